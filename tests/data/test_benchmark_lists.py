"""Lists of pairs of one's own: what is read, and what is refused with file and line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from sets import HEADER, picture
from surefeat.core.image import image_size, load
from surefeat.data.pairs import load_pairs


def write_list(folder: Path, *rows: str, header: str = HEADER) -> Path:
    picture(folder / "a.png")
    picture(folder / "b.png", width=50)
    path = folder / "pairs.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_a_list_of_ones_own_is_read_in_the_images_own_pixels(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a.png,b.png,my chairs,0;39;10.5,0;29;7,49;1;2,3;4;5")
    (pair,) = load_pairs(path)
    assert pair.category == "my chairs"
    assert (pair.size0, pair.size1) == ((30, 40), (30, 50))
    assert pair.points0.tolist() == [[0, 0], [39, 29], [10.5, 7]]
    assert pair.points1.tolist() == [[49, 3], [1, 4], [2, 5]]
    assert pair.visible.tolist() == [True, True, True]
    assert pair.image1 == tmp_path / "b.png"


def test_lists_that_count_from_one_are_moved_by_one(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a.png,b.png,x,1;40,1;30,1;50,1;30")
    (pair,) = load_pairs(path, first_pixel=1)
    assert pair.points0.tolist() == [[0, 0], [39, 29]]
    assert pair.points1.tolist() == [[0, 0], [49, 29]]


@pytest.mark.parametrize("first_pixel", [0, 1])
def test_padding_marks_missing_keypoints(tmp_path: Path, first_pixel: int) -> None:
    path = write_list(tmp_path, "a.png,b.png,x,5;-1;nan;8,5;-1;3;8,6;7;8;-1,6;7;8;-1")
    (pair,) = load_pairs(path, first_pixel=first_pixel)
    assert pair.visible.tolist() == [True, False, False, False]
    points0, points1 = pair.common()
    assert points0.tolist() == [[5 - first_pixel] * 2]
    assert points1.tolist() == [[6 - first_pixel] * 2]
    assert pair.points0[1:3].isnan().all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a.png,b.png,x,1;2,1,1;2,1;2", "line 3: XA has 2 numbers and YA has 1"),
        ("a.png,b.png,x,1;2,1;2,1,1", "line 3: 2 points in image 0 and 1 in image 1"),
        ("a.png,b.png,x,1;two,1;2,1;2,1;2", "line 3: XA must be numbers"),
        ("a.png,b.png,x,,,,", "line 3: XA must be numbers"),
        ("a.png,b.png,x,1;inf,1;2,1;2,1;2", "line 3: XA or YA holds an infinite"),
        ("a.png,b.png,x,1,1,1", "line 3: wants 7 fields"),
        ("a.png,b.png,x,1,1,1,1,9", "line 3: wants 7 fields"),
        ("a.png,c.png,x,1,1,1,1", "line 3: there is no image"),
        ("a.png,b.png,,1,1,1,1", "line 3: the class is empty"),
        ("a.png,b.png,x,40,1,1,1", r"line 3, image 0: point 1 at \(40, 1\)"),
        ("a.png,b.png,x,1,1,3;4,3;31", "line 3: 1 points in image 0 and 2"),
        ("a.png,b.png,x,1;2,1;2,3;4,3;31", r"line 3, image 1: point 2 at \(4, 31\)"),
        ("a.png,b.png,x,-1,-1,1,1", "line 3: no keypoint is in both images"),
    ],
)
def test_malformed_lists_are_refused_with_file_and_line(
    tmp_path: Path, row: str, message: str
) -> None:
    path = write_list(tmp_path, "a.png,b.png,x,1,1,1,1", row)
    with pytest.raises(ValueError, match=f"pairs.csv, {message}"):
        load_pairs(path)


def test_lists_without_columns_rows_or_file_are_refused(tmp_path: Path) -> None:
    path = write_list(tmp_path, header="source_image,target_image,class,XA,YA")
    with pytest.raises(ValueError, match="line 1: no column XB, YB"):
        load_pairs(path)
    with pytest.raises(ValueError, match="holds no pairs"):
        load_pairs(write_list(tmp_path))
    with pytest.raises(ValueError, match="there is no pair list"):
        load_pairs(tmp_path / "other.csv")
    mirrored = write_list(tmp_path, "a.png,b.png,x,1,1,1,1,1", header=HEADER + ",flip")
    with pytest.raises(ValueError, match="line 2: mirrored"):
        load_pairs(mirrored)


def test_points_may_lie_outside_by_the_tolerance_alone(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a.png,b.png,x,41.4,1,1,1")  # the edge is at 39.5
    assert len(load_pairs(path, tolerance=2.0)) == 1
    with pytest.raises(ValueError, match="outside the image of 40 x 30"):
        load_pairs(path, tolerance=1.8)


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp", "x.tif"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_image_size_is_that_of_the_loaded_picture(
    tmp_path: Path, name: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (40, 30)).save(tmp_path / name, exif=exif)
    assert image_size(tmp_path / name) == tuple(load(tmp_path / name).shape[-2:])


def test_image_size_notices_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    picture(path)
    assert image_size(path) == (30, 40)
    picture(path, width=70)
    os.utime(path, ns=(1, 1))
    assert image_size(path) == (30, 70)


def test_image_size_refuses_what_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"broken.jpg: is text, not an image; convert"):
        image_size(tmp_path / "broken.jpg")


@pytest.mark.usefixtures("no_hang")
def test_a_huge_image_and_a_pipe_in_a_list_are_no_traceback(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a.png,wide.png,x,1,1,19999,1")
    Image.new("1", (20_000, 10_000)).save(tmp_path / "wide.png")  # 200 megapixels
    assert load_pairs(path)[0].size1 == (10_000, 20_000)
    Image.new("1", (20_000, 16_000)).save(tmp_path / "wide.png")
    with pytest.raises(ValueError, match=r"line 2: .*wide.png: has 20000 x 16000 .*smaller"):
        load_pairs(path)
    (tmp_path / "wide.png").unlink()
    os.mkfifo(tmp_path / "wide.png")
    with pytest.raises(ValueError, match=r"line 2: .*wide.png: is a pipe.*copy its content"):
        load_pairs(path)

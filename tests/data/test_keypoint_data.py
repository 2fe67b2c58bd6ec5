"""COCO keypoints in and out, and what is wrong with them."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from surefeat.data.coco import make_category
from surefeat.data.drawn import draw_many, write_folder
from surefeat.data.keypoints import KeypointSet, read_coco, write_coco

NAMES = ["left_ear", "right_ear", "nose"]


def record(**more: Any) -> dict[str, Any]:
    """One photo of 40 x 30, one object."""
    label = {"id": 7, "image_id": 1, "category_id": 3, "bbox": [2, 4, 20, 10],
             "keypoints": [3, 5, 2, 0, 0, 0, 21.5, 13.5, 1]}  # fmt: skip
    return {
        "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 30}],
        "annotations": [label | more],
        "categories": [{"id": 3, "name": "cat", "keypoints": NAMES}],
    }


def write(folder: Path, content: Any) -> Path:
    Image.new("RGB", (40, 30)).save(folder / "a.png")
    (folder / "labels.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return folder / "labels.json"


def test_a_json_is_read_as_it_says(tmp_path: Path) -> None:
    found = read_coco(write(tmp_path, record()))
    (item,) = found.objects
    assert found.categories[item.category].name == "cat"
    assert found.categories[0].flip == (1, 0, 2)
    assert item.box.tolist() == [2, 4, 21, 13]  # inclusive
    assert item.visible.tolist() == [True, False, True]
    assert item.points[[0, 2]].tolist() == [[3, 5], [21.5, 13.5]]
    assert item.points[1].isnan().all()
    assert item.size == (30, 40)
    assert item.read().shape == (3, 30, 40)


@pytest.mark.parametrize("box", [None, []])
def test_without_a_box_the_whole_image_is_taken(tmp_path: Path, box: Any) -> None:
    content = record(bbox=box)
    del content["images"][0]["width"]  # the file itself knows
    item = read_coco(write(tmp_path, content)).objects[0]
    assert item.box.tolist() == [0, 0, 39, 29]


def test_drawn_sets_are_read_and_written_back_the_same(tmp_path: Path) -> None:
    write_folder(tmp_path, count=9, size=64, seed=3)
    found = read_coco(tmp_path / "keypoints.json")
    for item, drawn in zip(found.objects, draw_many(9, size=64, seed=3), strict=True):
        assert torch.equal(item.read(), drawn.image)
        seen = item.visible
        torch.testing.assert_close(item.points[seen], drawn.keypoints[seen], atol=0.006, rtol=0)
    write_coco(tmp_path / "again.json", found)
    again = read_coco(tmp_path / "again.json")
    assert again.categories == found.categories
    for first, second in zip(found.objects, again.objects, strict=True):
        assert (first.name, first.category) == (second.name, second.category)
        assert torch.equal(first.box, second.box)
        assert torch.equal(first.points.nan_to_num(-1), second.points.nan_to_num(-1))
    assert not list(tmp_path.glob("*.part"))
    cats = found.only([found.categories[1].name])
    assert [item.category for item in cats.objects] == [1]
    with pytest.raises(ValueError, match="no category 'dog'; there are car, bird"):
        found.only(["dog"])


def test_images_are_found_in_tar_shards(tmp_path: Path) -> None:
    path = write(tmp_path, record())
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "one.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "a.png")
    (tmp_path / "a.png").unlink()
    assert read_coco(path, images=shards).objects[0].read().shape == (3, 30, 40)


@pytest.mark.parametrize(
    ("names", "flip"),
    [
        (["left_ear", "right_ear", "nose"], (1, 0, 2)),
        (["L_eye", "nose", "R_eye", "l"], (2, 1, 0, 3)),
        (["wheelLeft", "wheelRight", "upright", "bright"], (1, 0, 2, 3)),
        (["hand.l", "hand.r", "left foot"], (1, 0, 2)),
        (["upper_left_l", "upper_right_l"], (1, 0)),
        (["front", "back"], (0, 1)),
    ],
)
def test_left_and_right_are_twins_by_their_names(names: list[str], flip: tuple[int, ...]) -> None:
    assert make_category("thing", names).flip == flip


def test_a_given_flip_is_honoured() -> None:
    assert make_category("thing", ["a", "b", "left_c"], [1, 0, 2]).flip == (1, 0, 2)
    for wrong in ([0, 1], [1, 2, 0], [0, 1, 5]):
        with pytest.raises(ValueError, match=r"has flip .*mirrored twin"):
            make_category("thing", ["a", "b", "c"], wrong)


def spoilt(**changes: Any) -> dict[str, Any]:
    return record() | changes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "labels.json is not a COCO file .*it needs images, annotations"),
        ("[1, 2]", "labels.json is not a COCO file"),
        ("{}", "labels.json is not a COCO file .*'images'"),
        (spoilt(annotations=[]), "holds no annotations; label some objects first"),
        (record(keypoints=[41.6, 5, 2, 0, 0, 0, 0, 0, 0]),
         r"annotation 7 \(a.png\): 'left_ear' at \(41.6, 5\) lies outside.*40 x 30.*set v to 0"),
        (record(keypoints=[1, 2, 2]), "keypoints has 3 numbers, not 9; 'cat' has 3"),
        (record(keypoints="none"), "annotation 7: keypoints is 'none'; give a list of numbers"),
        (record(keypoints=[10**400, 5, 2] + [0] * 6), "annotation 7: keypoints holds what is no"),
        (record(bbox=[0, 0, 10**400, 5]), "annotation 7: bbox holds what is no number"),
        (record(image_id=[1]), r"annotation 7: an id is \[1\]; ids are single numbers"),
        (record(keypoints=[float("nan"), 5, 2] + [0] * 6), "lies outside"),
        (record(bbox=[1, 2, 0, 5]), "bbox is no box of a pixel or more; give x, y, width"),
        (record(image_id=9), "annotation 7: no image or category has the id 9"),
        (record(category_id=1), "annotation 7: no image or category has the id 1"),
        (spoilt(categories=[{"id": 3, "name": "cat", "keypoints": ["a", "b", "a"]}]),
         "labels.json: category 'cat' has two keypoints called 'a'; give every"),
        (spoilt(categories=[{"id": i, "name": "cat", "keypoints": NAMES} for i in (3, 4)]),
         "two categories are called 'cat'; rename one"),
        (spoilt(images=[{"id": 1, "file_name": "b.png", "width": 40, "height": 30}]),
         r"1 images are not under .*\(b.png\); pass the folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_named_with_its_fix(
    tmp_path: Path, content: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_coco(write(tmp_path, content))


def test_a_keypoint_may_lie_a_pixel_beyond_the_edge(tmp_path: Path) -> None:
    """Labels counted from 1, or rounded up, do: of 40 x 30 pixels the edges are 39.5 and 29.5."""
    content = record(keypoints=[40.5, 30.5, 2, -1.5, -1.5, 2, 0, 0, 0])
    (item,) = read_coco(write(tmp_path, content)).objects
    assert item.points[:2].tolist() == [[40.5, 30.5], [-1.5, -1.5]]
    for beyond in ([40.6, 5, 2], [5, 30.6, 2], [-1.6, 5, 2], [5, -1.6, 2]):
        with pytest.raises(ValueError, match="lies outside the image"):
            read_coco(write(tmp_path, record(keypoints=beyond + [0] * 6)))


def test_a_json_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing.json: cannot be read"):
        read_coco(tmp_path / "nothing.json")


def test_labels_of_another_size_than_the_image_are_refused(tmp_path: Path) -> None:
    content = record()
    content["images"][0] |= {"width": 80, "height": 60}
    (item,) = read_coco(write(tmp_path, content)).objects
    with pytest.raises(ValueError, match=r"a.png: is 40 x 30 pixels, its label says 80 x 60; use"):
        item.read()


def test_pascal3d_is_read_from_its_shards(data_root: Path) -> None:
    found = read_coco(data_root / "pascal3d" / "keypoints_val.json", images=data_root / "voc")
    assert (len(found.categories), len(found.objects)) == (12, 5776)
    assert sum(int(item.visible.sum()) for item in found.objects) == 25_282
    assert found.channels[-1].stop == 124


class Counted(str):
    """A name that counts how often names are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_writing_looks_up_every_image_once_however_many_there_are(tmp_path: Path) -> None:
    """Ten times as many objects once took more than a hundred times as long."""
    item = read_coco(write(tmp_path, record())).objects[0]
    objects = tuple(replace(item, name=Counted(f"{i // 2}.png")) for i in range(400))
    Counted.compared = 0
    write_coco(tmp_path / "many.json", KeypointSet((make_category("cat", NAMES),), objects))
    assert Counted.compared < 10 * len(objects)
    assert len(json.loads((tmp_path / "many.json").read_text())["images"]) == 200

"""Sources: images are found in folders, lists and shards, and what is lost there is named."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from surefeat.core.image import load
from surefeat.data.decode import SourceError, decode_all, decode_item
from surefeat.data.sources import find_images, image_finder
from tiny import gradient, names, shard, write


def test_a_folder_is_walked_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/z.png", "a/b/c.tif", ".x.jpg", ".git/y.jpg", "a/._b.jpg"):
        write(tmp_path / name)
    (tmp_path / "a" / "z.png").rename(tmp_path / "a" / "z.PNG")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert names(find_images(tmp_path)) == ["a/b/c.tif", "a/z.PNG", "b.jpg"]


def test_a_linked_folder_is_entered_once(tmp_path: Path) -> None:
    write(tmp_path / "real" / "x.jpg")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "one").symlink_to(tmp_path / "real")
    (tmp_path / "root" / "two").symlink_to(tmp_path / "real")
    assert len(find_images(tmp_path / "root")) == 1


def test_an_unreadable_folder_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.jpg")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def guarded(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    canvas = decode_all(find_images(tmp_path), side=8, workers=1)
    assert [entry.name for entry in canvas.skipped] == ["locked"]
    assert "Permission denied" in canvas.skipped[0].reason


def test_a_list_is_relative_to_its_folder_or_to_images(tmp_path: Path) -> None:
    write(tmp_path / "here" / "a.jpg")
    write(tmp_path / "there" / "a.webp")
    other = write(tmp_path / "other" / "b.png")
    listed = tmp_path / "here" / "list.txt"
    listed.write_text(f"# a comment\n\na\n a.jpg \n{other}\nmissing\n")
    found = find_images(listed)
    assert names(found) == ["a.jpg", "a.jpg", str(other), "missing"]
    canvas = decode_all(found, side=8, workers=1)
    assert [entry.name for entry in canvas.skipped] == ["missing"]
    assert names(find_images(listed, images=tmp_path / "there"))[0] == "a.webp"


def test_shards_are_read_in_place_from_file_folder_glob_or_list(tmp_path: Path) -> None:
    long = "very/" * 60 + "long.png"  # needs an extra header
    images = {
        name: np.full((4, 5, 3), 9 * i, np.uint8) for i, name in enumerate(["x.png", long, "z.png"])
    }
    shard(tmp_path / "s-0.tar", {name: images[name] for name in ("x.png", long)})
    shard(tmp_path / "s-1.tar", {"z.png": images["z.png"]})
    before = sorted(os.listdir(tmp_path))
    expected = ["s-0.tar/x.png", f"s-0.tar/{long}", "s-1.tar/z.png"]
    assert names(find_images(tmp_path)) == expected
    assert names(find_images(str(tmp_path / "s-*.tar"))) == expected
    assert names(find_images(tmp_path / "s-1.tar")) == expected[2:]
    listed = tmp_path.parent / "ids.txt"
    listed.write_text("z\nx.png\n")
    assert names(find_images(listed, images=tmp_path)) == ["s-1.tar/z.png", "s-0.tar/x.png"]
    for item, image in zip(find_images(tmp_path), images.values(), strict=True):
        copied = pickle.loads(pickle.dumps(item))  # as it travels to a worker process
        assert torch.equal(decode_item(copied, side=8), load(image))
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("damage", ["cut", "boundary", "header", "loop"])
@pytest.mark.usefixtures("no_hang")
def test_images_lost_in_a_damaged_shard_are_not_lost_silently(tmp_path: Path, damage: str) -> None:
    path = shard(tmp_path / "s.tar", {f"{i}.png": gradient(5, 5) for i in range(4)})
    data, places = path.read_bytes(), [item.read for item in find_images(path)]
    second, third = (place.offset - 512 for place in places[1:3])
    if damage == "header":
        data = data[:third] + b"\xaa" * 512 + data[third + 512 :]
    elif damage == "loop":  # a negative size leads back to the second member
        header = bytearray(data[third : third + 512])
        header[124:136] = (256**12 + second - third - 512).to_bytes(12, "big")
        header[148:156] = b" " * 8
        header[148:156] = f"{sum(header):06o}\0 ".encode()
        data = data[:third] + bytes(header) + data[third + 512 :]
    else:
        data = data[: third + (540 if damage == "cut" else 0)]
    path.write_bytes(data)
    canvas = decode_all(find_images(path), side=8, workers=1)
    assert canvas.names == ("s.tar/0.png", "s.tar/1.png")
    lost = {entry.name for entry in canvas.skipped}
    assert lost == ({"s.tar", "s.tar/2.png"} if damage in ("cut", "loop") else {"s.tar"})


@pytest.mark.usefixtures("no_hang")
def test_an_empty_source_says_what_was_looked_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "list.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "gone.txt").write_text("gone.jpg\n")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "empty": r"no images under .*empty \(looked for .jpg .jpeg .png .*; pass another folder",
        "*.tar": "no images under",
        "gone.txt": "gone.jpg is not where it was looked for",
        "missing": "does not exist",
        "pipe": "is a pipe",
        "list.bin": "is not a text file",
    }.items():
        with pytest.raises(SourceError, match=message):
            find_images(tmp_path / name)
    (tmp_path / "x.tar.gz").write_bytes(b"")
    with pytest.raises(SourceError, match="is compressed"):
        find_images(tmp_path / "x.tar.gz")


def test_the_voc_shards_are_complete(data_root: Path) -> None:
    voc, listed = data_root / "voc", data_root / "lists" / "rigid12.txt"
    assert len(find_images(voc)) == 7036
    crops = find_images(voc / "instances.json", keep=listed, categories=("car",))
    assert not decode_all(crops[:20], side=64, workers=2).skipped


def test_photos_of_unreadable_formats_are_skipped_by_name_not_passed_over(tmp_path: Path) -> None:
    for name in ("a.jpg", "sub/b.png"):
        write(tmp_path / name)
    for name in ("IMG_1.HEIC", "sub/c.avif", ".d.heic", "sub/notes.pdf"):
        (tmp_path / name).write_bytes(b"x")
    canvas = decode_all(find_images(tmp_path), side=8, workers=1)
    assert canvas.names == ("a.jpg", "sub/b.png")
    assert [entry.name for entry in canvas.skipped] == ["IMG_1.HEIC", "sub/c.avif"]
    assert "convert it to JPEG" in canvas.skipped[0].reason
    with pytest.raises(SourceError, match=r"IMG_1.HEIC is .heic, which is not read; convert"):
        find_images(tmp_path / "IMG_1.HEIC")


def test_shards_beside_nothing_but_unreadable_photos_are_found(tmp_path: Path) -> None:
    (tmp_path / "x.heic").write_bytes(b"x")
    shard(tmp_path / "s.tar", {"a.png": gradient(5, 5)})
    assert names(find_images(tmp_path)) == ["x.heic", "s.tar/a.png"]


def test_of_equal_names_in_tar_files_the_first_is_found(tmp_path: Path) -> None:
    """By its full name, and without extension."""
    for number in (1, 2):
        shard(
            tmp_path / f"{number}.tar", dict.fromkeys(("x.png", f"y{number}.png"), gradient(4, 4))
        )
    find = image_finder(tmp_path, beside=tmp_path)
    assert [Path(find(name).read.path).name for name in ("x.png", "x", "y2")] == [
        "1.tar", "1.tar", "2.tar",
    ]  # fmt: skip
    assert find("z").read.refused

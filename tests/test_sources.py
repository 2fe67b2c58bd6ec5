"""Promises of surefeat.data.sources: all good images are found and decoded, all bad ones named."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hostile import add_member, encode, make, noise
from surefeat.data import canvas as decoding
from surefeat.data.canvas import CanvasStream, canvas_bytes, decode_all, decode_item
from surefeat.data.items import Item, SourceError
from surefeat.data.sources import find_images
from surefeat.image import load, resize
from surefeat.pixels import ImageError


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A reader that blocks ends the run with a traceback instead of stopping it for ever."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def write(path: Path, *, size: tuple[int, int] = (10, 8), colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {"jpg": "JPEG", "tif": "TIFF"}.get(path.suffix[1:], path.suffix[1:].upper())
    path.write_bytes(encode(Image.new("RGB", size, colour), kind))
    return path


def names(items: list[Item]) -> list[str]:
    return [item.name for item in items]


def gradient(height: int, width: int) -> np.ndarray:
    """Red is the column, green the row: a crop shows where it was cut."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8)


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("workers", [1, 3])
def test_200_hostile_files_do_not_harm_20_good_ones(tmp_path: Path, workers: int) -> None:
    hostile = make(tmp_path, np.random.default_rng(0))
    assert (len(hostile.good), len(hostile.bad), len(set(hostile.bad))) == (20, 200, 200)
    items = find_images(hostile.folder) + find_images(hostile.shards)
    assert sorted(names(items)) == sorted([*hostile.good, *hostile.bad])

    canvas = decode_all(items, side=32, workers=workers)

    assert sorted(canvas.names) == sorted(hostile.good)
    assert sorted(entry.name for entry in canvas.skipped) == sorted(hostile.bad)
    for pixels, (height, width), name in zip(
        canvas.pixels, canvas.sizes.tolist(), canvas.names, strict=True
    ):
        assert (height, width) == ((9, 20) if ".tar" in name else (24, 32))
        expected = torch.tensor(hostile.good[name])[:, None, None]
        assert (pixels[:, :height, :width].int() - expected).abs().max() <= 4
        assert not pixels[:, height:].any()
        assert not pixels[:, :, width:].any()
    for entry in canvas.skipped:
        assert entry.reason.isprintable()
        assert ";" in entry.reason, "no fix"
        assert not entry.reason.startswith(entry.name)


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


def shard(path: Path, members: dict[str, np.ndarray]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, image in members.items():
            add_member(tar, name, encode(Image.fromarray(image), "PNG"))
    return path


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


def coco(path: Path, *, boxes: list[dict[str, object]], files: list[str]) -> Path:
    images = [{"id": 10 + number, "file_name": name} for number, name in enumerate(files)]
    categories = [{"id": 1, "name": "car"}, {"id": 2, "name": "bus"}]
    annotations = [
        {"id": 100 + number, "category_id": 1, **box} for number, box in enumerate(boxes)
    ]
    content = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(content))
    return path


def test_coco_boxes_cut_exactly_their_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(Image.fromarray(gradient(100, 200)), "PNG"))
    boxes = [
        {"image_id": 10, "bbox": [50, 20, 40, 60]},
        {"image_id": 10, "bbox": [50.4, 19.6, 40, 60], "category_id": 2},
        {"image_id": 10, "bbox": [180, 80, 40, 40]},
    ]
    items = find_images(coco(tmp_path / "coco.json", boxes=boxes, files=["a.png"]))
    assert [item.label for item in items] == ["car", "bus", "car"]
    assert names(items) == ["a.png#100", "a.png#101", "a.png#102"]
    assert items[0].crop == (50, 20, 89, 79)
    whole = gradient(100, 200)
    expected = [whole[20:80, 50:90], whole[20:80, 50:90], whole[80:, 180:]]
    canvas = decode_all(items, side=64, workers=2)
    for item, pixels, size, part in zip(items, canvas.pixels, canvas.sizes, expected, strict=True):
        height, width = size.tolist()
        assert torch.equal(pixels[:, :height, :width], load(np.ascontiguousarray(part)))
        assert torch.equal(decode_item(item, side=64), pixels[:, :height, :width])


def test_coco_options_choose_and_grow_boxes(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(encode(Image.fromarray(gradient(100, 200)), "PNG"))
    boxes = [
        {"image_id": 10, "bbox": [50, 20, 40, 40]},
        {"image_id": 10, "bbox": [50, 20, 31, 40]},
        {"image_id": 10, "bbox": [0, 0, 90, 90], "iscrowd": 1},
        {"image_id": 11, "bbox": [0, 0, 50, 50], "category_id": 2},
        {"image_id": 11, "bbox": [float("nan"), 0, 50, 50]},
        {"image_id": 11},
    ]
    path = coco(tmp_path / "coco.json", boxes=boxes, files=["a.png", "b.png", "unused.png"])
    (tmp_path / "keep.txt").write_text("b\n")
    assert names(find_images(path)) == ["a.png#100", "b.png#103"]
    assert names(find_images(path, min_side=30)) == ["a.png#100", "a.png#101", "b.png#103"]
    assert names(find_images(path, categories=("bus",))) == ["b.png#103"]
    assert names(find_images(path, keep=tmp_path / "keep.txt")) == ["b.png#103"]
    assert find_images(path, context=0.25)[0].crop == (40, 10, 99, 69)
    assert find_images(tmp_path, crop=path) == find_images(path)
    assert names(find_images(tmp_path / "keep.txt", crop=path)) == ["b.png#103"]
    with pytest.raises(SourceError, match=r"no category \['tram'\]; it has \['bus', 'car'\]"):
        find_images(path, categories=("tram",))


def test_coco_images_may_be_in_shards_and_missing_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shard(tmp_path / "shards" / "s.tar", {"a.png": gradient(100, 200)})
    boxes = [{"image_id": i, "bbox": [50, 20, 40, 40]} for i in (10, 11)]
    path = coco(tmp_path / "coco.json", boxes=boxes, files=["a.png", "b.png"])
    canvas = decode_all(find_images(path, images=tmp_path / "shards"), side=16, workers=1)
    assert canvas.names == ("s.tar/a.png#100",)
    assert [entry.name for entry in canvas.skipped] == ["b.png"]


def test_a_box_outside_the_image_is_skipped_and_the_others_stay(tmp_path: Path) -> None:
    write(tmp_path / "a.png", size=(60, 60))
    boxes = [
        {"image_id": 10, "bbox": box}
        for box in ([500, 0, 40, 40], [0, 0, 40, 40], [-90, 0, 40, 40])
    ]
    items = find_images(coco(tmp_path / "coco.json", boxes=boxes, files=["a.png"]))
    canvas = decode_all(items, side=40, workers=1)
    assert canvas.names == ("a.png#101",)
    assert [entry.name for entry in canvas.skipped] == ["a.png#100", "a.png#102"]
    assert "outside the 60 x 60 image" in canvas.skipped[0].reason


def test_a_file_with_many_crops_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.png", size=(90, 90))
    (tmp_path / "b.png").write_bytes(b"bad")
    boxes = [{"image_id": 10 + i % 2, "bbox": [i, i, 40, 40]} for i in range(8)]
    items = find_images(coco(tmp_path / "coco.json", boxes=boxes, files=["a.png", "b.png"]))
    calls = []
    decode = decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda *a, **k: calls.append(1) or decode(*a, **k))
    canvas = decode_all(items, side=40, workers=1)
    assert (len(calls), len(canvas.names), len(canvas.skipped)) == (2, 4, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not a COCO file"),
        ("[]", "is not a COCO file"),
        ('{"images": []}', "is not a COCO file"),
        ('{"images": [], "annotations": [{"bbox": "abcd"}]}', "is not a COCO file"),
        ('{"images": [], "annotations": []}', "no images under .*boxes of any category, 32 pixels"),
    ],
)
def test_a_useless_coco_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "coco.json").write_text(content)
    with pytest.raises(SourceError, match=message):
        find_images(tmp_path / "coco.json")


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


def test_images_are_shrunk_to_the_side_and_never_enlarged(tmp_path: Path) -> None:
    source = noise(np.random.default_rng(0), size=100).resize((100, 40))
    source.save(tmp_path / "large.png")
    source.resize((20, 8)).save(tmp_path / "small.png")
    large, small = (decode_item(item, side=50) for item in find_images(tmp_path))
    assert torch.equal(large, resize(load(source), size=(20, 50)))
    assert tuple(small.shape) == (3, 8, 20)


def test_progress_counts_to_the_end_and_stops_the_work_when_it_raises(tmp_path: Path) -> None:
    for number in range(30):
        write(tmp_path / f"{number:02d}.png")
    items = find_images(tmp_path)
    seen: list[int] = []
    canvas = decode_all(items, side=16, workers=2, progress=seen.append)
    assert seen == list(range(1, 31))
    assert canvas.pixels.numel() + canvas.sizes.numel() * 4 == canvas_bytes(30, side=16)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_all(items, side=16, workers=2, progress=stop)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_replaces_bad_files_by_the_next_good_one_and_reports_once(
    tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    for number, colour in enumerate(("red", "blue", "green", "white", "black", "gray")):
        write(tmp_path / f"{number}.png", colour=colour)
    (tmp_path / "1.png").write_bytes(b"bad")
    (tmp_path / "5.png").write_bytes(b"bad")
    handler = logging.StreamHandler()  # to stderr, which worker processes share
    logging.getLogger("surefeat").addHandler(handler)
    stream = CanvasStream(find_images(tmp_path), side=12)
    try:
        epochs = [list(DataLoader(stream, batch_size=2, num_workers=workers)) for _ in range(2)]
    finally:
        logging.getLogger("surefeat").removeHandler(handler)
    for batches in epochs:
        pixels, sizes, ok = (torch.cat(part) for part in zip(*batches, strict=True))
        assert ok.tolist() == [True, False, True, True, True, False]
        assert torch.equal(pixels[1], pixels[2])
        assert torch.equal(pixels[5], pixels[0])
        assert sizes.tolist() == [[8, 10]] * 6
    log = capfd.readouterr().err
    assert log.count("skipped 1.png") == log.count("skipped 5.png") == 1


def test_a_stream_without_a_good_file_ends(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"bad")
    with pytest.raises(SourceError, match="none of 1 images"):
        CanvasStream(find_images(tmp_path), side=12)[0]
    with pytest.raises(ImageError):
        decode_item(find_images(tmp_path)[0], side=12)


def test_the_voc_shards_are_complete(data_root: Path) -> None:
    voc, listed = data_root / "voc", data_root / "lists" / "rigid12.txt"
    assert len(find_images(voc)) == 7036
    assert len(find_images(listed, images=voc)) == 6670
    crops = find_images(voc / "instances.json", keep=listed, categories=("car",))
    assert crops == find_images(
        listed, images=voc, crop=voc / "instances.json", categories=("car",)
    )
    assert not decode_all(crops[:20], side=64, workers=2).skipped

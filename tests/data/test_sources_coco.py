"""Sources: the boxes of a COCO file are cut from their images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hostile import encode
from surefeat.core.image import load
from surefeat.data import decode as decoding
from surefeat.data.decode import SourceError, decode_all, decode_item
from surefeat.data.sources import find_images
from tiny import gradient, names, shard, write


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
    path = coco(tmp_path / "coco.json", boxes=boxes, files=["a.png"])
    items = find_images(path, context=0)
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


def test_a_box_grows_by_a_share_of_its_own_sides(tmp_path: Path) -> None:
    path = coco(tmp_path / "a.json", boxes=[{"image_id": 10, "bbox": [40, 30, 60, 20]}],
                files=["a.png"])  # fmt: skip
    (tmp_path / "a.png").write_bytes(encode(Image.fromarray(gradient(100, 200)), "PNG"))
    (item,) = find_images(path, context=0.25, min_side=20)
    assert item.crop == (40 - 15, 30 - 5, 99 + 15, 49 + 5)


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
    decoded = decoding.decoded
    monkeypatch.setattr(decoding, "decoded", lambda *a, **k: calls.append(1) or decoded(*a, **k))
    canvas = decode_all(items, side=40, workers=1)
    assert (len(calls), len(canvas.names), len(canvas.skipped)) == (2, 4, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "is not a COCO file"),
        ("[]", "is not a COCO file"),
        ('{"images": []}', "is not a COCO file"),
        (
            '{"images": [{"id": 1, "file_name": ""}], "annotations": [{"image_id": 1, "bbox": 9}]}',
            "annotation None: bbox is 9; give a list of numbers",
        ),
        ('{"images": [{"id": [1], "file_name": "a"}], "annotations": []}', "is not a COCO file"),
        ('{"images": [], "annotations": []}', "no images under .*boxes of any category, 32 pixels"),
    ],
)
def test_a_useless_coco_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "coco.json").write_text(content)
    with pytest.raises(SourceError, match=message):
        find_images(tmp_path / "coco.json")


def test_python_and_the_command_line_grow_boxes_alike(tmp_path: Path) -> None:
    write(tmp_path / "a.png", size=(90, 90))
    path = coco(
        tmp_path / "coco.json", boxes=[{"image_id": 10, "bbox": [20, 20, 40, 40]}], files=["a.png"]
    )
    assert find_images(path)[0].crop == (12, 12, 67, 67)  # a fifth of 40 on each side

"""Outlines in a COCO json: read as polygons, written as they were; run lengths are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import tiny
from surefeat.data.coco import read_annotations
from surefeat.data.keypoints import read_coco, write_coco

# Edges of a box of 10 x 6 pixels whose first pixel is (4, 2): COCO counts edges, not centres.
RING = [4, 2, 14, 2, 14, 8, 4, 8]


def write(folder: Path, segmentation: object) -> Path:
    tiny.write(folder / "a.png", size=(40, 30))
    note = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [4, 2, 10, 6],
            "keypoints": [5, 5, 2], "segmentation": segmentation}  # fmt: skip
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 30}],
        "annotations": [note], "categories": [{"id": 1, "name": "x", "keypoints": ["k"]}],
    }  # fmt: skip
    (folder / "labels.json").write_text(json.dumps(content))
    return folder / "labels.json"


def test_an_outline_runs_half_a_pixel_around_the_pixels_it_encloses(tmp_path: Path) -> None:
    (item,) = read_coco(write(tmp_path, [RING])).objects
    (ring,) = item.mask
    assert ring.tolist() == [[3.5, 1.5], [13.5, 1.5], [13.5, 7.5], [3.5, 7.5]]
    # The inclusive box holds pixels 4 .. 13 and 2 .. 7.
    assert item.box.tolist() == [4, 2, 13, 7]
    assert torch.equal(ring.amin(0) + 0.5, item.box[:2])
    assert torch.equal(ring.amax(0) - 0.5, item.box[2:])


def test_an_outline_is_written_as_it_was_read(tmp_path: Path) -> None:
    labelled = read_coco(write(tmp_path, [RING, [1, 1, 5.25, 1, 3, 9]]))
    write_coco(tmp_path / "again.json", labelled)
    (note,) = json.loads((tmp_path / "again.json").read_text())["annotations"]
    assert note["segmentation"] == [RING, [1, 1, 5.25, 1, 3, 9]]
    plain = read_coco(write(tmp_path, None))
    write_coco(tmp_path / "plain.json", plain)
    (note,) = json.loads((tmp_path / "plain.json").read_text())["annotations"]
    assert "segmentation" not in note


def test_what_is_no_polygon_is_no_mask_and_no_error(tmp_path: Path) -> None:
    run_lengths = {"counts": [3, 4], "size": [30, 40]}
    others: tuple[object, ...] = ([], [[1, 2, 3, 4]], [[1, 2, 3]], [["a"] * 6], "x", [1, 2])
    for given in (run_lengths, *others, [RING[:7]], [[float("1e12")] * 6]):
        assert read_annotations(write(tmp_path, given)).annotations[0].polygons == ()

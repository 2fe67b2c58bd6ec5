"""CorLoc, VOC's average precision, selection and suppression, against cases done by hand."""

from __future__ import annotations

import math

import pytest
import torch
from detection import (
    Found,
    average_precision,
    centre_box,
    corloc,
    largest_proposal,
    precision_recall,
    suppress,
)
from torchvision.ops import nms

from surefeat.boxes.config import SelectConfig
from surefeat.boxes.select import Candidate, Selection, select, to_coco
from surefeat.core.geometry import box_iou
from surefeat.data.coco import coco_record
from surefeat.data.decode import Item, Place
from surefeat.data.sources import Object, PhotoLabels

Box = tuple[float, float, float, float]
HERE: Box = (0, 0, 9, 9)
THERE: Box = (20, 0, 29, 9)


def image(name: str, *objects: tuple[Box, bool], category: str = "cat") -> PhotoLabels:
    truth = tuple(Object(category, box, hard) for box, hard in objects)
    return PhotoLabels(name, Item(name, Place(name)), frozenset({category}), objects=truth)


def detected(*boxes: tuple[Box, float]) -> Found:
    return Found(torch.tensor([b for b, _ in boxes]).float(), torch.tensor([s for _, s in boxes]))


def test_average_precision_of_a_case_by_hand() -> None:
    """Right, wrong, right, right of 4 objects: precision 1, 1/2, 2/3, 3/4 at recall 1/4 ... 3/4.

    Made monotone: 1, 3/4, 3/4. Area = 1/4 + 1/4 * 3/4 + 1/4 * 3/4 = 0.625. At the eleven levels: 1
    for 0, .1, .2; 3/4 for .3 to .7; then 0: (3 + 5 * 0.75) / 11.
    """
    result = precision_recall(torch.tensor([True, False, True, True]), 4)
    assert result.area == pytest.approx(0.625)
    assert result.eleven == pytest.approx((3 + 5 * 0.75) / 11)
    assert result.objects == 4


def test_precision_without_objects_is_no_number_and_without_boxes_zero() -> None:
    assert math.isnan(precision_recall(torch.tensor([False]), 0).area)
    none = precision_recall(torch.zeros(0, dtype=torch.bool), 3)
    assert (none.area, none.eleven) == (0, 0)


def test_an_object_is_found_once() -> None:
    images = [image("a", (HERE, False)), image("b", (THERE, False))]
    boxes = {"a": detected((HERE, 0.9), (HERE, 0.8)), "b": detected((THERE, 0.7))}
    # Right, a second time on the same object, right: 1/2 + 1/2 * 2/3.
    assert average_precision(images, boxes, "cat").area == pytest.approx(0.5 + 0.5 * 2 / 3)


def test_the_better_box_takes_the_object() -> None:
    boxes = {"a": detected((HERE, 0.2), ((0, 0, 9, 8), 0.9))}
    assert average_precision([image("a", (HERE, False))], boxes, "cat").area == pytest.approx(1)


def test_difficult_objects_are_ignored() -> None:
    images = [image("a", (HERE, True), (THERE, False))]
    both = {"a": detected((HERE, 0.9), (HERE, 0.85), (THERE, 0.8))}
    result = average_precision(images, both, "cat")
    assert (result.area, result.objects) == (1, 1)


def test_half_an_overlap_is_right_and_less_is_not() -> None:
    half, less = (0, 0, 9, 4), (0, 0, 9, 3.9)
    truth = [image("a", (HERE, False))]
    assert average_precision(truth, {"a": detected((half, 1.0))}, "cat").area == 1
    assert average_precision(truth, {"a": detected((less, 1.0))}, "cat").area == 0


def test_corloc_is_the_share_of_images_with_a_right_box() -> None:
    images = [
        image("a", (HERE, False)), image("b", (HERE, False), (THERE, True)),
        image("c", (THERE, False)), image("d", (HERE, True)), image("e", (HERE, False)),
    ]  # fmt: skip
    best = {("a", "cat"): HERE, ("b", "cat"): THERE, ("c", "cat"): THERE, ("d", "cat"): HERE}
    boxes = {key: torch.tensor(box) for key, box in best.items()}
    # d shows only a difficult object and does not count; b's box is on one; e has no box.
    assert corloc(images, boxes, ("cat",)) == {"cat": 0.5}
    assert math.isnan(corloc(images, boxes, ("dog",))["dog"])


def test_the_centre_box_has_its_share_of_the_image() -> None:
    x1, y1, x2, y2 = centre_box((40, 80), share=0.25).tolist()
    assert (x1, y1, x2, y2) == (20, 10, 59, 29)


def test_the_largest_proposal_is_not_the_whole_image() -> None:
    boxes = torch.tensor([[0.0, 0, 99, 99], [10, 10, 80, 80], [0, 0, 30, 30]])
    assert largest_proposal(boxes, (100, 100)).tolist() == [10, 10, 80, 80]
    assert largest_proposal(boxes[:1], (100, 100)).tolist() == [0, 0, 99, 99]


def candidates(scores: dict[str, list[float]]) -> list[Candidate]:
    return [
        Candidate(f"{category}{i}.jpg", category, HERE, score)
        for category, values in scores.items()
        for i, score in enumerate(values)
    ]


def test_selection_drops_under_the_floor_then_under_the_class_median() -> None:
    given = candidates({"cat": [0.5, 0.0009, 0.3, 0.1, 0.002], "dog": [0.04], "cow": [0.0002]})
    done = select(given, SelectConfig())
    kept = [(c.category, c.score) for c in done.kept()]
    # The median of the cats that are left (.5 .3 .1 .002) is 0.2; the dog is its own.
    assert kept == [("cat", 0.5), ("cat", 0.3), ("dog", 0.04)]
    assert done.counts() == {"kept": 3, "below the floor": 2, "below the median": 2}


def test_coco_lists_every_image_and_the_kept_boxes() -> None:
    given = (Candidate("a.jpg", "cat", (2, 3, 11, 22), 0.5),
             Candidate("b.jpg", "cat", HERE, 0.1, "below the median"))  # fmt: skip
    sizes = {"a.jpg": (40, 30), "b.jpg": (9, 9)}
    written = coco_record(to_coco(Selection(given), sizes, ("dog", "cat")))
    assert [i["file_name"] for i in written["images"]] == ["a.jpg", "b.jpg"]
    assert written["images"][0] | {"width": 30, "height": 40} == written["images"][0]
    (only,) = written["annotations"]
    assert (only["bbox"], only["score"], only["image_id"]) == ([2, 3, 10, 20], 0.5, 1)
    assert written["categories"][only["category_id"] - 1]["name"] == "cat"


def test_suppression_leaves_no_overlapping_boxes_of_a_class() -> None:
    generator = torch.Generator().manual_seed(0)
    corners = (torch.rand(60, 2, 2, generator=generator) * 50).floor().sort(dim=1).values
    boxes, scores = corners.reshape(60, 4), torch.rand(60, 3, generator=generator)
    kept = suppress(boxes, scores, overlap=0.4, least=0.1)
    for k, found in zip(range(3), kept, strict=True):
        overlaps = box_iou(found.boxes, found.boxes) - torch.eye(len(found.boxes))
        assert overlaps.max() <= 0.4
        assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
        some = scores[:, k] >= 0.1
        alone = nms(boxes[some] + torch.tensor([0.0, 0, 1, 1]), scores[some, k], 0.4)
        assert torch.equal(found.boxes, boxes[some][alone])

"""Boxes that support each other: detect_select.agreed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sets import HUES, make, settings
from surefeat.boxes.config import SelectConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import Photo, stack_labels, stack_proposals
from surefeat.boxes.select import Candidate, Scored, agreed, best_boxes, predict_boxes, select
from surefeat.core.geometry import box_iou
from surefeat.data.decode import Item, Place
from surefeat.data.sources import PhotoLabels, find_labels
from tiny import CPU


def test_agreed_scores_are_sums_weighted_by_overlap() -> None:
    """By a loop; never less than a box's own score, never more than the image's."""
    random = torch.Generator().manual_seed(0)
    corner = torch.rand(6, 2, generator=random) * 50
    boxes = torch.cat([corner, corner + 10 + 40 * torch.rand(6, 2, generator=random)], 1)
    scores = torch.rand(6, 3, generator=random) / 18
    found = agreed(boxes, scores, 2.0)
    for i in range(6):
        for k in range(3):
            total = sum(
                float(box_iou(boxes[i, None], boxes[j, None])) ** 2 * float(scores[j, k])
                for j in range(6)
            )
            assert float(found[i, k]) == pytest.approx(total, rel=1e-5)
    assert (found >= scores).all()
    assert (found <= scores.sum(0) + 1e-6).all()


def test_without_agreement_scores_stay() -> None:
    boxes, scores = torch.tensor([[0.0, 0, 9, 9], [0, 0, 8, 9]]), torch.rand(2, 2)
    assert agreed(boxes, scores, 0.0) is scores


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_a_group_of_boxes_wins_over_a_lone_part(power: float) -> None:
    boxes, scores = part_and_group()
    assert int(agreed(boxes, scores, 0.0).argmax()) == 0
    assert int(agreed(boxes, scores, power).argmax()) == 1


def test_by_default_the_box_of_a_label_is_the_one_its_neighbours_support() -> None:
    boxes, scores = part_and_group()
    image = PhotoLabels("a.jpg", Item("a.jpg", Place("a.jpg")), frozenset({"bus"}))
    photo = Photo(image, torch.zeros(3, 100, 100, dtype=torch.uint8), (100, 100), boxes)
    (best,) = best_boxes(Scored(photo, scores), ["bus"], agreement=SelectConfig().agreement)
    assert best.box == tuple(boxes[1].tolist())
    overlaps = box_iou(boxes[1, None], boxes)[0]
    assert best.score == pytest.approx(float((overlaps * scores[:, 0]).sum()), rel=1e-5)
    (alone,) = best_boxes(Scored(photo, scores), ["bus"], agreement=0)
    assert alone.box == tuple(boxes[0].tolist())
    assert alone.score == pytest.approx(0.3)


def part_and_group() -> tuple[Tensor, Tensor]:
    """A part that scores 0.3, and three boxes around the whole that score 0.2 each."""
    part = torch.tensor([[40.0, 40, 49, 49]])
    around = torch.tensor([[10.0, 10, 89, 89], [12, 10, 89, 89], [10, 12, 89, 87]])
    return torch.cat([part, around]), torch.tensor([[0.3], [0.2], [0.2], [0.2]])


def test_the_floor_goes_before_the_median_of_the_rest() -> None:
    """Of cats 1, 3, 4 and 9 with a floor of 3 the median is 4; dogs have their own."""
    given = [("cat", 1.0), ("cat", 3.0), ("cat", 4.0), ("cat", 9.0), ("dog", 3.0), ("dog", 9.0)]
    candidates = [Candidate(f"{n}", kind, (0, 0, 9, 9), score)
                  for n, (kind, score) in enumerate(given)]  # fmt: skip
    verdicts = [one.verdict for one in select(candidates, SelectConfig(floor=3.0)).candidates]
    low, middle, kept = "below the floor", "below the median", "kept"
    assert verdicts == [low, middle, kept, kept, middle, kept]
    # Without a floor the median of all four cats is 3.5.
    verdicts = [one.verdict for one in select(candidates, SelectConfig(floor=0.0)).candidates]
    assert verdicts == [middle, middle, kept, kept, middle, kept]
    # What is dropped has no say in the median: of 1, 2, 3 and 9 it would be 2.5.
    few = [replace(one, score=score) for one, score in zip(candidates, (1, 2, 3, 9), strict=False)]
    verdicts = [one.verdict for one in select(few, SelectConfig(floor=2.5)).candidates]
    assert verdicts == [low, low, middle, kept]


def test_every_setting_of_the_selection_acts(tmp_path: Path) -> None:
    data = make(tmp_path / "data", count=2, boxes=12)
    torch.manual_seed(0)
    detector = Detector(settings().detector, tuple(HUES)).eval()

    def scores(name: str, **changes: Any) -> list[tuple[float, str]]:
        config = replace(settings(), select=replace(settings().select, **changes))
        done = predict_boxes(
            find_labels(data / "photos"), detector, out=tmp_path / name, config=config,
            proposals=data / "proposals.npz", quiet=True,
        )  # fmt: skip
        return [(one.score, one.verdict) for one in done.selection.candidates]

    plain = scores("plain")
    assert scores("again") == plain
    for name, value in (("scales", (48,)), ("agreement", 3.0), ("agreement", 0.0), ("floor", 0.9)):
        assert scores(f"{name}{value}", **{name: value}) != plain, name


def photo(name: str, boxes: int, **labels: Any) -> Photo:
    image = PhotoLabels(name, Item(name, Place(name)), **labels)
    corners = torch.arange(4.0 * boxes).reshape(boxes, 4)
    return Photo(image, torch.zeros(3, 5, 7, dtype=torch.uint8), (50, 70), corners)


def test_a_label_is_shown_not_shown_or_not_known() -> None:
    """As VOC's difficult objects are: an image with only those teaches nothing of them."""
    photos = [
        photo("a", 1, labels=frozenset({"cat"}), unsure=frozenset({"dog"})),
        photo("b", 2, labels=frozenset({"dog", "cow"}), unsure=frozenset({"dog"})),
    ]
    assert stack_labels(photos, ("cat", "cow", "dog")).tolist() == [[1, -1, 0], [-1, 1, 1]]
    stacked = stack_proposals(photos, CPU)
    assert stacked.valid.tolist() == [[True, False], [True, True]]
    assert stacked.sizes.tolist() == [[50, 70]] * 2
    turned = stacked.rows([1, 0]).mirrored([True, False])
    assert turned.boxes[0].tolist() == [[67, 1, 69, 3], [63, 5, 65, 7]]
    assert turned.boxes[1].tolist() == stacked.boxes[0].tolist()

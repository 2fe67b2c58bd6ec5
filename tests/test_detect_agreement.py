"""Boxes that support each other: detect_select.agreed."""

from __future__ import annotations

import pytest
import torch

from surefeat.detect_select import agreed
from surefeat.geometry import box_iou


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


def test_a_group_of_boxes_wins_over_a_lone_part() -> None:
    part = torch.tensor([[40.0, 40, 49, 49]])
    around = torch.tensor([[10.0, 10, 89, 89], [12, 10, 89, 89], [10, 12, 89, 87]])
    boxes, scores = torch.cat([part, around]), torch.tensor([[0.3], [0.2], [0.2], [0.2]])
    assert int(agreed(boxes, scores, 0.0).argmax()) == 0
    assert int(agreed(boxes, scores, 2.0).argmax()) == 1

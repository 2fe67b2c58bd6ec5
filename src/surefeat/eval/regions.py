"""Which proposals have a known answer, and where it lies (Proposal Flow, Ham et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.data.pairs import Pair
from surefeat.eval.metrics import keypoint_box
from surefeat.geometry import box_area, box_intersection, clip_boxes, fit_thin_plate

ACTIVE_SHARE = 0.75
"""More than this share of a proposal's area must lie in the box of the keypoints."""


@dataclass(frozen=True, eq=False)
class RegionTruth:
    """The active proposals of image 0 and the boxes in image 1 they correspond to."""

    active: Tensor
    """(A,) indices into the proposals of image 0, rising."""
    boxes: Tensor
    """(A, 4) inclusive boxes, original pixels of image 1, inside it."""


def active_proposals(boxes: Tensor, points: Tensor) -> Tensor:
    """(N,) bool: proposals (N, 4) whose place is fixed by the keypoints (V, 2) around them.

    Active: more than 0.75 of the area (inclusive widths) lies in the keypoints' box, and at least
    one keypoint lies between the proposal's first and last pixel centres. The box of a single
    keypoint is one pixel, that of keypoints in one row a pixel high: hardly a proposal is active.
    """
    everything = torch.ones(len(points), dtype=torch.bool, device=points.device)
    frame = keypoint_box(points.double(), everything)[None]
    boxes = boxes.double()
    # No division: a proposal of no area (inverted) must not count as wholly inside.
    inside = box_intersection(boxes, frame)[:, 0] > ACTIVE_SHARE * box_area(boxes)
    after = points.double()[None] >= boxes[:, None, :2]
    before = points.double()[None] <= boxes[:, None, 2:]
    return inside & (after & before).all(-1).any(-1)


def ground_truth_boxes(
    boxes: Tensor, points0: Tensor, points1: Tensor, *, size1: tuple[int, int]
) -> Tensor:
    """Where boxes (A, 4) of image 0 lie in image 1, inclusive (A, 4), by the common keypoints.

    A thin-plate spline through the keypoints (V, 2) maps the four corners; x1 is the mean of the
    two smallest x, x2 of the two largest, the same for y; cut to the image of size1.

    Degenerate sets: one keypoint gives a mere shift; two, or several on one line, are followed
    along that line and leave lengths across it as they are; keypoints at one place of image 0 with
    different targets go to the targets' mean. A box mapped wholly outside becomes the nearest
    pixels of the border.
    """
    spline = fit_thin_plate(points0.double(), points1.double())
    corners = boxes.double()[:, [0, 1, 2, 1, 0, 3, 2, 3]].reshape(-1, 2)
    moved = spline(corners).reshape(-1, 4, 2).sort(dim=1).values
    mapped = torch.cat([moved[:, :2].mean(1), moved[:, 2:].mean(1)], dim=-1)
    return clip_boxes(mapped, size=size1).to(boxes.dtype)


def region_truth(pair: Pair, boxes0: Tensor) -> RegionTruth:
    """Active ones among proposals boxes0 (N, 4), original pixels of image 0, and their truth."""
    points0, points1 = pair.common()
    active = active_proposals(boxes0, points0).nonzero()[:, 0]
    truth = ground_truth_boxes(boxes0[active], points0, points1, size1=pair.size1)
    return RegionTruth(active=active, boxes=truth)

"""PCK in its four conventions, PCR and mIoU@k, and the controls printed beside them.

A PCK without its convention is worthless: the same predictions differ by ten points.

scnet    alpha * 224, after rescaling image 1 to 224 x 224 (PF-PASCAL in the paper, SCNet, NC-Net)
img      alpha * longer side of image 1 (PF-PASCAL in HPF and later)
bbox-kp  alpha * longer side of the box of image 1's visible keypoints (PF-WILLOW)
bbox     alpha * longer side of the object box annotated in image 1 (SPair-71k)

Right means strictly nearer than that. Sides of boxes are x2 - x1, as in the benchmarks' own code,
not the inclusive x2 - x1 + 1 that few-shot keypoints use (measure.fewshot).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.data.benchmarks import CONVENTIONS, SCNET_SIDE, Convention
from surefeat.data.pairs import Pair

TOP = 100  # mIoU@k is drawn for k = 1..100


@dataclass(frozen=True)
class PckResult:
    """Percentages of correct keypoints, as shares in [0, 1], one per alpha."""

    per_image: tuple[float, ...]
    """Mean over pairs of each pair's share."""
    per_point: tuple[float, ...]
    """Share over all pairs' keypoints together."""
    by_category: Mapping[str, tuple[float, ...]]
    """per_image within each category."""
    right: tuple[Tensor, ...]
    """Of every pair (A, V) bool: which of its visible keypoints are right at each alpha."""


def longer_side(box: Tensor) -> float:
    """x2 - x1 or y2 - y1 of a box (4,), whichever is longer."""
    return float(torch.maximum(box[2] - box[0], box[3] - box[1]))


def keypoint_box(points: Tensor, visible: Tensor) -> Tensor:
    """(4,) smallest box that holds the visible ones of points (N, 2)."""
    seen = points[visible]
    return torch.cat([seen.amin(0), seen.amax(0)])


def in_convention(
    predicted: Tensor, pair: Pair, convention: Convention
) -> tuple[Tensor, Tensor, float]:
    """Predictions and targets (N, 2) in the convention's frame, and the length alpha multiplies.

    `predicted` are original pixels of image 1.
    """
    if convention == "scnet":
        frame = Frame(original=pair.size1, network=(SCNET_SIDE, SCNET_SIDE))
        return frame.to_network(predicted), frame.to_network(pair.points1), float(SCNET_SIDE)
    if convention == "img":
        return predicted, pair.points1, float(max(pair.size1))
    if convention == "bbox-kp":
        return predicted, pair.points1, longer_side(keypoint_box(pair.points1, pair.visible))
    if convention == "bbox":
        if pair.box1 is None:
            raise ValueError(f"{pair.name} has no object box for the bbox rule; use another")
        return predicted, pair.points1, longer_side(pair.box1)
    raise ValueError(f"unknown PCK convention {convention!r}; choose from {', '.join(CONVENTIONS)}")


def hits(predicted: Tensor, target: Tensor, threshold: Tensor | float, visible: Tensor) -> Tensor:
    """Which visible points are right: (N, 2), (N, 2), (A,) or a number, (N,) -> (A, V) bool.

    A prediction that is not finite is wrong; invisible points are not looked at.
    """
    if predicted.shape != target.shape or visible.shape != target.shape[:1]:
        raise ValueError(
            f"predicted {tuple(predicted.shape)}, target {tuple(target.shape)} and visible "
            f"{tuple(visible.shape)} do not belong together; keep invisible points in place"
        )
    offset = (predicted[visible] - target[visible]).double()
    distance = torch.linalg.vector_norm(offset, dim=-1)
    limits = torch.as_tensor(threshold, dtype=torch.float64, device=distance.device).reshape(-1, 1)
    return torch.lt(distance, limits)


def pck_over_pairs(
    predictions: Sequence[Tensor],
    pairs: Sequence[Pair],
    *,
    convention: Convention,
    alphas: Sequence[float],
) -> PckResult:
    """PCK of predictions (N, 2), one per pair, in original pixels of the pair's image 1."""
    if len(predictions) != len(pairs) or not pairs:
        raise ValueError(
            f"{len(predictions)} predictions for {len(pairs)} pairs; pass one for each"
        )
    steps = torch.tensor(alphas, dtype=torch.float64)
    right = []
    for predicted, pair in zip(predictions, pairs, strict=True):
        moved, target, length = in_convention(predicted.detach().cpu(), pair, convention)
        right.append(hits(moved, target, steps * length, pair.visible))
    shares = torch.stack([marks.double().mean(-1) for marks in right])
    names = [pair.category for pair in pairs]
    return PckResult(
        per_image=_floats(shares.mean(0)),
        per_point=_floats(torch.cat(right, dim=1).double().mean(-1)),
        by_category={name: _floats(mean) for name, mean in _mean_by(shares, names).items()},
        right=tuple(right),
    )


def region_curves(ious: Sequence[Tensor], categories: Sequence[str]) -> dict[str, Tensor]:
    """Curves of regions from, per pair, the IoU (A,) of its active proposals by falling score.

    The IoU is that of a proposal's best match with its ground-truth box; pairs without active
    proposals do not count. "pcr" (101,): for t = 0, 0.01, ..., 1, mean over pairs of the share of
    active proposals with 1 - IoU < t (SCNet's); "pcr by class": the same, averaged within each
    category first and then over categories (Proposal Flow's); "miou" (100,): for k = 1..100, mean
    IoU over all pairs' active proposals ranked <= k in their pair.
    """
    used = [index for index, iou in enumerate(ious) if iou.numel()]
    if not used:
        raise ValueError("no pair has an active proposal; check the proposals and the keypoints")
    thresholds = torch.arange(101, dtype=torch.float64) / 100
    shares = torch.stack(
        [(1 - ious[i].double()[:, None].cpu() < thresholds).double().mean(0) for i in used]
    )
    by_class = torch.stack(list(_mean_by(shares, [categories[i] for i in used]).values()))
    total = torch.zeros(TOP, dtype=torch.float64)
    count = torch.zeros_like(total)
    for index in used:
        best = ious[index][:TOP].double().cpu()
        total[: len(best)] += best
        count[: len(best)] += 1
    miou = total.cumsum(0) / count.cumsum(0)
    return {"pcr": shares.mean(0), "pcr by class": by_class.mean(0), "miou": miou}


def identity_points(points: Tensor, *, size0: tuple[int, int], size1: tuple[int, int]) -> Tensor:
    """Control: the same place in the other image. (N, 2) pixels of image 0 -> of image 1."""
    return Frame(original=size0, network=size1).to_network(points)


def _mean_by(rows: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Mean of rows (P, K) within each name, by sorted name."""
    return {
        name: rows[[index for index, other in enumerate(names) if other == name]].mean(0)
        for name in sorted(set(names))
    }


def area(curves: Tensor) -> Tensor:
    """Trapezoidal area (...) under curves (..., N) over an evenly spaced axis of length 1."""
    return torch.trapezoid(curves, dx=1 / (curves.shape[-1] - 1))


def _floats(values: Tensor) -> tuple[float, ...]:
    return tuple(values.tolist())

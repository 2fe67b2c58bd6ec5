"""The label-free check: are matches right under fresh random warps, and does confidence know it?

On images that were held out, two new views are drawn; points of view 0 are matched to the best of
a fine grid over view 1 by plain nearest neighbour. It measures stability on one's own photos, not
matching across instances (docs/recipe.md says how little the one predicts the other).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefeat.config import ColourConfig, WarpConfig
from surefeat.eval.ranking import auroc
from surefeat.geometry import grid_to_pixel
from surefeat.loss import mean_predicted_loss
from surefeat.model import DenseFeatures, Maps
from surefeat.warp import corresponding_points, draw, two_views

# Shares of the view's side within which a match counts as right.
THRESHOLDS = (0.025, 0.05, 0.1)


@dataclass(frozen=True)
class SelfCheck:
    """What the check found; accuracies and AUROC in [0, 1].

    What speaks of confidence is NaN for a model that has none.
    """

    accuracy: dict[float, float]
    """Threshold (share of the view's side) -> share of matches that are right."""
    auroc: float
    """How well confidence ranks right before wrong matches (at the middle threshold); NaN when all
    are right or all wrong."""
    auroc_score: float
    """The same for the plain matching score."""
    predicted_loss: float
    """Mean matching loss that sigma predicts for true matches."""
    actual_loss: float
    """Mean matching loss of true matches: calibrated when equal to the predicted one."""
    calibration_error: float
    """Mean absolute difference of the two over ten equally filled bins of sigma."""
    points: int
    """Points that were matched."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        accuracy = {f"accuracy@{t:g}": value for t, value in self.accuracy.items()}
        rest = {k: v for k, v in self.__dict__.items() if k != "accuracy"}
        return {**accuracy, **rest}


@torch.inference_mode()
def self_check(
    model: DenseFeatures,
    pixels: Tensor,
    sizes: Tensor,
    *,
    warp: WarpConfig,
    colour: ColourConfig,
    points: int = 200,
    seed: int = 1,
    batch: int = 16,
) -> SelfCheck:
    """Check a model on a canvas of held-out images: (N, 3, S, S) uint8 with (N, 2) sizes.

    Occluders are left out: what they hide cannot be found.
    """
    device, warp = model.head.weight.device, replace(warp, occluders=0.0)
    rows: list[Tensor] = []
    for start in range(0, len(pixels), batch):
        part = slice(start, start + batch)
        images, size = pixels[part].to(device), sizes[part].to(device)
        generator = torch.Generator(device=device).manual_seed(seed + start)
        draws = draw(len(images), points=points, generator=generator)
        views = two_views(images, size, draws, warp, colour)
        points0, points1, valid = corresponding_points(views, draws, count=points)
        maps0, maps1 = model(views.view0), model(views.view1)
        rows.append(_match(maps0, maps1, points0, points1)[valid].flatten(0, 1).cpu())
    return _summary(torch.cat(rows), side=warp.size, sure=model.has_confidence)


def _match(maps0: Maps, maps1: Maps, points0: Tensor, points1: Tensor) -> Tensor:
    """(B, N, 5): error in pixels, confidence, best score, predicted and actual matching loss."""
    descriptors0, sigma0 = maps0.at(points0)
    true1, true_sigma1 = maps1.at(points1)
    grid = _fine_grid(maps1.descriptors).expand(len(points0), -1, -1)
    places = grid_to_pixel(grid, maps1.stride)
    candidates, sigma1 = maps1.at(places)
    best, index = torch.bmm(descriptors0, candidates.transpose(1, 2)).max(-1)
    found = places.gather(1, index[..., None].expand(-1, -1, 2))
    confidence = 2 / (sigma0 + sigma1.gather(1, index))
    predicted = mean_predicted_loss((sigma0 + true_sigma1) / 2)
    actual = 1 - (descriptors0 * true1).sum(-1).clamp_min(0)
    error = (found - points1).norm(dim=-1)
    return torch.stack([error, confidence, best, predicted, actual], dim=-1)


def _fine_grid(maps: Tensor) -> Tensor:
    """(1, 4hw, 2): places in cells, two per cell in each direction."""
    height, width = maps.shape[-2:]
    ys = torch.arange(2 * height, device=maps.device) / 2 - 0.25
    xs = torch.arange(2 * width, device=maps.device) / 2 - 0.25
    grid = torch.stack(torch.meshgrid(ys, xs, indexing="ij"), -1)
    return grid.flip(-1).reshape(1, -1, 2)


def _summary(rows: Tensor, *, side: int, sure: bool) -> SelfCheck:
    if not len(rows):
        raise ValueError("no two views overlapped; soften the warps (translation, zoom)")
    error, confidence, score, predicted, actual = rows.unbind(-1)
    right = error <= THRESHOLDS[1] * side
    mixed = bool(right.any()) and not bool(right.all())
    return SelfCheck(
        accuracy={t: (error <= t * side).float().mean().item() for t in THRESHOLDS},
        auroc=auroc(confidence, right) if mixed and sure else math.nan,
        auroc_score=auroc(score, right) if mixed else math.nan,
        predicted_loss=predicted.mean().item() if sure else math.nan,
        actual_loss=actual.mean().item(),
        calibration_error=calibration_gap(predicted, actual) if sure else math.nan,
        points=len(rows),
    )


def calibration_gap(predicted: Tensor, actual: Tensor, *, bins: int = 10) -> float:
    """Mean |predicted - actual| over equally filled bins of the predicted value; (N,) each."""
    order = predicted.argsort(stable=True)
    bins = min(bins, len(predicted))
    pairs = zip(predicted[order].tensor_split(bins), actual[order].tensor_split(bins), strict=True)
    return sum(abs((p.mean() - a.mean()).item()) * len(p) for p, a in pairs) / len(predicted)

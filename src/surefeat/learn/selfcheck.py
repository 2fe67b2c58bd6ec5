"""The label-free check: are matches right under fresh random warps, and does confidence know it?

On images that were held out, two new views are drawn; points of view 0 are matched to the best of
a fine grid over view 1 by plain nearest neighbour. It measures stability on one's own photos, not
matching across instances (docs/recipe.md says how little the one predicts the other).

`surefeat evaluate self`: the label-free check of a model on a user's own photos.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.geometry import grid_to_pixel
from surefeat.core.ranking import auroc
from surefeat.data.decode import Item, decode_all
from surefeat.data.sources import find_images
from surefeat.learn.config import ColourConfig, Config, WarpConfig, preset
from surefeat.learn.runs import Run
from surefeat.learn.warp import corresponding_points, draw, two_views
from surefeat.model.network import DenseFeatures, Maps
from surefeat.model.probability import mean_predicted_loss

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
    device = model.head.weight.device
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


_LOG = logging.getLogger("surefeat")


def check_folder(
    source: str | Path,
    *,
    model: str | Path | None = None,
    count: int = 64,
    seed: int = 1,
    device: str | torch.device | None = None,
) -> SelfCheck:
    """Check a model (a run or model folder; None: the one that ships) on up to `count` images.

    On the photos that a run learned from, only those that it held out are used. The warps are
    those the model was trained with, where its run folder says them.
    """
    found = DenseFeatures.from_pretrained(model, device=device)
    config = _settings(model, found)
    items = _not_learned_from(find_images(source), model)
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    chosen = [items[i] for i in order[:count].tolist()]
    canvas = decode_all(chosen, side=config.data.side, workers=config.data.workers)
    if not canvas.names:
        raise ValueError(f"none of the {len(chosen)} files drawn from {source} can be read")
    return self_check(
        found, canvas.pixels, canvas.sizes, warp=config.warp, colour=config.colour, seed=seed
    )


def _not_learned_from(items: list[Item], source: str | Path | None) -> list[Item]:
    """Those of the images that the run held out; all, where it knows none of them."""
    file = None if source is None else Path(source) / "images.json"
    names = (
        json.loads(file.read_text()).get("held_out_names", ()) if file and file.is_file() else ()
    )
    apart = [item for item in items if item.name in set(names)]
    if apart:
        _LOG.info("checking on %d of %d images, which the run held out", len(apart), len(items))
    return apart or items


def _settings(source: str | Path | None, model: DenseFeatures) -> Config:
    if source is not None and Run(Path(source)).config_file.is_file():
        return Run(Path(source)).config()
    return preset("small" if model.config.trunk == "small" else "ours")

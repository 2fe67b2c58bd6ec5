"""The label-free check: are matches right under fresh random warps, and does confidence know it?

On images that were held out, two new views are drawn; points of view 0 are matched to the best of
a fine grid over view 1 by plain nearest neighbour. It measures stability on one's own photos, not
matching across instances (docs/recipe.md says how little the one predicts the other).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.geometry import cell_centres
from surefeat.core.image import printable
from surefeat.core.ranking import auroc, expected_calibration_error
from surefeat.data.decode import Item, decode_all
from surefeat.data.sources import find_images
from surefeat.learn.config import ColourConfig, Config, WarpConfig, preset
from surefeat.learn.runs import Run
from surefeat.learn.warp import corresponding_points, draw, two_views
from surefeat.model.network import DenseFeatures, Maps
from surefeat.model.probability import mean_predicted_loss

_LOG = logging.getLogger("surefeat")

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
    same_place: dict[float, float]
    """As `accuracy`, of leaving every point where it was: what knowing nothing gets."""
    lower_layers: dict[float, float]
    """The same of the lower layers that matching adds: untrained, where the head alone learned."""
    shipped: dict[float, float] = field(default_factory=dict)
    """The same of the model that ships, where it stands beside another one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = dict(vars(self))
        names = ("accuracy", "shipped", "lower_layers", "same_place")
        shares = {name: values.pop(name) for name in names}
        flat = {f"{name}@{t:g}": share for name, by in shares.items() for t, share in by.items()}
        return flat | values


@torch.inference_mode()
def self_check(
    model: DenseFeatures, pixels: Tensor, sizes: Tensor, *, warp: WarpConfig, colour: ColourConfig,
    points: int = 200, seed: int = 1, batch: int = 16,
) -> SelfCheck:  # fmt: skip
    """Check a model on a canvas of held-out images: (N, 3, S, S) uint8 with (N, 2) sizes."""
    device = model.device
    rows: list[Tensor] = []
    for start in range(0, len(pixels), batch):
        part = slice(start, start + batch)
        images, size = pixels[part].to(device), sizes[part].to(device)
        generator = torch.Generator(device=device).manual_seed(seed + start)
        draws = draw(len(images), points=points, generator=generator)
        views = two_views(images, size, draws, warp, colour)
        points0, points1, valid = corresponding_points(views, draws, count=points)
        (maps0, lower0), (maps1, lower1) = map(model.forward_with_lower, (views.view0, views.view1))
        found = _match(maps0, maps1, points0, points1)
        below0, below1 = _maps_below(maps0, lower0), _maps_below(maps1, lower1)
        error = _match(below0, below1, points0, points1)[..., :1]
        rows.append(torch.cat([found, error], dim=-1)[valid].flatten(0, 1).cpu())
    return _summary(torch.cat(rows), side=warp.size, sure=model.has_confidence)


def _match(maps0: Maps, maps1: Maps, points0: Tensor, points1: Tensor) -> Tensor:
    """(B, N, 6): error in pixels, confidence, best score, predicted and actual matching loss, and
    the error of staying in place.

    The candidates are two per cell in each direction.
    """
    descriptors0, sigma0 = maps0.at(points0)
    true1, true_sigma1 = maps1.at(points1)
    height, width = maps1.descriptors.shape[-2:]
    grid = cell_centres(
        size=(2 * height, 2 * width), stride=maps1.stride / 2, device=points0.device
    )
    places = grid.expand(len(points0), -1, -1)
    candidates, sigma1 = maps1.at(places)
    best, index = torch.bmm(descriptors0, candidates.transpose(1, 2)).max(-1)
    matches = places.gather(1, index[..., None].expand(-1, -1, 2))
    confidence = 2 / (sigma0 + sigma1.gather(1, index))
    predicted = mean_predicted_loss((sigma0 + true_sigma1) / 2)
    actual = 1 - (descriptors0 * true1).sum(-1).clamp_min(0)
    error = (matches - points1).norm(dim=-1)
    stayed = (points0 - points1).norm(dim=-1)
    return torch.stack([error, confidence, best, predicted, actual, stayed], dim=-1)


def _maps_below(maps: Maps, lower: Tensor) -> Maps:
    """The lower layers (B, D, h, w) of these maps as maps of their own, equally sure everywhere."""
    stride = maps.stride * maps.descriptors.shape[-1] // lower.shape[-1]
    return Maps(lower, lower.new_ones(len(lower), *lower.shape[-2:]), stride)


def _summary(rows: Tensor, *, side: int, sure: bool) -> SelfCheck:
    if not len(rows):
        raise ValueError("no two views overlapped; soften the warps (translation, zoom)")
    error, confidence, score, predicted, actual, stayed, below = rows.unbind(-1)
    right = error <= THRESHOLDS[1] * side
    mixed = bool(right.any()) and not bool(right.all())

    def shares(errors: Tensor) -> dict[float, float]:
        return {t: (errors <= t * side).float().mean().item() for t in THRESHOLDS}

    return SelfCheck(
        accuracy=shares(error),
        auroc=auroc(confidence, right) if mixed and sure else math.nan,
        auroc_score=auroc(score, right) if mixed else math.nan,
        predicted_loss=predicted.mean().item() if sure else math.nan,
        actual_loss=actual.mean().item(),
        calibration_error=expected_calibration_error(predicted, actual) if sure else math.nan,
        points=len(rows),
        same_place=shares(stayed),
        lower_layers=shares(below),
    )


def check_folder(
    source: str | Path, *, model: str | Path | None = None, count: int = 64, seed: int = 1,
    device: str | torch.device | None = None,
) -> SelfCheck:  # fmt: skip
    """`surefeat evaluate self`: check a model (a folder; None: what ships) on up to `count` images.

    Photos that its run learned from, whole or cropped, are left out; where there are no others, the
    check is done on them, and says so. The warps are those of the run, where there is one. The
    model that ships stands beside another one.
    """
    if count < 1:
        raise ValueError(f"count is {count}; check on at least 1 image")
    features = DenseFeatures.from_pretrained(model, device=device)
    run = _run_of(model)
    small = features.config.trunk == "small"
    config = run.settings(Config) if run else preset("small" if small else "ours")
    items = _not_learned_from(find_images(source), run)
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    chosen = [items[i] for i in order[:count].tolist()]
    canvas = decode_all(chosen, side=config.data.side, workers=config.data.workers)
    if not canvas.names:
        raise ValueError(f"none of the {len(chosen)} files drawn from {source} can be read")

    def check(model: DenseFeatures) -> SelfCheck:
        return self_check(
            model, canvas.pixels, canvas.sizes, warp=config.warp, colour=config.colour, seed=seed
        )

    return beside_shipped(features, check)


def beside_shipped(model: DenseFeatures, check: Callable[[DenseFeatures], SelfCheck]) -> SelfCheck:
    """The check of a model, and where it is another one of that which ships."""
    # By the weights themselves: a model that is about to learn has no hash of its file.
    shipped = DenseFeatures.from_pretrained(device=model.device)
    own, theirs = model.state_dict(), shipped.state_dict()
    same = own.keys() == theirs.keys() and all(torch.equal(own[k], theirs[k]) for k in own)
    return replace(check(model), shipped={} if same else check(shipped).accuracy)


def _run_of(model: str | Path | None) -> Run | None:
    """The run a model is of: its own folder, or the one its folder `model` lies in."""
    folders = [Path(model), Path(model).resolve().parent] if model is not None else []
    runs = [Run(folder) for folder in folders if (folder / "model" / "model.json").is_file()]
    return next((run for run in runs if run.settings_file.is_file()), None)


def _not_learned_from(items: list[Item], run: Run | None) -> list[Item]:
    """The images without those of photos that the run learned from; all, where that leaves none."""
    if run is None or not run.learned_file.is_file():
        return items
    names = run.learned_file.read_text(encoding="utf-8").split("\n")
    # A crop is called photo#annotation; one photo's crops are learned from together, or held out.
    learned = {*names, *(name.rpartition("#")[0] for name in names)} - {""}
    known = [printable(item.name) for item in items]
    photos = [name.rpartition("#")[0] if item.crop else name
              for item, name in zip(items, known, strict=True)]  # fmt: skip
    rows = zip(items, known, photos, strict=True)
    others = [item for item, name, photo in rows if learned.isdisjoint({name, photo})]
    if not others:
        _LOG.warning(
            "the model learned from all of these %d images, so that the check flatters it; pass "
            "photos it has not seen", len(items),
        )  # fmt: skip
    elif len(others) < len(items):
        counts = len(others), len(items)
        _LOG.info("checking on %d of %d images; from the rest the model learned", *counts)
    return others or items

"""Rows as maps of one size: (B, 3, S, S) uint8 crops -> (B, C, h, h), for a head on top of them.

Each layer is brought to the common size and, unless raw, scaled to unit length in every cell, so
that all layers of a row count the same whatever the size of their activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.baselines.networks import HYPERCOLUMN, imagenet_trunk, run_taps
from surefeat.model import DenseFeatures
from surefeat.model_files import WEIGHTS, file_hash, model_folder

LAYERS: dict[str, tuple[str, ...]] = {
    "resnet50-hc": HYPERCOLUMN, "resnet50-dilated": ("res5c",), "vgg16": ("pool4",),
    "res4c": ("res4c",), "res4d": ("res4d",),
}  # fmt: skip
"""The untrained rows and the ImageNet layers they consist of."""


@dataclass(frozen=True, eq=False)
class DenseRow:
    """Features under test."""

    name: str
    """Of the row in files and tables."""
    features: Callable[[Tensor], Tensor]
    """(B, 3, S, S) uint8 RGB on the device -> (B, C, h, h)."""
    weights_sha256: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else decides the numbers; printed in every result file."""


def build_dense_row(
    name: str,
    *,
    cells: int,
    device: torch.device,
    model: str | Path | None = None,
    init: Sequence[str | Path] = ("imagenet",),
    raw: bool = False,
    weights: tuple[float, float] = (1.0, 1.0),
) -> DenseRow:
    """A row by name: `ours` (from `model`), one of LAYERS, or NAME=FOLDER for another model.

    `weights` are those of a model's descriptors and lower layer; one of 0 is left out. `raw` keeps
    the untrained rows' activations as they are.
    """
    title, given, folder = name.partition("=")
    if name == "ours" or (given and title and folder):
        source = model if name == "ours" else folder
        return _model_row(title, source, cells=cells, device=device, weights=weights)
    if name not in LAYERS:
        known = ", ".join(LAYERS)
        raise ValueError(f"unknown row {name!r}; choose ours, {known}, or NAME=FOLDER for a model")
    return _imagenet_row(name, init=init, cells=cells, device=device, raw=raw)


def _imagenet_row(
    name: str, *, init: Sequence[str | Path], cells: int, device: torch.device, raw: bool
) -> DenseRow:
    layers = LAYERS[name]
    network = "vgg16" if name == "vgg16" else "resnet50"
    # The hypercolumn is of the plain network, at stride 32.
    trunk, digest = imagenet_trunk(network, init, device=device, dilated=layers != HYPERCOLUMN)

    def features(crops: Tensor) -> Tensor:
        taps = run_taps(trunk, crops, layers)
        maps = [at_size(taps[layer].float(), cells) for layer in layers]
        return torch.cat([each if raw else F.normalize(each, dim=1) for each in maps], dim=1)

    settings = {"layers": list(layers), "each": "raw" if raw else "unit length"}
    return DenseRow(name, features, digest, settings)


def _model_row(
    name: str,
    source: str | Path | None,
    *,
    cells: int,
    device: torch.device,
    weights: tuple[float, float],
) -> DenseRow:
    """A trained model (a run or model folder; None: the one that ships)."""
    if min(weights) < 0 or max(weights) == 0:
        raise ValueError(f"weights are {weights}; none may be negative, and not both 0")
    model = DenseFeatures.from_pretrained(source, device=device).requires_grad_(False)

    def features(crops: Tensor) -> Tensor:
        maps, lower = model.forward_with_lower(crops.float() / 255)
        both = zip((maps.descriptors, lower), weights, strict=True)
        parts = [
            weight * F.normalize(at_size(each.float(), cells), dim=1)
            for each, weight in both
            if weight
        ]
        return torch.cat(parts, dim=1)

    settings = {"trunk": model.config.trunk, "lower": model.lower, "weights": list(weights)}
    return DenseRow(name, features, file_hash(model_folder(source) / WEIGHTS), settings)


def at_size(maps: Tensor, cells: int) -> Tensor:
    """Maps (B, C, h, w) -> (B, C, cells, cells): finer ones averaged, coarser ones bilinear."""
    height, width = maps.shape[-2:]
    if (height, width) == (cells, cells):
        return maps
    if height % cells == 0 and width % cells == 0:
        return F.adaptive_avg_pool2d(maps, cells)
    return F.interpolate(
        maps, size=(cells, cells), mode="bilinear", align_corners=False, antialias=cells < height
    )

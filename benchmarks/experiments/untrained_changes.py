"""What the search for the untrained rows' differences changes: maps of regions, order, filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surefeat.model.features import Pooling

SIDE = 224


@dataclass(frozen=True)
class Maps:
    """What decides the inner products of regions; they are computed once for each of these."""

    cells: int = 28
    """A side of the map that regions are pooled on."""
    unit: bool = True
    """Layers, and all of them together, have unit length at every place."""
    dilated: bool = False
    """res5 of the hypercolumn at stride 16 instead of 32."""
    pooling: Pooling = "max"
    edges: Literal["nearest", "fast-rcnn"] = "nearest"
    """Where boxes end: at the nearest cell edges, or as in Fast R-CNN's ROI pooling: a corner over
    the stride, rounded, is the first or last cell, both included, so boxes gain a cell."""
    seen: int = SIDE
    """Side of the picture the network sees, pixels."""
    seed: int = 0
    """Of the proposals."""


@dataclass(frozen=True)
class Change:
    """One way to go from inner products to keypoints."""

    maps: Maps = Maps()
    normalised: bool = True
    discount: float = 0.0
    smooth: bool = True
    """The SD filter; without it, points that no region covers stay where they are."""


CHANGES = {
    "as measured": Change(),
    "order by score / area^0.02": Change(discount=0.02),
    "order by score / area^0.05": Change(discount=0.05),
    "inner products not normalised": Change(normalised=False),
    "no SD filter": Change(smooth=False),
    "14 cells": Change(Maps(cells=14)),
    "14 cells, rounded as Fast R-CNN": Change(Maps(cells=14, edges="fast-rcnn")),
    "rounded as Fast R-CNN": Change(Maps(edges="fast-rcnn")),
    "raw activations": Change(Maps(unit=False)),
    "mean pooling": Change(Maps(pooling="mean")),
    "res5 dilated": Change(Maps(dilated=True)),
    "seen at 320 px, 40 cells": Change(Maps(seen=320, cells=40)),
    "other proposals (seed 1)": Change(Maps(seed=1)),
}
ONLY = {"res5 dilated": "resnet50-hc", "seen at 320 px, 40 cells": "vgg16"}
"""Changes that mean nothing for the other row, or take too long for it."""

"""One interface for all that is compared: a name, and a function from images to Features.

A new row is one function. Convention: rows see images already resized to the protocol's square
input, so a row's Features have that square as their original size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.features import Features
from surefeat.geometry import Frame


@dataclass(frozen=True, eq=False)
class Row:
    """A method under test."""

    name: str
    """Of the row in files and tables."""
    extract: Callable[[Tensor], list[Features]]
    """(B, 3, S, S) uint8 RGB on the device -> Features of each."""
    weights_sha256: str | None = None
    """Of what was learned; None where nothing was."""
    lower: bool = False
    """The lower layer counts too: in regions, and in points with the weights below."""
    descriptor_weight: float = 1.0
    lower_weight: float = 0.0
    region_weights: tuple[float, float] = (1.0, 1.0)
    """Of descriptors and lower layer in regions pooled by maxima."""
    mean_weights: tuple[float, float] = (1.0, 1.0)
    """The same for regions pooled by means; the paper's, and as good as any on PF-PASCAL val."""
    unit: bool = True
    """Features have unit length at every place; else regions pool them as the network gives them
    (points are compared at unit length either way)."""
    confidence: bool = False
    """It predicts sigma; region descriptors are scaled by 1/sigma."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else decides the numbers; printed in every result file."""


def as_features(
    maps: Tensor,
    *,
    side: int,
    uncertainty: Tensor | None = None,
    lower: Tensor | None = None,
    unit: bool = True,
) -> list[Features]:
    """Maps (B, C, h, w) of square images of `side` pixels -> Features, unit length along C.

    Without uncertainty (B, h, w) it is 1 everywhere; without a lower layer (B, D, h', w') the
    maps stand in for it, which rows that do not use it never see. `unit` off: lengths are kept.
    """
    maps = F.normalize(maps.float(), dim=1) if unit else maps.float()
    sigma = torch.ones_like(maps[:, 0]) if uncertainty is None else uncertainty.float()
    below = maps if lower is None else F.normalize(lower.float(), dim=1)
    frame = Frame(original=(side, side), network=(side, side))
    stride = side // maps.shape[-1]
    return [Features(*each, frame, stride) for each in zip(maps, sigma, below, strict=True)]

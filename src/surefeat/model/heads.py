"""Heads: layers of a trunk -> descriptor channels and one for sigma, at every location.

A head is called with its layers, finest first, and gives (B, C + 1, h, w) at the last one's size;
`last` is the convolution whose final filter is sigma's. Where a head learns alone, what enters it
never changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefeat.model.config import HeadKind

WIDTH = 512
"""Channels inside a deep head."""

DILATIONS = (2, 4)
"""Of its residual 3x3 convolutions: with them a location knows what lies around it, up to about a
third of a 320 px photo away."""


class LinearHead(nn.Conv2d):
    """The paper's: one 1x1 filter a channel on the last layer (section 3.6)."""

    def __init__(self, inputs: Sequence[int], outputs: int) -> None:
        super().__init__(inputs[-1], outputs, 1)

    @property
    def last(self) -> nn.Conv2d:
        return self

    def forward(self, layers: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        return _filtered(layers[-1], self)


class DeepHead(nn.Module):
    """Two layers side by side, a 3x3 convolution, residual ones that look further and further."""

    def __init__(self, inputs: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(sum(inputs), WIDTH, 1)
        self.near = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.far = nn.ModuleList(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=step, dilation=step) for step in DILATIONS
        )
        self.last = nn.Conv2d(WIDTH, outputs, 1)

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        size = layers[-1].shape[-2:]
        x = torch.cat([_even(at_size(layer, size)) for layer in layers], dim=1)
        x = F.relu(self.near(F.relu(self.first(x))))
        for conv in self.far:
            x = x + F.relu(conv(x))
        return _filtered(x, self.last)


Head = LinearHead | DeepHead


def build_head(kind: HeadKind, inputs: Sequence[int], *, channels: int, sigma_floor: float) -> Head:
    """A head for layers of so many channels each; sigma starts near 1 everywhere."""
    head = LinearHead(inputs, channels + 1) if kind == "linear" else DeepHead(inputs, channels + 1)
    assert head.last.bias is not None
    with torch.no_grad():
        head.last.weight[-1].mul_(0.1)
        head.last.bias[-1] = math.log(math.expm1(1.0 - sigma_floor))
    return head


def at_size(layer: Tensor, size: torch.Size) -> Tensor:
    """A layer (B, C, h, w) at another size, bilinear."""
    if layer.shape[-2:] == size:
        return layer
    grown: Tensor = F.interpolate(layer, size=size, mode="bilinear", align_corners=False)
    return grown


def _even(layer: Tensor) -> Tensor:
    """Each location scaled to mean square 1, so that no layer outweighs the other by its size."""
    return F.normalize(layer.float(), dim=1) * math.sqrt(layer.shape[1])


def _filtered(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """conv(x); its odd number of filters, which tensor cores serve badly, padded to a multiple of
    8."""
    extra = -conv.out_channels % 8
    weight = F.pad(conv.weight, (0, 0, 0, 0, 0, 0, 0, extra))
    bias = F.pad(conv.bias, (0, extra))  # type: ignore[arg-type]
    return F.conv2d(x, weight, bias)[:, : conv.out_channels]

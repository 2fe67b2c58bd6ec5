"""Local offset voting: neighbours that move alike support each other.

Every cell of image 0 spreads one vote over the cells of image 1 by its similarities; the votes are
binned by offset; a point reads, for every target, how much the cells around it agree with the
offset to that target. It is spatial regularisation: the paper's own comparison goes without it.

Convention: each image is cut into voting cells, `grid` along its longer side; cell centres are
integers and an offset is target cell minus source cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.geometry import sample


@dataclass(frozen=True)
class Voting:
    """Settings of the vote; chosen on validation pairs unless tagged [C], our choice."""

    grid: int = 28
    """Cells along the longer side of each image; the shorter side follows the aspect ratio."""
    temperature: float = 0.05
    """A cell's votes are softmax(similarity / temperature)."""
    reach: float = 60 / 224
    """Standard deviation of the Gaussian over source cells, in longer sides of image 0."""
    blur: float = 1.0
    """Standard deviation of the blur over offsets, in cells [C]."""
    weight: float = 0.4
    """Of log(H + floor) in the score."""
    floor: float = 0.02
    """Added to H, whose maximum is 1: bounds what a lack of support can cost."""

    def __post_init__(self) -> None:
        positive = {k: getattr(self, k) for k in ("grid", "temperature", "reach", "floor")}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"voting: {name} must be above 0, not {value}")
        if self.blur < 0:
            raise ValueError(f"voting: blur must be 0 or more, not {self.blur}")


WIDE_VOTING = Voting(blur=3.0, weight=0.3)
"""Chosen for trained features on 478 PF-PASCAL pairs, PCK@0.1; untrained ones lose by it (README).
The probability of a match is fitted to the default."""


@dataclass(frozen=True, eq=False)
class Votes:
    """The votes of all cells of image 0, ready to be read anywhere."""

    histograms: Tensor
    """(h0, w0, h0 + h1 - 1, w0 + w1 - 1): per source cell its votes by offset, blurred."""
    settings: Voting

    def around(self, cells: Tensor) -> Tensor:
        """Support for every offset at source places (N, 2), in cells -> (N, By, Bx), maximum 1."""
        h0, w0 = self.histograms.shape[:2]
        reach = self.settings.reach * self.settings.grid
        x, y = (_gaussian(cells[:, i], size, reach) for i, size in enumerate((w0, h0)))
        if len(cells) and bool((cells[:, 1] == cells[0, 1]).all()):
            # One row of a grid: the Gaussian is separable, so the rows are added up only once.
            summed = x @ (y[:1] @ self.histograms.flatten(1)).reshape(w0, -1)
        else:
            near = (y[:, :, None] * x[:, None]).flatten(1)
            summed = near @ self.histograms.reshape(h0 * w0, -1)
        top = summed.amax(1, keepdim=True).clamp_min(torch.finfo(summed.dtype).tiny)
        return (summed / top).reshape(-1, *self.histograms.shape[2:])

    def bonus(self, cells0: Tensor, cells1: Tensor) -> Tensor:
        """What voting adds to the scores of source places (N, 2) with targets (T, 2) -> (N, T)."""
        support = self.around(cells0)
        h0, w0 = self.histograms.shape[:2]
        zero = torch.tensor([w0 - 1, h0 - 1], device=cells0.device)
        bins = cells1[None] - cells0[:, None] + zero
        read = sample(support[:, None], bins)[..., 0]
        return self.settings.weight * (read + self.settings.floor).log()


def voting_grid(size: tuple[int, int], grid: int) -> tuple[int, int]:
    """Voting cells (rows, columns) of an image of this (height, width)."""
    rows, columns = (max(1, round(grid * side / max(size))) for side in size)
    return rows, columns


def collect(similarity: Tensor, settings: Voting) -> Votes:
    """Votes of image 0: similarity (h0, w0, h1, w1) of all its cells with all of image 1."""
    h0, w0, h1, w1 = similarity.shape
    votes = (similarity.flatten(2) / settings.temperature).softmax(-1).reshape(-1, h1, w1)
    device = similarity.device
    high, wide = h0 + h1 - 1, w0 + w1 - 1
    # The offset of target y from source s is y - s + (h0 - 1), which no two targets share.
    rows = torch.arange(h1, device=device) - torch.arange(h0, device=device)[:, None] + h0 - 1
    columns = torch.arange(w1, device=device) - torch.arange(w0, device=device)[:, None] + w0 - 1
    bins = rows[:, None, :, None] * wide + columns[None, :, None, :]
    binned = votes.new_zeros(h0 * w0, high * wide)
    binned.scatter_(1, bins.reshape(h0 * w0, -1), votes.flatten(1))
    # Blurring each cell's votes is the same as blurring the sums that points take over them.
    blurred = _blur(binned.reshape(-1, high, wide), settings.blur)
    return Votes(blurred.reshape(h0, w0, high, wide), settings)


def _gaussian(centre: Tensor, size: int, deviation: float) -> Tensor:
    """(N,) places -> (N, size) weights of the cells 0 .. size-1."""
    distance = centre[:, None] - torch.arange(size, device=centre.device)
    return (-0.5 * (distance / deviation).square()).exp()


def _blur(maps: Tensor, deviation: float) -> Tensor:
    """Gaussian blur of (B, h, w), zeros outside."""
    if deviation == 0:
        return maps
    # As products with banded matrices, which for such small maps is far quicker than convolving.
    down, across = (_blur_matrix(size, deviation, maps) for size in maps.shape[1:])
    return down @ (maps @ across)


def _blur_matrix(size: int, deviation: float, like: Tensor) -> Tensor:
    """(size, size) symmetric: row i holds a Gaussian around i, scaled as if it had no border."""
    every = torch.arange(size, device=like.device, dtype=like.dtype)
    reach = math.ceil(6 * deviation)
    whole = _gaussian(every.new_tensor([float(reach)]), 2 * reach + 1, deviation).sum()
    return _gaussian(every, size, deviation) / whole

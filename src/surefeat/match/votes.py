"""Votes: neighbours that move alike support each other, whichever way the two things face.

Every cell of image 0 votes for the cells of image 1 that it resembles; a point reads, for every
target, how much of the votes around it agrees. A thing may lean or be larger, so each of a few
`POSES` has its own votes, and the one that agrees most speaks. Whether it faces the other way is
asked of the pair as a whole: cells vote by their confidence, and the facing on whose best pose and
offset more of them agree has the say. It is spatial regularisation: the paper's own comparison goes
without it. Convention: places are cells of a coarse grid over each image, (x, y) or row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from surefeat.core.geometry import sample
from surefeat.model.probability import mean_predicted_loss

Pose = tuple[float, float, float, float]


def _poses(facing: float) -> tuple[Pose, ...]:
    """Linear maps (xx, xy, yx, yy) from image 0 to image 1: upright and as large, then the rest."""
    poses = []
    for angle in (0.0, math.radians(-20), math.radians(20)):
        for scale in (1.0, 0.8, 1.25):
            cos, sin = scale * math.cos(angle), scale * math.sin(angle)
            poses.append((facing * cos, -sin, facing * sin, cos))
    return tuple(poses)


POSES = (_poses(1.0), _poses(-1.0))
"""Facing the same way, and the other: upright or leaning by 20 degrees, as large, smaller or
larger."""


@dataclass(frozen=True)
class Voting:
    """Settings of the vote, chosen on PF-PASCAL's development pairs and birds together."""

    grid: int = 14
    """Cells along the longer side of each image; the shorter side follows the aspect ratio."""
    temperature: float = 0.03
    """A pair of cells has softmax(similarity / temperature) over the one times over the other."""
    reach: float = 0.25
    """Standard deviation of the Gaussian over source cells, in longer sides of image 0."""
    blur: float = 1.5
    """Standard deviation of the blur over offsets, in cells."""
    weight: float = 0.4
    """Of log(H + floor) in the score of a point that is not sure of itself."""
    doubt: float = 0.35
    """The loss that sigma predicts for a match, from which on votes count in full: where the
    network is surer they count less, in proportion."""
    floor: float = 0.2
    """Added to H, whose maximum is 1: bounds what a lack of support can cost."""
    turned: float = 0.95
    """What votes for a leaning or larger pose count beside those for the first."""
    decisive: float = 20.0
    """How steeply the pair's say about its facing grows with the logarithm of the two facings'
    agreement."""

    def __post_init__(self) -> None:
        for name in ("grid", "temperature", "reach", "floor", "doubt"):
            if not getattr(self, name) > 0:
                raise ValueError(f"voting: {name} must be above 0, not {getattr(self, name)}")
        for name in ("blur", "turned", "decisive"):
            if getattr(self, name) < 0:
                raise ValueError(f"voting: {name} must be 0 or more, not {getattr(self, name)}")


COARSE = 2.0
"""Blur over offsets, in cells, where a whole pair is asked which way it faces."""

OBJECTION = 0.3
"""All layers together lean to the same facing, as they learned mostly from views that are not
mirrored: only what exceeds this counts against a mirrored pair (log of the ratio)."""

_SETTLED = 1e-3
"""Of a facing with less say than this the votes are not counted at all."""


@dataclass(frozen=True, eq=False)
class PoseVotes:
    """The votes of all cells of image 0, binned by where they lead under one pose."""

    linear: Tensor
    """(2, 2): the pose."""
    first: Tensor
    """(2,): the offset (x, y) of the first bin, in cells."""
    histograms: Tensor
    """(h0 * w0, By, Bx): per source cell its votes by offset."""
    blur: float
    """Over offsets, in cells."""

    def around(self, near: Tensor) -> Tensor:
        """Votes of all cells, which count by near (N, h0 * w0), blurred: (N, 1, By, Bx)."""
        size = self.histograms.shape[1:]
        # Blurring and adding up commute: few points have less to blur than all cells.
        if len(near) < len(self.histograms):
            total = _blur((near @ self.histograms.flatten(1)).reshape(-1, *size), self.blur)
        else:
            total = near @ self._blurred
        return total.reshape(-1, 1, *size)

    @cached_property
    def _blurred(self) -> Tensor:
        return _blur(self.histograms, self.blur).flatten(1)


@dataclass(frozen=True, eq=False)
class Votes:
    """The votes of image 0 over image 1, ready to be read anywhere."""

    grid0: tuple[int, int]
    """Cells (rows, columns) of image 0."""
    grid1: tuple[int, int]
    settings: Voting
    poses: tuple[tuple[PoseVotes, ...], ...]
    """Of POSES: facing the same way, and the other; none where a facing has no say."""
    mirrored: float
    """The say of the other facing, in [0, 1]."""

    @property
    def widest(self) -> int:
        """Bins of the largest histogram of a cell."""
        return max(votes.histograms[0].numel() for facing in self.poses for votes in facing)

    def support(self, cells: Tensor, facing: int) -> Tensor:
        """How far the cells around source places (N, 2) agree on each target: (N, h1, w1).

        In cells of image 0; the best of a facing's poses, scaled so that the maximum is 1.
        """
        reach = self.settings.reach * self.settings.grid
        h0, w0 = self.grid0
        x, y = (_gaussian(cells[:, i], size, reach) for i, size in enumerate((w0, h0)))
        near = (y[:, :, None] * x[:, None]).flatten(1)
        source, targets = _centred(cells, self.grid0), _centred_cells(self.grid1, cells)
        best = near.new_zeros(len(cells), len(targets))
        for number, votes in enumerate(self.poses[facing]):
            last = source.new_tensor(votes.histograms.shape[1:]).flip(0) - 1
            offsets = targets - (source @ votes.linear.T)[:, None] - votes.first
            inside = ((offsets >= 0) & (offsets <= last)).all(-1)  # beyond it nobody has voted
            read = sample(votes.around(near), offsets)[..., 0] * inside
            best = torch.maximum(best, read * (self.settings.turned if number else 1.0))
        top = best.amax(1, keepdim=True).clamp_min(torch.finfo(best.dtype).tiny)
        return (best / top).reshape(-1, *self.grid1)

    def bonus(self, cells0: Tensor, cells1: Tensor, sigma: Tensor) -> Tensor:
        """What voting adds to the scores of source places (N, 2) with targets (T, 2) -> (N, T).

        sigma (N,): of the places; the surer the network is of one, the less its neighbours say.
        """
        total = cells0.new_zeros(len(cells0), len(cells1))
        for facing, say in enumerate((1 - self.mirrored, self.mirrored)):
            if self.poses[facing]:
                agreed = self.support(cells0, facing)[:, None]
                read = sample(agreed, cells1.expand(len(cells0), -1, -1))[..., 0]
                total = total + say * (read + self.settings.floor).log()
        doubt = (mean_predicted_loss(sigma) / self.settings.doubt).clamp_max(1.0)
        return self.settings.weight * doubt[:, None] * total


def voting_grid(size: tuple[int, int], grid: int) -> tuple[int, int]:
    """Voting cells (rows, columns) of an image of this (height, width)."""
    rows, columns = (max(1, round(grid * side / max(size))) for side in size)
    return rows, columns


def chosen(similarity: Tensor, temperature: float) -> Tensor:
    """(n0, n1) -> (n0, n1) in [0, 1]: how far two cells choose each other."""
    scaled = similarity / temperature
    return scaled.softmax(1) * scaled.softmax(0)


def mirrored_share(
    similarity: Tensor, lower: Tensor, confidence: tuple[Tensor, Tensor], settings: Voting
) -> float:
    """How far a pair is taken to face opposite ways: from 0, the same way, to 1.

    similarity (h0, w0, h1, w1): of all layers; lower: of the lower layers, which were never taught
    which way a thing faces; confidence (n0,), (n1,) of the cells.
    """
    ratio = _facing_ratio(lower, confidence, settings)
    objection = (_facing_ratio(similarity, confidence, settings) - OBJECTION).clamp_min(0)
    return float(torch.sigmoid(-settings.decisive * (ratio + objection)))


def _facing_ratio(
    similarity: Tensor, confidence: tuple[Tensor, Tensor], settings: Voting
) -> Tensor:
    """Logarithm of how much more cells agree on one pose and offset of the same facing."""
    h0, w0, h1, w1 = similarity.shape
    votes = chosen(similarity.reshape(h0 * w0, h1 * w1), settings.temperature)
    votes = votes * confidence[0][:, None] * confidence[1]
    agreed = []
    for poses in POSES:
        peaks = []
        for pose in poses:
            binned = _binned(votes, pose, (h0, w0), (h1, w1), COARSE)
            peaks.append(_blur(binned.histograms.sum(0)[None], COARSE).amax())
        agreed.append(torch.stack(peaks).amax())
    return (agreed[0] / agreed[1].clamp_min(torch.finfo(votes.dtype).tiny)).log()


def collect(similarity: Tensor, settings: Voting, *, mirrored: float = 0.0) -> Votes:
    """Votes of image 0: similarity (h0, w0, h1, w1) of all its cells with all of image 1.

    mirrored: of `mirrored_share`.
    """
    h0, w0, h1, w1 = similarity.shape
    votes = chosen(similarity.reshape(h0 * w0, h1 * w1), settings.temperature)
    grids = ((h0, w0), (h1, w1))
    binned = tuple(
        tuple(_binned(votes, pose, *grids, settings.blur) for pose in poses if say > _SETTLED)
        for poses, say in zip(POSES, (1 - mirrored, mirrored), strict=True)
    )
    return Votes(*grids, settings, binned, mirrored)


def _binned(
    votes: Tensor, pose: Pose, grid0: tuple[int, int], grid1: tuple[int, int], blur: float
) -> PoseVotes:
    """Votes (h0 * w0, h1 * w1) by their offset: target minus where the pose takes the source."""
    linear, first, bins, (high, wide) = _offset_bins(pose, grid0, grid1, votes.device, votes.dtype)
    histograms = votes.new_zeros(len(votes), high * wide).scatter_add_(1, bins, votes)
    return PoseVotes(linear, first, histograms.reshape(-1, high, wide), blur)


@lru_cache(maxsize=4 * sum(map(len, POSES)))
def _offset_bins(
    pose: Pose,
    grid0: tuple[int, int],
    grid1: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """The pose (2, 2), the first bin's offset (2,), the bin of every pair of cells, and how many.

    Kept, there and back, for two pairs of grids: most photos have one of few shapes.
    """
    linear = torch.tensor(pose, device=device, dtype=dtype).reshape(2, 2)
    cells0, cells1 = (_centred_cells(grid, linear) for grid in (grid0, grid1))
    offsets = cells1 - (cells0 @ linear.T)[:, None]
    first = offsets.flatten(0, 1).amin(0).floor()
    bins = (offsets - first).round().long()
    wide, high = (int(bins[..., i].max()) + 1 for i in (0, 1))
    return linear, first, bins[..., 1] * wide + bins[..., 0], (high, wide)


def _centred(cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cells (..., 2) as x, y from the middle of a grid of (rows, columns)."""
    return cells - cells.new_tensor([grid[1] - 1, grid[0] - 1]) / 2


def _centred_cells(grid: tuple[int, int], like: Tensor) -> Tensor:
    """(rows * columns, 2): all cells of a grid, row by row, from its middle."""
    ys, xs = (torch.arange(n, device=like.device, dtype=like.dtype) for n in grid)
    return _centred(torch.cartesian_prod(ys, xs).flip(-1).reshape(-1, 2), grid)


def _gaussian(centre: Tensor, size: int, deviation: float) -> Tensor:
    """(N,) places -> (N, size) weights of the cells 0 .. size-1."""
    distance = centre[:, None] - torch.arange(size, device=centre.device)
    return (-0.5 * (distance / deviation).square()).exp()


def _blur(maps: Tensor, deviation: float) -> Tensor:
    """Gaussian blur of (B, h, w), zeros outside, peak 1: as products with banded matrices."""
    if deviation == 0:
        return maps
    down, across = (
        _gaussian(torch.arange(n, device=maps.device, dtype=maps.dtype), n, deviation)
        for n in maps.shape[1:]
    )
    return down @ (maps @ across)

"""The search below all matching: the best place of a fine grid for each point, with votes.

Convention: points are original pixels; a side's places are a grid of two per descriptor cell each
way, row by row, spread evenly over the image.

Voting: every cell of image 0 votes for the cells of image 1 that it resembles; a point reads, for
every target, how much of the votes around it agrees. A thing may face the other way, lean or be
larger, so each of a few `POSES` has its own votes, and the one that agrees most speaks. It is
spatial regularisation: the paper's own comparison goes without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from surefeat.core.geometry import sample
from surefeat.model.features import Features


def _poses() -> tuple[tuple[float, float, float, float], ...]:
    """Linear maps (xx, xy, yx, yy) from image 0 to image 1: as it is, then all the others."""
    poses = []
    for facing in (1.0, -1.0):
        for angle in (0.0, math.radians(-20), math.radians(20)):
            for scale in (1.0, 0.8, 1.25):
                cos, sin = scale * math.cos(angle), scale * math.sin(angle)
                poses.append((facing * cos, -sin, facing * sin, cos))
    return tuple(poses)


POSES = _poses()
"""Either way round, upright or leaning by 20 degrees, as large, smaller or larger."""


@dataclass(frozen=True)
class Voting:
    """Settings of the vote, chosen on PF-PASCAL's development pairs and birds together."""

    grid: int = 14
    """Cells along the longer side of each image; the shorter side follows the aspect ratio."""
    temperature: float = 0.015
    """A pair of cells has softmax(similarity / temperature) over the one times over the other."""
    reach: float = 0.35
    """Standard deviation of the Gaussian over source cells, in longer sides of image 0."""
    blur: float = 2.0
    """Standard deviation of the blur over offsets, in cells."""
    weight: float = 0.4
    """Of log(H + floor) in the score."""
    floor: float = 0.1
    """Added to H, whose maximum is 1: bounds what a lack of support can cost."""
    turned: float = 0.9
    """What votes for any other pose count beside those for the same pose."""

    def __post_init__(self) -> None:
        for name in ("grid", "temperature", "reach", "floor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"voting: {name} must be above 0, not {getattr(self, name)}")
        if self.blur < 0 or self.turned < 0:
            raise ValueError("voting: blur and turned must be 0 or more")


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
    poses: tuple[PoseVotes, ...]

    def support(self, cells: Tensor) -> Tensor:
        """How far the cells around source places (N, 2) agree on each target: (N, h1, w1).

        In cells of image 0; the best of the poses, scaled so that the maximum is 1.
        """
        reach = self.settings.reach * self.settings.grid
        h0, w0 = self.grid0
        x, y = (_gaussian(cells[:, i], size, reach) for i, size in enumerate((w0, h0)))
        near = (y[:, :, None] * x[:, None]).flatten(1)
        source, targets = _centred(cells, self.grid0), _centred_cells(self.grid1, cells)
        best = near.new_zeros(len(cells), len(targets))
        for number, votes in enumerate(self.poses):
            last = source.new_tensor(votes.histograms.shape[1:]).flip(0) - 1
            offsets = targets - (source @ votes.linear.T)[:, None] - votes.first
            inside = ((offsets >= 0) & (offsets <= last)).all(-1)  # beyond it nobody has voted
            read = sample(votes.around(near), offsets)[..., 0] * inside
            best = torch.maximum(best, read * (self.settings.turned if number else 1.0))
        top = best.amax(1, keepdim=True).clamp_min(torch.finfo(best.dtype).tiny)
        return (best / top).reshape(-1, *self.grid1)

    def bonus(self, cells0: Tensor, cells1: Tensor) -> Tensor:
        """What voting adds to the scores of source places (N, 2) with targets (T, 2) -> (N, T)."""
        read = sample(self.support(cells0)[:, None], cells1.expand(len(cells0), -1, -1))[..., 0]
        return self.settings.weight * (read + self.settings.floor).log()


def voting_grid(size: tuple[int, int], grid: int) -> tuple[int, int]:
    """Voting cells (rows, columns) of an image of this (height, width)."""
    rows, columns = (max(1, round(grid * side / max(size))) for side in size)
    return rows, columns


def collect(similarity: Tensor, settings: Voting) -> Votes:
    """Votes of image 0: similarity (h0, w0, h1, w1) of all its cells with all of image 1."""
    h0, w0, h1, w1 = similarity.shape
    scaled = similarity.reshape(h0 * w0, h1 * w1) / settings.temperature
    votes = scaled.softmax(1) * scaled.softmax(0)
    grids = ((h0, w0), (h1, w1))
    poses = POSES if settings.turned else POSES[:1]
    binned = (_binned(votes, pose, *grids, settings.blur) for pose in poses)
    return Votes(*grids, settings, tuple(binned))


def _binned(
    votes: Tensor,
    pose: tuple[float, float, float, float],
    grid0: tuple[int, int],
    grid1: tuple[int, int],
    blur: float,
) -> PoseVotes:
    """Votes (h0 * w0, h1 * w1) by their offset: target minus where the pose takes the source."""
    linear = votes.new_tensor(pose).reshape(2, 2)
    cells0, cells1 = (_centred_cells(grid, votes) for grid in (grid0, grid1))
    offsets = cells1 - (cells0 @ linear.T)[:, None]
    first = offsets.flatten(0, 1).amin(0).floor()
    bins = (offsets - first).round().long()
    wide, high = (int(bins[..., i].max()) + 1 for i in (0, 1))
    histograms = votes.new_zeros(len(votes), high * wide)
    histograms.scatter_add_(1, bins[..., 1] * wide + bins[..., 0], votes)
    return PoseVotes(linear, first, histograms.reshape(-1, high, wide), blur)


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


PEAK_RADIUS = 30 / 224
"""Places closer to a peak than this share of the longer network side belong to it (method: 30 px
of a 224 px image)."""

PLACES_PER_CELL = 2

REFINE_REACH = 2
"""Places each way that a refined peak is the weighted mean of."""

REFINE_TEMPERATURE = 0.05
"""On smooth maps of stride 16 it takes a third to two thirds off the error of the bare place, and
parabolas a little less."""

# Entries of a similarity matrix held at once; bounds memory for any number of points.
_CHUNK = 1 << 23


@dataclass(frozen=True, eq=False)
class Side:
    """One image of a pair, ready to be searched."""

    features: Features
    weights: tuple[float, float]
    """Of descriptors and lower layer in the similarity; they add up to 1."""
    size: tuple[int, int]
    """Rows and columns of places."""
    points: Tensor
    """(T, 2): the places, original pixels."""
    vectors: Tensor
    """(T, K): what is compared there; inner products are similarities."""

    def at(self, points: Tensor) -> Tensor:
        """Vectors at original pixels (N, 2) -> (N, K)."""
        return _vectors(self.features, points, self.weights)

    def cells(self, points: Tensor, grid: tuple[int, int]) -> Tensor:
        """Original pixels (..., 2) -> cells of a grid of (rows, columns) over the image."""
        height, width = self.features.frame.original
        scale = points.new_tensor([grid[1] / width, grid[0] / height])
        return (points + 0.5) * scale - 0.5


@dataclass(frozen=True, eq=False)
class Peaks:
    """The best places found for N points."""

    index: Tensor
    """(N,) into the places of the searched side."""
    points: Tensor
    """(N, 2) original pixels: the place, refined if asked for."""
    score: Tensor
    """(N,) similarity at the place, in [-1, 1]; votes not included."""
    margin: Tensor
    """(N,) the peak's score minus the best beyond PEAK_RADIUS, votes included; NaN unless asked."""


def prepare(features: Features, *, descriptor_weight: float, lower_weight: float) -> Side:
    """The places of an image and what is compared there."""
    total = descriptor_weight + lower_weight
    if min(descriptor_weight, lower_weight) < 0 or not total > 0:
        raise ValueError(
            f"descriptor_weight {descriptor_weight} and lower_weight {lower_weight} must not be "
            "negative, nor both 0"
        )
    weights = (descriptor_weight / total, lower_weight / total)
    rows, columns = (PLACES_PER_CELL * n for n in features.descriptors.shape[1:])
    points = even_grid(features, size=(rows, columns))
    vectors = _vectors(features, points, weights)
    return Side(features, weights, (rows, columns), points, vectors)


def prepare_pair(
    features0: Features, features1: Features, *, descriptor_weight: float, lower_weight: float
) -> tuple[Side, Side]:
    """Both images, after a check that they can be compared."""
    check_pair(features0, features1)
    weights = {"descriptor_weight": descriptor_weight, "lower_weight": lower_weight}
    return prepare(features0, **weights), prepare(features1, **weights)


def check_pair(features0: Features, features1: Features) -> None:
    """Two images can be compared only by one model on one device."""
    for name in ("descriptors", "lower"):
        maps0, maps1 = getattr(features0, name), getattr(features1, name)
        if maps0.shape[0] != maps1.shape[0]:
            raise ValueError(
                f"the two images have {maps0.shape[0]} and {maps1.shape[0]} channels of {name}; "
                "extract both with the same model"
            )
        if maps0.device != maps1.device:
            raise ValueError(
                f"the two images lie on {maps0.device} and {maps1.device}; "
                f"move one: features.to({str(maps0.device)!r})"
            )


def even_grid(features: Features, *, size: tuple[int, int]) -> Tensor:
    """(rows * columns, 2) original pixels: centres of an even grid over the image, row by row."""
    height, width = features.frame.original
    device = features.descriptors.device
    ys = (torch.arange(size[0], device=device) + 0.5) * (height / size[0]) - 0.5
    xs = (torch.arange(size[1], device=device) + 0.5) * (width / size[1]) - 0.5
    return torch.cartesian_prod(ys, xs).flip(-1).reshape(-1, 2)


def vote(side0: Side, side1: Side, settings: Voting) -> Votes:
    """The votes of image 0 over image 1."""
    return collect(_cell_similarity(side0, side1, settings), settings)


def vote_both_ways(side0: Side, side1: Side, settings: Voting) -> tuple[Votes, Votes]:
    """The votes of image 0 over image 1, and of image 1 over image 0."""
    similarity = _cell_similarity(side0, side1, settings)
    return collect(similarity, settings), collect(similarity.permute(2, 3, 0, 1), settings)


def _cell_similarity(side0: Side, side1: Side, settings: Voting) -> Tensor:
    """(h0, w0, h1, w1) similarities of all voting cells."""
    grids = [voting_grid(side.features.frame.network, settings.grid) for side in (side0, side1)]
    vectors0, vectors1 = (
        side.at(even_grid(side.features, size=grid))
        for side, grid in zip((side0, side1), grids, strict=True)
    )
    return (vectors0 @ vectors1.T).reshape(*grids[0], *grids[1])


def find(
    side0: Side,
    side1: Side,
    points0: Tensor,
    votes: Votes | None,
    *,
    refine: bool,
    margin: bool = False,
) -> Peaks:
    """The best place of image 1 for points0 (N, 2) of image 0, original pixels."""
    widest = max(
        len(side1.points), max(v.histograms[0].numel() for v in votes.poses) if votes else 0
    )
    step = max(1, _CHUNK // widest)
    chunks = torch.split(points0, step) if len(points0) else (points0,)
    parts = [_find_chunk(side0, side1, part, votes, refine, margin) for part in chunks]
    return join(parts)


def join(parts: list[Peaks]) -> Peaks:
    """Peaks of several chunks of points, as of one."""
    return Peaks(*(torch.cat([getattr(p, k) for p in parts]) for k in Peaks.__dataclass_fields__))


def _find_chunk(
    side0: Side, side1: Side, points0: Tensor, votes: Votes | None, refine: bool, margin: bool
) -> Peaks:
    similarity = side0.at(points0) @ side1.vectors.T
    total = similarity
    if votes is not None:
        cells0 = side0.cells(points0, votes.grid0)
        total = similarity + votes.bonus(cells0, side1.cells(side1.points, votes.grid1))
    best, index = total.max(1)
    surface = total.reshape(-1, *side1.size)
    places = side1.points[index]
    if refine:
        height, width = side1.features.frame.original
        step = places.new_tensor([width / side1.size[1], height / side1.size[0]])
        places = places + step * peak_offset(surface, index)
    score = similarity.gather(1, index[:, None])[:, 0]
    gap = torch.full_like(best, float("nan"))
    if margin:
        gap = best - beyond(surface, index, side1.features.frame.network)
    return Peaks(index, places, score, gap)


def beyond(surface: Tensor, index: Tensor, network: tuple[int, int]) -> Tensor:
    """The best of surface (N, rows, columns) beyond PEAK_RADIUS from the places `index` (N,)."""
    rows, columns = surface.shape[1:]
    radius = PEAK_RADIUS * max(network)
    y = torch.arange(rows, device=index.device) - (index // columns)[:, None]
    x = torch.arange(columns, device=index.device) - (index % columns)[:, None]
    down = (y * (network[0] / rows)).square()
    across = (x * (network[1] / columns)).square()
    near = down[:, :, None] + across[:, None] <= radius * radius
    return surface.masked_fill(near, float("-inf")).flatten(1).amax(1)


def peak_offset(surface: Tensor, index: Tensor) -> Tensor:
    """Where between the places the peak lies: (N, rows, columns) and (N,) -> (N, 2), in places.

    Mean of the places around the peak, weighted by softmax(score / REFINE_TEMPERATURE). Of a
    window that the border cuts, the opposite side is left out too, lest it pull inwards.
    """
    rows, columns = surface.shape[1:]
    y, x = (index // columns)[:, None], (index % columns)[:, None]
    steps = torch.arange(-REFINE_REACH, REFINE_REACH + 1, device=index.device)
    dy, dx = torch.cartesian_prod(steps, steps).unbind(-1)
    whole = (dy.abs() <= torch.minimum(y, rows - 1 - y)) & (
        dx.abs() <= torch.minimum(x, columns - 1 - x)
    )
    around = (y + dy).clamp(0, rows - 1) * columns + (x + dx).clamp(0, columns - 1)
    scores = surface.flatten(1).gather(1, around).masked_fill(~whole, float("-inf"))
    share = (scores / REFINE_TEMPERATURE).softmax(-1)
    return share @ torch.stack([dx, dy], dim=-1).to(share.dtype)


def _vectors(features: Features, points: Tensor, weights: tuple[float, float]) -> Tensor:
    """Descriptors and lower layer side by side, scaled so that products are the weighted sum."""
    parts = []
    if weights[0] > 0:
        parts.append(features.at(points) * weights[0] ** 0.5)
    if weights[1] > 0:
        parts.append(features.lower_at(points) * weights[1] ** 0.5)
    return torch.cat(parts, dim=-1)

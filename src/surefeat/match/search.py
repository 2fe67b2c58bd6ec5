"""Local offset voting: neighbours that move alike support each other.

Every cell of image 0 spreads one vote over the cells of image 1 by its similarities; the votes are
binned by offset; a point reads, for every target, how much the cells around it agree with the
offset to that target. It is spatial regularisation: the paper's own comparison goes without it.

Convention: each image is cut into voting cells, `grid` along its longer side; cell centres are
integers and an offset is target cell minus source cell.

The search below point and dense matching: the best place of a fine grid for each point.

Convention: points are original pixels; a side's places are a grid of two per descriptor cell each
way, row by row, spread evenly over the image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.core.geometry import sample
from surefeat.model.features import Features


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
    widest = max(len(side1.points), votes.histograms[0, 0].numel() if votes else 0)
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
        h0, w0, high, wide = votes.histograms.shape
        grid1 = (high - h0 + 1, wide - w0 + 1)
        cells0, cells1 = side0.cells(points0, (h0, w0)), side1.cells(side1.points, grid1)
        total = similarity + votes.bonus(cells0, cells1)
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

"""The search below all matching: the best place of a fine grid for each point, with votes.

Convention: points are original pixels; a side's places are a grid of two per descriptor cell each
way, row by row, spread evenly over the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.match.votes import Votes, Voting, collect, mirrored_share, voting_grid
from surefeat.model.features import Features

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
    similarity, mirrored = _compare_cells(side0, side1, settings)
    return collect(similarity, settings, mirrored=mirrored)


def vote_both_ways(side0: Side, side1: Side, settings: Voting) -> tuple[Votes, Votes]:
    """The votes of image 0 over image 1, and of image 1 over image 0."""
    similarity, mirrored = _compare_cells(side0, side1, settings)
    there = collect(similarity, settings, mirrored=mirrored)
    return there, collect(similarity.permute(2, 3, 0, 1), settings, mirrored=mirrored)


def _compare_cells(side0: Side, side1: Side, settings: Voting) -> tuple[Tensor, float]:
    """Similarities (h0, w0, h1, w1) of all voting cells; how far the pair faces opposite ways."""
    grids, rows = [], []
    for side in (side0, side1):
        grid = voting_grid(side.features.frame.network, settings.grid)
        cells = even_grid(side.features, size=grid)
        grids.append(grid)
        rows.append(
            (side.at(cells), side.features.lower_at(cells), side.features.confidence_at(cells))
        )
    similarity, lower = ((rows[0][i] @ rows[1][i].T).reshape(*grids[0], *grids[1]) for i in (0, 1))
    confidence = (rows[0][2], rows[1][2])
    return similarity, mirrored_share(similarity, lower, confidence, settings)


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
    widest = max(len(side1.points), votes.widest if votes else 0)
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
        sigma = side0.features.confidence_at(points0).reciprocal()
        total = similarity + votes.bonus(cells0, side1.cells(side1.points, votes.grid1), sigma)
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

"""Labelled pairs as squares, similarities of layers, votes of many pairs at once, and cycles.

Similarities of keypoints and of voting cells are computed once for each model and layer. Mixtures
of layers are sums of them, and ways of voting read the same cells, so that a thousand of both can
be tried in minutes. Points are (x, y) pixels of squares of SIDE.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import sample
from surefeat.core.image import decode, read_bytes, resize
from surefeat.data.pairs import Pair
from surefeat.match.search import Voting, collect, peak_offset
from surefeat.model.network import DenseFeatures

SIDE, PLACES, BATCH = 320, 40, 32
TAPS = ("res4c", "res4d", "res4e", "res4f", "res5a", "res5b", "res5c")

Similarities = tuple[Tensor, Tensor]
"""Of P pairs: keypoints with places (P, K, T), voting cells with voting cells (P, n * n, n * n)."""


# The pairs and what a model says of them.


@dataclass(frozen=True)
class Pairs:
    """A development set as squares on the device."""

    images: Tensor
    """(I, 3, SIDE, SIDE) uint8."""
    categories: tuple[str, ...]
    """Of the images."""
    which: Tensor
    """(P, 2): numbers of the images of each pair."""
    points: Tensor
    """(P, K, 2, 2): where each keypoint lies in image 0 and in image 1."""
    visible: Tensor
    """(P, K) bool."""

    def every(self, step: int) -> Pairs:
        """Each step-th pair alone."""
        return replace(
            self, which=self.which[::step], points=self.points[::step], visible=self.visible[::step]
        )


def load_squares(pairs: Sequence[Pair], device: torch.device) -> Pairs:
    kinds = {p: pair.category for pair in pairs for p in (pair.image0, pair.image1)}
    paths = sorted(kinds)

    def square(path: Path) -> Tensor:
        return resize(decode(read_bytes(path, name=path.name), name=path.name), size=(SIDE, SIDE))

    with ThreadPoolExecutor(16) as pool:
        images = torch.stack(list(pool.map(square, paths)))
    most = max(int(pair.visible.sum()) for pair in pairs)
    points, visible = torch.zeros(len(pairs), most, 2, 2), torch.zeros(len(pairs), most)
    for row, pair in enumerate(pairs):
        common = pair.common()
        visible[row, : len(common[0])] = 1
        for i, size in enumerate((pair.size0, pair.size1)):
            scale = torch.tensor([SIDE / size[1], SIDE / size[0]])
            points[row, : len(common[i]), i] = (common[i] + 0.5) * scale - 0.5
    which = torch.tensor([[paths.index(p) for p in (one.image0, one.image1)] for one in pairs])
    categories = tuple(kinds[path] for path in paths)
    tensors = (which.to(device), points.to(device), visible.bool().to(device))
    return Pairs(images.to(device), categories, *tensors)


def pck(pairs: Pairs, places: Tensor) -> list[float]:
    """Percent of the visible keypoints within 0.05 and 0.1 of the side, mean over pairs."""
    distance = (places - pairs.points[:, :, 1]).norm(dim=-1)
    right = [((distance < alpha * SIDE) & pairs.visible).sum(1) for alpha in (0.05, 0.1)]
    return [round(100 * (some / pairs.visible.sum(1)).mean().item(), 2) for some in right]


@torch.no_grad()
def seen(model: DenseFeatures, images: Tensor, taps: Iterable[str]) -> dict[str, Tensor]:
    """Layer -> (I, C, h, w), unit length; the descriptors too. Images (I, 3, S, S) in [0, 1]."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        maps = model.trunk(model.normalise_input(images), tuple(taps))
        maps["descriptors"] = model(images).descriptors
    return {name: F.normalize(some.float(), dim=1) for name, some in maps.items()}


def similarities(
    model: DenseFeatures, pairs: Pairs, cells: int, taps: Sequence[str] = TAPS
) -> dict[str, Similarities]:
    """Of each layer; in half precision."""
    parts: dict[str, list[Tensor]] = {}
    for some in pairs.images.split(BATCH):
        for name, maps in seen(model, some.float() / 255, taps).items():
            parts.setdefault(name, []).append(maps.half())
    return {name: _similarities(torch.cat(maps), pairs, cells) for name, maps in parts.items()}


def _similarities(maps: Tensor, pairs: Pairs, cells: int) -> Similarities:
    places, grid = (even_points(n, maps.device) for n in (PLACES, cells))
    of_points, of_cells = [], []
    for rows in torch.arange(len(pairs.which), device=maps.device).split(BATCH):
        first, second = (maps[pairs.which[rows, i]] for i in (0, 1))
        targets, cells0, cells1 = (
            read_maps(some, where.expand(len(rows), -1, -1))
            for some, where in ((second, places), (first, grid), (second, grid))
        )
        asked = read_maps(first, pairs.points[rows, :, 0])
        of_points.append((asked @ targets.transpose(1, 2)).half())
        of_cells.append((cells0 @ cells1.transpose(1, 2)).half())
    return torch.cat(of_points), torch.cat(of_cells)


def even_points(count: int, device: torch.device) -> Tensor:
    """(count^2, 2): an even grid of pixels, row by row."""
    steps = (torch.arange(count, device=device) + 0.5) * SIDE / count - 0.5
    return torch.cartesian_prod(steps, steps).flip(-1)


def as_cells(points: Tensor, grid: int) -> Tensor:
    """Pixels -> cells of a grid over the square, the first centre 0."""
    return (points + 0.5) / SIDE * grid - 0.5


def read_maps(maps: Tensor, points: Tensor) -> Tensor:
    """(B, C, h, h) at pixels (B, N, 2) -> (B, N, C), unit length."""
    return F.normalize(sample(maps.float(), as_cells(points, maps.shape[-1])), dim=-1)


def mixed(layers: Mapping[str, Similarities], weights: Mapping[str, float]) -> Similarities:
    """The weighted mean of some layers."""
    total = sum(weights.values())
    points, cells = (
        torch.stack([layers[k][i].float() * (w / total) for k, w in weights.items()]).sum(0)
        for i in (0, 1)
    )
    return points, cells


# Votes.


@dataclass(frozen=True)
class PairVoting:
    """Votes whose poses count by kind, and by how far the whole pair agrees on them.

    Where leaning, sized and mirrored are 1, and agreement and facing 0, it is what the package
    does with `turned` 1.
    """

    voting: Voting = field(default_factory=Voting)
    """The package's settings; `turned` is not used."""
    angles: tuple[float, ...] = (0.0, -20.0, 20.0)
    """Of the poses, degrees; the first is upright."""
    scales: tuple[float, ...] = (1.0, 0.8, 1.25)
    leaning: float = 0.9
    """What votes for a leaning pose count; a leaning and mirrored one counts both factors."""
    sized: float = 0.9
    """Of a smaller or larger pose."""
    mirrored: float = 0.9
    """Of a pose that faces the other way."""
    agreement: float = 0.0
    """A pose counts (its agreement in the pair / that of the best pose) to this power: gamma."""
    facing: float = 0.0
    """Poses of the facing that agrees less count (its agreement / the other's) to this power: fpow;
    in the second search the same is kpow * hpow."""
    coarse: float = 2.0
    """Standard deviation of the blur over offsets for that agreement, in cells."""


def poses(settings: PairVoting) -> tuple[Tensor, Tensor]:
    """Linear maps (Q, 2, 2) from image 0 to image 1, the mirrored ones last; what each counts."""
    linear, counts = [], []
    for facing, degrees, scale in product((1, -1), settings.angles, settings.scales):
        angle = math.radians(degrees)
        cos, sin = scale * math.cos(angle), scale * math.sin(angle)
        linear.append([[facing * cos, -sin], [facing * sin, cos]])
        kinds = ((settings.leaning, angle != 0), (settings.sized, scale != 1),
                 (settings.mirrored, facing < 0))  # fmt: skip
        counts.append(math.prod(share for share, turned in kinds if turned))
    return torch.tensor(linear), torch.tensor(counts)


def centred_cells(n: int, device: torch.device) -> Tensor:
    """(n * n, 2): all cells, row by row, from the middle of the grid."""
    steps = torch.arange(n, device=device) - (n - 1) / 2
    return torch.cartesian_prod(steps, steps).flip(-1)


def gaussian(centre: Tensor, size: int, deviation: float) -> Tensor:
    """(...) places -> (..., size) weights of the cells 0 .. size-1."""
    distance = centre[..., None] - torch.arange(size, device=centre.device)
    return (-0.5 * (distance / deviation).square()).exp()


def blurred(votes: Tensor, size: tuple[int, int], deviation: float) -> Tensor:
    """(..., rows * columns) -> (..., rows, columns), each vote spread with peak 1."""
    down, across = (gaussian(torch.arange(n, device=votes.device), n, deviation) for n in size)
    return down @ votes.unflatten(-1, size) @ across


def read_pose(
    votes: Tensor, cells: Tensor, linear: Tensor, settings: PairVoting
) -> tuple[Tensor, Tensor]:
    """Votes (B, n * n, n * n) by offset under one pose, around places (B, K, 2): (B, K, n * n).

    And how far each whole pair agrees on one offset: (B,).
    """
    voting, n = settings.voting, settings.voting.grid
    targets = centred_cells(n, votes.device)
    offsets = targets - (targets @ linear.T)[:, None]
    first = offsets.flatten(0, 1).amin(0).floor()
    bins = (offsets - first).round().long()
    last = bins.flatten(0, 1).amax(0)
    columns, rows = (last + 1).tolist()
    index = (bins[..., 1] * columns + bins[..., 0]).expand_as(votes)
    histograms = votes.new_zeros(*votes.shape[:2], rows * columns).scatter_add_(2, index, votes)
    x, y = (gaussian(cells[..., i], n, voting.reach * n) for i in (0, 1))
    near = (y[..., :, None] * x[..., None, :]).flatten(2)
    around = blurred(near @ histograms, (rows, columns), voting.blur)
    asked = targets - ((cells - (n - 1) / 2) @ linear.T)[:, :, None] - first
    inside = ((asked >= 0) & (asked <= last)).all(-1)  # beyond it nobody has voted
    read = sample(around.flatten(0, 1)[:, None], asked.flatten(0, 1)).reshape(inside.shape)
    whole = blurred(histograms.sum(1), (rows, columns), settings.coarse)
    return read * inside, whole.flatten(1).amax(1)


@torch.no_grad()
def support(similarity: Tensor, cells: Tensor, settings: PairVoting) -> Tensor:
    """`Votes.support` of B pairs, with what the whole pair says of the poses.

    Similarities of cells (B, n * n, n * n), places (B, K, 2) in cells -> (B, K, n, n), at most 1.
    """
    scaled = similarity / settings.voting.temperature
    votes = scaled.softmax(2) * scaled.softmax(1)
    linear, counts = (some.to(votes.device) for some in poses(settings))
    parts = [read_pose(votes, cells, one, settings) for one in linear]
    whole = torch.stack([agreed for _, agreed in parts], dim=1) * counts
    ways = whole.unflatten(1, (2, -1)).amax(2, keepdim=True)
    less = (ways / ways.flip(1)).clamp(max=1).expand(-1, -1, len(counts) // 2).flatten(1)
    prior = less**settings.facing * (whole / whole.amax(1, keepdim=True)) ** settings.agreement
    best = torch.zeros_like(parts[0][0])
    for (read, _), weight in zip(parts, (prior * counts).unbind(1), strict=True):
        best = torch.maximum(best, read * weight[:, None, None])
    top = best.amax(-1, keepdim=True).clamp_min(torch.finfo(best.dtype).tiny)
    return (best / top).unflatten(-1, (settings.voting.grid, -1))


def bonus(similarity: Tensor, asked: Tensor, places: Tensor, voting: Voting | PairVoting) -> Tensor:
    """What votes add to the scores of pixels (B, K, 2) with places (T, 2): (B, K, T)."""
    if isinstance(voting, Voting):  # the package's own way, pair by pair
        n = voting.grid
        cells0, cells1 = as_cells(asked, n), as_cells(places, n)
        return torch.stack([
            collect(one.reshape(n, n, n, n), voting).bonus(cells, cells1)
            for one, cells in zip(similarity, cells0, strict=True)
        ])  # fmt: skip
    settings, n = voting.voting, voting.voting.grid
    agreed = support(similarity, as_cells(asked, n), voting).flatten(0, 1)[:, None]
    read = sample(agreed, as_cells(places, n).expand(len(agreed), -1, -1))
    return settings.weight * (read.reshape(*asked.shape[:2], -1) + settings.floor).log()


@torch.no_grad()
def located(both: Similarities, pairs: Pairs, voting: Voting | PairVoting | None) -> Tensor:
    """(P, K, 2): the best place of each keypoint, with votes or without, refined."""
    places, parts = even_points(PLACES, pairs.points.device), []
    for rows in torch.arange(len(pairs.which), device=pairs.points.device).split(BATCH):
        total = both[0][rows]
        if voting is not None:
            total = total + bonus(both[1][rows], pairs.points[rows, :, 0], places, voting)
        index = total.argmax(-1).flatten()
        offset = peak_offset(total.reshape(-1, PLACES, PLACES), index) * SIDE / PLACES
        parts.append((places[index] + offset).reshape(*total.shape[:2], 2))
    return torch.cat(parts)


# Cycles, which need no labels.

Layers = Sequence[tuple[Tensor, float]]
"""Maps (B, C, h, h) and their weights, which add up to 1."""


def triples(categories: Sequence[str], count: int, seed: int = 0) -> Tensor:
    """(count, 3): numbers of three images of one category."""
    generator, kinds = random.Random(seed), dict[str, list[int]]()
    for number, category in enumerate(categories):
        kinds.setdefault(category, []).append(number)
    large = [numbers for numbers in kinds.values() if len(numbers) >= 3]
    if not large:
        raise ValueError("no category has three images; pass more pairs")
    return torch.tensor([generator.sample(generator.choice(large), 3) for _ in range(count)])


@torch.no_grad()
def returned(look: Callable[[Tensor], Layers], images: Tensor, chosen: Tensor) -> dict[str, float]:
    """Points sent A -> B -> C -> A' by nearest neighbour: percent that come back, by what A' is.

    A' is A itself, A mirrored, or A shifted by a fifth of the side: copying the place of a point
    does well on the first alone. Images (I, 3, SIDE, SIDE) uint8, chosen (N, 3) of `triples`.
    """
    places, grid = (even_points(n, images.device) for n in (PLACES, 12))
    grid = grid[((grid - SIDE / 2).abs() < SIDE * 0.33).all(-1)]
    shift = round(SIDE * 0.2)

    def vectors(layers: Layers, points: Tensor) -> Tensor:
        return torch.cat([read_maps(maps, points) * w**0.5 for maps, w in layers], dim=-1)

    def send(layers0: Layers, points: Tensor, layers1: Layers) -> Tensor:
        targets = vectors(layers1, places.expand(len(points), -1, -1))
        return places[(vectors(layers0, points) @ targets.transpose(1, 2)).argmax(-1)]

    back: dict[str, list[Tensor]] = {"mirrored": [], "shifted": [], "same": []}
    for rows in chosen.to(images.device).split(BATCH):
        first, second, third = (images[rows[:, i]].float() / 255 for i in range(3))
        start, between, last = look(first), look(second), look(third)
        points = grid.expand(len(rows), -1, -1)
        arrived = send(between, send(start, points, between), last)
        moved = torch.cat([first[..., shift:], first[..., -shift:].flip(-1)], dim=-1)
        wanted = {
            "mirrored": (
                first.flip(-1),
                torch.stack([SIDE - 1 - points[..., 0], points[..., 1]], -1),
            ),
            "shifted": (moved, points - points.new_tensor([shift, 0])),
            "same": (first, points),
        }
        for kind, (image, home) in wanted.items():
            near = (send(last, arrived, look(image)) - home).norm(dim=-1) < 0.1 * SIDE
            kept = home[..., 0] >= 0
            back[kind].append((near & kept).sum(1) / kept.sum(1))
    return {kind: round(100 * torch.cat(some).mean().item(), 1) for kind, some in back.items()}

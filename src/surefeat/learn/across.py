"""Matches between photos of a folder, to learn from beside warps.

A warp shows what a place looks like when it moves, never what it looks like on another thing of its
kind. Photos of a folder that match well by themselves can show that: each is matched with those
most like it by the model that ships, and what leads back and is probably right is taken for true. A
share of the pairs of a batch then shows two photos; matched places take the place of the warp's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.files import pack_tensors, read_tensors, write_bytes
from surefeat.core.geometry import apply_affine, compose, invert
from surefeat.learn.warp import Draws, pick_inside, shared_points
from surefeat.match.points import match_points
from surefeat.match.related import GRID, Cells, pooled_vector
from surefeat.match.search import even_grid, prepare
from surefeat.match.votes import voting_grid
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

PHOTOS = 300
"""That are matched, at most: a second's work each on a core of a CPU."""

PARTNERS = 3
"""Of a photo, those most like it; a photo has more where others chose it."""

LEAST = 0.5
"""Probability of a match that is learned from."""

FEWEST = 8
"""Matches of two photos, or of two of their views: fewer teach nothing."""

_BATCH = 8

Points = tuple[Tensor, Tensor, Tensor]
"""Of `corresponding_points`."""


@dataclass(frozen=True, eq=False)
class Second:
    """What the second views of a batch show: a partner of the photo, or the photo itself."""

    photo: Tensor
    """(B,) which."""
    places: Tensor
    """(B, P, 2, 2): matched places, source pixels of the photo and of its partner."""
    other: Tensor
    """(B,) bool: a partner."""


@dataclass(frozen=True, eq=False)
class Partners:
    """Of N photos, up to K others that match, and where."""

    photos: Tensor
    """(N, K)."""
    places: Tensor
    """(N, K, P, 2, 2): matched places, source pixels of the photo and of its partner; repeated
    where they are fewer."""
    count: Tensor
    """(N,) how many partners."""

    def second(self, rows: Tensor, draws: Draws, share: float) -> Second:
        """What pairs of photos (B,) show beside them; with a partner this share of the pairs."""
        count = self.count[rows]
        other = (draws.partner[:, 0] < share) & (count > 0)
        which = (draws.partner[:, 1] * count).long().clamp_max(self.photos.shape[1] - 1)
        return Second(torch.where(other, self.photos[rows, which], rows),
                      self.places[rows, which], other)  # fmt: skip

    def of(self, rows: Tensor) -> Partners:
        """The same of the photos (M,) alone, which are numbered anew."""
        number = torch.full_like(self.count, -1)
        number[rows] = torch.arange(len(rows), device=rows.device)
        edges = [
            (new, int(number[self.photos[row, k]]), self.places[row, k])
            for new, row in enumerate(rows.tolist()) for k in range(int(self.count[row]))
        ]  # fmt: skip
        return collect([edge for edge in edges if edge[1] >= 0], total=len(rows))

    def to(self, device: torch.device) -> Partners:
        return Partners(self.photos.to(device), self.places.to(device), self.count.to(device))

    def save(self, path: Path) -> None:
        write_bytes(path, pack_tensors(dict(vars(self))))

    @staticmethod
    def load(path: Path) -> Partners:
        return Partners(**read_tensors(path)[0])


def collect(edges: Sequence[tuple[int, int, Tensor]], *, total: int) -> Partners:
    """Photo, partner and places (P, 2, 2) of each pair -> of all photos."""
    most = max((len(places) for *_, places in edges), default=1)
    known: list[list[tuple[int, Tensor]]] = [[] for _ in range(total)]
    for photo, other, places in edges:
        known[photo].append((other, places[torch.arange(most) % len(places)]))
    widest = max(1, *map(len, known)) if known else 1
    photos = torch.zeros(total, widest, dtype=torch.long)
    places = torch.zeros(total, widest, most, 2, 2)
    for row, partners in enumerate(known):
        for k, (other, some) in enumerate(partners):
            photos[row, k], places[row, k] = other, some
    return Partners(photos, places, torch.tensor([len(partners) for partners in known]))


def chosen_photos(total: int, count: int, *, seed: int) -> Tensor:
    """(count,) of `total` photos, or all: kept views and matches are of the same ones."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]


@torch.no_grad()
def find_partners(
    model: DenseFeatures, photos: Sequence[Tensor], *, rows: Tensor, total: int, quiet: bool = True
) -> Partners:
    """Match photos (3, H, W) uint8, the `rows` (N,) of `total`, by a model that has probability."""
    seen = [
        one for start in range(0, len(photos), _BATCH)
        for one in model.extract(list(photos[start : start + _BATCH]))
    ]  # fmt: skip
    numbers, edges = rows.tolist(), []
    for i, j in progress.bar(alike(seen, model), desc="matching photos", unit="pair", quiet=quiet):
        places = matched_places(seen[i], seen[j])
        if len(places) >= FEWEST:
            edges.append((numbers[i], numbers[j], places))
            edges.append((numbers[j], numbers[i], places.flip(1)))
    return collect(edges, total=total)


def alike(seen: Sequence[Features], model: DenseFeatures) -> list[tuple[int, int]]:
    """Pairs of photos, each with those most like it by one vector per photo; none twice."""
    assert model.cohort is not None
    weights = {"descriptor_weight": POINT_WEIGHTS[0], "lower_weight": POINT_WEIGHTS[1]}
    centre = model.cohort.kinds.mean(0).to(seen[0].descriptors)
    vectors = torch.stack(
        [pooled_vector(Cells.of(prepare(one, **weights)), centre) for one in seen]
    )
    similar = (vectors @ vectors.T).fill_diagonal_(-torch.inf)
    nearest = similar.topk(min(PARTNERS, len(seen) - 1)).indices.tolist()
    pairs = {(min(i, j), max(i, j)) for i, others in enumerate(nearest) for j in others}
    return sorted(pairs)


def matched_places(features0: Features, features1: Features) -> Tensor:
    """(P, 2, 2): places of both photos that find each other and are probably right."""
    points = even_grid(features0, size=voting_grid(features0.frame.network, GRID))
    matches = match_points(features0, features1, points).filter(mutual=True, probability=LEAST)
    return torch.stack([matches.points0, matches.points1], 1).cpu()


def second_points(
    to_source: Tensor, second: Second | None, draws: Draws, *, side: int, count: int
) -> Points:
    """Corresponding points of two views, (B, 2, 2, 3) to their sources: by the warp where both
    show one photo, else by its matches."""
    from_source = invert(to_source)
    warp = compose(from_source[:, 1], to_source[:, 0])
    points0, points1, valid = shared_points(warp, draws, side=side, count=count)
    if second is None:
        return points0, points1, valid
    here, there = (apply_affine(from_source[:, i], second.places[:, :, i]) for i in (0, 1))
    here, there, found = pick_inside(here, there, side=side, count=count)
    other = second.other[:, None, None]
    return (
        torch.where(other, here, points0), torch.where(other, there, points1),
        torch.where(second.other, found >= FEWEST, valid),
    )  # fmt: skip

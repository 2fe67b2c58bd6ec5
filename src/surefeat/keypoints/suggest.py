"""What to label next: photos that show what many others show.

A photo covers a cell of another as far as one of its own cells resembles it; chosen is, one after
the other, the photo that adds most to what the chosen ones and those already labelled cover
(facility location). Labels serve the other photos: a photo covers its own cells no better than the
best other one would, or the odd ones out, which only they themselves resemble, would all be chosen.

Cells count by their squared confidence, as in `surefeat relate`, and by how much more the other
photos resemble them than the model's cohort does: sky resembles sky everywhere, the thing the
photos are of resembles itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core import progress
from surefeat.data.decode import Skipped
from surefeat.data.keypoints import KeypointSet
from surefeat.keypoints.transfer import photo_names, read_labels
from surefeat.match.related import GRID
from surefeat.match.search import even_grid
from surefeat.match.votes import voting_grid
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.extract import extract_readable
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

KEPT = 49
"""Cells of a photo that are compared, those that count most."""

_BATCH = 16

# Photos that say what the folder is of, and photos whose cells are to be covered: of a larger
# folder a part, spread over it, says as much. Time and memory stay linear in the number of photos.
_REFERENCES, _ASKED = 64, 500

# What cells count that the others resemble no more than the cohort does: a photo of nothing else
# is still covered by something.
_LEAST = 1e-6

# Entries of the table of resemblances held at once beside it; bounds memory.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Suggestion:
    """A photo worth labelling."""

    photo: str
    gain: float
    """What it adds to what is covered, as a share of what all photos together cover."""
    stands_for: int
    """Photos, itself too, that no other suggestion or labelled photo covers better; of more than
    500 photos an estimate."""


@dataclass(frozen=True, eq=False)
class Suggested:
    """Photos to label, the most useful first."""

    suggestions: tuple[Suggestion, ...]
    covered: float
    """What suggestions and labelled photos cover, as a share of what all photos cover."""
    labelled: int
    """Photos among them that have labels already."""
    paths: dict[str, Path]
    """Where the photos are, by name."""
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        rows = [
            {"photo": one.photo, "gain": round(one.gain, 4), "stands_for": one.stands_for}
            for one in self.suggestions
        ]
        return {
            "suggestions": rows, "covered": round(self.covered, 4), "labelled": self.labelled,
            "skipped": [{"photo": s.name, "reason": s.reason} for s in self.skipped],
        }  # fmt: skip


@torch.no_grad()
def suggest(
    photos: str | Path | Sequence[str | Path],
    model: DenseFeatures | None = None,
    *,
    count: int = 10,
    labels: str | Path | KeypointSet | None = None,
    images: str | Path | None = None,
    quiet: bool = True,
) -> Suggested:
    """Photos (a folder, or photos and folders) -> the `count` whose labels would help most.

    labels: what is labelled already (a COCO json, its photos under `images`, default: beside it or
    in the folder `photos`; or a set): those photos count as chosen, wherever they lie (but in tar
    shards). Photos that cannot be read are skipped and listed.
    """
    if count < 1:
        raise ValueError(f"count is {count}; suggest at least 1 photo")
    names = photo_names(photos)
    model = model or DenseFeatures.from_pretrained()
    known = read_labels(labels, photos, images) if isinstance(labels, str | Path) else labels
    # In files of their own; of tar shards single photos cannot be looked at.
    places = [item.image for item in known.objects] if known else []
    done = {os.path.realpath(place.path) for place in places if place.size is None}
    names |= {Path(file): file for file in sorted(done - set(map(os.path.realpath, names)))}
    skipped: list[Skipped] = []
    seen = look(list(names), model, skipped, quiet=quiet)
    if not seen.paths:
        raise ValueError(f"none of {len(names)} photos can be read ({skipped[0].reason})")
    labelled = [row for row, path in enumerate(seen.paths) if os.path.realpath(path) in done]
    place = {path: number for number, path in enumerate(names)}
    skipped.sort(key=lambda one: place[Path(one.name)])
    order, gains = cover(seen.alike, seen.shares, count=count, chosen=labelled)
    chosen = [*labelled, *order]
    most = float(seen.alike.amax(0).float() @ seen.shares)
    stands_for = seen.stands_for(chosen)[len(labelled) :]
    suggestions = tuple(
        Suggestion(names[seen.paths[row]], gain / most if most else 0.0, others)
        for row, gain, others in zip(order, gains, stands_for, strict=True)
    )
    return Suggested(
        suggestions, covered_share(seen.alike, seen.shares, chosen), len(labelled),
        {names[path]: path for path in sorted(seen.paths, key=place.__getitem__)},
        tuple(replace(one, name=names.get(Path(one.name), one.name)) for one in skipped),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PhotoGrid:
    """A photo as a coarse grid of n cells."""

    descriptors: Tensor
    """(n, C) unit length."""
    lower: Tensor
    """(n, D) unit length."""
    confidence: Tensor
    """(n,) 1/sigma."""
    common: Tensor | None
    """(n,): the highest similarity with the model's cohort; None: it has none."""

    @staticmethod
    def of(features: Features) -> PhotoGrid:
        points = even_grid(features, size=voting_grid(features.frame.network, GRID))
        return PhotoGrid(
            features.at(points), features.lower_at(points), features.confidence_at(points),
            None if features.common is None else features.common_at(points),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Kind:
    """What photos of a folder look like, to tell cells of what they are of from all other cells."""

    grids: Sequence[PhotoGrid]
    """Of some of the photos."""
    surest: Sequence[Tensor]
    """(KEPT, D) of each: its most confident cells, by the lower layers."""
    middle: float
    """Half of the cells exceed the cohort by less than this."""

    @staticmethod
    def of(grids: Sequence[PhotoGrid]) -> Kind:
        surest = [grid.lower[_heaviest(grid.confidence)] for grid in grids]
        some = [excess for grid in grids if (excess := _excess(grid, grids, surest)) is not None]
        return Kind(grids, surest, float(torch.cat(some).median()) if some else 0.0)

    def kept(self, grid: PhotoGrid) -> tuple[Tensor, Tensor]:
        """The KEPT cells of a photo that count most: vectors (KEPT, K) whose products are
        similarities as in matching, and shares (KEPT,) that add up to 1."""
        weights = grid.confidence.square()
        excess = _excess(grid, self.grids, self.surest)
        if excess is not None:
            weights = weights * (excess - self.middle).clamp_min(_LEAST)
        cells = _heaviest(weights)
        first, second = ((weight / sum(POINT_WEIGHTS)) ** 0.5 for weight in POINT_WEIGHTS)
        vectors = torch.cat([grid.descriptors[cells] * first, grid.lower[cells] * second], dim=1)
        # A long photo has fewer cells: others stand beside them and do not count.
        more = (0, KEPT - len(cells))
        return F.pad(vectors, (0, 0, *more)), F.pad(F.normalize(weights[cells], p=1, dim=0), more)


def _heaviest(weights: Tensor) -> Tensor:
    return weights.topk(min(KEPT, len(weights))).indices


def _excess(grid: PhotoGrid, grids: Sequence[PhotoGrid], surest: Sequence[Tensor]) -> Tensor | None:
    """(n,): by how much a cell's best similarity in another photo, on average, exceeds that in the
    cohort; None where there is no cohort, or no other photo."""
    best = [
        (grid.lower @ cells.T).amax(1)
        for other, cells in zip(grids, surest, strict=True) if other is not grid
    ]  # fmt: skip
    return None if grid.common is None or not best else torch.stack(best).mean(0) - grid.common


@dataclass(frozen=True, eq=False)
class Looked:
    """How far photos cover each other."""

    paths: Sequence[Path]
    """N photos, those whose cells are to be covered first."""
    alike: Tensor
    """(N, A * KEPT) in [0, 1]: how far each photo covers the cells of the first A."""
    shares: Tensor
    """(A * KEPT,), adding up to 1: how much each cell counts."""

    def stands_for(self, chosen: Sequence[int]) -> list[int]:
        """How many photos each of the chosen covers best, itself too; of more than A estimated."""
        asked = len(self.shares) // KEPT
        each = self.alike[list(chosen)].float() * self.shares
        owners = each.reshape(len(chosen), asked, KEPT).sum(2).argmax(0)
        for place, row in enumerate(chosen):
            if row < asked:
                owners[row] = place
        counts = owners.bincount(minlength=len(chosen))
        return [max(1, round(float(n) * len(self.paths) / asked)) for n in counts]


def look(
    paths: Sequence[Path], model: DenseFeatures, skipped: list[Skipped], *, quiet: bool = True
) -> Looked:
    """Look once at every photo that can be read."""
    return compare(_grids(_spread(paths), model, skipped, quiet=quiet))


def compare(grids: Iterator[tuple[Path, PhotoGrid]]) -> Looked:
    """Photos as they come; the first ones should be a fair sample of all.

    Memory: 2.5 MB for each of the first _REFERENCES photos, 0.6 MB for each of the first _ASKED,
    50 kB for every one.
    """
    first = list(islice(grids, _REFERENCES))
    kind = Kind.of([grid for _, grid in first])
    kept = ((path, *kind.kept(grid)) for path, grid in chain(first, grids))
    asked = list(islice(kept, _ASKED))
    if not asked:
        return Looked([], torch.zeros(0, 0), torch.zeros(0))
    things = torch.cat([vectors for _, vectors, _ in asked])
    shares = torch.cat([own for _, _, own in asked]).cpu() / len(asked)
    beginning = zip([path for path, _, _ in asked], torch.split(things, KEPT), strict=True)
    del asked
    seen: list[Path] = []
    rows: list[Tensor] = []
    for path, vectors in chain(beginning, ((path, vectors) for path, vectors, _ in kept)):
        seen.append(path)
        rows.append((things @ vectors.T).amax(1).clamp(0, 1).half().cpu())
    owners = torch.arange(len(things) // KEPT).repeat_interleave(KEPT)
    return Looked(seen, for_others(torch.stack(rows), owners), shares)


def _spread(paths: Sequence[Path]) -> list[Path]:
    """The paths in an order whose every beginning is spread over all of them."""
    return [paths[i] for i in sorted(range(len(paths)), key=lambda i: f"{i:064b}"[::-1])]


def _grids(
    paths: Sequence[Path], model: DenseFeatures, skipped: list[Skipped], *, quiet: bool
) -> Iterator[tuple[Path, PhotoGrid]]:
    side = model.config.longest_side
    with progress.bar(total=len(paths), desc="looking", unit="img", quiet=quiet) as bar:
        for start in range(0, len(paths), _BATCH):
            part = list(paths[start : start + _BATCH])
            for path, features in extract_readable(model, part, skipped, longest_side=side):
                yield path, PhotoGrid.of(features)
            bar.update(len(part))


def for_others(alike: Tensor, owners: Tensor) -> Tensor:
    """(N, M) with what a photo covers of its own lowered to what the best other photo covers of it.

    alike: how far each photo covers M things; owners (M,): the photo each of them is of.
    """
    if len(alike) < 2:
        return alike
    things = torch.arange(alike.shape[1], device=alike.device)
    alike = alike.clone()
    alike[owners, things] = 0
    alike[owners, things] = alike.amax(0)
    return alike


def cover(
    alike: Tensor, shares: Tensor, *, count: int, chosen: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Up to `count` more rows of N, each adding most to what all chosen cover, and what it adds.

    alike (N, M) in [0, 1]: how far each row covers M things, which count by shares (M,); chosen:
    rows that are there already.
    """
    covered = _covered(alike, chosen)
    free = torch.ones(len(alike), dtype=torch.bool, device=alike.device)
    free[list(chosen)] = False
    step = max(1, _CHUNK // alike.shape[1])
    order: list[int] = []
    gains: list[float] = []
    while len(order) < count and bool(free.any()):
        parts = [
            (part.float() - covered).clamp_min(0) @ shares for part in torch.split(alike, step)
        ]
        gain = torch.cat(parts).masked_fill(~free, -1.0)
        best = int(gain.argmax())
        order.append(best)
        gains.append(float(gain[best]))
        covered = torch.maximum(covered, alike[best].float())
        free[best] = False
    return order, gains


def covered_share(alike: Tensor, shares: Tensor, chosen: Sequence[int]) -> float:
    """In [0, 1]: what rows `chosen` cover of what all rows cover."""
    most = float(alike.amax(0).float() @ shares)
    return float(_covered(alike, chosen) @ shares) / most if most else 0.0


def _covered(alike: Tensor, chosen: Sequence[int]) -> Tensor:
    """(M,): how far each thing is covered by the chosen rows."""
    if not len(chosen):
        return torch.zeros(alike.shape[1], device=alike.device)
    return alike[list(chosen)].amax(0).float()

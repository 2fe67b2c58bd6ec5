"""What to label next: photos that stand for many others.

Every photo becomes one vector, the mean of its cells by confidence, as `surefeat relate` has it. A
photo covers another as far as their vectors resemble each other; chosen is, one after the other,
the photo that adds most to what the chosen ones and those already labelled cover (facility
location). Labels serve the other photos: a photo covers itself no better than the best other one
would, or the odd ones out, which only they themselves resemble, would all be chosen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core import progress
from surefeat.data.decode import Skipped
from surefeat.data.keypoints import KeypointSet, read_coco
from surefeat.keypoints.transfer import photo_names
from surefeat.match.related import GRID
from surefeat.match.search import even_grid, prepare
from surefeat.match.votes import voting_grid
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.extract import extract_readable
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

_BATCH = 16

# Entries of the table of resemblances held at once beside it; bounds memory.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Suggestion:
    """A photo worth labelling."""

    photo: str
    gain: float
    """What it adds to what is covered, as a share of what all photos together cover."""
    stands_for: int
    """Photos, itself too, that no other suggestion or labelled photo covers better."""


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

    labels: what is labelled already (a COCO json, its photos under `images`, default: beside it;
    or a set): those photos count as chosen. Photos that cannot be read are skipped and listed.
    """
    if count < 1:
        raise ValueError(f"count is {count}; suggest at least 1 photo")
    names = photo_names(photos)
    model = model or DenseFeatures.from_pretrained()
    known = read_coco(labels, images=images) if isinstance(labels, str | Path) else labels
    skipped: list[Skipped] = []
    vectors = photo_vectors(list(names), model, skipped, quiet=quiet)
    if not vectors:
        raise ValueError(f"none of {len(names)} photos can be read ({skipped[0].reason})")
    paths = list(vectors)
    done = {os.path.realpath(item.image.path) for item in known.objects} if known else set()
    labelled = [row for row, path in enumerate(paths) if os.path.realpath(path) in done]
    alike = for_others(resemblance(torch.stack(list(vectors.values()))), torch.arange(len(paths)))
    shares = torch.full((len(paths),), 1 / len(paths))
    order, gains = cover(alike, shares, count=count, chosen=labelled)
    owners = alike[[*labelled, *order]].argmax(0)
    owners[[*labelled, *order]] = torch.arange(len(labelled) + len(order))
    most = float(alike.amax(0) @ shares)
    suggestions = tuple(
        Suggestion(
            names[paths[row]], gain / most if most else 0.0,
            int((owners == len(labelled) + place).sum()),
        )
        for place, (row, gain) in enumerate(zip(order, gains, strict=True))
    )  # fmt: skip
    return Suggested(
        suggestions, covered_share(alike, shares, [*labelled, *order]), len(labelled),
        {names[path]: path for path in paths}, tuple(_renamed(skipped, names)),
    )  # fmt: skip


def _renamed(skipped: Sequence[Skipped], names: Mapping[Path, str]) -> list[Skipped]:
    return [Skipped(names.get(Path(one.name), one.name), one.reason) for one in skipped]


def photo_vectors(
    paths: Sequence[Path], model: DenseFeatures, skipped: list[Skipped], *, quiet: bool = True
) -> dict[Path, Tensor]:
    """One vector (K,) of unit length for each photo that can be read, in their order."""
    centre = model.cohort.centre(POINT_WEIGHTS) if model.cohort else None
    means: dict[Path, Tensor] = {}
    side = model.config.longest_side
    with progress.bar(total=len(paths), desc="looking", unit="img", quiet=quiet) as bar:
        for start in range(0, len(paths), _BATCH):
            part = list(paths[start : start + _BATCH])
            for path, features in extract_readable(model, part, skipped, longest_side=side):
                means[path] = mean_vector(features)
            bar.update(len(part))
    if not means:
        return {}
    # Of a model without a cohort the photos themselves say what all have in common.
    middle = torch.stack(list(means.values())).mean(0) if centre is None else centre.cpu()
    return {path: F.normalize(means[path] - middle, dim=0) for path in paths if path in means}


def mean_vector(features: Features) -> Tensor:
    """(K,): the mean of a photo's cells by their confidence; products are similarities."""
    side = prepare(features, descriptor_weight=POINT_WEIGHTS[0], lower_weight=POINT_WEIGHTS[1])
    places = even_grid(features, size=voting_grid(features.frame.network, GRID))
    weights = features.confidence_at(places)
    return (weights @ side.at(places) / weights.sum()).cpu()


def resemblance(vectors: Tensor) -> Tensor:
    """(N, K) unit length -> (N, N) in [0, 1]: how far one photo covers another."""
    return (vectors @ vectors.T).clamp(0, 1)


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

"""What to label next: photos that stand for many others, and for those that are still in doubt.

Every photo becomes one vector, the mean of its cells by confidence, as `surefeat relate` has it. A
photo covers another as far as their vectors resemble each other; chosen is, one after the other,
the photo that adds most to what the chosen ones and those already labelled cover (facility
location). Photos whose labels are in doubt count more.
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
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.transfer import photo_names, transfer
from surefeat.match.related import GRID
from surefeat.match.search import even_grid, prepare
from surefeat.match.votes import voting_grid
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.extract import extract_readable
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

LEAST_DOUBT = 0.25
"""What a photo whose labels are beyond doubt still counts, beside 1 of one in full doubt."""

_BATCH = 16


@dataclass(frozen=True)
class Suggestion:
    """A photo worth labelling."""

    photo: str
    gain: float
    """What it adds to the covered share of all photos, by their doubt: in [0, 1]."""
    stands_for: int
    """Photos, itself too, that no other suggestion or labelled photo resembles more."""
    doubt: float | None
    """Of its labels so far, in [0, 1]; None where there are none to go by."""


@dataclass(frozen=True, eq=False)
class Suggested:
    """Photos to label, the most useful first."""

    suggestions: tuple[Suggestion, ...]
    covered: float
    """The share of all photos, by their doubt, that suggestions and labelled photos cover."""
    labelled: int
    """Photos among them that have labels already."""
    paths: dict[str, Path]
    """Where the photos are, by name."""
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        rows = [
            {"photo": one.photo, "gain": round(one.gain, 4), "stands_for": one.stands_for,
             "doubt": None if one.doubt is None else round(one.doubt, 4)}
            for one in self.suggestions
        ]  # fmt: skip
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
    detector: KeypointDetector | None = None,
    quiet: bool = True,
) -> Suggested:
    """Photos (a folder, or photos and folders) -> the `count` whose labels would help most.

    labels: what is labelled already (a COCO json, its photos under `images`, default: beside it;
    or a set): those photos count as chosen, and how doubtful their labels are on the others
    (keypoints.transfer) says where more are needed; a detector fitted on them says it instead,
    where one is given. Photos that cannot be read are skipped and listed.
    """
    if count < 1:
        raise ValueError(f"count is {count}; suggest at least 1 photo")
    names = photo_names(photos)
    model = model or (detector.model if detector else DenseFeatures.from_pretrained())
    known = read_coco(labels, images=images) if isinstance(labels, str | Path) else labels
    skipped: list[Skipped] = []
    vectors = photo_vectors(list(names), model, skipped, quiet=quiet)
    if not vectors:
        raise ValueError(f"none of {len(names)} photos can be read ({skipped[0].reason})")
    paths = list(vectors)
    done = {os.path.realpath(item.image.path) for item in known.objects} if known else set()
    labelled = [row for row, path in enumerate(paths) if os.path.realpath(path) in done]
    doubts = _doubts(paths, labelled, model, known, detector, quiet=quiet)
    table = torch.stack(list(vectors.values()))
    order, gains = cover(table, doubts, count=count, chosen=labelled)
    owners = _owners(table, [*labelled, *order])
    suggestions = tuple(
        Suggestion(
            names[paths[row]], gain, int((owners == len(labelled) + place).sum()),
            None if doubts is None else float(doubts[row]),
        )
        for place, (row, gain) in enumerate(zip(order, gains, strict=True))
    )  # fmt: skip
    return Suggested(
        suggestions, covered_share(table, doubts, [*labelled, *order]), len(labelled),
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


def cover(
    vectors: Tensor, doubts: Tensor | None, *, count: int, chosen: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Up to `count` more rows of N, each adding most to what all chosen cover, and what it adds.

    vectors (N, K) unit length; doubts (N,) in [0, 1]; chosen: rows that are there already.
    """
    alike = resemblance(vectors)
    weights = _weights(doubts, len(vectors))
    covered = alike[list(chosen)].amax(0) if len(chosen) else torch.zeros(len(vectors))
    free = torch.ones(len(vectors), dtype=torch.bool)
    free[list(chosen)] = False
    order: list[int] = []
    gains: list[float] = []
    while len(order) < min(count, int(len(vectors) - len(chosen))):
        gain = (alike - covered).clamp_min(0) @ weights
        best = int(gain.masked_fill(~free, -1.0).argmax())
        order.append(best)
        gains.append(float(gain[best]))
        covered = torch.maximum(covered, alike[best])
        free[best] = False
    return order, gains


def covered_share(vectors: Tensor, doubts: Tensor | None, chosen: Sequence[int]) -> float:
    """In [0, 1]: how much of all photos, by their doubt, rows `chosen` cover."""
    if not len(chosen):
        return 0.0
    return float(resemblance(vectors)[list(chosen)].amax(0) @ _weights(doubts, len(vectors)))


def _weights(doubts: Tensor | None, count: int) -> Tensor:
    """(N,), adding up to 1."""
    raw = torch.ones(count) if doubts is None else LEAST_DOUBT + (1 - LEAST_DOUBT) * doubts
    return raw / raw.sum()


def _owners(vectors: Tensor, chosen: Sequence[int]) -> Tensor:
    """(N,): which of the chosen each photo resembles most."""
    return (vectors[list(chosen)] @ vectors.T).argmax(0)


def _doubts(
    paths: Sequence[Path], labelled: Sequence[int], model: DenseFeatures,
    known: KeypointSet | None, detector: KeypointDetector | None, *, quiet: bool,
) -> Tensor | None:  # fmt: skip
    """(N,) in [0, 1] of every photo's labels: 0 of labelled ones; None where nothing is known."""
    rest = [path for row, path in enumerate(paths) if row not in set(labelled)]
    if not rest or (detector is None and known is None):
        return None
    if detector is not None:
        kinds = [category.name for category in detector.categories]
        objects: Sequence[Labelled] = [
            item for kind in kinds for item in detector.predict(rest, category=kind)
        ]
    else:
        assert known is not None
        objects = transfer(known, rest, model, quiet=quiet).objects
    doubt = {str(path): 1.0 for path in rest}
    for item in objects:
        known_parts = item.points.isfinite().all(-1)
        if item.scores is not None and bool(known_parts.any()):
            # Of several objects or categories the surest speaks: the others may not be there.
            sure = float(item.scores[known_parts].mean())
            doubt[item.image.path] = min(doubt[item.image.path], 1 - sure)
    return torch.tensor([doubt.get(str(path), 0.0) for path in paths])

"""What a run's model knows of its own answers, without labels: the shipped fit, moved to it.

A head that learned alone reads the same layers as the shipped one. Whether two photos are related
is asked of those layers, so the shipped model's cohort and fit hold as they are. The signs of a
point read the head too: on photos of the run's own folder both heads match the same points, and the
fit is moved so that the new head's signs are distributed there as the shipped head's were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from surefeat.match.points import match_points
from surefeat.match.related import Agreement, Cells, point_signs
from surefeat.match.search import prepare
from surefeat.model.config import POINT_WEIGHTS, SHIPPED_TRUNKS
from surefeat.model.features import Features, compare_with
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort, Logistic, Reliability
from surefeat.model.weights import quantise, widen

PHOTOS = 24
"""Of the folder, at most: every one is matched with the next."""

POINTS = 40
"""Of each photo, chosen as `match_points` does."""

FEW = 4

WORDS = "fitted without labels: the shipped model's fit, moved by {} photos of the run's folder"


class Trust(NamedTuple):
    """What a model gets, or why it gets nothing."""

    reliability: Reliability | None
    cohort: Cohort | None
    words: str


def trust_without_labels(model: DenseFeatures, photos: Sequence[Tensor]) -> Trust:
    """For a model that learned from other photos of the same folder: (3, H, W) uint8 each."""
    name = SHIPPED_TRUNKS.get(model.config.trunk)
    if name is None:
        return _none(f"no model with {model.config.trunk} ships that has one")
    shipped = DenseFeatures.from_pretrained(name, device=model.device)
    known, cohort = shipped.reliability, shipped.cohort
    if known is None or cohort is None:
        return _none(f"the shipped {name} has none either")
    if reason := reason_against(model, shipped):
        return _none(reason)
    if len(photos) < FEW:
        return _none(f"it needs {FEW} photos that were not learned from, not {len(photos)}")
    photos = photos[:PHOTOS]
    before, now = signs_of_folder((shipped, model), photos, cohort, side=known.sides[0])
    words = WORDS.format(len(photos))
    fitted = replace(
        known, point=moved(known.point, before, now, words=words), weights_sha256="",
        without_labels=True, keypoints=None, transfer=None,
    )  # fmt: skip
    return Trust(fitted, cohort, words)


def _none(why: str) -> Trust:
    return Trust(None, None, f"no probability of matches: {why}")


def reason_against(model: DenseFeatures, shipped: DenseFeatures) -> str:
    """Why the shipped fit says nothing of this model; empty where it does."""
    if shipped.lower != model.lower or shipped.config.longest_side != model.config.longest_side:
        return "lower layers or input size are not the shipped model's"
    if not model.has_confidence:
        return "the model has no confidence"
    if not _same(model.trunk.state_dict(), shipped.trunk.state_dict()):
        return "layers below the head are not the shipped model's"
    return ""


def _same(own: dict[str, Tensor], shipped: dict[str, Tensor]) -> bool:
    """Whether two trunks are one, but for the rounding with which the shipped one is stored."""
    stored = [widen(quantise({k: v.cpu() for k, v in one.items()})) for one in (own, shipped)]
    return stored[0].keys() == stored[1].keys() and all(
        torch.allclose(value.float(), stored[1][name].float(), rtol=1e-3, atol=1e-5)
        for name, value in stored[0].items()
    )


@torch.no_grad()
def signs_of_folder(
    models: tuple[DenseFeatures, DenseFeatures], photos: Sequence[Tensor], cohort: Cohort, *,
    side: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """POINT_SIGNS (N,) by each model of the same points, which the first one chooses.

    Every photo is matched with the next. side: the longest of the network's input.
    """
    seen = [
        [compare_with(cohort, one) for one in model.extract(list(photos), longest_side=side)]
        for model in models
    ]
    rows: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]] = ([], [])
    for first in range(len(photos) - 1):
        places = match_points(*seen[0][first : first + 2], count=POINTS).points0
        for features, signs in zip(seen, rows, strict=True):
            signs.append(_signs(features[first], features[first + 1], places))
    before, now = ({name: torch.cat([row[name] for row in one]) for name in one[0]} for one in rows)
    return before, now


def _signs(features0: Features, features1: Features, places: Tensor) -> dict[str, Tensor]:
    weights = {"descriptor_weight": POINT_WEIGHTS[0], "lower_weight": POINT_WEIGHTS[1]}
    side0, side1 = (prepare(features, **weights) for features in (features0, features1))
    matches = match_points(features0, features1, places)
    tensors = {name: v for name, v in vars(matches).items() if isinstance(v, Tensor)}
    signs = point_signs(side0, side1, Agreement(Cells.of(side0), Cells.of(side1)), tensors)
    return {name: value.cpu() for name, value in signs.items()}


def moved(
    fitted: Logistic, before: dict[str, Tensor], now: dict[str, Tensor], *, words: str
) -> Logistic:
    """The same fit for signs that are distributed as `now` where they were as `before`."""
    mean, scale = [], []
    for name, middle, width in zip(fitted.signs, fitted.mean, fitted.scale, strict=True):
        old, new = before[name].double(), now[name].double()
        ratio = float(new.std() / old.std()) if float(old.std()) > 0 else 1.0
        ratio = min(max(ratio, 0.25), 4.0)
        mean.append(float(new.mean()) + (middle - float(old.mean())) * ratio)
        scale.append(width * ratio)
    return replace(fitted, mean=tuple(mean), scale=tuple(scale), fitted_on=words)

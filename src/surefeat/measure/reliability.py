"""Fitting the probability that a match is right on pairs with known answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefeat.core.ranking import fit_probability
from surefeat.match.points import Matches
from surefeat.model.probability import Reliability, signs


def fit_reliability(
    matches: Sequence[Matches],
    correct: Sequence[Tensor],
    *,
    voting: bool,
    right_within: float,
    fitted_on: str,
    weights_sha256: str = "",
    sides: Sequence[int] = (),
    ridge: float = 1e-4,
) -> Reliability:
    """Fit on the matches of many pairs; correct: per pair (N,) bool.

    The other arguments are recorded as provenance (see Reliability).
    """
    if len(matches) != len(correct) or any(
        len(found) != len(right) for found, right in zip(matches, correct, strict=False)
    ):
        raise ValueError("matches and correct must be as long as each other, pair by pair")
    if not matches:
        raise ValueError("no pairs to fit on; pass the matches of at least one")
    table = torch.cat([match_signs(found).double().cpu() for found in matches])
    # A sign that never varies (confidence, from a model without it) differs by rounding alone,
    # which standardising would blow up.
    mean, deviation = table.mean(0), table.std(0, correction=0)
    table = torch.where(deviation > 1e-5 * (1 + mean.abs()), table, mean)
    fitted = fit_probability(table, torch.cat([right.cpu() for right in correct]), ridge=ridge)
    return Reliability(
        weights=tuple(fitted.weights.tolist()),
        bias=fitted.bias,
        mean=tuple(fitted.mean.tolist()),
        scale=tuple(fitted.scale.tolist()),
        voting=voting,
        right_within=right_within,
        fitted_on=fitted_on,
        matches=len(table),
        weights_sha256=weights_sha256,
        sides=tuple(sides),
    )


def match_signs(matches: Matches) -> Tensor:
    """The signs (N, 4) of a pair's matches that `Reliability` reads."""
    relative = matches.round_trip / max(matches.size0)
    return signs(matches.score, matches.margin, relative, matches.confidence)

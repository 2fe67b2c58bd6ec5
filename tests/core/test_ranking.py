"""AUROC, risk and coverage, and calibration, against loops and cases done by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefeat.core.ranking import (
    aurc,
    auroc,
    expected_calibration_error,
)

ANSWERS = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=12)


def slow_auroc(scores: list[float], correct: list[bool]) -> float:
    """Every right answer against every wrong one; a tie is half a win."""
    right = [s for s, c in zip(scores, correct, strict=True) if c]
    wrong = [s for s, c in zip(scores, correct, strict=True) if not c]
    if not right or not wrong:
        return math.nan
    return sum((r > w) + 0.5 * (r == w) for r in right for w in wrong) / (len(right) * len(wrong))


@given(ANSWERS)
def test_auroc_equals_the_pairwise_count_with_ties(answers: list[tuple[int, bool]]) -> None:
    scores, correct = [float(s) for s, _ in answers], [c for _, c in answers]
    value = auroc(torch.tensor(scores), torch.tensor(correct))
    assert value == pytest.approx(slow_auroc(scores, correct), nan_ok=True)


def test_auroc_of_known_cases() -> None:
    correct = torch.tensor([True, True, False, False])
    assert auroc(torch.tensor([4.0, 3.0, 2.0, 1.0]), correct) == 1.0
    assert auroc(torch.tensor([1.0, 2.0, 3.0, 4.0]), correct) == 0.0
    assert auroc(torch.zeros(4), correct) == 0.5
    assert auroc(torch.tensor([4.0, 1.0, 3.0, 2.0]), correct) == 0.5
    assert math.isnan(auroc(torch.zeros(4), torch.ones(4, dtype=torch.bool)))


def test_auroc_is_exact_on_many_answers() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 500, (3000,), generator=generator).float()
    correct = torch.rand(3000, generator=generator) < scores / 500
    gap = scores[correct][:, None] - scores[~correct][None]
    expected = ((gap > 0).double() + 0.5 * (gap == 0).double()).mean()
    assert auroc(scores, correct) == pytest.approx(float(expected), abs=1e-12)


def test_risk_and_coverage_of_a_hand_computed_case() -> None:
    # By falling score: right, wrong, right, wrong.
    scores, correct = torch.tensor([0.9, 0.2, 0.8, 0.1]), torch.tensor([True, True, False, False])
    assert aurc(scores, correct) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_risk_with_ties_is_the_mean_over_their_orders(answers: list[tuple[int, bool]]) -> None:
    areas = []
    for order in itertools.permutations(answers):
        ranked = sorted(order, key=lambda answer: -answer[0])  # stable: ties keep this order
        wrong = np.cumsum([not c for _, c in ranked])
        areas.append(float((wrong / np.arange(1, len(ranked) + 1)).mean()))
    scores = torch.tensor([float(s) for s, _ in answers])
    correct = torch.tensor([c for _, c in answers])
    assert aurc(scores, correct) == pytest.approx(sum(areas) / len(areas))


def test_a_useless_score_has_the_overall_error_as_area() -> None:
    correct = torch.tensor([True, False, True, True])
    assert aurc(torch.zeros(4), correct) == pytest.approx(0.25)


def test_calibration_error_of_equally_filled_bins_agrees_with_numpy() -> None:
    generator = torch.Generator().manual_seed(4)
    predicted, actual = torch.rand(2, 103, generator=generator, dtype=torch.float64)
    order = np.argsort(predicted.numpy())
    bins = [order[chunk] for chunk in np.array_split(np.arange(103), 10)]
    expected = sum(
        len(b) / 103 * abs(predicted.numpy()[b].mean() - actual.numpy()[b].mean()) for b in bins
    )
    assert expected_calibration_error(predicted, actual) == pytest.approx(expected)
    assert expected_calibration_error(predicted, predicted) == 0.0


def test_ranking_says_what_is_wrong_with_its_input() -> None:
    some = torch.tensor([True, False])
    with pytest.raises(ValueError, match="NaN"):
        auroc(torch.tensor([0.1, math.nan]), some)
    with pytest.raises(ValueError, match=r"must both be \(N,\)"):
        aurc(torch.zeros(3), some)

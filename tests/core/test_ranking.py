"""AUROC, risk and coverage, calibration and the logistic fit, against loops and other solvers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from surefeat.core.ranking import (
    auroc,
    calibration,
    expected_calibration_error,
    fit_probability,
    risk_coverage,
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
    curve = risk_coverage(
        torch.tensor([0.9, 0.2, 0.8, 0.1]), torch.tensor([True, True, False, False])
    )
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert curve.area == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_risk_with_ties_is_the_mean_over_their_orders(answers: list[tuple[int, bool]]) -> None:
    areas = []
    for order in itertools.permutations(answers):
        ranked = sorted(order, key=lambda answer: -answer[0])  # stable: ties keep this order
        wrong = np.cumsum([not c for _, c in ranked])
        areas.append(float((wrong / np.arange(1, len(ranked) + 1)).mean()))
    curve = risk_coverage(
        torch.tensor([float(s) for s, _ in answers]), torch.tensor([c for _, c in answers])
    )
    assert curve.area == pytest.approx(sum(areas) / len(areas))


def test_a_useless_score_has_the_overall_error_as_area() -> None:
    correct = torch.tensor([True, False, True, True])
    assert risk_coverage(torch.zeros(4), correct).area == pytest.approx(0.25)


def test_calibration_of_a_hand_computed_case() -> None:
    probabilities = torch.tensor([0.1, 0.3, 0.6, 0.8, 1.0])
    correct = torch.tensor([False, True, True, True, True])
    result = calibration(probabilities, correct, bins=2)
    assert result.count.tolist() == [2, 3]
    assert result.predicted.tolist() == pytest.approx([0.2, 0.8])
    assert result.actual.tolist() == [0.5, 1.0]
    assert result.error == pytest.approx(0.4 * 0.3 + 0.6 * 0.2)


def test_calibration_leaves_empty_bins_out_of_the_error() -> None:
    result = calibration(torch.full((4,), 0.75), torch.tensor([True, True, True, False]), bins=10)
    assert result.error == pytest.approx(0.0)
    assert result.predicted.isnan().sum() == 9
    with pytest.raises(ValueError, match="fit_probability"):
        calibration(torch.tensor([1.2]), torch.tensor([True]))


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


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two features of very different scale, and answers right with a known probability."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    features = features * torch.tensor([1.0, 1000.0]) + torch.tensor([0.0, 5e4])
    chance = torch.sigmoid(1.5 * features[:, 0] - 0.002 * (features[:, 1] - 5e4) + 0.5)
    return features, torch.rand(count, generator=generator, dtype=torch.float64) < chance


def test_fit_probability_finds_the_optimum_a_general_solver_finds() -> None:
    features, correct = drawn(400, seed=0)
    fit = fit_probability(features, correct, ridge=1e-3)
    design = ((features - features.mean(0)) / features.std(0, correction=0)).numpy()
    sign = np.where(correct.numpy(), 1.0, -1.0)

    def objective(w: np.ndarray) -> float:
        margin = sign * (design @ w[:2] + w[2])
        return float(np.logaddexp(0, -margin).mean() + 1e-3 / 2 * (w[:2] ** 2).sum())

    best = minimize(objective, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
    assert [*fit.weights.tolist(), fit.bias] == pytest.approx(best.tolist(), abs=1e-5)


def test_fit_probability_is_calibrated_on_fresh_answers() -> None:
    fit = fit_probability(*drawn(4000, seed=1))
    features, correct = drawn(4000, seed=2)
    probabilities = fit.predict(features)
    assert calibration(probabilities, correct).error < 0.03
    assert calibration(1 - probabilities, correct).error > 0.2
    trained = fit.predict(drawn(4000, seed=1)[0]).mean()
    assert float(trained) == pytest.approx(float(drawn(4000, seed=1)[1].double().mean()), abs=1e-9)


def test_fit_probability_stays_finite_on_separable_and_constant_features() -> None:
    score = torch.cat([torch.linspace(-2, -1, 20), torch.linspace(1, 2, 20)])
    features = torch.stack([score, torch.full_like(score, 7.0)], dim=1)
    fit = fit_probability(features, score > 0)
    assert bool(fit.weights.isfinite().all())
    assert float(fit.weights[1]) == pytest.approx(0.0, abs=1e-9)
    probabilities = fit.predict(features)
    assert float(probabilities[:20].max()) < 0.1 < 0.9 < float(probabilities[20:].min())
    torch.testing.assert_close(fit_probability(score, score > 0).predict(score), probabilities)


def test_ranking_says_what_is_wrong_with_its_input() -> None:
    some = torch.tensor([True, False])
    with pytest.raises(ValueError, match="NaN"):
        auroc(torch.tensor([0.1, math.nan]), some)
    with pytest.raises(ValueError, match=r"must both be \(N,\)"):
        risk_coverage(torch.zeros(3), some)
    with pytest.raises(ValueError, match="right and wrong"):
        fit_probability(torch.zeros(2, 1), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="finite"):
        fit_probability(torch.tensor([[math.inf], [0.0]]), some)
    with pytest.raises(ValueError, match="fitted on 1 features, not 2"):
        fit_probability(torch.tensor([0.0, 1.0]), some).predict(torch.zeros(2, 2))

"""The fit of a logistic model: known answers, priors, signs that say nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefeat.core.ranking import expected_calibration_error
from surefeat.model.probability import Logistic, fit_logistic


def drawn(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Two standard signs, and answers right with a known probability."""
    generator = torch.Generator().manual_seed(seed)
    signs = {name: torch.randn(count, generator=generator) for name in ("a", "b")}
    chance = torch.sigmoid(1.5 * signs["a"] - 2 * signs["b"] + 0.5)
    return signs, torch.rand(count, generator=generator) < chance


def unscaled(fitted: Logistic) -> list[float]:
    """Weights of the signs as they are, and the bias at 0."""
    weights = [w / s for w, s in zip(fitted.weights, fitted.scale, strict=True)]
    return [*weights, fitted.bias - sum(w * m for w, m in zip(weights, fitted.mean, strict=True))]


def test_the_fit_finds_the_weights_and_is_calibrated_on_fresh_answers() -> None:
    fitted = fit_logistic(*drawn(4000, seed=1), fitted_on="drawn")
    assert unscaled(fitted) == pytest.approx([1.5, -2, 0.5], abs=0.15)
    signs, right = drawn(4000, seed=2)
    chance = fitted.log_odds(signs).sigmoid()
    assert expected_calibration_error(chance, right) < 0.03
    assert expected_calibration_error(1 - chance, right) > 0.2


def test_the_mean_probability_is_the_share_of_right_answers() -> None:
    signs, right = drawn(400, seed=3)
    chance = fit_logistic(signs, right, fitted_on="drawn").log_odds(signs).sigmoid()
    assert float(chance.mean()) == pytest.approx(float(right.float().mean()), abs=1e-5)
    weight = torch.where(right, 3.0, 1.0)
    fitted = fit_logistic(signs, right, fitted_on="drawn", weight=weight)
    share = float((weight * right).sum() / weight.sum())
    mean = float((weight * fitted.log_odds(signs).sigmoid()).sum() / weight.sum())
    assert mean == pytest.approx(share, abs=1e-5)


def test_the_fit_stays_finite_on_separable_and_constant_signs() -> None:
    score = torch.cat([torch.linspace(-2, -1, 20), torch.linspace(1, 2, 20)])
    signs = {"score": score, "constant": torch.full((40,), 3.0)}
    fitted = fit_logistic(signs, score > 0, fitted_on="drawn")
    assert fitted.weights[1] == 0
    chance = fitted.log_odds(signs).sigmoid()
    assert float(chance[:20].max()) < 0.1 < 0.9 < float(chance[20:].min())
    with pytest.raises(ValueError, match="right ones and wrong ones"):
        fit_logistic(signs, torch.ones(40, dtype=torch.bool), fitted_on="drawn")


def test_few_answers_correct_a_prior_and_many_replace_it() -> None:
    prior = Logistic(("a", "b"), (-1.0, 1.0), 0.0, (0.0, 0.0), (1.0, 1.0), "another", 9)
    signs, right = drawn(6000, seed=4)
    free = fit_logistic(signs, right, fitted_on="drawn")
    few = {name: value[:12] for name, value in signs.items()}
    kept = fit_logistic(few, right[:12], fitted_on="drawn", prior=prior, strength=1000.0)
    assert unscaled(kept) == pytest.approx(unscaled(prior), abs=0.1)
    many = fit_logistic(signs, right, fitted_on="drawn", prior=prior, strength=4.0)
    assert unscaled(many) == pytest.approx(unscaled(free), abs=0.3)
    assert abs(unscaled(many)[0] - prior.weights[0]) > 1.5


def test_shares_are_fitted_as_their_mean() -> None:
    signs = {"a": torch.tensor([0.0, 0.0, 1.0, 1.0])}
    fitted = fit_logistic(signs, torch.tensor([0.1, 0.3, 0.5, 0.7]), fitted_on="shares")
    mean = fitted.log_odds(signs).sigmoid()
    assert mean.tolist() == pytest.approx([0.2, 0.2, 0.6, 0.6], abs=1e-3)


def test_the_fit_arrives_also_from_a_prior_that_is_sure_of_the_opposite() -> None:
    """Where the loss hardly bends a whole step leads far beyond the minimum."""
    signs, right = drawn(300, seed=5)
    prior = Logistic(("a", "b"), (-9.0, 9.0), 0.0, (0.0, 0.0), (1.0, 1.0), "another", 9)
    fitted = fit_logistic(signs, right, fitted_on="drawn", prior=prior, ridge=1e-3)
    mild = fit_logistic(signs, right, fitted_on="drawn", ridge=1e-3)
    assert unscaled(fitted) == pytest.approx(unscaled(mild), abs=0.25)

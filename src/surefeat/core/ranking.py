"""Does a score tell right matches from wrong ones, and can it be read as a probability?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The share of wrong answers among the best-scored part, for every size of that part."""

    coverage: Tensor
    """(N,) 1/N, 2/N, ..., 1."""
    risk: Tensor
    """(N,) share of wrong answers among the answered."""
    area: float
    """AURC: mean risk over coverages; lower is better, the overall error for a useless score."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Reliability of probabilities in bins of equal width over [0, 1]."""

    predicted: Tensor
    """(B,) mean probability in each bin; NaN where a bin is empty."""
    actual: Tensor
    """(B,) share of right answers in each bin; NaN where a bin is empty."""
    count: Tensor
    """(B,)"""
    error: float
    """Expected calibration error: mean |predicted - actual|, weighted by count."""


@dataclass(frozen=True, eq=False)
class Logistic:
    """p(right) = sigmoid(weights . (features - mean) / scale + bias)."""

    weights: Tensor
    """(F,) float64"""
    bias: float
    mean: Tensor
    """(F,) of the training features."""
    scale: Tensor
    """(F,) their standard deviation; 1 where they do not vary."""

    def predict(self, features: Tensor) -> Tensor:
        """Features (N, F) or, with a single feature, (N,) -> probabilities (N,), float64."""
        table = _table(features)
        if table.shape[1] != len(self.weights):
            raise ValueError(f"fitted on {len(self.weights)} features, not {table.shape[1]}")
        return torch.sigmoid((table - self.mean) / self.scale @ self.weights + self.bias)


def auroc(scores: Tensor, correct: Tensor) -> float:
    """Chance that a right answer outscores a wrong one, ties counting half. (N,) and (N,) bool.

    0.5 is useless, 1 perfect, NaN undefined: all answers are right, or all wrong.
    """
    scores, correct = _checked(scores, correct)
    positive = int(correct.sum())
    negative = len(correct) - positive
    if positive == 0 or negative == 0:
        return float("nan")
    # Mann-Whitney: the sum of the right ones' ranks, tied scores sharing their mean rank.
    block, count = _ties(scores)
    mean_rank = count.cumsum(0).double() - (count.double() - 1) / 2
    rank_sum = mean_rank[block][correct].sum()
    return float((rank_sum - positive * (positive + 1) / 2) / (positive * negative))


def risk_coverage(scores: Tensor, correct: Tensor) -> RiskCoverage:
    """Risk at every coverage, answers with the highest score (N,) first.

    Tied scores count as if in random order, by expectation, so the result does not depend on how
    the answers happen to be listed.
    """
    scores, correct = _checked(scores, correct)
    block, count = _ties(-scores)
    wrong = torch.zeros(len(count), dtype=torch.float64, device=scores.device)
    wrong.index_add_(0, block, (~correct).double())
    in_order = (wrong / count).repeat_interleave(count)
    answered = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    risk = in_order.cumsum(0) / answered
    return RiskCoverage(coverage=answered / len(scores), risk=risk, area=float(risk.mean()))


def calibration(probabilities: Tensor, correct: Tensor, *, bins: int = 15) -> Calibration:
    """Reliability curve and expected calibration error of probabilities (N,) in [0, 1].

    Bin b holds [b/bins, (b+1)/bins), the last one 1 too.
    """
    probabilities, correct = _checked(probabilities, correct)
    if bool(((probabilities < 0) | (probabilities > 1)).any()):
        raise ValueError(
            "probabilities must lie in [0, 1]; turn scores into them by fit_probability"
        )
    index = (probabilities * bins).long().clamp_max(bins - 1)
    count = torch.bincount(index, minlength=bins)
    predicted = torch.bincount(index, weights=probabilities, minlength=bins) / count
    actual = torch.bincount(index, weights=correct.double(), minlength=bins) / count
    gap = ((predicted - actual).abs() * count).nansum() / len(probabilities)
    return Calibration(predicted=predicted, actual=actual, count=count, error=float(gap))


def expected_calibration_error(predicted: Tensor, actual: Tensor, *, bins: int = 10) -> float:
    """Mean |predicted - actual| over bins of equal filling, for any predicted quantity (N,).

    Bins run by rising prediction and weigh by their count; `actual` (N,) may be real numbers.
    """
    if predicted.dim() != 1 or predicted.shape != actual.shape or not len(predicted):
        raise ValueError(f"{tuple(predicted.shape)} and {tuple(actual.shape)} must both be (N,)")
    order = predicted.argsort(stable=True)
    gaps = (predicted.double() - actual.double())[order].tensor_split(bins)
    return float(torch.stack([gap.sum().abs() for gap in gaps]).sum() / len(predicted))


def fit_probability(
    features: Tensor, correct: Tensor, *, ridge: float = 1e-4, steps: int = 100
) -> Logistic:
    """Logistic regression of `correct` (N,) bool on features (N, F), by Newton's method.

    Minimises the mean log loss + ridge/2 |weights|^2 on standardised features; the ridge keeps
    the weights finite where the features separate right from wrong exactly. The bias is free, so
    the mean probability equals the share of right answers.
    """
    table, correct = _table(features), correct.bool()
    if correct.shape != table.shape[:1]:
        raise ValueError(f"{tuple(correct.shape)} answers for {len(table)} rows of features")
    if bool(correct.all()) or not bool(correct.any()):
        raise ValueError("a probability needs right and wrong answers to be fitted on")
    if ridge <= 0:
        raise ValueError(f"the ridge must be above 0, not {ridge}: separable data has no optimum")
    mean, scale = table.mean(0), table.std(0, correction=0)
    scale = torch.where(scale > 1e-12 * (1 + mean.abs()), scale, torch.ones_like(scale))
    design = torch.cat([(table - mean) / scale, torch.ones_like(table[:, :1])], dim=1)
    weights = _newton(design, correct.double(), ridge, steps)
    return Logistic(weights=weights[:-1], bias=float(weights[-1]), mean=mean, scale=scale)


def _newton(design: Tensor, target: Tensor, ridge: float, steps: int) -> Tensor:
    """The minimiser (F+1,) of mean log loss + ridge; the last column is the unpenalised bias."""
    penalty = torch.full_like(design[0], ridge)
    penalty[-1] = 0

    def objective(weights: Tensor) -> float:
        loss = F.binary_cross_entropy_with_logits(design @ weights, target)
        return float(loss + (penalty * weights.square()).sum() / 2)

    weights = torch.zeros_like(design[0])
    current = objective(weights)
    for _ in range(steps):
        chance = torch.sigmoid(design @ weights)
        gradient = design.T @ (chance - target) / len(target) + penalty * weights
        if float(gradient.abs().max()) < 1e-12:
            break
        curvature = (design * (chance * (1 - chance))[:, None]).T @ design / len(target)
        step = torch.linalg.solve(curvature + torch.diag(penalty), gradient)
        # A full step can overshoot where the sigmoid is flat: halve it until it helps.
        size = 1.0
        while (proposed := objective(weights - size * step)) > current and size > 1e-10:
            size /= 2
        if proposed > current:
            break
        weights, current = weights - size * step, proposed
    return weights


def _ties(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (N,) -> each one's block of equal scores (N,), rising, and the blocks' sizes (B,)."""
    ordered, order = scores.sort()
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    number = new.long().cumsum(0) - 1
    return torch.empty_like(number).scatter_(0, order, number), torch.bincount(number)


def _table(features: Tensor) -> Tensor:
    table = features.detach().double()
    table = table[:, None] if table.dim() == 1 else table
    if table.dim() != 2 or not bool(table.isfinite().all()):
        raise ValueError("features must be finite numbers of shape (N, F)")
    return table


def _checked(scores: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    scores, correct = scores.detach().double(), correct.bool()
    if scores.dim() != 1 or scores.shape != correct.shape or not len(scores):
        raise ValueError(
            f"scores {tuple(scores.shape)} and correct {tuple(correct.shape)} must both be (N,)"
        )
    if bool(scores.isnan().any()):
        raise ValueError("a score is NaN and has no rank; leave such answers out or score them")
    return scores, correct

"""Does a score tell right matches from wrong ones, and can it be read as a probability?"""

from __future__ import annotations

import torch
from torch import Tensor


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


def aurc(scores: Tensor, correct: Tensor) -> float:
    """Share of wrong answers among the 1, 2, ..., N best-scored, on average. (N,) and (N,) bool.

    Lower is better, the overall error for a useless score. Tied scores count as if in random
    order, by expectation, however the answers happen to be listed.
    """
    scores, correct = _checked(scores, correct)
    block, count = _ties(-scores)
    wrong = torch.zeros(len(count), dtype=torch.float64, device=scores.device)
    wrong.index_add_(0, block, (~correct).double())
    in_order = (wrong / count).repeat_interleave(count)
    answered = torch.arange(1, len(scores) + 1, device=scores.device)
    return float((in_order.cumsum(0) / answered).mean())


_BINS = 10


def expected_calibration_error(predicted: Tensor, actual: Tensor) -> float:
    """Mean |predicted - actual| over ten bins of equal filling, for any predicted quantity (N,).

    Bins run by rising prediction and weigh by their count; `actual` (N,) may be real numbers.
    """
    if predicted.dim() != 1 or predicted.shape != actual.shape or not len(predicted):
        raise ValueError(f"{tuple(predicted.shape)} and {tuple(actual.shape)} must both be (N,)")
    order = predicted.argsort(stable=True)
    gaps = (predicted.double() - actual.double())[order].tensor_split(_BINS)
    return float(torch.stack([gap.sum().abs() for gap in gaps]).sum() / len(predicted))


def _ties(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (N,) -> each one's block of equal scores (N,), rising, and the blocks' sizes (B,)."""
    ordered, order = scores.sort()
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    number = new.long().cumsum(0) - 1
    return torch.empty_like(number).scatter_(0, order, number), torch.bincount(number)


def _checked(scores: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    scores, correct = scores.detach().double(), correct.bool()
    if scores.dim() != 1 or scores.shape != correct.shape or not len(scores):
        shapes = f"scores {tuple(scores.shape)} and correct {tuple(correct.shape)}"
        raise ValueError(f"{shapes} must both be (N,)")
    if bool(scores.isnan().any()):
        raise ValueError("a score is NaN and has no rank; leave such answers out or score them")
    return scores, correct

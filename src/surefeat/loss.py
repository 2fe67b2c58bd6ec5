"""Labels from the warp, the paper's three pair losses, hard negatives and their balance.

Shapes: B image pairs, N points in each view, so N x N point pairs; descriptors (B, N, C) are unit
length, uncertainties sigma (B, N) positive, points (B, N, 2) pixels of view 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.config import LossConfig

# Below this 1/sigma the closed form of the log-normaliser loses digits and its series takes over.
_SERIES = 1e-3


def log_normaliser(inverse_sigma: Tensor) -> Tensor:
    """log((1 - exp(-b)) / b) for b = 1/sigma > 0, any shape; stable from b = 1e-6 to 1e6.

    It is log C(sigma) - 1/sigma with the paper's C(sigma) = sigma (exp(1/sigma) - 1).
    """
    small = inverse_sigma < _SERIES
    # Both branches must stay finite for the gradient of torch.where.
    b = torch.where(small, torch.ones_like(inverse_sigma), inverse_sigma)
    series = torch.where(small, inverse_sigma, torch.zeros_like(inverse_sigma))
    exact = torch.log(-torch.expm1(-b) / b)
    return torch.where(small, -series / 2 + series.square() / 24, exact)


def negative_log_density(loss: Tensor, sigma: Tensor) -> Tensor:
    """-log p(s | y, sigma) from the matching loss l in [0, 1] (paper, eq. 4), in float32 or better."""
    inverse = sigma.reciprocal()
    return loss * inverse + log_normaliser(inverse)


def mean_predicted_loss(sigma: Tensor) -> Tensor:
    """The matching loss that sigma predicts: m = sigma - 1/(exp(1/sigma) - 1), in (0, 1/2)."""
    b = sigma.reciprocal()
    safe = b.clamp_min(1e-2)
    return torch.where(b < 1e-2, 0.5 - b / 12, safe.reciprocal() - torch.expm1(safe).reciprocal())


def labels(points0_in_1: Tensor, points1: Tensor, config: LossConfig) -> Tensor:
    """g(u) (B, N, 2) and u' (B, M, 2), both in view 1 -> (B, N, M) int8: +1, 0 (ignored) or -1."""
    square = (points0_in_1[:, :, None] - points1[:, None]).square().sum(-1)
    far = torch.where(square > config.ignore_radius**2, -1, 0)
    return torch.where(square <= config.match_radius**2, 1, far).to(torch.int8)


@dataclass(frozen=True)
class PairLoss:
    """The loss of a batch and what the log shows of it, all on the device."""

    total: Tensor
    """Scalar: mean(positives)/2 + mean(negatives)/2, averaged over images."""
    positive_score: Tensor
    """Mean score of matches, in [0, 1]."""
    negative_score: Tensor
    """Mean score of the mined non-matches, in [0, 1]."""
    dead_positives: Tensor
    """Share of matches with negative inner product: they get no gradient through max(0, .)."""


def pair_loss(
    descriptors0: Tensor,
    descriptors1: Tensor,
    sigma0: Tensor,
    sigma1: Tensor,
    points1: Tensor,
    config: LossConfig,
    *,
    hold_sigma: bool | Tensor = False,
    valid: Tensor | None = None,
) -> PairLoss:
    """All N x N pairs of one batch (paper, section 3.4): points1 are the g(u_i) of the anchors u_i.

    hold_sigma: score with sigma = 1 (the warm-up); a bool tensor avoids recompilation.
    valid: (B,) images that count; None = all.
    """
    inner = torch.bmm(descriptors0, descriptors1.transpose(1, 2)).float()
    kind = labels(points1, points1, config)
    if config.kind == "probabilistic":
        sigma = (sigma0[:, :, None] + sigma1[:, None]).float() / 2
        sigma = torch.where(torch.as_tensor(hold_sigma, device=sigma.device), 1.0, sigma)
        inverse = sigma.reciprocal()
        offset = log_normaliser(inverse)
    score = inner.clamp_min(0)

    def cost(score: Tensor, inner: Tensor, match: bool) -> Tensor:
        if config.kind == "contrastive":
            return _contrastive(inner, match=match, margin=config.margin)
        loss = 1 - score if match else score
        return loss * inverse + offset if config.kind == "probabilistic" else loss

    positive = kind == 1
    with torch.no_grad():
        hardness = cost(score, inner, False).masked_fill(kind != -1, -torch.inf)
        hardest, index = hardness.topk(min(config.negatives, hardness.shape[-1]), dim=-1, sorted=False)
        mined = hardest > -torch.inf
    weight = torch.ones_like(inner[:, 0, 0]) if valid is None else valid.float()
    negative_cost = cost(score, inner, False).gather(-1, index)
    images = (
        _mean_where(cost(score, inner, True), positive) + _mean_where(negative_cost, mined)
    ) / 2
    with torch.no_grad():
        alive = weight / weight.sum().clamp_min(1)
        stats = (
            (_mean_where(score, positive) * alive).sum(),
            (_mean_where(score.gather(-1, index), mined) * alive).sum(),
            (_mean_where((inner < 0).float(), positive) * alive).sum(),
        )
    # Every image weighs 1/B, so that the mean over processes is the mean over the global batch.
    return PairLoss((images * weight).mean(), *stats)


def _contrastive(inner: Tensor, *, match: bool, margin: float) -> Tensor:
    """UCN's loss (Choy et al. 2016) on unit descriptors, where d^2 = 2 - 2 <., .>."""
    square = (2 - 2 * inner).clamp_min(0)
    if match:
        return square / 2
    # The floor keeps the root's gradient finite where two descriptors coincide.
    return (margin - square.clamp_min(1e-8).sqrt()).clamp_min(0).square() / 2


def _mean_where(values: Tensor, mask: Tensor) -> Tensor:
    """(B, N, M) and its mask -> (B,) means over the masked pairs, 0 where there are none."""
    count = mask.sum((1, 2)).clamp_min(1)
    return torch.where(mask, values, 0).sum((1, 2)) / count

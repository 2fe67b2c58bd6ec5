"""The paper's step: two views and their points, labels, three pair losses, hard negatives.

Shapes: B image pairs, N points in each view, so N x N point pairs; descriptors (B, N, C) are unit
length, uncertainties sigma (B, N) positive, points (B, N, 2) pixels of view 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.learn.config import Config, LossConfig, TrainConfig
from surefeat.learn.warp import Draws, corresponding_points, draw, two_views
from surefeat.model.network import DenseFeatures, Maps
from surefeat.model.probability import negative_log_density

Step = Callable[[Tensor, Tensor, Draws, Tensor], tuple["PairLoss", Tensor]]
"""Pixels, sizes, draws and whether sigma is held -> loss, and sigma at the points (B, 2N)."""


def make_step(network: Callable[[Tensor], Maps], config: Config, device: torch.device) -> Step:
    """One batch, as in the paper, as a function; compiled where wanted."""

    def step(pixels: Tensor, sizes: Tensor, draws: Draws, hold: Tensor) -> tuple[PairLoss, Tensor]:
        views = two_views(pixels, sizes, draws, config.warp, config.colour)
        points0, points1, valid = corresponding_points(views, draws, count=config.loss.points)
        both = torch.cat([views.view0, views.view1])
        if both.device.type == "cuda":
            both = both.contiguous(memory_format=torch.channels_last)
        amp = config.train.amp and both.device.type != "cpu"
        with torch.autocast(both.device.type, torch.bfloat16, enabled=amp):
            maps = network(both)
        return loss_of_maps(maps, (points0, points1, valid), config.loss, hold)

    if not compiles(config.train, device):
        return step
    # CUDA graphs take the host out of the loop, but not across processes' reductions.
    alone = isinstance(network, DenseFeatures)
    return torch.compile(step, dynamic=False, mode="reduce-overhead" if alone else "default")


def loss_of_maps(
    maps: Maps, points: tuple[Tensor, Tensor, Tensor], config: LossConfig, hold: Tensor
) -> tuple[PairLoss, Tensor]:
    """Maps of all first views, then of all second ones; points as of `corresponding_points`."""
    points0, points1, valid = points
    descriptors, sigma = maps.at(torch.cat([points0, points1]))
    (first, second), (sigma0, sigma1) = descriptors.chunk(2), sigma.chunk(2)
    loss = pair_loss(first, second, sigma0, sigma1, points1, config, hold_sigma=hold, valid=valid)
    return loss, torch.cat([sigma0, sigma1], dim=1)


def held_steps(config: Config) -> int:
    """Steps during which sigma is held: of a short training at most three fifths."""
    return min(config.loss.sigma_warmup, config.train.steps * 3 // 5)


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Whether compiling is wanted, or will have paid for itself by the last step."""
    if config.compile == "auto":
        enough = 1000 if config.trained == "all" else 3000
        return device.type == "cuda" and config.steps >= enough
    return config.compile == "on"


def step_draws(step: int, config: Config, device: torch.device) -> Draws:
    """All random numbers of a step, for the global batch."""
    generator = torch.Generator(device=device)
    generator.manual_seed((config.train.seed * 1_000_003 + step * 7 + 1) % 2**63)
    return draw(config.train.batch, points=config.loss.points, generator=generator)


def labels(points0_in_1: Tensor, points1: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """g(u) (B, N, 2) and u' (B, M, 2), both in view 1 -> masks (B, N, M) of y = +1 and y = -1."""
    square = (points0_in_1[:, :, None] - points1[:, None]).square().sum(-1)
    return square <= config.match_radius**2, square > config.ignore_radius**2


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
    if config.kind == "probabilistic":
        hold = torch.as_tensor(hold_sigma, device=inner.device)
        sigma0 = torch.where(hold, 1.0, sigma0.float())
        sigma1 = torch.where(hold, 1.0, sigma1.float())
    counts = torch.ones_like(inner[:, 0, 0], dtype=torch.bool) if valid is None else valid
    mined = mine(inner.detach(), sigma0.detach(), sigma1.detach(), points1, counts, config)
    # Only what is mined is scored with gradients.
    far = inner.gather(-1, mined.far)
    far_sigma1 = sigma1.gather(1, mined.far.flatten(1)).view_as(mined.far)
    far_sigma = (sigma0[:, :, None] + far_sigma1) / 2
    near = inner.flatten().gather(0, mined.near)
    anchor, image = mined.near // inner.shape[2], mined.near // inner[0].numel()
    other = image * inner.shape[2] + mined.near % inner.shape[2]
    near_sigma = (sigma0.flatten().gather(0, anchor) + sigma1.flatten().gather(0, other)) / 2
    far_cost = pair_cost(far, far_sigma, match=False, config=config) * mined.far_share
    near_cost = pair_cost(near, near_sigma, match=True, config=config) * mined.near_share
    with torch.no_grad():
        images = counts.sum().clamp_min(1)
        stats = (
            (near.clamp_min(0) * mined.near_share).sum() / images,
            (far.clamp_min(0) * mined.far_share).sum() / images,
            ((near < 0) * mined.near_share).sum() / images,
        )
    return PairLoss((near_cost.sum() + far_cost.sum()) / (2 * len(inner)), *stats)


# Matches per anchor that an image has slots for: two by chance beside its own are ample.
_SLOTS = 3


@dataclass(frozen=True)
class Mined:
    """The pairs of a batch that are learned from, and how much each of them counts.

    Both shares add up to 1 over an image that counts, so that every image weighs the same and the
    mean over processes is the mean over the global batch.
    """

    far: Tensor
    """(B, N, K): the hardest non-matches of each anchor, which of the M."""
    far_share: Tensor
    """(B, N, K): 0 where an anchor has fewer."""
    near: Tensor
    """(S,): matches, as places in the flat (B, N, M)."""
    near_share: Tensor
    """(S,): 0 in the slots that are left over."""


@torch.no_grad()
def mine(
    inner: Tensor,
    sigma0: Tensor,
    sigma1: Tensor,
    points1: Tensor,
    valid: Tensor,
    config: LossConfig,
) -> Mined:
    """All matches, and per anchor the non-matches that cost most; of images (B,) that are valid."""
    positive, negative = labels(points1, points1, config)
    # Where views hardly overlap the points are nearly one, and their N x N matches would fill the
    # slots of all images: of such an image each anchor has its own match alone.
    own = torch.eye(positive.shape[1], dtype=torch.bool, device=positive.device)
    crowded = positive.sum((1, 2)) > _SLOTS * positive.shape[1]
    positive = torch.where(crowded[:, None, None], own, positive) & valid[:, None, None]
    pair_sigma = (sigma0[:, :, None] + sigma1[:, None]) / 2
    hardness = pair_cost(inner, pair_sigma, match=False, config=config)
    hardness = hardness.masked_fill(~negative, -torch.inf)
    # Half precision is enough to rank by, and halves the passes of the selection.
    keys = hardness.half() if hardness.is_cuda else hardness
    hardest, far = keys.topk(min(config.negatives, keys.shape[-1]), dim=-1, sorted=False)
    real_far = (hardest > -torch.inf).float()
    # A fixed size spares the host a wait. The unused slots name distinct pairs, so that no place
    # gathers all their (zero) gradients.
    slots = _SLOTS * positive[..., 0].numel()
    near = torch.nonzero_static(positive.flatten(), size=slots)[:, 0]
    real_near = (near >= 0).float()
    near = torch.where(near >= 0, near, torch.arange(slots, device=near.device) % inner.numel())
    weight = valid.float()
    far_share = real_far * (weight / real_far.sum((1, 2)).clamp_min(1))[:, None, None]
    per_match = weight / positive.sum((1, 2)).clamp_min(1)
    return Mined(far, far_share, near, real_near * per_match.gather(0, near // inner[0].numel()))


def pair_cost(inner: Tensor, sigma: Tensor, *, match: bool, config: LossConfig) -> Tensor:
    """What each pair costs, from its inner product and mean uncertainty, same shapes."""
    if config.kind == "contrastive":
        # UCN's loss (Choy et al. 2016) on unit descriptors, where d^2 = 2 - 2 <., .>. The floor
        # keeps the root's gradient finite where two descriptors coincide.
        square = (2 - 2 * inner).clamp_min(0)
        apart = (config.margin - square.clamp_min(1e-8).sqrt()).clamp_min(0).square()
        return (square if match else apart) / 2
    score = inner.clamp_min(0)
    loss = 1 - score if match else score
    return negative_log_density(loss, sigma) if config.kind == "probabilistic" else loss


# Sigma's 10th percentile above this: not even the most confident tenth claims to know anything.
# Where matches outscore the mined non-matches by d, the best sigma is about 1 / (6 d); so it stays
# there only while d < 0.02, and comes down again by itself once the descriptors separate.
COLLAPSED_SIGMA = 8.0


def reason_to_stop(step: int, line: dict[str, float], config: LossConfig) -> str | None:
    """What to say where sigma is on its way to infinity, with nothing to bring it back.

    line: of the log; sigma's 10th percentile, and mean scores of matches and mined non-matches.
    """
    sigma, gap = line["sigma_p10"], line["positive"] - line["negative"]
    learned = config.kind == "probabilistic" and step > config.sigma_warmup
    if not learned or sigma <= COLLAPSED_SIGMA or gap >= 1 / (6 * COLLAPSED_SIGMA):
        return None
    return (
        f"confidence collapsed: sigma is above {sigma:.1f} at 90 % of points, which makes every "
        "match cost nothing. Raise --loss.sigma-warmup, start from trained weights (--init), or "
        "soften the warps"
    )

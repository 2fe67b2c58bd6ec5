"""The probabilistic loss against quadrature, scipy and hand-computed cases (method, section 1)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize
from torch import Tensor

from surefeat.learn.config import LossConfig
from surefeat.learn.loss import labels, mine, pair_cost, pair_loss
from surefeat.model.probability import log_normaliser, mean_predicted_loss, negative_log_density

# Optimal sigma and its cost for a constant matching loss l: solved by hand from d/db = l - m(b).
OPTIMA = {
    0.01: (0.0100, -3.605),
    0.05: (0.0500, -1.996),
    0.10: (0.1000, -1.303),
    0.20: (0.2083, -0.617),
    0.30: (0.3742, -0.253),
    0.40: (0.8131, -0.061),
    0.45: (1.657, -0.015),
}


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.5, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("match", [True, False])
def test_density_integrates_to_one(sigma: float, match: bool) -> None:
    def density(score: float) -> float:
        loss = torch.tensor(1 - score if match else score, dtype=torch.float64)
        return math.exp(-negative_log_density(loss, torch.tensor(sigma, dtype=torch.float64)))

    total, _ = integrate.quad(density, 0, 1, points=[0.0, 1.0], limit=200)
    assert total == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 10.0, 20.0, 300.0])
def test_normaliser_equals_quadrature_and_closed_form(sigma: float) -> None:
    quadrature, _ = integrate.quad(lambda s: math.exp(s / sigma), 0, 1)
    assert sigma * math.expm1(1 / sigma) == pytest.approx(quadrature, rel=1e-9)
    ours = log_normaliser(torch.tensor(1 / sigma, dtype=torch.float64)).item() + 1 / sigma
    assert ours == pytest.approx(math.log(quadrature), rel=1e-9)


@pytest.mark.parametrize(("loss", "optimum"), OPTIMA.items())
def test_optimal_sigma_is_the_tabulated_one(loss: float, optimum: tuple[float, float]) -> None:
    def cost(log_sigma: float) -> float:
        sigma = torch.tensor(math.exp(log_sigma), dtype=torch.float64)
        return negative_log_density(torch.tensor(loss, dtype=torch.float64), sigma).item()

    found = optimize.minimize_scalar(cost, bounds=(-6, 3), method="bounded",
                                     options={"xatol": 1e-8})  # fmt: skip
    assert math.exp(found.x) == pytest.approx(optimum[0], rel=2e-3)
    assert found.fun == pytest.approx(optimum[1], abs=1e-3)


@pytest.mark.parametrize("loss", [0.5, 0.7, 1.0])
def test_hopeless_matches_want_infinite_sigma_at_no_cost(loss: float) -> None:
    sigma = torch.logspace(-2, 6, 200, dtype=torch.float64)
    cost = negative_log_density(torch.full_like(sigma, loss), sigma)
    assert (cost.diff() <= 0).all()
    assert cost[-1].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [1e-6, 1e-3, 0.011, 1.0, 1e4, 1e6])
def test_extreme_sigma_gives_finite_loss_and_gradient(sigma: float, dtype: torch.dtype) -> None:
    value = torch.tensor(sigma, dtype=dtype, requires_grad=True)
    cost = negative_log_density(torch.tensor(0.3, dtype=dtype), value)
    cost.backward()
    assert torch.isfinite(cost)
    assert value.grad is not None
    assert torch.isfinite(value.grad)
    exact = 0.3 / sigma + _exact_log_normaliser(1 / sigma)
    assert cost.item() == pytest.approx(exact, rel=1e-5, abs=1e-6)


def _exact_log_normaliser(b: float) -> float:
    from mpmath import expm1, log, mp, mpf

    mp.dps = 50
    return float(log(-expm1(-mpf(b)) / mpf(b)))


@given(st.floats(0, 1), st.floats(0.02, 100))
def test_gradient_of_the_density_is_right(loss: float, sigma: float) -> None:
    inputs = (
        torch.tensor(loss, dtype=torch.float64, requires_grad=True),
        torch.tensor(sigma, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(negative_log_density, inputs, eps=1e-7, atol=1e-4, rtol=1e-3)


def test_predicted_loss_is_the_mean_of_the_density() -> None:
    for sigma in (0.05, 0.5, 2.0, 300.0):
        mean, _ = integrate.quad(
            lambda s, sigma=sigma: (1 - s) * math.exp(s / sigma - 1 / sigma), 0, 1
        )
        norm = -sigma * math.expm1(-1 / sigma)
        predicted = mean_predicted_loss(torch.tensor(sigma, dtype=torch.float64)).item()
        assert predicted == pytest.approx(mean / norm, rel=1e-4)


def test_labels_follow_the_two_radii() -> None:
    moved = torch.tensor([[[10.0, 10.0]]])
    others = torch.tensor([[[10.0, 11.0], [10.8, 10.8], [40.0, 10.0], [40.1, 10.0]]])
    match, non_match = labels(moved, others, LossConfig(match_radius=1, ignore_radius=30))
    assert match.tolist() == [[[True, False, False, False]]]
    assert non_match.tolist() == [[[False, False, False, True]]]


def test_radii_are_distances_not_their_squares() -> None:
    moved, others = torch.zeros(1, 1, 2), torch.tensor([[[1.9, 0.0], [2.1, 0.0], [4.1, 0.0]]])
    match, non_match = labels(moved, others, LossConfig(match_radius=2, ignore_radius=4))
    assert match.tolist() == [[[True, False, False]]]
    assert non_match.tolist() == [[[False, False, True]]]


def _random_batch(seed: int, *, batch: int = 2, count: int = 12, channels: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> Tensor:
        draws = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(draws, dim=-1)

    sigma0, sigma1 = (0.05 + torch.rand(batch, count, generator=generator) for _ in range(2))
    points = torch.rand(batch, count, 2, generator=generator) * 100
    points[:, 1] = points[:, 0] + 0.5  # a second positive besides the diagonal
    return [unit(batch, count, channels), unit(batch, count, channels), sigma0, sigma1, points]


def _slow_pair_loss(batch: list[Tensor], config: LossConfig, *, hold: bool = False) -> float:
    """One pair at a time, in plain Python."""
    first, second, sigma0, sigma1, points = (t.tolist() for t in batch)
    total = 0.0
    for image in range(len(first)):
        positives, negatives = [], []
        for i, d0 in enumerate(first[image]):
            candidates = []
            for j, d1 in enumerate(second[image]):
                inner = sum(x * y for x, y in zip(d0, d1, strict=True))
                apart = math.dist(points[image][i], points[image][j])
                sigma = 1.0 if hold else (sigma0[image][i] + sigma1[image][j]) / 2
                if apart <= config.match_radius:
                    positives.append(_slow_cost(inner, sigma, True, config))
                elif apart > config.ignore_radius:
                    candidates.append(_slow_cost(inner, sigma, False, config))
            negatives += sorted(candidates)[-config.negatives :]
        total += sum(positives) / len(positives) / 2 + sum(negatives) / len(negatives) / 2
    return total / len(first)


def _slow_cost(inner: float, sigma: float, match: bool, config: LossConfig) -> float:
    if config.kind == "contrastive":
        apart = math.sqrt(max(0.0, 2 - 2 * inner))
        return apart**2 / 2 if match else max(0.0, config.margin - apart) ** 2 / 2
    score = max(0.0, inner)
    loss = 1 - score if match else score
    if config.kind == "plain":
        return loss
    return -math.log(math.exp((1 - loss) / sigma) / (sigma * (math.exp(1 / sigma) - 1)))


@pytest.mark.parametrize("kind", ["probabilistic", "plain", "contrastive"])
@pytest.mark.parametrize("seed", range(3))
def test_pair_loss_equals_a_slow_loop(kind: str, seed: int) -> None:
    config = LossConfig(kind=kind, negatives=3, ignore_radius=20.0)  # type: ignore[arg-type]
    batch = _random_batch(seed)
    fast = pair_loss(*batch, config).total.item()
    assert fast == pytest.approx(_slow_pair_loss(batch, config), rel=1e-5)


def test_held_sigma_is_scored_as_one() -> None:
    config = LossConfig(negatives=3, ignore_radius=20.0)
    batch = _random_batch(0)
    held = pair_loss(*batch, config, hold_sigma=True).total.item()
    assert held == pytest.approx(_slow_pair_loss(batch, config, hold=True), rel=1e-5)


def test_gradient_flows_only_through_positives_and_mined_negatives() -> None:
    config = LossConfig(kind="plain", negatives=1, ignore_radius=20.0)
    batch = _random_batch(4, batch=1)
    batch[0].requires_grad_(True)
    batch[1].requires_grad_(True)
    with torch.no_grad():
        inner = (batch[0] @ batch[1].transpose(1, 2))[0]
        match, non_match = (mask[0] for mask in labels(batch[4], batch[4], config))
    loss = pair_loss(*batch, config).total
    (gradient,) = torch.autograd.grad(loss, batch[1])
    scored = torch.zeros(inner.shape, dtype=torch.bool)
    scored[match] = True
    hardest = inner.clamp_min(0).masked_fill(~non_match, -1).argmax(1)
    scored[torch.arange(len(inner)), hardest] = True
    touched = (scored & (inner > 0)).any(0)
    assert torch.equal(gradient[0].abs().sum(-1) > 0, touched)


def test_dead_positives_are_counted() -> None:
    """A match with negative inner product gets no gradient: the log must say how many there are."""
    axis = torch.eye(4)[:2][None]
    flipped = axis * torch.tensor([1.0, -1.0])[None, :, None]
    points = torch.tensor([[[0.0, 0.0], [100.0, 0.0]]])
    ones = torch.ones(1, 2)
    result = pair_loss(axis, flipped, ones, ones, points, LossConfig())
    assert result.dead_positives.item() == pytest.approx(0.5)
    assert result.positive_score.item() == pytest.approx(0.5)


def test_images_without_overlap_do_not_count() -> None:
    config = LossConfig(negatives=3, ignore_radius=20.0)
    batch = _random_batch(1)
    only = pair_loss(*[t[:1] for t in batch], config)
    both = pair_loss(*batch, config, valid=torch.tensor([True, False]))
    assert both.total.item() == pytest.approx(only.total.item() / 2, rel=1e-6)
    for name in ("positive_score", "negative_score", "dead_positives"):
        alone = getattr(only, name).item()
        assert alone > 0
        assert getattr(both, name).item() == pytest.approx(alone, rel=1e-6)


def test_an_image_without_overlap_takes_no_slots_from_those_after_it() -> None:
    """Its points are one point repeated: 144 matches, more than all slots of the batch."""
    config = LossConfig(negatives=3, ignore_radius=20.0)
    batch = _random_batch(1)
    only = pair_loss(*[t[1:] for t in batch], config)
    batch[4][0] = batch[4][0, :1]
    both = pair_loss(*batch, config, valid=torch.tensor([False, True]))
    assert both.total.item() == pytest.approx(only.total.item() / 2, rel=1e-6)
    assert both.positive_score.item() == pytest.approx(only.positive_score.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["probabilistic", "plain", "contrastive"])
@pytest.mark.parametrize("spoilt", [0, 1, 3])
def test_an_image_whose_points_coincide_takes_nothing_from_the_others(
    kind: str, spoilt: int
) -> None:
    """It counts, and its 144 matches are as many as all slots of the batch."""
    config = LossConfig(kind=kind, negatives=3, ignore_radius=20.0)  # type: ignore[arg-type]
    batch = _random_batch(2, batch=4)
    batch[4][spoilt] = batch[4][spoilt, :1]
    alone = [pair_loss(*[t[i : i + 1] for t in batch], config) for i in range(4)]
    together = pair_loss(*batch, config)
    mean = sum(loss.total.item() for loss in alone) / 4
    assert together.total.item() == pytest.approx(mean, rel=1e-6)
    score = sum(loss.positive_score.item() for loss in alone) / 4
    assert together.positive_score.item() == pytest.approx(score, rel=1e-6)
    # Of its matches each anchor's own is learned from.
    inner = torch.bmm(batch[0], batch[1].transpose(1, 2))
    mined = mine(inner, batch[2], batch[3], batch[4], torch.ones(4, dtype=torch.bool), config)
    own = mined.near[(mined.near_share > 0) & (mined.near // 144 == spoilt)] % 144
    assert own.tolist() == [13 * anchor for anchor in range(12)]


@pytest.mark.parametrize(("together", "learned"), [(3, 3), (4, 1)])
def test_up_to_three_matches_of_an_anchor_are_learned_from_and_of_more_its_own(
    together: int, learned: int
) -> None:
    """Points that happen to lie side by side match each other; a crowd says nothing of a place."""
    config = LossConfig(kind="plain", negatives=3, ignore_radius=20.0)
    batch = _random_batch(6)
    groups = torch.arange(12) // together
    batch[4] = torch.stack([100.0 * groups, 0 * groups], dim=-1).expand(2, -1, -1).contiguous()
    inner = torch.bmm(batch[0], batch[1].transpose(1, 2))
    mined = mine(inner, batch[2], batch[3], batch[4], torch.ones(2, dtype=torch.bool), config)
    shares = mined.near_share[mined.near_share > 0]
    assert len(shares) == 2 * 12 * learned
    assert shares.tolist() == pytest.approx([1 / (12 * learned)] * len(shares))
    if learned == together:
        fast = pair_loss(*batch, config).total.item()
        assert fast == pytest.approx(_slow_pair_loss(batch, config), rel=1e-5)


@pytest.mark.parametrize("match", [True, False])
def test_equal_descriptors_have_a_finite_gradient_under_the_contrastive_loss(match: bool) -> None:
    """Their distance is 0, where a root's slope is infinite."""
    inner = torch.tensor([1.0, 1.0 + 1e-6, 0.5], requires_grad=True)
    cost = pair_cost(inner, torch.ones(3), match=match, config=LossConfig(kind="contrastive"))
    cost.sum().backward()
    assert inner.grad is not None
    assert bool(inner.grad.isfinite().all())


def test_balance_gives_both_sets_the_same_weight() -> None:
    """All positives perfect, all negatives of score 1: plain loss 0 and 1, balanced 1/2."""
    same = torch.zeros(1, 3, 4)
    same[..., 0] = 1
    points = torch.tensor([[[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]]])
    ones = torch.ones(1, 3)
    config = replace(LossConfig(), kind="plain")
    assert pair_loss(same, same, ones, ones, points, config).total.item() == pytest.approx(0.5)

"""What is said of matches: limits, confidence of both places, probability, spread; by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefeat.match.dense import match_dense
from surefeat.match.points import (
    Matches,
    match_points,
    quality,
    spread,
)
from surefeat.match.related import PAIR_SIGNS, POINT_SIGNS
from surefeat.match.search import find, prepare_pair, vote_both_ways
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features, compare_with
from surefeat.model.probability import Reliability
from tiny import a_cohort, a_logistic, a_reliability, analytic, photo


def made_up(**values: list[float]) -> Matches:
    """Three matches that differ in nothing but what is given."""
    plain = {"score": 0.5, "confidence": 2.0, "margin": 0.1, "round_trip": 3.0, "probability": 0.5}
    columns = {name: torch.tensor(values.get(name, [value] * 3)) for name, value in plain.items()}
    return Matches(
        points0=torch.zeros(3, 2), points1=torch.zeros(3, 2), index=torch.arange(3),
        mutual=torch.tensor([True, False, True]), size0=(8, 8), size1=(8, 8), **columns,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["score", "confidence", "margin", "probability"])
def test_a_least_value_keeps_what_has_it_and_more(name: str) -> None:
    matches = made_up(**{name: [0.25, 0.5, 0.75]})
    for value, kept in ((0.25, [0, 1, 2]), (0.5, [1, 2]), (0.6, [2]), (0.75, [2]), (0.8, [])):
        given: dict[str, Any] = {name: value}
        assert matches.filter(**given).index.tolist() == kept


def test_a_longest_round_trip_keeps_what_has_it_and_less() -> None:
    matches = made_up(round_trip=[1.0, 4.0, 2.0])
    for value, kept in ((4.0, [0, 1, 2]), (2.0, [0, 2]), (1.5, [0]), (0.5, [])):
        assert matches.filter(round_trip=value).index.tolist() == kept
    assert matches.filter(mutual=True).index.tolist() == [0, 2]
    assert matches.filter().index.tolist() == [0, 1, 2]
    both = matches.filter(round_trip=2.0, score=0.6)
    assert len(both) == 0


# A pair of photos of other shapes, each with its own sigma.


def unsure(features: Features, *, least: float) -> Features:
    rows, columns = features.uncertainty.shape
    sigma = least + torch.arange(rows * columns).reshape(rows, columns) / (rows * columns)
    return replace(features, uncertainty=sigma)


@pytest.fixture(scope="module")
def pair() -> tuple[Features, Features]:
    first = analytic(photo(size=(96, 128)), original=(60, 80))
    second = analytic(photo("chelsea", size=(128, 96)))
    cohort = a_cohort(second)
    return (
        compare_with(cohort, unsure(first, least=0.1)),
        compare_with(cohort, unsure(second, least=0.5)),
    )


def test_confidence_is_of_both_places(pair: tuple[Features, Features]) -> None:
    matches = match_points(*pair, count=20)
    places = (matches.points0, matches.points1)
    sigmas = [1 / one.confidence_at(at) for one, at in zip(pair, places, strict=True)]
    torch.testing.assert_close(matches.confidence, 2 / (sigmas[0] + sigmas[1]))
    assert (sigmas[0] - sigmas[1]).abs().min() > 1e-3


def test_a_round_trip_goes_back_as_it_came(pair: tuple[Features, Features]) -> None:
    """With votes one way, with votes the other: those of image 1 over image 0."""
    matches = match_points(*pair, count=20)
    weights = {"descriptor_weight": POINT_WEIGHTS[0], "lower_weight": POINT_WEIGHTS[1]}
    side0, side1 = prepare_pair(*pair, **weights)
    _, back = vote_both_ways(side0, side1, Voting())
    returned = find(side1, side0, matches.points1, back, refine=True).points
    expected = (returned - matches.points0).norm(dim=-1)
    torch.testing.assert_close(matches.round_trip, expected, atol=1e-3, rtol=1e-3)
    blind = find(side1, side0, matches.points1, None, refine=True).points
    assert not torch.allclose(blind, returned, atol=1.0)


def known(name: str, **more: Any) -> Reliability:
    """A probability that follows from one sign alone, of photos that are surely related."""
    point = a_logistic(POINT_SIGNS, bias=0.0, **{name: 1.0})
    return a_reliability(pair=a_logistic(PAIR_SIGNS, bias=30.0), point=point, **more)


def logit(chance: Tensor | None) -> Tensor:
    assert chance is not None
    return (chance / (1 - chance)).log()


@pytest.mark.parametrize("name", ["score", "margin", "confidence0", "confidence1"])
def test_probability_reads_each_sign_by_its_own_weight(
    name: str, pair: tuple[Features, Features]
) -> None:
    matches = match_points(*pair, count=20, reliability=known(name))
    expected = {
        "confidence0": pair[0].confidence_at(matches.points0).log(),
        "confidence1": pair[1].confidence_at(matches.points1).log(),
        "score": matches.score, "margin": matches.margin,
    }[name]  # fmt: skip
    torch.testing.assert_close(logit(matches.probability), expected, atol=1e-3, rtol=1e-3)


def test_a_round_trip_counts_in_longer_sides_of_image_0(pair: tuple[Features, Features]) -> None:
    """Doubled with the photo, it is as long as before."""
    small = match_points(*pair, count=20, reliability=known("round_trip"))
    frame = replace(pair[0].frame, original=(120, 160))
    large = match_points(replace(pair[0], frame=frame), pair[1], small.points0 * 2 + 0.5,
                         reliability=known("round_trip"))  # fmt: skip
    torch.testing.assert_close(large.round_trip, 2 * small.round_trip, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(large.probability, small.probability, atol=1e-3, rtol=1e-2)
    # The logarithm of the trip over 80 pixels, with what is added to it before.
    added = logit(small.probability).exp() - small.round_trip / 80
    torch.testing.assert_close(added, added.mean().expand(20), atol=1e-4, rtol=1e-2)
    assert 0 < float(added.mean()) < 0.1


def test_two_models_give_no_probability(pair: tuple[Features, Features]) -> None:
    one, other = known("score"), known("score", weights_sha256="other")
    for first, second, given in ((one, one, True), (one, other, False), (one, None, False),
                                 (None, one, False)):  # fmt: skip
        both = replace(pair[0], reliability=first), replace(pair[1], reliability=second)
        assert (match_points(*both, count=3).probability is not None) == given


def test_a_model_s_own_probability_is_for_the_matching_it_was_fitted_on(
    pair: tuple[Features, Features],
) -> None:
    """Other votes, or other weights of the layers: its signs mean something else."""
    both = [replace(features, reliability=known("score")) for features in pair]
    assert match_points(*both, count=3).probability is not None
    for options in ({"voting": False}, {"voting": Voting(weight=0.3)}, {"lower_weight": 0.9}):
        matches = match_points(*both, count=3, **options)  # type: ignore[arg-type]
        assert (matches.probability, matches.related) == (None, None)


# Which places are chosen.


def test_the_best_come_first_and_no_two_are_nearer_than_half_their_spacing() -> None:
    places = torch.cartesian_prod(torch.arange(10.0), torch.arange(10.0))
    worth = torch.rand(100, generator=torch.Generator().manual_seed(0))
    chosen = spread(worth, places, count=9)
    assert chosen[0] == worth.argmax()
    assert (worth[chosen].diff() <= 0).all()
    # Nine points spread evenly over 9 x 9 are 3 apart.
    gaps = torch.cdist(places[chosen], places[chosen]) + 99 * torch.eye(len(chosen))
    assert gaps.min() >= 1.5
    free = torch.cdist(places, places[chosen]).amin(1) >= 1.5
    assert len(chosen) == 9 or not free.any()
    # What is as far as that is not too close: a place two steps away is taken at once.
    line = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [9.0, 9.0]])
    assert spread(torch.tensor([4.0, 3.0, 2.0, 1.0]), line, count=9).tolist() == [0, 2, 3]


def test_mutual_places_are_worth_something_in_both_images(
    pair: tuple[Features, Features],
) -> None:
    """The first match is the best by the product of both."""
    matches = match_points(*pair, count=8, mutual=True, refine=False)
    weights = {"descriptor_weight": POINT_WEIGHTS[0], "lower_weight": POINT_WEIGHTS[1]}
    worth = []
    for side, points in zip(
        prepare_pair(*pair, **weights), (matches.points0, matches.points1), strict=True
    ):
        nearest = torch.cdist(points, side.points).argmin(1)
        worth.append(quality(side)[nearest])
    both = worth[0] * worth[1]
    assert (both.diff() <= 1e-6).all()
    assert not (worth[0].diff() <= 1e-6).all()


def test_votes_count_in_the_margin_and_not_in_the_score(pair: tuple[Features, Features]) -> None:
    matches = match_points(*pair, count=12, refine=False)
    weights = {"descriptor_weight": POINT_WEIGHTS[0], "lower_weight": POINT_WEIGHTS[1]}
    side0, side1 = prepare_pair(*pair, **weights)
    alike = side0.at(matches.points0) @ side1.vectors.T
    votes, _ = vote_both_ways(side0, side1, Voting())
    cells = side0.cells(matches.points0, votes.grid0), side1.cells(side1.points, votes.grid1)
    sigma = pair[0].confidence_at(matches.points0).reciprocal()
    total = alike + votes.bonus(*cells, sigma)
    best = total.argmax(1)
    torch.testing.assert_close(matches.points1, side1.points[best])
    torch.testing.assert_close(matches.score, alike.gather(1, best[:, None])[:, 0])
    rows, columns = side1.size
    step = torch.tensor([96 / columns, 128 / rows])  # network pixels between places
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1) * step
    near = torch.cdist(places[best], places) <= 128 * 30 / 224
    margin = total.amax(1) - total.masked_fill(near, -torch.inf).amax(1)
    torch.testing.assert_close(matches.margin, margin, atol=1e-4, rtol=1e-3)


def test_every_pixel_has_the_confidence_of_both_its_places(
    pair: tuple[Features, Features],
) -> None:
    """The sum of both sigmas is interpolated: one is constant, one is read where it lies."""
    flat = replace(pair[0], uncertainty=torch.full_like(pair[0].uncertainty, 0.3))
    dense = match_dense(flat, pair[1])
    assert dense.confidence.shape == (60, 80)
    middle = dense.points1[8:-8, 8:-8].reshape(-1, 2)
    expected = 2 / (0.3 + 1 / pair[1].confidence_at(middle))
    close = (dense.confidence[8:-8, 8:-8].flatten() / expected - 1).abs()
    assert close.median() < 0.05
    even = replace(pair[1], uncertainty=torch.full_like(pair[1].uncertainty, 0.5))
    torch.testing.assert_close(match_dense(flat, even).confidence, torch.full((60, 80), 2.5))


def test_one_in_four_network_pixels_is_asked_for_every_pixel(
    pair: tuple[Features, Features],
) -> None:
    """96 x 128 of them: 24 x 32 questions unless told otherwise."""
    plain, asked = match_dense(*pair), match_dense(*pair, size=(24, 32))
    assert torch.equal(plain.points1, asked.points1)
    assert not torch.equal(plain.points1, match_dense(*pair, size=(6, 8)).points1)
    # What is asked for one by one is what matching points answers.
    every = match_dense(*pair, size=(60, 80), voting=False)
    some = torch.tensor([[10.0, 20.0], [44.0, 31.0], [79.0, 59.0]])
    points = match_points(*pair, some, voting=False)
    x, y = some.long().T
    torch.testing.assert_close(every.points1[y, x], points.points1, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(every.score[y, x], points.score, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(every.confidence[y, x], points.confidence, atol=1e-3, rtol=1e-3)

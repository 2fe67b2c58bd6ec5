"""Which points are matched and refused, which matches are kept, and how far they are trusted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from surefeat.match.dense import match_dense
from surefeat.match.points import (
    Matches,
    match_many,
    match_points,
    matching_text,
    quality,
    spread,
)
from surefeat.match.search import prepare
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import compare_with
from surefeat.model.probability import Reliability
from tiny import a_cohort, a_reliability, analytic, photo


def test_chosen_points_are_spread_confident_and_near_the_middle() -> None:
    features = analytic(photo())
    unsure = features.uncertainty.clone()
    unsure[:, :12] = 50.0
    features = replace(features, uncertainty=unsure)
    found = match_points(features, features, count=40)
    assert len(found) == 40
    assert (found.points0[:, 0] > 90).float().mean() > 0.85
    gaps = torch.cdist(found.points0, found.points0) + torch.eye(40) * 1e6
    assert gaps.min() >= 0.5 * 188 / math.sqrt(40) - 1e-3
    side = prepare(features, descriptor_weight=1, lower_weight=1)
    assert quality(side)[spread(quality(side), side.points, count=1)] == quality(side).max()
    for height, width in ((192, 192), (96, 288)):  # all equally sure
        maps = analytic(photo(), original=(height, width))
        plain = prepare(maps, descriptor_weight=1, lower_weight=1)
        first = plain.points[spread(quality(plain), plain.points, count=9)[0]]
        middle = torch.tensor([width - 1, height - 1]) / 2
        assert (first - middle).abs().max() < 7


def test_an_image_matched_with_itself_stays_in_place() -> None:
    features = analytic(photo())
    found = match_points(features, features, count=50)
    assert (found.points1 - found.points0).norm(dim=-1).max() < 4
    assert found.mutual.float().mean() > 0.95  # flat places may find their neighbours
    assert found.round_trip.max() < 8
    assert found.round_trip.median() < 3
    assert torch.allclose(found.confidence, torch.full((50,), 2.0))


def test_points_outside_are_named() -> None:
    features = analytic(photo(), original=(100, 300))
    for bad in ([300.0, 5.0], [-0.6, 5.0], [4.0, math.nan]):
        with pytest.raises(ValueError, match=r"point 1 \(.*\) lies outside image 0.* 300 x 100"):
            match_points(features, features, [[5, 5], bad])
    assert len(match_points(features, features, [])) == 0
    assert len(match_points(features, features, np.array([[299.5, 99.5], [-0.5, -0.5]]))) == 2


def test_pairs_that_cannot_be_compared_are_refused() -> None:
    features = analytic(photo())
    other = replace(features, descriptors=features.descriptors[:4])
    with pytest.raises(ValueError, match="channels of descriptors; extract both with the same"):
        match_points(features, other)
    with pytest.raises(ValueError, match="must not be negative, nor both 0"):
        match_dense(features, features, descriptor_weight=0, lower_weight=0)
    with pytest.raises(ValueError, match="count must be at least 1"):
        match_points(features, features, count=0)


def test_many_points_are_matched_as_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    features0, features1 = analytic(photo()), analytic(photo("chelsea"))
    whole = match_points(features0, features1, count=30)
    monkeypatch.setattr("surefeat.match.search._CHUNK", 12_000)
    parts = match_points(features0, features1, count=30)
    assert torch.allclose(whole.points1, parts.points1, atol=1e-3)
    assert torch.allclose(whole.margin, parts.margin, atol=1e-4)


def matches(count: int = 6) -> Matches:
    pair = analytic(photo()), analytic(photo("chelsea"))
    return match_points(*pair, count=count, voting=Voting(grid=12))


def test_filter_keeps_what_passes_every_limit() -> None:
    found = matches(20)
    limits = {"score": 0.5, "round_trip": 40.0, "margin": 0.01, "mutual": True}
    kept = found.filter(**limits)  # type: ignore[arg-type]
    expected = [
        i
        for i in range(20)
        if found.score[i] >= 0.5
        and found.round_trip[i] <= 40
        and found.margin[i] >= 0.01
        and found.mutual[i]
    ]
    assert kept.index.tolist() == expected
    assert torch.equal(kept.points1, found.points1[expected])
    with pytest.raises(ValueError, match="no probability"):
        found.filter(probability=0.5)
    chances = torch.linspace(0, 1, 20)
    kept = replace(found, probability=chances).filter(probability=0.5)
    assert kept.index.tolist() == [i for i in range(20) if float(chances[i]) >= 0.5]


def test_matches_are_looked_at_one_by_one_and_as_arrays() -> None:
    found = matches(5)
    one = list(found)[3]
    assert one.point0 == pytest.approx(tuple(found.points0[3].tolist()))
    assert one.point1 == pytest.approx(tuple(found.points1[3].tolist()))
    assert (one.score, one.mutual) == (found.score[3].item(), found.mutual[3].item())
    assert one.probability is None
    sure = list(replace(found, probability=torch.arange(5) / 5.0))
    assert [match.probability for match in sure] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    arrays = found.numpy()
    assert arrays.keys() == {
        "points0", "points1", "score", "confidence", "margin", "round_trip", "mutual", "index",
    }  # fmt: skip
    assert isinstance(arrays["points1"], np.ndarray)
    np.testing.assert_array_equal(arrays["points1"], found.points1.numpy())


def test_one_image_against_many_and_pairs_are_matched_as_one_by_one() -> None:
    many = [analytic(photo()), analytic(photo("chelsea")), analytic(photo("coffee"))]
    alone = [match_points(many[0], other, count=7, voting=False) for other in many[1:]]
    for given in (many[0], [many[0], many[0]]):
        together = match_many(given, many[1:], count=7, voting=False)
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one.points1, other.points1)
    with pytest.raises(ValueError, match="2 images and 3 images are no pairs"):
        match_many(many[:2], many)


def test_matches_become_json() -> None:
    found = matches()
    read = json.loads(found.to_json())
    assert read == found.to_dict()
    assert read["size0"] == [192, 192]
    assert read["probability"] is None
    assert read["points1"] == [pytest.approx(row) for row in found.points1.tolist()]


def test_a_reliability_of_another_matching_is_refused() -> None:
    features = analytic(photo())
    features = compare_with(a_cohort(features), features)
    said = match_points(features, features, count=5, reliability=a_reliability())
    assert said.probability is not None
    other = a_reliability(matching=matching_text(None, POINT_WEIGHTS))
    with pytest.raises(ValueError, match="matches by nearest neighbour"):
        match_points(features, features, reliability=other)


def test_a_damaged_reliability_file_is_refused_and_a_missing_one_is_none(tmp_path: Path) -> None:
    assert Reliability.load(tmp_path) is None
    for text in ("{", "[]", '{"format": "surefeat-reliability-5", "pair": [1]}', '{"a": 1}'):
        (tmp_path / "reliability.json").write_text(text)
        with pytest.raises(ValueError, match="fit it again"):
            Reliability.load(tmp_path)
    for earlier in (2, 4):  # whose answers are of another question, or of other signs
        text = f'{{"format": "surefeat-reliability-{earlier}", "bias": 1}}'
        (tmp_path / "reliability.json").write_text(text)
        assert Reliability.load(tmp_path) is None
    a_reliability().save(tmp_path)
    assert Reliability.load(tmp_path) == a_reliability()


def test_the_trusted_score_combines_similarity_and_confidence() -> None:
    """Density over [0, 1] with sigma .2083 has mean loss .2 (tabulated), so a gap of .6."""
    one = torch.ones(3)
    sigma = torch.tensor([0.2083, 1e6, 0.2083])
    matches = Matches(
        points0=torch.zeros(3, 2), points1=torch.zeros(3, 2),
        score=torch.tensor([0.5, 0.5, -0.4]), confidence=1 / sigma, margin=one, round_trip=one,
        mutual=torch.ones(3, dtype=torch.bool), index=torch.arange(3), size0=(8, 8), size1=(8, 8),
    )  # fmt: skip
    torch.testing.assert_close(
        matches.trusted_score, torch.tensor([0.3, 0.0, 0.0]), atol=1e-3, rtol=0
    )

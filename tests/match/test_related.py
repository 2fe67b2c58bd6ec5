"""Are two photos related, which of many are, and has a point a counterpart: signs and verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefeat.cli.main import _verdict
from surefeat.match.points import match_points
from surefeat.match.related import Agreement, Cells, pooled_vector
from surefeat.match.relations import group, relate
from surefeat.model.features import Features, compare_with
from surefeat.model.network import DenseFeatures
from tiny import a_cohort, a_logistic, a_reliability, analytic, photo, write


def cells(count: int, *, seed: int, common: float = 0.0) -> Cells:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.nn.functional.normalize(torch.randn(count, 6, generator=generator), dim=1)
    points = torch.rand(count, 2, generator=generator) * 100
    kind = torch.nn.functional.normalize(torch.randn(count, 4, generator=generator), dim=1)
    confidence = torch.rand(count, generator=generator) + 0.1
    return Cells(points, vectors, kind, confidence, torch.full((count,), common))


def test_signs_of_a_pair_are_means_over_one_layer_by_squared_confidence() -> None:
    """Against a slow loop; what matching compares besides, the descriptors, has no say."""
    one, other = cells(7, seed=0, common=0.2), cells(5, seed=1, common=-0.1)
    signs = Agreement(one, other).signs()
    excess = []
    for mine, theirs in ((one, other), (other, one)):
        weights = [float(c) ** 2 for c in mine.confidence]
        best = [max(float(v @ w) for w in theirs.kind) for v in mine.kind]
        mean = sum(w * b for w, b in zip(weights, best, strict=True)) / sum(weights)
        excess.append(mean - float(mine.common[0]))
    assert float(signs["excess"]) == pytest.approx(sum(excess) / 2, abs=1e-5)
    assert float(signs["common"]) == pytest.approx((0.2 - 0.1) / 2, abs=1e-5)
    varied = replace(one, common=torch.arange(7.0))
    shares = one.confidence**2 / (one.confidence**2).sum()
    expected = (float(shares @ torch.arange(7.0)) - 0.1) / 2
    assert float(Agreement(varied, other).signs()["common"]) == pytest.approx(expected, abs=1e-5)
    turned = replace(one, vectors=-one.vectors)
    assert float(Agreement(turned, other).signs()["excess"]) == float(signs["excess"])


def test_exchanging_the_photos_changes_no_sign_and_confidence_counts() -> None:
    one, other = (
        replace(cells(count, seed=seed), common=torch.linspace(0, 1, count))
        for seed, count in enumerate((7, 5))
    )
    there, back = Agreement(one, other).signs(), Agreement(other, one).signs()
    even = [replace(c, confidence=torch.ones_like(c.confidence)) for c in (one, other)]
    plain = Agreement(*even).signs()
    for name in there:
        assert float(there[name]) == pytest.approx(float(back[name]), abs=1e-6)
        assert float(there[name]) != pytest.approx(float(plain[name]), abs=1e-4)


def test_what_is_everywhere_speaks_for_nothing() -> None:
    """The same two photos: the more common their places are elsewhere, the less they are related"""
    rare, usual = (Agreement(*(cells(9, seed=s, common=c) for s in (0, 1))) for c in (0.1, 0.8))
    fitted = a_reliability().pair
    assert float(fitted.log_odds(rare.signs())) > float(fitted.log_odds(usual.signs())) + 5


def test_support_is_what_neighbours_choose_around_the_match() -> None:
    places = torch.tensor([[x, y] for y in (0.0, 50.0, 100.0) for x in (0.0, 50.0, 100.0)])
    vectors = torch.eye(9)
    mirror = [2, 1, 0, 5, 4, 3, 8, 7, 6]
    one = Cells(places, vectors, vectors, torch.ones(9), torch.zeros(9))
    turned = Cells(places, vectors[mirror], vectors, torch.ones(9), torch.zeros(9))
    agreement = Agreement(one, turned)
    corner = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    right, wrong = agreement.support(corner, torch.tensor([[100.0, 0.0], [0.0, 100.0]]))
    assert float(right) > 0.9 > 0.05 > float(wrong)
    assert float(agreement.facing()) == pytest.approx(-1.0, abs=1e-3)
    assert float(Agreement(one, one).facing()) == pytest.approx(1.0, abs=1e-3)


def judged(features: Features, cohort: Features) -> Features:
    return replace(compare_with(a_cohort(cohort, count=400), features), reliability=a_reliability())


def test_a_photo_is_more_related_to_itself_than_to_another() -> None:
    cohort = analytic(photo("coffee"))
    one, other = (judged(analytic(photo(name)), cohort) for name in ("astronaut", "chelsea"))
    same, different = match_points(one, one, count=5), match_points(one, other, count=5)
    assert same.related is not None
    assert different.related is not None
    assert same.related > different.related + 0.2
    assert same.probability is not None
    assert different.probability is not None
    assert same.probability.mean() > different.probability.mean() + 0.1
    assert bool((same.probability <= same.related).all())
    assert bool((different.probability <= different.related).all())
    assert same.to_dict()["related"] == same.related
    assert same.take(torch.tensor([0, 1])).related == same.related


def test_pooled_vectors_are_weighted_and_centred() -> None:
    one = cells(5, seed=3)
    centre, weights = torch.full((4,), 0.1), one.confidence**2
    mean = sum((w * v for w, v in zip(weights, one.kind, strict=True)), torch.zeros(4))
    expected = mean / weights.sum() - centre
    assert torch.allclose(pooled_vector(one, centre), expected / expected.norm(), atol=1e-6)


def matrix(pairs: dict[tuple[int, int], float], count: int) -> Tensor:
    values = torch.eye(count)
    for (i, j), value in pairs.items():
        values[i, j] = values[j, i] = value
    return values


def test_groups_are_joined_by_the_mean_of_all_their_pairs() -> None:
    """0-1 and 2-3 are sure; 1-2 alone is likely, which must not chain them together."""
    chances = matrix({(0, 1): 0.9, (2, 3): 0.95, (1, 2): 0.8, (0, 2): 0.1, (0, 3): 0.1}, 5)
    assert group(chances, threshold=0.5) == ((0, 1), (2, 3), (4,))
    assert group(chances, threshold=0.2) == ((0, 1, 2, 3), (4,))
    assert group(chances, threshold=0.97) == ((0,), (1,), (2,), (3,), (4,))
    # Three photos that are one group and a fourth like one of them: .43 over the pairs, not .55.
    sure = {(0, 1): 0.99, (0, 2): 0.98, (1, 2): 0.98}
    chances = matrix(sure | {(0, 3): 0.2, (1, 3): 0.2, (2, 3): 0.9}, 4)
    assert group(chances, threshold=0.5) == ((0, 1, 2), (3,))
    assert group(chances, threshold=0.43) == ((0, 1, 2, 3),)


def test_photos_of_a_folder_are_related_and_unreadable_ones_listed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    from surefeat.model.config import ModelConfig

    model = DenseFeatures(
        ModelConfig(trunk="small", head="linear", channels=8, longest_side=64)
    ).eval()
    with pytest.raises(ValueError, match="use the model that ships"):
        relate(tmp_path, model)
    for name, colour in (("a", "red"), ("b", "red"), ("c", "blue")):
        write(tmp_path / f"{name}.png", size=(64, 48), colour=colour)
    (tmp_path / "d.png").write_bytes(b"no image")
    model.reliability = a_reliability(pooled=a_logistic(("pooled",), bias=0.0, pooled=1e-3))
    model.cohort = a_cohort(model.extract(write(tmp_path / "x" / "y.png", size=(64, 64)))[0])
    relations = relate([tmp_path / f"{name}.png" for name in "abcd"], model)
    assert [Path(name).stem for name in relations.names] == ["a", "b", "c"]
    assert [Path(entry.name).stem for entry in relations.skipped] == ["d"]
    assert relations.compared == 3
    assert torch.equal(relations.probability, relations.probability.T)
    assert relations.probability[0, 1] >= relations.probability[0, 2]
    direct = match_points(*model.extract([tmp_path / "a.png", tmp_path / "c.png"]), count=3,
                          reliability=model.reliability)  # fmt: skip
    assert float(relations.probability[0, 2]) == pytest.approx(direct.related, abs=1e-5)
    sure = replace(model.reliability, pooled=a_logistic(("pooled",), bias=9.0))
    model.reliability = sure
    assert relate(tmp_path, model).compared == 0


@pytest.mark.parametrize(
    ("related", "words"),
    [
        (0.08, "these two photos seem to have nothing in common (probability 8 %); 3 matches"),
        (0.93, "these two photos show the same kind of thing (probability 93 %); 3 matches"),
        (None, "no probability: it is not fitted for this model, size or matching"),
    ],
)
def test_match_says_in_words_whether_the_photos_are_related(
    related: float | None, words: str
) -> None:
    features = analytic(photo())
    matches = match_points(features, features, [[30, 40], [90, 90], [120, 60]], voting=False)
    chances = None if related is None else torch.tensor([0.1, 0.7, 0.2])
    matches = replace(matches, related=related, probability=chances,
                      mutual=torch.tensor([True, True, False]))  # fmt: skip
    said = _verdict(matches)
    assert words in said
    assert "without labels" not in said
    unlabelled = _verdict(replace(matches, without_labels=True))
    assert (", fitted without labels);" in unlabelled) == (related is not None)
    assert "1 of which does not lead back" in said

"""A run's own probability, without labels: whose fit is taken over, and how it is moved."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from surefeat.learn import trust
from surefeat.learn.trust import FEW, moved, reason_against, trust_without_labels
from surefeat.match.points import match_points
from surefeat.match.related import POINT_SIGNS
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort, Reliability
from surefeat.model.weights import quantise, widen
from tiny import a_cohort, a_logistic, a_reliability, smooth_photo

SIDE = 96


@pytest.fixture
def shipped() -> DenseFeatures:
    """A small network that stands for the one that ships."""
    torch.manual_seed(0)
    model = DenseFeatures(ModelConfig(trunk="small", channels=8, longest_side=SIDE)).eval()
    point = a_logistic(POINT_SIGNS, score=2.0, confidence0=1.5, confidence1=0.5)
    model.reliability = a_reliability(sides=(SIDE,), point=point)
    model.cohort = a_cohort(model.extract(smooth_photo(SIDE, SIDE, seed=9))[0], count=30)
    return model


@pytest.fixture
def at_home(shipped: DenseFeatures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its folder, known as the model that ships with this trunk."""
    shipped.save_pretrained(tmp_path / "shipped")
    monkeypatch.setattr(trust, "SHIPPED_TRUNKS", {"small": str(tmp_path / "shipped")})
    return tmp_path


def own_head(shipped: DenseFeatures, *, seed: int = 1) -> DenseFeatures:
    """The same trunk, another head, as a run leaves it."""
    model = deepcopy(shipped)
    model.reliability = model.cohort = None
    torch.manual_seed(seed)
    with torch.no_grad():
        for values in model.head.parameters():
            values.add_(0.02 * torch.randn_like(values))
    return model


def photos(count: int) -> list[torch.Tensor]:
    return [smooth_photo(SIDE, SIDE, seed=number).byte() for number in range(count)]


def test_a_moved_fit_says_of_moved_signs_what_it_said_before() -> None:
    """Signs that are shifted and stretched as a whole mean the same as before."""
    fitted = a_logistic(POINT_SIGNS, score=2.0, margin=-1.0, facing=0.5)
    generator = torch.Generator().manual_seed(0)
    before = {name: torch.randn(50, generator=generator) for name in POINT_SIGNS}
    now = {name: 1.5 * values - 0.7 for name, values in before.items()}
    again = moved(fitted, before, now, words="a test")
    assert torch.allclose(again.log_odds(now), fitted.log_odds(before), atol=1e-4)
    assert not torch.allclose(fitted.log_odds(now), fitted.log_odds(before), atol=0.1)
    assert again.fitted_on == "a test"
    # A sign that never varied cannot say how far it stretches: it is only shifted.
    before["facing"] = torch.ones(50)
    shifted = moved(fitted, before, now, words="")
    assert shifted.scale[POINT_SIGNS.index("facing")] == 1.0


def test_a_run_on_the_same_trunk_gets_the_shipped_fit_moved(
    shipped: DenseFeatures, at_home: Path
) -> None:
    model = own_head(shipped)
    given = trust_without_labels(model, photos(6))
    assert given.words.startswith("fitted without labels")
    assert "6 photos" in given.words
    assert given.reliability is not None
    assert given.cohort is not None
    assert given.reliability.without_labels
    assert given.reliability.point.weights == shipped.reliability.point.weights  # type: ignore[union-attr]
    assert given.reliability.point.mean != shipped.reliability.point.mean  # type: ignore[union-attr]
    assert given.reliability.pair == shipped.reliability.pair  # type: ignore[union-attr]
    model.reliability, model.cohort = given.reliability, given.cohort
    model.save_pretrained(at_home / "own")
    again = DenseFeatures.from_pretrained(at_home / "own", device="cpu")
    first, second = again.extract(photos(2))
    matches = match_points(first, second, count=5)
    assert matches.probability is not None
    assert matches.without_labels
    assert Reliability.load(at_home / "own").without_labels  # type: ignore[union-attr]
    kept, cohort = Cohort.load(at_home / "own"), shipped.cohort
    assert kept is not None
    assert cohort is not None
    assert torch.equal(kept.lower, cohort.lower.half().float())


def test_the_same_head_keeps_the_very_fit(shipped: DenseFeatures, at_home: Path) -> None:
    given = trust_without_labels(deepcopy(shipped), photos(FEW))
    assert given.reliability is not None
    assert given.reliability.point.mean == pytest.approx(shipped.reliability.point.mean, abs=1e-5)  # type: ignore[union-attr]


def test_what_the_fit_says_nothing_of_is_named(shipped: DenseFeatures, at_home: Path) -> None:
    few = trust_without_labels(own_head(shipped), photos(FEW - 1))
    assert few.reliability is few.cohort is None
    assert few.words == f"no probability of matches: it needs {FEW} photos that were not learned " \
                        f"from, not {FEW - 1}"  # fmt: skip
    unsure = own_head(shipped)
    unsure.without_confidence()
    assert "no confidence" in trust_without_labels(unsure, photos(FEW)).words
    deeper = own_head(shipped)
    with torch.no_grad():
        next(iter(deeper.trunk.parameters())).mul_(1.05)
    assert "layers below the head" in trust_without_labels(deeper, photos(FEW)).words
    larger = DenseFeatures(ModelConfig(trunk="small", channels=8, longest_side=2 * SIDE))
    assert "input size" in trust_without_labels(larger, photos(FEW)).words


def test_a_trunk_that_was_stored_with_rounding_is_the_same(shipped: DenseFeatures) -> None:
    rounded = own_head(shipped)
    state = widen(quantise(dict(rounded.trunk.state_dict())))
    rounded.trunk.load_state_dict(state)
    assert reason_against(shipped, rounded) == ""


def test_a_trunk_that_does_not_ship_has_no_probability_and_says_so() -> None:
    model = DenseFeatures(ModelConfig(trunk="small", channels=8, longest_side=SIDE)).eval()
    assert trust_without_labels(model, photos(FEW)).words == (
        "no probability of matches: no model with small ships that has one"
    )


def test_a_trunk_with_layers_of_its_own_is_another_one() -> None:
    """Even where all that both have is the same: its other layers may be what is compared."""
    weights = torch.rand(4, 3, 1, 1)
    smaller, larger = {"res4": weights}, {"res4": weights, "res5": weights}
    assert trust._same(smaller, dict(smaller))
    assert not trust._same(larger, smaller)
    assert not trust._same(smaller, larger)

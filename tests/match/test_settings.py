"""Every setting of matching and of proposals acts: another value, another answer."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefeat.core.files import from_dict
from surefeat.match.config import ProposalConfig
from surefeat.match.dense import match_dense
from surefeat.match.points import Matches, match_points, matching_text
from surefeat.match.proposals import propose
from surefeat.match.votes import POSES, Voting
from surefeat.model.config import POINT_WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.probability import Reliability
from tiny import analytic, photo, smooth_photo


@pytest.fixture(scope="module")
def pair() -> tuple[Features, Features]:
    return analytic(photo(size=(96, 128))), analytic(photo("chelsea", size=(128, 112)))


def told(matches: Matches) -> Tensor:
    """All that is said of matches, in one."""
    columns = (matches.points1, matches.score[:, None], matches.margin[:, None])
    return torch.cat([*columns, matches.round_trip[:, None]], dim=1)


def other(value: Any) -> Any:
    """Another value of a setting, not far off."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + max(1, value // 3)
    if isinstance(value, float):
        return value * 0.6
    return tuple(other(part) for part in value)


@pytest.mark.parametrize("name", [field.name for field in fields(Voting)])
def test_a_setting_of_voting_acts(name: str, pair: tuple[Features, Features]) -> None:
    plain = Voting()
    changed = replace(plain, **{name: other(getattr(plain, name))})
    first, second = (told(match_points(*pair, count=30, voting=v)) for v in (plain, changed))
    assert not torch.allclose(first, second, atol=1e-4)


def test_the_weights_of_the_layers_act(pair: tuple[Features, Features]) -> None:
    answers = [
        told(match_points(*pair, count=30, descriptor_weight=d, lower_weight=low))
        for d, low in ((1.0, 1.0), (1.0, 0.2), (0.2, 1.0))
    ]
    assert not torch.allclose(answers[0], answers[1], atol=1e-3)
    assert not torch.allclose(answers[0], answers[2], atol=1e-3)
    # Only their ratio counts.
    scaled = told(match_points(*pair, count=30, descriptor_weight=0.5, lower_weight=0.1))
    torch.testing.assert_close(scaled, answers[1], atol=2e-3, rtol=1e-3)
    dense = [match_dense(*pair, lower_weight=low, size=(6, 8)).points1 for low in (1.0, 0.2)]
    assert not torch.allclose(*dense, atol=1e-2)


@pytest.mark.parametrize("name", [field.name for field in fields(ProposalConfig)])
def test_a_setting_of_proposals_acts(name: str) -> None:
    pytest.importorskip("cv2").ximgproc  # noqa: B018
    image = smooth_photo(60, 80)
    base = ProposalConfig(count=40, draws=60, side=48)
    value = {"overlaps": (1.0,), "side": 64, "superpixel": 120}.get(
        name, other(getattr(base, name))
    )
    first, second = (propose(image, config) for config in (base, replace(base, **{name: value})))
    assert first.shape != second.shape or not torch.equal(first, second)


def test_the_default_votes_are_those_the_shipped_probability_was_fitted_on() -> None:
    """Whoever changes them measures and fits anew (benchmarks/experiments/reliability.py)."""
    shipped = Reliability.load(model_folder(None))
    assert shipped is not None
    assert matching_text(Voting(), POINT_WEIGHTS) == shipped.matching


def test_poses_lean_by_20_degrees_and_are_a_fifth_smaller_or_a_quarter_larger() -> None:
    for facing, poses in zip((1, -1), POSES, strict=True):
        seen = []
        for xx, xy, yx, yy in poses:
            assert facing * (xx * yy - xy * yx) > 0
            scale, angle = math.hypot(xy, yy), math.degrees(math.atan2(-xy, yy))
            assert (xx, yx) == pytest.approx((facing * yy, -facing * xy))
            seen.append((round(angle), round(scale, 3)))
        assert seen[0] == (0, 1.0)
        assert sorted(seen) == sorted((a, s) for a in (-20, 0, 20) for s in (0.8, 1.0, 1.25))


def test_proposals_are_drawn_as_for_the_stored_results() -> None:
    """Whoever changes a default of ProposalConfig measures anew."""
    results = Path(__file__).parents[2] / "results"
    stored = json.loads((results / "pf-willow" / "pf-willow-test-ours@320.json").read_text())
    used = from_dict(ProposalConfig, stored["config"]["protocol"]["proposals"])
    assert used == ProposalConfig()

"""What a detector says of its own keypoints: learned on photos left out, kept with the detector."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sets import QUICK, feature_model, write_labelled
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.head import KeypointHead
from surefeat.keypoints.trust import (
    SIGNS,
    Answers,
    SeenCrops,
    cross_validate,
    examples_of,
    fit_trust,
    read_signs,
)
from surefeat.keypoints.views import CutObjects
from surefeat.model.probability import KeypointTrust
from tiny import a_logistic


def trust(**weights: float) -> KeypointTrust:
    fitted = a_logistic(SIGNS, **weights)
    return KeypointTrust(fitted, fitted, fitted)


def test_examples_are_the_mean_of_labelled_places() -> None:
    maps = torch.randn(3, 5, 4, 4)
    cells = torch.tensor([[[1.0, 2.0], [0.0, 0.0]], [[3.0, 3.0], [2.0, 1.0]],
                          [[torch.nan, torch.nan], [1.0, 1.0]]])  # fmt: skip
    visible = cells.isfinite().all(-1)
    examples = examples_of(maps, cells, visible, torch.ones(3, 2, dtype=torch.bool))
    first = F.normalize(maps[0, :, 2, 1], dim=0) + F.normalize(maps[1, :, 3, 3], dim=0)
    assert torch.allclose(examples.vectors[0], F.normalize(first, dim=0), atol=1e-5)
    assert (examples.seen.tolist(), examples.asked.tolist()) == ([2, 3], [3, 3])


class Spike(KeypointHead):
    """Logits that are given."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(1, 1, hidden=1)
        self.given = logits

    def forward(self, features: Tensor) -> Tensor:
        return self.given[: len(features)]


def test_signs_read_the_peak_its_lead_and_what_the_place_looks_like() -> None:
    logits = torch.full((1, 2, 9, 9), -4.0)
    logits[0, 0, 4, 4], logits[0, 0, 0, 8] = 2.0, 1.0  # a rival far away
    logits[0, 1, 1, 1], logits[0, 1, 1, 2] = 3.0, 2.9  # its own neighbour is none
    maps = torch.zeros(1, 3, 9, 9)
    maps[0, 0], maps[0, 1, 1, :3] = 1.0, 1.0
    maps[0, 1, 0, :3] = maps[0, 1, 2, :3] = 1.0
    crops = SeenCrops(maps, torch.full((1, 9, 9), 2.0))
    own = torch.ones(1, 2, dtype=torch.bool)
    labelled = torch.tensor([[[4.0, 4.0], [1.0, 1.0]]])
    examples = examples_of(maps, labelled, own, own)
    _, signs = read_signs(Spike(logits), crops, examples, own)
    assert signs["peak"][0].tolist() == pytest.approx([2.0, 3.0], abs=1e-3)
    assert signs["gap"][0].tolist() == pytest.approx([1.0, 7.0], abs=0.05)
    assert signs["agreement"][0].tolist() == pytest.approx([1.0, 1.0], abs=1e-2)
    assert signs["rival"][0].tolist() == pytest.approx([1 - 0.5**0.5] * 2, abs=1e-2)
    assert signs["confidence"][0].tolist() == pytest.approx([0.6931, 0.6931], abs=1e-3)


def test_cross_validation_never_asks_about_photos_it_learned_from() -> None:
    count = 7
    photo = torch.tensor([0, 0, 1, 2, 3, 3, 4])
    points = torch.full((count, 1, 2), 4.0)
    boxes = torch.tensor([[0.0, 0.0, 8.0, 8.0]]).repeat(count, 1)
    visible = torch.ones(count, 1, dtype=torch.bool)
    objects = CutObjects(torch.zeros(count, 3, 1, 1), boxes, boxes, points, visible, visible,
                         torch.zeros(1).long())  # fmt: skip
    crops = SeenCrops(torch.randn(count, 3, 9, 9), torch.ones(count, 9, 9))
    learned: list[set[int]] = []

    def fit_head(chosen: Tensor, seed: int) -> KeypointHead:
        learned.append(set(photo[chosen].tolist()))
        return Spike(torch.zeros(count, 1, 9, 9))

    answers = cross_validate(fit_head, crops, points, objects, photo, seed=0)
    assert answers is not None
    assert len(answers.visible) == count
    assert len(learned) == 5
    assert {next(iter(set(range(5)) - one)) for one in learned} == set(range(5))
    assert cross_validate(fit_head, crops, points, objects, torch.zeros(count), seed=0) is None


def test_right_is_seen_and_within_a_tenth_of_the_longer_side() -> None:
    """As PCK has it: nearer than that, not as near."""
    error = torch.tensor([0.0, 0.09, 0.1, 0.15, 0.09, torch.nan])
    visible = torch.tensor([True, True, True, True, False, False])
    assert Answers({}, visible, error).right.tolist() == [True, True] + 4 * [False]


def test_trust_follows_answers_and_few_answers_follow_the_prior() -> None:
    generator = torch.Generator().manual_seed(0)
    signs = {name: torch.randn(900, generator=generator) for name in SIGNS}
    visible = signs["peak"] > -0.5
    error = torch.where(visible, 0.3 * torch.sigmoid(-3 * signs["gap"]), torch.nan)
    answers = Answers(signs, visible, error)
    fitted = fit_trust(answers, None, words="drawn")
    assert fitted is not None
    present = fitted.present.log_odds(signs).sigmoid()
    assert ((present > 0.5) == visible).float().mean() > 0.97
    expected = fitted.error.log_odds(signs).sigmoid()[visible]
    assert float(expected.mean()) == pytest.approx(float(error[visible].mean()), abs=1e-3)
    assert torch.corrcoef(torch.stack([expected, error[visible]]))[0, 1] > 0.8
    few = Answers({n: v[:6] for n, v in signs.items()}, visible[:6], error[:6])
    assert fit_trust(few, None, words="too few") is None
    corrected = fit_trust(few, trust(peak=2.0), words="with a prior")
    assert corrected is not None
    assert corrected.present.weights[0] == pytest.approx(2.0, abs=0.5)


def test_a_detector_keeps_what_it_says_of_its_keypoints(tmp_path: Path) -> None:
    model = feature_model()
    photos = write_labelled(tmp_path / "photos")
    detector = replace(
        KeypointDetector.fit(model, photos, config=QUICK), trust=trust(peak=1.0, agreement=1.0)
    )
    detector.save(tmp_path / "detector")
    again = KeypointDetector.load(tmp_path / "detector", model)
    image = torch.randint(0, 255, (3, 60, 120), dtype=torch.uint8)
    (one,), (other,) = (d.predict(image, category="bird") for d in (detector, again))
    assert one.scores is not None
    assert one.errors is not None
    assert other.scores is not None
    torch.testing.assert_close(one.scores, other.scores)
    torch.testing.assert_close(one.errors, other.errors)
    # trust() has one model for all three: of a box 120 pixels wide.
    torch.testing.assert_close(one.errors, 120 * one.scores)
    (every,) = again.predict(image, category="bird", threshold=0.0)
    assert bool(every.visible.all())
    middle = float(one.scores.median())
    (some,) = again.predict(image, category="bird", threshold=middle)
    assert some.visible.tolist() == [score >= middle for score in one.scores.tolist()]

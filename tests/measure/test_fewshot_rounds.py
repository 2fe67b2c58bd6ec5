"""Rounds of the few-shot benchmark, and their measures."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefeat.core.geometry import out_of_box
from surefeat.measure.fewshot import (
    UNIT,
    area,
    at_alpha,
    class_curves,
    drawer,
    image_ranks,
    mean_positions,
    relative_errors,
    round_objects,
)
from surefeat.measure.fewshot_data import Objects
from surefeat.measure.fewshot_settings import FewShot
from surefeat.measure.fewshot_views import Views


def objects(boxes: Tensor, points: Tensor, visible: Tensor, category: Tensor) -> Objects:
    return Objects(torch.arange(len(boxes)), category, boxes, points, visible)


def random_objects(count: int) -> tuple[Objects, Tensor]:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(count, 2, generator=generator) * 50
    sides = torch.rand(count, 2, generator=generator) * 80 + 5
    boxes = torch.cat([corners, corners + sides - 1], dim=1)
    points = corners[:, None] + torch.rand(count, 5, 2, generator=generator) * sides[:, None]
    category = torch.arange(count) % 2
    own = torch.tensor([[True, True, True, False, False], [False, False, False, True, True]])
    visible = own[category] & (torch.rand(count, 5, generator=generator) < 0.7)
    predicted = points + torch.randn(count, 5, 2, generator=generator) * 5
    points = torch.where(visible[..., None], points, torch.nan)
    return objects(boxes, points, visible, category), predicted


def test_pck_equals_a_slow_loop() -> None:
    found, predicted = random_objects(60)
    curves = class_curves(relative_errors(predicted, found), found, classes=2)
    for alpha in (0.0, 0.05, 0.1, 0.25, 1.0):
        for number in (0, 1):
            right = total = 0
            for row in range(60):
                x1, y1, x2, y2 = found.boxes[row].tolist()
                limit = alpha * max(x2 - x1 + 1, y2 - y1 + 1)
                for part in range(5):
                    if found.category[row] == number and found.visible[row, part]:
                        near = math.dist(
                            predicted[row, part].tolist(), found.points[row, part].tolist()
                        )
                        right, total = right + (near < limit), total + 1
            assert float(at_alpha(curves[number], alpha)) == pytest.approx(100 * right / total)
    assert 0.3 < float(curves[0, 10]) < 0.95


def test_a_prediction_that_is_not_finite_is_wrong() -> None:
    found, _ = random_objects(4)
    truth = found.points.nan_to_num(0.0)
    spoilt = truth.clone()
    spoilt[0] = torch.nan
    perfect, worse = (
        class_curves(relative_errors(p, found), found, classes=2)[0, -1] for p in (truth, spoilt)
    )
    assert perfect == 1
    share = found.visible[0].sum() / found.visible[found.category == 0].sum()
    assert float(worse) == pytest.approx(1 - float(share))


def test_the_area_of_known_curves() -> None:
    straight = torch.linspace(0, 1, 101)
    assert float(area(straight)) == pytest.approx(0.5)
    # Right from alpha 0.3 on: the trapezoid over [0.29, 0.30] adds half a step.
    assert float(area((straight > 0.295).float())) == pytest.approx(0.705)


def test_rounds_are_nested_and_have_as_many_images_of_every_class() -> None:
    generator = torch.Generator().manual_seed(4)
    photo = torch.randint(0, 60, (300,), generator=generator)
    category = torch.randint(0, 3, (300,), generator=generator)
    ranks = image_ranks(category, photo, generator=torch.Generator().manual_seed(1))
    before: set[int] = set()
    for size in (1, 2, 5, 20):
        chosen = round_objects(ranks, size)
        assert before <= set(chosen.tolist())
        before = set(chosen.tolist())
        for number in range(3):
            photos = set(photo[chosen][category[chosen] == number].tolist())
            assert len(photos) == size
            # A photo brings all its objects of the class.
            every = {i for i in range(300) if category[i] == number and int(photo[i]) in photos}
            assert every <= before
    assert round_objects(ranks, "all").tolist() == list(range(300))
    again, other = (
        image_ranks(category, photo, generator=torch.Generator().manual_seed(s)) for s in (1, 2)
    )
    assert torch.equal(ranks, again)
    assert not torch.equal(ranks, other)


def test_mean_positions_by_hand() -> None:
    # Boxes of 10 x 20 and 40 x 10 pixels, whose outer edges are half a pixel further out.
    boxes = torch.tensor([[0.0, 0, 9, 19], [100.0, 50, 139, 59]])
    points = torch.tensor([[[4.5, 9.5], [0.0, 0.0]], [[109.5, 51.5], [7.0, 7.0]]])
    visible = torch.tensor([[True, False], [True, False]])
    found = objects(boxes, points, visible, torch.tensor([0, 0]))
    places = mean_positions(found)
    # In shares of the box, from its middle: (0, 0) and (-.25, -.3); what nobody shows is at 0.
    assert torch.allclose(places, torch.tensor([[-0.125, -0.15], [0.0, 0.0]]), atol=1e-6)
    back = out_of_box(places, boxes, size=UNIT)
    assert torch.allclose(back[0, 0], torch.tensor([3.25, 6.5]))
    assert torch.allclose(back[1, 1], torch.tensor([119.5, 54.5]))


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ((), (0, 1), (2, 1), ("all", 1), (1, 1)):
        with pytest.raises(ValueError, match="they must rise from 1 on, 'all' the last"):
            FewShot(rounds=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        FewShot(seeds=0)
    assert FewShot().steps(100) == 1500
    assert FewShot().steps(32_000) == 3000


def test_keypoints_that_are_not_visible_count_as_absent_or_not_at_all() -> None:
    visible, own = torch.tensor([[True, False, False]]), torch.tensor([[True, True, False]])
    views = Views(torch.zeros(1, 3, 3, 2), torch.ones(1, 3, 2), visible, own)
    for absent, counted in (("background", own), ("ignored", visible)):
        draw = drawer(views, torch.tensor([0]), FewShot(absent=absent, batch=2))  # type: ignore[arg-type]
        features, targets, counts = draw(torch.Generator().manual_seed(0))
        assert features.shape == (2, 2, 3, 3)
        assert torch.equal(counts, counted.expand(2, 3))
        # A point on the middle cell; its neighbours are one cell, two spreads, away: exp(-2) < 0.2.
        assert targets[0, 0].nonzero().tolist() == [[1, 1]]
        assert not targets[:, 1:].any()

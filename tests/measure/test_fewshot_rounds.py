"""Rounds of the few-shot benchmark, and their measures."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefeat.core.geometry import out_of_box
from surefeat.keypoints.config import PAPER, FewShot, KeypointConfig
from surefeat.keypoints.views import CutObjects
from surefeat.measure.fewshot import (
    UNIT,
    at_alpha,
    class_curves,
    image_ranks,
    mean_positions,
    relative_errors,
    round_objects,
)
from surefeat.measure.metrics import area


def objects(boxes: Tensor, points: Tensor, visible: Tensor) -> CutObjects:
    none = torch.empty(0)
    return CutObjects(none, boxes, boxes, points, visible, visible, none)


def random_objects(count: int) -> tuple[CutObjects, Tensor, Tensor]:
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
    return objects(boxes, points, visible), category, predicted


def test_pck_equals_a_slow_loop() -> None:
    found, category, predicted = random_objects(60)
    errors = relative_errors(predicted, found)
    curves = class_curves(errors, found.visible, category, classes=2)
    for alpha in (0.0, 0.05, 0.1, 0.25, 1.0):
        for number in (0, 1):
            right = total = 0
            for row in range(60):
                x1, y1, x2, y2 = found.boxes[row].tolist()
                limit = alpha * max(x2 - x1 + 1, y2 - y1 + 1)
                for part in range(5):
                    if category[row] == number and found.visible[row, part]:
                        near = math.dist(
                            predicted[row, part].tolist(), found.points[row, part].tolist()
                        )
                        right, total = right + (near < limit), total + 1
            assert float(at_alpha(curves[number], alpha)) == pytest.approx(100 * right / total)
    assert 0.3 < float(curves[0, 10]) < 0.95


def test_a_prediction_that_is_not_finite_is_wrong() -> None:
    found, category, _ = random_objects(4)
    truth = found.points.nan_to_num(0.0)
    spoilt = truth.clone()
    spoilt[0] = torch.nan
    perfect, worse = (
        class_curves(relative_errors(p, found), found.visible, category, classes=2)[0, -1]
        for p in (truth, spoilt)
    )
    assert perfect == 1
    share = found.visible[0].sum() / found.visible[category == 0].sum()
    assert float(worse) == pytest.approx(1 - float(share))


def test_an_error_of_exactly_alpha_is_not_right() -> None:
    """Boxes 100 pixels wide: errors of 9.5, 10 and 10.5 pixels against alpha 0.1."""
    boxes = torch.tensor([[0.0, 0.0, 99.0, 49.0]]).expand(3, 4)
    points = torch.tensor([20.0, 20.0]).expand(3, 1, 2)
    found = objects(boxes, points, torch.ones(3, 1, dtype=torch.bool))
    errors = relative_errors(points + torch.tensor([[[9.5, 0]], [[10.0, 0]], [[10.5, 0]]]), found)
    curves = class_curves(
        errors.double().round(decimals=6), found.visible, torch.zeros(3), classes=1
    )
    assert at_alpha(curves, 0.1).tolist() == pytest.approx([100 / 3])
    assert at_alpha(curves, 0.11).tolist() == pytest.approx([100])


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
    boxes = torch.tensor([[0.0, 0, 9, 19], [100.0, 50, 139, 59], [0.0, 0, 9, 9]])
    points = torch.tensor([[[4.5, 9.5], [0, 0]], [[109.5, 51.5], [7, 7]], [[90.0, 90], [8, 8]]])
    visible = torch.tensor([[True, False], [True, False], [False, False]])
    found = objects(boxes, points, visible)
    places = mean_positions(found, torch.tensor([0, 1, 2]))
    # In shares of the box, from its middle: (0, 0) and (-.25, -.3); what nobody shows is at 0.
    assert torch.allclose(places, torch.tensor([[-0.125, -0.15], [0.0, 0.0]]), atol=1e-6)
    # Of one object alone it is that object's.
    alone = mean_positions(found, torch.tensor([1]))
    assert torch.allclose(alone[0], torch.tensor([-0.25, -0.3]), atol=1e-6)
    back = out_of_box(places, boxes, size=UNIT)
    assert torch.allclose(back[0, 0], torch.tensor([3.25, 6.5]))
    assert torch.allclose(back[1, 1], torch.tensor([119.5, 54.5]))


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ((), (0, 1), (2, 1), ("all", 1), (1, 1)):
        with pytest.raises(ValueError, match="they must rise from 1 on, 'all' the last"):
            FewShot(rounds=wrong)  # type: ignore[arg-type]
    for seeds in ((), (1, 1), (-1,)):
        with pytest.raises(ValueError, match=r"seeds are .*; name each once, from 0 on"):
            FewShot(seeds=seeds)
    with pytest.raises(ValueError, match="--batch is 0; use at least 1"):
        KeypointConfig(batch=0, least_steps=0)
    for jitter, said in ((0.5, "a side moves by less than half a box"), (-0.1, "--jitter is -0.1")):
        with pytest.raises(ValueError, match=said):
            KeypointConfig(jitter=jitter)
    assert KeypointConfig(jitter=0.0).jitter == 0


def test_the_papers_protocol_is_there_as_it_was_written() -> None:
    """Section 4.3, and Tulsiani and Malik's loss for 12 x 12 cells."""
    assert FewShot().rounds == (1, 2, 5, 10, 20, 50, 100, "all")
    assert len(FewShot().seeds) == 3
    assert (PAPER.epochs, PAPER.least_steps, PAPER.hidden, PAPER.size) == (3, 500, 512, 224)
    assert (PAPER.weight, PAPER.spread, PAPER.floor, PAPER.jitter) == (50, 0.5, 0.2, 1 / 6)
    assert PAPER.mirror
    assert PAPER.absent == "background"
    # 3 epochs of at least 500 steps of 32 objects.
    assert PAPER.steps(100, categories=12) == 1500
    assert PAPER.steps(32_000, categories=12) == 3000
    # What ships has as many for as many categories, and for one its share of them, rounded up.
    assert KeypointConfig().steps(100, categories=12) == 1500
    assert KeypointConfig().steps(10, categories=1) == 3 * 42
    assert KeypointConfig(batch=8).steps(8_000, categories=1) == 3000

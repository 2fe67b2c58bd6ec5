"""How an object moved: the map that most matches agree on, and boxes and outlines that follow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tiny
from surefeat.core.geometry import apply_affine
from surefeat.keypoints.motion import Motion, fit_motion, mask_box

SIZES = {"size0": (200, 300), "size1": (400, 380)}


def turned(degrees: float, scale: float, *, facing: float = 1.0) -> Tensor:
    """A map whose middle of image 0 (150, 100) goes to (190, 200)."""
    cos, sin = (scale * f(math.radians(degrees)) for f in (math.cos, math.sin))
    linear = torch.tensor([[facing * cos, -sin], [facing * sin, cos]])
    shift = torch.tensor([190.0, 200.0]) - linear @ torch.tensor([150.0, 100.0])
    return torch.cat([linear, shift[:, None]], dim=1)


@pytest.mark.parametrize("facing", [1.0, -1.0])
@pytest.mark.parametrize("degrees", [0.0, 25.0, 160.0])
def test_the_map_is_found_among_as_many_wrong_matches(facing: float, degrees: float) -> None:
    truth = turned(degrees, 1.1, facing=facing)
    generator = tiny.generator(3)
    points0 = torch.rand(60, 2, generator=generator) * torch.tensor([140.0, 90.0]) + 60
    points1 = apply_affine(truth, points0) + torch.randn(60, 2, generator=generator)
    points1[30:] = torch.rand(30, 2, generator=generator) * torch.tensor([379.0, 399.0])
    weights = torch.full((60,), 0.5)
    motion = fit_motion(points0, points1, weights, **SIZES)
    corners = torch.tensor([[60.0, 60.0], [200.0, 60.0], [200.0, 150.0], [60.0, 150.0]])
    away = motion.move_points(corners) - apply_affine(truth, corners)
    assert float(away.norm(dim=1).max()) < 8
    assert motion.mirrored == (facing < 0)
    # Half of the matches agree, each with half of what counts.
    assert motion.support == pytest.approx(0.25, abs=0.04)


def test_wrong_matches_that_are_not_believed_do_not_count() -> None:
    points0 = torch.rand(40, 2, generator=tiny.generator(1)) * 150
    points1 = points0 + torch.tensor([20.0, 5.0])
    points1[:28] = points0[:28] + torch.tensor([120.0, 150.0])  # alike, and more of them
    weights = torch.cat([torch.full((28,), 0.01), torch.full((12,), 0.9)])
    motion = fit_motion(points0, points1, weights, size0=(200, 300), size1=(200, 300))
    assert torch.allclose(motion.matrix[:, 2], torch.tensor([20.0, 5.0]), atol=1.0)


def test_a_photo_twice_as_large_changes_nothing_but_the_scale() -> None:
    generator = tiny.generator(2)
    points0 = torch.rand(30, 2, generator=generator) * 150
    points1 = points0 * 0.9 + 10 + torch.randn(30, 2, generator=generator)
    small = fit_motion(points0, points1, torch.ones(30), size0=(200, 300), size1=(200, 300))
    large = fit_motion(points0, 2 * points1, torch.ones(30), size0=(200, 300), size1=(400, 600))
    assert torch.allclose(2 * small.matrix, large.matrix, atol=1e-3)
    assert small.support == pytest.approx(large.support)


def test_boxes_follow_shifts_mirrors_and_quarter_turns_exactly() -> None:
    """An inclusive box of 40 x 20 pixels, whose edges lie half a pixel outside its pixels."""
    box = torch.tensor([10.0, 30.0, 49.0, 49.0])
    cases = {
        "shift": ([[1.0, 0, 5], [0, 1, -7]], [15.0, 23, 54, 42]),
        "mirror": ([[-1.0, 0, 99], [0, 1, 0]], [50.0, 30, 89, 49]),
        "twice as large": ([[2.0, 0, 0.5], [0, 2, 0.5]], [20.0, 60, 99, 99]),
        "quarter turn": ([[0.0, -1, 79], [1, 0, 0]], [30.0, 10, 49, 49]),
        "out of the photo": ([[1.0, 0, 180], [0, 1, 0]], [190.0, 30, 199, 49]),
    }
    for name, (matrix, expected) in cases.items():
        moved = Motion(torch.tensor(matrix), 1.0).move_box(box, size=(100, 200))
        assert moved.tolist() == pytest.approx(expected, abs=1e-4), name


def test_an_outline_follows_and_its_box_is_the_pixels_it_encloses() -> None:
    outline = torch.tensor([[9.5, 29.5], [49.5, 29.5], [49.5, 49.5], [9.5, 49.5]])
    motion = Motion(torch.tensor([[1.0, 0, 5], [0, 1, -7]]), 1.0)
    (moved,) = motion.move_mask((outline,), size=(100, 200))
    assert torch.allclose(moved, outline + torch.tensor([5.0, -7.0]))
    assert mask_box((moved,), size=(100, 200)).tolist() == [15, 23, 54, 42]
    # A smaller photo ends at its last pixels' outer edges, and so does what is held in it.
    (cut,) = motion.move_mask((outline,), size=(30, 40))
    assert cut.amax(0).tolist() == [39.5, 29.5]
    assert torch.equal(cut, moved.minimum(torch.tensor([39.5, 29.5])))


def test_two_matches_are_too_few() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        fit_motion(torch.rand(2, 2), torch.rand(2, 2), torch.ones(2), size0=(9, 9), size1=(9, 9))

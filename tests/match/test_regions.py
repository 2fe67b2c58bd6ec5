"""Active proposals and their ground-truth boxes, and the thin-plate spline under them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.interpolate import RBFInterpolator
from torch import Tensor

from surefeat.core.geometry import fit_thin_plate
from surefeat.data.benchmarks import load_pf_willow
from surefeat.data.pairs import Pair
from surefeat.measure.material import active_proposals, ground_truth_boxes, region_truth

SQUARE = torch.tensor([[0.0, 0.0], [99.0, 0.0], [0.0, 99.0], [99.0, 99.0]])


def random_points(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 2, generator=generator, dtype=dtype) * 200


@pytest.mark.parametrize("count", [3, 4, 10, 25])
def test_thin_plate_equals_scipy(count: int) -> None:
    points0, points1 = random_points(count, 1), random_points(count, 2)
    queries = random_points(60, 3) * 1.5 - 50
    oracle = RBFInterpolator(
        points0.numpy(), points1.numpy(), kernel="thin_plate_spline", smoothing=0, degree=1
    )
    found = fit_thin_plate(points0, points1)(queries)
    np.testing.assert_allclose(found.numpy(), oracle(queries.numpy()), rtol=0, atol=1e-6)


def test_thin_plate_in_single_precision_passes_through_its_points() -> None:
    points0, points1 = random_points(10, 4, torch.float32), random_points(10, 5, torch.float32)
    error = (fit_thin_plate(points0, points1)(points0) - points1).abs().max()
    assert float(error) < 0.05


def slow_active(boxes: Tensor, points: Tensor) -> list[bool]:
    """Straight from the definition, one box at a time, in whole and part pixels."""
    xs, ys = points[:, 0].tolist(), points[:, 1].tolist()
    frame = min(xs), min(ys), max(xs), max(ys)
    found = []
    for x1, y1, x2, y2 in boxes.tolist():
        wide = max(0.0, min(x2, frame[2]) - max(x1, frame[0]) + 1)
        high = max(0.0, min(y2, frame[3]) - max(y1, frame[1]) + 1)
        share = wide * high / ((x2 - x1 + 1) * (y2 - y1 + 1))
        holds = any(x1 <= x <= x2 and y1 <= y <= y2 for x, y in zip(xs, ys, strict=True))
        found.append(share > 0.75 and holds)
    return found


def test_active_proposals_agree_with_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.rand(400, 2, generator=generator) * 150
    boxes = torch.cat([low, low + 1 + torch.rand(400, 2, generator=generator) * 60], dim=1)
    points = 30 + random_points(25, 1, torch.float32) / 2
    active = active_proposals(boxes, points)
    assert active.tolist() == slow_active(boxes, points)
    assert 20 < int(active.sum()) < 380


def test_active_needs_more_than_three_quarters_and_a_keypoint() -> None:
    # The keypoints' box is 0..99, 100 pixels wide; boxes hang over its right edge.
    points = torch.cat([SQUARE, torch.tensor([[95.0, 50.0]])])
    boxes = torch.tensor(
        [
            [92.5, 40.0, 102.5, 60.0],  # 7.5 of 11 columns
            [70.0, 40.0, 109.0, 60.0],  # 30 of 40 columns: exactly 0.75 is not more
            [71.0, 40.0, 108.0, 60.0],  # 29 of 38
            [10.0, 10.0, 50.0, 50.0],  # wholly inside, but no keypoint in it
            [95.0, 50.0, 95.0, 50.0],  # one pixel, the keypoint's own
            [97.0, 50.0, 94.0, 50.0],  # inverted: no area
        ]
    )
    assert active_proposals(boxes, points).tolist() == [False, False, True, False, True, False]


def test_a_single_keypoint_makes_only_its_pixel_active() -> None:
    boxes = torch.tensor([[5.0, 5.0, 5.0, 5.0], [4.0, 4.0, 6.0, 6.0]])
    assert active_proposals(boxes, torch.tensor([[5.0, 5.0]])).tolist() == [True, False]


def test_ground_truth_follows_shift_and_scale() -> None:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0]])
    scale, shift = torch.tensor([2.0, 0.5]), torch.tensor([7.0, -3.0])
    truth = ground_truth_boxes(boxes, SQUARE, SQUARE * scale + shift, size1=(500, 500))
    torch.testing.assert_close(truth, torch.tensor([[27.0, 7.0, 67.0, 27.0]]))


def test_ground_truth_takes_the_mean_of_the_two_outer_corners() -> None:
    # A shear x' = x + y/2: corners at x 10+5, 30+5, 10+15, 30+15 -> sorted 15, 25, 35, 45.
    boxes = torch.tensor([[10.0, 10.0, 30.0, 30.0]])
    sheared = SQUARE + torch.stack([SQUARE[:, 1] / 2, torch.zeros(4)], dim=1)
    truth = ground_truth_boxes(boxes, SQUARE, sheared, size1=(500, 500))
    torch.testing.assert_close(truth, torch.tensor([[20.0, 10.0, 40.0, 30.0]]))


def test_ground_truth_survives_mirroring() -> None:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0]])
    mirrored = SQUARE * torch.tensor([-1.0, 1.0]) + torch.tensor([99.0, 0.0])
    truth = ground_truth_boxes(boxes, SQUARE, mirrored, size1=(100, 100))
    torch.testing.assert_close(truth, torch.tensor([[69.0, 20.0, 89.0, 60.0]]))


def test_ground_truth_agrees_with_a_slow_loop_over_scipy() -> None:
    points0, points1 = random_points(9, 7), random_points(9, 8)
    low = random_points(20, 9) / 2
    boxes = torch.cat([low, low + random_points(20, 10) / 3], dim=1)
    spline = RBFInterpolator(points0.numpy(), points1.numpy(), kernel="thin_plate_spline", degree=1)
    truth = ground_truth_boxes(boxes, points0, points1, size1=(180, 160))
    for (x1, y1, x2, y2), found in zip(boxes.tolist(), truth.tolist(), strict=True):
        corners = spline(np.array([[x1, y1], [x2, y1], [x1, y2], [x2, y2]]))
        xs, ys = sorted(corners[:, 0]), sorted(corners[:, 1])
        expected = [sum(xs[:2]) / 2, sum(ys[:2]) / 2, sum(xs[2:]) / 2, sum(ys[2:]) / 2]
        top = [159, 179, 159, 179]
        clamped = [min(max(v, 0), t) for v, t in zip(expected, top, strict=True)]
        assert found == pytest.approx(clamped, abs=1e-5)


def test_ground_truth_is_cut_to_the_image() -> None:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 9.0, 9.0]])
    moved = SQUARE + torch.tensor([80.0, -300.0])
    truth = ground_truth_boxes(boxes, SQUARE, moved, size1=(50, 100))
    assert truth.tolist() == [[90.0, 0.0, 99.0, 0.0], [80.0, 0.0, 89.0, 0.0]]


def test_one_keypoint_gives_a_shift() -> None:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0]])
    start, end = torch.tensor([[15.0, 25.0]]), torch.tensor([[19.0, 20.0]])
    truth = ground_truth_boxes(boxes, start, end, size1=(100, 100))
    torch.testing.assert_close(truth, torch.tensor([[14.0, 15.0, 34.0, 55.0]]))


@pytest.mark.parametrize("xs", [[0.0, 40.0], [0.0, 20.0, 40.0], [0.0, 10.0, 25.0, 40.0]])
def test_keypoints_on_a_line_are_followed_along_it_alone(xs: list[float]) -> None:
    # Stretched by 2 along x and moved by 5 in y: heights stay, widths double.
    start = torch.tensor([[x, 30.0] for x in xs])
    end = torch.tensor([[2 * x, 35.0] for x in xs])
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0]])
    truth = ground_truth_boxes(boxes, start, end, size1=(200, 200))
    torch.testing.assert_close(truth, torch.tensor([[20.0, 25.0, 60.0, 65.0]]), rtol=0, atol=1e-3)


def test_keypoints_at_one_place_go_to_the_mean_of_their_targets() -> None:
    start = torch.cat([SQUARE, SQUARE[:1]])
    end = torch.cat([SQUARE, SQUARE[:1] + 10])
    spline = fit_thin_plate(start.double(), end.double())
    torch.testing.assert_close(spline(SQUARE[:1].double()), torch.full((1, 2), 5.0).double())


def test_region_truth_uses_only_keypoints_visible_in_both_images() -> None:
    far = torch.tensor([[300.0, 300.0]])
    points0, points1 = torch.cat([SQUARE, far]), torch.cat([SQUARE + 10, far * torch.nan])
    visible = torch.tensor([True] * 4 + [False])
    here = Path("a.png")
    pair = Pair(here, here, "car", points0, points1, visible, (400, 400), (400, 400), "pair")
    boxes = torch.tensor([[200.0, 200.0, 310.0, 310.0], [0.0, 0.0, 50.0, 60.0]])
    truth = region_truth(pair, boxes)
    assert truth.active.tolist() == [1]
    torch.testing.assert_close(truth.boxes, torch.tensor([[10.0, 10.0, 60.0, 70.0]]))


def test_a_pair_without_active_proposals_has_empty_truth() -> None:
    here = Path("a.png")
    visible = torch.ones(4, dtype=torch.bool)
    pair = Pair(here, here, "car", SQUARE, SQUARE, visible, (400, 400), (400, 400), "pair")
    truth = region_truth(pair, torch.tensor([[200.0, 200.0, 310.0, 310.0]]))
    assert truth.active.shape == (0,)
    assert truth.boxes.shape == (0, 4)


def test_real_pairs_have_truth_inside_the_image(data_root: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for pair in load_pf_willow(data_root / "pf-willow")[::90]:
        height, width = pair.size0
        low = torch.rand(300, 2, generator=generator) * torch.tensor([width, height]) * 0.8
        boxes = torch.cat([low, low + 10 + torch.rand(300, 2, generator=generator) * 60], dim=1)
        truth = region_truth(pair, boxes)
        assert len(truth.active) > 0
        assert bool((truth.boxes[:, 2:] >= truth.boxes[:, :2]).all())
        assert float(truth.boxes.min()) >= 0
        assert float(truth.boxes[:, 2].max()) <= pair.size1[1] - 1

"""PCR, mIoU@k and the controls, against hand-computed cases and slow loops."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefeat.data.benchmarks import shifted, shifted_image
from surefeat.data.pairs import Pair
from surefeat.measure.metrics import area, identity_points, region_curves


def slow_pcr(ious: list[Tensor], t: float) -> list[float]:
    return [sum(1 - v < t for v in iou.tolist()) / len(iou) for iou in ious if len(iou)]


def slow_miou(ious: list[Tensor], k: int) -> float:
    kept = [value for iou in ious for value in iou.tolist()[:k]]
    return sum(kept) / len(kept)


def test_region_curves_agree_with_slow_loops() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 150, 0, 40, 1, 99]
    ious = [torch.rand(n, generator=generator, dtype=torch.float64) for n in lengths]
    curves = region_curves(ious, ["x", "x", "x", "y", "y", "z"])
    for index in range(101):
        shares = slow_pcr(ious, index / 100)
        assert curves["pcr"][index] == pytest.approx(sum(shares) / 5)
        by_class = (sum(shares[:2]) / 2 + sum(shares[2:4]) / 2 + shares[4]) / 3
        assert curves["pcr by class"][index] == pytest.approx(by_class)
    for k in range(1, 101):
        assert curves["miou"][k - 1] == pytest.approx(slow_miou(ious, k))
    assert (len(curves["pcr"]), len(curves["miou"])) == (101, 100)


def test_region_curves_of_a_hand_computed_case() -> None:
    # Pair 1: IoU 0.5 of the best score, then 1; pair 2: IoU 0.25.
    curves = region_curves([torch.tensor([0.5, 1.0]), torch.tensor([0.25])], ["a", "b"])
    assert curves["pcr"][0] == 0.0  # 1 - IoU < 0 holds for nothing, not even a perfect match
    assert curves["pcr"][1] == 0.25
    assert curves["pcr"][50] == 0.25  # 1 - 0.5 < 0.5 does not hold
    assert curves["pcr"][51] == 0.5
    assert curves["pcr"][76] == 1.0
    assert curves["miou"][0] == pytest.approx((0.5 + 0.25) / 2)
    assert curves["miou"][1] == curves["miou"][99] == pytest.approx((1 + 0.5 + 0.25) / 3)
    # Trapezoids of 1/100: a step from a to b within one hundredth counts half.
    heights = [0.0] + [0.25] * 50 + [0.5] * 25 + [1.0] * 25
    expected = sum((a + b) / 2 for a, b in pairwise(heights)) / 100
    assert float(area(curves["pcr"])) == pytest.approx(expected)
    assert area(curves["miou"]) == pytest.approx((98 * 1.75 / 3 + (0.375 + 1.75 / 3) / 2) / 99)


def test_perfect_and_hopeless_regions_reach_the_ends_of_the_scale() -> None:
    perfect = region_curves([torch.ones(5)], ["a"])
    assert area(perfect["pcr"]) == pytest.approx(0.995)  # t = 0 admits nothing
    assert area(perfect["miou"]) == pytest.approx(1.0)
    hopeless = region_curves([torch.zeros(5)], ["a"])
    assert area(hopeless["pcr"]) == area(hopeless["miou"]) == 0.0


def test_region_curves_refuse_to_average_nothing() -> None:
    with pytest.raises(ValueError, match="no pair has an active proposal"):
        region_curves([torch.zeros(0)], ["a"])


def test_identity_keeps_the_relative_place() -> None:
    # Outer corners and the middle of a 100 x 50 image, in a 10 x 20 one.
    points = torch.tensor([[-0.5, -0.5], [49.5, 99.5], [24.5, 49.5]])
    moved = identity_points(points, size0=(100, 50), size1=(10, 20))
    torch.testing.assert_close(moved, torch.tensor([[-0.5, -0.5], [19.5, 9.5], [9.5, 4.5]]))


def test_shifted_pairs_move_points_and_pixels_together() -> None:
    generator = torch.Generator().manual_seed(2)
    points = torch.tensor([[3.0, 4.0], [60.0, 20.0], [95.0, 9.0], [79.0, 0.0], [80.0, 0.0]])
    image = torch.rand(3, 30, 100, generator=generator) * 0.5
    for x, y in points.long().tolist():
        image[:, y, x] = 1.0
    here, seen = Path("a.png"), torch.ones(5, dtype=torch.bool)
    pair = shifted(Pair(here, here, "x", points, points, seen, (30, 100), (30, 100), "x"), 45)
    assert pair is not None
    # 45/224 of 100 px = 20.09 -> 20.
    assert pair.visible.tolist() == [True, True, False, True, False]
    assert pair.points1[:, 0].tolist() == [23.0, 80.0, 115.0, 99.0, 100.0]
    moved = shifted_image(image, 45)
    for x, y in pair.common()[1].long().tolist():
        assert moved[:, y, x].tolist() == [1.0, 1.0, 1.0]
    padded = torch.nn.functional.pad(image, (20, 0))
    padded[..., :20] = image[..., :20].flip(-1)
    torch.testing.assert_close(moved, padded[..., :100], rtol=0, atol=0)
    with pytest.raises(ValueError, match="use 0 to 224"):
        shifted_image(image, 230)

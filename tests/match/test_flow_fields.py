"""Dense fields from regions, and what is moved along a field."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefeat.match.dense import flow_from_regions, transfer_points, warp_image
from surefeat.match.sd_filter import sd_filter
from tiny import random_boxes, smooth_photo


def slow_flow(
    boxes0: Tensor, boxes1: Tensor, scores: Tensor, size0: tuple[int, int], size1: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    field, confidence = torch.zeros(*size0, 2), torch.zeros(size0)
    taken: set[tuple[int, int]] = set()
    assigned = torch.zeros(size0, dtype=torch.bool)
    for i in sorted(range(len(scores)), key=lambda n: -float(scores[n])):
        a, b = boxes0[i].tolist(), boxes1[i].tolist()
        for y in range(int(a[1]), int(a[3]) + 1):
            for x in range(int(a[0]), int(a[2]) + 1):
                if assigned[y, x]:
                    continue
                assigned[y, x] = True
                tx = (x - a[0] + 0.5) / (a[2] - a[0] + 1) * (b[2] - b[0] + 1) + b[0] - 0.5
                ty = (y - a[1] + 0.5) / (a[3] - a[1] + 1) * (b[3] - b[1] + 1) + b[1] - 0.5
                target = (
                    min(max(round(tx), 0), size1[1] - 1),
                    min(max(round(ty), 0), size1[0] - 1),
                )
                if target not in taken:
                    taken.add(target)
                    field[y, x] = torch.tensor([target[0] - x, target[1] - y])
                    confidence[y, x] = scores[i]
    return field, confidence


def test_flow_from_regions_equals_a_slow_loop() -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        size0, size1 = (23, 31), (37, 19)
        boxes0, boxes1 = (random_boxes(12, s, generator) for s in (size0, size1))
        scores = torch.rand(12, generator=generator)
        field, confidence = flow_from_regions(boxes0, boxes1, scores, size0=size0, size1=size1)
        # The oracle meets pixels box by box, so within a target the most confident comes first.
        wanted = slow_flow(boxes0, boxes1, scores, size0, size1)
        assert torch.equal(field, wanted[0])
        assert torch.equal(confidence, wanted[1])


def test_of_equal_scores_the_first_region_goes_first() -> None:
    """However many there are: fast sorts keep the order of a few by chance."""
    count, size = 300, (12, 14)
    boxes0 = torch.tensor([[2.0, 3.0, 9.0, 8.0]]).repeat(count, 1)
    shifts = torch.arange(count)[:, None] % 3 - 1.0
    for first in range(3):
        boxes1 = boxes0 + shifts.roll(-first, 0)
        field, _ = flow_from_regions(
            boxes0, boxes1, torch.full((count,), 0.7), size0=size, size1=size
        )
        assert field[5, 5].tolist() == [first - 1.0] * 2


def test_boxes_under_one_affine_map_give_the_affine_field() -> None:
    generator = torch.Generator().manual_seed(0)
    boxes0 = random_boxes(40, (40, 50), generator)
    scale, shift = torch.tensor([2.0, 1.5] * 2), torch.tensor([7.0, 3.0] * 2)
    outer = torch.tensor([-0.5, -0.5, 0.5, 0.5])
    boxes1 = (boxes0 + outer) * scale + shift - outer
    field, confidence = flow_from_regions(
        boxes0, boxes1, torch.ones(40), size0=(40, 50), size1=(200, 200)
    )
    ys, xs = torch.meshgrid(torch.arange(40.0), torch.arange(50.0), indexing="ij")
    pixels = torch.stack([xs, ys], -1)
    error = (field + pixels - (pixels * scale[:2] + shift[:2])).abs()
    assert (confidence > 0).float().mean() > 0.9
    assert error[confidence > 0].max() <= 0.5


def test_regions_without_score_or_overlap_leave_everything_masked() -> None:
    boxes = torch.tensor([[2.0, 2.0, 5.0, 5.0], [-30.0, 0.0, -20.0, 4.0]])
    field, confidence = flow_from_regions(
        boxes, boxes, torch.tensor([0.0, 1.0]), size0=(9, 9), size1=(9, 9)
    )
    assert not confidence.any()
    assert not field.any()


def test_dense_field_of_shifted_regions_is_the_shift_everywhere() -> None:
    boxes0 = torch.tensor([[4.0, 4.0, 20.0, 14.0], [10.0, 12.0, 30.0, 26.0]])
    shift = torch.tensor([5.0, -3.0])
    field, confidence = flow_from_regions(
        boxes0, boxes0 + shift.repeat(2), torch.tensor([0.5, 0.9]), size0=(30, 36), size1=(60, 60)
    )
    photo = smooth_photo(30, 36)
    smooth = sd_filter(field.permute(2, 0, 1)[None], confidence[None] > 0, photo[None])
    assert smooth.shape == (1, 2, 30, 36)
    assert (smooth - shift[:, None, None]).abs().max() < 1e-2
    assert not confidence[0, 0]
    assert confidence[5, 5] == 0.5


def pixels_of(height: int, width: int) -> Tensor:
    ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([xs, ys], dim=-1).float()


def test_image_and_points_move_together() -> None:
    field = torch.zeros(30, 40, 2)
    field[..., 0], field[..., 1] = 6.0, -4.0
    image1 = torch.zeros(3, 50, 60, dtype=torch.uint8)
    image1[:, 9, 21] = 255
    warped = warp_image(image1, pixels_of(30, 40) + field)
    assert warped.dtype == torch.uint8
    assert warped.shape == (3, 30, 40)
    assert torch.nonzero(warped[0]).tolist() == [[13, 15]]
    assert transfer_points(field, torch.tensor([[15.0, 13.0]])).tolist() == [[21.0, 9.0]]
    assert transfer_points(field, torch.tensor([[99.0, 13.2]]))[0].tolist() == pytest.approx(
        [105, 9.2]
    )


def test_warp_reads_between_pixels_and_repeats_the_border() -> None:
    image1 = torch.arange(12.0).reshape(1, 3, 4)
    warped = warp_image(image1, pixels_of(3, 4) + 0.5)
    assert warped[0, 0, 0] == pytest.approx(2.5)
    assert warped[0, 2, 3] == 11


def test_points_move_with_the_pixel_they_lie_in_up_to_the_corners() -> None:
    """A field of which every pixel has its own number; what is outside goes with the border."""
    field = torch.arange(24.0).reshape(3, 4, 2)
    points = torch.tensor(
        [[0.0, 0.0], [3.4, 2.4], [1.6, 0.7], [-0.5, 2.0], [3.0, -4.0], [9.0, 1.0]]
    )
    moved = transfer_points(field, points) - points
    assert moved.tolist() == [
        pytest.approx(field[y, x].tolist(), abs=1e-4)
        for y, x in ((0, 0), (2, 3), (1, 2), (2, 0), (0, 3), (1, 3))
    ]


@pytest.mark.parametrize("score", [0.0, -0.5])
def test_a_region_without_score_moves_nothing(score: float) -> None:
    boxes = torch.tensor([[1.0, 1.0, 4.0, 3.0], [6.0, 1.0, 8.0, 3.0]])
    scores = torch.tensor([score, 0.8])
    field, confidence = flow_from_regions(
        boxes, boxes + torch.tensor([1.0, 2.0] * 2), scores, size0=(8, 10), size1=(8, 10)
    )
    assert not field[1:4, 1:5].any()
    assert not confidence[1:4, 1:5].any()
    assert field[2, 7].tolist() == [1.0, 2.0]
    assert float(confidence[2, 7]) == pytest.approx(0.8)

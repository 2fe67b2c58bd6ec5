"""The side from which objects are seen, found from their keypoints; standard errors of shares."""

from __future__ import annotations

import pytest
import torch
from part_search import mean_of
from rigid_views import Views, angle_between, find_views
from torch import Tensor
from viewpoint import share, which_bin

# A thing with two like halves, x being the side: (left, right) pairs, then two in the middle.
HALF = torch.tensor([[0.8, 1.0, 0.5], [0.7, -1.1, 0.4], [0.4, 0.3, -0.6], [0.5, -0.9, -0.3]])
MIDDLE = torch.tensor([[0.0, 1.4, 0.1], [0.0, -1.2, -0.5]])
SHAPE = torch.cat([HALF, HALF * torch.tensor([-1.0, 1.0, 1.0]), MIDDLE]).double()
FLIP = (4, 5, 6, 7, 0, 1, 2, 3, 8, 9)


def _seen(count: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rotations (N, 3, 3), points (N, 10, 2) and which are seen: the seven nearest ones."""
    generator = torch.Generator().manual_seed(4)
    turned = torch.linalg.qr(torch.randn(count, 3, 3, dtype=torch.float64, generator=generator)).Q
    rotations = turned * torch.linalg.det(turned)[:, None, None]
    there = SHAPE @ rotations.transpose(1, 2)
    size = 40 + 60 * torch.rand(count, 1, 1, generator=generator)
    points = there[..., :2] * size + 300 * torch.rand(count, 1, 2, generator=generator)
    points = points + noise * size * torch.randn(points.shape, generator=generator)
    depth = there[..., 2]
    visible = depth <= depth.sort(1).values[:, 6:7]
    return rotations, points.masked_fill(~visible[..., None], float("nan")), visible


def _errors(truth: Tensor, views: Views) -> Tensor:
    """Degrees by which the angles between any two views are wrong."""
    row, column = torch.triu_indices(len(truth), len(truth), 1)
    pairs = (angle_between(one[row], one[column]) for one in (truth, views.rotations))
    return next(pairs).sub(next(pairs)).abs()


@pytest.mark.parametrize(("noise", "median", "most"), [(0.0, 1.5, 5.0), (0.04, 4.0, 15.0)])
def test_angles_between_views_are_found_from_keypoints_with_some_hidden(
    noise: float, median: float, most: float
) -> None:
    truth, points, visible = _seen(80, noise)
    generator = torch.Generator().manual_seed(0)
    views = find_views(points, visible, flip=FLIP, generator=generator, restarts=8)
    errors = _errors(truth, views)
    assert float(errors.median()) < median
    assert float(errors.quantile(0.95)) < most
    assert torch.allclose(torch.linalg.det(views.rotations), torch.ones(80).double())
    # What is seen lies nearer than what is hidden, as it was made.
    found = (views.rotations[:, 2] @ views.shape.T).flatten()
    made = (truth[:, 2] @ SHAPE.T).flatten()
    assert float(torch.corrcoef(torch.stack([found, made]))[0, 1]) > 0.95


def test_a_view_that_keypoints_leave_open_is_doubted() -> None:
    """Three points fit from two sides, and almost from others."""
    _, points, visible = _seen(80, 0.0)
    visible[:10] &= visible[:10].cumsum(1) <= 3
    generator = torch.Generator().manual_seed(0)
    views = find_views(points, visible, flip=FLIP, generator=generator, restarts=8)
    assert float(views.doubt[10:].median()) < 0.05
    assert float(views.doubt[:10].mean()) > 5 * float(views.doubt[10:].mean())
    assert len(views.doubt) == 80


def test_bins_of_angles() -> None:
    assert which_bin(torch.tensor([0.0, 29.0, 31.0, 89.0, 91.0, 180.0])).tolist() == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


def test_standard_errors_of_hand_computed_cases() -> None:
    """Two sources with 2 of 4 and 4 of 4: 6 of 8, off by -1 and +1, 2 / (2 - 1) * 2 = 4."""
    assert share([1, 1, 2, 2], [2, 2, 2, 2], ["a", "a", "b", "b"]) == [75.0, 25.0]
    # Questions of one photo count as one draw; alone each, it is the usual standard error.
    assert mean_of([0.0, 1.0], [0, 1]) == [50.0, 50.0]
    assert mean_of([0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]) == [50.0, 50.0]
    assert mean_of([0.0, 0.0, 1.0, 1.0], [0, 1, 2, 3])[1] == pytest.approx(28.87)

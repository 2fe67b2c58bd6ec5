"""Crops: pixels and points move together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefeat.core.geometry import into_box, jittered_box, mirrored, out_of_box
from surefeat.core.image import crop


def blob(x: float, y: float, *, size: tuple[int, int], spread: float) -> Tensor:
    """A bright round spot on black: (3, H, W) uint8."""
    rows, columns = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
    square = (columns - x).square() + (rows - y).square()
    return (255 * (-square / (2 * spread**2)).exp()).round().byte().expand(3, -1, -1)


def centre(image: Tensor) -> Tensor:
    """Centre of mass (2,) as x, y."""
    mass = image[0].double()
    rows, columns = torch.meshgrid(*(torch.arange(s) for s in mass.shape), indexing="ij")
    return torch.stack([(mass * columns).sum(), (mass * rows).sum()]) / mass.sum()


@pytest.mark.parametrize(
    "box",
    [
        [10.0, 20.0, 73.0, 83.0],  # as large as the crop
        [20.3, 31.7, 61.2, 70.4],  # enlarged, between pixels
        [-30.0, -10.5, 250.0, 199.0],  # shrunk, not square, beyond the image
    ],
)
def test_a_crop_moves_points_and_pixels_together(box: list[float]) -> None:
    image, where = blob(40.25, 52.5, size=(180, 200), spread=4), torch.tensor(box)
    cut = crop(image, where, size=64)
    assert cut.shape == (3, 64, 64)
    assert cut.dtype == torch.uint8
    point = into_box(torch.tensor([[40.25, 52.5]]), where, size=(64, 64))[0]
    torch.testing.assert_close(centre(cut).float(), point, atol=0.05, rtol=0)


def test_a_box_of_the_crops_size_gives_its_pixels() -> None:
    image = torch.randint(0, 256, (3, 40, 50), generator=torch.Generator().manual_seed(0)).byte()
    box = torch.tensor([5.0, 3.0, 20.0, 18.0])
    assert torch.equal(crop(image, box, size=16), image[:, 3:19, 5:21])


def test_beyond_the_image_its_border_is_repeated() -> None:
    image = torch.arange(8, dtype=torch.uint8).expand(3, 8, 8) * 10
    cut = crop(image, torch.tensor([-4.0, 0.0, 3.0, 7.0]), size=8)
    assert cut[0, 4].tolist() == [0, 0, 0, 0, 0, 10, 20, 30]
    # A box wholly outside is its nearest border, not an error.
    assert crop(image, torch.tensor([20.0, 0.0, 27.0, 7.0]), size=8)[0, 0].tolist() == [70] * 8


def test_a_crop_shows_what_lies_between_the_box_and_its_surroundings() -> None:
    """Enlarged, its outermost pixels lie between the box's own and those around it."""
    image = torch.arange(30, dtype=torch.uint8).expand(3, 30, 30) * 8
    across, down = (crop(i, torch.tensor([10.0, 10.0, 19.0, 19.0]), size=40)
                    for i in (image, image.transpose(1, 2)))  # fmt: skip
    places = 10 - 0.5 + (torch.arange(40) + 0.5) / 4
    assert (across[0, 20] - 8 * places).abs().max() <= 1
    assert torch.equal(across, down.transpose(1, 2))


def test_points_come_back_from_their_cells() -> None:
    boxes = torch.tensor([[3.0, 4.0, 30.0, 17.0], [0.5, -2.0, 1.5, 90.0]])
    points = torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(0)) * 50
    cells = into_box(points, boxes, size=(14, 7))
    torch.testing.assert_close(out_of_box(cells, boxes, size=(14, 7)), points, atol=1e-4, rtol=0)
    # The box's outer edges are those of the grid: by hand, 3 - .5 -> -.5 and 30 + .5 -> 6.5.
    corners = torch.tensor([[2.5, 3.5], [30.5, 17.5]])
    edges = into_box(corners, boxes[0], size=(14, 7))
    torch.testing.assert_close(edges, torch.tensor([[-0.5, -0.5], [6.5, 13.5]]))


def test_a_mirrored_crop_shows_the_mirrored_points_under_swapped_names() -> None:
    """left_eye, nose, right_eye: what was left is right after."""
    cells = torch.tensor([[1.0, 2.0], [3.0, 5.0], [6.0, 2.5]])
    visible, flip = torch.tensor([True, True, False]), torch.tensor([2, 1, 0])
    moved, seen = mirrored(cells, visible, flip, size=(8, 8))
    assert moved.tolist() == [[1.0, 2.5], [4.0, 5.0], [6.0, 2.0]]
    assert seen.tolist() == [False, True, True]
    image = blob(1.0, 2.0, size=(8, 8), spread=0.4)
    torch.testing.assert_close(centre(image.flip(-1)).float(), moved[2], atol=0.01, rtol=0)


def test_jitter_moves_every_side_by_at_most_its_share() -> None:
    box = torch.tensor([10.0, 20.0, 69.0, 49.0]).expand(4000, 4)  # 60 x 30
    moved = jittered_box(box, torch.Generator().manual_seed(0)) - box
    most = moved.abs().amax(0)
    assert (most <= torch.tensor([10.0, 5.0, 10.0, 5.0]) + 1e-4).all()
    assert (most > torch.tensor([9.9, 4.95, 9.9, 4.95])).all()
    assert moved.mean(0).abs().max() < 0.4
    assert torch.corrcoef(moved.T).fill_diagonal_(0).abs().max() < 0.06

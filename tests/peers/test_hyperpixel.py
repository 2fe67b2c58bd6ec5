"""Hyperpixel Flow: histogram, product and transfer against slow loops and known moves."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.data.drawn import draw_many
from surefeat.model.trunks import ResNet50
from surefeat.peers.hyperpixel import (
    DEFAULT,
    Grid,
    HyperpixelConfig,
    cosines,
    gaussian,
    hough_scores,
    hyperpixel_row,
    hyperpixel_transfer,
    hyperpixels,
    move_points,
    offset_bins,
    shrink,
    tap_layers,
)
from tiny import CPU


def grid(rows: int, columns: int, *, jump: float = 4, size: tuple[int, int] = (40, 50)) -> Grid:
    ys, xs = torch.arange(rows) * jump, torch.arange(columns) * jump
    return Grid(torch.cartesian_prod(ys, xs).flip(-1), size, half=6)


@pytest.fixture(scope="module")
def trunk() -> ResNet50:
    torch.manual_seed(0)
    return ResNet50(stride_in_1x1=True, dilated=False).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def image() -> Tensor:
    """Noise over a drawn object: no two places are alike."""
    drawn = draw_many(1, size=112, seed=3)[0].image.float()
    noise = torch.rand(3, 28, 28, generator=torch.Generator().manual_seed(0))
    grown = F.interpolate(255 * noise[None], size=(112, 112), mode="bilinear")[0]
    return (0.5 * drawn + 0.5 * grown).round().byte()


def test_the_histogram_counts_every_vote_once_in_its_bin() -> None:
    """5 x 6 cells against 4 x 7, votes and blurred counts in a double loop."""
    grid0, grid1 = grid(5, 6), grid(4, 7, size=(36, 44))
    cosine = torch.randn(30, 28, generator=torch.Generator().manual_seed(1))
    side = math.sqrt((50 + 44) * (40 + 36) / DEFAULT.cells)
    bins, (rows, columns) = offset_bins(grid0, grid1, DEFAULT.cells)
    counts = torch.zeros(rows, columns)
    places = {}
    for n, (x0, y0) in enumerate(grid0.centres.tolist()):
        for m, (x1, y1) in enumerate(grid1.centres.tolist()):
            x, y = math.floor((50 - x0 + x1) / side), math.floor((40 - y0 + y1) / side)
            places[n, m] = (y, x)
            assert int(bins[n, m]) == y * columns + x
            counts[y, x] += max(0.0, float(cosine[n, m])) ** 3
    kernel, reach = gaussian(7), 3
    scores = hough_scores(cosine, grid0, grid1)
    for (n, m), (y, x) in list(places.items())[::37]:
        total = 0.0
        for dy in range(-reach, reach + 1):
            for dx in range(-reach, reach + 1):
                if 0 <= y + dy < rows and 0 <= x + dx < columns:
                    total += float(kernel[dy + reach, dx + reach] * counts[y + dy, x + dx])
        vote = max(0.0, float(cosine[n, m])) ** 3
        assert float(scores[n, m]) == pytest.approx(vote * total, rel=1e-4, abs=1e-6)


def test_the_gaussian_sums_to_one_and_is_as_wide_as_said() -> None:
    kernel = gaussian(7)
    assert float(kernel.sum()) == pytest.approx(1, abs=1e-6)
    ratio = float(kernel[3, 4] / kernel[3, 3])
    assert ratio == pytest.approx(math.exp(-1 / (2 * 1.487**2)), abs=1e-3)


def test_coarse_layers_multiplied_first_are_the_direct_product(
    trunk: ResNet50, image: Tensor
) -> None:
    first, second = (hyperpixels(trunk, part) for part in (image, image[:, :96].flip(-1)))
    whole = [
        torch.cat([
            F.interpolate(layer[None], size=side.layers[0].shape[-2:], mode="bilinear",
                          align_corners=True)[0]
            for layer in side.layers
        ])[:, side.rows, side.columns].flatten(1)
        for side in (first, second)
    ]  # fmt: skip
    direct = F.normalize(whole[0], dim=0).T @ F.normalize(whole[1], dim=0)
    assert whole[0].shape[0] == 256 + 512 + 3 * 1024
    torch.testing.assert_close(cosines(first, second), direct, rtol=0, atol=1e-4)


def test_an_image_of_300_by_225_keeps_3640_cells() -> None:
    """The count is the authors' geometry: boxes of 27 px every 4, at most 4 px beyond the image."""

    boxes = 0
    for i in range(57):
        for j in range(75):
            inside = 4 * j - 13 >= -4 and 4 * i - 13 >= -4
            boxes += inside and 4 * j + 13 <= 304 and 4 * i + 13 <= 229
    assert boxes == 3640
    torch.manual_seed(0)
    thin = HyperpixelConfig(taps=(2,))
    trunk = ResNet50(stride_in_1x1=True, dilated=False).eval().requires_grad_(False)
    seen = hyperpixels(trunk, torch.zeros(3, 225, 300, dtype=torch.uint8), thin)
    assert len(seen.grid.centres) == boxes
    assert seen.grid.centres[0].tolist() == [12, 12]


def test_taps_are_read_before_the_last_relu_of_their_block(trunk: ResNet50, image: Tensor) -> None:
    after = trunk(
        (image.float()[None] / 255 - torch.tensor(trunk.mean)[:, None, None])
        / torch.tensor(trunk.std)[:, None, None],
        ("res2b", "res3d"),
    )
    for raw, name in zip(tap_layers(trunk, image, (2, 7)), ("res2b", "res3d"), strict=True):
        assert float(raw.amin()) < 0
        torch.testing.assert_close(raw.clamp_min(0), after[name][0])


def test_an_image_against_itself_gives_every_point_back(trunk: ResNet50, image: Tensor) -> None:
    transfer = hyperpixel_transfer(trunk)
    points = torch.tensor([[30.0, 40], [55.5, 61], [80, 22], [2, 109]])
    assert float((transfer(image, image, points) - points).norm(dim=1).amax()) < 1


def test_an_image_against_itself_shifted_gives_the_shift(trunk: ResNet50, image: Tensor) -> None:
    """By 12 px, three cells; around the middle, where both show the same."""
    moved = torch.roll(image, shifts=(0, 12), dims=(1, 2))
    points = torch.tensor([[40.0, 40], [55, 61], [62, 50]])
    away = hyperpixel_transfer(trunk)(image, moved, points) - points
    torch.testing.assert_close(away, torch.tensor([[12.0, 0]] * 3), rtol=0, atol=1)


def test_a_point_moves_with_the_mean_of_its_boxes_or_the_nearest_one() -> None:
    cells = grid(3, 3, jump=10)  # boxes of 12 px around 0, 10, 20
    targets = cells.centres + torch.arange(9.0)[:, None]
    inside, far = torch.tensor([[5.0, 5.0]]), torch.tensor([[40.0, 20.0]])
    # In four boxes, moved by 0, 1, 3 and 4; beyond all of them, nearest to the last column.
    assert move_points(inside, cells, targets).tolist() == [[7.0, 7.0]]
    assert move_points(far, cells, targets).tolist()[0] == pytest.approx([45.0, 25.0])


def test_large_images_are_seen_smaller_with_points_in_their_own_pixels(
    trunk: ResNet50, image: Tensor
) -> None:
    large = F.interpolate(image[None].float(), scale_factor=4, mode="nearest")[0].byte()
    small, frame = shrink(large, 112)
    assert small.shape == (3, 112, 112)
    assert frame.original == (448, 448)
    points = torch.tensor([[120.0, 160], [222, 244]])
    transfer = hyperpixel_transfer(trunk, HyperpixelConfig(longest=112))
    assert float((transfer(large, large, points) - points).norm(dim=1).amax()) < 4


def test_the_row_says_what_it_is_and_that_its_layers_were_chosen_by_labels() -> None:
    row = hyperpixel_row(init=("none",), device=CPU)
    assert row.asked(("nearest", "own")) == ("own",)
    assert "val keypoints" in row.settings["layers chosen"]
    with pytest.raises(ValueError, match="own way"):
        row.extract(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_a_tiny_image_is_refused_in_words(trunk: ResNet50) -> None:
    with pytest.raises(ValueError, match="too small"):
        hyperpixels(trunk, torch.zeros(3, 12, 60, dtype=torch.uint8))

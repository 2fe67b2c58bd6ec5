"""Warps by rendering: pixels and points must move together (method, section 1)."""

from __future__ import annotations

import math
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from surefeat.core.geometry import apply_affine, compose, invert
from surefeat.learn.config import ColourConfig, WarpConfig, preset
from surefeat.learn.warp import (
    change_colour,
    corresponding_points,
    draw,
    mirror,
    render,
    shared_points,
    two_views,
    view_maps,
)

NO_COLOUR = ColourConfig(probability=0.0)


def _blob_image(places: Tensor, *, size: tuple[int, int], radius: float = 2.5) -> Tensor:
    """(1, 3, H, W) black with a smooth white spot at each place (x, y)."""
    ys, xs = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
    grid = torch.stack([xs, ys], -1).float()
    apart = (grid[None] - places[:, None, None]).square().sum(-1)
    return torch.exp(-apart / (2 * radius**2)).amax(0).expand(1, 3, *size).contiguous()


def _spot_near(image: Tensor, place: Tensor) -> Tensor:
    """Sub-pixel centre (x, y) of the bright spot within 10 px of a place of a (3, H, W) image.

    Mirror padding shows further copies of the spot, so the whole image cannot be asked.
    """
    ys, xs = torch.meshgrid(*(torch.arange(n).float() for n in image.shape[1:]), indexing="ij")
    near = (xs - place[0]).square() + (ys - place[1]).square() < 100
    weight = image[0].square() * near
    assert weight.max() > 0.3, "no spot where the map says"
    return torch.stack([(weight * xs).sum(), (weight * ys).sum()]) / weight.sum()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("size", [(120, 120), (90, 140)])
def test_warp_moves_points_and_pixels_together(seed: int, size: tuple[int, int]) -> None:
    place = torch.tensor([[size[1] / 2 + 3.0, size[0] / 2 - 5.0]])
    image, sizes = _blob_image(place, size=size), torch.tensor([size])
    draws = draw(1, points=50, generator=torch.Generator().manual_seed(seed))
    config = replace(WarpConfig(), size=128, mirrored=0.5)
    views = two_views(image, sizes, draws, config, NO_COLOUR)
    # The drawn maps say where the spot is in each view, with ghat: source -> view.
    ghat, ghat_prime = invert(view_maps(sizes, draws, config)[0])
    said0, said1 = apply_affine(ghat, place)[0], apply_affine(ghat_prime, place)[0]
    seen0, seen1 = _spot_near(views.view0[0], said0), _spot_near(views.view1[0], said1)
    assert (said0 - seen0).norm() < 0.1
    # And the pair map takes the one rendered spot to the other: g = ghat' o ghat^-1.
    assert (apply_affine(views.warp[0], seen0[None])[0] - seen1).norm() < 0.1


def test_pair_map_is_second_after_inverse_of_first() -> None:
    draws = draw(5, points=10, generator=torch.Generator().manual_seed(3))
    sizes = torch.tensor([[100, 80]]).expand(5, 2)
    maps = view_maps(sizes, draws, WarpConfig())
    ghat, ghat_prime = invert(maps[:, 0]), invert(maps[:, 1])
    views = two_views(torch.zeros(5, 3, 100, 80), sizes, draws, WarpConfig(), NO_COLOUR)
    torch.testing.assert_close(views.warp, compose(ghat_prime, invert(ghat)), atol=1e-3, rtol=1e-4)


def test_rendering_outside_equals_symmetric_mirror_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, 9, 12, generator=generator)
    canvas = torch.zeros(1, 3, 16, 16)
    canvas[:, :, :9, :12] = image
    padded = np.pad(image[0].numpy(), ((0, 0), (9, 9), (12, 12)), mode="symmetric")
    shift = torch.tensor([[[1.0, 0.0, -5.3], [0.0, 1.0, -4.6]]])
    ours = render(canvas, torch.tensor([[9, 12]]), shift, side=20)[0]
    xs = np.arange(20, dtype=np.float32) - 5.3 + 12
    ys = np.arange(20, dtype=np.float32) - 4.6 + 9
    grid_x, grid_y = np.meshgrid(xs, ys)
    for channel in range(3):
        theirs = cv2.remap(padded[channel], grid_x.astype(np.float32), grid_y.astype(np.float32),
                           cv2.INTER_LINEAR)  # fmt: skip
        # OpenCV rounds its interpolation weights to 1/32.
        assert np.abs(ours[channel].numpy() - theirs).max() < 0.05
        assert np.abs(ours[channel].numpy() - theirs).mean() < 0.01


def test_mirror_folds_without_end() -> None:
    points = torch.tensor([[[-1.0, 0.0], [4.0, 0.0], [9.0, 0.0], [-11.0, 0.0], [3.4, 0.0]]])
    folded = mirror(points, torch.tensor([[3, 4]]))[0, :, 0]
    # Width 4: ... 1 0 | 0 1 2 3 | 3 2 1 0 | 0 1 ...
    torch.testing.assert_close(folded, torch.tensor([0.0, 3.0, 1.0, 2.0, 3.0]))


def test_paper_views_overlap_as_measured() -> None:
    """Two views of the printed ranges overlap 61 % on average, 10th percentile 36 %."""
    config = preset("paper").warp
    draws = draw(4000, points=100, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([[224, 224]]).expand(4000, 2)
    maps = view_maps(sizes, draws, config)
    pair = compose(invert(maps[:, 1]), maps[:, 0])
    points = draws.points * config.size - 0.5
    moved = apply_affine(pair, points)
    share = ((moved > -0.5) & (moved < config.size - 0.5)).all(-1).float().mean(1)
    assert share.mean().item() == pytest.approx(0.61, abs=0.03)
    assert share.quantile(0.1).item() == pytest.approx(0.36, abs=0.03)


def test_every_drawn_point_stays_inside_the_second_view() -> None:
    config = preset("paper").warp
    draws = draw(64, points=200, generator=torch.Generator().manual_seed(1))
    views = two_views(torch.zeros(64, 3, 50, 50), torch.full((64, 2), 50), draws, config, NO_COLOUR)
    points0, points1, valid = corresponding_points(views, draws, count=200)
    assert points0.shape == points1.shape == (64, 200, 2)
    inside = ((points1 >= -0.5) & (points1 <= config.size - 0.5)).all(-1)
    assert inside[valid].all()
    assert valid.float().mean() > 0.95
    torch.testing.assert_close(apply_affine(views.warp, points0), points1, atol=1e-2, rtol=0)


def test_views_without_overlap_are_marked() -> None:
    draws = draw(1, points=10, generator=torch.Generator().manual_seed(0))
    affine = torch.full((1, 2, 8), 0.5)
    affine[0, 0, 5], affine[0, 1, 5] = 0.0, 1.0  # shifted apart by twice the largest translation
    far = replace(draws, affine=affine)
    config = WarpConfig(translation=2.5)
    views = two_views(torch.zeros(1, 3, 9, 9), torch.full((1, 2), 9), far, config, NO_COLOUR)
    assert not corresponding_points(views, far, count=10)[2].item()


def test_where_one_point_alone_stays_inside_it_is_repeated() -> None:
    draws = draw(1, points=3, generator=torch.Generator().manual_seed(0))
    points = torch.full_like(draws.points, 0.1)
    points[0, 4] = 0.9
    away = torch.tensor([[[1.0, 0.0, -5.0], [0.0, 1.0, -5.0]]])
    points0, points1, valid = shared_points(away, replace(draws, points=points), side=10, count=3)
    assert valid.tolist() == [True]
    assert points0[0].flatten().tolist() == pytest.approx([8.5] * 6)
    assert points1[0].flatten().tolist() == pytest.approx([3.5] * 6)


def test_part_of_the_draws_gives_part_of_the_views() -> None:
    """Processes that share a batch must see exactly what one process would have seen."""
    draws = draw(6, points=20, generator=torch.Generator().manual_seed(2))
    images = torch.rand(6, 3, 40, 40, generator=torch.Generator().manual_seed(3))
    sizes = torch.full((6, 2), 40)
    whole = two_views(images, sizes, draws, WarpConfig(size=32), ColourConfig())
    rows = slice(2, 4)
    part = two_views(
        images[rows], sizes[rows], draws.part(rows), WarpConfig(size=32), ColourConfig()
    )
    torch.testing.assert_close(part.view1, whole.view1[rows])


def _colour_draws(**amounts: float) -> Tensor:
    """Draws that switch on exactly the named changes, amounts in [-1, 1]."""
    names = ("brightness", "contrast", "saturation", "hue")
    switches = [0.0 if name in amounts else 1.0 for name in names]
    values = [(amounts.get(name, 0.0) + 1) / 2 for name in names]
    return torch.tensor([[*switches, *values, 0.0]])


def test_hue_turns_as_opencv_does_for_full_turns_and_keeps_grey() -> None:
    """A third of a turn about the grey axis permutes the primaries, as it does in HSV."""
    config = ColourConfig(hue=120.0, strength=1.0)
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    turned = change_colour(red, _colour_draws(hue=1.0), config).flatten()
    torch.testing.assert_close(turned, torch.tensor([0.0, 1.0, 0.0]), atol=1e-5, rtol=0)
    grey = torch.full((1, 3, 2, 2), 0.4)
    torch.testing.assert_close(change_colour(grey, _colour_draws(hue=0.3), config), grey)
    # Half of the range at twice the strength is the same turn, as it is of every change.
    twice = ColourConfig(hue=60.0, strength=2.0)
    torch.testing.assert_close(
        change_colour(red, _colour_draws(hue=1.0), twice).flatten(), turned, atol=1e-5, rtol=0
    )


def test_brightness_contrast_and_saturation_match_hand_computed_values() -> None:
    config = ColourConfig(strength=1.0)
    pixel = torch.tensor([0.2, 0.4, 0.6]).view(1, 3, 1, 1)
    bright = change_colour(pixel, _colour_draws(brightness=1.0), config).flatten()
    torch.testing.assert_close(bright, torch.tensor([0.2, 0.4, 0.6]) + 32 / 255)
    strong = change_colour(pixel, _colour_draws(contrast=1.0), config).flatten()
    torch.testing.assert_close(strong, torch.tensor([0.3, 0.6, 0.9]))
    grey = 0.299 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6
    pale = change_colour(pixel, _colour_draws(saturation=-1.0), config).flatten()
    torch.testing.assert_close(pale, grey + 0.5 * (torch.tensor([0.2, 0.4, 0.6]) - grey))


def test_no_change_is_drawn_half_of_the_time_each() -> None:
    draws = torch.rand(4000, 9, generator=torch.Generator().manual_seed(0))
    pixel = torch.tensor([0.3, 0.5, 0.4]).view(1, 3, 1, 1).expand(4000, 3, 1, 1)
    same = (change_colour(pixel, draws, ColourConfig()) - pixel).abs().amax((1, 2, 3)) < 1e-6
    assert same.float().mean().item() == pytest.approx(1 / 16, abs=0.015)


def test_rotation_range_is_respected() -> None:
    draws = draw(500, points=10, generator=torch.Generator().manual_seed(5))
    config = WarpConfig(linear=0.0, translation=0.0, zoom=(1.0, 1.0), mirrored=0.0)
    maps = view_maps(torch.full((500, 2), 100), draws, config)
    angle = torch.atan2(maps[..., 1, 0], maps[..., 0, 0]).abs() * 180 / math.pi
    assert angle.max() <= config.rotation + 1e-3
    assert angle.max() > 0.9 * config.rotation


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_second_view_is_mirrored_in_its_share_of_pairs_and_the_first_never(
    share: float,
) -> None:
    draws = draw(2000, points=10, generator=torch.Generator().manual_seed(6))
    maps = view_maps(torch.full((2000, 2), 100), draws, WarpConfig(mirrored=share))
    turned = torch.linalg.det(maps[..., :2]) < 0
    assert not turned[:, 0].any()
    assert turned[:, 1].float().mean().item() == pytest.approx(share, abs=0.03)
    # Left to right, not upside down: without rotation only x changes its sign.
    plain = WarpConfig(mirrored=share, rotation=0.0, linear=0.0)
    maps = view_maps(torch.full((2000, 2), 100), draws, plain)
    assert torch.equal(maps[:, 1, 0, 0] < 0, turned[:, 1])
    assert (maps[..., 1, 1] > 0).all()


def test_mirroring_leaves_all_other_draws_alone() -> None:
    draws = draw(8, points=10, generator=torch.Generator().manual_seed(3))
    pixels = torch.rand(8, 3, 40, 40, generator=torch.Generator().manual_seed(4))
    sizes, still = torch.full((8, 2), 40), WarpConfig(size=32, rotation=0.0, linear=0.0)
    still = replace(still, translation=0.0, mirrored=0.0)
    plain = two_views(pixels, sizes, draws, still, ColourConfig())
    turned = two_views(pixels, sizes, draws, replace(still, mirrored=1.0), ColourConfig())
    assert torch.equal(plain.view0, turned.view0)
    torch.testing.assert_close(turned.view1, plain.view1.flip(-1), atol=2e-5, rtol=0)

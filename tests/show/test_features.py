"""Figures of maps and views show what they say, where they say it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from torch import Tensor

from surefeat import viz
from surefeat.core.geometry import Frame
from surefeat.learn.config import ColourConfig, WarpConfig
from surefeat.learn.warp import corresponding_points, draw, two_views
from surefeat.model.features import Features
from surefeat.show.style import PALETTE
from tiny import drawn, pictures, pixel_at

ORIGINAL = (120, 180)


def features(
    descriptors: Tensor, uncertainty: Tensor, *, original: tuple[int, int] = ORIGINAL
) -> Features:
    """Maps of (h, w) cells of stride 8 over an image whose network size is not its original one."""
    height, width = uncertainty.shape
    frame = Frame(original, (8 * height, 8 * width))
    return Features(
        descriptors, uncertainty, descriptors[:1], frame, stride=8, name="dir/photo.png"
    )


def random_features(*, seed: int = 0, channels: int = 12) -> Features:
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(channels, 6, 9, generator=generator)
    return features(maps / maps.norm(dim=0), torch.rand(6, 9, generator=generator) + 0.1)


def blank(size: tuple[int, int] = ORIGINAL) -> Tensor:
    return torch.full((3, *size), 128, dtype=torch.uint8)


def test_confidence_lights_up_at_its_cell_in_original_pixels() -> None:
    uncertainty = torch.full((6, 9), 1.0)
    uncertainty[1, 6] = 0.1
    figure = viz.confidence_map(features(torch.ones(1, 6, 9), uncertainty), blank())
    over = pictures(figure)[1]
    # The cell's centre by hand: 6.5 of 9 cells across 180 pixels, 1.5 of 6 down 120.
    centre = (6.5 / 9 * 180 - 0.5, 1.5 / 6 * 120 - 0.5)
    bright = pixel_at(figure, over, centre)
    for step in ((25, 0), (-25, 0), (0, 25), (0, -25)):
        dark = pixel_at(figure, over, (centre[0] + step[0], centre[1] + step[1]))
        assert bright[:2].sum() > dark[:2].sum() + 0.5
    # The brightest place of the array behind it is the same one.
    values = np.asarray(over.images[1].get_array())
    row, column = np.unravel_index(values.argmax(), values.shape)
    assert (column, row) == pytest.approx(centre, abs=1)
    read = features(torch.ones(1, 6, 9), uncertainty).confidence_at(torch.tensor([[column, row]]))
    assert values.max() == pytest.approx(read.item())


def test_large_images_keep_original_pixels_as_units() -> None:
    wide = features(torch.ones(1, 6, 9), torch.rand(6, 9) + 0.1, original=(1200, 1800))
    axes = pictures(viz.confidence_map(wide, blank((1200, 1800))))[1]
    assert tuple(axes.images[0].get_extent()) == (-0.5, 1799.5, 1199.5, -0.5)
    assert max(np.asarray(axes.images[0].get_array()).shape) <= 512


def test_confidence_has_one_scale_for_all_images() -> None:
    sure, unsure = (features(torch.ones(1, 6, 9), torch.full((6, 9), s)) for s in (0.1, 1.0))
    figure = viz.confidence_map([sure, unsure], [blank(), blank()])
    first, second = (pictures(figure)[i].images[1] for i in (1, 3))
    assert first.get_clim() == second.get_clim() == pytest.approx((1, 10))


def test_a_cell_that_is_far_surer_than_all_others_does_not_take_the_whole_scale() -> None:
    uncertainty = torch.linspace(1.0, 0.5, 2400).reshape(40, 60).clone()
    uncertainty[20, 30] = 1e-4
    figure = viz.confidence_map(features(torch.ones(1, 40, 60), uncertainty), blank())
    low, high = pictures(figure)[1].images[1].get_clim()
    assert (low, high) == pytest.approx((1, 2), abs=0.1)


def test_pca_gives_two_regions_two_colours_shared_by_images() -> None:
    one, other = torch.eye(8)[0], torch.eye(8)[3]
    left = torch.where(torch.arange(9) < 4, 1.0, 0.0).expand(6, 9)
    sigma = torch.ones(6, 9)
    first = features(one[:, None, None] * left + other[:, None, None] * (1 - left), sigma)
    second = features(first.descriptors.flip(-1), sigma)
    colours = viz.pca_colours([first, second])
    region0, region1 = colours[0][:, 0, 0], colours[0][:, 0, 8]
    assert (region0 - region1).abs().max() == pytest.approx(1)
    assert torch.allclose(colours[0][:, :, :4], region0[:, None, None].expand(3, 6, 4), atol=1e-5)
    assert torch.allclose(colours[0][:, :, 4:], region1[:, None, None].expand(3, 6, 5), atol=1e-5)
    assert torch.allclose(colours[1], colours[0].flip(-1), atol=1e-5)


def test_pca_directions_are_those_of_numpy() -> None:
    several = [random_features(seed=s) for s in (0, 1)]
    rows = torch.cat([f.descriptors.flatten(1).T for f in several]).double().numpy()
    found = torch.cat([c.flatten(1).T for c in viz.pca_colours(several)]).double().numpy()
    scores = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    inside = (found > 0.01) & (found < 0.99)
    for axis in range(3):
        expected = scores[0][:, axis] * scores[1][axis]
        kept = inside[:, axis]
        correlation = np.corrcoef(expected[kept], found[kept, axis])[0, 1]
        assert abs(correlation) == pytest.approx(1, abs=1e-5)


def test_weighted_pca_fades_where_confidence_is_low() -> None:
    random = random_features()
    sigma = torch.full((6, 9), 0.1)
    sigma[:, :2] = 1000.0
    colours = viz.pca_colours([features(random.descriptors, sigma)], weighted=True)[0]
    assert colours[:, :, :2].min() > 0.99
    assert colours[:, :, 2:].min() < 0.2


def test_channels_shows_those_that_vary_most() -> None:
    maps = torch.full((5, 6, 9), 0.1)
    maps[3, 2, 2], maps[1, 4, 7] = 0.9, -0.5
    figure = viz.channels(features(maps, torch.ones(6, 9)), blank(), top=2)
    titles = [axes.get_title(loc="left") for axes in pictures(figure)]
    assert titles == ["photo.png", "channel 3", "channel 1"]
    response = np.asarray(pictures(figure)[1].images[0].get_array())
    row, column = np.unravel_index(response.argmax(), response.shape)
    assert (column, row) == pytest.approx((2.5 / 9 * 180 - 0.5, 2.5 / 6 * 120 - 0.5), abs=1)


def test_views_sheet_marks_one_place_in_one_colour() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = draw(3, points=50, generator=generator)
    pixels = torch.randint(0, 256, (3, 3, 64, 64), generator=generator, dtype=torch.uint8)
    sizes = torch.full((3, 2), 64)
    views = two_views(pixels, sizes, draws, WarpConfig(size=48), ColourConfig())
    points0, points1, _ = corresponding_points(views, draws, count=50)
    axes = pictures(viz.views_sheet(views, points0, points1))
    assert len(axes) == 6
    marks = [np.asarray(each.collections[0].get_offsets()) for each in axes]
    for row in range(3):
        there = marks[2 * row] @ views.warp[row, :, :2].T.numpy() + views.warp[row, :, 2].numpy()
        assert np.allclose(marks[2 * row + 1], there, atol=1e-3)
        colours = np.asarray(axes[2 * row].collections[0].get_facecolor())[:, :3]
        assert np.allclose(colours, [to_rgb(name) for name in PALETTE[:7]])
        assert np.allclose(
            colours, np.asarray(axes[2 * row + 1].collections[0].get_facecolor())[:, :3]
        )
    shown = np.asarray(axes[2].images[0].get_array())
    assert np.allclose(shown, views.view0[1].permute(1, 2, 0).numpy())


def test_file_names_are_no_formulas() -> None:
    strange = Features(**{**random_features().__dict__, "name": "a/$\\frac{$\x07_file.png"})
    figure = viz.confidence_map(strange, blank())
    drawn(figure)
    assert pictures(figure)[0].get_title(loc="left") == "$\\frac{$?_file.png"


def test_features_of_another_image_are_refused() -> None:
    with pytest.raises(ValueError, match="pass the image they were extracted from"):
        viz.confidence_map(random_features(), blank((60, 60)))
    with pytest.raises(ValueError, match="pass one image for each Features"):
        viz.pca([random_features()], [blank(), blank()])


def test_figures_leave_no_global_state() -> None:
    before = dict(rcParams)
    viz.loss_surface()
    viz.pca([random_features()], [blank()])
    assert dict(rcParams) == before


_IMPORTS = """
import sys
import surefeat
surefeat.viz
print("matplotlib.pyplot" in sys.modules)
loaded = ("matplotlib", "surefeat.viz", "surefeat.show")
for name in [name for name in sys.modules if name.startswith(loaded)]:
    del sys.modules[name]
sys.modules["matplotlib"] = None
import surefeat.viz
"""


def test_viz_needs_matplotlib_but_not_pyplot() -> None:
    command = [sys.executable, "-c", _IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False"
    assert done.stderr.strip().endswith("needs matplotlib: pip install 'surefeat[viz]'")

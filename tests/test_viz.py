"""Figures show what they say, where they say it."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from surefeat import viz
from surefeat.config import ColourConfig, WarpConfig
from surefeat.eval.selfcheck import SelfCheck
from surefeat.features import Features
from surefeat.geometry import Frame
from surefeat.viz_style import PALETTE
from surefeat.warp import corresponding_points, draw, two_views

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


def drawn(figure: Figure) -> npt.NDArray[np.float64]:
    """The figure as it is saved: (H, W, 3) in [0, 1]."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    return np.asarray(Image.open(buffer).convert("RGB"), dtype=np.float64) / 255


def pixel_at(figure: Figure, axes: Axes, point: tuple[float, float]) -> npt.NDArray[np.float64]:
    """The drawn colour at a place given in the axes' data units, here original pixels."""
    picture = drawn(figure)
    x, y = axes.transData.transform(point) * (100 / figure.dpi)
    colour: npt.NDArray[np.float64] = picture[picture.shape[0] - 1 - int(y), int(x)]
    return colour


def pictures(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]


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
    draws = draw(4, points=50, generator=generator)
    pixels = torch.randint(0, 256, (4, 3, 64, 64), generator=generator, dtype=torch.uint8)
    sizes = torch.full((4, 2), 64)
    views = two_views(pixels, sizes, draws, WarpConfig(size=48), ColourConfig())
    points0, points1, _ = corresponding_points(views, draws, count=50)
    axes = pictures(viz.views_sheet(views, points0, points1, pairs=3, points=5))
    assert len(axes) == 6
    marks = [np.asarray(each.collections[0].get_offsets()) for each in axes]
    for row in range(3):
        there = marks[2 * row] @ views.warp[row, :, :2].T.numpy() + views.warp[row, :, 2].numpy()
        assert np.allclose(marks[2 * row + 1], there, atol=1e-3)
        colours = np.asarray(axes[2 * row].collections[0].get_facecolor())[:, :3]
        assert np.allclose(colours, [to_rgb(name) for name in PALETTE[:5]])
        assert np.allclose(
            colours, np.asarray(axes[2 * row + 1].collections[0].get_facecolor())[:, :3]
        )
    shown = np.asarray(axes[2].images[0].get_array())
    assert np.allclose(shown, views.view0[1].permute(1, 2, 0).numpy())


def test_loss_surface_draws_the_optimal_sigma() -> None:
    figure = viz.loss_surface()
    score, sigma = (np.asarray(values) for values in figure.axes[0].lines[0].get_data())
    # From the table of optimal sigma over the matching loss l = 1 - s.
    for loss, optimum in ((0.05, 0.05), (0.1, 0.1), (0.2, 0.2083), (0.3, 0.3742), (0.4, 0.8131)):
        at = np.interp(1 - loss, score[::-1], sigma[::-1])
        assert at == pytest.approx(optimum, rel=0.01)
    minima = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    places = sorted((float(m.get_xdata()[0]), float(m.get_ydata()[0])) for m in minima)
    expected = [(0.01, -3.605), (0.1, -1.303), (0.3742, -0.253)]
    assert np.allclose(places, expected, rtol=0.03, atol=0.002)


def row(step: int, **more: float) -> dict[str, Any]:
    names = ("loss", "positive", "negative", "dead", "sigma_p10", "sigma_p50", "sigma_p90")
    return {"step": step, **dict.fromkeys(names, 0.25), "pairs_per_s": 9.0, **more}


def test_training_curves_draws_what_was_logged() -> None:
    rows = [row(10, loss=1.0), row(20, loss=0.5, auroc=0.7), row(30, loss=0.25, auroc=0.8)]
    titles = {axes.get_title(loc="left"): axes for axes in viz.training_curves(rows).axes}
    assert np.allclose(titles["Loss"].lines[0].get_data(), [[10, 20, 30], [1.0, 0.5, 0.25]])
    assert np.allclose(titles["Label-free check"].lines[0].get_data(), [[20, 30], [0.7, 0.8]])
    assert np.allclose(titles["Dead positives"].lines[0].get_ydata(), 25)  # per cent
    unchecked = viz.training_curves([row(10)])
    assert "Label-free check" not in {axes.get_title(loc="left") for axes in unchecked.axes}
    with pytest.raises(ValueError, match="has not logged a line yet"):
        viz.training_curves([])


@pytest.mark.parametrize("as_dictionary", [True, False])
def test_selfcheck_figure_shows_its_numbers(as_dictionary: bool) -> None:
    check = SelfCheck({0.025: 0.125, 0.1: 0.875}, math.nan, 0.625, 0.2, 0.3, 0.1, 400)
    figure = viz.selfcheck_figure(check.to_dict() if as_dictionary else check)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["0.125", "0.875", "not defined", "0.625", "0.200", "0.300"]
    bars = [patch.get_width() for patch in figure.axes[0].patches[2:]]
    assert bars == pytest.approx([0.125, 0.875])
    drawn(figure)


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
for name in [name for name in sys.modules if name.startswith(("matplotlib", "surefeat.viz"))]:
    del sys.modules[name]
sys.modules["matplotlib"] = None
import surefeat.viz
"""


def test_viz_needs_matplotlib_but_not_pyplot() -> None:
    command = [sys.executable, "-c", _IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False"
    assert done.stderr.strip().endswith("needs matplotlib: pip install 'surefeat[viz]'")


def test_what_could_not_be_computed_is_drawn_as_not_defined() -> None:
    """summary.json and metrics.jsonl hold null where all matches were right."""
    check = {"accuracy@0.05": 1.0, "auroc": None, "auroc_score": None, "predicted_loss": 0.2,
             "actual_loss": 0.2, "calibration_error": 0.0}  # fmt: skip
    figure = viz.selfcheck_figure(check)
    assert [text.get_text() for text in figure.axes[1].texts].count("not defined") == 2
    rows = [{"step": 10 * i, "loss": -0.1, "positive": 0.8, "negative": 0.3, "dead": 0.0,
             "sigma_p10": 0.5, "sigma_p50": 0.6, "sigma_p90": 0.7, "pairs_per_s": 9.0,
             "seconds": 1.0, **check} for i in (1, 2)]  # fmt: skip
    assert viz.training_curves(rows).axes


def test_calibration_curve_leaves_empty_bins_out() -> None:
    figure = viz.calibration_curve([None, 0.3, 0.9], [None, 0.2, 1.0], [0, 5, 50])
    x, y = figure.axes[0].lines[1].get_data()
    assert (list(x), list(y)) == ([0.3, 0.9], [0.2, 1.0])

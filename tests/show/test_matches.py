"""Match figures by their drawn content: lines, boxes and warps must be where the matches say."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import ConnectionPatch, Rectangle

from surefeat import viz
from surefeat.match.dense import DenseMatches
from surefeat.match.points import Matches
from surefeat.match.regions import RegionMatches

PHOTO0 = torch.full((3, 40, 60), 128, dtype=torch.uint8)
PHOTO1 = torch.full((3, 50, 30), 128, dtype=torch.uint8)


def _matches(points0: list[list[float]], points1: list[list[float]]) -> Matches:
    count = len(points0)
    ones = torch.linspace(0.2, 0.8, count)
    return Matches(
        points0=torch.tensor(points0).reshape(-1, 2),
        points1=torch.tensor(points1).reshape(-1, 2),
        score=ones,
        confidence=ones,
        margin=ones,
        round_trip=ones,
        mutual=torch.ones(count, dtype=torch.bool),
        index=torch.arange(count),
        size0=(40, 60),
        size1=(50, 30),
    )


def test_lines_join_the_matched_points() -> None:
    matches = _matches([[5, 6], [50, 30]], [[7, 8], [20, 40]])
    figure = viz.match_lines(PHOTO0, PHOTO1, matches)
    lines = [artist for artist in figure.artists if isinstance(artist, ConnectionPatch)]
    assert [line.xy1 for line in lines] == [[5, 6], [50, 30]]
    assert [line.xy2 for line in lines] == [[7, 8], [20, 40]]
    FigureCanvasAgg(figure).draw()


def test_known_answers_colour_the_lines() -> None:
    matches = _matches([[5, 6], [50, 30]], [[7, 8], [20, 40]])
    figure = viz.match_lines(PHOTO0, PHOTO1, matches, right=torch.tensor([True, False]))
    lines = [artist for artist in figure.artists if isinstance(artist, ConnectionPatch)]
    assert [to_hex(line.get_edgecolor()) for line in lines] == ["#009e73", "#d55e00"]


@pytest.mark.parametrize("size", [(5000, 1), (1, 5000), (1, 1)])
def test_strips_are_drawn_on_a_page_of_its_usual_width_and_a_bounded_height(
    size: tuple[int, int],
) -> None:
    strip = torch.full((3, *size), 90, dtype=torch.uint8)
    back = DenseMatches(torch.zeros(*size, 2), torch.ones(size), torch.ones(size))
    matches = _matches([[0, 0]], [[0, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # axes that collapse are warned of
        for figure in (
            viz.match_lines(PHOTO0, strip, matches),
            viz.match_lines(strip, PHOTO0, matches),
            viz.warped(PHOTO0, strip, back),
        ):
            FigureCanvasAgg(figure).draw()
            width, height = figure.get_size_inches()
            assert width == 10
            assert 0.8 <= height <= 40


def test_no_matches_is_said_and_drawn() -> None:
    figure = viz.match_lines(PHOTO0, PHOTO1, _matches([], []))
    assert figure.get_suptitle() == "no matches"


def test_lines_differ_and_doubtful_ones_are_thin_and_dark() -> None:
    matches = _matches([[5, 6], [50, 30], [20, 20]], [[7, 8], [20, 40], [9, 9]])
    matches = replace(matches, probability=torch.tensor([0.4, 0.6, 0.9]))
    figure = viz.match_lines(PHOTO0, PHOTO1, matches)
    lines = [artist for artist in figure.artists if isinstance(artist, ConnectionPatch)]
    looks = {
        tuple(line.xy1): (to_hex(line.get_edgecolor()), line.get_linewidth()) for line in lines
    }
    assert looks[5, 6] == ("#1f2933", 0.5)
    assert looks[50, 30][1] == looks[20, 20][1] == 1.3
    assert looks[50, 30][0] != looks[20, 20][0]
    assert max(lines, key=lambda line: line.get_zorder()).xy1 == [20, 20]


def test_lines_of_photos_with_nothing_in_common_are_all_doubtful() -> None:
    matches = replace(_matches([[5, 6]], [[7, 8]]), probability=torch.tensor([0.9]))
    object.__setattr__(matches, "related", 0.1)
    figure = viz.match_lines(PHOTO0, PHOTO1, matches)
    assert figure.get_suptitle() == "these two photos seem to have nothing in common"
    lines = [artist for artist in figure.artists if isinstance(artist, ConnectionPatch)]
    assert [line.get_linewidth() for line in lines] == [0.5]


def test_region_boxes_are_drawn_to_their_outer_edges() -> None:
    boxes = torch.tensor([[2.0, 3.0, 11.0, 20.0], [0.0, 0.0, 4.0, 4.0]])
    matches = RegionMatches(boxes, boxes, torch.tensor([0.9, 0.1]), torch.arange(2))
    figure = viz.region_matches(PHOTO0, PHOTO1, matches, top=1)
    for axes in figure.axes[:2]:
        # The seam below the box and the box itself.
        assert len(axes.patches) == 2
        for box in axes.patches:
            assert isinstance(box, Rectangle)
            assert (*box.get_xy(), box.get_width(), box.get_height()) == (1.5, 2.5, 10, 18)


def _regions(boxes0: list[list[float]], boxes1: list[list[float]]) -> RegionMatches:
    """Scores fall from 0.9 by 0.1."""
    count = torch.arange(len(boxes0))
    return RegionMatches(torch.tensor(boxes0), torch.tensor(boxes1), 0.9 - 0.1 * count, count)


def _numbered(axes: Axes) -> dict[str, str]:
    """Number -> its colour, and that colour must be drawn as a box of its own."""
    colours = {to_hex(patch.get_edgecolor()) for patch in axes.patches}
    found = {}
    for text in axes.texts:
        edge = text.get_bbox_patch()
        assert edge is not None
        found[text.get_text()] = to_hex(edge.get_edgecolor())
    assert set(found.values()) == colours - {"#ffffff"}
    return found


def test_both_boxes_of_a_match_have_its_number_and_colour() -> None:
    here = [[0.0, 0.0, 9.0, 9.0], [20.0, 20.0, 39.0, 39.0], [40.0, 0.0, 59.0, 9.0]]
    there = [[20.0, 40.0, 29.0, 49.0], [0.0, 0.0, 9.0, 9.0], [0.0, 20.0, 19.0, 29.0]]
    figure = viz.region_matches(PHOTO0, PHOTO1, _regions(here, there))
    first, second = (_numbered(axes) for axes in figure.axes[:2])
    assert first == second
    assert list(first) == ["1", "2", "3"]
    assert len(set(first.values())) == 3
    for axes, boxes in zip(figure.axes, (here, there), strict=True):
        for place, (number, colour) in enumerate(first.items()):
            (box,) = [each for each in axes.patches if to_hex(each.get_edgecolor()) == colour]
            assert isinstance(box, Rectangle)
            assert box.get_xy() == (boxes[place][0] - 0.5, boxes[place][1] - 0.5), number


def test_scores_stand_beside_the_numbers() -> None:
    boxes = [[0.0, 0.0, 9.0, 9.0], [15.0, 15.0, 25.0, 25.0]]
    figure = viz.region_matches(PHOTO0, PHOTO1, _regions(boxes, boxes))
    (legend,) = figure.legends
    assert [text.get_text().split() for text in legend.get_texts()] == [
        ["1", "0.90"],
        ["2", "0.80"],
    ]


def test_regions_that_repeat_a_better_one_in_either_photo_are_left_out() -> None:
    """The second repeats the first in photo A, the third in photo B, the fourth in neither."""
    here = [[0.0, 0.0, 19.0, 19.0], [1.0, 0.0, 20.0, 19.0], [40.0, 20.0, 59.0, 39.0],
            [30.0, 0.0, 39.0, 9.0]]  # fmt: skip
    there = [[0.0, 0.0, 9.0, 9.0], [20.0, 40.0, 29.0, 49.0], [0.0, 1.0, 9.0, 10.0],
             [10.0, 20.0, 19.0, 29.0]]  # fmt: skip
    matches = _regions(here, there)
    for overlap, scores in ((0.3, ["0.90", "0.60"]), (1.0, ["0.90", "0.80", "0.70", "0.60"])):
        figure = viz.region_matches(PHOTO0, PHOTO1, matches, overlap=overlap)
        found = [text.get_text().split()[1] for text in figure.legends[0].get_texts()]
        assert found == scores


def test_numbers_of_boxes_with_one_corner_do_not_hide_each_other() -> None:
    boxes = [[5.0, 5.0, 24.0, 24.0], [5.0, 5.0, 14.0, 38.0]]
    figure = viz.region_matches(PHOTO0, PHOTO0, _regions(boxes, boxes), overlap=1.0)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes[:2]:
        extents = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
        assert not extents[0].overlaps(extents[1])


def test_no_region_matches_is_said() -> None:
    none = torch.zeros(0, 4)
    empty = RegionMatches(none, none, torch.zeros(0), torch.arange(0))
    assert viz.region_matches(PHOTO0, PHOTO1, empty).get_suptitle() == "no matches"


def test_warped_leaves_unsure_pixels_blank() -> None:
    photo = torch.zeros(3, 32, 48, dtype=torch.uint8)
    ys, xs = torch.meshgrid(torch.arange(32), torch.arange(48), indexing="ij")
    flat = torch.ones(32, 48)
    same = DenseMatches(torch.stack([xs, ys], dim=-1).float(), flat, flat)
    figure = viz.warped(photo, photo, same, sure=xs < 12)
    moved = np.asarray(figure.axes[1].images[0].get_array())[..., 0]
    assert moved[:, :12].max() == 0
    assert moved[:, 12:].min() > 200
    assert "25 % of B" in str(figure.get_label())


@pytest.mark.parametrize("shift", [0, 7])
def test_warped_shows_photo_a_where_b_has_its_match(shift: int) -> None:
    """A has a white dot; B's pixel (x, y) matches A's (x + shift, y): the dot moves left."""
    photo = torch.zeros(3, 32, 48, dtype=torch.uint8)
    photo[:, 10, 30] = 255
    ys, xs = torch.meshgrid(torch.arange(32), torch.arange(48), indexing="ij")
    places = torch.stack([(xs + shift).clamp_max(47), ys], dim=-1).float()
    flat = torch.ones(32, 48)
    figure = viz.warped(photo, torch.zeros_like(photo), DenseMatches(places, flat, flat))
    moved = np.asarray(figure.axes[1].images[0].get_array())[..., 0]
    assert np.argwhere(moved > 200).tolist() == [[10, 30 - shift]]

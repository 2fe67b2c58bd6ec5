"""Match figures by their drawn content: lines, boxes and warps must be where the matches say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import ConnectionPatch, Rectangle

from surefeat import viz
from surefeat.dense import DenseMatches
from surefeat.match import Matches
from surefeat.regions import RegionMatches

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


def test_no_matches_is_said_and_drawn() -> None:
    figure = viz.match_lines(PHOTO0, PHOTO1, _matches([], []))
    assert figure.get_suptitle() == "no matches"


def test_region_boxes_are_drawn_to_their_outer_edges() -> None:
    boxes = torch.tensor([[2.0, 3.0, 11.0, 20.0], [0.0, 0.0, 4.0, 4.0]])
    matches = RegionMatches(
        boxes, boxes, torch.tensor([0.9, 0.1]), torch.arange(2), torch.arange(2)
    )
    figure = viz.region_matches(PHOTO0, PHOTO1, matches, top=1)
    for axes in figure.axes[:2]:
        (box,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert (box.get_x(), box.get_y(), box.get_width(), box.get_height()) == (1.5, 2.5, 10, 18)


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

"""Where a labelled object is looked at when its labels are carried to another photo."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from surefeat.data.decode import Place
from surefeat.data.keypoints import Labelled
from surefeat.keypoints.carry import GRID, _grid, chances_of
from surefeat.match.points import Matches


def labelled(box: list[float]) -> Labelled:
    points = torch.tensor([[40.0, 20.0], [50.0, 30.0]])
    return Labelled(
        Place("a.png"), "a.png", 0, torch.tensor(box), points, torch.ones(2, dtype=torch.bool),
        (80, 120),
    )  # fmt: skip


def test_places_beside_the_parts_are_the_middles_of_an_even_grid_over_the_box() -> None:
    """A box of 18 x 36 pixels: cells of 2 x 4, the first one's middle half a cell inside."""
    places = _grid(labelled([10.0, 21.0, 27.0, 56.0])).reshape(GRID, GRID, 2)
    assert places[0, :, 0].tolist() == pytest.approx([10.5 + 2 * n for n in range(9)])
    assert places[:, 0, 1].tolist() == pytest.approx([22.5 + 4 * n for n in range(9)])
    assert bool((places[..., 0] == places[0, :, 0]).all())


def test_without_a_box_of_its_own_the_grid_lies_around_the_keypoints() -> None:
    """A margin of a quarter of their extent, but of a tenth of the photo at least: 3 pixels."""
    places = _grid(labelled([0.0, 0.0, 119.0, 79.0]))
    low, high = places.amin(0), places.amax(0)
    assert ((low + high) / 2).tolist() == pytest.approx([45.0, 25.0])
    assert (high - low).tolist() == pytest.approx([17 * 8 / 9] * 2)


def test_without_a_probability_a_match_counts_by_its_way_back() -> None:
    """A photo of 400 pixels: 40 off is one standard deviation, whatever the other photo's size."""
    ways = torch.tensor([0.0, 40.0, 80.0])
    ones, places = torch.ones(3), torch.zeros(3, 2)
    matches = Matches(
        places, places, score=0.8 * ones, confidence=1e6 * ones, margin=ones, round_trip=ways,
        mutual=ones > 0, index=torch.arange(3), size0=(300, 400), size1=(50, 80),
    )  # fmt: skip
    expected = [0.8, 0.8 * math.exp(-0.5), 0.8 * math.exp(-2)]
    assert chances_of(matches).tolist() == pytest.approx(expected, abs=1e-4)
    known = replace(matches, probability=torch.tensor([0.1, 0.9, 0.3]))
    assert chances_of(known).tolist() == pytest.approx([0.1, 0.9, 0.3])

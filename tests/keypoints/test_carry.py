"""Where a labelled object is looked at when its labels are carried to another photo."""

from __future__ import annotations

import pytest
import torch

from surefeat.data.decode import Place
from surefeat.data.keypoints import Labelled
from surefeat.keypoints.carry import GRID, _grid


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

"""A small thing in a large photo: found, and its points come back in the photo's own pixels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from surefeat.core.image import resize
from surefeat.match.large import (
    _Candidate,
    _closer,
    best_parts,
    cut_part,
    moved_back,
    parts_of,
)
from surefeat.match.points import match_points
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from tiny import photo, smooth_photo

SIDE = 96


@pytest.fixture(scope="module")
def model() -> DenseFeatures:
    torch.manual_seed(0)
    config = ModelConfig(trunk="small", head="linear", channels=32, longest_side=SIDE)
    return DenseFeatures(config).eval()


@pytest.fixture(scope="module")
def close_up() -> Tensor:
    return (photo("astronaut", size=(192, 192)) * 255).byte()


def pasted(thing: Tensor, *, side: int, at: tuple[int, int]) -> tuple[Tensor, float]:
    """A large photo that shows a thing at `side` pixels from (x, y) on, and its scale."""
    canvas = smooth_photo(500, 700, seed=4)
    height, width = thing.shape[1:]
    scale = side / max(height, width)
    small = resize(thing, size=(round(height * scale), round(width * scale)))
    x, y = at
    canvas[:, y : y + small.shape[1], x : x + small.shape[2]] = small
    return canvas, scale


@pytest.mark.parametrize("at", [(37, 61), (420, 250), (590, 390)])
def test_a_small_thing_is_found_in_a_large_photo(
    model: DenseFeatures, close_up: Tensor, at: tuple[int, int]
) -> None:
    """A hundredth of the photo's area, and over seams of windows."""
    large, scale = pasted(close_up, side=96, at=at)
    points0 = torch.tensor([[60.0, 70.0], [96.0, 96.0], [120.0, 130.0]])
    wanted = (points0 + 0.5) * scale - 0.5 + torch.tensor(at)
    parts = best_parts(model, close_up, large, points0)
    assert parts[0] == (0, 0, 191, 191)
    (f0,), (f1,) = model.extract(close_up), model.extract(cut_part(large, parts[1]))
    matches = moved_back(match_points(f0, f1, points0), parts, (close_up, large))
    assert (matches.size0, matches.size1) == ((192, 192), (500, 700))
    assert float((matches.points1 - wanted).norm(dim=1).median()) < 0.1 * 96
    assert np.allclose(matches.points0, points0)


def test_a_closer_look_is_as_large_as_the_thing_and_where_it_is(
    model: DenseFeatures, close_up: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From matches in a window of four times its area, in the photo's own pixels."""
    large, scale = pasted(close_up, side=96, at=(420, 250))
    window = (400, 190, 591, 381)
    (f0,), (f1,) = model.extract(close_up), model.extract(cut_part(large, window))
    steps = torch.arange(9) * 20 + 15.5  # around the middle, 95.5
    points0 = torch.cartesian_prod(steps, steps)
    found, same = match_points(f0, f1, points0), torch.ones(81)
    points1 = (points0 + 0.5) * scale - 0.5 + torch.tensor([20, 60])  # in the window
    found = replace(
        found, points1=points1, score=same, margin=same, confidence=same, round_trip=0 * same
    )
    monkeypatch.setattr("surefeat.match.large.match_points", lambda *_, **__: found)
    closer = _closer(model, _Candidate((0, 0, 191, 191), window, f0, f1, 0.0), large)
    assert closer is not None
    assert closer.part1 == pytest.approx((420, 250, 515, 345), abs=1)
    assert closer.features1.frame.original == tuple(cut_part(large, closer.part1).shape[1:])


def test_photos_that_are_not_large_are_matched_whole(
    model: DenseFeatures, close_up: Tensor
) -> None:
    assert best_parts(model, close_up, close_up[:, :100]) == ((0, 0, 191, 191), (0, 0, 191, 99))


def test_where_the_first_photo_is_large_its_part_lies_around_the_points(
    model: DenseFeatures, close_up: Tensor
) -> None:
    large, scale = pasted(close_up, side=96, at=(420, 250))
    points0 = (torch.tensor([[96.0, 96.0]]) + 0.5) * scale - 0.5 + torch.tensor([420, 250])
    (x1, y1, x2, y2), part1 = best_parts(model, large, close_up, points0)
    assert x1 <= points0[0, 0] <= x2
    assert y1 <= points0[0, 1] <= y2
    assert max(x2 - x1, y2 - y1) < 400
    assert part1 == (0, 0, 191, 191)


def test_a_large_photo_is_looked_at_as_a_whole_and_in_windows(model: DenseFeatures) -> None:
    boxes = [part.box for part in parts_of(model, smooth_photo(500, 700))]
    assert boxes[0] == (0, 0, 699, 499)
    widths = {round((box[2] - box[0] + 1) / 10) * 10 for box in boxes}
    assert widths == {700, 360, 190, 100}

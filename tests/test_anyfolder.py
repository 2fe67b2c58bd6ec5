"""The search for what serves any folder: its measure with known answers, its recipes."""

from __future__ import annotations

from pathlib import Path

import torch
from anyfolder import RECIPES, pck

from surefeat.core.geometry import Frame
from surefeat.data.pairs import Pair
from surefeat.match.votes import Voting
from surefeat.model.features import Features
from tiny import generator


def features(maps: torch.Tensor) -> Features:
    frame = Frame((160, 160), (160, 160))
    return Features(maps, torch.ones(10, 10), maps, frame, 16)


def test_a_photo_is_found_in_itself_and_not_in_another() -> None:
    """Three keypoints, one of them moved by a third of the photo in the labels."""
    drawn = generator()
    own, other = (
        torch.nn.functional.normalize(torch.randn(16, 10, 10, generator=drawn), dim=0)
        for _ in range(2)
    )
    points = torch.tensor([[24.0, 40.0], [72.0, 88.0], [120.0, 56.0]])
    moved = points.clone()
    moved[2, 0] -= 53
    here, there = Path("here.jpg"), Path("there.jpg")
    size = (160, 160)
    seen = torch.ones(3, dtype=torch.bool)
    pair = Pair(here, there, "bird", points, moved, seen, size, size, "one")
    same = {here: features(own), there: features(own)}
    for voting in (None, Voting()):
        assert pck(same, [pair], voting)[1] == 66.67
    unlike = {here: features(own), there: features(other)}
    assert pck(unlike, [pair], None)[1] < 66


def test_recipes_are_settings_of_the_package() -> None:
    for recipe in RECIPES.values():
        config = recipe.config(seed=3, sigma=False)
        assert (config.train.seed, config.loss.kind) == (3, "plain")
        assert (config.warp.mirrored, config.data.held_out) == (recipe.mirrored, 0)
        assert config.train.kept_views == recipe.photos * recipe.kept * bool(recipe.kept)

"""The search for what serves any folder: its votes of many pairs, and cycles with known answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from anyfolder import RECIPES
from anyfolder_votes import SIDE, PairVoting, bonus, returned, support, triples

from surefeat.match.search import Voting, collect
from tiny import generator

ALL_EQUAL = PairVoting(Voting(grid=6, turned=1.0), leaning=1.0, sized=1.0, mirrored=1.0)


def cells_and_places() -> tuple[torch.Tensor, torch.Tensor]:
    """Similarities of 6 x 6 cells of two pairs, and three pixels of each, one in a corner."""
    drawn = generator()
    points = torch.rand(2, 3, 2, generator=drawn) * SIDE
    points[0, 0] = 0
    return torch.rand(2, 36, 36, generator=drawn) / 10, points


def test_votes_of_many_pairs_are_those_of_the_package() -> None:
    similarity, points = cells_and_places()
    places = torch.rand(7, 2, generator=generator(1)) * SIDE
    ours, theirs = (bonus(similarity, points, places, v) for v in (ALL_EQUAL, ALL_EQUAL.voting))
    assert torch.allclose(ours, theirs, atol=1e-5)
    cells = (points + 0.5) / SIDE * 6 - 0.5
    votes = collect(similarity[1].reshape(6, 6, 6, 6), ALL_EQUAL.voting)
    agreed = support(similarity, cells, ALL_EQUAL)
    assert torch.allclose(agreed[1], votes.support(cells[1]), atol=1e-5)


def test_a_pair_that_agrees_on_one_facing_leaves_little_to_the_other() -> None:
    """Cells that choose their mirror image: with the prior, what faces the same way is lost."""
    same = torch.arange(36).reshape(6, 6)
    similarity = torch.stack([torch.eye(36)[same.flatten()], torch.eye(36)[same.flip(1).flatten()]])
    middle_row = torch.tensor([[0.0, 2.0]]).expand(2, 1, 2)
    one_pose = {"angles": (0.0,), "scales": (1.0,), "mirrored": 1.0}
    free, bound = (
        support(similarity, middle_row, PairVoting(Voting(grid=6), **one_pose, facing=power))
        for power in (0.0, 4.0)
    )
    # The first cell of a row goes to the first, or to the last; elsewhere the prior takes support.
    assert [int(one.argmax()) for one in bound.flatten(1)] == [12, 17]
    assert bool((bound <= free + 1e-6).all())
    assert bound[0, 0, 2, 5] < 0.9 * free[0, 0, 2, 5]
    assert bound[1, 0, 2, 0] < 0.9 * free[1, 0, 2, 0]


def test_a_model_that_knows_every_place_comes_back_from_a_cycle() -> None:
    """Of an image whose colours are its own places; one that sees nothing does not come back."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    image = torch.stack([x * 255 // SIDE, y * 255 // SIDE, torch.full_like(x, 128)]).byte()
    images = image.expand(3, -1, -1, -1)
    chosen = triples(["a", "a", "a"], 1)
    back = returned(lambda some: [(F.avg_pool2d(some, 16), 1.0)], images, chosen)
    assert (back["same"], back["mirrored"]) == (100.0, 100.0)
    assert back["shifted"] > 90  # what is shifted in is there twice
    blind = returned(lambda some: [(torch.ones(len(some), 1, 20, 20), 1.0)], images, chosen)
    assert max(blind.values()) < 10


def test_cycles_stay_within_a_category() -> None:
    chosen = triples(["a", "b", "a", "b", "a", "b", "c"], 20)
    assert {tuple(sorted(row)) for row in chosen.tolist()} == {(0, 2, 4), (1, 3, 5)}
    with pytest.raises(ValueError, match="no category has three images; pass more pairs"):
        triples(["a", "b", "b"], 1)


def test_recipes_are_settings_of_the_package() -> None:
    for recipe in RECIPES.values():
        config = recipe.config(seed=3, sigma=False)
        assert (config.train.seed, config.loss.kind) == (3, "plain")
        assert (config.warp.mirrored, config.data.held_out) == (recipe.mirrored, 0)
        assert config.train.kept_views == recipe.photos * recipe.kept * bool(recipe.kept)
        assert not recipe.start or recipe.start in RECIPES

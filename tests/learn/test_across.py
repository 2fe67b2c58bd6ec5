"""Matches between photos: who is matched with whom, and where matched places lie in views."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefeat.core.geometry import apply_affine, sample
from surefeat.learn import across
from surefeat.learn.across import (
    FEWEST,
    Partners,
    chosen_photos,
    collect,
    find_partners,
    second_points,
)
from surefeat.learn.config import ColourConfig, WarpConfig
from surefeat.learn.warp import Draws, draw, two_views
from tiny import images, learn, same_bits, smooth_photo, stand_in, tiny, weights

SIDE = 48


def draws_of(batch: int, seed: int = 0) -> Draws:
    return draw(batch, points=40, generator=torch.Generator().manual_seed(seed))


def places(count: int, value: float) -> Tensor:
    return torch.full((count, 2, 2), value)


@pytest.fixture
def partners() -> Partners:
    """Of five photos the first matches two others, the third one; 9 and 12 places."""
    edges = [(0, 1, places(9, 1.0)), (0, 2, places(12, 2.0)), (2, 0, places(12, 3.0))]
    return collect(edges, total=5)


def smooth(height: int, width: int, seed: int) -> Tensor:
    """(3, H, W) in [0, 1]: no two places have one colour, and neighbours are alike."""
    coarse = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    size = (height, width)
    return torch.nn.functional.interpolate(coarse, size, mode="bicubic").clamp(0, 1)[0]


def test_views_of_two_photos_show_the_same_at_matched_places() -> None:
    """The partner is the photo enlarged: pixels of the rendered views must agree at the points."""
    photo = smooth(50, 70, seed=0)
    large = torch.nn.functional.interpolate(photo[None], (100, 140), mode="bilinear")[0]
    canvas = torch.zeros(2, 3, 150, 150)
    canvas[0, :, :50, :70], canvas[1, :, :100, :140] = photo, large
    sizes = torch.tensor([[50, 70], [100, 140]])
    here = torch.rand(60, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [69.0, 49.0]
    )
    there = (here + 0.5) * 2 - 0.5
    known = collect([(0, 1, torch.stack([here, there], 1)),
                     (1, 0, torch.stack([there, here], 1))], total=2)  # fmt: skip
    config, draws, rows = WarpConfig(size=SIDE, mirrored=0.5), draws_of(16), torch.arange(16) % 2
    second = known.second(rows, draws, share=1.0)
    assert second.photo.tolist() == (1 - rows).tolist()
    views = two_views(
        canvas[rows], sizes[rows], draws, config, ColourConfig(probability=0.0),
        second=(canvas[second.photo], sizes[second.photo]),
    )  # fmt: skip
    points0, points1, valid = second_points(views.to_source, second, draws, side=SIDE, count=40)
    assert int(valid.sum()) >= 8
    colours0, colours1 = (
        sample(view, points) for view, points in ((views.view0, points0), (views.view1, points1))
    )
    gap = (colours0 - colours1).abs()[valid]
    assert float(gap.mean()) < 0.01
    shuffled = (colours0 - colours1.roll(1, dims=1)).abs()[valid]
    assert float(shuffled.mean()) > 0.05, "the photo is too even to tell"


def test_where_both_views_show_one_photo_the_warp_leads(partners: Partners) -> None:
    draws, rows = draws_of(8), torch.full((8,), 4)  # a photo without partners
    second = partners.second(rows, draws, share=1.0)
    assert not second.other.any()
    assert second.photo.tolist() == rows.tolist()
    to_source = two_views(torch.zeros(8, 3, 30, 40), torch.tensor([[30, 40]]).expand(8, 2), draws,
                          WarpConfig(size=SIDE), ColourConfig()).to_source  # fmt: skip
    mixed = second_points(to_source, second, draws, side=SIDE, count=20)
    alone = second_points(to_source, None, draws, side=SIDE, count=20)
    for one, other in zip(mixed, alone, strict=True):
        assert torch.equal(one, other)
    photo0 = apply_affine(to_source[:, 0], alone[0])
    assert torch.allclose(photo0, apply_affine(to_source[:, 1], alone[1]), atol=1e-3)


def test_two_photos_whose_views_share_too_few_matches_count_for_nothing() -> None:
    draws = draws_of(2)
    still = torch.eye(2, 3).expand(2, 2, 2, 3)
    some = torch.full((FEWEST, 2, 2), 5.0)
    few = some.clone()
    few[0, 1] = -30.0  # one of them lies outside the second view
    known = collect([(0, 1, some), (1, 0, few)], total=2)
    second = known.second(torch.arange(2), draws, share=1.0)
    *_, valid = second_points(still, second, draws, side=SIDE, count=20)
    assert valid.tolist() == [True, False]


def test_a_share_of_pairs_shows_partners_each_as_often(partners: Partners) -> None:
    draws, rows = draws_of(4000), torch.zeros(4000, dtype=torch.long)
    second = partners.second(rows, draws, share=0.3)
    assert float(second.other.float().mean()) == pytest.approx(0.3, abs=0.03)
    assert float((second.photo[second.other] == 1).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert second.photo[~second.other].unique().tolist() == [0]
    assert second.places[second.photo == 2].unique().tolist() == [2.0]


def test_places_are_repeated_to_one_number(partners: Partners) -> None:
    several = torch.arange(9.0)[:, None, None].expand(9, 2, 2)
    known = collect([(0, 1, several), (1, 0, places(12, 3.0))], total=2)
    assert known.places.shape == (2, 1, 12, 2, 2)
    assert known.places[0, 0, :, 0, 0].tolist() == [*range(9), 0, 1, 2]
    assert partners.count.tolist() == [2, 0, 1, 0, 0]


def test_some_photos_are_numbered_anew_and_lose_partners_that_are_not_there(
    partners: Partners,
) -> None:
    some = partners.of(torch.tensor([2, 3, 0]))
    assert some.count.tolist() == [1, 0, 1]
    assert some.photos[:, 0].tolist() == [2, 0, 0]
    assert some.places[2, 0].unique().tolist() == [2.0]


def test_nobody_matches(tmp_path: Path) -> None:
    none = collect([], total=3)
    second = none.second(torch.arange(3), draws_of(3), share=1.0)
    assert second.photo.tolist() == [0, 1, 2]
    assert not second.other.any()


def test_partners_are_kept_on_disk(partners: Partners, tmp_path: Path) -> None:
    partners.save(tmp_path / "partners.safetensors")
    again = Partners.load(tmp_path / "partners.safetensors")
    assert same_bits(vars(partners), vars(again))


def shifted(photo: Tensor, by: int) -> Tensor:
    return photo.roll(by, dims=-1)


@pytest.fixture
def three() -> list[Tensor]:
    """Two photos of one thing, the second moved to the right, and one of another."""
    photo = smooth_photo(96, 96, seed=3)
    return [photo, smooth_photo(96, 96, seed=4), shifted(photo, 12)]


def test_photos_are_matched_with_those_most_like_them(
    three: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stand_in(96)
    monkeypatch.setattr(across, "PARTNERS", 1)
    pairs = across.alike(model.extract(three), model)
    assert (0, 2) in pairs
    assert all(i < j for i, j in pairs)
    monkeypatch.setattr(across, "PARTNERS", 9)
    assert across.alike(model.extract(three), model) == [(0, 1), (0, 2), (1, 2)]


def test_matched_places_lead_from_photo_to_photo(three: list[Tensor]) -> None:
    """Photos 3, 5 and 7 of nine; most places of the moved photo lie 12 pixels to the right."""
    rows = torch.tensor([3, 5, 7])
    known = find_partners(stand_in(96, bias=9.0), three, rows=rows, total=9)
    assert sorted(known.count.nonzero()[:, 0].tolist()) == [3, 5, 7]
    k = known.photos[3].tolist().index(7)
    here, there = known.places[3, k].unbind(1)
    moved = there - here
    assert float((moved - torch.tensor([12.0, 0.0])).norm(dim=1).median()) < 3
    back = known.places[7, known.photos[7].tolist().index(3)]
    assert torch.equal(back.flip(1), known.places[3, k])


def test_what_is_probably_wrong_is_not_learned_from(three: list[Tensor]) -> None:
    known = find_partners(stand_in(96, bias=-99.0), three, rows=torch.arange(3), total=3)
    assert known.count.tolist() == [0, 0, 0]


@pytest.fixture
def knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in is the model that ships with the small trunk."""
    stand_in(SIDE, bias=9.0).save_pretrained(tmp_path / "shipped")
    known = {"small": str(tmp_path / "shipped")}
    monkeypatch.setattr("surefeat.learn.pretrain.SHIPPED_TRUNKS", known)


@pytest.mark.usefixtures("knows")
@pytest.mark.parametrize("kept", [0, 24])
def test_a_run_that_matches_photos_goes_on_as_an_undisturbed_one(tmp_path: Path, kept: int) -> None:
    """Who matches whom is found once; a run with it learns something else than one without."""
    config = tiny(steps=4, sigma_warmup=0, kept_views=kept, trained="head", across=1.0)
    source = images(tmp_path / "photos")
    learn(source, tmp_path / "whole", config)
    found = tmp_path / "whole/partners.safetensors"
    assert int(Partners.load(found).count.sum()) > 0
    learn(source, tmp_path / "parts", config, steps=2)
    first = (tmp_path / "parts/partners.safetensors").read_bytes()
    assert first == found.read_bytes()
    learn(source, tmp_path / "parts", None, resume=True, steps=4)
    assert (tmp_path / "parts/partners.safetensors").read_bytes() == first
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    alone = replace(config, train=replace(config.train, across=0.0))
    learn(source, tmp_path / "alone", alone)
    assert not (tmp_path / "alone/partners.safetensors").exists()
    assert not same_bits(weights(tmp_path / "whole"), weights(tmp_path / "alone"))


def test_without_a_model_that_knows_photos_are_learned_from_alone(tmp_path: Path) -> None:
    """Nothing ships with the small trunk."""
    config = tiny(steps=2, across=1.0)
    learn(images(tmp_path / "photos"), tmp_path / "run", config)
    assert not (tmp_path / "run/partners.safetensors").exists()


def test_chosen_photos_follow_the_seed() -> None:
    first, again, other = (chosen_photos(50, 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique()) == 20
    assert sorted(chosen_photos(7, 20, seed=0).tolist()) == list(range(7))
    assert torch.equal(chosen_photos(50, 10, seed=1), first[:10])

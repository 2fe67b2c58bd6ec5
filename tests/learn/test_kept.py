"""Views that are seen once: their loss by hand, and a training that needs nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefeat.core.geometry import apply_affine, compose, invert, sample
from surefeat.data.decode import Batches, Part, batch_indices
from surefeat.learn.config import Config
from surefeat.learn.kept import KeptViews, keep_views, kept_losses, photos_and_views
from surefeat.learn.loss import held_steps, loss_of_maps, step_draws
from surefeat.learn.pretrain import _check_kept, pretrain
from surefeat.learn.warp import shared_points
from surefeat.model.config import HeadKind, Trained
from tiny import CPU, canvas, images, same_bits, small_model, tiny, weights


@pytest.fixture
def config() -> Config:
    kept = tiny(trained="last", kept_views=12, steps=6, sigma_warmup=0)
    return replace(kept, warp=replace(kept.warp, mirrored=0.5))


def views_of(config: Config) -> tuple[KeptViews, Batches]:
    batches = Batches(canvas(9), device=CPU)
    return keep_views(small_model(config), batches, config), batches


@pytest.mark.parametrize(
    ("photos", "total", "wanted"),
    [(200, 1200, (200, 6)), (5000, 1200, (300, 4)), (20, 1200, (20, 8)), (1, 1200, (1, 8)),
     (7, 12, (3, 4))],
)  # fmt: skip
def test_photos_share_the_views_in_twos(photos: int, total: int, wanted: tuple[int, int]) -> None:
    assert photos_and_views(photos, total) == wanted


def test_kept_views_are_what_the_frozen_layers_say_of_rendered_photos(config: Config) -> None:
    """A place of a photo looks alike in all its views: maps are read where the photo's point is."""
    plain = replace(config, colour=replace(config.colour, probability=0.0))
    kept, _ = views_of(plain)
    (layer,) = kept.maps
    assert layer.dtype == torch.float16
    assert not layer.requires_grad, "all views' passes would stay in memory"
    count, views = photos_and_views(9, 12)
    assert kept.to_source.shape[:2] == layer.shape[:2] == (count, views)
    again, _ = views_of(plain)
    assert torch.equal(layer, again.maps[0])
    # The points of two views that show one place of the photo, there and back.
    warp = compose(invert(kept.to_source[:, 1]), kept.to_source[:, 0])
    middle = torch.full((count, 1, 2), (config.warp.size - 1) / 2)
    photo0 = apply_affine(kept.to_source[:, 0], middle)
    photo1 = apply_affine(kept.to_source[:, 1], apply_affine(warp, middle))
    assert torch.allclose(photo0, photo1, atol=1e-3)
    assert bool((kept.to_source[:, :, 0, 0] < 0).any()), "none of the views is mirrored"
    assert bool((kept.to_source[:, ::2, 0, 0] > 0).all()), "a first view is mirrored"
    assert sample(layer[:, 0].float(), middle / 8).isfinite().all()


@pytest.mark.parametrize("held", [False, True])
def test_a_step_pairs_two_views_of_one_photo_by_their_own_warp(config: Config, held: bool) -> None:
    """The loss of a step, put together by hand from the views that the draws name; at first sigma
    is held."""
    config = replace(config, train=replace(config.train, amp=False),
                     loss=replace(config.loss, sigma_warmup=int(held)))  # fmt: skip
    model = small_model(config)
    with torch.no_grad():
        model.head.last.bias[-1] += 2  # type: ignore[index]  # a new head's sigma is 1, as a held one
    kept, _ = views_of(config)
    (loss, sigma), *_ = kept_losses(model, kept, range(1), config)
    draws = step_draws(0, config, CPU)
    views = kept.to_source.shape[1]
    first = [int(draw * views) for draw in draws.affine[:, 0, 0].tolist()]
    second = [
        (a + 1 + int(draw * (views - 1))) % views
        for a, draw in zip(first, draws.affine[:, 1, 0].tolist(), strict=True)
    ]
    assert all(a != b for a, b in zip(first, second, strict=True))
    rows = batch_indices(0, batch=4, count=len(kept.to_source), seed=config.train.seed).tolist()
    chosen = list(zip(rows, first, second, strict=True))
    warp = torch.stack(
        [compose(invert(kept.to_source[r, b][None]), kept.to_source[r, a][None])[0]
         for r, a, b in chosen]
    )  # fmt: skip
    points = shared_points(warp, draws, side=config.warp.size, count=config.loss.points)
    (layer,) = kept.maps
    maps = [layer[r, a] for r, a, _ in chosen] + [layer[r, b] for r, _, b in chosen]
    whole = model.from_frozen([torch.stack(maps).float()], config.train.trained)
    wanted, wanted_sigma = loss_of_maps(whole, points, config.loss, torch.tensor(held))
    assert loss.total.item() == pytest.approx(wanted.total.item(), abs=1e-6)
    assert torch.allclose(sigma, wanted_sigma)
    other, _ = loss_of_maps(whole, points, config.loss, torch.tensor(not held))
    assert other.total.item() != pytest.approx(wanted.total.item(), abs=1e-3)
    quicker = replace(config, train=replace(config.train, amp=True))
    (rounded, _), *_ = kept_losses(model, kept, range(1), quicker)
    assert rounded.total.item() == pytest.approx(wanted.total.item(), abs=2e-2)


@pytest.mark.parametrize("trained", ["last", "head"])
@pytest.mark.parametrize("kind", ["linear", "deep"])
def test_the_two_halves_of_a_network_are_the_whole(trained: Trained, kind: HeadKind) -> None:
    config = tiny()
    model = small_model(replace(config, model=replace(config.model, head=kind)))
    picture = torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    halves = model.from_frozen(model.frozen_maps(picture, trained), trained)
    whole = model(picture)
    assert torch.allclose(halves.descriptors, whole.descriptors, atol=1e-6)
    assert torch.allclose(halves.uncertainty, whole.uncertainty, atol=1e-6)


def test_a_run_with_kept_views_learns_the_last_stage_alone_and_resumes_to_the_same_bits(
    config: Config, tmp_path: Path
) -> None:
    source = images(tmp_path / "photos")
    whole = pretrain(source, out=tmp_path / "whole", config=config, quiet=True, device="cpu")
    half = replace(config, train=replace(config.train, steps=4))
    pretrain(source, out=tmp_path / "half", config=half, quiet=True, device="cpu")
    pretrain(source, out=tmp_path / "half", steps=6, resume=True, quiet=True, device="cpu")
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "half"))
    start = pretrain(source, out=tmp_path / "none", config=config, steps=0, quiet=True).model
    changed = {
        name
        for name, value in whole.model.state_dict().items()
        if not torch.equal(value, start.state_dict()[name])
    }
    assert changed
    assert all(name.startswith(("head.", "trunk.layers.5.")) for name in changed)


def test_views_are_kept_only_where_the_layers_below_do_not_learn(
    config: Config, tmp_path: Path
) -> None:
    everything = replace(config, train=replace(config.train, trained="all"))
    with pytest.raises(ValueError, match=r"--train\.trained head, or --train\.kept-views 0"):
        pretrain(images(tmp_path / "p"), out=tmp_path / "run", config=everything, quiet=True)
    assert not (tmp_path / "run").exists()
    batches = Batches(canvas(9), device=CPU)
    with pytest.raises(ValueError, match=r"for one process .* pass --train\.kept-views 0"):
        _check_kept(small_model(config), batches, config, Part(0, 2))


@pytest.mark.parametrize(("steps", "held"), [(0, 0), (5, 3), (100, 60), (250, 150), (500, 150)])
def test_sigma_is_never_held_for_a_whole_training(steps: int, held: int) -> None:
    config = Config()
    assert held_steps(replace(config, train=replace(config.train, steps=steps))) == held

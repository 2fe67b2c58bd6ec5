"""Every setting of learning acts: another value, other weights; and random draws are as said."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefeat.data.decode import Part
from surefeat.learn.config import ColourConfig, Config, TrainConfig, WarpConfig, preset
from surefeat.learn.loop import Log, Progress
from surefeat.learn.loss import compiles, step_draws
from surefeat.learn.pretrain import _shared
from surefeat.learn.warp import change_colour, corresponding_points, draw, two_views, view_maps
from surefeat.model.network import DenseFeatures
from tiny import CPU, go, same_bits, small_model, tiny

# Settings.

BASE: Config = tiny(steps=2, lr_warmup=0, clip=0.0, log_every=0, checkpoint_every=0, sigma_warmup=0)

CHANGES: dict[str, Any] = {
    "warp.rotation": 5.0, "warp.linear": 0.1, "warp.translation": 0.1, "warp.zoom": (0.9, 1.1),
    "warp.mirrored": 1.0, "warp.size": 40, "colour.brightness": 0.3, "colour.contrast": 0.2,
    "colour.saturation": 0.2, "colour.hue": 90.0, "colour.strength": 1.0,
    "colour.probability": 0.9, "loss.kind": "plain", "loss.points": 20, "loss.negatives": 3,
    "loss.match_radius": 4.0, "loss.ignore_radius": 20.0, "loss.sigma_warmup": 1,
    "train.steps": 3, "train.batch": 5, "train.trained": "head", "train.optimiser": "adagrad",
    "train.lr": 1e-3, "train.head_lr": 1e-3, "train.weight_decay": 0.5, "train.lr_warmup": 2,
    "train.decay": "constant", "train.clip": 1e-3, "train.seed": 1,
}  # fmt: skip


def changed(config: Config, name: str, value: Any) -> Config:
    group, field = name.split(".")
    return replace(config, **{group: replace(getattr(config, group), **{field: value})})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Weights after two steps; the rate falls, so that its fall can be switched off."""
    config = changed(BASE, "train.decay", "cosine")
    return go(tmp_path_factory.mktemp("base") / "run", config)[1].state_dict()


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_of_learning_acts(name: str, base: dict[str, Tensor], tmp_path: Path) -> None:
    config = changed(changed(BASE, "train.decay", "cosine"), name, CHANGES[name])
    model = small_model(BASE)
    assert not same_bits(go(tmp_path / "run", config, model=model)[1].state_dict(), base)


def test_the_margin_acts_on_the_contrastive_loss(tmp_path: Path) -> None:
    states = []
    for margin in (1.0, 0.6):
        config = changed(changed(BASE, "loss.kind", "contrastive"), "loss.margin", margin)
        states.append(go(tmp_path / f"{margin}", config)[1].state_dict())
    assert not same_bits(*states)


def test_head_and_trunk_learn_at_their_own_rates(tmp_path: Path) -> None:
    """AdamW's first step moves a weight by its rate, whatever the gradient."""
    config = tiny(lr=1e-4, head_lr=1e-2, lr_warmup=0, weight_decay=0.0, steps=1)
    before = small_model(config)
    _, after, _ = go(tmp_path / "run", config)
    for part, expected in (("head", 1e-2), ("trunk", 1e-4)):
        pairs = zip(
            getattr(before, part).parameters(), getattr(after, part).parameters(), strict=True
        )
        assert max((p - q).abs().max().item() for p, q in pairs) == pytest.approx(expected, rel=0.1)


def test_all_numbers_of_a_step_follow_from_the_seed() -> None:
    first, again, other = (step_draws(3, tiny(seed=seed), CPU) for seed in (4, 4, 5))
    for name in ("affine", "flip", "colour", "points"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


@pytest.mark.parametrize(
    ("trained", "steps", "expected"),
    [("all", 999, False), ("all", 1000, True), ("last", 2999, False), ("last", 3000, True),
     ("head", 1000, False)],
)  # fmt: skip
def test_what_runs_long_enough_on_a_gpu_is_compiled(
    trained: Any, steps: int, expected: bool
) -> None:
    config = TrainConfig(trained=trained, steps=steps, compile="auto")
    assert compiles(config, torch.device("cuda")) == expected
    assert not compiles(config, CPU)


def test_statistics_of_a_shared_batch_are_refused() -> None:
    """Each process would see its own part of the batch."""
    model, two = DenseFeatures(preset("small").model), Part(0, 2)
    with pytest.raises(ValueError, match=r"pass --train\.batch-norm frozen"):
        _shared(model, two, TrainConfig(batch_norm="trained"))
    assert _shared(model, Part(), TrainConfig(batch_norm="trained")) is model


# The log.


def test_percentiles_are_of_all_images_of_the_last_step() -> None:
    log = Log(CPU, batch=2, unit="pairs")
    first = {"loss": torch.tensor(1.0), "sigma": torch.full((2, 50), 9.0)}
    last = {"loss": torch.tensor(3.0), "sigma": torch.arange(100.0).reshape(2, 50)}
    log.add(first)
    log.add(last)
    line = log.sum_up(last)
    assert line["loss"] == 2.0
    shown = [line[f"sigma_p{level}"] for level in (10, 50, 90)]
    assert shown == pytest.approx([9.9, 49.5, 89.1], abs=1e-4)
    assert line["pairs_per_s"] == pytest.approx(4 / line["seconds"], rel=1e-6)
    # The next line speaks of what came after this one.
    log.add(first)
    assert log.sum_up(first)["loss"] == 1.0


@pytest.mark.parametrize(("fall", "stops"), [(0.0005, True), (0.002, False)])
def test_an_improvement_of_less_than_a_thousandth_is_none(fall: float, stops: bool) -> None:
    progress = Progress()
    progress.plateaued(1.0, patience=20)
    progress.step = 20
    # A fifth of a new loss enters the smoothed one.
    assert progress.plateaued(1.0 - 5 * fall, patience=20) == stops


# Distributions of what is drawn.


def views_of(config: WarpConfig, size: tuple[int, int], count: int = 3000) -> Tensor:
    draws = draw(count, points=1, generator=torch.Generator().manual_seed(8))
    return view_maps(torch.tensor([size]).expand(count, 2), draws, config)


def correlation(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


def test_zoom_is_uniform_in_its_range_and_of_the_geometric_mean_of_the_sides() -> None:
    still = WarpConfig(rotation=0, linear=0, translation=0, mirrored=0, zoom=(0.5, 1.5), size=50)
    side = views_of(still, (40, 160))[..., 0, 0] * 50  # pixels of the image that a view spans
    zoom = side / math.sqrt(40 * 160)
    assert zoom.min().item() == pytest.approx(0.5, abs=0.01)
    assert zoom.max().item() == pytest.approx(1.5, abs=0.01)
    assert zoom.mean().item() == pytest.approx(1.0, abs=0.02)
    assert zoom.std().item() == pytest.approx(1 / math.sqrt(12), abs=0.02)


def test_every_number_of_a_view_is_drawn_by_itself() -> None:
    """Rotation, the four linear entries, both shifts and the zoom of both views: 16 numbers."""
    config = WarpConfig(rotation=20, linear=0.3, translation=0.4, mirrored=0, zoom=(0.8, 1.2))
    one = {"rotation": 0.0, "linear": 0.0, "translation": 0.0, "zoom": (1.0, 1.0)}
    angle = views_of(replace(config, **one | {"rotation": 20.0}), (100, 100))
    angle = torch.atan2(angle[..., 1, 0], angle[..., 0, 0])
    # Without rotation the off-diagonal entries vanish: turned by 20 degrees at least, none does.
    entries = views_of(replace(config, **one | {"rotation": 20.0, "linear": 0.3}), (100, 100))
    plain = views_of(replace(config, **one | {"rotation": 20.0}), (100, 100))
    entries = entries[..., :2] / plain[..., :2]
    shift = views_of(replace(config, **one | {"translation": 0.4}), (100, 100))[..., 2]
    zoom = views_of(replace(config, **one | {"zoom": (0.8, 1.2)}), (100, 100))[..., 0, 0]
    columns = [
        values[:, view]
        for values in (angle, *entries.flatten(-2).unbind(-1), *shift.unbind(-1), zoom)
        for view in (0, 1)
    ]
    assert len(columns) == 16
    for n, first in enumerate(columns):
        for second in columns[:n]:
            assert abs(correlation(first, second)) < 0.08
    for values, most in ((angle.rad2deg(), 20), (entries - 1, 0.3)):
        assert values.abs().max().item() == pytest.approx(most, rel=0.02)
        assert values.mean().item() == pytest.approx(0, abs=0.02 * most)


def test_shifts_are_in_half_sides_of_the_view() -> None:
    still = WarpConfig(rotation=0, linear=0, translation=0.5, mirrored=0, zoom=(1.0, 1.0), size=50)
    maps = views_of(still, (100, 100))
    middle = maps[..., :2].sum(-1) * 24.5 + maps[..., 2]
    shift = (middle - 49.5) / 50
    assert shift.abs().max().item() == pytest.approx(0.5, abs=0.01)
    assert shift.amax((0, 1)).tolist() == pytest.approx([0.5, 0.5], abs=0.01)
    assert shift.amin((0, 1)).tolist() == pytest.approx([-0.5, -0.5], abs=0.01)


def test_the_two_views_have_colours_of_their_own() -> None:
    draws = draw(40, points=1, generator=torch.Generator().manual_seed(1))
    still = WarpConfig(rotation=0, linear=0, translation=0, mirrored=0, zoom=(1.0, 1.0), size=16)
    grey = torch.full((40, 3, 16, 16), 0.4)
    views = two_views(grey, torch.full((40, 2), 16), draws, still, ColourConfig(probability=1.0))
    apart = (views.view0 - views.view1).abs().amax((1, 2, 3))
    assert (apart > 0.01).float().mean() > 0.9


def test_points_are_spread_over_all_of_view_0_up_to_its_edges() -> None:
    """Pixels reach half a pixel beyond their centres; what lands there in view 1 counts too."""
    side, count = 16, 4000
    draws = draw(1, points=count, generator=torch.Generator().manual_seed(2))
    still = WarpConfig(rotation=0, linear=0, translation=0, mirrored=0, zoom=(1.0, 1.0), size=side)
    views = two_views(
        torch.zeros(1, 3, side, side), torch.full((1, 2), side), draws, still, ColourConfig()
    )
    points0, points1, valid = corresponding_points(views, draws, count=count)
    assert bool(valid.all())
    torch.testing.assert_close(points0, points1, atol=1e-4, rtol=0)
    assert points0.min().item() == pytest.approx(-0.5, abs=0.02)
    assert points0.max().item() == pytest.approx(side - 0.5, abs=0.02)
    assert points0.mean().item() == pytest.approx((side - 1) / 2, abs=0.15)


# Colours.


def colour(draws: list[float], pixel: list[float], **settings: float) -> list[float]:
    """A pixel with 4 switches (0 on, 1 off), 4 amounts in [0, 1] and the order, at strength 1."""
    config = ColourConfig(**{"strength": 1.0, **settings})
    image = torch.tensor(pixel).view(1, 3, 1, 1)
    return change_colour(image, torch.tensor([draws]), config).flatten().tolist()


@pytest.mark.parametrize("first", [True, False])
def test_contrast_comes_before_saturation_or_after_it(first: bool) -> None:
    """Red .9 times 1.5 is cut to 1 before it is blended half with grey, or not at all."""
    switches, amounts = [1.0, 0.0, 0.0, 1.0], [0.5, 1.0, 0.0, 0.5]
    draws = [*switches, *amounts, 0.2 if first else 0.8]
    red = colour(draws, [0.9, 0.0, 0.0], contrast=0.5, saturation=0.5)[0]
    half = 0.5 + 0.5 * 0.299  # the luma of red
    assert red == pytest.approx(half if first else 1.5 * 0.9 * half)


def test_what_a_hue_pushes_out_of_range_is_cut_before_the_contrast() -> None:
    """A third of a turn the other way leaves no negative light for a contrast to scale."""
    draws = [1.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.5, 1.0, 0.8]  # contrast .5 after hue 60 degrees
    turned = colour(draws, [1.0, 0.0, 0.0], contrast=0.5, hue=60.0)
    # A sixth of a turn of red about the grey axis: (2/3, 2/3, -1/3), cut to 0 from below.
    assert turned == pytest.approx([1 / 3, 1 / 3, 0.0], abs=1e-5)
    brighter = colour([1.0, 0.0, 1.0, 0.0, 0.5, 1.0, 0.5, 1.0, 0.8], [1.0, 1.0, 0.0], hue=60.0)
    # Yellow by a sixth: (1/3, 4/3, 1/3), cut to 1 before 1.5 times the contrast.
    assert brighter == pytest.approx([0.5, 1.0, 0.5], abs=1e-5)
    dimmer = colour([1.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.5, 1.0, 0.8], [1.0, 1.0, 0.0], hue=60.0)
    assert dimmer == pytest.approx([1 / 6, 0.5, 1 / 6], abs=1e-5)


def test_changes_are_as_strong_as_said_and_drawn_evenly() -> None:
    draws = torch.rand(4000, 9, generator=torch.Generator().manual_seed(3))
    draws[:, 0], draws[:, 1:4] = 0.0, 1.0  # brightness alone
    grey = torch.full((4000, 3, 1, 1), 0.5)
    for strength in (1.0, 2.0):
        moved = change_colour(grey, draws, ColourConfig(brightness=0.1, strength=strength)) - grey
        assert moved.abs().max().item() == pytest.approx(0.1 * strength, rel=0.01)
        assert moved.mean().item() == pytest.approx(0, abs=0.004)

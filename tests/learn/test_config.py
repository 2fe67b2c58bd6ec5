"""Presets hold the printed numbers, and settings survive JSON."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_args

import pytest

from surefeat.core.files import by_flag, from_dict, to_dict
from surefeat.learn.config import (
    Config,
    LossConfig,
    Preset,
    TrainConfig,
    check_numbers,
    preset,
    refuse_preset,
)
from surefeat.model.config import model_folder

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_the_paper_preset_has_the_printed_numbers() -> None:
    """Novotny et al. 2018, sections 3.2 to 3.6 and 4; warp ranges after Rocco et al. 2017."""
    paper = preset("paper")
    assert paper.loss.kind == "probabilistic"
    assert (paper.loss.points, paper.loss.negatives) == (700, 30)
    assert (paper.loss.match_radius, paper.loss.ignore_radius) == (1.0, 30.0)
    train = paper.train
    assert (train.optimiser, train.lr, train.weight_decay) == ("adagrad", 1e-3, 5e-4)
    assert (train.trained, train.decay, train.clip, train.lr_warmup) == ("all", "constant", 0.0, 0)
    assert train.patience > 0
    warp = paper.warp
    assert (warp.rotation, warp.linear, warp.translation) == (30.0, 0.5, 0.5)
    assert warp.zoom == (9 / 16, 9 / 16)
    assert warp.mirrored == 0
    colour = paper.colour
    assert colour.brightness == pytest.approx(32 / 255)
    assert (colour.contrast, colour.saturation, colour.hue) == (0.5, 0.5, 36.0)
    assert colour.probability == 0.5
    assert paper.model.trunk == "resnet50"


def test_the_paper_preset_gives_the_head_the_printed_rate() -> None:
    assert preset("paper").train.head_lr == 1e-3


def test_the_default_is_ours() -> None:
    assert preset("ours") == Config()
    assert preset("ours").loss.sigma_warmup > 0
    assert preset("small").model.trunk == "small"


def test_the_default_recipe_is_the_one_that_the_shipped_model_was_trained_by() -> None:
    """Whoever changes a default trains anew, and stores the run. What its machine, its first
    weights and its files decide may differ."""
    run = json.loads((RESULTS / "studies" / "training_ours.json").read_text())
    about = json.loads((model_folder("resnet50") / "model.json").read_text())
    assert run["weights_sha256"]["ours"] == about["sha256"]
    trained, default = (by_flag(c) for c in (from_dict(Config, run["config"]["ours"]), Config()))
    of_the_machine = {
        "model.stride-in-1x1", "train.compile", "train.check-every", "train.checkpoint-every",
        "data.held-out",
    }  # fmt: skip
    assert {flag for flag in default if trained[flag] != default[flag]} <= of_the_machine


@pytest.mark.parametrize("name", ["ours", "one-way", "paper", "small"])
def test_settings_survive_json(name: str) -> None:
    config = preset(name)  # type: ignore[arg-type]
    config = replace(config, warp=replace(config.warp, zoom=(0.25, 4.5), mirrored=0.5))
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config


def test_missing_settings_take_their_defaults() -> None:
    assert from_dict(Config, {"loss": {"points": 5}}) == Config(loss=LossConfig(points=5))


def test_an_unknown_setting_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"unknown setting 'lrr' for TrainConfig; known: .*lr"):
        from_dict(TrainConfig, {"lrr": 1})
    values = to_dict(Config())
    values["loss"]["radius"] = 3
    with pytest.raises(ValueError, match="unknown setting 'radius' for LossConfig"):
        from_dict(Config, values)


def test_an_unknown_preset_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown preset 'big'; choose auto, ours, quick"):
        preset("big")  # type: ignore[arg-type]


def test_settings_cannot_be_changed_in_place() -> None:
    for part in (Config(), *(getattr(Config(), item.name) for item in fields(Config))):
        assert is_dataclass(part)
        with pytest.raises(AttributeError):
            setattr(part, fields(part)[0].name, None)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [("train", "batch", 0), ("warp", "size", 0), ("loss", "points", 1), ("data", "side", -4)],
)
def test_numbers_that_cannot_work_are_refused_by_their_flag(
    group: str, name: str, value: int
) -> None:
    config = preset("small")
    check_numbers(config)
    changed = replace(getattr(config, group), **{name: value})
    with pytest.raises(ValueError, match=f"--{group}.{name} is {value}; use at least"):
        check_numbers(replace(config, **{group: changed}))


@pytest.mark.parametrize(("share", "said"), [(1.5, "use at most 1"), (-0.1, "use at least 0")])
def test_a_share_of_mirrored_views_beyond_its_range_is_refused(share: float, said: str) -> None:
    config = preset("small")
    with pytest.raises(ValueError, match=said):
        check_numbers(replace(config, warp=replace(config.warp, mirrored=share)))


def test_a_preset_that_is_not_a_run_s_own_is_refused() -> None:
    """Single settings may differ, and how long it runs; other presets' settings may not."""
    for name in get_args(Preset):
        own = preset(name)
        own = replace(own, train=replace(own.train, steps=7, batch=5))
        others = {"auto", name} | ({"ours", "auto"} if name in ("ours", "auto") else set())
        for asked in get_args(Preset):
            if asked in others:
                refuse_preset(asked, own, run="runs/x")
            else:
                with pytest.raises(ValueError, match=f"not those of {asked}"):
                    refuse_preset(asked, own, run="runs/x")

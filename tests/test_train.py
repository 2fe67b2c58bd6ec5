"""The loop: it learns, stops for the right reasons, and never keeps a broken state."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import surefeat.train
from surefeat.config import Config, TrainConfig, preset
from surefeat.data.batches import Batches
from surefeat.loss import PairLoss, negative_log_density
from surefeat.model import DenseFeatures
from surefeat.monitor import Due, Progress, TrainingStoppedError, collapsed
from surefeat.optimiser import make_optimiser, rate
from surefeat.runs import Run
from surefeat.train import step_draws, train
from tiny import canvas, same_bits, tiny

CPU = torch.device("cpu")


def small_model(config: Config, *, seed: int = 0) -> DenseFeatures:
    torch.manual_seed(seed)
    return DenseFeatures.create(config.model, init="none")


def go(
    folder: Path,
    config: Config,
    *,
    images: int = 9,
    model: DenseFeatures | None = None,
    **more: Any,
) -> tuple[Run, DenseFeatures, Progress]:
    model = model or small_model(config)
    run = Run.start(folder, config)
    batches = Batches(canvas(images), device=CPU)
    return run, model, train(model, batches, run, config, **more)


def still(**settings: Any) -> Config:
    """Nothing moves: with the same images and views the loss is the same at every step."""
    return tiny(lr=0.0, head_lr=0.0, weight_decay=0.0, sigma_warmup=0, **settings)


# Rates and groups


def test_the_rate_warms_up_and_falls_along_a_cosine() -> None:
    config = TrainConfig(steps=100, lr_warmup=4, decay="cosine")
    assert [rate(step, config) for step in (0, 1)] == pytest.approx([0.25, 0.5], rel=1e-3)
    assert rate(50, config) == pytest.approx(0.5)
    assert rate(25, config) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert rate(100, config) == pytest.approx(0)
    constant = replace(config, decay="constant")
    assert [rate(step, constant) for step in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    assert rate(0, replace(constant, lr_warmup=0)) == 1


def test_a_step_is_taken_at_the_rate_of_its_time(tmp_path: Path) -> None:
    """AdamW's first step moves every weight by its rate, whatever the gradient."""
    config = tiny(lr=1e-2, head_lr=1e-2, lr_warmup=1000, weight_decay=0.0, steps=1)
    before = small_model(config)
    _, after, _ = go(tmp_path / "run", config)
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    moved = max((p - q).abs().max().item() for p, q in pairs)
    assert moved == pytest.approx(1e-5, rel=0.05)


def test_the_paper_preset_learns_by_adagrad_with_the_printed_rates() -> None:
    model = small_model(tiny())
    model.set_trained("all")
    optimiser = make_optimiser(model, preset("paper").train)
    assert isinstance(optimiser, torch.optim.Adagrad)
    groups = optimiser.param_groups
    assert [group["lr"] for group in groups] == [1e-3, 1e-3]
    assert [group["weight_decay"] for group in groups] == [5e-4, 5e-4]
    learning = [p for group in groups for p in group["params"]]
    assert {id(p) for p in learning} == {id(p) for p in model.parameters()}


def test_frozen_layers_are_left_alone(tmp_path: Path) -> None:
    config = tiny(trained="last", steps=3)
    before = {k: v.clone() for k, v in small_model(config).state_dict().items()}
    _, model, _ = go(tmp_path / "run", config)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {k for k in before if k.startswith(("head.", "trunk.layers.5."))}
    model.set_trained("head")
    assert len(make_optimiser(model, config.train).param_groups) == 1


# The schedule


@given(
    step=st.integers(1, 60),
    every=st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 7)),
)
def test_a_line_precedes_every_check_and_checkpoint(step: int, every: tuple[int, int, int]) -> None:
    lines, checks, checkpoints = every
    config = TrainConfig(
        steps=60, log_every=lines, check_every=checks, checkpoint_every=checkpoints
    )
    due = Due.after(step, config)
    assert due.check == (checks > 0 and step % checks == 0)
    assert due.checkpoint == (step == 60 or (checkpoints > 0 and step % checkpoints == 0))
    logged = lines > 0 and step % lines == 0
    assert due.line == (logged or due.check or due.checkpoint)


def test_checks_and_checkpoints_keep_to_their_own_steps(tmp_path: Path) -> None:
    config = tiny(steps=11, log_every=4, check_every=5, checkpoint_every=3)
    reported: list[int] = []
    run, _, progress = go(
        tmp_path / "run", config,
        check=lambda _: {"auroc": math.nan, "right": 0.5},
        report=lambda step, _: reported.append(step),
    )  # fmt: skip
    assert progress.step == 11
    rows = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in run.metrics_file.read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == reported == [3, 4, 5, 6, 8, 9, 10, 11]
    assert [row["step"] for row in rows if "right" in row] == [5, 10]
    assert rows[2]["auroc"] is None
    names = [path.name for path in run.checkpoints()]
    assert names == ["checkpoint-00000009.safetensors", "checkpoint-00000011.safetensors"]


def test_a_line_holds_the_mean_over_its_steps(tmp_path: Path) -> None:
    each, _, _ = go(tmp_path / "each", tiny(log_every=1, checkpoint_every=0))
    some, _, _ = go(tmp_path / "some", tiny(log_every=5, checkpoint_every=0))
    losses = [row["loss"] for row in each.metrics()]
    expected = [sum(losses[:5]) / 5, sum(losses[5:10]) / 5, sum(losses[10:]) / 2]
    assert [row["loss"] for row in some.metrics()] == pytest.approx(expected, abs=1e-6)


# Randomness


def test_a_seed_decides_everything_and_nothing_else_does(tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        torch.manual_seed(len(runs))
        start = small_model(tiny())
        torch.rand(len(runs) + 3)
        runs[name] = go(tmp_path / name, tiny(seed=seed, steps=4), model=start)[1].state_dict()
    assert same_bits(runs["first"], runs["again"])
    assert not same_bits(runs["first"], runs["other"])


def test_every_step_and_seed_draws_its_own_numbers() -> None:
    drawn = {
        step_draws(step, tiny(seed=seed), CPU).affine.sum().item()
        for step in range(20)
        for seed in range(5)
    }
    assert len(drawn) == 100


# Learning by heart, and stopping


def test_a_few_images_are_learned_by_heart(tmp_path: Path) -> None:
    config = tiny(steps=60, log_every=5, checkpoint_every=0, sigma_warmup=20, lr=4e-3, head_lr=4e-3)
    run, _, _ = go(tmp_path / "run", config, images=2, overfit=True)
    rows = run.metrics()
    assert rows[3]["loss"] < rows[0]["loss"] - 0.02  # sigma is held at 1 up to here
    assert rows[-1]["loss"] < rows[3]["loss"] - 0.2
    first, last = (row["positive"] - row["negative"] for row in (rows[0], rows[-1]))
    assert last > first + 0.2


def test_overfitting_repeats_images_and_views(tmp_path: Path) -> None:
    config = still(log_every=1, steps=6)
    by_heart, _, _ = go(tmp_path / "by-heart", config, overfit=True)
    assert len({row["loss"] for row in by_heart.metrics()}) == 1
    fresh, _, _ = go(tmp_path / "fresh", config)
    assert len({row["loss"] for row in fresh.metrics()}) == 6


def test_a_plateau_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    config = still(steps=100, log_every=2, patience=6, checkpoint_every=50)
    run, _, progress = go(tmp_path / "run", config, overfit=True)
    assert progress.step == 8  # best at 2
    assert run.checkpoints()[-1].name == "checkpoint-00000008.safetensors"


def test_patience_counts_steps_without_a_better_smoothed_loss() -> None:
    progress = Progress()
    losses = [1.0, 0.9, 2.0, 0.8, 0.8, 0.8]
    smooth, seen = losses[0], []
    for number, loss in enumerate(losses):
        progress.step = 10 * (number + 1)
        stop = progress.plateaued(loss, patience=30)
        smooth = 0.8 * smooth + 0.2 * loss
        assert progress.recent == pytest.approx(smooth)
        seen.append((progress.best_step, stop))
    assert seen == [(10, False), (20, False), (20, False), (20, False), (20, True), (20, True)]
    assert not Progress(step=10**6).plateaued(1.0, patience=0)


# Bad states


def finite_checkpoints(run: Run) -> list[str]:
    for path in run.checkpoints():
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())
    return [path.name for path in run.checkpoints()]


def test_an_absurd_rate_is_said_and_nothing_broken_is_written(tmp_path: Path) -> None:
    """Weights of 1e38 are finite; what they do at the next step is not."""
    config = tiny(lr=1e38, head_lr=1e38, lr_warmup=0, clip=0.0, optimiser="adagrad",
                  log_every=100, checkpoint_every=1)  # fmt: skip
    model = small_model(config)
    with pytest.raises(TrainingStoppedError) as stopped:
        go(tmp_path / "run", config, model=model)
    assert "the loss is nan, weights are not finite; lower --train.lr" in str(stopped.value)
    assert not all(bool(p.isfinite().all()) for p in model.parameters())
    kept = finite_checkpoints(Run.open(tmp_path / "run"))
    assert kept == ["checkpoint-00000000.safetensors", "checkpoint-00000001.safetensors"]
    assert kept[-1] in str(stopped.value)


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, Tensor], Tensor]) -> None:
    """Change the loss of step number n."""
    true, calls = surefeat.train.pair_loss, iter(range(1000))

    def spoiled(*args: Any, **more: Any) -> PairLoss:
        loss = true(*args, **more)
        return replace(loss, total=change(next(calls), loss.total))

    monkeypatch.setattr(surefeat.train, "pair_loss", spoiled)


def test_a_loss_of_nan_stops_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda step, loss: loss * math.nan if step == 5 else loss)
    with pytest.raises(TrainingStoppedError, match=r"the loss is nan.* is checkpoint-00000004"):
        go(tmp_path / "run", tiny(checkpoint_every=2, log_every=100))
    run = Run.open(tmp_path / "run")
    names = ["checkpoint-00000002.safetensors", "checkpoint-00000004.safetensors"]
    assert finite_checkpoints(run) == names
    assert [row["step"] for row in run.metrics()] == [2, 4]
    monkeypatch.undo()
    config = tiny(checkpoint_every=2, log_every=100)
    resumed = small_model(config)
    train(resumed, Batches(canvas(9), device=CPU), run, config)
    _, undisturbed, _ = go(tmp_path / "undisturbed", config)
    assert same_bits(resumed.state_dict(), undisturbed.state_dict())


def test_a_gradient_of_nan_behind_a_finite_loss_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The root's slope at 0 is infinite, times 0 it is NaN; the value is 0.
    spoil(monkeypatch, lambda step, loss: loss + ((loss - loss).sqrt() if step == 3 else 0))
    with pytest.raises(TrainingStoppedError, match=r"the loss is -?\d.*, weights are not finite"):
        go(tmp_path / "run", tiny(checkpoint_every=1, log_every=100))
    assert finite_checkpoints(Run.open(tmp_path / "run"))[-1] == "checkpoint-00000003.safetensors"


def collapsing(*, sigma_warmup: int) -> Config:
    """The paper's wide warps, and steps so large that sigma runs before descriptors separate."""
    config = tiny(size=48, points=96, sigma_warmup=sigma_warmup, steps=50, batch=8, log_every=5,
                  lr=2e-2, head_lr=2e-2, checkpoint_every=20)  # fmt: skip
    return replace(
        config,
        warp=replace(preset("paper").warp, size=48),
        loss=replace(config.loss, ignore_radius=4.0),
    )


def test_without_sigma_warmup_a_random_network_collapses_and_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError) as stopped:
        go(tmp_path / "run", collapsing(sigma_warmup=0), images=20)
    message = str(stopped.value)
    assert message.startswith("confidence collapsed: sigma is above ")
    assert "Raise --loss.sigma-warmup" in message
    kept = finite_checkpoints(Run.open(tmp_path / "run"))
    assert f"the last good checkpoint is {kept[-1]}" in message


def test_while_sigma_is_held_nothing_collapses(tmp_path: Path) -> None:
    run, _, progress = go(tmp_path / "run", collapsing(sigma_warmup=50), images=20)
    assert progress.step == 50
    assert all(row["sigma_p10"] < 4 for row in run.metrics())


@pytest.mark.parametrize(
    ("sigma_p10", "positive", "negative", "expected"),
    [
        (1.0, 0.5, 0.5, False),  # a random network at the start
        (4.6, 0.98, 0.98, False),  # such runs were seen to recover
        (8.5, 0.98, 0.98, True),
        (300.0, 0.7, 0.75, True),
        (8.5, 0.9, 0.8, False),  # descriptors separate: sigma will come down
        (0.2, 0.5, 0.6, False),  # hard negatives
    ],
)
def test_collapse_is_doubt_without_knowledge(
    sigma_p10: float, positive: float, negative: float, expected: bool
) -> None:
    line = {"sigma_p10": sigma_p10, "positive": positive, "negative": negative}
    assert collapsed(line) == expected


def test_separation_brings_sigma_back() -> None:
    """The best sigma for matches that outscore non-matches by d is about 1/(6 d): by search."""
    sigma = torch.logspace(-1, 3, 20001, dtype=torch.float64)
    for d in (0.01, 0.02, 0.05):
        high, low = torch.full_like(sigma, 0.5 + d / 2), torch.full_like(sigma, 0.5 - d / 2)
        cost = negative_log_density(1 - high, sigma) + negative_log_density(low, sigma)
        assert sigma[cost.argmin()].item() == pytest.approx(1 / (6 * d), rel=0.01)


@pytest.mark.parametrize("kind", ["plain", "contrastive"])
def test_losses_without_sigma_do_not_collapse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("surefeat.monitor.COLLAPSED_SIGMA", 0.0)
    config = replace(tiny(steps=3), loss=replace(tiny().loss, kind=kind))  # type: ignore[arg-type]
    assert go(tmp_path / "run", config)[2].step == 3


# What a check and a caller may rely on


def test_a_check_sees_a_model_in_eval_mode_and_leaves_no_trace(tmp_path: Path) -> None:
    """With a batch norm that learns, a held-out image would otherwise enter its statistics."""
    config = tiny(batch_norm="trained", check_every=2, steps=6)
    modes: list[bool] = []

    def check(model: DenseFeatures) -> dict[str, Any]:
        modes.append(any(module.training for module in model.modules()))
        model(torch.rand(2, 3, 32, 32))
        return {}

    states = []
    for name, used in (("checked", check), ("unchecked", lambda _: {})):
        model = small_model(config)
        model.trunk.layers[0][1] = nn.BatchNorm2d(24)  # type: ignore[index, operator]
        states.append(go(tmp_path / name, config, model=model, check=used)[1].state_dict())
    assert modes == [False] * 3
    assert states[0]["trunk.layers.0.1.num_batches_tracked"] == 6
    assert same_bits(*states)


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    during: list[Any] = []
    go(tmp_path / "run", tiny(steps=1), check=None,
       report=lambda *_: during.append(signal.getsignal(signal.SIGTERM)))  # fmt: skip
    assert during[0] not in before
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before


def test_training_works_outside_the_main_thread(tmp_path: Path) -> None:
    done: list[int] = []
    work = threading.Thread(target=lambda: done.append(go(tmp_path / "r", tiny(steps=2))[2].step))
    work.start()
    work.join()
    assert done == [2]

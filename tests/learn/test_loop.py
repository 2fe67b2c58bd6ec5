"""The loop: its rates, its schedule and its randomness, and that it learns."""

from __future__ import annotations

import json
import math
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from surefeat.learn.config import preset
from surefeat.learn.loop import Schedule, descend, fast_arithmetic, make_optimiser, rate
from surefeat.learn.loss import compiles, step_draws
from surefeat.model.network import DenseFeatures
from tiny import CPU, go, same_bits, small_model, still, tiny

# Rates and groups


def test_the_rate_warms_up_and_falls_along_a_cosine() -> None:
    falling = [rate(step, 100, warmup=4, decay="cosine") for step in (0, 1, 25, 50, 100)]
    expected = [0.25, 0.5, (1 + math.sqrt(0.5)) / 2, 0.5, 0]
    assert falling == pytest.approx(expected, rel=1e-3, abs=1e-9)
    constant = [rate(step, 100, warmup=4, decay="constant") for step in (0, 3, 4, 99)]
    assert constant == [0.25, 1, 1, 1]
    assert rate(0, 100, warmup=0, decay="constant") == 1


def test_a_step_is_taken_at_the_rate_of_its_time(tmp_path: Path) -> None:
    """AdamW's first step moves every weight by its rate, whatever the gradient."""
    config = tiny(lr=1e-2, head_lr=1e-2, lr_warmup=1000, weight_decay=0.0, steps=1)
    before = small_model(config)
    _, after, _ = go(tmp_path / "run", config)
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    moved = max((p - q).abs().max().item() for p, q in pairs)
    assert moved == pytest.approx(1e-5, rel=0.05)


def test_the_paper_preset_learns_by_adagrad_with_the_printed_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.optim.Optimizer] = []

    def watched(*args: Any, **more: Any) -> torch.optim.Optimizer:
        made.append(make_optimiser(*args, **more))
        return made[0]

    monkeypatch.setattr("surefeat.learn.loop.make_optimiser", watched)
    config = replace(tiny(), train=replace(preset("paper").train, steps=1, batch=4))
    _, model, _ = go(tmp_path / "run", config)
    assert isinstance(made[0], torch.optim.Adagrad)
    groups = made[0].param_groups
    assert [group["lr"] for group in groups] == [1e-3, 1e-3]
    assert [group["weight_decay"] for group in groups] == [5e-4, 5e-4]
    learning = [p for group in groups for p in group["params"]]
    assert {id(p) for p in learning} == {id(p) for p in model.parameters()}


def test_the_gradient_is_clipped_and_the_rates_are_multiplied() -> None:
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    rates = zip(weights, (1.0, 0.1), strict=True)
    optimiser = torch.optim.SGD([{"params": [w], "lr": r, "initial_lr": r} for w, r in rates])
    slope = torch.tensor([3.0, 4.0])
    descend(optimiser, sum((w * slope).sum() for w in weights), factor=0.5, clip=1.0)  # type: ignore[arg-type]
    step = slope / slope.repeat(2).norm() * 0.5
    torch.testing.assert_close(weights[0].data, -step)
    torch.testing.assert_close(weights[1].data, -0.1 * step)


def test_sgd_has_a_momentum_of_nine_tenths() -> None:
    """Down an even slope the second step is the first one's length and nine tenths of it more."""
    weight = nn.Parameter(torch.zeros(1))
    optimiser = make_optimiser("sgd", [([weight], 0.1)], weight_decay=0.0)
    places = []
    for _ in range(2):
        descend(optimiser, weight.sum(), factor=1.0, clip=0.0)
        places.append(weight.item())
    assert places == pytest.approx([-0.1, -0.1 - 0.19])


@pytest.mark.parametrize(("compile_", "on_cuda"), [("auto", True), ("on", True), ("off", False)])
def test_what_runs_on_the_cpu_is_compiled_only_on_demand(compile_: Any, on_cuda: bool) -> None:
    """Also on a machine that has a GPU."""
    config = replace(preset("ours").train, steps=10_000, compile=compile_)
    assert compiles(config, torch.device("cuda")) == on_cuda
    assert compiles(config, CPU) == (compile_ == "on")


def test_frozen_layers_are_left_alone(tmp_path: Path) -> None:
    config = tiny(trained="last", steps=3)
    before = {k: v.clone() for k, v in small_model(config).state_dict().items()}
    _, model, _ = go(tmp_path / "run", config)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {k for k in before if k.startswith(("head.", "trunk.layers.5."))}
    model.set_trained("head")
    rates = [(model.head.parameters(), 1.0), (model.trunk.parameters(), 1.0)]
    assert len(make_optimiser("adamw", rates, weight_decay=0.0).param_groups) == 1


# The schedule


@given(
    step=st.integers(1, 60),
    every=st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 7)),
)
def test_a_line_precedes_every_check_and_checkpoint(step: int, every: tuple[int, int, int]) -> None:
    lines, checks, checkpoints = every
    due = Schedule(60, lines, checkpoints, check_every=checks)
    assert due.checks(step) == (checks > 0 and step % checks == 0)
    assert due.saves(step) == (step == 60 or (checkpoints > 0 and step % checkpoints == 0))
    logged = lines > 0 and step % lines == 0
    assert due.logs(step) == (logged or due.checks(step) or due.saves(step))


def test_checks_and_checkpoints_keep_to_their_own_steps(tmp_path: Path) -> None:
    config = tiny(steps=11, log_every=4, check_every=5, checkpoint_every=3)
    reported: list[int] = []
    ticks: list[int] = []
    run, _, progress = go(
        tmp_path / "run", config,
        check=lambda _: {"auroc": math.nan, "right": 0.5},
        shown=(lambda step, _: reported.append(step), ticks.append),
    )  # fmt: skip
    assert progress.step == 11
    assert ticks == list(range(12))  # the bar moves with every step
    rows = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in run.metrics_file.read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == reported == [3, 4, 5, 6, 8, 9, 10, 11]
    assert [row["step"] for row in rows if "right" in row] == [5, 10]
    assert rows[2]["auroc"] is None
    names = [path.name for path in run.checkpoints()]
    assert names == ["checkpoint-00000009.safetensors", "checkpoint-00000011.safetensors"]


def test_a_training_that_holds_nothing_out_checks_nothing(tmp_path: Path) -> None:
    run, _, progress = go(tmp_path / "run", tiny(steps=4, check_every=2, log_every=0), check=None)
    assert progress.step == 4
    assert [row["step"] for row in run.metrics()] == [2, 4]


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


# Learning by heart


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


@pytest.mark.parametrize("enabled", [True, False])
def test_fast_arithmetic_lasts_as_long_as_the_training(enabled: bool) -> None:
    def flags() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark

    before = flags()
    assert before == (False, False)
    with fast_arithmetic(enabled=enabled):
        assert flags() == (enabled, enabled)
    assert flags() == before
    with pytest.raises(RuntimeError), fast_arithmetic(enabled=True):
        raise RuntimeError
    assert flags() == before


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    during: list[Any] = []

    def report(*_: object) -> None:
        during.append(signal.getsignal(signal.SIGTERM))

    go(tmp_path / "run", tiny(steps=1), check=None, shown=(report, during.append))
    assert during[:2] == [0, 1]
    assert during[2] not in before
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before


def test_training_works_outside_the_main_thread(tmp_path: Path) -> None:
    done: list[int] = []
    work = threading.Thread(target=lambda: done.append(go(tmp_path / "r", tiny(steps=2))[2].step))
    work.start()
    work.join()
    assert done == [2]

"""The loop stops for the right reasons, and never keeps a broken state."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import surefeat.learn.loss
from surefeat.data.decode import Batches
from surefeat.learn.config import Config, LossConfig, preset
from surefeat.learn.loop import Progress, TrainingStoppedError
from surefeat.learn.loss import PairLoss, reason_to_stop
from surefeat.learn.pretrain import train
from surefeat.learn.runs import Run
from surefeat.model.probability import negative_log_density
from tiny import CPU, canvas, go, same_bits, small_model, still, tiny

# Stopping


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
    true, calls = surefeat.learn.loss.pair_loss, iter(range(1000))

    def spoiled(*args: Any, **more: Any) -> PairLoss:
        loss = true(*args, **more)
        return replace(loss, total=change(next(calls), loss.total))

    monkeypatch.setattr(surefeat.learn.loss, "pair_loss", spoiled)


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
    """Sigma is let go after three fifths of the steps, however long it was to be held."""
    config = collapsing(sigma_warmup=50)
    longer = replace(config, train=replace(config.train, steps=50 * 5 // 3 + 1))
    with suppress(TrainingStoppedError):
        go(tmp_path / "run", longer, images=20)
    rows = Run(tmp_path / "run").metrics()
    assert all(row["sigma_p10"] < 4 for row in rows if row["step"] <= 50)
    assert max(row["step"] for row in rows) >= 50


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
    config = LossConfig(sigma_warmup=10)
    assert bool(reason_to_stop(11, line, config)) == expected
    assert reason_to_stop(10, line, config) is None


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
    monkeypatch.setattr("surefeat.learn.loss.COLLAPSED_SIGMA", 0.0)
    config = replace(tiny(steps=3), loss=replace(tiny().loss, kind=kind))  # type: ignore[arg-type]
    assert go(tmp_path / "run", config)[2].step == 3

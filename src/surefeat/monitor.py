"""Watching a training run: progress, log lines, and the reasons to stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from surefeat.config import TrainConfig
from surefeat.data.batches import Part
from surefeat.loss import PairLoss
from surefeat.runs import Run

# Sigma's 10th percentile above this: not even the most confident tenth claims to know anything.
# Where matches outscore the mined non-matches by d, the best sigma is about 1 / (6 d); so it stays
# there only while d < 0.02, and comes down again by itself once the descriptors separate.
COLLAPSED_SIGMA = 8.0
_SIGMA_PERCENTILES = (0.1, 0.5, 0.9)
# Steps after which several processes ask each other whether one was told to stop.
_ASK_EVERY = 10


class TrainingStoppedError(RuntimeError):
    """Training ended for a reason the user should read; the last good checkpoint is kept."""


@dataclass
class Progress:
    """What the loop remembers besides tensors; stored in checkpoints."""

    step: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    recent: float | None = None
    """Loss smoothed over the last logs."""

    def plateaued(self, loss: float, *, patience: int) -> bool:
        """Take in a logged loss; True when nothing has improved for `patience` steps."""
        self.recent = loss if self.recent is None else 0.8 * self.recent + 0.2 * loss
        if self.best is None or self.recent < self.best - 1e-3:
            self.best, self.best_step = self.recent, self.step
        return bool(patience) and self.step - self.best_step >= patience


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    line: bool
    """A line of the log: also before every check and checkpoint, so that no bad state is kept."""
    check: bool
    checkpoint: bool

    @classmethod
    def after(cls, step: int, config: TrainConfig) -> Due:
        """By the number of steps done alone, so that a resumed run does the same."""

        def every(steps: int) -> bool:
            return steps > 0 and step % steps == 0

        last = step == config.steps
        check, checkpoint = every(config.check_every), last or every(config.checkpoint_every)
        return cls(last or every(config.log_every) or check or checkpoint, check, checkpoint)


def refuse_bad(values: dict[str, float], *, finite: bool, held: bool, run: Run, kind: str) -> None:
    """NaN and the collapse of confidence end the run with a plain message.

    finite: whether parameters and optimiser still are; held: sigma is not learned yet.
    """
    kept = run.checkpoints()
    where = f"the last good checkpoint is {kept[-1].name}" if kept else "there is no checkpoint"
    if not math.isfinite(values["loss"]) or not finite:
        what = f"the loss is {values['loss']:.3g}, weights are {'' if finite else 'not '}finite"
        raise TrainingStoppedError(f"{what}; lower --train.lr, or set --train.clip 1; {where}")
    if kind == "probabilistic" and not held and collapsed(values):
        raise TrainingStoppedError(
            f"confidence collapsed: sigma is above {values['sigma_p10']:.1f} at 90 % of points, "
            "which makes every match cost nothing. Raise --loss.sigma-warmup, start from trained "
            f"weights (--init), or soften the warps; {where}"
        )


def all_finite(tensors: dict[str, Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity; the host waits for the device once."""
    device = next(iter(tensors.values())).device
    return bool(torch.stack([t.isfinite().all().to(device) for t in tensors.values()]).all())


def collapsed(values: dict[str, float]) -> bool:
    """Whether a log line shows sigma on its way to infinity, with nothing to bring it back."""
    separation = values["positive"] - values["negative"]
    return values["sigma_p10"] > COLLAPSED_SIGMA and separation < 1 / (6 * COLLAPSED_SIGMA)


class Log:
    """Sums on the device, read once per log line, so that no step waits for the host."""

    def __init__(self, device: torch.device, part: Part) -> None:
        self.sums, self.steps = torch.zeros(4, device=device), 0
        self.part, self.since = part, time.perf_counter()

    def add(self, loss: PairLoss) -> None:
        parts = (loss.total, loss.positive_score, loss.negative_score, loss.dead_positives)
        self.sums += torch.stack([value.detach().float() for value in parts])
        self.steps += 1

    def flush(self, sigma: Tensor, *, rows: int) -> dict[str, float]:
        """Means since the last line, sigma's percentiles now, and the speed."""
        levels = torch.tensor(_SIGMA_PERCENTILES, device=sigma.device)
        # A sample is enough for a percentile, and a short sort does not hold up the device.
        flat = sigma.detach().float().flatten()[:: max(1, sigma.numel() // 4096)]
        both = torch.cat([self.sums / self.steps, torch.quantile(flat, levels)])
        if self.part.world > 1:
            dist.all_reduce(both)
            both /= self.part.world
        names = ("loss", "positive", "negative", "dead", "sigma_p10", "sigma_p50", "sigma_p90")
        values: dict[str, float] = dict(zip(names, both.tolist(), strict=True))
        now = time.perf_counter()
        values["seconds"] = now - self.since
        values["pairs_per_s"] = self.steps * rows / (now - self.since)
        self.sums.zero_()
        self.steps, self.since = 0, now
        return values


class Reporter:
    """Progress bar and, where wanted, TensorBoard; called with each log line."""

    def __init__(self, run: Run, config: TrainConfig, *, quiet: bool, tensorboard: bool) -> None:
        self.bar = tqdm(total=config.steps, desc="training", unit="step", disable=quiet)
        self.writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                fix = "pip install 'surefeat[tensorboard]'"
                raise ImportError(f"needs TensorBoard: {fix}") from error
            folder = str(run.folder / "tensorboard")
            self.writer = SummaryWriter(folder)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.writer:
            self.writer.close()

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self.bar.update(step - self.bar.n)
        sigma = "/".join(f"{values[f'sigma_p{p}']:.2f}" for p in (10, 50, 90))
        self.bar.set_postfix_str(
            f"loss {values['loss']:.3f} pos {values['positive']:.2f} neg {values['negative']:.2f} "
            f"sigma {sigma} {values['pairs_per_s']:.0f} pairs/s"
        )
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)


def told_to_stop(flag: bool, step: int, due: Due, part: Part, device: torch.device) -> bool:
    """Whether any process was asked to stop: all must leave the loop at the same step."""
    if part.world == 1:
        return flag
    if not due.line and step % _ASK_EVERY:
        return False
    shared = torch.tensor(float(flag), device=device)
    dist.all_reduce(shared)
    return bool(shared.item() > 0)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM are noted; the loop ends after its current step."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python allows handlers in the main thread only
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, lambda number, _: asked.append(number)) for kind in kinds]
    try:
        yield lambda: bool(asked)
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)

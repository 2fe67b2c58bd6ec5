"""Watching a training run: progress, log lines, and the reasons to stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from surefeat.data.batches import Part
from surefeat.loss import PairLoss
from surefeat.runs import Run

# Sigma's 10th percentile above this: not even the most confident tenth claims to know anything.
COLLAPSED_SIGMA = 5.0
_SIGMA_PERCENTILES = (0.1, 0.5, 0.9)


class TrainingStopped(RuntimeError):
    """Training ended for a reason the user should read; the last good checkpoint is kept."""


@dataclass
class Progress:
    """What the loop remembers besides tensors; stored in checkpoints."""

    step: int = 0
    seconds: float = 0.0
    best: float = math.inf
    best_step: int = 0
    recent: float | None = field(default=None)
    """Loss smoothed over the last logs."""

    def plateaued(self, loss: float, *, patience: int) -> bool:
        """Take in a logged loss; True when nothing has improved for `patience` steps."""
        self.recent = loss if self.recent is None else 0.8 * self.recent + 0.2 * loss
        if self.recent < self.best - 1e-3:
            self.best, self.best_step = self.recent, self.step
        return bool(patience) and self.step - self.best_step >= patience


def refuse_bad(values: dict[str, float], *, held: bool, run: Run, kind: str) -> None:
    """NaN and the collapse of confidence end the run with a plain message."""
    kept = run.checkpoints()
    where = f"the last good checkpoint is {kept[-1].name}" if kept else "there is no checkpoint yet"
    if not math.isfinite(values["loss"]):
        raise TrainingStopped(
            f"the loss is {values['loss']}; lower --train.lr, or set --train.clip 1; {where}"
        )
    if kind == "probabilistic" and not held and values["sigma_p10"] > COLLAPSED_SIGMA:
        raise TrainingStopped(
            f"confidence collapsed: sigma is above {values['sigma_p10']:.0f} at 90 % of the points, "
            "which makes every match cost nothing. Raise --loss.sigma-warmup, start from trained "
            f"weights (--init), or soften the warps; {where}"
        )


class Log:
    """Sums on the device, read once per log line, so that no step waits for the host."""

    def __init__(self, device: torch.device, part: Part) -> None:
        self.sums, self.steps = torch.zeros(4, device=device), 0
        self.part, self.since = part, time.perf_counter()

    def add(self, loss: PairLoss) -> None:
        parts = (loss.total, loss.positive_score, loss.negative_score, loss.dead_positives)
        self.sums += torch.stack([value.detach().float() for value in parts])
        self.steps += 1

    def flush(self, loss: PairLoss, sigma: Tensor, *, rows: int) -> dict[str, float]:
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


def any_process(flag: bool, part: Part, device: torch.device) -> bool:
    """Whether any process was asked to stop: all must leave the loop at the same step."""
    if part.world == 1:
        return flag
    shared = torch.tensor(float(flag), device=device)
    dist.all_reduce(shared)
    return bool(shared.item() > 0)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM are noted; the loop ends after its current step."""
    asked: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(kind, lambda number, _: asked.append(number)) for kind in kinds]
    except ValueError:  # not in the main thread, where Python allows no handlers
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)

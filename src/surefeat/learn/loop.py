"""The one training loop, whatever is learned: log, checks, checkpoints, exact resuming, stopping.

    job = open_job(Job(model, optimiser, run, schedule, ...))
    run_steps(job, steps_of(job.todo()))

`steps_of` is the training's own: an iterator that takes a step whenever it is asked for the next.
All randomness of step t must be a function of (seed, t): then a resumed run, or one on another
number of processes, sees what an undisturbed one would have seen.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefeat.core import progress
from surefeat.core.files import choose_device
from surefeat.data.decode import Part
from surefeat.learn.runs import Checkpoint, Run, state_tensors

_LOG = logging.getLogger("surefeat")

Taken = dict[str, Tensor]
"""What a step leaves, on the device: scalars (`loss` is one) whose means the log shows, and larger
tensors, of which it shows percentiles of the last."""

Values = dict[str, Any]
"""A line of the log."""

Report = Callable[[int, Values], None]
"""Called with each line and its step."""

_PERCENTILES = (10, 50, 90)

# Seconds that a step may take to end after Ctrl-C.
_PATIENCE = 5.0

# Steps after which several processes ask each other whether one was told to stop.
_ASK_EVERY = 10


class TrainingStoppedError(RuntimeError):
    """Training ended for a reason the user should read; the last good checkpoint is kept."""


@dataclass(frozen=True)
class Schedule:
    """How long a training lasts and when what is done, in steps; 0: never."""

    steps: int
    log_every: int
    checkpoint_every: int
    check_every: int = 0
    patience: int = 0
    """Stop when the smoothed loss has not improved for so long."""

    # By the number of steps done alone, so that a resumed run does the same.

    def logs(self, step: int) -> bool:
        """A line of the log: also before checks and checkpoints, so that no bad state is kept."""
        return self.checks(step) or self.saves(step) or _every(self.log_every, step)

    def checks(self, step: int) -> bool:
        return _every(self.check_every, step)

    def saves(self, step: int) -> bool:
        return step == self.steps or _every(self.checkpoint_every, step)


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0


@dataclass
class Progress:
    """What the loop remembers besides tensors; stored in checkpoints."""

    step: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = 0
    recent: float | None = None
    """Loss smoothed over the last logs."""
    unlogged: list[float] = field(default_factory=list)
    """Of a run that was stopped between two lines: what the next line will also sum up."""

    def plateaued(self, loss: float, *, patience: int) -> bool:
        """Take in a logged loss; True when nothing has improved for `patience` steps."""
        self.recent = loss if self.recent is None else 0.8 * self.recent + 0.2 * loss
        if self.best is None or self.recent < self.best - 1e-3:
            self.best, self.best_step = self.recent, self.step
        return bool(patience) and self.step - self.best_step >= patience


@dataclass(frozen=True, eq=False)
class Job:
    """What the loop works on."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    run: Run | None
    """Where the log and checkpoints go; None: of what is done in minutes, nowhere."""
    schedule: Schedule
    log: Log
    advice: str
    """What to change when the loss is no number."""
    check: Callable[[], Values] | None = None
    complain: Callable[[int, Values], str | None] | None = None
    """Step and line -> why not to go on, if there is a reason."""
    report: Report | None = None
    tick: Callable[[int], None] | None = None
    """Called with the number of steps done, before the first and after each."""
    progress: Progress = field(default_factory=Progress)

    def todo(self) -> range:
        """The steps that are left."""
        return range(self.progress.step, self.schedule.steps)


def open_job(job: Job) -> Job:
    """Put a job into the state of its run's newest checkpoint; where there is none, write one.

    So a resumed run needs no initial weights, and a bad one has a state to go back to.
    """
    checkpoint = job.run and job.run.load_checkpoint()
    if not checkpoint:
        save_checkpoint(job)
        return job
    checkpoint.restore(job.model, job.optimiser)
    progress = Progress(**checkpoint.progress)
    job.log.take_up(progress.unlogged)
    return replace(job, progress=progress)


def run_steps(job: Job, steps: Iterator[Taken], *, fast: bool) -> Progress:
    """Take all steps that are left, or stop at a plateau.

    Ctrl-C and SIGTERM end it after the current step, with a checkpoint; where that step takes
    long, at once, without one. fast: `fast_arithmetic`.
    """
    job.log.since, first = time.perf_counter(), job.progress.step
    _tick(job)
    with stop_requests(job.run) as stop_requested, fast_arithmetic(enabled=fast):
        for taken in steps:
            job.log.add(taken)
            job.progress.step += 1
            if job.progress.step == first + 1:
                _say_how_long(job, time.perf_counter() - job.log.since)
            _tick(job)
            asked = told_to_stop(job, asked=stop_requested())
            if asked or job.schedule.logs(job.progress.step):
                values = log_and_check(job, taken)
                if save_if_due(job, values, asked=asked):
                    break
    return job.progress


def _tick(job: Job) -> None:
    if job.tick and job.log.part.rank == 0:
        job.tick(job.progress.step)


# Below this many seconds nobody needs to be told how long it takes.
_LONG = 300


def _say_how_long(job: Job, seconds: float) -> None:
    """On a CPU, from the first step: how long all will take, before anybody waits for it."""
    left = seconds * len(job.todo())
    if job.log.device.type == "cpu" and job.log.part.rank == 0 and left > _LONG:
        took = f"{left / 60:.0f} minutes" if left < 7200 else f"{left / 3600:.0f} hours"
        fix = "; Ctrl-C stops, --resume goes on, fewer steps are sooner done" if job.run else ""
        _LOG.warning("a step takes %.1f s here, all of them about %s%s", seconds, took, fix)


def log_and_check(job: Job, taken: Taken) -> Values:
    """Sum up the steps since the last line, refuse a bad state, check and log if due."""
    due = job.schedule.logs(job.progress.step)
    # A line that only a request to stop brought about would be one more than without it.
    job.progress.unlogged = [] if due else job.log.pending()
    values = job.log.sum_up(taken)
    job.progress.seconds += values["seconds"]
    refuse_bad(job, values)
    if job.check and job.schedule.checks(job.progress.step):
        values |= job.check()
    if job.log.part.rank == 0 and due:
        if job.run:
            job.run.log(job.progress.step, values)
        if job.report:
            job.report(job.progress.step, values)
    return values


def refuse_bad(job: Job, values: Values) -> None:
    """NaN, and whatever the training itself complains of, end the run with a plain message."""
    tensors = state_tensors(job.model, job.optimiser).values()
    # Collected on one device, so that the host waits for it once.
    finite = bool(torch.stack([t.isfinite().all().to(job.log.device) for t in tensors]).all())
    reason = job.complain and job.complain(job.progress.step, values)
    if not math.isfinite(values["loss"]) or not finite:
        state = "" if finite else "not "
        reason = f"the loss is {values['loss']:.3g}, weights are {state}finite; {job.advice}"
    if reason and job.run:
        # Another machine's processes may see no folder of the run.
        kept = [path.name for path in job.run.checkpoints()] or ["not here"]
        reason += f"; the last good checkpoint is {kept[-1]}"
    if reason:
        raise TrainingStoppedError(reason)


def save_if_due(job: Job, values: Values, *, asked: bool) -> bool:
    """After a line: save where due, leave if asked to; True on a plateau."""
    # A line that only a request to stop brought about must not change what follows.
    step, patience = job.progress.step, job.schedule.patience
    due = job.schedule.logs(step)
    level = due and job.progress.plateaued(values["loss"], patience=patience)
    if job.schedule.saves(step) or level or asked:
        save_checkpoint(job)
    if asked and not level:
        kept = "; checkpoint saved; --resume goes on" if job.run else ""
        raise KeyboardInterrupt(f"stopped after step {step}{kept}")
    return level


def save_checkpoint(job: Job) -> None:
    """Write a checkpoint, from one process; `refuse_bad` has looked at the state before."""
    if job.run and job.log.part.rank == 0:
        tensors = state_tensors(job.model, job.optimiser)
        job.run.save_checkpoint(Checkpoint(job.progress.step, tensors, vars(job.progress)))


def told_to_stop(job: Job, *, asked: bool) -> bool:
    """Whether any process was asked to stop: all must leave the loop at the same step."""
    if job.log.part.world == 1:
        return asked
    if not job.schedule.logs(job.progress.step) and job.progress.step % _ASK_EVERY:
        return False
    shared = torch.tensor(float(asked), device=job.log.device)
    dist.all_reduce(shared)
    return bool(shared.item() > 0)


@contextmanager
def stop_requests(run: Run | None = None) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM are noted; the loop ends after its current step.

    A second one, or a step that has not ended after some seconds, ends it at once.
    """
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        if asked:
            kept = "; --resume goes on from the last checkpoint" if run else ""
            raise KeyboardInterrupt(f"stopped within a step{kept}")
        asked.append(number)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Python allows handlers in the main thread only
        return
    kinds = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGALRM"):  # not on Windows
        kinds.append(signal.SIGALRM)
    before = [signal.signal(kind, note) for kind in kinds]
    try:
        yield lambda: bool(asked)
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)


@contextmanager
def fast_arithmetic(*, enabled: bool) -> Iterator[None]:
    """TF32 products and cuDNN's search for the best kernels, while training, then as before."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    if enabled:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark = before


class Log:
    """Sums on the device, read once per log line, so that no step waits for the host."""

    def __init__(
        self, device: torch.device, *, batch: int, unit: str, part: Part | None = None
    ) -> None:
        self.device, self.batch, self.unit, self.part = device, batch, unit, part or Part()
        self.sums, self.steps, self.since = torch.zeros(1, device=device), 0, time.perf_counter()
        self.earlier = 0  # of these steps, those of before the run was stopped

    def pending(self) -> list[float]:
        """The sums since the last line, mean of all processes, and behind them the steps."""
        sums = self.sums.clone()
        if self.part.world > 1:
            dist.all_reduce(sums)
            sums /= self.part.world
        return [*sums.tolist(), self.steps]

    def take_up(self, pending: list[float]) -> None:
        """Go on with what `pending` gave; with nothing, if it is empty."""
        if pending:
            self.sums = torch.tensor(pending[:-1], device=self.device)
            self.steps = self.earlier = int(pending[-1])

    def add(self, taken: Taken) -> None:
        scalars = [value.detach().float() for value in taken.values() if not value.ndim]
        self.sums, self.steps = self.sums + torch.stack(scalars), self.steps + 1

    def sum_up(self, last: Taken) -> Values:
        """Means since the last line, percentiles now, and the speed."""
        names = [name for name, value in last.items() if not value.ndim]
        numbers = [self.sums / self.steps]
        for name, value in last.items():
            if value.ndim:
                names += [f"{name}_p{level}" for level in _PERCENTILES]
                levels = torch.tensor(_PERCENTILES, device=value.device) / 100
                # A sample is enough, and a short sort does not hold up the device.
                flat = value.detach().float().flatten()[:: max(1, value.numel() // 4096)]
                numbers.append(torch.quantile(flat, levels))
        both = torch.cat(numbers)
        if self.part.world > 1:
            dist.all_reduce(both)
            both /= self.part.world
        values: Values = dict(zip(names, both.tolist(), strict=True))
        now = time.perf_counter()
        values["seconds"] = now - self.since
        taken = self.steps - self.earlier
        values[f"{self.unit}_per_s"] = taken * self.batch / (now - self.since)
        self.sums, self.steps, self.since = torch.zeros(1, device=self.device), 0, now
        self.earlier = 0
        return values


@contextmanager
def progress_bar(
    steps: int, shown: Sequence[str], *, quiet: bool, tensorboard: Path | None = None
) -> Iterator[tuple[Report, Callable[[int], None]]]:
    """A bar that moves with each step and shows these values of each line: a job's report and tick.

    Where a folder is given, TensorBoard's files too.
    """
    with (
        progress.bar(total=steps, desc="training", unit="step", quiet=quiet) as bar,
        _summary_writer(tensorboard) if tensorboard else nullcontext() as writer,
    ):

        def report(step: int, values: Values) -> None:
            # Not refreshed here: in a log that would be a line each time.
            said = " ".join(f"{name} {values[name]:.3g}" for name in shown)
            bar.set_postfix_str(said, refresh=False)
            if writer is not None:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

        def tick(step: int) -> None:
            if step == bar.n:
                bar.unpause()  # what came before the first step is not its time
            bar.update(step - bar.n)

        yield report, tick


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("needs TensorBoard: pip install 'surefeat[tensorboard]'") from error
    return SummaryWriter(str(folder))


def make_optimiser(
    kind: Literal["adagrad", "adamw", "sgd"],
    rates: Iterable[tuple[Iterable[nn.Parameter], float]],
    *,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Groups of parameters, each with its rate; those that do not learn are left out."""
    groups: list[dict[str, Any]] = []
    for parameters, rate in rates:
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        groups += [{"params": learning, "lr": rate, "initial_lr": rate}] if learning else []
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, weight_decay=weight_decay)
    if kind == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, weight_decay=weight_decay)
    fused = groups[0]["params"][0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, weight_decay=weight_decay, fused=fused)


def descend(
    optimiser: torch.optim.Optimizer, loss: Tensor, *, factor: float, clip: float = 0.0
) -> None:
    """One step down the gradient, at `factor` times the rates the optimiser was made with."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    if clip:
        learning = [p for group in optimiser.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(learning, clip)
    for group in optimiser.param_groups:
        group["lr"] = group["initial_lr"] * factor
    optimiser.step()


def rate(step: int, steps: int, *, warmup: int, decay: Literal["constant", "cosine"]) -> float:
    """Factor on the learning rates at a step: linear warm-up, then constant or half a cosine."""
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if decay == "constant":
        return warm
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def join_processes(device: str | torch.device | None) -> tuple[Part, torch.device]:
    """This process's part of the work, and its device; joins the others under torchrun."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return Part(rank, world), chosen

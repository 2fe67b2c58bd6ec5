"""The one loop: two views, one pass, all pairs, hard negatives, a step; and everything around it.

All randomness of step t is a function of (seed, t), and image order one of (seed, epoch). So a
resumed run, or one on another number of processes, sees what an undisturbed one would have seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefeat.checkpoints import Checkpoint, state_tensors
from surefeat.config import Config, TrainConfig
from surefeat.data.batches import Batches, Part, StreamedBatches
from surefeat.loss import PairLoss, pair_loss
from surefeat.model import DenseFeatures, Maps
from surefeat.monitor import Due, Log, Progress, all_finite, refuse_bad, stop_requests, told_to_stop
from surefeat.optimiser import make_optimiser, update
from surefeat.runs import Run
from surefeat.warp import Draws, corresponding_points, draw, two_views

Step = Callable[..., tuple[PairLoss, Tensor]]
Check = Callable[[DenseFeatures], dict[str, Any]]
Report = Callable[[int, dict[str, Any]], None]


def make_step(network: Callable[[Tensor], Maps], config: Config) -> Step:
    """The step as a function of (pixels, sizes, draws, hold_sigma), compiled where wanted."""

    def step(pixels: Tensor, sizes: Tensor, draws: Draws, hold: Tensor) -> tuple[PairLoss, Tensor]:
        """One batch, as in the paper -> loss, and sigma at the points (B, 2N)."""
        views = two_views(pixels, sizes, draws, config.warp, config.colour)
        points0, points1, valid = corresponding_points(views, draws, count=config.loss.points)
        both = torch.cat([views.view0, views.view1])
        if both.device.type == "cuda":
            both = both.contiguous(memory_format=torch.channels_last)
        amp = config.train.amp and both.device.type != "cpu"
        with torch.autocast(both.device.type, torch.bfloat16, enabled=amp):
            maps = network(both)
        descriptors, sigma = maps.at(torch.cat([points0, points1]))
        (first, second), (sigma0, sigma1) = descriptors.chunk(2), sigma.chunk(2)
        loss = pair_loss(
            first, second, sigma0, sigma1, points1, config.loss, hold_sigma=hold, valid=valid
        )
        return loss, torch.cat([sigma0, sigma1], dim=1)

    if not compiles(config.train):
        return step
    # CUDA graphs take the host out of the loop, but not across processes' reductions.
    alone = isinstance(network, DenseFeatures)
    return torch.compile(step, dynamic=False, mode="reduce-overhead" if alone else "default")


def compiles(config: TrainConfig) -> bool:
    """Whether compiling is wanted, or will have paid for itself by the last step."""
    if config.compile == "auto":
        enough = 1000 if config.trained == "all" else 3000
        return torch.cuda.is_available() and config.steps >= enough
    return config.compile == "on"


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


def train(
    model: DenseFeatures,
    batches: Batches | StreamedBatches,
    run: Run,
    config: Config,
    *,
    part: Part | None = None,
    check: Check | None = None,
    report: Report | None = None,
    overfit: bool = False,
) -> Progress:
    """Train until the last step or a plateau, continuing from the newest checkpoint if any.

    check: label-free check, called every `check_every` steps; report: called with each log line;
    overfit: the same images and views at every step, to see that a few can be learned by heart.
    """
    job = begin(model, run, config, part or Part(), check=check, report=report)
    settings, progress, device = config.train, job.progress, model.head.weight.device
    todo = range(progress.step, settings.steps)
    drawn = [0] * len(todo) if overfit else todo
    feed = batches.iterate(drawn, batch=settings.batch, seed=settings.seed, part=job.part)
    with stop_requests() as stop_requested, fast_arithmetic(enabled=settings.amp):
        for step, seen, (pixels, sizes) in zip(todo, drawn, feed, strict=True):
            draws = step_draws(seen, config, device).part(job.part.rows(settings.batch))
            hold = torch.full((), step < config.loss.sigma_warmup, device=device)
            loss, sigma = job.step(pixels, sizes, draws, hold)
            update(model, job.optimiser, loss.total, step, settings)
            job.log.add(loss)
            progress.step = step + 1
            due = Due.after(progress.step, settings)
            asked = told_to_stop(stop_requested(), progress.step, due, job.part, device)
            if due.line or asked:
                values = line(job, sigma, due)
                if settle(job, values, due, asked=asked):
                    break
    return progress


@dataclass(frozen=True)
class Job:
    """What the loop works on."""

    model: DenseFeatures
    step: Step
    optimiser: torch.optim.Optimizer
    progress: Progress
    run: Run
    config: Config
    part: Part
    log: Log
    check: Check | None
    report: Report | None


def begin(
    model: DenseFeatures,
    run: Run,
    config: Config,
    part: Part,
    *,
    check: Check | None = None,
    report: Report | None = None,
) -> Job:
    """Make model and optimiser ready, as the newest checkpoint has them; the start is kept too."""
    model.set_trained(config.train.trained, batch_norm=config.train.batch_norm)
    device = model.head.weight.device
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    optimiser = make_optimiser(model, config.train)
    progress = restore(run, model, optimiser)
    step = make_step(_wrapped(model, part, config), config)
    log = Log(device, part)
    job = Job(model, step, optimiser, progress, run, config, part, log, check, report)
    # From here on a resumed run needs no initial weights, and a bad one has a state to go back to.
    if progress.step == 0:
        save(job)
        log.since = time.perf_counter()
    return job


def line(job: Job, sigma: Tensor, due: Due) -> dict[str, Any]:
    """Sum up the steps since the last line, refuse a bad state, check if due, and log."""
    values: dict[str, Any] = job.log.flush(sigma, rows=job.config.train.batch)
    job.progress.seconds += values["seconds"]
    held = job.progress.step <= job.config.loss.sigma_warmup
    finite = all_finite(snapshot(job).tensors)
    refuse_bad(values, finite=finite, held=held, run=job.run, kind=job.config.loss.kind)
    if job.check and due.check:
        # Held-out images must not enter the statistics of a batch norm that learns.
        job.model.eval()
        values |= job.check(job.model)
        job.model.set_trained(job.config.train.trained, batch_norm=job.config.train.batch_norm)
    if job.part.rank == 0:
        job.run.log(job.progress.step, values)
        if job.report:
            job.report(job.progress.step, values)
    return values


def settle(job: Job, values: dict[str, Any], due: Due, *, asked: bool) -> bool:
    """After a line: save where due, leave if asked to; True on a plateau."""
    # A line that only a request to stop brought about must not change what follows.
    patience = job.config.train.patience
    level = due.line and job.progress.plateaued(values["loss"], patience=patience)
    if due.checkpoint or level or asked:
        save(job)
    if asked and not level:
        raise KeyboardInterrupt(f"stopped after step {job.progress.step}; checkpoint saved")
    return level


def save(job: Job) -> None:
    """Write a checkpoint, from one process; `line` has refused a bad state before."""
    if job.part.rank == 0:
        job.run.save_checkpoint(snapshot(job))


def step_draws(step: int, config: Config, device: torch.device) -> Draws:
    """All random numbers of a step, for the global batch."""
    generator = torch.Generator(device=device)
    generator.manual_seed((config.train.seed * 1_000_003 + step * 7 + 1) % 2**63)
    return draw(config.train.batch, points=config.loss.points, generator=generator)


def _wrapped(model: DenseFeatures, part: Part, config: Config) -> nn.Module:
    if part.world == 1:
        return model
    if config.warp.occluders:
        raise ValueError(
            "an occluder is of the batch's next image, which another process may hold; "
            "pass --warp.occluders 0, or train with one process"
        )
    if config.train.batch_norm == "trained":
        raise ValueError(
            "statistics of a batch shared by processes would differ between them; "
            "pass --train.batch-norm frozen, or train with one process"
        )
    device = model.head.weight.device
    ids = [device.index] if device.type == "cuda" else None
    # Frozen statistics never differ, and writing them anew would void the filters folded with them.
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


def snapshot(job: Job) -> Checkpoint:
    """Everything needed to continue exactly; shares memory with model and optimiser."""
    tensors = state_tensors(job.model, job.optimiser)
    return Checkpoint(job.progress.step, tensors, dict(job.progress.__dict__))


def restore(run: Run, model: DenseFeatures, optimiser: torch.optim.Optimizer) -> Progress:
    """Load the newest checkpoint of a run into model and optimiser; a new run starts at step 0."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return Progress()
    checkpoint.restore(model, optimiser)
    return Progress(**checkpoint.progress)

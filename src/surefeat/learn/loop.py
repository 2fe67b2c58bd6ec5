"""How the weights move: AdaGrad as in the paper or AdamW, their rates, and one step of them.

Watching a training run: progress, log lines, and the reasons to stop.

The one loop: two views, one pass, all pairs, hard negatives, a step; and everything around it.

All randomness of step t is a function of (seed, t), and image order one of (seed, epoch). So a
resumed run, or one on another number of processes, sees what an undisturbed one would have seen.
"""

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
from torch import Tensor, nn
from tqdm import tqdm

from surefeat.data.decode import Batches, Part, StreamedBatches
from surefeat.learn.config import Config, TrainConfig
from surefeat.learn.loss import PairLoss, pair_loss
from surefeat.learn.runs import Checkpoint, Run, state_tensors
from surefeat.learn.warp import Draws, corresponding_points, draw, two_views
from surefeat.model.network import DenseFeatures, Maps


def make_optimiser(model: DenseFeatures, config: TrainConfig) -> torch.optim.Optimizer:
    """AdaGrad as in the paper, or AdamW; the head has its own rate."""
    head = [p for p in model.head.parameters() if p.requires_grad]
    trunk = [p for p in model.trunk.parameters() if p.requires_grad]
    groups = [{"params": head, "lr": config.head_lr}]
    if trunk:
        groups.append({"params": trunk, "lr": config.lr})
    for group in groups:
        group["initial_lr"] = group["lr"]
    if config.optimiser == "adagrad":
        return torch.optim.Adagrad(groups, weight_decay=config.weight_decay)
    fused = head[0].device.type == "cuda"
    return torch.optim.AdamW(groups, weight_decay=config.weight_decay, fused=fused)


def rate(step: int, config: TrainConfig) -> float:
    """Factor on the learning rates at a step: linear warm-up, then constant or half a cosine."""
    warm = min(1.0, (step + 1) / config.lr_warmup) if config.lr_warmup else 1.0
    if config.decay == "constant":
        return warm
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / config.steps)))


def update(
    model: DenseFeatures,
    optimiser: torch.optim.Optimizer,
    loss: Tensor,
    step: int,
    config: TrainConfig,
) -> None:
    """One step down the gradient, at this step's rate."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    if config.clip:
        learning = [p for p in model.parameters() if p.requires_grad]
        nn.utils.clip_grad_norm_(learning, config.clip)
    for group in optimiser.param_groups:
        group["lr"] = group["initial_lr"] * rate(step, config)
    optimiser.step()


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

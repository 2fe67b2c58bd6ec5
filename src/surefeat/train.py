"""The one loop: two views, one pass, all pairs, hard negatives, a step; and everything around it.

All randomness of step t is a function of (seed, t), and image order one of (seed, epoch). So a
resumed run, or one on another number of processes, sees what an undisturbed one would have seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surefeat.config import Config, TrainConfig
from surefeat.data.batches import Batches, Part, StreamedBatches
from surefeat.loss import PairLoss, pair_loss
from surefeat.model import DenseFeatures, Maps
from surefeat.monitor import Log, Progress, any_process, refuse_bad, stop_requests
from surefeat.runs import Checkpoint, Run
from surefeat.warp import Draws, corresponding_points, draw, two_views

Step = Callable[..., tuple[PairLoss, Tensor]]


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

    if not config.train.compile:
        return step
    # CUDA graphs take the host out of the loop, but not across processes' reductions.
    alone = isinstance(network, DenseFeatures)
    return torch.compile(step, dynamic=False, mode="reduce-overhead" if alone else "default")


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


def train(
    model: DenseFeatures,
    batches: Batches | StreamedBatches,
    run: Run,
    config: Config,
    *,
    part: Part | None = None,
    check: Callable[[DenseFeatures], dict[str, Any]] | None = None,
    report: Callable[[int, dict[str, float]], None] | None = None,
    overfit: bool = False,
) -> Progress:
    """Train until the last step or a plateau, continuing from the newest checkpoint if any.

    check: label-free check, called every `check_every` steps; report: called with each log line;
    overfit: draw the same views at every step, to see that a few images can be learned by heart.
    """
    part = part or Part()
    settings = config.train
    model.set_trained(settings.trained, batch_norm=settings.batch_norm)
    optimiser = make_optimiser(model, settings)
    progress = restore(run, model, optimiser)
    device = model.head.weight.device
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    step_fn = make_step(_wrapped(model, part, device), config)
    log = Log(device, part)
    todo = range(progress.step, settings.steps)
    feed = batches.iterate(todo, batch=settings.batch, seed=settings.seed, part=part)
    with stop_requests() as stop_requested, fast_arithmetic(enabled=settings.amp):
        for step, (pixels, sizes) in zip(todo, feed, strict=False):
            draws = step_draws(0 if overfit else step, config, device).part(part.rows(settings.batch))
            hold = torch.full((), step < config.loss.sigma_warmup, device=device)
            loss, sigma = step_fn(pixels, sizes, draws, hold)
            update(model, optimiser, loss.total, step, settings)
            log.add(loss)
            progress.step = step + 1
            last = progress.step == settings.steps
            hurry = part.world == 1 and stop_requested()
            if progress.step % settings.log_every and not (last or hurry):
                continue
            values = log.flush(loss, sigma, rows=settings.batch)
            progress.seconds += values["seconds"]
            refuse_bad(values, held=step < config.loss.sigma_warmup, run=run, kind=config.loss.kind)
            if check and settings.check_every and progress.step % settings.check_every == 0:
                values.update(check(model))
            stop = progress.plateaued(values["loss"], patience=settings.patience)
            asked = any_process(stop_requested(), part, device)
            if part.rank == 0:
                run.log(progress.step, values)
                if report:
                    report(progress.step, values)
                if last or stop or asked or progress.step % settings.checkpoint_every == 0:
                    run.save_checkpoint(snapshot(model, optimiser, progress))
            if asked:
                raise KeyboardInterrupt(f"stopped after step {progress.step}; checkpoint saved")
            if stop:
                break
    return progress


def step_draws(step: int, config: Config, device: torch.device) -> Draws:
    """All random numbers of a step, for the global batch."""
    generator = torch.Generator(device=device)
    generator.manual_seed((config.train.seed * 1_000_003 + step * 7 + 1) % 2**63)
    return draw(config.train.batch, points=config.loss.points, generator=generator)


def update(
    model: DenseFeatures, optimiser: torch.optim.Optimizer, loss: Tensor, step: int, config: TrainConfig
) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    if config.clip:
        learning = [p for p in model.parameters() if p.requires_grad]
        nn.utils.clip_grad_norm_(learning, config.clip)
    for group in optimiser.param_groups:
        group["lr"] = group["initial_lr"] * rate(step, config)
    optimiser.step()


def _wrapped(model: DenseFeatures, part: Part, device: torch.device) -> nn.Module:
    if part.world == 1:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def snapshot(
    model: DenseFeatures, optimiser: torch.optim.Optimizer, progress: Progress
) -> Checkpoint:
    """Everything needed to continue exactly."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{key}": torch.as_tensor(v) for key, v in state.items()}
    return Checkpoint(progress.step, tensors, dict(progress.__dict__))


def restore(run: Run, model: DenseFeatures, optimiser: torch.optim.Optimizer) -> Progress:
    """Load the newest checkpoint of a run into model and optimiser; a new run starts at step 0."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return Progress()
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in checkpoint.tensors.items() if k.startswith("model.")}
    )
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in checkpoint.tensors.items():
        if key.startswith("optimiser."):
            _, index, name = key.split(".", 2)
            state.setdefault(int(index), {})[name] = value
    groups = optimiser.state_dict()["param_groups"]
    optimiser.load_state_dict({"state": state, "param_groups": groups})
    return Progress(**checkpoint.progress)

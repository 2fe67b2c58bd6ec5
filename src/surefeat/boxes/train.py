"""Learning boxes from image labels: scales and flips at random, a step, checkpoints, resuming.

All randomness of step t is a function of (seed, t), and image order one of (seed, epoch), so that a
resumed run does what an undisturbed one would have done.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.boxes.config import LearnConfig
from surefeat.boxes.network import Detector, image_log_loss, spatial_regulariser
from surefeat.boxes.photos import (
    Boxes,
    FreshMaps,
    KeptMaps,
    Photo,
    maps_fit,
    stack_boxes,
    stack_labels,
)
from surefeat.data.decode import batch_indices
from surefeat.learn.loop import TrainingStoppedError, fast_arithmetic, stop_requests
from surefeat.learn.runs import Checkpoint, Run, state_tensors
from surefeat.model.features import box_cells

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Job:
    """What the loop works on."""

    detector: Detector
    maps: KeptMaps | FreshMaps
    boxes: Boxes
    labels: Tensor
    """(N, K) on the device."""
    optimiser: torch.optim.Optimizer
    config: LearnConfig
    run: Run
    first: int
    """Step to begin with: 0, or where the newest checkpoint stopped."""


@dataclass(frozen=True)
class Draw:
    """What a step draws."""

    rows: Tensor
    """(B,) photos."""
    flips: Tensor
    """(B,) bool."""
    scale: int
    """Longest side, network pixels."""


def steps_of(config: LearnConfig, images: int) -> int:
    """Steps of the whole training."""
    return math.ceil(config.epochs * images / config.batch)


def learn(
    detector: Detector,
    photos: Sequence[Photo],
    run: Run,
    config: LearnConfig,
    *,
    quiet: bool = False,
) -> int:
    """Train to the last step, continuing from the newest checkpoint if any; -> that step.

    Ctrl-C and SIGTERM end it after the current step with a checkpoint.
    """
    job = _begin(detector, photos, run, config, quiet=quiet)
    first, total = job.first, steps_of(config, len(photos))
    sums, since, last = torch.zeros(2, device=detector.scale.device), time.perf_counter(), first
    bar = tqdm(total=total, initial=first, desc="learning", unit="step", disable=quiet)
    with stop_requests() as asked, fast_arithmetic(enabled=config.amp), bar:
        for step in range(first, total):
            sums += one_step(job, step, total, count=len(photos))
            done = step + 1
            stop = asked()
            due = bool(config.checkpoint_every) and done % config.checkpoint_every == 0
            if done % config.log_every == 0 or done == total or due or stop:
                now = time.perf_counter()
                _line(job, done, (sums / (done - last)).tolist(), (now - since) / (done - last))
                bar.update(done - last)
                sums, since, last = torch.zeros_like(sums), now, done
            if stop or due:
                _save(job, done)
            if stop and done < total:
                raise KeyboardInterrupt(f"stopped after step {done}; checkpoint saved")
    return total


def one_step(job: Job, step: int, total: int, *, count: int) -> Tensor:
    """One batch of `count` photos, as in the paper -> loss and regulariser (2,), detached."""
    config, device = job.config, job.labels.device
    drawn = draw(step, config, count=count, device=device)
    generator = torch.Generator(device).manual_seed(_seed(config.seed, step))
    seen = job.maps.of(drawn.rows, drawn.flips, scale=drawn.scale)
    boxes, labels = job.boxes.rows(drawn.rows).mirrored(drawn.flips), job.labels[drawn.rows]
    cells = box_cells(boxes.boxes, boxes.sizes, seen.shapes)
    amp = config.amp and device.type != "cpu"
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        found = job.detector(seen.maps, cells, boxes.valid, generator=generator)
    loss = image_log_loss(found.scores, labels).mean()
    pull = spatial_regulariser(
        found.scores, found.hidden, boxes.boxes, labels, boxes.valid, overlap=config.overlap
    ).mean()
    job.optimiser.zero_grad(set_to_none=True)
    (loss + config.regulariser * pull).backward()  # type: ignore[no-untyped-call]
    for group in job.optimiser.param_groups:
        group["lr"] = group["initial_lr"] * (1.0 if 2 * step < total else 0.1)
    job.optimiser.step()
    return torch.stack([loss.detach(), pull.detach()])


def draw(step: int, config: LearnConfig, *, count: int, device: torch.device) -> Draw:
    """Photos, flips and the scale of a step; drawn on the host, so that nobody waits."""
    generator = torch.Generator().manual_seed(_seed(config.seed, step) + 1)
    rows = batch_indices(step, batch=config.batch, count=count, seed=config.seed)
    flips = torch.rand(config.batch, generator=generator) < (0.5 if config.flips else 0.0)
    place = int(torch.randint(len(config.scales), (), generator=generator))
    both = torch.stack([rows, flips.long()])
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    return Draw(both[0], both[1].bool(), config.scales[place])


def _begin(
    detector: Detector, photos: Sequence[Photo], run: Run, config: LearnConfig, *, quiet: bool
) -> Job:
    device = detector.scale.device
    detector.eval()
    detector.requires_grad_(config.trained == "all")
    for parameter in detector.hidden_parameters():
        parameter.requires_grad_(True)
    if config.trained == "last":
        detector.trunk.last_stage.requires_grad_(True)
    if device.type == "cuda":
        detector.trunk.to(memory_format=torch.channels_last)
    optimiser = make_optimiser(detector, config)
    # Before the maps: a resumed run has its trunk's weights from the checkpoint alone.
    first = _restore(run, detector, optimiser)
    options = {"flips": config.flips, "amp": config.amp}
    maps: KeptMaps | FreshMaps
    if config.trained == "none" and maps_fit(detector, photos, config.scales, **options):
        maps = KeptMaps(detector, photos, config.scales, **options, quiet=quiet)
    else:
        maps = FreshMaps(detector, photos, amp=config.amp)
    boxes = stack_boxes(photos, device=device)
    labels = stack_labels(photos, detector.categories).to(device)
    return Job(detector, maps, boxes, labels, optimiser, config, run, first)


def make_optimiser(detector: Detector, config: LearnConfig) -> torch.optim.Optimizer:
    """SGD as in the paper, or AdamW; the trunk has its own rate."""
    trunk = [p for p in detector.trunk.parameters() if p.requires_grad]
    groups = [{"params": detector.hidden_parameters(), "lr": config.lr}]
    if trunk:
        groups.append({"params": trunk, "lr": config.trunk_lr})
    for group in groups:
        group["initial_lr"] = group["lr"]
    fused = detector.scale.device.type == "cuda"
    decay = config.weight_decay
    if config.optimiser == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, weight_decay=decay, fused=fused)
    return torch.optim.AdamW(groups, weight_decay=decay, fused=fused)


def calibrate(detector: Detector, photos: Sequence[Photo], config: LearnConfig) -> None:
    """Scale what fc6 sees to a mean square of 1: for hidden layers from random weights.

    Maxima over bins are far larger than the map they are of.
    """
    some = photos[:: max(1, len(photos) // 16)][:16]
    fresh = FreshMaps(detector.eval().requires_grad_(False), some, amp=config.amp)
    device = detector.scale.device
    every, squares = stack_boxes(some, device=device), []
    detector.scale.fill_(1.0)
    for row in range(len(some)):
        rows, flips = torch.tensor([row], device=device), torch.tensor([False], device=device)
        seen, boxes = fresh.of(rows, flips, scale=config.scales[0]), every.rows(rows)
        cells = box_cells(boxes.boxes, boxes.sizes, seen.shapes)
        features = detector.pooled(seen.maps, cells)[boxes.valid]
        squares.append(features.square().mean())
    detector.scale.copy_(torch.stack(squares).mean().clamp_min(1e-12).rsqrt())


def _seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step * 7 + 1) % 2**62


def _line(job: Job, step: int, means: list[float], seconds: float) -> None:
    """Log the means since the last line; a loss that is no number ends the run."""
    if not math.isfinite(means[0]):
        raise TrainingStoppedError(f"the loss is {means[0]}; lower --learn.lr and start anew")
    values = {"loss": means[0], "regulariser": means[1]}
    job.run.log(step, values | {"images_per_s": job.config.batch / seconds})


def _save(job: Job, step: int) -> None:
    tensors = state_tensors(job.detector, job.optimiser)
    job.run.save_checkpoint(Checkpoint(step, tensors, {}))


def _restore(run: Run, detector: Detector, optimiser: torch.optim.Optimizer) -> int:
    """The newest checkpoint into detector and optimiser; -> the first step to do."""
    checkpoint = run.load_checkpoint()
    if checkpoint is None:
        return 0
    checkpoint.restore(detector, optimiser)
    return checkpoint.step

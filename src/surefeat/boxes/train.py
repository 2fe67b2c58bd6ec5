"""Learning boxes from image labels: a scale and flips at random, a step of WSDDN's loss.

Everything around the steps is learn.loop's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.boxes.config import LearnConfig
from surefeat.boxes.network import Detector, image_log_loss, spatial_regulariser
from surefeat.boxes.photos import (
    FreshMaps,
    KeptMaps,
    Photo,
    maps_fit,
    stack_labels,
    stack_proposals,
)
from surefeat.data.decode import batch_indices
from surefeat.learn.loop import (
    Job,
    Log,
    Reporter,
    Schedule,
    Taken,
    descend,
    make_optimiser,
    open_job,
    run_steps,
)
from surefeat.learn.runs import Run
from surefeat.model.features import box_cells


def learn_boxes(
    detector: Detector,
    photos: Sequence[Photo],
    run: Run,
    config: LearnConfig,
    *,
    quiet: bool = False,
) -> int:
    """Train to the last step, continuing from the newest checkpoint if any; -> that step."""
    device = detector.scale.device
    detector.set_trained(config.trained)
    if device.type == "cuda":
        detector.trunk.to(memory_format=torch.channels_last)
    rates = [
        (detector.hidden_parameters(), config.lr), (detector.trunk.parameters(), config.trunk_lr)
    ]  # fmt: skip
    steps = math.ceil(config.epochs * len(photos) / config.batch)
    with Reporter(run, steps, shown=("loss", "regulariser", "images_per_s"), quiet=quiet) as report:
        job = open_job(Job(
            detector, make_optimiser(config.optimiser, rates, weight_decay=config.weight_decay),
            run, Schedule(steps, config.log_every, config.checkpoint_every),
            Log(device, batch=config.batch, unit="images"), advice="lower --learn.lr",
            report=report,
        ))  # fmt: skip
        # With the weights of the checkpoint; and before the loop, which notes Ctrl-C for later.
        maps = _maps(detector, photos, config, quiet=quiet)
        run_steps(job, box_steps(detector, photos, maps, job, config), amp=config.amp)
    return steps


def _maps(
    detector: Detector, photos: Sequence[Photo], config: LearnConfig, *, quiet: bool
) -> KeptMaps | FreshMaps:
    """Of a frozen trunk all at once, where they can be kept."""
    options = {"flips": config.flips, "amp": config.amp}
    if config.trained == "none" and maps_fit(detector, photos, config.scales, **options):
        return KeptMaps(detector, photos, config.scales, **options, quiet=quiet)
    return FreshMaps(detector, photos, amp=config.amp)


def box_steps(
    detector: Detector,
    photos: Sequence[Photo],
    maps: KeptMaps | FreshMaps,
    job: Job,
    config: LearnConfig,
) -> Iterator[Taken]:
    """Maps of a batch at one scale, its proposals, the losses of its labels: until the last step.

    The second half goes at a tenth of the rate [P].
    """
    device = detector.scale.device
    proposals = stack_proposals(photos, device=device)
    labels = stack_labels(photos, detector.categories).to(device)
    amp = config.amp and device.type != "cpu"
    for step in job.todo():
        drawn = draw(step, config, count=len(photos), device=device)
        generator = torch.Generator(device).manual_seed(_seed(config.seed, step))
        seen = maps.of(drawn.rows, drawn.flips, scale=drawn.scale)
        boxes, shown = proposals.rows(drawn.rows).mirrored(drawn.flips), labels[drawn.rows]
        cells = box_cells(boxes.boxes, boxes.sizes, seen.shapes)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            regions = detector(seen.maps, cells, boxes.valid, generator=generator)
        loss = image_log_loss(regions.scores, shown).mean()
        pull = spatial_regulariser(
            regions.scores, regions.hidden, boxes.boxes, shown, boxes.valid, overlap=config.overlap
        ).mean()
        factor = 1.0 if 2 * step < job.schedule.steps else 0.1
        descend(job.optimiser, loss + config.regulariser * pull, factor=factor)
        yield {"loss": loss, "regulariser": pull}


@dataclass(frozen=True)
class BoxDraw:
    """What a step draws."""

    rows: Tensor
    """(B,) photos."""
    flips: Tensor
    """(B,) bool."""
    scale: int
    """Longest side, network pixels."""


def draw(step: int, config: LearnConfig, *, count: int, device: torch.device) -> BoxDraw:
    """Photos, flips and the scale of a step; drawn on the host, so that nobody waits."""
    generator = torch.Generator().manual_seed(_seed(config.seed, step) + 1)
    rows = batch_indices(step, batch=config.batch, count=count, seed=config.seed)
    flips = torch.rand(config.batch, generator=generator) < (0.5 if config.flips else 0.0)
    place = int(torch.randint(len(config.scales), (), generator=generator))
    both = torch.stack([rows, flips.long()])
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    return BoxDraw(both[0], both[1].bool(), config.scales[place])


def calibrate(detector: Detector, photos: Sequence[Photo], config: LearnConfig) -> None:
    """Scale what fc6 sees to a mean square of 1: for hidden layers from random weights.

    Maxima over bins are far larger than the map they are of.
    """
    some = photos[:: max(1, len(photos) // 16)][:16]
    fresh = FreshMaps(detector.eval().requires_grad_(False), some, amp=config.amp)
    device = detector.scale.device
    proposals, squares = stack_proposals(some, device=device), []
    detector.scale.fill_(1.0)
    for row in range(len(some)):
        rows, flips = torch.tensor([row], device=device), torch.tensor([False], device=device)
        seen, boxes = fresh.of(rows, flips, scale=config.scales[0]), proposals.rows(rows)
        cells = box_cells(boxes.boxes, boxes.sizes, seen.shapes)
        squares.append(detector.pooled(seen.maps, cells)[boxes.valid].square().mean())
    detector.scale.copy_(torch.stack(squares).mean().clamp_min(1e-12).rsqrt())


def _seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step * 7 + 1) % 2**62

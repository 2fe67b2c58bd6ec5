"""Learning boxes from image labels: `fit_boxes`; a scale and flips at random, WSDDN's loss.

Everything around the steps is learn.loop's.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from surefeat.boxes.config import BoxesConfig, LearnConfig, check_boxes_config
from surefeat.boxes.network import Detector, image_log_loss, spatial_regulariser
from surefeat.boxes.photos import (
    Photo,
    TrunkMaps,
    faster,
    read_photos,
    ready_proposals,
    stack_labels,
    stack_proposals,
)
from surefeat.core.files import choose_device
from surefeat.data.decode import Skipped, batch_indices
from surefeat.data.sources import LabelledImages
from surefeat.learn import loop
from surefeat.learn.runs import Run, alone, list_skipped
from surefeat.model.features import box_cells

_LOG = logging.getLogger("surefeat")


@dataclass(frozen=True)
class Fitted:
    """What learning left behind."""

    detector: Detector
    folder: Path
    images: int
    """That were learned from."""
    steps: int
    skipped: tuple[Skipped, ...]
    """Images that were not, and why."""


@alone
def fit_boxes(
    labels: LabelledImages,
    *,
    out: str | Path,
    config: BoxesConfig | None = None,
    init: str | Path | None = None,
    proposals: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Fitted:
    """Learn a detector from image labels alone; boxes in `labels` are not looked at.

    out: the run folder. init: as of `DenseFeatures.create`; None is `imagenet`, and `shipped` where
    it cannot be downloaded. proposals: their file,
    made or added to where it lacks images; by default in the run folder. resume: continue the run
    in `out` exactly, with its own settings. An image without label is left out, and listed.
    """
    where, config = choose_device(device), config or BoxesConfig()
    check_boxes_config(config)
    run = Run.resume(out) if resume else Run.start(out, config, device=where)
    with run.beginning(new=not resume):
        detector = _create(run, labels.categories, init=init).to(where)
        config, file = detector.fitted, Path(proposals or run.folder / "proposals.sqlite")
        known = ready_proposals(labels.labelled(), config, file=file, quiet=quiet)
    photos, bad = read_photos(labels.labelled(), known, config)
    silent = [Skipped(image.name, "has no label") for image in labels.images if not image.labels]
    skipped = (*silent, *bad)
    list_skipped(run.folder, skipped)
    _check_classes(photos, labels.categories)
    run.store_images({"images": len(photos), "sha256": _digest(photos)})
    if not detector.hidden_given and not run.checkpoints():
        calibrate(detector, photos, config.learn)
    steps = learn_boxes(detector, photos, run, config.learn, quiet=quiet)
    detector.save(run.folder / "model")
    return Fitted(detector, run.folder, len(photos), steps, skipped)


def _create(run: Run, categories: tuple[str, ...], *, init: str | Path | None) -> Detector:
    """The detector before training, with the settings of its run."""
    config = run.settings(BoxesConfig)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.learn.seed)
        # A checkpoint holds all weights; then the initial ones need not be at hand again.
        if run.checkpoints():
            init = "none"
        try:
            detector = Detector.create(config.detector, categories, init=init or "imagenet")
        except OSError as error:
            if init is not None:
                raise
            _LOG.warning("%s; starting from the model that ships", error)
            detector = Detector.create(config.detector, categories, init="shipped")
    # Weights may say which variant of the network they are for; a resumed run must know.
    detector.fitted = replace(config, detector=detector.config)
    run.store_settings(detector.fitted)
    return detector


def _check_classes(photos: Sequence[Photo], categories: Sequence[str]) -> None:
    for name in categories:
        count = sum(name in photo.image.labels for photo in photos)
        if not count:
            raise ValueError(f"no readable image shows {name!r}; add some, or leave it out")
        if count == 1:
            _LOG.warning("only one image shows %r: expect its box to be anything in it", name)


def _digest(photos: Sequence[Photo]) -> str:
    """Of images, labels and proposals in their order."""
    digest = hashlib.sha256()
    for photo in photos:
        labels = [*sorted(photo.image.labels), "?", *sorted(photo.image.unsure)]
        digest.update(os.fsencode(f"{photo.image.name}\t{labels}\n"))
        digest.update(photo.proposals.numpy().tobytes())
    return digest.hexdigest()


def calibrate(detector: Detector, photos: Sequence[Photo], config: LearnConfig) -> None:
    """Scale what fc6 sees to a mean square of 1: for hidden layers from random weights.

    Maxima over bins are far larger than the map they are of.
    """
    some = photos[:: max(1, len(photos) // 16)][:16]
    maps, proposals = TrunkMaps(detector, some), stack_proposals(some, detector.scale.device)
    detector.scale.fill_(1.0)
    squares = []
    for row in range(len(some)):
        seen, shapes = maps.of([row], [False], scale=config.scales[0])
        boxes = proposals.rows([row])
        pooled = detector.pooled(seen, box_cells(boxes.boxes, boxes.sizes, shapes))
        squares.append(pooled[boxes.valid].square().mean())
    detector.scale.copy_(torch.stack(squares).mean().clamp_min(1e-12).rsqrt())


def learn_boxes(
    detector: Detector, photos: Sequence[Photo], run: Run, config: LearnConfig, *, quiet: bool
) -> int:
    """Train to the last step, continuing from the newest checkpoint if any; -> that step."""
    detector.eval()
    if detector.scale.device.type == "cuda":
        detector.trunk.to(memory_format=torch.channels_last)
    optimiser = loop.make_optimiser(
        "adamw", [(detector.parameters(), config.lr)], weight_decay=config.weight_decay
    )
    steps = math.ceil(config.epochs * len(photos) / config.batch)
    schedule = loop.Schedule(steps, config.log_every, config.checkpoint_every)
    log = loop.Log(detector.scale.device, batch=config.batch, unit="images")
    with loop.progress_bar(steps, ("loss", "regulariser", "images_per_s"), quiet=quiet) as (
        report,
        tick,
    ):
        job = loop.open_job(loop.Job(
            detector, optimiser, run, schedule, log, advice="lower --learn.lr", report=report,
            tick=tick,
        ))  # fmt: skip
        # Photos of many sizes: a search for the best kernels of each would take longer than it won.
        loop.run_steps(job, box_steps(detector, photos, job, config), fast=False)
    return steps


def box_steps(
    detector: Detector, photos: Sequence[Photo], job: loop.Job, config: LearnConfig
) -> Iterator[loop.Taken]:
    """Maps of a batch at one scale, its proposals, the losses of its labels: until the last step.

    The second half goes at a tenth of the rate [P].
    """
    device, maps = job.log.device, TrunkMaps(detector, photos)
    proposals = stack_proposals(photos, device)
    labels = stack_labels(photos, detector.categories).to(device)
    for step in job.todo():
        rows, flips, scale = draw(step, config, count=len(photos))
        dropout = torch.Generator(device).manual_seed(_seed(config.seed, step))
        seen, shapes = maps.of(rows, flips, scale=scale)
        boxes, shown = proposals.rows(rows).mirrored(flips), labels[rows]
        cells = box_cells(boxes.boxes, boxes.sizes, shapes)
        with faster(device):
            scores, hidden = detector(seen, cells, boxes.valid, dropout)
        loss = image_log_loss(scores, shown).mean()
        pull = spatial_regulariser(
            scores, hidden, boxes.boxes, shown, boxes.valid, overlap=config.overlap
        ).mean()
        factor = 1.0 if 2 * step < job.schedule.steps else 0.1
        loop.descend(job.optimiser, loss + config.regulariser * pull, factor=factor)
        yield {"loss": loss, "regulariser": pull}


def draw(step: int, config: LearnConfig, *, count: int) -> tuple[list[int], list[bool], int]:
    """Photos (rows and whether to mirror each) and the scale (longest side) of a step."""
    generator = torch.Generator().manual_seed(_seed(config.seed, step) + 1)
    rows = batch_indices(step, batch=config.batch, count=count, seed=config.seed)
    flips = torch.rand(config.batch, generator=generator) < (0.5 if config.flips else 0.0)
    place = int(torch.randint(len(config.scales), (), generator=generator))
    return rows.tolist(), flips.tolist(), config.scales[place]


def _seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step * 7 + 1) % 2**62

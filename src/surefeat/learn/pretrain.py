"""Pretraining: photos -> model. Find and decode images, train by pairs of views, check, save."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefeat.core import progress
from surefeat.core.files import write_json, write_text
from surefeat.core.image import printable, write_png
from surefeat.data.decode import (
    Batches,
    Canvas,
    Item,
    Memory,
    Part,
    Place,
    Skipped,
    StreamedBatches,
    choose_memory,
    content_hash,
    decode_all,
)
from surefeat.data.sources import find_images
from surefeat.learn import loop
from surefeat.learn.config import (
    Config,
    DataConfig,
    TrainConfig,
    check_numbers,
    default_init,
    fit_to,
    preset,
)
from surefeat.learn.kept import keep_views, kept_losses
from surefeat.learn.loss import PairLoss, held_steps, make_step, reason_to_stop, step_draws
from surefeat.learn.runs import Run, alone, list_skipped
from surefeat.learn.selfcheck import SelfCheck, beside_shipped, self_check
from surefeat.learn.trust import PHOTOS, Trust, trust_without_labels
from surefeat.model.network import DenseFeatures

_LOG = logging.getLogger(__name__)

Feed = Batches | StreamedBatches
"""Where batches of images come from."""

Shown = tuple[loop.Report, Callable[[int], None]]
"""What `loop.progress_bar` gives: a job's report and tick."""

# With fewer images every batch would repeat them several times over.
_FEW = 8

# Held-out images that the report matches with each other, before and after.
_MATCHED = 4

# What the progress bar shows of a line.
_SHOWN = ("loss", "positive", "negative", "sigma_p10", "sigma_p50", "sigma_p90", "pairs_per_s")


@dataclass(frozen=True)
class Pretrained:
    """What a training run left behind."""

    model: DenseFeatures
    folder: Path
    progress: loop.Progress
    check: SelfCheck | None
    """The label-free check on held-out images; None when nothing was held out."""
    skipped: tuple[Skipped, ...]
    trust: str = ""
    """How the probability of its matches was fitted, or why it has none."""


@alone
def pretrain(
    source: str | Path, *, out: str | Path, steps: int | None = None, config: Config | None = None,
    init: str | Path | None = None, fit: bool | None = None, images: str | Path | None = None,
    crop: str | Path | None = None, keep: str | Path | None = None,
    categories: tuple[str, ...] | None = None, context: float | None = None, min_side: int = 32,
    resume: bool = False, overfit: int = 0, device: str | torch.device | None = None,
    quiet: bool = False, tensorboard: bool = False,
) -> Pretrained:  # fmt: skip
    """Learn features and confidence from a folder, a list, tar shards or a COCO json.

    out: the run folder. config: by default preset `ours`, fitted to the folder and the machine;
    fit: whether to fit a given one too (`fit_to`). init: as of `DenseFeatures.create`; None: as
    `default_init` says. images, crop, ... min_side: as for data.sources.find_images.
    resume: continue the run in `out` exactly, with its own settings (but `steps` may change).
    overfit: learn this many images by heart, with the same views at every step.
    Under torchrun the batch is shared by all processes.
    """
    fit = config is None if fit is None else fit
    config = config or preset("ours")
    check_numbers(config if steps is None else _lasting(config, steps))
    if overfit < 0:
        raise ValueError(f"overfit is {overfit}; use 0, or as many images as to learn by heart")
    part, device = loop.join_processes(device)
    quiet = quiet or part.rank > 0
    items = find_images(
        source, images=images, crop=crop, keep=keep, categories=categories, context=context,
        min_side=min_side,
    )  # fmt: skip
    if fit:
        config = fit_to(config, photos=len(items), cpu=device.type == "cpu")
    run = _open_run(Path(out), config, steps=steps, resume=resume, part=part, device=device)
    config = run.settings(Config)
    # The weights first: a wrong name of theirs is said before many images are decoded.
    init = default_init(config) if init is None else init
    with run.beginning(new=not resume and part.rank == 0):
        model = _create(run, config, init=init, part=part).to(device)
        pictures = load_pictures(
            items, config.data, memory=_place(len(items), config.data, device, part),
            seed=config.train.seed, device=device, overfit=overfit, quiet=quiet,
        )  # fmt: skip
        _check_kept(model, pictures.batches, config, part)
    if part.rank == 0:
        _list(run, pictures, items)
    with loop.progress_bar(
        config.train.steps, _SHOWN, quiet=quiet,
        tensorboard=run.folder / "tensorboard" if tensorboard and part.rank == 0 else None,
    ) as shown:  # fmt: skip
        try:
            done = _learn(model, pictures, run, config, init=str(init), shown=shown, part=part,
                          overfit=bool(overfit))  # fmt: skip
        except KeyboardInterrupt as stop:  # within the loop it says so itself
            raise KeyboardInterrupt(str(stop) or "stopped; --resume goes on") from None
    _finish(run, done, pictures, part)
    return done


def _learn(
    model: DenseFeatures, pictures: Pictures, run: Run, config: Config, *, init: str, shown: Shown,
    part: Part, overfit: bool,
) -> Pretrained:  # fmt: skip
    """Look at the model as it is, train it, look again."""
    apart = pictures.held_out

    def check(model: DenseFeatures) -> SelfCheck:
        return self_check(model, apart.pixels, apart.sizes, warp=config.warp, colour=config.colour)

    if part.rank == 0 and apart.names and not run.checkpoints():
        _look_before(run, model, pictures, beside_shipped(model.eval(), check), init=init)
    progress = train(
        model, pictures.batches, run, config, part=part, shown=shown, overfit=overfit,
        check=(lambda current: check(current).to_dict()) if apart.names else None,
    )  # fmt: skip
    checked = check(model.eval()) if apart.names else None
    trust = _trust(model.eval(), apart) if part.rank == 0 else None
    return Pretrained(
        model, run.folder, progress, checked, pictures.skipped(), trust.words if trust else ""
    )


def _trust(model: DenseFeatures, apart: Canvas) -> Trust:
    """Tell the model how far its matches can be trusted, by photos it has not learned from."""
    sizes = apart.sizes[:PHOTOS].tolist()
    photos = [apart.pixels[row, :, :h, :w] for row, (h, w) in enumerate(sizes)]
    trust = trust_without_labels(model, photos)
    model.reliability, model.cohort = trust.reliability, trust.cohort
    _LOG.info(trust.words)
    return trust


def _open_run(
    out: Path, config: Config, *, steps: int | None, resume: bool, part: Part, device: torch.device
) -> Run:
    """Start or reopen the run, with its settings in config.json; one process does it for all."""
    if part.rank == 0:
        run = Run.resume(out) if resume else Run.start(out, config, device=device)
        config = run.settings(Config)
        if steps is not None:
            run.store_settings(_lasting(config, steps))
    if part.world > 1:
        dist.barrier()
    return Run.open(out)


def _lasting(config: Config, steps: int) -> Config:
    return replace(config, train=replace(config.train, steps=steps))


def _create(run: Run, config: Config, *, init: str | Path, part: Part) -> DenseFeatures:
    """The model before training: the same in every process, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        # A checkpoint holds all weights; then the initial ones need not be at hand again.
        model = DenseFeatures.create(config.model, init="none" if run.checkpoints() else init)
        if config.loss.kind != "probabilistic":
            model.without_confidence()
    if part.rank == 0 and model.config != config.model:
        # Weights may say which variant of the network they are for; a resumed run must know.
        run.store_settings(replace(config, model=model.config))
    return model


# The images.


@dataclass(frozen=True)
class Pictures:
    """The images of a run."""

    batches: Feed
    """Those to learn from."""
    held_out: Canvas
    """Those to check on, never learned from; perhaps none."""
    names: tuple[str, ...]
    """Of the images to learn from, in order."""

    def skipped(self) -> tuple[Skipped, ...]:
        """What could not be decoded so far; a stream meets its bad files on the way."""
        return self.batches.skipped() + self.held_out.skipped


def load_pictures(
    items: Sequence[Item], config: DataConfig, *, memory: Memory, seed: int, device: torch.device,
    overfit: int = 0, quiet: bool = True,
) -> Pictures:  # fmt: skip
    """Split, decode and place the images of a run; `overfit` keeps only so many, none held out."""
    held = 0 if overfit else config.held_out
    learn, apart = split(items[: overfit or None], held_out=held, seed=seed)
    side, workers = config.side, config.workers
    held_out = decode_all(apart, side=side, workers=workers)
    if memory == "stream":
        stream = StreamedBatches(learn, side=side, workers=workers, device=device)
        return Pictures(stream, held_out, tuple(item.name for item in learn))
    with progress.bar(total=len(learn), desc="reading images", unit="img", quiet=quiet) as bar:
        canvas = decode_all(
            learn, side=side, workers=workers, progress=lambda done: bar.update(done - bar.n)
        )
    if not canvas.names:
        reasons = "; ".join(f"{entry.name} {entry.reason}" for entry in canvas.skipped[:3])
        raise ValueError(f"none of the {len(learn)} files is a readable image: {reasons}")
    if len(canvas.names) < _FEW and not overfit:
        _LOG.warning("only %d images: expect features of those images alone", len(canvas.names))
    return Pictures(Batches(canvas, device=device, memory=memory), held_out, canvas.names)


def split(items: Sequence[Item], *, held_out: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Items to learn from, and at most `held_out` to check on, but no more than a fifth.

    Crops of one file stay together: they may show the same object.
    """
    files: dict[Place, list[Item]] = {}
    for item in items:
        files.setdefault(item.read, []).append(item)
    places, room, apart = list(files), min(held_out, len(items) // 5), set[Place]()
    for k in torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(files[places[k]]) <= room:
            room -= len(files[places[k]])
            apart.add(places[k])
    learn = [item for item in items if item.read not in apart]
    return learn, [item for item in items if item.read in apart]


def _place(count: int, config: DataConfig, device: torch.device, part: Part) -> Memory:
    """Where the images go; processes agree, as what is free changes while each of them looks."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", part.world))
    place = choose_memory(
        count, side=config.side, device=device, wanted=config.memory, processes=beside
    )
    if part.world > 1:
        shared = [place]
        dist.broadcast_object_list(shared, src=0)
        (place,) = shared
    if part.rank == 0:
        _LOG.info(place[1])
    return place[0]


def _list(run: Run, pictures: Pictures, items: Sequence[Item]) -> None:
    """Write down what became of the images."""
    apart, names, skipped = pictures.held_out.names, "\n".join(pictures.names), pictures.skipped()
    kept = {*pictures.names, *apart}
    run.store_images({
        "content": content_hash([item for item in items if item.name in kept]),
        "images": len(pictures.names), "sha256": hashlib.sha256(os.fsencode(names)).hexdigest(),
        "held_out": len(apart), "held_out_names": apart, "skipped": len(skipped),
    })  # fmt: skip
    write_text(run.learned_file, "".join(f"{printable(name)}\n" for name in pictures.names))
    list_skipped(run.folder, skipped)


# The training.


def train(
    model: DenseFeatures, batches: Feed, run: Run, config: Config, *, part: Part | None = None,
    check: Callable[[DenseFeatures], loop.Values] | None = None, shown: Shown | None = None,
    overfit: bool = False,
) -> loop.Progress:  # fmt: skip
    """Train until the last step or a plateau, continuing from the newest checkpoint if any.

    check: label-free check, called every `check_every` steps; shown: of `loop.progress_bar`;
    overfit: the same images and views at every step, to see that a few can be learned by heart.
    """
    settings, device = config.train, model.device
    model.set_trained(settings.trained, batch_norm=settings.batch_norm)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    rates = [(model.head.parameters(), settings.head_lr), (model.trunk.parameters(), settings.lr)]

    def check_held_out() -> loop.Values:
        # Held-out images must not enter the statistics of a batch norm that learns.
        assert check is not None
        values = check(model.eval())
        model.set_trained(settings.trained, batch_norm=settings.batch_norm)
        return values

    optimiser = loop.make_optimiser(settings.optimiser, rates, weight_decay=settings.weight_decay)
    schedule = loop.Schedule(
        settings.steps, settings.log_every, settings.checkpoint_every, settings.check_every,
        settings.patience,
    )  # fmt: skip
    log = loop.Log(device, batch=settings.batch, unit="pairs", part=part)
    job = loop.open_job(loop.Job(
        model, optimiser, run, schedule, log,
        advice="lower --train.lr, or set --train.clip 1", check=check and check_held_out,
        complain=lambda step, values: reason_to_stop(step, values, config.loss),
        report=shown and shown[0], tick=shown and shown[1],
    ))  # fmt: skip
    if settings.kept_views:
        assert isinstance(batches, Batches)
        kept = keep_views(model, batches, config, quiet=shown is None)
        losses = kept_losses(model, kept, job.todo(), config)
    else:
        losses = view_losses(model, batches, job, config, overfit)
    return loop.run_steps(job, pair_steps(losses, job, settings), fast=settings.amp)


def pair_steps(
    losses: Iterator[tuple[PairLoss, Tensor]], job: loop.Job, settings: TrainConfig
) -> Iterator[loop.Taken]:
    """A step down each loss; sigma of its points is for the log."""
    for step, (loss, sigma) in zip(job.todo(), losses, strict=True):
        factor = loop.rate(step, settings.steps, warmup=settings.lr_warmup, decay=settings.decay)
        loop.descend(job.optimiser, loss.total, factor=factor, clip=settings.clip)
        yield {"loss": loss.total, "positive": loss.positive_score,
               "negative": loss.negative_score, "dead": loss.dead_positives,
               "sigma": sigma}  # fmt: skip


def _check_kept(model: DenseFeatures, batches: Feed, config: Config, part: Part) -> None:
    """ValueError where views cannot be kept: that takes frozen layers, and one process."""
    trained = config.train.trained
    if not config.train.kept_views:
        return
    if trained == "all" or (trained == "last" and not model.trunk.before_last):
        fix = "pass --train.trained head, or --train.kept-views 0"
        raise ValueError(f"views can be kept only where the layers below do not learn; {fix}")
    if part.world > 1 or not isinstance(batches, Batches):
        fix = "pass --train.kept-views 0"
        raise ValueError(f"kept views are for one process and photos that fit in memory; {fix}")


def view_losses(
    model: DenseFeatures, batches: Feed, job: loop.Job, config: Config, overfit: bool
) -> Iterator[tuple[PairLoss, Tensor]]:
    """Of each step: two new views of every image of a batch, all pairs of their points."""
    settings, part, device = config.train, job.log.part, job.log.device
    take = make_step(_shared(model, part, settings), config, device)
    drawn = [0] * len(job.todo()) if overfit else job.todo()
    feed = batches.iterate(drawn, batch=settings.batch, seed=settings.seed, part=part)
    for step, seen, (pixels, sizes) in zip(job.todo(), drawn, feed, strict=True):
        draws = step_draws(seen, config, device).part(part.rows(settings.batch))
        hold = torch.full((), step < held_steps(config), device=device)
        yield take(pixels, sizes, draws, hold)


def _shared(model: DenseFeatures, part: Part, config: TrainConfig) -> nn.Module:
    """The model, or what averages its gradients over processes."""
    if part.world == 1:
        return model
    if config.batch_norm == "trained":
        raise ValueError(
            "statistics of a batch shared by processes would differ between them; "
            "pass --train.batch-norm frozen, or train with one process"
        )
    device = model.device
    ids = [device.index] if device.type == "cuda" else None
    # Frozen statistics never differ, and writing them anew would void the filters folded with them.
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


# What is left behind.


def _look_before(
    run: Run, model: DenseFeatures, pictures: Pictures, check: SelfCheck, *, init: str
) -> None:
    """Before the first step: some held-out images, what the model makes of them, and its check.

    The report shows them beside what was learned.
    """
    write_json(run.folder / "before.json", {"init": init, "self_check": check.to_dict()})
    folder = run.folder / "examples"
    for row, (height, width) in enumerate(pictures.held_out.sizes[:6].tolist()):
        pixels = pictures.held_out.pixels[row, :, :height, :width]
        write_png(folder / f"{row}.png", pixels)
        if row < _MATCHED:
            model.extract(pixels)[0].save(folder / f"before-{row}.safetensors")


def _finish(run: Run, done: Pretrained, pictures: Pictures, part: Part) -> None:
    """Write the model and its summary; then all go on."""
    if part.rank == 0:
        if isinstance(pictures.batches, StreamedBatches):
            list_skipped(run.folder, done.skipped)
        done.model.save_pretrained(run.folder / "model")
        summary: dict[str, Any] = {"steps": done.progress.step, "seconds": done.progress.seconds}
        checked = {"self_check": done.check.to_dict()} if done.check else {}
        write_json(run.folder / "summary.json", summary | checked | {"probability": done.trust})
    if part.world > 1:
        dist.barrier()

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
from PIL import Image
from torch import nn
from tqdm import tqdm

from surefeat.core.files import write_json, write_text
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
    decode_all,
)
from surefeat.data.sources import CONTEXT, find_images
from surefeat.learn.config import Config, DataConfig, TrainConfig, check_numbers, preset
from surefeat.learn.loop import (
    Job,
    Log,
    Progress,
    Report,
    Schedule,
    Taken,
    Values,
    descend,
    join_processes,
    make_optimiser,
    open_job,
    progress_bar,
    rate,
    run_steps,
)
from surefeat.learn.loss import collapsed, make_step, step_draws
from surefeat.learn.runs import Run, list_skipped
from surefeat.learn.selfcheck import SelfCheck, self_check
from surefeat.model.network import DenseFeatures

_LOG = logging.getLogger(__name__)

# With fewer images every batch would repeat them several times over.
_FEW = 8

# What the progress bar shows of a line.
_SHOWN = ("loss", "positive", "negative", "sigma_p10", "sigma_p50", "sigma_p90", "pairs_per_s")


@dataclass(frozen=True)
class Pretrained:
    """What a training run left behind."""

    model: DenseFeatures
    folder: Path
    progress: Progress
    check: SelfCheck | None
    """The label-free check on held-out images; None when nothing was held out."""
    skipped: tuple[Skipped, ...]


def pretrain(
    source: str | Path,
    *,
    out: str | Path,
    steps: int | None = None,
    config: Config | None = None,
    init: str | Path = "imagenet",
    images: str | Path | None = None,
    crop: str | Path | None = None,
    keep: str | Path | None = None,
    categories: tuple[str, ...] | None = None,
    context: float = CONTEXT,
    min_side: int = 32,
    resume: bool = False,
    overfit: int = 0,
    device: str | torch.device | None = None,
    quiet: bool = False,
    tensorboard: bool = False,
) -> Pretrained:
    """Learn features and confidence from a folder, a list, tar shards or a COCO json.

    out: the run folder. init: `imagenet` (downloaded), a file, or `none`. images, crop, keep,
    categories, context, min_side: as for data.sources.find_images.
    resume: continue the run in `out` exactly, with its own settings (but `steps` may change).
    overfit: learn this many images by heart, with the same views at every step.
    Under torchrun the batch is shared by all processes.
    """
    config = config or preset("ours")
    check_numbers(config)
    part, device = join_processes(device)
    quiet = quiet or part.rank > 0
    items = find_images(
        source, images=images, crop=crop, keep=keep, categories=categories, context=context,
        min_side=min_side,
    )  # fmt: skip
    run = _open_run(Path(out), config, steps=steps, resume=resume, part=part, device=device)
    config = run.settings(Config)
    # The weights first: a wrong name of theirs is said before many images are decoded.
    model = _create(run, config, init=init, part=part).to(device)
    pictures = _read(run, items, config, device=device, overfit=overfit, quiet=quiet, part=part)
    check = _checker(pictures.held_out, config)
    folder = run.folder / "tensorboard" if tensorboard and part.rank == 0 else None
    with progress_bar(config.train.steps, _SHOWN, quiet=quiet, tensorboard=folder) as report:
        progress = train(
            model, pictures.batches, run, config, part=part, report=report, overfit=bool(overfit),
            check=check and (lambda current: check(current).to_dict()),
        )  # fmt: skip
    return _finish(model, run, progress, check, pictures, part)


def _open_run(
    out: Path, config: Config, *, steps: int | None, resume: bool, part: Part, device: torch.device
) -> Run:
    """Start or reopen the run, with its settings in config.json; one process does it for all."""
    if part.rank == 0:
        run = Run.resume(out) if resume else Run.start(out, config, device=device)
        config = run.settings(Config)
        if steps is not None:
            run.store_settings(replace(config, train=replace(config.train, steps=steps)))
    if part.world > 1:
        dist.barrier()
    return Run.open(out)


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

    batches: Batches | StreamedBatches
    """Those to learn from."""
    held_out: Canvas | None
    """Those to check on, never learned from; None when there are none."""
    names: tuple[str, ...]
    """Of the images to learn from, in order."""
    skipped: tuple[Skipped, ...]
    """What could not be decoded so far; a stream meets its bad files on the way."""


def load_pictures(
    items: Sequence[Item],
    config: DataConfig,
    *,
    memory: Memory,
    seed: int,
    device: torch.device,
    overfit: int = 0,
    quiet: bool = True,
) -> Pictures:
    """Decode, split and place the images of a run; `overfit` keeps only so many, none held out."""
    held = 0 if overfit else config.held_out
    if memory == "stream":
        learn, check = split(items, range(len(items)), held_out=held, seed=seed)
        apart = [items[i] for i in check]
        used = [items[i] for i in learn][: overfit or None]
        held_out = decode_all(apart, side=config.side, workers=config.workers) if apart else None
        stream = StreamedBatches(used, side=config.side, workers=config.workers, device=device)
        names = tuple(item.name for item in used)
        return Pictures(stream, held_out, names, held_out.skipped if held_out else ())
    with tqdm(total=len(items), desc="reading images", unit="img", disable=quiet) as bar:
        canvas = decode_all(
            items, side=config.side, workers=config.workers,
            progress=lambda done: bar.update(done - bar.n),
        )  # fmt: skip
    good = _decoded(items, canvas)
    row_of = {item: row for row, item in enumerate(good)}
    learn, check = split(items, good, held_out=held, seed=seed)
    rows = [row_of[i] for i in learn][: overfit or None]
    if len(rows) < _FEW and not overfit:
        _LOG.warning("only %d images: expect features of those images alone", len(rows))
    batches = Batches(canvas, device=device, memory=memory, rows=rows)
    held_out = _take(canvas, [row_of[i] for i in check]) if check else None
    return Pictures(batches, held_out, tuple(canvas.names[row] for row in rows), canvas.skipped)


def split(
    items: Sequence[Item], good: Sequence[int], *, held_out: int, seed: int
) -> tuple[list[int], list[int]]:
    """Numbers of the good items to learn from, and of at most `held_out` to check on; both rising.

    At most a fifth is held out. Crops of one file stay together: they may show the same object.
    """
    room = min(held_out, len(good) // 5)
    of_place: dict[Place, list[int]] = {item.read: [] for item in items}
    for i in good:
        of_place[items[i].read].append(i)
    groups = list(of_place.values())
    check: list[int] = []
    for k in torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(check) + len(groups[k]) <= room:
            check += groups[k]
    apart = set(check)
    return [i for i in good if i not in apart], sorted(check)


def _decoded(items: Sequence[Item], canvas: Canvas) -> list[int]:
    """Numbers of the items that the rows of a canvas are of."""
    good: list[int] = []
    for number, item in enumerate(items):
        if len(good) < len(canvas.names) and canvas.names[len(good)] == item.name:
            good.append(number)
    if not good:
        reasons = "; ".join(f"{entry.name} {entry.reason}" for entry in canvas.skipped[:3])
        raise ValueError(f"none of the {len(items)} files is a readable image: {reasons}")
    return good


def _take(canvas: Canvas, rows: list[int]) -> Canvas:
    names = tuple(canvas.names[row] for row in rows)
    return Canvas(canvas.pixels[rows], canvas.sizes[rows], names, ())


def _read(
    run: Run,
    items: Sequence[Item],
    config: Config,
    *,
    device: torch.device,
    overfit: int,
    quiet: bool,
    part: Part,
) -> Pictures:
    """Decode the images, and say and write down what became of them."""
    memory, where = _place(len(items), config.data, device=device, part=part)
    pictures = load_pictures(
        items, config.data, memory=memory, seed=config.train.seed, device=device,
        overfit=overfit, quiet=quiet,
    )  # fmt: skip
    if part.rank == 0:
        _LOG.info(where)
        apart = pictures.held_out.names if pictures.held_out else ()
        names = "\n".join(pictures.names)
        run.store_images({
            "images": len(pictures.names), "sha256": hashlib.sha256(names.encode()).hexdigest(),
            "held_out": len(apart), "held_out_names": apart, "skipped": len(pictures.skipped),
        })  # fmt: skip
        write_text(run.learned_file, names + "\n")
        list_skipped(run.folder, pictures.skipped)
    return pictures


def _place(
    count: int, config: DataConfig, *, device: torch.device, part: Part
) -> tuple[Memory, str]:
    """Where the images go; processes agree, as what is free changes while each of them looks."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", part.world))
    place = choose_memory(
        count, side=config.side, device=device, wanted=config.memory, processes=beside
    )
    if part.world > 1:
        shared = [place]
        dist.broadcast_object_list(shared, src=0)
        place = shared[0]
    return place


# The training.


def train(
    model: DenseFeatures,
    batches: Batches | StreamedBatches,
    run: Run,
    config: Config,
    *,
    part: Part | None = None,
    check: Callable[[DenseFeatures], Values] | None = None,
    report: Report | None = None,
    overfit: bool = False,
) -> Progress:
    """Train until the last step or a plateau, continuing from the newest checkpoint if any.

    check: label-free check, called every `check_every` steps; report: called with each log line;
    overfit: the same images and views at every step, to see that a few can be learned by heart.
    """
    settings, device = config.train, model.head.weight.device
    model.set_trained(settings.trained, batch_norm=settings.batch_norm)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    rates = [(model.head.parameters(), settings.head_lr), (model.trunk.parameters(), settings.lr)]

    def check_held_out() -> Values:
        # Held-out images must not enter the statistics of a batch norm that learns.
        assert check is not None
        values = check(model.eval())
        model.set_trained(settings.trained, batch_norm=settings.batch_norm)
        return values

    optimiser = make_optimiser(settings.optimiser, rates, weight_decay=settings.weight_decay)
    schedule = Schedule(
        settings.steps, settings.log_every, settings.checkpoint_every, settings.check_every,
        settings.patience,
    )  # fmt: skip
    job = open_job(Job(
        model, optimiser, run, schedule, Log(device, batch=settings.batch, unit="pairs", part=part),
        advice="lower --train.lr, or set --train.clip 1", check=check and check_held_out,
        complain=lambda step, values: complain_of_collapse(step, values, config), report=report,
    ))  # fmt: skip
    return run_steps(job, pair_steps(model, batches, job, config, overfit), fast=settings.amp)


def pair_steps(
    model: DenseFeatures,
    batches: Batches | StreamedBatches,
    job: Job,
    config: Config,
    overfit: bool,
) -> Iterator[Taken]:
    """Two views of every image of a batch, all pairs of their points, a step: until the last."""
    settings, part, device = config.train, job.log.part, job.log.device
    take = make_step(_shared(model, part, settings), config, device)
    drawn = [0] * len(job.todo()) if overfit else job.todo()
    feed = batches.iterate(drawn, batch=settings.batch, seed=settings.seed, part=part)
    for step, seen, (pixels, sizes) in zip(job.todo(), drawn, feed, strict=True):
        draws = step_draws(seen, config, device).part(part.rows(settings.batch))
        hold = torch.full((), step < config.loss.sigma_warmup, device=device)
        loss, sigma = take(pixels, sizes, draws, hold)
        factor = rate(step, settings.steps, warmup=settings.lr_warmup, decay=settings.decay)
        descend(job.optimiser, loss.total, factor=factor, clip=settings.clip)
        yield {"loss": loss.total, "positive": loss.positive_score,
               "negative": loss.negative_score, "dead": loss.dead_positives,
               "sigma": sigma}  # fmt: skip


def complain_of_collapse(step: int, values: Values, config: Config) -> str | None:
    """Sigma on its way to infinity, with nothing to bring it back, where it is learned already."""
    if config.loss.kind != "probabilistic" or step <= config.loss.sigma_warmup:
        return None
    if not collapsed(**{name: values[name] for name in ("sigma_p10", "positive", "negative")}):
        return None
    return (
        f"confidence collapsed: sigma is above {values['sigma_p10']:.1f} at 90 % of points, "
        "which makes every match cost nothing. Raise --loss.sigma-warmup, start from trained "
        "weights (--init), or soften the warps"
    )


def _shared(model: DenseFeatures, part: Part, config: TrainConfig) -> nn.Module:
    """The model, or what averages its gradients over processes."""
    if part.world == 1:
        return model
    if config.batch_norm == "trained":
        raise ValueError(
            "statistics of a batch shared by processes would differ between them; "
            "pass --train.batch-norm frozen, or train with one process"
        )
    device = model.head.weight.device
    ids = [device.index] if device.type == "cuda" else None
    # Frozen statistics never differ, and writing them anew would void the filters folded with them.
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


# What is left behind.


def _checker(
    held_out: Canvas | None, config: Config
) -> Callable[[DenseFeatures], SelfCheck] | None:
    if held_out is None or not held_out.names:
        return None
    return lambda model: self_check(
        model, held_out.pixels, held_out.sizes, warp=config.warp, colour=config.colour
    )


def _finish(
    model: DenseFeatures,
    run: Run,
    progress: Progress,
    check: Callable[[DenseFeatures], SelfCheck] | None,
    pictures: Pictures,
    part: Part,
) -> Pretrained:
    model.eval()
    checked = check(model) if check else None
    skipped = pictures.skipped
    if isinstance(pictures.batches, StreamedBatches):
        skipped += pictures.batches.skipped()
    if part.rank == 0:
        if len(skipped) > len(pictures.skipped):
            list_skipped(run.folder, skipped)
        model.save_pretrained(run.folder / "model")
        summary: dict[str, Any] = {"steps": progress.step, "seconds": progress.seconds}
        if checked:
            summary["self_check"] = checked.to_dict()
        write_json(run.folder / "summary.json", summary)
        _keep_examples(run, pictures.held_out)
    if part.world > 1:
        dist.barrier()
    return Pretrained(model, run.folder, progress, checked, skipped)


def _keep_examples(run: Run, held_out: Canvas | None, count: int = 6) -> None:
    """A few held-out images stay in the run folder, for its report."""
    folder = run.folder / "examples"
    for row in range(min(count, len(held_out.names) if held_out else 0)):
        assert held_out is not None
        height, width = held_out.sizes[row].tolist()
        pixels = held_out.pixels[row, :, :height, :width].permute(1, 2, 0).cpu().numpy()
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{row}.png")

"""The images of a run: decoded, split into those to learn from and those to check on, placed.

Folder -> model: find and decode images, train, check, save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from tqdm import tqdm

from surefeat.core.files import choose_device, write_json, write_text
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
from surefeat.data.sources import find_images
from surefeat.learn.config import Config, DataConfig, check_numbers, preset
from surefeat.learn.loop import Progress, Reporter, train
from surefeat.learn.runs import Run
from surefeat.learn.selfcheck import SelfCheck, self_check
from surefeat.model.network import DenseFeatures

_LOG = logging.getLogger(__name__)

# With fewer images every batch would repeat them several times over.
_FEW = 8


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
    crop: str | Path | None = None,
    resume: bool = False,
    overfit: int = 0,
    device: str | torch.device | None = None,
    quiet: bool = False,
    tensorboard: bool = False,
    **find: Any,
) -> Pretrained:
    """Learn features and confidence from a folder, a list, tar shards or a COCO json.

    out: the run folder. init: `imagenet` (downloaded), a file, or `none`. crop: COCO boxes to cut.
    resume: continue the run in `out` exactly, with its own settings (but `steps` may change).
    overfit: learn this many images by heart, with the same views at every step.
    find: further arguments of data.sources.find_images (images, keep, categories, context).
    Under torchrun the batch is shared by all processes.
    """
    config = config or preset("ours")
    check_numbers(config)
    part, device = join_processes(device)
    quiet = quiet or part.rank > 0
    items = find_images(source, crop=crop, **find)
    run = _open_run(Path(out), config, steps=steps, resume=resume, part=part, device=device)
    config = run.config()
    # The weights first: a wrong name of theirs is said before many images are decoded.
    model = _create(run, config, init=init, part=part).to(device)
    pictures = _read(run, items, config, device=device, overfit=overfit, quiet=quiet, part=part)
    check = _checker(pictures.held_out, config)
    shown = tensorboard and part.rank == 0
    with Reporter(run, config.train, quiet=quiet, tensorboard=shown) as report:
        progress = train(
            model, pictures.batches, run, config, part=part, report=report, overfit=bool(overfit),
            check=check and (lambda current: check(current).to_dict()),
        )  # fmt: skip
    return _finish(model, run, progress, check, pictures, part)


def join_processes(device: str | torch.device | None) -> tuple[Part, torch.device]:
    """This process's part of the work, and its device; joins the others under torchrun."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return Part(rank, world), chosen


def _open_run(
    out: Path, config: Config, *, steps: int | None, resume: bool, part: Part, device: torch.device
) -> Run:
    """Start or reopen the run, with its settings in config.json; one process does it for all."""
    if part.rank == 0:
        if resume:
            run = Run.open(out)
            config = run.config()
            checkpoint = run.load_checkpoint()
            run.forget_after(checkpoint.step if checkpoint else 0)
        else:
            run = Run.start(out, config, device=device)
        if steps is not None:
            run.store_config(replace(config, train=replace(config.train, steps=steps)))
    if part.world > 1:
        dist.barrier()
    return Run.open(out)


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
    say = _LOG.info if part.rank == 0 else _LOG.debug
    memory, where = _place(len(items), config.data, device=device, part=part)
    say(where)
    pictures = load_pictures(
        items, config.data, memory=memory, seed=config.train.seed, device=device,
        overfit=overfit, quiet=quiet,
    )  # fmt: skip
    if part.rank == 0:
        _remember(run, pictures)
    if pictures.skipped:
        say("%d files skipped, listed in %s", len(pictures.skipped), run.folder / "skipped.txt")
    return pictures


def _place(
    count: int, config: DataConfig, *, device: torch.device, part: Part
) -> tuple[Memory, str]:
    """Where the images go; processes agree, as what is free changes while each of them looks."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", part.world))
    found = choose_memory(
        count, side=config.side, device=device, wanted=config.memory, processes=beside
    )
    if part.world > 1:
        shared = [found]
        dist.broadcast_object_list(shared, src=0)
        found = shared[0]
    return found


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
        run.store_config(replace(config, model=model.config))
    return model


def _remember(run: Run, pictures: Pictures) -> None:
    """Write what was read; a resumed run must see the same images in the same order."""
    digest = hashlib.sha256("\n".join(pictures.names).encode()).hexdigest()
    apart = pictures.held_out.names if pictures.held_out else ()
    about = {"images": len(pictures.names), "names_sha256": digest, "held_out": len(apart),
             "held_out_names": apart, "skipped": len(pictures.skipped)}  # fmt: skip
    file = run.folder / "images.json"
    if run.checkpoints() and file.is_file():
        before = json.loads(file.read_text())
        if before["names_sha256"] != digest:
            raise ValueError(
                f"the images changed since the run began ({before['images']} then, "
                f"{about['images']} now); put them back, or start a new run with another --out"
            )
    write_json(file, about)
    _list_skipped(run, pictures.skipped)


def _list_skipped(run: Run, skipped: Sequence[Skipped]) -> None:
    lines = [f"{entry.name}\t{entry.reason}\n" for entry in skipped]
    write_text(run.folder / "skipped.txt", "".join(lines))


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
    found = check(model) if check else None
    skipped = pictures.skipped
    if isinstance(pictures.batches, StreamedBatches):
        skipped += pictures.batches.skipped()
    if part.rank == 0:
        _list_skipped(run, skipped)
        model.save_pretrained(run.folder / "model")
        summary: dict[str, Any] = {"steps": progress.step, "seconds": progress.seconds}
        if found:
            summary["self_check"] = found.to_dict()
        write_json(run.folder / "summary.json", summary)
        _keep_examples(run, pictures.held_out)
    if part.world > 1:
        dist.barrier()
    return Pretrained(model, run.folder, progress, found, skipped)


def _keep_examples(run: Run, held_out: Canvas | None, count: int = 6) -> None:
    """A few held-out images stay in the run folder, for its report."""
    folder = run.folder / "examples"
    for row in range(min(count, len(held_out.names) if held_out else 0)):
        assert held_out is not None
        height, width = held_out.sizes[row].tolist()
        pixels = held_out.pixels[row, :, :height, :width].permute(1, 2, 0).cpu().numpy()
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{row}.png")

"""Folder -> model: find and decode images, train, check, save."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

from surefeat.config import Config, preset
from surefeat.data.batches import Batches, Part, StreamedBatches, choose_memory
from surefeat.data.canvas import Canvas, Skipped, decode_all
from surefeat.data.sources import Item, find_images
from surefeat.eval.selfcheck import SelfCheck, self_check
from surefeat.model import DenseFeatures, best_device
from surefeat.monitor import Progress
from surefeat.runs import Run, write_json, write_text
from surefeat.train import train

_LOG = logging.getLogger("surefeat")

# With fewer images every batch would repeat them several times over.
_FEW = 8


@dataclass(frozen=True)
class Pretrained:
    """What a training run left behind."""

    model: DenseFeatures
    folder: Path
    progress: Progress
    check: SelfCheck | None
    """The label-free check on held-out images; None when nothing was held out."""
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Pictures:
    """The images of a run, split into those to learn from and those to check on."""

    batches: Batches | StreamedBatches
    held_out: Canvas | None
    names: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    where: str
    """Where they live, in words."""


def pretrain(
    images: str | Path,
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
    resume: continue the run in `out` exactly, with its own settings. overfit: learn this many images
    by heart, with the same views at every step. Under torchrun the batch is shared by all processes.
    find: further arguments of data.sources.find_images (images, keep, categories, context).
    """
    part, device = join_processes(device)
    config = config or preset("ours")
    if steps is not None:
        config = replace(config, train=replace(config.train, steps=steps))
    run = _open_run(Path(out), config, resume=resume, part=part)
    if resume:
        stored = run.config()
        config = stored if steps is None else replace(stored, train=replace(stored.train, steps=steps))
    items = find_images(images, crop=crop, **find)
    pictures = _load(items, config, device=device, overfit=overfit, quiet=quiet or part.rank > 0)
    if part.rank == 0:
        _remember(run, pictures)
    say = _LOG.info if part.rank == 0 else _LOG.debug
    say(pictures.where)
    if pictures.skipped:
        say("%d files skipped, listed in %s", len(pictures.skipped), run.folder / "skipped.txt")
    # The same start in every process, whatever was drawn before.
    torch.manual_seed(config.train.seed)
    model = DenseFeatures.create(config.model, init=init).to(device)
    check = _checker(pictures.held_out, config)
    with _reporter(run, config, quiet=quiet or part.rank > 0, tensorboard=tensorboard) as report:
        progress = train(
            model, pictures.batches, run, config,
            part=part, check=check and (lambda m: check(m).to_dict()), report=report,
            overfit=bool(overfit),
        )  # fmt: skip
    return _finish(model, run, progress, check, pictures, part)


def join_processes(device: str | torch.device | None) -> tuple[Part, torch.device]:
    """This process's part of the work, and its device; joins the others under torchrun."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", local)
    chosen = torch.device(device) if device is not None else best_device()
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return Part(rank, world), chosen


def _open_run(out: Path, config: Config, *, resume: bool, part: Part) -> Run:
    if part.rank > 0:
        dist.barrier()
        return Run.open(out)
    run = Run.open(out) if resume else Run.start(out, config)
    if resume:
        checkpoint = run.load_checkpoint()
        run.forget_after(checkpoint.step if checkpoint else 0)
    if part.world > 1:
        dist.barrier()
    return run


def _load(
    items: Sequence[Item], config: Config, *, device: torch.device, overfit: int, quiet: bool
) -> Pictures:
    """Decode, split and place the images."""
    side, workers = config.data.side, config.data.workers
    fits, where = choose_memory(len(items), side=side, device=device)
    memory = fits if config.data.memory == "auto" else config.data.memory
    order = torch.randperm(
        len(items), generator=torch.Generator().manual_seed(config.train.seed)
    ).tolist()
    held = 0 if overfit else min(config.data.held_out, len(items) // 5)
    if memory == "stream":
        apart = [items[i] for i in sorted(order[:held])]
        rest = [items[i] for i in sorted(order[held:])][: overfit or None]
        held_out = decode_all(apart, side=side, workers=workers) if held else None
        batches = StreamedBatches(rest, side=side, workers=workers, device=device)
        names = tuple(item.name for item in rest)
        return Pictures(batches, held_out, names, held_out.skipped if held_out else (), where)
    with tqdm(total=len(items), desc="reading images", unit="img", disable=quiet) as bar:
        canvas = decode_all(
            items, side=side, workers=workers, progress=lambda done: bar.update(done - bar.n)
        )
    if not canvas.names:
        reasons = "; ".join(f"{s.name}: {s.reason}" for s in canvas.skipped[:3])
        raise ValueError(f"none of the {len(items)} files is a readable image ({reasons})")
    good = {name: row for row, name in enumerate(canvas.names)}
    shuffled = [good[items[i].name] for i in order if items[i].name in good]
    held = min(held, len(shuffled) // 5)
    held_out = _rows(canvas, sorted(shuffled[:held])) if held else None
    used = _rows(canvas, sorted(shuffled[held:])[: overfit or None])
    if len(used.names) < _FEW and not overfit:
        _LOG.warning("only %d images: expect features of those images alone", len(used.names))
    batches = Batches(used, device=device, memory=memory)
    return Pictures(batches, held_out, used.names, canvas.skipped, where)


def _rows(canvas: Canvas, rows: list[int]) -> Canvas:
    names = tuple(canvas.names[row] for row in rows)
    return replace(canvas, pixels=canvas.pixels[rows], sizes=canvas.sizes[rows], names=names)


def _remember(run: Run, pictures: Pictures) -> None:
    """Write what was read; a resumed run must see the same images in the same order."""
    digest = hashlib.sha256("\n".join(pictures.names).encode()).hexdigest()
    about = {"images": len(pictures.names), "names_sha256": digest,
             "held_out": len(pictures.held_out.names) if pictures.held_out else 0,
             "skipped": len(pictures.skipped)}  # fmt: skip
    file = run.folder / "images.json"
    if file.is_file():
        import json

        before = json.loads(file.read_text())
        if before["names_sha256"] != digest:
            raise ValueError(
                f"the images changed since the run began ({before['images']} then, "
                f"{about['images']} now); put them back, or start a new run with another --out"
            )
    write_json(file, about)
    lines = [f"{entry.name}\t{entry.reason}\n" for entry in pictures.skipped]
    write_text(run.folder / "skipped.txt", "".join(lines))


def _checker(
    held_out: Canvas | None, config: Config
) -> Callable[[DenseFeatures], SelfCheck] | None:
    if held_out is None or not held_out.names:
        return None
    return lambda model: self_check(
        model, held_out.pixels, held_out.sizes, warp=config.warp, colour=config.colour
    )


class _reporter:  # noqa: N801 - used as a function, `with _reporter(...) as report`
    """Progress bar and, where wanted, TensorBoard; called with each log line."""

    def __init__(self, run: Run, config: Config, *, quiet: bool, tensorboard: bool) -> None:
        self.bar = tqdm(total=config.train.steps, desc="training", unit="step", disable=quiet)
        self.writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("needs TensorBoard: pip install 'surefeat[tensorboard]'") from error
            self.writer = SummaryWriter(str(run.folder / "tensorboard"))  # type: ignore[no-untyped-call]

    def __enter__(self) -> Callable[[int, dict[str, float]], None]:
        return self.report

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.writer:
            self.writer.close()

    def report(self, step: int, values: dict[str, float]) -> None:
        self.bar.update(step - self.bar.n)
        sigma = "/".join(f"{values[f'sigma_p{p}']:.2f}" for p in (10, 50, 90))
        self.bar.set_postfix_str(
            f"loss {values['loss']:.3f} pos {values['positive']:.2f} neg {values['negative']:.2f} "
            f"sigma {sigma} {values['pairs_per_s']:.0f} pairs/s"
        )
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)


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
    if part.rank == 0:
        model.save_pretrained(run.folder / "model")
        summary: dict[str, Any] = {"steps": progress.step, "seconds": progress.seconds}
        if found:
            summary["self_check"] = found.to_dict()
        write_json(run.folder / "summary.json", summary)
    if part.world > 1:
        dist.barrier()
    return Pretrained(model, run.folder, progress, found, pictures.skipped)


Preset = Literal["ours", "paper", "small"]

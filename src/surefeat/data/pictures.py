"""The images of a run: decoded, split into those to learn from and those to check on, placed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from surefeat.config import DataConfig
from surefeat.data.batches import Batches, Memory, StreamedBatches
from surefeat.data.canvas import Canvas, Skipped, decode_all
from surefeat.data.items import Item, Place

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

"""Decoding: items of a source -> one buffer of images, or a stream of them.

A bad file never stops either: it is skipped, and named with the reason.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from surefeat.data.items import Item, Place, SourceError
from surefeat.image import decode, read_bytes, resize
from surefeat.pixels import ImageError, problem

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Skipped:
    """An image that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Canvas:
    """Decoded images of mixed sizes in one buffer."""

    pixels: Tensor
    """(N, 3, S, S) uint8: each image in the top-left corner, the rest zero."""
    sizes: Tensor
    """(N, 2) int32: (height, width) of the used part."""
    names: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def decode_item(item: Item, *, side: int) -> Tensor:
    """One item -> RGB (3, h, w) uint8, cropped; longest side at most `side`, never enlarged."""
    return _cut(_decode(item, side=side), item, side=side)


def _decode(item: Item, *, side: int) -> Tensor:
    if item.read.refused:
        raise problem(item.name, item.read.refused)
    place = item.read
    data = read_bytes(place.path, name=item.name, offset=place.offset, size=place.size)
    return decode(data, name=item.name, longest_side=side if item.crop is None else None)


def _cut(image: Tensor, item: Item, *, side: int) -> Tensor:
    if item.crop is not None:
        x1, y1, x2, y2 = (math.floor(value + 0.5) for value in item.crop)
        size = f"{image.shape[2]} x {image.shape[1]}"
        image = image[:, max(y1, 0) : max(y2 + 1, 0), max(x1, 0) : max(x2 + 1, 0)]
        if image.numel() == 0:
            raise problem(
                item.name, f"has its box {item.crop} outside the {size} image; correct it"
            )
    height, width = image.shape[1:]
    scale = side / max(height, width)
    if scale < 1:
        image = resize(image, size=(max(1, round(height * scale)), max(1, round(width * scale))))
    return image.contiguous()


def canvas_bytes(count: int, *, side: int) -> int:
    """The memory that decode_all takes for this many images."""
    return count * (3 * side * side + 8)


def decode_all(
    items: Sequence[Item],
    *,
    side: int,
    workers: int,
    progress: Callable[[int], None] | None = None,
) -> Canvas:
    """All items, decoded by `workers` threads into one buffer of side S = `side`, in their order.

    A file with several crops is decoded once. `progress` is told how many items are done.
    """
    pixels = torch.zeros(len(items), 3, side, side, dtype=torch.uint8)
    sizes = torch.zeros(len(items), 2, dtype=torch.int32)
    reasons: dict[int, str] = {}
    groups: dict[tuple[Place, bool], list[int]] = {}
    for row, item in enumerate(items):
        groups.setdefault((item.read, item.crop is None), []).append(row)

    def fill(rows: list[int]) -> int:
        try:
            image = _decode(items[rows[0]], side=side)
        except ImageError as error:
            reasons.update(dict.fromkeys(rows, _reason(error, items[rows[0]])))
            return len(rows)
        for row in rows:
            try:
                part = _cut(image, items[row], side=side)
            except ImageError as error:
                reasons[row] = _reason(error, items[row])
                continue
            pixels[row, :, : part.shape[1], : part.shape[2]] = part
            sizes[row] = torch.tensor(part.shape[1:], dtype=torch.int32)
        return len(rows)

    done = 0
    with ThreadPoolExecutor(max(1, workers)) as pool:
        try:
            for count in pool.map(fill, groups.values()):
                done += count
                if progress is not None:
                    progress(done)
        except BaseException:  # Ctrl-C must not wait for everything that is still queued
            pool.shutdown(cancel_futures=True)
            raise
    return _packed(items, pixels, sizes, reasons)


def _packed(
    items: Sequence[Item], pixels: Tensor, sizes: Tensor, reasons: dict[int, str]
) -> Canvas:
    good = [row for row in range(len(items)) if row not in reasons]
    for target, row in enumerate(good):  # in place: a second buffer may not fit
        if target != row:
            pixels[target], sizes[target] = pixels[row], sizes[row]
    names = tuple(items[row].name for row in good)
    skipped = tuple(Skipped(items[row].name, reasons[row]) for row in sorted(reasons))
    return Canvas(pixels[: len(good)], sizes[: len(good)], names, skipped)


def _reason(error: ImageError, item: Item) -> str:
    return str(error).removeprefix(f"{item.name}: ")


class CanvasStream(Dataset[tuple[Tensor, Tensor, bool]]):
    """Items decoded on the fly, for sets that do not fit into memory; made for DataLoader workers.

    An index gives (pixels (3, S, S) uint8, size (2,) int32, ok). A bad file gives the next good one
    and ok = False, every time the same, and is logged once, whatever the number of workers.
    """

    def __init__(self, items: Sequence[Item], *, side: int) -> None:
        self.items, self.side = items, side
        # In shared memory, so that workers do not try, or report, what another one found bad.
        self.bad = torch.zeros(len(items), dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, bool]:
        for step in range(len(self)):
            row = (index + step) % len(self)
            if self.bad[row]:
                continue
            try:
                image = decode_item(self.items[row], side=self.side)
            except ImageError as error:
                self.bad[row] = True
                _LOG.warning("skipped %s", error)
                continue
            pixels = torch.zeros(3, self.side, self.side, dtype=torch.uint8)
            pixels[:, : image.shape[1], : image.shape[2]] = image
            return pixels, torch.tensor(image.shape[1:], dtype=torch.int32), step == 0
        raise SourceError(f"none of {len(self)} images can be decoded; see the log for the reasons")

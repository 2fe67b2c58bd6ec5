"""Items of a source -> decoded images: one by one, all in one buffer, or as training batches.

A bad file never stops any of these: it is skipped, and named with the reason. Batches come in a
fixed order, the same for any number of processes and after a resume; decoded images stay on the
accelerator when they fit, else in host memory, else they are decoded again and again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from surefeat.core.files import write_text
from surefeat.core.image import (
    ImageError,
    decoded,
    image_threads,
    printable,
    problem,
    read_bytes,
    resize,
)

_LOG = logging.getLogger(__name__)

Box = tuple[float, float, float, float]


class SourceError(ValueError):
    """A source that gives no images: one line with what was looked for and the fix."""


@dataclass(frozen=True)
class Place:
    """Where an image's bytes are; `refused` says why they are not to be read."""

    path: str
    offset: int = 0
    size: int | None = None
    """None: the whole file; else this many bytes from `offset`, a member of a tar file."""
    refused: str | None = None


@dataclass(frozen=True)
class Item:
    """One image, not yet decoded."""

    name: str
    """Readable: the path below the source, or shard.tar/member; a crop adds #annotation."""
    read: Place
    crop: Box | None = None
    """Inclusive (x1, y1, x2, y2), original pixels; it may reach beyond the image."""
    label: str | None = None
    """Category of the crop, where known."""


def name_of(item: Item) -> str:
    """What lists and COCO files call an item: without the name of its tar file."""
    return item.name.partition("/")[2] if item.read.size is not None else item.name


_HASHED = 64  # files that content_hash reads


def content_hash(items: Sequence[Item]) -> str:
    """SHA-256 of what the items' files hold: the sizes of all, and the bytes of some, evenly drawn.

    Times do not count, so that a copy of the photos is the same photos.
    """
    places = list(dict.fromkeys(item.read for item in items))
    digest = hashlib.sha256()
    for place in places:
        size = os.path.getsize(place.path) if place.size is None else place.size
        digest.update(f"{size} ".encode())
    for place in places[:: max(1, len(places) // _HASHED)]:
        digest.update(read_bytes(place.path, offset=place.offset, size=place.size))
    return digest.hexdigest()


@dataclass(frozen=True)
class Skipped:
    """An image that was left out, and why."""

    name: str
    reason: str


def write_skipped(file: Path, skipped: Sequence[Skipped]) -> None:
    """Write a line with name and reason for each; of none, no file, nor one of an earlier run."""
    lines = "".join(f"{printable(one.name)}\t{printable(one.reason)}\n" for one in skipped)
    if lines:
        write_text(file, lines)
    else:
        file.unlink(missing_ok=True)


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
    with _decoded(item, side=side) as image:
        return _cut(image, item, side=side)


@contextmanager
def _decoded(item: Item, *, side: int) -> Iterator[Tensor]:
    if item.read.refused:
        raise problem(item.name, item.read.refused)
    place = item.read
    data = read_bytes(place.path, name=item.name, offset=place.offset, size=place.size)
    longest = side if item.crop is None else None
    with decoded(data, name=item.name, longest_side=longest) as image:
        yield image


def _cut(image: Tensor, item: Item, *, side: int) -> Tensor:
    if item.crop is not None:
        x1, y1, x2, y2 = (math.floor(value + 0.5) for value in item.crop)
        size = f"{image.shape[2]} x {image.shape[1]}"
        image = image[:, max(y1, 0) : max(y2 + 1, 0), max(x1, 0) : max(x2 + 1, 0)]
        if image.numel() == 0:
            what = f"has its box {item.crop} outside the {size} image"
            raise problem(item.name, f"{what}; correct it")
    height, width = image.shape[1:]
    scale = side / max(height, width)
    if scale < 1:
        image = resize(image, size=(max(1, round(height * scale)), max(1, round(width * scale))))
    return image.contiguous()


def canvas_bytes(count: int, *, side: int) -> int:
    """The memory that decode_all takes for this many images."""
    return count * (3 * side * side + 8)


def decode_all(
    items: Sequence[Item], *, side: int, workers: int, progress: Callable[[int], None] | None = None
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
        for row, part in _decode_crops([items[row] for row in rows], rows, reasons, side=side):
            _put(part, row, pixels, sizes)
        return len(rows)

    done = 0
    with image_threads(workers) as pool:
        for count in pool.map(fill, groups.values()):
            done += count
            if progress is not None:
                progress(done)
    good = [row for row in range(len(items)) if row not in reasons]
    for target, row in enumerate(good):  # in place: a second buffer may not fit
        if target != row:
            pixels[target], sizes[target] = pixels[row], sizes[row]
    names = tuple(items[row].name for row in good)
    skipped = tuple(Skipped(items[row].name, reasons[row]) for row in sorted(reasons))
    return Canvas(pixels[: len(good)], sizes[: len(good)], names, skipped)


def _decode_crops(
    items: Sequence[Item], rows: Sequence[int], reasons: dict[int, str], *, side: int
) -> Iterator[tuple[int, Tensor]]:
    """Items of one file -> their rows and pixels; of those that fail, the reason is noted."""
    try:
        with _decoded(items[0], side=side) as image:
            for row, item in zip(rows, items, strict=True):
                try:
                    yield row, _cut(image, item, side=side)
                except ImageError as error:
                    reasons[row] = error.reason
    except ImageError as error:
        reasons.update(dict.fromkeys(rows, error.reason))


def _put(image: Tensor, row: int, pixels: Tensor, sizes: Tensor) -> None:
    pixels[row, :, : image.shape[1], : image.shape[2]] = image
    sizes[row] = torch.tensor(image.shape[1:], dtype=torch.int32)


Memory = Literal["device", "host", "stream"]

# Shares of free memory that images may take; the rest is for the network and other programs.
_DEVICE_SHARE, _HOST_SHARE = 0.4, 0.5

_AHEAD = 3  # steps that a stream decodes beforehand

_PLACES: dict[Memory, str] = {
    "device": "kept on the accelerator",
    "host": "kept in host memory",
    "stream": "decoded anew at every step",
}

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Part:
    """Which share of each global batch this process works on."""

    rank: int = 0
    world: int = 1

    def rows(self, batch: int) -> slice:
        """The rows of a global batch that are this process's."""
        if batch % self.world:
            raise ValueError(
                f"a batch of {batch} pairs cannot be shared by {self.world} processes; "
                f"pass --train.batch {batch // self.world * self.world or self.world}"
            )
        share = batch // self.world
        return slice(self.rank * share, (self.rank + 1) * share)


def batch_indices(step: int, *, batch: int, count: int, seed: int) -> Tensor:
    """(batch,) image numbers of a step: each epoch is its own permutation, run through in order."""
    first, last = step * batch, (step + 1) * batch
    parts = []
    for epoch in range(first // count, (last - 1) // count + 1):
        order, start = _permutation(count, seed=seed, epoch=epoch), epoch * count
        parts.append(order[max(0, first - start) : last - start])
    return torch.cat(parts)


@lru_cache(maxsize=4)
def _permutation(count: int, *, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator)


class Batches:
    """Batches of a decoded canvas, kept on the device or in host memory."""

    def __init__(self, canvas: Canvas, *, device: torch.device, memory: Memory = "host") -> None:
        self.bad, self.device = canvas.skipped, device
        on = device if memory == "device" else torch.device("cpu")
        self.pixels, self.sizes = canvas.pixels.to(on), canvas.sizes.to(on)

    def iterate(
        self, steps: Sequence[int], *, batch: int, seed: int, part: Part
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(pixels (b, 3, S, S) uint8, sizes (b, 2)) of each step, on the device."""
        for step in steps:
            picked = batch_indices(step, batch=batch, count=len(self.pixels), seed=seed)
            rows = _upload(picked[part.rows(batch)], self.pixels.device)
            yield _upload(self.pixels[rows], self.device), _upload(self.sizes[rows], self.device)

    def skipped(self) -> tuple[Skipped, ...]:
        """The bad files of the canvas."""
        return self.bad


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without making the host wait for the device."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class StreamedBatches:
    """Batches decoded on the fly by threads, for sets larger than memory.

    In place of a bad file comes the next good one, every time the same; it is logged once.
    """

    def __init__(
        self, items: Sequence[Item], *, side: int, workers: int, device: torch.device
    ) -> None:
        self.items, self.side, self.workers, self.device = items, side, workers, device
        self.bad: dict[int, Skipped] = {}

    def iterate(
        self, steps: Sequence[int], *, batch: int, seed: int, part: Part
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As Batches.iterate; while one step is worked on, the next ones are decoded."""
        rows, count = part.rows(batch), len(self.items)
        waiting: deque[list[Future[Tensor]]] = deque()
        with image_threads(self.workers) as pool:
            for step in steps:
                picked = batch_indices(step, batch=batch, count=count, seed=seed)[rows]
                waiting.append([pool.submit(self._decode, row) for row in picked.tolist()])
                if len(waiting) > _AHEAD:
                    yield self._stacked(waiting.popleft())
            while waiting:
                yield self._stacked(waiting.popleft())

    def _decode(self, index: int) -> Tensor:
        for row in (*range(index, len(self.items)), *range(index)):
            if row not in self.bad:
                item = self.items[row]
                try:
                    return decode_item(item, side=self.side)
                except ImageError as error:
                    # Two threads may meet it at once: only the first one says so.
                    entry = Skipped(item.name, error.reason)
                    if self.bad.setdefault(row, entry) is entry:
                        _LOG.warning("skipped %s", error)
        count = len(self.items)
        raise SourceError(f"none of {count} images can be decoded; see the log for the reasons")

    def _stacked(self, images: Sequence[Future[Tensor]]) -> tuple[Tensor, Tensor]:
        pixels = torch.zeros(len(images), 3, self.side, self.side, dtype=torch.uint8)
        sizes = torch.zeros(len(images), 2, dtype=torch.int32)
        for row, image in enumerate(images):
            _put(image.result(), row, pixels, sizes)
        return _upload(pixels, self.device), _upload(sizes, self.device)

    def skipped(self) -> tuple[Skipped, ...]:
        """The bad files met so far, in order."""
        return tuple(self.bad[row] for row in sorted(self.bad))


def choose_memory(
    count: int,
    *,
    side: int,
    device: torch.device,
    wanted: Literal["auto", "device", "host", "stream"] = "auto",
    processes: int = 1,
) -> tuple[Memory, str]:
    """Where decoded images go, and the sentence for the log.

    wanted: the place itself, or `auto` for the first of device, host and stream that they fit into.
    processes: how many on this machine each hold all of them.
    """
    need = canvas_bytes(count, side=side)
    size = f"{count} images, {need / 2**30:.2f} GiB decoded"
    if wanted != "auto":
        return wanted, f"{size}: {_PLACES[wanted]}, as asked for"
    # They pass through host memory on their way to the accelerator.
    if need * processes > _HOST_SHARE * free_host_memory():
        return "stream", f"{size}: too large for memory, {_PLACES['stream']}"
    chosen: Memory = "host"
    if device.type == "cuda" and need <= _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
        chosen = "device"
    return chosen, f"{size}: {_PLACES[chosen]}"


def free_host_memory() -> int:
    """Bytes that can be taken without swapping or breaking a container's limit.

    Half of all memory where the system does not say.
    """
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    free = 1024 * _entry(_MEMINFO, "MemAvailable:", free // 1024)
    limit = _CGROUP / "memory.max"
    if limit.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - _entry(_CGROUP / "memory.stat", "anon", 0))
    return max(0, free)


def _entry(file: Path, name: str, default: int) -> int:
    """The number after a name in a table of the system."""
    for line in file.read_text().splitlines() if file.is_file() else ():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    return default

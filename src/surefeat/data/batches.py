"""Training batches in a fixed order: the same for any number of processes, and after a resume.

Decoded images stay on the accelerator when they fit, else in host memory, else worker processes
decode them again and again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from surefeat.data.canvas import Canvas, CanvasStream, canvas_bytes
from surefeat.data.sources import Item

Memory = Literal["device", "host", "stream"]

# Shares of free memory that images may take; the rest is for the network and other programs.
_DEVICE_SHARE, _HOST_SHARE = 0.4, 0.5


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
    """(batch,) image numbers of a step: every epoch is its own permutation, run through in order."""
    first = step * batch
    epochs = range(first // count, (first + batch - 1) // count + 1)
    order = torch.cat([_permutation(count, seed=seed, epoch=epoch) for epoch in epochs])
    start = first - epochs[0] * count
    return order[start : start + batch]


@lru_cache(maxsize=4)
def _permutation(count: int, *, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator)


class Batches:
    """Batches of a decoded canvas, kept on the device or in host memory."""

    def __init__(self, canvas: Canvas, *, device: torch.device, memory: Memory = "host") -> None:
        self.count = len(canvas.names)
        self.device = device
        on = device if memory == "device" else torch.device("cpu")
        self.pixels, self.sizes = canvas.pixels.to(on), canvas.sizes.to(on)

    def iterate(
        self, steps: range, *, batch: int, seed: int, part: Part
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(pixels (b, 3, S, S) uint8, sizes (b, 2)) of each step, on the device."""
        for step in steps:
            rows = batch_indices(step, batch=batch, count=self.count, seed=seed)[part.rows(batch)]
            rows = self._upload(rows, self.pixels.device)
            pixels, sizes = self.pixels[rows], self.sizes[rows]
            yield self._upload(pixels, self.device), self._upload(sizes, self.device)

    @staticmethod
    def _upload(tensor: Tensor, device: torch.device) -> Tensor:
        """Copy without making the host wait for the device."""
        if device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)


class StreamedBatches:
    """Batches decoded on the fly by worker processes, for sets larger than memory."""

    def __init__(
        self, items: Sequence[Item], *, side: int, workers: int, device: torch.device
    ) -> None:
        self.count = len(items)
        self.device = device
        self.workers = workers
        self.stream = CanvasStream(items, side=side)

    def iterate(
        self, steps: range, *, batch: int, seed: int, part: Part
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As Batches.iterate."""
        rows = part.rows(batch)
        order = [
            batch_indices(step, batch=batch, count=self.count, seed=seed)[rows].tolist()
            for step in steps
        ]
        loader = torch.utils.data.DataLoader(
            self.stream,
            batch_sampler=order,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=False,
        )
        for pixels, sizes, *_ in loader:
            yield (
                pixels.to(self.device, non_blocking=True),
                sizes.to(self.device, non_blocking=True),
            )


def choose_memory(count: int, *, side: int, device: torch.device) -> tuple[Memory, str]:
    """Where decoded images fit, and the sentence for the log."""
    need = canvas_bytes(count, side=side)
    size = f"{count} images, {need / 2**30:.2f} GiB decoded"
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if need <= _DEVICE_SHARE * free:
            return "device", f"{size}: kept on the accelerator"
    if need <= _HOST_SHARE * free_host_memory():
        return "host", f"{size}: kept in host memory"
    return "stream", f"{size}: too large for memory, decoded anew by worker processes"


def free_host_memory() -> int:
    """Bytes of memory that can be taken without swapping (half of all where the system is silent)."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

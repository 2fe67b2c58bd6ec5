"""One shard made: photos -> features -> cells -> a file, the same wherever it is made.

A shard that is there, whole, of the same photos and made the same way is not made again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from surefeat.core.files import as_json, to_dict
from surefeat.core.geometry import Frame
from surefeat.data.decode import Skipped
from surefeat.index.cells import (
    PhotoCells,
    Projection,
    all_cells,
    join_cells,
    kept_cells,
    tile_cells,
)
from surefeat.index.photos import DecodedPhoto, ListedPhoto, decode_photos, skipped_of
from surefeat.index.shards import (
    CellsAbout,
    CellSettings,
    shard_metadata,
    skipped_in,
    stack_cells,
    write_shard,
)
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.tiles import extract_tiled, levels

_DECODERS = 8
"""Threads that decode while an accelerator computes; a CPU does one after the other."""


@dataclass(frozen=True)
class ShardJob:
    """One shard to be made."""

    number: int
    file: Path
    photos: tuple[ListedPhoto, ...]


@dataclass(frozen=True)
class ShardReport:
    """One shard that is there now."""

    number: int
    written: bool
    """False: it was there already."""
    photos: int
    rows: int
    bytes: int
    skipped: tuple[Skipped, ...]
    host: str
    process: int
    """Who made or found it."""


@dataclass(frozen=True, eq=False)
class CellMaker:
    """A model and what is written of its cells.

    On a CPU the last bits depend on the number of torch's threads: the engines use one.
    """

    model: DenseFeatures
    settings: CellSettings = field(default_factory=CellSettings)
    projection: Projection | None = None

    @property
    def longest_side(self) -> int:
        return self.model._side(self.settings.longest_side, batch=self.settings.batch)

    def about(self, *, shards: int, photos: int, sources: Sequence[str] = ()) -> CellsAbout:
        """What _cells.json says of a folder of these cells."""
        settings = to_dict(self.settings) | {"longest_side": self.longest_side}
        projection = self.projection
        return CellsAbout(
            weights_sha256=self.model.weights_hash(),
            dimension=projection.matrix.shape[1] if projection else self.model.config.channels,
            settings=CellSettings(**settings),
            shards=shards,
            photos=photos,
            sources=tuple(sources),
            projection=projection.digest if projection else None,
        )

    def make(self, job: ShardJob, about: CellsAbout, *, stop: Event | None = None) -> ShardReport:
        """Write a shard, unless it is there; nothing once `stop` is set."""
        fingerprint = fingerprint_of(job.photos, about)
        known = shard_metadata(job.file)
        if known is not None and known["fingerprint"] == fingerprint:
            size, skipped = job.file.stat().st_size, skipped_in(known)
            return _report(job, False, int(known["rows"]), size, skipped)
        parts, skipped = self.cells_of(job.photos, stop=stop)
        kind, dimension = about.settings.kind, about.dimension
        cells = stack_cells(parts, kind=kind, dimension=dimension, skipped=skipped)
        size = write_shard(job.file, cells, about, fingerprint=fingerprint)
        return _report(job, True, len(cells), size, skipped)

    def cells_of(
        self, photos: Sequence[ListedPhoto], *, stop: Event | None = None
    ) -> tuple[list[tuple[str, tuple[int, int], PhotoCells]], tuple[Skipped, ...]]:
        """Name, (height, width) and cells of the photos in their order; what was left out."""
        decoded = decode_photos(
            photos,
            longest_side=self.longest_side,
            multiple=self.model.stride,
            threads=0 if self.model.device.type == "cpu" else _DECODERS,
            tiles=self.settings.tiles,
        )
        parts: dict[int, tuple[str, tuple[int, int], PhotoCells]] = {}
        skipped: list[Skipped] = []
        batch: list[tuple[int, DecodedPhoto]] = []
        for number, photo in enumerate(decoded):
            if photo.refused:
                skipped.append(skipped_of(photo))
            batch.append((number, photo))
            if stop is not None and stop.is_set():
                raise InterruptedError("stopped; the same command goes on from here")
            if len(batch) == self.settings.batch:
                parts.update(self._batch(batch))
                batch = []
        parts.update(self._batch(batch))
        return [parts[number] for number in sorted(parts)], tuple(skipped)

    @torch.inference_mode()
    def _batch(
        self, photos: Sequence[tuple[int, DecodedPhoto]]
    ) -> list[tuple[int, tuple[str, tuple[int, int], PhotoCells]]]:
        """The cells of some photos, in one pass for each size."""
        groups: dict[tuple[int, int], list[tuple[int, Tensor, Frame, str]]] = {}
        for number, photo in photos:
            if photo.pixels is not None and photo.frame is not None:
                group = groups.setdefault(photo.frame.network, [])
                group.append((number, photo.pixels, photo.frame, photo.photo.name))
        large = {number: photo.whole for number, photo in photos}
        parts = []
        for group in groups.values():
            for number, features in self.model.extract_group(group):
                if self.settings.budget is None:
                    cells = all_cells(features, projection=self.projection)
                else:
                    budget = self.settings.budget
                    cells = kept_cells(features, budget=budget, projection=self.projection)
                whole = large.get(number)
                if whole is not None:
                    cells = join_cells([cells, *self._finer(whole, features)])
                parts.append((number, (features.name, features.frame.original, cells)))
        return parts

    def _finer(self, photo: Tensor, coarse: Features) -> Iterator[PhotoCells]:
        """The cells of a large photo's finer levels, numbered on from those of the coarse one."""
        side, first = self.longest_side, coarse.uncertainty.numel()
        size = (photo.shape[1], photo.shape[2])
        for longest in levels(size, side=side, stride=self.model.stride)[1:]:
            stitched = extract_tiled(self.model, photo, longest_side=longest, side=side)
            yield from tile_cells(
                stitched, side=side, budget=self.settings.budget, projection=self.projection,
                first=first,
            )  # fmt: skip
            first += stitched.uncertainty.numel()


def fingerprint_of(photos: Sequence[ListedPhoto], about: CellsAbout) -> str:
    """SHA-256 of what a shard is made of: model, settings, and the photos' names and states."""
    digest = hashlib.sha256(as_json(about.maker()).encode())
    for photo in photos:
        digest.update(f"{photo.name}\t{photo.state()}\n".encode())
    return digest.hexdigest()


def _report(
    job: ShardJob, written: bool, rows: int, size: int, skipped: tuple[Skipped, ...]
) -> ShardReport:
    who = (platform.node(), os.getpid())
    return ShardReport(job.number, written, len(job.photos), rows, size, skipped, *who)

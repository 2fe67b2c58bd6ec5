"""Searching an index: cell by cell while there are few, by faiss's lists when there are many.

Up to EXACT cells are all compared. Of more, faiss looks into the lists of cells near the one asked
for: _faiss.idx, vectors of a byte a number, with the cells' places and a record of the shards it
was made from. What is damaged, foreign or another model's is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefeat.core.files import file_hash, pack_tensors, read_tensors, write_bytes, write_json
from surefeat.index.cells import Projection
from surefeat.index.shards import (
    ABOUT,
    CellsAbout,
    read_about,
    read_cells,
    shard_file,
    shard_metadata,
)

EXACT = 200_000
"""Cells up to which all are compared: a fraction of a second, and no extra to install."""

PROJECTION, FAISS, RECORD = "_projection.safetensors", "_faiss.idx", "_faiss.json"
PLACES = "_places.safetensors"

SEARCH_EXTRA = "pip install 'surefeat[search]'"

Search = Literal["exact", "faiss"]

_FORMAT = "surefeat-faiss-1"

# Cells compared at once, and cells that faiss gives back for a photo that is asked for.
_CHUNK, _DEEPER = 1 << 16, 50

# Lists of faiss in square roots of the number of cells; cells a list is learned from; lists read.
_LISTS, _LEARNED, _READ = 4.0, 40, 32


def shard_rows(folder: Path, about: CellsAbout) -> list[int | None]:
    """Cells of every shard; None: it is not there."""
    known = (shard_metadata(shard_file(folder, number)) for number in range(about.shards))
    return [None if one is None else int(one["rows"]) for one in known]


def made_from(folder: Path, about: CellsAbout) -> str:
    """SHA-256 of what the shards of an index say they were made from."""
    digest = hashlib.sha256(f"{about.weights_sha256} {about.projection} {about.shards}".encode())
    for number in range(about.shards):
        known = shard_metadata(shard_file(folder, number))
        digest.update(f"{known['fingerprint'] if known else ''}\n".encode())
    return digest.hexdigest()


def import_faiss() -> Any:
    """faiss, or what to install."""
    try:
        import faiss
    except ImportError as error:
        what = f"more than {EXACT:,} cells are searched with faiss"
        raise ImportError(f"{what}: {SEARCH_EXTRA}") from error
    return faiss


def faiss_of(
    vectors: Iterator[npt.NDArray[np.float32]], learn: npt.NDArray[np.float32], *, cells: int
) -> Any:
    """Inverted lists of vectors of a byte a number: cells that come in parts, in their order.

    learn (M, D): those that the lists' centres are learned from.
    """
    faiss = import_faiss()
    lists = max(1, min(round(_LISTS * math.sqrt(cells)), len(learn) // _LEARNED))
    dimension = learn.shape[1]
    kind = faiss.ScalarQuantizer.QT_8bit
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(dimension), dimension, lists, kind, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.seed = 0
    index.train(learn)
    for part in vectors:
        index.add(part)
    index.nprobe = min(lists, _READ)
    return index


def build_faiss(folder: Path) -> None:
    """Write _faiss.idx, the cells' places and the record, unless they are there of these shards."""
    about = read_about(folder)
    source = made_from(folder, about)
    if _record(folder).get("made_from") == source:
        return
    cells = sum(row or 0 for row in shard_rows(folder, about))
    lists = round(_LISTS * math.sqrt(cells))
    step = max(1, cells // (lists * _LEARNED))
    learn = np.concatenate([part.unit_vectors()[::step] for part in read_cells(folder)])
    index = faiss_of((part.unit_vectors() for part in read_cells(folder)), learn, cells=cells)
    data = import_faiss().serialize_index(index).tobytes()
    table = _CellTable.of(folder, vectors=False)
    tensors = {"photo": table.photo, "points": table.points, "sizes": table.sizes,
               "confidence": table.confidence}  # fmt: skip
    places = pack_tensors({name: torch.from_numpy(value) for name, value in tensors.items()})
    # The record last: without it the others count as not there.
    (folder / RECORD).unlink(missing_ok=True)
    write_bytes(folder / FAISS, data)
    write_bytes(folder / PLACES, places)
    record = {
        "format": _FORMAT, "made_from": source, "cells": cells, "dimension": about.dimension,
        "lists": index.nlist, "sha256": hashlib.sha256(data).hexdigest(),
        "places_sha256": hashlib.sha256(places).hexdigest(), "names": table.names,
    }  # fmt: skip
    write_json(folder / RECORD, record)


def _record(folder: Path) -> dict[str, Any]:
    """What _faiss.json says; nothing where there is none, or none of ours."""
    try:
        record = json.loads((folder / RECORD).read_text())
        return record if record["format"] == _FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclass(frozen=True, eq=False)
class _CellTable:
    """The cells of an index without their vectors, or with them."""

    names: tuple[str, ...]
    sizes: npt.NDArray[np.int32]
    photo: npt.NDArray[np.int32]
    points: npt.NDArray[np.float32]
    confidence: npt.NDArray[np.float32]
    vectors: npt.NDArray[Any] | None = None

    @staticmethod
    def of(folder: Path, *, vectors: bool) -> _CellTable:
        names: list[str] = []
        columns: dict[str, list[Any]] = {
            name: [] for name in ("sizes", "photo", "points", "confidence", "vectors")
        }
        for part in read_cells(folder):
            shifted = {"photo": part.photo + np.int32(len(names))}
            for name, parts in columns.items():
                if name != "vectors" or vectors:
                    parts.append(shifted.get(name, getattr(part, name)))
            names += part.names
        joined = {name: np.concatenate(parts) for name, parts in columns.items() if parts}
        return _CellTable(tuple(names), **joined)


@dataclass(frozen=True, eq=False)
class CellHit:
    """The cell of a photo that is most like the one asked for."""

    photo: str
    size: tuple[int, int]
    """(height, width) of the photo."""
    point: tuple[float, float]
    """x, y of the cell's centre, original pixels."""
    score: float
    """Inner product of unit vectors."""
    confidence: float


class PartIndex:
    """An index that is open: asked for vectors, it names the cells most like them."""

    def __init__(
        self, folder: Path, about: CellsAbout, projection: Projection, table: _CellTable, lists: Any
    ) -> None:
        self.folder, self.about, self.projection = folder, about, projection
        self._table, self._lists = table, lists

    def __len__(self) -> int:
        return len(self._table.photo)

    @property
    def photos(self) -> tuple[str, ...]:
        """Names of the photos it has cells of."""
        return self._table.names

    @property
    def search(self) -> Search:
        return "exact" if self._lists is None else "faiss"

    @staticmethod
    def open(folder: str | Path, *, weights: str) -> PartIndex:
        """The index in a folder, for a model whose weights have this hash.

        ValueError: it is damaged, another kind of folder, or another model's.
        """
        folder = Path(folder)
        made = f"surefeat index PHOTOS --out {folder}"
        again = f"remove {folder} and index the photos again: {made}"
        if not (folder / ABOUT).is_file():
            raise FileNotFoundError(f"no index in {folder}; make one: {made}")
        about = read_about(folder)
        if about.weights_sha256 != weights:
            what = f"{folder} was made by another model (weights {about.weights_sha256[:12]})"
            raise ValueError(f"{what}; pass that --model, or another --out to surefeat index")
        if not (folder / PROJECTION).is_file():
            raise ValueError(f"{folder} has no {PROJECTION}, so it is no index; {again}")
        projection = Projection.load(folder / PROJECTION)
        if projection.digest != about.projection:
            raise ValueError(f"{folder / PROJECTION} is not the one of these cells; {again}")
        rows = shard_rows(folder, about)
        if None in rows or sum(row or 0 for row in rows) <= EXACT:
            # A missing shard is named by read_cells.
            return PartIndex(folder, about, projection, _CellTable.of(folder, vectors=True), None)
        return PartIndex(folder, about, projection, *_read_faiss(folder, about, f"run {made}"))

    def best(self, vectors: Tensor, *, count: int) -> list[CellHit]:
        """The best cells for vectors (Q, D), any of them, one a photo, the best photo first."""
        table = self._table
        asked = vectors.detach().float().cpu()
        if self._lists is None:
            assert table.vectors is not None
            scores, cells = nearest_per_photo(asked, table.vectors, table.photo, len(table.names))
        else:
            scores, cells = self._by_lists(asked, count)
        order = scores.argsort(descending=True, stable=True)[:count].tolist()
        hits = []
        for place in order:
            cell = int(cells[place])
            photo = int(table.photo[cell])
            x, y = table.points[cell].tolist()
            height, width = table.sizes[photo].tolist()
            hits.append(
                CellHit(table.names[photo], (height, width), (x, y), float(scores[place]),
                        float(table.confidence[cell]))
            )  # fmt: skip
        return hits

    def _by_lists(self, asked: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Scores and cells of the photos that faiss names, each photo once."""
        deep = min(len(self), max(1000, _DEEPER * count))
        scores, cells = self._lists.search(np.ascontiguousarray(asked.numpy()), deep)
        best: dict[int, tuple[float, int]] = {}
        for score, cell in zip(
            scores.reshape(-1).tolist(), cells.reshape(-1).tolist(), strict=True
        ):
            if cell >= 0:  # faiss fills up with -1
                photo = int(self._table.photo[cell])
                best[photo] = max(best.get(photo, (-math.inf, -1)), (score, cell))
        values = list(best.values())
        return torch.tensor([s for s, _ in values]), torch.tensor([c for _, c in values])


def _read_faiss(folder: Path, about: CellsAbout, fix: str) -> tuple[_CellTable, Any]:
    """Places and inverted lists, checked against the record and the shards."""
    record = _record(folder)
    if not record:
        raise ValueError(f"{folder} has no {FAISS} yet, or one that is not ours; {fix}")
    if record.get("made_from") != made_from(folder, about):
        raise ValueError(f"{folder / FAISS} was made from other shards; {fix}")
    for name, key in ((FAISS, "sha256"), (PLACES, "places_sha256")):
        if not (folder / name).is_file() or file_hash(folder / name) != record.get(key):
            raise ValueError(f"{folder / name} is missing or damaged; {fix}")
    faiss = import_faiss()
    try:
        lists = faiss.read_index(str(folder / FAISS))
        stored, _ = read_tensors(folder / PLACES)
        columns = {name: value.numpy() for name, value in stored.items()}
        return _CellTable(tuple(record["names"]), **columns), lists
    except (RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / FAISS} cannot be read ({error}); {fix}") from error


def nearest_per_photo(
    asked: Tensor, vectors: npt.NDArray[Any], photo: npt.NDArray[np.int32], photos: int
) -> tuple[Tensor, Tensor]:
    """Of every photo the score and number of the cell most like any of asked (Q, D).

    vectors (N, D), of any length and stored as small as they are: compared at unit length. -inf and
    -1 for a photo without cells.
    """
    best = torch.full((photos,), -math.inf)
    cells = torch.full((photos,), -1, dtype=torch.long)
    for start in range(0, len(vectors), _CHUNK):
        part = torch.from_numpy(vectors[start : start + _CHUNK]).float()
        # Shorter than making a copy of them at unit length.
        scores = (asked @ part.T).amax(0) / part.norm(dim=1).clamp_min(1e-12)
        owner = torch.from_numpy(photo[start : start + _CHUNK]).long()
        higher = best.scatter_reduce(0, owner, scores, "amax")
        # The first of the cells that has its photo's best score, if that is new.
        mine = ((scores == higher[owner]) & (higher > best)[owner]).nonzero()[:, 0].flip(0)
        cells[owner[mine]] = start + mine
        best = higher
    return best, cells

"""An index of photos' parts: cells on disk, grown photo by photo, and searched for those alike.

A folder of shards (index.shards) with the projection that made their vectors, fitted once on the
folder's own photos. Up to EXACT cells are compared one by one; of more, faiss looks into the lists
of cells near the one asked for (_faiss.idx, with a record of the shards it was made from).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefeat.core.files import (
    file_hash,
    pack_tensors,
    read_tensors,
    write_bytes,
    write_json,
)
from surefeat.data.decode import Skipped
from surefeat.index.cells import Projection, fit_projection
from surefeat.index.engines import Engine, one_torch_thread, plan_shards, write_cells
from surefeat.index.maker import ShardJob
from surefeat.index.photos import ListedPhoto, decode_photos, import_parquet, list_photos
from surefeat.index.shards import (
    ABOUT,
    CellsAbout,
    CellSettings,
    read_about,
    read_cells,
    shard_file,
    shard_metadata,
    skipped_in,
)
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

EXACT = 200_000
"""Cells up to which all are compared: a fraction of a second, and no extra to install."""

DIMENSION = 128
"""Numbers of a vector, a byte each. On birds and PASCAL3D+ 256 are no better, 64 worse, and the
descriptors alone, 128 numbers too, find half as many parts of PASCAL3D+ (docs/search.md)."""

BUDGET = 100
"""Cells kept of a photo."""

FITTED = 64
"""Photos, evenly drawn, that the projection is fitted on."""

PROJECTION, FAISS, RECORD = "_projection.safetensors", "_faiss.idx", "_faiss.json"
PLACES = "_places.safetensors"

SEARCH_EXTRA = "pip install 'surefeat[search]'"

Search = Literal["exact", "faiss"]

_FORMAT = "surefeat-faiss-1"

# Cells compared at once, and cells that faiss gives back for a photo that is asked for.
_CHUNK, _DEEPER = 1 << 16, 50

# Lists of faiss in square roots of the number of cells; cells a list is learned from; lists read.
_LISTS, _LEARNED, _READ = 4.0, 40, 32

# Seconds to wait for what the first process of several writes.
_WAIT = 1800.0


@dataclass(frozen=True)
class Indexed:
    """What `index_photos` did."""

    folder: Path
    photos: int
    """Listed, the skipped ones too."""
    cells: int
    written: int
    """Shards that were made now."""
    already_there: int
    bytes: int
    """Of all shards."""
    search: Search | None
    """None: other processes are still at their shards; run the command again for the rest."""
    skipped: tuple[Skipped, ...]
    listed: Path | None
    """Where the skipped photos are listed with the reasons."""


def index_photos(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    model: str | Path | DenseFeatures | None = None,
    budget: int = BUDGET,
    tiles: bool = False,
    engine: Engine = "here",
    address: str | None = None,
    workers: int | None = None,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Indexed:
    """An index of photos below `out`; again on a folder that has grown it adds what is new.

    sources, engine, address, workers: as of `write_cells`. budget: cells kept of a photo, and with
    `tiles` of every tile of a large one. Photos that are gone or changed are taken out or made anew
    with the shard they are in.
    """
    out = Path(out).absolute()
    if not isinstance(model, DenseFeatures):
        model = DenseFeatures.from_pretrained(model, device="cpu" if engine == "ray" else device)
    _check_same_index(out, model, budget=budget, tiles=tiles)
    photos = list_photos(sources)
    projection = _projection(out, photos, model)
    written = write_cells(
        sources, out, model=model, settings=CellSettings(budget=budget, tiles=tiles),
        projection=projection, engine=engine, address=address, workers=workers, device=device,
        quiet=quiet, plan=plan_grown,
    )  # fmt: skip
    about = read_about(out)
    rows = _rows(out, about)
    search: Search | None = None
    if None not in rows:
        search = "exact" if sum(row or 0 for row in rows) <= EXACT else "faiss"
    if search == "faiss" and int(os.environ.get("RANK", 0)) == 0:
        build_faiss(out)
    return Indexed(
        folder=out, photos=about.photos, cells=sum(row or 0 for row in rows),
        written=written.written, already_there=written.already_there, bytes=written.bytes,
        search=search, skipped=written.skipped, listed=written.listed,
    )  # fmt: skip


def _check_same_index(out: Path, model: DenseFeatures, *, budget: int, tiles: bool) -> None:
    """Refuse to mix, before anything is computed."""
    if budget < 1:
        raise ValueError(f"a budget of {budget} cells a photo keeps none; use at least 1")
    if not (out / ABOUT).exists():
        return
    about = read_about(out)
    if about.weights_sha256 != model.weights_hash():
        raise ValueError(f"{out} is an index of another model; pass that --model, or another --out")
    if (about.settings.budget, about.settings.tiles) != (budget, tiles):
        made = f"--budget {about.settings.budget}{' --tiles' * about.settings.tiles}"
        raise ValueError(f"{out} was made with {made}; say the same, or pass another --out")
    if about.projection is None:
        raise ValueError(f"{out} holds cells that are no index; pass another --out")


def _projection(out: Path, photos: Sequence[ListedPhoto], model: DenseFeatures) -> Projection:
    """That of the index; of a new one fitted on some of its photos, by one process of several."""
    file = out / PROJECTION
    deadline = time.monotonic() + _WAIT
    while int(os.environ.get("RANK", 0)) > 0 and not file.is_file():
        if time.monotonic() > deadline:
            raise ValueError(f"the first process has written no {file}; look what stopped it")
        time.sleep(0.5)
    if file.is_file():
        return Projection.load(file)
    if (out / ABOUT).exists():
        raise ValueError(f"{file} is gone, so nothing can be added; index the photos anew")
    drawn = photos[:: max(1, len(photos) // FITTED)][:FITTED]
    with one_torch_thread():
        seen = list(_features(drawn, model))
        if not seen:
            raise ValueError(f"none of {len(drawn)} photos drawn to learn from can be read")
        generator = torch.Generator().manual_seed(0)
        projection = fit_projection(seen, dimension=DIMENSION, generator=generator)
    projection.save(file)
    return projection


@torch.inference_mode()
def _features(photos: Sequence[ListedPhoto], model: DenseFeatures) -> Iterator[Features]:
    side = model.config.longest_side
    for photo in decode_photos(photos, longest_side=side, multiple=model.stride):
        if photo.pixels is not None and photo.frame is not None:
            for _, features in model.extract_group([(0, photo.pixels, photo.frame, "")]):
                yield features.to("cpu")


def plan_grown(photos: Sequence[ListedPhoto], out: Path, *, count: int) -> list[ShardJob]:
    """Shards that are there keep their photos, less what is gone; new photos make new shards.

    A shard that is missing or has lost all its photos is filled with new ones, so that all others
    keep their numbers.
    """
    left = {photo.name: photo for photo in photos}
    place = {photo.name: number for number, photo in enumerate(photos)}
    known = read_about(out).shards if (out / ABOUT).exists() else 0
    shards: list[tuple[ListedPhoto, ...]] = []
    for number in range(known):
        names = [name for name in photos_in(shard_file(out, number)) if name in left]
        # In the order of the listing, as when the shard was made.
        shards.append(tuple(left.pop(name) for name in sorted(names, key=place.__getitem__)))
    new = [job.photos for job in plan_shards(list(left.values()), out, count=count)]
    for number, kept in enumerate(shards):
        if not kept and new:
            shards[number] = new.pop(0)
    shards += new
    while shards and not shards[-1]:
        shards.pop()
    return [ShardJob(number, shard_file(out, number), some) for number, some in enumerate(shards)]


def photos_in(shard: Path) -> list[str]:
    """The photos of a shard, the skipped ones too; none where there is no whole shard."""
    known = shard_metadata(shard)
    if known is None:
        return []
    try:
        column = import_parquet().read_table(shard, columns=["photo"]).column("photo")
    except (OSError, ValueError, KeyError):
        return []
    return [*column.unique().to_pylist(), *(entry.name for entry in skipped_in(known))]


def _rows(folder: Path, about: CellsAbout) -> list[int | None]:
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
    cells = sum(row or 0 for row in _rows(folder, about))
    lists = round(_LISTS * math.sqrt(cells))
    step = max(1, cells // (lists * _LEARNED))
    learn = np.concatenate([part.unit_vectors()[::step] for part in read_cells(folder)])
    index = faiss_of((part.unit_vectors() for part in read_cells(folder)), learn, cells=cells)
    data = import_faiss().serialize_index(index).tobytes()
    table = _Table.of(folder, vectors=False)
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
class _Table:
    """The cells of an index without their vectors, or with them."""

    names: tuple[str, ...]
    sizes: npt.NDArray[np.int32]
    photo: npt.NDArray[np.int32]
    points: npt.NDArray[np.float32]
    confidence: npt.NDArray[np.float32]
    vectors: npt.NDArray[Any] | None = None

    @staticmethod
    def of(folder: Path, *, vectors: bool) -> _Table:
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
        return _Table(tuple(names), **joined)


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
        self, folder: Path, about: CellsAbout, projection: Projection, table: _Table, lists: Any
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
        fix = "index the photos again: surefeat index PHOTOS --out"
        if not (folder / ABOUT).is_file():
            raise FileNotFoundError(f"no index in {folder}; make one: surefeat index PHOTOS --out")
        about = read_about(folder)
        if about.weights_sha256 != weights:
            what = f"{folder} was made by another model (weights {about.weights_sha256[:12]})"
            raise ValueError(f"{what}; pass that --model, or {fix} elsewhere")
        if not (folder / PROJECTION).is_file():
            raise ValueError(f"{folder} has no {PROJECTION}, so it is no index; {fix} {folder}")
        projection = Projection.load(folder / PROJECTION)
        if projection.digest != about.projection:
            raise ValueError(f"{folder / PROJECTION} is not the one of these cells; {fix} {folder}")
        rows = _rows(folder, about)
        if None in rows or sum(row or 0 for row in rows) <= EXACT:
            # A missing shard is named by read_cells.
            return PartIndex(folder, about, projection, _Table.of(folder, vectors=True), None)
        return PartIndex(folder, about, projection, *_read_faiss(folder, about, f"{fix} {folder}"))

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


def _read_faiss(folder: Path, about: CellsAbout, fix: str) -> tuple[_Table, Any]:
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
        return _Table(tuple(record["names"]), **columns), lists
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

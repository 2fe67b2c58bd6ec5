"""Shards of cells on disk: one Parquet file for some photos, written whole, and read again.

A row is a cell: photo (text), cell (int32), x and y (float32, original pixels), descriptor (a list
of fixed size, int8 or half), confidence (float32). int8 is the unit vector times SCALE, rounded.
The file's own metadata says by which model and settings it was made; _cells.json beside the shards
says how many there are. pandas, DuckDB and Spark read the folder's *.parquet as one table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from surefeat import __version__
from surefeat.core.files import as_json, from_dict, to_dict, write_bytes, write_json
from surefeat.data.decode import Skipped
from surefeat.index.cells import PhotoCells
from surefeat.index.photos import import_parquet

Kind = Literal["half", "int8"]

SCALE = 127
"""int8 vectors are unit vectors times this, rounded."""

ABOUT = "_cells.json"
"""pandas and Spark, given a folder, pass over what begins so."""

_FORMAT = "surefeat-cells-1"

# Before the names of a shard's own metadata.
_PREFIX = "surefeat."


@dataclass(frozen=True)
class CellSettings:
    """What is written of each photo, and how photos are cut into shards."""

    kind: Kind = "int8"
    """How vectors are stored: int8 (a byte a number) or half (two)."""
    budget: int | None = None
    """Cells kept of a photo, confident ones spread out; None: all."""
    photos: int = 256
    """Photos of a shard: what is lost at most when a worker is."""
    batch: int = 16
    """Photos a pass; batches do not cross shards."""
    longest_side: int | None = None
    """Network pixels at which photos are seen; None: the model's own."""
    tiles: bool = False
    """Large photos are seen at finer levels too, up to their own size; each tile has the budget."""

    def __post_init__(self) -> None:
        if self.kind not in ("half", "int8"):
            raise ValueError(f"kind is {self.kind!r}; choose half or int8")
        named = {"budget": self.budget, "shard": self.photos, "batch": self.batch}
        for name, value in named.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; use at least 1")


@dataclass(frozen=True)
class CellsAbout:
    """What a folder of shards holds: _cells.json."""

    weights_sha256: str
    """Of the model that made them."""
    dimension: int
    """Numbers of a vector."""
    settings: CellSettings
    """With the longest side that was used."""
    shards: int
    photos: int
    """Listed, the broken ones too."""
    sources: tuple[str, ...] = ()
    """Where the photos were listed, absolute: list_photos finds them there again by name."""
    projection: str | None = None
    """Digest of the Projection; None: the vectors are descriptors."""
    scale: int = SCALE
    """Of int8 vectors."""
    version: str = __version__
    format: str = _FORMAT

    def maker(self) -> dict[str, Any]:
        """What cells have to share to lie in one folder: model, settings, vectors, format."""
        names = ("weights_sha256", "dimension", "projection", "scale", "format")
        return {name: getattr(self, name) for name in names} | {"settings": to_dict(self.settings)}


@dataclass(frozen=True, eq=False)
class StoredCells:
    """The cells of a shard: N cells of P photos, photo by photo."""

    names: tuple[str, ...]
    """P photos; those that could not be read are in `skipped` alone."""
    sizes: npt.NDArray[np.int32]
    """(P, 2): (height, width) of the photos, original pixels."""
    photo: npt.NDArray[np.int32]
    """(N,) into names."""
    cell: npt.NDArray[np.int32]
    """(N,) number of the cell in its photo, row by row."""
    points: npt.NDArray[np.float32]
    """(N, 2) original pixels."""
    vectors: npt.NDArray[Any]
    """(N, D) int8 (unit vectors times SCALE) or float16."""
    confidence: npt.NDArray[np.float32]
    """(N,) 1/sigma."""
    skipped: tuple[Skipped, ...] = ()
    """Photos of the shard that could not be read, and why."""

    def __len__(self) -> int:
        return len(self.cell)

    def unit_vectors(self) -> npt.NDArray[np.float32]:
        """(N, D) float32 of unit length, whichever way they are stored."""
        vectors = self.vectors.astype(np.float32)
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: npt.NDArray[np.float32] = vectors / np.maximum(length, np.float32(1e-12))
        return unit


def shard_file(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"cells-{number:06d}.parquet"


def stack_cells(
    parts: Sequence[tuple[str, tuple[int, int], PhotoCells]],
    *,
    kind: Kind,
    dimension: int,
    skipped: Sequence[Skipped] = (),
) -> StoredCells:
    """Name, (height, width) and cells of photos -> a shard's cells, vectors as they are stored."""
    cells = [part for _, _, part in parts]
    # What an empty shard is made of too.
    vectors = torch.cat([torch.empty(0, dimension), *(part.vectors.cpu() for part in cells)])
    points = torch.cat([torch.empty(0, 2), *(part.points.cpu() for part in cells)])
    confidence = torch.cat([torch.empty(0), *(part.confidence.cpu() for part in cells)])
    numbers = torch.cat([torch.empty(0, dtype=torch.int64), *(part.number.cpu() for part in cells)])
    small = (vectors * SCALE).round().to(torch.int8) if kind == "int8" else vectors.half()
    return StoredCells(
        names=tuple(name for name, _, _ in parts),
        sizes=np.array([size for _, size, _ in parts], dtype=np.int32).reshape(-1, 2),
        photo=np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in cells]),
        cell=numbers.int().numpy(),
        points=points.float().numpy(),
        vectors=small.numpy(),
        confidence=confidence.float().numpy(),
        skipped=tuple(skipped),
    )


def write_shard(path: Path, cells: StoredCells, about: CellsAbout, *, fingerprint: str) -> int:
    """Write a shard whole or not at all; the bytes it has. The same cells are the same bytes."""
    parquet = import_parquet()
    import pyarrow

    half = about.settings.kind == "half"
    number = pyarrow.float16() if half else pyarrow.int8()
    listed = pyarrow.list_(pyarrow.field("element", number, nullable=False), about.dimension)
    kinds = {
        "photo": pyarrow.string(), "cell": pyarrow.int32(), "x": pyarrow.float32(),
        "y": pyarrow.float32(), "descriptor": listed, "confidence": pyarrow.float32(),
    }  # fmt: skip
    fields = [pyarrow.field(name, kind, nullable=False) for name, kind in kinds.items()]
    flat = pyarrow.array(np.ascontiguousarray(cells.vectors).reshape(-1), number)
    columns = [
        pyarrow.array(cells.names, pyarrow.string()).take(pyarrow.array(cells.photo)),
        pyarrow.array(cells.cell),
        pyarrow.array(np.ascontiguousarray(cells.points[:, 0])),
        pyarrow.array(np.ascontiguousarray(cells.points[:, 1])),
        pyarrow.FixedSizeListArray.from_arrays(flat, type=listed),
        pyarrow.array(cells.confidence),
    ]
    table = pyarrow.Table.from_arrays(
        columns, schema=pyarrow.schema(fields, metadata=_metadata(cells, about, fingerprint))
    )
    sink = pyarrow.BufferOutputStream()
    # Parquet has no numbers of a byte but as a table of its 255 values, which takes a byte each.
    tables = ["photo"] if half else ["photo", "descriptor.list.element"]
    parquet.write_table(
        table, sink, compression="zstd", use_dictionary=tables, write_page_checksum=True
    )
    data = sink.getvalue().to_pybytes()
    write_bytes(path, data)
    return len(data)


def _metadata(cells: StoredCells, about: CellsAbout, fingerprint: str) -> dict[str, str]:
    """Nothing of where or when it was made, so that all machines write the same bytes."""
    skipped = [[entry.name, entry.reason] for entry in cells.skipped]
    scale = str(about.scale) if about.settings.kind == "int8" else "1"
    values = {
        "format": about.format, "version": about.version, "weights_sha256": about.weights_sha256,
        "kind": about.settings.kind, "scale": scale, "projection": about.projection or "",
        "settings": as_json(to_dict(about.settings)),
        "sizes": as_json(cells.sizes.tolist()), "skipped": as_json(skipped),
        "fingerprint": fingerprint,
    }  # fmt: skip
    return {_PREFIX + name: value for name, value in values.items()}


def shard_metadata(path: Path) -> dict[str, str] | None:
    """What a shard says of itself and its number of `rows`; None: there is no whole one."""
    parquet = import_parquet()
    try:
        footer = parquet.read_metadata(path)
    except (OSError, ValueError):  # missing, empty, cut short, another kind of file
        return None
    stored = {key.decode(): value.decode() for key, value in (footer.metadata or {}).items()}
    values = {k.removeprefix(_PREFIX): v for k, v in stored.items() if k.startswith(_PREFIX)}
    if values.get("format") != _FORMAT:
        return None
    return values | {"rows": str(footer.num_rows)}


def skipped_in(metadata: Mapping[str, str]) -> tuple[Skipped, ...]:
    """The photos that a shard's metadata says were left out."""
    return tuple(Skipped(*entry) for entry in json.loads(metadata["skipped"]))


def read_shard(path: Path, about: CellsAbout | None = None) -> StoredCells:
    """A shard's cells; ValueError: it is damaged, foreign, or not of the folder `about` tells."""
    known = shard_metadata(path)
    if known is None:
        what = "is no whole shard of cells" if path.exists() else "is not there"
        raise ValueError(f"{path} {what}; run the command that made the folder again")
    if about is not None and (
        known["weights_sha256"] != about.weights_sha256
        or known["projection"] != (about.projection or "")
        or json.loads(known["settings"]) != to_dict(about.settings)
    ):
        what = f"{path} was made by another model or settings than its folder's {ABOUT} says"
        raise ValueError(f"{what}; remove it and run the command again")
    try:
        parquet = import_parquet()
        table = parquet.read_table(path, page_checksum_verification=True)
        column = {name: table.column(name).combine_chunks() for name in table.column_names}
        photos = column["photo"].dictionary_encode()
        vectors = column["descriptor"]
        return StoredCells(
            names=tuple(photos.dictionary.to_pylist()),
            sizes=np.array(json.loads(known["sizes"]), dtype=np.int32).reshape(-1, 2),
            photo=photos.indices.to_numpy(),
            cell=column["cell"].to_numpy(),
            points=np.stack([column["x"].to_numpy(), column["y"].to_numpy()], axis=1),
            vectors=vectors.flatten().to_numpy().reshape(len(vectors), vectors.type.list_size),
            confidence=column["confidence"].to_numpy(),
            skipped=skipped_in(known),
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        fix = "remove it and run the command that made the folder again"
        raise ValueError(f"{path} is damaged ({error}); {fix}") from error


def write_about(folder: Path, about: CellsAbout) -> None:
    """Write _cells.json; ValueError: the folder holds cells of another model or settings."""
    file = folder / ABOUT
    if file.exists() and read_about(folder).maker() != about.maker():
        what = "cells of another model, or made with other settings"
        raise ValueError(f"{folder} holds {what}; pass another --out")
    write_json(file, to_dict(about))


def read_about(folder: str | Path) -> CellsAbout:
    """What _cells.json says; ValueError: it is damaged; FileNotFoundError: there is none."""
    file = Path(folder) / ABOUT
    if not file.is_file():
        fix = "pass a folder written by `surefeat extract --format parquet`"
        raise FileNotFoundError(f"no {ABOUT} in {folder}; {fix}")
    try:
        about: CellsAbout = from_dict(CellsAbout, json.loads(file.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        fix = "remove it and run the command that made the folder again"
        raise ValueError(f"{file} is damaged ({error}); {fix}") from error
    if about.format != _FORMAT:
        raise ValueError(f"{file} is of the format {about.format}, not {_FORMAT}; write it anew")
    return about


def read_cells(folder: str | Path) -> Iterator[StoredCells]:
    """The cells of a folder, shard by shard, in the order of the photos.

    ValueError before the first: a shard is missing; at a shard: it is damaged or foreign.
    """
    about = read_about(folder)
    files = [shard_file(Path(folder), number) for number in range(about.shards)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        what = f"{len(missing)} of {about.shards} shards are not there ({missing[0]} ...)"
        raise ValueError(f"{folder}: {what}; run the command that made the folder to its end")
    for file in files:
        yield read_shard(file, about)

"""An index of photos' parts: their cells on disk, grown photo by photo.

A folder of shards (index.shards) with the projection that made their vectors, fitted once on the
folder's own photos, and what is needed to search them (index.search).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from surefeat.data.decode import Skipped
from surefeat.index.cells import Projection, fit_projection
from surefeat.index.engines import (
    Engine,
    check_asked,
    one_torch_thread,
    plan_shards,
    write_cells,
)
from surefeat.index.maker import ShardJob
from surefeat.index.photos import ListedPhoto, decode_photos, import_parquet, list_photos
from surefeat.index.search import EXACT, PROJECTION, Search, build_faiss, shard_rows
from surefeat.index.shards import (
    ABOUT,
    CellSettings,
    read_about,
    shard_file,
    shard_metadata,
    skipped_in,
)
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

DIMENSION = 128
"""Numbers of a vector, a byte each. On birds and PASCAL3D+ 256 are hardly better, 64 worse, and
the descriptors alone, 128 numbers too, find far fewer parts of PASCAL3D+ (docs/search.md)."""

BUDGET = 100
"""Cells kept of a photo."""

FITTED = 64
"""Photos, evenly drawn, that the projection is fitted on."""

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
    sources: Sequence[str | Path], out: str | Path, *,
    model: str | Path | DenseFeatures | None = None, budget: int = BUDGET, tiles: bool = False,
    engine: Engine = "here", address: str | None = None, workers: int | None = None,
    device: str | torch.device | None = None, quiet: bool = False,
) -> Indexed:  # fmt: skip
    """An index of photos below `out`; again on a folder that has grown it adds what is new.

    sources, engine, address, workers: as of `write_cells`. budget: cells kept of a photo, and with
    `tiles` of every tile of a large one. Photos that are gone or changed are taken out or made anew
    with the shard they are in.
    """
    check_asked(engine, address, workers)
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
    rows = shard_rows(out, about)
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
        raise ValueError(f"{file} is gone, so nothing can be added; remove {out} and index anew")
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

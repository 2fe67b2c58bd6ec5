"""The photos of an index: listed once with names that differ, read and decoded where they are used.

A photo is a file, a member of a tar shard or a row of a Parquet file with the columns photo and
bytes. What is listed can be sent to another machine that sees the same disk.
"""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.core.image import ImageError, decode, image_threads, prepare, problem, read_bytes
from surefeat.data.decode import Item, Place, Skipped, SourceError
from surefeat.data.sources import find_images
from surefeat.model.tiles import is_large

SCALE_EXTRA = "pip install 'surefeat[scale]'"

# Rows of a Parquet file that are held at once while it is read.
_ROWS = 64


@dataclass(frozen=True)
class ListedPhoto:
    """One photo, not yet read."""

    name: str
    """As the source lists it, UTF-8; no other photo of the run has it."""
    read: Place
    """Where its bytes are; the path is absolute."""
    row: int | None = None
    """Row of the Parquet file that `read` names; None: `read` says it all."""

    def state(self) -> str:
        """Size and time of its file, and its place in it: others, where it was replaced."""
        try:
            info = os.stat(self.read.path)
        except OSError:
            return "missing"
        place = f"{self.read.offset} {self.read.size} {self.row}"
        return f"{info.st_size} bytes, {info.st_mtime_ns}, {place}"


@dataclass(frozen=True)
class DecodedPhoto:
    """What the network is given of a photo, or why there is nothing."""

    photo: ListedPhoto
    pixels: Tensor | None = None
    """(3, h, w) uint8 at the network's size."""
    frame: Frame | None = None
    refused: str = ""
    whole: Tensor | None = None
    """(3, H, W) uint8 at its own size, where it is large and to be seen in tiles."""


def list_photos(sources: Sequence[str | Path]) -> list[ListedPhoto]:
    """The photos of folders, lists, tar shards, Parquet files and single files, in order.

    Of several folders the photos keep the folder's name, so that equal names below them differ.
    Equal names otherwise are an error. Broken photos are listed as refused.
    """
    if not sources:
        raise ValueError("no photos are given; name folders, tar shards, lists or Parquet files")
    photos: list[ListedPhoto] = []
    for source in sources:
        above = Path(source).name if len(sources) > 1 and Path(source).is_dir() else ""
        photos += _of_source(source, above)
    first: dict[str, ListedPhoto] = {}
    for photo in photos:
        other = first.setdefault(photo.name, photo)
        if other is not photo:
            where = f"{other.read.path} and {photo.read.path}"
            raise SourceError(f"two photos are named {photo.name} ({where}); extract them apart")
    return photos


def _of_source(source: str | Path, above: str) -> list[ListedPhoto]:
    text = str(source)
    if text.endswith(".json"):
        fix = "pass the folder or tar shards with its photos"
        raise SourceError(f"{source} is a COCO json, which cuts out boxes; {fix}")
    if text.endswith(".parquet"):
        files = [text] if os.path.exists(text) else sorted(glob.glob(text))
        if not files:
            raise SourceError(f"no Parquet file at {source}; check the path")
        return [photo for file in files for photo in _rows(os.path.abspath(file))]
    return [_listed(item, above) for item in find_images(source)]


def _listed(item: Item, above: str) -> ListedPhoto:
    name = os.path.join(above, item.name).encode("utf-8", "backslashreplace").decode()
    place = item.read
    return ListedPhoto(
        name, Place(os.path.abspath(place.path), place.offset, place.size, place.refused)
    )


def _rows(path: str) -> list[ListedPhoto]:
    """The photos of a Parquet file, by the names in its column `photo`."""
    with _parquet(path) as file:
        columns = set(file.schema_arrow.names)
        if not {"photo", "bytes"} <= columns:
            fix = "it needs the columns photo (text) and bytes (an image file's bytes)"
            raise SourceError(f"{path} has the columns {', '.join(sorted(columns))}; {fix}")
        names = file.read(columns=["photo"]).column("photo").to_pylist()
    if not names:
        raise SourceError(f"{path} has no rows; pass another file")
    return [ListedPhoto(str(name), Place(path), row) for row, name in enumerate(names)]


def _parquet(path: str) -> Any:
    parquet = import_parquet()
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise SourceError(f"{path} is no whole Parquet file ({error}); copy it anew") from error


def import_parquet() -> Any:
    """pyarrow.parquet, or what to install."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"Parquet files need pyarrow: {SCALE_EXTRA}") from error
    return parquet


def decode_photos(
    photos: Sequence[ListedPhoto],
    *,
    longest_side: int,
    multiple: int,
    threads: int = 0,
    tiles: bool = False,
) -> Iterator[DecodedPhoto]:
    """The photos in their order at the network's size; a broken one says so.

    tiles: large ones come at their own size too.
    threads: that many decode ahead of what is asked for; 0: nothing is done beforehand.
    """

    def one(photo: ListedPhoto, data: bytes | None) -> DecodedPhoto:
        return _decoded(photo, data, longest_side, multiple, tiles=tiles)

    if threads < 1:
        yield from (one(photo, data) for photo, data in _read(photos))
        return
    waiting: deque[Future[DecodedPhoto]] = deque()
    with image_threads(threads) as pool:
        for photo, data in _read(photos):
            waiting.append(pool.submit(one, photo, data))
            if len(waiting) > 4 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def read_photo(photo: ListedPhoto) -> Tensor:
    """One photo at its own size: RGB (3, H, W) uint8; ImageError: it cannot be read."""
    ((_, data),) = _read([photo])
    return _pixels(photo, data)


def _pixels(photo: ListedPhoto, data: bytes | None) -> Tensor:
    if photo.read.refused:
        raise problem(photo.name, photo.read.refused)
    if data is None:
        place = photo.read
        data = read_bytes(place.path, name=photo.name, offset=place.offset, size=place.size)
    return decode(data, name=photo.name)


def _decoded(
    photo: ListedPhoto, data: bytes | None, longest_side: int, multiple: int, *, tiles: bool
) -> DecodedPhoto:
    try:
        image = _pixels(photo, data)
        pixels, frame = prepare(image, longest_side=longest_side, multiple=multiple)
    except ImageError as error:
        return DecodedPhoto(photo, refused=error.reason)
    large = tiles and is_large(frame.original, side=longest_side)
    return DecodedPhoto(photo, pixels, frame, whole=image if large else None)


def _read(photos: Sequence[ListedPhoto]) -> Iterator[tuple[ListedPhoto, bytes | None]]:
    """The photos with the bytes of those that are rows; files are left to who decodes them."""
    for path, group in groupby(photos, key=lambda p: None if p.row is None else p.read.path):
        if path is None:
            yield from ((photo, None) for photo in group)
        else:
            yield from _read_rows(path, list(group))


def _read_rows(path: str, photos: list[ListedPhoto]) -> Iterator[tuple[ListedPhoto, bytes]]:
    """Rows in growing order; only the row groups that hold them are read."""
    wanted = {photo.row: photo for photo in photos if photo.row is not None}
    start, last = 0, max(wanted)
    with _parquet(path) as file:
        for number in range(file.metadata.num_row_groups):
            stop = start + file.metadata.row_group(number).num_rows
            if any(start <= row < stop for row in wanted):
                batches = file.iter_batches(_ROWS, row_groups=[number], columns=["bytes"])
                values = (value for batch in batches for value in batch.column(0))
                for row, value in enumerate(values, start):
                    if row in wanted:
                        yield wanted[row], value.as_py() or b""
                    if row == last:
                        return
            start = stop


def skipped_of(decoded: DecodedPhoto) -> Skipped:
    """The entry of a broken photo in the list of those that were left out."""
    return Skipped(decoded.photo.name, decoded.refused)

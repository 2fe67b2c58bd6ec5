"""Small image files and tar shards of them, and the names of what is found."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from hostile import add_member, encode
from surefeat.data.items import Item


def write(path: Path, *, size: tuple[int, int] = (10, 8), colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {"jpg": "JPEG", "tif": "TIFF"}.get(path.suffix[1:], path.suffix[1:].upper())
    path.write_bytes(encode(Image.new("RGB", size, colour), kind))
    return path


def shard(path: Path, members: dict[str, np.ndarray]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, image in members.items():
            add_member(tar, name, encode(Image.fromarray(image), "PNG"))
    return path


def gradient(height: int, width: int) -> np.ndarray:
    """Red is the column, green the row: a crop shows where it was cut."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8)


def names(items: list[Item]) -> list[str]:
    return [item.name for item in items]

"""Where training images come from: folders, lists, tar shards, COCO files; and how they are decoded.

Finding and decoding are separate: `find_images` opens no image, so it is fast and its items can be
decoded by threads (`decode_all`) or worker processes (`CanvasStream`). A bad file never stops
either: it is skipped, and named with the reason.
"""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from surefeat.image import EXTENSIONS, ImageError, decode, problem, read_bytes, resize

Box = tuple[float, float, float, float]
_LOG = logging.getLogger(__name__)


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
    """One training image, not yet decoded."""

    name: str
    """Readable: the path below the source, or shard.tar/member; #id of the annotation for a crop."""
    read: Place
    crop: Box | None = None
    """Inclusive (x1, y1, x2, y2), original pixels; it may reach beyond the image."""
    label: str | None = None
    """Category of the crop, where known."""


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


def find_images(
    source: str | Path,
    *,
    images: str | Path | None = None,
    crop: str | Path | None = None,
    keep: str | Path | None = None,
    categories: tuple[str, ...] | None = None,
    context: float = 0.0,
    min_side: int = 32,
) -> list[Item]:
    """The images of a folder, a list, tar shards (file, folder or glob) or a COCO json, in order.

    `images` is where the names in a list or COCO json are looked up (a folder or tar shards; default:
    beside that file). `crop` is a COCO json whose boxes are cut from the images of `source`; a COCO
    json as `source` does the same with its own images. `keep` is a list of the names (with or without
    extension) to keep. For boxes: `categories` filters by name, `context` grows a box by that share
    of its size per side, and boxes with a side under `min_side` pixels are dropped.
    """
    is_coco = str(source).lower().endswith(".json")
    if is_coco and crop is not None:
        raise SourceError(f"{source} and {crop} are both COCO files; pass the images as the source")
    kept = None if keep is None else set(_lines(Path(keep)))
    coco = source if is_coco else crop
    if coco is None:
        found = _files(source, images)
    else:
        found = _crops(
            Path(coco),
            dict(reversed(_files(source, images))) if not is_coco else images or Path(coco).parent,
            categories=categories, context=context, min_side=min_side,
        )
    items = [item for name, item in found if kept is None or kept & {name, _stem(name)}]
    if all(item.read.refused for item in items):
        kept_by = "" if keep is None else f", only those in {keep}"
        reason = f"; the first of {len(items)} refused: {items[0].read.refused}" if items else ""
        looked = " ".join(EXTENSIONS)
        raise SourceError(
            f"no images under {source} (looked for {looked}{kept_by}){reason}; pass another folder"
        )
    return items

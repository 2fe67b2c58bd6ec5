"""Where in these photos is this part? The best cells of an index, verified photo by photo.

A point of a photo is described as the cells of the index are, and the index names the best cell of
each of some photos. These photos are then read again and matched with the one that was asked: the
point goes there and back, with votes and probability as any match. Convention: points are original
pixels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.image import ImageError, ImageLike, load, problem
from surefeat.data.decode import Place, Skipped, SourceError
from surefeat.index.cells import described
from surefeat.index.photos import ListedPhoto, list_photos, read_photo
from surefeat.index.search import CellHit, PartIndex, Search
from surefeat.match.large import Part, cut_part
from surefeat.match.points import check_inside, match_points
from surefeat.model.features import Features, stack_points
from surefeat.model.network import DenseFeatures
from surefeat.model.tiles import boxes_around, is_large, levels

COUNT = 20
"""Photos that are looked at more closely and shown."""

AGREE = 0.1
"""Of the parts of a large photo, those count first in which matching leads to the cell that was
found, up to this share of their longer side."""


@dataclass(frozen=True)
class PartHit:
    """The part in one photo."""

    photo: str
    """As the index lists it."""
    point: tuple[float, float]
    """x, y: where matching puts it; without verification the cell's centre."""
    probability: float | None
    """That it is this part; None: not verified, or the model has no fitted Reliability."""
    returns: bool | None
    """Matching back leads to the place that was asked for; None: not verified."""
    score: float
    """Similarity of the cell by which the photo was found."""
    confidence: float
    """Of that cell, 1/sigma."""
    cell: tuple[float, float]
    """x, y of that cell."""
    size: tuple[int, int]
    """(height, width) of the photo."""
    seen: Part
    """Inclusive box of the photo in which it was matched: all of it, or a part of a large one."""


@dataclass(frozen=True)
class PartSearch:
    """What was asked, and the answer."""

    photo: str
    point: tuple[float, float]
    hits: tuple[PartHit, ...]
    """The surest first."""
    missing: tuple[Skipped, ...]
    """Photos of the index that can no longer be read, and why."""
    photos: int
    """Of the index."""
    cells: int
    search: Search
    pictures: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Photo -> (3, H, W) uint8 of the hits, as they were read to verify them."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "photo": self.photo, "point": list(self.point), "photos": self.photos,
            "cells": self.cells, "search": self.search,
            "hits": [{k: list(v) if isinstance(v, tuple) else v for k, v in vars(hit).items()}
                     for hit in self.hits],
            "missing": [{"photo": s.name, "reason": s.reason} for s in self.missing],
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class _View:
    """A part of the photo that was asked, and the point in it."""

    features: Features
    point: Tensor
    """(1, 2) pixels of the part."""


@torch.inference_mode()
def find_part(
    image: ImageLike,
    point: Sequence[float],
    index: PartIndex | str | Path,
    *,
    model: str | Path | DenseFeatures | None = None,
    count: int = COUNT,
    verify: bool = True,
    quiet: bool = True,
) -> PartSearch:
    """Where the part at a point (x, y) of an image is in the photos of an index.

    The `count` photos with the best cells are read again and matched with the image, and those that
    can no longer be read are listed. The image itself, where it is one of the photos, is left out.
    """
    if count < 1:
        raise ValueError(f"count is {count}; use at least 1")
    if not isinstance(model, DenseFeatures):
        model = DenseFeatures.from_pretrained(model)
    if not isinstance(index, PartIndex):
        index = PartIndex.open(index, weights=model.weights_hash())
    pixels, asked = load(image), stack_points(point)
    check_inside(asked, (pixels.shape[1], pixels.shape[2]))
    tiles = index.about.settings.tiles
    views = _views(model, pixels, asked, tiles=tiles)
    vectors = torch.cat([described(v.features, v.point, index.projection) for v in views])
    name = str(image) if isinstance(image, str | Path) else ""
    find = _finder(index.about.sources)
    # One more than asked for: the image itself may be among them.
    hits = [hit for hit in index.best(vectors, count=count + 1) if not _is_same(name, find(hit))]
    plain = [_unverified(hit) for hit in hits[:count]]
    missing: list[Skipped] = []
    pictures: dict[str, Tensor] = {}
    if verify:
        plain = _verified(
            model, views, hits[:count], find, missing, pictures, tiles=tiles, quiet=quiet
        )
        # Without a probability, those that return, by similarity.
        plain.sort(key=lambda h: (h.probability or 0.0, bool(h.returns), h.score), reverse=True)
    x, y = asked[0].tolist()
    return PartSearch(
        name, (x, y), tuple(plain), tuple(missing), len(index.photos), len(index), index.search,
        pictures,
    )  # fmt: skip


def _views(model: DenseFeatures, pixels: Tensor, asked: Tensor, *, tiles: bool) -> list[_View]:
    """The photo as a whole; where it is large and tiles are wanted, its parts around the point."""
    boxes = _looked_at((pixels.shape[1], pixels.shape[2]), asked, model, tiles=tiles)
    views = []
    for box in boxes:
        (features,) = model.extract(cut_part(pixels, box))
        views.append(_View(features, asked - asked.new_tensor(box[:2])))
    return views


def _looked_at(
    size: tuple[int, int], point: Tensor, model: DenseFeatures, *, tiles: bool
) -> list[Part]:
    side = model.config.longest_side
    if not tiles or not is_large(size, side=side):
        return [(0, 0, size[1] - 1, size[0] - 1)]
    return boxes_around(point, size, levels(size, side=side, stride=model.stride), side=side)


def _unverified(hit: CellHit) -> PartHit:
    whole = (0, 0, hit.size[1] - 1, hit.size[0] - 1)
    return PartHit(hit.photo, hit.point, None, None, hit.score, hit.confidence, hit.point,
                   hit.size, whole)  # fmt: skip


def _verified(
    model: DenseFeatures,
    views: Sequence[_View],
    hits: Sequence[CellHit],
    find: Callable[[CellHit], ListedPhoto],
    missing: list[Skipped],
    pictures: dict[str, Tensor],
    *,
    tiles: bool,
    quiet: bool,
) -> list[PartHit]:
    """Hits whose photos were read again and matched; what cannot be read goes to `missing`."""
    done = []
    for hit in progress.bar(hits, desc="verifying", unit="photo", quiet=quiet, leave=False):
        try:
            pixels = read_photo(find(hit))
            if (pixels.shape[1], pixels.shape[2]) != hit.size:
                what = "has another size than when it was indexed; index again"
                raise problem(hit.photo, what)
        except ImageError as error:
            missing.append(Skipped(hit.photo, error.reason))
            continue
        pictures[hit.photo] = pixels
        place = torch.tensor([hit.point])
        boxes = _looked_at(hit.size, place, model, tiles=tiles)
        seen = [(box, model.extract(cut_part(pixels, box))[0]) for box in boxes]
        tried = [_matched(view, features, hit, box) for box, features in seen for view in views]
        done.append(max(tried, key=lambda one: one[0])[1])
    return done


def _matched(
    view: _View, features: Features, hit: CellHit, box: Part
) -> tuple[tuple[bool, float], PartHit]:
    """The point matched into a part of a photo and back.

    First whether it leads to the cell that was found, and how sure that is.
    """
    matches = match_points(view.features, features, view.point)
    x, y = (matches.points1[0].cpu() + torch.tensor(box[:2])).tolist()
    chance = None if matches.probability is None else float(matches.probability[0])
    checked = replace(
        _unverified(hit), point=(x, y), probability=chance, returns=bool(matches.mutual[0]),
        seen=box,
    )  # fmt: skip
    reach = AGREE * max(box[2] - box[0] + 1, box[3] - box[1] + 1)
    agrees = math.dist((x, y), hit.point) <= reach
    sure = float(matches.trusted_score[0]) if chance is None else chance
    return (agrees, sure), checked


def _finder(sources: Sequence[str]) -> Callable[[CellHit], ListedPhoto]:
    """Where the photo of a hit lies, by the sources of the index.

    Files of a folder are asked for by their name; only for tar shards, lists and Parquet files are
    the sources listed anew, once.
    """
    listed: dict[str, ListedPhoto] = {}

    def find(hit: CellHit) -> ListedPhoto:
        for source in sources:
            if os.path.isdir(source):
                below = os.path.dirname(source) if len(sources) > 1 else source
                path = os.path.join(below, hit.photo)
                if os.path.isfile(path):
                    return ListedPhoto(hit.photo, Place(path))
            elif os.path.basename(source) == hit.photo and os.path.isfile(source):
                return ListedPhoto(hit.photo, Place(source))
        if not listed:
            with suppress(SourceError):  # all of it is gone
                listed.update({photo.name: photo for photo in list_photos(sources)})
        gone = (
            f"is no longer where it was indexed ({', '.join(sources)}); put it back, or index again"
        )
        return listed.get(hit.photo) or ListedPhoto(hit.photo, Place(hit.photo, refused=gone))

    return find


def _is_same(name: str, photo: ListedPhoto) -> bool:
    """Whether a photo of the index is the file that was asked about."""
    whole = photo.row is None and photo.read.size is None and not photo.read.refused
    return bool(name) and whole and os.path.samefile(name, photo.read.path)

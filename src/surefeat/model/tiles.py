"""Large photos: seen in overlapping tiles at a finer scale, joined into one set of features.

A network that sees a photo of 6,000 pixels at 320 sees nothing of a part of 40. Here the photo goes
through it in tiles, with its own pixels, and the tiles' maps are stitched: one map, one frame, all
questions in original pixels. Where tiles overlap they fade into each other, elsewhere a cell is its
tile's own. Things may be of any size in a large photo, so whoever looks for one looks at several
levels, each about twice as fine as the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.core.image import network_size, resize
from surefeat.model.features import Features

if TYPE_CHECKING:
    from surefeat.model.network import DenseFeatures
    from surefeat.model.probability import Reliability

LARGE = 2.0
"""A photo is large, and seen in tiles where that is asked for, if its longest side has more than
this many times the side at which the network sees photos."""

TILE = 2.0
"""Of a tile, in sides at which the network sees photos: half as large a tile would be seen for a
fifth more time, as more of it is overlap."""

OVERLAP = 0.25
"""Of neighbouring tiles at least, in sides at which the network sees photos."""

MOST_CELLS = 100_000
"""Of a stitched map: a photo of 25 megapixels at stride 16, and 0.6 GB in half precision for the
3,200 channels of the default model. A larger photo is seen at a coarser scale."""

_BATCH = 4


def is_large(size: tuple[int, int], *, side: int) -> bool:
    """Whether a photo of this (height, width) has more than a network sees at this side."""
    return max(size) > LARGE * side


def finest_side(size: tuple[int, int], *, side: int, stride: int) -> int:
    """The longest side, network pixels, at which a photo of this (height, width) is stitched.

    Its own, so that nothing is enlarged, or what MOST_CELLS allow; of one that is not large `side`.
    """
    if not is_large(size, side=side):
        return side
    most = stride * math.sqrt(MOST_CELLS * max(size) / min(size))
    return min(max(size), int(most))


def levels(size: tuple[int, int], *, side: int, stride: int) -> tuple[int, ...]:
    """The longest sides at which a large photo is looked at, the coarsest, `side`, first.

    Each is about twice the one before, and the last is the finest.
    """
    finest = finest_side(size, side=side, stride=stride)
    steps = max(1, round(math.log2(finest / side))) if finest > side else 0
    return tuple(round(side * (finest / side) ** (n / max(steps, 1))) for n in range(steps + 1))


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """First cells of tiles that cover `length` cells evenly and share at least `overlap`."""
    if tile >= length:
        return [0]
    count = math.ceil((length - overlap) / (tile - overlap))
    return [round(n * (length - tile) / (count - 1)) for n in range(count)]


@torch.inference_mode()
def extract_tiled(
    model: DenseFeatures, pixels: Tensor, *, longest_side: int, side: int, name: str = ""
) -> Features:
    """Features of a photo (3, H, W) uint8 at `longest_side` network pixels, stitched from tiles.

    side: at which the network sees whole photos; tiles follow from it. Maps are kept in half
    precision. A probability of matches holds for photos seen whole: `windows` gives it back.
    """
    stride = model.stride
    original = (pixels.shape[1], pixels.shape[2])
    size = network_size(original, longest_side=longest_side, multiple=stride)
    shown = resize(pixels, size=size)
    rows, columns = size[0] // stride, size[1] // stride
    overlap = max(1, round(OVERLAP * side / stride))
    tile = max(2 * overlap + 1, round(TILE * side / stride))
    places = [
        (y, x)
        for y in tile_starts(rows, tile, overlap)
        for x in tile_starts(columns, tile, overlap)
    ]
    high, wide = (min(tile, cells) * stride for cells in (rows, columns))
    stitch = _Stitch((rows, columns), overlap)
    frame = Frame((high, wide), (high, wide))
    for start in range(0, len(places), _BATCH):
        group = []
        for number, (y, x) in enumerate(places[start : start + _BATCH], start):
            top, left = y * stride, x * stride
            group.append((number, shown[:, top : top + high, left : left + wide], frame, ""))
        for number, features in model.extract_group(group):
            stitch.add(features, places[number])
    return replace(stitch.joined(), frame=Frame(original, size), stride=stride, name=name)


class _Stitch:
    """The maps of a whole photo, added up tile by tile."""

    def __init__(self, size: tuple[int, int], overlap: int) -> None:
        self.size, self.overlap = size, overlap
        self.maps: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.last = 0

    def add(self, features: Features, place: tuple[int, int]) -> None:
        """A tile whose first cell lies at (row, column)."""
        maps = {"descriptors": features.descriptors, "lower": features.lower,
                "uncertainty": features.uncertainty[None]}  # fmt: skip
        if features.common is not None and features.common_kind is not None:
            maps |= {"common": features.common[None], "common_kind": features.common_kind[None]}
            self.last = features.last
        for name, values in maps.items():
            # A lower layer may be finer than the descriptors.
            finer = values.shape[-1] // features.descriptors.shape[-1]
            (height, width), (y, x) = (
                tuple(finer * n for n in pair) for pair in (self.size, place)
            )
            if name not in self.maps:
                kind = torch.float16 if len(values) > 1 else torch.float32
                self.maps[name] = values.new_zeros(len(values), height, width, dtype=kind)
                self.weights[name] = values.new_zeros(height, width)
            rows, columns = slice(y, y + values.shape[1]), slice(x, x + values.shape[2])
            down, across = (
                _fading(first, count, whole, finer * self.overlap).to(values.device)
                for first, count, whole in (
                    (y, values.shape[1], height),
                    (x, values.shape[2], width),
                )
            )
            weight = down[:, None] * across
            self.maps[name][:, rows, columns] += (values * weight).to(self.maps[name].dtype)
            self.weights[name][rows, columns] += weight

    def joined(self) -> Features:
        """Means by weight, unit length again; frame and stride are the caller's."""
        for name, maps in self.maps.items():
            # A copy of all channels at once would double the memory.
            for values in torch.split(maps, 256):
                values /= self.weights[name]
            if name in ("descriptors", "lower"):
                length = torch.zeros_like(self.weights[name])
                for values in torch.split(maps, 256):
                    length += values.float().square().sum(0)
                for values in torch.split(maps, 256):
                    values /= length.sqrt().clamp_min(1e-6)
        common, kind = (
            self.maps[name][0] if name in self.maps else None for name in ("common", "common_kind")
        )
        return Features(
            self.maps["descriptors"], self.maps["uncertainty"][0], self.maps["lower"],
            Frame(self.size, self.size), 1, common=common, common_kind=kind, last=self.last,
        )  # fmt: skip


def _fading(first: int, count: int, whole: int, overlap: int) -> Tensor:
    """(count,) weights of a tile's cells along one side: less near an edge inside the photo."""
    steps = torch.arange(count)
    before = steps + 1 if first > 0 else torch.full_like(steps, overlap)
    after = count - steps if first + count < whole else torch.full_like(steps, overlap)
    return torch.minimum(before, after).clamp_max(overlap).float() / overlap


@dataclass(frozen=True, eq=False)
class Window:
    """A part of a photo, as features of its own."""

    features: Features
    """As of a photo that shows this part alone."""
    box: tuple[int, int, int, int]
    """Inclusive (x1, y1, x2, y2), original pixels of the whole photo."""
    first: tuple[int, int] = (0, 0)
    """Row and column of its first cell in the whole photo's map."""


def windows(
    features: Features, *, side: int, overlap: float = 0.5, reliability: Reliability | None = None
) -> Iterator[Window]:
    """The parts of a stitched map that a network sees at `side`, row by row.

    What is at most as large as their overlap, a share of a part, lies whole in one of them.
    reliability: of the model, which holds for parts of this side.
    """
    rows, columns = features.descriptors.shape[1:]
    cells = max(2, round(side / features.stride))
    shared = int(overlap * cells)
    for y in tile_starts(rows, cells, shared):
        for x in tile_starts(columns, cells, shared):
            yield window(features, (y, x), (min(cells, rows), min(cells, columns)), reliability)


def window(
    features: Features,
    first: tuple[int, int],
    size: tuple[int, int],
    reliability: Reliability | None = None,
) -> Window:
    """The cells from `first` (row, column) on, `size` (rows, columns) of them.

    Its box is rounded to whole pixels, so places move by less than a pixel of the network.
    """
    whole = features.descriptors.shape[1:]
    (y, x), (rows, columns) = first, size
    finer = features.lower.shape[-1] // whole[1]
    (height, width) = features.frame.original
    edges = [
        round(cell * pixels / cells)
        for cell, pixels, cells in (
            (x, width, whole[1]), (y, height, whole[0]),
            (x + columns, width, whole[1]), (y + rows, height, whole[0]),
        )
    ]  # fmt: skip
    box = (edges[0], edges[1], max(edges[2], edges[0] + 1) - 1, max(edges[3], edges[1] + 1) - 1)
    cut = (slice(None), slice(y, y + rows), slice(x, x + columns))
    fine = (slice(None), slice(finer * y, finer * (y + rows)),
            slice(finer * x, finer * (x + columns)))  # fmt: skip
    network = (rows * features.stride, columns * features.stride)
    holds = reliability is not None and reliability.holds_at(network)
    seen = replace(
        features,
        descriptors=features.descriptors[cut].float(),
        uncertainty=features.uncertainty[cut[1:]],
        lower=features.lower[fine].float(),
        frame=Frame((box[3] - box[1] + 1, box[2] - box[0] + 1), network),
        reliability=reliability if holds else None,
        common=None if features.common is None else features.common[cut[1:]],
        common_kind=None if features.common_kind is None else features.common_kind[cut[1:]],
    )
    return Window(seen, box, first)


def boxes_around(
    points: Tensor, size: tuple[int, int], sides: Sequence[int], *, side: int
) -> list[tuple[int, int, int, int]]:
    """Of every level a box around points (N, 2), inclusive, original pixels, inside the photo.

    As large as what a network sees there at `side`, but with all points in it; the whole photo is
    one of them.
    """
    height, width = size
    boxes: list[tuple[int, int, int, int]] = []
    low, high = points.amin(0).tolist(), points.amax(0).tolist()
    for longest in sides:
        extent = side * max(size) / longest
        corners = []
        for first, last, pixels in ((low[0], high[0], width), (low[1], high[1], height)):
            wanted = min(pixels, round(max(extent, 1.2 * (last - first) + 1)))
            start = min(max(0, round((first + last + 1 - wanted) / 2)), pixels - wanted)
            corners.append((start, start + wanted - 1))
        (x1, x2), (y1, y2) = corners
        if (x1, y1, x2, y2) not in boxes:
            boxes.append((x1, y1, x2, y2))
    return boxes

"""A few-shot benchmark that is drawn in a second, and a row of features that knows the answer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.image import Image
from surefeat.data.items import Place
from surefeat.data.keypoints import KeypointSet, Labelled, make_category, write_coco
from surefeat.measure.fewshot_settings import FewShot
from surefeat.measure.rows import DenseRow

KINDS = (
    make_category("cart", ("left_wheel", "right_wheel", "flag")),
    make_category("kite", ("head", "tail")),
)
COLOURS = torch.tensor(
    [[255, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0]], dtype=torch.uint8
)
"""Of the keypoints of both kinds, in order; the two wheels look alike."""
SIDE = 48
"""Pixels of a crop."""
SETTINGS = FewShot(
    rounds=(1, 3, "all"), seeds=2, side=SIDE, cells=12, views=4, least_views=16, hidden=16,
    epochs=1, least_steps=25, batch=8, learning_rate=1e-2,
)  # fmt: skip


def write_photos(folder: Path, *, count: int, seed: int, first: int = 0) -> KeypointSet:
    """Photos of 1 object each, every third with 2; coloured squares of 5 x 5 pixels on grey."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    found: list[Labelled] = []
    for number in range(first, first + count):
        path = folder / f"{number:03d}.png"
        pixels = torch.full((3, 70, 130), 128, dtype=torch.uint8)
        size = (70, 130)
        for place in range(2 if number % 3 == 0 else 1):
            box = torch.tensor([4.0 + 62 * place, 6.0, 62.0 + 62 * place, 62.0])
            kind = (number + place) % 2
            points = _draw(pixels, box, kind, generator)
            visible = torch.rand(len(points), generator=generator) < 0.9
            visible[0] = True
            points = torch.where(visible[:, None], points, torch.nan)
            found.append(Labelled(Place(str(path)), path.name, kind, box, points, visible, size))
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return KeypointSet(KINDS, tuple(found))


def _draw(pixels: Tensor, box: Tensor, kind: int, generator: torch.Generator) -> Tensor:
    """Squares at random places, in different rows; a left wheel lies left of the middle."""
    count, x1, y1 = len(KINDS[kind].keypoints), int(box[0]), int(box[1])
    rows = torch.randperm(count, generator=generator)
    places = torch.rand(count, 2, generator=generator)
    points = []
    for part in range(count):
        x = x1 + 4 + int(places[part, 0] * 50)
        if kind == 0 and part < 2:
            x = x1 + 4 + int(places[part, 0] * 18) + 32 * part
        y = y1 + 5 + int((rows[part] + 0.6 * places[part, 1]) * 50 / count)
        pixels[:, y - 2 : y + 3, x - 2 : x + 3] = COLOURS[3 * kind + part][:, None, None]
        points.append((float(x), float(y)))
    return torch.tensor(points)


def write_benchmark(root: Path) -> Path:
    """keypoints_train.json and keypoints_val.json with their photos beside them."""
    for split, first in (("train", 0), ("val", 100)):
        found = write_photos(root, count=18, seed=first, first=first)
        write_coco(root / f"keypoints_{split}.json", found)
    return root


def colours(crops: Tensor, *, cells: int = 12) -> Tensor:
    """Each cell's share of every colour, and its place: (B, 3, S, S) -> (B, 6, cells, cells)."""
    known = torch.unique(COLOURS, dim=0).float()
    distance = (crops.float()[:, None] - known[None, :, :, None, None]).square().sum(2)
    share = F.adaptive_avg_pool2d((-distance / 2 / 60**2).exp(), cells)
    x = torch.linspace(-1, 1, cells).expand(len(crops), 1, cells, cells)
    return torch.cat([share, x, x.transpose(2, 3)], dim=1)


def oracle() -> DenseRow:
    return DenseRow("colours", colours, settings={"cells": 12})

"""SPair-71k (Min et al. 2019): 18 categories, pairs with annotated boxes.

Layout: PairAnnotation/<split>/*.json and JPEGImages/<category>/*.jpg. Coordinates are taken as
they stand, first pixel 0, as the data set's own evaluator does; its boxes (x1, y1, x2, y2) name
their last pixel, which is our inclusive box.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.data.pairs import Pair, make_pair

SPLITS = ("trn", "val", "test")
FIELDS = ("src_imname", "trg_imname", "category", "src_kps", "trg_kps", "src_bndbox", "trg_bndbox")

TOLERANCE = 1.0
"""Pixels a keypoint may lie outside: the annotation tool names the last pixel W or W - 1."""


def load_spair(root: str | Path, split: str = "test") -> list[Pair]:
    """The pairs of one split ("trn", "val" or "test"), in the order of their file names."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; SPair-71k has {', '.join(SPLITS)}")
    root = Path(root)
    if not (root / "PairAnnotation").is_dir() and (root / "SPair-71k").is_dir():
        root = root / "SPair-71k"
    folder = root / "PairAnnotation" / split
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"no pair annotations (*.json) in {folder}; pass SPair-71k's own folder")
    return [read_pair(path, root / "JPEGImages") for path in files]


def read_pair(path: Path, images: Path) -> Pair:
    """One pair annotation file; images lie in `images`/<category>/."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    missing = [field for field in FIELDS if field not in content]
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)}; fetch SPair-71k again")
    category = str(content["category"])
    if not (images / category).is_dir():
        raise ValueError(f"{path}: unknown category {category!r}, there is no {images / category}")
    points0, points1 = (_numbers(content[f], (-1, 2), path, f) for f in ("src_kps", "trg_kps"))
    for each in (points0, points1):
        each[(each == -1).all(-1)] = torch.nan
    box0, box1 = (_numbers(content[f], (4,), path, f) for f in ("src_bndbox", "trg_bndbox"))
    image0, image1 = (images / category / str(content[f]) for f in ("src_imname", "trg_imname"))
    boxes = (box0, box1)
    return make_pair(image0, image1, category, points0, points1, TOLERANCE, str(path), boxes)


def _numbers(value: object, shape: tuple[int, ...], path: Path, field: str) -> Tensor:
    try:
        numbers = torch.tensor(value, dtype=torch.float32).reshape(shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: {field} is malformed ({error})") from error
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"{path}: {field} holds a number that is not finite")
    return numbers

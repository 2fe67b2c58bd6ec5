"""Coloured ellipses on clutter with labels and proposals, and a detector that learns them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from surefeat.boxes.config import BoxesConfig, DetectorConfig, LearnConfig, SelectConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.run import fit_boxes
from surefeat.data.labels import find_labels
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import Proposals, key_of, write_proposals

SIDE = 96
COLOURS = {"ruby": (220, 40, 40), "leaf": (40, 190, 60), "sky": (50, 70, 220)}
Box = tuple[float, float, float, float]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clutter(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    picture = np.full((SIDE, SIDE, 3), float(generator.integers(60, 200)))
    for _ in range(25):
        h, w = generator.integers(8, 32, 2)
        y, x = generator.integers(0, SIDE - h), generator.integers(0, SIDE - w)
        picture[y : y + h, x : x + w] = generator.integers(30, 230) + generator.normal(0, 15, 3)
    return picture


def scene(name: str, seed: int) -> tuple[np.ndarray[Any, Any], Box]:
    """An ellipse of the category's colour anywhere on grey clutter, and its box."""
    generator = np.random.default_rng([seed, list(COLOURS).index(name)])
    picture = clutter(generator)
    h, w = (int(value) for value in generator.integers(30, 50, 2))
    y, x = int(generator.integers(0, SIDE - h)), int(generator.integers(0, SIDE - w))
    rows, columns = np.indices((h, w))
    inside = np.hypot((2 * rows - h + 1) / h, (2 * columns - w + 1) / w) <= 1
    picture[y : y + h, x : x + w][inside] = COLOURS[name] + generator.normal(0, 20, 3)
    picture += generator.normal(0, 12, picture.shape)
    return picture.clip(0, 255).astype(np.uint8), (x, y, x + w - 1, y + h - 1)


def random_proposals(seed: int, count: int) -> Proposals:
    generator = np.random.default_rng([seed, 77])
    sides = generator.integers(24, 64, (count, 2))
    corners = (generator.random((count, 2)) * (SIDE - sides)).astype(int)
    return Proposals(torch.tensor(np.concatenate([corners, corners + sides - 1], axis=1)).float())


def make(folder: Path, *, count: int, seed: int = 0, boxes: int = 80) -> Path:
    """photos/CATEGORY/i.png, truth.json beside them (COCO), and proposals.npz."""
    images, annotations, proposals = [], [], {}
    for kind, name in enumerate(COLOURS, start=1):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(count):
            picture, (x1, y1, x2, y2) = scene(name, seed + i)
            path = folder / "photos" / name / f"{i}.png"
            Image.fromarray(picture).save(path)
            number = len(images) + 1
            images.append({"id": number, "file_name": f"{name}/{i}.png"})
            annotations.append({"id": number, "image_id": number, "category_id": kind,
                                "bbox": [x1, y1, x2 - x1 + 1, y2 - y1 + 1]})  # fmt: skip
            proposals[key_of(path.read_bytes())] = random_proposals(seed + i, boxes)
    categories = [{"id": i, "name": name} for i, name in enumerate(COLOURS, start=1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "truth.json").write_text(json.dumps(content))
    write_proposals(proposals, ProposalConfig(), folder / "proposals.npz")
    return folder


def settings(**learn: Any) -> BoxesConfig:
    loop: dict[str, Any] = {"epochs": 8, "lr": 1e-3, "scales": (SIDE,), "log_every": 20}
    return BoxesConfig(
        detector=DetectorConfig(trunk="small", tap="conv2", hidden=64, pooled=3),
        learn=LearnConfig(**loop | {"checkpoint_every": 0} | learn),
        select=SelectConfig(scales=(SIDE,)),
    )


def fit(folder: Path, out: Path, config: BoxesConfig, **more: Any) -> Detector:
    found = more.pop("found", None) or find_labels(folder / "photos")
    file, init = folder / "proposals.npz", more.pop("init", "none")
    return fit_boxes(
        found, out=out, config=config, init=init, proposals=file, device="cpu", quiet=True, **more
    ).detector

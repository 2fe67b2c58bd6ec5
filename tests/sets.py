"""Small data sets for the tests: benchmarks, scenes with boxes, photos with keypoints."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from surefeat.boxes.config import BoxesConfig, DetectorConfig, LearnConfig, SelectConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.train import fit_boxes
from surefeat.data.coco import make_category
from surefeat.data.decode import Place
from surefeat.data.drawn import correspondences, draw_many, write_folder
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco, write_coco
from surefeat.data.pairs import load_pairs
from surefeat.data.sources import find_labels
from surefeat.keypoints.config import FewShot, KeypointConfig
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import key_of, proposals_of
from surefeat.match.proposals import write_proposals as store_proposals
from surefeat.measure.protocol import Protocol
from surefeat.measure.rows import Row, untrained_row
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from tiny import SIDE

SIZE = 96
"""Pixels of an image of the drawn benchmark, and of a scene with ellipses."""


# A benchmark of drawn pairs, a model for it, and its proposals.

PROTOCOL = Protocol(side=SIZE, proposals=ProposalConfig(count=60))


def write_pairs(folder: Path, *, count: int = 16, most: int = 6) -> Path:
    """Images and pairs.csv in PF-PASCAL's columns; pairs of one category, in both directions."""
    folder.mkdir(parents=True, exist_ok=True)
    instances = draw_many(count, size=SIZE, seed=5)
    for number, one in enumerate(instances):
        Image.fromarray(one.image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    rows = []
    for (i, first), (j, second) in permutations(enumerate(instances), 2):
        if first.category == second.category and len(rows) < most:
            points0, points1 = correspondences(first, second)
            if len(points0) >= 3:
                columns = (";".join(f"{v:.2f}" for v in p) for p in (*points0.T, *points1.T))
                name = CATEGORIES[first.category].name
                rows.append([f"{i}.png", f"{j}.png", name, *columns])
    with (folder / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source_image", "target_image", "class", "XA", "YA", "XB", "YB"])
        writer.writerows(rows)
    return folder / "pairs.csv"


def write_model(folder: Path) -> Path:
    """A small network with random weights."""
    torch.manual_seed(1)
    DenseFeatures(
        ModelConfig(trunk="small", head="linear", channels=16, longest_side=SIZE)
    ).save_pretrained(folder)
    return folder


def write_proposals(listed: Path, file: Path) -> Path:
    """Proposals of the images of a list."""
    images = [path for pair in load_pairs(listed) for path in (pair.image0, pair.image1)]
    proposals_of(images, PROTOCOL.proposals, file=file, quiet=True)
    return file


# Small copies of the public benchmarks, in their own layouts.

HEADER = "source_image,target_image,class,XA,YA,XB,YB"
BOTH = "PF-dataset-PASCAL/JPEGImages/a.jpg,PF-dataset-PASCAL/JPEGImages/b.jpg"


def write_mat(path: Path, content: dict[str, Any]) -> None:
    from scipy.io import savemat

    savemat(path, content)


def picture(path: Path, *, width: int = 40, height: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (90, 120, 60)).save(path)


def willow(root: Path) -> Path:
    for number in range(10):
        folder = root / "PF-dataset-WILLOW" / f"class({number})"
        for image in range(10):
            picture(folder / f"i{image}.png")
            points = np.stack([np.arange(1, 11) + image, np.arange(11, 21)]).astype(float)
            write_mat(folder / f"i{image}.mat", {"pts_coord": points})
    return root


def pascal(root: Path, *rows: str, header: str) -> Path:
    images = root / "PF-dataset-PASCAL"
    for name in ("a", "b"):
        picture(images / "JPEGImages" / f"{name}.jpg")
    for name, points in (
        ("a", [[1, 1], [5, 6], [np.nan, np.nan]]),
        ("b", [[40, 30], [np.nan, 2], [3, 4]]),
    ):
        path = images / "Annotations" / "bicycle" / f"{name}.mat"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mat(path, {"kps": np.array(points, dtype=float), "bbox": np.array([[1, 2, 31, 22]])})
    (root / "image_pairs").mkdir(exist_ok=True)
    text = "\n".join([header, *rows]) + "\n"
    (root / "image_pairs" / "list.csv").write_text(text, encoding="utf-8")
    return root


def development_layout(root: Path, *, val: str, train: str, rebuilt: str) -> Path:
    """PF-PASCAL as published: a test list of c and d, public lists without keypoints, .mat files.

    `rebuilt` rows go to the two lists that carry rebuilt keypoints.
    """
    pascal(root, header=HEADER)
    folder, lists = root / "PF-dataset-PASCAL", root / "image_pairs"
    for name in ("c", "d"):
        picture(folder / "JPEGImages" / f"{name}.jpg")
        content = {"kps": np.full((3, 2), 7.0), "bbox": np.array([[1, 1, 20, 20]])}
        write_mat(folder / "Annotations" / "bicycle" / f"{name}.mat", content)
    there = BOTH.replace("a.jpg", "c.jpg").replace("b.jpg", "d.jpg")
    (lists / "test_pairs.csv").write_text(f"{HEADER}\n{there},2,1,1,1,1\n")
    public = "source_image,target_image,class,flip"
    for split, rows in (("val", val), ("train", train)):
        (lists / f"{split}_pairs.csv").write_text(f"{public}\n{rows}\n")
        (lists / f"{split}_pairs_rebuilt_keypoints.csv").write_text(f"{HEADER}\n{rebuilt}\n")
    return root


def spair(root: Path, **changes: object) -> Path:
    for name in ("a", "b"):
        picture(root / "JPEGImages" / "cat" / f"{name}.jpg")
    content: dict[str, object] = {
        "src_imname": "a.jpg",
        "trg_imname": "b.jpg",
        "category": "cat",
        "src_kps": [[3, 4], [5, 6]],
        "trg_kps": [[7, 8], [39, 29]],
        "src_bndbox": [1, 2, 30, 20],
        "trg_bndbox": [0, 0, 39, 29],
    }
    folder = root / "PairAnnotation" / "test"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**content, **changes})
    (folder / "000001-a-b.json").write_text(text, encoding="utf-8")
    return root


# Ellipses on clutter with labels and proposals, and a detector that learns them.

HUES = {"ruby": (220, 40, 40), "leaf": (40, 190, 60), "sky": (50, 70, 220)}
Box = tuple[float, float, float, float]


def clutter(generator: np.random.Generator) -> np.ndarray[Any, Any]:
    picture = np.full((SIZE, SIZE, 3), float(generator.integers(60, 200)))
    for _ in range(25):
        h, w = generator.integers(8, 32, 2)
        y, x = generator.integers(0, SIZE - h), generator.integers(0, SIZE - w)
        picture[y : y + h, x : x + w] = generator.integers(30, 230) + generator.normal(0, 15, 3)
    return picture


def scene(name: str, seed: int) -> tuple[np.ndarray[Any, Any], Box]:
    """An ellipse of the category's colour anywhere on grey clutter, and its box."""
    generator = np.random.default_rng([seed, list(HUES).index(name)])
    picture = clutter(generator)
    h, w = (int(value) for value in generator.integers(30, 50, 2))
    y, x = int(generator.integers(0, SIZE - h)), int(generator.integers(0, SIZE - w))
    rows, columns = np.indices((h, w))
    inside = np.hypot((2 * rows - h + 1) / h, (2 * columns - w + 1) / w) <= 1
    picture[y : y + h, x : x + w][inside] = HUES[name] + generator.normal(0, 20, 3)
    picture += generator.normal(0, 12, picture.shape)
    return picture.clip(0, 255).astype(np.uint8), (x, y, x + w - 1, y + h - 1)


def random_proposals(seed: int, count: int) -> Tensor:
    generator = np.random.default_rng([seed, 77])
    sides = generator.integers(24, 64, (count, 2))
    corners = (generator.random((count, 2)) * (SIZE - sides)).astype(int)
    return torch.tensor(np.concatenate([corners, corners + sides - 1], axis=1)).float()


def make(folder: Path, *, count: int, seed: int = 0, boxes: int = 80) -> Path:
    """photos/CATEGORY/i.png, truth.json beside them (COCO), and proposals.npz."""
    images, annotations, proposals = [], [], {}
    for kind, name in enumerate(HUES, start=1):
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
    categories = [{"id": i, "name": name} for i, name in enumerate(HUES, start=1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "truth.json").write_text(json.dumps(content))
    store_proposals(proposals, ProposalConfig(), folder / "proposals.npz")
    return folder


def settings(**learn: Any) -> BoxesConfig:
    loop: dict[str, Any] = {
        "epochs": 8, "batch": 4, "lr": 1e-3, "scales": (SIZE,), "log_every": 20,
    }  # fmt: skip
    return BoxesConfig(
        detector=DetectorConfig(trunk="small", tap="conv2", hidden=64, pooled=3),
        learn=LearnConfig(**loop | {"checkpoint_every": 0} | learn),
        select=SelectConfig(scales=(SIZE,)),
    )


def fit(folder: Path, out: Path, config: BoxesConfig, **more: Any) -> Detector:
    found = more.pop("found", None) or find_labels(folder / "photos")
    file, init = folder / "proposals.npz", more.pop("init", "none")
    return fit_boxes(
        found, out=out, config=config, init=init, proposals=file, device="cpu", quiet=True, **more
    ).detector


# A detector of keypoints small enough for tests, and photos with labels.

QUICK = KeypointConfig(
    size=64, hidden=16, views=2, least_views=0, batch=4, epochs=1, least_steps=24
)  # fmt: skip


def feature_model(seed: int = 5) -> DenseFeatures:
    torch.manual_seed(seed)
    return DenseFeatures(
        ModelConfig(trunk="small", head="linear", lower="conv4", channels=16)
    ).eval()


def write_labelled(folder: Path) -> Path:
    """16 photos of 8 categories; the json of their labels."""
    write_folder(folder, count=16, size=96, seed=0)
    return folder / "keypoints.json"


def write_one_label(photos: Path, few: Path) -> Path:
    """Of drawn photos, two others into a folder of their own; the json of one labelled bird."""
    few.mkdir()
    for photo in sorted(photos.glob("*.png"))[2:4]:
        shutil.copy(photo, few)
    birds = read_coco(photos / "keypoints.json").only(["bird"])
    write_coco(photos / "one.json", replace(birds, objects=birds.objects[:1]))
    return photos / "one.json"


# A few-shot benchmark, and a row of features that knows the answer.

KINDS = (
    make_category("cart", ("left_wheel", "right_wheel", "flag")),
    make_category("kite", ("head", "tail")),
)
COLOURS = torch.tensor(
    [[255, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0]], dtype=torch.uint8
)
"""Of the keypoints of both kinds, in order; the two wheels look alike."""
ROUNDS = FewShot(rounds=(1, 3, "all"), seeds=(0, 1), cells=12)
HEAD = KeypointConfig(
    size=SIDE, views=4, least_views=16, hidden=16, epochs=1, least_steps=150, batch=8,
    learning_rate=1e-2,
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


def oracle() -> Row:
    return untrained_row("colours", lambda crops: [colours(crops)], unit=False, settings={})

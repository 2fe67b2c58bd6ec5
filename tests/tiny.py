"""Small inputs for the tests: images, data sets, models and features made in a second."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from hostile import add_member, encode
from surefeat.boxes.config import BoxesConfig, DetectorConfig, LearnConfig, SelectConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.train import fit_boxes
from surefeat.core.geometry import Frame, apply_affine, cell_centres, fit_thin_plate, normalise
from surefeat.core.image import resize
from surefeat.data.coco import make_category
from surefeat.data.decode import Batches, Canvas, Item, Place
from surefeat.data.drawn import correspondences, draw_many, write_folder
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco, write_coco
from surefeat.data.pairs import load_pairs
from surefeat.data.sources import find_labels
from surefeat.keypoints.config import FewShot, KeypointConfig
from surefeat.learn.config import Config, preset
from surefeat.learn.loop import Progress
from surefeat.learn.pretrain import Pretrained, pretrain, train
from surefeat.learn.runs import Run
from surefeat.match.config import ProposalConfig
from surefeat.match.points import matching_text
from surefeat.match.proposals import key_of, proposals_of
from surefeat.match.proposals import write_proposals as store_proposals
from surefeat.match.related import PAIR_SIGNS, POINT_SIGNS
from surefeat.match.votes import Voting
from surefeat.measure.protocol import Protocol
from surefeat.measure.rows import Row, untrained_row
from surefeat.model.config import POINT_WEIGHTS, ModelConfig
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort, Logistic, Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CPU = torch.device("cpu")
SIDE = 48
"""Pixels of a drawn training image, and of a crop for keypoints."""
SIZE = 96
"""Pixels of an image of the drawn benchmark, and of a scene with ellipses."""


# Image files and tar shards of them.


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


# A training that takes a second: drawn images and settings for them.


def tiny(*, size: int = 32, points: int = 24, sigma_warmup: int = 3, **train: Any) -> Config:
    """The small preset for 48 pixel images, with some settings of the loop."""
    small = preset("small")
    loop: dict[str, Any] = {
        "steps": 12, "batch": 4, "lr_warmup": 2, "decay": "constant", "log_every": 3,
        "checkpoint_every": 4,
    }  # fmt: skip
    return replace(
        small,
        warp=replace(small.warp, size=size),
        loss=replace(small.loss, points=points, ignore_radius=10.0, sigma_warmup=sigma_warmup),
        train=replace(small.train, **(loop | train)),
        data=replace(small.data, side=SIDE, held_out=2, workers=1, memory="host"),
    )


def still(**settings: Any) -> Config:
    """Nothing moves: with the same images and views the loss is the same at every step."""
    return tiny(lr=0.0, head_lr=0.0, weight_decay=0.0, sigma_warmup=0, **settings)


def images(folder: Path, *, count: int = 11) -> Path:
    write_folder(folder, count=count, size=SIDE, seed=0)
    return folder


def canvas(count: int) -> Canvas:
    drawn = [one.image for one in draw_many(count, size=SIDE, seed=0)]
    sizes = torch.full((count, 2), SIDE, dtype=torch.int32)
    return Canvas(torch.stack(drawn), sizes, tuple(f"{i}.png" for i in range(count)), ())


def learn(source: Path, out: Path, config: Config | None = None, **more: Any) -> Pretrained:
    """pretrain on the CPU from random weights."""
    return pretrain(
        source, out=out, config=config, **{"init": "none"} | more, device="cpu", quiet=True
    )


def small_model(config: Config, *, seed: int = 0) -> DenseFeatures:
    torch.manual_seed(seed)
    return DenseFeatures.create(config.model, init="none")


def go(
    folder: Path,
    config: Config,
    *,
    images: int = 9,
    model: DenseFeatures | None = None,
    **more: Any,
) -> tuple[Run, DenseFeatures, Progress]:
    model = model or small_model(config)
    run = Run.start(folder, config, device="cpu")
    batches = Batches(canvas(images), device=CPU)
    return run, model, train(model, batches, run, config, **more)


def weights(run: Path) -> dict[str, Tensor]:
    """Of the model that a run left behind."""
    found: dict[str, Tensor] = load_file(run / "model" / "model.safetensors")
    return found


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


# Features without a network, and pairs of a photo and its view through a known warp.

STRIDE = 8


def photo(name: str = "astronaut", *, size: tuple[int, int] = (192, 192)) -> Tensor:
    """A photo that ships with scikit-image: (3, H, W) in [0, 1]."""
    data = pytest.importorskip("skimage.data")
    pixels = torch.from_numpy(np.ascontiguousarray(getattr(data, name)())).permute(2, 0, 1)
    return resize(pixels, size=size).float() / 255


def analytic(image: Tensor, *, original: tuple[int, int] | None = None) -> Features:
    """Features without a network: colour and gradients, blurred at three scales, every 8 pixels."""
    grey = image.mean(0, keepdim=True)
    dx, dy = grey.diff(dim=2, append=grey[:, :, -1:]), grey.diff(dim=1, append=grey[:, -1:])
    edges = torch.cat([dx, dy, dx + dy, dx - dy]).abs()
    channels = torch.cat([image, 4 * edges])
    scales = []
    for reach in (4, 8, 16):
        padded = F.pad(channels[None], (reach,) * 4, mode="reflect")
        blurred = F.avg_pool2d(F.avg_pool2d(padded, reach + 1, stride=1), reach + 1, stride=1)
        scales.append(F.avg_pool2d(blurred, STRIDE)[0])
    fine, middle, coarse = scales
    maps = torch.cat([fine, middle, coarse, fine - middle, middle - coarse])
    maps = (maps - maps.mean((1, 2), keepdim=True)) / maps.std((1, 2), keepdim=True)
    half = len(maps) // 2
    size = (image.shape[1], image.shape[2])
    return Features(
        descriptors=F.normalize(maps[:half], dim=0),
        uncertainty=torch.full(maps.shape[1:], 0.5),
        lower=F.normalize(maps[half:], dim=0),
        frame=Frame(original or size, size),
        stride=STRIDE,
    )


def rendered(image: Tensor, where: Tensor, *, size: tuple[int, int]) -> Tensor:
    """The view whose pixels (H*W, 2), row by row, show these places of the image."""
    grid = normalise(where, size=(image.shape[1], image.shape[2])).reshape(1, *size, 2)
    return F.grid_sample(image[None], grid, padding_mode="reflection", align_corners=False)[0]


def warps() -> dict[str, Callable[[Tensor], Tensor]]:
    """Pixels of a view -> pixels of the photo."""
    cos, sin = math.cos(math.radians(8)), math.sin(math.radians(8))
    affine = torch.tensor([[1.05 * cos, -sin, 20.0], [sin, 0.95 * cos, -6.0]])
    corners = torch.tensor([[10, 10], [180, 12], [12, 178], [175, 180], [96, 96], [50, 130.0]])
    moved = corners + torch.tensor([[8, 3], [-9, 6], [5, -8], [-6, -7], [7, 5], [-6, 8.0]])
    return {"affine": lambda p: apply_affine(affine, p), "spline": fit_thin_plate(corners, moved)}


def warped_pair(name: str, *, size: tuple[int, int] = (176, 160)) -> tuple[Features, Features]:
    """Features of a view of the photo through a warp, and of the photo."""
    view = rendered(photo(), warps()[name](cell_centres(size=size, stride=1)), size=size)
    return analytic(view), analytic(photo())


def a_logistic(signs: tuple[str, ...], *, bias: float = 0.1, **weights: float) -> Logistic:
    """Of these signs, each with its weight or 0; means 0 and scales 1."""
    row = tuple(weights.get(name, 0.0) for name in signs)
    zeros, ones = (0.0,) * len(signs), (1.0,) * len(signs)
    return Logistic(signs, row, bias, zeros, ones, "a test", 9)


def a_reliability(**changes: Any) -> Reliability:
    """One that looks at a few signs, as if fitted for the default matching."""
    given: dict[str, Any] = {
        "pair": a_logistic(PAIR_SIGNS, excess=20.0),
        "point": a_logistic(POINT_SIGNS, score=1.0, margin=2.0),
        "pooled": a_logistic(("pooled",), pooled=3.0),
        "matching": matching_text(Voting(), POINT_WEIGHTS), "right_within": 0.1,
    }  # fmt: skip
    return Reliability(**given | changes)


def a_cohort(features: Features, *, count: int = 8) -> Cohort:
    """Some places of features."""
    descriptors = features.descriptors.flatten(1).T[:count]
    return Cohort(features.lower.flatten(1).T[:count], descriptors)


# Random regions, and a picture with smooth parts and sharp edges.


def random_boxes(count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    corners = torch.rand(count, 2, 2, generator=generator) * torch.tensor([size[1], size[0]]) - 0.5
    low, high = corners.amin(1).ceil(), corners.amax(1).floor()
    return torch.cat([low, torch.maximum(low, high)], dim=1)


def smooth_photo(height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth colours, two sharp objects and sensor noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 5, generator=generator) * 200
    image = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
    image[:, height // 4 : height // 2, width // 3 : width // 2] += 90
    image[:, height // 2 :, : width // 4] -= 70
    noise = torch.randn(3, height, width, generator=generator) * 4
    return (image + noise).clamp(0, 255).byte()


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


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


# Figures as they are drawn: their pixels, and the axes that show pictures.


def drawn(figure: Figure) -> npt.NDArray[np.float64]:
    """The figure as it is saved: (H, W, 3) in [0, 1]."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    return np.asarray(Image.open(buffer).convert("RGB"), dtype=np.float64) / 255


def pixel_at(figure: Figure, axes: Axes, point: tuple[float, float]) -> npt.NDArray[np.float64]:
    """The drawn colour at a place given in the axes' data units, here original pixels."""
    picture = drawn(figure)
    x, y = axes.transData.transform(point) * (100 / figure.dpi)
    colour: npt.NDArray[np.float64] = picture[picture.shape[0] - 1 - int(y), int(x)]
    return colour


def pictures(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]

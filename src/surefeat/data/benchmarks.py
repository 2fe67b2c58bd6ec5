"""The benchmarks of semantic matching by name: their pairs, and the rule their numbers go by.

pf-pascal (Ham et al. 2017): PF-dataset-PASCAL/JPEGImages/*.jpg, Annotations/<class>/<image>.mat
there (`kps`, N x 2 with NaN = missing; `bbox`, x1 y1 x2 y2), and the lists image_pairs/*.csv.
pf-willow (Ham et al. 2016): PF-dataset-WILLOW/<sub-class>/<image>.png with <image>.mat beside it,
whose `pts_coord` is 2 x 10, x in the first row. Both count pixels from 1; here from 0.
spair (SPair-71k, Min et al. 2019): PairAnnotation/<split>/*.json and JPEGImages/<category>/*.jpg,
first pixel 0; its boxes name their last pixel, as ours do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefeat.data.pairs import Pair, is_mirrored, list_rows, load_pairs, located, make_pair

Convention = Literal["scnet", "img", "bbox-kp", "bbox"]
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
SCNET_SIDE = 224  # pixels: SCNet's input, in which it is evaluated too

Name = Literal["pf-pascal", "pf-willow", "spair", "pairs"]

RULES: dict[Name, Convention] = {
    "pf-pascal": "scnet", "pf-willow": "bbox-kp", "spair": "bbox", "pairs": "img",
}  # fmt: skip
"""The convention each benchmark's own tables use; all others are computed beside it."""

# fmt: off
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)
# fmt: on
"""PASCAL VOC's 20 classes in their own order: class 1 is aeroplane."""

PASCAL_FOLDER, PASCAL_TEST_PAIRS = "PF-dataset-PASCAL", 299

PASCAL_TOLERANCE = 4.0
"""Pixels. One point of the training images (2008_007529) lies 3.4 px right of its image; every
point of the test list lies inside."""

WILLOW_FOLDERS = ("PF-dataset-WILLOW", "PF-dataset")
"""The archive's own folder is PF-dataset; the longer name tells it from PF-PASCAL."""

SPAIR_SPLITS = ("trn", "val", "test")

SPAIR_TOLERANCE = 1.0
"""Pixels a keypoint may lie outside: the annotation tool names the last pixel W or W - 1."""


@dataclass(frozen=True, eq=False)
class Benchmark:
    """Pairs to measure on."""

    name: Name
    split: str
    pairs: list[Pair]

    @property
    def rule(self) -> Convention:
        """The convention of its own tables."""
        return RULES[self.name]


def load_benchmark(
    name: Name, data: str | Path, *, split: str = "test", images: str | Path | None = None
) -> Benchmark:
    """Read a benchmark in its public layout.

    Splits: pf-pascal has test, and val and train for choosing settings (no test image; keypoints
    from its Annotations folder, or rebuilt ones); spair has test, val and trn; pf-willow and pairs
    are all test. `pairs` is a CSV list in PF-PASCAL's columns, its images beside it or under
    `images`.
    """
    data = Path(data)
    if name not in RULES:
        raise ValueError(f"unknown benchmark {name!r}; choose from {', '.join(RULES)}")
    if name == "spair":
        pairs = load_spair(data, split)
    elif name == "pf-pascal" and split in ("val", "train"):
        pairs = development_pairs(data)[split == "train"]
    elif split != "test":
        raise ValueError(f"{name} has no split {split!r}; leave --split out")
    elif name == "pairs":
        pairs = load_pairs(_list(data), images)
    else:
        pairs = load_pf_pascal(data) if name == "pf-pascal" else load_pf_willow(data)
    return Benchmark(name, split, pairs)


def _list(data: Path) -> Path:
    """The CSV itself, or the only one in a folder."""
    if not data.is_dir():
        return data
    lists = sorted(data.glob("*.csv"))
    if len(lists) != 1:
        raise ValueError(f"{data} holds {len(lists)} CSV lists; name the one to use")
    return lists[0]


def class_name(index: str) -> str:
    """VOC's class number "1".."20" -> its name."""
    names = {str(number): name for number, name in enumerate(VOC_CLASSES, start=1)}
    if index not in names:
        raise ValueError(f"unknown class {index!r}; PF-PASCAL's classes are 1 to {len(names)}")
    return names[index]


def load_list(root: str | Path, name: str) -> list[Pair]:
    """The pairs of image_pairs/<name>, a list that carries its keypoints."""
    path = Path(root) / "image_pairs" / name
    return load_pairs(path, root, first_pixel=1, tolerance=PASCAL_TOLERANCE, category=class_name)


def load_pf_pascal(root: str | Path) -> list[Pair]:
    """The 299 public test pairs (2,414 keypoints): for the final table, never to choose on."""
    pairs = load_list(root, "test_pairs.csv")
    if len(pairs) != PASCAL_TEST_PAIRS:
        what = f"test_pairs.csv has {len(pairs)} pairs, the public list {PASCAL_TEST_PAIRS}"
        raise ValueError(f"{root}: {what}; fetch it again, or read your own list with load_list")
    return pairs


def development_pairs(root: str | Path) -> tuple[list[Pair], list[Pair]]:
    """Validation and training pairs to choose settings on: none shares an image with the test list.

    The public lists carry no keypoints. Where PF-PASCAL's own Annotations folder is there, they
    come from it, with boxes; otherwise from lists rebuilt from the Berkeley annotations (171 and
    614 pairs), whose `person` points are unreliable and left out.
    """
    root = Path(root)
    test = {path.name for pair in load_pf_pascal(root) for path in (pair.image0, pair.image1)}

    def listed(split: str) -> list[Pair]:
        if (root / PASCAL_FOLDER / "Annotations").is_dir():
            return annotated_pairs(root, f"{split}_pairs.csv")
        rebuilt = load_list(root, f"{split}_pairs_rebuilt_keypoints.csv")
        return [pair for pair in rebuilt if pair.category != "person"]

    def clean(pairs: list[Pair]) -> list[Pair]:
        return [pair for pair in pairs if not {pair.image0.name, pair.image1.name} & test]

    return clean(listed("val")), clean(listed("train"))


def annotated_pairs(root: Path, name: str) -> list[Pair]:
    """Pairs of image_pairs/<name> with keypoints and boxes from the per-image annotations.

    For the public training and validation lists, which carry no keypoints. The training list
    repeats its pairs mirrored; those have no image files and are left out.
    """
    path = root / "image_pairs" / name
    pairs = []
    for where, row in list_rows(path, ("source_image", "target_image", "class")):
        if is_mirrored(row):
            continue
        image0, image1 = root / row["source_image"], root / row["target_image"]
        with located(where):
            category = class_name(row["class"].strip())
            points0, box0 = read_annotation(root / PASCAL_FOLDER, category, image0.stem)
            points1, box1 = read_annotation(root / PASCAL_FOLDER, category, image1.stem)
        places = (points0, points1, PASCAL_TOLERANCE)
        pairs.append(make_pair(image0, image1, category, *places, where, (box0, box1)))
    if not pairs:
        raise ValueError(f"{path}: the list holds no pairs")
    return pairs


def read_annotation(folder: Path, category: str, image: str) -> tuple[Tensor, Tensor]:
    """Annotations/<category>/<image>.mat -> points (N, 2), NaN = missing, and inclusive box (4,).

    Convention: the file counts pixels from 1, the result from 0.
    """
    path = folder / "Annotations" / category / f"{image}.mat"
    if not path.is_file():
        raise ValueError(f"there is no annotation {path}; fetch PF-PASCAL's own archive")
    points, box = _read_mat(path, "kps", "bbox")
    if points.ndim != 2 or points.shape[1] != 2 or box.size != 4:
        raise ValueError(f"{path}: wants kps N x 2 and bbox 1 x 4, not {points.shape}, {box.shape}")
    points[np.isnan(points).any(1)] = np.nan
    return torch.from_numpy(points - 1.0).float(), torch.from_numpy(box.reshape(4) - 1.0).float()


def _read_mat(path: Path, *fields: str) -> list[npt.NDArray[np.float64]]:
    """Fields of a Matlab file as numbers."""
    from scipy.io import loadmat

    try:
        content = loadmat(path)
        return [np.array(content[field], dtype=np.float64) for field in fields]
    except (KeyError, ValueError, TypeError, OSError, NotImplementedError) as error:
        what = f"{path}: cannot read {' and '.join(fields)} ({error})"
        raise ValueError(f"{what}; fetch the file again") from error


def load_pf_willow(root: str | Path) -> list[Pair]:
    """All ordered pairs within each sub-class: 900, each with 10 visible keypoints.

    The category is the sub-class, e.g. "car(S)", because Proposal Flow averages by it first.
    An incomplete copy is refused: numbers on part of the benchmark cannot be compared.
    """
    places = [Path(root) / name for name in WILLOW_FOLDERS if (Path(root) / name).is_dir()]
    if not places:
        raise ValueError(f"no PF-WILLOW under {root} (looked for {' or '.join(WILLOW_FOLDERS)})")
    classes = sorted(path for path in places[0].iterdir() if any(path.glob("*.mat")))
    if len(classes) != 10:
        raise ValueError(f"{places[0]} has {len(classes)} sub-classes of 10; fetch it again")
    pairs = []
    for subclass in classes:
        files = sorted(subclass.glob("*.mat"))
        if len(files) != 10:
            raise ValueError(f"{subclass} has {len(files)} .mat files of 10; fetch it again")
        points = {path: read_points(path) for path in files}
        for one, two in permutations(files, 2):
            images, where = (one.with_suffix(".png"), two.with_suffix(".png")), f"{one}, {two.name}"
            pairs.append(make_pair(*images, subclass.name, points[one], points[two], 0.0, where))
    return pairs


def read_points(path: Path) -> Tensor:
    """(10, 2) pixels counted from 0 of one of PF-WILLOW's annotation files."""
    (points,) = _read_mat(path, "pts_coord")
    if points.shape != (2, 10) or not np.isfinite(points).all():
        what = f"2 x 10 numbers, not {points.shape}"
        raise ValueError(f"{path}: pts_coord must be {what}; fetch the file again")
    return torch.from_numpy(points.T - 1.0).float()


def load_spair(root: str | Path, split: str = "test") -> list[Pair]:
    """The pairs of one split ("trn", "val" or "test"), in the order of their file names."""
    if split not in SPAIR_SPLITS:
        raise ValueError(f"unknown split {split!r}; spair has {', '.join(SPAIR_SPLITS)}")
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
    sides = ("src", "trg")
    wanted = [f"{side}_{what}" for what in ("imname", "kps", "bndbox") for side in sides]
    missing = [field for field in (*wanted, "category") if field not in content]
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)}; fetch SPair-71k again")
    category = str(content["category"])
    if not (images / category).is_dir():
        raise ValueError(f"{path}: unknown category {category!r}, there is no {images / category}")
    with located(str(path)):
        points0, points1 = (_numbers(content, f"{side}_kps", (-1, 2)) for side in sides)
        box0, box1 = (_numbers(content, f"{side}_bndbox", (4,)) for side in sides)
    for points in (points0, points1):
        points[(points == -1).all(-1)] = torch.nan
    image0, image1 = (images / category / str(content[f"{side}_imname"]) for side in sides)
    boxes = (box0, box1)
    return make_pair(image0, image1, category, points0, points1, SPAIR_TOLERANCE, str(path), boxes)


def _numbers(content: dict[str, Any], field: str, shape: tuple[int, ...]) -> Tensor:
    try:
        numbers = torch.tensor(content[field], dtype=torch.float32).reshape(shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{field} is malformed ({error})") from error
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"{field} holds a number that is not finite")
    return numbers


# The control that knows where, not what: image 1 is moved right by a share of its width, 45/224.


def _shift(width: int, pixels_of_224: float) -> int:
    """Whole pixels, so that content is copied, not blurred."""
    if not 0 <= pixels_of_224 <= SCNET_SIDE:
        raise ValueError(f"a shift of {pixels_of_224} of 224 pixels leaves the image; use 0 to 224")
    return round(pixels_of_224 / SCNET_SIDE * width)


def shifted_image(image: Tensor, pixels_of_224: float) -> Tensor:
    """Control: image (..., H, W) moved right; the gap mirrors what lay at the left edge."""
    columns = torch.arange(image.shape[-1], device=image.device)
    columns = columns - _shift(len(columns), pixels_of_224)
    return image[..., torch.where(columns < 0, -1 - columns, columns)]


def shifted(pair: Pair, pixels_of_224: float) -> Pair | None:
    """Control: the pair with image 1 shifted; None if no point stays in it.

    Points that leave the image are no longer visible.
    """
    width = pair.size1[1]
    by = torch.tensor([float(_shift(width, pixels_of_224)), 0.0])
    points1 = pair.points1 + by
    visible = pair.visible & (points1[:, 0] <= width - 0.5)
    box1 = None if pair.box1 is None else pair.box1 + by.repeat(2)
    moved = replace(pair, points1=points1, visible=visible, box1=box1)
    return moved if bool(visible.any()) else None


def shifted_boxes(boxes: Tensor, *, size: tuple[int, int], pixels_of_224: float) -> Tensor:
    """Boxes (N, 4) moved with the image's content and cut at its right edge.

    A box of which less than half its width stays inside is left out.
    """
    moved = boxes + boxes.new_tensor([_shift(size[1], pixels_of_224), 0] * 2)
    cut = moved.minimum(moved.new_tensor([size[1] - 1.0, float("inf")] * 2))
    width, left = moved[:, 2] - moved[:, 0] + 1, cut[:, 2] - moved[:, 0] + 1
    return cut[2 * left >= width]

"""PF-PASCAL (Ham et al. 2017): pairs of VOC images, longest side 300, with Berkeley keypoints.

Layout: PF-dataset-PASCAL/JPEGImages/*.jpg, PF-dataset-PASCAL/Annotations/<class>/<image>.mat
(`kps`, N x 2 with NaN = missing; `bbox`, x1 y1 x2 y2) and the public lists in image_pairs/*.csv.
All of them count pixels from 1 (the public evaluators subtract 1 before normalising); here from 0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from surefeat.data.pairs import Pair, list_rows, load_pairs, make_pair

# fmt: off
CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)
# fmt: on
"""PASCAL VOC's 20 classes in their own order: class 1 is aeroplane."""

TOLERANCE = 4.0
"""Pixels. One point of the training images (2008_007529) lies 3.4 px right of its image; every
point of the test list lies inside."""

FOLDER = "PF-dataset-PASCAL"
TEST_PAIRS = 299


def class_name(index: str) -> str:
    """VOC's class number "1".."20" -> its name."""
    if index not in map(str, range(1, len(CLASSES) + 1)):
        raise ValueError(f"unknown class {index!r}; PF-PASCAL's classes are 1 to {len(CLASSES)}")
    return CLASSES[int(index) - 1]


def load_list(root: str | Path, name: str) -> list[Pair]:
    """The pairs of image_pairs/<name>, a list that carries its keypoints."""
    return load_pairs(
        Path(root) / "image_pairs" / name,
        root,
        first_pixel=1,
        tolerance=TOLERANCE,
        category=class_name,
    )


def load_pf_pascal(root: str | Path) -> list[Pair]:
    """The 299 public test pairs (2,414 keypoints): for the final table, never to choose on."""
    pairs = load_list(root, "test_pairs.csv")
    if len(pairs) != TEST_PAIRS:
        raise ValueError(
            f"{root}: test_pairs.csv has {len(pairs)} pairs, the public list {TEST_PAIRS}; "
            "fetch it again, or read a list of your own with load_list"
        )
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
        if (root / FOLDER / "Annotations").is_dir():
            return annotated_pairs(root, f"{split}_pairs.csv", drop_mirrored=True)
        rebuilt = load_list(root, f"{split}_pairs_rebuilt_keypoints.csv")
        return [pair for pair in rebuilt if pair.category != "person"]

    def clean(pairs: list[Pair]) -> list[Pair]:
        return [pair for pair in pairs if not {pair.image0.name, pair.image1.name} & test]

    return clean(listed("val")), clean(listed("train"))


def annotated_pairs(root: str | Path, name: str, *, drop_mirrored: bool = False) -> list[Pair]:
    """Pairs of image_pairs/<name> with keypoints and boxes from the per-image annotations.

    For the public training and validation lists, which carry no keypoints. The training list
    repeats its pairs mirrored (flip = 1); those have no image files, so they raise ValueError
    unless `drop_mirrored` leaves them out on purpose.
    """
    root = Path(root)
    path = root / "image_pairs" / name
    pairs = []
    for where, row in list_rows(path, ("source_image", "target_image", "class")):
        if row.get("flip", "0").strip() not in ("", "0"):
            if drop_mirrored:
                continue
            raise ValueError(f"{where}: a mirrored pair; pass drop_mirrored=True to leave them out")
        try:
            category = class_name(row["class"].strip())
            image0, image1 = root / row["source_image"], root / row["target_image"]
            points0, box0 = read_annotation(root / FOLDER, category, image0.stem)
            points1, box1 = read_annotation(root / FOLDER, category, image1.stem)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        boxes = (box0, box1)
        pairs.append(make_pair(image0, image1, category, points0, points1, TOLERANCE, where, boxes))
    if not pairs:
        raise ValueError(f"{path}: the list holds no pairs")
    return pairs


def read_annotation(folder: Path, category: str, image: str) -> tuple[Tensor, Tensor]:
    """Annotations/<category>/<image>.mat -> points (N, 2), NaN = missing, and inclusive box (4,).

    Convention: the file counts pixels from 1, the result from 0.
    """
    from scipy.io import loadmat

    path = folder / "Annotations" / category / f"{image}.mat"
    if not path.is_file():
        raise ValueError(f"there is no annotation {path}; fetch PF-PASCAL's own archive")
    try:
        content = loadmat(path)
        points = np.asarray(content["kps"], dtype=np.float64)
        box = np.asarray(content["bbox"], dtype=np.float64).reshape(-1)
    except (KeyError, ValueError, TypeError, OSError, NotImplementedError) as error:
        raise ValueError(f"{path}: cannot read kps and bbox ({error}); fetch it again") from error
    if points.ndim != 2 or points.shape[1] != 2 or box.shape != (4,):
        raise ValueError(f"{path}: wants kps N x 2 and bbox 1 x 4, not {points.shape}, {box.shape}")
    points = points.copy()
    points[np.isnan(points).any(1)] = np.nan
    return torch.from_numpy(points - 1.0).float(), torch.from_numpy(box - 1.0).float()

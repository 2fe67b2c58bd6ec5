"""Small copies of the public benchmarks, in their own layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

HEADER = "source_image,target_image,class,XA,YA,XB,YB"
BOTH = "PF-dataset-PASCAL/JPEGImages/a.jpg,PF-dataset-PASCAL/JPEGImages/b.jpg"


def picture(path: Path, *, width: int = 40, height: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (90, 120, 60)).save(path)


def willow(root: Path) -> Path:
    for number in range(10):
        folder = root / "PF-dataset-WILLOW" / f"class({number})"
        for image in range(10):
            picture(folder / f"i{image}.png")
            points = np.stack([np.arange(1, 11) + image, np.arange(11, 21)]).astype(float)
            savemat(folder / f"i{image}.mat", {"pts_coord": points})
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
        savemat(path, {"kps": np.array(points, dtype=float), "bbox": np.array([[1, 2, 31, 22]])})
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
        savemat(folder / "Annotations" / "bicycle" / f"{name}.mat", content)
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

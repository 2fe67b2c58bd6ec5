"""PF-WILLOW (Ham et al. 2016): 10 sub-classes of 10 images, 10 keypoints each, 900 pairs.

Layout: PF-dataset-WILLOW/<sub-class>/<image>.png with <image>.mat beside it, whose `pts_coord`
is 2 x 10 (x in the first row) and counts pixels from 1, as Matlab does; here from 0.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from surefeat.data.pairs import Pair, make_pair

FOLDERS = ("PF-dataset-WILLOW", "PF-dataset")
"""The archive's own folder is PF-dataset; the longer name tells it from PF-PASCAL."""
CLASSES, IMAGES, KEYPOINTS = 10, 10, 10


def load_pf_willow(root: str | Path) -> list[Pair]:
    """All ordered pairs within each sub-class: 900, each with 10 visible keypoints.

    The category is the sub-class, e.g. "car(S)", because Proposal Flow averages by it first.
    An incomplete copy is refused: numbers on part of the benchmark cannot be compared.
    """
    folder = _folder(Path(root))
    classes = sorted(path for path in folder.iterdir() if any(path.glob("*.mat")))
    if len(classes) != CLASSES:
        raise ValueError(f"{folder} has {len(classes)} sub-classes of {CLASSES}; fetch it again")
    pairs = []
    for subclass in classes:
        annotations = sorted(subclass.glob("*.mat"))
        if len(annotations) != IMAGES:
            raise ValueError(
                f"{subclass} has {len(annotations)} .mat files of {IMAGES}; fetch again"
            )
        points = {path: read_points(path) for path in annotations}
        for one, two in permutations(annotations, 2):
            image0, image1 = one.with_suffix(".png"), two.with_suffix(".png")
            where = f"{one} and {two.name}"
            pairs.append(
                make_pair(image0, image1, subclass.name, points[one], points[two], 0.0, where)
            )
    return pairs


def read_points(path: Path) -> Tensor:
    """(10, 2) pixels counted from 0 of one annotation file."""
    from scipy.io import loadmat

    try:
        points = np.asarray(loadmat(path)["pts_coord"], dtype=np.float64)
    except (KeyError, ValueError, TypeError, OSError, NotImplementedError) as error:
        raise ValueError(
            f"{path}: cannot read pts_coord ({error}); fetch the file again"
        ) from error
    if points.shape != (2, KEYPOINTS) or not np.isfinite(points).all():
        raise ValueError(f"{path}: pts_coord must be 2 x {KEYPOINTS} numbers, not {points.shape}")
    return torch.from_numpy(points.T - 1.0).float()


def _folder(root: Path) -> Path:
    for name in FOLDERS:
        if (root / name).is_dir():
            return root / name
    raise ValueError(f"no PF-WILLOW under {root} (looked for {' or '.join(FOLDERS)})")

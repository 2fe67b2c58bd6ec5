"""Rows without learning: dense SIFT (OpenCV) and HOG (scikit-image); need the eval extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.baselines.rows import Row, as_features
from surefeat.features import Features

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CELL = 8
"""Pixels between descriptors: twice as fine as the networks' maps."""
SIFT_SIZE = 8.0
"""Diameter of a SIFT keypoint, px; its descriptor sees six times as much."""
HOG_BLOCK, HOG_ANGLES = 3, 9
"""A HOG descriptor is 3 x 3 cells around its own, 9 orientations each."""


def sift_row(name: str = "sift") -> Row:
    """SIFT at every cell centre, upright, one scale."""
    settings = {"cell": CELL, "size": SIFT_SIZE}
    return Row(name, lambda images: _each(images, _sift), settings=settings)


def hog_row(name: str = "hog") -> Row:
    """HOG of every cell with its eight neighbours."""
    settings = {"cell": CELL, "block": HOG_BLOCK, "orientations": HOG_ANGLES}
    return Row(name, lambda images: _each(images, _hog), settings=settings)


def _each(images: Tensor, describe: Any) -> list[Features]:
    """(B, 3, S, S) uint8 -> Features; the mirrored border of one cell keeps the maps complete."""
    if images.shape[-1] % CELL or images.shape[-2] % CELL:
        raise ValueError(f"sides must be multiples of {CELL} px, not {tuple(images.shape[-2:])}")
    grey = images.float().cpu().mean(1, keepdim=True)
    padded = F.pad(grey, (CELL,) * 4, mode="reflect")[:, 0].round().byte().numpy()
    maps = torch.stack([torch.from_numpy(describe(image)) for image in padded])
    maps = maps.permute(0, 3, 1, 2).to(images.device)
    return as_features(maps, side=images.shape[-1])


def _sift(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(H + 2 CELL, W + 2 CELL) grey -> (H / CELL, W / CELL, 128)."""
    cv2: Any
    try:
        import cv2
    except ImportError as error:
        raise ImportError("the sift row needs OpenCV: pip install 'surefeat[eval]'") from error
    rows, columns = (n // CELL - 2 for n in image.shape)
    middle = 1.5 * CELL - 0.5  # of the first cell, behind the border
    points = [
        cv2.KeyPoint(middle + CELL * x, middle + CELL * y, SIFT_SIZE, 0.0)
        for y in range(rows)
        for x in range(columns)
    ]
    _, found = cv2.SIFT_create().compute(image, points)
    return found.reshape(rows, columns, -1)  # type: ignore[no-any-return]


def _hog(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(H + 2 CELL, W + 2 CELL) grey -> (H / CELL, W / CELL, 81)."""
    try:
        from skimage.feature import hog
    except ImportError as error:
        raise ImportError("the hog row needs scikit-image: pip install 'surefeat[eval]'") from error
    blocks = hog(
        image,
        orientations=HOG_ANGLES,
        pixels_per_cell=(CELL, CELL),
        cells_per_block=(HOG_BLOCK, HOG_BLOCK),
        feature_vector=False,
    )
    return blocks.reshape(*blocks.shape[:2], -1).astype("float32")  # type: ignore[no-any-return]

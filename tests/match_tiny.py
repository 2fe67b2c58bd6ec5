"""Features without a network, and pairs of a photo and its view through a known warp."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import Frame, apply_affine, cell_centres, fit_thin_plate, normalise
from surefeat.core.image import resize
from surefeat.model.features import Features

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

"""Object crops for keypoints: jittered boxes, the pixels in them, and where points go.

Convention: a crop of S x S pixels, or a map of h x w cells, spans its box's outer edges exactly;
the two scales may differ, so an object fills its crop whatever its proportions. Boxes are
inclusive and in original pixels, and may reach beyond the image.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.geometry import Frame, normalise
from surefeat.image import resize


def jittered_box(boxes: Tensor, generator: torch.Generator, amount: float = 1 / 6) -> Tensor:
    """Boxes (..., 4), each side moved by its own U(-amount, amount) of the width or height."""
    extent = (boxes[..., 2:] - boxes[..., :2] + 1).repeat(*[1] * (boxes.ndim - 1), 2)
    draws = torch.rand(boxes.shape, generator=generator, device=generator.device).to(boxes.device)
    return boxes + (2 * draws - 1) * amount * extent


def into_box(points: Tensor, box: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Original pixels (..., N, 2) -> cells, or crop pixels, of a (height, width) grid over a box.

    box: (..., 4), with the points' leading dimensions.
    """
    first, scale = _span(box, size)
    return (points - first + 0.5) * scale - 0.5


def out_of_box(cells: Tensor, box: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Inverse of into_box: cells or crop pixels (..., N, 2) -> original pixels."""
    first, scale = _span(box, size)
    return (cells + 0.5) / scale + first - 0.5


def _span(box: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A box's first corner (..., 1, 2), and grid cells per pixel (..., 1, 2)."""
    grid = torch.tensor([size[1], size[0]], dtype=box.dtype, device=box.device)
    return box[..., None, :2], grid / (box[..., None, 2:] - box[..., None, :2] + 1)


def mirrored(
    cells: Tensor, visible: Tensor, flip: Tensor, *, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Keypoints (..., K, 2) and visible (..., K) after the grid they are in is mirrored.

    flip (K,): the keypoint that each one becomes, so that what was the left wheel is then the
    right one. Pixels are mirrored by `crop.flip(-1)`.
    """
    x, y = cells.unbind(-1)
    moved = torch.stack([size[1] - 1 - x, y], dim=-1)
    return moved[..., flip, :], visible[..., flip]


def crop(image: Tensor, box: Tensor, *, size: int) -> Tensor:
    """The pixels of a box (4,): image (3, H, W) uint8 -> (3, size, size) uint8.

    Pixel for pixel the map is `into_box`; antialiased when it shrinks, and beyond the image the
    border pixel is repeated (a mirror image would show parts twice).
    """
    part, first = _around(image, box, size)
    original = (part.shape[1], part.shape[2])
    width, height = (box[2:] - box[:2] + 1).tolist()
    # A plain bilinear read would skip pixels of a large photo: the part is made smaller first.
    network = (_shrunk(original[0], size / height), _shrunk(original[1], size / width))
    steps = torch.arange(size, device=image.device, dtype=torch.float32)
    ys, xs = torch.meshgrid(steps, steps, indexing="ij")
    places = out_of_box(torch.stack([xs, ys], dim=-1), box.to(image.device), size=(size, size))
    inside = Frame(original=original, network=network).to_network(places - first)
    source = resize(part, size=network).float()[None]
    grid = normalise(inside, size=network)[None]
    read = F.grid_sample(source, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return read[0].round().clamp(0, 255).to(torch.uint8)


def _around(image: Tensor, box: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """What a crop can need of an image: the part (3, h, w), and its first pixel (2,) as x, y."""
    margin = 2 * (box[2:] - box[:2] + 1) / size + 2
    last = torch.tensor([image.shape[2], image.shape[1]]) - 1
    low = torch.minimum((box[:2] - margin).floor().clamp_min(0), last).long()
    high = torch.minimum((box[2:] + margin).ceil().clamp_min(0), last).long()
    (x1, y1), (x2, y2) = low.tolist(), high.tolist()
    return image[:, y1 : y2 + 1, x1 : x2 + 1], low.to(image.device)


def _shrunk(side: int, scale: float) -> int:
    return max(1, math.ceil(side * min(1.0, scale)))

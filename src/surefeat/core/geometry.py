"""THE coordinate convention, and everything that moves coordinates.

Convention: points are (x, y); the centre of the top-left pixel is (0, 0), so an image of width W
spans [-1/2, W - 1/2]. A feature map of stride s has its cell (0, 0) centred on pixel (s-1)/2.
Boxes are (x1, y1, x2, y2) and inclusive: they name the centres of their first and last pixels, so
a box of one pixel has x1 == x2 and width x2 - x1 + 1. Sizes are (height, width).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def pixel_to_grid(points: Tensor, stride: float) -> Tensor:
    """Pixels (..., 2) -> cells (..., 2) of a map with this stride; cell centres are integers."""
    return (points + 0.5) / stride - 0.5


def grid_to_pixel(cells: Tensor, stride: float) -> Tensor:
    """Inverse of pixel_to_grid."""
    return (cells + 0.5) * stride - 0.5


def normalise(points: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Pixels (..., 2) -> [-1, 1] over the image's outer edges, as grid_sample wants them.

    Convention: for align_corners=False, where -1 and 1 are pixel edges, not pixel centres.
    """
    height, width = size
    x, y = points.unbind(-1)
    return torch.stack([(x + 0.5) * (2 / width) - 1, (y + 0.5) * (2 / height) - 1], dim=-1)


def from_corner(place: float) -> float:
    """A place measured from the image's top-left corner, 0 to W, as one between pixel centres."""
    return place - 0.5


def to_corner(place: float) -> float:
    """Inverse of from_corner."""
    return place + 0.5


def sample(maps: Tensor, cells: Tensor) -> Tensor:
    """Bilinear read: maps (B, C, H, W) at cells (B, N, 2) -> (B, N, C).

    Convention: cell centres at integers; beyond the outermost centres the border value is used.
    """
    grid = normalise(cells, size=(maps.shape[-2], maps.shape[-1])).unsqueeze(1).to(maps.dtype)
    read = F.grid_sample(maps, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return read.squeeze(2).transpose(1, 2)


def interpolation(cells: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Bilinear weights (B, N, H*W) with which a (H, W) map is read at cells (B, N, 2).

    The same as `sample`, as a matrix: for small maps and many points a product with it, and above
    all its gradient, is faster than scattered reads.
    """
    height, width = size
    x, y = cells[..., 0, None].clamp(0, width - 1), cells[..., 1, None].clamp(0, height - 1)
    across = (1 - (x - torch.arange(width, device=cells.device)).abs()).clamp_min(0)
    down = (1 - (y - torch.arange(height, device=cells.device)).abs()).clamp_min(0)
    return (down[..., None] * across[..., None, :]).flatten(-2)


def cell_centres(
    *, size: tuple[int, int], stride: float, device: torch.device | None = None
) -> Tensor:
    """Pixel positions (H*W, 2) of the cells of a (H, W) map, row by row."""
    ys, xs = torch.meshgrid(
        torch.arange(size[0], device=device), torch.arange(size[1], device=device), indexing="ij"
    )
    return grid_to_pixel(torch.stack([xs, ys], dim=-1).reshape(-1, 2).float(), stride)


# Affine maps: (..., 2, 3) matrices acting on column points (x, y, 1).


def apply_affine(matrix: Tensor, points: Tensor) -> Tensor:
    """matrix (..., 2, 3) and points (..., N, 2) -> (..., N, 2)."""
    # Written out: products with an inner size of two are slow as matrix products.
    m = matrix.unsqueeze(-3)
    x, y = points[..., 0, None], points[..., 1, None]
    return x * m[..., 0] + y * m[..., 1] + m[..., 2]


def compose(outer: Tensor, inner: Tensor) -> Tensor:
    """The map `outer o inner`: first inner, then outer. (..., 2, 3) each."""
    linear = outer[..., :2] @ inner[..., :2]
    shift = (outer[..., :2] @ inner[..., 2:]) + outer[..., 2:]
    return torch.cat([linear, shift], dim=-1)


def invert(matrix: Tensor) -> Tensor:
    """The inverse map of an affine map (..., 2, 3); the linear part must not be singular."""
    a, b, c, d = (matrix[..., i, j] for i in (0, 1) for j in (0, 1))
    det = a * d - b * c
    rows = torch.stack([torch.stack([d, -b], -1), torch.stack([-c, a], -1)], -2)
    linear = rows / det[..., None, None]
    return torch.cat([linear, -linear @ matrix[..., 2:]], dim=-1)


# Boxes: (..., 4), inclusive.


def boxes_from_xywh(boxes: Tensor) -> Tensor:
    """COCO's (x, y, width, height), edges at integers, -> our inclusive (x1, y1, x2, y2)."""
    x, y, w, h = boxes.unbind(-1)
    return torch.stack([x, y, x + w - 1, y + h - 1], dim=-1)


def xywh_from_boxes(boxes: Tensor) -> Tensor:
    """Inverse of boxes_from_xywh."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return torch.stack([x1, y1, x2 - x1 + 1, y2 - y1 + 1], dim=-1)


def box_area(boxes: Tensor) -> Tensor:
    """(..., 4) -> (...): inclusive widths times heights, 0 for inverted boxes."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return (x2 - x1 + 1).clamp_min(0) * (y2 - y1 + 1).clamp_min(0)


def box_intersection(boxes0: Tensor, boxes1: Tensor) -> Tensor:
    """(N, 4) and (M, 4) -> (N, M) areas of the common part."""
    low = torch.maximum(boxes0[:, None, :2], boxes1[None, :, :2])
    high = torch.minimum(boxes0[:, None, 2:], boxes1[None, :, 2:])
    return (high - low + 1).clamp_min(0).prod(-1)


def box_iou(boxes0: Tensor, boxes1: Tensor) -> Tensor:
    """(N, 4) and (M, 4) -> (N, M) intersection over union, inclusive widths."""
    common = box_intersection(boxes0, boxes1)
    union = box_area(boxes0)[:, None] + box_area(boxes1)[None, :] - common
    return common / union.clamp_min(torch.finfo(common.dtype).tiny)


def clip_boxes(boxes: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Boxes (..., 4) cut to the pixels of an image of this (height, width)."""
    height, width = size
    top = torch.tensor([width, height] * 2, dtype=boxes.dtype, device=boxes.device) - 1
    return torch.minimum(boxes.clamp_min(0), top)


@dataclass(frozen=True)
class Frame:
    """How an original image and its resized network input share coordinates."""

    original: tuple[int, int]
    """(height, width) of the image as the user sees it, EXIF rotation applied."""
    network: tuple[int, int]
    """(height, width) of the tensor the network saw."""

    def _scale(self, points: Tensor) -> Tensor:
        (oh, ow), (nh, nw) = self.original, self.network
        return torch.tensor([nw / ow, nh / oh], dtype=points.dtype, device=points.device)

    def to_network(self, points: Tensor) -> Tensor:
        """Original pixels (..., 2) -> network pixels (..., 2)."""
        return (points + 0.5) * self._scale(points) - 0.5

    def to_original(self, points: Tensor) -> Tensor:
        """Network pixels (..., 2) -> original pixels (..., 2)."""
        return (points + 0.5) / self._scale(points) - 0.5

    def boxes_to_network(self, boxes: Tensor) -> Tensor:
        """Inclusive boxes (..., 4), original -> network pixels: their outer edges are mapped."""
        edges = boxes + torch.tensor([-0.5, -0.5, 0.5, 0.5], dtype=boxes.dtype, device=boxes.device)
        moved = self.to_network(edges.reshape(*edges.shape[:-1], 2, 2)).flatten(-2)
        return moved + torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=boxes.dtype, device=boxes.device)


def fit_thin_plate(points0: Tensor, points1: Tensor) -> Callable[[Tensor], Tensor]:
    """The thin-plate spline, (M, 2) -> (M, 2), that maps points0 (N, 2) exactly onto points1.

    Its kernel is r^2 log r, without smoothing. Fewer than three points, or points on one line,
    leave the affine part undetermined: the least-norm solution is taken, which for a single pair
    is a mere shift.
    """
    centre = points0.double().mean(0)
    source, target = points0.double() - centre, points1.double()
    count = source.shape[0]
    poly = torch.cat([torch.ones_like(source[:, :1]), source], dim=1)
    top = torch.cat([_thin_plate_kernel(source, source), poly], dim=1)
    bottom = torch.cat([poly.T, poly.new_zeros(3, 3)], dim=1)
    # Residual to the shift keeps the least-norm solution of degenerate sets near the identity.
    right = torch.cat([target - source, target.new_zeros(3, 2)])
    solution = torch.linalg.lstsq(torch.cat([top, bottom]), right, driver="gelsd").solution
    affine: Tensor = solution[count:].clone()
    affine[1:] += torch.eye(2, dtype=affine.dtype)
    affine[0] -= centre @ affine[1:]
    weights: Tensor = solution[:count].to(points0.dtype)
    affine = affine.to(points0.dtype)

    def spline(points: Tensor) -> Tensor:
        straight = torch.cat([torch.ones_like(points[:, :1]), points], dim=1) @ affine
        return straight + _thin_plate_kernel(points, points0) @ weights

    return spline


def _thin_plate_kernel(points: Tensor, centres: Tensor) -> Tensor:
    square = (points[:, None] - centres[None]).square().sum(-1)
    # r^2 log r = r^2 log(r^2) / 2, and 0 at r = 0.
    return 0.5 * square * square.clamp_min(torch.finfo(square.dtype).tiny).log()


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

"""HOG of boxes as Proposal Flow has it (Ham et al. 2016): 8 x 8 cells of 31 numbers, whitened.

The histograms are Felzenszwalb's; whitening is linear discriminant analysis against the mean and
covariance of any photos' cells (Hariharan et al. 2012), estimated once by `fit_background`. Crops
come out of the square that all rows see, so a box's pixels are those of its 80 x 80 crop anyhow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import normalise

CELL = 8
"""Pixels of a cell."""

CELLS = 8
"""Cells of a box each way, without the outermost, which only help to normalise."""

CHANNELS = 31
"""18 signed and 9 unsigned orientations, 4 of texture."""

MARGIN = 1 / 8
"""A crop's margin on each side, in widths and heights of the box."""

RIDGE = 0.01
"""Added to the covariance's diagonal, until it can be inverted."""

_CLIP, _TEXTURE, _SMALL = 0.2, 0.2357, 1e-4

# Crops described at once; bounds memory for any number of boxes.
_CHUNK = 64


def hog_cells(images: Tensor) -> Tensor:
    """(B, 3, H, W) floats, H and W multiples of 8 -> (B, 31, H / 8 - 2, W / 8 - 2)."""
    counts = _oriented_cells(images)
    energy = (counts[:, :9] + counts[:, 9:]).square().sum(1, keepdim=True)
    # Of every cell four normalisers: the energy of the 2 x 2 cells towards each of its corners.
    blocks = (4 * F.avg_pool2d(energy, 2, stride=1) + _SMALL).rsqrt()
    height, width = counts.shape[-2] - 2, counts.shape[-1] - 2
    corners = [
        blocks[..., y : y + height, x : x + width] for y in (1, 0) for x in (1, 0)
    ]  # fmt: skip
    inner = counts[..., 1:-1, 1:-1]
    signed = [(inner * corner).clamp_max(_CLIP) for corner in corners]
    plain = [((inner[:, :9] + inner[:, 9:]) * corner).clamp_max(_CLIP) for corner in corners]
    texture = [_TEXTURE * part.sum(1, keepdim=True) for part in signed]
    halves = (0.5 * torch.stack(parts).sum(0) for parts in (signed, plain))
    return torch.cat([*halves, *texture], dim=1)


def _oriented_cells(images: Tensor) -> Tensor:
    """(B, 3, H, W) -> (B, 18, H / 8, W / 8): gradients of the strongest colour, shared out."""
    height, width = images.shape[-2:]
    if height % CELL or width % CELL:
        raise ValueError(f"sides must be multiples of {CELL} px, not {(height, width)}")
    dx = images[..., 1:-1, 2:] - images[..., 1:-1, :-2]
    dy = images[..., 2:, 1:-1] - images[..., :-2, 1:-1]
    square = dx.square() + dy.square()
    strength, colour = square.max(1, keepdim=True)
    dx, dy = (part.gather(1, colour) for part in (dx, dy))
    angles = torch.arange(9, device=images.device) * (math.pi / 9)
    along = dx * angles.cos()[:, None, None] + dy * angles.sin()[:, None, None]
    best = torch.cat([along, -along], dim=1).argmax(1, keepdim=True)
    votes = torch.zeros_like(along.repeat(1, 2, 1, 1)).scatter_(1, best, strength.sqrt())
    down, across = (_shares(n, device=images.device) for n in (height, width))
    return down @ votes @ across.T


def _shares(pixels: int, *, device: torch.device) -> Tensor:
    """(cells, pixels - 2): how much of each inner pixel a cell gets, linear between centres."""
    places = (torch.arange(1, pixels - 1, device=device) + 0.5) / CELL - 0.5
    cells = torch.arange(pixels // CELL, device=device)
    return (1 - (places - cells[:, None]).abs()).clamp_min(0)


def crops(image: Tensor, boxes: Tensor, *, side: int) -> Tensor:
    """Boxes (N, 4) of an image (3, H, W) with their margin -> (N, 3, side, side).

    Read at twice the resolution and averaged, which keeps large boxes from skipping pixels; beyond
    the image its border pixels are repeated.
    """
    extent = boxes[:, 2:] - boxes[:, :2] + 1
    first, span = boxes[:, :2] - 0.5 - MARGIN * extent, (1 + 2 * MARGIN) * extent
    steps = (torch.arange(2 * side, device=boxes.device) + 0.5) / (2 * side)
    x, y = (first[:, n, None] + steps * span[:, n, None] for n in (0, 1))
    places = torch.stack(
        [x[:, None].expand(-1, 2 * side, -1), y[:, :, None].expand(-1, -1, 2 * side)], dim=-1
    )
    grid = normalise(places, size=(image.shape[-2], image.shape[-1]))
    source = image[None].expand(len(boxes), -1, -1, -1)
    read = F.grid_sample(source, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return F.avg_pool2d(read, 2)


def describe_boxes(image: Tensor, boxes: Tensor) -> Tensor:
    """(N, 1984): the 8 x 8 cells of boxes (N, 4) of an image (3, H, W), cell by cell."""
    side = (CELLS + 2) * CELL
    parts = [
        hog_cells(crops(image, part, side=side)).permute(0, 2, 3, 1).flatten(1)
        for part in torch.split(boxes, _CHUNK)
    ]
    return torch.cat(parts) if parts else image.new_zeros(0, CELLS * CELLS * CHANNELS)


@dataclass(frozen=True, eq=False)
class Background:
    """Mean and stationary covariance of HOG cells of any photos."""

    mean: Tensor
    """(31,)."""
    covariance: Tensor
    """(15, 15, 31, 31): of cells up to 7 apart, by rows and columns between them, plus 7."""
    ridge: int = 1
    """How many times RIDGE is added."""

    def table(self) -> Tensor:
        """(1984, 1984) covariance of a box's cells, float64."""
        y, x = (part.flatten() for part in torch.meshgrid(
            torch.arange(CELLS), torch.arange(CELLS), indexing="ij"))  # fmt: skip
        reach = CELLS - 1
        whole = self.covariance.double()[y - y[:, None] + reach, x - x[:, None] + reach]
        table = whole.permute(0, 2, 1, 3).reshape(CELLS * CELLS * CHANNELS, -1)
        ridge = self.ridge * RIDGE * torch.eye(len(table), dtype=table.dtype)
        return (table + table.T) / 2 + ridge

    def factor(self) -> Tensor:
        """(1984, 1984) lower triangle whose square the table is, float64."""
        lower: Tensor = torch.linalg.cholesky_ex(self.table())[0]
        return lower

    def raised(self) -> Background:
        """The same with the smallest ridge that lets the table be inverted."""

        def inverts(ridge: int) -> bool:
            return not int(torch.linalg.cholesky_ex(replace(self, ridge=ridge).table())[1])

        high = 1
        while not inverts(high):
            high *= 2
        low = high // 2  # does not, or is 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if inverts(middle) else (middle, high)
        return replace(self, ridge=high)


def fit_background(images: Iterable[Tensor], *, halved: bool = True) -> Background:
    """From batches (B, 3, S, S) uint8: as they are, mirrored, and at half the size too."""
    reach = CELLS - 1
    total, cells = torch.zeros(CHANNELS, dtype=torch.float64), 0
    # A last channel of ones, so that products hold sums and counts too.
    shape = (2 * reach + 1, 2 * reach + 1, CHANNELS + 1, CHANNELS + 1)
    products = torch.zeros(shape, dtype=torch.float64)
    for batch in images:
        whole = batch.float()
        # Summed where the photos are: bringing each sum to the host would wait for the device.
        products, total = products.to(whole.device), total.to(whole.device)
        for level in (whole, F.avg_pool2d(whole, 2)) if halved else (whole,):
            for view in (level, level.flip(-1)):
                maps = hog_cells(view)
                total += maps.sum((0, 2, 3)).double()
                cells += maps[:, 0].numel()
                _add_products(torch.cat([maps, torch.ones_like(maps[:, :1])], dim=1), products)
    if not cells:
        raise ValueError("no photos to estimate the background from; pass some")
    products, mean = products.cpu(), total.cpu() / cells
    products /= products[..., -1:, -1:].clamp_min(1)
    first, second = products[..., :-1, -1:], products[..., -1:, :-1]
    # Around the mean of all cells: a plain difference of products would let its error add up.
    covariance = products[..., :-1, :-1] - first * mean - mean[:, None] * second
    covariance += torch.outer(mean, mean)
    return Background(mean.float(), covariance.float()).raised()


def _add_products(maps: Tensor, products: Tensor) -> None:
    """Sums of products of all cells of maps (B, C, h, w) with those a number of cells away."""
    reach, (height, width) = CELLS - 1, maps.shape[-2:]
    for down in range(reach + 1):
        for across in range(-reach, reach + 1):
            if down >= height or abs(across) >= width:
                continue
            left, right = max(0, -across), max(0, across)
            here = maps[..., : height - down, left : width - right].transpose(0, 1).flatten(1)
            there = maps[..., down:, right : width - left].transpose(0, 1).flatten(1)
            product = (here @ there.T).double()
            products[reach + down, reach + across] += product
            if down:  # the same pairs of cells seen from the other end
                products[reach - down, reach - across] += product.T

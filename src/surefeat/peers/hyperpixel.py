"""Hyperpixel Flow (Min, Lee, Ponce, Cho, ICCV 2019): untrained layers, one Hough vote over offsets.

Layers of an ImageNet network at a fine grid, as they are, side by side; every cell of image 0 votes
with every cell of image 1 for the offset between them, and matches of common offsets win. A
keypoint moves as the mean of the boxes around it. Which layers: chosen by its authors on keypoints
of PF-PASCAL's val split, so it is not free of labels. Convention: points are pixels of the resized
image in here; cell (i, j) of a layer with jump J lies at pixel (j J, i J), as the authors have it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import to_dict
from surefeat.core.geometry import Frame
from surefeat.core.image import resize
from surefeat.measure.rows import Row, Transfer, imagenet_trunk
from surefeat.model.features import Features
from surefeat.model.trunks import ResNet50, conv_bn

GEOMETRY = {
    0: (4, 11), 1: (4, 19), 2: (4, 27), 3: (4, 35), 4: (8, 43), 5: (8, 59), 6: (8, 75), 7: (8, 91),
    8: (16, 107), 9: (16, 139),
}  # fmt: skip
"""Of a tap: pixels between its cells, and its receptive field. 0 is the max pooling, 1 to 3 res2a
to res2c, 4 to 7 res3a to res3d, 8 to 13 res4a to res4f, 14 to 16 res5a to res5c."""


@dataclass(frozen=True)
class HyperpixelConfig:
    """Settings, all its authors'."""

    taps: tuple[int, ...] = (2, 7, 11, 12, 13)
    """Layers, each before its block's last ReLU; the first one's grid is that of all."""
    longest: int = 300
    """Longest side at which an image is seen, pixels; smaller ones are left as they are."""
    power: int = 3
    """Of the rectified cosine, which makes a vote."""
    cells: int = 8192
    """Of the histogram of offsets."""
    blur: int = 7
    """Side of the Gaussian over the histogram, cells; also its full width at half maximum
    doubled."""


DEFAULT = HyperpixelConfig()


@dataclass(frozen=True, eq=False)
class Grid:
    """Cells of one image that are compared."""

    centres: Tensor
    """(N, 2) pixels of the resized image."""
    size: tuple[int, int]
    """(height, width) of the resized image."""
    half: int
    """Half the side of a cell's box, pixels."""


@dataclass(frozen=True, eq=False)
class Hyperpixels:
    """One image: its layers, and the part of the first one's grid that is compared."""

    layers: tuple[Tensor, ...]
    """(C, h, w) each with its own size, the first one's the finest."""
    rows: slice
    columns: slice
    grid: Grid

    def grown(self, maps: Tensor) -> Tensor:
        """Maps (K, h, w) of any layer -> (K, N) at the compared cells of the first one.

        Bilinear with the corners' cells in each other's place, as two small products: ten times
        as fast as torch's own on many small maps.
        """
        size = self.layers[0].shape[-2:]
        if maps.shape[-2:] == size:
            return maps[:, self.rows, self.columns].flatten(1)
        down, across = (
            _between(own, whole, device=maps.device)[part]
            for own, whole, part in zip(
                maps.shape[-2:], size, (self.rows, self.columns), strict=True
            )
        )
        return (down @ (maps @ across.T)).flatten(1)

    def lengths(self) -> Tensor:
        """(N,): of all layers' vectors in one."""
        return sum(
            (self.grown(layer).square().sum(0) for layer in self.layers), torch.zeros(())
        ).sqrt()  # fmt: skip


def tap_layers(trunk: ResNet50, image: Tensor, taps: Sequence[int]) -> tuple[Tensor, ...]:
    """(3, H, W) uint8 -> the taps (C, h, w), each before the ReLU that ends its block."""
    mean, std = (
        torch.tensor(values, device=image.device)[:, None, None]
        for values in (trunk.mean, trunk.std)
    )
    x = (image.float() / 255 - mean)[None] / std
    x = F.max_pool2d(conv_bn(x, trunk.conv1, trunk.bn1), 3, stride=2, padding=1)
    layers = {0: x[0]}
    stages = (getattr(trunk, f"layer{stage}") for stage in (1, 2, 3, 4))
    for number, block in enumerate((block for stage in stages for block in stage), start=1):
        if number > max(taps):
            break
        raw = block(x, relu=False)
        layers[number], x = raw[0], F.relu(raw)
    return tuple(layers[tap] for tap in taps)


def hyperpixels(trunk: ResNet50, image: Tensor, config: HyperpixelConfig = DEFAULT) -> Hyperpixels:
    """Layers of (3, H, W) uint8; boxes that reach more than a cell beyond the image are dropped."""
    jump, field = GEOMETRY[config.taps[0]]
    layers = tap_layers(trunk, image, config.taps)
    size, half = (image.shape[-2], image.shape[-1]), field // 2
    rows, columns = (
        _inside(count, pixels, jump=jump, half=half)
        for count, pixels in zip(layers[0].shape[-2:], size, strict=True)
    )
    ys, xs = (
        torch.arange(part.start, part.stop, device=image.device) * float(jump)
        for part in (rows, columns)
    )
    centres = torch.cartesian_prod(ys, xs).flip(-1)
    return Hyperpixels(layers, rows, columns, Grid(centres, size, half))


def _inside(count: int, pixels: int, *, jump: int, half: int) -> slice:
    """Of a row of cells, those whose box ends at most a cell beyond the image."""
    first = math.ceil((half - jump) / jump)
    last = (pixels + jump - half) // jump
    kept = slice(max(0, first), min(count, last + 1))
    if kept.start >= kept.stop:
        raise ValueError(f"an image with a side of {pixels} px is too small for boxes of {2 * half}"
                         " px; pass a larger one")  # fmt: skip
    return kept


def _between(few: int, many: int, *, device: torch.device) -> Tensor:
    """(many, few): weights that grow a line of cells, its ends in their place."""
    places = torch.linspace(0, few - 1, many, device=device)
    return (1 - (places[:, None] - torch.arange(few, device=device)).abs()).clamp_min(0)


def cosines(first: Hyperpixels, second: Hyperpixels) -> Tensor:
    """(N, M): of all pairs of cells.

    Growing a layer is linear, so coarse layers are multiplied first and their products grown,
    which is exact and leaves a third of the arithmetic.
    """
    total = torch.zeros(())
    sizes = dict.fromkeys(layer.shape[-2:] for layer in first.layers)
    for size in sizes:
        layers0, layers1 = (
            torch.cat([side.layers[n] for n, own in enumerate(first.layers)
                       if own.shape[-2:] == size])
            for side in (first, second)
        )  # fmt: skip
        if size == first.layers[0].shape[-2:]:
            product = first.grown(layers0).T @ second.grown(layers1)
        else:
            coarse = layers0.flatten(1).T @ layers1.flatten(1)
            across = second.grown(coarse.reshape(-1, *layers1.shape[-2:]))
            product = first.grown(across.T.reshape(-1, *layers0.shape[-2:])).T
        total = total.to(product.device) + product
    return total / (first.lengths()[:, None] * second.lengths()).clamp_min(1e-12)


def gaussian(side: int, *, device: torch.device | None = None) -> Tensor:
    """(side, side), sums to 1; its full width at half maximum is half the side."""
    deviation = side / (2 * 2.354)
    steps = torch.arange(side, device=device) - (side - 1) / 2
    line = (-steps.square() / (2 * deviation**2)).exp()
    return torch.outer(line, line) / line.sum().square()


def offset_bins(grid0: Grid, grid1: Grid, cells: int) -> tuple[Tensor, tuple[int, int]]:
    """For all pairs of cells (N, M) the bin of their offset, and the histogram's (rows, columns).

    The offset is counted from where image 0's far corner would lie, so that none is negative.
    """
    (height0, width0), (height1, width1) = grid0.size, grid1.size
    side = math.sqrt((width0 + width1) * (height0 + height1) / cells)
    corner = grid0.centres.new_tensor([width0, height0])
    x, y = (
        ((start[:, None] + end) / side).floor().clamp_min_(0).long()
        for start, end in zip((corner - grid0.centres).T, grid1.centres.T, strict=True)
    )
    columns, rows = (int(of / side) + 1 for of in (width0 + width1, height0 + height1))
    return y.clamp_max_(rows - 1) * columns + x.clamp_max_(columns - 1), (rows, columns)


def hough_scores(
    cosine: Tensor, grid0: Grid, grid1: Grid, config: HyperpixelConfig = DEFAULT
) -> Tensor:
    """Cosines (N, M) -> each vote times the votes for its offset (N, M)."""
    votes = cosine.clamp_min(0).pow(config.power)
    bins, size = offset_bins(grid0, grid1, config.cells)
    counts = votes.new_zeros(size[0] * size[1]).index_add_(0, bins.flatten(), votes.flatten())
    kernel = gaussian(config.blur, device=cosine.device)[None, None]
    smooth = F.conv2d(counts.reshape(1, 1, *size), kernel, padding=config.blur // 2)
    return votes * smooth.flatten()[bins]


def move_points(points: Tensor, grid: Grid, targets: Tensor) -> Tensor:
    """Points (V, 2) moved by the mean of the boxes that hold them; targets (N, 2): new centres.

    A point near the border that lies in no box moves with the nearest.
    """
    apart = (points[:, None] - grid.centres).abs().amax(-1)
    near = apart <= grid.half
    near |= (apart == apart.amin(1, keepdim=True)) & ~near.any(1, keepdim=True)
    share = near.float() / near.sum(1, keepdim=True)
    return points + share @ (targets - grid.centres)


def hough_transfer(
    cosine: Tensor, grid0: Grid, grid1: Grid, points: Tensor, config: HyperpixelConfig = DEFAULT
) -> Tensor:
    """Points (V, 2) of image 0 -> of image 1, pixels of the resized images."""
    best = hough_scores(cosine, grid0, grid1, config).argmax(1)
    return move_points(points, grid0, grid1.centres[best])


def shrink(image: Tensor, longest: int) -> tuple[Tensor, Frame]:
    """(3, H, W) uint8 with its longest side at most so many pixels, aspect kept."""
    height, width = image.shape[-2:]
    scale = min(1.0, longest / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    return resize(image, size=size), Frame((height, width), size)


def hyperpixel_transfer(trunk: ResNet50, config: HyperpixelConfig = DEFAULT) -> Transfer:
    """Hyperpixel Flow as a row's own way."""

    @torch.no_grad()
    def transfer(image0: Tensor, image1: Tensor, points0: Tensor) -> Tensor:
        (small0, frame0), (small1, frame1) = (
            shrink(image, config.longest) for image in (image0, image1)
        )
        first, second = (hyperpixels(trunk, image, config) for image in (small0, small1))
        asked = frame0.to_network(points0.to(first.grid.centres))
        moved = hough_transfer(cosines(first, second), first.grid, second.grid, asked, config)
        return frame1.to_original(moved)

    return transfer


def hyperpixel_row(
    *, init: Sequence[str | Path], device: torch.device, config: HyperpixelConfig = DEFAULT
) -> Row:
    """The row `hyperpixel-flow`: it is measured by its own way alone."""
    trunk, digest = imagenet_trunk("resnet50", init, device=device, dilated=False)
    assert isinstance(trunk, ResNet50)
    about = {"layers chosen": "by its authors on PF-PASCAL val keypoints"}
    return Row(
        "hyperpixel-flow",
        _no_features,
        weights_sha256=digest,
        measures=("own",),
        transfer=hyperpixel_transfer(trunk, config),
        settings={"trunk": "resnet50", **to_dict(config), **about},
    )


def _no_features(images: Tensor) -> list[Features]:
    raise ValueError("hyperpixel-flow matches in its own way alone; measure it by `own`")

"""Two random affine views of each image: mirror padding, colour change, the exact point map.

Everything is drawn per image from one generator and rendered once, on the tensors' device.
Convention: a view's affine map takes view pixels to source pixels (the inverse warp that rendering
needs); `Views.warp` takes pixels of view 0 to pixels of view 1, the paper's g = ghat' o ghat^-1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import apply_affine, compose, invert, normalise
from surefeat.learn.config import ColourConfig, WarpConfig

# ITU-R 601 luma, as in OpenCV's and Pillow's grey conversion.
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Views:
    """Two rendered views of B images and how their pixels correspond."""

    view0: Tensor
    """(B, 3, S, S) in [0, 1]."""
    view1: Tensor
    """(B, 3, S, S) in [0, 1]."""
    warp: Tensor
    """(B, 2, 3): pixels of view 0 -> pixels of view 1."""


@dataclass(frozen=True)
class Draws:
    """All random numbers of a batch, so that processes can share one batch (see `part`)."""

    affine: Tensor
    """(B, 2, 8) in [0, 1): per view rotation, 4 linear entries, 2 translations, zoom."""
    flip: Tensor
    """(B,) in [0, 1): whether the second view is mirrored."""
    colour: Tensor
    """(B, 2, 9) in [0, 1): per view 4 switches, 4 amounts, order."""
    points: Tensor
    """(B, K, 2) in [0, 1): candidate points of view 0."""

    def part(self, rows: slice) -> Draws:
        """The draws of some of the images."""
        return Draws(self.affine[rows], self.flip[rows], self.colour[rows], self.points[rows])


# Candidates per wanted point: enough that a pair overlapping by a quarter still fills its set.
_CANDIDATES = 4


def draw(batch: int, *, points: int, generator: torch.Generator) -> Draws:
    """Random numbers for a batch of images, on the generator's device."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=generator.device)

    return Draws(
        affine=uniform(batch, 2, 8),
        flip=uniform(batch),
        colour=uniform(batch, 2, 9),
        points=uniform(batch, _CANDIDATES * points, 2),
    )


def two_views(
    pixels: Tensor, sizes: Tensor, draws: Draws, warp: WarpConfig, colour: ColourConfig
) -> Views:
    """Render both views of images that lie in the top-left corner of a canvas.

    pixels: (B, 3, H, W) uint8 or float in [0, 1]; sizes: (B, 2) used (height, width).
    """
    to_source = view_maps(sizes, draws, warp)
    source = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
    view0, view1 = (render(source, sizes, to_source[:, i], side=warp.size) for i in (0, 1))
    view0, view1 = (
        change_colour(view, draws.colour[:, i], colour) for i, view in enumerate((view0, view1))
    )
    pair = compose(invert(to_source[:, 1]), to_source[:, 0])
    return Views(view0=view0, view1=view1, warp=pair)


def view_maps(sizes: Tensor, draws: Draws, config: WarpConfig) -> Tensor:
    """(B, 2, 2, 3): for each of the two views, view pixels -> source pixels.

    A view is a square of `zoom` times the image's side (geometric mean of width and height),
    centred on the image, then transformed by the random linear map and shift.
    """
    uniform = draws.affine * 2 - 1
    angle = uniform[..., 0] * math.radians(config.rotation)
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    linear = rotation * (1 + uniform[..., 1:5].reshape(*uniform.shape[:-1], 2, 2) * config.linear)
    low, high = config.zoom
    zoom = low + (high - low) * draws.affine[..., 7]
    # The second view alone looks at the image in a mirror, so that the two face opposite ways.
    turned = torch.ones_like(linear)
    turned[:, 1, 0] = torch.where(draws.flip < config.mirrored, -1.0, 1.0)[:, None]
    linear = linear * turned

    extent = sizes.to(linear.dtype).flip(-1)  # (width, height)
    half_side = extent.prod(-1).sqrt()[:, None] * zoom / 2
    shift = uniform[..., 5:7] * config.translation * half_side[..., None]
    centre = (extent - 1)[:, None] / 2 + shift
    # View pixels v in [0, S-1] are centred on (S-1)/2 and scaled so that S pixels span the side.
    scaled = linear * (half_side * 2 / config.size)[..., None, None]
    middle = torch.full_like(centre, (config.size - 1) / 2)
    offset = centre - (scaled @ middle[..., None])[..., 0]
    return torch.cat([scaled, offset[..., None]], dim=-1)


def render(source: Tensor, sizes: Tensor, to_source: Tensor, *, side: int) -> Tensor:
    """Sample (B, 3, H, W) at the places a (B, 2, 3) map names -> (B, 3, side, side).

    Convention: outside its used (height, width) an image continues as its symmetric mirror image
    (the edge pixel is repeated), without end.
    """
    steps = torch.arange(side, device=source.device, dtype=to_source.dtype)
    ys, xs = torch.meshgrid(steps, steps, indexing="ij")
    points = apply_affine(to_source, torch.stack([xs, ys], -1).reshape(1, -1, 2))
    return sample_mirrored(source, sizes, points, side=side)


def sample_mirrored(source: Tensor, sizes: Tensor, points: Tensor, *, side: int) -> Tensor:
    """Read (B, 3, H, W) at points (B, side * side, 2), source pixels, row by row.

    Convention: as of `render`, whatever moved the points.
    """
    grid = normalise(mirror(points, sizes), size=(source.shape[-2], source.shape[-1]))
    grid = grid.reshape(-1, side, side, 2).to(source.dtype)
    return F.grid_sample(source, grid, mode="bilinear", padding_mode="border", align_corners=False)


def mirror(points: Tensor, sizes: Tensor) -> Tensor:
    """Fold points (B, N, 2) into images of (B, 2) sizes as symmetric mirroring does."""
    extent = sizes.to(points.dtype).flip(-1)[:, None]
    phase = torch.remainder(points + 0.5, 2 * extent)
    folded = torch.minimum(phase, 2 * extent - phase) - 0.5
    # Between the outermost centre and the edge the mirror image repeats the edge pixel.
    return torch.minimum(folded.clamp_min(0), extent - 1)


def corresponding_points(
    views: Views, draws: Draws, *, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Random points of view 0 whose images lie in view 1.

    -> points0 (B, count, 2), points1 (B, count, 2) pixels, and valid (B,): False where the views do
    not overlap at all. Where fewer than `count` candidates stay inside, they are repeated.
    """
    return shared_points(views.warp, draws, side=views.view0.shape[-1], count=count)


def shared_points(
    warp: Tensor, draws: Draws, *, side: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for views of `side` pixels that are not at hand, only their warp (B, 2, 3)."""
    candidates = draws.points * side - 0.5
    moved = apply_affine(warp, candidates)
    inside = ((moved >= -0.5) & (moved <= side - 0.5)).all(-1)
    # Stable sort keeps the random order among the candidates that stay inside.
    order = inside.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    found = inside.sum(1, keepdim=True)
    slot = torch.arange(count, device=order.device)[None] % found.clamp_min(1)
    chosen = order.gather(1, slot)[..., None].expand(-1, -1, 2)
    return candidates.gather(1, chosen), moved.gather(1, chosen), found[:, 0] > 0


def change_colour(images: Tensor, draws: Tensor, config: ColourConfig) -> Tensor:
    """SSD's photometric changes: (B, 3, H, W) in [0, 1] with (B, 9) draws -> the same, clamped.

    Brightness, then contrast either before or after saturation and hue. Each is affine in RGB, so
    saturation and hue are one 3x3 matrix per image. Hue turns RGB about the grey axis.
    """
    on = (draws[:, :4] < config.probability).to(images.dtype)
    amount = (draws[:, 4:8] * 2 - 1) * on * config.strength
    bright = (amount[:, 0] * config.brightness)[:, None, None, None]
    contrast = (1 + amount[:, 1] * config.contrast).clamp_min(0)
    saturation = (1 + amount[:, 2] * config.saturation).clamp_min(0)
    tint = _hue_matrix(amount[:, 3] * math.radians(config.hue)) @ _saturation_matrix(saturation)
    # Scaling commutes with a matrix; what the order changes is which clamp comes between.
    contrast_first = draws[:, 8] < 0.5
    before = torch.where(contrast_first, contrast, 1.0)[:, None, None, None]
    after = torch.where(contrast_first, 1.0, contrast)[:, None, None, None]
    first = ((images + bright) * before).clamp(0, 1)
    turned = (tint[:, :, :, None, None] * first[:, None]).sum(2).clamp(0, 1)
    return (turned * after).clamp(0, 1)


def _saturation_matrix(factor: Tensor) -> Tensor:
    """(B,) -> (B, 3, 3): blend with the grey image; 1 leaves it alone, 0 gives grey."""
    grey = [(1 - factor) * share for share in _LUMA]
    rows = [grey[j] + factor if i == j else grey[j] for i in range(3) for j in range(3)]
    return torch.stack(rows, -1).view(-1, 3, 3)


def _hue_matrix(angle: Tensor) -> Tensor:
    """(B,) radians -> (B, 3, 3): rotation about the grey axis (Rodrigues), which is circulant."""
    third, turn = (1 - angle.cos()) / 3, angle.sin() / math.sqrt(3)
    same, down, up = angle.cos() + third, third - turn, third + turn
    rows = [same, down, up, up, same, down, down, up, same]
    return torch.stack(rows, -1).view(-1, 3, 3)

"""gCNN (Rocco, Arandjelovic, Sivic, CVPR 2017): a warp read off the correlation of two maps.

VGG16 up to pool4, which never learns, the correlation of all cells of A with all of B, and a small
network that regresses an affine map, another a thin-plate one; both learn from photos and their own
warps. Convention: coordinates are normalised, -1 and 1 at the centres of the outermost pixels; a
warp takes points of B to A, the direction in which A is sampled to look like B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefeat.core.files import from_dict, to_dict
from surefeat.core.geometry import apply_affine
from surefeat.core.image import resize
from surefeat.data.decode import Canvas, batch_indices
from surefeat.learn.runs import Run
from surefeat.learn.warp import sample_mirrored
from surefeat.measure.rows import Row, Transfer
from surefeat.model.features import Features
from surefeat.peers.fitting import (
    Extract,
    FitConfig,
    StoredPeer,
    Training,
    frozen_vgg,
    generator_of,
    learn_peer,
    learned,
    new_network,
    save_peer,
)

VIEW = 9 / 16
"""Side of a view in sides of the photo."""

GRID = 20
"""Points each way at which two warps are compared."""

WARPS = ("affine", "tps")
"""What is regressed, in the order of training."""


@dataclass(frozen=True)
class GcnnConfig:
    """Settings; the defaults are its authors' of 2017."""

    side: int = 240
    """At which photos are seen, pixels."""
    cells: int = 15
    """Of the map each way."""
    kernels: tuple[int, int] = (7, 5)
    """Of the regressor's two convolutions."""
    channels: tuple[int, int] = (128, 64)
    rotation: float = 30.0
    """Degrees, at most, of the affine warps."""
    linear: float = 0.5
    """Each linear entry is multiplied by its own 1 +- this."""
    shift: float = 0.5
    """Of affine warps, at most, in half sides."""
    control: float = 0.4
    """What a control point of thin-plate warps moves by at most, in half sides."""
    photo: int = 384
    """Longest side at which training photos are kept, pixels."""
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=16_700, cosine=True))


# Thin-plate warps: 3 x 3 control points, in columns.

_STEPS = (-1.0, 0.0, 1.0)
CONTROL = torch.tensor([[x, y] for x in _STEPS for y in _STEPS])
"""(9, 2)."""


def _kernel(points: Tensor, centres: Tensor) -> Tensor:
    square = (points[..., None, :] - centres).square().sum(-1)
    return square * square.clamp_min(torch.finfo(square.dtype).tiny).log()


def plate_matrix(points: Tensor) -> Tensor:
    """(..., 9) for points (..., 2): what each control point's image counts there; rows sum to 1."""
    control = CONTROL.to(device=points.device, dtype=torch.float64)
    poly = torch.cat([torch.ones(9, 1, dtype=torch.float64, device=points.device), control], dim=1)
    system = torch.zeros(12, 12, dtype=torch.float64, device=points.device)
    system[:9, :9], system[:9, 9:], system[9:, :9] = _kernel(control, control), poly, poly.T
    exact = points.double()
    basis = torch.cat([_kernel(exact, control), torch.ones_like(exact[..., :1]), exact], dim=-1)
    inverse: Tensor = torch.linalg.inv(system)
    return (basis @ inverse[:, :9]).to(points.dtype)


def warp_points(theta: Tensor, points: Tensor) -> Tensor:
    """Points (B, P, 2), or (P, 2) for all, by affine (B, 6) or thin-plate (B, 18) warps.

    Affine: a 2 x 3 matrix row by row. Thin-plate: the control points' 9 x, then their 9 y.
    """
    if theta.shape[-1] == 6:
        points = points.expand(len(theta), *points.shape[-2:])
        return apply_affine(theta.reshape(-1, 2, 3), points)
    return plate_matrix(points) @ theta.reshape(-1, 2, 9).transpose(1, 2)


def identity(warp: str) -> Tensor:
    """(6,) or (18,): the warp that leaves all as it is."""
    if warp == "affine":
        return torch.tensor([1.0, 0, 0, 0, 1, 0])
    return CONTROL.T.flatten()


def even_points(side: int, *, device: torch.device | None = None) -> Tensor:
    """(side * side, 2) normalised, row by row, from corner to corner."""
    line = torch.linspace(-1, 1, side, device=device)
    return torch.cartesian_prod(line, line).flip(-1)


def warp_grid(theta: Tensor, side: int) -> Tensor:
    """Even points (B, side * side, 2) under affine (B, 6) or thin-plate (B, 18) warps."""
    if theta.shape[-1] == 6:
        return warp_points(theta, even_points(side, device=theta.device).to(theta.dtype))
    matrix = _even_plate(side, theta.device, theta.dtype)
    return matrix @ theta.reshape(-1, 2, 9).transpose(1, 2)


@lru_cache(maxsize=8)
def _even_plate(side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """plate_matrix of even points: the same in every step, and inverting waits for the device."""
    return plate_matrix(even_points(side, device=device).to(dtype))


def draw_warps(
    warp: str, batch: int, config: GcnnConfig, generator: torch.Generator
) -> Tensor:  # fmt: skip
    """Random warps (B, 6) or (B, 18), on the generator's device."""
    device = generator.device
    if warp == "tps":
        moves = 2 * torch.rand(batch, 18, generator=generator, device=device) - 1
        return identity("tps").to(device) + config.control * moves
    drawn = 2 * torch.rand(batch, 7, generator=generator, device=device) - 1
    angle = drawn[:, 0] * math.radians(config.rotation)
    cos, sin = angle.cos(), angle.sin()
    linear = torch.stack([cos, -sin, sin, cos], dim=1) * (1 + config.linear * drawn[:, 1:5])
    shift = config.shift * drawn[:, 5:]
    return torch.cat([linear[:, :2], shift[:, :1], linear[:, 2:], shift[:, 1:]], dim=1)


def render_views(source: Tensor, sizes: Tensor, theta: Tensor, *, side: int) -> Tensor:
    """Views (B, 3, side, side) of photos (B, 3, H, W) in [0, 1]: the middle, warped by theta.

    sizes (B, 2): the used (height, width). Beyond its border a photo goes on as its mirror image.
    """
    places = VIEW * warp_grid(theta, side)
    half = (sizes.to(places).flip(-1)[:, None] - 1) / 2
    return sample_mirrored(source, sizes, half + places * half, side=side)


# The network.


def unit_cells(maps: Tensor) -> Tensor:
    """Maps (B, C, h, w) of length 1 along C, or less where there is next to nothing."""
    return maps * (maps.square().sum(1, keepdim=True) + 1e-6).rsqrt()


def correlate(first: Tensor, second: Tensor) -> Tensor:
    """Maps (B, C, h, w) of A and B -> (B, h * w, h, w): how each cell of B fits all cells of A.

    Rectified, and of unit length for every cell of B, so that what fits many cells counts little.
    """
    first, second = unit_cells(first), unit_cells(second)
    products = first.flatten(2).transpose(1, 2) @ second.flatten(2)
    return unit_cells(products.reshape(len(first), -1, *second.shape[-2:]).clamp_min(0))


class Regressor(nn.Module):
    """From a correlation to the numbers of a warp."""

    def __init__(self, config: GcnnConfig, outputs: int) -> None:
        super().__init__()
        (size0, size1), (wide0, wide1) = config.kernels, config.channels
        self.layers = nn.Sequential(
            nn.Conv2d(config.cells**2, wide0, size0), nn.BatchNorm2d(wide0), nn.ReLU(),
            nn.Conv2d(wide0, wide1, size1), nn.BatchNorm2d(wide1), nn.ReLU(),
        )  # fmt: skip
        left = config.cells - size0 - size1 + 2
        self.last = nn.Linear(wide1 * left * left, outputs)

    def forward(self, correlation: Tensor) -> Tensor:
        theta: Tensor = self.last(self.layers(correlation).flatten(1))
        return theta


class Gcnn(nn.Module):
    """Both regressors; the trunk is not part of it, as it never learns."""

    def __init__(self, config: GcnnConfig) -> None:
        super().__init__()
        self.config = config
        self.affine, self.tps = Regressor(config, 6), Regressor(config, 18)

    def forward(self, warp: str, first: Tensor, second: Tensor) -> Tensor:
        """Maps of A and B -> the warp (B, 6) or (B, 18) from B to A."""
        theta: Tensor = getattr(self, warp)(correlate(first, second))
        return theta


def grid_loss(theta: Tensor, truth: Tensor) -> Tensor:
    """Mean squared distance between where two warps (B, 6) or (B, 18) take a grid."""
    apart = warp_grid(theta, GRID) - warp_grid(truth, GRID)
    return apart.square().sum(-1).mean()


def middle_maps(
    extract: Extract, photos: Tensor, sizes: Tensor, config: GcnnConfig
) -> Tensor:  # fmt: skip
    """Maps (B, C, cells, cells) of the middle of photos (B, 3, S, S) in [0, 1], not warped: A."""
    plain = identity("affine").to(photos.device).expand(len(photos), 6)
    return extract(render_views(photos, sizes, plain, side=config.side))


def step_losses(
    model: Gcnn, extract: Extract, photos: Tensor, sizes: Tensor, generator: torch.Generator,
    *, first: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The losses of a batch (B, 3, S, S) in [0, 1] for both kinds of warp; `loss` is their sum.

    The two networks share nothing that learns, so this is training them apart. first: what
    middle_maps gave for the photos, if it is known.
    """
    config = model.config
    if first is None:
        first = middle_maps(extract, photos, sizes, config)
    truths = [draw_warps(warp, len(photos), config, generator) for warp in WARPS]
    views = [render_views(photos, sizes, truth, side=config.side) for truth in truths]
    second = torch.split(extract(torch.cat(views)), len(photos))
    losses = {
        warp: grid_loss(model(warp, first, maps), truth)
        for warp, maps, truth in zip(WARPS, second, truths, strict=True)
    }
    return {"loss": losses["affine"] + losses["tps"], **losses}


def learn_gcnn(
    canvas: Canvas, run: Run, config: GcnnConfig, extract: Extract, *, about: dict[str, Any],
    device: torch.device, quiet: bool,
) -> float:  # fmt: skip
    """Train both networks on decoded photos and write them to the run's model/; the last loss."""
    model = new_network(lambda: Gcnn(config), seed=config.fit.seed, device=device)
    pixels, sizes, kept = canvas.pixels, canvas.sizes, None
    if device.type == "cuda":
        pixels, sizes = pixels.to(device), sizes.to(device)
        # The trunk answers in this type there, so nothing is lost; 1.4 GB of 6,000 photos.
        kept = torch.cat([
            middle_maps(extract, part.float() / 255, own, config).bfloat16()
            for part, own in zip(torch.split(pixels, 32), torch.split(sizes, 32), strict=True)
        ])  # fmt: skip

    def step(number: int) -> dict[str, Tensor]:
        fit = config.fit
        rows = batch_indices(number, batch=fit.batch, count=len(pixels), seed=fit.seed)
        rows = rows.to(pixels.device)
        photos, own = pixels[rows].to(device).float() / 255, sizes[rows].to(device)
        drawn = generator_of(fit.seed, number, device)
        first = None if kept is None else kept[rows].float()
        return step_losses(model.train(), extract, photos, own, drawn, first=first)

    training = Training(model, step, ("loss", *WARPS))
    learn_peer(training, run, config.fit, quiet=quiet)
    save_peer(run.folder / "model", "gcnn", to_dict(config), model.state_dict(), about)
    return float(run.metrics()[-1]["loss"])


# Use.


def to_unit(points: Tensor, size: tuple[int, int]) -> Tensor:
    """Pixels (..., 2) of an image of (height, width) -> normalised."""
    last = points.new_tensor([size[1] - 1, size[0] - 1]).clamp_min(1)
    return 2 * points / last - 1


def from_unit(points: Tensor, size: tuple[int, int]) -> Tensor:
    """Inverse of to_unit."""
    last = points.new_tensor([size[1] - 1, size[0] - 1]).clamp_min(1)
    return (points + 1) / 2 * last


def resample(images: Tensor, theta: Tensor) -> Tensor:
    """Images (B, 3, S, S) sampled by warps (B, 6) or (B, 18), as large; nothing outside."""
    side = images.shape[-1]
    grid = warp_grid(theta, side).reshape(-1, side, side, 2)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=True)


def move_by(thetas: Sequence[Tensor], points: Tensor) -> Tensor:
    """Normalised points (P, 2) of B -> A, by the stages' warps in the order they were found.

    The last stage looked at what the first had made of A, so its warp acts first.
    """
    moved = points
    for theta in reversed(thetas):
        moved = warp_points(theta, moved)[0]
    return moved


def gcnn_transfer(model: Gcnn, extract: Extract, stages: Sequence[str]) -> Transfer:
    """A row's own way: keypoints of image 0 go to image 1, so image 1 is A, image 0 is B."""
    side = model.config.side

    @torch.no_grad()
    def transfer(image0: Tensor, image1: Tensor, points0: Tensor) -> Tensor:
        second, first = (
            resize(image, size=(side, side))[None].float() / 255 for image in (image0, image1)
        )
        sizes = [(image.shape[-2], image.shape[-1]) for image in (image0, image1)]
        thetas: list[Tensor] = []
        maps = extract(second)
        for stage in stages:
            thetas.append(model(stage, extract(first), maps))
            first = resample(first, thetas[-1])
        asked = to_unit(points0.to(maps), sizes[0])
        return from_unit(move_by(thetas, asked), sizes[1])

    return transfer


def gcnn_row(
    name: str, stored: StoredPeer, *, init: Sequence[str | Path], device: torch.device
) -> Row:
    """`gcnn`: both stages; a name that ends in -affine or -tps: that one alone."""
    config: GcnnConfig = from_dict(GcnnConfig, dict(stored.settings))
    model = learned(Gcnn(config), stored.tensors, device=device)
    extract, digest = frozen_vgg(init, device=device)
    stages = [warp for warp in WARPS if name.endswith(f"-{warp}")] or list(WARPS)
    settings = {"stages": stages, "trunk_sha256": digest, "trained on": dict(stored.about)}
    return Row(
        name, _no_maps, weights_sha256=stored.digest, measures=("own",),
        transfer=gcnn_transfer(model, extract, stages),
        settings=settings | {"peer": dict(stored.settings)},
    )  # fmt: skip


def _no_maps(images: Tensor) -> list[Features]:
    raise ValueError("gcnn matches in its own way alone (its maps are the row vgg16's)")

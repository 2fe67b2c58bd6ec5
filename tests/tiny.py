"""Small inputs for the tests: images, trainings, models and features made in a second."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from hostile import add_member, encode
from surefeat.core.geometry import Frame, apply_affine, cell_centres, fit_thin_plate, normalise
from surefeat.core.image import resize
from surefeat.data.decode import Batches, Canvas, Item
from surefeat.data.drawn import draw_many, write_folder
from surefeat.learn.config import Config, preset
from surefeat.learn.loop import Progress
from surefeat.learn.pretrain import Pretrained, pretrain, train
from surefeat.learn.runs import Run
from surefeat.match.points import matching_text
from surefeat.match.related import PAIR_SIGNS, POINT_SIGNS
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort, Logistic, Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CPU = torch.device("cpu")
SIDE = 48
"""Pixels of a drawn training image, and of a crop for keypoints."""


# Image files and tar shards of them.


def write(path: Path, *, size: tuple[int, int] = (10, 8), colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {"jpg": "JPEG", "tif": "TIFF"}.get(path.suffix[1:], path.suffix[1:].upper())
    path.write_bytes(encode(Image.new("RGB", size, colour), kind))
    return path


def shard(path: Path, members: dict[str, np.ndarray]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, image in members.items():
            add_member(tar, name, encode(Image.fromarray(image), "PNG"))
    return path


def gradient(height: int, width: int) -> np.ndarray:
    """Red is the column, green the row: a crop shows where it was cut."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8)


def names(items: list[Item]) -> list[str]:
    return [item.name for item in items]


# A training that takes a second: drawn images and settings for them.


def tiny(*, size: int = 32, points: int = 24, sigma_warmup: int = 3, **train: Any) -> Config:
    """The small preset for 48 pixel images, with some settings of the loop."""
    small = preset("small")
    loop: dict[str, Any] = {
        "steps": 12, "batch": 4, "lr_warmup": 2, "decay": "constant", "log_every": 3,
        "checkpoint_every": 4,
    }  # fmt: skip
    return replace(
        small,
        warp=replace(small.warp, size=size),
        loss=replace(small.loss, points=points, ignore_radius=10.0, sigma_warmup=sigma_warmup),
        train=replace(small.train, **(loop | train)),
        data=replace(small.data, side=SIDE, held_out=2, workers=1, memory="host"),
    )


def still(**settings: Any) -> Config:
    """Nothing moves: with the same images and views the loss is the same at every step."""
    return tiny(lr=0.0, head_lr=0.0, weight_decay=0.0, sigma_warmup=0, **settings)


def images(folder: Path, *, count: int = 11) -> Path:
    write_folder(folder, count=count, size=SIDE, seed=0)
    return folder


def canvas(count: int) -> Canvas:
    drawn = [one.image for one in draw_many(count, size=SIDE, seed=0)]
    sizes = torch.full((count, 2), SIDE, dtype=torch.int32)
    return Canvas(torch.stack(drawn), sizes, tuple(f"{i}.png" for i in range(count)), ())


def learn(source: Path, out: Path, config: Config | None = None, **more: Any) -> Pretrained:
    """pretrain on the CPU from random weights."""
    return pretrain(
        source, out=out, config=config, **{"init": "none"} | more, device="cpu", quiet=True
    )


def small_model(config: Config, *, seed: int = 0) -> DenseFeatures:
    torch.manual_seed(seed)
    return DenseFeatures.create(config.model, init="none")


def go(
    folder: Path,
    config: Config,
    *,
    images: int = 9,
    model: DenseFeatures | None = None,
    **more: Any,
) -> tuple[Run, DenseFeatures, Progress]:
    model = model or small_model(config)
    run = Run.start(folder, config, device="cpu")
    batches = Batches(canvas(images), device=CPU)
    return run, model, train(model, batches, run, config, **more)


def weights(run: Path) -> dict[str, Tensor]:
    """Of the model that a run left behind."""
    found: dict[str, Tensor] = load_file(run / "model" / "model.safetensors")
    return found


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


# Features without a network, and pairs of a photo and its view through a known warp.

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


def a_logistic(signs: tuple[str, ...], *, bias: float = 0.1, **weights: float) -> Logistic:
    """Of these signs, each with its weight or 0; means 0 and scales 1."""
    row = tuple(weights.get(name, 0.0) for name in signs)
    zeros, ones = (0.0,) * len(signs), (1.0,) * len(signs)
    return Logistic(signs, row, bias, zeros, ones, "a test", 9)


def a_reliability(**changes: Any) -> Reliability:
    """One that looks at a few signs, as if fitted for the default matching."""
    given: dict[str, Any] = {
        "pair": a_logistic(PAIR_SIGNS, excess=20.0),
        "point": a_logistic(POINT_SIGNS, score=1.0, margin=2.0),
        "pooled": a_logistic(("pooled",), pooled=3.0),
        "matching": matching_text(Voting(), POINT_WEIGHTS), "right_within": 0.1,
    }  # fmt: skip
    return Reliability(**given | changes)


def a_cohort(features: Features, *, count: int = 8) -> Cohort:
    """Some places of features."""
    return Cohort(features.lower.flatten(1).T[:count])


# Random regions, and a picture with smooth parts and sharp edges.


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_boxes(count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    corners = torch.rand(count, 2, 2, generator=generator) * torch.tensor([size[1], size[0]]) - 0.5
    low, high = corners.amin(1).ceil(), corners.amax(1).floor()
    return torch.cat([low, torch.maximum(low, high)], dim=1)


def smooth_photo(height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth colours, two sharp objects and sensor noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 5, generator=generator) * 200
    image = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
    image[:, height // 4 : height // 2, width // 3 : width // 2] += 90
    image[:, height // 2 :, : width // 4] -= 70
    noise = torch.randn(3, height, width, generator=generator) * 4
    return (image + noise).clamp(0, 255).byte()


# Figures as they are drawn: their pixels, and the axes that show pictures.


def drawn(figure: Figure) -> npt.NDArray[np.float64]:
    """The figure as it is saved: (H, W, 3) in [0, 1]."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    return np.asarray(Image.open(buffer).convert("RGB"), dtype=np.float64) / 255


def pixel_at(figure: Figure, axes: Axes, point: tuple[float, float]) -> npt.NDArray[np.float64]:
    """The drawn colour at a place given in the axes' data units, here original pixels."""
    picture = drawn(figure)
    x, y = axes.transData.transform(point) * (100 / figure.dpi)
    colour: npt.NDArray[np.float64] = picture[picture.shape[0] - 1 - int(y), int(x)]
    return colour


def save_blank(figure: Figure, file: io.BytesIO, **options: Any) -> None:
    """In the place of `Figure.savefig`, where what is drawn does not matter: a white pixel."""
    Image.new("RGB", (1, 1), "white").save(file, format=options["format"])


def pictures(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]

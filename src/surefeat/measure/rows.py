"""One interface for all that is compared: a name, and a function from images to Features.

A new row is one function. Convention: rows see images already resized to the protocol's square
input, so a row's Features have that square as their original size.

Rows from networks: ImageNet trunks as they are, and models that surefeat has trained.

Rows without learning: dense SIFT (OpenCV) and HOG (scikit-image); need the eval extra.

The rows by name, as the command line knows them.

Rows as maps of one size: (B, 3, S, S) uint8 crops -> (B, C, h, h), for a head on top of them.

Each layer is brought to the common size and, unless raw, scaled to unit length in every cell, so
that all layers of a row count the same whatever the size of their activations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import file_hash
from surefeat.core.geometry import Frame
from surefeat.match.regions import LOWER_WEIGHT
from surefeat.model.features import Features
from surefeat.model.files import WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures
from surefeat.model.trunks import ResNet50, Trunk, Vgg16
from surefeat.model.weights import load_initial, read_weights, stride_in_1x1_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Row:
    """A method under test."""

    name: str
    """Of the row in files and tables."""
    extract: Callable[[Tensor], list[Features]]
    """(B, 3, S, S) uint8 RGB on the device -> Features of each."""
    weights_sha256: str | None = None
    """Of what was learned; None where nothing was."""
    lower: bool = False
    """The lower layer counts too: in regions, and in points with the weights below."""
    descriptor_weight: float = 1.0
    lower_weight: float = 0.0
    region_weights: tuple[float, float] = (1.0, 1.0)
    """Of descriptors and lower layer in regions pooled by maxima."""
    mean_weights: tuple[float, float] = (1.0, 1.0)
    """The same for regions pooled by means; the paper's, and as good as any on PF-PASCAL val."""
    unit: bool = True
    """Features have unit length at every place; else regions pool them as the network gives them
    (points are compared at unit length either way)."""
    confidence: bool = False
    """It predicts sigma; region descriptors are scaled by 1/sigma."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else decides the numbers; printed in every result file."""


def as_features(
    maps: Tensor,
    *,
    side: int,
    uncertainty: Tensor | None = None,
    lower: Tensor | None = None,
    unit: bool = True,
) -> list[Features]:
    """Maps (B, C, h, w) of square images of `side` pixels -> Features, unit length along C.

    Without uncertainty (B, h, w) it is 1 everywhere; without a lower layer (B, D, h', w') the
    maps stand in for it, which rows that do not use it never see. `unit` off: lengths are kept.
    """
    maps = F.normalize(maps.float(), dim=1) if unit else maps.float()
    sigma = torch.ones_like(maps[:, 0]) if uncertainty is None else uncertainty.float()
    below = maps if lower is None else F.normalize(lower.float(), dim=1)
    frame = Frame(original=(side, side), network=(side, side))
    stride = side // maps.shape[-1]
    return [Features(*each, frame, stride) for each in zip(maps, sigma, below, strict=True)]


HYPERCOLUMN = ("res3c", "res4c", "res5c")

# Of each trunk, a tensor that only its own weight files have.
_PROBES = {"resnet50": "layer1.0.conv1.weight", "vgg16": "features.0.weight"}


def model_row(
    name: str, source: str | Path | None, *, device: torch.device, lower: str | None = None
) -> Row:
    """A trained model (a run or model folder; None: the one that ships), lower layer included.

    lower: another layer than the model's own choice.
    """
    model = DenseFeatures.from_pretrained(source, device=device)
    model.lower = lower or model.lower
    folder = model_folder(source)

    def extract(images: Tensor) -> list[Features]:
        maps, lower = model.forward_with_lower(images.float() / 255)
        return as_features(
            maps.descriptors, side=images.shape[-1], uncertainty=maps.uncertainty, lower=lower
        )

    return Row(
        name,
        extract,
        weights_sha256=file_hash(folder / WEIGHTS),
        lower=True,
        descriptor_weight=0.5,
        lower_weight=1.0,
        region_weights=(1.0, LOWER_WEIGHT),
        confidence=model.has_confidence,
        settings={"trunk": model.config.trunk, "lower": model.lower},
    )


def tap_row(
    name: str, tap: str, *, init: Sequence[str | Path], device: torch.device, unit: bool = True
) -> Row:
    """One layer of an ImageNet trunk: res2a ... res5c (res5 dilated) or pool1 ... pool4."""
    trunk, digest = imagenet_trunk(
        "vgg16" if tap.startswith("pool") else "resnet50", init, device=device
    )

    def extract(images: Tensor) -> list[Features]:
        maps = run_taps(trunk, images, (tap,))[tap]
        return as_features(maps, side=images.shape[-1], unit=unit)

    return Row(name, extract, weights_sha256=digest, unit=unit, settings={"layer": tap})


def hypercolumn_row(
    name: str, *, init: Sequence[str | Path], device: torch.device, unit: bool = True
) -> Row:
    """res3c, res4c and res5c of the plain (stride 32) ResNet-50 at res3c's size, side by side.

    With `unit` each layer has unit length before they are joined, so that each counts the same.
    """
    trunk, digest = imagenet_trunk("resnet50", init, device=device, dilated=False)

    def extract(images: Tensor) -> list[Features]:
        taps = run_taps(trunk, images, HYPERCOLUMN)
        maps = hypercolumn([taps[tap] for tap in HYPERCOLUMN], unit=unit)
        return as_features(maps, side=images.shape[-1], unit=unit)

    settings = {"layers": list(HYPERCOLUMN), "each": "unit length" if unit else "as it is",
                "upsampling": "bilinear"}  # fmt: skip
    return Row(name, extract, weights_sha256=digest, unit=unit, settings=settings)


def hypercolumn(maps: Sequence[Tensor], *, unit: bool = True) -> Tensor:
    """Maps (B, C_i, h_i, w_i), each at unit length, at the first one's size: (B, sum C, h, w)."""
    size = maps[0].shape[-2:]
    scaled = [F.normalize(each, dim=1) if unit else each for each in maps]
    parts = [
        F.interpolate(each, size=size, mode="bilinear", align_corners=False) for each in scaled
    ]
    return torch.cat(parts, dim=1)


def run_taps(trunk: Trunk, images: Tensor, taps: tuple[str, ...]) -> dict[str, Tensor]:
    """Taps of (B, 3, S, S) uint8 images."""
    mean, std = (
        torch.tensor(values, device=images.device)[:, None, None]
        for values in (trunk.mean, trunk.std)
    )
    return trunk((images.float() / 255 - mean) / std, taps)  # type: ignore[no-any-return]


def imagenet_trunk(
    name: str, init: Sequence[str | Path], *, device: torch.device, dilated: bool = True
) -> tuple[Trunk, str]:
    """The ImageNet trunk from whichever of the files fits it, and the hash of its weights."""
    source = _fitting(name, init)
    file = None if str(source) in ("imagenet", "none") else Path(source)
    trunk: Trunk = Vgg16()
    if name == "resnet50":
        first = bool(file and stride_in_1x1_of(file))
        trunk = ResNet50(stride_in_1x1=first, dilated=dilated)
    load_initial(trunk, source, name=name)
    digest = file_hash(file) if file else _state_hash(trunk)
    return trunk.eval().requires_grad_(False).to(device), digest


def _fitting(name: str, init: Sequence[str | Path]) -> str | Path:
    """`imagenet`, `none`, or the file with this trunk's weights."""
    for source in init:
        if str(source) in ("imagenet", "none") or _PROBES[name] in read_weights(Path(source)):
            return source
    given = ", ".join(map(str, init)) or "nothing"
    raise ValueError(f"{given} holds no weights of {name}; add its file to --init, or imagenet")


def _state_hash(trunk: Trunk) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(trunk.state_dict().items()):
        digest.update(key.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


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


Init = Sequence[str | Path]

KNOWN: dict[str, Callable[[Init, torch.device], Row]] = {
    "resnet50-hc": lambda init, device: hypercolumn_row("resnet50-hc", init=init, device=device),
    "resnet50-dilated": lambda init, device: tap_row(
        "resnet50-dilated", "res5c", init=init, device=device
    ),
    "vgg16": lambda init, device: tap_row("vgg16", "pool4", init=init, device=device),
    "res4c": lambda init, device: tap_row("res4c", "res4c", init=init, device=device),
    "res4d": lambda init, device: tap_row("res4d", "res4d", init=init, device=device),
    "sift": lambda init, device: sift_row(),
    "hog": lambda init, device: hog_row(),
}


def build_row(
    name: str, *, model: str | Path | None = None, init: Init, device: torch.device
) -> Row:
    """A row by name: `ours` (from `model`), one of KNOWN, or NAME=FOLDER for another model."""
    if name == "ours":
        return model_row(name, model, device=device)
    title, given, folder = name.partition("=")
    if given and title and folder:
        return model_row(title, folder, device=device)
    if name not in KNOWN:
        raise ValueError(
            f"unknown row {name!r}; choose ours, {', '.join(KNOWN)}, or NAME=FOLDER for a model"
        )
    return KNOWN[name](init, device)


LAYERS: dict[str, tuple[str, ...]] = {
    "resnet50-hc": HYPERCOLUMN, "resnet50-dilated": ("res5c",), "vgg16": ("pool4",),
    "res4c": ("res4c",), "res4d": ("res4d",),
}  # fmt: skip
"""The untrained rows and the ImageNet layers they consist of."""


@dataclass(frozen=True, eq=False)
class DenseRow:
    """Features under test."""

    name: str
    """Of the row in files and tables."""
    features: Callable[[Tensor], Tensor]
    """(B, 3, S, S) uint8 RGB on the device -> (B, C, h, h)."""
    weights_sha256: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else decides the numbers; printed in every result file."""


def build_dense_row(
    name: str,
    *,
    cells: int,
    device: torch.device,
    model: str | Path | None = None,
    init: Sequence[str | Path] = ("imagenet",),
    raw: bool = False,
    weights: tuple[float, float] = (1.0, 1.0),
) -> DenseRow:
    """A row by name: `ours` (from `model`), one of LAYERS, or NAME=FOLDER for another model.

    `weights` are those of a model's descriptors and lower layer; one of 0 is left out. `raw` keeps
    the untrained rows' activations as they are.
    """
    title, given, folder = name.partition("=")
    if name == "ours" or (given and title and folder):
        source = model if name == "ours" else folder
        return _model_row(title, source, cells=cells, device=device, weights=weights)
    if name not in LAYERS:
        known = ", ".join(LAYERS)
        raise ValueError(f"unknown row {name!r}; choose ours, {known}, or NAME=FOLDER for a model")
    return _imagenet_row(name, init=init, cells=cells, device=device, raw=raw)


def _imagenet_row(
    name: str, *, init: Sequence[str | Path], cells: int, device: torch.device, raw: bool
) -> DenseRow:
    layers = LAYERS[name]
    network = "vgg16" if name == "vgg16" else "resnet50"
    # The hypercolumn is of the plain network, at stride 32.
    trunk, digest = imagenet_trunk(network, init, device=device, dilated=layers != HYPERCOLUMN)

    def features(crops: Tensor) -> Tensor:
        taps = run_taps(trunk, crops, layers)
        maps = [at_size(taps[layer].float(), cells) for layer in layers]
        return torch.cat([each if raw else F.normalize(each, dim=1) for each in maps], dim=1)

    settings = {"layers": list(layers), "each": "raw" if raw else "unit length"}
    return DenseRow(name, features, digest, settings)


def _model_row(
    name: str,
    source: str | Path | None,
    *,
    cells: int,
    device: torch.device,
    weights: tuple[float, float],
) -> DenseRow:
    """A trained model (a run or model folder; None: the one that ships)."""
    if min(weights) < 0 or max(weights) == 0:
        raise ValueError(f"weights are {weights}; none may be negative, and not both 0")
    model = DenseFeatures.from_pretrained(source, device=device).requires_grad_(False)

    def features(crops: Tensor) -> Tensor:
        maps, lower = model.forward_with_lower(crops.float() / 255)
        both = zip((maps.descriptors, lower), weights, strict=True)
        parts = [
            weight * F.normalize(at_size(each.float(), cells), dim=1)
            for each, weight in both
            if weight
        ]
        return torch.cat(parts, dim=1)

    settings = {"trunk": model.config.trunk, "lower": model.lower, "weights": list(weights)}
    return DenseRow(name, features, file_hash(model_folder(source) / WEIGHTS), settings)


def at_size(maps: Tensor, cells: int) -> Tensor:
    """Maps (B, C, h, w) -> (B, C, cells, cells): finer ones averaged, coarser ones bilinear."""
    height, width = maps.shape[-2:]
    if (height, width) == (cells, cells):
        return maps
    if height % cells == 0 and width % cells == 0:
        return F.adaptive_avg_pool2d(maps, cells)
    return F.interpolate(
        maps, size=(cells, cells), mode="bilinear", align_corners=False, antialias=cells < height
    )

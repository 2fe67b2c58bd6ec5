"""Rows: all that is compared, behind one interface, a name and a function from images to Features.

Rows are trained models, layers of ImageNet networks as they are, and what needs no learning: dense
SIFT (OpenCV) and HOG (scikit-image; both need the eval extra). Convention: rows see images already
resized to the protocol's square input, so a row's Features have that square as original size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import file_hash, pack_tensors
from surefeat.core.geometry import Frame
from surefeat.match.points import match_points
from surefeat.measure.protocol import MEASURES, Measure
from surefeat.model.config import POINT_WEIGHTS, REGION_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.trunks import ResNet50, Trunk, Vgg16, build_trunk
from surefeat.model.weights import load_initial, read_weights, stride_in_1x1_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Layers = Callable[[Tensor], Sequence[Tensor]]
"""(B, 3, S, S) uint8 RGB on the device -> layers (B, C, h, w), each with its own C, h and w."""


Transfer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Image 0 (3, H, W), image 1 (3, H', W'), uint8 at their own size, and points of image 0 (V, 2)
-> where they lie in image 1 (V, 2); points are original pixels."""


@dataclass(frozen=True, eq=False)
class RegionPair:
    """What a row may look at when it scores the regions of a pair anew."""

    boxes0: Tensor
    """(N, 4) inclusive, pixels of the square the network sees."""
    boxes1: Tensor
    """(M, 4) likewise of image 1."""
    sizes: tuple[tuple[int, int], tuple[int, int]]
    """(height, width) of both images as they are."""
    side: int
    """Of the square, pixels."""
    described0: Tensor | None = None
    """(N, D): what the row's `describe` gave, if it has one."""
    described1: Tensor | None = None
    """(M, D)."""

    def originals(self) -> tuple[Tensor, Tensor]:
        """The boxes in original pixels of their images."""
        square = (self.side, self.side)
        first, second = (
            Frame(square, size).boxes_to_network(boxes)
            for boxes, size in zip((self.boxes0, self.boxes1), self.sizes, strict=True)
        )
        return first, second


@dataclass(frozen=True, eq=False)
class Row:
    """A method under test."""

    name: str
    """Of the row in files and tables."""
    extract: Callable[[Tensor], list[Features]]
    """(B, 3, S, S) uint8 RGB on the device -> Features of each, for matching."""
    layers: Layers | None = None
    """The same layers as the network gives them, for a head on top; a model's are its descriptors
    and its lower layer."""
    layer_weights: tuple[float, ...] = ()
    """Of the layers under a head; one of 0 is left out. None given: all 1."""
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
    """Features have unit length at every place; else regions and heads get them as the network
    gives them (points are compared at unit length either way)."""
    confidence: bool = False
    """It predicts sigma; region descriptors are scaled by 1/sigma."""
    measures: tuple[Measure, ...] = MEASURES
    """What it can be asked; the rest is left out of its results."""
    transfer: Transfer | None = None
    """Its own way from image 0 to image 1, for the measure `own`."""
    describe: Callable[[Features, Tensor], Tensor] | None = None
    """Its own descriptors of boxes (N, 4), pixels of the square, instead of pooled features:
    (N, D), whose inner products are the scores."""
    rescore: Callable[[Tensor, RegionPair], Tensor] | None = None
    """Scores (N, M) of all pairs of regions, rectified only where features were pooled -> better
    ones (N, M), as when neighbours vote."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else decides the numbers; printed in every result file."""

    def __post_init__(self) -> None:
        if self.layer_weights and (min(self.layer_weights) < 0 or max(self.layer_weights) == 0):
            raise ValueError(f"weights are {self.layer_weights}; none may be negative, nor all 0")

    def asked(self, measures: Sequence[Measure]) -> tuple[Measure, ...]:
        """Those of the measures that can be asked of it."""
        known = [measure for measure in measures if measure in self.measures]
        return tuple(measure for measure in known if measure != "own" or self.transfer)

    def maps(self, crops: Tensor, *, cells: int) -> Tensor:
        """Under a head: crops (B, 3, S, S) uint8 -> (B, C, cells, cells), layers side by side.

        Each layer is brought to the common size and, unless the row is raw, scaled to unit length
        in every cell, so that layers count by their weights, not by the size of activations.
        """
        if self.layers is None:
            raise ValueError(f"the row {self.name} has no layers to train a head on; give it some")
        layers = self.layers(crops)
        weights = self.layer_weights or (1.0,) * len(layers)
        parts = [
            weight * _scaled(at_size(layer.float(), cells), unit=self.unit)
            for layer, weight in zip(layers, weights, strict=True)
            if weight
        ]
        return torch.cat(parts, dim=1)


def as_features(
    maps: Tensor, *, side: int, uncertainty: Tensor | None = None, lower: Tensor | None = None,
    unit: bool = True,
) -> list[Features]:  # fmt: skip
    """Maps (B, C, h, w) of square images of `side` pixels -> Features, unit length along C.

    Without uncertainty (B, h, w) it is 1 everywhere; without a lower layer (B, D, h', w') the
    maps stand in for it, which rows that do not use it never see. `unit` off: lengths are kept.
    """
    maps = F.normalize(maps.float(), dim=1) if unit else maps.float()
    sigma = torch.ones_like(maps[:, 0]) if uncertainty is None else uncertainty.float()
    below = maps if lower is None else F.normalize(lower.float(), dim=1)
    frame = Frame(original=(side, side), network=(side, side))
    parts = zip(maps, sigma, below, strict=True)
    return [Features(*one, frame, side // maps.shape[-1]) for one in parts]


def untrained_row(
    name: str, layers: Layers, *, unit: bool = True, digest: str | None = None,
    settings: Mapping[str, Any],
) -> Row:  # fmt: skip
    """A row of layers side by side at the first one's size, without confidence or lower layer."""

    def extract(images: Tensor) -> list[Features]:
        return as_features(join_layers(layers(images), unit=unit), side=images.shape[-1], unit=unit)

    settings = {**settings, "layers are": "of unit length" if unit else "as they are"}
    return Row(name, extract, layers, weights_sha256=digest, unit=unit, settings=settings)


def join_layers(layers: Sequence[Tensor], *, unit: bool = True) -> Tensor:
    """Layers (B, C_i, h_i, w_i), each at unit length, at the first one's size: (B, sum C, h, w)."""
    if len(layers) == 1:
        return layers[0]
    size = layers[0].shape[-2:]
    parts = [
        F.interpolate(_scaled(layer, unit=unit), size=size, mode="bilinear", align_corners=False)
        for layer in layers
    ]
    return torch.cat(parts, dim=1)


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


def _scaled(maps: Tensor, *, unit: bool) -> Tensor:
    return F.normalize(maps, dim=1) if unit else maps


def model_row(
    name: str, source: str | Path | None, *, device: torch.device,
    layer_weights: tuple[float, float] = (1.0, 1.0),
) -> Row:  # fmt: skip
    """A trained model (a run or model folder; None: the one that ships), lower layer included."""
    model = DenseFeatures.from_pretrained(source, device=device).requires_grad_(False)

    def extract(images: Tensor) -> list[Features]:
        maps, lower = model.forward_with_lower(images.float() / 255)
        sigma = maps.uncertainty
        return as_features(maps.descriptors, side=images.shape[-1], uncertainty=sigma, lower=lower)

    def layers(images: Tensor) -> Sequence[Tensor]:
        maps, layers = model.forward_with_layers(images.float() / 255)
        return maps.descriptors, layers[0]

    return Row(
        name,
        extract,
        layers,
        layer_weights=layer_weights,
        weights_sha256=model.weights_hash(),
        lower=True,
        descriptor_weight=POINT_WEIGHTS[0],
        lower_weight=POINT_WEIGHTS[1],
        region_weights=REGION_WEIGHTS,
        confidence=model.has_confidence,
        settings={"trunk": model.config.trunk, "lower": "+".join(model.lower)},
    )


AS_MATCHED = ("match", "match-slower")
"""Rows of the model `ours` as two commands treat photos: seen as they are, not as squares."""


def matched_row(name: str, source: str | Path | None, *, device: torch.device) -> Row:
    """What `surefeat match` does to photos, or `match --slower`: measured by `own` alone."""
    model, slower = DenseFeatures.from_pretrained(source, device=device), name == AS_MATCHED[1]

    def transfer(image0: Tensor, image1: Tensor, points: Tensor) -> Tensor:
        first, second = model.extract([image0, image1], slower=slower)
        return match_points(first, second, points).points1

    row = model_row(name, source, device=device)
    seen = {"longest_side": model.config.longest_side, "slower": slower}
    return replace(row, measures=("own",), transfer=transfer, settings={**row.settings, **seen})


@dataclass(frozen=True)
class ImageNetLayers:
    """Which layers of which ImageNet network a row consists of."""

    trunk: Literal["resnet50", "vgg16"]
    layers: tuple[str, ...]
    """As the trunk names its taps, finest first: res2a ... res5c, or pool1 ... pool4."""
    dilated: bool = True
    """res5 at res4's resolution; else the network as published, at stride 32."""


UNTRAINED: dict[str, ImageNetLayers] = {
    "resnet50-hc": ImageNetLayers("resnet50", ("res3c", "res4c", "res5c"), dilated=False),
    "resnet50-dilated": ImageNetLayers("resnet50", ("res5c",)),
    "vgg16": ImageNetLayers("vgg16", ("pool4",)),
    "res4c": ImageNetLayers("resnet50", ("res4c",)),
    "res4d": ImageNetLayers("resnet50", ("res4d",)),
    "res4e": ImageNetLayers("resnet50", ("res4e",)),
}
"""The untrained rows by name; the first is the paper's hypercolumn."""

# Of each trunk, a tensor that only its own weight files have.
_PROBES = {"resnet50": "layer1.0.conv1.weight", "vgg16": "features.0.weight"}


def imagenet_row(
    name: str, which: ImageNetLayers, *, init: Sequence[str | Path], device: torch.device,
    unit: bool = True,
) -> Row:  # fmt: skip
    """Layers of an ImageNet network as they are; with `unit` each of them counts the same."""
    trunk, digest = imagenet_trunk(which.trunk, init, device=device, dilated=which.dilated)

    def layers(images: Tensor) -> Sequence[Tensor]:
        taps = run_taps(trunk, images, which.layers)
        return [taps[layer] for layer in which.layers]

    settings = {"trunk": which.trunk, "layers": list(which.layers), "dilated": which.dilated}
    return untrained_row(name, layers, unit=unit, digest=digest, settings=settings)


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
        first = bool(file and stride_in_1x1_of(file, name))
        trunk = ResNet50(stride_in_1x1=first, dilated=dilated)
    load_initial(trunk, source, name=name)
    packed = pack_tensors(trunk.state_dict())
    digest = file_hash(file) if file else hashlib.sha256(packed).hexdigest()
    return trunk.eval().requires_grad_(False).to(device), digest


def _fitting(name: str, init: Sequence[str | Path]) -> str | Path:
    """`imagenet`, `none`, or the file with this trunk's weights."""
    for source in init:
        if str(source) in ("imagenet", "none") or _PROBES[name] in read_weights(Path(source)):
            return source
    given = ", ".join(map(str, init)) or "nothing"
    raise ValueError(f"{given} holds no weights of {name}; add its file to --init, or imagenet")


def timm_row(
    name: str, *, init: Sequence[str | Path], device: torch.device, unit: bool = True
) -> Row:
    """timm:NETWORK/TAP: one layer of a timm network as it is, with the first weights of `init`."""
    network, _, tap = name.partition("/")
    trunk, source = build_trunk(network), init[0]
    if tap not in trunk.taps:
        known = ", ".join(trunk.taps)
        raise ValueError(f"row {name!r}: {network} has no layer {tap!r}; add one of /{known}")
    load_initial(trunk, source, name=network)
    file = None if str(source) in ("imagenet", "none") else Path(source)
    digest = file_hash(file) if file else None
    ready = trunk.eval().requires_grad_(False).to(device)
    settings = {"trunk": network, "layers": [tap]}
    return untrained_row(
        name, lambda images: [run_taps(ready, images, (tap,))[tap]], unit=unit, digest=digest,
        settings=settings,
    )  # fmt: skip


CELL = 8
"""Pixels between descriptors: twice as fine as the networks' maps."""

SIFT_SIZE = 8.0
"""Diameter of a SIFT keypoint, px; its descriptor sees six times as much."""

HOG_BLOCK, HOG_ANGLES = 3, 9
"""A HOG descriptor is 3 x 3 cells around its own, 9 orientations each."""


def _describe(images: Tensor, describe: Describe) -> Tensor:
    """(B, 3, S, S) uint8 -> (B, C, h, w); the mirrored border of a cell keeps maps complete."""
    if images.shape[-1] % CELL or images.shape[-2] % CELL:
        raise ValueError(f"sides must be multiples of {CELL} px, not {tuple(images.shape[-2:])}")
    grey = images.float().cpu().mean(1, keepdim=True)
    padded = F.pad(grey, (CELL,) * 4, mode="reflect")[:, 0].round().byte().numpy()
    maps = torch.stack([torch.from_numpy(describe(image)) for image in padded])
    return maps.permute(0, 3, 1, 2).to(images.device)


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
    _, descriptors = cv2.SIFT_create().compute(image, points)
    return descriptors.reshape(rows, columns, -1)  # type: ignore[no-any-return]


def _hog(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(H + 2 CELL, W + 2 CELL) grey -> (H / CELL, W / CELL, 81)."""
    try:
        from skimage.feature import hog
    except ImportError as error:
        raise ImportError("the hog row needs scikit-image: pip install 'surefeat[eval]'") from error
    blocks = hog(
        image, orientations=HOG_ANGLES, pixels_per_cell=(CELL, CELL),
        cells_per_block=(HOG_BLOCK, HOG_BLOCK), feature_vector=False,
    )  # fmt: skip
    return blocks.reshape(*blocks.shape[:2], -1).astype("float32")  # type: ignore[no-any-return]


Describe = Callable[[Any], Any]
"""A grey image with a border of CELL pixels -> descriptors (H / CELL, W / CELL, C)."""

WITHOUT_LEARNING: dict[str, tuple[Describe, dict[str, float]]] = {
    "sift": (_sift, {"cell": CELL, "size": SIFT_SIZE}),
    "hog": (_hog, {"cell": CELL, "block": HOG_BLOCK, "orientations": HOG_ANGLES}),
}
"""SIFT at every cell centre, upright, one scale; HOG of every cell with its eight neighbours."""


def build_row(
    name: str, *, device: torch.device, model: str | Path | None = None,
    init: Sequence[str | Path] = ("imagenet",), raw: bool = False,
    layer_weights: tuple[float, float] = (1.0, 1.0),
) -> Row:  # fmt: skip
    """A row by name: `ours`, `match` or `match-slower` (from `model`), an untrained one,
    timm:NETWORK/TAP for a layer of any timm network, or NAME=FOLDER for another model.

    layer_weights: of a model's descriptors and lower layer under a head. raw: untrained layers
    are left as they are, instead of at unit length.
    """
    title, given, folder = name.partition("=")
    if name == "ours" or (given and title and folder):
        source = model if name == "ours" else folder
        return model_row(title, source, device=device, layer_weights=layer_weights)
    if name in AS_MATCHED:
        return matched_row(name, model, device=device)
    if name in UNTRAINED:
        return imagenet_row(name, UNTRAINED[name], init=init, device=device, unit=not raw)
    if name.startswith("timm:"):
        return timm_row(name, init=init, device=device, unit=not raw)
    if name in WITHOUT_LEARNING:
        describe, settings = WITHOUT_LEARNING[name]
        return untrained_row(name, lambda images: [_describe(images, describe)], settings=settings)
    known = ", ".join([*AS_MATCHED, *UNTRAINED, *WITHOUT_LEARNING, "timm:NETWORK/TAP"])
    raise ValueError(f"unknown row {name!r}; choose ours, {known}, or NAME=FOLDER for a model")

"""Rows from networks: ImageNet trunks as they are, and models that surefeat has trained."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.backbone import ResNet50, Trunk, Vgg16
from surefeat.baselines.rows import Row, as_features
from surefeat.features import Features
from surefeat.model import DenseFeatures
from surefeat.model_files import WEIGHTS, file_hash, model_folder
from surefeat.regions import LOWER_WEIGHT
from surefeat.weights import load_initial, read_weights, stride_in_1x1_of

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

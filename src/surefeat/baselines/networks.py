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
from surefeat.runs import Run
from surefeat.weights import load_initial, read_weights, stride_in_1x1_of

HYPERCOLUMN = ("res3c", "res4c", "res5c")
# Of each trunk, a tensor that only its own weight files have.
_PROBES = {"resnet50": "layer1.0.conv1.weight", "vgg16": "features.0.weight"}


def model_row(name: str, source: str | Path | None, *, device: torch.device) -> Row:
    """A trained model (a run or model folder; None: the one that ships), lower layer included."""
    model = DenseFeatures.from_pretrained(source, device=device)
    folder = model_folder(source)
    sure = _learned_confidence(folder)

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
        confidence=sure,
        settings={"trunk": model.config.trunk, "lower": model.lower},
    )


def tap_row(name: str, tap: str, *, init: Sequence[str | Path], device: torch.device) -> Row:
    """One layer of an ImageNet trunk: res2a ... res5c (res5 dilated) or pool1 ... pool4."""
    trunk, digest = _trunk("vgg16" if tap.startswith("pool") else "resnet50", init, device=device)

    def extract(images: Tensor) -> list[Features]:
        return as_features(_run(trunk, images, (tap,))[tap], side=images.shape[-1])

    return Row(name, extract, weights_sha256=digest, settings={"layer": tap})


def hypercolumn_row(name: str, *, init: Sequence[str | Path], device: torch.device) -> Row:
    """res3c, res4c and res5c of the plain (stride 32) ResNet-50 at res3c's size, side by side.

    Each layer has unit length before they are joined, so that each counts the same.
    """
    trunk, digest = _trunk("resnet50", init, device=device, dilated=False)

    def extract(images: Tensor) -> list[Features]:
        taps = _run(trunk, images, HYPERCOLUMN)
        return as_features(hypercolumn([taps[tap] for tap in HYPERCOLUMN]), side=images.shape[-1])

    settings = {"layers": list(HYPERCOLUMN), "each": "unit length", "upsampling": "bilinear"}
    return Row(name, extract, weights_sha256=digest, settings=settings)


def _learned_confidence(folder: Path) -> bool:
    """Whether sigma was learned: not by the losses without it, as the run's settings say."""
    run = Run(folder.parent)
    return not run.config_file.is_file() or run.config().loss.kind == "probabilistic"


def hypercolumn(maps: Sequence[Tensor]) -> Tensor:
    """Maps (B, C_i, h_i, w_i), each scaled to unit length, at the first one's size: (B, sum C)."""
    size = maps[0].shape[-2:]
    parts = [
        F.interpolate(F.normalize(each, dim=1), size=size, mode="bilinear", align_corners=False)
        for each in maps
    ]
    return torch.cat(parts, dim=1)


def _run(trunk: Trunk, images: Tensor, taps: tuple[str, ...]) -> dict[str, Tensor]:
    """Taps of (B, 3, S, S) uint8 images."""
    mean, std = (
        torch.tensor(values, device=images.device)[:, None, None]
        for values in (trunk.mean, trunk.std)
    )
    return trunk((images.float() / 255 - mean) / std, taps)  # type: ignore[no-any-return]


def _trunk(
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

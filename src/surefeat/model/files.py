"""The files of a model: a folder with model.json and model.safetensors, here or on the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surefeat.core.files import checked_weights, from_dict

Trained = Literal["all", "last", "head"]


@dataclass(frozen=True)
class ModelConfig:
    """The network (paper, section 3.6)."""

    trunk: str = "resnet50"
    """resnet50, vgg16 (to pool4), vgg16-conv5 (three layers more), small, or timm:NAME (the timm
    extra)."""
    stride_in_1x1: bool = False
    """ResNet v1 (stride in the first 1x1 of a block) instead of v1.5, torchvision's own."""
    channels: int = 128
    """Descriptor size C [C]."""
    sigma_floor: float = 1e-2
    """Added to softplus: the smallest uncertainty [C]."""
    lower: str = "auto"
    """Lower layer that matching adds to the descriptors: auto is res4c for ResNet-50, pool4 for
    either VGG16 [P], conv4 for small, the last but one of a timm network [C]."""
    longest_side: int = 320
    """Images are resized to this for extraction, pixels [C]."""


WEIGHTS, SETTINGS = "model.safetensors", "model.json"

SHIPPED = ("resnet50", "vgg16")
"""Models inside the package, the default one first."""


def model_folder(source: str | Path | None) -> Path:
    """The folder that holds a model: shipped, given, inside a run, or fetched from the hub.

    None is the default one of those that ship; a model folder goes before a shipped one's name.
    """
    shipped = Path(__file__).parent.parent / "models"
    if source is None:
        return shipped / SHIPPED[0]
    given = Path(source)
    for folder in (given, given / "model"):
        if (folder / SETTINGS).is_file() and (folder / WEIGHTS).is_file():
            return folder
    if str(source) in SHIPPED:
        return shipped / str(source)
    if isinstance(source, str) and source.count("/") == 1 and not given.exists():
        return _from_hub(source)
    raise FileNotFoundError(
        f"no model at {source} (looked for {SETTINGS} and {WEIGHTS}, also in model/); "
        f"pass a folder written by `surefeat pretrain`, or {' or '.join(SHIPPED)}"
    )


def read_settings(folder: Path) -> tuple[ModelConfig, Path]:
    """What model.json says, and the weights it speaks of, checked by their hash."""
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text())
        wanted = settings["sha256"]
        config: ModelConfig = from_dict(ModelConfig, settings["config"])
    except (ValueError, KeyError, TypeError) as error:
        what = f"{path} is not what save_pretrained writes ({error})"
        raise ValueError(f"{what}; pass a folder written by `surefeat pretrain`") from error
    return config, checked_weights(folder / WEIGHTS, wanted)


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise FileNotFoundError(
            f"no folder {name}; to fetch it from the hub: pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise FileNotFoundError(
            f"no folder {name}, and not on the hub ({type(error).__name__}); check the name"
        ) from error

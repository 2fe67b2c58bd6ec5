"""What a model is and where it lies: its settings, its layers' weights, its folder.

Imports no torch: the command line's help reads settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefeat.core.files import check_settings, checked_weights, from_dict

Trained = Literal["all", "last", "head"]

HeadKind = Literal["linear", "deep"]


@dataclass(frozen=True)
class ModelConfig:
    """The network (paper, section 3.6)."""

    trunk: str = "resnet50"
    """resnet50, vgg16 (to pool4), vgg16-conv5 (three layers more), small, or timm:NAME (the timm
    extra)."""
    stride_in_1x1: bool = False
    """ResNet v1 (stride in the first 1x1 of a block) instead of v1.5, torchvision's own."""
    head: HeadKind = "deep"
    """linear: one 1x1 filter a channel on the last layer [P]; deep: a few convolutions on the last
    two stages, which need no other layer to learn [M]."""
    channels: int = 128
    """Descriptor size C [C]."""
    sigma_floor: float = 1e-2
    """Added to softplus: the smallest uncertainty [C]."""
    lower: str = "auto"
    """Layers that matching adds to the descriptors, joined by +: auto is res4e+res5c for ResNet-50
    with a deep head, res4e with a linear one [M] (the paper: res4c), pool4 for either VGG16 [P],
    conv4 for small, the last but one of a timm network [C]."""
    longest_side: int = 320
    """Images are resized to this for extraction, pixels [C]."""


POINT_WEIGHTS = (0.4, 1.0)
"""What descriptors and lower layer count where single places are compared; chosen on PF-PASCAL's
development pairs and birds together."""

REGION_WEIGHTS = (1.0, 3.0)
"""The same for regions whose bins keep maxima: chosen for the trained ResNet-50 on PF-PASCAL val
(docs/studies/log.md), used for every trained model. The paper has 1 and 1."""

WEIGHTS, SETTINGS = "model.safetensors", "model.json"

SHIPPED = ("resnet50", "vgg16")
"""Models inside the package, the default one first."""

SHIPPED_TRUNKS = {"resnet50": "resnet50", "vgg16": "vgg16", "vgg16-conv5": "vgg16"}
"""Trunk -> the shipped model whose layers it can start from."""

HUB = "hub:"
"""Before owner/name of a model on the Hugging Face hub; nothing else is looked for there."""


def model_folder(source: str | Path | None) -> Path:
    """The folder that holds a model: shipped, given, inside a run, or fetched (hub:owner/name).

    None is the default one of those that ship; a model folder goes before a shipped one's name.
    """
    shipped = Path(__file__).parent.parent / "models"
    if source is None:
        return shipped / SHIPPED[0]
    if str(source).startswith(HUB):
        return _from_hub(str(source).removeprefix(HUB))
    folder = _holds_model(Path(source))
    if folder is not None:
        return folder
    if newest_checkpoint(Path(source)) is not None:
        return Path(source)
    if str(source) in SHIPPED:
        return shipped / str(source)
    what = f"no model at {source} (looked for {SETTINGS} and {WEIGHTS}, also in model/)"
    known = f"a folder written by `surefeat pretrain`, {' or '.join(SHIPPED)}, or {HUB}OWNER/NAME"
    raise FileNotFoundError(f"{what}; {_nearby(Path(source))}pass {known}")


def _holds_model(given: Path) -> Path | None:
    """The folder itself or its model/, if a model is in it."""
    for folder in (given, given / "model"):
        if (folder / SETTINGS).is_file():
            return folder
    return None


def newest_checkpoint(run: Path) -> Path | None:
    """Of a run that was stopped before it left a model."""
    files = sorted(run.glob("checkpoint-*.safetensors")) if run.is_dir() else []
    return files[-1] if files and (run / "config.json").is_file() else None


def _nearby(given: Path) -> str:
    """The models that lie where one was looked for, for somebody who mistyped a name."""
    place = next((p for p in (given, *given.parents) if p.is_dir()), Path())
    names = sorted(str(p) for p in place.iterdir() if p.is_dir() and _holds_model(p))
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"there are {', '.join(names[:8])}{more}; " if names else ""


def stored_config(values: dict[str, Any]) -> ModelConfig:
    """Settings of a model as a file has them; the first files knew of no head but a linear one."""
    config: ModelConfig = from_dict(ModelConfig, {"head": "linear", **values})
    return config


def read_settings(folder: Path) -> tuple[ModelConfig, Path, str]:
    """What model.json says, the weights it speaks of, and their hash, which is checked."""
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text())
        wanted = settings["sha256"]
        config = stored_config(settings["config"])
        sides = {"channels": 1 << 16, "longest-side": 1 << 16, "sigma-floor": 0.9}
        check_settings(config, least={"channels": 1, "longest-side": 16}, most=sides)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{path} is not what save_pretrained writes ({error})"
        fix = "pass a folder written by `surefeat pretrain`, whose --resume writes it anew"
        raise ValueError(f"{what}; {fix}") from error
    return config, checked_weights(folder / WEIGHTS, wanted), wanted


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        fix = "pip install huggingface_hub"
        raise ImportError(f"{HUB}{name} is fetched with huggingface_hub: {fix}") from error
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub's client has many kinds
        what = f"could not fetch {name} from the hub ({type(error).__name__})"
        raise FileNotFoundError(f"{what}; check the name, {HUB}OWNER/NAME") from error

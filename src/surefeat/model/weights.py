"""Initial weights: of a model, downloaded, of a file, or none. Never silently random, no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from warnings import catch_warnings

import torch
from torch import Tensor

from surefeat.core.files import read_tensor_metadata, read_tensors
from surefeat.model.config import (
    SETTINGS,
    SHIPPED,
    SHIPPED_TRUNKS,
    WEIGHTS,
    model_folder,
    read_settings,
)
from surefeat.model.trunks import Timm, Trunk

_SCALE = ".int8_scale"


def load_initial(trunk: Trunk, init: str | Path, *, name: str) -> None:
    """Fill a trunk with `imagenet` weights (downloaded), a model's or a file's; `none`: random.

    A model: see `model_to_start_from`. A file is safetensors or a state dict, which is read without
    executing pickles. Tensors beyond the trunk (a classifier) are ignored; a missing or ill-fitting
    one is an error.
    """
    if str(init) == "none":
        return
    folder = model_to_start_from(init, name)
    if folder is not None:
        tensors = model_tensors(folder)
        state = {k.removeprefix("trunk."): v for k, v in tensors.items() if k.startswith("trunk.")}
    else:
        state = _downloaded(name) if str(init) == "imagenet" else read_weights(Path(init))
    if isinstance(trunk, Timm):
        state = trunk.own_names(state)
    wanted = trunk.state_dict()
    needed = [key for key in wanted if not key.endswith("num_batches_tracked")]
    missing = [key for key in needed if key not in state]
    if missing:
        what = (
            f"{len(missing)} of {len(wanted)} tensors of {name} are missing, first {missing[0]!r}"
        )
        fix = f"pass weights of {name} under its usual names, or --init none"
        raise ValueError(f"{init}: {what}; {fix}")
    for key in needed:
        shape, own = tuple(state[key].shape), tuple(wanted[key].shape)
        if shape != own:
            fix = f"pass weights of {name}, or --init none"
            raise ValueError(f"{init}: {key} is {shape}, {name} needs {own}; {fix}")
    check_finite({key: state[key] for key in needed}, what=str(init))
    trunk.load_state_dict({k: v.float() for k, v in state.items() if k in wanted}, strict=False)


def model_to_start_from(init: str | Path, trunk: str) -> Path | None:
    """The model folder that `init` means: `shipped` (the one that ships with this trunk), the name
    of one that ships, a folder or run, or the weights file in it; None: it means no model."""
    if str(init) in ("imagenet", "none"):
        return None
    if str(init) == "shipped":
        if trunk not in SHIPPED_TRUNKS:
            known = ", ".join(SHIPPED_TRUNKS)
            raise ValueError(f"no model with {trunk} ships (only {known}); pass --init imagenet")
        return model_folder(SHIPPED_TRUNKS[trunk])
    path = Path(init)
    if path.is_file():
        beside = path.name == WEIGHTS and (path.parent / SETTINGS).is_file()
        return path.parent if beside else None
    return model_folder(init) if path.is_dir() or str(init) in SHIPPED else None


def model_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model, its hash checked, in full precision."""
    _, weights, _ = read_settings(folder)
    return widen(read_tensors(weights)[0])


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file or of a torch state dict, without executing pickles."""
    if not path.is_file():
        known = "a file, a model, shipped, imagenet or none"
        raise FileNotFoundError(f"no weights at {path}; --init is {known}")
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    try:
        with catch_warnings(action="ignore"):  # of a pickle that is refused
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        fix = "pass a .safetensors file, or what torch.save(model.state_dict()) wrote"
        raise ValueError(f"{path}: no weights that can be read; {fix}") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path}: holds no state dict of tensors; save model.state_dict()")
    return state


def check_finite(state: Mapping[str, Tensor], *, what: str) -> None:
    """Refuse weights with NaN or infinity: they would spread over every map without a word."""
    for name, value in state.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{what}: {name} holds NaN or infinite numbers; use other weights")


def stride_in_1x1_of(init: str | Path, trunk: str = "resnet50") -> bool | None:
    """Whether a model or a safetensors file says its ResNet has the stride in the 1x1 (v1); None =
    silent."""
    folder, path = model_to_start_from(init, trunk), Path(init)
    if folder is not None:
        return read_settings(folder)[0].stride_in_1x1
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    try:
        text = read_tensor_metadata(path).get("architecture", "")
    except ValueError:
        return None  # reading the weights says what is wrong
    return ("v1:" in text or "stride in the first 1x1" in text) if "ResNet" in text else None


def _downloaded(name: str) -> dict[str, Tensor]:
    """torchvision's (or timm's) own ImageNet weights; needs the network once."""
    try:
        if name.startswith("timm:"):
            return Timm(name.removeprefix("timm:"), pretrained=True).state_dict()
        import torchvision.models as zoo

        weights = {"resnet50": zoo.ResNet50_Weights.IMAGENET1K_V1,
                 "vgg16": zoo.VGG16_Weights.IMAGENET1K_V1,
                 "vgg16-conv5": zoo.VGG16_Weights.IMAGENET1K_V1}  # fmt: skip
        if name not in weights:
            raise ValueError(f"there are no ImageNet weights for {name}; pass --init none or FILE")
        state: dict[str, Tensor] = weights[name].get_state_dict(check_hash=True)
        return state
    except OSError as error:
        fix = "pass --init shipped, or --init FILE with a copy"
        what = f"could not download the ImageNet weights of {name} ({error})"
        raise OSError(f"{what}; {fix}") from error


def quantise(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Filters as int8 with one scale per output channel; everything else as it is.

    A quarter of the size; the error of a weight is at most 1/254 of its filter's largest.
    """
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.ndim < 2 or not value.is_floating_point():
            stored[name] = value
            continue
        scale = value.flatten(1).abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        stored[name] = (value / scale.view(-1, *[1] * (value.ndim - 1))).round().to(torch.int8)
        stored[name + _SCALE] = scale.float()
    return stored


def widen(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of quantise; tensors that were not quantised come back in float32."""
    state: dict[str, Tensor] = {}
    for name, value in stored.items():
        if name.endswith(_SCALE):
            continue
        scale = stored.get(name + _SCALE)
        if scale is not None:
            value = value.float() * scale.view(-1, *[1] * (value.ndim - 1))
        state[name] = value.float() if value.is_floating_point() else value
    return state

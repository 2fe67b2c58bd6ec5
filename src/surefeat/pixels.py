"""Values in memory -> RGB uint8 (3, H, W): PIL images, arrays and tensors, or an ImageError."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor


class ImageError(ValueError):
    """An image that cannot be used: one line that names it, what is wrong and the fix."""


def problem(name: str, what: str) -> ImageError:
    """The error for this image; line breaks and undecodable bytes in `name` are escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)
    return ImageError(f"{shown}: {' '.join(what.split())}")


def to_rgb(image: Image.Image, *, name: str) -> Tensor:
    """A loaded PIL image -> (3, H, W) uint8, transparency on white."""
    if image.mode == "F" or image.mode.startswith("I"):
        return torch.from_numpy(_to_uint8(np.asarray(image), name=name)).expand(3, -1, -1)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    # A copy: torch wants to own what it is given.
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def from_array(array: npt.NDArray[Any]) -> Tensor:
    """(H, W), (H, W, 1), (H, W, 3) or (H, W, 4), 8 or 16 bits or floats in [0, 1]."""
    name = f"array of shape {array.shape} and type {array.dtype}"
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in (1, 3, 4) or array.size == 0:
        fix = "channels come last, array.transpose(1, 2, 0) moves them"
        raise problem(name, f"is none of (H, W), (H, W, 1), (H, W, 3), (H, W, 4); {fix}")
    if array.dtype.kind != "f" and (array.dtype.kind != "u" or array.dtype.itemsize > 2):
        raise problem(name, "has neither uint8, uint16 nor float values; convert it")
    pixels = _to_uint8(array if channels > 1 else array.reshape(array.shape[:2]), name=name)
    return to_rgb(Image.fromarray(np.ascontiguousarray(pixels)), name=name).contiguous()


def from_tensor(tensor: Tensor) -> Tensor:
    """(H, W), (1, H, W) or (3, H, W), uint8 or floats in [0, 1]."""
    name = f"tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}"
    image = tensor.detach().unsqueeze(0) if tensor.ndim == 2 else tensor.detach()
    if image.ndim != 3 or image.shape[0] not in (1, 3) or image.numel() == 0:
        fix = "channels come first, one image at a time: tensor.permute(2, 0, 1) or batch[0]"
        raise problem(name, f"is none of (H, W), (1, H, W), (3, H, W); {fix}")
    if image.is_floating_point():
        _check_unit_range(float(image.min()), float(image.max()), name=name)
        image = (image.float() * 255).round().clamp(0, 255).to(torch.uint8)
    if image.dtype != torch.uint8:
        raise problem(name, "has neither uint8 nor float values; convert it")
    return image.expand(3, -1, -1).contiguous()


def _to_uint8(array: npt.NDArray[Any], *, name: str) -> npt.NDArray[np.uint8]:
    if array.dtype == np.uint8:
        return array
    low, high = array.min(), array.max()
    if array.dtype.kind == "f":
        _check_unit_range(float(low), float(high), name=name)
        return np.clip(np.rint(array.astype(np.float32) * 255), 0, 255).astype(np.uint8)
    if low < 0 or high > 65535:
        raise problem(name, f"has values from {low} to {high}; convert it to 8 or 16 bits")
    return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 = 257 * 255


def _check_unit_range(low: float, high: float, *, name: str) -> None:
    slack = 1e-3  # resampling leaves values just outside
    if not (low >= -slack and high <= 1 + slack):  # also catches NaN
        raise problem(name, f"has values from {low:g} to {high:g}; scale floats to [0, 1]")

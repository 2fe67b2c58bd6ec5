"""Convolution and batch norm as one: exact with frozen statistics, and faster."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(
    x: Tensor, conv: nn.Conv2d, bn: nn.BatchNorm2d, skip: Tensor | None = None, *, relu: bool = True
) -> Tensor:
    """Convolution, batch norm, optional residual, ReLU.

    With frozen statistics the norm is a scale of the filters: folding it there is exact, keeps its
    gradients, and saves two passes over the activations.
    """
    if bn.training:
        y: Tensor = bn(conv(x))
    else:
        learns = torch.is_grad_enabled() and (conv.weight.requires_grad or x.requires_grad)
        if not learns and relu and _fuses(x):
            return _fused(x, conv, bn, skip)
        weight, bias = fold(conv, bn)
        y = F.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation)
    y = y if skip is None else y + skip
    return F.relu(y) if relu else y


def fold(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Filters and bias of one convolution equal to conv followed by the frozen norm."""
    assert bn.running_var is not None
    assert bn.running_mean is not None
    scale = bn.weight * torch.rsqrt(bn.running_var + bn.eps)
    return conv.weight * scale[:, None, None, None], bn.bias - bn.running_mean * scale


def _fuses(x: Tensor) -> bool:
    """Whether cuDNN's fused kernels serve: half precision on CUDA; the compiler has its own way."""
    return x.is_cuda and torch.is_autocast_enabled("cuda") and not torch.compiler.is_compiling()


def _fused(x: Tensor, conv: nn.Conv2d, bn: nn.BatchNorm2d, skip: Tensor | None) -> Tensor:
    """One kernel per layer, without gradients: half the time of convolution and ReLU apart."""
    dtype = torch.get_autocast_dtype("cuda")
    parts = (conv.weight, bn.weight, bn.bias, bn.running_mean, bn.running_var)
    # Tensors made in inference mode do not count their changes, so nothing is kept for them.
    kept = not any(p is None or p.is_inference() for p in parts)
    version = (dtype, *((p.data_ptr(), p._version) for p in parts if p is not None and kept))
    # Not a buffer: it follows from the parameters and must not be saved with them.
    cached = conv.__dict__.get("_folded")
    if cached is None or cached[0] != version or not kept:
        with torch.no_grad():
            weight, bias = fold(conv, bn)
        weight = weight.to(dtype, memory_format=torch.channels_last)
        cached = conv.__dict__["_folded"] = (version, weight, bias.to(dtype))
    _, weight, bias = cached
    x = x.to(dtype, memory_format=torch.channels_last)
    where: Any = (conv.stride, conv.padding, conv.dilation, 1)
    if skip is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *where)
    return torch.cudnn_convolution_add_relu(x, weight, skip.to(dtype), 1.0, bias, *where)

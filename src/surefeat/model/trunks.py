"""Convolution and batch norm as one: exact with frozen statistics, and faster.

Trunks: images -> named feature maps ("taps") at a known stride.

A trunk has `stride` (of its last map), `taps` (name -> channels, in order of depth), `mean`, `std`
(its input scale) and `last_stage` (the modules that `trained="last"` trains), and is called with
normalised images and the names of the wanted taps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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


IMAGENET_MEAN = (0.485, 0.456, 0.406)

IMAGENET_STD = (0.229, 0.224, 0.225)


class Bottleneck(nn.Module):
    """A ResNet block, 1x1 - 3x3 - 1x1, with torchvision's parameter names."""

    def __init__(
        self, inputs: int, width: int, *, stride: int, dilation: int, stride_in_1x1: bool
    ) -> None:
        super().__init__()
        first, second = (stride, 1) if stride_in_1x1 else (1, stride)
        self.conv1 = nn.Conv2d(inputs, width, 1, stride=first, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(
            width, width, 3, stride=second, padding=dilation, dilation=dilation, bias=False
        )
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride=stride, bias=False),
                nn.BatchNorm2d(4 * width),
            )

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        if self.downsample is not None:
            skip = conv_bn(x, self.downsample[0], self.downsample[1], relu=False)  # type: ignore[arg-type]
        x = conv_bn(x, self.conv1, self.bn1)
        x = conv_bn(x, self.conv2, self.bn2)
        return conv_bn(x, self.conv3, self.bn3, skip)


class ResNet50(nn.Module):
    """ResNet-50 without pooling and classifier; res5 at stride 1, dilated by 2 (section 3.6).

    Taps are the paper's names, after the ReLU: res2a ... res5c. `stride_in_1x1` builds the original
    (v1) network, whose dilated form is exact everywhere; in v1.5 (torchvision) the first 3x3 of
    res5 held the stride and stays undilated. `dilated=False` gives the stride-32 network.
    """

    mean, std = IMAGENET_MEAN, IMAGENET_STD
    last = "res5c"

    def __init__(self, *, stride_in_1x1: bool = False, dilated: bool = True) -> None:
        super().__init__()
        self.stride = 16 if dilated else 32
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs, self.taps = 64, {}
        for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
            layer = nn.ModuleList()
            for index in range(blocks):
                dilate = dilated and stage == 3
                first = index == 0 and stage > 0
                stride = 2 if first and not dilate else 1
                dilation = 2 if dilate and (stride_in_1x1 or not first) else 1
                layer.append(
                    Bottleneck(inputs, width, stride=stride, dilation=dilation,
                               stride_in_1x1=stride_in_1x1)
                )  # fmt: skip
                inputs = 4 * width
                self.taps[f"res{stage + 2}{'abcdef'[index]}"] = inputs
            setattr(self, f"layer{stage + 1}", layer)

    def _blocks(self) -> Iterator[tuple[str, nn.Module]]:
        layers = (getattr(self, f"layer{stage}") for stage in (1, 2, 3, 4))
        return zip(self.taps, (block for layer in layers for block in layer), strict=True)

    @property
    def last_stage(self) -> nn.Module:
        return self.layer4  # type: ignore[return-value]

    def forward(self, x: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """(B, 3, H, W) normalised -> the wanted taps; layers beyond the deepest are not run."""
        found: dict[str, Tensor] = {}
        x = conv_bn(x, self.conv1, self.bn1)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        for name, block in self._blocks():
            x = block(x)
            if name in taps:
                found[name] = x
                if len(found) == len(taps):
                    break
        return found


class Vgg16(nn.Module):
    """VGG16 up to pool4 (stride 16), torchvision's parameter names; taps pool1 ... pool4.

    `conv5` adds the last three convolutions, without their pooling: tap conv5, stride 16 too.
    """

    mean, std = IMAGENET_MEAN, IMAGENET_STD
    stride = 16

    def __init__(self, *, conv5: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs, self.taps, self._at = 3, {}, {}
        for stage, (width, convs) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3)), start=1):
            for _ in range(convs):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = width
            layers.append(nn.MaxPool2d(2))
            self.taps[f"pool{stage}"] = width
            self._at[len(layers) - 1] = f"pool{stage}"
        if conv5:
            for _ in range(3):
                layers += [nn.Conv2d(inputs, inputs, 3, padding=1), nn.ReLU(inplace=True)]
            self.taps["conv5"] = inputs
            self._at[len(layers) - 1] = "conv5"
        self.last = list(self.taps)[-1]
        self.features = nn.Sequential(*layers)

    @property
    def last_stage(self) -> nn.Module:
        return self.features[24 if self.last == "conv5" else 17 :]

    def forward(self, x: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """(B, 3, H, W) normalised -> the wanted taps."""
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.features):
            x = layer(x)
            name = self._at.get(index, "")
            if name in taps:
                found[name] = x
        return found


class Small(nn.Module):
    """A trunk of 0.3 M parameters and stride 8, for CPU, tests and the demo."""

    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    last, stride = "conv6", 8

    def __init__(self) -> None:
        super().__init__()
        # (inputs, outputs, stride, dilation): three halvings, then context by dilation.
        plan = ((3, 24, 2, 1), (24, 48, 2, 1), (48, 64, 2, 1), (64, 96, 1, 1), (96, 96, 1, 2),
                (96, 128, 1, 2))  # fmt: skip
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(i, o, 3, stride=s, padding=d, dilation=d, bias=False),
                nn.GroupNorm(8, o),
                nn.ReLU(inplace=True),
            )
            for i, o, s, d in plan
        )
        self.taps = {f"conv{n}": step[1] for n, step in enumerate(plan, start=1)}

    @property
    def last_stage(self) -> nn.Module:
        return self.layers[-1]

    def forward(self, x: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """(B, 3, H, W) normalised -> the wanted taps."""
        found: dict[str, Tensor] = {}
        for name, layer in zip(self.taps, self.layers, strict=True):
            x = layer(x)
            if name in taps:
                found[name] = x
        return found


class Timm(nn.Module):
    """Any timm network with feature maps (the timm extra); taps stage0 ... in order of depth."""

    def __init__(self, name: str, *, pretrained: bool) -> None:
        super().__init__()
        try:
            import timm
        except ImportError as error:
            raise ImportError("trunk timm:NAME needs timm: pip install 'surefeat[timm]'") from error
        if not timm.is_model(name):
            near = ", ".join(timm.list_models(f"*{name.split('.')[0][:6]}*")[:5])
            raise ValueError(f"timm has no model {name!r}; perhaps {near or 'timm.list_models()'}")
        try:
            self.net: Any = timm.create_model(
                name, pretrained=pretrained, features_only=True, output_stride=16
            )
        except (NotImplementedError, TypeError, AssertionError):
            self.net = timm.create_model(name, pretrained=pretrained, features_only=True)
        info = self.net.feature_info
        self.taps = {f"stage{n}": width for n, width in enumerate(info.channels())}
        self.last, self.stride = list(self.taps)[-1], int(info.reduction()[-1])
        data: Any = timm.data.resolve_model_data_config(self.net)  # type: ignore[attr-defined, no-untyped-call]
        self.mean, self.std = tuple(data["mean"]), tuple(data["std"])

    @property
    def last_stage(self) -> nn.Module:
        children = [m for m in self.net.children() if any(True for _ in m.parameters())]
        last: nn.Module = children[-1]
        return last

    def forward(self, x: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """(B, 3, H, W) normalised -> the wanted taps."""
        maps = dict(zip(self.taps, self.net(x), strict=True))
        return {name: maps[name] for name in taps}


Trunk = ResNet50 | Vgg16 | Small | Timm


def build_trunk(name: str, *, stride_in_1x1: bool = False) -> Trunk:
    """A trunk by name, with random weights."""
    if name == "resnet50":
        return ResNet50(stride_in_1x1=stride_in_1x1)
    if name in ("vgg16", "vgg16-conv5"):
        return Vgg16(conv5=name == "vgg16-conv5")
    if name == "small":
        return Small()
    if name.startswith("timm:"):
        return Timm(name.removeprefix("timm:"), pretrained=False)
    raise ValueError(
        f"unknown trunk {name!r}; choose resnet50, vgg16, vgg16-conv5, small or timm:NAME"
    )

"""Trunks: images -> named feature maps ("taps") at a known stride.

A trunk has `stride` (of its last map), `taps` (name -> channels, in order of depth), `last` (the
deepest one's name), `mean`, `std` (its input scale) and `last_stage` (what `trained="last"`
trains), and is called with normalised images and the names of the wanted taps. `before_last` names
the tap from which `finish` runs the last stage alone, where there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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


def run_blocks(
    x: Tensor, blocks: Iterable[tuple[str, nn.Module]], taps: Collection[str]
) -> dict[str, Tensor]:
    """x through the blocks in turn -> the wanted taps; blocks beyond the deepest are not run."""
    maps: dict[str, Tensor] = {}
    for name, block in blocks:
        x = block(x)
        if name in taps:
            maps[name] = x
            if len(maps) == len(taps):
                break
    return maps


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

    def forward(self, x: Tensor, *, relu: bool = True) -> Tensor:
        skip = x
        if self.downsample is not None:
            skip = conv_bn(x, self.downsample[0], self.downsample[1], relu=False)  # type: ignore[arg-type]
        x = conv_bn(x, self.conv1, self.bn1)
        x = conv_bn(x, self.conv2, self.bn2)
        return conv_bn(x, self.conv3, self.bn3, skip, relu=relu)


class ResNet50(nn.Module):
    """ResNet-50 without pooling and classifier; res5 at stride 1, dilated by 2 (section 3.6).

    Taps are the paper's names, after the ReLU: res2a ... res5c. `stride_in_1x1` builds the original
    (v1) network, whose dilated form is exact everywhere; in v1.5 (torchvision) the first 3x3 of
    res5 held the stride and stays undilated. `dilated=False` gives the stride-32 network.
    """

    mean, std = IMAGENET_MEAN, IMAGENET_STD
    last, before_last = "res5c", "res4f"

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

    @property
    def last_stage(self) -> nn.Module:
        return self.layer4  # type: ignore[return-value]

    def forward(self, x: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """(B, 3, H, W) normalised -> the wanted taps."""
        x = F.max_pool2d(conv_bn(x, self.conv1, self.bn1), 3, stride=2, padding=1)
        layers = (getattr(self, f"layer{stage}") for stage in (1, 2, 3, 4))
        blocks = (block for layer in layers for block in layer)
        return run_blocks(x, zip(self.taps, blocks, strict=True), taps)

    def finish(self, x: Tensor) -> Tensor:
        """The map of `before_last` -> that of `last`."""
        for block in self.layer4:  # type: ignore[union-attr]
            x = block(x)
        return x


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
        stages = {"pool1": (64, 2), "pool2": (128, 2), "pool3": (256, 3), "pool4": (512, 3)}
        for name, (width, convs) in (stages | ({"conv5": (512, 3)} if conv5 else {})).items():
            for _ in range(convs):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = width
            if name != "conv5":
                layers.append(nn.MaxPool2d(2))
            self.taps[name], self._at[len(layers) - 1] = width, name
        self.before_last, self.last = list(self.taps)[-2:]
        self.features = nn.Sequential(*layers)

    @property
    def last_stage(self) -> nn.Module:
        return self.features[24 if self.last == "conv5" else 17 :]

    def forward(self, x: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """(B, 3, H, W) normalised -> the wanted taps."""
        layers = ((self._at.get(index, ""), layer) for index, layer in enumerate(self.features))
        return run_blocks(x, layers, taps)

    def finish(self, x: Tensor) -> Tensor:
        """The map of `before_last` -> that of `last`."""
        out: Tensor = self.last_stage(x)
        return out


class Small(nn.Module):
    """A trunk of 0.3 M parameters and stride 8, for CPU, tests and the demo."""

    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    last, before_last, stride = "conv6", "conv5", 8

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
        return run_blocks(x, zip(self.taps, self.layers, strict=True), taps)

    def finish(self, x: Tensor) -> Tensor:
        """The map of `before_last` -> that of `last`."""
        out: Tensor = self.layers[-1](x)
        return out


class Timm(nn.Module):
    """A network of timm (the timm extra): taps stage0 ..., or block0 ... of a vision transformer.

    Convolutional networks are dilated to stride 16 where they can be. Transformers take any size;
    their last tap goes through the network's own final norm, the others are as the blocks leave
    them. Sizes that are no multiple of the stride are padded to the right and below.
    """

    before_last = ""  # timm's networks do not run their last stage alone

    def __init__(self, name: str, *, pretrained: bool) -> None:
        super().__init__()
        try:
            import timm
        except ImportError as error:
            raise ImportError("trunk timm:NAME needs timm: pip install 'surefeat[timm]'") from error
        if not timm.is_model(name):
            near = ", ".join(timm.list_models(f"*{name.split('.')[0][:6]}*")[:5])
            raise ValueError(f"timm has no model {name!r}; perhaps {near or 'timm.list_models()'}")
        self.net: Any = _build_timm(name, pretrained=pretrained)
        self.whole = not hasattr(self.net.feature_info, "channels")  # one with all its blocks
        info = list(self.net.feature_info if self.whole else self.net.feature_info.get_dicts())
        plain = self.whole and len({stage["reduction"] for stage in info}) == 1
        kind = "block" if plain else "stage"
        self.taps = {f"{kind}{n}": int(stage["num_chs"]) for n, stage in enumerate(info)}
        self.last, self.stride = list(self.taps)[-1], int(info[-1]["reduction"])
        # Of a plain transformer a quarter of the blocks, as res5 is of ResNet-50.
        count = max(1, len(info) // 4) if plain else 1
        self._last_modules = [str(stage["module"]) for stage in info[-count:]]
        data: Any = timm.data.resolve_model_data_config(self.net)  # type: ignore[attr-defined, no-untyped-call]
        self.mean, self.std = tuple(data["mean"]), tuple(data["std"])

    @property
    def last_stage(self) -> nn.Module:
        by_name: dict[str, nn.Module] = dict(self.net.named_modules())
        # timm's feature networks write a dotted name with a stroke.
        names = [n if n in by_name else n.replace(".", "_") for n in self._last_modules]
        modules = [by_name[name] for name in names]
        if not any(weight.ndim > 1 for module in modules for weight in module.parameters()):
            kind = type(self.net).__name__
            raise ValueError(f"timm's {kind} has no last stage of its own; train all or the head")
        return nn.ModuleList([*modules, *([self.net.norm] if self.whole else [])])

    def forward(self, x: Tensor, taps: Collection[str]) -> dict[str, Tensor]:
        """(B, 3, H, W) normalised -> the wanted taps; of transformers none beyond the deepest."""
        x = F.pad(x, (0, -x.shape[-1] % self.stride, 0, -x.shape[-2] % self.stride))
        if not self.whole:
            maps = dict(zip(self.taps, self.net(x), strict=True))
            return {name: maps[name] for name in taps}
        wanted = [name for name in self.taps if name in taps]
        index = [list(self.taps).index(name) for name in wanted]
        read = self.net.forward_intermediates(
            x, indices=index, stop_early=True, intermediates_only=True, output_fmt="NCHW"
        )
        maps = dict(zip(wanted, read, strict=True))
        if self.last in maps:
            maps[self.last] = self.net.norm(maps[self.last].permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return maps

    def finish(self, x: Tensor) -> Tensor:
        raise ValueError("timm's networks do not run their last stage alone")

    def own_names(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict as timm or the network's authors publish it, under this trunk's names."""
        if any(name.startswith("net.") for name in state):
            return dict(state)
        convert = getattr(sys.modules[type(self.net).__module__], "checkpoint_filter_fn", None)
        if convert is not None and not self.net.state_dict().keys() <= state.keys():
            state = convert(dict(state), self.net)
        children = {name.replace("_", "."): name for name, _ in self.net.named_children()}
        named = {}
        for key, value in state.items():
            start = next((c for c in children if key.startswith(f"{c}.")), "")
            named[f"net.{children.get(start, '')}{key[len(start) :]}"] = value
        return named


def _build_timm(name: str, *, pretrained: bool) -> Any:
    """The whole network if it is a transformer that takes any size, else its feature maps."""
    import timm

    ways: tuple[dict[str, Any], ...] = (
        # Swin swallows the first without effect and needs the second, which ViTs refuse.
        {"num_classes": 0, "dynamic_img_size": True, "strict_img_size": False},
        {"num_classes": 0, "dynamic_img_size": True},
        {"features_only": True, "output_stride": 16},
    )
    for way in ways:
        try:
            return timm.create_model(name, pretrained=pretrained, **way)
        except (NotImplementedError, TypeError, AssertionError):
            continue
    return timm.create_model(name, pretrained=pretrained, features_only=True)


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
    known = "resnet50, vgg16, vgg16-conv5, small or timm:NAME"
    raise ValueError(f"unknown trunk {name!r}; choose {known}")

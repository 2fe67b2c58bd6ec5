"""DenseFeatures: trunk + head -> unit descriptors and their uncertainty at every location."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefeat.core.files import (
    choose_device,
    file_hash,
    pack_tensors,
    read_tensors,
    to_dict,
    write_model,
)
from surefeat.core.geometry import Frame, interpolation, pixel_to_grid
from surefeat.core.image import ImageLike, image_size, load, prepare
from surefeat.data.sources import folder_paths
from surefeat.model.config import (
    SETTINGS,
    SHIPPED_TRUNKS,
    WEIGHTS,
    ModelConfig,
    Trained,
    model_folder,
    newest_checkpoint,
    read_settings,
    stored_config,
)
from surefeat.model.features import Features, compare_with, extract_slowly
from surefeat.model.heads import at_size, build_head
from surefeat.model.probability import COHORT, Cohort, Reliability
from surefeat.model.probability import FILE as RELIABILITY
from surefeat.model.tiles import extract_tiled, finest_side, is_large
from surefeat.model.trunks import build_trunk
from surefeat.model.weights import (
    check_finite,
    load_initial,
    model_tensors,
    model_to_start_from,
    quantise,
    stride_in_1x1_of,
    widen,
)

_LOG = logging.getLogger("surefeat")


LARGEST_SIDE = 4096
"""Network pixels: above it neither the layers nor a comparison of all cells fits in memory."""


@dataclass(frozen=True)
class Maps:
    """What the network says of B images of one size."""

    descriptors: Tensor
    """(B, C, h, w), unit length along C."""
    uncertainty: Tensor
    """(B, h, w): sigma, above the floor."""
    stride: int

    def at(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Network pixels (B, N, 2) -> unit descriptors (B, N, C) and sigma (B, N), bilinear."""
        size = (self.descriptors.shape[-2], self.descriptors.shape[-1])
        weights = interpolation(pixel_to_grid(points, self.stride), size=size)
        read = weights @ self.descriptors.float().flatten(2).transpose(1, 2)
        sigma = weights @ self.uncertainty.float().flatten(1)[..., None]
        return F.normalize(read, dim=-1), sigma[..., 0]


class DenseFeatures(nn.Module):
    """Dense descriptors with a per-pixel confidence (paper, section 3.6)."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config or ModelConfig()
        self.trunk = build_trunk(self.config.trunk, stride_in_1x1=self.config.stride_in_1x1)
        self.reliability: Reliability | None = None
        self.cohort: Cohort | None = None
        self.weights_sha256 = ""  # of the file it was read from or last written to
        taps = self.trunk.taps
        self.lower = _lower_layers(self.config, list(taps))
        last, before = self.trunk.last, self.trunk.before_last or list(taps)[-2]
        self.seen = (last,) if self.config.head == "linear" else (before, last)
        self.head = build_head(
            self.config.head, [taps[name] for name in self.seen], channels=self.config.channels,
            sigma_floor=self.config.sigma_floor,
        )  # fmt: skip
        for name in ("mean", "std"):
            values = torch.tensor(getattr(self.trunk, name), device="cpu")[:, None, None]
            self.register_buffer(name, values, persistent=False)
        self.mean: Tensor
        self.std: Tensor

    @classmethod
    def create(cls, config: ModelConfig, *, init: str | Path = "imagenet") -> DenseFeatures:
        """A model ready for training, its trunk filled with initial weights.

        init: `shipped`, a model (name or folder), `imagenet` (downloaded), a file of weights, or
        `none`. A model gives its head too, where it has as many channels.
        """
        if config.trunk == "resnet50":
            said = stride_in_1x1_of(init)
            if said is not None:
                config = replace(config, stride_in_1x1=said)
        model = cls(config)
        load_initial(model.trunk, init, name=config.trunk)
        folder = model_to_start_from(init, config.trunk)
        if folder is not None:
            state = model_tensors(folder)
            head = {k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")}
            shapes = {name: value.shape for name, value in head.items()}
            if shapes == {name: value.shape for name, value in model.head.state_dict().items()}:
                model.head.load_state_dict(head)
        return model

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @property
    def stride(self) -> int:
        return self.trunk.stride

    def weights_hash(self) -> str:
        """SHA-256 of the file it was read from or written to; of what `save_pretrained` would
        write, if it never was or has learned since."""
        if self.weights_sha256:
            return self.weights_sha256
        return hashlib.sha256(pack_tensors(self.state_dict())).hexdigest()

    @property
    def has_confidence(self) -> bool:
        """Whether sigma can differ from place to place; see `without_confidence`."""
        return bool(self.head.last.weight[-1].any())

    def without_confidence(self) -> None:
        """Make sigma the same everywhere, for losses that do not teach it.

        Left to itself it would follow the trunk and look like a confidence that it is not.
        """
        with torch.no_grad():
            self.head.last.weight[-1].zero_()

    def normalise_input(self, images: Tensor) -> Tensor:
        """RGB in [0, 1] -> the trunk's own input scale."""
        return (images - self.mean) / self.std

    def forward(self, images: Tensor) -> Maps:
        """(B, 3, H, W) RGB in [0, 1] -> descriptors and uncertainty at the trunk's stride."""
        return self._head(self.trunk(self.normalise_input(images), self.seen))

    def forward_with_layers(self, images: Tensor) -> tuple[Maps, tuple[Tensor, ...]]:
        """The same, and the lower layers that matching adds, (B, D, h, w) each."""
        taps = self.trunk(self.normalise_input(images), {*self.lower, *self.seen})
        return self._head(taps), tuple(taps[name] for name in self.lower)

    def forward_with_lower(self, images: Tensor) -> tuple[Maps, Tensor]:
        """The same, the lower layers as one, of unit length: (B, D, h', w').

        Side by side at the first one's size, each at unit length, so that all count the same.
        """
        maps, layers = self.forward_with_layers(images)
        parts = [
            F.normalize(at_size(layer.float(), layers[0].shape[-2:]), dim=1) for layer in layers
        ]
        return maps, torch.cat(parts, dim=1) / len(parts) ** 0.5

    def frozen_maps(self, images: Tensor, trained: Trained) -> tuple[Tensor, ...]:
        """What enters the part that learns: (B, 3, H, W) RGB in [0, 1] -> its maps (B, C, h, w)."""
        names = self.seen if trained == "head" else (self.trunk.before_last,)
        taps = self.trunk(self.normalise_input(images), names)
        return tuple(taps[name] for name in names)

    def from_frozen(self, maps: Sequence[Tensor], trained: Trained) -> Maps:
        """The rest of `forward`, from what `frozen_maps` gave."""
        if trained == "head":
            return self._head(dict(zip(self.seen, maps, strict=True)))
        (before,) = maps
        last = self.trunk.finish(before)
        return self._head({self.trunk.before_last: before, self.trunk.last: last})

    def _head(self, taps: Mapping[str, Tensor]) -> Maps:
        out = self.head([taps[name] for name in self.seen]).float()
        sigma = F.softplus(out[:, -1]) + self.config.sigma_floor
        return Maps(F.normalize(out[:, :-1], dim=1), sigma, self.stride)

    def set_trained(self, trained: Trained, *, batch_norm: str = "frozen") -> None:
        """Choose which parameters learn, and put every batch norm into its mode.

        Statistics of layers that do not learn stay frozen whatever `batch_norm` says.
        """
        self.weights_sha256 = ""  # they are about to change
        self.requires_grad_(trained == "all")
        self.head.requires_grad_(True)
        if trained == "last":
            self.trunk.last_stage.requires_grad_(True)
        self.eval()
        for module in self.modules():
            learns = any(p.requires_grad for p in module.parameters(recurse=False))
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(batch_norm == "trained" and learns)

    @torch.inference_mode()
    def extract(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        longest_side: int | None = None,
        batch: int = 16,
        tiles: bool = False,
        slower: bool = False,
    ) -> list[Features]:
        """Features of one or many images: paths, folders, PIL images, arrays, tensors; any sizes.

        Images are resized to `longest_side` network pixels (default: the model's own) and batched
        with those of the same size, so nothing is padded and a batch gives what one image gives.
        tiles: images more than twice as large are seen at their own size, in tiles (model.tiles).
        slower: every image is seen at 1.4 times that size too, and mirrored, which matches a point
        or two better in eight times the time, without probabilities.
        """
        side = self._side(longest_side, batch=batch)
        if slower and tiles:
            raise ValueError(
                "tiles are seen once, as they are; leave out slower=True or tiles=True"
            )
        if slower:
            return extract_slowly(self, list(_each_image(images)), longest_side=side, batch=batch)
        done: dict[int, Features] = {}
        waiting: dict[tuple[int, int], list[tuple[int, Tensor, Frame, str]]] = {}
        for index, image in enumerate(_each_image(images)):
            large = self.extract_large(image, longest_side=side) if tiles else None
            if large is not None:
                done[index] = large
                continue
            pixels, frame = prepare(image, longest_side=side, multiple=self.stride)
            name = str(image) if isinstance(image, str | Path) else ""
            group = waiting.setdefault(frame.network, [])
            group.append((index, pixels, frame, name))
            if len(group) == batch:
                done.update(self.extract_group(waiting.pop(frame.network)))
        for group in waiting.values():
            done.update(self.extract_group(group))
        return [done[index] for index in sorted(done)]

    def extract_large(self, image: ImageLike, *, longest_side: int) -> Features | None:
        """Features of an image at its own size, stitched from tiles; None: it is not large."""
        name = str(image) if isinstance(image, str | Path) else ""
        if name and not is_large(image_size(name), side=longest_side):
            return None
        pixels = load(image)
        size = (pixels.shape[1], pixels.shape[2])
        if not is_large(size, side=longest_side):
            return None
        finest = finest_side(size, side=longest_side, stride=self.stride)
        return extract_tiled(self, pixels, longest_side=finest, side=longest_side, name=name)

    def _side(self, longest_side: int | None, *, batch: int) -> int:
        """The side that was asked for, or the model's own; ValueError: too small, or no batch."""
        side = self.config.longest_side if longest_side is None else longest_side
        if side < 2 * self.stride:
            least = f"use at least {2 * self.stride}"
            raise ValueError(f"longest_side (--side) {side} is too small; {least}")
        if side > LARGEST_SIDE:
            fix = f"use at most {LARGEST_SIDE:,}; --tiles (tiles=True) sees large photos in parts"
            raise ValueError(f"longest_side {side:,} is more than memory holds; {fix}")
        if batch < 1:
            raise ValueError(f"batch is {batch}; use at least 1")
        return side

    def extract_group(
        self, group: list[tuple[int, Tensor, Frame, str]]
    ) -> Iterator[tuple[int, Features]]:
        device = self.device
        stack = torch.stack([pixels for _, pixels, _, _ in group]).to(device).float() / 255
        safe = device.type == "cuda" and torch.cuda.is_bf16_supported()
        with torch.autocast(device.type, torch.bfloat16, enabled=safe):
            maps, lower = self.forward_with_lower(stack)
        known = self.reliability
        for row, (index, _, frame, name) in enumerate(group):
            reliability = known if known and known.holds_at(frame.network) else None
            own = (maps.descriptors[row].float(), maps.uncertainty[row].float(), lower[row])
            features = Features(*own, frame, self.stride, name, reliability)
            yield index, compare_with(self.cohort, features) if self.cohort else features

    def save_pretrained(self, folder: str | Path, *, int8: bool = False) -> None:
        """Write model.json and model.safetensors; int8 stores filters in a quarter of the space."""
        folder, state = Path(folder), self.state_dict()
        state = quantise({k: v.cpu() for k, v in state.items()}) if int8 else state
        for file in (RELIABILITY, COHORT):  # of a model that was here before
            (folder / file).unlink(missing_ok=True)
        write_model(folder / WEIGHTS, state, folder / SETTINGS, {"config": to_dict(self.config)})
        self.weights_sha256 = file_hash(folder / WEIGHTS)
        if self.reliability is not None:
            replace(self.reliability, weights_sha256=self.weights_sha256).save(folder)
        if self.cohort is not None:
            self.cohort.save(folder)

    @classmethod
    def from_pretrained(
        cls, source: str | Path | None = None, *, device: str | torch.device | None = None
    ) -> DenseFeatures:
        """A model in eval mode: one that ships (see SHIPPED), a folder or hub:OWNER/NAME.

        The weights are checked against their hash; device: by default the best there is.
        """
        where = choose_device(device)
        folder = model_folder(source)
        checkpoint = newest_checkpoint(folder)
        if checkpoint is not None and not (folder / SETTINGS).is_file():
            return cls._of_checkpoint(folder, checkpoint).eval().to(where)
        config, weights, digest = read_settings(folder)
        # Nothing is drawn that the weights replace; the caller's random numbers stay as they are.
        empty = torch.device("meta" if config.trunk in SHIPPED_TRUNKS else "cpu")
        with torch.random.fork_rng(devices=[]), empty:
            model = cls(config)
        state = widen(read_tensors(weights)[0])
        check_finite(state, what=str(weights))
        try:
            model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
        except RuntimeError as error:
            raise ValueError(f"{folder}: weights and {SETTINGS} are of different models") from error
        known = Reliability.load(folder)
        # One that was fitted to other weights says nothing of these.
        model.reliability = known if known and known.weights_sha256 in ("", digest) else None
        model.cohort = Cohort.load(folder) if model.reliability else None
        model.weights_sha256 = digest
        return model.eval().to(where)

    @classmethod
    def _of_checkpoint(cls, run: Path, checkpoint: Path) -> DenseFeatures:
        """The model of a run that was stopped, as its newest checkpoint has it."""
        try:
            settings = json.loads((run / "config.json").read_text())
            config = stored_config(settings["model"])
            tensors = read_tensors(checkpoint)[0]
            model = cls(config)
            model.load_state_dict(
                {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
            )
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            what = f"{checkpoint} holds no model of `surefeat pretrain` ({error})"
            raise ValueError(f"{what}; resume the run, or pass another") from error
        _LOG.warning("%s is not finished: this is its %s", run, checkpoint.stem)
        return model


def _lower_layers(config: ModelConfig, taps: list[str]) -> tuple[str, ...]:
    """The layers that matching adds: the best measured, or those that were asked for."""
    if config.lower == "auto":
        # With a head that learns alone res5c is ImageNet's own, and worth as much as res4e.
        resnet = "res4e+res5c" if config.head == "deep" else "res4e"
        known = {"resnet50": resnet, "vgg16": "pool4", "vgg16-conv5": "pool4", "small": "conv4"}
        return tuple(known.get(config.trunk, taps[-2]).split("+"))
    layers = tuple(config.lower.split("+"))
    for layer in layers:
        if layer not in taps:
            what = f"{config.trunk} has no layer {layer!r}"
            raise ValueError(f"{what}; choose auto, or of {', '.join(taps)} one or several, with +")
    return layers


def _each_image(images: ImageLike | Sequence[ImageLike]) -> Iterator[ImageLike]:
    """Single images, sequences of them, and the images of folders."""
    items = images if isinstance(images, list | tuple) else [images]
    for item in items:
        if isinstance(item, str | Path) and Path(item).is_dir():
            yield from folder_paths(item)
        else:
            yield item  # type: ignore[misc]

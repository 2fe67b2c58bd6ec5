"""What a head learns from: objects cut out of their photos, seen through many boxes, described.

Every object is cut once, with room around its box. Its views, through jittered boxes and every
second one mirrored, are read from that cut on the device; their features are computed once and kept
there, or, where they do not fit, made anew in every step. All that is random is drawn on the CPU
before anything is read, so a view depends on the seed alone, not on the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core import progress
from surefeat.core.geometry import into_box, jittered_box, mirrored, normalise, out_of_box
from surefeat.core.image import crop, image_threads
from surefeat.data.decode import free_host_memory
from surefeat.data.keypoints import KeypointSet
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.head import Batch, heatmaps
from surefeat.model.network import DenseFeatures, Maps

FeatureFunction = Callable[[Tensor], Tensor]
"""Crops (B, 3, S, S) uint8 -> maps (B, C, h, h) on their device."""

BATCH = {"cuda": 256}
"""Crops per pass of the network; on other devices 16."""

THREADS = 16
"""That read photos."""

_FINER = 1.25
"""Pixels of a cut per pixel of a view of its box: reading it a second time costs no sharpness."""

_SPARE = 4 * 2**30
"""Bytes that are left free on a GPU beside the features, for passes of the network and the head."""

_LOG = logging.getLogger(__name__)


def describe(model: DenseFeatures) -> FeatureFunction:
    """What a detector sees of crops: descriptors and lowest layer of a frozen model."""
    return lambda crops: side_by_side(*model.forward_with_layers(crops.float() / 255))


def side_by_side(maps: Maps, layers: Sequence[Tensor]) -> Tensor:
    """Descriptors and the lowest layer as (B, C + D, h, w), each unit length per cell.

    The higher ones, which matching adds too, would only make the head larger.
    """
    size = (maps.descriptors.shape[-2], maps.descriptors.shape[-1])
    lower = layers[0].float()
    if lower.shape[-2:] != size:  # some trunks' lower layer is finer
        lower = F.adaptive_avg_pool2d(lower, size)
    return torch.cat([maps.descriptors.float(), F.normalize(lower, dim=1)], dim=1)


@torch.no_grad()
def maps_of(crops: Tensor, features: FeatureFunction) -> Tensor:
    """The features of crops (B, 3, S, S) uint8: (B, C, h, h); in bf16 on CUDA."""
    kind = crops.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        return features(crops.contiguous(memory_format=torch.channels_last))


@dataclass(frozen=True, eq=False)
class CutObjects:
    """N objects as tensors on one device: pixels, boxes, and K channels of keypoints."""

    pixels: Tensor
    """(N, 3, P, P) uint8: what lies in `reach`."""
    reach: Tensor
    """(N, 4) inclusive, original pixels: the boxes, and around them what jitter can show."""
    boxes: Tensor
    """(N, 4) inclusive, original pixels."""
    points: Tensor
    """(N, K, 2) original pixels; NaN where not visible."""
    visible: Tensor
    """(N, K) bool."""
    own: Tensor
    """(N, K) bool: the channels of the object's category."""
    flip: Tensor
    """(K,) channel of the mirrored keypoint."""

    def __len__(self) -> int:
        return len(self.boxes)

    def read(self, numbers: Tensor, boxes: Tensor, *, size: int) -> Tensor:
        """Boxes (B, 4) within the reach of objects (B,) -> crops (B, 3, size, size) uint8."""
        steps = torch.arange(size, device=boxes.device, dtype=torch.float32)
        ys, xs = torch.meshgrid(steps, steps, indexing="ij")
        grid = torch.stack([xs, ys], dim=-1).reshape(1, -1, 2)
        side = (self.pixels.shape[-2], self.pixels.shape[-1])
        places = out_of_box(grid, boxes, size=(size, size))
        inside = normalise(into_box(places, self.reach[numbers], size=side), size=side)
        read = F.grid_sample(
            self.pixels[numbers].float(), inside.reshape(-1, size, size, 2),
            padding_mode="border", align_corners=False,
        )  # fmt: skip
        return read.round().clamp(0, 255).to(torch.uint8)


def cut_objects(
    labelled: KeypointSet, *, size: int, jitter: float, device: torch.device, quiet: bool = True
) -> CutObjects:
    """Cut a set's objects out of their photos, each photo read once, by several threads.

    Boxes that jitter moves by up to its share stay within the cuts. Without jitter a cut is the
    crop of the box itself, `size` pixels wide.
    """
    items = labelled.objects
    boxes = torch.stack([item.box for item in items]).float()
    extent = (boxes[:, 2:] - boxes[:, :2] + 1).repeat(1, 2)
    reach = boxes + torch.tensor([-jitter, -jitter, jitter, jitter]) * extent
    side = math.ceil(size * (1 + 2 * jitter) * (_FINER if jitter else 1))
    pixels = torch.empty(len(items), 3, side, side, dtype=torch.uint8)
    photos: dict[object, list[int]] = {}
    for number, item in enumerate(items):
        photos.setdefault(item.image, []).append(number)

    def fill(numbers: list[int]) -> None:
        photo = items[numbers[0]].read()
        for number in numbers:
            pixels[number] = crop(photo, reach[number], size=side)

    with image_threads(THREADS) as pool:
        done = pool.map(fill, photos.values())
        for _ in progress.bar(done, total=len(photos), desc="photos", unit="img", quiet=quiet):
            pass
    tensors = (pixels, reach, boxes, *_keypoints(labelled))
    return CutObjects(*(tensor.to(device) for tensor in tensors))


def _keypoints(labelled: KeypointSet) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points, visible, own and flip of CutObjects."""
    both = list(zip(labelled.categories, labelled.channels, strict=True))
    flip = torch.tensor([span.start + twin for kind, span in both for twin in kind.flip])
    shape = (len(labelled.objects), len(flip))
    points = torch.full((*shape, 2), torch.nan)
    visible, own = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for number, item in enumerate(labelled.objects):
        channels = labelled.channels[item.category]
        span = slice(channels.start, channels.stop)
        points[number, span], visible[number, span] = item.points, item.visible
        own[number, span] = True
    return points, visible, own, flip


class ObjectViews:
    """M views of objects (M,) through boxes (M, 4) within their reach, some mirrored (M,) bool.

    They are described when they are made, if their features fit into memory, else when asked for.
    """

    def __init__(
        self, objects: CutObjects, numbers: Tensor, boxes: Tensor, mirror: Tensor, *,
        features: FeatureFunction, size: int, quiet: bool = True,
    ) -> None:  # fmt: skip
        device = objects.boxes.device
        self.objects, self.features, self.crop_size = objects, features, size
        self.numbers, self.boxes = numbers.to(device), boxes.to(device)
        self.mirror = mirror.to(device)
        self.kept: Tensor | None = None
        """(M, h, w, C): channels last, as convolutions like them; None: made anew."""
        self.size = self._keep(quiet)
        """(h, w) of the maps."""
        points = into_box(objects.points[self.numbers], self.boxes, size=self.size)
        visible = objects.visible[self.numbers]
        turned, seen = mirrored(points, visible, objects.flip, size=self.size)
        self.points = torch.where(self.mirror[:, None, None], turned, points)
        """(M, K, 2) cells of the map."""
        self.visible = torch.where(self.mirror[:, None], seen, visible)
        """(M, K) bool."""

    def _keep(self, quiet: bool) -> tuple[int, int]:
        count, batch = len(self.numbers), BATCH.get(self.boxes.device.type, 16)
        with progress.bar(total=count, desc="describing views", unit="view", quiet=quiet) as bar:
            for start in range(0, count, batch):
                maps = self._describe(slice(start, start + batch))
                room = room_for(count, maps) if start == 0 else self.kept
                if room is None:
                    break
                room[start : start + batch] = maps.permute(0, 2, 3, 1)
                self.kept = room
                bar.update(len(maps))
        return maps.shape[-2], maps.shape[-1]

    def _describe(self, rows: Tensor | slice) -> Tensor:
        crops = self.objects.read(self.numbers[rows], self.boxes[rows], size=self.crop_size)
        mirror = self.mirror[rows, None, None, None]
        return maps_of(torch.where(mirror, crops.flip(-1), crops), self.features)

    def maps(self, rows: Tensor | slice) -> Tensor:
        """Features of some views as (B, C, h, w), on the objects' device."""
        if self.kept is None:
            return self._describe(rows)
        maps = self.kept[rows].permute(0, 3, 1, 2)
        return maps if maps.is_cuda else maps.float()

    def batches(
        self, rows: Tensor, *, steps: int, config: KeypointConfig, seed: int
    ) -> Iterator[Batch]:
        """Random batches of the views `rows` (M,); one recurs only when all have been drawn."""
        count, generator = steps * config.batch, torch.Generator().manual_seed(seed)
        passes = -(-count // len(rows))
        order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(passes)])
        for batch in rows[order[:count].to(rows.device)].reshape(steps, config.batch):
            targets = heatmaps(
                self.points[batch], self.visible[batch], size=self.size, spread=config.spread,
                floor=config.floor,
            )  # fmt: skip
            own = self.objects.own[self.numbers[batch]]
            counts = own if config.absent == "background" else self.visible[batch]
            yield self.maps(batch), targets, counts


def room_for(count: int, maps: Tensor) -> Tensor | None:
    """(count, h, w, C) in 16 bits on the maps' device, to be filled; None where it has no room."""
    dtype = torch.bfloat16 if maps.is_cuda else torch.float16
    shape = (count, *maps.shape[2:], maps.shape[1])
    need = torch.Size(shape).numel() * dtype.itemsize
    if need <= _free(maps.device):
        with suppress(RuntimeError):  # another program was faster
            return torch.empty(shape, dtype=dtype, device=maps.device)
    _LOG.warning(
        "the features of %d views take %.1f GiB, more than is free on %s: made anew in every step, "
        "which is slower", count, need / 2**30, maps.device,
    )  # fmt: skip
    return None


def _free(place: torch.device) -> float:
    """Bytes that features may take; unknown on some devices, where trying shows it."""
    if place.type == "cpu":
        return free_host_memory()
    if place.type != "cuda":
        return float("inf")
    # What torch keeps of earlier tensors is as good as free.
    kept = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return torch.cuda.mem_get_info(place)[0] + kept - _SPARE


class ViewStore:
    """Views of objects for fits on all or some of them; those that fits share are made once."""

    def __init__(
        self, objects: CutObjects, features: FeatureFunction, config: KeypointConfig, *,
        seed: int = 0, quiet: bool = True,
    ) -> None:  # fmt: skip
        self.objects, self.features, self.config = objects, features, config
        self.seed, self.quiet = seed, quiet

    @cached_property
    def every(self) -> ObjectViews:
        """`config.views` of every object."""
        numbers = torch.arange(len(self.objects))
        return self._random(numbers, count=self.config.views, seed=self.seed)

    def views_of(self, chosen: Tensor, *, seed: int) -> tuple[ObjectViews, Tensor]:
        """Views to learn objects `chosen` (N,) from, and which rows of them; few get more each."""
        count, device = self.config.views_each(len(chosen)), self.objects.boxes.device
        if count == self.config.views:
            rows = (chosen[:, None] * count + torch.arange(count)).flatten()
            return self.every, rows.to(device)
        views = self._random(chosen, count=count, seed=seed)
        return views, torch.arange(len(views.numbers), device=device)

    def _random(self, chosen: Tensor, *, count: int, seed: int) -> ObjectViews:
        """`count` views of each, one after the other, every second one mirrored."""
        numbers = chosen.repeat_interleave(count)
        generator = torch.Generator().manual_seed(seed)
        boxes = self.objects.boxes[numbers.to(self.objects.boxes.device)]
        boxes = jittered_box(boxes, generator, self.config.jitter)
        mirror = (torch.arange(len(numbers)) % count % 2 == 1) & self.config.mirror
        return ObjectViews(
            self.objects, numbers, boxes, mirror, features=self.features, size=self.config.size,
            quiet=self.quiet,
        )  # fmt: skip

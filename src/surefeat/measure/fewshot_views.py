"""Objects as the network sees them: crops cut on the device, their features and keypoints.

Everything random is drawn before anything is cut, so a view depends on the seed alone, not on the
device or the size of a batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import into_box, jittered_box, mirrored, normalise, out_of_box
from surefeat.data.decode import free_host_memory
from surefeat.measure.fewshot_data import Channels, Material, Objects, Photos
from surefeat.measure.fewshot_settings import FewShot
from surefeat.measure.rows import Row

FeatureFunction = Callable[[Tensor], Tensor]
"""(B, 3, S, S) uint8 crops -> (B, C, h, w) maps on the same device."""

BATCH = {"cuda": 256}
"""Crops per pass of the network; on other devices 16."""

_SPARE = 4 * 2**30
"""Bytes that are left free on a GPU beside the features, for passes of the network and the head."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Plan:
    """Which crops are to be cut; M of them."""

    objects: Tensor
    """(M,) numbers of objects."""
    boxes: Tensor
    """(M, 4) inclusive, pixels of the photos; they may reach beyond."""
    mirror: Tensor
    """(M,) bool: mirrored before the network sees them."""


@dataclass(frozen=True, eq=False)
class Views:
    """Cut crops; M of them, K channels."""

    features: Tensor
    """(M, h, w, C): channels last, as convolutions like them; on the host if too many."""
    points: Tensor
    """(M, K, 2) cells of the map."""
    visible: Tensor
    """(M, K) bool; False outside the object's class."""
    own: Tensor
    """(M, K) bool: the channels of the object's class."""

    @property
    def size(self) -> tuple[int, int]:
        """(h, w) of the maps."""
        return self.features.shape[1], self.features.shape[2]

    def maps(self, rows: Tensor | slice) -> Tensor:
        """Features of some views as (B, C, h, w), on the device of their points."""
        rows = rows.to(self.features.device) if isinstance(rows, Tensor) else rows
        return self.features[rows].to(self.points.device).permute(0, 3, 1, 2)


def plain_plan(objects: Objects) -> Plan:
    """One view per object: its own box, not mirrored."""
    numbers = torch.arange(len(objects), device=objects.boxes.device)
    return Plan(numbers, objects.boxes, torch.zeros_like(numbers, dtype=torch.bool))


def random_plan(
    objects: Objects, chosen: Tensor, *, count: int, jitter: float, generator: torch.Generator
) -> Plan:
    """`count` views of each chosen object (N,), one after the other, every second one mirrored.

    Each side of a box is moved by up to `jitter` of its size; the generator is on the CPU.
    """
    numbers = chosen.repeat_interleave(count)
    boxes = jittered_box(objects.boxes[numbers], generator, jitter)
    mirror = torch.arange(len(numbers), device=numbers.device) % count % 2 == 1
    return Plan(numbers, boxes, mirror)


def cut(photos: Photos, rows: Tensor, boxes: Tensor, *, side: int) -> Tensor:
    """Boxes (B, 4) of photos `rows` (B,) -> (B, 3, side, side) uint8.

    Convention: as crops.crop, the crop spans the box's outer edges and the border pixel is repeated
    beyond the photo. Antialiasing: each pixel is the mean of 2 x 2 bilinear reads, which serves
    boxes of up to about twice the crop's side.
    """
    fine = torch.arange(2 * side, device=boxes.device, dtype=torch.float32)
    ys, xs = torch.meshgrid(fine, fine, indexing="ij")
    grid = torch.stack([xs, ys], dim=-1).reshape(1, -1, 2)
    places = out_of_box(grid, boxes, size=(2 * side, 2 * side))
    # A photo fills only a part of its canvas: what counts as the border is its own last pixel.
    last = photos.sizes[rows].flip(-1)[:, None].float() - 1
    places = places.clamp_min(0).minimum(last)
    canvas = (photos.pixels.shape[-2], photos.pixels.shape[-1])
    places = normalise(places, size=canvas).reshape(-1, 2 * side, 2 * side, 2)
    pixels = photos.pixels[rows].float()
    read = F.grid_sample(pixels, places, padding_mode="border", align_corners=False)
    return F.avg_pool2d(read, 2).round().clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def extract(
    plan: Plan,
    objects: Objects,
    *,
    photos: Photos,
    channels: Channels,
    features: FeatureFunction,
    side: int,
) -> Views:
    """Cut the crops of a plan, and their features and keypoints; bf16 on CUDA."""
    device = objects.boxes.device
    on_cuda = device.type == "cuda"
    kept: Tensor | None = None
    count, batch = len(plan.objects), BATCH.get(device.type, 16)
    for start in range(0, count, batch):
        part = slice(start, start + batch)
        crops = cut(photos, objects.photo[plan.objects[part]], plan.boxes[part], side=side)
        crops = torch.where(plan.mirror[part, None, None, None], crops.flip(-1), crops)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda):
            maps = features(crops.contiguous(memory_format=torch.channels_last))
        if kept is None:
            kept = _room(count, maps)
        kept[part] = maps.permute(0, 2, 3, 1)
    if kept is None:
        raise ValueError("there are no objects to cut")
    size = (kept.shape[1], kept.shape[2])
    return Views(kept, *_keypoints(plan, objects, channels, size=size))


def _keypoints(
    plan: Plan, objects: Objects, channels: Channels, *, size: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Points in cells, visible and own of a plan's views."""
    points = into_box(objects.points[plan.objects], plan.boxes, size=size)
    visible = objects.visible[plan.objects]
    turned, seen = mirrored(points, visible, channels.flip, size=size)
    points = torch.where(plan.mirror[:, None, None], turned, points)
    visible = torch.where(plan.mirror[:, None], seen, visible)
    return points, visible, channels.own[objects.category[plan.objects]]


def _room(count: int, maps: Tensor) -> Tensor:
    """(count, h, w, C) to be filled: on the maps' device, or on the host where that is full."""
    dtype = torch.bfloat16 if maps.device.type == "cuda" else torch.float32
    shape = (count, *maps.shape[2:], maps.shape[1])
    need = torch.Size(shape).numel() * dtype.itemsize
    size = f"the features of {count} views take {need / 2**30:.1f} GiB"
    for place in dict.fromkeys((maps.device, torch.device("cpu"))):
        if need <= _free(place):
            try:
                room = torch.empty(shape, dtype=dtype, device=place)
            except RuntimeError:  # another program was faster
                continue
            if place != maps.device:
                _LOG.warning("%s, more than is free on %s: on the host", size, maps.device)
            return room
    raise MemoryError(f"{size}, more than is free; pass fewer views, or fewer cells")


def _free(place: torch.device) -> float:
    """Bytes that features may take; unknown on some devices, where trying shows it."""
    if place.type == "cpu":
        return free_host_memory()
    if place.type != "cuda":
        return float("inf")
    # What torch keeps of earlier tensors is as good as free.
    kept = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return torch.cuda.mem_get_info(place)[0] + kept - _SPARE


class RowViews:
    """The features of one row; those that seeds and rounds share are computed once."""

    def __init__(self, row: Row, material: Material, settings: FewShot) -> None:
        self.row, self.material, self.settings = row, material, settings
        self.seconds = 0.0
        """Spent on the features that all rounds share."""
        self.places: set[str] = set()
        """Kinds of devices that features were kept on."""

    @cached_property
    def test(self) -> Views:
        """One view of every test object."""
        return self._extract(plain_plan(self.material.test), self.material.test)

    @cached_property
    def train(self) -> Views:
        """`settings.views` of every training object, the same for all seeds and rounds."""
        every = torch.arange(len(self.material.train))
        return self._random(every, count=self.settings.views, seed=0)

    def prepare(self, largest: Tensor) -> list[Views]:
        """What all rounds share, computed before the first; `largest` (N,): objects of the last.

        So what does not fit into memory shows before anything is trained.
        """
        start = time.perf_counter()
        shared = [self.test, self.train] if self._shared(largest) else [self.test]
        if self.test.points.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        return shared

    def _shared(self, chosen: Tensor) -> bool:
        """Whether there are enough views of these objects among those of all."""
        return len(chosen) * self.settings.views >= self.settings.least_views

    def of(self, chosen: Tensor, *, seed: int) -> tuple[Views, Tensor]:
        """Views to train on objects `chosen` (N,), and which rows of them; few objects get more."""
        views = self.settings.views
        if self._shared(chosen):
            rows = (chosen[:, None] * views + torch.arange(views)).flatten()
            return self.train, rows.to(self.train.points.device)
        found = self._random(chosen, count=-(-self.settings.least_views // len(chosen)), seed=seed)
        return found, torch.arange(len(found.points), device=found.points.device)

    def _random(self, chosen: Tensor, *, count: int, seed: int) -> Views:
        objects = self.material.train
        plan = random_plan(
            objects, chosen.to(objects.boxes.device), count=count, jitter=self.settings.jitter,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        return self._extract(plan, objects)

    def _extract(self, plan: Plan, objects: Objects) -> Views:
        views = extract(
            plan, objects, photos=self.material.photos, channels=self.material.channels,
            features=partial(self.row.maps, cells=self.settings.cells),
            side=self.settings.side,
        )  # fmt: skip
        self.places.add(views.features.device.type)
        return views

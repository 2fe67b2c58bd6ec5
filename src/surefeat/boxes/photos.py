"""What the detector sees of photos: pixels, labels and proposals, and its trunk's maps of them.

Maps are at several scales, plain and mirrored, kept or computed anew. Each photo fills its own map,
unpadded through the trunk, so a batch gives what one photo gives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from surefeat.boxes.network import Detector
from surefeat.core.image import ImageError, decode, network_size, resize
from surefeat.data.decode import Skipped, free_host_memory
from surefeat.data.labels import PhotoLabels
from surefeat.match.proposals import item_bytes, key_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Photo:
    """One image with its label and proposals."""

    image: PhotoLabels
    pixels: Tensor
    """(3, h, w) uint8, on the CPU."""
    size: tuple[int, int]
    """(height, width) of the original, whose pixels all boxes are in."""
    proposals: Tensor
    """(R, 4) inclusive, original pixels: without any, the whole image is the only one."""


@dataclass(frozen=True, eq=False)
class PaddedBoxes:
    """The proposals of several photos, padded to one count, on a device."""

    boxes: Tensor
    """(N, R, 4) inclusive, original pixels; padding is 0."""
    valid: Tensor
    """(N, R) bool."""
    sizes: Tensor
    """(N, 2) of the originals."""

    def rows(self, index: Tensor) -> PaddedBoxes:
        """The same for some of the photos."""
        return PaddedBoxes(self.boxes[index], self.valid[index], self.sizes[index])

    def mirrored(self, flips: Tensor) -> PaddedBoxes:
        """Boxes of those photos (N,) bool mirrored left to right."""
        width = self.sizes[:, 1, None].float()
        x1, y1, x2, y2 = self.boxes.unbind(-1)
        turned = torch.stack([width - 1 - x2, y1, width - 1 - x1, y2], dim=-1)
        boxes = torch.where(flips[:, None, None], turned, self.boxes)
        return PaddedBoxes(boxes, self.valid, self.sizes)


def read_photos(
    images: Sequence[PhotoLabels],
    proposals: dict[str, Tensor],
    *,
    side: int,
    count: int,
    smallest: float = 0.0,
    workers: int = 8,
) -> tuple[list[Photo], tuple[Skipped, ...]]:
    """Decode images to at most this longest side; what cannot be used is named with the reason.

    proposals: by key_of the file; at most the first `count` are used, of those with no side under
    `smallest` times the image's longest.
    """

    def read(image: PhotoLabels) -> Photo | Skipped:
        try:
            content = item_bytes(image.item)
            pixels = decode(content, name=image.item.name)
        except ImageError as error:
            return Skipped(image.name, str(error).removeprefix(f"{image.item.name}: "))
        boxes = proposals.get(key_of(content))
        if boxes is None:
            return Skipped(image.name, "has no proposals in the file; make them for this image")
        size = (pixels.shape[1], pixels.shape[2])
        scale = min(1.0, side / max(size))
        small = (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))
        usable = _usable(boxes.round(), size, smallest=smallest)[:count]
        return Photo(image, resize(pixels, size=small), size, usable)

    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(read, images))
    skipped = tuple(entry for entry in done if isinstance(entry, Skipped))
    return [entry for entry in done if isinstance(entry, Photo)], skipped


def _usable(boxes: Tensor, size: tuple[int, int], *, smallest: float) -> Tensor:
    """Those that are large enough; without any, the whole image is the only one."""
    sides = boxes[:, 2:] - boxes[:, :2] + 1
    large = (sides >= smallest * max(size)).all(1)
    return boxes[large] if large.any() else torch.tensor([[0.0, 0.0, size[1] - 1.0, size[0] - 1.0]])


def stack_proposals(photos: Sequence[Photo], *, device: torch.device) -> PaddedBoxes:
    """All photos' proposals, padded to the largest count."""
    most = max(len(photo.proposals) for photo in photos)
    boxes = torch.zeros(len(photos), most, 4)
    valid = torch.zeros(len(photos), most, dtype=torch.bool)
    for row, photo in enumerate(photos):
        count = len(photo.proposals)
        boxes[row, :count], valid[row, :count] = photo.proposals, True
    sizes = torch.tensor([photo.size for photo in photos])
    return PaddedBoxes(boxes.to(device), valid.to(device), sizes.to(device))


def stack_labels(photos: Sequence[Photo], categories: Sequence[str]) -> Tensor:
    """(N, K): +1 shown, -1 not shown, 0 not known."""
    labels = torch.full((len(photos), len(categories)), -1)
    for row, photo in enumerate(photos):
        for column, name in enumerate(categories):
            if name in photo.image.labels:
                labels[row, column] = 1
            elif name in photo.image.unsure:
                labels[row, column] = 0
    return labels


# Share of free memory that kept maps may take; the rest is for the layers that learn.
_SHARE = 0.6

# Network pixels that go through the trunk at once.
_PIXELS = 1 << 22


@dataclass(frozen=True, eq=False)
class TrunkMaps:
    """Of a batch of photos."""

    maps: Tensor
    """(B, C, H, W); each photo's own in the top-left corner."""
    shapes: Tensor
    """(B, 2) rows and columns of each photo's own."""


class KeptMaps:
    """Every photo's maps at every scale, plain and mirrored, computed once: for a frozen trunk."""

    def __init__(
        self,
        detector: Detector,
        photos: Sequence[Photo],
        scales: Sequence[int],
        *,
        flips: bool,
        amp: bool,
        quiet: bool = True,
    ) -> None:
        self.stored: dict[int, TrunkMaps] = {}
        bar = tqdm(total=len(photos) * len(scales), desc="maps", unit="img", disable=quiet)
        for scale in scales:
            self.stored[scale] = _all_maps(detector, photos, scale, flips=flips, amp=amp, bar=bar)
        bar.close()

    def of(self, rows: Tensor, flips: Tensor, *, scale: int) -> TrunkMaps:
        """Of photos (B,), those mirrored that flips (B,) says; both on the maps' device."""
        stored = self.stored[scale]
        return TrunkMaps(stored.maps[flips.long(), rows], stored.shapes[rows])


class FreshMaps:
    """Maps computed at every step: for a trunk that learns, or maps that fit nowhere."""

    def __init__(self, detector: Detector, photos: Sequence[Photo], *, amp: bool) -> None:
        self.detector, self.photos, self.amp = detector, photos, amp

    def of(self, rows: Tensor, flips: Tensor, *, scale: int) -> TrunkMaps:
        """As KeptMaps.of, but float32 where the trunk learns."""
        learns = any(p.requires_grad for p in self.detector.trunk.parameters())
        own = []
        for row, flip in zip(rows.tolist(), flips.tolist(), strict=True):
            photo = self.photos[row]
            pixels = network_input([photo], network_of(photo, self.detector, scale), rows.device)
            pixels = pixels.flip(-1) if flip else pixels
            with torch.set_grad_enabled(learns):
                own.append(trunk_maps(self.detector, pixels, amp=self.amp, half=not learns)[0])
        shapes = torch.tensor([maps.shape[1:] for maps in own])
        height, width = shapes.amax(0).tolist()
        padded = [F.pad(m, (0, width - m.shape[2], 0, height - m.shape[1])) for m in own]
        return TrunkMaps(torch.stack(padded), shapes.to(rows.device))


def maps_fit(
    detector: Detector, photos: Sequence[Photo], scales: Sequence[int], *, flips: bool, amp: bool
) -> bool:
    """Whether all maps can be kept in the memory of the detector's device."""
    device = detector.scale.device
    # Layers before the last are finer than its stride.
    side = 8 * detector.trunk.stride
    with torch.no_grad():
        channels, across = detector.maps(torch.zeros(1, 3, side, side, device=device)).shape[1:3]
    cells = sum((math.ceil(scale / side * across) + 1) ** 2 for scale in scales)
    wide = 2 if amp and device.type != "cpu" else 4
    need = len(photos) * cells * channels * wide * (1 + flips)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    _LOG.info("maps of %d photos take %.1f of %.1f GiB", len(photos), need / 2**30, free / 2**30)
    return need <= _SHARE * free


def network_of(photo: Photo, detector: Detector, scale: int) -> tuple[int, int]:
    """(height, width) at which the network sees a photo."""
    return network_size(photo.size, longest_side=scale, multiple=detector.trunk.stride)


def same_sizes(
    photos: Sequence[Photo], detector: Detector, scale: int
) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Photos in groups of one network size: row numbers and (height, width)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, photo in enumerate(photos):
        groups.setdefault(network_of(photo, detector, scale), []).append(row)
    for size, rows in groups.items():
        step = max(1, _PIXELS // (size[0] * size[1]))
        for start in range(0, len(rows), step):
            yield rows[start : start + step], size


def network_input(photos: Sequence[Photo], size: tuple[int, int], device: torch.device) -> Tensor:
    """(B, 3, *size) in [0, 1] on the device."""
    resized = [resize(photo.pixels.to(device), size=size) for photo in photos]
    return torch.stack(resized).float() / 255


def trunk_maps(detector: Detector, pixels: Tensor, *, amp: bool, half: bool = True) -> Tensor:
    """The pooled layer of (B, 3, H, W): float16 on accelerators with amp and half, else float32."""
    amp = amp and pixels.device.type != "cpu"
    if pixels.device.type == "cuda":
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=amp):
        maps = detector.maps(pixels)
    # Pooling wants its channels first, and has no kernel for bfloat16.
    return maps.to(torch.float16 if amp and half else torch.float32).contiguous()


@torch.no_grad()
def _all_maps(
    detector: Detector, photos: Sequence[Photo], scale: int, *, flips: bool, amp: bool, bar: tqdm
) -> TrunkMaps:
    device = detector.scale.device
    maps, shapes = torch.zeros(0), torch.zeros(len(photos), 2, dtype=torch.long)
    for rows, size in same_sizes(photos, detector, scale):
        pixels = network_input([photos[row] for row in rows], size, device)
        for flip in range(2 if flips else 1):
            part = trunk_maps(detector, pixels.flip(-1) if flip else pixels, amp=amp)
            channels, height, width = part.shape[1:]
            if not len(maps):
                sizes = [network_of(photo, detector, scale) for photo in photos]
                most = [max(side) * height // size[0] for side in zip(*sizes, strict=True)]
                maps = part.new_zeros(1 + flips, len(photos), channels, *most)
            maps[flip, torch.tensor(rows, device=device), :, :height, :width] = part
            shapes[rows] = torch.tensor([height, width])
        bar.update(len(rows))
    return TrunkMaps(maps, shapes.to(device))

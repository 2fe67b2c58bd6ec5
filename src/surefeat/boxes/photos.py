"""What the detector sees of photos: pixels, labels and proposals, and its trunk's maps of them.

Maps are at several scales, plain and mirrored. Each photo fills its own map, unpadded through the
trunk, so a batch gives what one photo gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from surefeat.boxes.config import BoxesConfig
from surefeat.boxes.network import Detector
from surefeat.core.image import ImageError, decoded, image_threads, network_size, resize
from surefeat.data.decode import Skipped, free_host_memory
from surefeat.data.sources import PhotoLabels
from surefeat.match.proposals import item_bytes, key_of, make_proposals, read_proposals


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

    def rows(self, index: Sequence[int]) -> PaddedBoxes:
        """The same for some of the photos."""
        return PaddedBoxes(self.boxes[index], self.valid[index], self.sizes[index])

    def mirrored(self, flips: Sequence[bool]) -> PaddedBoxes:
        """The boxes of those photos mirrored left to right."""
        width = self.sizes[:, 1, None].float()
        x1, y1, x2, y2 = self.boxes.unbind(-1)
        turned = torch.stack([width - 1 - x2, y1, width - 1 - x1, y2], dim=-1)
        which = torch.tensor(flips, device=turned.device)[:, None, None]
        return replace(self, boxes=torch.where(which, turned, self.boxes))


def ready_proposals(
    images: Sequence[PhotoLabels], config: BoxesConfig, *, file: Path, quiet: bool
) -> dict[str, Tensor]:
    """Proposals by the hash of the image file; those that `file` lacks are made and added."""
    make_proposals([image.item for image in images], config.proposals, file=file, quiet=quiet)
    return read_proposals(file, config.proposals) if file.exists() else {}


def read_photos(
    images: Sequence[PhotoLabels], proposals: dict[str, Tensor], config: BoxesConfig
) -> tuple[list[Photo], list[Skipped]]:
    """Decode images and take the proposals that compete; what cannot be used is named, with why.

    proposals: by key_of the file.
    """

    def read(image: PhotoLabels) -> Photo | Skipped:
        try:
            content = item_bytes(image.item)
            with decoded(content, name=image.item.name) as whole_image:
                height, width = whole_image.shape[1:]
                scale = min(1.0, config.side / max(height, width))
                small = (max(1, round(height * scale)), max(1, round(width * scale)))
                pixels = resize(whole_image, size=small)
        except ImageError as error:
            return Skipped(image.name, error.reason)
        boxes = proposals.get(key_of(content))
        if boxes is None:
            return Skipped(image.name, "has no proposals in the file; make them for this image")
        boxes = boxes.round()
        large = (boxes[:, 2:] - boxes[:, :2] + 1 >= config.smallest * max(height, width)).all(1)
        whole = torch.tensor([[0.0, 0.0, width - 1.0, height - 1.0]])
        usable = boxes[large][: config.regions] if large.any() else whole
        return Photo(image, pixels, (height, width), usable)

    with image_threads(8) as pool:
        done = list(pool.map(read, images))
    photos = [entry for entry in done if isinstance(entry, Photo)]
    return photos, [entry for entry in done if isinstance(entry, Skipped)]


def stack_proposals(photos: Sequence[Photo], device: torch.device) -> PaddedBoxes:
    """All photos' proposals, padded to the largest count."""
    boxes = pad_sequence([photo.proposals for photo in photos], batch_first=True)
    counts = torch.tensor([len(photo.proposals) for photo in photos])
    valid = torch.arange(boxes.shape[1]) < counts[:, None]
    sizes = torch.tensor([photo.size for photo in photos])
    return PaddedBoxes(boxes.to(device), valid.to(device), sizes.to(device))


def stack_labels(photos: Sequence[Photo], categories: Sequence[str]) -> Tensor:
    """(N, K): +1 shown, -1 not shown, 0 not known."""

    def mark(image: PhotoLabels, name: str) -> int:
        return 1 if name in image.labels else 0 if name in image.unsure else -1

    return torch.tensor([[mark(photo.image, name) for name in categories] for photo in photos])


# Share of free memory that kept maps may take; the rest is for the layers that learn.
_SHARE = 0.6

# Network pixels that go through the trunk at once.
_PIXELS = 1 << 22


class TrunkMaps:
    """The frozen trunk's maps of photos: computed when first asked for, and kept while they fit."""

    def __init__(self, detector: Detector, photos: Sequence[Photo]) -> None:
        self.detector, self.photos, self.device = detector, photos, detector.scale.device
        cuda = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if cuda else free_host_memory()
        self.room = _SHARE * free
        self.kept: dict[tuple[int, bool, int], Tensor] = {}

    def of(
        self, rows: Sequence[int], flips: Sequence[bool], *, scale: int
    ) -> tuple[Tensor, Tensor]:
        """Maps (B, C, H, W) of some photos, each in the top-left corner, and their sizes (B, 2)."""
        own = [self._map(row, flip, scale) for row, flip in zip(rows, flips, strict=True)]
        shapes = torch.tensor([maps.shape[1:] for maps in own])
        height, width = shapes.amax(0).tolist()
        padded = [F.pad(m, (0, width - m.shape[2], 0, height - m.shape[1])) for m in own]
        return torch.stack(padded), shapes.to(self.device)

    @torch.no_grad()
    def _map(self, row: int, flip: bool, scale: int) -> Tensor:
        if (row, flip, scale) in self.kept:
            return self.kept[row, flip, scale]
        photo = self.photos[row]
        pixels = network_input([photo], network_of(photo, self.detector, scale), self.device)
        maps = trunk_maps(self.detector, pixels.flip(-1) if flip else pixels)[0]
        if maps.nbytes <= self.room:
            self.room -= maps.nbytes
            self.kept[row, flip, scale] = maps
        return maps


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


def trunk_maps(detector: Detector, pixels: Tensor) -> Tensor:
    """The pooled layer of (B, 3, H, W): float16 on accelerators, else float32."""
    if pixels.device.type == "cuda":
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    with faster(pixels.device):
        maps = detector.maps(pixels)
    # Pooling wants its channels first, and has no kernel for bfloat16.
    fast = pixels.device.type != "cpu"
    return maps.to(torch.float16 if fast else torch.float32).contiguous()


def faster(device: torch.device) -> torch.autocast:
    """bf16 on accelerators; never on the CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu")

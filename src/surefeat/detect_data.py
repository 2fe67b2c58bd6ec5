"""Photos ready for the detector: pixels, labels and proposals."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.data.canvas import Skipped
from surefeat.data.labels import Labelled
from surefeat.detect_proposals import Proposals, item_bytes, key_of
from surefeat.image import decode, resize
from surefeat.pixels import ImageError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Photo:
    """One image with its label and proposals."""

    image: Labelled
    pixels: Tensor
    """(3, h, w) uint8, on the CPU."""
    size: tuple[int, int]
    """(height, width) of the original, whose pixels all boxes are in."""
    proposals: Proposals
    """One box or more: without any, the whole image is the only one."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """The proposals of several photos, padded to one count, on a device."""

    boxes: Tensor
    """(N, R, 4) inclusive, original pixels; padding is 0."""
    scores: Tensor | None
    """(N, R) the proposer's own, or None."""
    valid: Tensor
    """(N, R) bool."""
    sizes: Tensor
    """(N, 2) of the originals."""

    def rows(self, index: Tensor) -> Boxes:
        """The same for some of the photos."""
        scores = None if self.scores is None else self.scores[index]
        return Boxes(self.boxes[index], scores, self.valid[index], self.sizes[index])

    def mirrored(self, flips: Tensor) -> Boxes:
        """Boxes of those photos (N,) bool mirrored left to right."""
        width = self.sizes[:, 1, None].float()
        x1, y1, x2, y2 = self.boxes.unbind(-1)
        turned = torch.stack([width - 1 - x2, y1, width - 1 - x1, y2], dim=-1)
        boxes = torch.where(flips[:, None, None], turned, self.boxes)
        return Boxes(boxes, self.scores, self.valid, self.sizes)


def read_photos(
    images: Sequence[Labelled],
    proposals: dict[str, Proposals],
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

    def read(image: Labelled) -> Photo | Skipped:
        try:
            content = item_bytes(image.item)
            pixels = decode(content, name=image.item.name)
        except ImageError as error:
            return Skipped(image.name, str(error).removeprefix(f"{image.item.name}: "))
        found = proposals.get(key_of(content))
        if found is None:
            return Skipped(image.name, "has no proposals in the file; make them for this image")
        size = (pixels.shape[1], pixels.shape[2])
        scale = min(1.0, side / max(size))
        small = (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))
        usable = _usable(found, size, smallest=smallest).first(count)
        return Photo(image, resize(pixels, size=small), size, usable)

    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(read, images))
    skipped = tuple(each for each in done if isinstance(each, Skipped))
    for each in skipped[:5]:
        _LOG.warning("skipped %s: %s", each.name, each.reason)
    if len(skipped) > 5:
        _LOG.warning("... and %d more", len(skipped) - 5)
    return [each for each in done if isinstance(each, Photo)], skipped


def _usable(found: Proposals, size: tuple[int, int], *, smallest: float) -> Proposals:
    """Those that are large enough; without any, the whole image is the only one."""
    sides = found.boxes[:, 2:] - found.boxes[:, :2] + 1
    large = (sides >= smallest * max(size)).all(1)
    if large.any():
        return Proposals(found.boxes[large], None if found.scores is None else found.scores[large])
    height, width = size
    whole = torch.tensor([[0.0, 0.0, width - 1.0, height - 1.0]])
    return Proposals(whole, None if found.scores is None else torch.zeros(1))


def stack_boxes(photos: Sequence[Photo], *, device: torch.device) -> Boxes:
    """All photos' proposals, padded to the largest count."""
    most = max(len(photo.proposals.boxes) for photo in photos)
    boxes = torch.zeros(len(photos), most, 4)
    valid = torch.zeros(len(photos), most, dtype=torch.bool)
    scores = torch.zeros(len(photos), most)
    for row, photo in enumerate(photos):
        count = len(photo.proposals.boxes)
        boxes[row, :count], valid[row, :count] = photo.proposals.boxes, True
        if photo.proposals.scores is not None:
            scores[row, :count] = photo.proposals.scores
    scored = any(photo.proposals.scores is not None for photo in photos)
    sizes = torch.tensor([photo.size for photo in photos])
    return Boxes(
        boxes.to(device), scores.to(device) if scored else None, valid.to(device), sizes.to(device)
    )


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

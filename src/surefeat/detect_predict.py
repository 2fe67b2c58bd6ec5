"""Scores of all proposals of photos: the mean over scales and flips (appendix B)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.detect import Detector, to_cells
from surefeat.detect_data import Boxes, Photo, stack_boxes
from surefeat.detect_maps import network_input, same_sizes, trunk_maps

# Proposals that go through the hidden layers at once.
_REGIONS = 8192


@dataclass(frozen=True, eq=False)
class Scored:
    """A photo and what the detector says about its proposals."""

    photo: Photo
    scores: Tensor
    """(R, K) in [0, 1]: mean over scales and flips, for the photo's R proposals."""

    def image_scores(self) -> Tensor:
        """(K,): sum over regions, how sure the detector is that the photo shows each class."""
        return self.scores.sum(0)


@torch.inference_mode()
def score_photos(
    detector: Detector,
    photos: Sequence[Photo],
    *,
    scales: Sequence[int],
    flips: bool = True,
    amp: bool = True,
) -> list[Scored]:
    """Every photo's scores, on the detector's device, in order."""
    if not photos:
        return []
    device = detector.scale.device
    boxes = stack_boxes(photos, device=device)
    totals = torch.zeros(*boxes.valid.shape, len(detector.categories), device=device)
    for scale in scales:
        for rows, size in same_sizes(photos, detector, scale):
            pixels = network_input([photos[row] for row in rows], size, device)
            for flip in (False, True)[: 1 + flips]:
                maps = trunk_maps(detector, pixels.flip(-1) if flip else pixels, amp=amp)
                _add(detector, maps, boxes, rows, totals, flip=flip, amp=amp)
    totals /= len(scales) * (1 + flips)
    counts = [len(photo.proposals.boxes) for photo in photos]
    return [
        Scored(photo, totals[row, :count])
        for row, (photo, count) in enumerate(zip(photos, counts, strict=True))
    ]


def _add(
    detector: Detector, maps: Tensor, boxes: Boxes, rows: list[int], totals: Tensor, *,
    flip: bool, amp: bool,
) -> None:  # fmt: skip
    """One pass over photos of one size; their region scores are added to the totals."""
    device = maps.device
    amp = amp and device.type != "cpu"
    step = max(1, _REGIONS // boxes.valid.shape[1])
    for start in range(0, len(rows), step):
        picked = torch.tensor(rows[start : start + step], device=device)
        some = boxes.rows(picked).mirrored(torch.full_like(picked, flip, dtype=torch.bool))
        part = maps[start : start + step]
        shapes = torch.tensor([maps.shape[2:]], device=device).expand(len(picked), -1)
        cells = to_cells(some.boxes, some.sizes, shapes)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            found = detector(part, cells, some.valid, some.scores)
        totals[picked] += found.scores


def score_in_chunks(
    detector: Detector, photos: Sequence[Photo], *, chunk: int = 512, **options: object
) -> Iterator[Scored]:
    """The same for many photos, a few hundred at a time, so that memory stays bounded."""
    for start in range(0, len(photos), chunk):
        yield from score_photos(detector, photos[start : start + chunk], **options)  # type: ignore[arg-type]

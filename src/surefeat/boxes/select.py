"""Which boxes to keep, as in the paper's appendix B, and what is written about them.

All proposals of a photo are scored, as the mean over scales and flips; the best one of each image
label is a candidate, and floor and class median decide.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from surefeat.boxes.config import SelectConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import (
    PaddedBoxes,
    Photo,
    network_input,
    same_sizes,
    stack_proposals,
    trunk_maps,
)
from surefeat.core.geometry import box_iou
from surefeat.data.coco import Annotation, Coco, CocoCategory, CocoImage
from surefeat.model.features import box_cells

Verdict = Literal["kept", "below the floor", "below the median"]

VERDICTS = ("kept", "below the floor", "below the median")

# Photos that are scored together, and proposals that go through the hidden layers at once.
_PHOTOS, _REGIONS = 512, 8192


@dataclass(frozen=True, eq=False)
class Scored:
    """A photo and what the detector says about its proposals."""

    photo: Photo
    scores: Tensor
    """(R, K) in [0, 1]: mean over scales and flips, for the photo's R proposals."""

    def image_scores(self) -> Tensor:
        """(K,): sum over regions, how sure the detector is that the photo shows each class."""
        return self.scores.sum(0)


def score_photos(
    detector: Detector,
    photos: Sequence[Photo],
    *,
    scales: Sequence[int],
    flips: bool = True,
    amp: bool = True,
) -> Iterator[Scored]:
    """Every photo's scores, on the detector's device, in order, a few hundred photos at a time."""
    for start in range(0, len(photos), _PHOTOS):
        part = photos[start : start + _PHOTOS]
        totals = _mean_scores(detector, part, scales=scales, flips=flips, amp=amp)
        for photo, scores in zip(part, totals, strict=True):
            yield Scored(photo, scores[: len(photo.proposals)])


@torch.inference_mode()
def _mean_scores(
    detector: Detector, photos: Sequence[Photo], *, scales: Sequence[int], flips: bool, amp: bool
) -> Tensor:
    """(N, R, K); what is padding has 0."""
    device = detector.scale.device
    boxes = stack_proposals(photos, device=device)
    totals = torch.zeros(*boxes.valid.shape, len(detector.categories), device=device)
    for scale in scales:
        for rows, size in same_sizes(photos, detector, scale):
            pixels = network_input([photos[row] for row in rows], size, device)
            for flip in (False, True)[: 1 + flips]:
                maps = trunk_maps(detector, pixels.flip(-1) if flip else pixels, amp=amp)
                _add(detector, maps, boxes, rows, totals, flip=flip, amp=amp)
    return totals / (len(scales) * (1 + flips))


def _add(
    detector: Detector, maps: Tensor, boxes: PaddedBoxes, rows: list[int], totals: Tensor, *,
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
        cells = box_cells(some.boxes, some.sizes, shapes)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            totals[picked] += detector(part, cells, some.valid).scores


@dataclass(frozen=True)
class Candidate:
    """The best box of one label of one image."""

    name: str
    """Of the image."""
    category: str
    box: tuple[float, float, float, float]
    """Inclusive, original pixels."""
    score: float
    """Mean over scales and flips, of this box and those that support it (`agreed`); in [0, 1]."""
    verdict: Verdict = "kept"


@dataclass(frozen=True)
class Selection:
    """All candidates with their verdicts."""

    candidates: tuple[Candidate, ...]
    counts: dict[str, dict[str, int]]
    """For the floor on the mean and on the sum: how many of each verdict."""

    def kept(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.candidates if c.verdict == "kept")


def agreed(boxes: Tensor, scores: Tensor, power: float) -> Tensor:
    """Boxes (R, 4), scores (R, K) -> (R, K): sums over all boxes of their scores times IoU^power.

    Boxes around an object support each other, where a part that scores high may lie alone. Never
    less than a box's own score or more than the image's. Power 0: the scores as they are.
    """
    if not power:
        return scores
    boxes = boxes.to(scores.device)
    return box_iou(boxes, boxes).pow(power) @ scores


def best_boxes(scored: Scored, categories: Sequence[str], *, agreement: float) -> list[Candidate]:
    """The best of a photo's proposals for each of its labels; agreement: as in SelectConfig."""
    photo = scored.photo
    top, rows = agreed(photo.proposals, scored.scores, agreement).cpu().max(0)
    candidates = []
    for column, category in enumerate(categories):
        if category in photo.image.labels:
            x1, y1, x2, y2 = photo.proposals[rows[column]].tolist()
            score = float(top[column])
            candidates.append(Candidate(photo.image.name, category, (x1, y1, x2, y2), score))
    return candidates


def select(candidates: Sequence[Candidate], config: SelectConfig) -> Selection:
    """Drop what scores under the floor, then, per class, what scores under the median of the rest.

    A floor on the sum over scales and flips is lower by their number, for scores that are the mean.
    """
    judged = {
        on: _judge(candidates, floor, median=config.median)
        for on, floor in (("mean", config.floor), ("sum", config.floor / config.passes))
    }
    counts = {
        on: {verdict: sum(c.verdict == verdict for c in verdicts) for verdict in VERDICTS}
        for on, verdicts in judged.items()
    }
    return Selection(tuple(judged[config.floor_on]), counts)


def _judge(candidates: Sequence[Candidate], floor: float, *, median: bool) -> list[Candidate]:
    scores: dict[str, list[float]] = {}
    for candidate in candidates:
        if candidate.score >= floor:
            scores.setdefault(candidate.category, []).append(candidate.score)
    middle = {category: statistics.median(values) for category, values in scores.items()}

    def judge(candidate: Candidate) -> Verdict:
        if candidate.score < floor:
            return "below the floor"
        below = median and candidate.score < middle[candidate.category]
        return "below the median" if below else "kept"

    return [replace(candidate, verdict=judge(candidate)) for candidate in candidates]


def to_coco(
    selection: Selection, sizes: dict[str, tuple[int, int]], categories: Sequence[str]
) -> Coco:
    """The kept boxes as a COCO file: every image is listed, also those without a box.

    sizes: name -> (height, width).
    """
    rows = {name: row for row, name in enumerate(sizes)}
    columns = {name: column for column, name in enumerate(categories)}
    annotations = tuple(
        Annotation(
            rows[candidate.name], columns[candidate.category], candidate.box,
            more={"score": round(candidate.score, 6)},
        )
        for candidate in selection.kept()
    )  # fmt: skip
    images = tuple(CocoImage(name, size) for name, size in sizes.items())
    return Coco(images, tuple(CocoCategory(name) for name in categories), annotations)


def to_csv(selection: Selection) -> str:
    """Every candidate with its score and verdict, a line each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["image", "category", "x1", "y1", "x2", "y2", "score", "verdict"])
    for c in selection.candidates:
        writer.writerow([c.name, c.category, *c.box, f"{c.score:.6f}", c.verdict])
    return out.getvalue()

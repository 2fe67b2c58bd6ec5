"""How right boxes are: CorLoc and VOC's average precision, and the controls beside them.

Convention: a box is right when its IoU (inclusive widths) with an object of its class is at least
0.5. Difficult objects, as VOC flags them, are neither missed nor wrong to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from surefeat.core.geometry import box_area, box_iou
from surefeat.data.sources import PhotoLabels

RIGHT = 0.5
"""Least IoU of a right box."""

_NONE = torch.zeros(0, 4)


@dataclass(frozen=True)
class AveragePrecision:
    """Of one class, in [0, 1]."""

    area: float
    """Area under the precision-recall curve made monotone: VOC from 2010 on."""
    eleven: float
    """Mean of that curve at recall 0, 0.1, ... 1: VOC 2007."""
    objects: int
    """That are not difficult."""


@dataclass(frozen=True, eq=False)
class Found:
    """All detections of one class in one image, on the CPU."""

    boxes: Tensor
    """(N, 4) float32, inclusive, original pixels."""
    scores: Tensor
    """(N,) float32."""


def corloc(
    images: Sequence[PhotoLabels], best: Mapping[tuple[str, str], Tensor], categories: Sequence[str]
) -> dict[str, float]:
    """Share of a class's images in which its best box is right; NaN for a class without images.

    best: (image name, category) -> box (4,). Images count that show an object of the class which is
    not difficult; one without a box is a miss.
    """
    found = {}
    for category in categories:
        hits = []
        for image in images:
            truth = objects_of(image, category)[0]
            if len(truth):
                box = best.get((image.name, category))
                hits.append(box is not None and _overlap(box, truth) >= RIGHT)
        found[category] = sum(hits) / len(hits) if hits else float("nan")
    return found


def average_precision(
    images: Sequence[PhotoLabels], found: Mapping[str, Found], category: str
) -> AveragePrecision:
    """VOC's: each object is found once, by the best scored box that has it as its best overlap."""
    scores, right = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]
    total = 0
    for image in images:
        truth, difficult = objects_of(image, category)
        total += len(truth)
        if image.name in found:
            marks, counted = _judge(found[image.name], truth, difficult)
            scores.append(found[image.name].scores[counted])
            right.append(marks[counted])
    order = torch.cat(scores).argsort(descending=True, stable=True)
    return precision_recall(torch.cat(right)[order], total)


def precision_recall(right: Tensor, total: int) -> AveragePrecision:
    """Detections by falling score (N,) bool, and how many objects there are."""
    if not total:
        return AveragePrecision(float("nan"), float("nan"), 0)
    hits = right.double().cumsum(0)
    recall = hits / total
    precision = hits / torch.arange(1, len(right) + 1)
    # From the right: the best precision at this recall or more.
    monotone = precision.flip(0).cummax(0).values.flip(0) if len(right) else precision
    steps = recall - torch.cat([torch.zeros(1, dtype=torch.float64), recall])[: len(recall)]
    levels = [monotone[recall >= level / 10 - 1e-9] for level in range(11)]
    eleven = sum(float(level[0]) if len(level) else 0.0 for level in levels) / 11
    return AveragePrecision(float((steps * monotone).sum()), eleven, total)


def objects_of(image: PhotoLabels, category: str) -> tuple[Tensor, Tensor]:
    """Boxes (N, 4) of an image's objects of a class, and those (M, 4) of its difficult ones."""
    of_class = [each for each in image.objects if each.category == category]
    if not of_class:
        return _NONE, _NONE
    boxes = torch.tensor([each.box for each in of_class], dtype=torch.float32).reshape(-1, 4)
    hard = torch.tensor([each.difficult for each in of_class], dtype=torch.bool)
    return boxes[~hard], boxes[hard]


def suppress(
    boxes: Tensor, scores: Tensor, *, overlap: float = 0.4, least: float = 1e-4
) -> list[Found]:
    """Boxes (R, 4) and scores (R, K), on any device -> what is found of each class.

    Greedy: a box with more IoU than `overlap` with a better one of its class goes [P], and so does
    one that scores under `least`: 1e-3 on the sum of ten passes in the code of Bilen & Vedaldi.
    """
    rows, kind = (scores >= least).nonzero(as_tuple=True)
    boxes, value = boxes.to(scores.device)[rows], scores[rows, kind]
    # torchvision's boxes exclude their far edge, ours include it.
    edges = boxes + torch.tensor([0.0, 0.0, 1.0, 1.0], device=boxes.device)
    kept = batched_nms(edges, value, kind, overlap)
    boxes, value, kind = (each[kept].cpu() for each in (boxes, value, kind))
    return [Found(boxes[kind == k], value[kind == k]) for k in range(scores.shape[1])]


def centre_box(size: tuple[int, int], *, share: float = 0.5) -> Tensor:
    """Control (4,): the box of this share of the image's area in its middle, same aspect."""
    height, width = size
    h, w = height * share**0.5, width * share**0.5
    left, top = (width - w) / 2, (height - h) / 2
    return torch.tensor([left, top, left + w - 1, top + h - 1])


def largest_proposal(boxes: Tensor, size: tuple[int, int], *, most: float = 0.9) -> Tensor:
    """Control (4,): the largest of the proposals (N, 4) that is not about the whole image."""
    areas = box_area(boxes)
    whole = areas > most * size[0] * size[1]
    return boxes[(areas.masked_fill(whole, -1) if not bool(whole.all()) else areas).argmax()]


def controls(boxes: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
    """By name, for an image with these proposals (N, 4): boxes that know nothing of its labels."""
    shares = (0.25, 0.5, 0.75, 1.0)
    centres = {f"centre box, {each:g} of the area": centre_box(size, share=each) for each in shares}
    return centres | {"largest proposal": largest_proposal(boxes, size)}


def _overlap(box: Tensor, truth: Tensor) -> float:
    return float(box_iou(box.float().cpu()[None], truth).max())


def _judge(found: Found, truth: Tensor, difficult: Tensor) -> tuple[Tensor, Tensor]:
    """Which detections (N,) are right, and which count at all."""
    count = len(found.boxes)
    right, counted = torch.zeros(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
    both = torch.cat([truth, difficult])
    if not len(both):
        return right, counted
    best, which = box_iou(found.boxes, both).max(1)
    taken: set[int] = set()
    order = found.scores.argsort(descending=True, stable=True)
    for row in order[best[order] >= RIGHT].tolist():
        place = int(which[row])
        if place >= len(truth):
            counted[row] = False
        elif place not in taken:
            right[row] = True
            taken.add(place)
    return right, counted

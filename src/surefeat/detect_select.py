"""Which boxes to keep, as in the paper's appendix B, and what is written about them."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from surefeat.detect_config import SelectConfig
from surefeat.detect_data import Photo
from surefeat.geometry import xywh_from_boxes

Verdict = Literal["kept", "below the floor", "below the median"]
VERDICTS = ("kept", "below the floor", "below the median")


@dataclass(frozen=True)
class Candidate:
    """The best box of one label of one image."""

    name: str
    """Of the image."""
    category: str
    box: tuple[float, float, float, float]
    """Inclusive, original pixels."""
    score: float
    """Mean over scales and flips, in [0, 1]."""
    verdict: Verdict = "kept"


@dataclass(frozen=True)
class Selection:
    """All candidates with their verdicts."""

    candidates: tuple[Candidate, ...]
    counts: dict[str, dict[str, int]]
    """For the floor on the mean and on the sum: how many of each verdict."""

    def kept(self) -> tuple[Candidate, ...]:
        return tuple(each for each in self.candidates if each.verdict == "kept")


def best_boxes(photo: Photo, scores: Tensor, categories: Sequence[str]) -> list[Candidate]:
    """The best of a photo's proposals, by scores (R, K), for each of its labels."""
    found = []
    for column, category in enumerate(categories):
        if category in photo.image.labels:
            best = int(scores[:, column].argmax())
            x1, y1, x2, y2 = photo.proposals.boxes[best].tolist()
            score = float(scores[best, column])
            found.append(Candidate(photo.image.name, category, (x1, y1, x2, y2), score))
    return found


def select(candidates: Sequence[Candidate], config: SelectConfig, *, passes: int) -> Selection:
    """Drop what scores under the floor, then, per class, what scores under the median of the rest.

    passes: scales times flips that the score is the mean of; a floor on the sum is so much lower.
    """
    judged = {
        on: _judge(candidates, floor, median=config.median)
        for on, floor in (("mean", config.floor), ("sum", config.floor / passes))
    }
    counts = {
        on: {verdict: sum(each.verdict == verdict for each in found) for verdict in VERDICTS}
        for on, found in judged.items()
    }
    return Selection(tuple(judged[config.floor_on]), counts)


def _judge(candidates: Sequence[Candidate], floor: float, *, median: bool) -> list[Candidate]:
    scores: dict[str, list[float]] = {}
    for each in candidates:
        if each.score >= floor:
            scores.setdefault(each.category, []).append(each.score)
    middle = {category: statistics.median(found) for category, found in scores.items()}

    def verdict(each: Candidate) -> Verdict:
        if each.score < floor:
            return "below the floor"
        return "below the median" if median and each.score < middle[each.category] else "kept"

    return [replace(each, verdict=verdict(each)) for each in candidates]


def to_coco(
    selection: Selection, sizes: dict[str, tuple[int, int]], categories: Sequence[str]
) -> dict[str, Any]:
    """The kept boxes as a COCO file: every image is listed, also those without a box.

    sizes: name -> (height, width). Convention: COCO's boxes are x, y, width, height.
    """
    number = {name: place for place, name in enumerate(sizes, start=1)}
    classes = {name: place for place, name in enumerate(categories, start=1)}
    images = [
        {"id": number[name], "file_name": name, "width": width, "height": height}
        for name, (height, width) in sizes.items()
    ]
    annotations = []
    for place, each in enumerate(selection.kept(), start=1):
        box = [round(v, 2) for v in xywh_from_boxes(torch.tensor(each.box)).tolist()]
        annotations.append({
            "id": place, "image_id": number[each.name], "category_id": classes[each.category],
            "bbox": box, "area": round(box[2] * box[3], 1), "iscrowd": 0,
            "score": round(each.score, 6),
        })  # fmt: skip
    listed = [{"id": place, "name": name} for name, place in classes.items()]
    return {"images": images, "annotations": annotations, "categories": listed}


def to_csv(selection: Selection) -> str:
    """Every candidate with its score and verdict, a line each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["image", "category", "x1", "y1", "x2", "y2", "score", "verdict"])
    for each in selection.candidates:
        row = [each.name, each.category, *each.box, f"{each.score:.6f}", each.verdict]
        writer.writerow(row)
    return out.getvalue()


def suppress(
    boxes: Tensor, scores: Tensor, *, overlap: float = 0.4, most: int = 200
) -> list[tuple[Tensor, Tensor]]:
    """Boxes (R, 4) and scores (R, K) -> per class the boxes (N, 4) and scores (N,) that stay.

    Greedy suppression of boxes with more IoU than `overlap` with a better one [P], after the `most`
    best of each class.
    """
    top, rows = scores.topk(min(most, len(boxes)), dim=0)
    count, classes = top.shape
    kind = torch.arange(classes, device=boxes.device).expand(count, classes)
    # torchvision's boxes exclude their far edge, ours include it.
    edges = boxes + torch.tensor([0.0, 0.0, 1.0, 1.0], device=boxes.device)
    kept = batched_nms(edges[rows.flatten()], top.flatten(), kind.flatten(), overlap)
    label, row, score = kind.flatten()[kept], rows.flatten()[kept], top.flatten()[kept]
    return [(boxes[row[label == k]], score[label == k]) for k in range(classes)]

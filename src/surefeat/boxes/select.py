"""Boxes of photos with image labels: `predict_boxes` scores, selects and writes them.

All proposals of a photo are scored, as the mean over scales and flips; the best one of each image
label is a candidate, and floor and class median decide, as in the paper's appendix B.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from surefeat.boxes.config import BoxesConfig, SelectConfig, check_boxes_config
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import (
    PaddedBoxes,
    Photo,
    faster,
    network_input,
    read_photos,
    ready_proposals,
    same_sizes,
    stack_proposals,
    trunk_maps,
)
from surefeat.core import progress
from surefeat.core.files import write_text
from surefeat.core.geometry import box_iou
from surefeat.data.coco import Annotation, Coco, CocoImage, make_category, write_annotations
from surefeat.data.decode import Skipped
from surefeat.data.sources import LabelledImages, PhotoLabels
from surefeat.learn.runs import list_skipped
from surefeat.model.features import box_cells

Verdict = Literal["kept", "below the floor", "below the median"]

# Photos that are scored together, and proposals that go through the hidden layers at once.
_PHOTOS, _REGIONS = 256, 8192


@dataclass(frozen=True)
class Predicted:
    """What predicting left behind."""

    selection: Selection
    folder: Path
    skipped: tuple[Skipped, ...]
    """Images, or single labels of theirs, for which there is no box, and why."""


def predict_boxes(
    labels: LabelledImages,
    detector: Detector,
    *,
    out: str | Path,
    config: BoxesConfig | None = None,
    proposals: str | Path | None = None,
    quiet: bool = False,
) -> Predicted:
    """The best box of every image label, selected; writes boxes.json (COCO) and selection.csv.

    config: that which the detector was fitted with, where it is not given.
    A label the detector does not know, an image without label and one that cannot be read are
    listed in skipped.txt; nothing else is lost: what was dropped is in selection.csv.
    """
    folder, config = Path(out), config or detector.fitted
    check_boxes_config(config)
    images, skipped = _known_labels(labels, detector)
    file = Path(proposals or folder / "proposals.sqlite")
    known = ready_proposals(images, config, file=file, quiet=quiet)
    candidates: list[Candidate] = []
    sizes: dict[str, tuple[int, int]] = {}
    for start in progress.bar(range(0, len(images), _PHOTOS), desc="boxes", quiet=quiet):
        photos, bad = read_photos(images[start : start + _PHOTOS], known, config)
        skipped += bad
        for scored in score_photos(detector, photos, scales=config.select.scales):
            sizes[scored.photo.image.name] = scored.photo.size
            candidates += best_boxes(scored, detector.categories, agreement=config.select.agreement)
    selection = select(candidates, config.select)
    write_annotations(folder / "boxes.json", to_coco(selection, sizes, detector.categories))
    write_text(folder / "selection.csv", to_csv(selection))
    list_skipped(folder, skipped)
    return Predicted(selection, folder, tuple(skipped))


def _known_labels(
    labels: LabelledImages, detector: Detector
) -> tuple[list[PhotoLabels], list[Skipped]]:
    """Images with labels the detector knows, and what is left out."""
    known = frozenset(detector.categories)
    images, skipped = [], []
    for image in labels.images:
        strange = sorted(image.labels - known)
        skipped += [Skipped(image.name, f"the detector knows no {name!r}") for name in strange]
        if not image.labels:
            skipped.append(Skipped(image.name, "has no label"))
        if image.labels & known:
            images.append(replace(image, labels=image.labels & known))
    if not images:
        raise ValueError(
            f"the detector knows {list(detector.categories)}, the images are labelled "
            f"{list(labels.categories)}; fit a detector on these labels"
        )
    return images, skipped


@dataclass(frozen=True, eq=False)
class Scored:
    """A photo and what the detector says about its proposals."""

    photo: Photo
    scores: Tensor
    """(R, K) in [0, 1]: mean over scales and flips, for the photo's R proposals."""


def score_photos(
    detector: Detector, photos: Sequence[Photo], *, scales: Sequence[int], flips: bool = True
) -> Iterator[Scored]:
    """Every photo's scores, on the detector's device, in order, a few hundred photos at a time."""
    for start in range(0, len(photos), _PHOTOS):
        part = photos[start : start + _PHOTOS]
        for photo, scores in zip(part, _mean_scores(detector, part, scales, flips), strict=True):
            yield Scored(photo, scores[: len(photo.proposals)])


@torch.inference_mode()
def _mean_scores(
    detector: Detector, photos: Sequence[Photo], scales: Sequence[int], flips: bool
) -> Tensor:
    """(N, R, K); what is padding has 0."""
    device = detector.scale.device
    boxes = stack_proposals(photos, device)
    totals = torch.zeros(*boxes.valid.shape, len(detector.categories), device=device)
    for scale in scales:
        for rows, size in same_sizes(photos, detector, scale):
            pixels = network_input([photos[row] for row in rows], size, device)
            for flip in (False, True)[: 1 + flips]:
                maps = trunk_maps(detector, pixels.flip(-1) if flip else pixels)
                totals[rows] += _scores(detector, maps, boxes.rows(rows).mirrored([flip]))
    return totals / (len(scales) * (1 + flips))


def _scores(detector: Detector, maps: Tensor, boxes: PaddedBoxes) -> Tensor:
    """(B, R, K) of photos of one size, a few at a time."""
    step = max(1, _REGIONS // boxes.valid.shape[1])
    cells = box_cells(boxes.boxes, boxes.sizes, torch.tensor([maps.shape[2:]], device=maps.device))
    parts = [slice(start, start + step) for start in range(0, len(maps), step)]
    with faster(maps.device):
        scores = [detector(maps[part], cells[part], boxes.valid[part])[0] for part in parts]
    return torch.cat(scores)


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

    def kept(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.candidates if c.verdict == "kept")

    def counts(self) -> dict[str, int]:
        """How many of each verdict."""
        counts = Counter(candidate.verdict for candidate in self.candidates)
        return {verdict: counts[verdict] for verdict in get_args(Verdict)}


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
    """Drop what is under the floor, then, per class, what is under the median of the rest."""
    scores: dict[str, list[float]] = {}
    for candidate in candidates:
        if candidate.score >= config.floor:
            scores.setdefault(candidate.category, []).append(candidate.score)
    middle = {category: statistics.median(values) for category, values in scores.items()}

    def judge(candidate: Candidate) -> Verdict:
        if candidate.score < config.floor:
            return "below the floor"
        return "below the median" if candidate.score < middle[candidate.category] else "kept"

    return Selection(tuple(replace(c, verdict=judge(c)) for c in candidates))


def to_coco(
    selection: Selection, sizes: dict[str, tuple[int, int]], categories: Sequence[str]
) -> Coco:
    """The kept boxes as a COCO file: every image is listed, also those without a box.

    sizes: name -> (height, width).
    """
    rows = {name: row for row, name in enumerate(sizes)}
    columns = {name: column for column, name in enumerate(categories)}
    annotations = tuple(
        Annotation(rows[c.name], columns[c.category], c.box, more={"score": round(c.score, 6)})
        for c in selection.kept()
    )
    images = tuple(CocoImage(name, size) for name, size in sizes.items())
    return Coco(images, tuple(make_category(name, ()) for name in categories), annotations)


def to_csv(selection: Selection) -> str:
    """Every candidate with its score and verdict, a line each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["image", "category", "x1", "y1", "x2", "y2", "score", "verdict"])
    for c in selection.candidates:
        writer.writerow([c.name, c.category, *c.box, f"{c.score:.6f}", c.verdict])
    return out.getvalue()

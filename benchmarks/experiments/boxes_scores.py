"""How boxes found from labels are judged on VOC: CorLoc, average precision, right ones kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from detection import Found, average_precision, controls, corloc, suppress

from surefeat.boxes.photos import Photo
from surefeat.boxes.select import Candidate, Scored, agreed, best_boxes


def detectors(agreement: float) -> dict[str, float]:
    """Measured side by side: each box by its own score, power 1 of IoU, and the chosen power."""
    return {named(power): power for power in (0.0, 1.0, agreement)}


def named(agreement: float) -> str:
    """Of a detector in the results."""
    return "detector" + (f", agreement {agreement:g}" if agreement else "")


def choose(
    scored: Iterable[Scored], categories: Sequence[str], agreement: float
) -> list[Candidate]:
    """The best box of every label of all photos."""
    found = (best_boxes(each, categories, agreement=agreement) for each in scored)
    return [best for boxes in found for best in boxes]


def mean(values: Sequence[float]) -> float:
    """Over the classes that have images."""
    known = [value for value in values if value == value]
    return round(sum(known) / len(known), 4) if known else float("nan")


def corlocs(
    photos: Sequence[Photo], best: dict[str, list[Candidate]], categories: Sequence[str]
) -> dict[str, dict[str, float]]:
    """CorLoc of the detectors and of the controls, each class and their mean."""
    shown = [photo.image for photo in photos]
    rows = {
        name: {(each.name, each.category): torch.tensor(each.box) for each in found}
        for name, found in best.items()
    }
    for photo in photos:
        for name, box in controls(photo.proposals, photo.size).items():
            given = {(photo.image.name, label): box for label in photo.image.labels}
            rows.setdefault(name, {}).update(given)
    table = {}
    for name, boxes in rows.items():
        row = corloc(shown, boxes, categories)
        table[name] = {"mean": mean(list(row.values())), **{k: round(v, 4) for k, v in row.items()}}
    return table


def precisions(
    scored: Sequence[Scored], categories: Sequence[str], agreement: float
) -> dict[str, dict[str, float]]:
    """AP at IoU 0.5 of the detectors; controls have their image scores, and their own box."""
    shown = [each.photo.image for each in scored]
    rows: dict[tuple[str, str], dict[str, Found]] = {}
    for each in scored:
        boxes, totals = each.photo.proposals, each.scores.sum(0).cpu()
        fixed = controls(boxes, each.photo.size)
        detected = {
            name: suppress(boxes, agreed(boxes, each.scores, power))
            for name, power in detectors(agreement).items()
        }
        for k in range(len(categories)):
            here = {name: found[k] for name, found in detected.items()}
            here |= {name: Found(box[None], totals[k, None]) for name, box in fixed.items()}
            for name, one in here.items():
                if len(one.boxes):
                    rows.setdefault((name, categories[k]), {})[each.photo.image.name] = one
    table = {}
    for name in dict.fromkeys(name for name, _ in rows):
        aps = {c: average_precision(shown, rows.get((name, c), {}), c) for c in categories}
        table[name] = {
            "map (area)": mean([ap.area for ap in aps.values()]),
            "map (11 points)": mean([ap.eleven for ap in aps.values()]),
            **{c: round(ap.area, 4) for c, ap in aps.items()},
        }
    return table


def right_share(photos: Sequence[Photo], kept: Sequence[Candidate]) -> float:
    """Share of right boxes among those kept: over boxes, not classes."""
    by_name = {photo.image.name: photo.image for photo in photos}
    right = [
        corloc([by_name[each.name]], {(each.name, each.category): torch.tensor(each.box)},
               (each.category,))[each.category]
        for each in kept
    ]  # fmt: skip
    return mean(right)

"""Boxes to cut from images, from a COCO json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefeat.core.image import read_bytes
from surefeat.data.items import Box, SourceError


@dataclass(frozen=True)
class ImageBoxes:
    """What is cut from one image."""

    file_name: str
    crops: tuple[tuple[str, Box, str | None], ...]
    """Annotation id, box, category."""


def read_boxes(
    path: Path, *, categories: tuple[str, ...] | None, min_side: int, context: float
) -> list[ImageBoxes]:
    """The images of a COCO json with those of their boxes that are wanted."""
    content = read_bytes(path)
    try:
        data = json.loads(content)
        labels = {entry["id"]: str(entry["name"]) for entry in data.get("categories", [])}
        crops: dict[Any, list[tuple[str, Box, str | None]]] = {}
        for entry in data["annotations"]:
            label, box = labels.get(entry.get("category_id")), _box(entry, min_side, context)
            if box is not None and (categories is None or label in categories):
                crops.setdefault(entry["image_id"], []).append((str(entry.get("id")), box, label))
        found = [
            ImageBoxes(str(i["file_name"]), tuple(crops.get(i["id"], ()))) for i in data["images"]
        ]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        fix = "it needs images, annotations and categories"
        raise SourceError(f"{path} is not a COCO file ({error!r}); {fix}") from error
    unknown = sorted(set(categories or ()) - set(labels.values()))
    if unknown:
        raise SourceError(f"{path} has no category {unknown}; it has {sorted(labels.values())}")
    return found


def _box(annotation: dict[str, Any], min_side: int, context: float) -> Box | None:
    """The inclusive box, grown by the context; None if it is a crowd, too small or no box."""
    numbers = [float(value) for value in annotation.get("bbox") or ()]
    if annotation.get("iscrowd") or len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        return None
    x, y, w, h = numbers
    if min(w, h) < max(min_side, 1):
        return None
    dx, dy = context * w, context * h
    return x - dx, y - dy, x + w - 1 + dx, y + h - 1 + dy

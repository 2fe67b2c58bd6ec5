"""COCO's json, read and written in one place: images, boxes, image labels, keypoints.

Convention: boxes here are inclusive (x1, y1, x2, y2) as everywhere (see core.geometry); COCO's own
are x, y, width, height. Keypoints are x, y, v with v = 2 visible, 1 hidden or labelled so, 0 not
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from surefeat.core.files import as_json, write_text
from surefeat.core.geometry import boxes_from_xywh, xywh_from_boxes
from surefeat.core.image import read_bytes
from surefeat.data.decode import Box, Item, Place, SourceError

# Whatever a file of another shape leads to.
WRONG = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)

# Pixels; no image is so large.
_FARTHEST = 1e9

_FIX = "it needs images, annotations and categories, each a list"


@dataclass(frozen=True)
class CocoImage:
    """An image that a json names."""

    name: str
    """Its file_name."""
    size: tuple[int, int] | None = None
    """(height, width), where the json has it."""


@dataclass(frozen=True)
class Category:
    """A kind of object and the names of its keypoints."""

    name: str
    keypoints: tuple[str, ...]
    flip: tuple[int, ...]
    """flip[i]: the keypoint that i becomes in a mirrored image; itself when it has no twin."""
    edges: tuple[tuple[int, int], ...] = ()
    """Keypoints that a line joins when they are drawn, counted from 0."""


def make_category(
    name: str,
    keypoints: Sequence[str],
    flip: Sequence[int] | None = None,
    edges: Sequence[Sequence[int]] = (),
) -> Category:
    """A checked category; without `flip`, names that differ by left and right (l, r) are twins."""
    names = tuple(str(keypoint) for keypoint in keypoints)
    twice = sorted({keypoint for keypoint in names if names.count(keypoint) > 1})
    if twice:
        fix = "give every keypoint its own name"
        raise ValueError(f"category {name!r} has two keypoints called {twice[0]!r}; {fix}")
    pairs = _twins(names) if flip is None else tuple(int(index) for index in flip)
    back = [pairs[i] if 0 <= i < len(pairs) else None for i in pairs]
    if len(pairs) != len(names) or back != list(range(len(names))):
        rule = f"it must name each of the {len(names)} keypoints' mirrored twin, counted from 0"
        raise ValueError(f"category {name!r} has flip {list(pairs)}; {rule}")
    lines = tuple((int(first), int(second)) for first, second in edges)
    if any(not 0 <= end < len(names) for line in lines for end in line):
        rule = f"join two of its {len(names)} keypoints each"
        raise ValueError(f"category {name!r} has a skeleton that names no keypoint; {rule}")
    return Category(str(name), names, pairs, lines)


_SWAP = {"left": "right", "right": "left", "l": "r", "r": "l"}

# Whole words anywhere, also in leftEye; "l" and "r" only where they stand alone, as in eye.R.
_SIDES = (r"left|right", r"(?<![a-z])[lr](?![a-z])")


def _twins(names: tuple[str, ...]) -> tuple[int, ...]:
    places = {name.lower(): index for index, name in enumerate(names)}

    def twin(name: str, index: int) -> int:
        swapped = (re.sub(sides, lambda side: _SWAP[side[0]], name) for sides in _SIDES)
        return next(
            (places[other] for other in swapped if other != name and other in places), index
        )

    return tuple(twin(name.lower(), index) for index, name in enumerate(names))


@dataclass(frozen=True)
class Annotation:
    """One object, or a mere label, of an image."""

    image: int
    """Index into the images."""
    category: int | None
    """Index into the categories; None: the json has no such category."""
    box: Box | None = None
    keypoints: tuple[float, ...] = ()
    """x, y, v of every keypoint, one after the other."""
    polygons: tuple[tuple[float, ...], ...] = ()
    """Its mask: rings of x, y, x, y ...; none where the json has none, or one as run lengths."""
    crowd: bool = False
    difficult: bool = False
    """VOC's flag."""
    id: str = ""
    """As the json has it; written ones are numbered."""
    individual: str = ""
    """Who it is, where a file tells animals apart."""
    more: dict[str, Any] = field(default_factory=dict)
    """Written as it is: area, score, ..."""


@dataclass(frozen=True)
class Coco:
    """The content of a json."""

    images: tuple[CocoImage, ...]
    categories: tuple[Category, ...]
    annotations: tuple[Annotation, ...]

    def by_image(self) -> list[list[Annotation]]:
        """The annotations of every image, in their order."""
        groups: list[list[Annotation]] = [[] for _ in self.images]
        for annotation in self.annotations:
            groups[annotation.image].append(annotation)
        return groups


def read_annotations(path: Path, *, strict: bool = True) -> Coco:
    """Everything in a COCO json; whatever cannot be meant is a SourceError with the fix.

    Without `strict`, annotations of images that are not listed are left out, categories may be
    missing, and a box that is none counts as no box: for files cut down by other tools.
    """
    content = read_bytes(path)
    try:
        data = json.loads(content)
        images = _by_id([(entry["id"], _image(entry)) for entry in data["images"]], "images")
        known = data["categories"] if strict else data.get("categories", [])
        named = [(entry["id"], (str(entry["name"]), entry)) for entry in known]
        kinds = _by_id(named, "categories")
        entries = [dict(entry) for entry in data["annotations"]]
    except SourceError as error:
        raise SourceError(f"{path}: {error}") from error
    except WRONG as error:
        raise SourceError(f"{path} is not a COCO file ({_why(error)}); {_FIX}") from error
    try:
        categories = {
            key: make_category(
                name, entry.get("keypoints") or (), entry.get("flip"), _skeleton(entry)
            )
            for key, (name, entry) in kinds.items()
        }
    except (ValueError, TypeError, OverflowError) as error:
        raise SourceError(f"{path}: {error}; correct its categories") from error
    rows = {key: row for row, key in enumerate(images)}
    columns = {key: column for column, key in enumerate(categories)}
    annotations = []
    for entry in entries:
        try:
            if strict or _key(entry.get("image_id")) in rows:
                annotations.append(_annotation(entry, rows, columns, strict=strict))
        except ValueError as error:
            raise SourceError(f"{path}, annotation {entry.get('id')}: {error}") from error
    return Coco(tuple(images.values()), tuple(categories.values()), _inclusive(annotations))


def _why(error: Exception) -> str:
    """Why a file cannot be meant, without Python's words or the file's own bytes."""
    if isinstance(error, UnicodeDecodeError):
        return "no UTF-8 text"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON at line {error.lineno}"
    if isinstance(error, KeyError):
        return f"without {error.args[0]!r}"
    return "nested too deeply" if isinstance(error, RecursionError) else "laid out otherwise"


def _by_id(entries: Sequence[tuple[Any, Any]], what: str) -> dict[Any, Any]:
    """Entries by their ids; two different ones with one id would share their annotations."""
    known: dict[Any, Any] = {}
    for key, entry in entries:
        if known.setdefault(key, entry) != entry:
            raise SourceError(f"two {what} have the id {key!r}; give each an id of its own")
    return known


def _skeleton(entry: dict[str, Any]) -> list[tuple[int, int]]:
    """COCO counts its keypoints from 1 here; without keypoints there is nothing to join."""
    lines = entry.get("skeleton") if entry.get("keypoints") else None
    try:
        return [(int(first) - 1, int(second) - 1) for first, second in lines or ()]
    except (TypeError, ValueError) as error:
        what = f"category {entry.get('name')!r} has a skeleton that is no list of pairs"
        raise ValueError(f"{what}; join two keypoints each, such as [[1, 2]]") from error


def _image(entry: dict[str, Any]) -> CocoImage:
    height, width = entry.get("height"), entry.get("width")
    size = (int(height), int(width)) if height and width else None
    return CocoImage(str(entry["file_name"]), size)


def _annotation(
    entry: dict[str, Any], rows: dict[Any, int], columns: dict[Any, int], *, strict: bool
) -> Annotation:
    """An annotation whose box is still COCO's own x, y, width, height."""
    image, category = _key(entry.get("image_id")), _key(entry.get("category_id"))
    for key, known in ((image, rows), (category, columns)):
        if strict and key not in known:
            raise ValueError(f"no image or category has the id {key!r}; correct it or remove it")
    box = _numbers(entry.get("bbox"), "bbox")
    if box and (len(box) != 4 or not all(abs(value) < _FARTHEST for value in box)):
        if strict:
            fix = "give x, y, width, height in pixels, or no bbox"
            raise ValueError(f"bbox {list(box)} is no box; {fix}")
        box = ()
    return Annotation(
        image=rows[image],
        category=columns.get(category),
        box=(box[0], box[1], box[2], box[3]) if box else None,
        keypoints=_numbers(entry.get("keypoints"), "keypoints"),
        polygons=_rings(entry.get("segmentation")),
        crowd=bool(entry.get("iscrowd")),
        difficult=bool(entry.get("difficult")),
        id=str(entry.get("id")),
        individual=str(entry.get("individual") or ""),
    )


def _key(value: object) -> object:
    """An id, which is looked up."""
    if isinstance(value, list | dict):
        raise ValueError(f"an id is {value}; ids are single numbers or texts")
    return value


def _numbers(values: object, field_name: str) -> tuple[float, ...]:
    if not isinstance(values or [], list):
        raise ValueError(f"{field_name} is {values!r}; give a list of numbers")
    try:
        return tuple(float(value) for value in values or ())  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{field_name} holds what is no number ({error}); correct it") from error


def _rings(values: object) -> tuple[tuple[float, ...], ...]:
    """The polygons of a segmentation; what is none (run lengths, a line) is left out."""
    rings = []
    for ring in values if isinstance(values, list) else ():
        numbers = ring if isinstance(ring, list) else ()
        real = all(isinstance(value, int | float) and abs(value) < _FARTHEST for value in numbers)
        if real and len(numbers) >= 6 and len(numbers) % 2 == 0:
            rings.append(tuple(float(value) for value in numbers))
    return tuple(rings)


def box_of_xywh(x: float, y: float, width: float, height: float) -> Box:
    """COCO's box, whose edges are measured from the image's corner, as an inclusive one."""
    box = boxes_from_xywh(torch.tensor([x, y, width, height], dtype=torch.float64)).tolist()
    return box[0], box[1], box[2], box[3]


def xywh_of_box(box: Box) -> Box:
    """Inverse of box_of_xywh."""
    numbers = xywh_from_boxes(torch.tensor(box, dtype=torch.float64)).tolist()
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _inclusive(annotations: Sequence[Annotation]) -> tuple[Annotation, ...]:
    """The same with inclusive boxes; all at once, which for many is far quicker."""
    boxed = [annotation.box for annotation in annotations if annotation.box is not None]
    table = torch.tensor(boxed, dtype=torch.float64).reshape(-1, 4)
    boxes = iter(boxes_from_xywh(table).tolist())
    return tuple(
        annotation if annotation.box is None else replace(annotation, box=tuple(next(boxes)))
        for annotation in annotations
    )


def read_crops(
    path: Path, categories: tuple[str, ...] | None, context: float, min_side: int
) -> Iterator[tuple[str, list[Item]]]:
    """Of every image with wanted boxes: its name, and a crop of each, whose place is not known."""
    content = read_annotations(path, strict=False)
    known = {category.name for category in content.categories}
    unknown = sorted(set(categories or ()) - known)
    if unknown:
        raise SourceError(f"{path} has no category {unknown}; it has {sorted(known)}")
    for image, notes in zip(content.images, content.by_image(), strict=True):
        crops = []
        for note in notes:
            label = None if note.category is None else content.categories[note.category].name
            wanted = categories is None or label in categories
            if note.crowd or note.box is None or not wanted:
                continue
            x1, y1, x2, y2 = note.box
            width, height = x2 - x1 + 1, y2 - y1 + 1
            if min(width, height) < max(min_side, 1) - 1e-6:
                continue
            dx, dy = context * width, context * height
            box = (x1 - dx, y1 - dy, x2 + dx, y2 + dy)
            crops.append(Item(f"#{note.id}", Place(""), box, label))
        if crops:
            yield image.name, crops


def coco_record(coco: Coco) -> dict[str, Any]:
    """The json's content: ids count from 1, numbers have two decimals, area is the box's own."""
    boxed = [note.box or (0.0, 0.0, -1.0, -1.0) for note in coco.annotations]
    table = torch.tensor(boxed, dtype=torch.float64).reshape(-1, 4)
    sides = [[_short(value) for value in row] for row in xywh_from_boxes(table).tolist()]
    return {
        "images": [
            {"id": i, "file_name": image.name}
            | ({"width": image.size[1], "height": image.size[0]} if image.size else {})
            for i, image in enumerate(coco.images, start=1)
        ],
        "annotations": [
            {"id": i, "image_id": note.image + 1} | _written(note, box)
            for i, (note, box) in enumerate(zip(coco.annotations, sides, strict=True), start=1)
        ],
        "categories": [
            {"id": i, "name": kind.name}
            | ({"keypoints": kind.keypoints, "flip": kind.flip} if kind.keypoints else {})
            | ({"skeleton": [[a + 1, b + 1] for a, b in kind.edges]} if kind.edges else {})
            for i, kind in enumerate(coco.categories, start=1)
        ],
    }


def write_annotations(path: str | Path, coco: Coco) -> None:
    """Write a COCO json, whole or not at all."""
    write_text(Path(path), as_json(coco_record(coco)) + "\n")


def _written(note: Annotation, box: list[float]) -> dict[str, Any]:
    about: dict[str, Any] = {} if note.category is None else {"category_id": note.category + 1}
    if note.box is not None:
        about |= {"bbox": box, "area": _short(box[2] * box[3])}
    about["iscrowd"] = int(note.crowd)
    if note.keypoints:
        about["num_keypoints"] = sum(v > 0 for v in note.keypoints[2::3])
        about["keypoints"] = [_short(value) for value in note.keypoints]
    if note.polygons:
        about["segmentation"] = [[_short(value) for value in ring] for ring in note.polygons]
    if note.individual:
        about["individual"] = note.individual
    return about | note.more


def _short(value: float) -> float:
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded

"""Categories of objects: the names of their keypoints, their channels, their mirrored twins.

Objects with named keypoints: COCO's keypoints json in and out.

Convention: points are (x, y) in original pixels, boxes inclusive (see geometry); COCO's own are x,
y, width, height. A keypoint is visible when its flag v is 1 or 2; with v = 0 it has no place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.geometry import boxes_from_xywh, xywh_from_boxes
from surefeat.core.image import decode, problem, read_bytes
from surefeat.data.items import Place, SourceError
from surefeat.data.pairs import image_size
from surefeat.data.sources import find_images

__all__ = ["Category", "KeypointSet", "Labelled", "make_category", "read_coco", "write_coco"]


@dataclass(frozen=True)
class Category:
    """A kind of object and the names of its keypoints."""

    name: str
    keypoints: tuple[str, ...]
    flip: tuple[int, ...]
    """flip[i]: the keypoint that i becomes in a mirrored image; itself when it has no twin."""


def channels(categories: Iterable[Category]) -> tuple[range, ...]:
    """Consecutive channels, one per keypoint, for each category."""
    found, first = [], 0
    for category in categories:
        found.append(range(first, first + len(category.keypoints)))
        first += len(category.keypoints)
    return tuple(found)


def make_category(
    name: str, keypoints: Sequence[str], flip: Sequence[int] | None = None
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
    return Category(str(name), names, pairs)


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


# Some tools count pixels from 1, or click on an image's very edge.
_TOLERANCE = 1.0


@dataclass(frozen=True, eq=False)
class Labelled:
    """One object in an image with its keypoints, labelled by hand or by a detector."""

    image: Place
    name: str
    """Of the image: its file_name in the json."""
    category: int
    """Index into the categories of its set."""
    box: Tensor
    """(4,) float32, inclusive, original pixels; the whole image where none was given."""
    points: Tensor
    """(K, 2) float32 original pixels of its category's keypoints; NaN where not visible."""
    visible: Tensor
    """(K,) bool."""
    size: tuple[int, int]
    """(height, width) of the image."""
    scores: Tensor | None = None
    """(K,) in [0, 1]: a detector's confidence."""

    def read(self) -> Tensor:
        """The image: RGB (3, H, W) uint8."""
        place = self.image
        data = read_bytes(place.path, name=self.name, offset=place.offset, size=place.size)
        pixels = decode(data, name=self.name)
        found = (pixels.shape[1], pixels.shape[2])
        if found != self.size:
            what = f"is {found[1]} x {found[0]} pixels, its label says"
            fix = "use the images the labels were made for"
            raise problem(self.name, f"{what} {self.size[1]} x {self.size[0]}; {fix}")
        return pixels


@dataclass(frozen=True, eq=False)
class KeypointSet:
    """Labelled objects of some categories."""

    categories: tuple[Category, ...]
    objects: tuple[Labelled, ...]

    @property
    def channels(self) -> tuple[range, ...]:
        """Of every category, the channels of its keypoints among those of all categories."""
        return channels(self.categories)

    def only(self, names: Sequence[str]) -> KeypointSet:
        """The objects of these categories; a name that is not there is an error."""
        known = [category.name for category in self.categories]
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise SourceError(f"no category {unknown[0]!r}; there are {', '.join(known)}")
        kept = tuple(item for item in self.objects if known[item.category] in names)
        return KeypointSet(self.categories, kept)


def read_coco(path: str | Path, *, images: str | Path | None = None) -> KeypointSet:
    """The objects of a COCO json, in its order; crowds are left out.

    Images are looked up under `images` (a folder or tar shards; default: beside the json). An
    object without a box gets the whole image, one without keypoints has none visible. Anything
    that cannot be meant is an error that names the file, the object and the fix.
    """
    path = Path(path)
    content = read_bytes(path)
    try:
        data = json.loads(content)
        kinds = {entry["id"]: entry for entry in data["categories"]}
        pictures = {entry["id"]: entry for entry in data["images"]}
        labels = [entry for entry in data["annotations"] if not entry.get("iscrowd")]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        fix = "it needs images, annotations and categories, each a list"
        raise SourceError(f"{path} is not a COCO keypoints file ({error!r}); {fix}") from error
    if not labels:
        raise SourceError(f"{path} holds no annotations; label some objects first")
    categories = _categories(path, kinds)
    names = {category.name: index for index, category in enumerate(categories)}
    used = {label.get("image_id") for label in labels}
    places = _places(path, [p for key, p in pictures.items() if key in used], images)
    objects = []
    for label in labels:
        where = f"{path}, annotation {label.get('id')}"
        try:
            picture = pictures[label["image_id"]]
            number = names[str(kinds[label["category_id"]]["name"])]
        except KeyError as error:
            raise SourceError(f"{where}: no image or category has the id {error}") from None
        found = places[str(picture["file_name"])]
        objects.append(_object(label, picture, found, number, categories[number], where))
    return KeypointSet(categories, tuple(objects))


def _categories(path: Path, kinds: dict[Any, Any]) -> tuple[Category, ...]:
    found: list[Category] = []
    for entry in kinds.values():
        try:
            made = make_category(entry["name"], entry.get("keypoints", ()), entry.get("flip"))
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{path}: {error}") from error
        if made.name in (category.name for category in found):
            raise SourceError(f"{path}: two categories are called {made.name!r}; rename one")
        found.append(made)
    return tuple(found)


def _places(
    path: Path, pictures: list[dict[str, Any]], images: str | Path | None
) -> dict[str, Place]:
    """Where each file_name is; those that are nowhere are one error that names them."""
    root = path.parent if images is None else Path(images)
    find = _finder(root)
    names = [str(entry.get("file_name")) for entry in pictures]
    found = {name: find(name) for name in names}
    missing = [name for name, place in found.items() if place is None]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        fix = "pass the folder or tar shards they are in as images"
        raise SourceError(f"{path}: {len(missing)} images are not under {root} ({shown}); {fix}")
    return {name: place for name, place in found.items() if place is not None}


def _finder(root: Path) -> Callable[[str], Place | None]:
    inside: dict[str, Place] = {}
    if not root.is_dir() or any(root.glob("*.tar")):
        # Members of tar shards are named shard.tar/member.
        inside = {item.name.partition("/")[2]: item.read for item in find_images(root)}

    def find(name: str) -> Place | None:
        return Place(str(root / name)) if (root / name).is_file() else inside.get(name)

    return find


def _object(
    label: dict[str, Any],
    picture: dict[str, Any],
    place: Place,
    number: int,
    category: Category,
    where: str,
) -> Labelled:
    name = str(picture["file_name"])
    try:
        height, width = picture.get("height"), picture.get("width")
        # A member of a tar file has no header of its own to read, so there the json must say it.
        size = (int(height), int(width)) if height and width else image_size(Path(place.path))
        box = _box(label.get("bbox"), size)
        points, visible = _points(label.get("keypoints"), category, size)
    except (TypeError, ValueError) as error:
        raise SourceError(f"{where} ({name}): {error}") from error
    return Labelled(place, name, number, box, points, visible, size)


def _box(numbers: Any, size: tuple[int, int]) -> Tensor:
    """The inclusive box of COCO's x, y, width, height; the whole image when there is none."""
    if not numbers:
        return torch.tensor([0.0, 0.0, size[1] - 1, size[0] - 1])
    box = torch.tensor([float(value) for value in numbers])
    if box.shape != (4,) or not bool(box.isfinite().all()) or bool((box[2:] < 1).any()):
        fix = "give x, y, width, height in pixels, or no bbox for the whole image"
        raise ValueError(f"bbox {numbers} is no box of a pixel or more; {fix}")
    return boxes_from_xywh(box)


def _points(numbers: Any, category: Category, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """x, y, v of each keypoint -> points (K, 2), NaN where v = 0, and visible (K,)."""
    count = len(category.keypoints)
    table = torch.tensor([float(value) for value in numbers or [0] * (3 * count)])
    if len(table) != 3 * count:
        rule = f"{category.name!r} has {count}, each with x, y, v"
        raise ValueError(f"keypoints has {len(table)} numbers, not {3 * count}; {rule}")
    points, visible = table.view(-1, 3)[:, :2], table.view(-1, 3)[:, 2] > 0
    edge = torch.tensor([size[1], size[0]]) - 0.5 + _TOLERANCE
    inside = ((points >= -0.5 - _TOLERANCE) & (points <= edge)).all(-1)
    for index in (visible & ~inside).nonzero()[:1, 0].tolist():
        x, y = points[index].tolist()
        what = f"{category.keypoints[index]!r} at ({x:g}, {y:g}) lies outside the image, which is"
        raise ValueError(f"{what} {size[1]} x {size[0]} (width x height); correct it or set v to 0")
    return torch.where(visible[:, None], points, torch.nan), visible


def write_coco(path: str | Path, found: KeypointSet) -> None:
    """Write a set as COCO keypoints json, whole or not at all; scores as keypoint_scores."""
    names = list(dict.fromkeys(item.name for item in found.objects))
    sizes = {item.name: item.size for item in found.objects}
    record = {
        "images": [
            {"id": i + 1, "file_name": name, "width": sizes[name][1], "height": sizes[name][0]}
            for i, name in enumerate(names)
        ],
        "annotations": [
            {"id": i + 1, "image_id": names.index(item.name) + 1} | _annotation(item)
            for i, item in enumerate(found.objects)
        ],
        "categories": [
            {"id": i + 1, "name": kind.name, "keypoints": kind.keypoints, "flip": kind.flip}
            for i, kind in enumerate(found.categories)
        ],
    }
    part = Path(path).with_name(f"{Path(path).name}.part")
    part.write_text(json.dumps(record) + "\n", encoding="utf-8")
    part.replace(path)


def _annotation(item: Labelled) -> dict[str, Any]:
    keypoints: list[float] = []
    for (x, y), seen in zip(item.points.tolist(), item.visible.tolist(), strict=True):
        keypoints += [round(x, 2), round(y, 2), 2] if seen else [0, 0, 0]
    box = [round(value, 2) for value in xywh_from_boxes(item.box).tolist()]
    about = {
        "category_id": item.category + 1, "bbox": box, "area": round(box[2] * box[3], 2),
        "iscrowd": 0, "num_keypoints": int(item.visible.sum()), "keypoints": keypoints,
    }  # fmt: skip
    if item.scores is None:
        return about
    scores = [round(score, 4) for score in item.scores.tolist()]
    return about | {"keypoint_scores": scores, "score": round(sum(scores) / max(1, len(scores)), 4)}

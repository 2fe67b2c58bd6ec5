"""Image labels: which categories a photo shows, from folder names, a CSV or a COCO json.

Boxes in a COCO json are read along, for scoring; nothing learns from them.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefeat.core.image import read_bytes
from surefeat.data.items import Box, Item, Place, SourceError
from surefeat.data.sources import find_images

_COLUMNS = ("image", "label")

_FIX = "pass a folder with one folder per category, or --labels with a CSV or COCO json"


@dataclass(frozen=True)
class Object:
    """A box of the ground truth."""

    category: str
    box: Box
    """Inclusive (x1, y1, x2, y2), original pixels."""
    difficult: bool
    """VOC's flag: neither to be found nor wrong to find."""


@dataclass(frozen=True)
class PhotoLabels:
    """One image and what it shows."""

    name: str
    """What lists and COCO files call it: its path below the source, or inside its tar file."""
    item: Item
    labels: frozenset[str]
    """Categories it shows; empty: it has no label."""
    unsure: frozenset[str] = frozenset()
    """Categories of which it shows difficult objects only: neither shown nor not shown."""
    objects: tuple[Object, ...] = ()
    """The ground truth, where there is one."""


@dataclass(frozen=True)
class LabelledImages:
    """Images with labels, in order."""

    images: tuple[PhotoLabels, ...]
    categories: tuple[str, ...]
    """All that occur, sorted; or those asked for, in their order."""

    def labelled(self) -> tuple[PhotoLabels, ...]:
        """Those that have a label."""
        return tuple(image for image in self.images if image.labels)

    def counts(self) -> dict[str, int]:
        """Category -> images that show it."""
        found = Counter(label for image in self.images for label in image.labels)
        return {name: found[name] for name in self.categories}


def find_labels(
    source: str | Path,
    *,
    labels: str | Path | None = None,
    images: str | Path | None = None,
    keep: str | Path | None = None,
    categories: tuple[str, ...] | None = None,
) -> LabelledImages:
    """Images and their labels; no image is opened.

    source: a folder (or tar shards) whose images lie in one folder per category, at any depth below
    it; or any source of find_images, with `labels`: a CSV with the columns image and label (several
    rows per image, or labels separated by semicolons), or a COCO json, whose boxes are optional. A
    COCO json as `source` names its own images, found under `images` or beside it.
    keep: a list of image names to use. categories: only these; other labels are dropped.
    """
    if str(source).lower().endswith(".json"):
        root = images if images is not None else Path(source).parent
        found = _from_coco(Path(source), find_images(root, keep=keep), complete=keep is None)
    else:
        items = find_images(source, images=images, keep=keep)
        if labels is None:
            found = [PhotoLabels(name_of(item), item, _folder(item)) for item in items]
        elif str(labels).lower().endswith(".json"):
            found = _from_coco(Path(labels), items, complete=False)
        else:
            found = _from_csv(Path(labels), items)
    seen = sorted({label for image in found for label in image.labels | image.unsure})
    if not any(image.labels for image in found):
        raise SourceError(f"none of {len(found)} images under {source} has a label; {_FIX}")
    unknown = sorted(set(categories or ()) - set(seen))
    if unknown:
        raise SourceError(f"no image is labelled {unknown}; there are {seen}")
    if categories is not None:
        found = [_only(image, frozenset(categories)) for image in found]
    return LabelledImages(tuple(found), categories or tuple(seen))


def name_of(item: Item) -> str:
    """What lists and COCO files call an item: without the name of its tar file."""
    return item.name.partition("/")[2] if item.read.size is not None else item.name


def _folder(item: Item) -> frozenset[str]:
    parts = name_of(item).split("/")
    return frozenset(parts[:1]) if len(parts) > 1 else frozenset()


def _only(image: PhotoLabels, wanted: frozenset[str]) -> PhotoLabels:
    objects = tuple(each for each in image.objects if each.category in wanted)
    return replace(
        image, labels=image.labels & wanted, unsure=image.unsure & wanted, objects=objects
    )


def _from_csv(path: Path, items: list[Item]) -> list[PhotoLabels]:
    """Labels by name; an image the file does not name has none, a name without image is listed."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not a text file; save it as UTF-8") from error
    rows = csv.DictReader(io.StringIO(text))
    missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise SourceError(
            f"{path} has no column {missing[0]!r}; its first line must be image,label"
        )
    found: dict[str, set[str]] = {}
    for row in rows:
        name, text = (row["image"] or "").strip(), row["label"] or ""
        if not name:
            raise SourceError(f"{path}, line {rows.line_num}: no image is named; fill it in")
        found.setdefault(name, set()).update(each.strip() for each in text.split(";"))
    labels = {name: frozenset(each - {""}) for name, each in found.items()}
    known = {key for item in items for key in _keys(item)}
    absent = [
        PhotoLabels(name, _missing(name), these)
        for name, these in labels.items()
        if name not in known
    ]
    return [_looked_up(item, labels) for item in items] + absent


def _keys(item: Item) -> tuple[str, str]:
    name = name_of(item)
    return name, str(Path(name).with_suffix(""))


def _looked_up(item: Item, labels: dict[str, frozenset[str]]) -> PhotoLabels:
    name, stem = _keys(item)
    return PhotoLabels(name, item, labels.get(name, labels.get(stem, frozenset())))


def _missing(name: str) -> Item:
    where = "is not where it was looked for; pass the folder or shards as images"
    return Item(name, Place(name, refused=where))


def _from_coco(path: Path, items: list[Item], *, complete: bool) -> list[PhotoLabels]:
    """Labels of a COCO file; with `complete`, also of images that are not there, as refused."""
    try:
        data = json.loads(read_bytes(path))
        names = {entry["id"]: str(entry["name"]) for entry in data["categories"]}
        objects: dict[Any, list[tuple[str, Object | None]]] = {i["id"]: [] for i in data["images"]}
        for entry in data["annotations"]:
            category = names[entry["category_id"]]
            objects[entry["image_id"]].append((category, _object(entry, category)))
        listed = {str(image["file_name"]): objects[image["id"]] for image in data["images"]}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        fix = "it needs images, annotations and categories"
        raise SourceError(f"{path} is not a COCO file ({error!r}); {fix}") from error
    found, left = [], dict(listed)
    for item in items:
        key = next((key for key in _keys(item) if key in listed), None)
        if key is not None:
            left.pop(key, None)
            found.append(_labelled(key, item, listed[key]))
        elif not complete:
            found.append(PhotoLabels(name_of(item), item, frozenset()))
    if complete:
        found += [_labelled(name, _missing(name), each) for name, each in left.items()]
    return found


def _labelled(name: str, item: Item, found: Iterable[tuple[str, Object | None]]) -> PhotoLabels:
    pairs = list(found)
    sure = {category for category, each in pairs if each is None or not each.difficult}
    unsure = {category for category, _ in pairs} - sure
    objects = tuple(each for _, each in pairs if each is not None)
    return PhotoLabels(name, item, frozenset(sure), frozenset(unsure), objects)


def _object(entry: dict[str, Any], category: str) -> Object | None:
    numbers = [float(value) for value in entry.get("bbox") or ()]
    if len(numbers) != 4:
        return None
    x, y, w, h = numbers
    flagged = bool(entry.get("difficult") or entry.get("iscrowd"))
    return Object(category, (x, y, x + w - 1, y + h - 1), flagged)

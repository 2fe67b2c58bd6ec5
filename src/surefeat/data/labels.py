"""Image labels: which categories a photo shows, from folder names, a CSV or a COCO json.

Boxes in a COCO json are read along, for scoring; nothing learns from them.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from surefeat.core.image import read_bytes
from surefeat.data.coco import Annotation, Coco, read_annotations
from surefeat.data.decode import Box, Item, SourceError, name_of
from surefeat.data.sources import find_images, missing_image

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
        count = Counter(label for image in self.images for label in image.labels)
        return {name: count[name] for name in self.categories}


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
        photos = _from_coco(Path(source), find_images(root, keep=keep), complete=keep is None)
    else:
        items = find_images(source, images=images, keep=keep)
        if labels is None:
            photos = [PhotoLabels(name_of(item), item, _folder(item)) for item in items]
        elif str(labels).lower().endswith(".json"):
            photos = _from_coco(Path(labels), items, complete=False)
        else:
            photos = _from_csv(Path(labels), items)
    seen = sorted({label for image in photos for label in image.labels | image.unsure})
    if not any(image.labels for image in photos):
        raise SourceError(f"none of {len(photos)} images under {source} has a label; {_FIX}")
    unknown = sorted(set(categories or ()) - set(seen))
    if unknown:
        raise SourceError(f"no image is labelled {unknown}; there are {seen}")
    if categories is not None:
        photos = [_only(image, frozenset(categories)) for image in photos]
    return LabelledImages(tuple(photos), categories or tuple(seen))


def _folder(item: Item) -> frozenset[str]:
    parts = name_of(item).split("/")
    return frozenset(parts[:1]) if len(parts) > 1 else frozenset()


def _only(image: PhotoLabels, wanted: frozenset[str]) -> PhotoLabels:
    objects = tuple(thing for thing in image.objects if thing.category in wanted)
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
    named: dict[str, set[str]] = {}
    for row in rows:
        name, text = (row["image"] or "").strip(), row["label"] or ""
        if not name:
            raise SourceError(f"{path}, line {rows.line_num}: no image is named; fill it in")
        named.setdefault(name, set()).update(label.strip() for label in text.split(";"))
    labels = {name: frozenset(own - {""}) for name, own in named.items()}
    known = {key for item in items for key in _keys(item)}
    absent = [
        PhotoLabels(name, missing_image(name, path.parent), own)
        for name, own in labels.items()
        if name not in known
    ]
    return [_looked_up(item, labels) for item in items] + absent


def _keys(item: Item) -> tuple[str, str]:
    name = name_of(item)
    return name, str(Path(name).with_suffix(""))


def _looked_up(item: Item, labels: dict[str, frozenset[str]]) -> PhotoLabels:
    name, stem = _keys(item)
    return PhotoLabels(name, item, labels.get(name, labels.get(stem, frozenset())))


def _from_coco(path: Path, items: list[Item], *, complete: bool) -> list[PhotoLabels]:
    """Labels of a COCO file; with `complete`, also of images that are not there, as refused."""
    content = read_annotations(path)
    notes = content.by_image()
    rows = {image.name: row for row, image in enumerate(content.images)}
    left, images = dict(rows), []
    for item in items:
        key = next((key for key in _keys(item) if key in rows), None)
        if key is not None:
            left.pop(key, None)
            images.append(_labelled(key, item, notes[rows[key]], content))
        elif not complete:
            images.append(PhotoLabels(name_of(item), item, frozenset()))
    if complete:
        absent = (missing_image(name, path.parent) for name in left)
        images += [_labelled(item.name, item, notes[left[item.name]], content) for item in absent]
    return images


def _labelled(name: str, item: Item, notes: Iterable[Annotation], content: Coco) -> PhotoLabels:
    """A label without a box is sure; one whose boxes are all difficult is not."""
    every: set[str] = set()
    sure: set[str] = set()
    objects = []
    for note in notes:
        assert note.category is not None
        category = content.categories[note.category].name
        every.add(category)
        difficult = note.difficult or note.crowd
        if note.box is not None:
            objects.append(Object(category, note.box, difficult))
        if note.box is None or not difficult:
            sure.add(category)
    unsure = frozenset(every - sure)
    return PhotoLabels(name, item, frozenset(sure), unsure, tuple(objects))

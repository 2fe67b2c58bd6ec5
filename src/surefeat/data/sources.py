"""Where images come from (folders, lists, tar shards, COCO files), and the labels they have.

Nothing here opens an image, so it is fast; data.decode reads what was found.
"""

from __future__ import annotations

import csv
import glob
import logging
import math
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surefeat.core.image import EXTENSIONS, UNREADABLE, read_bytes
from surefeat.data.coco import read_annotations, read_crops
from surefeat.data.decode import Box, Item, Place, SourceError, name_of

_LOG = logging.getLogger(__name__)

PHOTOS = frozenset((*EXTENSIONS, *UNREADABLE))

CONTEXT = 0.2
"""By this share of its size a box grows on each side before it is cut out."""


def find_images(
    source: str | Path, *, images: str | Path | None = None, crop: str | Path | None = None,
    keep: str | Path | None = None, categories: tuple[str, ...] | None = None,
    context: float | None = None, min_side: int = 32,
) -> list[Item]:  # fmt: skip
    """The images of a folder, a list, tar shards (file, folder or glob) or a COCO json, in order.

    `images` is where the names in a list or COCO json are looked up: a folder or tar shards, by
    default those beside that file. `crop` is a COCO json whose boxes are cut from the images of
    `source`; a COCO json as `source` cuts its own. `keep` is a list of the names (with or without
    extension) to keep. For boxes: `categories` filters by name, `context` grows a box by that share
    of its size per side (CONTEXT), boxes with a side under `min_side` pixels are dropped.
    """
    if context is not None and not 0 <= context < math.inf:
        raise ValueError(f"context is {context}, a share of a box; use 0 or more")
    coco = source if _is_json(source) else crop
    if coco is None and (categories, context) != (None, None):
        raise SourceError(f"{source} has no boxes for categories and context; pass crop (--crop)")
    context = CONTEXT if context is None else context
    if coco is None:
        items, wanted = _files(source, images), " ".join(EXTENSIONS)
    else:
        own = coco is source
        find = image_finder(images, beside=coco) if own else _index(_files(source, images))
        items = []
        for name, crops in read_crops(Path(coco), categories, context, min_side):
            item = find(name)
            if not item.read.refused:
                items += [replace(c, name=item.name + c.name, read=item.read) for c in crops]
            elif own:
                items.append(item)
        wanted = f"boxes of {categories or 'any category'}, {min_side} pixels or more, in {coco}"
    if keep is not None:
        kept = set(_lines(Path(keep)))
        items = [item for item in items if kept & {_bare_name(item), _stem(_bare_name(item))}]
        wanted += f", named in {keep}"
    check_any_readable(items, source, wanted)
    return items


def photos_of(given: Path) -> list[Path]:
    """A photo itself, or the photos of a folder."""
    return [Path(item.read.path) for item in find_images(given)] if given.is_dir() else [given]


def check_any_readable(
    items: Sequence[Item], source: str | Path, wanted: str = " ".join(EXTENSIONS)
) -> None:
    """SourceError if there is no item to read, with the reason of the first."""
    if all(item.read.refused for item in items):
        first = f"; {items[0].name} {items[0].read.refused}" if items else "; pass another folder"
        raise SourceError(f"no images under {source} (looked for {wanted}){first}")


def walk_folder(root: str | Path) -> list[Item]:
    """The images of a folder at any depth, sorted by their path below it.

    Hidden files and folders (macOS's `._x.jpg` too) are passed over, links are followed, a folder
    is entered once. What looks like a photo but cannot be read, and a folder that cannot be
    opened, is listed as refused, with the fix.
    """
    items: list[Item] = []
    seen: set[tuple[int, int]] = set()

    def add(path: str, refused: str | None = None) -> None:
        items.append(Item(os.path.relpath(path, root), Place(path, refused=refused)))

    def unreadable(error: OSError) -> None:
        add(error.filename, f"cannot be opened ({error.strerror}); check its permissions")

    for folder, folders, files in os.walk(root, followlinks=True, onerror=unreadable):
        info = os.stat(folder)
        if (info.st_dev, info.st_ino) in seen:  # a link back up, or a second way to a folder
            folders.clear()
            continue
        seen.add((info.st_dev, info.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if _ending(name) in PHOTOS:
                add(os.path.join(folder, name), _no_reader(name))
        for name in folders:  # one named x.jpg is listed, so that it is reported
            if _ending(name) in PHOTOS:
                add(os.path.join(folder, name), "is a folder, not an image; rename it")
    return sorted(items, key=lambda item: item.name)


def folder_paths(root: str | Path) -> list[Path]:
    """The images of a folder as files; what cannot be read is logged. SourceError: none."""
    items = walk_folder(root)
    check_any_readable(items, root)
    for item in items:
        if item.read.refused:
            _LOG.warning("skipped %s: %s", item.name, item.read.refused)
    return [Path(item.read.path) for item in items if not item.read.refused]


def image_finder(images: str | Path | None, *, beside: str | Path) -> Callable[[str], Item]:
    """Finds images by name, with or without extension, under `images` or beside a file.

    One that is not there comes back as refused.
    """
    root = Path(beside).parent if images is None else Path(images)
    packed = _index(_shards(root) if root.is_dir() else _files(root), root=str(root))

    # A folder is not listed for this: it may hold far more than the names that are asked for.
    def find(name: str) -> Item:
        endings = ("",) if _ending(name) in EXTENSIONS else (*EXTENSIONS, "")
        for spelling in (name + ending for ending in endings):
            path = os.path.join(root, spelling)
            if os.path.lexists(path):
                return Item(spelling, Place(path))
        return packed(name)

    return find


def _files(source: str | Path, images: str | Path | None = None) -> list[Item]:
    path, suffix = Path(source), Path(source).suffix.lower()
    if path.is_dir():
        loose = walk_folder(path)
        # Tar files beside loose images are backups more often than a second half of the data.
        nothing = all(item.read.refused for item in loose)
        return loose + _shards(path) if nothing else loose
    if not path.exists() and glob.has_magic(str(source)):
        matches = sorted(glob.glob(str(source), recursive=True))
        return [item for match in matches for item in _files(match, images)]
    if not path.is_file():
        what = "is a pipe, device or socket" if path.exists() else "does not exist"
        raise SourceError(f"{source} {what}; pass a folder, a list, tar shards or a COCO json")
    if _ending(path.name) in PHOTOS:
        return [Item(path.name, Place(str(path), refused=_no_reader(path.name)))]
    if suffix == ".tar":
        return list(_members(path))
    if suffix in (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip"):
        raise SourceError(f"{source} is compressed; repack it as a plain .tar, read in place")
    find = image_finder(images, beside=path)
    return [find(name) for name in _lines(path)]


def _shards(folder: Path) -> list[Item]:
    tars = (tar for tar in sorted(folder.glob("*.tar")) if not tar.name.startswith("."))
    return [item for tar in tars for item in _members(tar)]


def _members(path: Path) -> Iterator[Item]:
    """The images in a tar file, from one pass over its headers; nothing is extracted."""
    end, refused = -1, None
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.offset <= end:
                    raise OSError("its headers lead backwards")
                end, name = member.offset, member.name.removeprefix("./")
                if _ending(name) in PHOTOS and not member.isdir():
                    refused = _refusal(member) or _no_reader(name)
                    place = Place(str(path), member.offset_data, member.size, refused)
                    yield Item(f"{path.name}/{name}", place)
            # tarfile takes a damaged header, or none at all, for the end: the real one is zeros.
            file.seek(tar.offset)
            if file.read(512) != bytes(512):
                raise OSError("no end mark")
    except Exception as error:  # damaged headers raise nearly anything
        refused = f"is damaged or cut short ({error}); images after that are lost, fetch it again"
        yield Item(path.name, Place(str(path), refused=refused))


def _refusal(member: tarfile.TarInfo) -> str | None:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        return "has a path that leads out of the tar file; repack it with relative paths"
    if not member.isreg() or member.issparse() or member.size < 0:
        return "is a link, a device or sparse; repack the file itself"
    return None


def _index(items: Iterable[Item], *, root: str = "the source") -> Callable[[str], Item]:
    """Finds items by their name with or without extension; of equal names the first counts."""
    known: dict[str, Item] = {}
    for item in items:
        for name in (name_of(item), _stem(name_of(item))):
            known.setdefault(name, item)
    return lambda name: known.get(name) or missing_image(name, root)


def missing_image(name: str, root: str | Path) -> Item:
    """What stands for an image that is not there: refused, with the fix."""
    fix = "pass the folder or shards as images"
    return Item(name, Place(name, refused=f"is not where it was looked for ({root}); {fix}"))


def _bare_name(item: Item) -> str:
    """The name of an item's image: a crop's own has #annotation behind it."""
    return name_of(item) if item.crop is None else name_of(item).rpartition("#")[0]


def _is_json(path: str | Path) -> bool:
    return str(path).lower().endswith(".json")


def _ending(name: str) -> str:
    """A file's extension in small letters; none for a hidden file, such as macOS's `._x.jpg`."""
    parts = name.split("/")
    hidden = any(part.startswith(".") and part not in (".", "..") for part in parts)
    return "" if hidden else os.path.splitext(name)[1].lower()


def _no_reader(name: str) -> str | None:
    ending = _ending(name)
    return f"is {ending}, which is not read; convert it to JPEG" if ending in UNREADABLE else None


def _stem(name: str) -> str:
    return os.path.splitext(name)[0] if _ending(name) in EXTENSIONS else name


def _lines(path: Path) -> list[str]:
    lines = [line.strip() for line in _text(path).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not a text file; save it as UTF-8") from error


# Labels: which categories an image shows, from folder names, a CSV or a COCO json.


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
    """Images and their labels; boxes of a COCO json come along for scoring, nothing learns from it.

    source: a folder (or tar shards) whose images lie in one folder per category, at any depth below
    it; or any source of find_images, with `labels`: a CSV with the columns image and label (several
    rows per image, or labels separated by semicolons), or a COCO json, whose boxes are optional. A
    COCO json as `source` names its own images, found under `images` or beside it.
    keep: a list of image names to use. categories: only these; other labels are dropped.
    """
    own = _is_json(source)
    labels = source if own else labels
    root = (images or Path(source).parent) if own else source
    items = find_images(root, images=None if own else images, keep=keep)
    if labels is None:
        photos = [PhotoLabels(name_of(item), item, _folder(item)) for item in items]
    else:
        known = (_coco_labels if _is_json(labels) else _csv_labels)(Path(labels))
        photos = _matched(items, known, unnamed=not own)
        # Those a CSV or a json names as its own are missing when they are not there.
        if not _is_json(labels) or (own and keep is None):
            there = {name for item in items for name in (name_of(item), _stem(name_of(item)))}
            photos += [known[name] for name in known if name not in there]
    seen = sorted({label for image in photos for label in image.labels | image.unsure})
    if not any(image.labels for image in photos):
        fix = "pass a folder with one folder per category, or --labels with a CSV or COCO json"
        raise SourceError(f"none of {len(photos)} images under {source} has a label; {fix}")
    unknown = sorted(set(categories or ()) - set(seen))
    if unknown:
        raise SourceError(f"no image is labelled {unknown}; there are {seen}")
    if categories is not None:
        photos = [_only(image, frozenset(categories)) for image in photos]
    return LabelledImages(tuple(photos), categories or tuple(seen))


def _matched(
    items: list[Item], known: dict[str, PhotoLabels], *, unnamed: bool
) -> list[PhotoLabels]:
    """Items with what is known of them by name, with or without extension; others have no label."""
    photos = []
    for item in items:
        name = name_of(item)
        shown = known.get(name) or known.get(_stem(name))
        if shown is not None:
            photos.append(replace(shown, name=name, item=item))
        elif unnamed:
            photos.append(PhotoLabels(name, item, frozenset()))
    return photos


def _folder(item: Item) -> frozenset[str]:
    parts = name_of(item).split("/")
    return frozenset(parts[:1]) if len(parts) > 1 else frozenset()


def _only(image: PhotoLabels, wanted: frozenset[str]) -> PhotoLabels:
    objects = tuple(thing for thing in image.objects if thing.category in wanted)
    labels, unsure = image.labels & wanted, image.unsure & wanted
    return replace(image, labels=labels, unsure=unsure, objects=objects)


def _csv_labels(path: Path) -> dict[str, PhotoLabels]:
    rows = csv.DictReader(_text(path).splitlines(keepends=True))
    missing = [name for name in ("image", "label") if name not in (rows.fieldnames or ())]
    if missing:
        fix = "its first line must be image,label"
        raise SourceError(f"{path} has no column {missing[0]!r}; {fix}")
    named: dict[str, set[str]] = {}
    try:
        for row in rows:
            name = (row["image"] or "").strip()
            if not name:
                raise SourceError(f"{path}, line {rows.line_num}: no image is named; fill it in")
            labels = (label.strip() for label in (row["label"] or "").split(";"))
            named.setdefault(name, set()).update(label for label in labels if label)
    except csv.Error as error:
        raise SourceError(f"{path}, line {rows.line_num}: {error}; correct the line") from error
    return {
        name: PhotoLabels(name, missing_image(name, path.parent), frozenset(labels))
        for name, labels in named.items()
    }


def _coco_labels(path: Path) -> dict[str, PhotoLabels]:
    """A label without a box is sure; one whose boxes are all difficult is not."""
    content = read_annotations(path)
    known = {}
    for image, notes in zip(content.images, content.by_image(), strict=True):
        sure, objects = set(), []
        for note in notes:
            assert note.category is not None
            category, difficult = (
                content.categories[note.category].name,
                note.difficult or note.crowd,
            )
            if note.box is not None:
                objects.append(Object(category, note.box, difficult))
            if note.box is None or not difficult:
                sure.add(category)
        unsure = frozenset(thing.category for thing in objects) - sure
        missing = missing_image(image.name, path.parent)
        known[image.name] = PhotoLabels(
            image.name, missing, frozenset(sure), unsure, tuple(objects)
        )
    return known

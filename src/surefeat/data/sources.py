"""Where images come from: folders, lists, tar shards, COCO files.

`find_images` opens no image, so it is fast; data.decode reads what it found.
"""

from __future__ import annotations

import glob
import logging
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from surefeat.core.image import EXTENSIONS, UNREADABLE, read_bytes
from surefeat.data.coco import read_annotations
from surefeat.data.decode import Item, Place, SourceError, name_of

_LOG = logging.getLogger(__name__)

PHOTOS = frozenset((*EXTENSIONS, *UNREADABLE))

CONTEXT = 0.2
"""By this share of its size a box grows on each side before it is cut out."""


def find_images(
    source: str | Path,
    *,
    images: str | Path | None = None,
    crop: str | Path | None = None,
    keep: str | Path | None = None,
    categories: tuple[str, ...] | None = None,
    context: float = CONTEXT,
    min_side: int = 32,
) -> list[Item]:
    """The images of a folder, a list, tar shards (file, folder or glob) or a COCO json, in order.

    `images` is where the names in a list or COCO json are looked up: a folder or tar shards, by
    default those beside that file. `crop` is a COCO json whose boxes are cut from the images of
    `source`; a COCO json as `source` cuts its own. `keep` is a list of the names (with or without
    extension) to keep. For boxes: `categories` filters by name, `context` grows a box by that share
    of its size per side, boxes with a side under `min_side` pixels are dropped.
    """
    coco = source if str(source).lower().endswith(".json") else crop
    kept = None if keep is None else set(_lines(Path(keep)))
    if coco is None:
        items, wanted = _files(source, images), " ".join(EXTENSIONS)
    else:
        own = coco is source
        find = image_finder(images, beside=coco) if own else _index(_files(source, images))
        items = []
        for name, crops in _read_crops(Path(coco), categories, context, min_side):
            item = find(name)
            if _is_kept(item, kept) and not item.read.refused:
                items += [replace(c, name=item.name + c.name, read=item.read) for c in crops]
            elif _is_kept(item, kept) and own:
                items.append(item)
        wanted = f"boxes of {categories or 'any category'}, {min_side} pixels or more, in {coco}"
    if kept is not None:
        items = items if coco else [item for item in items if _is_kept(item, kept)]
        wanted += f", named in {keep}"
    if all(item.read.refused for item in items):
        first = f"; {items[0].name} {items[0].read.refused}" if items else "; pass another folder"
        raise SourceError(f"no images under {source} (looked for {wanted}){first}")
    return items


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
        for name in (*files, *folders):  # a folder named x.jpg is listed, so that it is reported
            if _ending(name) in PHOTOS:
                add(os.path.join(folder, name), _no_reader(name))
    return sorted(items, key=lambda item: item.name)


def folder_paths(root: str | Path) -> list[Path]:
    """The images of a folder as files; what cannot be read is logged. SourceError: none."""
    items = walk_folder(root)
    for item in items:
        if item.read.refused:
            _LOG.warning("skipped %s: %s", item.name, item.read.refused)
    paths = [Path(item.read.path) for item in items if not item.read.refused]
    if not paths:
        wanted = " ".join(EXTENSIONS)
        raise SourceError(f"no images under {root} (looked for {wanted}); pass another folder")
    return paths


def image_finder(images: str | Path | None, *, beside: str | Path) -> Callable[[str], Item]:
    """Finds images by name, with or without extension, under `images` or beside a file.

    One that is not there comes back as refused.
    """
    root = Path(beside).parent if images is None else Path(images)
    packed: Callable[[str], Item] | None = None
    if not root.is_dir():
        packed = _index(_files(root), root=str(root))
    elif any(root.glob("*.tar")):
        packed = _index(_shards(root), root=str(root))

    # A folder is not listed for this: it may hold far more than the names that are asked for.
    def find(name: str) -> Item:
        spellings = (
            [name] if _ending(name) in EXTENSIONS else [*(name + ext for ext in EXTENSIONS), name]
        )
        for spelling in spellings:
            path = os.path.join(root, spelling)
            if os.path.lexists(path):
                return Item(spelling, Place(path))
        return missing_image(name, root) if packed is None else packed(name)

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
    return [item for tar in sorted(folder.glob("*.tar")) for item in _members(tar)]


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


def _read_crops(
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


def _is_kept(item: Item, kept: set[str] | None) -> bool:
    return kept is None or name_of(item) in kept or _stem(name_of(item)) in kept


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
    try:
        lines = [line.strip() for line in read_bytes(path).decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not a text file; a list has one image per line") from error
    return [line for line in lines if line and not line.startswith("#")]

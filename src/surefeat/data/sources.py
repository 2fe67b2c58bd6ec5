"""A training image before it is read: its name, where its bytes are, what is cut from it.

Where training images come from: folders, lists, tar shards, COCO files.

`find_images` opens no image, so it is fast; canvas.py decodes what it found.
"""

from __future__ import annotations

import glob
import logging
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from surefeat.core.image import EXTENSIONS, read_bytes
from surefeat.data.coco import ImageBoxes, read_boxes
from surefeat.data.items import Item, Place, SourceError

_LOG = logging.getLogger(__name__)

_MISSING = "is not where it was looked for ({root}); pass the folder or shards as images"


def find_images(
    source: str | Path,
    *,
    images: str | Path | None = None,
    crop: str | Path | None = None,
    keep: str | Path | None = None,
    categories: tuple[str, ...] | None = None,
    context: float = 0.0,
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
    if coco is None:
        found, wanted = _files(source, images), " ".join(EXTENSIONS)
    else:
        find = _index(_files(source, images)) if coco is crop else _lookup(images, beside=coco)
        boxes = read_boxes(Path(coco), categories=categories, min_side=min_side, context=context)
        found = list(_crops(boxes, find, keep_missing=coco is source))
        wanted = f"boxes of {categories or 'any category'}, {min_side} pixels or more, in {coco}"
    if keep is not None:
        kept = set(_lines(Path(keep)))
        found = [entry for entry in found if entry[0] in kept or _stem(entry[0]) in kept]
        wanted += f", named in {keep}"
    items = [item for _, item in found]
    if all(item.read.refused for item in items):
        first = f"; {items[0].name} {items[0].read.refused}" if items else "; pass another folder"
        raise SourceError(f"no images under {source} (looked for {wanted}){first}")
    return items


# An entry is an item and the name lists and COCO files call it by: its path below the folder or
# inside the tar file.
_Entry = tuple[str, Item]


def _files(source: str | Path, images: str | Path | None = None) -> list[_Entry]:
    path, suffix = Path(source), Path(source).suffix.lower()
    if path.is_dir():
        # Tar files beside loose images are backups more often than a second half of the data.
        return _folder(path) or [
            entry for tar in sorted(path.glob("*.tar")) for entry in _members(tar)
        ]
    if not path.exists() and glob.has_magic(str(source)):
        matches = sorted(glob.glob(str(source), recursive=True))
        return [entry for match in matches for entry in _files(match, images)]
    if not path.is_file():
        what = "is a pipe, device or socket" if path.exists() else "does not exist"
        raise SourceError(f"{source} {what}; pass a folder, a list, tar shards or a COCO json")
    if suffix in EXTENSIONS:
        return [(path.name, Item(path.name, Place(str(path))))]
    if suffix == ".tar":
        return list(_members(path))
    if suffix in (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip"):
        raise SourceError(f"{source} is compressed; repack it as a plain .tar, read in place")
    find = _lookup(images, beside=path)
    return [find(name) for name in _lines(path)]


def _folder(root: Path) -> list[_Entry]:
    found: list[_Entry] = []
    seen: set[tuple[int, int]] = set()

    def add(path: str, refused: str | None = None) -> None:
        name = os.path.relpath(path, root)
        found.append((name, Item(name, Place(path, refused=refused))))

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
            if _is_image(name):
                add(os.path.join(folder, name))
    return sorted(found, key=lambda entry: entry[0])


def _members(path: Path) -> Iterator[_Entry]:
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
                if _is_image(name) and not member.isdir():
                    place = Place(str(path), member.offset_data, member.size, _refusal(member))
                    yield name, Item(f"{path.name}/{name}", place)
            # tarfile takes a damaged header, or none at all, for the end: the real one is zeros.
            file.seek(tar.offset)
            if file.read(512) != bytes(512):
                raise OSError("no end mark")
    except Exception as error:  # damaged headers raise nearly anything
        refused = f"is damaged or cut short ({error}); images after that are lost, fetch it again"
        yield path.name, Item(path.name, Place(str(path), refused=refused))


def _refusal(member: tarfile.TarInfo) -> str | None:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        return "has a path that leads out of the tar file; repack it with relative paths"
    if not member.isreg() or member.issparse() or member.size < 0:
        return "is a link, a device or sparse; repack the file itself"
    return None


def _index(entries: Iterable[_Entry], *, root: str = "the source") -> Callable[[str], _Entry]:
    """Finds entries by their name with or without extension; of equal names the first counts."""
    known: dict[str, _Entry] = {}
    for entry in entries:
        known.setdefault(entry[0], entry)
        known.setdefault(_stem(entry[0]), entry)
    refused = _MISSING.format(root=root)
    return lambda name: known.get(name) or (name, Item(name, Place(name, refused=refused)))


def _lookup(images: str | Path | None, *, beside: str | Path) -> Callable[[str], _Entry]:
    """Finds entries by their name, with or without extension, under `images` or beside a file."""
    root = Path(beside).parent if images is None else Path(images)
    if not root.is_dir() or any(root.glob("*.tar")):
        return _index(_files(root), root=str(root))

    # A folder is not listed for this: it may hold far more than the names that are asked for.
    def find(name: str) -> _Entry:
        spellings = [name] if _is_image(name) else [*(name + ext for ext in EXTENSIONS), name]
        for spelling in spellings:
            path = os.path.join(root, spelling)
            if os.path.lexists(path):
                return spelling, Item(spelling, Place(path))
        return name, Item(name, Place(name, refused=_MISSING.format(root=root)))

    return find


def _crops(
    boxes: Iterable[ImageBoxes], find: Callable[[str], _Entry], *, keep_missing: bool
) -> Iterator[_Entry]:
    for image in boxes:
        if not image.crops:
            continue
        name, item = find(image.file_name)
        if item.read.refused:
            if keep_missing:
                yield name, item
            continue
        for number, box, label in image.crops:
            yield name, replace(item, name=f"{item.name}#{number}", crop=box, label=label)


def _is_image(name: str) -> bool:
    hidden = any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))
    return not hidden and name.lower().endswith(EXTENSIONS)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0] if _is_image(name) else name


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in read_bytes(path).decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not a text file; a list has one image per line") from error
    return [line for line in lines if line and not line.startswith("#")]

"""YOLO's pose folders: data.yaml, images/ and labels/, a text file for every photo.

Convention: numbers are shares of the photo's width and height, measured from its corner, so 1 is
its far edge; half a pixel is taken off points. A line is class, box (centre, width, height), then
x, y (and v: 0 not there, 1 hidden, 2 visible) of each keypoint. All classes have as many keypoints
as the one with the most; data.yaml names them (kpt_names) and says which one a mirror makes of
each (flip_idx).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from surefeat.core.files import write_bytes, write_text
from surefeat.core.geometry import from_corner, to_corner
from surefeat.core.image import ImageError, image_size, read_bytes
from surefeat.data.coco import (
    WRONG,
    Annotation,
    Category,
    Coco,
    CocoImage,
    box_of_xywh,
    make_category,
    xywh_of_box,
)
from surefeat.data.decode import Place, SourceError
from surefeat.data.sources import walk_folder

SPLITS = ("train", "val", "test")

_LOG = logging.getLogger(__name__)

_FIX = "it needs names, kpt_shape and train, as Ultralytics' pose data sets have them"


@dataclass(frozen=True)
class _Layout:
    """What data.yaml says."""

    categories: tuple[Category, ...]
    count: int
    """Keypoints in every line."""
    numbers: int
    """Of each keypoint: 2, or 3 with v."""
    root: Path
    """What the paths of photos begin with."""
    folders: tuple[str, ...]


def yaml_in(folder: Path) -> Path | None:
    """The data.yaml of a folder, or its only other one."""
    files = sorted((*folder.glob("*.yaml"), *folder.glob("*.yml")))
    usual = [file for file in files if file.stem == "data"]
    return usual[0] if usual else files[0] if len(files) == 1 else None


def read_yolo(path: Path) -> Coco:
    """The objects of all photos of all splits; photos are named by their paths below the root.

    The photos must be there: without their sizes the numbers mean nothing.
    """
    file = yaml_in(path) if path.is_dir() else path
    if file is None:
        raise SourceError(f"{path} has no data.yaml; pass the folder that has it, or the file")
    layout = _layout(file)
    images: list[CocoImage] = []
    notes: list[Annotation] = []
    for photo in _photos(layout, file):
        try:
            size = image_size(photo)
        except ImageError as error:
            _LOG.warning("skipped %s", error)
            continue
        name = Path(os.path.relpath(photo, file.parent)).as_posix()
        notes += _objects(_labels_of(photo), len(images), layout, size)
        images.append(CocoImage(name, size))
    if not images:
        fix = "put them where train and val in it say"
        raise SourceError(f"{file} names no photos that are there; {fix}")
    return Coco(tuple(images), layout.categories, tuple(notes))


def _layout(file: Path) -> _Layout:
    yaml = _yaml()
    try:
        content = yaml.safe_load(read_bytes(file))
        names = content["names"]
        listed = dict(names) if isinstance(names, dict) else dict(enumerate(names))
        count, numbers = (int(number) for number in content["kpt_shape"])
        folders = [content.get(split) for split in SPLITS]
        flat = [x for f in folders if f for x in (f if isinstance(f, list) else [f])]
        if numbers not in (2, 3) or sorted(listed) != list(range(len(listed))) or not flat:
            raise ValueError("classes count from 0, a keypoint has 2 or 3 numbers")
        known = content.get("kpt_names") or {}
        flip = content.get("flip_idx")
        categories = tuple(
            _category(str(listed[row]), known.get(row), count, flip) for row in range(len(listed))
        )
    except (yaml.YAMLError, *WRONG) as error:
        said = " ".join(str(error).split())
        raise SourceError(f"{file} is no data.yaml of YOLO's for poses ({said}); {_FIX}") from error
    given = Path(str(content.get("path") or "."))
    root = given if given.is_absolute() else file.parent / given
    # Ultralytics looks under its own folder of data sets; a copy lies beside the file.
    root = root if root.is_dir() else file.parent
    return _Layout(categories, count, numbers, root, tuple(str(folder) for folder in flat))


def _category(name: str, points: Any, count: int, flip: Sequence[int] | None) -> Category:
    names = [str(point) for point in points or range(1, count + 1)]
    if len(names) > count:
        raise ValueError(f"class {name!r} has {len(names)} kpt_names, kpt_shape {count}")
    own = None if flip is None else [int(twin) for twin in flip[: len(names)]]
    if own is not None and any(twin >= len(names) for twin in own):
        own = None  # of a class with more keypoints
    return make_category(name, names, own)


def _photos(layout: _Layout, file: Path) -> Iterator[Path]:
    """The photos of every folder, list of photos, or photo that data.yaml names."""
    for given in dict.fromkeys(layout.folders):
        place = layout.root / given
        if place.is_dir():
            for item in walk_folder(place):
                if item.read.refused:
                    _LOG.warning("skipped %s: %s", item.name, item.read.refused)
                else:
                    yield Path(item.read.path)
        elif place.suffix == ".txt" and place.is_file():
            lines = read_bytes(place).decode("utf-8").splitlines()
            yield from (place.parent / line.strip() for line in lines if line.strip())
        else:
            raise SourceError(f"{file}: there is no {place}; correct path, train and val in it")


def _labels_of(photo: Path) -> Path:
    """labels/ in the place of the last images/ on a photo's path."""
    parts = list(photo.parts)
    last = max((i for i, part in enumerate(parts) if part == "images"), default=None)
    if last is not None:
        parts[last] = "labels"
    return Path(*parts).with_suffix(".txt")


def _objects(file: Path, image: int, layout: _Layout, size: tuple[int, int]) -> list[Annotation]:
    if not file.is_file():  # a photo that shows none
        return []
    notes = []
    for number, line in enumerate(read_bytes(file).decode("utf-8").splitlines(), start=1):
        if line.strip():
            try:
                notes.append(_object([float(word) for word in line.split()], image, layout, size))
            except (ValueError, IndexError) as error:
                fix = f"a line is class, box and {layout.count} keypoints of {layout.numbers}"
                raise SourceError(f"{file}, line {number}: {error}; {fix}") from error
    return notes


def _object(numbers: list[float], image: int, layout: _Layout, size: tuple[int, int]) -> Annotation:
    wanted = 5 + layout.count * layout.numbers
    if len(numbers) != wanted or numbers[0] not in range(len(layout.categories)):
        raise ValueError(f"{len(numbers)} numbers of class {numbers[0]:g}, not {wanted}")
    height, width = size
    category, (x, y, wide, high) = int(numbers[0]), numbers[1:5]
    box = box_of_xywh((x - wide / 2) * width, (y - high / 2) * height, wide * width, high * height)
    keypoints: list[float] = []
    for start in range(5, 5 + len(layout.categories[category].keypoints) * layout.numbers,
                       layout.numbers):  # fmt: skip
        x, y, *more = numbers[start : start + layout.numbers]
        v = more[0] if more else 2.0 * (x >= 0 and y >= 0 and (x, y) != (0, 0))
        keypoints += [from_corner(x * width), from_corner(y * height), v] if v else [0, 0, 0]
    return Annotation(image, category, box, tuple(keypoints), id=f"{image + 1}")


def write_yolo(path: Path, coco: Coco, photos: Callable[[str], Place] | None) -> int:
    """Write a folder with data.yaml, labels and, where `photos` finds them, copies of the photos.

    Every object has a box. Returns how many photos were not there to be copied.
    """
    folder = path.parent if path.suffix.lower() in (".yaml", ".yml") else path
    file = folder / "data.yaml" if folder == path else path
    count = max((len(kind.keypoints) for kind in coco.categories), default=0)
    places = [_path_of(image.name) for image in coco.images]
    missing = 0
    for image, place, notes in zip(coco.images, places, coco.by_image(), strict=True):
        lines = [_line(note, count, image.size) for note in notes]
        text = folder / "labels" / PurePosixPath(*place.parts[1:]).with_suffix(".txt")
        write_text(text, "".join(f"{line}\n" for line in lines))
        source = photos(image.name) if photos else Place("", refused="not asked for")
        missing += source.refused is not None
        target = folder / place
        there = source.size is None and target.exists() and target.samefile(source.path)
        if source.refused is None and not there:
            data = read_bytes(source.path, offset=source.offset, size=source.size)
            write_bytes(target, data)
    splits = [s for s in SPLITS if any(place.parts[1] == s for place in places)] or ["train"]
    write_text(file, _as_yaml(coco.categories, count, splits))
    return missing


def _path_of(name: str) -> PurePosixPath:
    """images/train/name; what is in a folder of images by its name already stays where it is."""
    parts = [
        part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "..")
    ]
    if parts[0] == "images" and len(parts) > 2 and parts[1] in SPLITS:
        return PurePosixPath(*parts)
    return PurePosixPath("images", "train", *parts)


def _line(note: Annotation, count: int, size: tuple[int, int] | None) -> str:
    assert note.box is not None
    assert size is not None
    height, width = size
    x, y, wide, high = xywh_of_box(note.box)
    numbers = [(x + wide / 2) / width, (y + high / 2) / height, wide / width, high / height]
    # Beyond the photo Ultralytics takes a whole file for broken.
    words = [str(note.category), *(f"{min(max(number, 0), 1):.8f}" for number in numbers)]
    for i in range(count):
        x, y, v = note.keypoints[3 * i : 3 * i + 3] or (0.0, 0.0, 0.0)
        share = (to_corner(x) / width, to_corner(y) / height) if v else (0.0, 0.0)
        words += [*(f"{min(max(at, 0), 1):.8f}" for at in share), str(int(v))]
    return " ".join(words)


def _as_yaml(categories: Sequence[Category], count: int, splits: Sequence[str]) -> str:
    flips = {(*kind.flip, *range(len(kind.flip), count)) for kind in categories}
    # Without `path` photos are looked up beside the file; "." would be where somebody stands.
    content: dict[str, Any] = {split: f"images/{split}" for split in splits}
    # Ultralytics asks for val; who has none of their own looks at those learned from.
    content.setdefault("val", f"images/{splits[0]}")
    content.setdefault("train", f"images/{splits[0]}")
    content |= {
        "kpt_shape": [count, 3],
        "names": {row: kind.name for row, kind in enumerate(categories)},
        "kpt_names": {row: list(kind.keypoints) for row, kind in enumerate(categories)},
    }
    if len(flips) == 1:
        content["flip_idx"] = list(flips.pop())
    text: str = _yaml().safe_dump(content, allow_unicode=True, sort_keys=False)
    return text


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        fix = "pip install 'surefeat[pose]'"
        raise ImportError(f"YOLO's data.yaml needs PyYAML: {fix}") from error
    return yaml

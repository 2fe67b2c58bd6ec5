"""Labels of other tools, in and out: which format a file has, and what each format cannot hold.

Whatever a file has is read as `coco.Coco`, in our coordinates, and written from it; one file of
this room knows one tool. A place stays on the same spot of its photo: tools that measure from the
image's corner differ by half a pixel from those that count pixel centres, as we do. Imports
nothing heavy at the top: the command line's help reads the names of the formats.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from surefeat.data.coco import Coco
    from surefeat.data.decode import Box, Item, Place

PoseFormat = Literal["coco", "deeplabcut", "sleap", "label-studio", "cvat", "yolo"]

ENDINGS: dict[str, PoseFormat] = {
    ".json": "coco", ".csv": "deeplabcut", ".h5": "deeplabcut", ".slp": "sleap", ".xml": "cvat",
    ".yaml": "yolo", ".yml": "yolo", "": "yolo",
}  # fmt: skip
"""Of files that are written; a folder is YOLO's. A JSON that is read may be Label Studio's."""

USUAL: dict[PoseFormat, str] = {
    "coco": "keypoints.json", "deeplabcut": "CollectedData_surefeat.csv", "sleap": "keypoints.slp",
    "label-studio": "label-studio.json", "cvat": "annotations.xml", "yolo": "yolo",
}  # fmt: skip
"""What a file is called where only its format is asked for."""

_CANNOT: dict[str, tuple[PoseFormat, ...]] = {
    "boxes": ("deeplabcut", "sleap"),
    "masks": ("deeplabcut", "sleap", "label-studio", "cvat", "yolo"),
    "names of categories": ("deeplabcut",),
    "hidden parts (they count as visible)": ("deeplabcut", "label-studio"),
    "lines between keypoints": ("deeplabcut", "label-studio", "yolo"),
    "mirrored twins that the names do not tell": ("deeplabcut", "label-studio", "cvat"),
    "names of individuals": ("label-studio", "cvat", "yolo"),
    "scores": ("deeplabcut", "label-studio", "cvat", "yolo"),
    "objects without any keypoint": ("deeplabcut",),
}


def is_labels(path: Path) -> bool:
    """Whether a file's ending is that of labels, not of a photo."""
    return bool(path.suffix) and path.suffix.lower() in ENDINGS


def tell_format(path: Path) -> PoseFormat:
    """The format of labels that are there, by ending and content; SourceError: none of ours."""
    from surefeat.core.image import read_bytes
    from surefeat.data.decode import SourceError
    from surefeat.data.yolo import yaml_in

    if path.is_dir():
        tables = next(path.rglob("CollectedData_*"), None)
        if yaml_in(path) is None and tables is None:
            what = "has neither a data.yaml (YOLO) nor CollectedData_* (DeepLabCut)"
            raise SourceError(f"{path} {what}; pass the file with the labels")
        return "deeplabcut" if tables is not None else "yolo"
    ending = path.suffix.lower()
    if ending == ".zip":
        raise SourceError(f"{path} is packed; unpack it and pass the file with the labels")
    if not ending or ending not in ENDINGS:
        known = " ".join(ending for ending in ENDINGS if ending)
        fix = "pass one of these, or convert it with --from"
        raise SourceError(f"{path} is of no known kind of labels ({known}); {fix}")
    if ending != ".json":
        return ENDINGS[ending]
    tasks = re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", read_bytes(path))
    return "label-studio" if tasks else "coco"


def read_pose(path: Path, form: PoseFormat | None = None) -> Coco:
    """Labels of any of the tools; whatever cannot be meant is a SourceError with the fix."""
    form = form or tell_format(path)
    if form == "coco":
        from surefeat.data.coco import read_annotations

        return read_annotations(path)
    if form == "deeplabcut":
        from surefeat.data.deeplabcut import read_deeplabcut

        return read_deeplabcut(path)
    if form == "sleap":
        from surefeat.data.sleap import read_sleap

        return read_sleap(path)
    if form == "label-studio":
        from surefeat.data.label_studio import read_label_studio

        return read_label_studio(path)
    if form == "cvat":
        from surefeat.data.cvat import read_cvat

        return read_cvat(path)
    from surefeat.data.yolo import read_yolo

    return read_yolo(path)


def photo_finder(path: Path, images: str | Path | None) -> Callable[[str], Item]:
    """Finds the photos that labels name: under `images`, else beside them or inside them.

    Beside: in the labels' folder, in its folder `images` (CVAT), or, for DeepLabCut's
    labeled-data/video/photo.png, from the folder of the project.
    """
    from surefeat.data.decode import Item
    from surefeat.data.sources import image_finder

    folder = path if path.is_dir() else path.parent
    roots = [Path(images)] if images is not None else [folder]
    table = path.is_dir() or path.suffix.lower() in (".csv", ".h5")
    if images is None:
        roots += [folder / "images"] if (folder / "images").is_dir() else []
        roots += [folder.absolute().parent, folder.absolute().parent.parent] if table else []
    finders = [image_finder(root, beside=path) for root in roots]
    packed = _packed(path) if images is None and path.suffix.lower() == ".slp" else {}

    def find(name: str) -> Item:
        if name in packed:
            return Item(f"{path.name}/{name}", packed[name])
        items = [found for finder in finders if not (found := finder(name)).read.refused]
        if not items and table:  # a table that was moved together with its photos
            items = [finders[0](PurePosixPath(name).name)]
        return items[0] if items else finders[0](name)

    return find


def _packed(path: Path) -> dict[str, Place]:
    from surefeat.data.sleap import packed_photos

    return packed_photos(path)


def with_sizes(coco: Coco, find: Callable[[str], Item], *, fix: str, empty: bool) -> Coco:
    """The same with the sizes of photos, from the files where the labels do not say them.

    empty: of photos that show no object too.
    """
    from surefeat.core.image import image_size
    from surefeat.data.decode import SourceError

    images = []
    for image, notes in zip(coco.images, coco.by_image(), strict=True):
        if image.size is None and (notes or empty):
            place = find(image.name).read
            if place.refused or place.size is not None:
                raise SourceError(f"{image.name} is not there, and its size is needed; {fix}")
            image = replace(image, size=image_size(place.path))
        images.append(image)
    return replace(coco, images=tuple(images))


def only_categories(coco: Coco, names: Sequence[str]) -> Coco:
    """The objects of these categories, and the photos that show one; an unknown name is refused."""
    from surefeat.data.decode import SourceError

    known = [kind.name for kind in coco.categories]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SourceError(f"no category {unknown[0]!r}; there are {', '.join(known)}")
    kinds = [row for row, name in enumerate(known) if name in names]
    notes = [note for note in coco.annotations if note.category in kinds]
    photos = sorted({note.image for note in notes})
    images, rows = tuple(coco.images[row] for row in photos), {p: i for i, p in enumerate(photos)}
    moved = tuple(replace(note, image=rows[note.image], category=kinds.index(note.category or 0))
                  for note in notes)  # fmt: skip
    return type(coco)(images, tuple(coco.categories[row] for row in kinds), moved)


def losses(coco: Coco, form: PoseFormat) -> list[str]:
    """What of these labels the format cannot hold, in words."""
    from surefeat.data.coco import make_category

    kinds, notes = coco.categories, coco.annotations
    twins = [kind.flip != make_category(kind.name, kind.keypoints).flip for kind in kinds]
    has = {
        "boxes": any(note.box is not None for note in notes),
        "masks": any(note.polygons for note in notes),
        "names of categories": any(kind.name not in ("object", "single") for kind in kinds),
        "hidden parts (they count as visible)": any(1 in note.keypoints[2::3] for note in notes),
        "lines between keypoints": any(kind.edges for kind in kinds),
        "mirrored twins that the names do not tell": any(twins),
        "names of individuals": any(note.individual for note in notes),
        "scores": any("keypoint_scores" in note.more for note in notes),
        "objects without any keypoint": any(not any(note.keypoints[2::3]) for note in notes),
    }
    lost = [what for what, there in has.items() if there and form in _CANNOT[what]]
    unboxed = sum(note.box is None for note in notes)
    if unboxed and (form == "yolo" or _needs_boxes(coco, form)):
        lost.append(f"objects without a box ({unboxed} got one around their keypoints)")
    if form == "yolo" and len({kind.flip for kind in kinds}) > 1:
        lost.append("mirrored twins of several categories")
    return lost


def _needs_boxes(coco: Coco, form: PoseFormat) -> bool:
    """In Label Studio a box tells objects of a photo, and kinds of objects, apart."""
    if form != "label-studio":
        return form == "yolo"
    count = Counter(note.image for note in coco.annotations)
    unboxed = [note for note in coco.annotations if note.box is None]
    return any(count[note.image] > 1 for note in unboxed) or len(coco.categories) > 1


def _boxed(coco: Coco) -> Coco:
    """Objects without a box get the one around their keypoints; without any, the whole photo."""
    notes = []
    for note in coco.annotations:
        if note.box is None:
            box = _around(note.keypoints, coco.images[note.image].size)
            note = replace(note, box=box)
        notes.append(note)
    return replace(coco, annotations=tuple(notes))


def _around(keypoints: Sequence[float], size: tuple[int, int] | None) -> Box:
    seen = [(x, y) for x, y, v in zip(*(keypoints[i::3] for i in range(3)), strict=True) if v > 0]
    if not seen:
        height, width = size or (1, 1)
        return 0.0, 0.0, width - 1.0, height - 1.0
    xs, ys = zip(*seen, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def format_for(path: Path) -> PoseFormat:
    """The format in which a file of this name is written; ValueError: it does not say."""
    form = ENDINGS.get(path.suffix.lower())
    if form is None:
        known = " ".join(ending for ending in ENDINGS if ending)
        raise ValueError(f"{path}: unknown ending; use one of {known}, a folder (YOLO), or --to")
    return form


def write_pose(
    path: Path, coco: Coco, form: PoseFormat, find: Callable[[str], Item], *, copy: bool = True
) -> list[str]:
    """Write labels in a format, whole or not at all; returns what it cannot hold, in words.

    find: where photos are, for the formats that need their sizes or hold copies of them (YOLO's
    folder, a package of SLEAP's). copy: YOLO's folder gets the photos.
    """
    lost = losses(coco, form)
    if form in ("label-studio", "cvat", "yolo"):
        fix = "pass --images with the folder of the photos"
        coco = with_sizes(coco, find, fix=fix, empty=form == "cvat")
    coco = _boxed(coco) if _needs_boxes(coco, form) else coco
    if form == "yolo":
        return lost + _write_folder(path, coco, find if copy else None)
    if form == "coco":
        from surefeat.data.coco import write_annotations

        write_annotations(path, coco)
    elif form == "deeplabcut":
        from surefeat.data.deeplabcut import write_deeplabcut

        write_deeplabcut(path, coco)
    elif form == "sleap":
        from surefeat.data.sleap import write_sleap

        write_sleap(path, _sized(coco, find), lambda name: find(name).read)
    elif form == "label-studio":
        from surefeat.data.label_studio import write_label_studio

        write_label_studio(path, coco)
    else:
        from surefeat.data.cvat import write_cvat

        write_cvat(path, coco)
    return lost


def unpack_photos(path: Path, coco: Coco, form: PoseFormat, find: Callable[[str], Item]) -> int:
    """Write those photos that lie in a package of SLEAP's beside the new labels; how many.

    YOLO's folder has its own copies, another package holds them, and files in tars are left there.
    """
    from surefeat.core.files import write_bytes
    from surefeat.core.image import read_bytes

    if form == "yolo" or path.name.lower().endswith(".pkg.slp"):
        return 0
    count = 0
    for image in coco.images:
        place = find(image.name).read
        target = path.parent / image.name
        inside = place.path.lower().endswith(".slp") and place.refused is None
        if inside and ".." not in target.parts and not target.exists():
            data = read_bytes(place.path, offset=place.offset, size=place.size)
            write_bytes(target, data.rstrip(b"\0"))  # a package pads them to one length
            count += 1
    return count


def _sized(coco: Coco, find: Callable[[str], Item]) -> Coco:
    """With sizes where the photos are there; SLEAP can do without."""
    try:
        return with_sizes(coco, find, fix="", empty=True)
    except ValueError:
        return coco


def _write_folder(path: Path, coco: Coco, find: Callable[[str], Item] | None) -> list[str]:
    """YOLO's folder, made beside its place and moved there."""
    from surefeat.core.files import folder_at_once
    from surefeat.data.yolo import write_yolo

    folder = path.parent if path.suffix else path
    photos = None if find is None else (lambda name: find(name).read)
    with folder_at_once(folder) as part:
        missing = write_yolo(part / path.name if path.suffix else part, coco, photos)
    said = f"{missing} photos that were not copied (put them into {folder / 'images'})"
    return [said] if missing else []

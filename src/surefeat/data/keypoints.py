"""Objects with named keypoints, from COCO's json, other tools' labels or PASCAL3D+'s own files.

Convention: points are (x, y) in original pixels, boxes inclusive (see core.geometry). A keypoint is
visible when COCO's flag v is 1 or 2; with v = 0 it has no place.

PASCAL3D+ (Xiang et al. 2014): COCO's layout, keypoints_train.json and keypoints_val.json, or the
release's: Annotations/<class>_pascal/<image>.mat, a struct `record` with `objects`, each with
`class`, `bbox` and `anchors` (keypoints with `location` and `status`); they count pixels from 1,
the result from 0. Objects that are difficult, truncated or occluded are not left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from surefeat.core.image import decode, image_size, problem, read_bytes
from surefeat.data.coco import (
    Annotation,
    Category,
    Coco,
    CocoImage,
    make_category,
    write_annotations,
)
from surefeat.data.decode import Item, Place, SourceError
from surefeat.data.pose import PoseFormat, photo_finder, read_pose, write_pose


def channels(categories: Iterable[Category]) -> tuple[range, ...]:
    """Consecutive channels, one per keypoint, for each category."""
    spans, first = [], 0
    for category in categories:
        spans.append(range(first, first + len(category.keypoints)))
        first += len(category.keypoints)
    return tuple(spans)


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
    """(K,) in [0, 1]: how probably the part is in the photo and within a tenth of the box's longer
    side of the point; of a detector without calibration the height of its heat map."""
    errors: Tensor | None = None
    """(K,) pixels: how far off a detector expects the point to be if the part is in the photo."""
    mask: tuple[Tensor, ...] = ()
    """Its outline where known: polygons (M, 2), original pixels, centres at integers."""
    box_score: float | None = None
    """How probably the box is right, where it was not drawn by hand (keypoints.transfer)."""

    def read(self) -> Tensor:
        """The image: RGB (3, H, W) uint8."""
        place = self.image
        data = read_bytes(place.path, name=self.name, offset=place.offset, size=place.size)
        pixels = decode(data, name=self.name)
        height, width = pixels.shape[1:]
        if (height, width) != self.size:
            what = f"is {width} x {height} pixels, its label says"
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
    """The objects of a COCO json, or of another tool's labels (see data.pose), in their order.

    Crowds are left out. Images are looked up under `images` (a folder or tar shards; default:
    beside the labels, or in them). An
    object without a box gets the whole image, one without keypoints has none visible. Anything
    that cannot be meant is an error that names the file, the object and the fix.
    """
    path = Path(path)
    content = read_pose(path)
    notes = [note for note in content.annotations if not note.crowd]
    if not notes:
        raise SourceError(f"{path} holds no annotations; label some objects first")
    categories = content.categories
    names = [category.name for category in categories]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise SourceError(f"{path}: two categories are called {twice[0]!r}; rename one")
    items = _items(path, content, sorted({note.image for note in notes}), images)
    objects = []
    for note in notes:
        image = content.images[note.image]
        assert note.category is not None
        try:
            objects.append(_labelled(note, image, items[note.image], categories[note.category]))
        except ValueError as error:
            where = f"{path}, annotation {note.id} ({image.name})"
            raise SourceError(f"{where}: {error}") from error
    return KeypointSet(categories, tuple(objects))


def _items(
    path: Path, content: Coco, rows: Sequence[int], images: str | Path | None
) -> dict[int, Item]:
    """Where the images are; those that are nowhere are one error that names them."""
    find = photo_finder(path, images)
    items = {row: find(content.images[row].name) for row in rows}
    missing = [content.images[row].name for row in rows if items[row].read.refused]
    if missing:
        root = path.parent if images is None else images
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        fix = "pass the folder or tar shards they are in as images (--images)"
        raise SourceError(f"{path}: {len(missing)} images are not under {root} ({shown}); {fix}")
    return items


def _labelled(note: Annotation, image: CocoImage, item: Item, category: Category) -> Labelled:
    assert note.category is not None
    if image.size is None and item.read.size is not None:
        raise ValueError("its image is in a tar file; give its width and height in the json")
    size = image.size or image_size(item.read.path)
    x1, y1, x2, y2 = note.box or (0.0, 0.0, size[1] - 1.0, size[0] - 1.0)
    if min(x2 - x1, y2 - y1) < -1e-6:
        fix = "give x, y, width, height in pixels, or no bbox for the whole image"
        raise ValueError(f"its bbox is no box of a pixel or more; {fix}")
    box = torch.tensor([x1, y1, x2, y2])
    points, visible = _points(note.keypoints, category, size)
    # COCO's outlines run along pixels' edges, which lie half a pixel before their centres.
    mask = tuple(torch.tensor(ring).view(-1, 2) - 0.5 for ring in note.polygons)
    about = (item.read, image.name, note.category, box, points, visible, size)
    return Labelled(*about, mask=mask)


def _points(
    numbers: Sequence[float], category: Category, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """x, y, v of each keypoint -> points (K, 2), NaN where v = 0, and visible (K,)."""
    count = len(category.keypoints)
    table = torch.tensor(numbers or [0.0] * (3 * count))
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


def write_coco(path: str | Path, labelled: KeypointSet) -> None:
    """Write a set as COCO keypoints json, whole or not at all.

    What a detector says of each keypoint is written as keypoint_scores and keypoint_errors.
    """
    write_annotations(path, _as_coco(labelled))


def write_keypoints(path: str | Path, labelled: KeypointSet, form: PoseFormat) -> list[str]:
    """Write a set as another tool's labels; returns what they cannot hold, in words."""
    places = {item.name: item.image for item in labelled.objects}

    def find(name: str) -> Item:
        return Item(name, places[name])

    return write_pose(Path(path), _as_coco(labelled), form, find)


def _as_coco(labelled: KeypointSet) -> Coco:
    sizes = {item.name: item.size for item in labelled.objects}
    rows = {name: row for row, name in enumerate(sizes)}
    images = tuple(CocoImage(name, size) for name, size in sizes.items())
    notes = (_annotation(item, rows[item.name]) for item in labelled.objects)
    return Coco(images, labelled.categories, tuple(notes))


def _annotation(item: Labelled, image: int) -> Annotation:
    keypoints: list[float] = []
    for (x, y), seen in zip(item.points.tolist(), item.visible.tolist(), strict=True):
        keypoints += [x, y, 2] if seen else [0, 0, 0]
    more: dict[str, Any] = {}
    if item.scores is not None:
        scores = [round(score, 4) for score in item.scores.tolist()]
        more = {"keypoint_scores": scores, "score": round(sum(scores) / max(1, len(scores)), 4)}
    if item.errors is not None:
        more["keypoint_errors"] = [round(error, 2) for error in item.errors.tolist()]
    if item.box_score is not None:
        more["box_score"] = round(item.box_score, 4)
    x1, y1, x2, y2 = item.box.tolist()
    rings = tuple(tuple((ring + 0.5).flatten().tolist()) for ring in item.mask)
    about = (image, item.category, (x1, y1, x2, y2), tuple(keypoints), rings)
    return Annotation(*about, more=more)


PASCAL3D_CLASSES = (
    "aeroplane", "bicycle", "boat", "bottle", "bus", "car", "chair", "diningtable", "motorbike",
    "sofa", "train", "tvmonitor",
)  # fmt: skip

_LISTS = ("PASCAL/VOCdevkit/VOC2012/ImageSets/Main", "ImageSets/Main", "Image_sets")

_NOWHERE = (torch.nan, torch.nan)

_PHOTOS = ("Images/{0}_pascal", "PASCAL/VOCdevkit/VOC2012/JPEGImages", "JPEGImages")


def load_pascal3d(
    data: str | Path, *, split: Literal["train", "val"], images: str | Path | None = None
) -> KeypointSet:
    """The objects of a split.

    `images` is where the photos are: a folder, or tar shards for COCO's layout; by default beside
    the json, or where the release has them.
    """
    root = Path(data)
    listed = root / f"keypoints_{split}.json"
    if listed.is_file():
        return read_coco(listed, images=images)
    if (root / "Annotations").is_dir():
        return _read_release(root, split, images)
    what = f"{root} holds neither {listed.name} nor PASCAL3D+'s Annotations folder"
    raise FileNotFoundError(f"{what}; pass the folder that has one of them")


def _read_release(root: Path, split: str, images: str | Path | None) -> KeypointSet:
    lists = [root / folder / f"{split}.txt" for folder in _LISTS]
    listed = [file.read_text() for file in lists if file.is_file()]
    if not listed:
        raise FileNotFoundError(f"there is no {lists[0]}; copy VOC 2012's there")
    wanted = {line.split()[0] for line in listed[0].splitlines() if line.strip()}
    categories: list[Category] = []
    objects = []
    for kind in PASCAL3D_CLASSES:
        files = sorted((root / "Annotations" / f"{kind}_pascal").glob("*.mat"))
        records = [(path.stem, *record) for path in files for record in _read_mat(path, kind)]
        if not records:
            continue
        # Named by the objects of both splits, so that the two have the same channels.
        names = sorted({name for _, _, places in records for name in places})
        for image, box, places in records:
            if image in wanted:
                photo = _photo(image, kind, root, images)
                points = torch.tensor([places.get(name, _NOWHERE) for name in names])
                seen, size = points.isfinite().all(-1), image_size(photo)
                about = (Place(str(photo)), photo.name, len(categories), torch.tensor(box))
                objects.append(Labelled(*about, points, seen, size))
        categories.append(make_category(kind, names))
    if not objects:
        raise ValueError(f"{root} has no annotated object in the list of {split}; fetch it again")
    return KeypointSet(tuple(categories), tuple(objects))


def _read_mat(path: Path, kind: str) -> list[tuple[list[float], dict[str, tuple[float, float]]]]:
    """Box and keypoints, counted from 0, of every annotated object of the folder's class.

    A file lists objects of other classes too. Keypoints that are not visible are nowhere.
    """
    from scipy.io import loadmat

    try:
        content = loadmat(path, squeeze_me=True, struct_as_record=False)
        return [
            (_box(thing), {name: _place(getattr(thing.anchors, name)) for name in names})
            for thing in np.atleast_1d(content["record"].objects)
            # Without keypoints the field is an empty array.
            if getattr(thing, "class") == kind
            and (names := getattr(thing.anchors, "_fieldnames", None)) is not None
        ]
    except Exception as error:  # scipy raises nearly anything for a damaged file
        raise ValueError(f"{path}: not a PASCAL3D+ record ({error!r}); fetch it again") from error


def _box(thing: Any) -> list[float]:
    box = [float(value) - 1 for value in np.ravel(thing.bbox)]
    if len(box) != 4:
        raise ValueError(f"a bbox has {len(box)} numbers, not 4")
    return box


def _place(anchor: Any) -> tuple[float, float]:
    if getattr(anchor, "status", None) != 1:  # 1: visible
        return _NOWHERE
    x, y = (float(value) - 1 for value in np.ravel(anchor.location))
    return x, y


def _photo(image: str, kind: str, root: Path, images: str | Path | None) -> Path:
    folders = [Path(images)] if images else [root / folder.format(kind) for folder in _PHOTOS]
    for folder in folders:
        for ending in (".jpg", ".webp", ".png"):
            if (folder / f"{image}{ending}").is_file():
                return folder / f"{image}{ending}"
    fix = "pass its folder as images"
    raise FileNotFoundError(f"there is no photo {image}.jpg in {folders[0]}; {fix}")

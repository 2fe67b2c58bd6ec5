"""PASCAL3D+ (Xiang et al. 2014): keypoints of 12 rigid classes on VOC 2012 photos.

Two layouts are read. COCO's: keypoints_train.json and keypoints_val.json in one folder. The
release's own: Annotations/<class>_pascal/<image>.mat, a struct `record` with `objects`, each with
`class`, `bbox` and `anchors`, a struct of keypoints with `location` and `status` (1: visible);
photos in Images/<class>_pascal, and VOC's lists of image names. The .mat files count pixels from
1, the result from 0. Objects that are difficult, truncated or occluded are not left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from surefeat.core.image import image_size
from surefeat.data.decode import Place
from surefeat.data.keypoints import Category, KeypointSet, Labelled, make_category, read_coco

CLASSES = (
    "aeroplane", "bicycle", "boat", "bottle", "bus", "car", "chair", "diningtable", "motorbike",
    "sofa", "train", "tvmonitor",
)  # fmt: skip

_LISTS = ("PASCAL/VOCdevkit/VOC2012/ImageSets/Main", "ImageSets/Main", "Image_sets")

_PHOTOS = ("Images/{0}_pascal", "PASCAL/VOCdevkit/VOC2012/JPEGImages", "JPEGImages")

_VISIBLE = 1


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
    raise FileNotFoundError(
        f"{root} holds neither {listed.name} nor PASCAL3D+'s Annotations folder; pass the folder "
        "that has one of them"
    )


@dataclass(frozen=True)
class _Record:
    """An object as the .mat file has it, counted from 0."""

    image: str
    kind: str
    box: tuple[float, ...]
    places: dict[str, tuple[float, float] | None]
    """Every keypoint that was asked for; None where it is not visible."""


def _read_release(root: Path, split: str, images: str | Path | None) -> KeypointSet:
    folders = {kind: root / "Annotations" / f"{kind}_pascal" for kind in CLASSES}
    kinds = [kind for kind in CLASSES if folders[kind].is_dir()]
    if not kinds:
        raise FileNotFoundError(f"{root}/Annotations has no folder such as car_pascal; fetch it")
    wanted = _names(root, split)
    records = {
        kind: [r for path in sorted(folders[kind].glob("*.mat")) for r in _read_mat(path, kind)]
        for kind in kinds
    }
    # Named by the objects of both splits, so that the two have the same channels.
    categories = tuple(
        make_category(kind, sorted({name for record in records[kind] for name in record.places}))
        for kind in kinds
    )
    objects = tuple(
        _labelled(record, number, categories[number], _photo(record, root, images))
        for number, kind in enumerate(kinds)
        for record in records[kind]
        if record.image in wanted
    )
    if not objects:
        raise ValueError(f"{root} has no annotated object in the list of {split}")
    return KeypointSet(categories, objects)


def _names(root: Path, split: str) -> set[str]:
    """The images of a split: VOC's list, the name first in each line."""
    for folder in _LISTS:
        path = root / folder / f"{split}.txt"
        if path.is_file():
            return {line.split()[0] for line in path.read_text().splitlines() if line.strip()}
    raise FileNotFoundError(f"there is no {root / _LISTS[0] / split}.txt; copy VOC 2012's there")


def _read_mat(path: Path, kind: str) -> list[_Record]:
    """The annotated objects of the folder's class; a file lists those of other classes too."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, squeeze_me=True, struct_as_record=False)
        return [
            _Record(path.stem, kind, _box(thing), _places(thing.anchors))
            for thing in np.atleast_1d(content["record"].objects)
            # Without keypoints the field is an empty array.
            if getattr(thing, "class") == kind and hasattr(thing.anchors, "_fieldnames")
        ]
    except Exception as error:  # scipy raises nearly anything for a damaged file
        raise ValueError(f"{path}: not a PASCAL3D+ record ({error!r}); fetch it again") from error


def _box(thing: Any) -> tuple[float, ...]:
    box = tuple(float(value) - 1 for value in np.ravel(thing.bbox))
    if len(box) != 4:
        raise ValueError(f"a bbox has {len(box)} numbers, not 4")
    return box


def _places(anchors: Any) -> dict[str, tuple[float, float] | None]:
    """Where every keypoint is; None unless it is visible."""
    places: dict[str, tuple[float, float] | None] = {}
    for name in anchors._fieldnames:
        anchor = getattr(anchors, name)
        places[str(name)] = None
        if hasattr(anchor, "status") and int(anchor.status) == _VISIBLE:
            x, y = (float(value) - 1 for value in np.ravel(anchor.location))
            places[str(name)] = (x, y)
    return places


def _labelled(record: _Record, number: int, category: Category, photo: Path) -> Labelled:
    places = [record.places.get(name) for name in category.keypoints]
    points = torch.tensor([place or (torch.nan, torch.nan) for place in places])
    visible = torch.tensor([place is not None for place in places])
    box, size = torch.tensor(record.box), image_size(photo)
    return Labelled(Place(str(photo)), photo.name, number, box, points, visible, size)


def _photo(record: _Record, root: Path, images: str | Path | None) -> Path:
    own = [root / folder.format(record.kind) for folder in _PHOTOS]
    folders = [Path(images)] if images else own
    for folder in folders:
        for ending in (".jpg", ".webp", ".png"):
            if (folder / f"{record.image}{ending}").is_file():
                return folder / f"{record.image}{ending}"
    raise FileNotFoundError(
        f"there is no photo {record.image}.jpg in {folders[0]}; pass its folder as images"
    )

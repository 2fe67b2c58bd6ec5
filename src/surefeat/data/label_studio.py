"""Label Studio's tasks: JSON with a photo each, boxes and keypoints in percent of its sides.

Convention: percent are measured from the image's corner, 0 to 100, so 100 is its far edge; half a
pixel is taken off. A keypoint belongs to the box it lies under in the tree of regions (parentID),
or to which a relation leads; one of neither belongs to the photo's only object. Which keypoints
there are, and in which order, stands in the labelling configuration, x.config.xml beside x.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

from surefeat.core.files import write_json, write_text
from surefeat.core.geometry import from_corner, to_corner
from surefeat.core.image import read_bytes
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
from surefeat.data.decode import Box, SourceError

LOCAL = "/data/local-files/?d="
"""Before the path of a photo on Label Studio's own disk."""

CONFIGURATION = ".config.xml"
"""The ending of the labelling configuration beside tasks.json: tasks.config.xml."""

_FIX = "export the project as JSON (not JSON-MIN)"

_NOBODY = "object"
"""The category of keypoints outside any box."""


@dataclass(frozen=True)
class _StudioObject:
    """An object of a photo: its box, if it has one, and its keypoints."""

    image: int
    category: str
    box: Box | None
    places: dict[str, tuple[float, float]]


def read_label_studio(path: Path) -> Coco:
    """The boxes and keypoints of every task's newest annotation, by the names of their labels."""
    content = read_bytes(path)
    try:
        tasks = json.loads(content)
        images, things = [], []
        for number, task in enumerate(tasks):
            regions = _regions(task)
            images.append(CocoImage(_photo(task["data"]), _size(regions)))
            things += _things(regions, number)
    except SourceError as error:
        raise SourceError(f"{path}: {error}") from error
    except WRONG as error:
        raise SourceError(f"{path} is no file of Label Studio's ({error!r}); {_FIX}") from error
    configured = _configured(path)
    if len(configured) == 1:  # what lies in no box is of the only kind there is
        only = next(iter(configured))
        things = [replace(t, category=only) if t.box is None else t for t in things]
    categories = _categories(things, configured)
    names = [category.name for category in categories]
    notes = [_note(thing, categories[names.index(thing.category)], names) for thing in things]
    return Coco(tuple(images), categories, tuple(notes))


def _regions(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What is marked in a task; of several annotations the newest that was not cancelled."""
    given = task["annotations"] if "annotations" in task else task["completions"]
    kept = [entry for entry in given if not entry.get("was_cancelled")]
    newest = max(kept, key=lambda entry: str(entry.get("created_at", "")), default=None)
    return list(newest["result"]) if newest else []


def _photo(data: dict[str, Any]) -> str:
    """The name of a task's photo: the part of its address that is a path of ours."""
    values = [value for value in data.values() if isinstance(value, str)]
    if not values:
        raise SourceError("a task has no photo; give its data an image")
    address = str(data.get("image") or data.get("img") or values[0])
    split = urlsplit(address)
    if split.path.endswith("/data/local-files/"):
        return parse_qs(split.query)["d"][0].lstrip("/")
    path = unquote(split.path) if split.scheme or address.startswith("/data/") else address
    uploaded = re.match(r"/data/upload/\d+/(?:[0-9a-f]{8}-)?(.+)", path)
    if uploaded:
        return uploaded[1]
    return PurePosixPath(path).name if split.scheme else path


def _size(regions: Sequence[dict[str, Any]]) -> tuple[int, int] | None:
    for region in regions:
        if region.get("original_width") and region.get("original_height"):
            return int(region["original_height"]), int(region["original_width"])
    return None


def _things(regions: Sequence[dict[str, Any]], image: int) -> list[_StudioObject]:
    size = _size(regions)
    kinds = {region["id"]: region for region in regions if "id" in region}
    boxes = {key: region for key, region in kinds.items() if "width" in region["value"]
             and region["type"].startswith("rectangle")}  # fmt: skip
    points = {key: region for key, region in kinds.items() if region["type"] == "keypointlabels"}
    if any(region.get("image_rotation") for region in kinds.values()):
        raise SourceError("a photo was turned in Label Studio; turn the file itself and label it")
    owners = {key: region.get("parentID") for key, region in points.items()}
    for region in regions:
        if region["type"] == "relation":
            ends = (region["from_id"], region["to_id"])
            owners |= {a: b for a, b in (ends, ends[::-1]) if a in points and b in boxes}
    marked: dict[str | None, dict[str, tuple[float, float]]] = {key: {} for key in boxes}
    for key, region in points.items():
        if size is None:
            raise SourceError(f"task {image + 1} has no original_width and original_height; {_FIX}")
        owner = owners[key] if owners[key] in boxes else None
        name, value = str(region["value"]["keypointlabels"][0]), region["value"]
        places = marked.setdefault(owner, {})
        if name in places:
            fix = "draw a box around every object and put its keypoints under it"
            raise SourceError(f"task {image + 1} has {name!r} twice in one object; {fix}")
        places[name] = (
            from_corner(float(value["x"]) / 100 * size[1]),
            from_corner(float(value["y"]) / 100 * size[0]),
        )
    return [
        _StudioObject(image, _label(boxes.get(key or "")), _box(boxes.get(key or ""), size), places)
        for key, places in marked.items()
    ]


def _label(region: dict[str, Any] | None) -> str:
    labels = region["value"].get("rectanglelabels") if region else None
    return str(labels[0]) if labels else _NOBODY


def _box(region: dict[str, Any] | None, size: tuple[int, int] | None) -> Box | None:
    if region is None or size is None:
        return None
    value, (height, width) = region["value"], size
    if value.get("rotation"):
        raise SourceError("a box is turned; set its rotation to 0 in Label Studio")
    x, y, wide, high = (float(value[side]) / 100 for side in ("x", "y", "width", "height"))
    return box_of_xywh(x * width, y * height, wide * width, high * height)


def _configured(path: Path) -> dict[str, tuple[str, ...]]:
    """Category -> keypoints, of the labelling configuration; {} where there is none.

    With as many lists of keypoints as labels of boxes each label has its own, else all share all.
    """
    file = path.with_suffix(CONFIGURATION)
    if not file.is_file():
        return {}
    try:
        root = ElementTree.fromstring(read_bytes(file))
    except ElementTree.ParseError as error:
        raise SourceError(f"{file} is no labelling configuration ({error}); remove it") from error

    def values(tag: ElementTree.Element) -> list[str]:
        return [str(label.get("value")) for label in tag.iter("Label")]

    boxes = [name for tag in root.iter("RectangleLabels") for name in values(tag)] or [_NOBODY]
    lists = [values(tag) for tag in root.iter("KeyPointLabels")]
    every = tuple(dict.fromkeys(name for names in lists for name in names))
    own = len(lists) == len(boxes)
    return {box: tuple(lists[row]) if own else every for row, box in enumerate(boxes)}


def _categories(
    things: Sequence[_StudioObject], configured: dict[str, tuple[str, ...]]
) -> tuple[Category, ...]:
    """Those configured, then what else is marked, in the order in which it first comes."""
    names = {name: dict.fromkeys(points) for name, points in configured.items()}
    for thing in things:
        names.setdefault(thing.category, {}).update(dict.fromkeys(thing.places))
    return tuple(make_category(name, list(points)) for name, points in names.items())


def _note(thing: _StudioObject, category: Category, names: Sequence[str]) -> Annotation:
    numbers: list[float] = []
    for name in category.keypoints:
        numbers += [*thing.places[name], 2] if name in thing.places else [0, 0, 0]
    return Annotation(thing.image, names.index(thing.category), thing.box, tuple(numbers))


def write_label_studio(path: Path, coco: Coco) -> None:
    """Write tasks, and beside them the labelling configuration that a project needs for them."""
    tasks = []
    for number, (image, notes) in enumerate(zip(coco.images, coco.by_image(), strict=True)):
        regions = [
            region
            for place, note in enumerate(notes)
            for region in _written(note, coco, f"{number + 1}-{place + 1}")
        ]
        result = [{"result": regions, "was_cancelled": False, "ground_truth": False}]
        data = {"image": LOCAL + quote(image.name)}
        tasks.append({"id": number + 1, "data": data, "annotations": result})
    write_text(path.with_suffix(CONFIGURATION), _configuration(coco.categories))
    write_json(path, tasks)


def _written(note: Annotation, coco: Coco, key: str) -> list[dict[str, Any]]:
    assert note.category is not None
    category, size = coco.categories[note.category], coco.images[note.image].size
    assert size is not None
    height, width = size
    shared = {"original_width": width, "original_height": height, "image_rotation": 0,
              "to_name": "image", "origin": "manual"}  # fmt: skip
    regions: list[dict[str, Any]] = []
    if note.box is not None:
        x, y, wide, high = xywh_of_box(note.box)
        value = {
            "x": 100 * x / width, "y": 100 * y / height, "width": 100 * wide / width,
            "height": 100 * high / height, "rotation": 0, "rectanglelabels": [category.name],
        }  # fmt: skip
        about = {"id": key, "type": "rectanglelabels", "from_name": "boxes", "value": value}
        regions.append(shared | about)
    triples = zip(note.keypoints[::3], note.keypoints[1::3], note.keypoints[2::3], strict=True)
    for part, (name, (x, y, v)) in enumerate(zip(category.keypoints, triples, strict=False)):
        if v > 0:
            place = {"x": 100 * to_corner(x) / width, "y": 100 * to_corner(y) / height}
            value = place | {"width": 0.5, "keypointlabels": [name]}
            about = {"id": f"{key}-{part + 1}", "type": "keypointlabels", "value": value,
                     "from_name": f"keypoints{note.category + 1}"}  # fmt: skip
            parent = {} if note.box is None else {"parentID": key}
            regions.append(shared | about | parent)
    return regions


def _configuration(categories: Sequence[Category]) -> str:
    """The labelling configuration: the kinds of boxes, and the keypoints of each."""
    boxes = "".join(f"    <Label value={quoteattr(kind.name)}/>\n" for kind in categories)
    lists = "".join(
        f'  <KeyPointLabels name="keypoints{row}" toName="image">\n'
        + "".join(
            f'    <Label value={quoteattr(name)} model_index="{place}"/>\n'
            for place, name in enumerate(kind.keypoints)
        )
        + "  </KeyPointLabels>\n"
        for row, kind in enumerate(categories, start=1)
    )
    rectangles = f'  <RectangleLabels name="boxes" toName="image">\n{boxes}  </RectangleLabels>\n'
    head = '<View>\n  <Image name="image" value="$image"/>\n'
    return f"{head}{rectangles}{lists}</View>\n"

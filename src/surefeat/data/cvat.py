"""CVAT's "for images 1.1" XML: skeletons, points and boxes of every photo.

Convention: CVAT measures from the image's corner (a photo of 1920 pixels ends at 1920), so half a
pixel is taken off. A skeleton's points are outside (not there), occluded (hidden) or visible. A
box belongs to the skeleton of the same group_id; a skeleton has none of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from surefeat.core.files import write_bytes
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

_FIX = "export the task as CVAT for images 1.1 and pass its annotations.xml"

_BOXES = " box"
"""After a category's name: the label of its boxes; that of skeletons is for these alone."""

_NOBODY = "object"
"""The category of single points, whose labels are the keypoints' names."""


@dataclass
class _CvatObject:
    """An object of a photo: its kind, its box, and x, y, v by the names of keypoints."""

    image: int
    category: str
    places: dict[str, tuple[float, float, int]]
    box: Box | None = None
    group: str = ""
    """Group 0 is none."""


def read_cvat(path: Path) -> Coco:
    """Skeletons; points of several places, numbered; single points, by group one object each."""
    try:
        root = ElementTree.fromstring(read_bytes(path))
        if root.tag != "annotations":
            raise ValueError(f"it begins with <{root.tag}>")
        kinds, edges = _labels(root)
        images, things = [], []
        for number, entry in enumerate(root.iter("image")):
            size = int(entry.attrib["height"]), int(entry.attrib["width"])
            images.append(CocoImage(entry.attrib["name"], size))
            things += _things(entry, number)
    except (ElementTree.ParseError, *WRONG) as error:
        raise SourceError(f"{path} is no XML of CVAT's ({error}); {_FIX}") from error
    if not images:
        what = "labels the frames of a video" if root.find("track") is not None else "has no image"
        raise SourceError(f"{path} {what}; {_FIX}")
    for thing in things:
        kinds.setdefault(thing.category, {}).update(dict.fromkeys(thing.places))
    categories = tuple(
        make_category(name, list(points), edges=edges.get(name, ()))
        for name, points in kinds.items()
    )
    names = list(kinds)
    return Coco(tuple(images), categories, tuple(_note(t, categories, names) for t in things))


def _labels(root: Element) -> tuple[dict[str, dict[str, None]], dict[str, list[tuple[int, int]]]]:
    """Skeletons' keypoints and edges, as the file's head has them."""
    kinds: dict[str, dict[str, None]] = {}
    edges: dict[str, list[tuple[int, int]]] = {}
    for label in root.iterfind("meta//labels/label"):
        name, parent = label.findtext("name", ""), label.findtext("parent")
        if label.findtext("type") == "skeleton":
            drawing = label.find("svg")
            nodes, lines = _drawing(drawing) if drawing is not None else ([], [])
            kinds[name] = dict.fromkeys(nodes) | kinds.get(name, {})
            edges[name] = lines
        elif parent:
            kinds.setdefault(parent, {})[name] = None
    return kinds, edges


def _drawing(svg: Element) -> tuple[list[str], list[tuple[int, int]]]:
    """Keypoints and edges of a skeleton's drawing, which is text that holds elements."""
    text = (svg.text or "") + "".join(ElementTree.tostring(e, "unicode") for e in svg)
    drawing = ElementTree.fromstring(f"<svg>{text}</svg>")
    circles = {e.attrib["data-node-id"]: e.attrib.get("data-label-name")
               for e in drawing.iter("circle")}  # fmt: skip
    order = list(circles)
    joined = [(e.attrib["data-node-from"], e.attrib["data-node-to"]) for e in drawing.iter("line")]
    lines = [(order.index(a), order.index(b)) for a, b in joined]
    # The editor leaves names out at times; then the labels' own order counts.
    named = [name for name in circles.values() if name]
    return (named if len(named) == len(circles) else []), lines


def _things(entry: Element, image: int) -> list[_CvatObject]:
    things: list[_CvatObject] = []
    single: dict[str, _CvatObject] = {}
    for shape in entry:
        group = shape.get("group_id", "0")
        if shape.tag == "skeleton":
            places = {e.attrib["label"]: _place(e) for e in shape.iter("points")}
            things.append(_CvatObject(image, shape.attrib["label"], places, group=group))
        elif shape.tag == "points":
            pairs = shape.attrib["points"].split(";")
            if len(pairs) == 1:
                thing = single.setdefault(group, _CvatObject(image, _NOBODY, {}, group=group))
                thing.places[shape.attrib["label"]] = _place(shape)
            else:
                places = {str(i): _place(shape, i - 1) for i in range(1, len(pairs) + 1)}
                things.append(_CvatObject(image, shape.attrib["label"], places, group=group))
    things += single.values()
    for shape in entry.iter("box"):
        _give_box(shape, things, image)
    return things


def _place(shape: Element, which: int = 0) -> tuple[float, float, int]:
    if shape.get("outside") == "1":
        return 0.0, 0.0, 0
    x, y = (float(number) for number in shape.attrib["points"].split(";")[which].split(","))
    return from_corner(x), from_corner(y), 1 if shape.get("occluded") == "1" else 2


def _give_box(shape: Element, things: list[_CvatObject], image: int) -> None:
    """Its box to the object of its group; a box of no group is an object without keypoints."""
    x, y, right, bottom = (float(shape.attrib[side]) for side in ("xtl", "ytl", "xbr", "ybr"))
    box, group = box_of_xywh(x, y, right - x, bottom - y), shape.get("group_id", "0")
    for thing in things:
        if group != "0" and thing.group == group and thing.box is None:
            thing.box = box
            return
    label = shape.attrib["label"].removesuffix(_BOXES)
    things.append(_CvatObject(image, label, {}, box, group))


def _note(thing: _CvatObject, categories: Sequence[Category], names: Sequence[str]) -> Annotation:
    row = names.index(thing.category)
    numbers: list[float] = []
    for name in categories[row].keypoints:
        numbers += thing.places.get(name, (0, 0, 0))
    return Annotation(thing.image, row, thing.box, tuple(numbers))


def write_cvat(path: Path, coco: Coco) -> None:
    """Write skeletons, a group of each with its box, with the labels a task needs for them."""
    root = Element("annotations")
    SubElement(root, "version").text = "1.1"
    labels = SubElement(SubElement(SubElement(root, "meta"), "task"), "labels")
    boxed = {note.category for note in coco.annotations if note.box is not None}
    for row, kind in enumerate(coco.categories):
        _add_labels(labels, kind, boxed=row in boxed)
    for number, (image, notes) in enumerate(zip(coco.images, coco.by_image(), strict=True)):
        assert image.size is not None
        height, width = (str(side) for side in image.size)
        entry = SubElement(root, "image", id=str(number), name=image.name, width=width,
                           height=height)  # fmt: skip
        for group, note in enumerate(notes, start=1):
            assert note.category is not None
            _add_object(entry, note, coco.categories[note.category], str(group))
    ElementTree.indent(root)
    write_bytes(path, ElementTree.tostring(root, "utf-8", xml_declaration=True) + b"\n")


def _add_labels(labels: Element, kind: Category, *, boxed: bool) -> None:
    def add(name: str, sort: str) -> Element:
        label = SubElement(labels, "label")
        SubElement(label, "name").text = name
        SubElement(label, "type").text = sort
        SubElement(label, "attributes")
        return label

    if kind.keypoints:
        SubElement(add(kind.name, "skeleton"), "svg").text = _drawn(kind)
    for name in kind.keypoints:
        SubElement(add(name, "points"), "parent").text = kind.name
    if boxed:
        add(kind.name + _BOXES, "rectangle")


def _drawn(kind: Category) -> str:
    """A drawing of the skeleton for CVAT's editor: nodes on a line, percent of its canvas."""
    spots = [(10 + 80 * i / max(1, len(kind.keypoints) - 1), 30 + 40 * (i % 2))
             for i in range(len(kind.keypoints))]  # fmt: skip
    parts: list[Element] = []
    for first, second in kind.edges:
        (x1, y1), (x2, y2) = spots[first], spots[second]
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        about = {"data-type": "edge", "data-node-from": first + 1, "data-node-to": second + 1}
        parts.append(_element("line", ends | about))
    for i, (name, (x, y)) in enumerate(zip(kind.keypoints, spots, strict=True), start=1):
        about = {"data-type": "element node", "data-element-id": i, "data-node-id": i}
        parts.append(_element("circle", {"r": 1.5, "cx": x, "cy": y, **about,
                                         "data-label-name": name}))  # fmt: skip
    return "".join(ElementTree.tostring(part, "unicode") for part in parts)


def _element(tag: str, about: dict[str, Any]) -> Element:
    return Element(tag, {name: str(value) for name, value in about.items()})


def _add_object(entry: Element, note: Annotation, kind: Category, group: str) -> None:
    shared = {"source": "manual", "z_order": "0", "group_id": group}
    if kind.keypoints:
        skeleton = SubElement(entry, "skeleton", {"label": kind.name} | shared)
        for name, (x, y, v) in _named(note, kind):
            place = f"{to_corner(x):.3f},{to_corner(y):.3f}" if v else "0.00,0.00"
            about = {"label": name, "source": "manual", "outside": str(int(v == 0)),
                     "occluded": str(int(v == 1)), "points": place}  # fmt: skip
            SubElement(skeleton, "points", about)
    if note.box is not None:
        x, y, wide, high = xywh_of_box(note.box)
        sides = {"xtl": x, "ytl": y, "xbr": x + wide, "ybr": y + high}
        about = {"label": kind.name + _BOXES, "occluded": "0"} | shared
        SubElement(entry, "box", about | {side: f"{at:.3f}" for side, at in sides.items()})


def _named(note: Annotation, kind: Category) -> Iterator[tuple[str, tuple[float, float, float]]]:
    numbers = note.keypoints or (0.0,) * (3 * len(kind.keypoints))
    triples = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return zip(kind.keypoints, triples, strict=True)

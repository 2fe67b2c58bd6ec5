"""What one visitor has on a tab with parts: photos, what was clicked in them, what was found.

Convention: places are kept in the photos' own pixels. Each photo is one object, in its box or seen
whole. Everything is frozen: a click makes another session, and the last one can be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

import torch
from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.data.coco import Annotation, make_category, read_annotations
from surefeat.data.decode import Box, Place, SourceError
from surefeat.data.keypoints import KeypointSet, Labelled

Point = tuple[float, float]

MOST_PAST = 200
"""Clicks that can be taken back."""


@dataclass(frozen=True)
class Marks:
    """What is labelled in a photo."""

    places: dict[str, Point] = field(default_factory=dict)
    """Clicked parts."""
    box: Box | None = None
    """The object's, inclusive; without it the whole photo is the object."""
    absent: frozenset[str] = frozenset()
    """Parts that were said not to be seen."""

    def with_place(self, name: str, point: Point | None) -> Marks:
        """A part at another place; None: it is not to be seen."""
        places = {part: place for part, place in self.places.items() if part != name}
        if point is None:
            return replace(self, places=places, absent=self.absent | {name})
        return replace(self, places=places | {name: point}, absent=self.absent - {name})


@dataclass(frozen=True, eq=False)
class PartPhoto:
    """A photo, the parts clicked in it and those found in it."""

    name: str
    path: str
    jpeg: bytes
    """As shown."""
    frame: Frame
    """From the photo's own pixels (original) to those shown (network)."""
    marks: Marks = field(default_factory=Marks)
    found: dict[str, Point] = field(default_factory=dict)
    """Parts that were found here, without those that are thought not to be seen."""
    found_box: Box | None = None
    """The object's, where it was carried over from another photo."""
    scores: dict[str, float] = field(default_factory=dict)
    """How sure that was, in [0, 1]; of parts that are thought not to be seen too."""

    def parts(self) -> dict[str, Point]:
        """Every part with a place: where it was clicked, else where it was found."""
        placed = self.found | self.marks.places
        return {name: place for name, place in placed.items() if name not in self.marks.absent}

    def whole(self) -> Box:
        """The box of the object."""
        height, width = self.frame.original
        return self.marks.box or self.found_box or (0.0, 0.0, width - 1.0, height - 1.0)


@dataclass(frozen=True, eq=False)
class Parts:
    """What one visitor has on the tab; never shared with another."""

    names: tuple[str, ...] = ()
    photos: tuple[PartPhoto, ...] = ()
    at: int = 0
    """The photo that is shown."""
    corner: Point | None = None
    """Of a box that is being drawn: its first corner, in the photo that is shown."""
    past: tuple[tuple[int, Marks], ...] = ()
    """Before every click: which photo, and what was labelled in it."""
    waiting: dict[str, Marks] = field(default_factory=dict)
    """Labels that were loaded of photos that are not here yet, by their names."""
    desk: str = ""
    """Where they are worked on: what the ids of its elements start with."""
    probable: bool = False
    """Scores of what was found are probabilities."""

    def missing(self) -> list[str]:
        """Parts that have no place yet in the photo that is shown."""
        if not self.photos:
            return list(self.names)
        photo = self.photos[self.at]
        done = photo.parts().keys() | photo.marks.absent
        return [name for name in self.names if name not in done]

    def labelled(self, photos: Sequence[PartPhoto], *, found: bool = False) -> KeypointSet:
        """Photos as objects with keypoints: those that were clicked are visible.

        found: those that were found too, with how probable they are; what was clicked is certain.
        """
        objects = []
        for photo in photos:
            placed = photo.parts() if found else photo.marks.places
            unknown = (torch.nan, torch.nan)
            points = torch.tensor([placed.get(name, unknown) for name in self.names])
            seen, box = points.isfinite().all(-1), torch.tensor(photo.whole())
            place, size = Place(photo.path), photo.frame.original
            scores = self._scores(photo) if found and photo.scores else None
            objects.append(Labelled(place, photo.name, 0, box, points, seen, size, scores))
        return KeypointSet((make_category("object", self.names),), tuple(objects))

    def _scores(self, photo: PartPhoto) -> Tensor:
        own = dict.fromkeys(photo.marks.places, 1.0) | dict.fromkeys(photo.marks.absent, 0.0)
        return torch.tensor([(photo.scores | own).get(name, 0.0) for name in self.names])

    def with_photos(self, added: Sequence[PartPhoto]) -> Parts:
        """More photos, with the labels that wait for them; the first of them is shown."""
        if not added:
            return self
        waiting, labelled = dict(self.waiting), []
        for photo in added:
            name = _name_in(waiting, photo)
            marks = photo.marks if name is None else waiting.pop(name)
            labelled.append(replace(photo, marks=_inside(marks, photo)))
        photos, at = (*self.photos, *labelled), len(self.photos)
        return replace(self, photos=photos, at=at, corner=None, waiting=waiting)

    def marked(self, marks: Marks) -> Parts:
        """The photo that is shown labelled otherwise; `undone` takes it back."""
        if not self.photos:
            return self
        past = (*self.past[1 - MOST_PAST :], (self.at, self.photos[self.at].marks))
        return replace(self._with_marks(self.at, marks), past=past, corner=None)

    def undone(self) -> Parts:
        """Without the last click, at the photo it was in."""
        if self.corner is not None or not self.past:
            return replace(self, corner=None)
        at, marks = self.past[-1]
        return replace(self._with_marks(at, marks), past=self.past[:-1], at=at)

    def _with_marks(self, at: int, marks: Marks) -> Parts:
        photos = list(self.photos)
        photos[at] = replace(photos[at], marks=marks)
        return replace(self, photos=tuple(photos))

    def with_part(self, name: str, point: Point | None) -> Parts:
        """A part at another place; None: it is not to be seen."""
        return self.marked(self.photos[self.at].marks.with_place(name, point))

    def with_corner(self, point: Point) -> Parts:
        """A corner of the box: the first is kept, the second makes the box."""
        if self.corner is None:
            return replace(self, corner=point)
        (x0, y0), (x1, y1) = self.corner, point
        box = (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))
        return self.marked(replace(self.photos[self.at].marks, box=box))

    def accepted(self) -> Parts:
        """What was found in the photo that is shown is right: it counts as clicked."""
        photo = self.photos[self.at]
        places = {name: place for name, place in photo.parts().items() if name in self.names}
        return self.marked(replace(photo.marks, places=photo.marks.places | places))

    def nearest(self, point: Point, *, within: float) -> str | None:
        """The part nearest to a point of the photo that is shown, if any is `within` pixels."""
        here = torch.tensor(point)
        apart = {
            name: float((torch.tensor(place) - here).norm())
            for name, place in self.photos[self.at].parts().items()
            if name in self.names
        }
        name = min(apart, key=lambda part: apart[part], default=None)
        return name if name is not None and apart[name] <= within else None

    def with_found(self, photos: Sequence[int], objects: Sequence[Labelled]) -> Parts:
        """What was found in these photos, instead of what had been found before."""
        changed = list(self.photos)
        for number, item in zip(photos, objects, strict=True):
            seen = zip(self.names, item.points.tolist(), item.visible.tolist(), strict=True)
            found = {name: (x, y) for name, (x, y), visible in seen if visible}
            chances = [] if item.scores is None else item.scores.tolist()
            scores = dict(zip(self.names, chances, strict=False))
            box = _own_box(item)
            changed[number] = replace(changed[number], found=found, scores=scores, found_box=box)
        return replace(self, photos=tuple(changed))

    def forgotten(self) -> Parts:
        """Without anything that was found."""
        photos = (replace(photo, found={}, scores={}, found_box=None) for photo in self.photos)
        return replace(self, photos=tuple(photos))


def _own_box(item: Labelled) -> Box | None:
    """An object's box, unless it is the whole photo."""
    x0, y0, x1, y1 = item.box.tolist()
    whole = torch.tensor([0, 0, item.size[1] - 1, item.size[0] - 1])
    return None if bool(((item.box - whole).abs() < 1).all()) else (x0, y0, x1, y1)


def read_labels(path: str | Path, *, name: str) -> tuple[tuple[str, ...], dict[str, Marks]]:
    """Keypoints' names and labels by photo, of a COCO json as the tab writes it.

    Of several categories the one with the most labels, of several objects in a photo the first.
    """
    content = read_annotations(Path(path))
    notes = [note for note in content.annotations if note.keypoints and note.category is not None]
    if not notes:
        raise SourceError(f"{name} holds no keypoints; load a COCO keypoints json")
    used = [note.category for note in notes]
    category = max(set(used), key=used.count)
    names = content.categories[category or 0].keypoints
    labels: dict[str, Marks] = {}
    for note in notes:
        if note.category == category:
            image = content.images[note.image].name
            labels.setdefault(image, _marks(note, names, name=name))
    return names, labels


def _name_in(labels: dict[str, Marks], photo: PartPhoto) -> str | None:
    """What the labels call a photo: its name, else one with the same file name."""
    if photo.name in labels:
        return photo.name
    own = PurePath(photo.name).name
    return next((name for name in labels if PurePath(name).name == own), None)


def _marks(note: Annotation, names: Sequence[str], *, name: str) -> Marks:
    if len(note.keypoints) != 3 * len(names):
        raise SourceError(f"{name}, annotation {note.id}: {len(names)} keypoints need x, y, v each")
    triples = zip(note.keypoints[::3], note.keypoints[1::3], note.keypoints[2::3], strict=True)
    places = {part: (x, y) for part, (x, y, v) in zip(names, triples, strict=True) if v > 0}
    return Marks(places, note.box)


def with_labels(session: Parts, names: tuple[str, ...], labels: dict[str, Marks]) -> Parts:
    """The session with loaded labels; those of photos that are not here wait for them.

    What was clicked stays. Places outside their photo are left out.
    """
    photos, waiting = list(session.photos), dict(labels)
    for number, photo in enumerate(photos):
        name = _name_in(waiting, photo)
        marks = None if name is None else waiting.pop(name)
        if marks is not None and not photo.marks.places:
            photos[number] = replace(photo, marks=_inside(marks, photo))
    every = tuple(dict.fromkeys((*session.names, *names)))
    return replace(session, names=every, photos=tuple(photos), waiting=waiting)


def _inside(marks: Marks, photo: PartPhoto) -> Marks:
    height, width = photo.frame.original
    places = {
        name: (x, y)
        for name, (x, y) in marks.places.items()
        if -0.5 <= x <= width - 0.5 and -0.5 <= y <= height - 0.5
    }
    if marks.box is None:
        return Marks(places)
    x0, y0, x1, y1 = marks.box
    box = (max(x0, 0.0), max(y0, 0.0), min(x1, width - 1.0), min(y1, height - 1.0))
    whole = box == (0.0, 0.0, width - 1.0, height - 1.0)
    return Marks(places, None if whole or box[0] >= box[2] or box[1] >= box[3] else box)

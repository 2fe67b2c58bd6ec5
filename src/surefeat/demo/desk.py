"""Where photos are labelled on the page: names of parts, a photo with its marks, what moves on.

Two tabs have one each: parts.py learns a detector from the clicks, folder.py carries them over to
the other photos. A change of the session answers with everything the desk shows (`shown`).
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from torch import Tensor

from surefeat.core.image import ImageError
from surefeat.data.decode import SourceError
from surefeat.demo.board import board, board_value, part_of, photo_of, place_of, sheet
from surefeat.demo.labels import Marks, PartPhoto, Parts, Point, read_labels, with_labels
from surefeat.demo.pictures import KEPT, SHOWN, read_upload, to_pil
from surefeat.show.style import picture

QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
"""Of events that are answered at once."""

BOX = "\x00box"
"""Of the choice of what is clicked next; no part can be called so."""

MOST_PHOTOS = 500
"""On one desk; larger folders are work for the command line."""

LISTED = 60
"""Photos on the sheet of what was found."""

_REACH = SHOWN / 30
"""How far from a part's disc a click may be to take it up, shown pixels."""


@dataclass(frozen=True, eq=False)
class Desk:
    """What a tab builds on."""

    session: gr.State
    shown: list[Any]
    """Session, photo, choice of the next part, line below the photo: what `show` answers with."""
    actions: gr.Column
    """Where the tab puts its button and what it tells."""
    sheet: gr.HTML
    """Below all, for what was found; a click on a photo opens it on the desk."""


def build_desk(start: Parts, *, example: str) -> Desk:
    """The desk of a tab with what it starts with; example: names of parts."""
    session, name = gr.State(start, time_to_live=KEPT), start.desk
    with gr.Row():
        with gr.Column(scale=1):
            names = gr.Textbox(
                label="parts, separated by commas", placeholder=example, elem_id=f"{name}_names"
            )
            kinds: dict[str, Any] = {"file_count": "multiple", "file_types": ["image"]}
            with gr.Row():
                add = gr.UploadButton(
                    "add photos", elem_id=f"{name}_files", size="sm", min_width=110, **kinds
                )
                load = gr.UploadButton(
                    "load labels", elem_id=f"{name}_labels", file_count="single",
                    file_types=[".json"], size="sm", min_width=110,
                )  # fmt: skip
            part = gr.Radio([], label="the next click is", elem_id=f"{name}_choice")
            actions = gr.Column()
        with gr.Column(scale=2):
            image = board(name)
            said = gr.Markdown(elem_id=f"{name}_said")
            buttons = _buttons()
    found = sheet(name)
    shown = [session, image, part, said]
    names.change(_on_names, [names, session], shown, **QUIET)
    add.upload(_on_files, [add, session], shown, **QUIET)
    load.upload(_on_labels, [load, session], [names, *shown], **QUIET)
    # Every press counts, also one that comes before the last is answered.
    every = {"trigger_mode": "multiple", **QUIET}
    for button, change in buttons:
        button.click(partial(_on_button, change), session, shown, **every)
    image.put(_on_click, [session, part], shown, **every)
    image.move(_on_drag, session, shown, **every)
    found.open(_on_open, session, shown, **QUIET)
    return Desk(session, shown, actions, found)


def _buttons() -> list[tuple[gr.Button, Any]]:
    """Below the photo, each with what it makes of a session."""
    changes = {
        "previous photo": partial(_moved, -1),
        "next photo": partial(_moved, 1),
        "undo": Parts.undone,
        "accept found": Parts.accepted,
        "clear its clicks": lambda session: session.marked(Marks()),
    }
    with gr.Row():
        return [(gr.Button(word, size="sm", min_width=110), c) for word, c in changes.items()]


def part_photo(name: str, path: str, pixels: Tensor) -> PartPhoto:
    """A photo (3, H, W) uint8 as the desk shows it."""
    shown, frame = picture(pixels, longest=SHOWN, enlarged=True)
    packed = io.BytesIO()
    to_pil(shown).save(packed, format="jpeg", quality=88)
    return PartPhoto(name, path, packed.getvalue(), frame)


def _on_names(text: str, session: Parts) -> list[Any]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    return show(replace(session, names=names))


def _on_files(files: list[str], session: Parts) -> list[Any]:
    added: dict[str, PartPhoto] = {}
    here = {photo.name for photo in session.photos}
    for file in files:
        name = Path(file).name
        if name in added or name in here:
            gr.Warning(f"{html.escape(name)} is here already; rename it if it is another photo")
            continue
        if len(here) + len(added) >= MOST_PHOTOS:
            gr.Warning(f"{MOST_PHOTOS} photos are the most here; use the command line for more")
            break
        try:
            added[name] = part_photo(name, file, read_upload(file, name=name))
        except ImageError as error:
            gr.Warning(html.escape(str(error)))  # gradio shows it as HTML
    return show(session.with_photos(list(added.values())))


def _on_labels(file: str, session: Parts) -> list[Any]:
    name = Path(file).name
    try:
        session = with_labels(session, *read_labels(file, name=name))
    except (SourceError, ValueError, OSError) as error:
        # The reader names the file by its place on the server, which is nobody's business.
        gr.Warning(html.escape(str(error).replace(str(file), name)))
    if session.waiting:
        gr.Info(f"labels of {len(session.waiting)} photos wait until these are added")
    return [", ".join(session.names), *show(session)]


def _moved(step: int, session: Parts) -> Parts:
    at = (session.at + step) % max(1, len(session.photos))
    return replace(session, at=at, corner=None)


def _on_button(change: Callable[[Parts], Parts], session: Parts) -> list[Any]:
    return show(change(session) if session.photos else session)


def _on_open(session: Parts, event: gr.EventData) -> list[Any]:
    """A photo of the sheet is shown above, where what was found can be corrected."""
    at = photo_of(event, session)
    return show(session if at is None else replace(session, at=at, corner=None))


def _on_drag(session: Parts, event: gr.EventData) -> list[Any]:
    """A part was dragged to its place, or off the photo."""
    part = part_of(event)
    if not session.photos or part not in session.names:
        return show(session)
    return show(session.with_part(part, place_of(event, session.photos[session.at].frame)))


def _on_click(session: Parts, part: str | None, event: gr.EventData) -> list[Any]:
    if not session.photos:
        gr.Warning("add a photo first")
        return show(session)
    photo = session.photos[session.at]
    point = place_of(event, photo.frame)
    if point is None:
        return show(session)
    if part == BOX:
        session = session.with_corner(point)
        return show(session, part=BOX if session.corner else None)
    if part in session.names:
        return show(session.with_part(part, point))
    taken = _taken(session, photo, point)
    if taken is None:
        gr.Warning(
            "all parts have their place: drag one to move it, or go to the next photo"
            if session.names
            else "name the parts first, separated by commas"
        )
    return show(session, part=taken)


def _taken(session: Parts, photo: PartPhoto, point: Point) -> str | None:
    """Nothing is chosen: a click on a part takes it up, the next one puts it down."""
    scale = photo.frame.original[1] / photo.frame.network[1]
    return session.nearest(point, within=_REACH * scale)


def show(session: Parts, *, part: str | None = None) -> list[Any]:
    """Everything the desk shows of a session; the next click places the first missing part."""
    missing = session.missing()
    marks = session.photos[session.at].marks if session.photos else Marks()
    signs = [_sign(name, marks, missing) for name in session.names]
    choices = [
        (f"{number} {name}{sign}", name)
        for number, (name, sign) in enumerate(zip(session.names, signs, strict=True), 1)
    ]
    choices += [("the box (two corners)", BOX)] if session.photos else []
    chosen = part or (missing[0] if missing else None)
    radio = gr.Radio(choices=choices, value=chosen)
    return [session, board_value(session), radio, _line(session, part)]


def _sign(name: str, marks: Marks, missing: Sequence[str]) -> str:
    """Behind a part's name: clicked, said not to be seen, found, or nothing yet."""
    if name in marks.places:
        return " ✓"
    return " ✗" if name in marks.absent else "" if name in missing else " ?"


def _line(session: Parts, part: str | None) -> str:
    """Below the photo: which it is, what its marks mean, what the next click does."""
    if not session.photos:
        return ""
    photo, count = session.photos[session.at], sum(bool(p.marks.places) for p in session.photos)
    where = f"photo {session.at + 1} of {len(session.photos)}, {html.escape(photo.name)}"
    said = f"{where} · photos labelled by hand: {count}"
    if photo.parts().keys() - photo.marks.places.keys():
        said += " · white discs were found: drag what is wrong, or off the photo what is not seen"
    if session.corner:
        said += " · now click the opposite corner"
    elif part in session.names:
        said += f" · now click where {html.escape(str(part))} belongs"
    return said

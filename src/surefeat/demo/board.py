"""Photos with parts on the page: one to put them down by clicks and drag them, and a sheet of many.

The browser (board.js, sheet.js) sends shares of the photo's sides, between its outer edges; here
they become places in the photo's own pixels. Nothing is asked of the network: photos travel in the
page.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import gradio as gr
from PIL import Image

from surefeat.core.geometry import Frame
from surefeat.demo.labels import PartPhoto, Parts, Point
from surefeat.demo.pictures import COLOURS

_BOARD = (
    '<div class="stage" hidden><img alt="" draggable="false"><div class="marks"></div>'
    '<div class="loupe" hidden></div></div>'
)

_SHEET = '<div class="tiles"></div>'

_THUMB = 320
"""Longest side of a photo on the sheet, pixels."""


def board(desk: str) -> gr.HTML:
    """A desk's photo, empty; its events are `put`, a click, and `move`, a part that was dragged."""
    return _component("board", _BOARD, f"{desk}_photo")


def sheet(desk: str) -> gr.HTML:
    """Many photos of a desk, empty; its event is `open`, a click on one."""
    return _component("sheet", _SHEET, f"{desk}_found")


def _component(kind: str, template: str, name: str) -> gr.HTML:
    room = files("surefeat.demo")
    style, script = (room.joinpath(f"{kind}.{end}").read_text("utf-8") for end in ("css", "js"))
    # No value stands in the template: gradio would run what a part's name holds.
    return gr.HTML(
        html_template=template, css_template=style, js_on_load=script, apply_default_css=False,
        elem_id=name,
    )  # fmt: skip


def sheet_value(session: Parts, listed: Sequence[int], notes: Sequence[str]) -> dict[str, Any]:
    """What the sheet shows: these photos of a session, a line below each."""
    tiles = []
    for at, note in zip(listed, notes, strict=True):
        photo = session.photos[at]
        small = Image.open(io.BytesIO(photo.jpeg))
        small.thumbnail((_THUMB, _THUMB))
        packed = io.BytesIO()
        small.save(packed, format="jpeg", quality=80)
        tiles.append({
            "at": at, "name": photo.name, "photo": _address(packed.getvalue()), "note": note,
            "width": small.width, "height": small.height,
            "marks": _marks(photo, session.names, probable=session.probable),
        })  # fmt: skip
    return {"desk": session.desk, "tiles": tiles}


def _address(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"


def board_value(session: Parts) -> dict[str, Any] | None:
    """What the board shows of a session: its photo, every part's mark, the box."""
    if not session.photos:
        return None
    photo = session.photos[session.at]
    height, width = photo.frame.network
    box = photo.marks.box or photo.found_box
    return {
        "desk": session.desk,
        "photo": _address(photo.jpeg),
        "name": photo.name,
        "width": width,
        "height": height,
        "marks": _marks(photo, session.names, probable=session.probable),
        "checked": bool(photo.marks.places or photo.marks.absent),
        "box": box and [*_share(box[:2], photo.frame), *_share(box[2:], photo.frame)],
        "boxFound": photo.marks.box is None,
        "corner": session.corner and _share(session.corner, photo.frame),
    }


def _marks(photo: PartPhoto, names: Sequence[str], *, probable: bool) -> list[dict[str, Any]]:
    placed = photo.parts()
    return [_mark(photo, number, name, probable) for number, name in enumerate(names)
            if name in placed]  # fmt: skip


def _mark(photo: PartPhoto, number: int, name: str, probable: bool) -> dict[str, Any]:
    found = name not in photo.marks.places
    x, y = _share(photo.parts()[name], photo.frame)
    sure = ""
    if found and name in photo.scores:
        sure = f", {how_sure(photo.scores[name], probable=probable)}"
    return {
        "part": name, "text": str(number + 1), "says": f"{number + 1} {name}{sure}",
        "x": x, "y": y, "found": found, "colour": COLOURS[number % len(COLOURS)],
    }  # fmt: skip


def how_sure(score: float, *, probable: bool) -> str:
    """A score in words."""
    return f"right with {100 * score:.0f} %" if probable else f"score {score:.2f}"


def _share(point: tuple[float, ...], frame: Frame) -> list[float]:
    """Original pixels -> shares of width and height, between the photo's outer edges."""
    (x, y), (height, width) = point, frame.original
    return [round((x + 0.5) / width, 5), round((y + 0.5) / height, 5)]


def place_of(event: object, frame: Frame) -> Point | None:
    """Where an event of the component was, original pixels inside the photo; None: nowhere in it.

    A request can be written by hand, so anything may stand in it.
    """
    shares = _data(event).get("place")
    if not isinstance(shares, list) or len(shares) != 2:
        return None
    if not all(isinstance(share, (int, float)) and math.isfinite(share) for share in shares):
        return None
    height, width = frame.original
    x, y = (
        min(max(share * side - 0.5, 0.0), side - 1.0)
        for share, side in zip(shares, (width, height), strict=True)
    )
    return x, y


def part_of(event: object) -> str | None:
    """The part that was dragged."""
    part = _data(event).get("part")
    return part if isinstance(part, str) else None


def photo_of(event: object, session: Parts) -> int | None:
    """The photo of the sheet that was clicked."""
    at = _data(event).get("at")
    return at if isinstance(at, int) and 0 <= at < len(session.photos) else None


def _data(event: object) -> dict[str, Any]:
    data = getattr(event, "_data", None)
    return data if isinstance(data, dict) else {}

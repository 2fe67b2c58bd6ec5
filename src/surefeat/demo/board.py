"""A photo on the page whose parts are put down by a click and moved by dragging (board.js).

The browser sends shares of the photo's sides, between its outer edges; here they become places in
the photo's own pixels. It asks nothing of the network: the photo travels in the page.
"""

from __future__ import annotations

import base64
import math
from importlib.resources import files
from typing import Any

from surefeat.core.geometry import Frame
from surefeat.demo.labels import PartPhoto, Parts, Point
from surefeat.demo.pictures import COLOURS

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the web page needs gradio: pip install 'surefeat[demo]'") from error

_FRAME = (
    '<div class="stage" hidden><img alt="" draggable="false"><div class="marks"></div>'
    '<div class="loupe" hidden></div></div>'
)


def board(name: str) -> gr.HTML:
    """The empty component; its events are `put`, a click, and `move`, a part that was dragged."""
    style, script = (
        files("surefeat.demo").joinpath(file).read_text("utf-8")
        for file in ("board.css", "board.js")
    )
    # No value stands in the template: gradio would run what a part's name holds.
    return gr.HTML(
        html_template=_FRAME, css_template=style, js_on_load=script, apply_default_css=False,
        elem_id=name,
    )  # fmt: skip


def board_value(session: Parts) -> dict[str, Any] | None:
    """What the component shows of a session: its photo, every part's mark, the box."""
    if not session.photos:
        return None
    photo = session.photos[session.at]
    height, width = photo.frame.network
    box = None if photo.marks.box is None else photo.marks.box
    return {
        "photo": f"data:image/jpeg;base64,{base64.b64encode(photo.jpeg).decode()}",
        "name": photo.name,
        "width": width,
        "height": height,
        "marks": [_mark(photo, session.names, name) for name in session.names
                  if name in photo.parts()],
        "box": box and [*_share(box[:2], photo.frame), *_share(box[2:], photo.frame)],
        "corner": session.corner and _share(session.corner, photo.frame),
    }  # fmt: skip


def _mark(photo: PartPhoto, names: tuple[str, ...], name: str) -> dict[str, Any]:
    number, found = names.index(name), name not in photo.marks.places
    x, y = _share(photo.parts()[name], photo.frame)
    sure = f", right with {photo.scores[name]:.0%}" if found and name in photo.scores else ""
    return {
        "part": name, "text": str(number + 1), "says": f"{number + 1} {name}{sure}",
        "x": x, "y": y, "found": found, "colour": COLOURS[number % len(COLOURS)],
    }  # fmt: skip


def _share(point: tuple[float, ...], frame: Frame) -> list[float]:
    """Original pixels -> shares of width and height, between the photo's outer edges."""
    (x, y), (height, width) = point, frame.original
    return [round((x + 0.5) / width, 5), round((y + 0.5) / height, 5)]


def place_of(event: object, frame: Frame) -> Point | None:
    """Where an event of the component was, original pixels inside the photo; None: nowhere in it.

    A request can be written by hand, so anything may stand in it.
    """
    shares = getattr(event, "_data", None)
    shares = shares.get("place") if isinstance(shares, dict) else None
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
    data = getattr(event, "_data", None)
    part = data.get("part") if isinstance(data, dict) else None
    return part if isinstance(part, str) else None

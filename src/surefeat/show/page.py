"""Self-contained HTML pages: sections of text, numbers, tables and figures.

A page has no script (a page of matches has its own, match_page.py), asks no network, holds its
pictures and escapes all text.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from surefeat.core.files import write_text
from surefeat.show import style

try:
    from jinja2 import Environment, PackageLoader
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("needs jinja2 and matplotlib: pip install 'surefeat[viz]'") from error

# Pictures are stored at twice the size of the page's pixels; larger files as JPEG.
_DPI, _LARGEST_PNG = 192, 300_000


@dataclass(frozen=True)
class Number:
    """A number to read first, with one sentence on what it means."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """A part of a page; empty parts are left out."""

    title: str
    text: str = ""
    """Plain text; a blank line starts a paragraph."""
    figures: tuple[Figure, ...] = ()
    """Each with its label as the caption."""
    table: Sequence[Sequence[object]] | None = None
    """Rows, the first of them the heading."""
    numbers: tuple[Number, ...] = ()
    folded: bool = False
    """Only its title is seen until it is opened, in the part of the page that it follows."""


def write_page(
    path: str | Path,
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    foot: str = "",
    viewer: object = None,
) -> Path:
    """Write one HTML file that needs nothing else: `lead` under the title, `foot` at the end.

    viewer: what match.html.j2 shows above the sections; without it the page is report.html.j2.
    """
    pages = Environment(loader=PackageLoader("surefeat.show"), autoescape=True, trim_blocks=True,
                        lstrip_blocks=True)  # fmt: skip
    pages.filters["inline"] = _inline
    page = pages.get_template("report.html.j2" if viewer is None else "match.html.j2")
    html = page.render(title=title, sections=sections, lead=lead, foot=foot, viewer=viewer)
    # A name that is no valid Unicode on disk must not keep the page from being written.
    write_text(Path(path), html.encode("utf-8", "replace").decode())
    return Path(path)


def _inline(figure: Figure) -> dict[str, Any]:
    """A figure as an `img` wants it: data address, size in CSS pixels, caption."""
    buffer, kind = style.drawn(figure, dpi=_DPI), "png"
    if buffer.tell() > _LARGEST_PNG:
        drawn = Image.open(buffer).convert("RGB")
        buffer, kind = BytesIO(), "jpeg"
        drawn.save(buffer, format="jpeg", quality=88, optimize=True)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    address = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"src": address, "width": width, "height": height, "caption": str(figure.get_label())}

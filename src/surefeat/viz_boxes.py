"""A contact sheet of weakly supervised boxes: what was kept and what was dropped, with scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from surefeat.data.labels import Labelled
from surefeat.detect_proposals import item_bytes
from surefeat.detect_select import Candidate, Selection
from surefeat.image import ImageLike, decode
from surefeat.viz_style import GREY, PALETTE, STYLE, new_figure, picture, show, small_title

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

_COLUMNS = 6
_KEPT, _DROPPED = PALETTE[2], PALETTE[1]


@rc_context(STYLE)
def contact_sheet(
    selection: Selection, images: Mapping[str, ImageLike], *, count: int = 36
) -> Figure:
    """At most `count` candidates, kept ones first in green, then dropped ones in orange.

    images: by name; candidates without one are left out. Both halves are spread evenly over their
    scores, best first.
    """
    shown = [each for each in chosen(selection, count) if each.name in images]
    kept = selection.kept()
    dropped = len(selection.candidates) - len(kept)
    if not shown:
        raise ValueError("there is no box to draw; pass the images the selection was made from")
    rows = math.ceil(len(shown) / _COLUMNS)
    label = (
        f"{len(kept)} boxes kept (green) and {dropped} dropped (orange), evenly drawn from each, "
        "best score first."
    )
    figure = new_figure(1.75 * rows + 0.4, label)
    # The file is looked at by itself, where nobody prints the label.
    figure.suptitle(label, x=0.005, ha="left", fontsize=9)
    grid = figure.subplots(rows, _COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, each in zip(grid.flat, shown, strict=False):
        _tile(axes, each, images[each.name])
    return figure


def chosen(selection: Selection, count: int) -> list[Candidate]:
    """The candidates on a sheet of `count`: half of them dropped ones, where there are as many."""
    kept = list(selection.kept())
    dropped = [each for each in selection.candidates if each.verdict != "kept"]
    room = min(len(kept), max(count // 2, count - len(dropped)))
    return [*spread_over(kept, room), *spread_over(dropped, count - room)]


def images_for(
    selection: Selection, images: Sequence[Labelled], *, count: int = 36
) -> dict[str, ImageLike]:
    """The pictures that a sheet of `count` needs, by name."""
    wanted = {each.name for each in chosen(selection, count)}
    found = {image.name: image.item for image in images if image.name in wanted}
    return {name: decode(item_bytes(item), name=item.name) for name, item in found.items()}


def spread_over(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """`count` of them, or all, evenly spaced by falling score."""
    ranked = sorted(candidates, key=lambda each: -each.score)
    count = min(count, len(ranked))
    return [ranked[place * len(ranked) // count] for place in range(count)]


def _tile(axes: Axes, each: Candidate, image: ImageLike) -> None:
    show(axes, *picture(image))
    axes.set_anchor("N")
    x1, y1, x2, y2 = each.box
    colour = _KEPT if each.verdict == "kept" else _DROPPED
    for width, tint in ((3.2, "white"), (1.8, colour)):
        axes.add_patch(
            Rectangle(
                (x1 - 0.5, y1 - 0.5), x2 - x1 + 1, y2 - y1 + 1, fill=False, edgecolor=tint,
                linewidth=width,
            )
        )  # fmt: skip
    small_title(axes, f"{each.category} {each.score:.3f}")
    if each.verdict != "kept":
        axes.text(
            0.5, -0.03, each.verdict, transform=axes.transAxes, ha="center", va="top",
            fontsize=7, color=GREY,
        )  # fmt: skip

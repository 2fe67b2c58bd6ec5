"""Figures of objects with their keypoints, drawn in original pixels.

A contact sheet of weakly supervised boxes: what was kept and what was dropped, with scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from surefeat.boxes.select import Candidate, Selection
from surefeat.core.image import ImageLike, decode
from surefeat.data.keypoints import Category, Labelled
from surefeat.data.labels import PhotoLabels
from surefeat.match.proposals import item_bytes
from surefeat.show.style import (
    GREY,
    INK,
    PALETTE,
    STYLE,
    WIDTH,
    new_figure,
    picture,
    show,
    small_title,
)

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

# Inches that the names take beside the photo, and that the tallest photo has.
_NAMES, _TALLEST = 2.2, 5.5

# Discs, points across: of a single object, and of several, which are smaller.
_LARGE, _SMALL = 13.0, 9.0


@rc_context(STYLE)
def keypoints(
    image: ImageLike, objects: Sequence[Labelled], categories: Sequence[Category]
) -> Figure:
    """The objects of one photo: boxes, and a numbered disc per visible keypoint.

    The legend says which number is which keypoint, and of a single object its score; discs are
    paler where a detector is less sure.
    """
    pixels, frame = picture(image)
    shape = frame.original[1] / frame.original[0]
    height = min(WIDTH / shape, _TALLEST)
    figure = new_figure(
        height, "Keypoints; paler discs are less sure.", width=height * shape + _NAMES
    )
    axes: Axes = figure.subplots()
    show(axes, pixels, frame)
    axes.set_axis_off()
    across = _LARGE if len(objects) == 1 else _SMALL
    for item in objects:
        _draw(axes, item, across)
    several = len({item.category for item in objects}) > 1
    handles = [
        Line2D(
            [], [], linestyle="", marker="o", markersize=across, color=_colour(k),
            label=_name(objects, k, f"{categories[number].name} {name}" if several else name),
        )
        for number in sorted({item.category for item in objects})
        for k, name in enumerate(categories[number].keypoints)
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside right center", labelspacing=0.7)
    return figure


def _draw(axes: Axes, item: Labelled, across: float) -> None:
    x1, y1, x2, y2 = item.box.tolist()
    if (x1, y1, x2, y2) != (0, 0, item.size[1] - 1, item.size[0] - 1):
        box = Rectangle((x1 - 0.5, y1 - 0.5), x2 - x1 + 1, y2 - y1 + 1, fill=False, color="white")
        axes.add_patch(box)
    for k, (x, y) in enumerate(item.points.tolist()):
        if bool(item.visible[k]):
            sure = 1.0 if item.scores is None else min(1.0, float(item.scores[k]))
            axes.scatter(
                [x], [y], s=across**2, color=_colour(k), edgecolors="white", linewidths=1.0,
                alpha=0.4 + 0.6 * sure, zorder=3,
            )  # fmt: skip
            axes.text(
                x, y, str(k + 1), color=_ink(_colour(k)), fontsize=0.62 * across, zorder=4,
                fontweight="bold", ha="center", va="center_baseline",
            )  # fmt: skip


def _name(objects: Sequence[Labelled], k: int, name: str) -> str:
    if len(objects) != 1 or objects[0].scores is None:
        return f"{k + 1}  {name}"
    return f"{k + 1}  {name}  {float(objects[0].scores[k]):.2f}"


def _colour(k: int) -> str:
    return PALETTE[k % len(PALETTE)]


def _ink(colour: str) -> str:
    """Of a number on a disc of this colour."""
    red, green, blue = to_rgb(colour)
    return INK if 0.3 * red + 0.6 * green + 0.1 * blue > 0.55 else "white"


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
    selection: Selection, images: Sequence[PhotoLabels], *, count: int = 36
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

"""Figures of objects with their keypoints, drawn in original pixels."""

from __future__ import annotations

from collections.abc import Sequence

from surefeat.data.keypoints import Category, Labelled
from surefeat.image import ImageLike
from surefeat.viz_style import INK, PALETTE, STYLE, WIDTH, new_figure, picture, show

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
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

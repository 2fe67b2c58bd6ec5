"""Figures of objects with their keypoints, drawn in original pixels."""

from __future__ import annotations

from collections.abc import Sequence

from surefeat.data.keypoints import Category, Labelled
from surefeat.image import ImageLike
from surefeat.viz_style import PALETTE, STYLE, WIDTH, new_figure, picture, show

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

# Share of the figure that the names take, and the rows they fit in.
_NAMES, _MARKS = 2.2, "os^Dv*"


@rc_context(STYLE)
def keypoints(
    image: ImageLike, objects: Sequence[Labelled], categories: Sequence[Category]
) -> Figure:
    """The objects of one photo: boxes, and a mark per visible keypoint, paler where less sure.

    The legend gives the names, and of a single object the scores.
    """
    pixels, frame = picture(image)
    shape = frame.original[1] / frame.original[0]
    height = min(WIDTH / shape, 5.5)
    figure = new_figure(
        height, "Keypoints; paler marks are less sure.", width=height * shape + _NAMES
    )
    axes: Axes = figure.subplots()
    show(axes, pixels, frame)
    axes.set_axis_off()
    for item in objects:
        _draw(axes, item)
    handles = [
        Line2D(
            [], [], linestyle="", marker=_mark(k), color=_colour(k), label=_name(objects, k, name)
        )
        for number in sorted({item.category for item in objects})
        for k, name in enumerate(categories[number].keypoints)
    ]
    figure.legend(handles=handles, loc="outside right center")
    return figure


def _draw(axes: Axes, item: Labelled) -> None:
    x1, y1, x2, y2 = item.box.tolist()
    whole = (0, 0, item.size[1] - 1, item.size[0] - 1)
    if (x1, y1, x2, y2) != whole:
        box = Rectangle((x1 - 0.5, y1 - 0.5), x2 - x1 + 1, y2 - y1 + 1, fill=False, color="white")
        axes.add_patch(box)
    for k, (x, y) in enumerate(item.points.tolist()):
        if bool(item.visible[k]):
            sure = 1.0 if item.scores is None else float(item.scores[k])
            axes.scatter(
                [x], [y], marker=_mark(k), color=_colour(k), s=70, edgecolors="white",
                linewidths=1.2, alpha=0.25 + 0.75 * min(1.0, sure), zorder=3,
            )  # fmt: skip


def _name(objects: Sequence[Labelled], k: int, name: str) -> str:
    if len(objects) != 1 or objects[0].scores is None:
        return name
    return f"{name}  {float(objects[0].scores[k]):.2f}"


def _colour(k: int) -> str:
    return PALETTE[k % len(PALETTE)]


def _mark(k: int) -> str:
    return _MARKS[k // len(PALETTE) % len(_MARKS)]

"""Figures of matches between two photos, drawn in original pixels."""

from __future__ import annotations

from math import dist
from typing import Any

from torch import Tensor

from surefeat.core.geometry import Frame, box_iou
from surefeat.core.image import ImageLike, load
from surefeat.match.dense import DenseMatches, warp_image
from surefeat.match.points import Matches
from surefeat.match.regions import RegionMatches
from surefeat.show.style import (
    MAP,
    PALETTE,
    STYLE,
    WIDTH,
    colour_bar,
    colour_of,
    hide_frames,
    new_figure,
    outline,
    picture,
    show,
    small_title,
)

try:
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import ConnectionPatch
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

_WRONG, _RIGHT = PALETTE[1:3]


def _side_by_side(
    image0: ImageLike, image1: ImageLike, label: str, *, beside: float
) -> tuple[Figure, list[Axes]]:
    """Two photos at one height, without frames, that leave this many inches beside them free."""
    pictures = [picture(image) for image in (image0, image1)]
    widths = [frame.original[1] / frame.original[0] for _, frame in pictures]
    figure = new_figure(min((WIDTH - beside) / sum(widths), 7.5) + 0.3, label)
    axes = list(figure.subplots(1, 2, width_ratios=widths))
    for axis, (pixels, frame), name in zip(axes, pictures, "AB", strict=True):
        show(axis, pixels, frame)
        small_title(axis, name)
    hide_frames(axes)
    return figure, axes


def _span(values: Tensor) -> Normalize:
    """From the lowest to the highest value, never empty."""
    low, high = float(values.min()), float(values.max())
    return Normalize(low, max(high, low + 1e-6))


@rc_context(STYLE)
def match_lines(
    image0: ImageLike,
    image1: ImageLike,
    matches: Matches,
    *,
    right: Tensor | None = None,
    label: str = "Matched points.",
) -> Figure:
    """Lines from points of image 0 to their matches; coloured by probability, or else by score.

    right: (N,) bool, where the truth is known: green and orange lines instead.
    """
    figure, (axis0, axis1) = _side_by_side(
        image0, image1, label, beside=0.8 if right is None else 0.0
    )
    if not len(matches):
        figure.suptitle("no matches")
        return figure
    values, norm = matches.score, _span(matches.score)
    if matches.probability is not None:
        values, norm = matches.probability, Normalize(0, 1)
    colours: list[Any] = [colormaps[MAP](norm(float(value))) for value in values]
    if right is not None:
        colours = [_RIGHT if bool(ok) else _WRONG for ok in right]
    points0, points1 = matches.points0.cpu().tolist(), matches.points1.cpu().tolist()
    for start, end, colour in zip(points0, points1, colours, strict=True):
        line = ConnectionPatch(
            start, end, "data", "data", axesA=axis0, axesB=axis1, color=colour, linewidth=1.1,
            alpha=0.85,
        )  # fmt: skip
        figure.add_artist(line)
    for axis, places in ((axis0, points0), (axis1, points1)):
        xs, ys = zip(*places, strict=True)
        axis.scatter(xs, ys, c=colours, s=22, edgecolors="white", linewidths=0.8, zorder=3)
    if right is None:
        what = "score" if matches.probability is None else "probability of being right"
        colour_bar(figure, [axis0, axis1], norm, MAP, what)
    return figure


@rc_context(STYLE)
def region_matches(
    image0: ImageLike,
    image1: ImageLike,
    matches: RegionMatches,
    *,
    top: int = 8,
    overlap: float = 0.3,
) -> Figure:
    """The best-scored region matches: a number and a colour for the two boxes of each.

    overlap: a match is left out where one of its boxes has a larger IoU than this with that of a
    better match, as the best of a thousand regions are mostly one region; 1 leaves none out.
    """
    chosen = _apart(matches, top, overlap=overlap)
    figure, axes = _side_by_side(
        image0, image1, "Region matches, numbered from the best; a number and its colour mark one "
        f"match. None has a box of a larger IoU than {overlap:g} with a better one's.", beside=1.0,
    )  # fmt: skip
    if not chosen:
        figure.suptitle("no matches")
        return figure
    for axis, boxes in zip(axes, (matches.boxes0, matches.boxes1), strict=True):
        _numbered_boxes(axis, boxes[chosen].tolist())
    marks = [
        Line2D([], [], color=colour_of(place), linewidth=4, solid_capstyle="butt",
               label=f"{place + 1}   {float(matches.score[row]):.2f}")
        for place, row in enumerate(chosen)
    ]  # fmt: skip
    figure.legend(
        handles=marks, title="score", loc="outside right upper", handlelength=1.2, labelspacing=0.7,
        alignment="left",
    )  # fmt: skip
    return figure


def _apart(matches: RegionMatches, top: int, *, overlap: float) -> list[int]:
    """Rows of the best matches whose boxes repeat no better one's, best first."""
    boxes0, boxes1 = matches.boxes0.cpu(), matches.boxes1.cpu()
    chosen: list[int] = []
    for row in matches.score.argsort(descending=True).tolist():
        if len(chosen) == top:
            break
        shared = (box_iou(boxes[[row]], boxes[chosen]) for boxes in (boxes0, boxes1))
        if not any(bool((iou > overlap).any()) for iou in shared):
            chosen.append(row)
    return chosen


def _numbered_boxes(axis: Axes, boxes: list[list[float]]) -> None:
    """Inclusive boxes, the first on top, each with its number on a corner."""
    corners = _free_corners(boxes, width=axis.get_xlim()[1], height=axis.get_ylim()[0])
    for place, box in reversed(list(enumerate(boxes))):
        outline(axis, box, colour_of(place))
    for place, corner in enumerate(corners):
        axis.text(
            *corner, str(place + 1), ha="center", va="center", fontsize=8.5,
            fontweight="bold", zorder=3,
            bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white", "linewidth": 1.6,
                  "edgecolor": colour_of(place)},
        )  # fmt: skip


def _free_corners(
    boxes: list[list[float]], *, width: float, height: float
) -> list[tuple[float, float]]:
    """A corner of each box, inside the photo; away from those of the boxes before, if one is."""
    margin = 0.03 * max(width, height)
    taken: list[tuple[float, float]] = []
    for x1, y1, x2, y2 in boxes:
        corners = [
            (min(max(x, margin), width - margin), min(max(y, margin), height - margin))
            for x, y in ((x1, y1), (x2, y1), (x2, y2), (x1, y2))
        ]
        free = [place for place in corners if all(dist(place, old) > 2 * margin for old in taken)]
        taken.append((free or corners)[0])
    return taken


@rc_context(STYLE)
def warped(image0: ImageLike, image1: ImageLike, back: DenseMatches) -> Figure:
    """Photo A warped onto photo B, beside both; `back` = match_dense(features1, features0)."""
    first, second = load(image0).cpu(), load(image1).cpu()
    moved = warp_image(first, back.points1.cpu())
    half = (second.float() * 0.5 + moved.float() * 0.5).to(second.dtype)
    height, width = second.shape[1:]
    figure = new_figure(
        WIDTH / 3 * height / width + 0.4,
        "Photo B; the pixels of photo A moved to where B has their match; and both blended.",
    )
    axes, frame = figure.subplots(1, 3), Frame((height, width), (height, width))
    titles = {"B": second, "A warped onto B": moved, "both": half}
    for axis, (name, pixels) in zip(axes, titles.items(), strict=True):
        show(axis, pixels, frame)
        small_title(axis, name)
    hide_frames(axes)
    return figure

"""Figures of objects: a photo's keypoints, and contact sheets of keypoints and of boxes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import PurePath

from torch import Tensor

from surefeat.boxes.select import Candidate, Selection
from surefeat.core.image import ImageLike
from surefeat.data.coco import Category
from surefeat.data.keypoints import Labelled
from surefeat.show import style

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

# Inches that the names take beside the photo, and that the tallest photo has.
_NAMES, _TALLEST = 2.2, 5.5

# Discs, points across: of a single object, of several, and of many on a sheet.
_LARGE, _SMALL, _TINY = 13.0, 9.0, 7.5

# Letters in a line above a contact sheet, and in the note under a tile.
_LETTERS, _NOTE = 150, 30

# Tiles in a row of a contact sheet, and the colours of its boxes.
_COLUMNS = 6
_DROPPED, _KEPT = style.PALETTE[1:3]


@rc_context(style.STYLE)
def keypoints(
    image: ImageLike, objects: Sequence[Labelled], categories: Sequence[Category]
) -> Figure:
    """The objects of one photo: boxes, and a numbered disc per visible keypoint.

    The legend says which number is which keypoint, and of a single object its score; discs are
    paler where a detector is less sure.
    """
    pixels, frame = style.picture(image)
    shape = frame.original[1] / frame.original[0]
    height = min(style.WIDTH / shape, _TALLEST)
    figure = style.new_figure(
        height, "Keypoints; paler discs are less sure.", width=height * shape + _NAMES
    )
    axes: Axes = figure.subplots()
    style.show(axes, pixels, frame)
    axes.set_axis_off()
    across = _LARGE if len(objects) == 1 else _SMALL
    for item in objects:
        _mark_object(axes, item, across)
    several = len({item.category for item in objects}) > 1
    handles = [
        Line2D(
            [], [], linestyle="", marker="o", markersize=across, color=style.colour_of(k),
            label=_name(objects, k, f"{categories[number].name} {name}" if several else name),
        )
        for number in sorted({item.category for item in objects})
        for k, name in enumerate(categories[number].keypoints)
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside right center", labelspacing=0.7)
    return figure


def _mark_object(axes: Axes, item: Labelled, across: float) -> None:
    """Its box, unless that is the whole photo, and its visible keypoints."""
    if item.box.tolist() != [0, 0, item.size[1] - 1, item.size[0] - 1]:
        style.outline(axes, item.box.tolist(), style.GREY, width=0.8)
    for ring in item.mask:
        axes.fill(*ring.T.tolist(), facecolor="none", edgecolor=style.PALETTE[2], linewidth=1.0)
    for k, (x, y) in enumerate(item.points.tolist()):
        if bool(item.visible[k]):
            sure = 1.0 if item.scores is None else min(1.0, float(item.scores[k]))
            axes.scatter(
                [x], [y], s=across**2, color=style.colour_of(k), edgecolors="white", linewidths=1.0,
                alpha=0.4 + 0.6 * sure, zorder=3,
            )  # fmt: skip
            axes.text(
                x, y, str(k + 1), color=_ink(style.colour_of(k)), fontsize=0.62 * across, zorder=4,
                fontweight="bold", ha="center", va="center_baseline",
            )  # fmt: skip


def _name(objects: Sequence[Labelled], k: int, name: str) -> str:
    if len(objects) != 1 or objects[0].scores is None:
        return f"{k + 1}  {name}"
    return f"{k + 1}  {name}  {float(objects[0].scores[k]):.2f}"


@rc_context(style.STYLE)
def keypoint_sheet(
    objects: Sequence[Labelled], categories: Sequence[Category], *, count: int = 36,
    asked: Sequence[Tensor] | None = None,
) -> Figure:  # fmt: skip
    """At most `count` objects cut out of their photos, those a detector is least sure of first.

    Under each stands the part it is least sure of, or those that it does not see. asked: of each
    category the parts (K,) bool that could be found at all, where labels were carried over: others
    are not missed, and an object is as doubtful as these are on average.
    """
    shown = sorted(objects, key=lambda item: _least_score(item, asked))[:count]
    names = dict.fromkeys(f"{k + 1} {part}" for kind in sorted({item.category for item in shown})
                          for k, part in enumerate(categories[kind].keypoints))  # fmt: skip
    label = f"{len(shown)} of {len(objects)} objects, the least sure first.  {'   '.join(names)}"
    lines = textwrap.wrap(label, _LETTERS)
    figure, grid = style.sheet(len(shown), _COLUMNS, row=1.95, top=0.2 + 0.16 * len(lines),
                               label=label, shown="\n".join(lines))  # fmt: skip
    for axes, item in zip(grid.flat, shown, strict=False):
        style.show(axes, *style.picture(item.read()))
        _mark_object(axes, item, _TINY)
        _cut_out(axes, item)
        style.small_title(axes, PurePath(item.name).name)
        note = _doubt(item, categories[item.category].keypoints, asked)
        axes.text(0.5, -0.03, note, transform=axes.transAxes, ha="center", va="top", fontsize=7,
                  color=style.GREY)  # fmt: skip
    return figure


@rc_context(style.STYLE)
def photo_sheet(photos: Sequence[ImageLike], notes: Sequence[str], *, label: str) -> Figure:
    """Whole photos in their order, numbered, with a note under each."""
    figure, grid = style.sheet(len(photos), _COLUMNS, row=1.75, top=0.4, label=label)
    for number, (axes, photo) in enumerate(zip(grid.flat, photos, strict=False)):
        style.show(axes, *style.picture(photo))
        name = PurePath(photo).name if isinstance(photo, str | PurePath) else ""
        style.small_title(axes, f"{number + 1}  {name}")
        axes.text(0.5, -0.03, notes[number], transform=axes.transAxes, ha="center", va="top",
                  fontsize=7, color=style.GREY)  # fmt: skip
    return figure


def _least_score(item: Labelled, asked: Sequence[Tensor] | None) -> float:
    if item.scores is None or not len(item.scores):
        return item.box_score or 0.0
    if asked is None:
        return float(item.scores.min())
    return float(item.scores[asked[item.category]].mean())


def _doubt(item: Labelled, names: Sequence[str], asked: Sequence[Tensor] | None) -> str:
    missed = ~item.visible if asked is None else ~item.visible & asked[item.category]
    absent = [name for name, gone in zip(names, missed.tolist(), strict=True) if gone]
    if absent:
        said = f"not seen: {', '.join(absent)}"
        return said if len(said) <= _NOTE else f"{len(absent)} of {len(names)} not seen"
    if item.scores is None or not len(item.scores):
        return ""
    least = int(item.scores.masked_fill(~item.visible, 2.0).argmin())
    return f"{least + 1} {names[least]} {float(item.scores[least]):.2f}"


def _cut_out(axes: Axes, item: Labelled) -> None:
    """Only the object is seen, with a tenth of its size around it, and no mark beyond."""
    x1, y1, x2, y2 = item.box.tolist()
    margin, (height, width) = 0.1 * max(x2 - x1, y2 - y1), item.size
    axes.set_xlim(max(-0.5, x1 - margin), min(width - 0.5, x2 + margin))
    axes.set_ylim(min(height - 0.5, y2 + margin), max(-0.5, y1 - margin))
    for artist in (*axes.texts, *axes.collections):
        artist.set_clip_on(True)


def _ink(colour: str) -> str:
    """Of a number on a disc of this colour."""
    red, green, blue = to_rgb(colour)
    return style.INK if 0.3 * red + 0.6 * green + 0.1 * blue > 0.55 else "white"


@rc_context(style.STYLE)
def contact_sheet(
    selection: Selection, read: Callable[[str], ImageLike], *, count: int = 36
) -> Figure:
    """At most `count` candidates, kept ones first in green, then dropped ones in orange.

    read: the image of a name. Both halves are spread evenly over their scores, best first.
    """
    shown = chosen(selection, count)
    kept = selection.kept()
    dropped = len(selection.candidates) - len(kept)
    label = (
        f"{len(kept)} boxes kept (green) and {dropped} dropped (orange), evenly drawn from each, "
        "best score first."
    )
    figure, grid = style.sheet(len(shown), _COLUMNS, row=1.75, top=0.4, label=label)
    for axes, candidate in zip(grid.flat, shown, strict=False):
        _draw_candidate(axes, candidate, read(candidate.name))
    return figure


def chosen(selection: Selection, count: int) -> list[Candidate]:
    """The candidates on a sheet of `count`: half of them dropped ones, where there are as many."""
    kept = list(selection.kept())
    dropped = [box for box in selection.candidates if box.verdict != "kept"]
    room = min(len(kept), max(count // 2, count - len(dropped)))
    return [*spread_over(kept, room), *spread_over(dropped, count - room)]


def spread_over(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """`count` of them, or all, evenly spaced by falling score."""
    ranked = sorted(candidates, key=lambda box: -box.score)
    count = min(count, len(ranked))
    return [ranked[place * len(ranked) // count] for place in range(count)]


def _draw_candidate(axes: Axes, candidate: Candidate, image: ImageLike) -> None:
    style.show(axes, *style.picture(image))
    kept = candidate.verdict == "kept"
    style.outline(axes, candidate.box, _KEPT if kept else _DROPPED, width=1.8)
    style.small_title(axes, f"{candidate.category} {candidate.score:.3f}")
    if not kept:
        axes.text(
            0.5, -0.03, candidate.verdict, transform=axes.transAxes, ha="center", va="top",
            fontsize=7, color=style.GREY,
        )  # fmt: skip

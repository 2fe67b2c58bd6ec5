"""Figures of `surefeat relate`: a contact sheet of the groups, and the matrix of all pairs."""

from __future__ import annotations

import math
from pathlib import PurePath

from surefeat.match.relations import Relations
from surefeat.show import style

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

_COLUMNS, _MOST_ROWS = 10, 30

_THUMBNAIL = 160

_NAMED = 30
"""Photos whose names stand beside the matrix; of more they would not be readable."""

_LETTERS = 18
"""Of a name below its photo."""


@rc_context(style.STYLE)
def group_sheet(relations: Relations, *, most: int = _COLUMNS) -> Figure:
    """A row of thumbnails for every group, at most `most` each, the largest group first.

    Photos that belong to no other come last, together.
    """
    groups = [group for group in relations.groups if len(group) > 1]
    alone = [number for group in relations.groups if len(group) == 1 for number in group]
    rows = [(f"{len(group)} photos", list(group)) for group in groups]
    rows = rows[: _MOST_ROWS - 1] + ([(f"{len(alone)} alone", alone)] if alone else [])
    label = f"{len(relations.names)} photos in {len(groups)} groups; {len(alone)} belong to none."
    figure, grid = style.sheet(len(rows) * most, most, row=1.2, top=0.4, label=label)
    for line, (title, numbers) in zip(grid, rows, strict=True):
        for axes, number in zip(line, numbers, strict=False):
            pixels, frame = style.picture(relations.names[number], longest=_THUMBNAIL)
            style.show(axes, pixels, frame)
            axes.text(0.5, -0.04, _short(relations.names[number], _LETTERS), ha="center", va="top",
                      fontsize=6, color=style.GREY, transform=axes.transAxes)  # fmt: skip
        style.small_title(line[0], title)
    return figure


@rc_context(style.STYLE)
def relation_matrix(relations: Relations) -> Figure:
    """How probably each two photos are related, photos in the order of their groups."""
    order = [number for group in relations.groups for number in group]
    values = relations.probability[order][:, order]
    side = min(8.0, 3.0 + math.sqrt(len(order)) / 3)
    label = "How probably each two photos show the same kind of thing, group by group."
    figure = style.new_figure(side, label, width=side + 1.0)
    axes: Axes = figure.subplots()
    axes.imshow(values.numpy(), cmap=style.MAP, vmin=0, vmax=1, interpolation="nearest")
    axes.grid(visible=False)
    edge = 0
    for group in relations.groups:
        if len(group) > 1:
            style.outline(axes, (edge, edge, edge + len(group) - 1, edge + len(group) - 1), "white",
                          width=1.2)  # fmt: skip
        edge += len(group)
    if len(order) <= _NAMED:
        names = [_short(relations.names[number], 2 * _LETTERS) for number in order]
        axes.set_yticks(range(len(order)), names, fontsize=7)
        axes.set_xticks([])
    else:
        axes.set_ylabel("photo, in the order of the groups")
    axes.set_xlabel("the same photos")
    style.colour_bar(figure, [axes], Normalize(0, 1), style.MAP, "probability of being related")
    return figure


def _short(path: str, letters: int) -> str:
    """A photo's file name, its beginning left out where it is long."""
    name = "".join(sign if sign.isprintable() else "?" for sign in PurePath(path).name)
    return name if len(name) <= letters else f"…{name[1 - letters :]}"

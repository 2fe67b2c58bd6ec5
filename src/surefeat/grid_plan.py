"""In which order to eliminate the pixels of a grid: geometric nested dissection (George 1973).

The grid is cut in half by a line of pixels, recursively; a cut comes after both its sides. The
order depends on the size alone, so it is planned once. surefeat.grid_solve carries it out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAF = 12
"""Pixels in a part that is eliminated without another cut; 8, 16, 32: same time within 10 %."""


class Plan(NamedTuple):
    """Fronts in the order of elimination, children before parents."""

    pixels: Ints
    """All fronts' rows, one after the other: pixels to eliminate, then the boundary."""
    starts: Ints
    """(K + 1,) where each front's rows begin in `pixels`."""
    pivots: Ints
    """(K,) how many of a front's rows are eliminated."""
    places: Ints
    """Beside `pixels`: the row of the parent's front a boundary pixel is added to."""
    children: Ints
    """(K,) number of fronts added to this one: always the latest on the stack."""
    kept: Ints
    """(K + 1,) eliminated rows times all rows, summed up: where a front's factor begins."""
    gone: Ints
    """(K,) pixels eliminated before each front."""


@lru_cache(maxsize=8)
def plan_grid(height: int, width: int) -> Plan:
    """The order of elimination for a grid of this size."""
    fronts: list[tuple[Ints, Ints, int]] = []
    ids = np.arange(height * width, dtype=np.int64).reshape(height, width)
    _dissect(ids, 0, height, 0, width, fronts)
    rank = np.empty(height * width, dtype=np.int64)
    rank[np.concatenate([own for own, _, _ in fronts])] = np.arange(height * width)
    # Boundaries in the order of elimination: then a child's rows keep their order in its parent.
    rows = [np.concatenate([own, bound[np.argsort(rank[bound])]]) for own, bound, _ in fronts]
    starts = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    pivots = np.array([len(own) for own, _, _ in fronts], dtype=np.int64)
    children = np.array([below for _, _, below in fronts], dtype=np.int64)
    places = np.full(starts[-1], -1, dtype=np.int64)
    place = np.empty(height * width, dtype=np.int64)
    stack: list[int] = []
    for front, row in enumerate(rows):
        place[row] = np.arange(len(row))
        for _ in range(children[front]):
            child = stack.pop()
            boundary = slice(starts[child] + pivots[child], starts[child + 1])
            places[boundary] = place[rows[child][pivots[child] :]]
        stack.append(front)
    kept = np.concatenate([[0], np.cumsum(pivots * np.diff(starts))]).astype(np.int64)
    return Plan(
        np.concatenate(rows), starts, pivots, places, children, kept, np.cumsum(pivots) - pivots
    )


def _dissect(
    ids: Ints, top: int, bottom: int, left: int, right: int, fronts: list[tuple[Ints, Ints, int]]
) -> int:
    """Append the fronts of top:bottom, left:right, the cut last. 0 if there is nothing, else 1."""
    height, width = bottom - top, right - left
    if height <= 0 or width <= 0:
        return 0
    below, own = 0, ids[top:bottom, left:right].ravel()
    if height * width > LEAF and max(height, width) > 2:
        if height >= width:
            cut = (top + bottom) // 2
            below = _dissect(ids, top, cut, left, right, fronts)
            below += _dissect(ids, cut + 1, bottom, left, right, fronts)
            own = ids[cut, left:right]
        else:
            cut = (left + right) // 2
            below = _dissect(ids, top, bottom, left, cut, fronts)
            below += _dissect(ids, top, bottom, cut + 1, right, fronts)
            own = ids[top:bottom, cut]
    sides = [
        ids[top - 1, left:right] if top > 0 else ids[:0, 0],
        ids[bottom, left:right] if bottom < ids.shape[0] else ids[:0, 0],
        ids[top:bottom, left - 1] if left > 0 else ids[:0, 0],
        ids[top:bottom, right] if right < ids.shape[1] else ids[:0, 0],
    ]
    fronts.append((own.astype(np.int64), np.concatenate(sides).astype(np.int64), below))
    return 1


def halves(plan: Plan) -> list[tuple[int, int]]:
    """The runs of fronts below the last one that do not touch each other: none, one or two."""
    last = len(plan.pivots) - 1
    roots: list[int] = []
    for front in range(last):
        del roots[len(roots) - plan.children[front] :]
        roots.append(front)
    return [(low, high + 1) for low, high in zip([0, *(r + 1 for r in roots)], roots, strict=False)]

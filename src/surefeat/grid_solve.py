"""Sparse Cholesky on a pixel grid, compiled: (diag(mask) + Laplacian) u = right-hand side.

A multifrontal factorisation in geometric nested-dissection order (George 1973): the grid is cut in
half by a line of pixels, recursively; each part is eliminated as a small dense front whose rest is
added to the front of the cut above it. Exact, so weights that span ten decades do no harm, and
the order depends on the size alone, so it is planned once. numba is an optional extra; surefeat.flow
has a slower solver in plain torch with the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAF = 8
"""Pixels in a part that is eliminated without another cut; 8 to 24 are equally fast."""
PANEL, BAND, SMALL = 16, 64, 48
"""Rows eliminated at a time, rows per matrix product, and the front below which plain loops win."""


def _compiled(function: Function) -> Function:
    """numba's njit with the function's own type kept; contraction lets it use fused multiply-add.

    Reordered sums ("reassoc") would speed up one loop and make the others half as fast.
    """
    options = {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    compiled: Function = njit(**options)(function)
    return compiled


@dataclass(frozen=True)
class Plan:
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


def solve(mask: Floats, right: Floats, down: Floats, targets: Floats) -> Floats:
    """Solve for u (T, H, W): mask * u + sum over neighbours of weight * (u - neighbour) = target.

    mask (H, W) and targets (T, H, W); right (H, W - 1) and down (H - 1, W) are the weights to the
    next pixel in x and y, all > 0; mask >= 0 and somewhere positive. One factorisation serves all.
    """
    height, width = mask.shape
    plan = plan_grid(height, width)
    east, south = np.zeros((height, width)), np.zeros((height, width))
    east[:, : width - 1], south[: height - 1] = right, down
    diagonal = mask + east + south
    diagonal[:, 1:] += right
    diagonal[1:] += down
    columns = np.ascontiguousarray(targets.reshape(len(targets), -1).T, dtype=np.float64)
    flat = _factor_and_solve(
        plan.pixels, plan.starts, plan.pivots, plan.places, plan.children,
        diagonal.ravel(), east.ravel(), south.ravel(), columns, width,
    )  # fmt: skip
    return flat.T.reshape(targets.shape)


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
    return Plan(np.concatenate(rows), starts, pivots, places, children)


def _dissect(
    ids: Ints, top: int, bottom: int, left: int, right: int, fronts: list[tuple[Ints, Ints, int]]
) -> int:
    """Append the fronts of rows top:bottom, columns left:right, the cut last; 0 if empty, else 1."""
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


@_compiled
def _factor_and_solve(
    pixels: Ints, starts: Ints, pivots: Ints, places: Ints, children: Ints,
    diagonal: Floats, east: Floats, south: Floats, targets: Floats, width: int,
) -> Floats:  # fmt: skip
    fronts, many = pivots.size, targets.shape[1]
    kept = np.zeros(fronts + 1, np.int64)
    for front in range(fronts):
        size = starts[front + 1] - starts[front]
        kept[front + 1] = kept[front] + pivots[front] * (size + many)
    largest = (starts[1:] - starts[:-1]).max()
    factor = np.empty(kept[fronts])
    work = np.empty(largest * (largest + many))
    stack, rests = np.empty(fronts, np.int64), np.empty(_stack_size(starts, pivots, children, many))
    place = np.full(targets.shape[0], -1)
    held, used = 0, 0
    for front in range(fronts):
        size, own = starts[front + 1] - starts[front], pivots[front]
        dense = work[: size * (size + many)].reshape(size, size + many)
        dense[:] = 0.0
        rows = pixels[starts[front] : starts[front + 1]]
        _assemble(dense, rows, own, place, diagonal, east, south, targets, width)
        for _ in range(children[front]):
            held -= 1
            first, last = starts[stack[held]] + pivots[stack[held]], starts[stack[held] + 1]
            used -= (last - first) * (last - first + many)
            _add_rest(dense, size, places[first:last], rests[used:], many)
        _eliminate(dense, own, size + many)
        block = factor[kept[front] : kept[front + 1]].reshape(own, size + many)
        for i in range(own):
            block[i, i:] = dense[i, i : size + many]
        rest = rests[used : used + (size - own) * (size - own + many)]
        rest = rest.reshape(size - own, size - own + many)
        for i in range(size - own):
            rest[i, i:] = dense[own + i, own + i : size + many]
        stack[held] = front
        held, used = held + 1, used + rest.size
    return _substitute(factor, kept, pixels, starts, pivots, targets)


@_compiled
def _stack_size(starts: Ints, pivots: Ints, children: Ints, many: int) -> int:
    """The most numbers that wait on the stack of rests at one time."""
    stack = np.empty(pivots.size, np.int64)
    held, used, most = 0, 0, 0
    for front in range(pivots.size):
        for _ in range(children[front]):
            held -= 1
            used -= stack[held]
        rest = starts[front + 1] - starts[front] - pivots[front]
        stack[held] = rest * (rest + many)
        used += stack[held]
        held, most = held + 1, max(most, used)
    return most


@_compiled
def _assemble(
    dense: Floats, rows: Ints, own: int, place: Ints, diagonal: Floats, east: Floats,
    south: Floats, targets: Floats, width: int,
) -> None:  # fmt: skip
    """Add the matrix's entries that touch a pixel eliminated here; upper triangle, then targets.

    place (H*W,) is the row of a pixel in this front; -1 for one that is gone and accounted for.
    """
    size = rows.size
    for i in range(size):
        place[rows[i]] = i
    for i in range(own):
        p = rows[i]
        dense[i, i] += diagonal[p]
        for t in range(targets.shape[1]):
            dense[i, size + t] += targets[p, t]
        # A weight of 0 stands for no neighbour: `place` is then another row's pixel, and not used.
        for low, high, weight in (
            (p, p + 1, east[p]),
            (p - 1, p, east[p - 1] if p > 0 else 0.0),
            (p, p + width, south[p]),
            (p - width, p, south[p - width] if p >= width else 0.0),
        ):
            if weight > 0:
                j = place[high] if low == p else place[low]
                if j > i:
                    dense[i, j] -= weight
    for i in range(own):
        place[rows[i]] = -1


@_compiled
def _add_rest(dense: Floats, size: int, places: Ints, rests: Floats, many: int) -> None:
    """Add what a child left, (n, n + many) at the start of `rests`; places rise, by plan_grid."""
    count = places.size
    for i in range(count):
        row, rest = dense[places[i]], rests[i * (count + many) : (i + 1) * (count + many)]
        for j in range(i, count):
            row[places[j]] += rest[j]
        for t in range(many):
            row[size + t] += rest[count + t]


@_compiled
def _eliminate(dense: Floats, own: int, length: int) -> None:
    """Remove the first `own` rows: L D L^T on the upper triangle; targets are its last columns."""
    for first in range(0, own, PANEL):
        last = min(own, first + PANEL)
        for a in range(first, last):
            for b in range(a + 1, last):
                share = dense[a, b] / dense[a, a]
                for j in range(b, length):
                    dense[b, j] -= share * dense[a, j]
        if length - first > SMALL:
            _subtract_by_blas(dense, first, last, length)
        else:
            _subtract_by_rows(dense, first, last, length)


@_compiled
def _subtract_by_rows(dense: Floats, first: int, last: int, length: int) -> None:
    """Rows last: of the front lose what rows first:last explain; two at a time saves passes."""
    size = dense.shape[0]
    for k in range(first, last - 1, 2):
        for i in range(last, size):
            row, r0, r1 = dense[i, i:length], dense[k, i:length], dense[k + 1, i:length]
            c0, c1 = r0[0] / dense[k, k], r1[0] / dense[k + 1, k + 1]
            for j in range(row.size):
                row[j] -= c0 * r0[j] + c1 * r1[j]
    if (last - first) % 2:
        k = last - 1
        for i in range(last, size):
            share = dense[k, i] / dense[k, k]
            for j in range(i, length):
                dense[i, j] -= share * dense[k, j]


@_compiled
def _subtract_by_blas(dense: Floats, first: int, last: int, length: int) -> None:
    """The same as matrix products, one for each band of rows, so that half of them is saved."""
    rest = dense.shape[0] - last
    scaled = np.empty((rest, last - first))
    for k in range(last - first):
        inverse = 1 / dense[first + k, first + k]
        for i in range(rest):
            scaled[i, k] = dense[first + k, last + i] * inverse
    for top in range(0, rest, BAND):
        bottom = min(rest, top + BAND)
        panel = dense[first:last, last + top : length].copy()
        explained = np.dot(scaled[top:bottom], panel)
        for i in range(top, bottom):
            row, part = dense[last + i, last + i : length], explained[i - top, i - top :]
            for j in range(row.size):
                row[j] -= part[j]


@_compiled
def _dot(first: Floats, second: Floats) -> float:
    """Four sums side by side: one alone waits for every addition to finish."""
    a = b = c = d = 0.0
    whole = first.size - first.size % 4
    for j in range(0, whole, 4):
        a += first[j] * second[j]
        b += first[j + 1] * second[j + 1]
        c += first[j + 2] * second[j + 2]
        d += first[j + 3] * second[j + 3]
    for j in range(whole, first.size):
        a += first[j] * second[j]
    return float(a + b + c + d)


@_compiled
def _substitute(
    factor: Floats, kept: Ints, pixels: Ints, starts: Ints, pivots: Ints, targets: Floats
) -> Floats:
    """Back substitution, the fronts in reverse: every boundary is known before its front."""
    solution, many = np.zeros_like(targets), targets.shape[1]
    known = np.empty((starts[1:] - starts[:-1]).max())
    for front in range(pivots.size - 1, -1, -1):
        size, own = starts[front + 1] - starts[front], pivots[front]
        rows = pixels[starts[front] : starts[front + 1]]
        block = factor[kept[front] : kept[front + 1]].reshape(own, size + many)
        for t in range(many):
            for j in range(own, size):
                known[j] = solution[rows[j], t]
            for i in range(own - 1, -1, -1):
                known[i] = (block[i, size + t] - _dot(block[i, i + 1 : size], known[i + 1 : size])) / block[i, i]
                solution[rows[i], t] = known[i]
    return solution

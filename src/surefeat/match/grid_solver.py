"""Sparse Cholesky on a pixel grid, compiled: (diag(mask) + Laplacian) u = right-hand side.

A multifrontal factorisation in geometric nested-dissection order (George 1973): the grid is cut in
half by a line of pixels, recursively, and a cut comes after both its sides. Each part is eliminated
as a small dense front whose rest is added to the front of the cut above it. Exact, so weights that
span ten decades do no harm; the order depends on the size alone, so it is planned once. In this
file: `solve`, then the plan, then what is compiled. numba is an optional extra; `sd_filter` has a
slower way with the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]

Floats = NDArray[np.float64]

Function = TypeVar("Function", bound=Callable[..., Any])

LEAF = 12
"""Pixels in a part that is eliminated without another cut; 8, 16, 32: same time within 10 %."""

PANEL = 32
"""Rows eliminated at a time, so that they stay in the nearest cache."""

NOTHING = np.empty(0)


class System(NamedTuple):
    """The matrix by pixel, all (H*W,), and its right-hand sides (H*W, T)."""

    diagonal: Floats
    east: Floats
    south: Floats
    targets: Floats
    width: int


def solve(
    mask: Floats, right: Floats, down: Floats, targets: Floats, *, pool: Executor | None = None
) -> Floats:
    """Solve for u (T, H, W): mask * u + sum over neighbours of weight * (u - neighbour) = target.

    mask (H, W) and targets (T, H, W); right (H, W - 1) and down (H - 1, W) are the weights to the
    next pixel in x and y, all > 0; mask >= 0 and somewhere positive. One factorisation serves all;
    given a pool, the two sides of the first cut are worked on there at the same time.
    """
    height, width = mask.shape
    east, south = np.zeros((height, width)), np.zeros((height, width))
    east[:, : width - 1], south[: height - 1] = right, down
    diagonal = mask + east + south
    diagonal[:, 1:] += right
    diagonal[1:] += down
    columns = np.ascontiguousarray(targets.reshape(len(targets), -1).T, dtype=np.float64)
    system = System(diagonal.ravel(), east.ravel(), south.ravel(), columns, width)
    plan = plan_grid(height, width)
    last, many = len(plan.pivots) - 1, len(targets)
    factor = np.empty(plan.kept[-1] + many * mask.size)
    solution = np.zeros_like(columns)
    parts = _halves(plan)
    run = pool.map if pool else map
    ends = (last, last + 1)

    def factor_part(part: tuple[int, int]) -> Floats:
        return _factor(plan, system, part[0], part[1], factor, NOTHING if part != ends else left)

    def solve_part(part: tuple[int, int]) -> None:
        _substitute(plan, factor, part[0], part[1], solution)

    left = np.concatenate([NOTHING, *run(factor_part, parts)])
    # The last cut runs on the pool too: its threads may be set up for this arithmetic.
    list(run(factor_part, [ends]))
    list(run(solve_part, [ends]))
    list(run(solve_part, parts))
    return solution.T.reshape(targets.shape)


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


def _halves(plan: Plan) -> list[tuple[int, int]]:
    """The runs of fronts below the last one that do not touch each other: none, one or two."""
    last = len(plan.pivots) - 1
    roots: list[int] = []
    for front in range(last):
        del roots[len(roots) - plan.children[front] :]
        roots.append(front)
    return [(low, high + 1) for low, high in zip([0, *(r + 1 for r in roots)], roots, strict=False)]


def _compiled(function: Function) -> Function:
    """numba's njit with the function's own type kept; contraction lets it use fused multiply-add.

    Reordered sums ("reassoc") were slower here: 57 instead of 37 ms at 224 x 224.
    """
    compiler = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
    return cast("Function", compiler(function))


@_compiled
def _factor(
    plan: Plan, system: System, begin: int, end: int, factor: Floats, waiting: Floats
) -> Floats:
    """Eliminate the fronts begin:end, `factor` receives their rows; what is left for the parent.

    waiting holds what earlier fronts left for this run, the latest last.
    """
    starts, pivots, many = plan.starts, plan.pivots, system.targets.shape[1]
    largest = (starts[begin + 1 : end + 1] - starts[begin:end]).max()
    work = np.empty(largest * (largest + many))
    rests = np.empty(waiting.size + _stack_size(plan, begin, end, many))
    rests[: waiting.size] = waiting
    place = np.full(system.diagonal.size, -1)
    used = waiting.size
    stack, held = _waiting_fronts(plan, begin, end)
    for front in range(begin, end):
        size, own = starts[front + 1] - starts[front], pivots[front]
        dense = work[: size * (size + many)].reshape(size, size + many)
        dense[:] = 0.0
        _assemble(dense, plan.pixels[starts[front] : starts[front + 1]], own, place, system)
        for _ in range(plan.children[front]):
            held -= 1
            first, last = starts[stack[held]] + pivots[stack[held]], starts[stack[held] + 1]
            used -= (last - first) * (last - first + many)
            _add_rest(dense, size, plan.places[first:last], rests[used:], many)
        _eliminate(dense, own, size + many)
        block = _block(plan, factor, front, many)
        for i in range(own):
            block[i, i:] = dense[i, i:]
        left = size - own
        rest = rests[used : used + left * (left + many)].reshape(left, left + many)
        for i in range(left):
            rest[i, i:] = dense[own + i, own + i :]
        stack[held] = front
        held, used = held + 1, used + rest.size
    return rests[:used]


@_compiled
def _block(plan: Plan, factor: Floats, front: int, many: int) -> Floats:
    """A front's eliminated rows in the factor: (own, size + many)."""
    own, size = plan.pivots[front], plan.starts[front + 1] - plan.starts[front]
    # Every pixel is eliminated once, in order, so the targets before this front are countable.
    begin = plan.kept[front] + many * plan.gone[front]
    return factor[begin : begin + own * (size + many)].reshape(own, size + many)


@_compiled
def _waiting_fronts(plan: Plan, begin: int, end: int) -> tuple[Ints, int]:
    """The fronts before `begin` whose rests no front before it has taken, and how many they are."""
    stack, held = np.empty(end, np.int64), 0
    for front in range(begin if plan.children[begin] > 0 and end - begin == 1 else 0):
        held += 1 - plan.children[front]
        stack[held - 1] = front
    return stack, held


@_compiled
def _stack_size(plan: Plan, begin: int, end: int, many: int) -> int:
    """The most numbers the fronts begin:end have on the stack of rests at one time."""
    stack = np.empty(end, np.int64)
    held, used, most = 0, 0, 0
    for front in range(begin, end):
        for _ in range(min(held, plan.children[front])):
            held -= 1
            used -= stack[held]
        rest = plan.starts[front + 1] - plan.starts[front] - plan.pivots[front]
        stack[held] = rest * (rest + many)
        used += stack[held]
        held, most = held + 1, max(most, used)
    return most


@_compiled
def _assemble(dense: Floats, rows: Ints, own: int, place: Ints, system: System) -> None:
    """Add the matrix's entries that touch a pixel eliminated here; upper triangle, then targets.

    place (H*W,) is the row of a pixel in this front; -1 for one that is gone and accounted for.
    """
    size, width = rows.size, system.width
    targets, east, south = system.targets, system.east, system.south
    for i in range(size):
        place[rows[i]] = i
    for i in range(own):
        p = rows[i]
        dense[i, i] += system.diagonal[p]
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
        _subtract(dense, first, last, length)


@_compiled
def _subtract(dense: Floats, first: int, last: int, length: int) -> None:
    """Rows last: of the front lose what rows first:last explain; four at a time saves passes.

    Plain loops: BLAS splits such products over threads, which get in the way of our own.
    """
    size = dense.shape[0]
    whole = first + (last - first) // 4 * 4
    for k in range(first, whole, 4):
        for i in range(last, size):
            row, r0, r1 = dense[i, i:length], dense[k, i:length], dense[k + 1, i:length]
            r2, r3 = dense[k + 2, i:length], dense[k + 3, i:length]
            c0, c1 = r0[0] / dense[k, k], r1[0] / dense[k + 1, k + 1]
            c2, c3 = r2[0] / dense[k + 2, k + 2], r3[0] / dense[k + 3, k + 3]
            for j in range(row.size):
                row[j] -= c0 * r0[j] + c1 * r1[j] + (c2 * r2[j] + c3 * r3[j])
    for k in range(whole, last):
        for i in range(last, size):
            share = dense[k, i] / dense[k, k]
            for j in range(i, length):
                dense[i, j] -= share * dense[k, j]


@_compiled
def _substitute(plan: Plan, factor: Floats, begin: int, end: int, solution: Floats) -> None:
    """Back substitution, the fronts in reverse: every boundary is known before its front."""
    starts, pivots, many = plan.starts, plan.pivots, solution.shape[1]
    known = np.empty((starts[begin + 1 : end + 1] - starts[begin:end]).max())
    for front in range(end - 1, begin - 1, -1):
        size, own = starts[front + 1] - starts[front], pivots[front]
        rows = plan.pixels[starts[front] : starts[front + 1]]
        block = _block(plan, factor, front, many)
        for t in range(many):
            for j in range(own, size):
                known[j] = solution[rows[j], t]
            for i in range(own - 1, -1, -1):
                explained = _dot(block[i, i + 1 : size], known[i + 1 : size])
                known[i] = (block[i, size + t] - explained) / block[i, i]
                solution[rows[i], t] = known[i]


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

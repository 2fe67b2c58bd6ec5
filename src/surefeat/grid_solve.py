"""Sparse Cholesky on a pixel grid, compiled: (diag(mask) + Laplacian) u = right-hand side.

A multifrontal factorisation in geometric nested-dissection order (George 1973): the grid is cut in
half by a line of pixels, recursively; each part is eliminated as a small dense front whose rest is
added to the front of the cut above it. Exact, so weights that span ten decades do no harm, and
the order depends on the size alone, so it is planned once. numba is an optional extra;
surefeat.static_dynamic has a slower solver in plain torch with the same answer.
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from surefeat.grid_front import compiled, dot, eliminate
from surefeat.grid_plan import Floats, Ints, Plan, halves, plan_grid

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
    parts = halves(plan)
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


@compiled
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
        eliminate(dense, own, size + many)
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


@compiled
def _block(plan: Plan, factor: Floats, front: int, many: int) -> Floats:
    """A front's eliminated rows in the factor: (own, size + many)."""
    own, size = plan.pivots[front], plan.starts[front + 1] - plan.starts[front]
    # Every pixel is eliminated once, in order, so the targets before this front are countable.
    begin = plan.kept[front] + many * plan.gone[front]
    return factor[begin : begin + own * (size + many)].reshape(own, size + many)


@compiled
def _waiting_fronts(plan: Plan, begin: int, end: int) -> tuple[Ints, int]:
    """The fronts before `begin` whose rests no front before it has taken, and how many they are."""
    stack, held = np.empty(end, np.int64), 0
    for front in range(begin if plan.children[begin] > 0 and end - begin == 1 else 0):
        held += 1 - plan.children[front]
        stack[held - 1] = front
    return stack, held


@compiled
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


@compiled
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


@compiled
def _add_rest(dense: Floats, size: int, places: Ints, rests: Floats, many: int) -> None:
    """Add what a child left, (n, n + many) at the start of `rests`; places rise, by plan_grid."""
    count = places.size
    for i in range(count):
        row, rest = dense[places[i]], rests[i * (count + many) : (i + 1) * (count + many)]
        for j in range(i, count):
            row[places[j]] += rest[j]
        for t in range(many):
            row[size + t] += rest[count + t]


@compiled
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
                explained = dot(block[i, i + 1 : size], known[i + 1 : size])
                known[i] = (block[i, size + t] - explained) / block[i, i]
                solution[rows[i], t] = known[i]

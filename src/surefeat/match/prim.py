"""Randomized Prim (Manen, Guillaumin, Van Gool 2013), compiled: superpixel graph -> random boxes.

Written from the paper. Imported only when used: numba and OpenCV contrib are an optional extra.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])

Ints = NDArray[np.int64]

Floats = NDArray[np.float64]

SIZE_AREAS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Share of the image covered by a tree: knots of the size distribution (method, section 3)."""

SIZE_CDF = (0.0, 0.069, 0.223, 0.439, 0.589, 0.797, 0.932, 1.0, 1.0)
"""Share of training objects no larger than that: alpha of the stopping rule, linear in between."""

BIAS, BORDER, COLOUR, SIZE = 3.0017, -1.0029, -2.6864, -2.3655
"""The paper's learned weights b, w_b, w_c, w_s of the edge similarity."""

HISTOGRAM_BITS = 4
"""Lab histograms have 2^4 = 16 bins per channel."""


def _compiled(function: Function) -> Function:
    """numba's njit with the function's own type kept, for the type checker."""
    return cast("Function", njit(cache=True, nogil=True)(function))


@dataclass(frozen=True)
class Graph:
    """Superpixels and how alike neighbours are; half-edges are sorted by their first node."""

    areas: Floats
    """(N,) share of the image."""
    boxes: Ints
    """(N, 4) inclusive boxes in the segmented image's pixels."""
    starts: Ints
    """(N + 1,): the half-edges of node i are starts[i]:starts[i + 1]."""
    ends: Ints
    """(E,) the node a half-edge leads to."""
    twins: Ints
    """(E,) the half-edge that leads back."""
    similarity: Floats
    """(E,) rho in (0, 1)."""


def build_graph(labels: NDArray[np.int32], lab: NDArray[np.uint8]) -> Graph:
    """Superpixel labels (H, W), 0..N-1, and the 8-bit Lab image (H, W, 3) -> their graph."""
    count = int(labels.max()) + 1
    areas, boxes, histograms = _describe(labels, lab, count)
    first, second, common, perimeter = _borders(labels, count)
    overlap = _intersections(histograms, areas, first, second)
    share = areas / labels.size
    longest = np.maximum(common / perimeter[first], common / perimeter[second])
    size = 1 - share[first] - share[second]
    rho = 1 / (1 + np.exp(BIAS + SIZE * size + BORDER * longest + COLOUR * overlap))
    origin, ends = np.concatenate([first, second]), np.concatenate([second, first])
    order = np.lexsort((ends, origin))
    starts = np.searchsorted(origin[order], np.arange(count + 1))
    # Sorted by (end, origin), the half-edges are their own twins' list sorted by (origin, end).
    twins = np.lexsort((origin[order], ends[order]))
    return Graph(share, boxes, starts, ends[order], twins, np.concatenate([rho, rho])[order])


def draw(graph: Graph, count: int, generator: np.random.Generator) -> Ints:
    """`count` boxes (count, 4) of random partial spanning trees, inclusive pixels, with repeats.

    A tree starts at a uniform superpixel with threshold 2 U(0, 1). A frontier edge is drawn with
    probability proportional to rho; the tree stops when alpha(its area) + 1 - rho exceeds the
    threshold or the image is used up, and otherwise takes in the edge's far end.
    """
    links = (graph.starts, graph.ends, graph.twins, graph.similarity)
    sizes, cdf = np.array(SIZE_AREAS), np.array(SIZE_CDF)
    members = draw_trees(graph.areas, *links, sizes, cdf, count, generator)
    return _tree_boxes(members, graph.boxes)


@_compiled
def _size_cdf(area: float, sizes: Floats, cdf: Floats) -> float:
    """np.interp for one number: numba's own allocates, and this runs once per step of a tree."""
    i = 1
    while i < sizes.size - 1 and area > sizes[i]:
        i += 1
    part = min(1.0, (area - sizes[i - 1]) / (sizes[i] - sizes[i - 1]))
    return float(cdf[i - 1] + part * (cdf[i] - cdf[i - 1]))


@_compiled
def draw_trees(
    areas: Floats, starts: Ints, ends: Ints, twins: Ints, similarity: Floats, sizes: Floats,
    cdf: Floats, count: int, generator: np.random.Generator,
) -> NDArray[np.bool_]:  # fmt: skip
    """Membership (count, N) of the random trees; arguments as in Graph, then alpha's knots."""
    nodes = areas.size
    members = np.zeros((count, nodes), np.bool_)
    frontier, place = np.empty(ends.size, np.int64), np.empty(ends.size, np.int64)
    for tree in range(count):
        inside = members[tree]
        node = int(generator.random() * nodes)
        threshold = 2 * generator.random()
        held, area, total = 0, 0.0, 0.0
        while True:
            inside[node] = True
            area += areas[node]
            for edge in range(starts[node], starts[node + 1]):
                if inside[ends[edge]]:
                    held -= 1
                    total -= similarity[edge]
                    gap = place[twins[edge]]
                    frontier[gap] = frontier[held]
                    place[frontier[gap]] = gap
                else:
                    frontier[held], place[edge] = edge, held
                    total += similarity[edge]
                    held += 1
            if held == 0:
                break
            left, pick = total * generator.random(), 0
            while pick < held - 1 and left >= similarity[frontier[pick]]:
                left -= similarity[frontier[pick]]
                pick += 1
            edge = frontier[pick]
            if _size_cdf(area, sizes, cdf) + 1 - similarity[edge] > threshold:
                break
            node = ends[edge]
    return members


@_compiled
def _tree_boxes(members: NDArray[np.bool_], boxes: Ints) -> Ints:
    """(count, 4): the box around the superpixels of each tree."""
    hulls = np.empty((members.shape[0], 4), np.int64)
    for tree in range(members.shape[0]):
        x1, y1, x2, y2 = 1 << 30, 1 << 30, -1, -1
        for node in range(members.shape[1]):
            if members[tree, node]:
                x1, y1 = min(x1, boxes[node, 0]), min(y1, boxes[node, 1])
                x2, y2 = max(x2, boxes[node, 2]), max(y2, boxes[node, 3])
        hulls[tree] = x1, y1, x2, y2
    return hulls


@_compiled
def _describe(
    labels: NDArray[np.int32], lab: NDArray[np.uint8], count: int
) -> tuple[Floats, Ints, NDArray[np.float32]]:
    """Pixel counts (N,), inclusive boxes (N, 4) and Lab histograms (N, 16^3) in pixels."""
    areas = np.zeros(count)
    boxes = np.empty((count, 4), np.int64)
    boxes[:, :2], boxes[:, 2:] = 1 << 30, -1
    histograms = np.zeros((count, 1 << (3 * HISTOGRAM_BITS)), np.float32)
    down = 8 - HISTOGRAM_BITS
    for y in range(labels.shape[0]):
        for x in range(labels.shape[1]):
            i = labels[y, x]
            areas[i] += 1
            boxes[i, 0], boxes[i, 1] = min(boxes[i, 0], x), min(boxes[i, 1], y)
            boxes[i, 2], boxes[i, 3] = max(boxes[i, 2], x), max(boxes[i, 3], y)
            cell = 0
            for channel in range(3):
                cell = (cell << HISTOGRAM_BITS) | (int(lab[y, x, channel]) >> down)
            histograms[i, cell] += 1
    return areas, boxes, histograms


@_compiled
def _borders(labels: NDArray[np.int32], count: int) -> tuple[Ints, Ints, Floats, Floats]:
    """Neighbours i < j (E,), (E,), pixel sides they share (E,), and every perimeter (N,).

    The image's outer edge counts towards a perimeter: it is part of the superpixel's outline.
    """
    height, width = labels.shape
    shared = np.zeros((count, count))
    perimeter = np.zeros(count)
    for y in range(height):
        for x in range(width):
            i = labels[y, x]
            perimeter[i] += (x == 0) + (y == 0) + (x == width - 1) + (y == height - 1)
            if x + 1 < width and labels[y, x + 1] != i:
                j = labels[y, x + 1]
                shared[min(i, j), max(i, j)] += 1
            if y + 1 < height and labels[y + 1, x] != i:
                j = labels[y + 1, x]
                shared[min(i, j), max(i, j)] += 1
    first, second = np.nonzero(shared)
    common = np.empty(first.size)
    for edge in range(first.size):
        common[edge] = shared[first[edge], second[edge]]
        perimeter[first[edge]] += common[edge]
        perimeter[second[edge]] += common[edge]
    return first, second, common, perimeter


@_compiled
def _intersections(
    histograms: NDArray[np.float32], areas: Floats, first: Ints, second: Ints
) -> Floats:
    """Intersection (E,) in [0, 1] of the two ends' histograms, each scaled to sum 1."""
    overlap = np.zeros(first.size)
    for edge in range(first.size):
        i, j = first[edge], second[edge]
        for cell in range(histograms.shape[1]):
            if histograms[i, cell] > 0:
                share = min(histograms[i, cell] / areas[i], histograms[j, cell] / areas[j])
                overlap[edge] += share
    return overlap


@_compiled
def spread(boxes: Floats, overlaps: Floats, count: int) -> Ints:
    """Indices (<= count,) of boxes (N, 4) chosen coarse to fine, in the given order.

    First those whose IoU with every box chosen so far is at most overlaps[0], then overlaps[1],
    and so on: near copies come in only once nothing more different is left.
    """
    total = boxes.shape[0]
    chosen, taken = np.empty(min(count, total), np.int64), np.zeros(total, np.bool_)
    areas = (boxes[:, 2] - boxes[:, 0] + 1) * (boxes[:, 3] - boxes[:, 1] + 1)
    nearest, seen, held = np.zeros(total), np.zeros(total, np.int64), 0
    for limit in overlaps:
        for i in range(total):
            if held == chosen.size:
                return chosen
            # Each pair is compared once: `seen` boxes have already gone into `nearest`.
            while nearest[i] <= limit and seen[i] < held and not taken[i]:
                j = chosen[seen[i]]
                width = min(boxes[i, 2], boxes[j, 2]) - max(boxes[i, 0], boxes[j, 0]) + 1
                height = min(boxes[i, 3], boxes[j, 3]) - max(boxes[i, 1], boxes[j, 1]) + 1
                if width > 0 and height > 0:
                    common = width * height
                    nearest[i] = max(nearest[i], common / (areas[i] + areas[j] - common))
                seen[i] += 1
            if nearest[i] <= limit and not taken[i]:
                chosen[held], taken[i] = i, True
                held += 1
    return chosen[:held]

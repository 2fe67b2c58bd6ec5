"""The drawn categories: parts as signed distances, motifs as signed distances, keypoints.

Convention: everything here lives in a category's canonical frame, x to the right and y down, the
object inside [-1, 1] x [-1, 1]. Distances are negative inside. A part is known by its outline and
its motif, never by its colour: instances colour the same part differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""float32 throughout; numpy's types hold that a float32 array times a float is float64."""
Shape = Callable[[Array, Array], Array]
"""x and y -> signed distance to the outline."""
Motif = Callable[[Array, Array, float, float], Array]
"""x, y, zoom of the pattern and share of ink -> signed distance to the ink."""


@dataclass(frozen=True)
class Part:
    """One painted layer of an object."""

    shape: Shape
    motif: Motif | None = None
    like: int | None = None
    """Index of an earlier part whose colours it shares; None draws its own."""


@dataclass(frozen=True)
class Category:
    """A kind of object: parts from back to front and its named points."""

    name: str
    keypoints: tuple[tuple[str, float, float], ...]
    """(name, x, y), each well inside a part that nothing in front of it covers."""
    parts: tuple[Part, ...]

    @property
    def keypoint_names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.keypoints)

    @property
    def keypoint_positions(self) -> npt.NDArray[np.float64]:
        """(K, 2) canonical (x, y)."""
        return np.array([(x, y) for _, x, y in self.keypoints])


def _length(u: Array, v: Array) -> Array:
    # Twice as fast as np.hypot, whose care about overflow is not needed here.
    length: Array = np.sqrt(u * u + v * v)
    return length


# Outlines.


def ellipse(cx: float, cy: float, rx: float, ry: float, angle: float = 0.0) -> Shape:
    """First-order distance, exact on the outline; angle in degrees, clockwise on the screen."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))

    def distance(x: Array, y: Array) -> Array:
        u = ((x - cx) * cos + (y - cy) * sin) / rx
        v = ((y - cy) * cos - (x - cx) * sin) / ry
        radius, slope = _length(u, v), _length(u / rx, v / ry)
        first_order: Array = radius * (radius - 1) / (slope + 1e-6)
        return first_order

    return distance


def box(cx: float, cy: float, rx: float, ry: float, corner: float = 0.05) -> Shape:
    """Half sides rx and ry, corners rounded by a radius."""

    def distance(x: Array, y: Array) -> Array:
        u, v = np.abs(x - cx) - (rx - corner), np.abs(y - cy) - (ry - corner)
        outside = _length(np.maximum(u, 0), np.maximum(v, 0))
        return outside + np.minimum(np.maximum(u, v), 0) - corner

    return distance


def rod(*points: tuple[float, float], width: float, end: float | None = None) -> Shape:
    """A bent bar through the points, its half width going from `width` to `end`."""
    widths = np.linspace(width, width if end is None else end, len(points)).tolist()

    def distance(x: Array, y: Array) -> Array:
        pieces = []
        for (x0, y0), (x1, y1), w0, w1 in zip(points, points[1:], widths, widths[1:], strict=False):
            dx, dy = x1 - x0, y1 - y0
            along = ((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy)
            along = np.clip(along, 0, 1)
            reach = _length(x - x0 - along * dx, y - y0 - along * dy)
            pieces.append(reach - (w0 + along * (w1 - w0)))
        return reduce(np.minimum, pieces)

    return distance


def polygon(*points: tuple[float, float], corner: float = 0.04) -> Shape:
    """Convex, corners in clockwise order on the screen, grown by a rounding radius."""

    def distance(x: Array, y: Array) -> Array:
        inside = np.full_like(x, -np.inf)
        outside = np.full_like(x, np.inf)
        for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1], strict=True):
            dx, dy = x1 - x0, y1 - y0
            px, py = x - x0, y - y0
            along = np.clip((px * dx + py * dy) / (dx * dx + dy * dy), 0, 1)
            outside = np.minimum(outside, _length(px - along * dx, py - along * dy))
            inside = np.maximum(inside, (px * dy - py * dx) / math.hypot(dx, dy))
        return np.where(inside > 0, outside, inside) - np.float32(corner)

    return distance


# Motifs. `_wave` is 0 in the middle of the ink and 1/2 farthest from it.


def _wave(t: Array) -> Array:
    return np.abs(t - np.round(t))


def stripes(period: float, angle: float = 0.0) -> Motif:
    """Bars across the direction `angle` (degrees): 0 gives upright bars."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return lambda x, y, zoom, ink: (
        (_wave((x * cos + y * sin) / (period * zoom)) - ink / 2) * (period * zoom)
    )


def zigzag(period: float) -> Motif:
    return lambda x, y, zoom, ink: (
        (_wave(y / (period * zoom) + _wave(x / (period * zoom))) - ink / 2) * (period * zoom * 0.7)
    )


def grid(period: float) -> Motif:
    return lambda x, y, zoom, ink: (
        (np.minimum(_wave(x / (period * zoom)), _wave(y / (period * zoom))) - ink / 3)
        * (period * zoom)
    )


def dots(period: float) -> Motif:
    def distance(x: Array, y: Array, zoom: float, ink: float) -> Array:
        u, v = (x + y) / (period * zoom * 1.414), (x - y) / (period * zoom * 1.414)
        return (_length(_wave(u), _wave(v)) - 0.12 - ink / 3) * (period * zoom)

    return distance


def checks(period: float) -> Motif:
    def distance(x: Array, y: Array, zoom: float, ink: float) -> Array:
        side = period * zoom
        return np.sin(x * (math.pi / side)) * np.sin(y * (math.pi / side)) * (side / math.pi)

    return distance


def scales(period: float) -> Motif:
    """Rows of overlapping arcs, as on a fish or a roof."""

    def distance(x: Array, y: Array, zoom: float, ink: float) -> Array:
        u, v = x / (period * zoom), y / (period * zoom)
        row = np.floor(u)
        reach = _length(u - row, v + row / 2 - np.round(v + row / 2))
        return (np.abs(reach - 0.6) - ink / 4) * (period * zoom)

    return distance


def rings(cx: float, cy: float, period: float) -> Motif:
    """Circles around a centre, ink in the middle."""
    return lambda x, y, zoom, ink: (
        (_wave(_length(x - cx, y - cy) / (period * zoom)) - ink / 2) * (period * zoom)
    )


def spokes(cx: float, cy: float, count: int) -> Motif:
    def distance(x: Array, y: Array, zoom: float, ink: float) -> Array:
        turn = np.arctan2(y - cy, x - cx) * (count / (2 * math.pi))
        arc = _length(x - cx, y - cy) * (2 * math.pi / count)
        return (_wave(turn + 0.25) - ink / 2) * arc

    return distance


def spiral(cx: float, cy: float, period: float) -> Motif:
    def distance(x: Array, y: Array, zoom: float, ink: float) -> Array:
        turn = np.arctan2(y - cy, x - cx) / (2 * math.pi)
        return (_wave(_length(x - cx, y - cy) / period + turn) - ink / 2) * period

    return distance

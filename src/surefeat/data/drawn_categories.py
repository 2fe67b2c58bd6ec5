"""Eight drawn categories: layers and motifs as signed distances, keypoints on their parts.

Convention: everything here lives in a category's canonical frame, x to the right and y down, the
object inside [-1, 1] x [-1, 1]. Distances are negative inside. A part is known by its outline and
its motif, never by its colour: instances colour the same part differently. Twin parts (two wheels,
two eyes) differ in motif or outline, so that left and right can be told apart from a patch.
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
class Layer:
    """One painted layer of an object."""

    shape: Shape
    motif: Motif | None = None
    like: int | None = None
    """Index of an earlier part whose colours it shares; None draws its own."""


@dataclass(frozen=True)
class DrawnCategory:
    """A kind of object: parts from back to front and its named points."""

    name: str
    keypoints: tuple[tuple[str, float, float], ...]
    """(name, x, y), each well inside a part that nothing in front of it covers."""
    parts: tuple[Layer, ...]

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


# Motifs, in units of their period. `_wave` is 0 in the middle of the ink and 1/2 farthest from it.


def _wave(t: Array) -> Array:
    return np.abs(t - np.round(t))


def _repeat(
    pattern: Callable[[Array, Array, float], Array], period: float, cx: float = 0, cy: float = 0
) -> Motif:
    """A pattern of u, v and the share of ink, where a unit is the period, zoomed."""

    def distance(x: Array, y: Array, zoom: float, ink: float) -> Array:
        unit = period * zoom
        return pattern((x - cx) / unit, (y - cy) / unit, ink) * unit

    return distance


def stripes(period: float, angle: float = 0.0) -> Motif:
    """Bars across the direction `angle` (degrees): 0 gives upright bars."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return _repeat(lambda u, v, ink: _wave(u * cos + v * sin) - ink / 2, period)


def zigzag(period: float) -> Motif:
    return _repeat(lambda u, v, ink: (_wave(v + _wave(u)) - ink / 2) * 0.7, period)


def grid(period: float) -> Motif:
    return _repeat(lambda u, v, ink: np.minimum(_wave(u), _wave(v)) - ink / 3, period)


def dots(period: float) -> Motif:
    def distance(u: Array, v: Array, ink: float) -> Array:
        return _length(_wave((u + v) / 1.414), _wave((u - v) / 1.414)) - 0.12 - ink / 3

    return _repeat(distance, period)


def checks(period: float) -> Motif:
    return _repeat(lambda u, v, _: np.sin(u * math.pi) * np.sin(v * math.pi) / math.pi, period)


def scales(period: float) -> Motif:
    """Rows of overlapping arcs, as on a fish or a roof."""

    def distance(u: Array, v: Array, ink: float) -> Array:
        row = np.floor(u)
        return np.abs(_length(u - row, v + row / 2 - np.round(v + row / 2)) - 0.6) - ink / 4

    return _repeat(distance, period)


def rings(cx: float, cy: float, period: float) -> Motif:
    """Circles around a centre, ink in the middle."""
    return _repeat(lambda u, v, ink: _wave(_length(u, v)) - ink / 2, period, cx, cy)


def spokes(cx: float, cy: float, count: int) -> Motif:
    def distance(u: Array, v: Array, ink: float) -> Array:
        turn = np.arctan2(v, u) * (count / (2 * math.pi))
        return (_wave(turn + 0.25) - ink / 2) * _length(u, v) * (2 * math.pi / count)

    return _repeat(distance, 1, cx, cy)


def spiral(cx: float, cy: float, period: float) -> Motif:
    """Its pitch is the same whatever the zoom."""

    def distance(x: Array, y: Array, _: float, ink: float) -> Array:
        turn = np.arctan2(y - cy, x - cx) / (2 * math.pi)
        return (_wave(_length(x - cx, y - cy) / period + turn) - ink / 2) * period

    return distance


# Tables of points, then of layers from back to front.
# fmt: off

CAR = DrawnCategory("car", (
    ("rear_wheel", -0.52, 0.42), ("front_wheel", 0.54, 0.42), ("headlight", 0.83, 0.04),
    ("tail_light", -0.84, 0.0), ("rear_window", -0.29, -0.32), ("front_window", 0.27, -0.32),
    ("door", 0.0, 0.14), ("aerial", -0.62, -0.78),
), (
    Layer(rod((-0.4, -0.4), (-0.6, -0.74), width=0.045)),
    Layer(ellipse(-0.62, -0.78, 0.11, 0.11), like=0),
    Layer(polygon((-0.62, -0.02), (-0.4, -0.54), (0.3, -0.54), (0.6, -0.02))),
    Layer(polygon((-0.44, -0.14), (-0.3, -0.44), (-0.08, -0.44), (-0.08, -0.14)), grid(0.17)),
    Layer(polygon((0.08, -0.44), (0.24, -0.44), (0.42, -0.14), (0.08, -0.14)), stripes(0.2, 40)),
    Layer(box(0.0, 0.14, 0.96, 0.28, 0.14), like=2),
    Layer(box(0.0, 0.14, 0.23, 0.21, 0.04), stripes(0.16, 90)),
    Layer(box(-0.86, 0.0, 0.1, 0.14, 0.04), checks(0.11)),
    Layer(ellipse(0.83, 0.04, 0.14, 0.14), rings(0.83, 0.04, 0.16)),
    Layer(ellipse(-0.52, 0.42, 0.27, 0.27), spokes(-0.52, 0.42, 6)),
    Layer(ellipse(-0.52, 0.42, 0.08, 0.08)),
    Layer(ellipse(0.54, 0.42, 0.27, 0.27), rings(0.54, 0.42, 0.19)),
))

BIRD = DrawnCategory("bird", (
    ("beak", 0.85, -0.42), ("eye", 0.5, -0.52), ("crest", 0.3, -0.88), ("breast", 0.42, 0.12),
    ("wing_root", 0.12, -0.04), ("wing_tip", -0.42, 0.22), ("tail", -0.82, -0.16),
    ("rear_foot", -0.22, 0.86), ("front_foot", 0.3, 0.86),
), (
    Layer(rod((-0.08, 0.4), (-0.2, 0.86), width=0.06), stripes(0.14, 90)),
    Layer(rod((-0.22, 0.86), (-0.06, 0.88), width=0.075)),
    Layer(rod((0.14, 0.4), (0.24, 0.86), width=0.06)),
    Layer(ellipse(0.31, 0.86, 0.15, 0.1), dots(0.13), like=2),
    Layer(polygon((-0.9, -0.36), (-0.3, 0.0), (-0.3, 0.28), (-0.92, 0.02)), stripes(0.17, 20)),
    Layer(rod((0.42, -0.6), (0.28, -0.9), width=0.1, end=0.07), zigzag(0.15)),
    Layer(ellipse(0.08, 0.12, 0.58, 0.42, -18)),
    Layer(ellipse(0.44, 0.14, 0.2, 0.28, 15), dots(0.15)),
    Layer(polygon((0.66, -0.58), (0.94, -0.42), (0.64, -0.32)), stripes(0.13)),
    Layer(ellipse(0.46, -0.46, 0.29, 0.28), like=6),
    Layer(ellipse(0.5, -0.52, 0.15, 0.15), rings(0.5, -0.52, 0.2)),
    Layer(polygon((-0.5, 0.24), (0, -0.16), (0.22, -0.1), (0.2, 0.12), (-0.1, 0.3)), scales(0.18)),
))

FISH = DrawnCategory("fish", (
    ("mouth", -0.86, 0.12), ("eye", -0.58, -0.08), ("gill", -0.3, 0.06),
    ("dorsal_fin", -0.02, -0.58), ("flank", 0.12, 0.02), ("belly_fin", -0.06, 0.62),
    ("tail_root", 0.56, 0.0), ("tail_upper", 0.86, -0.36), ("tail_lower", 0.86, 0.36),
), (
    Layer(polygon((0.56, -0.04), (0.8, -0.52), (0.95, -0.46), (0.76, 0.04)), stripes(0.16, 60)),
    Layer(polygon((0.56, 0.04), (0.76, -0.04), (0.95, 0.46), (0.8, 0.52)), dots(0.17), like=0),
    Layer(polygon((-0.34, -0.3), (0.02, -0.72), (0.34, -0.6), (0.34, -0.24)), stripes(0.17, 0)),
    Layer(polygon((-0.2, 0.34), (0.2, 0.3), (0.08, 0.72), (-0.14, 0.76)), zigzag(0.17)),
    Layer(ellipse(-0.14, 0.0, 0.8, 0.46), scales(0.2)),
    Layer(rod((-0.36, -0.32), (-0.26, 0.02), (-0.36, 0.34), width=0.09), like=3),
    Layer(ellipse(-0.6, 0.0, 0.34, 0.3)),
    Layer(rod((-0.86, 0.12), (-0.72, 0.16), width=0.09, end=0.06), like=0),
    Layer(ellipse(-0.58, -0.08, 0.15, 0.15), rings(-0.58, -0.08, 0.2)),
    Layer(box(0.56, 0.0, 0.09, 0.15, 0.05), checks(0.11)),
))

ROBOT = DrawnCategory("robot", (
    ("left_antenna", -0.42, -0.86), ("right_antenna", 0.42, -0.86), ("left_eye", -0.27, -0.32),
    ("right_eye", 0.27, -0.32), ("mouth", 0.0, 0.0), ("left_hand", -0.8, 0.56),
    ("right_hand", 0.8, 0.56), ("gauge", -0.18, 0.52), ("panel", 0.22, 0.52),
), (
    Layer(rod((-0.28, -0.5), (-0.42, -0.84), width=0.045)),
    Layer(ellipse(-0.42, -0.86, 0.12, 0.12), rings(-0.42, -0.86, 0.15)),
    Layer(rod((0.28, -0.5), (0.42, -0.84), width=0.045), like=0),
    Layer(box(0.42, -0.86, 0.12, 0.11, 0.02), checks(0.12)),
    Layer(rod((-0.4, 0.34), (-0.74, 0.36), (-0.8, 0.52), width=0.085), stripes(0.13, 0)),
    Layer(ellipse(-0.8, 0.56, 0.15, 0.15)),
    Layer(rod((0.4, 0.34), (0.74, 0.36), (0.8, 0.52), width=0.085), dots(0.13)),
    Layer(polygon((0.8, 0.4), (0.94, 0.56), (0.8, 0.7), (0.66, 0.56)), stripes(0.14, 90)),
    Layer(box(0.0, 0.54, 0.5, 0.4, 0.08)),
    Layer(box(0.0, -0.22, 0.58, 0.42, 0.12)),
    Layer(ellipse(-0.27, -0.32, 0.2, 0.2), rings(-0.27, -0.32, 0.2)),
    Layer(box(0.27, -0.32, 0.19, 0.17, 0.03), spokes(0.27, -0.32, 4)),
    Layer(box(0.0, 0.02, 0.36, 0.1, 0.04), stripes(0.15, 0)),
    Layer(ellipse(-0.2, 0.52, 0.19, 0.19), spokes(-0.2, 0.52, 7)),
    Layer(box(0.23, 0.52, 0.18, 0.24, 0.03), grid(0.16)),
))

CHAIR = DrawnCategory("chair", (
    ("back_top", -0.56, -0.84), ("back_middle", -0.5, -0.36), ("seat_rear", -0.34, 0.12),
    ("seat_front", 0.6, 0.14), ("arm_end", 0.56, -0.32), ("rear_foot", -0.6, 0.84),
    ("front_foot", 0.66, 0.84), ("crossbar", 0.02, 0.56),
), (
    Layer(rod((-0.5, 0.54), (0.56, 0.54), width=0.09)),
    Layer(box(0.02, 0.56, 0.2, 0.16, 0.06), checks(0.14)),
    Layer(rod((-0.46, 0.1), (-0.6, 0.84), width=0.14, end=0.12), stripes(0.18, 90)),
    Layer(rod((0.58, 0.1), (0.66, 0.8), width=0.11, end=0.1)),
    Layer(ellipse(0.66, 0.84, 0.17, 0.13), like=0),
    Layer(polygon((-0.72, -0.66), (-0.34, -0.66), (-0.2, 0.06), (-0.56, 0.06)), zigzag(0.2)),
    Layer(box(-0.56, -0.8, 0.34, 0.18, 0.1), dots(0.17)),
    Layer(rod((-0.3, -0.28), (0.5, -0.32), width=0.09)),
    Layer(rod((0.52, -0.28), (0.46, 0.08), width=0.075), like=7),
    Layer(ellipse(0.56, -0.32, 0.17, 0.17), rings(0.56, -0.32, 0.21)),
    Layer(box(0.1, 0.14, 0.76, 0.17, 0.08), grid(0.2)),
    Layer(box(0.62, 0.14, 0.24, 0.17, 0.08), stripes(0.17, 45)),
))

BICYCLE = DrawnCategory("bicycle", (
    ("rear_hub", -0.55, 0.34), ("front_hub", 0.57, 0.34), ("pedal", -0.04, 0.46),
    ("saddle", -0.32, -0.52), ("handlebar", 0.28, -0.74), ("lamp", 0.6, -0.36),
    ("carrier", -0.74, -0.22), ("frame_badge", 0.06, -0.2),
), (
    Layer(ellipse(-0.55, 0.34, 0.41, 0.41)),
    Layer(ellipse(-0.55, 0.34, 0.31, 0.31), spokes(-0.55, 0.34, 7)),
    Layer(ellipse(0.57, 0.34, 0.41, 0.41), like=0),
    Layer(ellipse(0.57, 0.34, 0.31, 0.31), rings(0.57, 0.34, 0.2)),
    Layer(box(-0.74, -0.22, 0.21, 0.15, 0.03), grid(0.16)),
    Layer(rod((-0.55, 0.34), (-0.22, -0.2), (0.36, -0.22), (-0.04, 0.44), width=0.065)),
    Layer(rod((-0.04, 0.44), (-0.3, -0.44), width=0.065), like=5),
    Layer(rod((0.57, 0.34), (0.36, -0.6), width=0.065), like=5),
    Layer(rod((-0.52, 0.34), (-0.04, 0.44), width=0.06), like=5),
    Layer(box(-0.32, -0.52, 0.26, 0.12, 0.1), stripes(0.15, 0)),
    Layer(rod((0.2, -0.76), (0.4, -0.7), (0.52, -0.58), width=0.11), zigzag(0.13)),
    Layer(polygon((0.46, -0.42), (0.72, -0.48), (0.72, -0.2), (0.46, -0.28)), stripes(0.13, 90)),
    Layer(ellipse(-0.04, 0.46, 0.17, 0.17), checks(0.13)),
    Layer(ellipse(0.06, -0.2, 0.18, 0.12), dots(0.13)),
))

TEAPOT = DrawnCategory("teapot", (
    ("spout_tip", 0.84, -0.4), ("spout_root", 0.5, 0.16), ("lid", 0.0, -0.5), ("knob", 0.0, -0.8),
    ("handle_top", -0.62, -0.3), ("handle_bottom", -0.66, 0.4), ("band", -0.1, -0.12),
    ("belly", -0.06, 0.28), ("foot", 0.0, 0.74),
), (
    Layer(rod((-0.4, -0.3), (-0.7, -0.32), (-0.88, 0.04), width=0.1), stripes(0.17, 30)),
    Layer(rod((-0.88, 0.04), (-0.68, 0.4), (-0.36, 0.44), width=0.1), dots(0.15)),
    Layer(rod((0.4, 0.3), (0.62, 0.06), (0.84, -0.38), width=0.22, end=0.09)),
    Layer(ellipse(0.84, -0.4, 0.16, 0.1, 20), stripes(0.13, 0)),
    Layer(box(0.0, 0.74, 0.4, 0.11, 0.05), zigzag(0.15)),
    Layer(ellipse(0.0, 0.14, 0.6, 0.58)),
    Layer(box(0.0, -0.12, 0.52, 0.12, 0.05), checks(0.15)),
    Layer(ellipse(-0.06, 0.3, 0.27, 0.25), spokes(-0.06, 0.3, 8)),
    Layer(ellipse(0.5, 0.16, 0.14, 0.18, 20), grid(0.14)),
    Layer(ellipse(0.0, -0.46, 0.4, 0.16), scales(0.15)),
    Layer(ellipse(0.0, -0.8, 0.14, 0.14), rings(0.0, -0.8, 0.17)),
    Layer(rod((0.0, -0.66), (0.0, -0.6), width=0.07), like=5),
))

SNAIL = DrawnCategory("snail", (
    ("shell_centre", -0.14, -0.12), ("shell_top", -0.22, -0.7), ("shell_rear", -0.62, 0.1),
    ("tail", -0.84, 0.6), ("sole", 0.0, 0.64), ("chest", 0.56, 0.42), ("eye", 0.66, 0.0),
    ("rear_horn", 0.5, -0.48), ("front_horn", 0.86, -0.4),
), (
    Layer(rod((0.6, 0.0), (0.5, -0.46), width=0.05)),
    Layer(ellipse(0.5, -0.48, 0.12, 0.12), rings(0.5, -0.48, 0.16)),
    Layer(rod((0.72, 0.0), (0.86, -0.38), width=0.05), like=0),
    Layer(box(0.86, -0.4, 0.11, 0.1, 0.02), checks(0.11)),
    Layer(rod((-0.9, 0.62), (0.4, 0.6), width=0.08, end=0.22), stripes(0.19, 0)),
    Layer(rod((0.4, 0.56), (0.66, 0.02), width=0.24, end=0.22)),
    Layer(ellipse(0.54, 0.42, 0.19, 0.2), dots(0.16)),
    Layer(ellipse(-0.86, 0.6, 0.12, 0.09), grid(0.13)),
    Layer(ellipse(-0.14, -0.12, 0.64, 0.64)),
    Layer(ellipse(-0.22, -0.66, 0.3, 0.14, -8), zigzag(0.15)),
    Layer(ellipse(-0.64, 0.1, 0.16, 0.28, -12), scales(0.17)),
    Layer(ellipse(-0.14, -0.12, 0.42, 0.42), spiral(-0.14, -0.12, 0.2)),
    Layer(ellipse(0.67, 0.0, 0.13, 0.13), spokes(0.67, 0.0, 4)),
))

CATEGORIES: tuple[DrawnCategory, ...] = (CAR, BIRD, FISH, ROBOT, CHAIR, BICYCLE, TEAPOT, SNAIL)

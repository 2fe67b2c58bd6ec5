"""How a drawn instance gets its colours, its paint, and what lies behind and before it.

Pictures are (3, H, W) float32 RGB, about 0 to 1, and are painted in place.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from surefeat.data.synthetic_shapes import (
    Array,
    Motif,
    Part,
    Shape,
    checks,
    dots,
    ellipse,
    grid,
    rod,
    stripes,
)

_TURN = 2 * math.pi


def colour(lightness: float, chroma: float, hue: float) -> Array:
    """OKLCH (lightness 0 to 1, chroma 0 to about 0.2, hue in radians) -> (3, 1, 1) sRGB.

    A perceptual space, so that ink contrasts with its ground by as much in every hue.
    """
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    cones = np.array(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ]
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = np.clip(to_rgb @ cones**3, 0, 1)
    encoded = np.where(linear < 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    rgb: Array = encoded.astype(np.float32)[:, None, None]
    return rgb


def cover(distance: Array, pixel: float) -> Array:
    """Share of a pixel that lies inside, from the signed distance of its centre."""
    return np.clip(0.5 - distance * (1 / pixel), 0, 1)


def blend(picture: Array, layer: Array, alpha: Array) -> None:
    """Paints `layer`, (3, 1, 1) or (3, H, W), with opacity alpha (H, W)."""
    picture += alpha * (layer - picture)


def paint(
    picture: Array,
    parts: tuple[Part, ...],
    canonical: npt.NDArray[np.float64],
    *,
    pixel: float,
    generator: np.random.Generator,
) -> Array:
    """Paints the parts, back to front, where canonical (H, W, 2) says; -> coverage (H, W)."""
    near = np.abs(canonical).max(axis=-1) < 1.2
    rows, columns = np.flatnonzero(near.any(axis=1)), np.flatnonzero(near.any(axis=0))
    area = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
    x, y = (np.ascontiguousarray(canonical[area][..., i], np.float32) for i in (0, 1))
    zoom, ink = generator.uniform(0.88, 1.2), generator.uniform(0.4, 0.6)
    grow, line = generator.uniform(-0.015, 0.025), generator.uniform(0.8, 1.3) * pixel
    sun, shine = generator.uniform(0, _TURN), generator.uniform(0, 0.16)
    light = 1 + x * (shine * math.cos(sun)) + y * (shine * math.sin(sun))
    palette: list[tuple[Array, Array]] = []
    coverage, view = np.zeros_like(x), picture[:, area[0], area[1]]
    for part in parts:
        own = _random_colours(generator)
        palette.append(own if part.like is None else palette[part.like])
        ground, stroke = palette[-1]
        distance = part.shape(x, y) - grow
        layer = np.repeat(ground, x.size, axis=1).reshape(3, *x.shape)
        if part.motif is not None:
            blend(layer, stroke, cover(part.motif(x, y, zoom, ink), pixel))
        layer *= light
        blend(layer, 0.45 * np.minimum(ground, stroke), 1 - cover(distance + line, pixel))
        alpha = cover(distance, pixel)
        blend(view, layer, alpha)
        coverage = np.maximum(coverage, alpha)
    full = np.zeros(picture.shape[1:], np.float32)
    full[area] = coverage
    return full


def _random_colours(generator: np.random.Generator) -> tuple[Array, Array]:
    """A ground and the ink on it, of any hues; the ink is darker, or now and then lighter."""
    light, dark = generator.uniform(0.72, 0.95), generator.uniform(0.25, 0.48)
    ground, ink = (dark, light) if generator.random() < 0.15 else (light, dark)
    hues = generator.uniform(0, _TURN, 2)
    return (
        colour(ground, generator.uniform(0.05, 0.15), hues[0]),
        colour(ink, generator.uniform(0.03, 0.13), hues[1]),
    )


def background(*, size: int, generator: np.random.Generator) -> Array:
    """A picture of nothing in particular: a gradient, perhaps an even texture, clutter.

    Any spot of it looks like many others, so there is little for a match to hold on to.
    """
    y, x = np.indices((size, size), dtype=np.float32) / size - 0.5
    hue, tone = generator.uniform(0, _TURN), generator.uniform(0.45, 0.88)

    def shade(spread: float) -> Array:
        lightness = np.clip(tone + generator.normal(0, spread), 0.3, 0.95)
        return colour(lightness, generator.uniform(0, 0.09), hue + generator.normal(0, 8 * spread))

    picture = np.repeat(shade(0.0), size * size, axis=1).reshape(3, size, size)
    turn = generator.uniform(0, _TURN)
    blend(picture, shade(0.1), np.clip(0.5 + x * math.cos(turn) + y * math.sin(turn), 0, 1))
    _texture(picture, x, y, generator)
    for _ in range(generator.integers(1, 6)):
        softness = float(generator.choice([1, 6, 12])) / size
        alpha = cover(_scrap(generator)(x, y), softness) * generator.uniform(0.4, 0.9)
        blend(picture, shade(0.1), alpha)
    return picture


def _scrap(generator: np.random.Generator) -> Shape:
    """A blob or a line somewhere in [-1/2, 1/2]."""
    cx, cy = generator.uniform(-0.55, 0.55, 2).tolist()
    if generator.random() < 0.6:
        rx, ry, angle = generator.uniform([0.03, 0.03, 0], [0.14, 0.14, 180]).tolist()
        return ellipse(cx, cy, rx, ry, angle)
    ex, ey = generator.normal(0, 0.35, 2).tolist()
    return rod((cx, cy), (cx + ex, cy + ey), width=generator.uniform(0.006, 0.02))


def _texture(picture: Array, x: Array, y: Array, generator: np.random.Generator) -> None:
    """Nothing, noise, or one small pattern repeated all over, faint to strong."""
    choice = generator.random()
    if choice < 0.25:
        noise = generator.standard_normal(x.shape, np.float32)
        picture += noise * generator.uniform(0.02, 0.08)
    elif choice < 0.85:
        period, angle = generator.uniform(0.05, 0.09), generator.uniform(0, math.pi)
        motifs: tuple[Motif, ...] = (stripes(period), dots(period), checks(period), grid(period))
        cos, sin = math.cos(angle), math.sin(angle)
        motif = motifs[generator.integers(len(motifs))]
        ink = cover(motif(x * cos + y * sin, y * cos - x * sin, 1.0, 0.5), 1 / x.shape[0])
        picture *= 1 + generator.uniform(-0.5, -0.1) * ink


def occluder(
    picture: Array, mask: npt.NDArray[np.bool_], *, generator: np.random.Generator
) -> Array:
    """Paints a plain blob or bar over a part of the object; -> its coverage (H, W)."""
    size = picture.shape[-1]
    y, x = np.indices((size, size), dtype=np.float32) / size
    rows, columns = np.nonzero(mask)
    pick = generator.integers(len(rows))
    cx, cy = float(columns[pick]) / size, float(rows[pick]) / size
    if generator.random() < 0.5:
        rx, ry, angle = generator.uniform([0.06, 0.06, 0], [0.13, 0.13, 180]).tolist()
        shape = ellipse(cx, cy, rx, ry, angle)
    else:
        turn = generator.uniform(0, _TURN)
        far = (cx + 1.5 * math.cos(turn), cy + 1.5 * math.sin(turn))
        shape = rod((cx, cy), far, width=generator.uniform(0.03, 0.06))
    alpha = cover(shape(x, y), 1 / size)
    lightness, chroma, hue = generator.uniform([0.35, 0, 0], [0.9, 0.07, _TURN]).tolist()
    blend(picture, colour(lightness, chroma, hue), alpha)
    return alpha

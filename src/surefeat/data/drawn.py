"""Drawn object categories with exact correspondences across instances: what ships without data.

Every instance draws its own pose, bend, palette, stroke and background; what instances share is
which motif sits on which part. Each pixel knows its canonical coordinate by the inverse of the
map that places the keypoints, so the annotations are exact. Pictures are (3, H, W) float32 RGB,
about 0 to 1, and are painted in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefeat.core.image import write_png
from surefeat.data.coco import Annotation, Coco, CocoImage, make_category, write_annotations
from surefeat.data.drawn_categories import (
    CATEGORIES,
    Array,
    DrawnCategory,
    Layer,
    Motif,
    Shape,
    checks,
    dots,
    ellipse,
    grid,
    rod,
    stripes,
)

_TURN = 2 * math.pi

# OKLab: what lightness, a and b give the three cones, and what the cones' cubes give linear RGB.
_TO_CONES = np.array(
    [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728],
     [1, -0.0894841775, -1.2914855480]]
)  # fmt: skip
_TO_RGB = np.array(
    [[4.0767416621, -3.3077115913, 0.2309699292], [-1.2684380046, 2.6097574011, -0.3413193965],
     [-0.0041960863, -0.7034186147, 1.7076147010]]
)  # fmt: skip

Points = npt.NDArray[np.float64]


def colour(lightness: float, chroma: float, hue: float) -> Array:
    """OKLCH (lightness 0 to 1, chroma 0 to about 0.2, hue in radians) -> (3, 1, 1) sRGB.

    A perceptual space, so that ink contrasts with its ground by as much in every hue.
    """
    cones = _TO_CONES @ [lightness, chroma * math.cos(hue), chroma * math.sin(hue)]
    linear = np.clip(_TO_RGB @ cones**3, 0, 1)
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
    parts: tuple[Layer, ...],
    canonical: Points,
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
    first = colour(ground, generator.uniform(0.05, 0.15), hues[0])
    return first, colour(ink, generator.uniform(0.03, 0.13), hues[1])


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


@dataclass(frozen=True)
class Instance:
    """One drawn object and everything known about it."""

    image: Tensor
    """(3, H, W) uint8 RGB."""
    mask: Tensor
    """(H, W) bool: the object's pixels, without those behind an occluder."""
    keypoints: Tensor
    """(K, 2) float32 pixels (x, y): the category's named parts, in its order."""
    visible: Tensor
    """(K,) bool: inside the image and not behind an occluder."""
    category: int
    """Index into CATEGORIES."""
    canonical: Tensor
    """(H, W, 2) float32: canonical (x, y) in [-1, 1] of object pixels, NaN elsewhere. Two pixels
    of two instances of one category correspond when these agree."""


@dataclass(frozen=True)
class Pose:
    """An invertible map from the canonical frame to pixels: slide, bend, then place.

    Each step has a closed inverse, so points and pixels agree to rounding.
    """

    slide: Points
    """(2,) in (-1, 1): moves the middle of each axis between its fixed ends."""
    bend: Points
    """(2, 3): amount, frequency and phase of the wave added to y along x, then to x along y."""
    linear: Points
    """(2, 2) pixels per canonical unit."""
    shift: Points
    """(2,) pixels."""

    def forward(self, points: Points) -> Points:
        """Canonical (..., 2) -> pixels (..., 2)."""
        x, y = np.moveaxis((points + self.slide) / (1 + self.slide * points), -1, 0)
        y = y + _sway(x, self.bend[0])
        x = x + _sway(y, self.bend[1])
        placed: Points = np.stack([x, y], axis=-1) @ self.linear.T + self.shift
        return placed

    def inverse(self, points: Points) -> Points:
        """Pixels (..., 2) -> canonical (..., 2); far from the object only roughly."""
        x, y = np.moveaxis((points - self.shift) @ np.linalg.inv(self.linear).T, -1, 0)
        x = x - _sway(y, self.bend[1])
        y = y - _sway(x, self.bend[0])
        # The slide has a pole well outside the object; clipping keeps far pixels on this side.
        bent = np.clip(np.stack([x, y], axis=-1), -2, 2)
        straight: Points = (bent - self.slide) / (1 - self.slide * bent)
        return straight


def _sway(t: Points, wave: Points) -> Points:
    offset: Points = wave[0] * np.sin(wave[1] * t + wave[2])
    return offset


def draw(category: int, *, size: int, generator: np.random.Generator) -> Instance:
    """One instance of CATEGORIES[category] in an image of size x size pixels."""
    if not 0 <= category < len(CATEGORIES):
        raise ValueError(f"no category {category}; pass 0 to {len(CATEGORIES) - 1}")
    if size < 32:
        raise ValueError(f"size {size} is too small to draw a part; pass 32 or more")
    kind = CATEGORIES[category]
    pose = _random_pose(kind, size=size, generator=generator)
    rows, columns = np.indices((size, size), dtype=np.float64)
    canonical = pose.inverse(np.stack([columns, rows], axis=-1))
    picture = background(size=size, generator=generator)
    # The side of a pixel in canonical units, on average.
    pixel = float(1 / np.sqrt(np.linalg.det(pose.linear)))
    shown = paint(picture, kind.parts, canonical, pixel=pixel, generator=generator)
    # A grown outline may pass the canonical frame by a fraction of a pixel.
    mask = (shown > 0.5) & (np.abs(canonical) <= 1).all(axis=-1)
    if generator.random() < 0.25:
        mask &= occluder(picture, mask, generator=generator) < 0.5
    picture += generator.standard_normal(picture.shape, np.float32) * 0.012
    keypoints = pose.forward(kind.keypoint_positions)
    nearest = np.round(keypoints).astype(int)
    inside = ((nearest >= 0) & (nearest < size)).all(axis=1)
    column, row = np.clip(nearest, 0, size - 1).T
    known = np.where(mask[..., None], canonical, np.nan)
    return Instance(
        image=torch.from_numpy(np.round(picture.clip(0, 1) * 255).astype(np.uint8)),
        mask=torch.from_numpy(mask),
        keypoints=torch.from_numpy(keypoints).float(),
        visible=torch.from_numpy(inside & mask[row, column]),
        category=category,
        canonical=torch.from_numpy(known).float(),
    )


def _random_pose(kind: DrawnCategory, *, size: int, generator: np.random.Generator) -> Pose:
    """Anywhere the keypoints fit into the image, or almost."""
    angle = np.radians(generator.uniform(-25, 25))
    stretch = np.exp(generator.uniform(-0.13, 0.13))
    scale = size * generator.uniform(0.28, 0.4)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    lean = np.array([[1, generator.uniform(-0.15, 0.15)], [0, 1]])
    ranges = ((-0.09, 0.09), (1.2, 2.2), (0, _TURN))
    bend = np.stack([generator.uniform(low, high, 2) for low, high in ranges], axis=-1)
    linear = scale * turn @ lean @ np.diag([stretch, 1 / stretch])
    still = Pose(generator.uniform(-0.15, 0.15, 2), bend, linear, np.zeros(2))
    placed = still.forward(kind.keypoint_positions)
    # What lies beyond the outermost keypoint may stick out of the image.
    first, last = 0.01 * size - placed.min(axis=0), 0.99 * size - 1 - placed.max(axis=0)
    shift = first + generator.uniform(0, 1, 2) * (last - first)
    return Pose(still.slide, bend, linear, shift)


def draw_many(count: int, *, size: int, seed: int) -> list[Instance]:
    """Instances of the categories in turn; number i is the same whatever the count."""
    return [
        draw(i % len(CATEGORIES), size=size, generator=np.random.default_rng([seed, i]))
        for i in range(count)
    ]


def correspondences(instance0: Instance, instance1: Instance) -> tuple[Tensor, Tensor]:
    """Keypoints visible in both instances of one category: (N, 2) and (N, 2) pixels."""
    if instance0.category != instance1.category:
        names = [CATEGORIES[i.category].name for i in (instance0, instance1)]
        raise ValueError(f"a {names[0]} and a {names[1]} share no parts; pass one category")
    both = instance0.visible & instance1.visible
    return instance0.keypoints[both], instance1.keypoints[both]


def write_folder(folder: Path, *, count: int, size: int, seed: int) -> None:
    """Draws into `folder`: one PNG per instance and keypoints.json (COCO keypoints format)."""
    if count < 1:
        raise ValueError(f"count is {count}; draw at least 1 image")
    images, annotations = [], []
    for i, instance in enumerate(draw_many(count, size=size, seed=seed)):
        name = f"{CATEGORIES[instance.category].name}_{i:05d}.png"
        write_png(folder / name, instance.image)
        images.append(CocoImage(name, (size, size)))
        annotations.append(_annotation(instance, i))
    kinds = tuple(make_category(kind.name, kind.keypoint_names) for kind in CATEGORIES)
    write_annotations(folder / "keypoints.json", Coco(tuple(images), kinds, tuple(annotations)))


def _annotation(instance: Instance, image: int) -> Annotation:
    """COCO: v is 2 for a visible keypoint, 1 for a hidden one, 0 (at 0, 0) outside the image."""
    rows, columns = torch.nonzero(instance.mask, as_tuple=True)
    box = (int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max()))
    last = instance.mask.shape[0] - 0.5
    keypoints: list[float] = []
    for (x, y), seen in zip(instance.keypoints.tolist(), instance.visible.tolist(), strict=True):
        inside = -0.5 <= x < last and -0.5 <= y < last
        keypoints += [x, y, 2 if seen else 1] if inside else [0, 0, 0]
    area = {"area": int(instance.mask.sum())}
    return Annotation(image, instance.category, box, tuple(keypoints), more=area)

"""Drawn object categories with exact correspondences across instances: what ships without data.

Every instance draws its own pose, bend, palette, stroke and background; what instances share is
which motif sits on which part. Each pixel knows its canonical coordinate by the inverse of the
map that places the keypoints, so the annotations are exact.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from surefeat.data.synthetic_categories import CATEGORIES
from surefeat.data.synthetic_scene import background, occluder, paint
from surefeat.data.synthetic_shapes import Array, Category
from surefeat.geometry import xywh_from_boxes

__all__ = [
    "CATEGORIES",
    "Category",
    "Instance",
    "correspondences",
    "draw",
    "draw_many",
    "write_folder",
]

Points = npt.NDArray[np.float64]


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

    @property
    def pixel(self) -> float:
        """Side of a pixel in canonical units, on average."""
        return float(1 / np.sqrt(np.linalg.det(self.linear)))


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
    shown = paint(picture, kind.parts, canonical, pixel=pose.pixel, generator=generator)
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
        image=_to_uint8(picture),
        mask=torch.from_numpy(mask),
        keypoints=torch.from_numpy(keypoints).float(),
        visible=torch.from_numpy(inside & mask[row, column]),
        category=category,
        canonical=torch.from_numpy(known).float(),
    )


def _to_uint8(picture: Array) -> Tensor:
    levels = np.round(picture.clip(0, 1) * 255).astype(np.uint8)
    return torch.from_numpy(levels)


def _random_pose(kind: Category, *, size: int, generator: np.random.Generator) -> Pose:
    """Anywhere the keypoints fit into the image, or almost."""
    angle = np.radians(generator.uniform(-25, 25))
    stretch = np.exp(generator.uniform(-0.13, 0.13))
    scale = size * generator.uniform(0.28, 0.4)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    lean = np.array([[1, generator.uniform(-0.15, 0.15)], [0, 1]])
    bend = np.stack(
        [
            generator.uniform(-0.09, 0.09, 2),
            generator.uniform(1.2, 2.2, 2),
            generator.uniform(0, 2 * np.pi, 2),
        ],
        axis=-1,
    )
    linear = scale * turn @ lean @ np.diag([stretch, 1 / stretch])
    still = Pose(generator.uniform(-0.15, 0.15, 2), bend, linear, np.zeros(2))
    low, high = (f(still.forward(kind.keypoint_positions), axis=0) for f in (np.min, np.max))
    # What lies beyond the outermost keypoint may stick out of the image.
    first, last = 0.01 * size - low, 0.99 * size - 1 - high
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
    """Draws into `folder`: one PNG per instance and keypoints.json (COCO keypoints format).

    Convention: COCO's boxes have their edges at integers, its keypoints their pixel centres.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for i, instance in enumerate(draw_many(count, size=size, seed=seed)):
        name = f"{CATEGORIES[instance.category].name}_{i:05d}.png"
        Image.fromarray(instance.image.permute(1, 2, 0).numpy()).save(folder / name)
        images.append({"id": i + 1, "file_name": name, "width": size, "height": size})
        annotations.append({"id": i + 1, "image_id": i + 1} | _annotation(instance))
    categories = [
        {"id": i + 1, "name": kind.name, "keypoints": list(kind.keypoint_names), "skeleton": []}
        for i, kind in enumerate(CATEGORIES)
    ]
    record = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "keypoints.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


def _annotation(instance: Instance) -> dict[str, object]:
    """COCO: v is 2 for a visible keypoint, 1 for a hidden one, 0 (at 0, 0) outside the image."""
    rows, columns = torch.nonzero(instance.mask, as_tuple=True)
    box = torch.stack([columns.min(), rows.min(), columns.max(), rows.max()])
    last = instance.mask.shape[0] - 0.5
    keypoints: list[float] = []
    for (x, y), seen in zip(instance.keypoints.tolist(), instance.visible.tolist(), strict=True):
        inside = -0.5 <= x < last and -0.5 <= y < last
        keypoints += [round(x, 2), round(y, 2), 2 if seen else 1] if inside else [0, 0, 0]
    return {
        "category_id": instance.category + 1,
        "bbox": xywh_from_boxes(box).tolist(),
        "area": int(instance.mask.sum()),
        "iscrowd": 0,
        "num_keypoints": sum(v > 0 for v in keypoints[2::3]),
        "keypoints": keypoints,
    }

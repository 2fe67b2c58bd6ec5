"""Which objects are learned from and which are measured on.

The benchmark's photos and objects as tensors on the device, decoded once for all rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.core.geometry import Frame
from surefeat.core.image import resize
from surefeat.data.keypoints import Category, KeypointSet, Labelled
from surefeat.data.pascal3d import load_pascal3d
from surefeat.measure.fewshot_settings import Split

HELD_OUT = 4
"""One in so many training images is what the development split measures on."""


def load_sets(
    data: str | Path, *, images: str | Path | None = None, split: Split = "val"
) -> tuple[KeypointSet, KeypointSet]:
    """Objects to learn from and to measure on, in the layouts that load_pascal3d knows.

    val: all of train, and val. dev: three quarters of the training images, and the rest of them,
    to choose settings on; which image is where follows from a hash of its name.
    """
    if split not in ("val", "dev"):
        raise ValueError(f"unknown split {split!r}; choose val, or dev to choose settings on")
    train = load_pascal3d(data, split="train", images=images)
    if split == "val":
        return train, load_pascal3d(data, split="val", images=images)
    learn = tuple(item for item in train.objects if not held_out(item.name))
    check = tuple(item for item in train.objects if held_out(item.name))
    return KeypointSet(train.categories, learn), KeypointSet(train.categories, check)


def held_out(name: str) -> bool:
    """Whether the development split measures on the image of this name."""
    digest = hashlib.sha256(PurePath(name).stem.encode()).digest()
    return digest[0] % HELD_OUT == 0


def some_objects(
    found: KeypointSet, *, classes: Sequence[str] | None = None, most: int | None = None
) -> KeypointSet:
    """Objects with at least one visible keypoint, of some classes, at most so many of each.

    Difficult, truncated and occluded objects stay in: what they do not show is not visible.
    """
    names = [category.name for category in found.categories]
    unknown = sorted(set(classes or ()) - set(names))
    if unknown:
        raise ValueError(f"there is no class {', '.join(unknown)}; choose from {', '.join(names)}")
    if most is not None and most < 1:
        raise ValueError(f"objects is {most}; use at least 1 per class")
    kept = [n for n, name in enumerate(names) if classes is None or name in classes]
    items: list[Labelled] = []
    for new, old in enumerate(kept):
        own = [one for one in found.objects if one.category == old and bool(one.visible.any())]
        if not own:
            raise ValueError(f"no object of {names[old]!r} shows a keypoint; leave the class out")
        count = min(len(own), most or len(own))
        spread = [own[i * len(own) // count] for i in range(count)]
        items += [replace(one, category=new) for one in spread]
    return KeypointSet(tuple(found.categories[n] for n in kept), tuple(items))


LONGEST_SIDE = 512
"""Pixels; larger photos are made smaller. VOC's are 500 at most."""


@dataclass(frozen=True, eq=False)
class Photos:
    """Decoded photos in one buffer."""

    pixels: Tensor
    """(P, 3, H, W) uint8: each photo in the top-left corner."""
    sizes: Tensor
    """(P, 2): (height, width) of the used part."""


@dataclass(frozen=True, eq=False)
class Channels:
    """One channel per keypoint of every class, K in all, class after class."""

    classes: tuple[str, ...]
    flip: Tensor
    """(K,) channel of the mirrored keypoint."""
    own: Tensor
    """(classes, K) bool."""


@dataclass(frozen=True, eq=False)
class Objects:
    """Annotated objects, N of them."""

    photo: Tensor
    """(N,) row of their photo."""
    category: Tensor
    """(N,) number of their class."""
    boxes: Tensor
    """(N, 4) inclusive, pixels of the decoded photo."""
    points: Tensor
    """(N, K, 2) pixels of the decoded photo; NaN where not visible."""
    visible: Tensor
    """(N, K) bool."""

    def __len__(self) -> int:
        return len(self.photo)

    def take(self, numbers: Tensor) -> Objects:
        """Some of them, by their numbers (M,)."""
        tensors = (self.photo, self.category, self.boxes, self.points, self.visible)
        return Objects(*(each[numbers] for each in tensors))


@dataclass(frozen=True, eq=False)
class Material:
    """What all rows are measured on."""

    split: str
    channels: Channels
    photos: Photos
    train: Objects
    test: Objects
    fingerprint: str
    """Of names, boxes and keypoints of all objects."""
    seconds: float
    """That the photos took."""


def prepare_material(
    train: KeypointSet,
    test: KeypointSet,
    *,
    split: str,
    device: torch.device,
    workers: int = 16,
    quiet: bool = True,
) -> Material:
    """Decode every photo once, by `workers` threads, and put everything on the device."""
    if train.categories != test.categories:
        raise ValueError("objects to train and to test on have other classes or keypoints")
    start = time.perf_counter()
    every = (*train.objects, *test.objects)
    one_of = {item.name: item for item in every}
    rows = {name: row for row, name in enumerate(one_of)}
    photos = _decode(list(one_of.values()), workers=workers, quiet=quiet)
    return Material(
        split=split,
        channels=_channels(train.categories, device),
        photos=Photos(photos.pixels.to(device), photos.sizes.to(device)),
        train=_objects(train, rows, device),
        test=_objects(test, rows, device),
        fingerprint=_fingerprint(train, test),
        seconds=time.perf_counter() - start,
    )


def _frame(item: Labelled) -> Frame:
    """Between the photo's own pixels and the decoded ones."""
    scale = min(1.0, LONGEST_SIDE / max(item.size))
    height, width = (max(1, round(side * scale)) for side in item.size)
    return Frame(item.size, (height, width))


def _decode(items: Sequence[Labelled], *, workers: int, quiet: bool) -> Photos:
    sizes = torch.tensor([_frame(item).network for item in items])
    height, width = sizes.max(0).values.tolist()
    pixels = torch.zeros(len(items), 3, height, width, dtype=torch.uint8)

    def fill(row: int) -> None:
        small = resize(items[row].read(), size=_frame(items[row]).network)
        pixels[row, :, : small.shape[1], : small.shape[2]] = small

    with ThreadPoolExecutor(max(1, workers)) as pool:
        try:
            done = pool.map(fill, range(len(items)))
            for _ in tqdm(done, total=len(items), desc="photos", unit="img", disable=quiet):
                pass
        except BaseException:  # the first bad file, or Ctrl-C, must not wait for all others
            pool.shutdown(cancel_futures=True)
            raise
    return Photos(pixels, sizes)


def _channels(categories: Sequence[Category], device: torch.device) -> Channels:
    counts = [len(category.keypoints) for category in categories]
    flip: list[int] = []
    own = torch.zeros(len(counts), sum(counts), dtype=torch.bool)
    for number, category in enumerate(categories):
        first = len(flip)
        flip += [first + twin for twin in category.flip]
        own[number, first : len(flip)] = True
    names = tuple(category.name for category in categories)
    return Channels(names, torch.tensor(flip, device=device), own.to(device))


def _objects(found: KeypointSet, rows: dict[str, int], device: torch.device) -> Objects:
    total = sum(len(category.keypoints) for category in found.categories)
    count = len(found.objects)
    boxes, points = torch.empty(count, 4), torch.full((count, total, 2), torch.nan)
    visible = torch.zeros(count, total, dtype=torch.bool)
    for number, item in enumerate(found.objects):
        own, frame = found.channels[item.category], _frame(item)
        boxes[number] = frame.boxes_to_network(item.box)
        points[number, own.start : own.stop] = frame.to_network(item.points)
        visible[number, own.start : own.stop] = item.visible
    photo = torch.tensor([rows[item.name] for item in found.objects])
    category = torch.tensor([item.category for item in found.objects])
    return Objects(*(each.to(device) for each in (photo, category, boxes, points, visible)))


def _fingerprint(train: KeypointSet, test: KeypointSet) -> str:
    digest = hashlib.sha256(repr(train.categories).encode())
    for part in (train, test):
        digest.update(f"{len(part.objects)}".encode())
        for item in part.objects:
            digest.update(f"{item.name} {item.category}".encode())
            for tensor in (item.box, item.points.nan_to_num(-1.0)):
                digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]

"""The few-shot benchmark's sets: which objects are learned from, which are measured on, cut out.

Objects are cut out of their photos once for all rows and stay on the device as bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import torch
from torch import Tensor

from surefeat.data.keypoints import KeypointSet, Labelled, load_pascal3d
from surefeat.keypoints.config import Split
from surefeat.keypoints.views import CutObjects, cut_objects

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
    labelled: KeypointSet, *, classes: Sequence[str] | None = None, most: int | None = None
) -> KeypointSet:
    """Objects with at least one visible keypoint, of some classes, at most so many of each.

    Difficult, truncated and occluded objects stay in: what they do not show is not visible.
    """
    names = [category.name for category in labelled.categories]
    unknown = sorted(set(classes or ()) - set(names))
    if unknown:
        raise ValueError(f"there is no class {', '.join(unknown)}; choose from {', '.join(names)}")
    if most is not None and most < 1:
        raise ValueError(f"objects is {most}; use at least 1 per class")
    kept = [n for n, name in enumerate(names) if classes is None or name in classes]
    items: list[Labelled] = []
    for new, old in enumerate(kept):
        own = [one for one in labelled.objects if one.category == old and bool(one.visible.any())]
        if not own:
            raise ValueError(f"no object of {names[old]!r} shows a keypoint; leave the class out")
        count = min(len(own), most or len(own))
        spread = [own[i * len(own) // count] for i in range(count)]
        items += [replace(one, category=new) for one in spread]
    return KeypointSet(tuple(labelled.categories[n] for n in kept), tuple(items))


@dataclass(frozen=True, eq=False)
class SplitPart:
    """One side of a split, N objects."""

    objects: CutObjects
    category: Tensor
    """(N,) number of their class, on the CPU."""
    photo: Tensor
    """(N,) number of their photo, on the CPU."""

    def images_per_class(self, chosen: Tensor) -> int:
        """Of objects (M,): a photo with two classes counts in both."""
        both = torch.stack([self.category[chosen], self.photo[chosen]])
        distinct: Tensor = torch.unique(both, dim=1)
        return distinct.shape[1]


@dataclass(frozen=True, eq=False)
class FewShotData:
    """What all rows are measured on."""

    split: str
    classes: tuple[str, ...]
    train: SplitPart
    test: SplitPart
    fingerprint: str
    """Of names, boxes and keypoints of all objects."""
    seconds: float
    """That the photos took."""


def cut_sets(
    train: KeypointSet,
    test: KeypointSet,
    *,
    split: str,
    size: int,
    jitter: float,
    device: torch.device,
    workers: int = 16,
    quiet: bool = True,
) -> FewShotData:
    """Cut all objects out of their photos, those to learn from with room for jitter."""
    if train.categories != test.categories:
        raise ValueError("objects to train and to test on have other classes or keypoints")
    start = time.perf_counter()
    learned, asked = (
        _cut(part, size=size, jitter=room, device=device, workers=workers, quiet=quiet)
        for part, room in ((train, jitter), (test, 0.0))
    )
    names = tuple(category.name for category in train.categories)
    seconds = time.perf_counter() - start
    return FewShotData(split, names, learned, asked, _fingerprint(train, test), seconds)


def _cut(
    labelled: KeypointSet,
    *,
    size: int,
    jitter: float,
    device: torch.device,
    workers: int,
    quiet: bool,
) -> SplitPart:
    objects = cut_objects(
        labelled, size=size, jitter=jitter, device=device, workers=workers, quiet=quiet
    )
    names = {name: n for n, name in enumerate(dict.fromkeys(one.name for one in labelled.objects))}
    photo = torch.tensor([names[one.name] for one in labelled.objects])
    return SplitPart(objects, torch.tensor([one.category for one in labelled.objects]), photo)


def _fingerprint(train: KeypointSet, test: KeypointSet) -> str:
    digest = hashlib.sha256(repr(train.categories).encode())
    for part in (train, test):
        digest.update(f"{len(part.objects)}".encode())
        for item in part.objects:
            digest.update(f"{item.name} {item.category}".encode())
            for tensor in (item.box, item.points.nan_to_num(-1.0)):
                digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]

"""Which objects are learned from and which are measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from surefeat.data.keypoints import KeypointSet, Labelled
from surefeat.data.pascal3d import load_pascal3d
from surefeat.eval.fewshot_settings import Split

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

"""Categories of objects: the names of their keypoints, their channels, their mirrored twins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Category:
    """A kind of object and the names of its keypoints."""

    name: str
    keypoints: tuple[str, ...]
    flip: tuple[int, ...]
    """flip[i]: the keypoint that i becomes in a mirrored image; itself when it has no twin."""


def channels(categories: Iterable[Category]) -> tuple[range, ...]:
    """Consecutive channels, one per keypoint, for each category."""
    found, first = [], 0
    for category in categories:
        found.append(range(first, first + len(category.keypoints)))
        first += len(category.keypoints)
    return tuple(found)


def make_category(
    name: str, keypoints: Sequence[str], flip: Sequence[int] | None = None
) -> Category:
    """A checked category; without `flip`, names that differ by left and right (l, r) are twins."""
    names = tuple(str(keypoint) for keypoint in keypoints)
    twice = sorted({keypoint for keypoint in names if names.count(keypoint) > 1})
    if twice:
        fix = "give every keypoint its own name"
        raise ValueError(f"category {name!r} has two keypoints called {twice[0]!r}; {fix}")
    pairs = _twins(names) if flip is None else tuple(int(index) for index in flip)
    back = [pairs[i] if 0 <= i < len(pairs) else None for i in pairs]
    if len(pairs) != len(names) or back != list(range(len(names))):
        rule = f"it must name each of the {len(names)} keypoints' mirrored twin, counted from 0"
        raise ValueError(f"category {name!r} has flip {list(pairs)}; {rule}")
    return Category(str(name), names, pairs)


_SWAP = {"left": "right", "right": "left", "l": "r", "r": "l"}
# Whole words anywhere, also in leftEye; "l" and "r" only where they stand alone, as in eye.R.
_SIDES = (r"left|right", r"(?<![a-z])[lr](?![a-z])")


def _twins(names: tuple[str, ...]) -> tuple[int, ...]:
    places = {name.lower(): index for index, name in enumerate(names)}

    def twin(name: str, index: int) -> int:
        swapped = (re.sub(sides, lambda side: _SWAP[side[0]], name) for sides in _SIDES)
        return next(
            (places[other] for other in swapped if other != name and other in places), index
        )

    return tuple(twin(name.lower(), index) for index, name in enumerate(names))

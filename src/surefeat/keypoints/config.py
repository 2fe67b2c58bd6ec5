"""Settings of keypoint learning: a detector's own, and those of the benchmark that measures it.

Imports nothing heavy: the command line's help reads them. [P]: the paper, section 4.3; [C]: our
choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from surefeat.core.files import check_settings

Round = int | Literal["all"]

Split = Literal["val", "dev"]


@dataclass(frozen=True)
class KeypointConfig:
    """The head, its targets, the views it learns from and the loop.

    The defaults are what `surefeat keypoints fit` ships and what `surefeat evaluate pascal3d`
    measures; PAPER has the paper's own.
    """

    size: int = 224
    """Side of an object's crop, pixels [P]."""
    hidden: int = 128
    """Channels between the head's two layers; the paper has 512, four times the work, which ten
    labels do not repay [C]."""
    spread: float = 0.5
    """Standard deviation of a target's Gaussian, cells [P]."""
    floor: float = 0.2
    """Target values below this are 0 [P]."""
    weight: float = 50.0
    """Lambda: of the targets' own cells in the loss; 50 is for maps of 12x12 cells [P]."""
    absent: Literal["background", "ignored"] = "background"
    """What an object teaches about keypoints it has no place for (v = 0): that they are nowhere in
    its box, as of parts that cannot be seen [P], or nothing, for sets labelled in part."""
    jitter: float = 1 / 6
    """Each side of a box moves by up to this share of its size [P]."""
    mirror: bool = True
    """Mirror every second view, and swap the names of left and right [P]."""
    views: int = 6
    """Of each object, described once and kept; the paper draws new ones in every step [C]."""
    least_views: int = 60
    """Of all objects together: few objects get more views of each [C]."""
    batch: int = 8
    """Views per step; 32 of ten labels find no more [C]."""
    epochs: int = 3
    """Passes over all objects [P]."""
    least_steps: int = 500
    """Of an epoch of 12 categories, the paper's number, which may be more steps than there are
    objects for [P]; fewer categories get fewer, in proportion [C]."""
    learning_rate: float = 1e-3
    """Of AdamW at the start; it falls to 0 along half a cosine [C]."""
    weight_decay: float = 1e-2
    """Of AdamW [C]."""

    def __post_init__(self) -> None:
        whole = ("size", "hidden", "views", "batch", "epochs", "least-steps")
        check_settings(self, least=dict.fromkeys(whole, 1), most={})
        if not 0 <= self.jitter < 0.5:
            raise ValueError(f"jitter is {self.jitter:g}; a side moves by less than half a box")

    def steps(self, objects: int, *, categories: int) -> int:
        """Of a fit on this many objects; a category learns from its own alone, so each has its
        share of the least steps."""
        least = math.ceil(self.least_steps * categories / _CATEGORIES)
        return self.epochs * max(least, math.ceil(objects / self.batch))

    def views_each(self, objects: int) -> int:
        """Of every one of this many objects."""
        return max(self.views, math.ceil(self.least_views / objects))


PAPER = KeypointConfig(hidden=512, views=8, least_views=2048, batch=32)
"""The paper's head (section 4.3); it sees new views in every step, these are many that recur."""

_CATEGORIES = 12
"""The paper's."""


@dataclass(frozen=True)
class FewShot:
    """The protocol of the few-shot benchmark (paper, section 4.3)."""

    rounds: tuple[Round, ...] = (1, 2, 5, 10, 20, 50, 100, "all")
    """Annotated images per class, rising; each round adds to those before [P], the sizes [C]."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One repetition each [P]: other images, other initial heads, other batches. Views of rounds
    with many objects are the same for all."""
    cells: int = 14
    """Common side of all rows' maps: finer ones are averaged, coarser ones interpolated [C]."""

    def __post_init__(self) -> None:
        sizes = [float("inf") if size == "all" else size for size in self.rounds]
        if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"rounds are {self.rounds}; they must rise from 1 on, 'all' the last")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are {self.seeds}; name each once, from 0 on, such as 0 1 2")
        if self.cells < 1:
            raise ValueError(f"cells is {self.cells}; use at least 1")

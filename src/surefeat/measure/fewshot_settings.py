"""The few-shot protocol's numbers (paper, section 4.3), each with its unit and source."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Round = int | Literal["all"]

Split = Literal["val", "dev"]


@dataclass(frozen=True)
class FewShot:
    """How a head is trained on growing annotation and measured. [P]: the paper; [C]: our choice."""

    rounds: tuple[Round, ...] = (1, 2, 5, 10, 20, 50, 100, "all")
    """Annotated images per class, rising; each round adds to those before [P], the sizes [C]."""
    seeds: int = 3
    """Repetitions [P]: other images, other initial heads, other batches. Views of rounds with many
    objects are the same for all seeds."""
    side: int = 224
    """Pixels of a crop's side [P]."""
    cells: int = 14
    """Common side of all rows' maps: finer ones are averaged, coarser ones interpolated [C]."""
    views: int = 8
    """Augmented crops per training object, half of them mirrored; computed once [C]."""
    least_views: int = 2048
    """A round with fewer objects gets more views of each, until there are so many [C]."""
    jitter: float = 1 / 6
    """Each side of a training box moves by up to this share of its width or height [P]."""
    spread: float = 0.5
    """Standard deviation of a target's Gaussian, cells [P]."""
    floor: float = 0.2
    """Target values below this are 0 [P]."""
    emphasis: float = 50.0
    """Lambda: extra weight of the cells at a keypoint; 50 is for 12x12 maps [P]."""
    absent: Literal["background", "ignored"] = "background"
    """What an object teaches about its class's keypoints that are not visible: that they are
    nowhere in its box [P], or nothing."""
    hidden: int = 512
    """Channels between the head's two convolutions [P]."""
    epochs: int = 3
    """Per round [P]."""
    least_steps: int = 500
    """Of an epoch, which may be more steps than there are objects for [P]."""
    batch: int = 32
    """Views per step [C]."""
    learning_rate: float = 1e-3
    """AdamW's, falling to 0 along half a cosine in every round [C]."""
    weight_decay: float = 1e-2
    """AdamW's [C]."""

    def __post_init__(self) -> None:
        sizes = [float("inf") if each == "all" else each for each in self.rounds]
        if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"rounds are {self.rounds}; they must rise from 1 on, 'all' the last")
        whole = ("seeds", "cells", "views", "epochs", "least_steps", "batch", "hidden")
        wrong = [name for name in whole if getattr(self, name) < 1]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} must be at least 1")

    def steps(self, objects: int) -> int:
        """Of a round with this many objects."""
        return self.epochs * max(self.least_steps, -(-objects // self.batch))

"""Every knob of a keypoint detector; the tags [P] and [C] are those of config.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KeypointConfig:
    """The head, its targets, the views it learns from and the loop (paper, section 4.3)."""

    size: int = 224
    """Side of an object's crop, pixels [C]."""
    hidden: int = 128
    """Channels between the head's two layers; the paper has 512, four times the work [C]."""
    spread: float = 0.5
    """Standard deviation of a target's Gaussian, cells [P]."""
    floor: float = 0.2
    """Target values below this are 0 [P]."""
    weight: float = 50.0
    """Of the targets' own cells in the loss; Tulsiani and Malik have it for 12x12 cells [C]."""
    absent: Literal["background", "ignored"] = "background"
    """What an object teaches about keypoints it has no place for (v = 0): that they are nowhere in
    its box, as of parts that cannot be seen [C], or nothing, for sets labelled in part."""
    jitter: float = 1 / 6
    """Each side of a box moves by up to this share of its size [P]."""
    mirror: bool = True
    """Mirror every second view on average, and swap the names of left and right [P]."""
    views: int = 4
    """Per object, the first through its own box [C]."""
    most_views: int = 2000
    """Over all objects: many labels need fewer views each [C]."""
    batch: int = 8
    """Views per step [C]."""
    steps: int = 100
    """At least so many steps; the paper has 500 per epoch [C]."""
    epochs: int = 3
    """At least so many passes over all views [P]."""
    learning_rate: float = 1e-3
    """Of AdamW at the start; it falls to 0 along half a cosine [C]."""
    weight_decay: float = 1e-2
    """Of AdamW [C]."""
    seed: int = 0
    """Determines everything drawn, on one machine."""

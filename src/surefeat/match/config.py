"""Settings of the room that the command line shows; importing them costs nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProposalConfig:
    """Which boxes of an image compete, by Randomized Prim; its numbers were tuned on VOC train."""

    count: int = 1000
    """Boxes per image at most [P]."""
    seed: int = 0
    """Of their drawing."""
    side: int = 320
    """Longest side of the image that is segmented, px; larger ones are shrunk. 256 loses 3 recall
    at 0.5."""
    blur: float = 0.8
    """Before the segmentation, standard deviation, px (Manen et al.)."""
    scale: float = 100.0
    """k of the graph segmentation (Manen et al.)."""
    superpixel: int = 50
    """The smallest, px of the shrunk image; Manen et al. have 100 at full size."""
    draws: int = 2500
    """Trees per colour space. 1,500 instead of 1,000 gained 2 points of recall at 0.5."""
    overlaps: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0)
    """Boxes are kept coarse to fine by these IoUs; (1.0,) keeps them simply at random."""

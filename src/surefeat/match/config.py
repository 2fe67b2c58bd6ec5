"""Settings of the room that the command line shows; importing them costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProposalMethod = Literal["prim", "selective", "grid"]


@dataclass(frozen=True)
class ProposalConfig:
    """Which boxes of an image compete. Numbers of Randomized Prim were tuned on VOC train."""

    method: ProposalMethod = "prim"
    """Randomized Prim, OpenCV's selective search, or a plain grid."""
    count: int = 1000
    """Boxes per image at most [P]."""
    seed: int = 0
    """Of their drawing."""
    side: int = 320
    """Prim: longest side of the image that is segmented, px; larger ones are shrunk. 256 loses 3
    recall at 0.5."""
    blur: float = 0.8
    """Prim: before the segmentation, standard deviation, px (Manen et al.)."""
    scale: float = 100.0
    """Prim: k of the graph segmentation (Manen et al.)."""
    superpixel: int = 50
    """Prim: the smallest, px of the shrunk image; Manen et al. have 100 at full size."""
    draws: int = 2500
    """Prim: trees per colour space. 1,500 instead of 1,000 gained 2 points of recall at 0.5."""
    border: float = 0.0
    """Prim: boxes that reach into this outer share of the image are dropped. Proposal Flow drops
    0.01; on VOC, where the frame cuts many objects, that costs 11 points of recall at 0.5."""
    overlaps: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0)
    """Prim: boxes are kept coarse to fine by these IoUs; (1.0,) keeps them simply at random."""

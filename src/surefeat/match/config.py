"""Which boxes are proposed: settings alone, nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProposalMethod = Literal["prim", "selective", "grid"]


@dataclass(frozen=True)
class ProposalConfig:
    """Which boxes compete."""

    method: ProposalMethod = "prim"
    """Randomized Prim, OpenCV's selective search, or a plain grid."""
    count: int = 1000
    """Boxes per image at most [C]; Bilen & Vedaldi have about 2000."""
    seed: int = 0
    """Of their drawing."""

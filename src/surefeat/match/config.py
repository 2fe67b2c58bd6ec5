"""match.config"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProposalMethod = Literal["prim", "selective", "edges", "grid"]


@dataclass(frozen=True)
class ProposalConfig:
    """Which boxes compete."""

    method: ProposalMethod = "prim"
    """Randomized Prim, OpenCV's selective search, EdgeBoxes [P], or a plain grid."""
    count: int = 1000
    """Boxes per image at most [C]; Bilen & Vedaldi have about 2000."""
    seed: int = 0
    """Of their drawing."""
    edge_model: str = ""
    """File of OpenCV's structured edge detector, for EdgeBoxes as published; without it they work
    on a thinned gradient map."""

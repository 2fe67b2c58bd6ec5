"""What the measurement of semantic matching fixes, and what it is called.

Imports nothing heavy: the command line's help reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from surefeat.match.config import ProposalConfig

if TYPE_CHECKING:
    from surefeat.match.votes import Voting

Measure = Literal[
    "nearest", "voting", "location", "regions", "flow", "mean-flow", "published-flow", "own"
]

MEASURES: tuple[Measure, ...] = get_args(Measure)
"""nearest: keypoints by nearest neighbour; voting: neighbours that move alike support each other,
the default of all matching; location: nearest neighbour with a bonus for the same place, a control;
regions: PCR and mIoU; flow: keypoints by the paper's route, region matches -> dense flow -> SD
filter; mean-flow: the same, but regions are pooled by means, not maxima; published-flow: as flow,
but on the row's own map with SCNet's rounding of boxes to cells, as the paper was measured; own:
keypoints as a row itself moves them, for rows that have a way of their own."""

USUAL: tuple[Measure, ...] = tuple(name for name in MEASURES if name != "published-flow")
"""Measured if nothing else is asked for."""

POINT_MEASURES: tuple[Measure, ...] = (
    "flow",
    "mean-flow",
    "published-flow",
    "nearest",
    "voting",
    "location",
    "own",
)

REGION_MEASURES: tuple[Measure, ...] = ("regions", "flow", "mean-flow", "published-flow")
"""Those that need proposals."""

ALPHAS = (0.05, 0.1, 0.15)
"""Of PCK."""

SHIFTED: tuple[Measure, ...] = ("nearest", "voting", "location", "regions", "own")
"""Measured with image 1 shifted, if nothing else is asked for."""


@dataclass(frozen=True)
class LocationBonus:
    """Control: what is gained by knowing that objects of a benchmark lie alike."""

    weight: float = 0.2
    """Added to the similarity at the same place; chosen on PF-PASCAL val with res4c (nearest
    neighbour 57.5, with the bonus 67.9)."""
    reach: float = 0.3
    """Standard deviation of the Gaussian, in sides of the square input; chosen likewise."""


def _voting() -> Voting:
    from surefeat.match.votes import Voting

    return Voting()


@dataclass(frozen=True)
class Protocol:
    """Settings of the evaluation; every result file prints them."""

    side: int = 224
    """Images are resized to this square, pixels; aspect is not kept, as in SCNet's evaluator."""
    inputs: tuple[int, ...] = ()
    """Sides at which the network sees that square, pixels; with several, their scores add up.
    None given: as it is."""
    measures: tuple[Measure, ...] = USUAL
    """What is measured on the pairs as they are."""
    shifted_measures: tuple[Measure, ...] = SHIFTED
    """What is measured again with image 1 shifted; flow costs the most and may be added."""
    shift: float = 45.0
    """Of image 1 to the right, in 224ths of its width, mirrored behind."""
    pooled_cells: int = 28
    """Maps with fewer cells a side are upsampled to this for region pooling. Chosen on PF-PASCAL
    val: 14 cells snap boxes to 16 px and cost res4c 9.6 points of flow PCK@0.1 (55.1, not 64.7)."""
    proposals: ProposalConfig = field(default_factory=ProposalConfig)
    voting: Voting = field(default_factory=_voting)
    location: LocationBonus = field(default_factory=LocationBonus)

    @property
    def seen(self) -> tuple[int, ...]:
        """Sides at which the network sees the square."""
        return self.inputs or (self.side,)

    def __post_init__(self) -> None:
        for flag, sides in (("side", (self.side,)), ("inputs", self.inputs)):
            for side in sides:
                if not 16 <= side <= 4096:
                    raise ValueError(f"--{flag} is {side}; use 16 to 4096 pixels")
        if not set(self.shifted_measures) <= set(self.measures):
            raise ValueError(
                f"shifted measures {self.shifted_measures} must be among {self.measures}"
            )

"""Do two photos show the same kind of thing, and has a point a counterpart at all?

Both photos are looked at as coarse grids of cells. A cell's best similarity in the other photo says
little by itself, because sky resembles sky: what counts is by how much it exceeds the best among
the model's cohort, places of many other photos. Of a photo unlike all of these, whose cells have
nothing similar there, an excess says less: so how similar they are to the cohort counts too. Cells
weigh by the square of their confidence, as measurements do by 1 / sigma^2. The pair is judged by
the last of the lower layers alone, which tells kinds of things (those before it see outlines, and a
cup has a face's), and which is the same whatever a head has learned on top of it.
Convention: points are original pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.match.search import Side, even_grid
from surefeat.match.votes import chosen, voting_grid
from surefeat.model.probability import Reliability

GRID = 14
"""Cells along the longer side of a photo."""

TEMPERATURE = 0.015
"""Two cells choose each other by softmax(similarity / temperature) over the one photo times over
the other."""

REACH = 0.12
"""Standard deviation of the neighbourhoods whose cells support a match, longer sides."""

PAIR_SIGNS = ("excess", "common")
"""Means over the cells of both photos: by how much the best in the other photo exceeds the best in
the cohort, and how similar that is."""

POINT_SIGNS = (
    "score", "excess0", "excess1", "margin", "round_trip", "confidence0", "confidence1", "support",
    "facing",
)  # fmt: skip

# Added to the round trip before the logarithm, in longer sides: below a cell it says nothing more.
_ROUND_TRIP_FLOOR = 0.01


@dataclass(frozen=True, eq=False)
class Cells:
    """One photo as a coarse grid."""

    points: Tensor
    """(n, 2) original pixels."""
    vectors: Tensor
    """(n, K): inner products are similarities, as in matching."""
    kind: Tensor
    """(n, D): the last of the lower layers alone, unit length."""
    confidence: Tensor
    """(n,) 1/sigma."""
    common: Tensor
    """(n,): the highest similarity with the model's cohort, by the same layer."""

    def shares(self) -> Tensor:
        """(n,) that add up to 1: how much each cell counts."""
        weights = self.confidence.square()
        return weights / weights.sum()

    @staticmethod
    def of(side: Side) -> Cells:
        """The cells of a photo whose model has a cohort."""
        features = side.features
        points = even_grid(features, size=voting_grid(features.frame.network, GRID))
        return Cells(
            points, side.at(points), features.kind_at(points), features.confidence_at(points),
            features.common_kind_at(points),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Agreement:
    """What the cells of two photos have in common."""

    cells0: Cells
    cells1: Cells

    @cached_property
    def similarity(self) -> Tensor:
        """(n0, n1), as in matching."""
        return self.cells0.vectors @ self.cells1.vectors.T

    @cached_property
    def chosen(self) -> Tensor:
        """(n0, n1) in [0, 1]: how far two cells choose each other."""
        return chosen(self.similarity, TEMPERATURE)

    def signs(self) -> dict[str, Tensor]:
        """PAIR_SIGNS, one number each; the same with the photos exchanged."""
        both, alike = [], self.cells0.kind @ self.cells1.kind.T
        for cells, axis in ((self.cells0, 1), (self.cells1, 0)):
            rows = torch.stack([alike.amax(axis) - cells.common, cells.common])
            both.append(rows @ cells.shares())
        return dict(zip(PAIR_SIGNS, torch.stack(both).mean(0), strict=True))

    def facing(self) -> Tensor:
        """From -1 to 1: how far what lies right in one photo lies right in the other too.

        The correlation of the x of cells that choose each other. Things that face opposite ways
        hide from each other what only one side has.
        """
        weights = self.chosen * (self.cells0.confidence[:, None] * self.cells1.confidence).sqrt()
        weights = weights / weights.sum()
        x0, x1 = self.cells0.points[:, 0], self.cells1.points[:, 0]
        x0, x1 = x0 - weights.sum(1) @ x0, x1 - weights.sum(0) @ x1
        spread = (weights.sum(1) @ x0.square()) * (weights.sum(0) @ x1.square())
        return (x0 @ weights @ x1) / spread.sqrt().clamp_min(1e-6)

    def support(self, points0: Tensor, points1: Tensor) -> Tensor:
        """(N,) in [0, 1]: how much of what the cells around points0 choose lies around points1."""
        near0, near1 = (
            _near(points, cells.points)
            for points, cells in ((points0, self.cells0), (points1, self.cells1))
        )
        both = (near0 @ self.chosen * near1).sum(1)
        return both / near0.sum(1)


def _near(points: Tensor, cells: Tensor) -> Tensor:
    """(N, 2) and (n, 2) -> (N, n): how near, in [0, 1]."""
    longer = (cells.amax(0) - cells.amin(0)).max().clamp_min(1.0) * GRID / (GRID - 1)
    return (-0.5 * (torch.cdist(points, cells) / (REACH * longer)).square()).exp()


def compare(side0: Side, side1: Side) -> Agreement:
    """Two photos cell by cell; both must come from a model with a cohort."""
    return Agreement(Cells.of(side0), Cells.of(side1))


def point_signs(
    side0: Side, side1: Side, agreement: Agreement, matches: dict[str, Tensor]
) -> dict[str, Tensor]:
    """POINT_SIGNS (N,) of matches, given by name as Matches has them.

    What spreads over orders of magnitude counts by its logarithm.
    """
    points0, points1, score = (matches[name] for name in ("points0", "points1", "score"))
    trip = matches["round_trip"] / max(side0.features.frame.original)
    lower = (side0.features.lower_at(points0) * side1.features.lower_at(points1)).sum(1)
    values = (
        score,
        lower - side0.features.common_at(points0), lower - side1.features.common_at(points1),
        matches["margin"], (trip + _ROUND_TRIP_FLOOR).log(),
        side0.features.confidence_at(points0).log(), side1.features.confidence_at(points1).log(),
        (agreement.support(points0, points1) + 1e-3).log(), agreement.facing().expand_as(score),
    )  # fmt: skip
    return dict(zip(POINT_SIGNS, values, strict=True))


def judge(
    side0: Side, side1: Side, reliability: Reliability, matches: dict[str, Tensor]
) -> tuple[float, Tensor]:
    """The probability that the photos are related, and of every match (N,).

    A point has a counterpart only in a related photo: the second is the first times the probability
    that, of related photos, it has one and it was found.
    """
    agreement = compare(side0, side1)
    related = torch.sigmoid(reliability.pair.log_odds(agreement.signs()))
    given = reliability.point.log_odds(point_signs(side0, side1, agreement, matches))
    return float(related), related * torch.sigmoid(given)


def pooled_vector(cells: Cells, centre: Tensor) -> Tensor:
    """(D,) unit length: the mean of a photo's cells, by confidence, from the cohort's centre (D,).

    Uncentred, all photos resemble each other: what most have in common dominates the mean.
    """
    return F.normalize(cells.shares() @ cells.kind - centre, dim=0)

"""Points of one image found in another: `match_points`, and the `Matches` that come of it.

Which points, where nobody says: confident ones, near the image's middle, spread out. All are in
original pixels; regions and every pixel are matched by the files beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from surefeat.match.related import judge
from surefeat.match.search import Peaks, Side, find, prepare_pair, vote_both_ways
from surefeat.match.votes import POSES, Votes, Voting
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features, stack_points
from surefeat.model.probability import Reliability, mean_predicted_loss

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MIDDLE = 0.25
"""Standard deviation of the Gaussian over a photo by which places near its middle count more, in
longer sides: what a photo is of stands there more often than in its corners."""


def quality(side: Side) -> Tensor:
    """(T,) for each place: its confidence, times how near the middle it is.

    Of the ways that were tried it gives the most right matches for 20, 60 and 200 points, on
    PF-PASCAL and on birds (docs/studies/related.md).
    """
    height, width = side.features.frame.original
    middle = side.points.new_tensor([width - 1, height - 1]) / 2
    away = (side.points - middle) / (MIDDLE * max(height, width))
    return side.features.confidence_at(side.points) * (-0.5 * away.square().sum(1)).exp()


def spread(quality: Tensor, *places: Tensor, count: int) -> Tensor:
    """Indices of up to `count` of N candidates, the best first, no two too close in any image.

    quality (N,); places: per image (N, 2). Too close is half the spacing of `count` points spread
    evenly over the box of all places: so many always fit into one image.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    order = quality.argsort(descending=True, stable=True)
    # Greedy choice is sequential: on the CPU, where many tiny steps cost little.
    placed = [points[order].cpu() for points in places]
    free = torch.ones(len(order), dtype=torch.bool)
    chosen: list[int] = []
    for candidate in range(len(order)):
        if len(chosen) < count and free[candidate]:
            chosen.append(candidate)
            for points in placed:
                square = (points.amax(0) - points.amin(0)).prod() / (4 * count)
                free &= (points - points[candidate]).square().sum(-1) >= square
    return order[torch.tensor(chosen, dtype=torch.long, device=order.device)]


class PointMatch(NamedTuple):
    """One match, in plain numbers."""

    point0: tuple[float, float]
    """x, y in original pixels of image 0."""
    point1: tuple[float, float]
    """x, y in original pixels of image 1."""
    score: float
    confidence: float
    mutual: bool
    probability: float | None


@dataclass(frozen=True, eq=False)
class Matches:
    """N points of image 0 and where they lie in image 1; iterating gives `PointMatch`es."""

    points0: Tensor
    """(N, 2) original pixels of image 0."""
    points1: Tensor
    """(N, 2) original pixels of image 1."""
    score: Tensor
    """(N,) similarity in [-1, 1]."""
    confidence: Tensor
    """(N,) of both places: 2 / (sigma0 + sigma1)."""
    margin: Tensor
    """(N,) the peak minus the best score outside its neighbourhood, votes included."""
    round_trip: Tensor
    """(N,) distance from the point after matching back, original pixels of image 0."""
    mutual: Tensor
    """(N,) bool: matching back leads to the place the point came from."""
    index: Tensor
    """(N,) which of the given or chosen points."""
    size0: tuple[int, int]
    """(height, width) of image 0."""
    size1: tuple[int, int]
    """(height, width) of image 1."""
    probability: Tensor | None = None
    """(N,) that the point has a counterpart in image 1 and that points1 is it, within a tenth of
    the longer side; None where the model has no fitted Reliability."""
    related: float | None = None
    """The probability that both images show the same kind of thing; None as above."""
    without_labels: bool = False
    """Both were fitted without labels, when the model was trained (learn.trust)."""

    def __len__(self) -> int:
        return len(self.score)

    def __iter__(self) -> Iterator[PointMatch]:
        chances = [None] * len(self) if self.probability is None else self.probability.tolist()
        columns = (self.points0, self.points1, self.score, self.confidence, self.mutual)
        rows = zip(*(column.tolist() for column in columns), chances, strict=True)
        for point0, point1, *rest in rows:
            yield PointMatch(tuple(point0), tuple(point1), *rest)

    @property
    def trusted_score(self) -> Tensor:
        """(N,) in [0, 1]: similarity times how far both confidences let it speak.

        The factor is the gap that the paper's density expects between the scores of matches and of
        non-matches: 1 where sigma is 0, 0 where it is infinite.
        """
        gap = 1 - 2 * mean_predicted_loss(self.confidence.reciprocal())
        return self.score.clamp_min(0) * gap

    def filter(
        self,
        *,
        probability: float | None = None,
        score: float | None = None,
        confidence: float | None = None,
        margin: float | None = None,
        round_trip: float | None = None,
        mutual: bool = False,
    ) -> Matches:
        """The matches that pass every given limit, in the same order.

        All limits are inclusive and the least that is kept, but round_trip, which is the most.
        """
        keep = self.mutual.clone() if mutual else torch.ones_like(self.mutual)
        if round_trip is not None:
            keep &= self.round_trip <= round_trip
        if probability is not None:
            if self.probability is None:
                raise ValueError("these matches have no probability; pass reliability= to match")
            keep &= self.probability >= probability
        for name, limit in {"score": score, "confidence": confidence, "margin": margin}.items():
            if limit is not None:
                keep &= getattr(self, name) >= limit
        return self.take(keep)

    def take(self, rows: Tensor) -> Matches:
        """Some of the matches, by index (M,) or mask (N,)."""
        cut: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        cut |= {name: value[rows] for name, value in cut.items() if isinstance(value, Tensor)}
        return Matches(**cut)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["trusted_score"] = self.trusted_score
        return {
            k: v.tolist() if isinstance(v, Tensor) else list(v) if isinstance(v, tuple) else v
            for k, v in values.items()
        }

    def to_json(self) -> str:
        """The same as a JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def numpy(self) -> dict[str, npt.NDArray[np.generic]]:
        """What there is of every match as NumPy arrays, by name; probability only where known."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {k: v.cpu().numpy() for k, v in values.items() if isinstance(v, Tensor)}


@torch.no_grad()
def match_points(
    features0: Features,
    features1: Features,
    points0: object = None,
    *,
    count: int = 200,
    voting: bool | Voting = True,
    descriptor_weight: float = POINT_WEIGHTS[0],
    lower_weight: float = POINT_WEIGHTS[1],
    refine: bool = True,
    mutual: bool = False,
    min_score: float | None = None,
    reliability: Reliability | None = None,
) -> Matches:
    """Where points0 (N, 2), original pixels of image 0, lie in image 1.

    Without points, up to `count` confident places near the middle of image 0 are chosen, spread
    out; with `mutual`, of both images, so that exchanging the images exchanges the matches.
    voting: let neighbours that move alike support each other, whichever way the two things face;
    other settings than the default (a Voting) are taken, but give no probability.
    descriptor_weight, lower_weight: shares of the two layers in the similarity.
    refine: place matches between the grid's places. mutual: keep only matches that lead back.
    reliability: gives each match its probability; by default the model's own, if it has one.
    """
    settings = Voting() if voting is True else voting or None
    weights = (descriptor_weight, lower_weight)
    sides = prepare_pair(
        features0, features1, descriptor_weight=descriptor_weight, lower_weight=lower_weight
    )
    there, back = vote_both_ways(*sides, settings) if settings else (None, None)
    if points0 is not None:
        points = stack_points(points0).to(features0.descriptors.device)
        check_inside(points, features0.frame.original)
    else:
        points = _places(*sides, there, back, count=count, mutual=mutual)
    matches = _match(*sides, points, there, back, refine=refine)
    matches = _judge(matches, *sides, reliability, matching_text(settings, weights))
    return matches.filter(mutual=mutual, score=min_score)


def match_many(
    features0: Features | Sequence[Features],
    features1: Sequence[Features],
    *,
    count: int = 200,
    voting: bool | Voting = True,
    mutual: bool = False,
) -> list[Matches]:
    """One image against each of many, or many pairs: the first with the first, and so on.

    The other arguments are those of `match_points`.
    """
    first = [features0] * len(features1) if isinstance(features0, Features) else features0
    if len(first) != len(features1):
        fix = "pass one, or as many as of the other"
        raise ValueError(f"{len(first)} images and {len(features1)} images are no pairs; {fix}")
    return [
        match_points(one, other, count=count, voting=voting, mutual=mutual)
        for one, other in zip(first, features1, strict=True)
    ]


def _match(
    side0: Side,
    side1: Side,
    points0: Tensor,
    there: Votes | None,
    back: Votes | None,
    *,
    refine: bool,
) -> Matches:
    """Match and match back; nothing is left out."""
    peaks = find(side0, side1, points0, there, refine=refine, margin=True)
    returned = find(side1, side0, peaks.points, back, refine=refine)
    sigma0 = side0.features.confidence_at(points0).reciprocal()
    sigma1 = side1.features.confidence_at(peaks.points).reciprocal()
    return Matches(
        points0=points0,
        points1=peaks.points,
        score=peaks.score,
        confidence=2 / (sigma0 + sigma1),
        margin=peaks.margin,
        round_trip=(returned.points - points0).norm(dim=-1),
        mutual=_leads_back(side0, side1, points0, peaks, back),
        index=torch.arange(len(points0), device=points0.device),
        size0=side0.features.frame.original,
        size1=side1.features.frame.original,
    )


def matching_text(voting: Voting | None, weights: tuple[float, float]) -> str:
    """How matches are found, as text: what a Reliability was fitted with."""
    votes = f"{voting}, {sum(map(len, POSES))} poses" if voting else "nearest neighbour"
    return f"{votes}, layers weigh {weights[0]:g} and {weights[1]:g}"


def _judge(
    matches: Matches, side0: Side, side1: Side, given: Reliability | None, matching: str
) -> Matches:
    """The matches with their probability, and the pair's, by the given Reliability or the model's.

    Of two models, two sizes or other settings than it was fitted with a model's own says nothing.
    """
    own = (side0.features.reliability, side1.features.reliability)
    known = given or (own[0] if own[0] == own[1] else None)
    if given is not None and given.matching != matching:
        raise ValueError(
            f"this reliability was fitted on matches by {given.matching}; match so, or fit "
            f"another (now: {matching})"
        )
    unseen = side0.features.common is None or side1.features.common is None
    if known is None or known.matching != matching or unseen:
        return matches
    rows = {name: value for name, value in vars(matches).items() if isinstance(value, Tensor)}
    related, probability = judge(side0, side1, known, rows)
    return replace(
        matches, related=related, probability=probability, without_labels=known.without_labels
    )


def _leads_back(
    side0: Side, side1: Side, points0: Tensor, peaks: Peaks, back: Votes | None
) -> Tensor:
    """(N,) bool: the place found, unrefined, has its own best in the place that holds the point.

    Both ways lead from places to places, so it is the same question with the images exchanged.
    """
    returned = find(side1, side0, side1.points[peaks.index], back, refine=False)
    cells = side0.cells(points0, side0.size)
    limit = cells.new_tensor([side0.size[1] - 1, side0.size[0] - 1])
    column, row = (cells + 0.5).floor().clamp_min(0).minimum(limit).long().unbind(-1)
    return returned.index == row * side0.size[1] + column


def _places(
    side0: Side, side1: Side, there: Votes | None, back: Votes | None, *, count: int, mutual: bool
) -> Tensor:
    """Up to `count` of the best places of image 0 (N, 2), spread out.

    With `mutual`, of those that find each other with a place of image 1, spread in both.
    """
    if not mutual:
        return side0.points[spread(quality(side0), side0.points, count=count)]
    forward = find(side0, side1, side0.points, there, refine=False).index
    backward = find(side1, side0, side1.points, back, refine=False).index
    every = torch.arange(len(forward), device=forward.device)
    source = every[backward[forward] == every]
    target = forward[source]
    both = quality(side0)[source] * quality(side1)[target]
    chosen = spread(both, side0.points[source], side1.points[target], count=count)
    return side0.points[source[chosen]]


def check_inside(points: Tensor, size: tuple[int, int]) -> None:
    """Refuse points (N, 2) beyond image 0 of this (height, width)."""
    height, width = size
    top = points.new_tensor([width, height]) - 0.5
    # Written as what is right, so that NaN is wrong.
    outside = ~((points >= -0.5) & (points <= top)).all(-1)
    if bool(outside.any()):
        index = int(outside.nonzero()[0])
        x, y = points[index].tolist()
        raise ValueError(
            f"point {index} ({x:g}, {y:g}) lies outside image 0, which is {width} x {height} "
            "(width x height); points are x, y in its original pixels"
        )

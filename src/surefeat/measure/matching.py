"""Measuring semantic matching (paper, section 4.2): from features to a record of each pair.

A record holds plain numbers: where the keypoints went (original pixels of image 1), how sure the
row was, and the IoU of its region matches. All metrics follow from records, see results.py.
Convention: in here everything happens in the square the network sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import Frame, box_iou
from surefeat.core.image import resize
from surefeat.match.dense import flow_from_regions, transfer_points
from surefeat.match.regions import match_regions, score_regions
from surefeat.match.sd_filter import sd_filter
from surefeat.match.search import Side, find, peak_offset, prepare, vote
from surefeat.measure.material import Case, FeatureStore, Key
from surefeat.measure.metrics import identity_points
from surefeat.measure.protocol import REGION_MEASURES, LocationBonus, Measure, Protocol
from surefeat.measure.rows import RegionPair, Row
from surefeat.model.features import Features, Pooling
from surefeat.model.probability import mean_predicted_loss

Record = dict[str, Any]

POINT_DIGITS, SHARE_DIGITS = 3, 6
"""Decimals kept of pixels, and of scores and IoUs."""


SparseFlow = tuple[Tensor, Tensor]
"""A field (S, S, 2) from region matches before the SD filter, and where it is known, (S, S)."""


@torch.no_grad()
def measure(
    cases: Sequence[Case],
    row: Row,
    features: FeatureStore,
    pictures: Mapping[Key, Tensor],
    protocol: Protocol,
    originals: Mapping[Key, Tensor] | None = None,
) -> list[Record]:
    """Records of several cases; their fields are smoothed together.

    originals: the pictures at their own size, for the measure `own`.
    """
    records, flows = [], []
    for whole in cases:
        case = replace(whole, measures=row.asked(whole.measures))
        record = _start_record(case)
        if set(case.measures) & {"nearest", "voting", "location"}:
            first, second = (features[key] for key in case.keys)
            _measure_points(record, case, row, first, second, protocol)
        if "own" in case.measures:
            moved = _own_points(case, row, originals or {}, features.device)
            record["own"] = {"points": _rounded(moved, POINT_DIGITS)}
        if set(REGION_MEASURES) & set(case.measures):
            first, second = (features[key] for key in case.keys)
            iou, by_route = _measure_regions(case, row, first, second, protocol)
            if "regions" in case.measures:
                record["iou_by_rank"] = _rounded(iou, SHARE_DIGITS)
            flows += [(case, record, route, flow) for route, flow in by_route.items()]
        records.append(record)
    if flows:
        device = features.device
        guides = torch.stack([pictures[case.keys[0]] for case, _, _, _ in flows]).to(device)
        guides = resize(guides, size=(protocol.side, protocol.side))
        values, masks = (torch.stack([flow[n] for *_, flow in flows]).to(device) for n in (0, 1))
        fields = sd_filter(values.permute(0, 3, 1, 2), masks, guides).permute(0, 2, 3, 1).cpu()
        for (case, record, route, _), field in zip(flows, fields, strict=True):
            points0 = _network_points(case, protocol.side)
            record[route] = {"points": _original(transfer_points(field, points0), case, protocol)}
    return records


def _start_record(case: Case) -> Record:
    """Which case it is, and the control that looks at nothing."""
    pair = case.pair
    same = identity_points(pair.common()[0], size0=pair.size0, size1=pair.size1)
    return {
        "pair": case.number,
        "variant": case.variant,
        "identity": {"points": _rounded(same, POINT_DIGITS)},
    }


def _own_points(
    case: Case, row: Row, originals: Mapping[Key, Tensor], device: torch.device
) -> Tensor:
    """The common keypoints of image 0 (V, 2) where the row's own way puts them in image 1."""
    assert row.transfer is not None
    images = [originals[key].to(device) for key in case.keys]
    return row.transfer(images[0], images[1], case.pair.common()[0].to(device))


def _measure_points(
    record: Record, case: Case, row: Row, features0: Features, features1: Features,
    protocol: Protocol,
) -> None:  # fmt: skip
    """Add keypoints by searching features, and the two places' confidence."""
    votes = {"nearest": None, "voting": protocol.voting}
    weights = {"descriptor_weight": row.descriptor_weight, "lower_weight": row.lower_weight}
    side0, side1 = prepare(features0, **weights), prepare(features1, **weights)
    points0 = _network_points(case, protocol.side).to(features0.descriptors.device)
    for route, settings in votes.items():
        if route in case.measures:
            counted = vote(side0, side1, settings) if settings else None
            peaks = find(side0, side1, points0, counted, refine=True, margin=True)
            signs = {"score": peaks.score, "margin": peaks.margin}
            if row.confidence:
                sigmas = _sigma(features0, points0) + _sigma(features1, peaks.points)
                signs["confidence"] = 2 / sigmas
            record[route] = {"points": _original(peaks.points.cpu(), case, protocol)}
            record[route] |= {key: _rounded(value, SHARE_DIGITS) for key, value in signs.items()}
    if "location" in case.measures:
        near = find_near(side0, side1, points0, protocol.location)
        record["location"] = {"points": _original(near.cpu(), case, protocol)}
    if row.confidence:
        record["loss"] = _true_losses(case, features0, features1, points0, protocol)


def _sigma(features: Features, points: Tensor) -> Tensor:
    """Uncertainty (N,) at points (N, 2)."""
    return features.confidence_at(points).reciprocal()


def find_near(side0: Side, side1: Side, points0: Tensor, bonus: LocationBonus) -> Tensor:
    """Control: nearest neighbour with a Gaussian bonus around the same place. (N, 2) -> (N, 2)."""
    height, width = side1.features.frame.original
    distance = (side1.points[None] - points0[:, None]).square().sum(-1)
    spread = bonus.reach * max(height, width)
    near = bonus.weight * (-0.5 * distance / spread**2).exp()
    total = side0.at(points0) @ side1.vectors.T + near
    index = total.argmax(1)
    step = points0.new_tensor([width / side1.size[1], height / side1.size[0]])
    return side1.points[index] + step * peak_offset(total.reshape(-1, *side1.size), index)


def _true_losses(
    case: Case, features0: Features, features1: Features, points0: Tensor, protocol: Protocol
) -> dict[str, list[float]]:
    """Loss of the true matches, as sigma predicts it and as it is: is confidence calibrated?"""
    points1 = case.frame(protocol.side, 1).to_network(case.pair.common()[1]).to(points0)
    sigma = (_sigma(features0, points0) + _sigma(features1, points1)) / 2
    actual = 1 - (features0.at(points0) * features1.at(points1)).sum(-1).clamp_min(0)
    predicted = mean_predicted_loss(sigma)
    return {
        "predicted": _rounded(predicted, SHARE_DIGITS),
        "actual": _rounded(actual, SHARE_DIGITS),
    }


def _measure_regions(
    case: Case, row: Row, features0: Features, features1: Features, protocol: Protocol
) -> tuple[Tensor, dict[Measure, SparseFlow]]:
    """IoU (A,) of the active proposals' matches by falling score, and the fields of all matches."""
    assert case.truth is not None
    square = [
        to_square(case.boxes0, case.frame(protocol.side, 0)),
        to_square(case.boxes1, case.frame(protocol.side, 1)),
    ]
    fine = [finer(features, cells=protocol.pooled_cells, unit=row.unit)
            for features in (features0, features1)]  # fmt: skip

    def matched(
        pooling: Pooling, weights: tuple[float, float], *, as_published: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Best box (N,) of image 1 and its score (N,)."""
        # A row that describes boxes itself, and the published way, take the maps as they are.
        seen = [features0, features1] if as_published or row.describe else fine
        if row.describe or row.rescore:
            scores = _own_scores(
                case, row, seen, square, pooling, weights, protocol, as_published=as_published
            )
            score, index = scores.max(1)
            return index.cpu(), score.float().cpu()
        matches = match_regions(
            *seen, *square, confidence=row.confidence, lower=row.lower, pooling=pooling,
            descriptor_weight=weights[0], lower_weight=weights[1], as_published=as_published,
        )  # fmt: skip
        return matches.index.cpu(), matches.score.float().cpu()

    def field(index: Tensor, score: Tensor) -> SparseFlow:
        size = (protocol.side, protocol.side)
        vectors, known = flow_from_regions(
            square[0], square[1][index], score, size0=size, size1=size
        )
        return vectors, known > 0

    flows: dict[Measure, SparseFlow] = {}
    if "mean-flow" in case.measures:
        flows["mean-flow"] = field(*matched("mean", row.mean_weights))
    if "published-flow" in case.measures:
        best = matched("max", row.region_weights, as_published=True)
        flows["published-flow"] = field(*best)
    if not {"regions", "flow"} & set(case.measures):
        return torch.zeros(0), flows
    index, score = matched("max", row.region_weights)
    if "flow" in case.measures:
        flows["flow"] = field(index, score)
    active = case.truth.active
    iou = box_iou(case.boxes1[index[active]], case.truth.boxes).diagonal()
    return iou[score[active].argsort(descending=True, stable=True)], flows


def _own_scores(
    case: Case, row: Row, fine: Sequence[Features], square: Sequence[Tensor], pooling: Pooling,
    weights: tuple[float, float], protocol: Protocol, as_published: bool = False,
) -> Tensor:  # fmt: skip
    """Scores (N, M), not below 0, of a row that describes regions or scores them itself."""
    boxes = [part.to(fine[0].descriptors.device) for part in square]
    sizes = (case.pair.size0, case.pair.size1)
    pair = RegionPair(boxes[0], boxes[1], sizes, protocol.side)
    if row.describe:
        described = [row.describe(f, b) for f, b in zip(fine, boxes, strict=True)]
        scores = described[0] @ described[1].T
        pair = replace(pair, described0=described[0], described1=described[1])
    else:
        scores = score_regions(
            fine[0], fine[1], *boxes, confidence=row.confidence, lower=row.lower, pooling=pooling,
            descriptor_weight=weights[0], lower_weight=weights[1], as_published=as_published,
        )  # fmt: skip
    return (row.rescore(scores, pair) if row.rescore else scores).clamp_min(0)


def finer(features: Features, *, cells: int, unit: bool = True) -> Features:
    """The same features with at least `cells` cells a side, bilinear; `unit`: at unit length."""

    def grown(maps: Tensor) -> Tensor:
        if maps.shape[-1] >= cells:
            return maps
        size = (cells, cells)
        return F.interpolate(maps[None], size=size, mode="bilinear", align_corners=False)[0]

    descriptors = grown(features.descriptors)
    descriptors = F.normalize(descriptors, dim=0) if unit else descriptors
    return replace(
        features,
        descriptors=descriptors,
        uncertainty=grown(features.uncertainty[None])[0],
        lower=F.normalize(grown(features.lower), dim=0),
        stride=features.frame.network[1] // descriptors.shape[-1],
    )


def to_square(boxes: Tensor, frame: Frame) -> Tensor:
    """Inclusive boxes (N, 4), original pixels -> of the square, none narrower than a pixel."""
    moved = frame.boxes_to_network(boxes)
    # A box of one pixel shrinks to less: it grows again, inwards at the border.
    low = moved[:, :2].clamp_max(frame.network[0] - 1.0)
    return torch.cat([low, torch.maximum(low, moved[:, 2:])], dim=1)


def _network_points(case: Case, side: int) -> Tensor:
    """The common keypoints of image 0 (V, 2) in the square."""
    return case.frame(side, 0).to_network(case.pair.common()[0])


def _original(points: Tensor, case: Case, protocol: Protocol) -> list[list[float]]:
    """Points (V, 2) of the square -> original pixels of image 1, for the record."""
    return _rounded(case.frame(protocol.side, 1).to_original(points), POINT_DIGITS)


def _rounded(values: Tensor, digits: int) -> list[Any]:
    listed: list[Any] = values.double().cpu().mul(10**digits).round().div(10**digits).tolist()
    return listed

"""Which parts of two photos to match, where one is large: a small thing fills its own part.

A large photo is looked at in windows of several levels (model.tiles); each is judged as a photo of
its own against the other photo, and in the best ones the points are matched. What comes back are
boxes: matching goes on with what lies in them, as with any two photos. Convention: boxes are
inclusive, points original pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefeat.match.points import Matches, match_points
from surefeat.match.related import Agreement, Cells
from surefeat.match.search import prepare
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.tiles import Window, boxes_around, extract_tiled, is_large, levels, windows

Part = tuple[int, int, int, int]
"""An inclusive box of whole pixels, x1, y1, x2, y2."""

CLOSER = 8
"""Pairs of parts, the most alike first, in which points are matched."""

# Sure matches that tell how large a thing is.
_ENOUGH = 6


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A part of each photo, and how alike they are."""

    part0: Part
    part1: Part
    features0: Features
    features1: Features
    likeness: float


@torch.inference_mode()
def best_parts(
    model: DenseFeatures, photo0: Tensor, photo1: Tensor, points0: Tensor | None = None
) -> tuple[Part, Part]:
    """The parts of two photos (3, H, W) uint8 in which to match; of one that is not large, all.

    points0 (N, 2): points of photo 0; where it is large its parts lie around them, and without them
    all of it is matched.
    """
    side = model.config.longest_side
    size0 = (photo0.shape[1], photo0.shape[2])
    whole0 = (0, 0, size0[1] - 1, size0[0] - 1)
    boxes0 = [whole0]
    if points0 is not None and is_large(size0, side=side):
        boxes0 = boxes_around(
            points0, size0, levels(size0, side=side, stride=model.stride), side=side
        )
    views0 = [(box, model.extract(cut_part(photo0, box))[0]) for box in boxes0]
    if len(views0) == 1 and not is_large((photo1.shape[1], photo1.shape[2]), side=side):
        return whole0, (0, 0, photo1.shape[2] - 1, photo1.shape[1] - 1)
    cells0 = [_cells(features) for _, features in views0]
    best: list[_Candidate] = []
    for one in parts_of(model, photo1):
        cells1 = _cells(one.features)
        for (box, features), cells in zip(views0, cells0, strict=True):
            alike = _likeness(model, cells, cells1)
            best.append(_Candidate(box, one.box, features, one.features, alike))
        # Features of the rest are let go: a large photo has hundreds of windows.
        best = sorted(best, key=lambda pair: -pair.likeness)[:CLOSER]
    agreed = [_agreement(pair, points0) for pair in best]
    chosen = best[agreed.index(max(agreed))]
    closer = _closer(model, chosen, photo1)
    if closer is not None and _agreement(closer, points0) > max(agreed):
        return closer.part0, closer.part1
    return chosen.part0, chosen.part1


def parts_of(model: DenseFeatures, photo: Tensor) -> Iterator[Window]:
    """A photo (3, H, W) uint8 as a whole, and where it is large the windows of its finer levels."""
    side, size = model.config.longest_side, (photo.shape[1], photo.shape[2])
    yield Window(model.extract(photo)[0], (0, 0, size[1] - 1, size[0] - 1))
    for longest in levels(size, side=side, stride=model.stride)[1:]:
        stitched = extract_tiled(model, photo, longest_side=longest, side=side)
        yield from windows(stitched, side=side, reliability=model.reliability)


def cut_part(photo: Tensor, part: Part) -> Tensor:
    """The pixels of a part: (3, H, W) -> (3, h, w)."""
    x1, y1, x2, y2 = part
    return photo[:, y1 : y2 + 1, x1 : x2 + 1]


def moved_back(
    matches: Matches, parts: tuple[Part, Part], photos: tuple[Tensor, Tensor]
) -> Matches:
    """Matches of two parts as matches of the photos (3, H, W) they are parts of."""
    first0, first1 = (matches.points0.new_tensor(part[:2]) for part in parts)
    sizes = [(photo.shape[1], photo.shape[2]) for photo in photos]
    return replace(
        matches, points0=matches.points0 + first0, points1=matches.points1 + first1,
        size0=sizes[0], size1=sizes[1],
    )  # fmt: skip


def _cells(features: Features) -> Cells:
    weights = dict(zip(("descriptor_weight", "lower_weight"), POINT_WEIGHTS, strict=True))
    if features.common is None:  # nothing to compare with: then every similarity counts as it is
        features = replace(features, common_kind=torch.zeros_like(features.uncertainty))
    return Cells.of(prepare(features, **weights))


def _likeness(model: DenseFeatures, cells0: Cells, cells1: Cells) -> float:
    """Log odds that two parts show the same kind of thing; without a fit, the mean similarity."""
    signs = Agreement(cells0, cells1).signs()
    known = model.reliability if model.cohort is not None else None
    return float(known.pair.log_odds(signs) if known else signs["excess"])


def _closer(model: DenseFeatures, pair: _Candidate, photo1: Tensor) -> _Candidate | None:
    """The same part of photo 0, and of photo 1 the box that it covers by their sure matches.

    Windows come in steps of two in size and half a window in place: this one is as large as the
    thing. None: too few matches to tell, or nothing new.
    """
    matches = match_points(pair.features0, pair.features1, count=100, mutual=True)
    sure = matches.trusted_score if matches.probability is None else matches.probability
    keep = sure >= sure.median() if len(matches) else sure
    points0, points1 = matches.points0[keep].cpu(), matches.points1[keep].cpu()
    if len(points0) < _ENOUGH:
        return None
    middle0, middle1 = points0.median(0).values, points1.median(0).values
    apart0, apart1 = (points0 - middle0).abs().median(), (points1 - middle1).abs().median()
    scale = float(apart1 / apart0.clamp_min(1e-6))
    height0, width0 = pair.features0.frame.original
    # As large as part 0 comes out, around the middle that the matches share.
    reach = torch.tensor([width0, height0]) * scale / 2
    first = torch.tensor(pair.part1[:2]) + middle1
    last = torch.tensor([photo1.shape[2], photo1.shape[1]]) - 1
    low, high = (first - reach).round().clamp_min(0), (first + reach).round().minimum(last)
    x1, y1, x2, y2 = (int(value) for value in (*low, *high))
    if min(x2 - x1, y2 - y1) < model.stride:
        return None
    part = (x1, y1, x2, y2)
    (features,) = model.extract(cut_part(photo1, part))
    return _Candidate(pair.part0, part, pair.features0, features, pair.likeness)


def _agreement(pair: _Candidate, points0: Tensor | None) -> float:
    """How sure the matches of two parts are, on average; of chosen points, if none are given."""
    x, y = pair.part0[:2]
    points = None if points0 is None else points0 - points0.new_tensor([x, y])
    matches = match_points(pair.features0, pair.features1, points, count=20)
    sure = matches.trusted_score if matches.probability is None else matches.probability
    return float(sure.mean())

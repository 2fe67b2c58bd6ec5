"""Dense matching, by nearest neighbour or through regions: a target for every pixel of image 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.features import Features
from surefeat.flow import DISCOUNT, flow_from_regions, sd_filter
from surefeat.geometry import cell_centres
from surefeat.nearest import even_grid, find, join, prepare_pair, vote
from surefeat.regions import RegionMatches
from surefeat.voting import Voting

PIXELS_PER_QUERY = 4
"""Network pixels between the points that are matched; between them the field is interpolated."""


@dataclass(frozen=True, eq=False)
class DenseMatches:
    """For every pixel of image 0 its place in image 1."""

    points1: Tensor
    """(H, W, 2) original pixels of image 1, inside it."""
    score: Tensor
    """(H, W) similarity in [-1, 1]."""
    confidence: Tensor
    """(H, W) of both places: 2 / (sigma0 + sigma1)."""


@torch.no_grad()
def match_dense(
    features0: Features,
    features1: Features,
    *,
    voting: bool | Voting = True,
    size: tuple[int, int] | None = None,
    descriptor_weight: float = 0.5,
    lower_weight: float = 1.0,
) -> DenseMatches:
    """Where every pixel of image 0 lies in image 1, original pixels.

    An even grid of `size` (rows, columns) points is matched (default: one in four network pixels
    each way) and what they say is interpolated to every pixel of image 0.
    """
    weights = {"descriptor_weight": descriptor_weight, "lower_weight": lower_weight}
    side0, side1 = prepare_pair(features0, features1, **weights)
    settings = Voting() if voting is True else voting
    votes = vote(side0, side1, settings) if settings else None
    network = features0.frame.network
    rows, columns = size or (network[0] // PIXELS_PER_QUERY, network[1] // PIXELS_PER_QUERY)
    if min(rows, columns) < 1:
        raise ValueError(f"size must be at least (1, 1) rows and columns, not {(rows, columns)}")
    points0 = even_grid(features0, size=(rows, columns))
    # Row by row, which lets voting add up a row's histograms in one go.
    split = torch.split(points0, columns)
    peaks = join([find(side0, side1, row, votes, refine=True) for row in split])
    sigma0 = features0.confidence_at(points0).reciprocal()
    sigma1 = features1.confidence_at(peaks.points).reciprocal()
    # Interpolated is what differs from the same relative place, which is right up to the border.
    moved = peaks.points - _same_place(points0, features0, features1)
    table = torch.cat([moved, peaks.score[:, None], (sigma0 + sigma1)[:, None]], dim=1)
    height, width = features0.frame.original
    maps = table.T.reshape(1, 4, rows, columns)
    full = F.interpolate(maps, size=(height, width), mode="bilinear", align_corners=False)[0]
    start = _same_place(even_grid(features0, size=(height, width)), features0, features1)
    points1 = full[:2].permute(1, 2, 0) + start.reshape(height, width, 2)
    top = points1.new_tensor(features1.frame.original).flip(0) - 1
    return DenseMatches(points1.clamp_min(0).minimum(top), full[2], 2 / full[3])


def match_dense_by_regions(
    features0: Features,
    features1: Features,
    image0: Tensor,
    matches: RegionMatches,
    *,
    discount: float = DISCOUNT,
) -> DenseMatches:
    """The paper's route: region matches -> flow -> SD filter along the edges of image 0.

    image0: (3, H, W) uint8, in original pixels. The score of a pixel is that of the region it moves
    with, and 0 where the filter filled a hole. discount: how far small regions go before large
    ones (see flow_from_regions); the paper has 0.
    """
    size0, size1 = features0.frame.original, features1.frame.original
    if tuple(image0.shape[-2:]) != size0:
        raise ValueError(f"image0 is {tuple(image0.shape)}, its features are of {size0}")
    regions = (matches.boxes0.cpu(), matches.boxes1.cpu(), matches.score.cpu())
    field, score = flow_from_regions(*regions, size0=size0, size1=size1, discount=discount)
    field = sd_filter(field.permute(2, 0, 1), score > 0, image0.cpu()).permute(1, 2, 0)
    places = cell_centres(size=size0, stride=1.0)
    top = torch.tensor([size1[1] - 1, size1[0] - 1])
    points1 = (places + field.reshape(-1, 2)).clamp_min(0).minimum(top)
    trust = [f.confidence_at(p).cpu() for f, p in ((features0, places), (features1, points1))]
    confidence = 2 / (1 / trust[0] + 1 / trust[1])
    return DenseMatches(points1.reshape(*size0, 2), score, confidence.reshape(size0))


def _same_place(points: Tensor, features0: Features, features1: Features) -> Tensor:
    """Original pixels (N, 2) of image 0 -> those at the same relative place of image 1."""
    size0, size1 = (points.new_tensor(f.frame.original).flip(0) for f in (features0, features1))
    return (points + 0.5) * (size1 / size0) - 0.5

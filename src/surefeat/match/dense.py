"""Dense matching, by nearest neighbour or through regions: a target for every pixel of image 0.

Convention: a field (H0, W0, 2) holds for every pixel p of image 0 the displacement v(p) = (vx, vy)
in pixels: p of image 0 corresponds to p + v(p) in image 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import cell_centres, sample
from surefeat.match.regions import RegionMatches
from surefeat.match.sd_filter import sd_filter
from surefeat.match.search import even_grid, find, join, prepare_pair, vote
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features

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
    descriptor_weight: float = POINT_WEIGHTS[0],
    lower_weight: float = POINT_WEIGHTS[1],
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
    features0: Features, features1: Features, image0: Tensor, matches: RegionMatches
) -> DenseMatches:
    """The paper's route: region matches -> flow -> SD filter along the edges of image 0.

    image0: (3, H, W) uint8, in original pixels. The score of a pixel is that of the region it moves
    with, and 0 where the filter filled a hole.
    """
    size0, size1 = features0.frame.original, features1.frame.original
    if tuple(image0.shape[-2:]) != size0:
        raise ValueError(f"image0 is {tuple(image0.shape)}, its features are of {size0}")
    regions = (matches.boxes0.cpu(), matches.boxes1.cpu(), matches.score.cpu())
    field, score = flow_from_regions(*regions, size0=size0, size1=size1)
    smooth = sd_filter(field.permute(2, 0, 1)[None], score[None] > 0, image0[None].cpu())[0]
    places = cell_centres(size=size0, stride=1.0)
    top = torch.tensor([size1[1] - 1, size1[0] - 1])
    points1 = (places + smooth.flatten(1).T).clamp_min(0).minimum(top)
    trust = [f.confidence_at(p).cpu() for f, p in ((features0, places), (features1, points1))]
    confidence = 2 / (1 / trust[0] + 1 / trust[1])
    return DenseMatches(points1.reshape(*size0, 2), score, confidence.reshape(size0))


def _same_place(points: Tensor, features0: Features, features1: Features) -> Tensor:
    """Original pixels (N, 2) of image 0 -> those at the same relative place of image 1."""
    size0, size1 = (points.new_tensor(f.frame.original).flip(0) for f in (features0, features1))
    return (points + 0.5) * (size1 / size0) - 0.5


def flow_from_regions(
    boxes0: Tensor,
    boxes1: Tensor,
    scores: Tensor,
    *,
    size0: tuple[int, int],
    size1: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Regions (N, 4), their matches (N, 4), (N,) -> field (H0, W0, 2), confidence (H0, W0).

    By falling score, every pixel not yet assigned takes the linear map box -> box, rounded and
    clamped to image 1. Of the pixels that land on one target only the most confident stays (of one
    box: the first, row by row); the others, and those in no box, have confidence 0 and field 0.
    Regions with score <= 0 are left out.
    Convention: inclusive boxes; a box owns the pixels whose centres lie within its outer edges.
    """
    (height, width), device = size0, boxes0.device
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[scores[order] > 0]
    boxes0, boxes1, scores = boxes0[order].double(), boxes1[order].double(), scores[order]
    rank = _first_owner(boxes0, size=size0)
    covered = rank < len(order)
    source = torch.nonzero(covered)
    pixels, owner = source.flip(-1).double(), rank[covered]
    low0, low1 = boxes0[owner, :2] - 0.5, boxes1[owner, :2] - 0.5
    scale = (boxes1[owner, 2:] + 0.5 - low1) / (boxes0[owner, 2:] + 0.5 - low0)
    top = torch.tensor([size1[1] - 1, size1[0] - 1], dtype=torch.float64, device=device)
    moved = torch.minimum(((pixels - low0) * scale + low1).round().clamp_min(0), top)
    kept = _most_confident(moved.long(), owner, width=size1[1], count=size1[0] * size1[1])
    field = torch.zeros(height, width, 2, device=device)
    confidence = torch.zeros(height, width, device=device)
    field[source[kept, 0], source[kept, 1]] = (moved - pixels)[kept].float()
    confidence[source[kept, 0], source[kept, 1]] = scores[owner[kept]].float()
    return field, confidence


def _first_owner(boxes: Tensor, *, size: tuple[int, int]) -> Tensor:
    """(H, W): the first of the boxes (N, 4) that holds each pixel, N where none does."""
    edges = boxes.detach().cpu().double()
    first = (edges[:, :2] - 0.5).ceil().clamp_min(0)
    end = (edges[:, 2:] + 0.5).ceil().clamp_min(0)
    owner = torch.full(size, len(boxes), dtype=torch.long)
    # Painted from the last to the first, so that the first box on a pixel is what stays.
    ranges = torch.cat([first, end], dim=1).long().tolist()
    for i, (x1, y1, x2, y2) in reversed(list(enumerate(ranges))):
        owner[y1:y2, x1:x2] = i
    return owner.to(boxes.device)


def _most_confident(targets: Tensor, owner: Tensor, *, width: int, count: int) -> Tensor:
    """(P,) bool: of the pixels on one target (P, 2), the one with the lowest owner, then index."""
    cells = targets[:, 1] * width + targets[:, 0]
    rank = owner * len(owner) + torch.arange(len(owner), device=owner.device)
    best = rank.new_full((count,), torch.iinfo(torch.long).max)
    best.scatter_reduce_(0, cells, rank, reduce="amin")
    return best[cells] == rank


def warp_image(image1: Tensor, points1: Tensor) -> Tensor:
    """Image 1 (C, H1, W1) seen in image 0's frame: its values at points1 (H0, W0, 2), (C, H0, W0).

    Convention: bilinear, beyond the border the border value; the type is kept, integers rounded.
    """
    height, width = points1.shape[:2]
    read = sample(image1[None].to(points1.dtype), points1.reshape(1, -1, 2))[0]
    values = read.T.reshape(-1, height, width)
    return values if image1.is_floating_point() else values.round().to(image1.dtype)


def transfer_points(field: Tensor, points: Tensor) -> Tensor:
    """Points (N, 2) of image 0 -> (N, 2) of image 1: p goes to p + v(round(p))."""
    height, width = field.shape[:2]
    cells = points.round().long()
    return points + field[cells[:, 1].clamp(0, height - 1), cells[:, 0].clamp(0, width - 1)]

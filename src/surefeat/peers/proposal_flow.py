"""Proposal Flow's three ways to score pairs of regions (Ham et al. 2016): NAM, PHM and LOM.

NAM: appearance alone. PHM: matches that agree on an offset in place and size support each other.
LOM: so do those that agree with the matches of the boxes around them. They go on top of whitened
HOG, as published, or of any row's regions. Convention: boxes are inclusive, original pixels; the
histogram counts from 1, as its authors do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import box_area, box_iou
from surefeat.measure.rows import RegionPair, Row, as_features
from surefeat.model.features import Features
from surefeat.peers.fitting import StoredPeer
from surefeat.peers.hog import Background, describe_boxes
from surefeat.peers.hyperpixel import gaussian

ASPECT = 2.0
"""Boxes whose ratios of width and height differ by this factor or more do not match."""

STEPS = 20
"""Of the reweighting that finds the median offset around a box."""

NEAR, ALIKE = 0.05, 0.3
"""What a pixel, and a unit of the ratio of areas, away from the median offset costs."""


@dataclass(frozen=True)
class OffsetGrid:
    """The histogram of offsets."""

    finer: float = 1.0
    """Bins each way in units of 2 W / c, where c = max(sqrt(4 W H / 8000), 5)."""
    scales: int = 20
    """Bins of log2(area 1 / area 0), over [-4, 4]."""


PHM_GRID = OffsetGrid()


def same_aspect(boxes0: Tensor, boxes1: Tensor) -> Tensor:
    """(N, M) bool: ratios of width and height less than a factor ASPECT apart."""
    logs = [((b[:, 2] - b[:, 0] + 1) / (b[:, 3] - b[:, 1] + 1)).log2() for b in (boxes0, boxes1)]
    factor = torch.tensor(ASPECT).log2().to(boxes0)
    return (logs[0][:, None] - logs[1]).abs() < factor - 1e-6


def offset_bins(
    boxes0: Tensor, boxes1: Tensor, *, size0: tuple[int, int], size1: tuple[int, int],
    grid: OffsetGrid,
) -> tuple[Tensor, tuple[int, int, int]]:  # fmt: skip
    """For all pairs (N, M) of boxes the bin of their offset, -1 where they have none.

    A box is a frame (centre, half its sides); the map from one to the other puts the last corner of
    image 0 somewhere: that place, over twice image 1's size, and the ratio of areas make the bin.
    Also returned: how many bins there are in scale, y and x.
    """
    (centre0, half0), (centre1, half1) = (
        ((b[:, :2] + b[:, 2:]) / 2 + 1, (b[:, 2:] - b[:, :2] + 1) / 2) for b in (boxes0, boxes1)
    )
    corner = centre0.new_tensor([size0[1], size0[0]])
    away = ((corner - centre0) / half0)[:, None]
    place = centre1 + away * half1  # (N, M, 2)
    scale = (box_area(boxes1) / box_area(boxes0)[:, None]).log2()
    cell = max((4 * size1[0] * size1[1] / 8000) ** 0.5, 5.0)
    columns, rows = (max(1, round(2 * n / cell * grid.finer)) for n in (size1[1], size1[0]))
    parts = []
    for values, low, high, count in (
        (scale, -4.0, 4.0, grid.scales),
        (place[..., 1], 1.0, 2.0 * size1[0], rows),
        (place[..., 0], 1.0, 2.0 * size1[1], columns),
    ):
        inside = (values >= low) & (values <= high)
        index = ((values - low) / (high - low) * count).floor().clamp(0, count - 1).long()
        parts.append(torch.where(inside, index, -1))
    known = (torch.stack(parts) >= 0).all(0) & same_aspect(boxes0, boxes1)
    flat = (parts[0] * rows + parts[1]) * columns + parts[2]
    return torch.where(known, flat, -1), (grid.scales, rows, columns)


def nam(scores: Tensor, pair: RegionPair) -> Tensor:
    """Rectified scores (N, M), 0 where the boxes' shapes differ too much."""
    return scores.clamp_min(0) * same_aspect(*pair.originals())


def phm(scores: Tensor, pair: RegionPair, grid: OffsetGrid = PHM_GRID) -> Tensor:
    """Each score times how many boxes of image 0 have a match of that offset.

    A box adds to a bin only the highest of its scores there. Where there is no bin: 0.
    """
    votes, (boxes0, boxes1) = nam(scores, pair), pair.originals()
    bins, shape = offset_bins(
        boxes0, boxes1, size0=pair.sizes[0], size1=pair.sizes[1], grid=grid
    )  # fmt: skip
    known, total = bins >= 0, shape[0] * shape[1] * shape[2]
    sources = torch.arange(len(votes), device=votes.device)[:, None]
    keys, index = torch.unique((sources * total + bins)[known], return_inverse=True)
    highest = votes.new_zeros(len(keys)).scatter_reduce_(0, index, votes[known], "amax")
    counts = votes.new_zeros(total).index_add_(0, keys % total, highest)
    smooth = _blurred(counts.reshape(shape)).flatten()
    return torch.where(known, votes * smooth[bins.clamp_min(0)], torch.zeros_like(votes))


def _blurred(counts: Tensor) -> Tensor:
    """A histogram (S, H, W) under a 5 x 5 x 5 Gaussian, zeros outside."""
    line = gaussian(5, device=counts.device).sum(0)
    for dim in range(3):
        shape = [1, 1, 1, 1, 1]
        shape[2 + dim] = 5
        padding = [2 if n == dim else 0 for n in range(3)]
        counts = F.conv3d(counts[None, None], line.reshape(shape), padding=padding)[0, 0]
    return counts


def lom(scores: Tensor, pair: RegionPair) -> Tensor:
    """Each score by how near its offset is to that of the boxes around, and how sure those are.

    All rows look at NAM's scores; its authors go row by row, so that later ones see what earlier
    ones have become.
    """
    scores, (boxes0, boxes1) = nam(scores, pair), pair.originals()
    best, index = scores.max(1)
    offsets = _offsets(boxes0, boxes1)  # (N, M, 3)
    own = offsets[torch.arange(len(scores), device=scores.device), index]
    around = (box_iou(boxes0, boxes0) > 0).to(scores.dtype)
    middle = median_offsets(own, around)
    apart = offsets - middle[:, None]
    cost = NEAR * apart[..., :2].norm(dim=-1) + ALIKE * apart[..., 2].abs()
    sure = around @ best / best.sum().clamp_min(1e-12)
    better: Tensor = scores * (-cost).exp() * sure[:, None]
    return better


def _offsets(boxes0: Tensor, boxes1: Tensor) -> Tensor:
    """(N, M, 3): dx, dy between centres, and the ratio of areas."""
    centre0, centre1 = ((b[:, :2] + b[:, 2:]) / 2 for b in (boxes0, boxes1))
    ratio = box_area(boxes1) / box_area(boxes0)[:, None]
    return torch.cat([centre1 - centre0[:, None], ratio[..., None]], dim=-1)


def median_offsets(offsets: Tensor, around: Tensor) -> Tensor:
    """Medians (N, 3), coordinate by coordinate, of offsets (N, 3) over neighbours (N, N) in 0, 1.

    By steps of reweighting from (1, 1, 1), each neighbour by the inverse of its distance.
    """
    medians = torch.ones_like(offsets)
    for _ in range(STEPS):
        columns = []
        for n in range(3):
            apart = (offsets[:, n] - medians[:, n, None]).abs().clamp_min(1e-4)
            share = around / apart
            columns.append(share @ offsets[:, n] / share.sum(1))
        medians = torch.stack(columns, dim=1)
    return medians


Rescore = Callable[[Tensor, RegionPair], Tensor]

WAYS: dict[str, Rescore] = {"nam": nam, "phm": phm, "lom": lom}


def with_way(row: Row, way: str) -> Row:
    """A row whose regions are scored by one of Proposal Flow's ways: NAME+phm, say."""
    settings = {**row.settings, "regions scored by": way}
    return replace(
        row, name=f"{row.name}+{way}", rescore=WAYS[way], measures=("regions", "flow"),
        settings=settings,
    )  # fmt: skip


def hog_row(name: str, stored: StoredPeer, way: str, *, device: torch.device) -> Row:
    """Whitened HOG of boxes, scored by one of the ways."""
    background = Background(
        stored.tensors["mean"], stored.tensors["covariance"], int(stored.settings["ridge"])
    )
    factor, mean = background.factor().float().to(device), background.mean.to(device)

    def extract(images: Tensor) -> list[Features]:
        """The pixels themselves: boxes are cut out of them."""
        return as_features(images.float(), side=images.shape[-1], unit=False)

    def describe(features: Features, boxes: Tensor) -> Tensor:
        vectors = describe_boxes(features.descriptors, boxes) - mean.repeat(64)
        white: Tensor = torch.linalg.solve_triangular(factor, vectors.T, upper=False)
        return white.T

    about = {"background": dict(stored.about), "way": way}
    return Row(
        name, extract, weights_sha256=stored.digest, unit=False, measures=("regions", "flow"),
        describe=describe, rescore=WAYS[way], settings=about,
    )  # fmt: skip

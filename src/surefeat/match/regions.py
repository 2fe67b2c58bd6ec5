"""Region matching as in the paper (section 4.1): pooled descriptors of boxes, compared all to all.

Convention: boxes are inclusive, original pixels, each of its own image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.match.search import check_pair
from surefeat.model.features import (
    Features,
    Layer,
    Pooling,
    bin_regions,
    pool_bins,
    published_bins,
    stack_boxes,
)

POOLED = 7
"""Bins each way [P]."""

# Entries of the score matrix held at once; bounds memory for any number of boxes.
_CHUNK = 1 << 24

# Entries of all boxes' vectors that a GPU may hold at once, 8 GB in half precision.
_DENSE = 1 << 32


@dataclass(frozen=True, eq=False)
class RegionMatches:
    """Boxes of image 0 and the box of image 1 that fits each best."""

    boxes0: Tensor
    """(N, 4) inclusive, original pixels of image 0."""
    boxes1: Tensor
    """(N, 4) their matches, original pixels of image 1."""
    score: Tensor
    """(N,) rectified inner product; in [0, 1] when normalised."""
    index: Tensor
    """(N,) which of the given boxes1."""

    def __len__(self) -> int:
        return len(self.score)


@dataclass(frozen=True, eq=False)
class Pooled:
    """One layer of one image, pooled over boxes; equal bins are stored once."""

    vectors: Tensor
    """(U, C): maxima over the distinct bins."""
    index: Tensor
    """(N, 49) into the vectors."""

    def norms(self) -> Tensor:
        """(N,): length of each box's 49 vectors in one."""
        return self.vectors.square().sum(-1)[self.index].sum(-1).sqrt()

    def rows(self, part: slice) -> Pooled:
        """The same for some of the boxes."""
        return Pooled(self.vectors, self.index[part])


@torch.no_grad()
def match_regions(
    features0: Features,
    features1: Features,
    boxes0: object,
    boxes1: object,
    *,
    confidence: bool = True,
    normalised: bool = True,
    lower: bool = True,
    descriptor_weight: float = 1.0,
    lower_weight: float = 1.0,
    pooling: Pooling = "max",
    as_published: bool = False,
) -> RegionMatches:
    """The best of boxes1 (M, 4) for each of boxes0 (N, 4), by features pooled in 7x7 bins.

    confidence: descriptors are scaled by 1/sigma before pooling; off for the paper's ablation.
    normalised: the blocks of descriptors and lower layer have unit length, each and together;
    otherwise the raw inner products are added. lower: use the lower layer at all; what each of
    the two counts follows from their weights. pooling: what a bin keeps of its cells.
    as_published: boxes snap to cells as in SCNet's code (`published_bins`).
    """
    device = features0.descriptors.device
    boxes0 = stack_boxes(boxes0, size=features0.frame.original).to(device)
    boxes1 = stack_boxes(boxes1, size=features1.frame.original).to(device)
    if not len(boxes1):
        raise ValueError("boxes1 is empty, so nothing can be matched; pass at least one box")
    blocks = _pooled_pair(
        features0, features1, boxes0, boxes1, confidence=confidence, lower=lower, pooling=pooling,
        as_published=as_published,
    )  # fmt: skip
    weights = (descriptor_weight, lower_weight) if lower else (1.0,)
    score, index = _best(*blocks, weights, normalised=normalised)
    return RegionMatches(boxes0, boxes1[index], score, index)


@torch.no_grad()
def score_regions(
    features0: Features, features1: Features, boxes0: Tensor, boxes1: Tensor, *, confidence: bool,
    lower: bool, descriptor_weight: float, lower_weight: float, pooling: Pooling = "max",
    as_published: bool = False,
) -> Tensor:  # fmt: skip
    """(N, M): the scores of all pairs of boxes, of which match_regions keeps the best."""
    blocks = _pooled_pair(
        features0, features1, boxes0, boxes1, confidence=confidence, lower=lower, pooling=pooling,
        as_published=as_published,
    )  # fmt: skip
    weights = (descriptor_weight, lower_weight) if lower else (1.0,)
    return region_scores(*blocks, weights, normalised=True)


def _pooled_pair(
    features0: Features, features1: Features, boxes0: Tensor, boxes1: Tensor, *, confidence: bool,
    lower: bool, pooling: Pooling, as_published: bool,
) -> tuple[list[Pooled], list[Pooled]]:  # fmt: skip
    """Every layer that counts, pooled over the boxes of either image."""
    check_pair(features0, features1)
    layers: tuple[Layer, ...] = ("descriptors", "lower") if lower else ("descriptors",)

    def pooled(features: Features, boxes: Tensor) -> list[Pooled]:
        return [
            pool_layer(features, boxes, layer, confidence=confidence, pooling=pooling,
                       as_published=as_published)
            for layer in layers
        ]  # fmt: skip

    return pooled(features0, boxes0), pooled(features1, boxes1)


def pool_layer(
    features: Features, boxes: Tensor, layer: Layer, *, confidence: bool,
    pooling: Pooling = "max", as_published: bool = False,
) -> Pooled:  # fmt: skip
    """Boxes (N, 4), original pixels, of one layer."""
    maps = features.layer(layer, confidence=confidence)
    snap = published_bins if as_published else bin_regions
    index, bins = snap(features, boxes, size=POOLED, cells=(maps.shape[1], maps.shape[2]))
    return Pooled(pool_bins(maps, bins, pooling), index)


def region_scores(
    pooled0: list[Pooled], pooled1: list[Pooled], weights: Sequence[float], *, normalised: bool
) -> Tensor:
    """(N, M) rectified scores of all pairs of boxes, given one Pooled and weight per layer."""
    total = torch.zeros(())
    for block0, block1, weight in zip(pooled0, pooled1, weights, strict=True):
        product = _inner_products(block0, block1) * weight
        if normalised:
            # Unit blocks, scaled so that side by side they have unit length again.
            product /= (block0.norms() * sum(weights)).clamp_min(1e-12)[:, None]
            product /= block1.norms().clamp_min(1e-12)
        total = total.to(product.device) + product
    return total.clamp_min(0)


def _inner_products(block0: Pooled, block1: Pooled) -> Tensor:
    """(N, M) inner products of the boxes' vectors of 49 bins.

    Only distinct vectors are multiplied, then the products are looked up bin by bin: on a coarse
    map the bins of many boxes coincide, which leaves a tenth of one large product's arithmetic.
    """
    numbers = (block0.index.numel() + block1.index.numel()) * block0.vectors.shape[1]
    if block0.vectors.is_cuda and numbers <= _DENSE:
        return dense_products(block0, block1)
    total = block0.vectors.new_zeros(len(block0.index), len(block1.index))
    few = len(block0.vectors) * len(block1.vectors) <= _CHUNK
    table = block0.vectors @ block1.vectors.T if few else None
    for k in range(block0.index.shape[1]):
        distinct, box0 = torch.unique(block0.index[:, k], return_inverse=True)
        if table is not None:
            product = table.index_select(0, distinct).index_select(1, block1.index[:, k])
        else:
            others, box1 = torch.unique(block1.index[:, k], return_inverse=True)
            product = (block0.vectors[distinct] @ block1.vectors[others].T).index_select(1, box1)
        total += product.index_select(0, box0)
    return total


def dense_products(block0: Pooled, block1: Pooled) -> Tensor:
    """The same as one product per bin in half precision: on tensor cores arithmetic is cheap.

    Bins are rounded one by one and added in float32, which keeps 4 digits of the sum.
    """
    # No entry exceeds 1 and no bin's product its channels, so nothing overflows.
    tops = [block.vectors.abs().amax().clamp_min(1e-12) for block in (block0, block1)]
    halves = [
        (block.vectors / top).half()[block.index].transpose(0, 1)
        for block, top in zip((block0, block1), tops, strict=True)
    ]
    products = torch.bmm(halves[0], halves[1].transpose(1, 2))
    return products.sum(0, dtype=torch.float32) * (tops[0] * tops[1])


def _best(
    pooled0: list[Pooled], pooled1: list[Pooled], weights: Sequence[float], *, normalised: bool
) -> tuple[Tensor, Tensor]:
    """Best score (N,) and its box (N,) for every box of image 0."""
    count0, count1 = len(pooled0[0].index), len(pooled1[0].index)
    step = max(1, _CHUNK // count1)
    none = pooled0[0].vectors.new_zeros(0, dtype=torch.float32)
    scores, indices = [none], [none.long()]
    for start in range(0, count0, step):
        rows = [block.rows(slice(start, start + step)) for block in pooled0]
        score, index = region_scores(rows, pooled1, weights, normalised=normalised).max(1)
        scores.append(score)
        indices.append(index)
    return torch.cat(scores), torch.cat(indices)

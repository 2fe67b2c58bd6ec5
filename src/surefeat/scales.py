"""One image seen at several sizes, as one set of features whose scores are the mean of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.features import Features
from surefeat.image import ImageLike
from surefeat.model import DenseFeatures


def extract_scales(
    model: DenseFeatures, images: Sequence[ImageLike], sides: Sequence[int]
) -> list[Features]:
    """Features of images, each seen at several longest sides (network pixels), joined.

    On PF-PASCAL two sizes match better than one (README); the time adds up.
    """
    by_side = [model.extract(images, longest_side=side) for side in sides]
    return [join_scales(parts) for parts in zip(*by_side, strict=True)]


def join_scales(parts: Sequence[Features]) -> Features:
    """Features of one image at several network sizes -> one, in the frame of the largest.

    Descriptors and lower layers lie side by side, each of equal length, on the finest map among
    them; so an inner product is the mean over the sizes. Sigma is the mean too. What a model knows
    of its matches' probability holds for one size, so it is left out.
    """
    if len(parts) == 1:
        return parts[0]
    largest = max(parts, key=lambda part: part.frame.network)
    sigma = _at_one_size([part.uncertainty[None] for part in parts])
    return replace(
        largest,
        descriptors=_side_by_side([part.descriptors for part in parts]),
        uncertainty=torch.stack(sigma).mean(0)[0],
        lower=_side_by_side([part.lower for part in parts]),
        reliability=None,
    )


def _side_by_side(maps: Sequence[Tensor]) -> Tensor:
    """Maps (C_i, h_i, w_i) -> (sum C_i, h, w), unit length along the channels."""
    grown = torch.cat([F.normalize(each, dim=0) for each in _at_one_size(maps)])
    return F.normalize(grown, dim=0)


def _at_one_size(maps: Sequence[Tensor]) -> list[Tensor]:
    """Maps (C_i, h_i, w_i) at the size of the finest, bilinear."""
    height, width = max(each.shape[-2:] for each in maps)
    return [
        F.interpolate(each[None], size=(height, width), mode="bilinear", align_corners=False)[0]
        for each in maps
    ]

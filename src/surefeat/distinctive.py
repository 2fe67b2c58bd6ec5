"""Which places of an image are worth matching: confident, unlike the rest, spread out."""

from __future__ import annotations

import torch
from torch import Tensor

from surefeat.nearest import Side, beyond

# Entries of a similarity matrix held at once; bounds memory for fine grids.
_CHUNK = 1 << 23


def quality(side: Side) -> Tensor:
    """(T,) for each place: its confidence times its distinctiveness."""
    return side.features.confidence_at(side.points) * distinctiveness(side)


def distinctiveness(side: Side) -> Tensor:
    """(T,) in [0, 2]: the peak margin of matching an image with itself.

    1 minus the similarity of the most similar place outside a place's own neighbourhood.
    """
    every = torch.arange(len(side.points), device=side.points.device)
    rows = []
    for part in torch.split(every, max(1, _CHUNK // len(every))):
        surface = (side.vectors[part] @ side.vectors.T).reshape(-1, *side.size)
        rows.append(1 - beyond(surface, part, side.features.frame.network))
    return torch.cat(rows).clamp_min(0)


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

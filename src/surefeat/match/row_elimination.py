"""Systems on a grid of pixels, each tied to its four neighbours, solved row by row in plain torch.

For accelerators, where batches of many systems are solved at once, and for machines without numba;
surefeat.grid_solve is the fast way on a CPU and gives the same answer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def solve_by_rows(mask: Tensor, right: Tensor, down: Tensor, targets: Tensor) -> Tensor:
    """The same systems in plain torch, on any device: rows of pixels are eliminated one by one.

    Memory: H * W^2 numbers per system, W the shorter side (90 MB at 224 x 224), so batches of many
    fields are worked on in parts that fit.
    """
    if mask.shape[-1] > mask.shape[-2]:
        flipped = (down.mT, right.mT)
        return solve_by_rows(mask.mT, *flipped, targets.mT).mT
    height, width = mask.shape[-2:]
    if height % 2:
        # A row that nothing is tied to, so that there are two halves.
        alone = (F.pad(mask, (0, 0, 0, 1), value=1.0), F.pad(right, (0, 0, 0, 1)))
        tied = (F.pad(down, (0, 0, 0, 1)), F.pad(targets, (0, 0, 0, 1)))
        return solve_by_rows(*alone, *tied)[..., :-1, :]
    part = max(1, _numbers_that_fit(mask.device) // (height * width**2))
    solved = [
        _eliminate_rows(*(t[i : i + part] for t in (mask, right, down, targets)))
        for i in range(0, len(mask), part)
    ]
    return torch.cat(solved)


def _numbers_that_fit(device: torch.device) -> int:
    """How many float64 the inverses of all rows may take: 4 GB, or a quarter of a GPU's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 32
    return 2**29


def _eliminate_rows(mask: Tensor, right: Tensor, down: Tensor, targets: Tensor) -> Tensor:
    """Row by row from the top and from the bottom at once, as one batch, then back from the middle.

    mask, diagonal (B, H, W), right (B, H, W-1), down (B, H-1, W), targets (B, T, H, W); H is even.
    """
    half = mask.shape[-2] // 2
    diagonal = mask.clone()
    diagonal[..., :-1] += right
    diagonal[..., 1:] += right
    diagonal[..., :-1, :] += down
    diagonal[..., 1:, :] += down
    diagonal, right, sides = (_halves(t, half) for t in (diagonal, right, targets.movedim(1, -1)))
    links, middle = _halves(down, half - 1)[..., None], down[:, half - 1, :, None]
    block, summed = _tied(diagonal[:, 0], right[:, 0]), [sides[:, 0]]
    inverses: list[Tensor] = []
    for y in range(1, half):
        link = links[:, y - 1]
        inverses.append(_inverse(block))
        block = _tied(diagonal[:, y], right[:, y]) - link * inverses[-1] * link.mT
        summed.append(sides[:, y] + link * (inverses[-1] @ summed[-1]))
    rows = [_join_middle(block, summed[-1], middle)]
    for y in range(half - 2, -1, -1):
        rows.append(inverses[y] @ (summed[y] + links[:, y] * rows[-1]))
    upper, lower = torch.stack(rows, dim=1).chunk(2)
    return torch.cat([upper.flip(1), lower], dim=1).movedim(-1, 1)


def _halves(rows: Tensor, count: int) -> Tensor:
    """(B, H, ...) -> (2B, count, ...): the first rows, and the last ones upside down."""
    return torch.cat([rows[:, :count], rows[:, rows.shape[1] - count :].flip(1)])


def _tied(diagonal: Tensor, right: Tensor) -> Tensor:
    """A row's own block (B, W, W): each pixel with itself and its neighbours in the row."""
    beside = torch.diag_embed(right, 1)
    return torch.diag_embed(diagonal) - beside - beside.mT


def _join_middle(blocks: Tensor, sides: Tensor, middle: Tensor) -> Tensor:
    """Solve for the two rows in the middle, tied only to each other by now: (2B, W, T)."""
    (top, bottom), (side0, side1) = blocks.chunk(2), sides.chunk(2)
    inverse = _inverse(bottom)
    joined = top - middle * inverse * middle.mT
    above = _inverse(joined) @ (side0 + middle * (inverse @ side1))
    return torch.cat([above, inverse @ (side1 + middle * above)])


def _inverse(blocks: Tensor) -> Tensor:
    """Inverses of symmetric positive definite blocks (B, W, W)."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(blocks)[0])
    if blocks.device.type == "cuda":
        return inverse
    # Numbers below 1e-308 are many times slower on a CPU; below 1e-60 they do not count.
    return torch.where(inverse.abs() > 1e-60, inverse, 0.0)

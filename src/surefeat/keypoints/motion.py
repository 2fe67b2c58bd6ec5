"""How an object moved from one photo to another: a robust affine map, and what follows it.

Many places of the object are matched, and some matches are wrong. Two of them fix a shift, a turn
and a size, facing either way; the choice with which most others agree is refined to an affine map.
Boxes and outlines follow it. Convention: points are original pixels of their photo; distances are
compared in longer sides, so that photos may have any size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.core.geometry import apply_affine, clip_boxes

RADIUS = 0.06
"""Standard deviation within which a match agrees with a map, longer sides of image 1."""

LARGEST = 3.0
"""By so much an object may be larger or smaller, measured in longer sides of the photos."""

_PROPOSERS = 40
"""Matches that propose maps, two by two: the surest."""

_APART = 0.2
"""Of the object's extent: nearer to each other, two matches fix no turn."""

_STIFF = 0.05
"""How strongly the affine map is held to the turn and size it started from, against the matches'
own spread: few matches must not shear an object."""

_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Motion:
    """Where an object's points went."""

    matrix: Tensor
    """(2, 3): original pixels of image 0 -> of image 1."""
    support: float
    """The mean over its matches of their weight, times how far they agree with the map: [0, 1]."""

    @property
    def mirrored(self) -> bool:
        """It faces the other way."""
        linear = self.matrix[:, :2]
        return bool(linear[0, 0] * linear[1, 1] < linear[0, 1] * linear[1, 0])

    def move_points(self, points: Tensor) -> Tensor:
        """(N, 2) -> (N, 2)."""
        return apply_affine(self.matrix, points)

    def move_box(self, box: Tensor, *, size: tuple[int, int]) -> Tensor:
        """Inclusive box (4,) -> (4,), cut to an image of (height, width).

        The box around the ellipse in it: a thing seldom fills the corners, which a turn would
        otherwise swing outwards.
        """
        half = (box[2:] - box[:2] + 1) / 2
        middle = self.move_points(((box[:2] + box[2:]) / 2)[None])[0]
        reach = (self.matrix[:, :2] * half).norm(dim=1)
        moved = torch.cat([middle - reach + 0.5, middle + reach - 0.5])
        return _inside(moved, size)

    def move_mask(self, mask: tuple[Tensor, ...], *, size: tuple[int, int]) -> tuple[Tensor, ...]:
        """Polygons (M, 2) -> (M, 2), corners held inside an image of (height, width)."""
        top = self.matrix.new_tensor([size[1], size[0]]) - 0.5
        return tuple(self.move_points(ring).clamp_min(-0.5).minimum(top) for ring in mask)


def mask_box(mask: tuple[Tensor, ...], *, size: tuple[int, int]) -> Tensor:
    """The inclusive box (4,) around polygons whose corners lie on pixels' edges."""
    corners = torch.cat(mask)
    return _inside(torch.cat([corners.amin(0) + 0.5, corners.amax(0) - 0.5]), size)


def _inside(box: Tensor, size: tuple[int, int]) -> Tensor:
    """A box of a pixel or more within an image."""
    cut = clip_boxes(box[None], size=size)[0]
    top = cut.new_tensor([size[1] - 1, size[0] - 1])
    first = torch.minimum(cut[:2].clamp_min(0), top)
    return torch.cat([first, torch.maximum(first, torch.minimum(cut[2:], top))])


def fit_motion(
    points0: Tensor,
    points1: Tensor,
    weights: Tensor,
    *,
    size0: tuple[int, int],
    size1: tuple[int, int],
) -> Motion:
    """The map that matches points0 (N, 2), points1 (N, 2) with weights (N,) in [0, 1] agree on."""
    if len(points0) < 3:
        raise ValueError(f"{len(points0)} matches fix no map; at least 3 are needed")
    here = (points0 / max(size0)).double()
    there = (points1 / max(size1)).double()
    trusted = weights.double().clamp_min(1e-6)
    start = _best_similarity(here, there, trusted)
    matrix = _refined(start, here, there, trusted)
    agree = _agreement(matrix, here, there)
    scaled = torch.cat([matrix[:, :2] / max(size0), matrix[:, 2:]], dim=1) * max(size1)
    return Motion(scaled.float(), float((weights.double() * agree).mean()))


def _agreement(matrix: Tensor, here: Tensor, there: Tensor) -> Tensor:
    """(N,) in [0, 1]: how far each match agrees with maps (..., 2, 3) -> (..., N)."""
    moved = here @ matrix[..., :2].mT + matrix[..., None, :, 2]
    return (-0.5 * ((moved - there) / RADIUS).square().sum(-1)).exp()


def _best_similarity(here: Tensor, there: Tensor, weights: Tensor) -> Tensor:
    """Of all maps (2, 3) that two sure matches propose, the one that most agree with."""
    sure = weights.argsort(descending=True, stable=True)[:_PROPOSERS]
    first, second = torch.combinations(sure).unbind(1)
    from0, to0 = here[second] - here[first], there[second] - there[first]
    extent = (here.amax(0) - here.amin(0)).max()
    apart = from0.norm(dim=1) > _APART * extent
    maps = []
    for facing in (1.0, -1.0):
        turned = from0 * here.new_tensor([facing, 1.0])
        square = turned.square().sum(1).clamp_min(1e-12)
        # The turn and size that lead from one difference to the other, as complex numbers.
        real = (turned * to0).sum(1) / square
        imaginary = (turned[:, 0] * to0[:, 1] - turned[:, 1] * to0[:, 0]) / square
        rows = (torch.stack([facing * real, -imaginary], 1),
                torch.stack([facing * imaginary, real], 1))  # fmt: skip
        linear = torch.stack(rows, dim=1)
        scale = (real.square() + imaginary.square()).sqrt()
        good = apart & (scale > 1 / LARGEST) & (scale < LARGEST)
        shift = there[first] - (linear @ here[first][..., None])[..., 0]
        maps.append(torch.cat([linear, shift[..., None]], dim=-1)[good])
    every = torch.cat(maps)
    if not len(every):
        middle = (weights @ there - weights @ here) / weights.sum()
        return torch.cat([torch.eye(2).double().to(here.device), middle[:, None]], dim=1)
    return every[(_agreement(every, here, there) @ weights).argmax()]


def _refined(start: Tensor, here: Tensor, there: Tensor, weights: Tensor) -> Tensor:
    """The affine map (2, 3) near a start that agreeing matches fit best, weighed anew by turns."""
    matrix = start
    for _ in range(_ROUNDS):
        share = weights * _agreement(matrix, here, there)
        share = share / share.sum().clamp_min(1e-12)
        centre0, centre1 = share @ here, share @ there
        spread0, spread1 = here - centre0, there - centre1
        square = (spread0 * share[:, None]).T @ spread0
        cross = (spread1 * share[:, None]).T @ spread0
        stiff = _STIFF * (square.trace() / 2 + 1e-6)
        eye = torch.eye(2, dtype=square.dtype, device=square.device)
        linear = torch.linalg.solve(square + stiff * eye, cross + stiff * start[:, :2], left=False)
        matrix = torch.cat([linear, (centre1 - linear @ centre0)[:, None]], dim=1)
    return matrix

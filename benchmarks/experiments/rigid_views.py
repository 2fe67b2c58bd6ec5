"""From which side is each object of a class seen? Rigid structure from its labelled keypoints.

Weak perspective: keypoint k of object i lies at s_i * R_i[:2] @ shape[k] + t_i. Shape and views are
found in turns: for every viewing direction of a sphere, turn in the picture, size and shift are one
complex least-squares fit, so that the best direction is never a local one; then each keypoint of
the shape is a weighted least-squares fit to all views. Missing keypoints have no weight, far off
ones little. What is seen at all says a good deal of the side, too: where points lie in one plane
(the side of a car) two directions explain them alike, and which keypoints are hidden decides.

Depth could be reversed for all objects of a class together: seen keypoints are taken to lie nearer
than hidden ones. Angles between two views are the same either way.
Convention: x to the right, y down, z away from the camera; a rotation takes shape to camera.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

DIRECTIONS, FINE = 400, 2500
"""Viewing directions while the shape is sought (10 degrees apart), and in the end (4)."""

ROUNDS, RESTARTS, DRAWN, FINALS = 40, 12, 160, 3
"""Of a start; starts; objects that they look at, where there are more; how many of the best starts
are gone on with."""

FAR = 30.0
"""Degrees beyond which a direction is another one, for `doubt`."""


@dataclass(frozen=True, eq=False)
class Views:
    """N objects with K keypoints, seen from the sides that were found."""

    shape: Tensor
    """(K, 3), root mean square 1 around its mean."""
    rotations: Tensor
    """(N, 3, 3)."""
    error: Tensor
    """(N,) root mean square distance of seen keypoints from where they should be, in root mean
    square distances of the object's seen keypoints from their mean."""
    doubt: Tensor
    """(N,) in [0, 1]: how likely the view is another one, FAR away."""
    cost: float
    """Of this shape, mean over objects; restarts are compared by it."""


def angle_between(rotations0: Tensor, rotations1: Tensor) -> Tensor:
    """Degrees (...,) by which two views (..., 3, 3) differ."""
    trace = (rotations0 * rotations1).sum((-1, -2))
    return ((trace - 1) / 2).clamp(-1, 1).acos().rad2deg()


def find_views(
    points: Tensor,
    visible: Tensor,
    *,
    flip: Sequence[int] | None = None,
    generator: torch.Generator,
    restarts: int = RESTARTS,
) -> Views:
    """points (N, K, 2) pixels and visible (N, K) -> shape and views.

    flip: the mirrored keypoint of each, of a thing with two like halves; mirrored photos then teach
    the shape as well. An object needs three keypoints that are not in a line, better six.
    """
    points, count = points.double(), len(points)
    turn = None if flip is None else torch.tensor(list(flip))
    if turn is not None:
        mirrored = points[:, turn] * points.new_tensor([-1.0, 1.0])
        points, visible = torch.cat([points, mirrored]), torch.cat([visible, visible[:, turn]])
    flat = _centred(points, visible)
    drawn = torch.randperm(len(flat), generator=generator)[:DRAWN]
    tried = [_one_start(flat[drawn], visible[drawn], turn, generator) for _ in range(restarts)]
    tried.sort(key=lambda one: one[1])
    finals = [_refined(flat, visible, shape, turn) for shape, _ in tried[:FINALS]]
    found = min(finals, key=lambda views: views.cost)
    cut = {name: getattr(found, name)[:count] for name in ("rotations", "error", "doubt")}
    return replace(found, **cut)


def _centred(points: Tensor, visible: Tensor) -> Tensor:
    """(N, K) complex: around the mean of what is seen, root mean square 1."""
    points = points.masked_fill(~visible[..., None], 0.0)
    flat = torch.complex(points[..., 0], points[..., 1])
    weight = visible.double()
    flat = flat - ((flat * weight).sum(1) / weight.sum(1))[:, None]
    size = ((flat.abs().square() * weight).sum(1) / weight.sum(1)).sqrt()
    return torch.where(visible, flat / size[:, None], torch.zeros_like(flat))


def sphere(count: int) -> Tensor:
    """(count, 3, 3) rotations, the third rows spread evenly over all directions."""
    number = torch.arange(count, dtype=torch.float64) + 0.5
    z, around = 1 - 2 * number / count, math.pi * (1 + 5**0.5) * number
    wide = (1 - z * z).sqrt()
    depth = torch.stack([around.cos() * wide, around.sin() * wide, z], dim=1)
    across = torch.stack([-around.sin(), around.cos(), torch.zeros_like(z)], dim=1)
    return torch.stack([across, torch.linalg.cross(depth, across), depth], dim=1)


@dataclass(frozen=True, eq=False)
class _Fits:
    """Of N objects in G directions."""

    scale: Tensor
    """(N, G) complex: size and turn."""
    shift: Tensor
    """(N, G) complex."""
    cost: Tensor
    """(N, G): weighted squares that are left."""


def _fit(flat: Tensor, weight: Tensor, shown: Tensor) -> _Fits:
    """flat (N, K) = scale * shown (G, K) + shift, by weight (N, K)."""
    full = weight.to(flat)
    total = weight.sum(1)[:, None]
    mean_shown = full @ shown.T / total
    mean_flat = (full * flat).sum(1)[:, None] / total
    cross = (full * flat) @ shown.conj().T - total * mean_flat * mean_shown.conj()
    own = weight @ shown.abs().square().T - total * mean_shown.abs().square()
    theirs = (weight * flat.abs().square()).sum(1)[:, None] - total * mean_flat.abs().square()
    scale = cross / own.clamp_min(1e-9)
    cost = (theirs - cross.abs().square() / own.clamp_min(1e-9)).clamp_min(0)
    return _Fits(scale, mean_flat - scale * mean_shown, cost)


def _shown(shape: Tensor, rotations: Tensor) -> Tensor:
    """(K, 3) and (G, 3, 3) -> (G, K) complex: the shape as each direction shows it."""
    seen = shape @ rotations[:, :2].transpose(1, 2)
    return torch.complex(seen[..., 0], seen[..., 1])


def _chosen(rotations: Tensor, fits: _Fits, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each object's direction best (N,): rotation with its turn, size and shift."""
    rows = torch.arange(len(best))
    scale, shift = fits.scale[rows, best], fits.shift[rows, best]
    return _turned(rotations[best], scale), scale.abs(), shift


def _turned(rotations: Tensor, scale: Tensor) -> Tensor:
    """Rotations (..., 3, 3), turned in the picture by the angle of scale (...,)."""
    turn = scale / scale.abs().clamp_min(1e-12)
    c, s, zero, one = turn.real, turn.imag, torch.zeros_like(turn.real), torch.ones_like(turn.real)
    rows = [torch.stack(row, -1) for row in ((c, -s, zero), (s, c, zero), (zero, zero, one))]
    return torch.stack(rows, dim=-2) @ rotations


def _next_shape(
    flat: Tensor,
    weight: Tensor,
    views: tuple[Tensor, Tensor, Tensor],
    old: Tensor,
    turn: Tensor | None,
) -> Tensor:
    """The shape that fits all views best, brought to mean 0 and size 1; with `turn`, of two halves
    that mirror each other."""
    rotations, size, shift = views
    planes = rotations[:, :2] * size[:, None, None]
    wanted = torch.view_as_real(flat - shift[:, None])
    left = torch.einsum("nk,nai,naj->kij", weight, planes, planes)
    right = torch.einsum("nk,nai,nka->ki", weight, planes, wanted)
    ridge = 1e-3 * torch.eye(3, dtype=left.dtype) * left.diagonal(dim1=1, dim2=2).mean()
    shape = torch.linalg.solve(left + ridge, right + (ridge @ old.T).T)
    shape = shape - shape.mean(0)
    if turn is not None:
        shape = (shape + shape[turn] @ _mirror(shape, turn)) / 2
    return shape / shape.square().sum(1).mean().sqrt()


def _mirror(shape: Tensor, turn: Tensor) -> Tensor:
    """(3, 3): the reflection that brings shape[turn] nearest to shape."""
    both = shape[turn].T @ shape
    # With I - 2nn' the trace of the product is trace(both) - 2 n'(both)n: largest for the least n.
    normal = torch.linalg.eigh(both + both.T).eigenvectors[:, 0]
    return torch.eye(3, dtype=shape.dtype) - 2 * torch.outer(normal, normal)


def _left_over(flat: Tensor, shape: Tensor, views: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """(N, K): how far each keypoint is from where it should be."""
    rotations, size, shift = views
    return (flat - size[:, None] * _shown(shape, rotations) - shift[:, None]).abs()


def _robust(away: Tensor, visible: Tensor) -> Tensor:
    """Weights (N, K) by Cauchy's rule, of twice the median distance."""
    width = 2 * away[visible].median().clamp_min(1e-3)
    return visible / (1 + (away / width).square())


def _one_start(
    flat: Tensor, visible: Tensor, turn: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, float]:
    rotations = sphere(DIRECTIONS)
    shape = torch.randn(flat.shape[1], 3, dtype=torch.float64, generator=generator)
    shape = shape / shape.square().sum(1).mean().sqrt()
    weight = visible.double()
    for _ in range(ROUNDS):
        fits = _fit(flat, weight, _shown(shape, rotations))
        views = _chosen(rotations, fits, fits.cost.argmin(1))
        shape = _next_shape(flat, weight, views, shape, turn)
        weight = _robust(_left_over(flat, shape, views), visible)
    away = _left_over(flat, shape, views)
    return shape, float(away.clamp_max(0.5)[visible].square().mean())


def _refined(flat: Tensor, visible: Tensor, shape: Tensor, turn: Tensor | None) -> Views:
    """Finer directions, and what is hidden as a sign of the side."""
    rotations, weight, hidden = sphere(FINE), visible.double(), None
    for _ in range(6):
        fits = _fit(flat, weight, _shown(shape, rotations))
        width = 2 * weight.sum(1).mean() * fits.cost.amin(1).mean() / weight.sum(1).mean() ** 2
        energy = fits.cost / width
        if hidden is not None:
            energy = energy + hidden
        best = energy.argmin(1)
        views = _chosen(rotations, fits, best)
        shape = _next_shape(flat, weight, views, shape, turn)
        away = _left_over(flat, shape, views)
        weight = _robust(away, visible)
        hidden = _surprise(rotations, visible, views[0])
    away = torch.where(visible, away, torch.zeros_like(away))
    error = (away.square().sum(1) / visible.sum(1)).sqrt()
    doubt = _doubt(rotations, fits, energy, views[0])
    cost = float(away.clamp_max(0.5)[visible].square().mean())
    nearer = _nearer(shape, views[0], visible)
    if nearer < 0:  # all depths the other way round
        mirror = torch.diag(torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64))
        return Views(shape @ mirror, mirror @ views[0] @ mirror, error, doubt, cost)
    return Views(shape, views[0], error, doubt, cost)


def _surprise(rotations: Tensor, visible: Tensor, seen_from: Tensor) -> Tensor:
    """(N, G): minus the log of how likely just these keypoints are seen from each direction.

    Per keypoint a logistic model of the direction, fitted to the views (N, 3, 3) so far.
    """
    ones = torch.ones(len(seen_from), 1, dtype=torch.float64)
    signs = torch.cat([ones, seen_from[:, 2]], dim=1)
    coefficients = torch.zeros(visible.shape[1], 4, dtype=torch.float64)
    truth = visible.double()
    for _ in range(12):  # Newton's steps, all keypoints at once
        chance = torch.sigmoid(signs @ coefficients.T)
        slope = signs.T @ (truth - chance) - coefficients.T
        bend = torch.einsum("nk,ni,nj->kij", chance * (1 - chance), signs, signs)
        bend = bend + torch.eye(4, dtype=torch.float64)
        coefficients = coefficients + torch.linalg.solve(bend, slope.T)
    every = torch.cat([torch.ones(len(rotations), 1, dtype=torch.float64), rotations[:, 2]], dim=1)
    odds = every @ coefficients.T
    return -(truth @ F.logsigmoid(odds).T + (1 - truth) @ F.logsigmoid(-odds).T)


def _doubt(rotations: Tensor, fits: _Fits, energy: Tensor, chosen: Tensor) -> Tensor:
    """(N,): how much of exp(-energy) lies in views FAR from the chosen ones."""
    shares = (-energy).softmax(1)
    values = []
    for row in range(len(chosen)):
        likely = (shares[row] > 1e-5).nonzero()[:, 0]
        others = _turned(rotations[likely], fits.scale[row, likely])
        far = angle_between(others, chosen[row]) > FAR
        values.append(shares[row, likely][far].sum())
    return torch.stack(values)


def _nearer(shape: Tensor, rotations: Tensor, visible: Tensor) -> float:
    """By how much hidden keypoints lie deeper than seen ones, as it is now."""
    depth = shape @ rotations[:, 2].T
    depth = (depth - depth.mean(0)).T
    return float(depth[~visible].mean() - depth[visible].mean()) if (~visible).any() else 0.0

"""The static/dynamic filter (Ham, Cho, Ponce 2015): fill and smooth a field along an image's edges.

Solved directly, never iteratively: the weights span ten decades. It is sparse work for the CPU,
wherever the field lies, by `grid_solver`, which needs numba, or four times slower by scipy
(`pip install 'surefeat[proposals]'` brings numba).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SDSettings:
    """Numbers of the filter, as used for Proposal Flow (method, section 3)."""

    smoothness: float = 20.0
    """lambda: weight of the Laplacian against the data."""
    guidance_decay: float = 30.0
    """Decay with the Lab distance of two guidance pixels, scaled to [0, 1] over the image."""
    value_decay: float = 15.0
    """Decay with the difference of the current values, scaled likewise."""
    floor: float = 1e-5
    """Added to both factors, so that no pixel is ever cut off."""
    iterations: int = 2
    """Times the weights are renewed; in the first the values are constant."""


DEFAULTS = SDSettings()


def sd_filter(values: Tensor, mask: Tensor, guidance: Tensor) -> Tensor:
    """Values (B, C, H, W), mask (B, H, W) bool, guidance (B, 3, H, W) uint8 RGB -> (B, C, H, W).

    Solves (M + lambda L) u = M f, M = diag(mask), channel by channel: L depends on the channel's
    own u from the second iteration on. Where the mask is empty there is nothing to go by and the
    result is 0. It is float32 and lies where the values do.
    """
    if values.shape[0] != mask.shape[0] or values.shape[-2:] != guidance.shape[-2:]:
        raise ValueError(
            f"values {tuple(values.shape)}, mask {tuple(mask.shape)} and guidance"
            f" {tuple(guidance.shape)} differ in batch or size; resize the guidance to the field"
        )
    # Torch's own threads, which spin between operations, rest while the solver's work.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _filter(values.cpu(), mask.cpu(), guidance.cpu(), threads).to(values.device)
    finally:
        torch.set_num_threads(threads)


def _filter(values: Tensor, mask: Tensor, guidance: Tensor, threads: int) -> Tensor:
    data = mask.double()
    data = torch.where(data.flatten(1).any(1)[:, None, None], data, torch.ones_like(data))
    targets = torch.where(mask.unsqueeze(1), values.double(), 0.0)
    static = _static_weights(guidance)
    # Constant values: the dynamic factor is the same for all edges and channels.
    right, down = (w * (1 + DEFAULTS.floor) for w in static)
    result = _solve(data, right, down, targets, threads)
    # From here on every channel has its own system.
    data, right, down = (t.repeat_interleave(values.shape[1], 0) for t in (data, *static))
    targets = targets.flatten(0, 1).unsqueeze(1)
    for _ in range(DEFAULTS.iterations - 1):
        dynamic = _dynamic_factors(result.flatten(0, 1))
        solved = _solve(data, right * dynamic[0], down * dynamic[1], targets, threads)
        result = solved.view_as(result)
    return result.float()


def rgb_to_lab(image: Tensor) -> Tensor:
    """sRGB (..., 3, H, W) uint8 -> CIE L*a*b* (..., 3, H, W) float64, white point D65."""
    levels = torch.arange(256, dtype=torch.float64, device=image.device) / 255
    curve = torch.where(levels > 0.04045, ((levels + 0.055) / 1.055) ** 2.4, levels / 12.92)
    linear = curve[image.long()]
    to_xyz = linear.new_tensor([
        [0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169],
        [0.019334, 0.119193, 0.950227],
    ])  # fmt: skip
    white = linear.new_tensor([0.950456, 1.0, 1.088754])
    xyz = torch.einsum("ij,...jhw->...ihw", to_xyz / white[:, None], linear)
    cube = torch.where(xyz > 0.008856, xyz.clamp_min(1e-9) ** (1 / 3), 7.787 * xyz + 16 / 116)
    x, y, z = cube.unbind(-3)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=-3)


def _static_weights(guidance: Tensor) -> tuple[Tensor, Tensor]:
    """lambda * (exp(-30 dg) + floor) between neighbours: right (B, H, W-1), down (B, H-1, W)."""
    lab = rgb_to_lab(guidance)
    right = (lab[..., 1:] - lab[..., :-1]).square().sum(1).sqrt()
    down = (lab[..., 1:, :] - lab[..., :-1, :]).square().sum(1).sqrt()
    right, down = _kernels(right, down, DEFAULTS.guidance_decay)
    return DEFAULTS.smoothness * right, DEFAULTS.smoothness * down


def _dynamic_factors(values: Tensor) -> tuple[Tensor, Tensor]:
    """exp(-15 du) + floor between neighbours of the values (B, H, W)."""
    right = (values[..., 1:] - values[..., :-1]).abs()
    down = (values[..., 1:, :] - values[..., :-1, :]).abs()
    return _kernels(right, down, DEFAULTS.value_decay)


def _kernels(right: Tensor, down: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """exp(-decay d) + floor, d scaled to [0, 1] over each image's edges, and 0 where all agree."""
    edges = torch.cat([right.flatten(1), down.flatten(1)], dim=1)
    if edges.shape[1] == 0:
        return right, down
    low, high = (v[:, None, None] for v in edges.aminmax(dim=1))
    # Differences at the level of rounding are none: a constant field stays constant.
    span = torch.where(high - low > 1e-9, high - low, torch.inf)
    kernels = [(-decay * ((edge - low) / span)).exp() + DEFAULTS.floor for edge in (right, down)]
    return kernels[0], kernels[1]


def _solve(mask: Tensor, right: Tensor, down: Tensor, targets: Tensor, threads: int) -> Tensor:
    """B systems with T right-hand sides each, (B, T, H, W), all float64."""
    systems = zip(*(t.numpy() for t in (mask, right, down, targets)), strict=True)
    try:
        from surefeat.match.grid_solver import solve
    except ImportError:
        with ThreadPoolExecutor(threads) as pool:
            solved = pool.map(lambda s: torch.from_numpy(solve_banded(*s)), systems)
            return torch.stack(list(solved))
    # Influence fades to below 1e-308 across an image, where arithmetic is many times
    # slower; the flag belongs to a thread, and these threads end here.
    flush = torch.set_flush_denormal
    with ThreadPoolExecutor(threads, initializer=flush, initargs=(True,)) as pool:
        if len(mask) == 1:
            return torch.from_numpy(solve(*next(systems), pool=pool)).unsqueeze(0)
        return torch.stack(list(pool.map(lambda s: torch.from_numpy(solve(*s)), systems)))


def solve_banded(mask: Floats, right: Floats, down: Floats, targets: Floats) -> Floats:
    """What grid_solver.solve gives, by scipy's banded Cholesky; 90 MB at 224 x 224."""
    try:
        from scipy.linalg import solveh_banded
    except ImportError as error:
        fix = "pip install 'surefeat[proposals]'"
        raise ImportError(f"the SD filter needs numba or scipy: {fix}") from error
    height, width = mask.shape
    if mask.size == 1:
        return targets / mask  # scipy takes two pixels or more
    bands = np.zeros((width + 1, height, width))
    bands[0] = mask
    bands[0, :, :-1] += right
    bands[0, :, 1:] += right
    bands[0, :-1] += down
    bands[0, 1:] += down
    bands[1, :, :-1] = -right
    bands[width, :-1] -= down
    sides = targets.reshape(len(targets), -1).T
    solved = solveh_banded(bands.reshape(width + 1, -1), sides, lower=True, overwrite_ab=True)
    return np.ascontiguousarray(solved.T).reshape(targets.shape)

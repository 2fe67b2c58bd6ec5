"""The SD filter against a direct solve, and what it does to holes and edges."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from surefeat.match import sd_filter as static_dynamic
from surefeat.match.dense import flow_from_regions
from tiny import random_boxes, smooth_photo

sparse = pytest.importorskip("scipy.sparse", reason="the oracle is scipy's sparse solver")
linalg = pytest.importorskip("scipy.sparse.linalg")


def sd_filter(values: Tensor, mask: Tensor, guidance: Tensor) -> Tensor:
    """Of one field (C, H, W) or channel (H, W)."""
    channels = values if values.dim() == 3 else values[None]
    filtered = static_dynamic.sd_filter(channels[None], mask[None], guidance[None])[0]
    return filtered if values.dim() == 3 else filtered[0]


def direct_sd(values: np.ndarray, mask: np.ndarray, lab: np.ndarray) -> np.ndarray:
    """The filter for one channel with scipy's direct solver, written from its definition."""
    height, width = mask.shape
    ids = np.arange(height * width).reshape(height, width)
    first = np.concatenate([ids[:, :-1].ravel(), ids[:-1].ravel()])
    second = np.concatenate([ids[:, 1:].ravel(), ids[1:].ravel()])

    def unit(d: np.ndarray) -> np.ndarray:
        return (d - d.min()) / (d.max() - d.min()) if d.max() > d.min() else np.zeros_like(d)

    pixels = lab.reshape(-1, 3)
    dg = unit(np.linalg.norm(pixels[first] - pixels[second], axis=1))
    u = np.zeros(height * width)
    for _ in range(2):
        du = unit(np.abs(u[first] - u[second]))
        w = (np.exp(-30 * dg) + 1e-5) * (np.exp(-15 * du) + 1e-5)
        graph = sparse.coo_matrix((w, (first, second)), shape=(ids.size, ids.size)).tocsc()
        graph = graph + graph.T
        laplacian = sparse.diags(np.asarray(graph.sum(1)).ravel()) - graph
        matrix = (sparse.diags(mask.ravel().astype(float)) + 20 * laplacian).tocsc()
        u = linalg.spsolve(matrix, (mask * values).ravel())
    return u.reshape(height, width)


def realistic_case(height: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values (2, H, W) and mask of matched regions, with holes, over a photo."""
    generator = torch.Generator().manual_seed(seed)
    boxes0 = random_boxes(30, (height, width), generator)
    boxes1 = random_boxes(30, (height, width), generator)
    scores = torch.rand(30, generator=generator)
    size = (height, width)
    field, confidence = flow_from_regions(boxes0, boxes1, scores, size0=size, size1=size)
    return field.permute(2, 0, 1), confidence > 0, smooth_photo(height, width, seed)


@pytest.mark.parametrize("size", [(40, 56), (61, 33), (1, 12), (3, 3)])
def test_sd_filter_equals_a_direct_solve(size: tuple[int, int]) -> None:
    values, mask, image = realistic_case(*size, seed=size[0])
    assert mask.any()
    filtered = sd_filter(values, mask, image)
    lab = static_dynamic.rgb_to_lab(image).permute(1, 2, 0).numpy()
    for channel in range(2):
        wanted = direct_sd(values[channel].numpy(), mask.numpy(), lab)
        assert np.abs(filtered[channel].numpy() - wanted).max() < 1e-3


def test_the_compiled_solution_is_that_of_a_dense_solve() -> None:
    solve = pytest.importorskip("surefeat.match.grid_solver").solve
    generator = np.random.default_rng(0)
    for height, width in ((19, 30), (30, 19), (1, 5), (5, 1), (2, 2), (1, 1)):
        right, down = (
            20 * 10 ** (-6 * generator.random(size))
            for size in ((height, width - 1), (height - 1, width))
        )
        mask = (generator.random((height, width)) < 0.3).astype(float)
        mask[0, 0] = 1  # one known pixel decides the rest
        targets = 50 * generator.standard_normal((3, height, width)) * mask
        wanted = dense_solution(mask, right, down, targets)
        np.testing.assert_allclose(solve(mask, right, down, targets), wanted, atol=1e-6)


def dense_solution(
    mask: np.ndarray, right: np.ndarray, down: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """The matrix written edge by edge, solved by LAPACK."""
    height, width = mask.shape
    matrix = np.diag(mask.ravel())
    edges = [((y, x), (y, x + 1), right[y, x]) for y in range(height) for x in range(width - 1)]
    edges += [((y, x), (y + 1, x), down[y, x]) for y in range(height - 1) for x in range(width)]
    for (y, x), (v, u), weight in edges:
        i, j = y * width + x, v * width + u
        matrix[[i, j], [i, j]] += weight
        matrix[[i, j], [j, i]] -= weight
    return np.linalg.solve(matrix, targets.reshape(len(targets), -1).T).T.reshape(targets.shape)


def test_sd_filter_is_the_same_on_several_threads() -> None:
    values, mask, image = realistic_case(30, 44, seed=3)
    alone = sd_filter(values, mask, image)
    torch.set_num_threads(2)
    assert torch.allclose(sd_filter(values, mask, image), alone, atol=1e-4)


def test_without_numba_scipy_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    guidance = smooth_photo(14, 11, seed=4)
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(2, 14, 11, generator=generator)
    mask = torch.rand(14, 11, generator=generator) < 0.6
    fast = sd_filter(values, mask, guidance)
    monkeypatch.setitem(sys.modules, "surefeat.match.grid_solver", None)
    torch.testing.assert_close(sd_filter(values, mask, guidance), fast, atol=1e-4, rtol=1e-4)
    several = [part.expand(3, *part.shape) for part in (values, mask, guidance)]
    torch.set_num_threads(2)
    for one in static_dynamic.sd_filter(*several):
        torch.testing.assert_close(one, fast, atol=1e-4, rtol=1e-4)
    monkeypatch.setitem(sys.modules, "scipy.linalg", None)
    with pytest.raises(ImportError, match=r"needs numba or scipy: pip install 'surefeat"):
        sd_filter(values, mask, guidance)


def test_sd_filter_treats_a_batch_like_its_members() -> None:
    cases = [realistic_case(20, 28, seed=s) for s in (1, 2)]
    batch = static_dynamic.sd_filter(*(torch.stack(part) for part in zip(*cases, strict=True)))
    for case, filtered in zip(cases, batch, strict=True):
        assert torch.allclose(sd_filter(*case), filtered, atol=1e-4)


def test_lab_equals_scikit_image() -> None:
    color = pytest.importorskip("skimage.color")
    image = smooth_photo(16, 20)
    wanted = color.rgb2lab(image.permute(1, 2, 0).numpy())
    ours = static_dynamic.rgb_to_lab(image).permute(1, 2, 0).numpy()
    # The two use the same white point to four digits.
    assert np.abs(ours - wanted).max() < 0.02


def test_a_constant_field_stays_constant_and_fills_the_mask() -> None:
    _, mask, image = realistic_case(32, 40, seed=5)
    constant = torch.full((2, 32, 40), 7.25)
    garbage = torch.where(mask, constant, torch.full_like(constant, 1e4))
    assert torch.allclose(sd_filter(garbage, mask, image), constant, atol=1e-3)


def test_holes_are_filled_between_their_surroundings() -> None:
    ramp = torch.arange(40.0).expand(40, 40).clone()
    mask = torch.ones(40, 40, dtype=torch.bool)
    mask[12:28, 12:28] = False
    flat = torch.full((3, 40, 40), 100, dtype=torch.uint8)
    filled = sd_filter(ramp, mask, flat)
    assert (filled[14:26, 14:26] - ramp[14:26, 14:26]).abs().max() < 2
    assert (filled[20, 13:28] > filled[20, 12:27]).all()


def test_a_step_in_the_image_keeps_the_two_sides_apart() -> None:
    image = torch.zeros(3, 20, 40, dtype=torch.uint8)
    image[:, :, 20:] = 255
    values = torch.zeros(20, 40)
    values[:, 20:] = 10
    mask = torch.zeros(20, 40, dtype=torch.bool)
    mask[5, [2, 37]] = True
    with_edge = sd_filter(values, mask, image)
    assert with_edge[:, :20].abs().max() < 0.1
    assert (with_edge[:, 20:] - 10).abs().max() < 0.1
    without = sd_filter(values, mask, torch.zeros_like(image))
    assert 2 < without[5, 19] < 8


def test_an_empty_mask_gives_zeros() -> None:
    values = torch.full((2, 2, 8, 9), 5.0)
    mask = torch.zeros(2, 8, 9, dtype=torch.bool)
    mask[1] = True
    filtered = static_dynamic.sd_filter(values, mask, smooth_photo(8, 9).expand(2, 3, 8, 9))
    assert not filtered[0].any()
    assert torch.allclose(filtered[1], values[1], atol=1e-3)


def test_sd_filter_names_the_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="resize the guidance"):
        sd_filter(torch.zeros(2, 8, 9), torch.ones(8, 9, dtype=torch.bool), smooth_photo(8, 8))

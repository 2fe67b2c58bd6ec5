"""Systems on a grid, eliminated row by row, against a dense solve of the whole matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from surefeat.match import row_elimination
from surefeat.match.row_elimination import solve_by_rows

Systems = tuple[Tensor, Tensor, Tensor, Tensor]


def systems(height: int, width: int, *, count: int = 3, seed: int = 0) -> Systems:
    """Mask with holes, weights over six decades, and two right-hand sides of each system."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator, dtype=torch.float64)

    mask = (drawn(height, width) > 0.4).double()
    mask[:, 0, 0] = 1  # one known pixel decides the rest
    right, down = 10 ** (6 * drawn(height, width - 1) - 5), 10 ** (6 * drawn(height - 1, width) - 5)
    return mask, right, down, 40 * drawn(2, height, width) * mask[:, None]


def dense(mask: np.ndarray, right: np.ndarray, down: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """One system: its matrix written edge by edge, solved by LAPACK."""
    height, width = mask.shape
    matrix = np.diag(mask.ravel())
    edges = [((y, x), (y, x + 1), right[y, x]) for y in range(height) for x in range(width - 1)]
    edges += [((y, x), (y + 1, x), down[y, x]) for y in range(height - 1) for x in range(width)]
    for (y, x), (v, u), weight in edges:
        i, j = y * width + x, v * width + u
        matrix[i, i] += weight
        matrix[j, j] += weight
        matrix[i, j] -= weight
        matrix[j, i] -= weight
    return np.linalg.solve(matrix, targets.reshape(len(targets), -1).T).T.reshape(targets.shape)


SIZES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 8), (7, 1), (2, 2), (3, 3), (6, 4), (7, 4), (4, 6),
         (4, 7), (9, 9), (8, 8)]  # fmt: skip


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_elimination_by_rows_equals_a_dense_solve(height: int, width: int) -> None:
    given = systems(height, width, seed=10 * height + width)
    found = solve_by_rows(*given)
    assert found.shape == (3, 2, height, width)
    for number in range(3):
        wanted = dense(*(each[number].numpy() for each in given))
        assert np.allclose(found[number].numpy(), wanted, rtol=1e-8, atol=1e-8)


def test_a_batch_that_does_not_fit_is_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = systems(6, 5, count=5)
    whole = solve_by_rows(*given)
    eliminate, parts = row_elimination._eliminate_rows, []

    def counted(*each: Tensor) -> Tensor:
        parts.append(len(each[0]))
        return eliminate(*each)

    monkeypatch.setattr(row_elimination, "_eliminate_rows", counted)
    monkeypatch.setattr(row_elimination, "_numbers_that_fit", lambda device: 2 * 6 * 5**2)
    torch.testing.assert_close(solve_by_rows(*given), whole, rtol=1e-10, atol=1e-10)
    assert parts == [2, 2, 1]


def test_a_pixel_far_from_all_known_ones_takes_their_value() -> None:
    """Nothing but one known pixel: any weights spread its value over the whole grid."""
    mask, right, down, targets = systems(7, 6)
    alone = torch.zeros_like(mask)
    alone[:, 3, 2] = 1
    targets = 12.5 * alone[:, None].expand_as(targets)
    found = solve_by_rows(alone, right, down, targets)
    torch.testing.assert_close(found, torch.full_like(found, 12.5), rtol=1e-6, atol=0)

"""Dense fronts of the sparse factorisation in surefeat.grid_solve, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

from surefeat.grid_plan import Floats

Function = TypeVar("Function", bound=Callable[..., Any])

PANEL, BAND, SMALL = 16, 32, 48
"""Rows eliminated at a time, rows per matrix product, and the front below which plain loops win.
Larger products were split over threads by BLAS, which then got in the way of our own."""


def compiled(function: Function) -> Function:
    """numba's njit with the function's own type kept; contraction lets it use fused multiply-add.

    Reordered sums ("reassoc") were slower here: 57 instead of 37 ms at 224 x 224.
    """
    compiler = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
    return cast("Function", compiler(function))


@compiled
def eliminate(dense: Floats, own: int, length: int) -> None:
    """Remove the first `own` rows: L D L^T on the upper triangle; targets are its last columns."""
    for first in range(0, own, PANEL):
        last = min(own, first + PANEL)
        for a in range(first, last):
            for b in range(a + 1, last):
                share = dense[a, b] / dense[a, a]
                for j in range(b, length):
                    dense[b, j] -= share * dense[a, j]
        if length - first > SMALL:
            _subtract_by_blas(dense, first, last, length)
        else:
            _subtract_by_rows(dense, first, last, length)


@compiled
def _subtract_by_rows(dense: Floats, first: int, last: int, length: int) -> None:
    """Rows last: of the front lose what rows first:last explain; two at a time saves passes."""
    size = dense.shape[0]
    for k in range(first, last - 1, 2):
        for i in range(last, size):
            row, r0, r1 = dense[i, i:length], dense[k, i:length], dense[k + 1, i:length]
            c0, c1 = r0[0] / dense[k, k], r1[0] / dense[k + 1, k + 1]
            for j in range(row.size):
                row[j] -= c0 * r0[j] + c1 * r1[j]
    if (last - first) % 2:
        k = last - 1
        for i in range(last, size):
            share = dense[k, i] / dense[k, k]
            for j in range(i, length):
                dense[i, j] -= share * dense[k, j]


@compiled
def _subtract_by_blas(dense: Floats, first: int, last: int, length: int) -> None:
    """The same as matrix products, one for each band of rows, so that half of them is saved."""
    rest = dense.shape[0] - last
    scaled = np.empty((rest, last - first))
    for k in range(last - first):
        inverse = 1 / dense[first + k, first + k]
        for i in range(rest):
            scaled[i, k] = dense[first + k, last + i] * inverse
    for top in range(0, rest, BAND):
        bottom = min(rest, top + BAND)
        panel = dense[first:last, last + top : length].copy()
        explained = np.dot(scaled[top:bottom], panel)
        for i in range(top, bottom):
            row, part = dense[last + i, last + i : length], explained[i - top, i - top :]
            for j in range(row.size):
                row[j] -= part[j]


@compiled
def dot(first: Floats, second: Floats) -> float:
    """Four sums side by side: one alone waits for every addition to finish."""
    a = b = c = d = 0.0
    whole = first.size - first.size % 4
    for j in range(0, whole, 4):
        a += first[j] * second[j]
        b += first[j + 1] * second[j + 1]
        c += first[j + 2] * second[j + 2]
        d += first[j + 3] * second[j + 3]
    for j in range(whole, first.size):
        a += first[j] * second[j]
    return float(a + b + c + d)

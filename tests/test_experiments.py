"""Studies beside the package that leave something in it: the fit of Matches.probability."""

from __future__ import annotations

import pytest
import torch
from reliability import calibration, halves


def test_calibration_of_a_hand_computed_case() -> None:
    chance = torch.tensor([0.05, 0.55, 0.59, 1.0])
    bins = calibration(chance, torch.tensor([False, True, False, True]))
    assert bins["count"] == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert bins["predicted"][0] == pytest.approx(0.05)
    assert (bins["predicted"][1], bins["predicted"][5]) == (None, pytest.approx(0.57))
    assert (bins["actual"][5], bins["actual"][9]) == (0.5, 1.0)
    # One of 0.05 off by 0.05, two of mean 0.57 off by 0.07, one exact.
    assert bins["expected calibration error"] == pytest.approx((0.05 + 2 * 0.07) / 4, abs=1e-4)


def test_weights_make_both_answers_and_all_groups_count_the_same() -> None:
    answer = torch.tensor([True, False, False, False, True, True])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    weights = halves(answer, group)
    assert weights.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3, 0.5, 0.5])

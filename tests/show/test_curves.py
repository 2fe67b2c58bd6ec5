"""Curves and bars show the numbers they were given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from surefeat import viz


def test_loss_surface_draws_the_optimal_sigma() -> None:
    figure = viz.loss_surface()
    score, sigma = (np.asarray(values) for values in figure.axes[0].lines[0].get_data())
    # From the table of optimal sigma over the matching loss l = 1 - s.
    for loss, optimum in ((0.05, 0.05), (0.1, 0.1), (0.2, 0.2083), (0.3, 0.3742), (0.4, 0.8131)):
        at = np.interp(1 - loss, score[::-1], sigma[::-1])
        assert at == pytest.approx(optimum, rel=0.01)
    minima = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    places = sorted((float(m.get_xdata()[0]), float(m.get_ydata()[0])) for m in minima)
    expected = [(0.01, -3.605), (0.1, -1.303), (0.3742, -0.253)]
    assert np.allclose(places, expected, rtol=0.03, atol=0.002)


def row(step: int, **more: float) -> dict[str, Any]:
    names = ("loss", "positive", "negative", "dead", "sigma_p10", "sigma_p50", "sigma_p90")
    return {"step": step, **dict.fromkeys(names, 0.25), "pairs_per_s": 9.0, **more}


def test_training_curves_draws_what_was_logged() -> None:
    rows = [row(10, loss=1.0), row(20, loss=0.5, auroc=0.7), row(30, loss=0.25, auroc=0.8)]
    titles = {axes.get_title(loc="left"): axes for axes in viz.training_curves(rows).axes}
    assert np.allclose(titles["Loss"].lines[0].get_data(), [[10, 20, 30], [1.0, 0.5, 0.25]])
    assert np.allclose(titles["Label-free check"].lines[0].get_data(), [[20, 30], [0.7, 0.8]])
    assert np.allclose(titles["Dead positives"].lines[0].get_ydata(), 25)  # per cent
    unchecked = viz.training_curves([row(10)])
    assert "Label-free check" not in {axes.get_title(loc="left") for axes in unchecked.axes}
    with pytest.raises(ValueError, match="has not logged a line yet"):
        viz.training_curves([])


def test_what_could_not_be_computed_leaves_a_gap() -> None:
    """metrics.jsonl holds null where all matches were right."""
    rows = [row(10, auroc=0.7), row(20) | {"auroc": None}, row(30, auroc=0.8)]
    titles = {axes.get_title(loc="left"): axes for axes in viz.training_curves(rows).axes}
    assert np.allclose(titles["Label-free check"].lines[0].get_data(), [[10, 30], [0.7, 0.8]])


def test_calibration_curve_leaves_empty_bins_out() -> None:
    figure = viz.calibration_curve([None, 0.3, 0.9], [None, 0.2, 1.0], [0, 5, 50])
    x, y = figure.axes[0].lines[1].get_data()
    assert (list(x), list(y)) == ([0.3, 0.9], [0.2, 1.0])

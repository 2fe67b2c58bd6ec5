"""The figures of docs/ show the numbers of their files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.patches import ConnectionPatch

from figures import BIRD_SIDE, FIGURES, RESULTS, accuracy_over_time, bird, bird_matches, main
from results_page import TITLES
from sets import feature_model
from surefeat.data.drawn import correspondences
from surefeat.match.points import match_points
from surefeat.measure.results import read_result
from surefeat.measure.tables import sizes_of
from surefeat.show.style import PALETTE

DOCS = Path(__file__).resolve().parents[1] / "docs"

# Step, seconds, nearest, voting: no measurement, only different from each other.
STAGES = [(0, 0.0, 41.0, 61.0), (10, 0.2, 50.0, 66.0), (20, 4.0, 60.0, 68.0), (40, 9.0, 63.0, 69.0)]


def result(*, shipped: int = 20) -> dict[str, Any]:
    """As benchmarks/experiments/training_curve.py writes it."""
    stages = [
        {"step": step, "seconds": seconds, "pck": {"nearest": nearest, "voting": voting}}
        for step, seconds, nearest, voting in STAGES
    ]
    return {
        "benchmark": "pf-pascal", "split": "val", "hardware": "a machine",
        "metrics": {"stages": stages, "shipped steps": shipped},
    }  # fmt: skip


def test_accuracy_over_time_draws_the_stages() -> None:
    axes = accuracy_over_time(result()).axes[0]
    curves = {str(line.get_label()): line.get_xydata() for line in axes.lines}
    seconds = [0.0, 0.2, 4.0, 9.0]
    for name, values in (
        ("nearest neighbour", [41.0, 50.0, 60.0, 63.0]),
        ("voting", [61.0, 66.0, 68.0, 69.0]),
    ):
        assert np.array_equal(curves[name], np.stack([seconds, values], axis=1))
    assert "a machine" in axes.get_xlabel()


def test_accuracy_over_time_marks_the_shipped_model_where_it_stops() -> None:
    axes = accuracy_over_time(result()).axes[0]
    (mark,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert np.array_equal(mark.get_xdata(), [4.0, 4.0])
    texts = [text.get_text() for text in axes.texts]
    # Both routes, untrained and shipped.
    assert {"41.0", "61.0", "60.0", "68.0"} <= set(texts)
    assert "shipped model: 20 steps, 4 s" in texts
    elsewhere = accuracy_over_time(result(shipped=30)).axes[0]
    assert all(line.get_linestyle() == "-" for line in elsewhere.lines)


def test_steps_stand_above_their_seconds_where_they_have_room() -> None:
    figure = accuracy_over_time(result())
    FigureCanvasAgg(figure).draw()
    (above,) = figure.axes[0].child_axes
    assert list(above.get_xticks()) == [0.0, 0.2, 4.0, 9.0]
    # 0.2 s of 9 are too close for the second label.
    assert [label.get_text() for label in above.get_xticklabels()] == ["0", "", "20", "40"]


@pytest.mark.parametrize("metrics", [{}, {"stages": []}])
def test_a_result_without_stages_says_how_to_get_them(metrics: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"write them with benchmarks/experiments/training_curve\.py"
    ):
        accuracy_over_time(result() | {"metrics": metrics})


def test_every_picture_of_the_pages_has_a_figure() -> None:
    assert {path.stem for path in DOCS.glob("*.png")} == FIGURES.keys()


def test_figures_are_drawn_from_the_stored_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["calibration", "regions", "fewshot", "training", "conventions"]
    monkeypatch.setattr(sys, "argv", ["figures.py", *names, "--out", str(tmp_path)])
    main()
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in names)


def test_the_curve_of_a_row_has_the_values_of_its_result() -> None:
    result = read_result(RESULTS / "first" / "pascal3d" / "pascal3d-val-ours.json")
    lines = {line.get_label(): line for line in FIGURES["fewshot"]().axes[1].get_lines()}
    curve = lines[TITLES.get("ours", "ours")]
    shown = [result["metrics"][f"pck@0.1 bbox, {size} per class"] for size in sizes_of(result)]
    assert list(curve.get_ydata()) == pytest.approx(shown)


def test_birds_are_matched_green_where_the_part_is_and_the_title_counts_all_pairs() -> None:
    birds = [bird(number) for number in range(4)]
    model = feature_model()
    figure = bird_matches({"before": model}, birds)
    features = model.extract([item.image for item in birds], longest_side=112)
    right = [
        [
            float(np.hypot(*(place - true).tolist())) < 0.1 * BIRD_SIDE
            for place, true in zip(
                match_points(features[i], features[j], points0).points1, points1, strict=True
            )
        ]
        for i in range(4)
        for j in range(4)
        if i != j
        for points0, points1 in [correspondences(birds[i], birds[j])]
    ]
    share = 100 * sum(map(sum, right)) / sum(map(len, right))
    (half,) = figure.subfigs
    assert half.get_suptitle() == f"before: {share:.0f} % of parts found"
    drawn = [line for line in half.get_children() if isinstance(line, ConnectionPatch)]
    green = [line.get_edgecolor() == to_rgba(PALETTE[2]) for line in drawn]
    assert green == right[0] + right[8]  # of birds 0 and 1, and of 2 and 3

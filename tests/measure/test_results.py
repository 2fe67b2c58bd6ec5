"""Results side by side: the bootstrap against cases that can be counted, tables, the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sets import SIZE, write_model, write_pairs
from surefeat.cli.main import main
from surefeat.measure.results import (
    NEEDED,
    Score,
    compare,
    difference,
    pair_values,
    paired,
    pck_score,
    read_result,
    write_result,
)
from surefeat.measure.tables import difference_table, markdown
from surefeat.show import style
from surefeat.show.results import pck_figure, write_results

FLOW = pck_score("flow", "scnet")


def result(row: str, values: list[float | None], **more: Any) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    base: dict[str, Any] = dict.fromkeys(NEEDED, "x")
    base |= {
        "row": row, "benchmark": "pf-pascal", "split": "test", "rule": "scnet", "curves": {},
        "metrics": {"flow pck@0.1 scnet": sum(known) / len(known)}, "by_class": {},
        "pairs": {"names": [f"p{i}" for i in range(len(values))], "flow pck@0.1 scnet": values},
    }  # fmt: skip
    return base | more


def test_a_constant_gain_is_certain() -> None:
    (found,) = compare(result("a", [10.0, 20.0, 30.0]), result("b", [15.0, 25.0, 35.0]))
    assert (found.first, found.second, found.difference) == (20, 25, 5)
    assert (found.low, found.high, found.chance, found.pairs) == (5, 5, 0, 3)


def test_two_opposite_changes_prove_nothing() -> None:
    """Resampled means of +1 and -1 are -1, 0 and 1 with 1/4, 1/2, 1/4."""
    found = difference(FLOW, torch.tensor([[0.0, 1.0], [0.0, -1.0]], dtype=torch.float64))
    assert (found.difference, found.low, found.high, found.chance) == (0, -1, 1, 1)


def test_chance_is_what_counting_all_resamples_gives() -> None:
    """Of three pairs one gains: all 27 draws miss it 8 times, and never lose."""
    values = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 5.0]], dtype=torch.float64)
    found = difference(FLOW, values)
    assert found.chance == pytest.approx(2 * 8 / 27, abs=0.03)
    assert (found.low, found.high) == (0, 3)
    assert difference(FLOW, values) == found
    assert difference(FLOW, values, seed=1) != found


def test_the_interval_holds_nineteen_of_twenty() -> None:
    """Of many pairs it is the normal one: 1.96 standard errors either way of a gain."""
    gains = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gains = 1 + 2 * (gains - gains.mean()) / gains.std(correction=0)
    found = difference(FLOW, torch.stack([torch.zeros_like(gains), gains], dim=1))
    assert (found.first, found.second) == pytest.approx((0.0, 1.0))
    assert found.difference == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((1 - 0.196, 1 + 0.196), abs=0.012)


def test_pairs_without_a_value_are_left_out() -> None:
    assert paired([1.0, None, 3.0], [None, 2.0, 4.0]).tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"benchmark": "pf-willow"}, "different benchmarks, pf-pascal and pf-willow"),
        ({"split": "val"}, "different splits, test and val"),
        ({"pairs": {"names": ["q"]}}, "of different pairs"),
    ],
)
def test_results_of_different_pairs_are_not_compared(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(result("a", [1.0]), result("b", [1.0], **change))


def test_the_comparison_reads_as_a_table() -> None:
    found = compare(result("a", [10.0, 20.0]), result("b", [11.0, 21.0]))
    assert markdown(difference_table(found, ("a", "b"))).splitlines()[2] == (
        "| flow pck@0.1 scnet | 15.0 | 16.0 | 1.0 | 1.0 to 1.0 | 0.000 | 2 |"
    )


def test_a_result_without_its_provenance_is_not_written(tmp_path: Path) -> None:
    wrong = result("a", [1.0])
    del wrong["commit"]
    with pytest.raises(ValueError, match="a result needs commit"):
        write_result(tmp_path / "x.json", wrong)
    (tmp_path / "y.json").write_text("{}")
    with pytest.raises(ValueError, match=r"y\.json is no result of surefeat evaluate: no row"):
        read_result(tmp_path / "y.json")
    (tmp_path / "z.json").write_text("{\n1")
    with pytest.raises(ValueError, match=r"z\.json, line 2: not JSON"):
        read_result(tmp_path / "z.json")


def test_numbers_are_rounded_and_nan_becomes_null(tmp_path: Path) -> None:
    metrics = {"a": 1 / 3, "b": float("nan"), "c": 2}
    path = write_result(tmp_path / "x.json", result("r", [1.0], metrics=metrics))
    assert json.loads(path.read_text())["metrics"] == {"a": 0.3333, "b": None, "c": 2}


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("voting pck@0.1 scnet", Score("pck", "voting", 0.1, "scnet")),
        ("pck@0.05 bbox, all per class", Score("pck", "", 0.05, "bbox", images="all")),
        ("shifted mean-flow pck@0.15 bbox-kp per point",
         Score("pck", "mean-flow", 0.15, "bbox-kp", shifted=True, per_point=True)),
        ("mean position pck area bbox, 10 per class, sd over seeds",
         Score("pck area", "mean position", rule="bbox", images="10", spread=True)),
        ("shifted nearest auroc margin", Score("auroc", "nearest", sign="margin", shifted=True)),
        ("pcr area by class", Score("pcr area by class")),
        ("shifted mean iou", Score("mean iou", shifted=True)),
        ("true matches: actual loss", Score("true matches: actual loss")),
    ],
)  # fmt: skip
def test_a_score_has_its_name_in_files(name: str, score: Score) -> None:
    assert str(score) == name


def test_a_score_is_shown_by_its_kind_not_by_its_size() -> None:
    """0.8 percent of the keypoints is 0.8, and an area of 1 is 1.000."""
    assert FLOW.shown(0.8) == "0.8"
    assert FLOW.shown(100.0) == "100.0"
    assert Score("pcr area").shown(1.0) == "1.000"
    assert Score("auroc", "voting", sign="score").shown(0.5) == "0.500"
    assert FLOW.shown(None) == ""


def test_pairs_hold_counts_of_right_points_and_older_files_shares() -> None:
    new = {"pairs": {"points": [4, 5, 2], str(FLOW): [1, None, 2], "mean iou": [0.5, None, 0.1]}}
    assert pair_values(new, FLOW) == [25, None, 100]
    assert pair_values(new, Score("mean iou")) == [0.5, None, 0.1]
    assert pair_values({"pairs": {str(FLOW): [25.0, None]}}, FLOW) == [25.0, None]
    assert pair_values(new, pck_score("voting", "scnet")) == []


def test_the_commands_measure_compare_and_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write_pairs(tmp_path / "data", count=16, most=3)
    model, out = write_model(tmp_path / "model"), tmp_path / "results"
    main(
        f"evaluate pairs {pairs} --rows mine={model} hog --out {out} --boxes 40 --side {SIZE} "
        "--device cpu --json".split()
    )
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"mine", "hog"}
    assert "flow pck@0.1 img" in found["hog"]
    assert "nearest auroc confidence" not in found["hog"]
    files = [out / f"pairs-test-{row}.json" for row in ("hog", "mine")]
    main(["evaluate", "compare", *map(str, files)])
    assert "| mean iou " in capsys.readouterr().out
    main(["evaluate", "tables", str(out), "--out", str(tmp_path / "tables")])
    written = {path.name for path in (tmp_path / "tables").iterdir()}
    assert written == {
        "index.html", "results.md", "pairs-test-pck.png", "pairs-test-regions.png",
    }  # fmt: skip
    text = (tmp_path / "tables" / "results.md").read_text()
    assert "| hog |" in text
    assert "### regions, flow, all rules" in text
    assert max(line.count("|") for line in text.splitlines()) <= 13
    main(["data", "show", "pairs", str(pairs), "--out", str(tmp_path / "p.png"), "--count", "2"])
    assert "2 of 3 pairs" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("pairs", "names", "a"), ("curves", "pcr", {"0": 0.5}), ("by_class", "pck", [1.0])],
)
def test_a_table_of_a_result_that_has_another_shape_is_named(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    whole = result("a", [50.0, 60.0])
    file = tmp_path / "a.json"
    file.write_text(json.dumps(whole | {name: {key: value}}))
    with pytest.raises(ValueError, match=f"a.json is damaged: its {name}, {key} is not what"):
        read_result(file)


def test_tables_of_foreign_results_stay_in_their_folder(tmp_path: Path) -> None:
    """A benchmark called ../../x must not write beside the folder."""
    (tmp_path / "in").mkdir()
    foreign = result("a", [50.0, 60.0], benchmark="../../x", split="../y")
    write_result(tmp_path / "in" / "a.json", foreign)
    before = set(tmp_path.iterdir())
    write_results(tmp_path / "in", tmp_path / "deep" / "out")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "deep"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"out"}
    assert len(list((tmp_path / "deep" / "out").glob("*-pck.png"))) == 1


def test_tables_hold_results_of_folders_below_the_best_row_first(tmp_path: Path) -> None:
    for row, values in (("worse", [50.0, 60.0]), ("better", [70.0, 80.0])):
        (tmp_path / "in" / row).mkdir(parents=True)
        write_result(tmp_path / "in" / row / "a.json", result(row, values))
    write_results(tmp_path / "in", tmp_path / "out")
    text = (tmp_path / "out" / "results.md").read_text()
    assert 0 < text.index("| better |") < text.index("| worse |")


def test_rows_of_one_name_in_several_folders_are_told_apart(tmp_path: Path) -> None:
    for number, place in enumerate(("", "old", "old", "new")):
        (tmp_path / "in" / place).mkdir(parents=True, exist_ok=True)
        values: list[float | None] = [50.0 + number, 60.0 + number]
        write_result(tmp_path / "in" / place / f"{number}.json", result("ours", values))
    write_results(tmp_path / "in", tmp_path / "out")
    text = (tmp_path / "out" / "results.md").read_text().split("##")[1]
    rows = {
        line.split(" | ")[0]: line.split(" | ")[1] for line in text.splitlines() if "| " in line
    }
    assert rows["| ours"] == "55.0"
    assert rows["| ours (2, new)"] == "58.0"
    assert rows["| ours (3, old)"] == "56.0"
    assert rows["| ours (4, old)"] == "57.0"


def test_a_long_name_of_a_row_leaves_room_for_the_figure(recwarn: pytest.WarningsRecorder) -> None:
    rows = [result(name, [50.0, 60.0]) for name in ("ours", "timm:" + 80 * "x" + "/block8")]
    figure = pck_figure(rows)
    style.drawn(figure, dpi=80)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "ours"
    assert labels[1].startswith("timm:xxx")
    assert labels[1].endswith("/block8")
    assert figure.axes[0].get_position().width > 0.5
    assert [str(one.message) for one in recwarn] == []

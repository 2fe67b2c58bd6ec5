"""Tables say what results hold, and the stored results behind the pages are sound."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from surefeat.core.files import file_stem
from surefeat.measure.results import pck_score, read_result
from surefeat.measure.tables import (
    class_table,
    control_table,
    groups,
    main_table,
    markdown,
    published,
    route_table,
    rule_table,
    score_table,
    transposed,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import results_page  # noqa: E402

RESULTS = sorted((ROOT / "results").rglob("*.json"))
MATCHING = [path for path in RESULTS if path.parent.name in ("pf-pascal", "pf-willow", "cub-dev")]
FEWSHOT = [path for path in RESULTS if path.parent.name == "pascal3d"]


def result(row: str, benchmark: str = "pf-pascal", **metrics: float | None) -> dict[str, Any]:
    """Metrics by route: PCK@0.1 by the scnet rule."""
    named = {str(pck_score(route.replace("_", "-"), "scnet")): v for route, v in metrics.items()}
    return {"row": row, "benchmark": benchmark, "split": "test", "rule": "scnet",
            "metrics": named, "by_class": {}, "curves": {}}  # fmt: skip


def test_a_table_has_the_columns_that_hold_something_the_default_first() -> None:
    ours = result("ours", flow=66.0, nearest=70.0, voting=0.8, identity=37.0)
    ours["metrics"] |= {"voting pck@0.05 img": 12.34, "pcr area": 0.4321}
    bare = result("hog", voting=5.0, nearest=None)
    table = main_table([ours, bare])
    assert table[0] == [
        "row", "voting scnet@0.1", "voting img@0.05", "nearest neighbour", "regions, flow",
        "PCR area", "published (flow)",
    ]  # fmt: skip
    assert table[1] == ["ours", "0.8", "12.3", "70.0", "66.0", "0.432", "66.5"]
    assert table[2] == ["hog", "5.0", "", "", "", "", ""]
    assert table[3] == ["identity (control)", "37.0", "", "37.0", "37.0", "", ""]
    assert transposed(table)[1] == ["voting scnet@0.1", "0.8", "5.0", "37.0"]
    assert control_table([ours, bare])[0] == ["row", "PCR area"]


def test_a_table_for_a_terminal_is_aligned_and_still_markdown() -> None:
    lines = markdown([["row", "a"], ["ours|x", "1.5"]], aligned=True).splitlines()
    assert lines == ["| row     | a   |", "|---------|-----|", "| ours\\|x | 1.5 |"]
    assert markdown([["row", "a"], ["x", "1"]]) == "| row | a |\n|---|---|\n| x | 1 |\n"


def test_what_is_published_stands_beside_its_own_row_and_benchmark_only() -> None:
    flow = pck_score("flow", "scnet")
    assert published("ours", "pf-pascal", flow) == 66.5
    assert published("resnet50-hc", "pf-pascal", flow) == 64.0
    for row, benchmark in (("", "pf-pascal"), ("ours", "pf-willow"), ("res4d", "pf-pascal")):
        assert published(row, benchmark, flow) is None
    assert published("ours", "pf-pascal", pck_score("voting", "scnet")) is None
    val = [{**result("ours", flow=60.0), "split": "val"}]
    assert "published (flow)" not in route_table(val)[0]


def test_rows_stand_by_rising_default_matching() -> None:
    rows = [result("a", voting=3.0), result("b", nearest=2.0), result("c", voting=1.0, flow=9.0)]
    (group,) = groups(rows).values()
    assert [one["row"] for one in group] == ["c", "b", "a"]


def test_seeds_become_a_mean_and_its_deviation() -> None:
    seeds = [result("x", voting=value) for value in (1.0, 2.0, 6.0)]
    column = {"voting": pck_score("voting", "scnet"), "flow": pck_score("flow", "scnet")}
    assert score_table({"x": seeds}, column) == [["row", "voting"], ["x", "3.0 ± 2.6"]]
    short = [*seeds, result("x", flow=1.0)]
    assert score_table({"x": short}, column) == [["row"], ["x"]]


def test_rules_and_classes_of_one_route() -> None:
    one = result("x", voting=50.0, nearest=1.0)
    one["metrics"] |= {"voting pck@0.05 img": 20.0, "voting pck@0.05 img per point": 21.0,
                       "shifted voting pck@0.1 img": 9.0, "voting auroc score": 0.9}  # fmt: skip
    assert rule_table([one], "voting") == [["row", "scnet@0.1", "img@0.05"], ["x", "50.0", "20.0"]]
    score = pck_score("voting", "scnet")
    assert class_table([one], score) == []
    one["by_class"] = {str(score): {"car": 40.0, "bus": 60.0}}
    assert class_table([one], score) == [
        ["row", "car", "bus", "mean"],
        ["x", "40.0", "60.0", "50.0"],
    ]


@pytest.mark.parametrize("page", results_page.TABLES, ids=lambda page: page.name)
def test_the_pages_have_the_tables_of_the_results(page: Path) -> None:
    told = f"{page.name} drifted from results/; run `make results`"
    assert results_page.filled(page) == page.read_text(), told


def test_results_are_json_only() -> None:
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix != ".json" and "cache" not in path.parts] == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_result_says_where_it_comes_from(path: Path) -> None:
    stored = json.loads(path.read_text())
    for key in ("row", "benchmark", "split", "metrics", "config", "commit", "hardware", "date"):
        assert stored.get(key), f"{path.name} lacks {key}"
    assert "weights_sha256" in stored


@pytest.mark.parametrize("path", MATCHING + FEWSHOT, ids=lambda path: path.name)
def test_a_row_is_one_run_of_one_clean_commit(path: Path) -> None:
    stored = read_result(path)
    assert path.stem == file_stem(*(stored[key] for key in ("benchmark", "split", "row")))
    assert isinstance(stored["commit"], str)
    assert results_page.is_clean(stored)
    assert stored["device"] in ("cpu", "cuda")
    assert (stored["device"] == "cuda") == ("NVIDIA" in stored["hardware"])
    learned = stored["row"] not in ("sift", "hog")
    assert (stored["weights_sha256"] is None) != learned
    if learned:
        assert len(stored["weights_sha256"]) == 64

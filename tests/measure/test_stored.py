"""Stored results check themselves: means follow from their parts, and rows from one model."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import results_page
from surefeat.core.files import file_hash
from surefeat.data.benchmarks import CONVENTIONS
from surefeat.keypoints.config import FewShot, KeypointConfig
from surefeat.learn.config import preset
from surefeat.match.sd_filter import DEFAULTS
from surefeat.measure.protocol import ALPHAS, Protocol
from surefeat.measure.results import CONTROL, Score, pair_values, pck_score, read_result
from surefeat.measure.tables import main_table, markdown, transposed
from surefeat.model.config import POINT_WEIGHTS, REGION_WEIGHTS, WEIGHTS, ModelConfig, model_folder

RESULTS = Path(__file__).resolve().parents[2] / "results"
FILES = sorted(RESULTS.rglob("*.json"))
MATCHING = [path for path in FILES if path.parent.name in ("pf-pascal", "pf-willow", "cub-dev")]
FEWSHOT = [path for path in FILES if path.parent.name == "pascal3d"]
BOXES = [path for path in FILES if path.parent.name == "boxes"]
OURS = RESULTS / "pf-pascal" / "pf-pascal-test-ours@320.json"
"""The headline row: the model that ships, at its own size."""


def plain(settings: Any) -> Any:
    """Settings as JSON has them."""
    return json.loads(json.dumps(asdict(settings)))


# Means of matching rows.


@pytest.mark.parametrize("path", MATCHING, ids=lambda path: path.name)
def test_a_row_holds_what_its_protocol_asked_for_and_its_means_follow_from_its_pairs(
    path: Path,
) -> None:
    stored = read_result(path)
    protocol, names = stored["config"]["protocol"], stored["pairs"]["names"]
    asked = {"": protocol["measures"], "shifted ": protocol["shifted_measures"]}
    routes = {
        f"{prefix}{route}"
        for prefix, measures in asked.items()
        for route in ("identity", *measures)
        if measures and route != "regions"
    }
    measured = (name.split(" pck@") for name in stored["metrics"] if " pck@" in name)
    assert {route for route, _ in measured} == routes
    checked = 0
    for shifted, rule, alpha in product((False, True), CONVENTIONS, ALPHAS):
        for route in (route for route in routes if route.startswith("shifted ") == shifted):
            score = pck_score(route.removeprefix("shifted "), rule, alpha=alpha, shifted=shifted)
            values = pair_values(stored, score)
            if any(value is not None for value in values):
                check_means(stored, score, values)
                checked += 1
            if str(score) in stored["by_class"]:
                check_classes(stored["by_class"][str(score)], names, values)
    assert checked >= len(routes)
    for name, curve in stored["curves"].items():
        area = (sum(curve) - (curve[0] + curve[-1]) / 2) / (len(curve) - 1)
        kind = "pcr area by class" if name.endswith("pcr by class") else f"{name} area"
        kind = f"shifted {kind}" if name.startswith("shifted pcr by") else kind
        assert area == pytest.approx(stored["metrics"][kind], abs=2e-4)
    assert len(names) == {"pf-pascal": 299, "pf-willow": 900, "pairs": 400}[stored["benchmark"]]


def check_means(stored: dict[str, Any], score: Score, values: list[float | None]) -> None:
    """Means over pairs and over points, and how many there are of both."""
    known = [value for value in values if value is not None]
    assert statistics.mean(known) == pytest.approx(score.of(stored), abs=2e-3), score
    prefix = "shifted " if score.shifted else ""
    assert stored["counts"][f"{prefix}pairs"] == len(known)
    points = stored["pairs"].get(f"{prefix}points")
    if points is not None:  # the first version did not write it
        total = sum(count for count in points if count is not None)
        right = sum(count for count in stored["pairs"][str(score)] if count is not None)
        assert stored["counts"][f"{prefix}points"] == total
        share = replace(score, per_point=True).of(stored)
        assert 100 * right / total == pytest.approx(share, abs=1e-3)


def check_classes(classes: dict[str, float], names: list[str], values: list[float | None]) -> None:
    """What is said of classes is the mean of their pairs, which are named CLASS/..."""
    grouped: dict[str, list[float]] = {}
    for pair, value in zip(names, values, strict=True):
        if value is not None:
            grouped.setdefault(pair.split("/")[0], []).append(value)
    assert grouped.keys() == classes.keys()
    for category, value in classes.items():
        assert statistics.mean(grouped[category]) == pytest.approx(value, abs=2e-3)


# Means of few-shot rows and of boxes.


@pytest.mark.parametrize("path", FEWSHOT, ids=lambda path: f"{path.parent.parent.name}-{path.name}")
def test_few_shot_means_follow_from_the_rounds_of_the_seeds(path: Path) -> None:
    stored = read_result(path)
    protocol = stored["config"]["protocol"]
    seeds = protocol["seeds"]  # the first version wrote how many
    seeds = seeds if isinstance(seeds, list) else list(range(seeds))
    for size, route in product(protocol["rounds"], ("", CONTROL)):
        own = [one for one in stored["rounds"] if one["round"] == size]
        assert [one["seed"] for one in own] == seeds
        score = Score("pck", route, alpha=0.1, rule="bbox", images=str(size))
        for one in (score, replace(score, kind="pck area", alpha=None)):
            values = [record[str(replace(one, images=""))] for record in own]
            assert statistics.mean(values) == pytest.approx(one.of(stored), abs=2e-4)
            spread = replace(one, spread=True).of(stored)
            assert statistics.stdev(values) == pytest.approx(spread, abs=2e-4)
            classes = stored["by_class"][str(one)].values()
            assert statistics.mean(classes) == pytest.approx(one.of(stored), abs=2e-4)
        curve = stored["pck_curves"][f"{route} {size} per class".lstrip()]
        for alpha in (0.05, 0.1):
            at = stored["pck_curves"]["alpha"].index(alpha)
            value = replace(score, alpha=alpha).of(stored)
            assert 100 * curve[at] == pytest.approx(value, abs=1e-2)
        assert stored["counts"][f"images, {size} per class"] == [one["images"] for one in own]


@pytest.mark.parametrize("path", BOXES, ids=lambda path: path.name)
def test_means_of_boxes_follow_from_their_classes(path: Path) -> None:
    metrics = read_result(path)["metrics"]
    for table, mean in (("corloc on train", "mean"), ("ap@0.5 on val", "map (area)")):
        for row in metrics[table].values():
            classes = [
                value for name, value in row.items() if name not in (mean, "map (11 points)")
            ]
            assert len(classes) in (12, 20)
            assert statistics.mean(classes) == pytest.approx(row[mean], abs=1e-4)


# Rows: one model, one commit, one way of measuring.


def common(result: dict[str, Any]) -> dict[str, Any]:
    """What must agree between the files behind one line; what is measured may differ."""
    protocol = dict(result["config"]["protocol"])
    protocol.pop("measures"), protocol.pop("shifted_measures")
    about = {key: result[key] for key in ("weights_sha256", "commit", "device", "row")}
    return about | {"protocol": protocol, "settings": result["config"]["row"]}


@pytest.mark.parametrize("row", ["ours@320", "res4e@320", "match", "match-slower"])
def test_a_line_of_the_readme_is_one_model_measured_in_one_way(row: str) -> None:
    folders = (RESULTS / "pf-pascal", RESULTS / "cub-dev")
    files = [path for path in MATCHING if path.stem.endswith(f"-test-{row}")]
    shown = [read_result(path) for path in files if path.parent in folders]
    assert shown
    assert all(common(one) == common(shown[0]) for one in shown)


@pytest.mark.parametrize("benchmark", results_page.RULES)
def test_seeds_of_one_line_share_all_but_their_weights(benchmark: str) -> None:
    lines = results_page.lines_of(benchmark)
    assert lines
    for line in lines:
        hashes = [one["weights_sha256"] for one in line.results]
        assert len(set(hashes)) == len(hashes)
        kept = [common(one) | {"weights_sha256": "", "row": ""} for one in line.results]
        for one in kept:
            one["settings"].get("peer", {}).get("fit", {}).pop("seed", None)
        assert all(one == kept[0] for one in kept)


# What was measured is what ships: other defaults ask for other numbers.


def test_the_shipped_model_is_that_of_its_rows() -> None:
    shipped = file_hash(model_folder(None) / WEIGHTS)
    rows = ("ours@320", "match", "match-slower")
    files = [path for path in MATCHING if path.stem.partition("-test-")[2] in rows]
    assert len(files) == 8
    assert {read_result(path)["weights_sha256"] for path in files} == {shipped}


def test_the_headline_numbers_were_measured_with_the_settings_of_today() -> None:
    """Whoever changes a default of matching measures anew: `surefeat evaluate pf-pascal`."""
    config = read_result(OURS)["config"]
    measured = {"measures", "shifted_measures", "inputs", "mirrored"}
    today = {key: value for key, value in plain(Protocol()).items() if key not in measured}
    assert {key: config["protocol"][key] for key in today} == today
    assert config["protocol"]["inputs"] == [ModelConfig().longest_side]
    assert not config["protocol"].get("mirrored")
    assert config["sd_filter"] == plain(DEFAULTS)
    row = config["row"]
    assert (row["descriptor_weight"], row["lower_weight"]) == POINT_WEIGHTS
    assert tuple(row["region_weights"]) == REGION_WEIGHTS


@pytest.mark.parametrize("row", ["match", "match-slower"])
def test_what_the_commands_do_was_measured_with_the_votes_of_today(row: str) -> None:
    config = read_result(OURS.with_name(f"pf-pascal-test-{row}.json"))["config"]
    assert config["protocol"]["voting"] == plain(Protocol())["voting"]
    assert (config["row"]["descriptor_weight"], config["row"]["lower_weight"]) == POINT_WEIGHTS


def test_few_shot_numbers_were_measured_with_the_detector_of_today() -> None:
    """Whoever changes a default of keypoints measures anew: `surefeat evaluate pascal3d`. A row of
    another model than the one that ships must not bear its name."""
    files = sorted((RESULTS / "pascal3d").glob("pascal3d-val-ours*.json"))
    assert files
    for path in files:
        stored = read_result(path)
        assert stored["config"]["head"] == plain(KeypointConfig())
        assert stored["config"]["protocol"] == plain(FewShot())
        shipped = stored["weights_sha256"] == file_hash(model_folder(None) / WEIGHTS)
        assert shipped == (path.stem == "pascal3d-val-ours")


def test_the_shipped_model_was_trained_by_the_recipe_of_today() -> None:
    """Whoever changes the recipe trains anew, and stores the run's settings and hash."""
    stored = json.loads((RESULTS / "studies" / "training_ours.json").read_text())
    assert stored["weights_sha256"]["ours"] == file_hash(model_folder(None) / WEIGHTS)
    without_effect = {
        "stride_in_1x1", "lower", "amp", "compile", "log_every", "check_every",
        "checkpoint_every", "held_out", "memory", "workers",
    }  # fmt: skip
    today = plain(preset("ours"))
    for group, settings in stored["config"]["ours"].items():
        used = {key: value for key, value in settings.items() if key not in without_effect}
        assert {key: today[group].get(key) for key in used} == used


def test_the_page_on_evaluation_prints_what_its_file_holds() -> None:
    result = read_result(RESULTS / "cub-dev" / "pairs-test-ours@320.json")
    printed = markdown(transposed(main_table([result])), aligned=True)
    page = (RESULTS.parent / "docs" / "evaluation.md").read_text()
    assert printed.strip() in page

"""Semantic matching measured end to end on drawn pairs: what a result holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import surefeat
import surefeat.measure.evaluate as evaluation
from sets import PROTOCOL, SIZE, write_pairs
from surefeat.core.files import hardware
from surefeat.data.benchmarks import load_benchmark
from surefeat.data.pairs import load_pairs
from surefeat.match.points import match_points
from surefeat.measure.evaluate import evaluate_row, evaluate_rows, some_pairs
from surefeat.measure.matching import measure
from surefeat.measure.material import Material, prepare_material
from surefeat.measure.results import read_result
from surefeat.measure.rows import Row, as_features
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from tiny import CPU


@pytest.fixture(scope="module")
def run(listed: Path, model: Path, boxes: Path) -> Callable[..., dict[str, Any]]:
    """Evaluate the small model; returns its result."""

    def evaluated(out: Path, **more: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "rows": [f"mine={model}"], "init": (), "proposals": boxes, "boxes": 60, "side": SIZE,
            "device": "cpu", "quiet": True,
        }  # fmt: skip
        paths = evaluate_rows("pairs", listed, out=out, **settings | more)
        return read_result(paths[0])

    return evaluated


@pytest.fixture(scope="module")
def whole(run: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished evaluation, whose pairs were measured two by two."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "CHUNK", {"cpu": 2})
        run(out)
    return out


RESULT = "pairs-test-mine.json"


def without_clock(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("date", "seconds")}


def test_a_result_says_what_was_measured_and_how(whole: Path, listed: Path) -> None:
    text = (whole / RESULT).read_text()
    assert len(text) < 60_000
    assert len(text.splitlines()) < 40
    result = json.loads(text)
    pairs = load_pairs(listed)
    assert (result["row"], result["benchmark"], result["split"]) == ("mine", "pairs", "test")
    assert result["counts"]["pairs"] == len(pairs) == 6
    assert result["counts"]["points"] == sum(int(pair.visible.sum()) for pair in pairs)
    assert result["config"]["protocol"]["proposals"]["count"] == 60
    assert len(result["weights_sha256"]) == 64
    assert (result["device"], result["hardware"]) == ("cpu", hardware("cpu"))
    for route in ("flow", "nearest", "voting", "location", "identity", "shifted nearest"):
        for rule in ("scnet", "img", "bbox-kp"):
            for alpha in ("0.05", "0.1", "0.15"):
                assert 0 <= result["metrics"][f"{route} pck@{alpha} {rule}"] <= 100
                assert f"{route} pck@{alpha} {rule} per point" in result["metrics"]
    assert "shifted flow pck@0.1 img" not in result["metrics"]
    assert not any(name.endswith(" bbox") for name in result["metrics"])
    assert 0 < result["metrics"]["pcr area"] < 1
    assert {"nearest auroc confidence", "nearest aurc score", "true matches: calibration error",
            "voting auroc margin"} <= result["metrics"].keys()  # fmt: skip
    assert len(result["curves"]["pcr"]) == 101
    assert len(result["curves"]["miou"]) == 100
    assert result["pairs"]["points"] == [int(pair.visible.sum()) for pair in pairs]
    names = {pair.category for pair in pairs}
    assert result["by_class"]["flow pck@0.1 img"].keys() == names


def test_identity_is_what_a_loop_over_the_list_gives(
    run: Callable[..., dict[str, Any]], tmp_path: Path, listed: Path
) -> None:
    """All images have one size, so the same place is the same pixel."""
    result = run(tmp_path, measures=("nearest",), shifted=())
    shares = []
    for pair in load_pairs(listed):
        points0, points1 = pair.common()
        near = [(a - b).norm() < 0.1 * SIZE for a, b in zip(points0, points1, strict=True)]
        shares.append(100 * sum(map(bool, near)) / len(near))
    expected = sum(shares) / len(shares)
    assert result["metrics"]["identity pck@0.1 img"] == pytest.approx(expected, abs=1e-3)
    assert "pcr area" not in result["metrics"]


def test_an_image_is_found_in_itself(model: Path, tmp_path: Path, boxes: Path) -> None:
    """Known answer: every route leads back to the point, every region to itself."""
    write_pairs(tmp_path)
    own = [line.split(",") for line in (tmp_path / "pairs.csv").read_text().splitlines()]
    for line in own[1:]:
        line[1], line[5], line[6] = line[0], line[3], line[4]
    (tmp_path / "pairs.csv").write_text("".join(",".join(line) + "\n" for line in own))
    (path,) = evaluate_rows(
        "pairs", tmp_path, rows=[f"mine={model}"], out=tmp_path / "out", init=(),
        proposals=boxes, boxes=60, side=SIZE, device="cpu", quiet=True,
    )  # fmt: skip
    metrics = read_result(path)["metrics"]
    for route in ("nearest", "voting", "location", "flow", "identity"):
        assert metrics[f"{route} pck@0.1 img"] == 100, route
    assert metrics["pcr area"] > 0.98
    assert metrics["miou area"] > 0.97
    assert metrics["shifted identity pck@0.1 img"] == 0


def test_an_interrupted_evaluation_continues_to_the_same_result(
    run: Callable[..., dict[str, Any]],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", {"cpu": 2})
    calls = []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts")
    (cache,) = (tmp_path / "parts" / "cache").glob("*.jsonl")
    assert len(cache.read_text().splitlines()) == 4
    # A crash in the middle of a line, too.
    cache.write_text(cache.read_text()[:-20])
    assert without_clock(run(tmp_path / "parts")) == without_clock(read_result(whole / RESULT))
    assert len(cache.read_text().splitlines()) == 12


def test_what_was_measured_before_stands(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A chunk that broke off is measured anew; of its pairs those in the file keep their records"""
    asked = {"measures": ("nearest",), "shifted": ()}
    before = run(tmp_path, **asked)
    (cache,) = (tmp_path / "cache").glob("*.jsonl")
    first = json.loads(cache.read_text().splitlines()[0])
    first["nearest"]["points"] = [[x + 500, y] for x, y in first["nearest"]["points"]]
    cache.write_text(json.dumps(first) + "\n")
    after = run(tmp_path, **asked)
    name = "nearest pck@0.15 img"
    assert before["pairs"][name][first["pair"]] > 0
    assert after["pairs"][name][first["pair"]] == 0
    rows = range(len(before["pairs"][name]))
    others = [
        [one["pairs"][name][n] for n in rows if n != first["pair"]] for one in (before, after)
    ]
    assert others[0] == others[1]
    assert json.loads(cache.read_text().splitlines()[0]) == first


def test_a_finished_evaluation_is_read_back(
    run: Callable[..., dict[str, Any]],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    first = read_result(out / RESULT)

    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(evaluation, "measure", never)
    assert without_clock(run(out)) == without_clock(first)
    with pytest.raises(AssertionError):
        run(out, side=64)


def test_inputs_are_the_sizes_the_network_sees(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    result = run(tmp_path, inputs=(64, SIZE), measures=("nearest",), shifted=())
    assert result["row"] == f"mine@64+{SIZE}"
    assert result["config"]["protocol"]["inputs"] == [64, SIZE]
    assert (tmp_path / f"pairs-test-mine@64+{SIZE}.json").is_file()


@pytest.mark.parametrize("row", ["match", "match-slower"])
def test_rows_as_matched_are_what_match_does_to_the_photos(
    row: str, run: Callable[..., dict[str, Any]], listed: Path, model: Path, tmp_path: Path
) -> None:
    result = run(tmp_path, rows=[row], model=model, shifted=(), inputs=(64,))
    assert result["row"] == row  # squares are none of its business
    assert "nearest pck@0.1 img" not in result["metrics"]
    known, shares = DenseFeatures.from_pretrained(model), []
    for pair in load_benchmark("pairs", listed).pairs:
        points0, points1 = pair.common()
        features = known.extract([pair.image0, pair.image1], slower=row == "match-slower")
        away = (match_points(*features, points0).points1 - points1).norm(dim=1)
        shares.append(float((away < 0.1 * max(pair.size1)).double().mean()))
    expected = 100 * sum(shares) / len(shares)
    assert result["metrics"]["own pck@0.1 img"] == pytest.approx(expected, abs=1e-3)


def test_evaluate_gives_what_the_files_hold(
    listed: Path, model: Path, boxes: Path, tmp_path: Path
) -> None:
    """A model in memory and its folder measure the same; the table has a line per row."""
    options: dict[str, Any] = {
        "data": listed, "proposals": boxes, "boxes": 60, "side": SIZE, "quiet": True,
        "measures": ("nearest", "regions"), "shifted": (),
    }  # fmt: skip
    given = DenseFeatures.from_pretrained(model, device="cpu").train()
    found = surefeat.evaluate(
        given, "pairs", rows=[f"again={model}"], out=tmp_path / "a", **options
    )
    assert given.training
    assert [path.name for path in found.paths] == ["pairs-test-ours.json", "pairs-test-again.json"]
    assert found.metrics == json.loads(found.paths[0].read_text())["metrics"]
    assert found.metrics == found.results[1]["metrics"]
    head, _, ours, again, identity = found.table().splitlines()
    shown = f"| {found.metrics['nearest pck@0.1 img']:.1f} |"
    assert head.startswith("| row | nearest neighbour img@0.1 |")
    assert ours.startswith("| ours |")
    assert again.startswith("| again |")
    assert shown in ours
    assert shown in again
    assert identity.startswith("| identity (control) |")
    folder = surefeat.evaluate(model, "pairs", out=tmp_path / "b", device="cpu", **options)
    assert folder.metrics == found.metrics
    assert folder.results[0]["weights_sha256"] == found.results[0]["weights_sha256"]


def test_what_the_cache_has_is_that_of_the_same_weights_pictures_and_settings(
    listed: Path, tmp_path: Path
) -> None:
    def features(images: Tensor) -> list[Features]:
        return as_features(F.avg_pool2d(images.float(), 8) + 1, side=SIZE)

    row = Row("mine", features, weights_sha256="0" * 64)
    protocol = replace(PROTOCOL, measures=("nearest",), shifted_measures=())
    benchmark = load_benchmark("pairs", listed)
    material = prepare_material(benchmark, protocol, proposals=tmp_path / "none", quiet=True)
    key = next(iter(material.pictures))
    pictures = material.pictures | {key: 255 - material.pictures[key]}
    case = material.cases[0]
    points = case.pair.points0 + 1
    asked = replace(case, pair=replace(case.pair, points0=points))
    files = [0]

    def measured(what: Row, on: Material) -> None:
        evaluate_row(what, on, out=tmp_path, device=CPU, quiet=True)
        files.append(len(list((tmp_path / "cache").glob("*.jsonl"))))

    measured(row, material)
    measured(row, material)  # the same again is read
    measured(replace(row, weights_sha256="1" * 64), material)
    measured(replace(row, settings={"layer": "other"}), material)
    measured(row, replace(material, protocol=replace(protocol, shift=30.0)))
    measured(row, replace(material, pictures=pictures))
    measured(row, replace(material, cases=(asked, *material.cases[1:])))
    measured(replace(row, name="other"), material)
    assert files == [0, 1, 1, 2, 3, 4, 5, 6, 7]


def test_some_pairs_are_spread_over_the_whole_list(listed: Path) -> None:
    benchmark = load_benchmark("pairs", listed)
    some = some_pairs(benchmark, 3)
    assert some.pairs == [benchmark.pairs[n] for n in (0, 2, 4)]
    assert some.split == "test-3-of-6"
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"has 6 pairs, so pairs={count} is not possible"):
            some_pairs(benchmark, count)


def test_what_is_asked_for_reaches_the_protocol(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    result = run(tmp_path, seed=3, measures=("nearest",), shifted=("nearest", "voting"), pairs=2,
                 proposals=None)  # fmt: skip
    protocol = result["config"]["protocol"]
    assert (protocol["proposals"]["seed"], protocol["proposals"]["count"]) == (3, 60)
    assert (protocol["side"], protocol["measures"]) == (SIZE, ["nearest"])
    # What is not measured at all is not measured shifted.
    assert protocol["shifted_measures"] == ["nearest"]
    assert result["split"] == "test-2-of-6"

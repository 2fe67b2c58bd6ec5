"""Semantic matching measured end to end on drawn pairs: what a result holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefeat
import surefeat.measure.evaluate as evaluation
from surefeat.core.files import hardware
from surefeat.data.pairs import load_pairs
from surefeat.measure.evaluate import evaluate_rows
from surefeat.measure.matching import measure
from surefeat.measure.results import read_result
from surefeat.model.network import DenseFeatures
from tiny import SIZE, write_pairs


@pytest.fixture
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


def without_clock(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("date", "seconds")}


def test_a_result_says_what_was_measured_and_how(
    run: Callable[..., dict[str, Any]], tmp_path: Path, listed: Path
) -> None:
    result = run(tmp_path)
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
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", {"cpu": 2})
    whole = run(tmp_path / "whole")
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
    assert without_clock(run(tmp_path / "parts")) == without_clock(whole)
    assert len(cache.read_text().splitlines()) == 12


def test_a_finished_evaluation_is_read_back(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path)

    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(evaluation, "measure", never)
    assert without_clock(run(tmp_path)) == without_clock(first)
    with pytest.raises(AssertionError):
        run(tmp_path, side=64)


def test_inputs_are_the_sizes_the_network_sees(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    result = run(tmp_path, inputs=(64, SIZE), measures=("nearest",), shifted=())
    assert result["row"] == f"mine@64+{SIZE}"
    assert result["config"]["protocol"]["inputs"] == [64, SIZE]
    assert (tmp_path / f"pairs-test-mine@64+{SIZE}.json").is_file()


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


def test_a_result_file_is_small_and_json(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run(tmp_path)
    text = (tmp_path / "pairs-test-mine.json").read_text()
    assert len(text) < 60_000
    assert json.loads(text)["row"] == "mine"
    assert len(text.splitlines()) < 40

"""The whole few-shot benchmark on drawn objects: rows, results, tables, the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefeat.cli.main import main
from surefeat.keypoints.head import KeypointHead
from surefeat.measure import fewshot, fewshot_views
from surefeat.measure.fewshot import measure_row, train_round
from surefeat.measure.fewshot_data import Material, prepare_material
from surefeat.measure.results import Score, read_result
from surefeat.measure.rows import untrained_row
from surefeat.measure.tables import class_table, read_fewshot, round_table
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from tiny import SETTINGS, colours, oracle, write_benchmark, write_photos


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("drawn")
    train, test = (write_photos(folder, count=18, seed=n, first=n) for n in (0, 100))
    return prepare_material(train, test, split="val", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def result(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure_row(oracle(), material, SETTINGS, out=tmp_path_factory.mktemp("results"))


def test_features_that_know_the_answer_find_nearly_all_keypoints(result: Path) -> None:
    metrics = read_result(result)["metrics"]
    assert metrics["pck@0.1 bbox, all per class"] > 97
    assert metrics["pck area bbox, all per class"] > 0.95
    # One image each leaves something to learn, and a guess without looking is far behind.
    assert metrics["pck@0.1 bbox, 1 per class"] < metrics["pck@0.1 bbox, all per class"]
    assert metrics["mean position pck@0.1 bbox, all per class"] < 40


def test_features_that_know_nothing_do_not(material: Material, tmp_path: Path) -> None:
    blind = untrained_row(
        "blind", lambda crops: [torch.zeros_like(colours(crops))], unit=False, settings={}
    )
    settings = replace(SETTINGS, rounds=("all",), seeds=1)
    metrics = read_result(measure_row(blind, material, settings, out=tmp_path))["metrics"]
    assert metrics["pck@0.1 bbox, all per class"] < 40


def test_a_result_says_what_was_measured_and_how(result: Path, material: Material) -> None:
    found = read_result(result)
    assert result.name == "pascal3d-val-colours.json"
    assert (found["benchmark"], found["rule"]) == ("pascal3d", "bbox")
    assert found["config"]["protocol"]["emphasis"] == 50
    assert found["counts"]["test objects"] == len(material.test)
    assert found["counts"]["images, 3 per class"] == [6, 6]
    assert [(each["seed"], each["round"]) for each in found["rounds"]] == [
        (0, 1), (0, 3), (0, "all"), (1, 1), (1, 3), (1, "all"),
    ]  # fmt: skip
    name = "pck@0.1 bbox, 3 per class"
    seeds = [each["pck@0.1 bbox"] for each in found["rounds"] if each["round"] == 3]
    assert found["metrics"][name] == pytest.approx(sum(seeds) / 2, abs=1e-3)
    spread = abs(seeds[0] - seeds[1]) / math.sqrt(2)
    assert found["metrics"][f"{name}, sd over seeds"] == pytest.approx(spread, abs=1e-3)
    classes = found["by_class"][name]
    assert sum(classes.values()) / 2 == pytest.approx(found["metrics"][name], abs=1e-3)
    assert found["pck_curves"]["3 per class"][10] * 100 == pytest.approx(
        found["metrics"][name], abs=0.01
    )


def test_a_round_starts_from_the_head_of_the_one_before(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(head: KeypointHead, *arguments: Any, **named: Any) -> float:
        before = head.conv1.weight.detach().clone()
        loss = train_round(head, *arguments, **named)
        seen.append((before, head.conv1.weight.detach().clone()))
        return loss

    monkeypatch.setattr(fewshot, "train_round", watched)
    fewshot.measure_row(oracle(), material, replace(SETTINGS, least_steps=2), out=tmp_path)
    first, second = seen[:3], seen[3:]
    for rounds in (first, second):
        assert torch.equal(rounds[0][1], rounds[1][0])
        assert torch.equal(rounds[1][1], rounds[2][0])
        assert not torch.equal(*rounds[1])
    assert not torch.equal(first[0][0], second[0][0])


def test_an_interrupted_evaluation_continues_to_the_same_result(
    material: Material, result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def tiring(*arguments: Any, **named: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 5:  # the second seed's second round
            raise KeyboardInterrupt
        return train_round(*arguments, **named)

    monkeypatch.setattr(fewshot, "train_round", tiring)
    with pytest.raises(KeyboardInterrupt):
        measure_row(oracle(), material, SETTINGS, out=tmp_path)
    (cache,) = (tmp_path / "cache").glob("*.jsonl")
    before = cache.read_text()
    assert before.count("\n") == 4
    cache.write_text(before + '{"seed": 0, "rou')
    continued = read_result(measure_row(oracle(), material, SETTINGS, out=tmp_path))
    assert calls == 7
    assert cache.read_text().startswith(before)
    assert continued["metrics"] == read_result(result)["metrics"]
    # The time is that of all rounds, not of those that were left.
    taken = sum(each["seconds"] + each["seconds_of_test"] for each in continued["rounds"])
    assert continued["seconds"] == pytest.approx(taken + continued["seconds_of_features"], abs=0.11)
    assert not list((tmp_path / "cache").glob("*.safetensors"))


def test_features_that_all_rounds_share_are_computed_once_and_before_any_training(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = 0

    def counted(crops: Tensor) -> list[Tensor]:
        nonlocal seen
        seen += len(crops)
        return [colours(crops)]

    row, settings = replace(oracle(), layers=counted), replace(SETTINGS, rounds=("all",))
    measure_row(row, material, replace(settings, least_steps=1), out=tmp_path)
    assert seen == len(material.test) + settings.views * len(material.train)
    # Where they do not fit, that shows before the first round, though it needs few of them.
    monkeypatch.setattr(fewshot_views, "_free", lambda place: 40 * 12 * 12 * 6 * 4)
    monkeypatch.setattr(fewshot, "train_round", pytest.fail)
    assert len(material.test) <= 40
    with pytest.raises(MemoryError, match=r"features of 96 views take .*; pass fewer views, or"):
        measure_row(row, material, SETTINGS, out=tmp_path)


def test_features_that_do_not_fit_on_the_device_stay_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    maps = torch.empty(2, 5, 3, 4, device="meta")
    assert fewshot_views._room(7, maps).device == maps.device
    free = {"meta": 7 * 60 * 4 - 1, "cpu": 7 * 60 * 4}
    monkeypatch.setattr(fewshot_views, "_free", lambda place: free[place.type])
    room = fewshot_views._room(7, maps)
    assert (room.device.type, tuple(room.shape)) == ("cpu", (7, 3, 4, 5))
    assert "more than is free on meta: on the host" in caplog.text


def test_a_seed_without_its_head_starts_over(
    material: Material, result: Path, tmp_path: Path
) -> None:
    source = next((result.parent / "cache").glob("*.jsonl"))
    lines = source.read_text().splitlines(keepends=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / source.name).write_text("".join([*lines[3:], lines[0]]))
    again = read_result(measure_row(oracle(), material, SETTINGS, out=tmp_path))
    assert again["metrics"] == read_result(result)["metrics"]


def test_other_settings_do_not_read_the_old_cache(material: Material, result: Path) -> None:
    settings = replace(SETTINGS, rounds=(1,), emphasis=5.0)
    other = measure_row(replace(oracle(), name="other"), material, settings, out=result.parent)
    assert len(list((result.parent / "cache").glob("*.jsonl"))) == 2
    assert read_result(other)["config"]["protocol"]["emphasis"] == 5
    other.unlink()


def test_tables_show_rows_spread_and_control(result: Path) -> None:
    results = read_fewshot(result.parent)
    table = round_table(results, Score("pck", alpha=0.1, rule="bbox"))
    metrics = results[0]["metrics"]
    assert table[0] == ["images per class", "1", "3", "all"]
    name = "pck@0.1 bbox, 3 per class"
    spread = metrics[f"{name}, sd over seeds"]
    assert table[1][2] == f"{metrics[name]:.1f} ± {spread:.1f}"
    assert [line[0] for line in table[2:]] == ["mean position (control)", "resnet50-hc, published"]
    assert table[3][3] == "54.7"
    by_class = class_table(results, Score("pck area", rule="bbox", images="all"))
    assert by_class[0] == ["row", "cart", "kite", "mean"]
    assert by_class[1][3] == f"{metrics['pck area bbox, all per class']:.3f}"
    with pytest.raises(ValueError, match="holds no results of dev"):
        read_fewshot(result.parent, split="dev")


def test_the_command_measures_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    DenseFeatures(ModelConfig(trunk="small", channels=8)).save_pretrained(tmp_path / "model")
    data = write_benchmark(tmp_path / "data")
    # fmt: off
    command = ["evaluate", "pascal3d", str(data), "--model", str(tmp_path / "model"), "--out",
               str(tmp_path / "out"), "--rounds", "1", "all", "--seeds", "1", "--side", "48",
               "--cells", "6", "--views", "2", "--least-views", "8", "--epochs", "1",
               "--least-steps", "5", "--batch", "4", "--hidden", "8", "--split", "dev",
               "--classes", "kite", "--objects", "4", "--device", "cpu"]
    # fmt: on
    main(command)
    shown = capsys.readouterr().out
    assert "| mean position (control) |" in shown
    main([*command, "--json"])
    metrics = json.loads(capsys.readouterr().out)["ours"]
    assert 0 <= metrics["pck@0.1 bbox, all per class"] <= 100
    assert (tmp_path / "out" / "pascal3d-dev-kite-4-objects-ours.json").is_file()

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

from sets import HEAD, ROUNDS, colours, oracle, write_benchmark, write_photos
from surefeat.cli.main import main
from surefeat.data.keypoints import KeypointSet
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.head import KeypointHead
from surefeat.measure import fewshot
from surefeat.measure.fewshot import FewShotData, Rounds, cut_sets, fit, measure_row
from surefeat.measure.results import Score, read_result
from surefeat.measure.rows import Row, build_row, untrained_row
from surefeat.measure.tables import class_table, round_table
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from tiny import CPU, SIDE


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[KeypointSet, KeypointSet]:
    folder = tmp_path_factory.mktemp("drawn")
    train, test = (write_photos(folder, count=18, seed=n, first=n) for n in (0, 100))
    return train, test


def cut(train: KeypointSet, test: KeypointSet) -> FewShotData:
    return cut_sets(train, test, split="val", size=SIDE, jitter=HEAD.jitter, device=CPU)


@pytest.fixture(scope="module")
def data(sets: tuple[KeypointSet, KeypointSet]) -> FewShotData:
    return cut(*sets)


@pytest.fixture(scope="module")
def result(data: FewShotData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure_row(oracle(), data, ROUNDS, HEAD, out=tmp_path_factory.mktemp("results"))


def quick(data: FewShotData, out: Path, row: Row | None = None, **head: Any) -> dict[str, Any]:
    """One round of few steps."""
    rounds, config = replace(ROUNDS, rounds=(3,), seeds=(0,)), replace(HEAD, least_steps=12, **head)
    return read_result(measure_row(row or oracle(), data, rounds, config, out=out))


def test_a_round_fits_the_detector_that_ships(
    sets: tuple[KeypointSet, KeypointSet], tmp_path: Path
) -> None:
    """The same head, bit for bit, which finds the same keypoints."""
    torch.manual_seed(0)
    model = DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).eval()
    model.save_pretrained(tmp_path / "model")
    model = DenseFeatures.from_pretrained(tmp_path / "model", device="cpu")
    config = KeypointConfig(size=64, least_views=200, hidden=8, epochs=1, least_steps=30, batch=4)
    detector = KeypointDetector.fit(model, sets[0], config=config, seed=7, calibrate=False)
    row = build_row("ours", model=tmp_path / "model", device=CPU)
    data = cut_sets(*sets, split="val", size=64, jitter=config.jitter, device=CPU)
    protocol = replace(ROUNDS, cells=64 // model.stride)
    rounds = Rounds(row, data, protocol, config)
    head = KeypointHead(
        len(detector.head.conv1.weight[0]), 5, hidden=8, generator=torch.Generator().manual_seed(7)
    )
    rounds.run_round(head, torch.arange(len(sets[0].objects)), seed=7)
    mine, other = detector.head.state_dict(), head.state_dict()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    points = rounds.predict(head)
    for number, item in enumerate(detector.label(sets[1]).objects):
        span = slice(0, 3) if item.category == 0 else slice(3, 5)
        torch.testing.assert_close(points[number, span], item.points, atol=0.01, rtol=0)


def test_seeds_draw_other_images_other_heads_and_other_batches(
    data: FewShotData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the largest round all images are the same, so what differs there is head and batches."""
    drawn: list[tuple[Tensor, Tensor]] = []

    def watched(head: KeypointHead, batches: Any, **named: Any) -> Any:
        before, seen = head.conv1.weight.detach().clone(), list(batches)
        drawn.append((before, torch.stack([features.sum() for features, _, _ in seen])))
        return fit(head, seen, **named)

    monkeypatch.setattr(fewshot, "fit", watched)
    rounds = replace(ROUNDS, rounds=("all",), seeds=(0, 1, 2))
    measure_row(oracle(), data, rounds, replace(HEAD, least_steps=18), out=tmp_path)
    heads, batches = zip(*drawn, strict=True)
    assert len({tuple(batch.tolist()) for batch in batches}) == 3
    assert not torch.equal(heads[0], heads[1])
    records = measure_row(
        oracle(), data, replace(ROUNDS, rounds=(1,), seeds=(0, 1, 2)),
        replace(HEAD, least_steps=18), out=tmp_path / "one",
    )  # fmt: skip
    one = read_result(records)["rounds"]
    assert len({record["mean position pck area bbox"] for record in one}) == 3


def test_the_control_knows_only_what_was_learned_from(
    sets: tuple[KeypointSet, KeypointSet], data: FewShotData, tmp_path: Path
) -> None:
    """Test labels that all lie in a corner leave the places it guesses as they are."""
    train, test = sets
    corner = [
        replace(item, points=torch.where(item.visible[:, None], item.box[:2], torch.nan))
        for item in test.objects
    ]
    moved = cut(train, KeypointSet(test.categories, tuple(corner)))
    name = "mean position pck@0.1 bbox, 3 per class"
    assert quick(moved, tmp_path)["metrics"][name] == 0
    # A few labels say less than all of them, which is not so for one that has seen the others.
    metrics = {size: [] for size in (1, "all")}  # type: ignore[var-annotated]
    for size, values in metrics.items():
        rounds = replace(ROUNDS, rounds=(size,), seeds=(0, 1))
        path = measure_row(oracle(), data, rounds, replace(HEAD, least_steps=1), out=tmp_path)
        values.append(
            read_result(path)["metrics"][f"mean position pck area bbox, {size} per class"]
        )
    assert metrics[1] < metrics["all"]


def test_what_the_cache_has_is_that_of_the_same_weights_data_and_settings(
    sets: tuple[KeypointSet, KeypointSet], data: FewShotData, tmp_path: Path
) -> None:
    row = replace(oracle(), weights_sha256="0" * 64)
    first = sets[0].objects[0]
    nudged = replace(first, points=first.points + 2)
    train = KeypointSet(sets[0].categories, (nudged, *sets[0].objects[1:]))
    files = [0]

    def measure(material: FewShotData, what: Row, **head: Any) -> None:
        quick(material, tmp_path, what, **head)
        files.append(len(list((tmp_path / "cache").glob("*.jsonl"))))

    measure(data, row)
    measure(data, row)  # the same again is read
    measure(data, replace(row, weights_sha256="1" * 64))
    measure(cut(train, sets[1]), row)
    measure(data, replace(row, settings={"cells": 11}))
    measure(data, row, weight=5.0)
    for protocol in (replace(ROUNDS, rounds=(2,)), replace(ROUNDS, rounds=(3,), cells=6)):
        config = replace(HEAD, least_steps=1)
        measure_row(row, data, replace(protocol, seeds=(0,)), config, out=tmp_path)
        files.append(len(list((tmp_path / "cache").glob("*.jsonl"))))
    assert files == [0, 1, 1, 2, 3, 4, 5, 6, 7]


def test_test_objects_are_seen_through_their_own_boxes(data: FewShotData) -> None:
    """Those to learn from have room around them, for boxes that move."""
    assert torch.equal(data.test.objects.reach, data.test.objects.boxes)
    assert data.test.objects.pixels.shape[-1] == SIDE
    room = data.train.objects.boxes - data.train.objects.reach
    assert (room[:, :2] > 1).all()
    assert (room[:, 2:] < -1).all()


def test_seeds_measured_one_by_one_are_those_measured_together(
    data: FewShotData, result: Path, tmp_path: Path
) -> None:
    for seeds in ((1,), (0,), (0, 1)):
        path = measure_row(oracle(), data, replace(ROUNDS, seeds=seeds), HEAD, out=tmp_path)
    assert read_result(path)["metrics"] == read_result(result)["metrics"]
    assert len(list((tmp_path / "cache").glob("*.jsonl"))) == 1


def test_features_that_know_the_answer_find_nearly_all_keypoints(result: Path) -> None:
    metrics = read_result(result)["metrics"]
    assert metrics["pck@0.1 bbox, all per class"] > 97
    assert metrics["pck area bbox, all per class"] > 0.95
    # One image each leaves something to learn, and a guess without looking is far behind.
    assert metrics["pck@0.1 bbox, 1 per class"] < metrics["pck@0.1 bbox, all per class"]
    assert metrics["mean position pck@0.1 bbox, all per class"] < 40


def test_features_that_know_nothing_do_not(data: FewShotData, tmp_path: Path) -> None:
    blind = untrained_row(
        "blind", lambda crops: [torch.zeros_like(colours(crops))], unit=False, settings={}
    )
    rounds = replace(ROUNDS, rounds=("all",), seeds=(0,))
    metrics = read_result(measure_row(blind, data, rounds, HEAD, out=tmp_path))["metrics"]
    assert metrics["pck@0.1 bbox, all per class"] < 40


def test_a_result_says_what_was_measured_and_how(result: Path, data: FewShotData) -> None:
    found = read_result(result)
    assert result.name == "pascal3d-val-colours.json"
    assert (found["benchmark"], found["rule"]) == ("pascal3d", "bbox")
    assert found["config"]["head"]["weight"] == 50
    assert found["counts"]["test objects"] == len(data.test.objects)
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
    data: FewShotData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(head: KeypointHead, *arguments: Any, **named: Any) -> list[float]:
        before = head.conv1.weight.detach().clone()
        losses = fit(head, *arguments, **named)
        seen.append((before, head.conv1.weight.detach().clone()))
        return losses

    monkeypatch.setattr(fewshot, "fit", watched)
    measure_row(oracle(), data, ROUNDS, replace(HEAD, least_steps=12), out=tmp_path)
    first, second = seen[:3], seen[3:]
    for rounds in (first, second):
        assert torch.equal(rounds[0][1], rounds[1][0])
        assert torch.equal(rounds[1][1], rounds[2][0])
        assert not torch.equal(*rounds[1])
    assert not torch.equal(first[0][0], second[0][0])


def test_an_interrupted_evaluation_continues_to_the_same_result(
    data: FewShotData, result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def tiring(*arguments: Any, **named: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 5:  # the second seed's second round
            raise KeyboardInterrupt
        return fit(*arguments, **named)

    monkeypatch.setattr(fewshot, "fit", tiring)
    with pytest.raises(KeyboardInterrupt):
        measure_row(oracle(), data, ROUNDS, HEAD, out=tmp_path)
    (cache,) = (tmp_path / "cache").glob("*.jsonl")
    before = cache.read_text()
    assert before.count("\n") == 1
    cache.write_text(before + '{"seed": 0, "rou')
    continued = read_result(measure_row(oracle(), data, ROUNDS, HEAD, out=tmp_path))
    assert calls == 8  # the second seed from its first round on
    assert cache.read_text().startswith(before)
    assert continued["metrics"] == read_result(result)["metrics"]
    # The time is that of all rounds, not of those that were left.
    taken = sum(each["seconds"] + each["seconds_of_test"] for each in continued["rounds"])
    assert taken <= continued["seconds"] + 0.1


def test_features_that_all_rounds_share_are_computed_once(
    data: FewShotData, tmp_path: Path
) -> None:
    seen = 0

    def counted(crops: Tensor) -> list[Tensor]:
        nonlocal seen
        seen += len(crops)
        return [colours(crops)]

    row, rounds = replace(oracle(), layers=counted), replace(ROUNDS, rounds=(10, "all"))
    measure_row(row, data, rounds, replace(HEAD, least_steps=1), out=tmp_path)
    assert seen == len(data.test.objects) + HEAD.views * len(data.train.objects)


def test_tables_show_rows_spread_and_control(result: Path) -> None:
    results = [read_result(result)]
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


def test_the_command_measures_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).save_pretrained(
        tmp_path / "model"
    )
    data = write_benchmark(tmp_path / "data")
    # fmt: off
    command = ["evaluate", "pascal3d", str(data), "--model", str(tmp_path / "model"), "--out",
               str(tmp_path / "out"), "--rounds", "1", "all", "--seeds", "0", "1", "--cells", "6",
               "--split", "dev", "--classes", "kite", "--objects", "4", "--device", "cpu"]
    head = ["--size", "48", "--views", "2", "--least-views", "8", "--epochs", "1",
            "--least-steps", "5", "--batch", "4", "--hidden", "8"]
    # fmt: on
    main([*command, *head])
    shown = capsys.readouterr().out
    assert "| mean position (control) |" in shown
    main([*command, *head, "--json"])
    metrics = json.loads(capsys.readouterr().out)["ours"]
    assert 0 <= metrics["pck@0.1 bbox, all per class"] <= 100
    assert (tmp_path / "out" / "pascal3d-dev-kite-4-objects-ours.json").is_file()
    with pytest.raises(SystemExit):
        main([*command, *head, "--paper"])
    assert "--paper sets the head; leave out" in capsys.readouterr().err

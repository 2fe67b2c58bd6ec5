"""Every command runs once in words and once with --json, on inputs made in a second."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import sets
import tiny
from commands import all_commands
from surefeat.cli.main import main
from surefeat.data import fetch
from surefeat.data.drawn import write_folder
from surefeat.keypoints.detector import KeypointDetector
from surefeat.model.network import DenseFeatures

SERVES = {"demo"}
"""Stays until it is stopped, and prints where it is: tests/demo."""

MATCHING = "--model {model} --out {new} --measures nearest --shifted nearest --device cpu"

COMMANDS = {
    "pretrain": "{photos} --out {new} --preset small --init none --device cpu --train.steps 2"
    " --train.batch 2 --warp.size 48 --loss.points 32 --data.side 64",
    "extract": "{photos} --out {new} --model {model} --device cpu",
    "match": "{first} {second} --out {new} --model {model} --count 9 --device cpu",
    "relate": "{first} {second} --out {new} --device cpu",
    "index": "{photos} --out {new} --model {model} --budget 9 --device cpu",
    "find": "{first} --point 30,30 --index {index} --count 3 --out {new} --model {model}"
    " --device cpu",
    "boxes fit": "{scenes}/photos --out {new} --init none --device cpu --proposals-file"
    " {scenes}/{proposals} --detector.trunk small --detector.tap conv2 --detector.hidden 16"
    " --detector.pooled 2 --learn.epochs 1 --learn.scales 96",
    "boxes predict": "{scenes}/photos --model {boxes} --out {new} --device cpu --proposals-file"
    " {scenes}/{proposals} --select.scales 96 --sheet 4",
    "boxes propose": "{scenes}/photos --file {new} --proposals.draws 100 --proposals.count 20",
    "keypoints fit": "{photos}/keypoints.json --categories bird --out {new} --model {model}"
    " --device cpu --size 64 --hidden 8 --least-steps 2 --least-views 4",
    "keypoints predict": "{first} --category bird --detector {detector} --out {new} --model {model}"
    " --device cpu",
    "keypoints transfer": "{labelled} {few} --out {new} --model {model} --device cpu",
    "keypoints suggest": "{few} --count 2 --out {new} --model {model} --device cpu",
    "keypoints convert": "{photos}/keypoints.json {new}.slp --categories bird",
    "evaluate self": "{photos} --model {model} --count 4 --device cpu",
    "evaluate parts": "--model {model} --count 16 --size 64",
    "evaluate pairs": "{listed} " + MATCHING,
    "evaluate pf-pascal": "{pascal} --pairs 2 " + MATCHING,
    "evaluate pf-willow": "{willow} --pairs 3 " + MATCHING,
    "evaluate spair": "{spair} " + MATCHING,
    "evaluate pascal3d": "{fewshot} --model {model} --out {new} --rounds 1 --seeds 0 --size 48"
    " --views 2 --least-views 4 --epochs 1 --least-steps 2 --batch 4 --hidden 8 --classes kite"
    " --objects 4 --device cpu",
    "evaluate compare": "{result} {result}",
    "evaluate tables": "{result.parent} --out {new}",
    "peers fit": "hog {photos} --out {new} --device cpu",
    "peers list": "",
    "report": "{run}",
    "export": "{new}.pt2 --model {model}",
    "data synthetic": "{new} --count 4 --size 48",
    "data get": "pf-willow --out {new}",
    "data show": "pairs {listed} --out {new}.png --count 2",
}


def test_no_command_is_forgotten() -> None:
    assert set(all_commands()) == COMMANDS.keys() | SERVES


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the commands ask for, by the names in COMMANDS."""
    root = tmp_path_factory.mktemp("inputs")
    model, pascal = sets.write_model(root / "model"), root / "pascal"
    write_folder(root / "photos", count=10, size=64, seed=0)
    scenes = sets.make(root / "scenes", count=2, boxes=12)
    sets.fit(scenes, root / "boxes", sets.settings(epochs=1))
    birds = root / "photos" / "keypoints.json"
    detector = KeypointDetector.fit(
        DenseFeatures.from_pretrained(model, device="cpu"), birds, config=sets.QUICK
    )
    detector.save(root / "detector")
    main(f"index {root / 'photos'} --out {root / 'index'} --model {model} --device cpu".split())
    # As many as the public list has, or it is taken for a broken copy.
    rows = [f"{sets.BOTH},2,1;5,1;6,30;9,20;8"] * 299
    sets.pascal(pascal, *rows, header=sets.HEADER)
    (pascal / "image_pairs" / "list.csv").rename(pascal / "image_pairs" / "test_pairs.csv")
    listed = sets.write_pairs(root / "pairs", most=2)
    command = f"evaluate pairs {listed} " + MATCHING.format(model=model, new=root / "results")
    main(command.split())
    return {
        "model": model, "photos": root / "photos", "scenes": scenes, "boxes": root / "boxes",
        "detector": root / "detector", "index": root / "index", "pascal": pascal, "listed": listed,
        "first": root / "photos" / "bird_00001.png", "second": root / "photos" / "bird_00009.png",
        "willow": sets.willow(root / "willow"), "spair": sets.spair(root / "spair"),
        "fewshot": sets.write_benchmark(root / "fewshot"),
        "result": next((root / "results").glob("*.json")),
        "labelled": sets.write_one_label(root / "photos", root / "few"), "few": root / "few",
        "proposals": next(path.name for path in scenes.glob("proposals*")),
        "run": tiny.learn(tiny.images(root / "drawn"), root / "run", tiny.tiny(steps=2)).folder,
    }  # fmt: skip


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive on this machine in the place of the one on the net."""
    archive = tmp_path / "PF-dataset.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("PF-dataset/readme.txt", "a small copy")
    source = (archive.as_uri(), "a test")
    monkeypatch.setitem(fetch.SOURCES, "pf-willow", source)


REPORTED = ("pretrain", "report")
"""What they draw takes longer than all else: tests/show/test_report.py."""


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_speaks_words_and_json(
    name: str,
    inputs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for way in ("words", "json"):
        if way == "json" or name in REPORTED:  # drawn once is enough
            monkeypatch.setattr(Figure, "savefig", tiny.save_blank)
        options = COMMANDS[name].format(**inputs, new=tmp_path / way).split()
        capsys.readouterr()
        main([*name.split(), *options, *(["--json"] if way == "json" else [])])
        said = capsys.readouterr().out
        if way == "json":
            assert json.loads(said, parse_constant=pytest.fail)
        else:
            assert said.strip()
            assert not said.lstrip().startswith(("{", "["))
            assert not any(sign in said for sign in ("None", "Path(", "tensor(", "nan", "('"))


def test_find_writes_what_it_says(
    inputs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = COMMANDS["find"].format(**inputs, new=tmp_path).split()
    main(["find", *options, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert len(said["hits"]) == 3
    assert json.loads((tmp_path / "find.json").read_text()) == said

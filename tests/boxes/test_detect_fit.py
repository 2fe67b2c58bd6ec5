"""Boxes from image labels on a few photos: resuming, what is trained, selecting, bad input."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from surefeat.boxes import train as detect_train
from surefeat.boxes.config import BoxesConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import read_photos
from surefeat.boxes.run import fit_boxes, predict_boxes
from surefeat.cli.main import main
from surefeat.data.labels import LabelledImages, find_labels
from surefeat.learn.config import Config
from surefeat.learn.loop import TrainingStoppedError
from surefeat.learn.runs import Run
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import key_of, read_proposals, write_proposals
from surefeat.model.trunks import Small
from tiny import HUES, SIZE, fit, make, random_proposals, settings


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("few"), count=4, boxes=12)


# Runs that send themselves a signal after a step; each is a process of its own.
DISTURBED = """
import os, sys, traceback
from pathlib import Path
import torch
import surefeat.boxes.train as train
from tiny import fit, settings
torch.set_num_threads(1)
steps = train.box_steps
data, out, init, trained, number, when = sys.argv[1:]
def disturbed(*args, **more):
    for step, taken in enumerate(steps(*args, **more)):
        if step == int(when):
            os.kill(os.getpid(), int(number))
        yield taken
train.box_steps = disturbed
fit(Path(data), Path(out), settings(**RUN, trained=trained), init=init)
"""
RUN: dict[str, Any] = {"epochs": 4, "log_every": 2, "checkpoint_every": 4}


def disturb(data: Path, out: Path, init: Path, trained: str, number: int, when: int) -> str:
    """What a run said that got a signal; it ends with its exit status."""
    script = f"RUN = {RUN}\n{DISTURBED}"
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here.parent / "src"), str(here)])
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, (data, out, init, trained, number, when))],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"{done.stderr}{done.returncode}"


@pytest.mark.parametrize(
    ("trained", "number", "said", "step"),
    [
        ("none", signal.SIGKILL, f"{-signal.SIGKILL}", 4),
        ("all", signal.SIGINT, "stopped after step 6; checkpoint saved", 6),
    ],
)
def test_a_run_that_is_killed_or_stopped_resumes_to_the_same_bits(
    trained: str, number: int, said: str, step: int, few: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    config, init = settings(**RUN, trained=trained), tmp_path / "small.safetensors"
    with torch.random.fork_rng(devices=[]):
        # Another seed than the run's: a resumed run that made its trunk anew would have another.
        torch.manual_seed(config.learn.seed + 1)
        save_file(Small().state_dict(), init)
    whole, out = fit(few, tmp_path / "whole", config, init=init), tmp_path / "run"
    assert said in disturb(few, out, init, trained, number, 5)
    assert Run.open(out).checkpoints()[-1].name == f"checkpoint-{step:08d}.safetensors"
    with pytest.raises(FileExistsError, match="--resume"):
        fit(few, out, config, init=init)
    # The initial weights are asked for no more: this file does not exist.
    again = fit(few, out, BoxesConfig(), init="nowhere.safetensors", resume=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    logged = [
        {row["step"]: row["loss"] for row in Run(folder).metrics()}
        for folder in (out, tmp_path / "whole")
    ]
    assert logged[0] == logged[1]
    assert logged[0].keys() == {2, 4, 6, 8, 10, 12}


def test_a_run_begins_with_a_checkpoint_and_keeps_no_broken_one(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of NaN behind a loss that is a number, at the third step."""
    true, calls = detect_train.image_log_loss, iter(range(100))

    def spoiled(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = true(scores, labels)
        return loss + ((loss - loss).sqrt() if next(calls) == 2 else 0)

    monkeypatch.setattr(detect_train, "image_log_loss", spoiled)
    with pytest.raises(TrainingStoppedError, match=r"weights are not finite; lower --learn.lr; .*"):
        fit(few, tmp_path / "run", settings(epochs=4, checkpoint_every=3))
    run = Run.open(tmp_path / "run")
    assert [path.name for path in run.checkpoints()] == ["checkpoint-00000000.safetensors"]
    assert run.settings(BoxesConfig) == settings(epochs=4, checkpoint_every=3)
    with pytest.raises(ValueError, match=r"holds no Config .*of another command"):
        run.settings(Config)


def test_ctrl_c_before_the_first_step_ends_the_run_at_once(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing the maps of many photos takes longer than any step."""

    def slow(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("Ctrl-C was put off")

    monkeypatch.setattr(detect_train, "KeptMaps", slow)
    with pytest.raises(KeyboardInterrupt):
        fit(few, tmp_path / "run", settings())
    names = [path.name for path in Run(tmp_path / "run").checkpoints()]
    assert names == ["checkpoint-00000000.safetensors"]


def test_a_resumed_run_refuses_other_labels(few: Path, tmp_path: Path) -> None:
    fit(few, tmp_path / "run", settings(epochs=1, checkpoint_every=2))
    found = find_labels(few / "photos")
    less = LabelledImages(found.images[1:], found.categories)
    with pytest.raises(ValueError, match="changed since the run"):
        fit(few, tmp_path / "run", settings(), found=less, resume=True)


def test_the_trunk_learns_only_where_asked(few: Path, tmp_path: Path) -> None:
    def moved(trained: str) -> list[str]:
        config = settings(epochs=1, trained=trained, trunk_lr=1e-2)
        config = replace(config, detector=replace(config.detector, tap="conv6"))
        with torch.random.fork_rng():
            torch.manual_seed(config.learn.seed)
            before = Detector(config.detector, tuple(sorted(HUES))).trunk.state_dict()
        after = fit(few, tmp_path / trained, config).trunk.state_dict()
        return [name for name in before if not torch.equal(before[name], after[name])]

    assert moved("none") == []
    assert {name.split(".")[1] for name in moved("last")} == {"5"}
    assert {name.split(".")[1] for name in moved("all")} == set("012345")


def test_the_last_stage_learns_only_where_it_is_used(few: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"conv2 comes before .* pass --detector\.tap auto"):
        fit(few, tmp_path / "run", settings(trained="last"))


def test_proposals_too_small_do_not_compete(few: Path) -> None:
    found, known = find_labels(few / "photos"), read_proposals(few / "proposals.npz")
    plain, large, none = (
        read_photos(found.images, known, side=SIZE, count=5, smallest=share)[0]
        for share in (0.0, 0.4, 2.0)
    )
    least = [float((p.proposals[:, 2:] - p.proposals[:, :2] + 1).min()) for p in large]
    assert min(least) >= 0.4 * SIZE
    assert any(len(p.proposals) == 5 for p in plain)
    # Without any the whole image is left.
    assert none[0].proposals.tolist() == [[0, 0, SIZE - 1, SIZE - 1]]


def test_a_class_of_one_image_is_learned_with_a_warning(
    few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_labels(few / "photos")
    names = {f"{i}.png" for i in range(4)}
    kept = [i for i in found.images if "sky" not in i.labels or i.name.endswith("0.png")]
    assert len(kept) == 2 * len(names) + 1
    less = LabelledImages(tuple(kept), found.categories)
    with caplog.at_level(logging.WARNING):
        detector = fit(few, tmp_path / "run", settings(epochs=1), found=less)
    assert "only one image shows 'sky'" in caplog.text
    done = predict_boxes(
        less, detector, out=tmp_path, config=settings(), proposals=few / "proposals.npz", quiet=True
    )
    # The only box of a class is its own median, and stays.
    assert [c.verdict for c in done.selection.candidates if c.category == "sky"] == ["kept"]


def test_images_without_label_and_corrupt_ones_are_listed(few: Path, tmp_path: Path) -> None:
    shutil.copytree(few, tmp_path / "data")
    photos = tmp_path / "data" / "photos"
    shutil.copy(photos / "sky" / "0.png", photos / "stray.png")
    (photos / "sky" / "1.png").write_bytes(b"\x89PNG, no more")
    found = find_labels(photos)
    done = fit_boxes(
        found, out=tmp_path / "run", config=settings(epochs=1), init="none", device="cpu",
        proposals=tmp_path / "data" / "proposals.npz", quiet=True,
    )  # fmt: skip
    assert done.images == 11
    reasons = {each.name: each.reason for each in done.skipped}
    assert reasons.keys() == {"stray.png", "sky/1.png"}
    assert reasons["stray.png"] == "has no label"
    assert "cannot be decoded" in reasons["sky/1.png"]
    assert "sky/1.png\t" in (tmp_path / "run" / "skipped.txt").read_text()
    after = predict_boxes(
        found, done.detector, out=tmp_path / "out", config=settings(),
        proposals=tmp_path / "data" / "proposals.npz", quiet=True,
    )  # fmt: skip
    assert {each.name for each in after.skipped} == reasons.keys()
    assert len(after.selection.candidates) == 11


def test_an_unknown_label_is_listed_and_the_rest_is_done(few: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    detector = Detector(settings().detector, ("leaf", "ruby")).eval()
    done = predict_boxes(
        find_labels(few / "photos"), detector, out=tmp_path, config=settings(),
        proposals=few / "proposals.npz", quiet=True,
    )  # fmt: skip
    assert {c.category for c in done.selection.candidates} == {"leaf", "ruby"}
    assert {s.reason for s in done.skipped} == {"the detector knows no 'sky'"}
    assert len(done.skipped) == 4
    strangers = Detector(settings().detector, ("cat", "dog"))
    with pytest.raises(ValueError, match=r"knows \['cat', 'dog'\], the images are labelled"):
        predict_boxes(find_labels(few / "photos"), strangers, out=tmp_path, config=settings())


def test_an_image_without_proposals_has_the_whole_image(few: Path, tmp_path: Path) -> None:
    path = few / "photos" / "sky" / "0.png"
    none = {key_of(path.read_bytes()): torch.zeros(0, 4)}
    write_proposals(none, ProposalConfig(), tmp_path / "none.npz")
    torch.manual_seed(0)
    detector = Detector(settings().detector, tuple(HUES)).eval()
    found = find_labels(few / "photos", categories=("sky",))
    one = LabelledImages(tuple(i for i in found.images if i.name == "sky/0.png"), ("sky",))
    done = predict_boxes(
        one, detector, out=tmp_path, config=settings(), proposals=tmp_path / "none.npz", quiet=True
    )
    assert [c.box for c in done.selection.candidates] == [(0, 0, SIZE - 1, SIZE - 1)]


def test_only_the_first_regions_compete(few: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    detector = Detector(settings().detector, tuple(HUES)).eval()
    done = predict_boxes(
        find_labels(few / "photos"), detector, out=tmp_path, quiet=True,
        config=replace(settings(), regions=1), proposals=few / "proposals.npz",
    )  # fmt: skip
    first = [tuple(random_proposals(i, 12)[0].tolist()) for i in range(4)]
    assert sorted(c.box for c in done.selection.candidates) == sorted(first * 3)


def test_one_category_alone_says_what_to_add(few: Path, tmp_path: Path) -> None:
    found = find_labels(few / "photos", categories=("sky",))
    with pytest.raises(ValueError, match="photos that show something else"):
        fit(few, tmp_path / "run", settings(), found=found)


def test_the_command_line_goes_from_photos_to_boxes(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (
        "--detector.trunk small --detector.hidden 16 --detector.pooled 2 --learn.epochs 1 "
        "--learn.scales 64 --regions 30"
    )
    grid = "--proposals.method grid --proposals.count 40"
    run, out, file = tmp_path / "run", tmp_path / "out", tmp_path / "p.npz"
    main(f"boxes propose {few / 'photos'} --file {file} {grid}".split())
    assert "12 of 12 images added" in capsys.readouterr().out
    main(
        f"boxes fit {few / 'photos'} --out {run} --init none --device cpu --json "
        f"--proposals-file {file} {grid} {small}".split()
    )
    assert json.loads(capsys.readouterr().out)["images"] == 12
    main(
        f"boxes predict {few / 'photos'} --model {run} --out {out} --device cpu --json "
        f"--select.scales 64".split()
    )
    result = json.loads(capsys.readouterr().out)
    assert sum(result["mean"].values()) == 12
    assert Path(result["sheet"]).stat().st_size > 10_000
    # Without a word about them the proposals are made as in fitting.
    made = read_proposals(out / "proposals.sqlite", ProposalConfig(method="grid", count=40))
    assert len(made) == 12
    assert Detector.load(run).fitted.regions == 30
    lines = (out / "selection.csv").read_text().splitlines()
    assert lines[0] == "image,category,x1,y1,x2,y2,score,verdict"
    assert len(lines) == 13

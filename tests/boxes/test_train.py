"""Learning boxes: resuming, stopping, what learns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from surefeat.boxes import train as detect_train
from surefeat.boxes.config import BoxesConfig
from surefeat.boxes.network import Detector
from surefeat.data.sources import LabelledImages, find_labels
from surefeat.learn.config import Config
from surefeat.learn.loop import TrainingStoppedError
from surefeat.learn.runs import Run
from surefeat.model.trunks import Small
from tiny import HUES, fit, make, settings


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
data, out, init, number, when = sys.argv[1:]
def disturbed(*args, **more):
    for step, taken in enumerate(steps(*args, **more)):
        if step == int(when):
            os.kill(os.getpid(), int(number))
        yield taken
train.box_steps = disturbed
fit(Path(data), Path(out), settings(**RUN), init=init)
"""
RUN: dict[str, Any] = {"epochs": 4, "log_every": 2, "checkpoint_every": 4}


def disturb(data: Path, out: Path, init: Path, number: int, when: int) -> str:
    """What a run said that got a signal; it ends with its exit status."""
    script = f"RUN = {RUN}\n{DISTURBED}"
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here.parent / "src"), str(here)])
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, (data, out, init, number, when))],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"{done.stderr}{done.returncode}"


@pytest.mark.parametrize(
    ("number", "said", "step"),
    [
        (signal.SIGKILL, f"{-signal.SIGKILL}", 4),
        (signal.SIGINT, "stopped after step 6; checkpoint saved", 6),
    ],
)
def test_a_run_that_is_killed_or_stopped_resumes_to_the_same_bits(
    number: int, said: str, step: int, few: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    config, init = settings(**RUN), tmp_path / "small.safetensors"
    with torch.random.fork_rng(devices=[]):
        # Another seed than the run's: a resumed run that made its trunk anew would have another.
        torch.manual_seed(config.learn.seed + 1)
        save_file(Small().state_dict(), init)
    whole, out = fit(few, tmp_path / "whole", config, init=init), tmp_path / "run"
    assert said in disturb(few, out, init, number, 5)
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


def test_a_resumed_run_refuses_other_labels(few: Path, tmp_path: Path) -> None:
    fit(few, tmp_path / "run", settings(epochs=1, checkpoint_every=2))
    found = find_labels(few / "photos")
    less = LabelledImages(found.images[1:], found.categories)
    with pytest.raises(ValueError, match="changed since the run"):
        fit(few, tmp_path / "run", settings(), found=less, resume=True)


def test_the_trunk_stays_as_it_was(few: Path, tmp_path: Path) -> None:
    config = settings(epochs=1)
    with torch.random.fork_rng():
        torch.manual_seed(config.learn.seed)
        before = Detector(config.detector, tuple(sorted(HUES))).state_dict()
    after = fit(few, tmp_path / "run", config).state_dict()
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"scale", "fc6", "fc7", "classify", "localise"}

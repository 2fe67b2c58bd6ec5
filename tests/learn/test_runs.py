"""A run folder: whole files, valid JSON, the newest readable checkpoint."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from surefeat.core import files
from surefeat.core.files import commit, environment, write_bytes, write_json
from surefeat.learn.config import Config, preset
from surefeat.learn.runs import Checkpoint, Run, locked, state_tensors

SMALL = preset("small")


def refuse(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def strict(text: str) -> object:
    """JSON as the standard has it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=refuse)


def checkpoint(step: int) -> Checkpoint:
    tensors = {"model.a": torch.full((2, 3), float(step)), "optimiser.0.step": torch.tensor(1.5)}
    return Checkpoint(step, tensors, {"step": step, "best": None, "seconds": 0.25})


def test_a_run_remembers_its_settings_and_where_it_ran(tmp_path: Path) -> None:
    Run.start(tmp_path / "run", SMALL, device="cpu")
    assert Run.open(tmp_path / "run").settings(Config) == SMALL
    about = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert about["torch"] == torch.__version__
    assert {"surefeat", "commit", "python", "hardware", "date"} < about.keys()


def test_a_number_that_json_does_not_know_becomes_null(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    run.log(3, {"auroc": math.nan, "loss": 0.1 + 0.2, "best": -math.inf, "points": 7})
    (line,) = run.metrics_file.read_text().splitlines()
    assert strict(line) == {"step": 3, "auroc": None, "loss": 0.1 + 0.2, "best": None, "points": 7}
    write_json(tmp_path / "x.json", {"a": [1.5, math.nan, (math.inf,)], "b": {"c": "NaN"}})
    expected = {"a": [1.5, None, [None]], "b": {"c": "NaN"}}
    assert strict((tmp_path / "x.json").read_text()) == expected


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    assert run.metrics() == []
    run.log(1, {"loss": 1.0})
    with run.metrics_file.open("a") as file:
        file.write('{"step": 2, "loss": 0.')
    assert run.metrics() == [{"step": 1, "loss": 1.0}]
    run.forget_after(1)
    run.log(2, {"loss": 0.5})
    assert run.metrics() == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    for step in range(1, 8):
        run.log(step, {"loss": step / 2})
    for step in (4, 6):
        run.save_checkpoint(checkpoint(step))
    (run.folder / ".checkpoint-00000008.safetensors.77.part").write_bytes(b"half")
    run.forget_after(4)
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
    assert [path.name for path in run.checkpoints()] == ["checkpoint-00000004.safetensors"]
    assert not list(run.folder.glob(".*"))


def test_the_newest_two_checkpoints_are_kept_and_come_back_exactly(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    assert run.load_checkpoint() is None
    for step in (0, 9, 10, 100):
        run.save_checkpoint(checkpoint(step))
    names = [path.name for path in run.checkpoints()]
    assert names == ["checkpoint-00000010.safetensors", "checkpoint-00000100.safetensors"]
    found = run.load_checkpoint()
    assert found is not None
    assert (found.step, found.progress) == (100, checkpoint(100).progress)
    assert found.tensors.keys() == checkpoint(100).tensors.keys()
    for name, value in checkpoint(100).tensors.items():
        assert torch.equal(found.tensors[name], value)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    run.save_checkpoint(checkpoint(1))
    newest = run.save_checkpoint(checkpoint(2))
    newest.write_bytes(newest.read_bytes()[:keep])
    found = run.load_checkpoint()
    assert found is not None
    assert found.step == 1
    assert newest.name in caplog.text


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    run.save_checkpoint(checkpoint(1))
    newest = run.save_checkpoint(checkpoint(2))
    whole = newest.read_bytes()
    for place in range(0, len(whole), 7):
        newest.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        stored = run.load_checkpoint()
        assert stored is not None
        assert stored.step == 1, whole[place - 20 : place + 20]
    newest.write_bytes(whole)
    stored = run.load_checkpoint()
    assert stored is not None
    assert stored.step == 2


def test_a_folder_is_one_runs_alone_and_the_lock_says_whose(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with locked(out):
        who = f"process {os.getpid()} on {platform.node()}"
        with pytest.raises(
            BlockingIOError, match=rf"run is in use by {who}, since .*another --out"
        ):
            locked(out).__enter__()
        (out / "config.json").write_text("{}")
    assert [path.name for path in out.iterdir()] == ["config.json"]
    with locked(out):
        pass


def _die_inside(out: Path) -> None:
    with locked(out):
        os._exit(0)


def test_the_lock_of_a_process_that_died_does_not_count(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_die_inside, args=(tmp_path,))
    child.start()
    child.join()
    (left,) = tmp_path.iterdir()
    assert f"process {child.pid} on {platform.node()}" in left.read_text()
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in left.read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_locks_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_another_safetensors_file_is_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    run.save_checkpoint(checkpoint(1))
    save_file({"x": torch.zeros(1)}, run.folder / "checkpoint-00000005.safetensors")
    found = run.load_checkpoint()
    assert found is not None
    assert found.step == 1


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "file"
    write_bytes(path, b"old")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_bytes(path, b"new and longer")
    assert path.read_bytes() == b"old"


def test_a_started_run_is_refused_and_one_that_never_began_is_not(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    Run.start(tmp_path / "run", SMALL, device="cpu")
    run.save_checkpoint(checkpoint(0))
    with pytest.raises(FileExistsError, match="already holds a run; pass --resume"):
        Run.start(tmp_path / "run", SMALL, device="cpu")
    with pytest.raises(FileNotFoundError, match="holds no run"):
        Run.open(tmp_path)


def test_a_run_with_a_log_and_no_checkpoint_is_not_begun_anew(tmp_path: Path) -> None:
    """Its checkpoints may have been moved away: the log is worth keeping."""
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    run.log(1, {"loss": 1.0})
    with pytest.raises(FileExistsError, match="already holds a run"):
        Run.start(tmp_path / "run", SMALL, device="cpu")
    assert run.metrics() == [{"step": 1, "loss": 1.0}]


def test_as_many_other_images_are_refused_once_something_was_learned(tmp_path: Path) -> None:
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    run.store_images({"images": 3, "sha256": "a"})
    run.store_images({"images": 3, "sha256": "b"})  # nothing was learned from the first
    run.save_checkpoint(checkpoint(0))
    run.store_images({"images": 3, "sha256": "b"})
    with pytest.raises(ValueError, match=r"images changed since the run began \(3 then, 3 now"):
        run.store_images({"images": 3, "sha256": "c"})


@pytest.mark.parametrize("lost", ["model.weight", "model.bias"])
def test_a_checkpoint_that_lacks_a_part_is_not_taken_for_a_whole_one(
    tmp_path: Path, lost: str
) -> None:
    model = nn.Linear(2, 3)
    optimiser = torch.optim.AdamW(model.parameters())
    tensors = {k: v for k, v in state_tensors(model, optimiser).items() if k != lost}
    run = Run.start(tmp_path, SMALL, device="cpu")
    run.save_checkpoint(Checkpoint(1, tensors, {}))
    stored = run.load_checkpoint()
    assert stored is not None
    with pytest.raises(RuntimeError, match="Missing key"):
        stored.restore(model, optimiser)


def test_the_commit_is_that_of_surefeat_not_of_a_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a virtual environment inside somebody's own repository."""
    monkeypatch.delenv("SUREFEAT_COMMIT", raising=False)
    installed = tmp_path / "site-packages" / "surefeat"
    installed.mkdir(parents=True)
    (installed / "files.py").write_text("")
    (tmp_path / "theirs.txt").write_text("")
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "theirs.txt"], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setattr(files, "__file__", str(installed / "files.py"))
    assert commit() == ""
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["git", *who, "commit", "-qm", "y"], cwd=tmp_path, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert commit() == head[:12]
    monkeypatch.setenv("SUREFEAT_COMMIT", "abc")
    assert environment("cpu")["commit"] == "abc"


def test_what_the_optimiser_held_comes_back_in_the_layout_of_its_weights(tmp_path: Path) -> None:
    """Fused steps, on CUDA, refuse a channels-last weight with moments that are not."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    model, optimiser = begin()
    image = torch.rand(2, 4, 8, 8)
    model(image).square().mean().backward()
    optimiser.step()
    run = Run.start(tmp_path, SMALL, device="cpu")
    run.save_checkpoint(Checkpoint(1, state_tensors(model, optimiser), {}))
    other, second = begin()
    stored = run.load_checkpoint()
    assert stored is not None
    stored.restore(other, second)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for part in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(second.state[ours][part], optimiser.state[theirs][part])
            assert second.state[ours][part].stride() == ours.stride()

"""A run that is killed, stopped or moved ends where an undisturbed one does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sets import fit, make, settings
from surefeat.cli.main import main
from surefeat.learn.config import Config
from surefeat.learn.runs import Run, locked
from tiny import images, learn, same_bits, tiny, weights

HERE = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)]),
}

CHECKPOINT = "checkpoint-00000008.safetensors"
KILLED = {f"{signal.SIGKILL:d}@6": [3, 4, 6], f"{signal.SIGKILL:d}@{CHECKPOINT}": [3, 4, 6, 8]}
STOPPED = [f"{signal.SIGINT:d}@6", f"{signal.SIGTERM:d}@6"]

# Processes of their own, forked so that torch (and what optimisers import later) is imported once:
# runs that send themselves a signal after a step, or in the middle of writing a checkpoint, one of
# them of boxes; then two at a time, as torchrun starts them: the first 6 steps; the last 6 of what
# one process began; a stopped run.
PROCESSES = """
import os, signal, socket, sys, traceback
import torch
import torch._dynamo, torch.distributed
import surefeat.boxes.train, surefeat.learn.runs, surefeat.learn.pretrain
from pathlib import Path
from sets import fit, settings
from tiny import learn, tiny
torch.set_num_threads(1)
steps, write = surefeat.learn.pretrain.pair_steps, surefeat.core.files.write_bytes
source, root = map(Path, sys.argv[1:3])
def apart(work):
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            Path(f"{root / os.environ['NAME']}.said").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    return child
def status(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def alone(number, when):
    def disturbed_steps(*args):
        for step, taken in enumerate(steps(*args)):
            if when == str(step):
                os.kill(os.getpid(), number)
            yield taken
    def disturbed_write(path, data):
        if path.name == when:
            (path.parent / f".{path.name}.1.part").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), number)
        write(path, data)
    surefeat.learn.pretrain.pair_steps = disturbed_steps
    surefeat.core.files.write_bytes = disturbed_write
    learn(source, root / os.environ["NAME"], tiny())
def boxes(number):
    steps = surefeat.boxes.train.box_steps
    def disturbed_steps(*args, **more):
        for step, taken in enumerate(steps(*args, **more)):
            if step == 5:
                os.kill(os.getpid(), number)
            yield taken
    surefeat.boxes.train.box_steps = disturbed_steps
    fit(root / "few", root / "boxes", settings(epochs=4, log_every=2, checkpoint_every=4))
def shared():
    def disturbed_steps(*args):
        for step, taken in enumerate(steps(*args)):
            if step == 4 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            yield taken
    learn(source, root / "two-then-one", tiny(), steps=6)
    learn(source, root / "one-then-two", steps=12, resume=True)
    surefeat.learn.pretrain.pair_steps = disturbed_steps
    learn(source, root / "stopped", tiny(log_every=100, checkpoint_every=100))
for name in sys.argv[3:]:
    number, when = name.split("@")
    os.environ["NAME"] = name
    Path(root, name + ".status").write_text(str(status(apart(lambda: alone(int(number), when)))))
os.environ["NAME"] = "boxes"
Path(root, "boxes.status").write_text(str(status(apart(lambda: boxes(signal.SIGKILL)))))
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
children = []
for rank in ("0", "1"):
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "NAME": f"rank-{rank}"}
    children.append(apart(shared))
print([status(child) for child in children])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learn(source, tmp_path_factory.mktemp("runs") / "undisturbed", tiny()).folder


@pytest.fixture(scope="module")
def begun(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps: checkpoints 4 and 6."""
    return learn(source, tmp_path_factory.mktemp("begun") / "run", tiny(), steps=6).folder


@pytest.fixture(scope="module")
def left(source: Path, begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What PROCESSES left behind: a folder for each run, what it said, the status of its process.

    Those that share a run with another end by being stopped.
    """
    root = tmp_path_factory.mktemp("left")
    shutil.copytree(begun, root / "one-then-two")
    make(root / "few", count=4, boxes=12)
    command = [sys.executable, "-c", PROCESSES, str(source), str(root), *KILLED, *STOPPED]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout == "[1, 1]\n", done.stderr
    return root


def steps_logged(run: Path) -> list[int]:
    return [row["step"] for row in Run.open(run).metrics()]


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_resumes_to_the_same_bits(
    source: Path, undisturbed: Path, left: Path, name: str
) -> None:
    out = left / name
    assert (left / f"{name}.status").read_text() == str(-signal.SIGKILL)
    assert steps_logged(out) == KILLED[name]
    assert Run.open(out).checkpoints()[-1].name == "checkpoint-00000004.safetensors"
    assert not (out / "model").exists()
    # The initial weights are asked for no more: this file does not exist.
    resumed = learn(source, out, init="nowhere.safetensors", resume=True)
    assert resumed.progress.step == 12
    assert same_bits(weights(out), weights(undisturbed))
    assert steps_logged(out) == steps_logged(undisturbed) == [3, 4, 6, 8, 9, 12]
    assert not list(out.glob(".*"))
    again, first = (Run.open(folder).metrics() for folder in (out, undisturbed))
    assert [row["loss"] for row in again] == [row["loss"] for row in first]


@pytest.mark.parametrize("name", STOPPED)
def test_a_stop_signal_saves_and_the_run_resumes_to_the_same_bits(
    source: Path, undisturbed: Path, left: Path, name: str
) -> None:
    out = left / name
    said = (left / f"{name}.said").read_text()
    assert said.endswith(
        "KeyboardInterrupt: stopped after step 7; checkpoint saved; --resume goes on\n"
    )
    checkpoint = Run.open(out).load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.step == 7
    # Step 7 is out of turn: it has no line, and must not count for the plateau.
    first, *others = [row["loss"] for row in Run.open(out).metrics()]
    for loss in others:
        first = 0.8 * first + 0.2 * loss
    assert checkpoint.progress["recent"] == pytest.approx(first, abs=1e-6)
    learn(source, out, resume=True)
    assert same_bits(weights(out), weights(undisturbed))
    again, whole = (Run.open(folder).metrics() for folder in (out, undisturbed))
    assert [row["step"] for row in again] == [row["step"] for row in whole]
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]


def test_a_killed_run_of_boxes_resumes_to_the_same_bits(left: Path) -> None:
    out, config = left / "boxes", settings(epochs=4, log_every=2, checkpoint_every=4)
    assert (left / "boxes.status").read_text() == str(-signal.SIGKILL)
    assert Run.open(out).checkpoints()[-1].name == "checkpoint-00000004.safetensors"
    again = fit(left / "few", out, config, init="nowhere.safetensors", resume=True)
    whole = fit(left / "few", left / "whole-boxes", config)
    assert same_bits(dict(again.state_dict()), dict(whole.state_dict()))
    assert steps_logged(out) == steps_logged(left / "whole-boxes") == [2, 4, 6, 8, 10, 12]


def assert_close(first: Path, second: Path) -> None:
    torch.testing.assert_close(weights(first), weights(second), rtol=1e-3, atol=2e-5)


@pytest.mark.usefixtures("undrawn")
def test_torchrun_with_two_processes_learns_what_one_does(source: Path, tmp_path: Path) -> None:
    words = (
        f"pretrain {source} --preset small --init none --device cpu --train.steps 6 --train.batch 4"
        " --warp.size 32 --loss.points 24 --loss.ignore-radius 10 --loss.sigma-warmup 3"
        " --data.side 48 --train.log-every 2 --train.check-every 0 --json --out"
    )
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, "-m", "surefeat", *words.split(), str(tmp_path / "two")]
    # A report is not written without matplotlib; drawing would take as long as all the rest.
    (tmp_path / "without" / "matplotlib").mkdir(parents=True)
    (tmp_path / "without" / "matplotlib" / "__init__.py").write_text("raise ImportError")
    paths = f"{tmp_path / 'without'}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    done = subprocess.run(
        command, env=ENVIRONMENT | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 6  # by the first process alone
    main([*words.split(), str(tmp_path / "one")])
    assert_close(tmp_path / "two", tmp_path / "one")
    both, alone = (Run.open(tmp_path / name).metrics() for name in ("two", "one"))
    assert [row["step"] for row in both] == [row["step"] for row in alone] == [2, 4, 6]
    losses = [[row["loss"] for row in rows] for rows in (both, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_run_goes_on_with_another_number_of_processes(
    source: Path, left: Path, undisturbed: Path, tmp_path: Path
) -> None:
    assert_close(left / "one-then-two", undisturbed)
    moved = tmp_path / "moved"
    shutil.copytree(left / "two-then-one", moved)
    learn(source, moved, steps=12, resume=True)
    assert_close(moved, undisturbed)
    assert Run.open(moved).settings(Config).train.steps == 12


def test_a_signal_to_one_process_stops_all_at_the_same_step(left: Path) -> None:
    for rank in (0, 1):
        said = (left / f"rank-{rank}.said").read_text()
        assert said.endswith(
            "KeyboardInterrupt: stopped after step 10; checkpoint saved; --resume goes on\n"
        )
    assert Run.open(left / "stopped").checkpoints()[-1].name.startswith("checkpoint-00000010")


@pytest.fixture
def halfway(begun: Path, tmp_path: Path) -> Path:
    """The same in a folder of its own."""
    return Path(shutil.copytree(begun, tmp_path / "run"))


def test_a_truncated_checkpoint_falls_back_to_the_one_before(
    source: Path, undisturbed: Path, halfway: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = halfway / "checkpoint-00000006.safetensors"
    newest.write_bytes(newest.read_bytes()[:5000])
    learn(source, halfway, steps=12, resume=True)
    assert "checkpoint-00000006.safetensors cannot be read" in caplog.text
    assert same_bits(weights(halfway), weights(undisturbed))
    assert steps_logged(halfway) == [3, 4, 6, 8, 9, 12]


def test_a_run_without_a_readable_checkpoint_is_not_begun_anew(source: Path, halfway: Path) -> None:
    for path in Run.open(halfway).checkpoints():
        path.write_bytes(b"")
    before = (halfway / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints in .* can be read; put back"):
        learn(source, halfway, resume=True)
    assert (halfway / "metrics.jsonl").read_text() == before


def test_images_that_changed_are_refused(source: Path, halfway: Path, tmp_path: Path) -> None:
    fewer = tmp_path / "fewer"
    shutil.copytree(source, fewer)
    next(fewer.glob("*.png")).unlink()
    with pytest.raises(ValueError, match=r"the images changed since the run began .*put them back"):
        learn(fewer, halfway, resume=True)


def test_photos_exchanged_under_the_same_names_are_refused(
    source: Path, halfway: Path, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    shutil.copytree(source, others)
    first, second = sorted(others.glob("*.png"))[:2]
    for path in sorted(others.glob("*.png")):
        path.touch()  # a copy has another time, and is no other photo
    learn(others, halfway, steps=7, resume=True)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(ValueError, match=r"other photos under the same names .*put them back"):
        learn(others, halfway, steps=8, resume=True)


def test_a_live_run_is_neither_resumed_nor_begun_again(source: Path, halfway: Path) -> None:
    before = {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()}
    with locked(halfway):
        for again in ({"resume": True}, {}):
            with pytest.raises(BlockingIOError, match=r"in use by process .* on .*; wait for it"):
                learn(source, halfway, tiny(), **again)
    assert {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()} == before


def test_a_run_is_not_overwritten(source: Path, halfway: Path) -> None:
    before = {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match=r"already holds a run; pass --resume"):
        learn(source, halfway, tiny())
    assert {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()} == before


def test_nothing_is_resumed_where_there_is_no_run(source: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no run"):
        learn(source, tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()


def test_a_run_that_never_began_does_not_stand_in_the_way(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="no weights at"):
        learn(source, out, tiny(), init="nowhere.safetensors")
    learn(source, out, tiny(), steps=1)
    assert (out / "model" / "model.json").is_file()


def test_a_finished_run_can_be_given_more_steps(
    source: Path, undisturbed: Path, halfway: Path
) -> None:
    assert learn(source, halfway, steps=9, resume=True).progress.step == 9
    # The run has its own settings; those passed along do not count.
    other = tiny(seed=5)
    assert learn(source, halfway, other, steps=12, resume=True).progress.step == 12
    assert Run.open(halfway).settings(Config) == replace(
        tiny(), train=replace(tiny().train, steps=12)
    )
    assert same_bits(weights(halfway), weights(undisturbed))

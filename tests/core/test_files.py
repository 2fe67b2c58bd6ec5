"""Files are written whole or not at all, alone and as the two files of a model."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surefeat.boxes.config import DetectorConfig
from surefeat.boxes.network import Detector
from surefeat.core import files
from surefeat.core.files import (
    add_lines,
    checked_weights,
    choose_device,
    environment,
    file_stem,
    from_dict,
    hardware,
    pack_tensors,
    read_json,
    read_lines,
    read_tensors,
    to_dict,
    write_bytes,
    write_json,
    write_lines,
    write_model,
)
from surefeat.data.coco import make_category
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.head import KeypointHead
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures


class Killed(BaseException):
    """Stands for the end of the process: nothing may handle it."""


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes(tmp_path / "x.bin", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(tmp_path / "x.bin", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x.bin": b"old"}


def test_the_file_and_its_folder_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []

    def watched(number: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
        names = {path.name for path in tmp_path.iterdir()}
        kept.append("folder" if is_folder and names == {"x"} else "file")

    monkeypatch.setattr(os, "fsync", watched)
    write_bytes(tmp_path / "x", b"1")
    assert kept == ["file", "folder"]


def _write_often(path: Path, letter: str) -> None:
    for _ in range(40):
        write_bytes(path, letter.encode() * 50_000)


def test_processes_that_write_one_file_never_mix_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in two containers that share a disk: every process is number 1.
    monkeypatch.setattr(os, "getpid", lambda: 1)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_write_often, args=(tmp_path / "x", name)) for name in "ab"]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        content = (tmp_path / "x").read_bytes() if (tmp_path / "x").exists() else b""
        assert content in (b"", b"a" * 50_000, b"b" * 50_000)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_written_while_it_is_being_written_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines on one disk: each has its own name for what is not yet whole."""
    true, path = os.fsync, tmp_path / "x"
    writers = iter([b"second" * 9])

    def other_machine(number: int) -> None:
        for data in writers:
            write_bytes(path, data)
        true(number)

    monkeypatch.setattr(os, "fsync", other_machine)
    write_bytes(path, b"first")
    assert path.read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_a_name_that_is_taken_is_never_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefeat.core.files.secrets.token_hex", lambda _: "same")
    (tmp_path / ".x.same.part").write_bytes(b"another's")
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "x", b"mine")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("local", "expected"), [("0", 0), ("1", 1), ("3", 1)])
def test_processes_take_the_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, local: str, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", local)
    assert choose_device("cuda") == torch.device("cuda", expected)
    # One that is named is taken as it is, and one that is not there is an error.
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"there is no cuda:2 here \(2 CUDA devices\)"):
        choose_device("cuda:2")


@pytest.mark.parametrize("there", [True, False])
def test_apple_s_gpu_is_taken_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == torch.device("mps" if there else "cpu")
    assert choose_device("cpu") == torch.device("cpu")
    if there:
        assert choose_device("mps") == torch.device("mps")
        return
    with pytest.raises(ValueError, match="there is no Apple GPU here; choose cpu"):
        choose_device("mps")


def test_an_unknown_device_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown device 'gpu'; choose cuda, cuda:N, mps or cpu"):
        choose_device("gpu")
    for name in ("cpu:1", "xpu"):  # torch knows these
        with pytest.raises(ValueError, match=f"unknown device '{name}'; choose cuda"):
            choose_device(name)


def test_a_name_of_a_file_leads_nowhere_and_is_never_empty() -> None:
    assert file_stem("a/b", "..\\c", "d:e") == "a-b-..-c-d-e"
    assert file_stem("../.x") == "-.x"
    assert file_stem("..") == file_stem("") == "unnamed"
    assert file_stem(300 * "x") == 200 * "x"


def test_tensors_of_any_layout_come_back_the_same(tmp_path: Path) -> None:
    turned = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    packed = pack_tensors({"t": turned}, {"about": "it"})
    write_bytes(tmp_path / "new" / "x.safetensors", packed)
    assert torch.equal(load_file(tmp_path / "new" / "x.safetensors")["t"], turned)


# Every file of a model is one rename, so a kill can come before any of these.
@pytest.mark.parametrize("survived", range(4))
def test_a_model_killed_while_it_is_written_over_another_is_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    def saved(value: float) -> None:
        about = {"value": value}
        tensors = {"t": torch.full((2,), value)}
        write_model(tmp_path / "w.safetensors", tensors, tmp_path / "s.json", about)

    def loaded() -> tuple[float, float]:
        about = json.loads((tmp_path / "s.json").read_text())
        weights = load_file(checked_weights(tmp_path / "w.safetensors", about["sha256"]))
        return about["value"], float(weights["t"][0])

    saved(1.0)
    _kill_after(survived, monkeypatch)
    if survived < 3:
        with pytest.raises(Killed):
            saved(2.0)
    else:
        saved(2.0)
    assert loaded() == ((1.0, 1.0) if survived < 2 else (2.0, 2.0))
    monkeypatch.undo()
    saved(3.0)
    assert loaded() == (3.0, 3.0)
    assert (tmp_path / "w.safetensors").is_file()


def _kill_after(renames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    move, done = files.move, []

    def counted(part: Path, path: Path) -> None:
        if len(done) == renames:
            raise Killed
        done.append(path)
        move(part, path)

    monkeypatch.setattr(files, "move", counted)


@pytest.mark.parametrize("survived", range(3))
def test_a_shipped_kind_of_model_survives_a_kill_between_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    def network(seed: int) -> DenseFeatures:
        torch.manual_seed(seed)
        return DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).eval()

    def detector(seed: int) -> Detector:
        torch.manual_seed(seed)
        return Detector(DetectorConfig(trunk="small", hidden=8), ("car", "bus")).eval()

    network(0).save_pretrained(tmp_path / "model")
    detector(0).save(tmp_path / "boxes")
    for save in (
        lambda: network(1).save_pretrained(tmp_path / "model"),
        lambda: detector(1).save(tmp_path / "boxes"),
    ):
        with monkeypatch.context() as patch:
            _kill_after(survived, patch)
            with pytest.raises(Killed):
                save()
    now = 0 if survived < 2 else 1
    for new, old in (
        (DenseFeatures.from_pretrained(tmp_path / "model", device="cpu"), network(now)),
        (Detector.load(tmp_path / "boxes", device="cpu"), detector(now)),
    ):
        for name, value in old.state_dict().items():
            torch.testing.assert_close(new.state_dict()[name], value, atol=1e-3, rtol=1e-3)


def test_a_keypoint_detector_killed_while_it_is_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).eval()
    head = KeypointHead(8, 2, hidden=4, generator=torch.Generator())
    parts = KeypointDetector(model, head, (make_category("car", ["a", "b"]),), KeypointConfig())
    for survived in range(3):
        with monkeypatch.context() as patch:
            _kill_after(survived, patch)
            with pytest.raises(Killed):
                parts.save(tmp_path / "parts")
        assert not (tmp_path / "parts").exists()
    parts.save(tmp_path / "parts")
    assert KeypointDetector.load(tmp_path / "parts", model).categories == parts.categories


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"w.safetensors is damaged.*copy it anew"):
        checked_weights(tmp_path / "w.safetensors", "0" * 64)


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [float("nan"), 1.0], "b": (float("inf"),)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, 1.0], "b": [None]}


def test_a_run_on_the_cpu_does_not_name_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Fast {device}")
    assert "Fast" not in environment("cpu")["hardware"]
    assert "cores" in hardware(torch.device("cpu"))
    assert environment("cuda:1")["hardware"] == "Fast cuda:1"


@dataclass(frozen=True)
class Inner:
    sides: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    name: str = "x"


def test_settings_come_back_from_json_and_unknown_ones_are_named() -> None:
    outer = Outer(Inner((3,)), "y")
    assert from_dict(Outer, json.loads(json.dumps(to_dict(outer)))) == outer
    with pytest.raises(ValueError, match="unknown setting 'side' for Inner; known: sides"):
        from_dict(Outer, {"inner": {"side": 1}})


def test_lines_are_added_and_what_a_crash_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    assert read_lines(path) == []
    add_lines(path, [{"a": 1}, {"a": float("nan")}])
    add_lines(path, [{"a": 3}])
    whole = path.read_text()
    assert read_lines(path) == [{"a": 1}, {"a": None}, {"a": 3}]
    path.write_text(whole + '{"a": 4, "b')
    assert read_lines(path) == [{"a": 1}, {"a": None}, {"a": 3}]
    assert path.read_text() == whole
    write_lines(path, [{"a": 5}])
    assert read_lines(path) == [{"a": 5}]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data.replace(b"data_offsets", b"data_offsetz"),
        lambda data: data.replace(b'"F32"', b'"F99"'),
        lambda data: data.replace(b'"shape":[3]', b'"shape":[4]'),
        lambda data: (2).to_bytes(8, "little") + b"[]",
        lambda data: (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_tensors_that_are_not_whole_are_one_line(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "x.safetensors"
    whole = pack_tensors({"t": torch.arange(3.0)}, {"about": "it"})
    path.write_bytes(whole)
    tensors, about = read_tensors(path)
    assert (tensors["t"].tolist(), about) == ([0, 1, 2], {"about": "it"})
    path.write_bytes(damage(whole))
    with pytest.raises(ValueError, match=r"x.safetensors is no whole safetensors file .*copy it"):
        read_tensors(path)


def test_tensors_are_read_under_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9") / "x.safetensors"
    write_bytes(path, pack_tensors({"none": torch.zeros(0, 2), "one": torch.tensor(1.0)}))
    tensors, about = read_tensors(path)
    assert (tensors["none"].shape, float(tensors["one"]), about) == ((0, 2), 1.0, {})


def test_lines_reach_the_disk_when_they_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: kept.append((tmp_path / "x").read_text()))
    add_lines(tmp_path / "x", [{"a": 1}])
    assert kept == ['{"a": 1}\n']


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda path: write_bytes(path, b"1"), lambda path: add_lines(path, [{"a": 1}])):
        with pytest.raises(OSError, match=r"No space left on device.*metrics.jsonl") as caught:
            write(tmp_path / "metrics.jsonl")
        assert caught.value.errno == 28


def test_a_folder_that_takes_no_files_names_the_file_and_not_its_part(tmp_path: Path) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("needs a folder that takes no files from anybody")
    with pytest.raises(OSError, match=r"x\.json") as refused:
        write_json(Path("/proc/x.json"), {})
    assert refused.value.filename == "/proc/x.json"


@pytest.mark.parametrize("content", ["", "[1]", '{"a": '], ids=["empty", "a list", "cut short"])
def test_a_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "about.json").write_text(content)
    with pytest.raises(ValueError, match=r"about\.json is damaged"):
        read_json(tmp_path / "about.json")

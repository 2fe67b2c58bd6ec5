"""Shards made on Ray: the same bytes as one process, whoever is killed; one Ray for the file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surefeat.data.decode import Place
from surefeat.data.drawn import write_folder
from surefeat.index import ray_engine
from surefeat.index.engines import write_cells
from surefeat.index.maker import CellMaker, ShardJob, ShardReport
from surefeat.index.photos import ListedPhoto
from surefeat.index.ray_engine import RETRIES, RayWorkers, ray_workers
from surefeat.index.shards import CellSettings, read_cells
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures

SETTINGS = CellSettings(budget=6, photos=4, batch=2)


def small() -> DenseFeatures:
    torch.manual_seed(0)
    return DenseFeatures(
        ModelConfig(trunk="small", head="linear", channels=8, longest_side=64)
    ).eval()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    pytest.importorskip("pyarrow", reason="the scale extra is not installed")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="the scale extra is not installed")
    try:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20,
            log_to_driver=False,
        )  # fmt: skip
    except Exception as error:  # it gives itself half a minute
        ray.shutdown()
        pytest.skip(f"Ray does not start here: {error}")
    yield ray
    ray.shutdown()


@pytest.mark.usefixtures("ray")
def test_two_workers_one_of_them_killed_write_what_one_process_does(tmp_path: Path) -> None:
    photos, model = tmp_path / "photos", small()
    write_folder(photos, count=30, size=48, seed=0)
    (photos / "broken.png").write_bytes(b"")
    alone = write_cells([photos], tmp_path / "one", model=model, settings=SETTINGS, quiet=True)
    reports: list[ShardReport] = []

    def told(report: ShardReport) -> None:
        reports.append(report)
        if len(reports) == 1:  # its worker has begun its next shard
            os.kill(report.process, signal.SIGKILL)

    done = write_cells(
        [photos], tmp_path / "ray", model=model, settings=SETTINGS, engine="ray", workers=2,
        device="cpu", quiet=True, told=told,
    )  # fmt: skip
    assert (done.written, done.shards, done.rows) == (8, 8, alone.rows)
    assert [entry.name for entry in done.skipped] == ["broken.png"]
    assert sorted(report.number for report in reports) == list(range(8))
    assert [report.process for report in reports].count(reports[0].process) == 1
    assert os.getpid() not in {report.process for report in reports}
    assert files(tmp_path / "ray") == files(tmp_path / "one")
    names = [name for shard in read_cells(tmp_path / "ray") for name in shard.names]
    assert len(names) == len(set(names)) == 30
    again = write_cells(
        [photos], tmp_path / "ray", model=model, settings=SETTINGS, quiet=True, workers=1
    )
    assert (again.written, again.already_there) == (0, 8)


def test_more_workers_than_cores_and_a_cluster_that_is_not_there_are_a_line(ray: Any) -> None:
    with (
        pytest.raises(ValueError, match="Ray has 2: use --workers 2"),
        ray_workers(small(), workers=3, device="cpu"),
    ):
        pass
    with pytest.raises(ValueError, match="Ray sees no GPU"), ray_workers(small(), device="cuda"):
        pass
    with pytest.raises(OSError, match="refused"):
        ray_engine._check_answers("127.0.0.1:9")


# The pool's own rules, with a Ray that does what a test says.


class LostError(Exception):
    pass


class RaisedError(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class ScriptedRay:
    """Makes shards at once, but for what `fate` says of a worker's number and a shard's."""

    exceptions = SimpleNamespace(RayTaskError=RaisedError, RayError=LostError)

    def __init__(self, fate: Callable[[int, int], Exception | None]) -> None:
        self.fate, self.workers, self.killed = fate, 0, 0

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **_: Any) -> Callable[[type], Any]:
        return lambda _: SimpleNamespace(remote=self._worker)

    def _worker(self, *_: Any) -> Any:
        self.workers += 1
        number = self.workers

        def make(job: ShardJob, _: Any) -> tuple[int, ShardJob, object]:
            return (number, job, object())

        return SimpleNamespace(make=SimpleNamespace(remote=make), number=number)

    def wait(self, owed: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return owed[:num_returns], owed[num_returns:]

    def get(self, owed: tuple[int, ShardJob, object]) -> ShardReport:
        number, job, _ = owed
        error = self.fate(number, job.number)
        if error is not None:
            raise error
        return ShardReport(job.number, True, len(job.photos), 1, 1, (), "host", number)

    def kill(self, _: Any) -> None:
        self.killed += 1


def scripted(
    fate: Callable[[int, int], Exception | None], *, shards: int = 5
) -> tuple[ScriptedRay, Iterator[ShardReport]]:
    maker, ray = CellMaker(small(), SETTINGS), ScriptedRay(fate)
    photo = ListedPhoto("a.png", Place("a.png"))
    jobs = [ShardJob(number, Path(f"{number}.parquet"), (photo,)) for number in range(shards)]
    about = maker.about(shards=shards, photos=shards)
    return ray, RayWorkers(ray, "cpu", 2).make(maker, about, jobs)


def test_a_lost_worker_is_replaced_and_costs_no_shard_but_its_own() -> None:
    ray, made = scripted(lambda worker, shard: LostError("gone") if worker == 1 else None)
    assert sorted(report.number for report in made) == [0, 1, 2, 3, 4]
    assert ray.workers == 3
    assert ray.killed == 2


def test_a_shard_that_kills_every_worker_is_named_when_all_others_are_there() -> None:
    ray, made = scripted(lambda worker, shard: LostError("gone") if shard == 2 else None)
    assert sorted(next(made).number for _ in range(4)) == [0, 1, 3, 4]
    with pytest.raises(RuntimeError, match=r"1 shards cost 4 workers each \(2\.parquet\)"):
        next(made)
    assert ray.workers == 2 + RETRIES + 1


def test_an_error_of_ours_in_a_worker_comes_out_as_it_is_and_ends_the_workers() -> None:
    full = OSError(28, "No space left on device", "x")
    ray, made = scripted(lambda worker, shard: RaisedError(full) if shard == 3 else None)
    with pytest.raises(OSError, match="No space left") as raised:
        list(made)
    assert raised.value is full
    assert ray.killed == 2


def test_a_machine_with_another_version_is_named(tmp_path: Path) -> None:
    worker = ray_engine.ShardWorker(CellMaker(small(), SETTINGS), "cpu")
    about = replace(worker.maker.about(shards=1, photos=1), version="0.0.0")
    with pytest.raises(RuntimeError, match="install the same on every machine"):
        worker.make(ShardJob(0, tmp_path / "0.parquet", ()), about)

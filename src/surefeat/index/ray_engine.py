"""Shards made by workers on Ray: on this machine, or on the cluster at an address.

A worker is a process with a model of its own that makes one shard after the other. One that is lost
(killed, out of memory, its machine gone) is replaced and its shard made again; the files of all
other shards stand. Nothing is sent to anybody, and no dashboard is started.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefeat import __version__
from surefeat.core.files import choose_device
from surefeat.index.maker import CellMaker, ShardJob, ShardReport
from surefeat.index.photos import SCALE_EXTRA
from surefeat.index.shards import CellsAbout
from surefeat.model.network import DenseFeatures

RETRIES = 3
"""How often a shard is begun again after its worker was lost, before it is given up."""

_LOG = logging.getLogger("surefeat")

# Read when Ray is imported or started. Its own niceness of 15 would make workers wait for anything.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

# Bytes that a local Ray may hold besides a model for every worker to read.
_STORE = 200 << 20

# Seconds in which a cluster has to answer.
_PATIENCE = 10


class ShardWorker:
    """What runs in a worker's process."""

    def __init__(self, maker: CellMaker, device: str) -> None:
        torch.set_num_threads(1)  # as the other engines: the last bits depend on it
        self.maker = replace(maker, model=maker.model.to(choose_device(device)))

    def make(self, job: ShardJob, about: CellsAbout) -> ShardReport:
        """Write a shard, unless it is there."""
        if about.version != __version__:
            versions = f"{platform.node()} has surefeat {__version__}, not {about.version}"
            raise RuntimeError(f"{versions}; install the same on every machine")
        return self.maker.make(job, about)


@dataclass(frozen=True)
class RayWorkers:
    """A Ray that is there, and how many workers it is asked for."""

    ray: Any
    device: str
    """cuda or cpu, of every worker."""
    count: int

    def make(
        self, maker: CellMaker, about: CellsAbout, jobs: Sequence[ShardJob]
    ) -> Iterator[ShardReport]:
        """Shards in the order in which they are done.

        Those whose workers were lost too often are named in an error when all others are there.
        """
        resources = {"num_cpus": 1, "num_gpus": int(self.device == "cuda")}
        remote = self.ray.remote(max_restarts=0, **resources)(ShardWorker)
        sent = self.ray.put(maker)
        pool = _Pool(self.ray, lambda: remote.remote(sent, self.device), jobs, about)
        try:
            yield from pool.run(min(self.count, len(jobs)))
        finally:
            pool.stop()


class _Pool:
    """Workers, each with one shard at a time, and the shards that wait."""

    def __init__(
        self, ray: Any, new_worker: Any, jobs: Sequence[ShardJob], about: CellsAbout
    ) -> None:
        self.ray, self.new_worker, self.about = ray, new_worker, about
        self.waiting = deque(jobs)
        self.workers: list[Any] = []
        self.running: dict[Any, tuple[Any, ShardJob]] = {}
        """What a worker owes -> the worker and its shard."""
        self.lost: Counter[int] = Counter()
        """Number of a shard -> how many workers it has cost."""

    def run(self, count: int) -> Iterator[ShardReport]:
        """Shards as they are done by `count` workers; RuntimeError at the end: some are not."""
        for _ in range(count):
            self._give(self._started())
        given_up: list[ShardJob] = []
        while self.running:
            owed = self.ray.wait(list(self.running), num_returns=1)[0][0]
            worker, job = self.running.pop(owed)
            report = self._result(owed, job)
            if report is None:
                self.workers.remove(worker)
                worker = self._started()
                if self.lost[job.number] > RETRIES:
                    given_up.append(job)
                else:
                    self.waiting.appendleft(job)
            # Before it is told of, so that the worker does not wait for who listens.
            self._give(worker)
            if report is not None:
                yield report
        if given_up:
            names = ", ".join(job.file.name for job in given_up[:3])
            what = f"{len(given_up)} shards cost {RETRIES + 1} workers each ({names})"
            raise RuntimeError(f"{what}; give workers more memory, and run the command again")

    def _started(self) -> Any:
        self.workers.append(self.new_worker())
        return self.workers[-1]

    def _give(self, worker: Any) -> None:
        if self.waiting:
            job = self.waiting.popleft()
            self.running[worker.make.remote(job, self.about)] = (worker, job)

    def _result(self, owed: Any, job: ShardJob) -> ShardReport | None:
        """What a worker gave back; None: it was lost."""
        errors = self.ray.exceptions
        try:
            report: ShardReport = self.ray.get(owed)
        except errors.RayTaskError as error:  # ours, with a page of Ray's around it
            raise error.cause from None
        except errors.RayError as error:
            self.lost[job.number] += 1
            reason = str(error).strip().splitlines()[0]
            _LOG.warning("a worker was lost; %s is made again (%s)", job.file.name, reason)
            return None
        return report

    def stop(self) -> None:
        """End the workers; the shards of those that are busy (Ctrl-C, an error) leave nothing."""
        for worker in self.workers:
            self.ray.kill(worker)


def _share(
    resources: dict[str, float], workers: int | None, device: str | torch.device | None
) -> tuple[str, int]:
    """The device of every worker and their number, from what the cluster has."""
    gpus = int(resources.get("GPU", 0))
    asked = "" if device is None else torch.device(device).type
    if asked == "cuda" and not gpus:
        raise ValueError("Ray sees no GPU; choose --device cpu, or start Ray on machines with one")
    kind = "cuda" if gpus and asked in ("", "cuda") else "cpu"
    most = gpus if kind == "cuda" else int(resources.get("CPU", 0))
    if workers is not None and workers > most:
        name = "GPUs" if kind == "cuda" else "cores"
        raise ValueError(
            f"{workers} workers need as many {name}; Ray has {most}: use --workers {most}"
        )
    return kind, workers or max(1, most)


@contextmanager
def ray_workers(
    model: DenseFeatures,
    *,
    address: str | None = None,
    workers: int | None = None,
    device: str | torch.device | None = None,
) -> Iterator[RayWorkers]:
    """Ray, started on this machine or found at the address; as it was before afterwards.

    workers: by default one a GPU of the cluster, or one a core where there is none or the CPU is
    asked for.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray as installed
    except ImportError as error:
        raise ImportError(f"--engine ray needs Ray: {SCALE_EXTRA}") from error
    ray: Any = installed
    if ray.is_initialized():  # by who called us
        yield RayWorkers(ray, *_share(ray.cluster_resources(), workers, device))
        return
    try:
        _start(ray, model, address, workers)
    except Exception as error:  # Ray's own are of many kinds, plain Exceptions among them
        where = "Ray does not start here" if address is None else f"no Ray cluster at {address}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "free the machine and try again, or use --engine here"
        if address is not None:
            fix = "check it with `ray status`, or leave --address out to use this machine"
        raise RuntimeError(f"{where} ({reason}); {fix}") from error
    try:
        yield RayWorkers(ray, *_share(ray.cluster_resources(), workers, device))
    finally:
        ray.shutdown()


def _start(ray: Any, model: DenseFeatures, address: str | None, workers: int | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        _check_answers(address)
        ray.init(address=address, **quiet)
        return
    size = sum(value.nbytes for value in model.state_dict().values())
    cores = max(workers or 1, os.cpu_count() or 1)
    ray.init(
        address="local", num_cpus=cores, include_dashboard=False,
        object_store_memory=2 * size + _STORE, **quiet,
    )  # fmt: skip


def _check_answers(address: str) -> None:
    """OSError: nobody listens at host:port; Ray itself would ask for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()

"""Photos -> a folder of shards of cells, by one process, by torchrun's or on Ray.

Every engine makes the same shards, bit for bit: a shard is made by one worker, with one of torch's
threads, and its batches are its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Literal, Protocol

import torch

from surefeat.core import progress
from surefeat.data.decode import Skipped, write_skipped
from surefeat.index.cells import Projection
from surefeat.index.maker import CellMaker, ShardJob, ShardReport
from surefeat.index.photos import ListedPhoto, import_parquet, list_photos
from surefeat.index.shards import CellsAbout, CellSettings, shard_file, write_about
from surefeat.model.network import DenseFeatures

Engine = Literal["here", "ray"]

# Seconds after which a file that is still half-written is nobody's.
_ABANDONED = 3600

Told = Callable[[ShardReport], None]
"""Is told of every shard when it is there."""


class ShardPlan(Protocol):
    """Photos -> shards of at most `count` of them, numbered from 0 on."""

    def __call__(
        self, photos: Sequence[ListedPhoto], out: Path, *, count: int
    ) -> list[ShardJob]: ...


@dataclass(frozen=True)
class CellsWritten:
    """What was done by this process, or by the workers it asked."""

    folder: Path
    shards: int
    """Of the whole folder."""
    written: int
    """Shards that were made now."""
    already_there: int
    """Shards that were whole, of the same photos and made the same way."""
    photos: int
    rows: int
    bytes: int
    skipped: tuple[Skipped, ...]
    listed: Path | None
    """Where the skipped photos are listed with the reasons."""


def write_cells(
    sources: Sequence[str | Path], out: str | Path, *,
    model: str | Path | DenseFeatures | None = None, settings: CellSettings | None = None,
    projection: Projection | None = None, engine: Engine = "here", address: str | None = None,
    workers: int | None = None, device: str | torch.device | None = None, quiet: bool = False,
    told: Told | None = None, plan: ShardPlan | None = None,
) -> CellsWritten:  # fmt: skip
    """The cells of photos as shards below `out`; what is there and whole is not made again.

    sources: folders, lists, tar shards, Parquet files (columns photo, bytes), single photos.
    engine: here, this process, which under torchrun takes its own share of the shards; or ray,
    local or the cluster at `address`. workers: shards made at the same time; by default one a core
    on a CPU, one a GPU. Unreadable photos are skipped and listed in OUT/_skipped-RANK.txt.
    plan: which photos make which shard; by default in their order. read_cells reads the folder.
    """
    check_asked(engine, address, workers)
    out = Path(out).absolute()
    photos = list_photos(sources)
    if not isinstance(model, DenseFeatures):
        # Ray's workers get the model from here, whatever they compute it on.
        model = DenseFeatures.from_pretrained(model, device="cpu" if engine == "ray" else device)
    maker = CellMaker(model, settings or CellSettings(), projection)
    jobs = (plan or plan_shards)(photos, out, count=maker.settings.photos)
    named = [os.path.abspath(source) for source in sources]
    about = maker.about(shards=len(jobs), photos=len(photos), sources=named)
    rank, mine = (0, jobs) if engine == "ray" else _own_share(jobs)
    with _workers(maker, about, engine, address, workers, device) as make:
        write_about(out, about)
        if rank == 0:
            _remove_surplus(out, len(jobs))
        reports = []
        total, hidden = sum(len(job.photos) for job in mine), quiet or rank > 0
        with progress.bar(total=total, desc="extracting", unit="img", quiet=hidden) as bar:
            for report in make(mine):
                reports.append(report)
                bar.update(report.photos)
                if told is not None:
                    told(report)
    return _summary(out, len(jobs), reports, rank=rank)


def _own_share(jobs: Sequence[ShardJob]) -> tuple[int, Sequence[ShardJob]]:
    """This process's number among torchrun's, and its shards; of one alone, all."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    return rank, jobs[rank::world]


@contextmanager
def _workers(
    maker: CellMaker,
    about: CellsAbout,
    engine: Engine,
    address: str | None,
    workers: int | None,
    device: str | torch.device | None,
) -> Iterator[Callable[[Sequence[ShardJob]], Iterator[ShardReport]]]:
    """Who makes shards; nothing is written before they are there."""
    if engine == "here":
        yield partial(make_here, maker, about, workers=workers)
        return
    from surefeat.index.ray_engine import ray_workers

    with ray_workers(maker.model, address=address, workers=workers, device=device) as cluster:
        yield partial(cluster.make, maker, about)


def check_asked(engine: str, address: str | None, workers: int | None) -> None:
    """Refuse what cannot work before anything is read."""
    import_parquet()
    if engine not in ("here", "ray"):
        raise ValueError(f"engine is {engine!r}; choose here or ray")
    if address is not None and engine != "ray":
        raise ValueError("an address is that of a Ray cluster; add --engine ray")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; use at least 1")


def plan_shards(photos: Sequence[ListedPhoto], out: Path, *, count: int) -> list[ShardJob]:
    """The photos in their order, `count` in a shard, the last one with the rest."""
    starts = range(0, len(photos), count)
    return [
        ShardJob(number, shard_file(out, number), tuple(photos[start : start + count]))
        for number, start in enumerate(starts)
    ]


def _remove_surplus(out: Path, shards: int) -> None:
    """Shards beyond the last one, of photos that are no longer there, would be read along.

    What killed writers left half-done goes too, once nobody can still be writing it.
    """
    planned = {shard_file(out, number).name for number in range(shards)}
    for file in out.glob("cells-*.parquet"):
        if file.name not in planned:
            file.unlink(missing_ok=True)
    for part in out.glob(".cells-*.part"):
        if part.stat().st_mtime < time.time() - _ABANDONED:
            part.unlink(missing_ok=True)


def make_here(
    maker: CellMaker, about: CellsAbout, jobs: Sequence[ShardJob], *, workers: int | None = None
) -> Iterator[ShardReport]:
    """Shards made by threads of this process, each one by one thread; in no fixed order.

    workers: by default as many as torch has threads on a CPU, else one.
    """
    on_cpu = maker.model.device.type == "cpu"
    count = workers or (torch.get_num_threads() if on_cpu else 1)
    with one_torch_thread():
        if count == 1 or len(jobs) < 2:
            yield from (maker.make(job, about) for job in jobs)
            return
        stop = Event()
        pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        try:
            waiting = [pool.submit(maker.make, job, about, stop=stop) for job in jobs]
            yield from (future.result() for future in as_completed(waiting))
        finally:  # Ctrl-C, a full disk: what is begun ends after its batch
            stop.set()
            pool.shutdown(cancel_futures=True)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """One of torch's threads for what is computed inside, as many as before afterwards.

    With several the last bits of a convolution depend on how many.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _summary(out: Path, shards: int, reports: Sequence[ShardReport], *, rank: int) -> CellsWritten:
    ordered = sorted(reports, key=lambda report: report.number)
    skipped = tuple(entry for report in ordered for entry in report.skipped)
    listed = out / f"_skipped-{rank}.txt"
    write_skipped(listed, skipped)
    written = sum(report.written for report in reports)
    return CellsWritten(
        folder=out,
        shards=shards,
        written=written,
        already_there=len(reports) - written,
        photos=sum(report.photos for report in reports),
        rows=sum(report.rows for report in reports),
        bytes=sum(report.bytes for report in reports),
        skipped=skipped,
        listed=listed if skipped else None,
    )

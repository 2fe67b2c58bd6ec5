"""Cells of photos as shards, by one process and on Ray: results/speed/shards.json.

    python benchmarks/speed/shards.py PHOTOS --out results/speed/shards.json

The same photos by one process and by Ray's workers on this machine, one thread each, in one run:
whether the files are the same bytes, also after a worker was killed in the middle, and how many
photos a second. A busy machine makes all of it slower, so processor seconds a photo are stored too;
they are what the routes are compared by, on photos seen at half the usual size. Then bytes a photo
by kind and budget, many small photos by a small network with the memory over time, and what ten
million photos would cost.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefeat.core.files import environment, file_hash, write_json
from surefeat.core.image import prepare
from surefeat.data.drawn import write_folder
from surefeat.index.engines import Engine, plan_shards, write_cells
from surefeat.index.maker import CellMaker, ShardReport
from surefeat.index.photos import list_photos
from surefeat.index.ray_engine import ShardWorker
from surefeat.index.shards import CellSettings, Kind, read_cells
from surefeat.model.config import WEIGHTS, ModelConfig, model_folder
from surefeat.model.network import DenseFeatures

SETTINGS = CellSettings(budget=64, photos=8, longest_side=160)
"""Of the routes: photos half as large as usual, so that what Ray adds weighs four times as much."""
SMALL = ModelConfig(trunk="small", head="linear", channels=32, longest_side=96)
DISTINCT = 200
"""Of the many small photos; the others are the same files under other names."""
MILLIONS = 10_000_000
PARTS = ("routes", "paired", "bytes", "many", "many on Ray")
PAIRED = replace(SETTINGS, photos=4)


def used_by(process: int) -> tuple[float, float]:
    """Processor seconds and resident MiB of a process, as Linux counts them."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Watch:
    """When each shard was there, by whom, and what that process had used by then."""

    def __init__(self, kill_after: int | None = None) -> None:
        self.reports: list[ShardReport] = []
        self.times: list[float] = []
        self.spent: list[float] = []
        self.memory: list[float] = []
        self.kill_after, self.killed = kill_after, 0

    def __call__(self, report: ShardReport) -> None:
        spent, memory = used_by(report.process)
        self.reports.append(report)
        self.times.append(time.perf_counter())
        self.spent.append(spent)
        self.memory.append(memory)
        if len(self.reports) == self.kill_after:
            self.killed = report.process
            os.kill(report.process, signal.SIGKILL)

    def rates(self) -> dict[str, float]:
        """Of what came after every worker's first shard: loading a model is not counted."""
        seconds = processor = photos = 0.0
        first: dict[int, int] = {}
        for row, report in enumerate(self.reports):
            first.setdefault(report.process, row)
        for process, start in first.items():
            rows = [r for r, report in enumerate(self.reports) if report.process == process]
            processor += self.spent[rows[-1]] - self.spent[start]
            photos += sum(self.reports[r].photos for r in rows[1:])
        begun = max(first.values())
        seconds = self.times[-1] - self.times[begun]
        after = sum(report.photos for report in self.reports[begun + 1 :])
        return {
            "photos a second": after / seconds if seconds else float("nan"),
            "processor seconds a photo": processor / max(photos, 1),
        }


def start_ray(workers: int) -> float:
    """Seconds until Ray is there, for the whole run; a busy machine may need several goes."""
    import ray

    if ray.is_initialized():
        return 0.0
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # as ray_workers has
    for attempt in range(5):
        start = time.perf_counter()
        try:
            ray.init(
                address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False,
                object_store_memory=600 << 20,
            )  # fmt: skip
            break
        except Exception as error:
            print(f"attempt {attempt}: {error}", flush=True)
            ray.shutdown()
    return time.perf_counter() - start


def same_files(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.glob("*.parquet"))
    return names == sorted(path.name for path in second.glob("*.parquet")) and all(
        (first / name).read_bytes() == (second / name).read_bytes() for name in names
    )


def routes(photos: Path, root: Path, *, repeats: int) -> dict[str, Any]:
    """The same photos by every route, in turns."""
    model = DenseFeatures.from_pretrained(device="cpu")
    asked: dict[str, tuple[Engine, int]] = {
        "one process": ("here", 1), "Ray, 1 worker": ("ray", 1), "Ray, 2 workers": ("ray", 2),
    }  # fmt: skip
    results: dict[str, Any] = {name: [] for name in asked}
    for turn in range(repeats):
        for name, (engine, workers) in asked.items():
            out, watch, start = root / f"{name} {turn}", Watch(), time.perf_counter()
            write_cells(
                [photos], out, model=model, settings=SETTINGS, engine=engine, workers=workers,
                device="cpu", quiet=True, told=watch,
            )  # fmt: skip
            whole = {"seconds in all": time.perf_counter() - start}
            same = {"same bytes": same_files(root / "one process 0", out)}
            load = {"load": os.getloadavg()[0]}
            results[name].append(watch.rates() | whole | same | load)
            print(name, results[name][-1], flush=True)
    means = {
        name: float(np.mean([turn["processor seconds a photo"] for turn in turns]))
        for name, turns in results.items()
    }
    for name in list(asked)[1:]:
        ratio = means[name] / means["one process"]
        results[f"{name}: processor seconds beside one process"] = ratio
    return results


def paired(photos: Path, root: Path) -> dict[str, Any]:
    """Every shard by this process and at once again by a worker on Ray, which comes first in turns.

    What else the machine does meets both alike, so the medians of the quotients can be trusted.
    """
    import ray

    maker = CellMaker(DenseFeatures.from_pretrained(device="cpu"), PAIRED)
    jobs = plan_shards(list_photos([photos]), root / "here", count=PAIRED.photos)
    about = maker.about(shards=len(jobs), photos=0)
    worker = ray.remote(num_cpus=1)(ShardWorker).remote(ray.put(maker), "cpu")
    process = ray.get(worker.make.remote(replace(jobs[0], file=root / "first"), about)).process
    maker.make(replace(jobs[0], file=root / "second"), about)
    rows: dict[str, list[tuple[float, float]]] = {"here": [], "ray": []}
    for number, job in enumerate(jobs[1:]):
        other = replace(job, file=root / "ray" / job.file.name)
        for route in ("here", "ray") if number % 2 else ("ray", "here"):
            asked = os.getpid() if route == "here" else process
            before, start = used_by(asked)[0], time.perf_counter()
            if route == "here":
                maker.make(job, about)
            else:
                ray.get(worker.make.remote(other, about))
            rows[route].append((time.perf_counter() - start, used_by(asked)[0] - before))
    ratios = np.array(rows["ray"]) / np.array(rows["here"])
    quarters = {
        name: [float(np.quantile(ratios[:, column], share)) for share in (0.25, 0.5, 0.75)]
        for column, name in enumerate(("seconds", "processor seconds"))
    }
    return {
        "shards": len(ratios), "photos a shard": PAIRED.photos,
        "Ray beside this process, quartiles": quarters,
        "same bytes": all(
            job.file.read_bytes() == (root / "ray" / job.file.name).read_bytes() for job in jobs[1:]
        ),
    }  # fmt: skip


def killed(photos: Path, root: Path) -> dict[str, Any]:
    """One of two workers is killed when its first shard is there and its second begun."""
    watch, out = Watch(kill_after=1), root / "killed"
    done = write_cells(
        [photos], out, settings=SETTINGS, engine="ray", workers=2, device="cpu", quiet=True,
        told=watch,
    )  # fmt: skip
    names = [name for shard in read_cells(out) for name in shard.names]
    by = [report.process for report in watch.reports]
    return {
        "shards": done.shards, "made by the killed worker": by.count(watch.killed),
        "workers": len(set(by)), "photos": len(names), "photos twice": len(names) - len(set(names)),
        "photos lost": done.photos - len(done.skipped) - len(set(names)),
        "same bytes as one process": same_files(root / "one process 0", out),
    }  # fmt: skip


def many(root: Path, *, count: int, engine: Engine) -> dict[str, Any]:
    """Memory over time: small photos, a small network with random weights, one worker."""
    folder, drawn = root / "many", root / "drawn"
    write_folder(drawn, count=DISTINCT, size=96, seed=0)
    files = sorted(drawn.glob("*.png"))
    folder.mkdir()
    for number in range(count):
        os.link(files[number % len(files)], folder / f"{number:06d}.png")
    tracemalloc.start()
    listed = list_photos([folder])
    listing = tracemalloc.get_traced_memory()[0] / len(listed)
    tracemalloc.stop()
    del listed
    torch.manual_seed(0)
    model, watch = DenseFeatures(SMALL).eval(), Watch()
    done = write_cells(
        [folder], root / "out", model=model, settings=CellSettings(budget=16), engine=engine,
        workers=1, device="cpu", quiet=True, told=watch,
    )  # fmt: skip
    names = [name for shard in read_cells(root / "out") for name in shard.names]
    return watch.rates() | {
        "photos": count, "photos read back": len(set(names)), "shards": done.shards,
        "rows": done.rows, "bytes to list a photo": listing,
        "rss after each shard, MiB": [round(value, 1) for value in watch.memory],
        "last beside a tenth of the way": watch.memory[-1] / watch.memory[len(watch.memory) // 10],
    }  # fmt: skip


def bytes_by_kind(photos: Path, root: Path) -> dict[str, Any]:
    """Bytes and cells a photo; how often int8 and half name the same nearest cell elsewhere."""
    model, sizes = DenseFeatures.from_pretrained(device="cpu"), {}
    kinds: tuple[Kind, ...] = ("int8", "half")
    for kind in kinds:
        for budget in (64, None):
            settings = CellSettings(kind=kind, budget=budget)
            out, spent = root / f"{kind} {budget}", time.process_time()
            done = write_cells(
                [photos], out, model=model, settings=settings, workers=1, device="cpu", quiet=True
            )
            sizes[f"{kind}, {budget or 'all'} cells"] = {
                "bytes a photo": done.bytes / done.photos, "cells a photo": done.rows / done.photos,
                "bytes a cell": done.bytes / done.rows,
                "processor seconds a photo": (time.process_time() - spent) / done.photos,
            }  # fmt: skip
    nearest = []
    for kind in kinds:
        (shard,) = read_cells(root / f"{kind} 64")
        scores = shard.unit_vectors() @ shard.unit_vectors().T
        scores[shard.photo[:, None] == shard.photo[None]] = -np.inf
        nearest.append(scores.argmax(1))
    sizes["same nearest cell by int8 and half"] = float((nearest[0] == nearest[1]).mean())
    return sizes


def decoding(photos: Path) -> float:
    """Processor seconds to read a photo and bring it to the network's size."""
    files, start = sorted(photos.iterdir()), time.process_time()
    for file in files:
        prepare(file, longest_side=320, multiple=16)
    return (time.process_time() - start) / len(files)


def on_paper(metrics: dict[str, Any]) -> dict[str, float]:
    """Ten million photos, from what was measured here."""
    spent = metrics["bytes"]["int8, 64 cells"]["processor seconds a photo"]
    sizes = {
        f"terabytes, {name}": MILLIONS * row["bytes a photo"] / 1e12
        for name, row in metrics["bytes"].items()
        if isinstance(row, dict)
    }
    return {
        "photos": MILLIONS,
        "core hours": MILLIONS * spent / 3600,
        "core hours of it to decode": MILLIONS
        * metrics["bytes"]["decoding, processor seconds a photo"]
        / 3600,
        "gigabytes to list them": MILLIONS * metrics["many"]["bytes to list a photo"] / 1e9,
        "shards of 256": MILLIONS / 256,
    } | sizes


def photos_of(part: str, options: Any) -> int:
    """How many photos a part looks at."""
    if part.startswith("many"):
        return int(options.many)
    return int(options.count) if part in ("routes", "paired") else int(options.count) // 3


def measured(part: str, listed: list[Path], root: Path, options: Any) -> dict[str, Any]:
    """One part of the benchmark."""
    count = min(len(listed), photos_of(part, options))
    some = root / "some"
    some.mkdir()
    if part == "many":
        return many(root, count=options.many, engine="here")
    for path in listed[:: max(1, len(listed) // count)][:count]:
        shutil.copy2(path, some / path.name)
    if part == "bytes":
        return bytes_by_kind(some, root) | {"decoding, processor seconds a photo": decoding(some)}
    started = {"seconds to start Ray": start_ray(2)}
    if part == "many on Ray":
        return many(root, count=options.many, engine="ray")
    if part == "paired":
        return paired(some, root)
    done = routes(some, root, repeats=options.repeats)
    return started | done | {"one worker killed": killed(some, root)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--part", choices=PARTS, help="this one alone, beside what OUT has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    listed = sorted(path for path in options.photos.iterdir() if path.is_file())
    known = json.loads(options.out.read_text()) if options.part and options.out.exists() else {}
    now = environment("cpu")
    if known and known["commit"] != now["commit"]:
        raise SystemExit(f"{options.out} is of another commit; measure all parts anew")
    metrics: dict[str, Any] = known.get("metrics", {})
    for part in [options.part] if options.part else PARTS:
        with tempfile.TemporaryDirectory() as folder:
            metrics[part] = measured(part, listed, Path(folder), options)
        print(part, metrics[part], flush=True)
    if {"bytes", "many"} <= metrics.keys():
        metrics["ten million photos, on paper"] = on_paper(metrics)
    photos = known.get("config", {}).get("photos", {}) | {
        part: photos_of(part, options) for part in ([options.part] if options.part else PARTS)
    }
    config = {
        "routes": asdict(SETTINGS), "photos": photos, "repeats": options.repeats,
        "source": options.photos.name, "threads a worker": 1, "device": "cpu",
        "many": {"model": asdict(SMALL), "budget": 16, "distinct files": DISTINCT},
    }  # fmt: skip
    record = {
        "row": "shards", "benchmark": "shards of cells, one process and Ray", "split": "none",
        "metrics": metrics, "config": config,
        "weights_sha256": file_hash(model_folder(None) / WEIGHTS),
    }  # fmt: skip
    write_json(options.out, record | now)


if __name__ == "__main__":
    main()

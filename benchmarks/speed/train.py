"""How fast `pretrain` is, end to end and stage by stage; writes results/speed/train.json.

    python benchmarks/speed/train.py IMAGES --init WEIGHTS --out results/speed/train.json

Every row trains with `surefeat.pretrain` itself and reads the speed from its metrics.jsonl: the
median of the log lines after the first, so that compilation and cuDNN's search are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.data.decode import Batches, Part, decode_all
from surefeat.data.sources import find_images
from surefeat.learn.config import Config, preset
from surefeat.learn.loop import descend, fast_arithmetic, make_optimiser
from surefeat.learn.loss import PairLoss, compiles, make_step, pair_loss, step_draws
from surefeat.learn.pretrain import pretrain
from surefeat.learn.warp import Views, corresponding_points, two_views
from surefeat.model.network import DenseFeatures


def settings(trained: str, *, compiled: bool, steps: int, batch: int) -> Config:
    ours = preset("ours")
    return replace(
        ours,
        train=replace(
            ours.train,
            trained=trained,
            compile="on" if compiled else "off",
            steps=steps,
            batch=batch,
            log_every=max(1, steps // 10),
            checkpoint_every=10**9,
            decay="constant",
        ),
        data=replace(ours.data, held_out=0),
    )


def end_to_end(images: Path, init: str, config: Config) -> dict[str, Any]:
    """Train a little; -> median pairs/s of the log lines after the first, peak memory."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        pretrain(images, out=run, config=config, init=init, quiet=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The first line holds start-up; the second may hold the end of sigma's warm-up.
    speeds = [row["pairs_per_s"] for row in rows[2:]]
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "pairs_per_s": statistics.median(speeds),
        "slowest_line": min(speeds),
        "peak_memory_gib": memory,
        "first_line_s": rows[0]["seconds"],
    }


def stages(images: Path, init: str, config: Config, *, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step; what loading, warping and colour add to it; and its kernels.

    The share is (whole step - step on views rendered beforehand) / whole step: what a user would
    gain if images came for free.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DenseFeatures.create(config.model, init=init).to(device)
    model.set_trained(config.train.trained)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    canvas = decode_all(find_images(images), side=config.data.side, workers=8)
    batches = Batches(canvas, device=device, memory="device")
    rates = [(model.head.parameters(), 1e-3), (model.trunk.parameters(), 1e-4)]
    optimiser = make_optimiser(config.train.optimiser, rates, weight_decay=5e-4)
    hold = torch.zeros((), dtype=torch.bool, device=device)
    feed = batches.iterate(range(10**6), batch=config.train.batch, seed=0, part=Part())
    step, fixed_step = make_step(model, config, device), make_fixed_step(model, config)
    pixels, sizes = next(feed)
    draws = step_draws(1, config, device)
    views = two_views(pixels, sizes, draws, config.warp, config.colour)
    points = corresponding_points(views, draws, count=config.loss.points)

    def whole() -> None:
        loss, _ = step(*next(feed), step_draws(1, config, device), hold)
        descend(optimiser, loss.total, factor=1.0, clip=config.train.clip)

    def fixed() -> None:
        loss = fixed_step(views, points, hold).total
        descend(optimiser, loss, factor=1.0, clip=config.train.clip)

    with fast_arithmetic(enabled=True):
        found: dict[str, Any] = {"whole_step_ms": timed(whole, repeats)}
        found["step_on_given_views_ms"] = timed(fixed, repeats)
        if device.type == "cuda":
            found["profile"] = profile(whole)
    found["loading_share"] = 1 - found["step_on_given_views_ms"] / found["whole_step_ms"]
    return found


def make_fixed_step(model: DenseFeatures, config: Config) -> Any:
    """The step without its first two lines: views and points are given."""

    def step(views: Views, points: Any, hold: torch.Tensor) -> PairLoss:
        points0, points1, valid = points
        both = torch.cat([views.view0, views.view1])
        if both.device.type == "cuda":
            both = both.contiguous(memory_format=torch.channels_last)
        with torch.autocast(both.device.type, torch.bfloat16, enabled=both.device.type == "cuda"):
            maps = model(both)
        descriptors, sigma = maps.at(torch.cat([points0, points1]))
        (first, second), (sigma0, sigma1) = descriptors.chunk(2), sigma.chunk(2)
        return pair_loss(
            first, second, sigma0, sigma1, points1, config.loss, hold_sigma=hold, valid=valid
        )

    if not compiles(config.train, model.device):
        return step
    return torch.compile(step, dynamic=False, mode="reduce-overhead")


def timed(work: Any, repeats: int) -> float:
    """Median milliseconds of `work` over batches of calls, device synchronised."""
    import time

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(5):
        work()
    spans = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        spans.append((time.perf_counter() - start) / repeats * 1000)
    return statistics.median(spans)


def profile(work: Any, steps: int = 5) -> list[dict[str, Any]]:
    """The twenty kernels that take most of a step: name, ms per step, share."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            work()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / 1000 / steps) for e in trace.key_averages()]
    total = sum(time for _, time in rows)
    rows.sort(key=lambda row: -row[1])
    return [
        {"kernel": name[:120], "ms": round(ms, 3), "share": round(ms / total, 4)}
        for name, ms in rows[:20]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("--init", default="none")
    parser.add_argument("--out", type=Path, default=Path("results/speed/train.json"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", nargs="*", default=["last", "last+compile", "all", "all+compile"])
    args = parser.parse_args()
    metrics: dict[str, Any] = {}
    for row in args.rows:
        trained, _, compiled = row.partition("+")
        config = settings(trained, compiled=bool(compiled), steps=args.steps, batch=args.batch)
        metrics[row] = end_to_end(args.images, args.init, config)
        metrics[row] |= stages(args.images, args.init, config, repeats=args.repeats)
        shown = {k: v for k, v in metrics[row].items() if k != "profile"}
        print(row, json.dumps(shown), flush=True)
        torch._dynamo.reset()
    config = settings("last", compiled=False, steps=args.steps, batch=args.batch)
    about = environment(choose_device(None))
    write_json(args.out, {
        "row": "pretrain", "benchmark": "train-speed", "split": "none", "metrics": metrics,
        "config": {"size": config.warp.size, "batch": args.batch, "trunk": "resnet50",
                   "points": config.loss.points, "steps": args.steps},
        "weights_sha256": file_hash(Path(args.init)) if Path(args.init).is_file() else None,
        **about,
    })  # fmt: skip
    print("wrote", args.out)


if __name__ == "__main__":
    main()

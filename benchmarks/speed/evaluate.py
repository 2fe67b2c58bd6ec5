"""Time per stage of `surefeat evaluate` on a few pairs, and what a whole benchmark will take.

    python benchmarks/speed/evaluate.py PF-PASCAL --proposals FILE --rows ours res4c --init WEIGHTS

Pairs come from the val list. Each measure is timed by itself on pictures whose features are
there, so a route's time holds all it needs: flow the region matches, voting the similarities.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefeat.core.files import choose_device, environment, write_json
from surefeat.data.benchmarks import load_benchmark
from surefeat.measure.evaluate import some_pairs
from surefeat.measure.matching import measure
from surefeat.measure.material import FeatureStore, Material, prepare_material
from surefeat.measure.protocol import MEASURES, Protocol
from surefeat.measure.rows import Row, build_row

TEST_PAIRS, TEST_IMAGES = 299, 506  # of PF-PASCAL


def seconds(task: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def stages(row: Row, material: Material, device: torch.device) -> dict[str, float]:
    """Seconds per image of features, and per pair of every measure; the first pair warms up."""
    store = FeatureStore(row, material.pictures, material.protocol, device=device, limit=8 << 30)

    def features() -> None:
        for key in material.pictures:
            store[key]

    found = {"features, per image": seconds(features, device) / len(material.pictures)}
    for name in MEASURES:
        cases = [replace(case, measures=(name,)) for case in material.cases]

        def task(cases: list[Any] = cases) -> None:
            measure(cases, row, store, material.pictures, material.protocol)

        measure(cases[:1], row, store, material.pictures, material.protocol)
        found[f"{name}, per pair"] = seconds(task, device) / len(cases)
    plain = sum(found[f"{name}, per pair"] for name in ("nearest", "voting", "location", "flow"))
    again = plain - found["flow, per pair"] + found["regions, per pair"]
    found["PF-PASCAL test, estimated"] = (
        TEST_PAIRS * plain + TEST_IMAGES * found["features, per image"]
    )
    # Half of the pictures, the targets, come once more.
    found["the shifted control, estimated"] = (
        TEST_PAIRS * again + TEST_IMAGES / 2 * found["features, per image"]
    )
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--proposals", type=Path, default=Path("results/cache/timing.safetensors"))
    parser.add_argument("--rows", nargs="*", default=["ours"])
    parser.add_argument("--model")
    parser.add_argument("--init", nargs="*", default=["imagenet"])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("results/speed/evaluate.json"))
    args = parser.parse_args()
    device = choose_device(None)
    benchmark = some_pairs(load_benchmark("pf-pascal", args.data, split="val"), args.pairs)
    material = prepare_material(
        benchmark, Protocol(shifted_measures=()), proposals=args.proposals, quiet=True
    )
    metrics, digests = {}, {}
    for name in args.rows:
        row = build_row(name, model=args.model, init=args.init, device=device)
        metrics[row.name] = stages(row, material, device)
        digests[row.name] = row.weights_sha256
        print(row.name, metrics[row.name])
    write_json(args.out, {
        "row": "surefeat evaluate, seconds per stage", "benchmark": "pf-pascal",
        "split": benchmark.split, "metrics": metrics,
        "config": {"side": 224, "proposals": 1000, "threads": torch.get_num_threads()},
        "weights_sha256": digests, **environment(device),
    })  # fmt: skip


if __name__ == "__main__":
    main()

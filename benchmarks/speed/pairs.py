"""What a pair costs by each way of matching, ours and the peers' in one run: speed/pairs.json.

    python benchmarks/speed/pairs.py PF-PASCAL --proposals FILE --init WEIGHTS... --out FILE.json
        --rows gcnn=FOLDER scnet-a=FOLDER hog-nam=FOLDER ... [--pairs 3]

From pixels to keypoints, features of both photos included, proposals not (they are made once).
Processor seconds on a CPU, which other work on the machine does not change; on a GPU wall time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from surefeat.core.files import choose_device, environment, write_json
from surefeat.data.benchmarks import load_benchmark
from surefeat.measure.evaluate import some_pairs
from surefeat.measure.matching import measure
from surefeat.measure.material import FeatureStore, memory_for_features, prepare_material
from surefeat.measure.protocol import Measure, Protocol
from surefeat.measure.rows import Row, build_row
from surefeat.peers.rows import peer_row

OURS: dict[str, tuple[str, tuple[Measure, ...], tuple[int, ...]]] = {
    "ours, voting, 320 px": ("ours", ("voting",), (320,)),
    "ours, regions and flow": ("ours", ("flow",), ()),
    "VGG16, regions and flow": ("vgg16", ("flow",), ()),
    "Hyperpixel Flow": ("hyperpixel-flow", ("own",), ()),
}
"""Title -> row, how it is asked, and at which sizes it sees the photos."""


def cost(row: Row, protocol: Protocol, options: argparse.Namespace, device: torch.device) -> float:
    """Seconds of a pair."""
    benchmark = some_pairs(load_benchmark("pf-pascal", options.data), options.pairs + 1)
    material = prepare_material(benchmark, protocol, proposals=options.proposals, quiet=True)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    limit, start = memory_for_features(device), 0.0
    # The first pair warms up.
    for cases in (material.cases[:1], material.cases[1:]):
        keys = {key for case in cases for key in case.keys}
        seen = {key: pixels for key, pixels in material.pictures.items() if key in keys}
        store = FeatureStore(row, seen, protocol, device=device, limit=limit)
        start = clock()
        measure(cases, row, store, material.pictures, protocol, material.originals)
    return (clock() - start) / options.pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", nargs="*", default=[], help="trained peers, NAME=FOLDER")
    parser.add_argument("--init", nargs="+", default=["imagenet"])
    parser.add_argument("--proposals", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = choose_device(None)
    asked = dict(OURS)
    for name in options.rows:
        title = name.partition("=")[0]
        own: Measure = "own" if title.startswith("gcnn") else "flow"
        asked[title] = (name, (own,), ())
    found: dict[str, Any] = {}
    for title, (name, measures, inputs) in asked.items():
        row = peer_row(name, init=options.init, device=device)
        row = row or build_row(name, init=options.init, device=device)
        protocol = Protocol(measures=measures, shifted_measures=(), inputs=inputs)
        found[title] = {"seconds": round(cost(row, protocol, options, device), 3)}
        first = next(iter(found.values()))["seconds"]
        found[title]["times the first"] = round(found[title]["seconds"] / first, 2)
        print(title, found[title], flush=True)
    result = {
        "row": "a pair from pixels to keypoints", "benchmark": "pf-pascal", "split": "test",
        "metrics": found, "weights_sha256": None, **environment(device),
        "config": {"pairs": options.pairs, "threads": torch.get_num_threads()},
    }  # fmt: skip
    write_json(options.out, result)


if __name__ == "__main__":
    main()

"""The search for wide voting: settings of the vote at several input sizes, on development pairs.

    python benchmarks/experiments/votes.py PF-PASCAL --out results/studies/votes_search.json

All val pairs and every second train pair that are free of test images, with the ResNet-50 that
ships. Every setting is compared with the default at the same sizes, pair by pair.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import environment, write_json
from surefeat.data.benchmarks import SCNET_SIDE, Benchmark, load_benchmark
from surefeat.match.search import WIDE_VOTING, Side, Votes, Voting, even_grid, find, prepare, vote
from surefeat.measure.material import Case, FeatureStore, memory_for_features, prepare_material
from surefeat.measure.protocol import Protocol
from surefeat.measure.rows import Row, model_row

SETTINGS: dict[str, Voting] = {
    "default": Voting(),
    "wide": WIDE_VOTING,
    "temperature 0.03": Voting(temperature=0.03),
    "temperature 0.07": Voting(temperature=0.07),
    "reach 40/224": Voting(reach=40 / 224),
    "reach 80/224": Voting(reach=80 / 224),
    "weight 0.2": Voting(weight=0.2),
    "blur 2": Voting(blur=2.0),
    "blur 4, weight 0.25": Voting(blur=4.0, weight=0.25),
    "default, votes weighted by confidence": Voting(),
    "wide, votes weighted by confidence": WIDE_VOTING,
}
ASKED: dict[tuple[int, ...], Sequence[str]] = {
    (224, 320): tuple(SETTINGS),
    (224,): ("default", "wide"),
}
"""Input sizes -> what is tried at them."""


def development(data: Path, every: int) -> Benchmark:
    """Val pairs and every n-th train pair, none of which shares an image with the test list."""
    val, train = (load_benchmark("pf-pascal", data, split=split) for split in ("val", "train"))
    return Benchmark("pf-pascal", f"val and 1/{every} of train", val.pairs + train.pairs[::every])


def cast(side0: Side, side1: Side, name: str) -> Votes:
    """The votes of image 0; weighted by confidence, each cell's count by it."""
    votes = vote(side0, side1, SETTINGS[name])
    if "confidence" not in name:
        return votes
    cells = votes.histograms.shape[:2]
    places = even_grid(side0.features, size=(cells[0], cells[1]))
    sure = side0.features.confidence_at(places).reshape(*cells, 1, 1)
    return replace(votes, histograms=votes.histograms * sure)


def right(found: Tensor, case: Case) -> float:
    """Percentage of a pair's keypoints that are right, PCK@0.1 by the scnet rule."""
    truth = case.frame(SCNET_SIDE, 1).to_network(case.pair.common()[1])
    return 100 * float(((found - truth).norm(dim=1) < 0.1 * SCNET_SIDE).float().mean())


def shares_at(sizes: tuple[int, ...], row: Row, benchmark: Benchmark) -> dict[str, list[float]]:
    """Setting -> the share of right keypoints of every pair."""
    protocol = Protocol(inputs=sizes, measures=("voting",), shifted_measures=())
    material = prepare_material(benchmark, protocol, proposals=Path("none"), quiet=True)
    device = torch.device("cpu")
    limit = memory_for_features(device)
    store = FeatureStore(row, material.pictures, protocol, device=device, limit=limit)
    weights = {"descriptor_weight": row.descriptor_weight, "lower_weight": row.lower_weight}
    shares: dict[str, list[float]] = {name: [] for name in ASKED[sizes]}
    for case in tqdm(material.cases, desc="+".join(map(str, sizes))):
        side0, side1 = (prepare(store[key], **weights) for key in case.keys)
        points0 = case.frame(SCNET_SIDE, 0).to_network(case.pair.common()[0])
        for name, kept in shares.items():
            votes = cast(side0, side1, name)
            kept.append(right(find(side0, side1, points0, votes, refine=True).points, case))
    return shares


def summary(shares: dict[str, list[float]], val: int) -> dict[str, Any]:
    """Means over val, train and all pairs, and the paired difference to the default."""
    found = {}
    for name, values in shares.items():
        gains = [a - b for a, b in zip(values, shares["default"], strict=True)]
        found[name] = {
            "val": mean(values[:val]), "train": mean(values[val:]), "all": mean(values),
            "gain": mean(gains), "its standard error": stdev(gains) / len(gains) ** 0.5,
        }  # fmt: skip
    return {k: {key: round(v, 2) for key, v in each.items()} for k, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=2, help="of the train pairs")
    options = parser.parse_args()
    benchmark = development(options.data, options.every)
    val = len(load_benchmark("pf-pascal", options.data, split="val").pairs)
    row = model_row("ours", None, device=torch.device("cpu"))
    metrics: dict[str, Any] = {}
    for sizes in ASKED:
        title = " + ".join(map(str, sizes)) + " px, voting pck@0.1 scnet"
        metrics[title] = summary(shares_at(sizes, row, benchmark), val)
        for name, found in metrics[title].items():
            print(f"{title}: {name}: {found}")
        result = {
            "row": "ours", "benchmark": "pf-pascal", "split": benchmark.split, "metrics": metrics,
            "config": {"settings": {k: repr(v) for k, v in SETTINGS.items()},
                       "pairs": {"val": val, "train": len(benchmark.pairs) - val}},
            "weights_sha256": row.weights_sha256, **environment("cpu"),
        }  # fmt: skip
        write_json(options.out, result)


if __name__ == "__main__":
    main()

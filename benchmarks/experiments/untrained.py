"""Why two untrained rows differ from the published numbers: one change at a time, with its noise.

    python benchmarks/experiments/untrained.py PF-PASCAL --proposals FILE
        --other-proposals FILE --init WEIGHTS

Keypoints by the paper's route (region matches -> dense flow -> SD filter) on val pairs that share
no image with test. Every change is paired with the setting that was measured, pair by pair, and
both the values and the differences get a bootstrap standard error over pairs. Those of the stored
results of the test list are added.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from untrained_changes import CHANGES, ONLY, SIDE, Change, Maps

from surefeat.core.files import choose_device, environment, write_json
from surefeat.core.image import resize
from surefeat.data.benchmarks import Benchmark, load_benchmark
from surefeat.match.config import ProposalConfig
from surefeat.match.dense import flow_from_regions, transfer_points
from surefeat.match.regions import POOLED, Pooled, region_scores
from surefeat.match.sd_filter import sd_filter
from surefeat.measure.evaluate import some_pairs
from surefeat.measure.matching import to_square
from surefeat.measure.material import (
    Case,
    FeatureStore,
    Material,
    memory_for_features,
    prepare_material,
)
from surefeat.measure.protocol import Protocol
from surefeat.measure.results import pck_score, read_result, resampled_means
from surefeat.measure.rows import (
    UNTRAINED,
    Row,
    as_features,
    at_size,
    imagenet_trunk,
    run_taps,
)
from surefeat.measure.tables import published
from surefeat.model.features import Features, bin_regions, pool_bins

ALPHA = 0.1
ROWS = {"vgg16": 57, "resnet50-hc": 29}
"""The rows that differ, and how many val pairs; the hypercolumn's 3584 channels take long."""


def network_row(name: str, maps: Maps, init: Sequence[str], device: torch.device) -> Row:
    """An untrained row, its layers brought to `maps.cells` cells a side."""
    which = UNTRAINED[name]
    layers, dilated = which.layers, maps.dilated or which.dilated
    trunk, digest = imagenet_trunk(which.trunk, init, device=device, dilated=dilated)

    def extract(images: Tensor) -> list[Features]:
        taps = run_taps(trunk, images, layers)
        parts = [F.normalize(taps[tap], dim=1) if maps.unit else taps[tap] for tap in layers]
        joined = torch.cat([at_size(part, maps.cells) for part in parts], dim=1)
        return as_features(joined, side=images.shape[-1], unit=maps.unit)

    return Row(name, extract, weights_sha256=digest, unit=maps.unit)


def pool(features: Features, boxes: Tensor, maps: Maps) -> Pooled:
    """Boxes (N, 4) of the square, pooled as `maps` says."""
    if maps.edges == "fast-rcnn":
        cell = SIDE / maps.cells
        first = (boxes[:, :2] / cell).round() * cell
        last = ((boxes[:, 2:] / cell).round() + 1) * cell - 1
        boxes = torch.cat([first.clamp_max(SIDE - cell), last.clamp_max(SIDE - 1)], dim=1)
    cells = (features.descriptors.shape[1], features.descriptors.shape[2])
    index, bins = bin_regions(features, boxes, size=POOLED, cells=cells)
    return Pooled(pool_bins(features.descriptors, bins, maps.pooling), index)


def sparse_flows(
    case: Case, store: FeatureStore, changes: Sequence[Change]
) -> list[tuple[Tensor, Tensor]]:
    """Field (2, S, S) and mask (S, S) of one pair for changes that share their maps."""
    maps, size = changes[0].maps, (SIDE, SIDE)
    squares = (
        to_square(case.boxes0, case.frame(SIDE, 0)),
        to_square(case.boxes1, case.frame(SIDE, 1)),
    )
    pooled = [pool(store[key], each, maps) for key, each in zip(case.keys, squares, strict=True)]
    raw = region_scores(pooled[:1], pooled[1:], (1.0,), normalised=False)
    unit = raw / pooled[0].norms()[:, None] / pooled[1].norms()
    flows = []
    for change in changes:
        score, index = (each.cpu() for each in (unit if change.normalised else raw).max(1))
        share = (squares[0][:, 2:] - squares[0][:, :2] + 1).prod(1) / SIDE**2
        field, known = flow_from_regions(
            squares[0], squares[1][index], score / share**change.discount, size0=size, size1=size
        )
        flows.append((field.permute(2, 0, 1), known > 0))
    return flows


@torch.no_grad()
def shares(
    material: Material, row: Row, changes: Sequence[Change], device: torch.device
) -> list[list[float]]:
    """PCK@0.1 (scnet, percent) of every pair, for each of the changes."""
    limit = memory_for_features(device)
    store = FeatureStore(row, material.pictures, material.protocol, device=device, limit=limit)
    flows = [sparse_flows(case, store, changes) for case in material.cases]
    guides = torch.stack([material.pictures[case.keys[0]] for case in material.cases])
    guides = resize(guides, size=(SIDE, SIDE)).to(device)
    found = []
    for number, change in enumerate(changes):
        fields, masks = (
            torch.stack(each) for each in zip(*(flow[number] for flow in flows), strict=True)
        )
        if change.smooth:
            fields = sd_filter(fields.to(device), masks.to(device), guides).cpu()
        found.append([
            100 * right(field.permute(1, 2, 0), case)
            for field, case in zip(fields, material.cases, strict=True)
        ])  # fmt: skip
    return found


def right(field: Tensor, case: Case) -> float:
    """Share of the pair's keypoints that a field (S, S, 2) moves to within ALPHA of the square."""
    points0, points1 = case.pair.common()
    moved = transfer_points(field, case.frame(SIDE, 0).to_network(points0))
    error = (moved - case.frame(SIDE, 1).to_network(points1)).norm(dim=1)
    return float((error < ALPHA * SIDE).double().mean())


def measure_row(name: str, benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    """Every change of one row: its mean, and the difference to what was measured."""
    wanted = {key: value for key, value in CHANGES.items() if ONLY.get(key, name) == name}
    found: dict[str, list[float]] = {}
    for maps in dict.fromkeys(change.maps for change in wanted.values()):
        start = time.perf_counter()
        protocol = Protocol(
            measures=("flow",), shifted_measures=(), inputs=(maps.seen,),
            proposals=ProposalConfig(seed=maps.seed),
        )  # fmt: skip
        file = options.proposals if not maps.seed else options.other_proposals
        material = prepare_material(benchmark, protocol, proposals=file, quiet=True)
        device = choose_device(None)
        row = network_row(name, maps, options.init, device)
        titles = [title for title, change in wanted.items() if change.maps == maps]
        values = shares(material, row, [wanted[title] for title in titles], device)
        found |= dict(zip(titles, values, strict=True))
        for title in titles:
            mean = sum(found[title]) / len(found[title])
            print(f"{name}, {title}: {mean:.1f} ({time.perf_counter() - start:.0f} s)", flush=True)
    base = found["as measured"]
    return {"pairs": len(base), "weights_sha256": row.weights_sha256, "changes": {
        title: with_errors(found[title], base) for title in wanted
    }}  # fmt: skip


def with_errors(values: Sequence[float], base: Sequence[float] | None = None) -> dict[str, float]:
    """Mean, bootstrap standard error over pairs, and both of the paired difference to `base`."""
    result = dict(zip(("pck", "error"), _mean_and_error(values), strict=True))
    if base is not None and base is not values:
        change = [a - b for a, b in zip(values, base, strict=True)]
        result |= dict(zip(("change", "change_error"), _mean_and_error(change), strict=True))
    return {key: round(value, 2) for key, value in result.items()}


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    listed = torch.tensor(values, dtype=torch.float64)
    drawn = resampled_means(listed, generator=torch.Generator().manual_seed(0))
    return float(listed.mean()), float(drawn.std())


def stored(folder: Path) -> dict[str, Any]:
    """Test values of the two rows with standard errors, from the values kept per pair."""
    found = {}
    for name in ROWS:
        pairs = read_result(folder / f"pf-pascal-test-{name}.json")["pairs"]
        routes = {
            route: [v for v in pairs[f"{route} pck@0.1 scnet"] if v is not None]
            for route in ("flow", "small-first")  # of earlier result files
            if f"{route} pck@0.1 scnet" in pairs
        }
        found[name] = {"published": published(name, "pf-pascal", pck_score("flow", "scnet"))} | {
            route: with_errors(values, routes["flow"]) for route, values in routes.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--proposals", type=Path, required=True, help="those of seed 0")
    parser.add_argument("--other-proposals", type=Path, required=True, help="those of seed 1")
    parser.add_argument("--init", nargs="+", default=["imagenet"])
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=tuple(ROWS))
    parser.add_argument("--pairs", type=int, help="val pairs of each row; 57 of VGG16, 29 of HC")
    parser.add_argument("--results", type=Path, default=Path("results/first/pf-pascal"))
    parser.add_argument(
        "--out", type=Path, default=Path("results/studies/untrained_differences.json")
    )
    options = parser.parse_args()
    whole = load_benchmark("pf-pascal", options.data, split="val")
    for name in options.rows:
        part = some_pairs(whole, options.pairs or ROWS[name])
        measured = measure_row(name, part, options)
        # The other row stays as it was measured before.
        old = read_result(options.out) if options.out.is_file() else {}
        digests = dict(old.get("weights_sha256", {})) | {name: measured.pop("weights_sha256")}
        val = dict(old.get("metrics", {}).get("val", {})) | {name: measured}
        write_json(options.out, {
            "row": "untrained rows under one change at a time", "benchmark": "pf-pascal",
            "split": "val, pairs spread evenly over 171; test as stored",
            "metrics": {"val": val, "test": stored(options.results)},
            "config": {title: asdict(change) for title, change in CHANGES.items()},
            "weights_sha256": digests, **environment(choose_device(None)),
        })  # fmt: skip


if __name__ == "__main__":
    main()

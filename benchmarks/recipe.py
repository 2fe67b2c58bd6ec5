"""The search for the recipe: train variants, measure each on pairs that are free of test images.

    python benchmarks/recipe.py train NAME... --images SHARDS --keep LIST --init WEIGHTS --out DIR
    python benchmarks/recipe.py rows NAME... --recipe VARIANT (the rest as above)
    python benchmarks/recipe.py measure MODEL... --data PF-PASCAL --proposals FILE --out FILE.json

Variants are the lines of VARIANTS, ways of matching those of WAYS, and the rows of the results
table that are trained those of ROWS, each with the recipe found. Nothing here sees a test pair.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefeat.baselines.known import build_row
from surefeat.baselines.networks import hypercolumn_row, model_row, tap_row
from surefeat.baselines.rows import Row
from surefeat.config import Config, from_dict, preset, to_dict
from surefeat.data.pascal3d import CLASSES
from surefeat.device import choose_device
from surefeat.eval.benchmarks import load_benchmark
from surefeat.eval.matching import measure
from surefeat.eval.material import prepare_material
from surefeat.eval.protocol import Protocol
from surefeat.eval.results import result_of
from surefeat.eval.run import some_pairs
from surefeat.eval.store import FeatureStore, memory_for_features
from surefeat.pretraining import pretrain
from surefeat.runs import environment, write_json
from surefeat.voting import Voting

AT_224: dict[str, Any] = {
    "warp.size": 224, "data.side": 256, "loss.ignore_radius": 30.0, "train.steps": 1000,
    "train.decay": "cosine",
}  # fmt: skip
"""What the search began with."""
SHORT = {"train.steps": 500, "train.decay": "constant"}
WIDE = {
    "warp.rotation": 30.0, "warp.linear": 0.5, "warp.translation": 0.5, "warp.zoom": (9 / 8, 9 / 8),
}  # fmt: skip
"""The paper's warps."""
WHOLE = AT_224 | {"train.trained": "all", "train.steps": 3000}

VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "base": AT_224,
    "seed1": AT_224 | {"train.seed": 1},
    "short": AT_224 | SHORT | {"train.batch": 32},
    "zoom-in": AT_224 | {"warp.zoom": (0.5, 1.0)},
    "zoom-wide": AT_224 | {"warp.zoom": (0.5, 1.5)},
    "soft": AT_224 | {"warp.rotation": 8.0, "warp.linear": 0.1, "warp.translation": 0.15},
    "hard": AT_224 | {"warp.rotation": 30.0, "warp.linear": 0.35},
    "view-320": {"train.steps": 1000, "train.decay": "cosine"},
    "view-320-short": SHORT | {"train.batch": 32},
    "channels-256": {"model.channels": 256},
    "ignore-20": {"loss.ignore_radius": 20.0},
    "negatives-100": {"loss.negatives": 100},
    "colour-1": {"colour.strength": 1.0},
    "lr-3e-5": {"train.lr": 3e-5},
    "lr-3e-4": {"train.lr": 3e-4},
    "adagrad": {"train.optimiser": "adagrad", "train.lr": 1e-3},
    "mirror": {"warp.mirror": True},
    "view-384": {"warp.size": 384, "data.side": 448, "loss.ignore_radius": 51.0},
    "boxes": {"images": "boxes"},
    "boxes-96": {"images": "boxes", "min_side": 96},
    "boxes-224": AT_224 | SHORT | {"images": "boxes"},
    "all20": {"images": "all"},
    "occluders": {"warp.occluders": 1.0},
    "occluders-without-confidence": {"warp.occluders": 1.0, "loss.kind": "plain"},
    "wide": WIDE,
    "wide-without-confidence": WIDE | {"loss.kind": "plain"},
    "whole-trunk": WHOLE,
    "whole-trunk-without-confidence": WHOLE | {"loss.kind": "plain"},
    "vgg16": {"images": "all", "model.trunk": "vgg16"},
    "vgg16-head": {"images": "all", "model.trunk": "vgg16", "train.trained": "head"},
    "vgg16-conv5": {"images": "all", "model.trunk": "vgg16-conv5"},
}
"""Name -> what differs from the preset `ours`. images: whole photos of 12 classes, true or weak
boxes, or photos of all classes; min_side: of boxes, as in `find_images`."""

PAPER_WARMED: dict[str, Any] = {
    "preset": "paper", "train.steps": 2000, "loss.sigma_warmup": 1000, "train.lr_warmup": 500,
}  # fmt: skip
PAPER_SLOW = PAPER_WARMED | {"train.lr": 1e-4}
"""The rate rises for 500 steps; and the trunk's is a tenth of what is printed."""

ROWS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-seed1": {"train.seed": 1},
    "ours-seed2": {"train.seed": 2},
    "without-confidence": {"loss.kind": "plain"},
    "without-confidence-seed1": {"loss.kind": "plain", "train.seed": 1},
    "without-confidence-seed2": {"loss.kind": "plain", "train.seed": 2},
    "contrastive": {"loss.kind": "contrastive"},
    "gtbox": {"images": "boxes"},
    "gtbox-seed1": {"images": "boxes", "train.seed": 1},
    "gtbox-seed2": {"images": "boxes", "train.seed": 2},
    "weakbox": {"images": "weak"},
    "weakbox-seed1": {"images": "weak", "train.seed": 1},
    "weakbox-seed2": {"images": "weak", "train.seed": 2},
    "nonrigid": {"images": "all"},
    "vgg16-ours": {"images": "all", "model.trunk": "vgg16-conv5"},
    "paper-as-printed": {"preset": "paper", "train.steps": 2000},
    "paper": {"preset": "paper", "train.steps": 2000, "loss.sigma_warmup": 1000},
    "paper-without-confidence": {"preset": "paper", "train.steps": 2000, "loss.kind": "plain"},
    "paper-warmed": PAPER_WARMED,
    "paper-warmed-without-confidence": PAPER_WARMED | {"loss.kind": "plain"},
    "paper-slow": PAPER_SLOW,
    "paper-slow-without-confidence": PAPER_SLOW | {"loss.kind": "plain"},
}
"""Row -> what differs from the recipe, or from a preset."""

Way = tuple[dict[str, Any], dict[str, Any]]
WAYS: dict[str, Way] = {
    "phi": ({"lower_weight": 0.0}, {}),
    "1:1": ({"descriptor_weight": 1.0}, {}),
    "1/2:1": ({}, {}),
    "as_it_is": ({}, {}),
    "cells_14": ({}, {"pooled_cells": 14}),
    "2:1": ({"descriptor_weight": 2.0}, {}),
    "res4d": ({"descriptor_weight": 1.0, "tap": "res4d"}, {}),
    "res4f": ({"descriptor_weight": 1.0, "tap": "res4f"}, {}),
    "unsure": ({"descriptor_weight": 1.0, "confidence": False}, {}),
    "regions_2:1": ({"descriptor_weight": 1.0, "region_weights": (2.0, 1.0)}, {}),
    "regions_1:2": ({"descriptor_weight": 1.0, "region_weights": (1.0, 2.0)}, {}),
    "mean_1:2": ({"mean_weights": (1.0, 2.0)}, {}),
    "unsure_1/2:1": ({"confidence": False}, {}),
    "cells_56": ({"descriptor_weight": 1.0}, {"pooled_cells": 56}),
    "cells_56_448": ({"descriptor_weight": 1.0}, {"pooled_cells": 56, "inputs": (448,)}),
    "pool3": ({"tap": "pool3"}, {}),
    "320": ({"descriptor_weight": 1.0}, {"inputs": (320,)}),
    "448": ({"descriptor_weight": 1.0}, {"inputs": (448,)}),
    "224+320": ({}, {"inputs": (224, 320)}),
    "224+448": ({"descriptor_weight": 1.0}, {"inputs": (224, 448)}),
    "320+448": ({"descriptor_weight": 1.0}, {"inputs": (320, 448)}),
}
"""Name -> what differs in the row, and in the protocol."""


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """A config with some settings, by dotted name, replaced."""
    values = to_dict(config)
    for name, value in changes.items():
        group, field = name.split(".")
        if field not in values[group]:
            raise KeyError(name)
        values[group][field] = value
    return from_dict(Config, values)  # type: ignore[no-any-return]


def without(keep: Path, left_out: Path | None, file: Path) -> Path:
    """The list `keep` without the images of a benchmark's COCO json, written to `file`."""
    if left_out is None:
        return keep
    seen = {Path(image["file_name"]).stem for image in json.loads(left_out.read_text())["images"]}
    names = [name for name in keep.read_text().split() if Path(name).stem not in seen]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(names) + "\n")
    return file


def train(names: Sequence[str], options: argparse.Namespace) -> None:
    for name in names:
        start = time.perf_counter()
        changes = VARIANTS[name] if options.task == "train" else ROWS[name]
        if options.task == "rows" and "preset" not in changes:
            changes = VARIANTS[options.recipe] | changes
        kind, base = changes.get("images", "whole"), preset(changes.get("preset", "ours"))
        find: dict[str, Any] = {k: v for k, v in changes.items() if k == "min_side"}
        crop = {"boxes": options.crop, "weak": options.weak}.get(kind)
        if kind in ("boxes", "weak") and crop is None:
            raise SystemExit(f"{name} needs --{'crop' if kind == 'boxes' else 'weak'}")
        if kind == "boxes":
            find["categories"] = CLASSES
        changes = {k: v for k, v in changes.items() if "." in k}
        config = changed(base, {"train.checkpoint_every": 10**9, "train.compile": "off"} | changes)
        if options.steps is not None:
            config = replace(config, train=replace(config.train, steps=options.steps))
        keep = options.keep_all if kind == "all" else options.keep
        init = next(path for path in options.init if config.model.trunk[:3] in Path(path).name)
        pretrain(
            options.images, out=options.out / name, config=config, init=init, quiet=True,
            keep=without(keep, options.without, options.out / f"{name}.txt"),
            crop=crop, **find,
        )  # fmt: skip
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


def measure_way(row: Row, protocol: Protocol, options: argparse.Namespace) -> dict[str, float]:
    """All metrics of one row under one protocol, on development pairs."""
    benchmark = load_benchmark("pf-pascal", options.data, split=options.split)
    if options.pairs:
        benchmark = some_pairs(benchmark, options.pairs)
    material = prepare_material(benchmark, protocol, proposals=options.proposals, quiet=True)
    device = choose_device(None)
    store = FeatureStore(
        row, material.pictures, protocol, device=device, limit=memory_for_features(device)
    )
    records = []
    for start in range(0, len(material.cases), 64):
        cases = material.cases[start : start + 64]
        records += measure(cases, row, store, material.pictures, protocol)
    return result_of(records, material, rated=row.confidence)["metrics"]  # type: ignore[no-any-return]


def untrained(name: str, init: Sequence[str], device: torch.device) -> Row:
    """A known row; NAME-raw keeps the lengths that the network gives its features."""
    if not name.endswith("-raw"):
        return build_row(name, init=init, device=device)
    if name == "resnet50-hc-raw":
        return hypercolumn_row(name, init=init, device=device, unit=False)
    tap = {"vgg16-raw": "pool4", "res4c-raw": "res4c"}[name]
    return tap_row(name, tap, init=init, device=device, unit=False)


def measure_all(models: Sequence[str], options: argparse.Namespace) -> None:
    device, found = choose_device(None), {}
    protocol = Protocol(
        measures=tuple(options.measures), shifted_measures=tuple(options.shifted),
        voting=Voting(blur=options.blur, temperature=options.temperature),
    )  # fmt: skip
    for name in models:
        title, trained, folder = name.partition("=")
        for way in options.ways:
            differs, asked = dict(WAYS[way][0]), replace(protocol, **WAYS[way][1])
            tap = differs.pop("tap", None)
            if trained:
                row = replace(model_row(title, folder, device=device, lower=tap), **differs)
            else:
                row = untrained(title, options.init, device)
            metrics = measure_way(row, asked, options)
            found[f"{title}, {way}"] = metrics
            shown = {k: v for k, v in metrics.items() if "@0.1 scnet" in k and "point" not in k}
            shown |= {k: v for k, v in metrics.items() if "area" in k}
            shown = {k: round(v, 3 if "area" in k else 1) for k, v in shown.items()}
            print(f"{title} [{way}]", json.dumps(shown), flush=True)
    result = {
        "row": "development", "benchmark": "pf-pascal", "split": options.split, "metrics": found,
        "config": {"ways": {k: WAYS[k] for k in options.ways}, "protocol": repr(protocol)},
        "weights_sha256": None, **environment(),
    }  # fmt: skip
    write_json(options.out, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=("train", "rows", "measure"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", nargs="+", default=["imagenet"])
    parser.add_argument("--images", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--keep-all", type=Path)
    parser.add_argument("--without", type=Path, help="COCO json whose images are left out")
    parser.add_argument("--crop", type=Path, help="COCO json of true boxes")
    parser.add_argument("--weak", type=Path, help="COCO json of boxes found from labels")
    parser.add_argument("--recipe", choices=tuple(VARIANTS), default="ours")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--proposals", type=Path)
    parser.add_argument("--measures", nargs="*", default=["nearest", "voting"])
    parser.add_argument("--shifted", nargs="*", default=[])
    parser.add_argument("--ways", nargs="+", default=["phi", "1/2:1", "1:1"])
    parser.add_argument("--blur", type=float, default=Voting().blur)
    parser.add_argument("--temperature", type=float, default=Voting().temperature)
    options = parser.parse_args()
    (measure_all if options.task == "measure" else train)(options.names, options)


if __name__ == "__main__":
    main()

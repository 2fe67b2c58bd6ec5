"""The search for the recipe: train variants, measure each on pairs that are free of test images.

    python benchmarks/experiments/recipe.py train NAME... --images SHARDS --keep LIST
        --init WEIGHTS --out DIR
    python benchmarks/experiments/recipe.py rows NAME... --recipe VARIANT (the rest as above)
    python benchmarks/experiments/recipe.py measure MODEL... --data PF-PASCAL --proposals FILE
        --out FILE.json

Names are those of recipe_variants.py: variants of training, rows of the results table, each with
the recipe found, and ways of matching. Nothing here sees a test pair.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from recipe_variants import ROWS, VARIANTS, WAYS

from surefeat.core.files import choose_device, environment, from_dict, to_dict, write_json
from surefeat.data.benchmarks import load_benchmark
from surefeat.data.keypoints import PASCAL3D_CLASSES as CLASSES
from surefeat.learn.config import Config, preset
from surefeat.learn.pretrain import pretrain
from surefeat.match.votes import Voting
from surefeat.measure.evaluate import some_pairs
from surefeat.measure.matching import measure
from surefeat.measure.material import FeatureStore, memory_for_features, prepare_material
from surefeat.measure.protocol import Protocol
from surefeat.measure.results import result_of
from surefeat.measure.rows import Row, build_row, model_row
from surefeat.model.config import SETTINGS, WEIGHTS, model_folder


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
            crop=crop, context=0.0 if crop else None, **find,
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
    return result_of(records, material)["metrics"]  # type: ignore[no-any-return]


def untrained(name: str, init: Sequence[str], device: torch.device) -> Row:
    """A known row; NAME-raw keeps the lengths that the network gives its features."""
    known = name.removesuffix("-raw")
    return replace(build_row(known, init=init, device=device, raw=known != name), name=name)


def with_lower(folder: Path, tap: str, beside: Path) -> Path:
    """The same model with another lower layer, in a folder of its own."""
    given = model_folder(folder)
    target = beside / f"{folder.name}-{tap}"
    settings = json.loads((given / SETTINGS).read_text())
    settings["config"]["lower"] = tap
    write_json(target / SETTINGS, settings)
    shutil.copy(given / WEIGHTS, target / WEIGHTS)
    return target


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
                source = with_lower(Path(folder), tap, options.out.parent) if tap else folder
                row = replace(model_row(title, source, device=device), **differs)
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
        "weights_sha256": None, **environment(device),
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

"""Matching accuracy over training time: results/studies/training_curve.json.

    python benchmarks/experiments/training_curve.py --images SHARDS --keep LIST --init WEIGHTS
        --data PF-PASCAL

Trains the preset `ours` once, keeps the weights at some steps, and measures each on PF-PASCAL pairs
that are free of test images. Seconds are those of the steps; what comes before the first (decoding
all photos, weights) is stored beside them.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from recipe import changed, measure_way, without

from surefeat.core.files import choose_device, environment, file_hash, to_dict, write_json
from surefeat.data.sources import find_images
from surefeat.learn.config import Config, preset
from surefeat.learn.pretrain import load_pictures, train
from surefeat.learn.runs import Run
from surefeat.measure.protocol import Protocol
from surefeat.measure.rows import model_row
from surefeat.model.config import WEIGHTS
from surefeat.model.network import DenseFeatures

STAGES = (0, 25, 50, 100, 150, 200, 300, 400, 500, 750, 1000)
MEASURES = ("nearest", "voting")


def train_and_keep(
    options: argparse.Namespace, config: Config, folder: Path
) -> tuple[list[dict[str, Any]], float]:
    """Models of all stages in the folder, when each was reached, and seconds before step 1."""
    begun, device = time.perf_counter(), choose_device(None)
    run = Run.start(folder / "run", config, device=device)
    keep = without(options.keep, options.without, folder / "kept.txt")
    items = find_images(options.images, keep=keep)
    torch.manual_seed(config.train.seed)
    model = DenseFeatures.create(config.model, init=options.init).to(device)
    pictures = load_pictures(
        items, config.data, memory="device", seed=config.train.seed, device=device
    )
    start, spent = time.perf_counter() - begun, 0.0
    states = {0: (0.0, _copy(model))}

    def keep_state(step: int, values: dict[str, Any]) -> None:
        nonlocal spent
        spent += values["seconds"]
        if step in options.stages:
            states[step] = (spent, _copy(model))

    train(model, pictures.batches, run, config, report=keep_state)
    for step, (_, state) in states.items():
        model.load_state_dict(state)
        model.save_pretrained(folder / f"step-{step}")
    return [{"step": k, "seconds": round(at, 2)} for k, (at, _) in states.items()], start


def _copy(model: DenseFeatures) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--without", type=Path, help="COCO json whose images are left out")
    parser.add_argument("--init", default="imagenet")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="val")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--proposals", type=Path)
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES))
    parser.add_argument("--runs", type=Path, default=Path("training-curve"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    every = math.gcd(*options.stages)
    config = changed(preset("ours"), {
        "train.steps": max(options.stages), "train.log_every": every, "train.check_every": 0,
        "train.checkpoint_every": 10**9,
    })  # fmt: skip
    stages, start = train_and_keep(options, config, options.runs)
    protocol = Protocol(measures=MEASURES, shifted_measures=())
    for stage in stages:
        row = model_row("ours", options.runs / f"step-{stage['step']}", device=choose_device(None))
        found = measure_way(row, protocol, options)
        stage["pck"] = {name: round(found[f"{name} pck@0.1 scnet"], 2) for name in MEASURES}
        print(stage, flush=True)
    last = options.runs / f"step-{stages[-1]['step']}" / WEIGHTS
    result = {
        "row": "ours", "benchmark": "pf-pascal", "split": options.split,
        "metrics": {
            "stages": stages, "seconds before the first step": round(start, 1),
            "shipped steps": preset("ours").train.steps,
        },
        "config": to_dict(config), "weights_sha256": file_hash(last),
        **environment(choose_device(None)),
    }  # fmt: skip
    path = Path(__file__).parents[2] / "results" / "training_curve.json"
    write_json(options.out or path, result)


if __name__ == "__main__":
    main()

"""Matching accuracy over training time: results/training_curve.json.

    python benchmarks/training_curve.py --images SHARDS --keep LIST --init WEIGHTS --data PF-PASCAL

Trains the preset `ours` in stages, each going on where the last one stopped, and measures the model
of every stage on PF-PASCAL pairs that are free of test images. Seconds are those of the steps; the
time to start (weights, decoding all photos) is stored beside them.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from recipe import changed, measure_way, without

from surefeat.baselines.networks import model_row
from surefeat.config import preset, to_dict
from surefeat.device import choose_device
from surefeat.eval.protocol import Protocol
from surefeat.model_files import file_hash
from surefeat.pretraining import pretrain
from surefeat.runs import environment, write_json

STAGES = (0, 25, 50, 100, 150, 200, 300, 500, 750, 1000)
MEASURES = ("nearest", "voting")


def train_in_stages(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One run, stopped at every stage; its models are kept in the folder."""
    config = changed(preset("ours"), {"train.checkpoint_every": 25, "train.log_every": 25})
    keep = without(options.keep, options.without, folder / "kept.txt")
    stages = []
    for steps in options.stages:
        begun = time.perf_counter()
        done = pretrain(
            options.images, out=folder / "run", config=config, init=options.init[0], keep=keep,
            steps=steps, resume=bool(stages), quiet=True,
        )  # fmt: skip
        shutil.copytree(done.folder / "model", folder / f"step-{steps}", dirs_exist_ok=True)
        whole, before = time.perf_counter() - begun, stages[-1]["seconds"] if stages else 0.0
        spent = round(done.progress.seconds, 2)
        start = round(whole - (spent - before), 1)
        stages.append({"step": steps, "seconds": spent, "around the steps": start})
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--without", type=Path, help="COCO json whose images are left out")
    parser.add_argument("--init", nargs=1, default=["imagenet"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="val")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--proposals", type=Path)
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES))
    parser.add_argument("--runs", type=Path, default=Path("training-curve"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stages = train_in_stages(options, options.runs)
    protocol = Protocol(measures=MEASURES, shifted_measures=())
    for stage in stages:
        folder = options.runs / f"step-{stage['step']}"
        row = model_row("ours", folder, device=choose_device(None))
        found = measure_way(row, protocol, options)
        stage["pck"] = {name: round(found[f"{name} pck@0.1 scnet"], 2) for name in MEASURES}
        print(stage, flush=True)
    result = {
        "row": "ours", "benchmark": "pf-pascal", "split": options.split,
        "metrics": {"stages": stages}, "config": to_dict(preset("ours")),
        "weights_sha256": file_hash(folder / "model.safetensors"), **environment(),
    }  # fmt: skip
    path = Path(__file__).parents[1] / "results" / "training_curve.json"
    write_json(options.out or path, result)


if __name__ == "__main__":
    main()

"""What a detector from ten labels costs and finds: results/speed/keypoints.json.

    python benchmarks/speed/keypoints.py --out results/speed/keypoints.json \
        --pascal3d data/pascal3d --images data/voc

Ten drawn birds with boxes are fitted several times, as in docs/keypoints.md, by two threads and by
one, and their parts looked for on ten others. The time is that of KeypointDetector.fit: reading,
features, head. A busy machine makes it longer, two threads most of all, so the processor time and
the load are stored beside it. With --pascal3d also ten labelled objects of some classes of photos,
measured on others of the training images.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from surefeat.core.files import environment, file_hash, write_json
from surefeat.core.geometry import into_box, out_of_box
from surefeat.data.drawn import write_folder
from surefeat.data.keypoints import KeypointSet, load_pascal3d, read_coco
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import KeypointDetector
from surefeat.measure.fewshot import held_out
from surefeat.measure.metrics import hits, longer_side
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures

LABELS, OTHERS = 10, 60
CLASSES = ("aeroplane", "car", "chair", "motorbike")
LEAST = 40
"""Longer side of a box, pixels: smaller objects are left out, to learn from and to measure on."""


def birds(folder: Path, *, size: int, seed: int) -> KeypointSet:
    write_folder(folder, count=8 * LABELS, size=size, seed=seed)
    return read_coco(folder / "keypoints.json").only(["bird"])


def measured(detector: KeypointDetector, known: KeypointSet, asked: KeypointSet) -> dict[str, Any]:
    """PCK@0.1 on objects, all keypoints alike, beside the mean place in the labelled boxes."""
    places = torch.stack([into_box(o.points, o.box, size=(1, 1)) for o in known.objects]).nanmean(0)
    guessed = [out_of_box(places.nan_to_num(0.0), o.box, size=(1, 1)) for o in asked.objects]
    found = [item.points for item in detector.label(asked).objects]
    shares = []
    for predicted in (found, guessed):
        right = [
            hits(points, true.points, 0.1 * longer_side(true.box), true.visible)[0]
            for points, true in zip(predicted, asked.objects, strict=True)
        ]
        shares.append(100 * float(torch.cat(right).float().mean()))
    counts = {"keypoints": sum(int(item.visible.sum()) for item in asked.objects)}
    return {"pck@0.1 bbox": shares[0], "mean position pck@0.1 bbox": shares[1]} | counts


def timed_birds(model: DenseFeatures, *, repeats: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        known = birds(Path(folder, "known"), size=256, seed=0)
        asked = birds(Path(folder, "asked"), size=200, seed=1)
        times: dict[str, list[float]] = {"seconds": [], "processor_seconds": [], "load": []}
        for _ in range(repeats):
            times["load"].append(os.getloadavg()[0])
            start, spent = time.perf_counter(), time.process_time()
            detector = KeypointDetector.fit(model, known)
            times["seconds"].append(time.perf_counter() - start)
            times["processor_seconds"].append(time.process_time() - spent)
        return times | measured(detector, known, asked)


def some(found: KeypointSet, name: str, *, checked: bool, most: int) -> KeypointSet:
    """Objects of a class in training images, drawn at random; `checked`: of the dev split's."""
    own = [
        item
        for item in found.only([name]).objects
        if bool(item.visible.any())
        and held_out(item.name) == checked
        and longer_side(item.box) >= LEAST
    ]
    return KeypointSet(found.categories, tuple(random.Random(0).sample(own, most)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pascal3d", type=Path, default=None)
    parser.add_argument("--images", type=Path, default=None)
    options = parser.parse_args()
    model = DenseFeatures.from_pretrained(options.model, device="cpu")
    metrics = {
        f"{LABELS} drawn birds, threads: {threads}": timed_birds(
            model, repeats=options.repeats, threads=threads
        )
        for threads in (2, 1)
    }
    if options.pascal3d is not None:
        photos = load_pascal3d(options.pascal3d, split="train", images=options.images)
        for name in CLASSES:
            known = some(photos, name, checked=False, most=LABELS)
            asked = some(photos, name, checked=True, most=OTHERS)
            detector = KeypointDetector.fit(model, known)
            metrics[f"{LABELS} of class {name}"] = measured(detector, known, asked)
    config = {
        "labels": LABELS, "others": OTHERS, "least_side": LEAST, "repeats": options.repeats,
        "device": "cpu",
        "detector": {key: str(value) for key, value in vars(KeypointConfig()).items()},
    }  # fmt: skip
    digest = file_hash(model_folder(options.model) / WEIGHTS)
    record = {
        "row": "keypoints", "benchmark": "keypoints-speed", "split": "none", "metrics": metrics,
        "config": config, "weights_sha256": digest,
    }  # fmt: skip
    write_json(options.out, record | environment("cpu"))
    print(metrics)


if __name__ == "__main__":
    main()

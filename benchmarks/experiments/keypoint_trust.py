"""How far keypoint detectors' own probabilities hold: PASCAL3D+ and birds, from 5 labels on.

    python benchmarks/experiments/keypoint_trust.py DATA --model MODEL --store
        --out results/studies/keypoint_trust.json

For every class and number of labels a detector is fitted as `surefeat keypoints fit` does; its
answers by cross-validation on its own labels, and on other photos, are compared with the truth. The
prior of one class is fitted on the answers of all other classes. With --store the prior of all is
written into the model's reliability.json, where new detectors start from it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from reliability import calibration
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.geometry import into_box
from surefeat.core.ranking import auroc
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import fit_head
from surefeat.keypoints.trust import (
    Answers,
    answers_of,
    cross_validate,
    examples_of,
    fit_trust,
    join_answers,
    see_objects,
)
from surefeat.keypoints.views import ViewStore, cut_objects, describe
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import KeypointTrust, Reliability


@dataclass(frozen=True, eq=False)
class Trial:
    """One detector: what it says of its own labels left out, and of other photos."""

    labels: int
    crossed: Answers
    test: Answers
    sides: Tensor
    """(N,) of the test answers, the box's longer side in pixels."""


def sets(data: Path, rng: random.Random, classes: list[str], *, most: int, test: int) -> Any:
    """Name -> objects to learn from and others, of one category each."""
    for name in classes:
        if name == "bird":
            whole = read_coco(data / "cub-dev/keypoints.json", images=data / "cub-dev/photos")
            objects = list(whole.objects)
            rng.shuffle(objects)
            parts = objects[:most], objects[most : most + test]
        else:
            halves = []
            for split, count in (("train", most), ("val", test)):
                whole = read_coco(data / f"pascal3d/keypoints_{split}.json", images=data / "voc")
                whole = whole.only([name])
                objects = [item for item in whole.objects if bool(item.visible.any())]
                rng.shuffle(objects)
                halves.append(objects[:count])
            parts = halves[0], halves[1]
        category = whole.categories[whole.objects[0].category]
        yield name, *(_one_kind(part, category) for part in parts)


def _one_kind(objects: list[Labelled], category: Any) -> KeypointSet:
    return KeypointSet((category,), tuple(replace(item, category=0) for item in objects))


def trials(
    model: DenseFeatures, learn: KeypointSet, test: KeypointSet, labels: list[int], *, seed: int
) -> list[Trial]:
    config, device = KeypointConfig(), model.device
    cut = {"size": config.size, "device": device}
    objects = cut_objects(learn, jitter=config.jitter, **cut)
    others = cut_objects(test, jitter=0.0, **cut)
    store = ViewStore(objects, describe(model), config, seed=seed)
    crops, asked = (see_objects(model, one, size=config.size) for one in (objects, others))
    size = (crops.maps.shape[-2], crops.maps.shape[-1])
    cells = into_box(objects.points, objects.boxes, size=size)
    photos: dict[str, int] = {}
    photo = torch.tensor([photos.setdefault(item.name, len(photos)) for item in learn.objects])
    results = []
    for count in labels:
        chosen = torch.arange(min(count, len(objects)))
        views, _ = store.views_of(chosen, seed=seed)

        def fit_on(some: Tensor, seed: int, views: Any = views) -> Any:
            rows = torch.isin(views.numbers, some.to(device)).nonzero()[:, 0]
            return fit_head(views, rows, config, objects=len(some), kinds=1, seed=seed)

        head = fit_on(chosen, seed)
        part = chosen.to(device)
        names = ("pixels", "reach", "boxes", "points", "visible", "own")
        mine = replace(objects, **{name: getattr(objects, name)[part] for name in names})
        own = replace(crops, maps=crops.maps[part], confidence=crops.confidence[part])
        crossed = cross_validate(fit_on, own, cells[part], mine, photo[chosen], seed=seed + 1000)
        assert crossed is not None
        examples = examples_of(own.maps, cells[part], mine.visible, mine.own)
        rows = torch.arange(len(others), device=device)
        said = answers_of(head, asked, examples, others, rows)
        longer = (others.boxes[:, 2:] - others.boxes[:, :2] + 1).amax(-1, keepdim=True)
        sides = longer.expand_as(others.own)[others.own]
        results.append(Trial(len(chosen), crossed, said, sides))
    return results


def judged(trust: KeypointTrust, trial: Trial) -> dict[str, Any]:
    """Calibration, expected and actual error, false alarms and misses on the test answers."""
    said = trial.test
    right, present, error = (
        fitted.log_odds(said.signs).sigmoid()
        for fitted in (trust.right, trust.present, trust.error)
    )
    right = torch.minimum(right, present)
    seen = said.visible
    pixels = (said.error * trial.sides)[seen], (error * trial.sides)[seen]
    order = pixels[1].argsort()
    thirds = [[round(float(p[part].mean()), 1) for p in reversed(pixels)]
              for part in order.tensor_split(3)]  # fmt: skip
    raw = said.signs["peak"].sigmoid()
    return {
        "keypoints": len(seen), "visible": round(float(seen.float().mean()), 4),
        "pck": round(float(said.right[seen].float().mean()), 4),
        "auroc right": round(auroc(right, said.right), 4),
        "auroc right, height alone": round(auroc(raw, said.right), 4),
        "calibration": calibration(right.cpu(), said.right.cpu()),
        "height of the heat map": calibration(raw.cpu(), said.right.cpu()),
        "present": calibration(present.cpu(), seen.cpu()),
        "false alarms": round(float((present[~seen] >= 0.5).float().mean()), 4),
        "misses": round(float((present[seen] < 0.5).float().mean()), 4),
        "false alarms without threshold": 1.0,
        "expected and actual error, px, in thirds": thirds,
        "expected and actual error, px": [round(float(p.mean()), 2) for p in reversed(pixels)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("results/studies/keypoint_trust.json"))
    parser.add_argument(
        "--classes", nargs="+", default=["bird", "aeroplane", "car", "chair", "bus"]
    )
    parser.add_argument("--labels", nargs="+", type=int, default=[5, 20, 100])
    parser.add_argument("--test", type=int, default=100, help="objects of each class")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--tables", type=Path, help="keep all answers in this file")
    args = parser.parse_args()
    start = time.perf_counter()
    about = environment(choose_device(None))  # before anything is written into the tree
    model = DenseFeatures.from_pretrained(args.model)
    done: dict[str, list[Trial]] = {}
    for seed in range(args.seeds):
        rng = random.Random(seed)
        given = sets(args.data, rng, args.classes, most=max(args.labels), test=args.test)
        for name, learn, test in tqdm(given, total=len(args.classes)):
            done.setdefault(name, []).extend(trials(model, learn, test, args.labels, seed=seed))
            if args.tables:
                torch.save(done, args.tables)
    metrics: dict[str, Any] = {}
    for name, mine in done.items():
        others = [trial.crossed for key, some in done.items() if key != name for trial in some]
        prior = fit_trust(join_answers(others), None, words="other classes")
        assert prior is not None
        for trial in mine:
            own = fit_trust(trial.crossed, prior, words="its labels")
            assert own is not None
            metrics[f"{name}, {trial.labels} labels"] = {
                "prior alone": judged(prior, trial),
                "prior and own labels": judged(own, trial),
            }
    words = f"answers of detectors of {', '.join(done)} from {args.labels} labels"
    every = [trial.crossed for some in done.values() for trial in some]
    prior = fit_trust(join_answers(every), None, words=words)
    folder = model_folder(args.model)
    known = Reliability.load(folder)
    if args.store and known is not None:
        replace(known, keypoints=prior).save(folder)
    write_json(args.out, {
        "row": "KeypointDetector scores and errors", "benchmark": "pascal3d val and birds",
        "split": "the prior of a class is fitted on all others; its labels by cross-validation",
        "metrics": metrics,
        "config": {"prior": asdict(prior) if prior else None, "labels": args.labels,
                   "test": args.test, "seeds": args.seeds},
        "seconds": round(time.perf_counter() - start),
        "weights_sha256": file_hash(folder / WEIGHTS), **about,
    })  # fmt: skip
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()

"""Weakly supervised boxes on PASCAL VOC, from image labels alone: results/boxes/*.json.

    python benchmarks/boxes_voc.py --data FOLDER --proposals proposals.npz --only-proposals
    python benchmarks/boxes_voc.py --data FOLDER --proposals proposals.npz --init WEIGHTS

FOLDER holds voc/ and voc-nonrigid/ (instances.json and tar shards) and lists/rigid12.txt. Learns on
the train split without the images kept for other tests, measures CorLoc on it and AP at IoU 0.5 on
val, beside controls, and writes the selected boxes (COCO) to --out. Made first, on any machine, the
file of proposals lets the rest run without OpenCV.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from surefeat.boxes import fit_boxes, passes
from surefeat.data.labels import Labelled, LabelledImages, find_labels
from surefeat.detect import Detector
from surefeat.detect_config import (
    BoxesConfig,
    DetectorConfig,
    LearnConfig,
    ProposalConfig,
    SelectConfig,
)
from surefeat.detect_data import Photo, read_photos
from surefeat.detect_predict import Scored, score_in_chunks
from surefeat.detect_proposals import make_proposals, read_proposals
from surefeat.detect_select import Candidate, best_boxes, select, suppress, to_coco, to_csv
from surefeat.eval.detection import (
    Found,
    average_precision,
    centre_box,
    control,
    corloc,
    largest_proposal,
)
from surefeat.model_files import file_hash
from surefeat.runs import environment, write_json, write_text

RIGID = (
    "aeroplane", "bicycle", "boat", "bottle", "bus", "car", "chair", "diningtable", "motorbike",
    "sofa", "train", "tvmonitor",
)  # fmt: skip
CENTRES = (0.25, 0.5, 0.75, 1.0)


def load(data: Path, split: str, *, classes: int, limit: int) -> LabelledImages:
    """The split's images with their labels; train images without PF-PASCAL's test images."""
    allowed = set((data / "lists" / "rigid12.txt").read_text().split())
    found: list[Labelled] = []
    # The images of voc-nonrigid show the other 8 classes alone.
    folders, wanted = (("voc",), RIGID) if classes == 12 else (("voc", "voc-nonrigid"), None)
    for folder in folders:
        file = data / folder / "instances.json"
        listed = json.loads(file.read_text())["images"]
        splits = {Path(image["file_name"]).stem: image["voc_split"] for image in listed}
        for image in find_labels(file, categories=wanted).images:
            stem = Path(image.name).stem
            fits = splits[stem] == split and (
                split != "train" or folder == "voc-nonrigid" or stem in allowed
            )
            # Val keeps images that show none of the classes, where a box would be wrong.
            if fits and (image.labels or split != "train"):
                found.append(image)
    names = wanted or tuple(sorted({label for image in found for label in image.labels}))
    step = max(1, len(found) // limit) if limit else 1
    return LabelledImages(tuple(found[::step][: limit or None]), names)


def mean(values: Sequence[float]) -> float:
    """Over the classes that have images."""
    known = [value for value in values if value == value]
    return round(sum(known) / len(known), 4) if known else float("nan")


def scored(
    detector: Detector, photos: Sequence[Photo], config: BoxesConfig
) -> tuple[list[Scored], float]:
    """All photos' scores, and seconds."""
    start = time.perf_counter()
    scales, amp = config.select.scales, config.learn.amp
    found = [
        Scored(each.photo, each.scores.cpu())
        for each in score_in_chunks(detector, photos, scales=scales, amp=amp)
    ]
    return found, time.perf_counter() - start


def corlocs(images: LabelledImages, photos: Sequence[Photo], best: list[Candidate]) -> Any:
    """CorLoc of the detector and of the controls, each class and their mean."""
    by_name = {photo.image.name: photo for photo in photos}
    shown = [photo.image for photo in photos]
    boxes = {(each.name, each.category): torch.tensor(each.box) for each in best}
    rows = {"detector": corloc(shown, boxes, images.categories)}
    for share in CENTRES:
        found = control(shown, lambda i, s=share: centre_box(by_name[i.name].size, share=s))
        rows[f"centre box, {share:g} of the area"] = corloc(shown, found, images.categories)
    found = control(
        shown,
        lambda i: largest_proposal(by_name[i.name].proposals.boxes, by_name[i.name].size),
    )
    rows["largest proposal"] = corloc(shown, found, images.categories)
    return {
        name: {"mean": mean(list(row.values())), **{k: round(v, 4) for k, v in row.items()}}
        for name, row in rows.items()
    }


def precisions(images: LabelledImages, found: list[Scored]) -> Any:
    """AP at IoU 0.5 of the detector; controls have its image scores, and their own box."""
    shown = [each.photo.image for each in found]
    rows: dict[str, dict[str, dict[str, Found]]] = {}
    for each in found:
        boxes = each.photo.proposals.boxes
        kept = suppress(boxes, each.scores)
        size = each.photo.size
        fixed = {f"centre box, {s:g} of the area": centre_box(size, share=s) for s in CENTRES}
        fixed["largest proposal"] = largest_proposal(boxes, size)
        totals = each.image_scores()
        for k, category in enumerate(images.categories):
            here = {"detector": Found(*kept[k])}
            here |= {name: Found(box[None], totals[k, None]) for name, box in fixed.items()}
            for name, one in here.items():
                rows.setdefault(name, {}).setdefault(category, {})[each.photo.image.name] = one
    table = {}
    for name, row in rows.items():
        aps = {c: average_precision(shown, row[c], c) for c in images.categories}
        table[name] = {
            "map (area)": mean([ap.area for ap in aps.values()]),
            "map (11 points)": mean([ap.eleven for ap in aps.values()]),
            **{c: round(ap.area, 4) for c, ap in aps.items()},
        }
    return table


def settings(options: argparse.Namespace) -> BoxesConfig:
    return BoxesConfig(
        detector=DetectorConfig(
            trunk=options.trunk, tap=options.tap, pooled=options.pooled, hidden=options.hidden
        ),
        proposals=ProposalConfig(method=options.method, count=options.count),
        learn=LearnConfig(
            epochs=options.epochs, batch=options.batch, trained=options.trained, lr=options.lr,
            trunk_lr=options.trunk_lr, optimiser=options.optimiser, scales=tuple(options.scales),
            regulariser=options.regulariser, seed=options.seed, checkpoint_every=0,
        ),
        select=SelectConfig(scales=tuple(options.test_scales or options.scales)),
        regions=options.regions,
        side=384,
    )  # fmt: skip


def measure(options: argparse.Namespace, config: BoxesConfig) -> dict[str, Any]:
    """Fit, CorLoc and selection on train, AP on val."""
    train = load(options.data, "train", classes=options.classes, limit=options.limit)
    start = time.perf_counter()
    done = fit_boxes(
        train, out=options.out / "run", config=config, init=options.init,
        proposals=options.proposals, device=options.device, quiet=options.quiet,
    )  # fmt: skip
    seconds = {"fit": time.perf_counter() - start}
    known = read_proposals(options.proposals, config.proposals)
    photos, _ = read_photos(train.images, known, side=config.side, count=config.regions)
    found, seconds["score train"] = scored(done.detector, photos, config)
    best = [c for each in found for c in best_boxes(each.photo, each.scores, train.categories)]
    selection = select(best, config.select, passes=passes(config.select))
    sizes = {photo.image.name: photo.size for photo in photos}
    write_json(options.out / "boxes.json", to_coco(selection, sizes, train.categories))
    write_text(options.out / "selection.csv", to_csv(selection))
    metrics = {
        "train images": len(photos), "corloc on train": corlocs(train, photos, best),
        "corloc of kept boxes": _kept(train, photos, list(selection.kept())),
        "selection": selection.counts,
    }  # fmt: skip
    del found
    val = load(options.data, "val", classes=options.classes, limit=options.limit)
    photos, _ = read_photos(val.images, known, side=config.side, count=config.regions)
    if photos:
        found, seconds["score val"] = scored(done.detector, photos, config)
        metrics |= {"val images": len(photos), "ap@0.5 on val": precisions(val, found)}
    return metrics | {"seconds": {k: round(v, 1) for k, v in seconds.items()}}


def _kept(images: LabelledImages, photos: Sequence[Photo], kept: list[Candidate]) -> float:
    """Share of right boxes among those kept: over boxes, not classes."""
    boxes = {(each.name, each.category): torch.tensor(each.box) for each in kept}
    hits, total = 0.0, 0
    for category in images.categories:
        names = {each.name for each in kept if each.category == category}
        shown = [p.image for p in photos if p.image.name in names]
        if shown:
            hits += corloc(shown, boxes, (category,))[category] * len(shown)
            total += len(shown)
    return round(hits / max(total, 1), 4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--proposals", type=Path, required=True, help="file, made or added to")
    parser.add_argument("--only-proposals", action="store_true", help="make the file and stop")
    parser.add_argument("--out", type=Path, default=Path("boxes-voc"), help="run, boxes, selection")
    parser.add_argument("--result", type=Path, help="JSON; default results/boxes/ROW.json")
    parser.add_argument("--row", default="wsddn")
    parser.add_argument("--classes", type=int, choices=(12, 20), default=12)
    parser.add_argument("--limit", type=int, default=0, help="images of each split; 0 = all")
    parser.add_argument("--init", default="imagenet", help="imagenet, none or a weights file")
    parser.add_argument("--trunk", default="resnet50")
    parser.add_argument("--tap", default="res4f", help="auto: the trunk's last layer")
    parser.add_argument("--pooled", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--method", default="prim")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--regions", type=int, default=500, help="the first so many compete")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--trained", default="none", choices=("none", "last", "all"))
    parser.add_argument("--optimiser", default="adamw", choices=("adamw", "sgd"))
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--trunk-lr", type=float, default=1e-5)
    parser.add_argument("--regulariser", type=float, default=1e-4)
    parser.add_argument("--scales", type=int, nargs="+", default=[320, 384, 480, 576])
    parser.add_argument("--test-scales", type=int, nargs="+", help="default: those of learning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quiet", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    config = settings(options)
    if options.only_proposals:
        for split in ("train", "val"):
            images = load(options.data, split, classes=options.classes, limit=options.limit).images
            items = [image.item for image in images]
            make_proposals(items, config.proposals, file=options.proposals, workers=options.workers)
        return
    metrics = measure(options, config)
    split = "train and val" + (f", every nth, {options.limit} each" if options.limit else "")
    here = environment()
    result = {
        "row": options.row, "benchmark": "voc-boxes",
        "split": f"{split}, {options.classes} classes", "metrics": metrics,
        "config": json.loads((options.out / "run" / "config.json").read_text()),
        "init": Path(options.init).name,
        "weights_sha256": file_hash(options.out / "run" / "model" / "detector.safetensors"),
        "commit": here["commit"], "hardware": here["hardware"], "date": here["date"],
        "environment": here,
    }  # fmt: skip
    path = options.result or Path(__file__).parents[1] / "results" / "boxes" / f"{options.row}.json"
    write_json(path, result)
    short = {k: v["detector"].get("mean", v["detector"].get("map (area)"))
             for k, v in metrics.items() if isinstance(v, dict) and "detector" in v}  # fmt: skip
    print(json.dumps(short | {"seconds": metrics["seconds"], "result": str(path)}))


if __name__ == "__main__":
    main()

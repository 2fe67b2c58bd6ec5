"""Weakly supervised boxes on PASCAL VOC, from image labels alone: results/boxes/*.json.

    python benchmarks/experiments/boxes_voc.py --data FOLDER --proposals proposals.sqlite
        --only-proposals
    python benchmarks/experiments/boxes_voc.py --data FOLDER --proposals proposals.sqlite
        --init WEIGHTS

FOLDER holds voc/ and voc-nonrigid/ (instances.json and tar shards). Learns on the train split
without the images kept for other tests, measures CorLoc on it and AP at IoU 0.5 on val, beside
controls, and writes the selected boxes (COCO) to --out: boxes.json of train, and of train and val
boxes_trainval.json, by the same detector. Made first, on any machine, the file of proposals lets
the rest run without OpenCV.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boxes_scores import choose, corlocs, detectors, named, precisions, right_share

from surefeat.boxes.config import BoxesConfig, DetectorConfig, LearnConfig, SelectConfig
from surefeat.boxes.photos import Photo, read_photos
from surefeat.boxes.select import Candidate, Selection, score_photos, select, to_coco, to_csv
from surefeat.boxes.train import fit_boxes
from surefeat.core.files import choose_device, environment, file_hash, write_json, write_text
from surefeat.data.coco import write_annotations
from surefeat.data.keypoints import PASCAL3D_CLASSES as CLASSES
from surefeat.data.sources import LabelledImages, PhotoLabels, find_labels
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import make_proposals, read_proposals

# As in BoxesConfig; count: boxes per image in the file, regions: of them the first so many compete.
DEFAULTS = {
    "trunk": "resnet50", "tap": "res5c", "pooled": 2, "hidden": 1024, "count": 500,
    "regions": 250, "smallest": 0.04, "epochs": 4, "batch": 4, "lr": 1e-4, "regulariser": 1e-4,
    "seed": 0, "agreement": 1.0,
}  # fmt: skip


def load(data: Path, split: str, *, classes: int, limit: int) -> LabelledImages:
    """The split's images with their labels, every nth where there is a limit.

    Train has no image that is kept for other tests. Val keeps images that show none of the classes,
    where a box would be wrong.
    """
    found: list[PhotoLabels] = []
    # The images of voc-nonrigid show the other 8 classes alone.
    folders, wanted = (("voc",), CLASSES) if classes == 12 else (("voc", "voc-nonrigid"), None)
    for folder in folders:
        file = data / folder / "instances.json"
        listed = json.loads(file.read_text())["images"]
        inside = {image["file_name"] for image in listed if image["voc_split"] == split}
        images = find_labels(file, categories=wanted).images
        found += [image for image in images if image.name in inside]
    if split == "train":
        found = [image for image in learnable(data, found) if image.labels]
    step = max(1, len(found) // limit) if limit else 1
    kept = tuple(found[::step][: limit or None])
    return LabelledImages(kept, tuple(sorted({label for image in kept for label in image.labels})))


def learnable(data: Path, images: Sequence[PhotoLabels]) -> list[PhotoLabels]:
    """Those without a part in other tests: no image of PF-PASCAL's test pairs."""
    barred = {
        image["file_name"]
        for image in json.loads((data / "voc" / "instances.json").read_text())["images"]
        if image["pf_pascal"] == "test"
    }
    return [image for image in images if image.name not in barred]


def settings(options: argparse.Namespace) -> BoxesConfig:
    return BoxesConfig(
        detector=DetectorConfig(
            trunk=options.trunk, tap=options.tap, pooled=options.pooled, hidden=options.hidden
        ),
        proposals=ProposalConfig(count=options.count),
        learn=LearnConfig(
            epochs=options.epochs, batch=options.batch, lr=options.lr, seed=options.seed,
            scales=tuple(options.scales), regulariser=options.regulariser, checkpoint_every=0,
        ),
        select=SelectConfig(
            scales=tuple(options.test_scales or options.scales), agreement=options.agreement
        ),
        regions=options.regions,
        smallest=options.smallest,
        side=384,
    )  # fmt: skip


def measure(options: argparse.Namespace, config: BoxesConfig) -> dict[str, Any]:
    """Fit, CorLoc and selection on train, AP on val."""
    times = [time.perf_counter()]
    train = load(options.data, "train", classes=options.classes, limit=options.limit)
    done = fit_boxes(
        train, out=options.out / "run", config=config, init=options.init,
        proposals=options.proposals, device=options.device, quiet=options.quiet,
    )  # fmt: skip
    times.append(time.perf_counter())
    known = read_proposals(options.proposals, config.proposals)
    photos, _ = read_photos(train.images, known, config)
    scored = list(score_photos(done.detector, photos, scales=config.select.scales))
    times.append(time.perf_counter())
    names, power = train.categories, config.select.agreement
    compared = {name: choose(scored, names, each) for name, each in detectors(power).items()}
    best = compared[named(power)]
    selection = write_boxes(options.out / "boxes.json", best, photos, names, config)
    metrics = {
        "train images": len(photos), "corloc on train": corlocs(photos, compared, names),
        "right boxes among the kept": right_share(photos, selection.kept()),
        "selection": selection.counts(),
    }  # fmt: skip
    val = load(options.data, "val", classes=options.classes, limit=options.limit)
    more, _ = read_photos(val.images, known, config)
    times.append(time.perf_counter())
    scored = list(score_photos(done.detector, more, scales=config.select.scales))
    times.append(time.perf_counter())
    metrics |= {"val images": len(more), "ap@0.5 on val": precisions(scored, names, power)}
    free = {image.name for image in learnable(options.data, val.images)}
    allowed = [each for each in scored if each.photo.image.name in free]
    best = best + choose(allowed, names, power)
    both = [*photos, *(each.photo for each in allowed)]
    write_boxes(options.out / "boxes_trainval.json", best, both, names, config)
    times.append(time.perf_counter())
    parts = ("fit", "score train", "measure train", "score val", "measure val")
    spent = (after - before for before, after in itertools.pairwise(times))
    return metrics | {"seconds": {k: round(v, 1) for k, v in zip(parts, spent, strict=True)}}


def write_boxes(
    file: Path, best: Sequence[Candidate], photos: Sequence[Photo], categories: Sequence[str],
    config: BoxesConfig,
) -> Selection:  # fmt: skip
    """Select, and write what is kept as a COCO file and all candidates as a CSV beside it."""
    selection = select(best, config.select)
    sizes = {photo.image.name: photo.size for photo in photos}
    write_annotations(file, to_coco(selection, sizes, categories))
    write_text(file.with_suffix(".csv"), to_csv(selection))
    return selection


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
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--scales", type=int, nargs="+", default=[320, 384, 480, 576])
    parser.add_argument("--test-scales", type=int, nargs="+", help="default: those of learning")
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
    here = environment(choose_device(options.device))
    result = {
        "row": options.row, "benchmark": "voc-boxes",
        "split": f"{split}, {options.classes} classes", "metrics": metrics,
        "config": json.loads((options.out / "run" / "config.json").read_text()),
        "init": Path(options.init).name,
        "weights_sha256": file_hash(options.out / "run" / "model" / "detector.safetensors"),
        "commit": here["commit"], "hardware": here["hardware"], "date": here["date"],
    }  # fmt: skip
    path = options.result or Path(__file__).parents[2] / "results" / "boxes" / f"{options.row}.json"
    write_json(path, result)
    row = named(options.agreement)
    short = {k: v[row].get("mean", v[row].get("map (area)"))
             for k, v in metrics.items() if isinstance(v, dict) and row in v}  # fmt: skip
    print(json.dumps(short | {"seconds": metrics["seconds"], "result": str(path)}))


if __name__ == "__main__":
    main()

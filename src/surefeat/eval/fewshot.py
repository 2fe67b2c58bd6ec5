"""`surefeat evaluate pascal3d`: keypoint detection from a handful of labels (paper, section 4.3).

The features of all training views are computed once per row and stay on the device; the head is
trained from them in rounds of growing annotation and measured on all test objects after each.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.baselines.dense_rows import DenseRow, build_dense_row
from surefeat.crops import out_of_box
from surefeat.device import choose_device
from surefeat.eval.fewshot_cache import Cache
from surefeat.eval.fewshot_data import Material, prepare_material
from surefeat.eval.fewshot_result import Record, class_curves, result_of
from surefeat.eval.fewshot_rounds import (
    UNIT,
    image_ranks,
    mean_positions,
    predict,
    relative_errors,
    round_objects,
    train_round,
)
from surefeat.eval.fewshot_sets import load_sets, some_objects
from surefeat.eval.fewshot_settings import FewShot, Split
from surefeat.eval.fewshot_views import RowViews
from surefeat.eval.results import write_result
from surefeat.keypoint_head import KeypointHead
from surefeat.runs import environment

VERSION = 1
"""Part of every cache key: raised when the same settings begin to give other records."""


def evaluate_fewshot(
    data: str | Path,
    *,
    images: str | Path | None = None,
    rows: Sequence[str] = ("ours",),
    model: str | Path | None = None,
    init: Sequence[str | Path] = ("imagenet",),
    raw: bool = False,
    weights: tuple[float, float] = (1.0, 1.0),
    out: str | Path = "results/pascal3d",
    split: Split = "val",
    classes: Sequence[str] | None = None,
    objects: int | None = None,
    settings: FewShot | None = None,
    device: str | torch.device | None = None,
    workers: int = 16,
    quiet: bool = False,
) -> list[Path]:
    """Measure rows (see baselines.dense_rows) on few-shot keypoints; their result files.

    data: a folder in one of the layouts of data.pascal3d, its photos under `images`. `classes` and
    `objects` (per class) make a trial smaller; the split's name says so. Photos are decoded once
    for all rows. Interrupted, it continues when called again with the same settings.
    """
    settings = settings or FewShot()
    where = choose_device(device)
    # Built first: a name or file that is wrong shows before the long preparation.
    built = [
        build_dense_row(name, cells=settings.cells, device=where, model=model, init=init, raw=raw,
                        weights=weights)
        for name in rows
    ]  # fmt: skip
    sets = load_sets(data, images=images, split=split)
    train, test = (some_objects(each, classes=classes, most=objects) for each in sets)
    smaller = [*(classes or ()), *([f"{objects}-objects"] if objects else ())]
    material = prepare_material(
        train, test, split="-".join([split, *smaller]), device=where, workers=workers, quiet=quiet
    )
    return [measure_row(row, material, settings, out=Path(out), quiet=quiet) for row in built]


def measure_row(
    row: DenseRow, material: Material, settings: FewShot, *, out: Path, quiet: bool = True
) -> Path:
    """All rounds of all seeds of a row; writes OUT/pascal3d-<split>-<row>.json, returns its path.

    Rounds are appended to OUT/cache as they are finished and read back from there.
    """
    stem, device = f"pascal3d-{material.split}-{row.name}", material.train.boxes.device
    config = {"row": dict(row.settings), "protocol": asdict(settings)}
    parts = [VERSION, row.name, row.weights_sha256, config, device.type, material.fingerprint]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    cache, views = Cache(out / "cache" / f"{stem}-{key}"), RowViews(row, material, settings)
    start, before = time.perf_counter(), len(cache.records())
    with tqdm(total=settings.seeds * len(settings.rounds), desc=row.name, disable=quiet) as bar:
        for seed in range(settings.seeds):
            _run_seed(seed, views, cache, bar)
    wall = time.perf_counter() - start
    order = {str(size): number for number, size in enumerate(settings.rounds)}
    records = sorted(cache.records(), key=lambda r: (r["seed"], order[str(r["round"])]))
    result = result_of(records, material) | {
        "row": row.name,
        "config": config,
        "weights_sha256": row.weights_sha256,
        "seconds": round(_seconds(records, views) if before else wall, 1),
        "seconds_of_photos": round(material.seconds, 1),
        "seconds_of_features": round(views.seconds, 1),
        "features_on": sorted(views.places),
        **environment(),
        "device": device.type,
    }
    return write_result(out / f"{stem}.json", result)


def _seconds(records: Sequence[Record], views: RowViews) -> float:
    """What an evaluation that was continued has taken: all its rounds, the features anew."""
    rounds = (float(each["seconds"] + each["seconds_of_test"]) for each in records)
    return views.seconds + sum(rounds)


def _run_seed(seed: int, views: RowViews, cache: Cache, bar: Any) -> None:
    """The rounds of one seed that are not in the cache yet, from the head of the one before."""
    material, settings = views.material, views.settings
    done = [record for record in cache.records() if record["seed"] == seed]
    if len(done) == len(settings.rounds):
        bar.update(len(done))
        return
    category, photo = material.train.category.cpu(), material.train.photo.cpu()
    ranks = image_ranks(category, photo, generator=torch.Generator().manual_seed(seed))
    views.prepare(round_objects(ranks, settings.rounds[-1]))
    channels = views.test.features.shape[-1]
    head = KeypointHead(
        channels, len(material.channels.flip), hidden=settings.hidden,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    if done and not cache.load_head(head, done[-1]):
        cache.start_over(seed)
        done = []
    head = head.to(views.test.points.device)
    bar.update(len(done))
    for number, size in enumerate(settings.rounds[len(done) :], start=len(done)):
        chosen = round_objects(ranks, size)
        # Each round has its own stream, so that a continued seed draws what it would have drawn.
        record = _round(head, chosen, views, seed=1000 * (seed + 1) + number)
        last = number + 1 == len(settings.rounds)
        cache.add({"seed": seed, "round": size} | record, None if last else head)
        bar.update()


def _round(head: KeypointHead, chosen: Tensor, views: RowViews, *, seed: int) -> dict[str, Any]:
    """Train on the chosen objects (N,), measure on all test objects."""
    material, start = views.material, time.perf_counter()
    train, test = material.train.take(chosen.to(material.train.boxes.device)), material.test
    seen, rows = views.of(chosen, seed=seed)
    loss = train_round(head, seen, rows, objects=len(chosen), seed=seed, settings=views.settings)
    trained = time.perf_counter()
    found = predict(head, views.test, test.boxes)
    guessed = out_of_box(mean_positions(train), test.boxes, size=UNIT)
    classes = len(material.channels.classes)
    curves, control = (
        class_curves(relative_errors(each, test), test, classes=classes).cpu()
        for each in (found, guessed)
    )
    images = set(zip(train.category.tolist(), train.photo.tolist(), strict=True))
    return {
        "images": len(images),
        "objects": len(train),
        "keypoints": int(train.visible.sum()),
        "steps": views.settings.steps(len(train)),
        "loss": loss,
        "seconds": round(trained - start, 2),
        "seconds_of_test": round(time.perf_counter() - trained, 2),
        "curves": _rounded(curves),
        "control": _rounded(control),
    }


def _rounded(curves: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in curve] for curve in curves.tolist()]

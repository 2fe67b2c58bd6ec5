"""Rounds of growing annotation: which images, the training of the head, the errors on the rest.

Errors -> PCK over alpha, and rounds -> a result with a convention in every name.

Names: "pck@0.1 bbox, 10 per class" is in percent, "pck area bbox, 10 per class" lies in [0, 1];
both are means over the classes, then over the seeds; "..., sd over seeds" is the spread of the
latter. "mean position ..." is the control: the mean place in the box, without looking.

What an interrupted evaluation continues from: finished rounds, and the head after the last.

`surefeat evaluate pascal3d`: keypoint detection from a handful of labels (paper, section 4.3).

The features of all training views are computed once per row and stay on the device; the head is
trained from them in rounds of growing annotation and measured on all test objects after each.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, write_bytes, write_text
from surefeat.core.geometry import into_box, out_of_box
from surefeat.keypoints.head import Draw, KeypointHead, fit, heatmaps, peaks
from surefeat.measure.fewshot_data import (
    Material,
    Objects,
    load_sets,
    prepare_material,
    some_objects,
)
from surefeat.measure.fewshot_settings import FewShot, Round, Split
from surefeat.measure.fewshot_views import RowViews, Views
from surefeat.measure.results import write_result
from surefeat.measure.rows import Row, build_row

TEST_BATCH = 512


def image_ranks(category: Tensor, photo: Tensor, *, generator: torch.Generator) -> Tensor:
    """(N,) place of each object's photo in a random order of its class's photos.

    A round of n images per class takes the objects with a rank below n: rounds are nested, and
    every class has the same number of images. All objects of a class in a photo come together;
    a photo with two classes has a rank in each.
    """
    ranks = torch.empty_like(category)
    for number in torch.unique(category).tolist():
        of_class = category == number
        photos, which = torch.unique(photo[of_class], return_inverse=True)
        order = torch.randperm(len(photos), generator=generator)
        ranks[of_class] = order[which]
    return ranks


def round_objects(ranks: Tensor, size: Round) -> Tensor:
    """Numbers of the objects whose annotation a round may use."""
    return torch.arange(len(ranks)) if size == "all" else (ranks < size).nonzero()[:, 0]


def drawer(views: Views, rows: Tensor, settings: FewShot) -> Draw:
    """What `fit` draws its batches with: random ones of the views `rows` (M,), on their device."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.randint(len(rows), (settings.batch,), generator=generator, device=rows.device)
        row = rows[index]
        targets = heatmaps(
            views.points[row], views.visible[row], size=views.size, spread=settings.spread,
            floor=settings.floor,
        )  # fmt: skip
        counts = views.own if settings.absent == "background" else views.visible
        return views.maps(row), targets, counts[row]

    return draw


def train_round(
    head: KeypointHead, views: Views, rows: Tensor, *, objects: int, seed: int, settings: FewShot
) -> float:
    """Train the head further on the views `rows`; the mean loss of the last tenth of the steps."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    losses = fit(
        head, drawer(views, rows, settings), steps=settings.steps(objects),
        learning_rate=settings.learning_rate, weight_decay=settings.weight_decay,
        weight=settings.emphasis, generator=generator,
    )  # fmt: skip
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


@torch.inference_mode()
def predict(head: KeypointHead, views: Views, boxes: Tensor) -> Tensor:
    """Keypoints of all channels in the crops of boxes (N, 4): (N, K, 2), pixels of the photos."""
    device = boxes.device
    found = []
    for start in range(0, len(boxes), TEST_BATCH):
        part = slice(start, start + TEST_BATCH)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = head(views.maps(part))
        cells, _ = peaks(logits.float().sigmoid())
        found.append(out_of_box(cells, boxes[part], size=views.size))
    return torch.cat(found)


def relative_errors(predicted: Tensor, objects: Objects) -> Tensor:
    """(N, K) distances to the truth over the longer side of the box; only visible ones count."""
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2] + 1
    distance: Tensor = torch.linalg.vector_norm(predicted - objects.points, dim=-1)
    return distance / sides.amax(-1, keepdim=True)


UNIT = (1, 1)
"""A grid of one cell: into_box gives shares of the box, 0 in its middle, +-1/2 at its edges."""


def mean_positions(objects: Objects) -> Tensor:
    """(K, 2): each keypoint's mean place where it is visible, in its box as UNIT has it.

    A keypoint that no object shows is taken to be in the middle.
    """
    places = into_box(objects.points, objects.boxes, size=UNIT)
    count = objects.visible.sum(0)[:, None]
    total = torch.where(objects.visible[..., None], places, 0.0).sum(0)
    return total / count.clamp_min(1)


Record = Mapping[str, Any]
"""One round of one seed, as a line of the cache."""

ALPHAS = torch.linspace(0, 1, 101, dtype=torch.float64)

PARTS = {"": "curves", "mean position ": "control"}
"""Prefix of a metric's name -> where a record has its curves."""


def class_curves(errors: Tensor, objects: Objects, *, classes: int) -> Tensor:
    """PCK over ALPHAS of every class: relative errors (N, K) -> (classes, 101) in [0, 1].

    A keypoint is right when its error is strictly below alpha; every visible keypoint of a class
    counts the same, whatever the object. Errors that are not finite are wrong.
    """
    alphas = ALPHAS.to(errors.device)
    curves = []
    for number in range(classes):
        of_class = objects.category == number
        own = errors[of_class][objects.visible[of_class]].double()
        ordered = own.nan_to_num(torch.inf).sort().values
        curves.append(torch.searchsorted(ordered, alphas) / max(1, len(ordered)))
    return torch.stack(curves)


def area(curve: Tensor) -> Tensor:
    """Area under curves (..., 101) over alpha in [0, 1], trapezoidal."""
    return torch.trapezoid(curve, dx=1 / (len(ALPHAS) - 1))


def at_alpha(curve: Tensor, alpha: float) -> Tensor:
    """PCK in percent at one of ALPHAS: (..., 101) -> (...)."""
    return 100 * curve[..., round(alpha * (len(ALPHAS) - 1))]


def result_of(records: Sequence[Record], material: Material) -> dict[str, Any]:
    """All metrics of a row's rounds."""
    classes = material.channels.classes
    result: dict[str, Any] = {
        "benchmark": "pascal3d", "split": material.split, "rule": "bbox", "metrics": {},
        "counts": _counts(material), "by_class": {}, "pck_curves": {"alpha": ALPHAS.tolist()},
        "rounds": [],
    }  # fmt: skip
    for size in dict.fromkeys(record["round"] for record in records):
        own = [record for record in records if record["round"] == size]
        for prefix, part in PARTS.items():
            curves = torch.tensor([record[part] for record in own], dtype=torch.float64)
            _add(result, prefix, str(size), curves, classes)
        result["counts"] |= {
            f"{what}, {size} per class": [record[what] for record in own]
            for what in ("images", "objects", "keypoints")
        }
    result["rounds"] = [_in_short(record) for record in records]
    return result


def _add(
    result: dict[str, Any], prefix: str, size: str, curves: Tensor, classes: Sequence[str]
) -> None:
    """Metrics of one round size from curves (seeds, classes, 101)."""
    values = {
        f"{prefix}pck@0.1 bbox, {size} per class": at_alpha(curves, 0.1),
        f"{prefix}pck@0.05 bbox, {size} per class": at_alpha(curves, 0.05),
        f"{prefix}pck area bbox, {size} per class": area(curves),
    }
    for name, each in values.items():
        by_seed = each.mean(1)
        result["metrics"][name] = float(by_seed.mean())
        result["metrics"][f"{name}, sd over seeds"] = _spread(by_seed)
        result["by_class"][name] = dict(zip(classes, each.mean(0).tolist(), strict=True))
    result["pck_curves"][f"{prefix}{size} per class"] = curves.mean((0, 1)).tolist()


def _spread(values: Tensor) -> float | None:
    """Standard deviation (n - 1); none of a single seed."""
    return float(values.std()) if len(values) > 1 else None


def _in_short(record: Record) -> dict[str, Any]:
    """A round's own numbers, without its curves per class."""
    short = {key: value for key, value in record.items() if key not in PARTS.values()}
    for prefix, part in PARTS.items():
        curves = torch.tensor(record[part], dtype=torch.float64)
        short[f"{prefix}pck@0.1 bbox"] = float(at_alpha(curves, 0.1).mean())
        short[f"{prefix}pck area bbox"] = float(area(curves).mean())
    return short


def _counts(material: Material) -> dict[str, Any]:
    found: dict[str, Any] = {"classes": len(material.channels.classes)}
    for name, part in (("train", material.train), ("test", material.test)):
        found[f"{name} images"] = len(torch.unique(part.photo))
        found[f"{name} objects"] = len(part)
        found[f"{name} keypoints"] = int(part.visible.sum())
    return found


@dataclass(frozen=True)
class Cache:
    """Files of one row under one key."""

    stem: Path
    """Folder, and how the names begin."""

    @property
    def file(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.jsonl")

    def _head_file(self, seed: int) -> Path:
        return self.stem.with_name(f"{self.stem.name}-seed{seed}.safetensors")

    def records(self) -> list[Record]:
        """Finished rounds, oldest first; a line that a crash cut off is removed from the file."""
        if not self.file.exists():
            return []
        lines, found = self.file.read_text().splitlines(), []
        for line in lines:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        if len(found) < len(lines):
            self._write(found)
        return found

    def start_over(self, seed: int) -> list[Record]:
        """The records of the other seeds: this one's can not be continued."""
        kept = [record for record in self.records() if record["seed"] != seed]
        self._write(kept)
        return kept

    def _write(self, records: Sequence[Record]) -> None:
        write_text(self.file, "".join(json.dumps(each) + "\n" for each in records))

    def add(self, record: Record, head: KeypointHead | None) -> None:
        """A finished round, and the head that the seed's next one starts from; None: it was last.

        The head's file says which round it is of: after a crash between the two writes they do not
        fit, `load_head` refuses, and the seed starts over.
        """
        from safetensors.torch import save

        seed, path = record["seed"], self._head_file(record["seed"])
        if head is not None:
            state = {key: value.detach().cpu().contiguous() for key, value in
                     head.state_dict().items()}  # fmt: skip
            write_bytes(path, save(state, {"round": str(record["round"])}))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if head is None:
            self._head_file(seed).unlink(missing_ok=True)

    def load_head(self, head: KeypointHead, record: Record) -> bool:
        """Fill the head as it was after the record's round; False where that is not known."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._head_file(record["seed"]), framework="pt") as file:
                if (file.metadata() or {}).get("round") != str(record["round"]):
                    return False
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return False
        head.load_state_dict(state)
        return True


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
    """Measure rows (see measure.rows) on few-shot keypoints; their result files.

    data: a folder in one of the layouts of data.pascal3d, its photos under `images`. `classes` and
    `objects` (per class) make a trial smaller; the split's name says so. Photos are decoded once
    for all rows. Interrupted, it continues when called again with the same settings.
    """
    settings = settings or FewShot()
    where = choose_device(device)
    # Built first: a name or file that is wrong shows before the long preparation.
    built = [
        build_row(name, device=where, model=model, init=init, raw=raw, layer_weights=weights)
        for name in rows
    ]
    sets = load_sets(data, images=images, split=split)
    train, test = (some_objects(each, classes=classes, most=objects) for each in sets)
    smaller = [*(classes or ()), *([f"{objects}-objects"] if objects else ())]
    material = prepare_material(
        train, test, split="-".join([split, *smaller]), device=where, workers=workers, quiet=quiet
    )
    return [measure_row(row, material, settings, out=Path(out), quiet=quiet) for row in built]


def measure_row(
    row: Row, material: Material, settings: FewShot, *, out: Path, quiet: bool = True
) -> Path:
    """All rounds of all seeds of a row; writes OUT/pascal3d-<split>-<row>.json, returns its path.

    Rounds are appended to OUT/cache as they are finished and read back from there.
    """
    stem, device = f"pascal3d-{material.split}-{row.name}", material.train.boxes.device
    config = {"row": {**row.settings, "weights": row.layer_weights}, "protocol": asdict(settings)}
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
        **environment(device),
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

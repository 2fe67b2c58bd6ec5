"""`surefeat evaluate pascal3d`: keypoint detection from a handful of labels (paper, section 4.3).

What is measured is the detector: in rounds of growing annotation its head is fitted further, as
`surefeat keypoints fit` fits it, on any row's features, and finds the keypoints of all test objects
after each.

Names: "pck@0.1 bbox, 10 per class" is in percent, "pck area bbox, 10 per class" lies in [0, 1];
both are means over the classes, then over the seeds; "..., sd over seeds" is the spread of the
latter. "mean position ..." is the control: the mean place in the box, without looking.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import (
    add_lines,
    choose_device,
    environment,
    read_lines,
    write_lines,
    write_tensors,
)
from surefeat.core.geometry import into_box, out_of_box
from surefeat.keypoints.config import FewShot, KeypointConfig, Round, Split
from surefeat.keypoints.head import KeypointHead, find_points, fit
from surefeat.keypoints.views import CutObjects, ObjectViews, ViewStore
from surefeat.measure.fewshot_data import FewShotData, cut_sets, load_sets, some_objects
from surefeat.measure.results import write_result
from surefeat.measure.rows import Row, build_row

VERSION = 2
"""Part of every cache key: raised when the same settings begin to give other records."""

TEST_BATCH = 512

Record = Mapping[str, Any]
"""One round of one seed, as a line of the cache."""


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
    protocol: FewShot | None = None,
    head: KeypointConfig | None = None,
    device: str | torch.device | None = None,
    workers: int = 16,
    quiet: bool = False,
) -> list[Path]:
    """Measure rows (see measure.rows) on few-shot keypoints; their result files.

    data: a folder in one of the layouts of data.keypoints, its photos under `images`. `classes` and
    `objects` (per class) make a trial smaller; the split's name says so. Objects are cut out of
    their photos once for all rows. Interrupted, it continues when called again with the same
    settings.
    """
    protocol, head = protocol or FewShot(), head or KeypointConfig()
    where = choose_device(device)
    # Built first: a name or file that is wrong shows before the long preparation.
    built = [
        build_row(name, device=where, model=model, init=init, raw=raw, layer_weights=weights)
        for name in rows
    ]
    sets = load_sets(data, images=images, split=split)
    train, test = (some_objects(part, classes=classes, most=objects) for part in sets)
    smaller = [*(classes or ()), *([f"{objects}-objects"] if objects else ())]
    cut = cut_sets(
        train, test, split="-".join([split, *smaller]), size=head.size, jitter=head.jitter,
        device=where, workers=workers, quiet=quiet,
    )  # fmt: skip
    return [measure_row(row, cut, protocol, head, out=Path(out), quiet=quiet) for row in built]


def measure_row(
    row: Row,
    data: FewShotData,
    protocol: FewShot,
    head: KeypointConfig,
    *,
    out: Path,
    quiet: bool = True,
) -> Path:
    """All rounds of all seeds of a row; writes OUT/pascal3d-<split>-<row>.json, returns its path.

    Rounds are appended to OUT/cache as they are finished and read back from there.
    """
    stem, device = f"pascal3d-{data.split}-{row.name}", data.train.objects.boxes.device
    config = {
        "row": {**row.settings, "weights": row.layer_weights},
        "protocol": asdict(protocol),
        "head": asdict(head),
    }
    # Not the seeds: a seed that was measured with others beside it need not be measured again.
    keyed = config | {"protocol": asdict(protocol) | {"seeds": None}}
    parts = [VERSION, row.name, row.weights_sha256, keyed, device.type, data.fingerprint]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    rounds = Rounds(row, data, protocol, head, Cache(out / "cache" / f"{stem}-{key}"))
    with tqdm(
        total=len(protocol.seeds) * len(protocol.rounds), desc=row.name, disable=quiet
    ) as bar:
        records = [record for seed in protocol.seeds for record in rounds.run(seed, bar)]
    taken = sum(float(record["seconds"] + record["seconds_of_test"]) for record in records)
    result = result_of(records, data) | {
        "row": row.name,
        "config": config,
        "weights_sha256": row.weights_sha256,
        "seconds": round(taken + rounds.seconds, 1),
        "seconds_of_photos": round(data.seconds, 1),
        "features_on": sorted(rounds.store.places),
        **environment(device),
        "device": device.type,
    }
    return write_result(out / f"{stem}.json", result)


class Rounds:
    """The rounds of one row; the features that seeds and rounds share are computed once."""

    def __init__(
        self,
        row: Row,
        data: FewShotData,
        protocol: FewShot,
        head: KeypointConfig,
        cache: Cache,
    ) -> None:
        self.data, self.protocol, self.config = data, protocol, head
        self.cache, self.features = cache, partial(row.maps, cells=protocol.cells)
        self.store = ViewStore(data.train.objects, self.features, head)
        self.seconds = 0.0
        """Spent on the features of the test objects."""

    @cached_property
    def test(self) -> ObjectViews:
        """One view of every test object, its own box."""
        start, objects = time.perf_counter(), self.data.test.objects
        numbers = torch.arange(len(objects))
        views = ObjectViews(
            objects, numbers, objects.boxes, torch.zeros_like(numbers, dtype=torch.bool),
            features=self.features, size=self.config.size,
        )  # fmt: skip
        self.seconds = time.perf_counter() - start
        return views

    def run(self, seed: int, bar: Any) -> list[Record]:
        """A seed's records; rounds that the cache does not have start from the head before them."""
        sizes = self.protocol.rounds
        done = [record for record in self.cache.records() if record["seed"] == seed]
        if len(done) < len(sizes):
            head = KeypointHead(
                self.test.maps(slice(0, 1)).shape[1], len(self.data.train.objects.flip),
                hidden=self.config.hidden, generator=torch.Generator().manual_seed(seed),
            )  # fmt: skip
            if done and not self.cache.load_head(head, done[-1]):
                self.cache.start_over(seed)
                done = []
            head = head.to(self.test.boxes.device)
        bar.update(len(done))
        train, generator = self.data.train, torch.Generator().manual_seed(seed)
        ranks = image_ranks(train.category, train.photo, generator=generator)
        for number, size in enumerate(sizes[len(done) :], start=len(done)):
            # Each round has its own stream: a continued seed draws what it would have drawn.
            chosen, stream = round_objects(ranks, size), 1000 * (seed + 1) + number
            record = {"seed": seed, "round": size} | self.run_round(head, chosen, seed=stream)
            self.cache.add(record, None if number + 1 == len(sizes) else head)
            done.append(record)
            bar.update()
        return done

    def run_round(self, head: KeypointHead, chosen: Tensor, *, seed: int) -> dict[str, Any]:
        """Fit the head further on the chosen objects (N,), measure it on all test objects."""
        train, test, start = self.data.train, self.data.test, time.perf_counter()
        steps = self.config.steps(len(chosen), categories=len(self.data.classes))
        views, rows = self.store.views_of(chosen, seed=seed)
        batches = views.batches(rows, steps=steps, config=self.config, seed=seed)
        losses = fit(head, batches, steps=steps, config=self.config)
        last = losses[-max(1, len(losses) // 10) :]
        trained = time.perf_counter()
        guessed = out_of_box(mean_positions(train.objects, chosen), test.objects.boxes, size=UNIT)
        curves, control = (
            class_curves(relative_errors(points, test.objects), test.objects.visible, test.category,
                         classes=len(self.data.classes)).tolist()
            for points in (self.predict(head), guessed)
        )  # fmt: skip
        return {
            "images": train.images_per_class(chosen),
            "objects": len(chosen),
            "keypoints": int(train.objects.visible[chosen.to(rows.device)].sum()),
            "steps": steps,
            "loss": sum(last) / len(last),
            "seconds": round(trained - start, 2),
            "seconds_of_test": round(time.perf_counter() - trained, 2),
            "curves": [[round(value, 6) for value in curve] for curve in curves],
            "control": [[round(value, 6) for value in curve] for curve in control],
        }

    def predict(self, head: KeypointHead) -> Tensor:
        """Keypoints of all channels of all test objects: (N, K, 2), original pixels."""
        boxes = self.test.boxes
        parts = (slice(start, start + TEST_BATCH) for start in range(0, len(boxes), TEST_BATCH))
        return torch.cat([find_points(head, self.test.maps(p), boxes[p])[0] for p in parts])


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


def relative_errors(predicted: Tensor, objects: CutObjects) -> Tensor:
    """(N, K) distances to the truth over the longer side of the box; only visible ones count."""
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2] + 1
    distance: Tensor = torch.linalg.vector_norm(predicted - objects.points, dim=-1)
    return distance / sides.amax(-1, keepdim=True)


UNIT = (1, 1)
"""A grid of one cell: into_box gives shares of the box, 0 in its middle, +-1/2 at its edges."""


def mean_positions(objects: CutObjects, chosen: Tensor) -> Tensor:
    """(K, 2): each keypoint's mean place where the chosen objects (M,) show it, as UNIT has it.

    A keypoint that none of them shows is taken to be in the middle.
    """
    chosen = chosen.to(objects.boxes.device)
    places = into_box(objects.points[chosen], objects.boxes[chosen], size=UNIT)
    visible = objects.visible[chosen]
    total = torch.where(visible[..., None], places, 0.0).sum(0)
    return total / visible.sum(0)[:, None].clamp_min(1)


ALPHAS = torch.linspace(0, 1, 101, dtype=torch.float64)

PARTS = {"": "curves", "mean position ": "control"}
"""Prefix of a metric's name -> where a record has its curves."""


def class_curves(errors: Tensor, visible: Tensor, category: Tensor, *, classes: int) -> Tensor:
    """PCK over ALPHAS of every class: relative errors (N, K) -> (classes, 101) in [0, 1].

    visible (N, K) and category (N,) are the objects'. A keypoint is right when its error is
    strictly below alpha; every visible keypoint of a class counts the same, whatever the object.
    Errors that are not finite are wrong.
    """
    alphas = ALPHAS.to(errors.device)
    curves = []
    for number in range(classes):
        own = errors[visible & (category == number).to(errors.device)[:, None]].double()
        ordered = own.nan_to_num(torch.inf).sort().values
        curves.append(torch.searchsorted(ordered, alphas) / max(1, len(ordered)))
    return torch.stack(curves)


def area(curve: Tensor) -> Tensor:
    """Area under curves (..., 101) over alpha in [0, 1], trapezoidal."""
    return torch.trapezoid(curve, dx=1 / (len(ALPHAS) - 1))


def at_alpha(curve: Tensor, alpha: float) -> Tensor:
    """PCK in percent at one of ALPHAS: (..., 101) -> (...)."""
    return 100 * curve[..., round(alpha * (len(ALPHAS) - 1))]


def result_of(records: Sequence[Record], data: FewShotData) -> dict[str, Any]:
    """All metrics of a row's rounds."""
    classes = data.classes
    result: dict[str, Any] = {
        "benchmark": "pascal3d", "split": data.split, "rule": "bbox", "metrics": {},
        "counts": _counts(data), "by_class": {}, "pck_curves": {"alpha": ALPHAS.tolist()},
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
    for name, shares in values.items():
        by_seed = shares.mean(1)
        result["metrics"][name] = float(by_seed.mean())
        result["metrics"][f"{name}, sd over seeds"] = _spread(by_seed)
        result["by_class"][name] = dict(zip(classes, shares.mean(0).tolist(), strict=True))
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


def _counts(data: FewShotData) -> dict[str, Any]:
    counts: dict[str, Any] = {"classes": len(data.classes)}
    for name, part in (("train", data.train), ("test", data.test)):
        counts[f"{name} images"] = len(torch.unique(part.photo))
        counts[f"{name} objects"] = len(part.objects)
        counts[f"{name} keypoints"] = int(part.objects.visible.sum())
    return counts


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
        """Finished rounds, oldest first."""
        return list(read_lines(self.file))

    def start_over(self, seed: int) -> None:
        """Leave the records of the other seeds: this one's can not be continued."""
        write_lines(self.file, [one for one in self.records() if one["seed"] != seed])

    def add(self, record: Record, head: KeypointHead | None) -> None:
        """A finished round, and the head that the seed's next one starts from; None: it was last.

        The head's file says which round it is of: after a crash between the two writes they do not
        fit, `load_head` refuses, and the seed starts over.
        """
        path = self._head_file(record["seed"])
        if head is not None:
            write_tensors(path, head.state_dict(), {"round": str(record["round"])})
        add_lines(self.file, [record])
        if head is None:
            path.unlink(missing_ok=True)

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

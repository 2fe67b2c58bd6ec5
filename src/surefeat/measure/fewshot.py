"""`surefeat evaluate pascal3d`: keypoint detection from a handful of labels (paper, section 4.3).

What is measured is the detector: in rounds of growing annotation its head is fitted further, as
`surefeat keypoints fit` fits it, on any row's features, and finds the keypoints of all test objects
after each. Metrics are means over the classes, then over the seeds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.files import add_lines, choose_device, file_stem, read_lines
from surefeat.core.geometry import into_box, out_of_box
from surefeat.data.keypoints import KeypointSet, Labelled, load_pascal3d
from surefeat.keypoints.config import FewShot, KeypointConfig, Round, Split
from surefeat.keypoints.head import KeypointHead, find_points, fit
from surefeat.keypoints.views import CutObjects, ObjectViews, ViewStore, cut_objects
from surefeat.measure.metrics import area
from surefeat.measure.results import CONTROL, Result, Score, about_row, cache_file, write_result
from surefeat.measure.rows import Row, build_row

VERSION = 3
"""Part of every cache key: raised when the same settings begin to give other records."""

TEST_BATCH = 512

HELD_OUT = 4
"""One in so many training images is what the development split measures on."""

Record = Mapping[str, Any]
"""One round of one seed."""


def evaluate_fewshot(
    data: str | Path,
    *,
    images: str | Path | None = None,
    rows: Sequence[str | Row] = ("ours",),
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
    quiet: bool = False,
) -> list[Path]:
    """Measure rows (see measure.rows) on few-shot keypoints; their result files.

    data: a folder in one of the layouts of data.keypoints, its photos under `images`. `classes` and
    `objects` (per class) make a trial smaller; the split's name says so. Objects are cut out of
    their photos once for all rows. Interrupted, it continues with the first seed not yet done.
    """
    protocol, head = protocol or FewShot(), head or KeypointConfig()
    where = choose_device(device)
    # Built first: a name or file that is wrong shows before the long preparation.
    built = [
        row
        if isinstance(row, Row)
        else build_row(row, device=where, model=model, init=init, raw=raw, layer_weights=weights)
        for row in rows
    ]
    sets = load_sets(data, images=images, split=split)
    train, test = (some_objects(part, classes=classes, most=objects) for part in sets)
    smaller = [*(classes or ()), *([f"{objects}-objects"] if objects else ())]
    cut = cut_sets(
        train, test, split="-".join([split, *smaller]), size=head.size, jitter=head.jitter,
        device=where, quiet=quiet,
    )  # fmt: skip
    return [measure_row(row, cut, protocol, head, out=Path(out), quiet=quiet) for row in built]


def load_sets(
    data: str | Path, *, images: str | Path | None = None, split: Split = "val"
) -> tuple[KeypointSet, KeypointSet]:
    """Objects to learn from and to measure on, in the layouts that load_pascal3d knows.

    val: all of train, and val. dev: three quarters of the training images, and the rest of them,
    to choose settings on; which image is where follows from a hash of its name.
    """
    if split not in ("val", "dev"):
        raise ValueError(f"unknown split {split!r}; choose val, or dev to choose settings on")
    train = load_pascal3d(data, split="train", images=images)
    if split == "val":
        return train, load_pascal3d(data, split="val", images=images)
    learn = tuple(item for item in train.objects if not held_out(item.name))
    check = tuple(item for item in train.objects if held_out(item.name))
    return KeypointSet(train.categories, learn), KeypointSet(train.categories, check)


def held_out(name: str) -> bool:
    """Whether the development split measures on the image of this name."""
    digest = hashlib.sha256(PurePath(name).stem.encode()).digest()
    return digest[0] % HELD_OUT == 0


def some_objects(
    labelled: KeypointSet, *, classes: Sequence[str] | None = None, most: int | None = None
) -> KeypointSet:
    """Objects with at least one visible keypoint, of some classes, at most so many of each.

    Difficult, truncated and occluded objects stay in: what they do not show is not visible.
    """
    names = [category.name for category in labelled.categories]
    unknown = sorted(set(classes or ()) - set(names))
    if unknown:
        raise ValueError(f"there is no class {', '.join(unknown)}; choose from {', '.join(names)}")
    if most is not None and most < 1:
        raise ValueError(f"objects is {most}; use at least 1 per class")
    kept = [n for n, name in enumerate(names) if classes is None or name in classes]
    items: list[Labelled] = []
    for new, old in enumerate(kept):
        own = [one for one in labelled.objects if one.category == old and bool(one.visible.any())]
        if not own:
            raise ValueError(f"no object of {names[old]!r} shows a keypoint; leave the class out")
        count = min(len(own), most or len(own))
        items += [replace(own[i * len(own) // count], category=new) for i in range(count)]
    return KeypointSet(tuple(labelled.categories[n] for n in kept), tuple(items))


@dataclass(frozen=True, eq=False)
class SplitPart:
    """One side of a split, N objects, cut out of their photos once for all rows."""

    objects: CutObjects
    """On the device, as bytes."""
    category: Tensor
    """(N,) number of their class, on the CPU."""
    photo: Tensor
    """(N,) number of their photo, on the CPU."""


@dataclass(frozen=True, eq=False)
class FewShotData:
    """What all rows are measured on."""

    split: str
    classes: tuple[str, ...]
    train: SplitPart
    test: SplitPart
    fingerprint: str
    """Of names, boxes and keypoints of all objects."""


def cut_sets(
    train: KeypointSet, test: KeypointSet, *, split: str, size: int, jitter: float,
    device: torch.device, quiet: bool = True,
) -> FewShotData:  # fmt: skip
    """Cut all objects out of their photos, those to learn from with room for jitter."""
    if train.categories != test.categories:
        raise ValueError("objects to train and to test on have other classes or keypoints")
    digest, parts = hashlib.sha256(repr(train.categories).encode()), []
    for labelled, room in ((train, jitter), (test, 0.0)):
        digest.update(f"{len(labelled.objects)}".encode())
        for item in labelled.objects:
            digest.update(f"{item.name} {item.category}".encode())
            for tensor in (item.box, item.points.nan_to_num(-1.0)):
                digest.update(tensor.numpy().tobytes())
        objects = cut_objects(labelled, size=size, jitter=room, device=device, quiet=quiet)
        numbers: dict[str, int] = {}
        photo = [numbers.setdefault(item.name, len(numbers)) for item in labelled.objects]
        category = [item.category for item in labelled.objects]
        parts.append(SplitPart(objects, torch.tensor(category), torch.tensor(photo)))
    names = tuple(category.name for category in train.categories)
    return FewShotData(split, names, parts[0], parts[1], digest.hexdigest()[:16])


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

    Seeds are appended to OUT/cache as they are finished and read back from there.
    """
    stem, device = file_stem("pascal3d", data.split, row.name), data.train.objects.boxes.device
    settings = {"row": {**row.settings, "weights": row.layer_weights}, "head": asdict(head)}
    # Not the seeds: a seed that was measured with others beside it need not be measured again.
    keyed = [VERSION, row.name, row.weights_sha256, settings, protocol.rounds, protocol.cells]
    cache = cache_file(out, stem, [*keyed, device.type, data.fingerprint])
    done = {seed["seed"]: seed for seed in read_lines(cache)}
    rounds = Rounds(row, data, protocol, head)
    missing = [seed for seed in protocol.seeds if seed not in done]
    total = len(missing) * len(protocol.rounds)
    with progress.bar(total=total, desc=row.name, unit="round", quiet=quiet) as bar:
        for seed in missing:
            done[seed] = rounds.run(seed, bar)
            add_lines(cache, [done[seed]])
    seeds = [done[seed] for seed in protocol.seeds]
    result = result_of([record for seed in seeds for record in seed["rounds"]], data)
    seconds = round(sum(float(seed["seconds"]) for seed in seeds), 1)
    config = settings | {"protocol": asdict(protocol)}
    about = about_row(row, config, device=device, seconds=seconds)
    return write_result(out / f"{stem}.json", result | about)


class Rounds:
    """The rounds of one row; the features that seeds and rounds share are computed once."""

    def __init__(
        self, row: Row, data: FewShotData, protocol: FewShot, head: KeypointConfig
    ) -> None:
        self.data, self.protocol, self.config = data, protocol, head
        self.features = partial(row.maps, cells=protocol.cells)
        self.store = ViewStore(data.train.objects, self.features, head)

    @cached_property
    def test(self) -> ObjectViews:
        """One view of every test object, its own box."""
        objects = self.data.test.objects
        numbers = torch.arange(len(objects))
        return ObjectViews(
            objects, numbers, objects.boxes, torch.zeros_like(numbers, dtype=torch.bool),
            features=self.features, size=self.config.size,
        )  # fmt: skip

    def run(self, seed: int, bar: Any) -> dict[str, Any]:
        """A seed's rounds, each from the head of the one before, and the seconds of all."""
        start, train, records = time.perf_counter(), self.data.train, []
        head = KeypointHead(
            self.test.maps(slice(0, 1)).shape[1], len(train.objects.flip),
            hidden=self.config.hidden, generator=torch.Generator().manual_seed(seed),
        ).to(self.test.boxes.device)  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        ranks = image_ranks(train.category, train.photo, generator=generator)
        for number, size in enumerate(self.protocol.rounds):
            chosen, stream = round_objects(ranks, size), 1000 * (seed + 1) + number
            record = self.run_round(head, chosen, seed=stream)
            records.append({"seed": seed, "round": size} | record)
            bar.update()
        return {"seed": seed, "seconds": time.perf_counter() - start, "rounds": records}

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
        images = zip(train.category[chosen].tolist(), train.photo[chosen].tolist(), strict=True)
        shown = int(train.objects.visible[chosen.to(rows.device)].sum())
        record: dict[str, Any] = {
            "images": len(set(images)), "objects": len(chosen), "keypoints": shown,
            "steps": steps, "loss": sum(last) / len(last),
        }  # fmt: skip
        for route, points in (("", self.predict(head)), (CONTROL, guessed)):
            errors = relative_errors(points, test.objects)
            curves = class_curves(
                errors, test.objects.visible, test.category, classes=len(self.data.classes)
            )
            record |= {str(score): float(shares.mean()) for score, shares in _scored(curves, route)}
            record[CURVES[route]] = [[round(v, 6) for v in curve] for curve in curves.tolist()]
        tested = time.perf_counter()
        seconds = {"seconds": trained - start, "seconds_of_test": tested - trained}
        return record | {name: round(value, 2) for name, value in seconds.items()}

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

CURVES = {"": "curves", CONTROL: "control"}
"""Route -> where a record has its curves."""


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


def at_alpha(curve: Tensor, alpha: float) -> Tensor:
    """PCK in percent at one of ALPHAS: (..., 101) -> (...)."""
    return 100 * curve[..., round(alpha * (len(ALPHAS) - 1))]


def _scored(curves: Tensor, route: str, images: str = "") -> list[tuple[Score, Tensor]]:
    """Scores of curves (..., 101) of a route, by their names."""
    score = Score("pck", route, rule="bbox", images=images)
    by_alpha = [(replace(score, alpha=alpha), at_alpha(curves, alpha)) for alpha in (0.1, 0.05)]
    return [*by_alpha, (replace(score, kind="pck area"), area(curves))]


def result_of(records: Sequence[Record], data: FewShotData) -> Result:
    """All metrics of a row's rounds."""
    counts: dict[str, Any] = {"classes": len(data.classes)}
    for name, part in (("train", data.train), ("test", data.test)):
        counts[f"{name} images"] = len(torch.unique(part.photo))
        counts[f"{name} objects"] = len(part.objects)
        counts[f"{name} keypoints"] = int(part.objects.visible.sum())
    result: Result = {
        "benchmark": "pascal3d", "split": data.split, "rule": "bbox", "metrics": {},
        "counts": counts, "by_class": {}, "pck_curves": {"alpha": ALPHAS.tolist()},
    }  # fmt: skip
    for size in dict.fromkeys(record["round"] for record in records):
        own = [record for record in records if record["round"] == size]
        for route, key in CURVES.items():
            curves = torch.tensor([record[key] for record in own], dtype=torch.float64)
            _add_curves(result, route, str(size), curves, data.classes)
        counts |= {
            f"{what}, {size} per class": [record[what] for record in own]
            for what in ("images", "objects", "keypoints")
        }
    result["rounds"] = [
        {key: value for key, value in record.items() if key not in CURVES.values()}
        for record in records
    ]
    return result


def _add_curves(
    result: Result, route: str, size: str, curves: Tensor, classes: Sequence[str]
) -> None:
    """Metrics of one round size from curves (seeds, classes, 101)."""
    for score, shares in _scored(curves, route, images=size):
        by_seed = shares.mean(1)
        spread = float(by_seed.std()) if len(by_seed) > 1 else None
        result["metrics"][str(score)] = float(by_seed.mean())
        result["metrics"][str(replace(score, spread=True))] = spread
        result["by_class"][str(score)] = dict(zip(classes, shares.mean(0).tolist(), strict=True))
    result["pck_curves"][f"{route} {size} per class".lstrip()] = curves.mean((0, 1)).tolist()

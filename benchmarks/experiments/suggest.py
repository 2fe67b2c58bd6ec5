"""Which photos to label: suggested ones against random ones, as a few-shot curve.

    python benchmarks/experiments/suggest.py DATA --sets bus chair --seeds 0 1 2 --out a.json
    python benchmarks/experiments/suggest.py --merge a.json b.json --out suggest.json

DATA holds cub-dev, pascal3d and voc. Of each set, 50 of 100 photos are to choose from (other 50 for
every seed); a head learns from 5, 10 and 20 of them and finds the parts in 100 other photos. All
choices get the same head, seeds and settings: descriptors alone, 192 pixels, 32 hidden channels,
3 views, so that a fit takes seconds; the detector that ships is larger and better. Random choice is
the mean of 3 draws per seed.

Which of WAYS ships is decided on development sets: other birds, and other classes than the FINAL
ones, of the train split alone. It is the way with the highest mean gain over random choice, over
those sets, their seeds and all numbers of labels. `boxed` knows the labelled boxes, which nobody
has who asks what to label: it says what knowing the object would be worth.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import fit_head
from surefeat.keypoints.head import find_points
from surefeat.keypoints.suggest import KEPT, cover, for_others
from surefeat.keypoints.views import CutObjects, ObjectViews, ViewStore, cut_objects, maps_of
from surefeat.match.related import GRID
from surefeat.match.search import even_grid
from surefeat.match.votes import voting_grid
from surefeat.measure.metrics import longer_side
from surefeat.model.config import POINT_WEIGHTS, WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort

HEAD = KeypointConfig(size=192, hidden=32, views=3, least_views=0)
LABELS = (5, 10, 20)
DRAWS = 3
FINAL = ("birds", "car", "aeroplane")


@dataclass(frozen=True)
class Sizes:
    """How many photos."""

    pool: int = 100
    """Of which every seed has its own `choice`."""
    choice: int = 50
    """To choose from."""
    test: int = 100
    """Asked."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Whole photos as coarse grids; where a grid has fewer cells than others it is filled up."""

    descriptors: Tensor
    """(N, n, C) unit length."""
    lower: Tensor
    """(N, n, D) unit length."""
    confidence: Tensor
    """(N, n) 1/sigma; 0 where filled up."""
    common: Tensor
    """(N, n): the highest similarity with the model's cohort, by the lower layers."""
    inside: Tensor
    """(N, n): 1 inside the labelled box, else 0."""
    centre: Tensor
    """(K,): the cohort's."""

    def part(self, rows: Sequence[int]) -> Seen:
        """Some of the photos."""
        own = {f.name: getattr(self, f.name)[list(rows)] for f in fields(self)[:-1]}
        return Seen(**own, centre=self.centre)

    def both(self) -> Tensor:
        """(N, n, K): descriptors and lower layers; products are similarities as in matching."""
        first, second = ((weight / sum(POINT_WEIGHTS)) ** 0.5 for weight in POINT_WEIGHTS)
        return torch.cat([self.descriptors * first, self.lower * second], dim=-1)

    def own_kind(self) -> Tensor:
        """(N, n): squared confidence, times by how much more the others than the cohort resemble.

        By how much its best similarity in another photo, on average, exceeds that in the cohort;
        half of all cells count as 0.
        """
        count, cells = self.confidence.shape
        best = _best(self.lower, _kept(self.confidence)).reshape(count, count, cells)
        own = torch.arange(count, device=best.device)
        best[own, own] = 0
        excess = best.sum(0) / (count - 1) - self.common
        real = self.confidence > 0
        above = (excess - excess[real].median()).clamp_min(1e-6)
        return self.confidence.square() * above


Way = Callable[[Seen], tuple[Tensor, Tensor]]
"""(N, M): how far each photo covers M things, and what these count (M,)."""


def _kept(weights: Tensor) -> Tensor:
    """(N, n) -> (N, KEPT) cells that weigh most."""
    return weights.topk(min(KEPT, weights.shape[1]), dim=1).indices


def _gather(vectors: Tensor, cells: Tensor) -> Tensor:
    return vectors.gather(1, cells[..., None].expand(-1, -1, vectors.shape[-1]))


def _best(vectors: Tensor, cells: Tensor, of: Tensor | None = None) -> Tensor:
    """(N, N * n): of every cell (those in `of`, or all) the best similarity in each photo's."""
    things = (vectors if of is None else _gather(vectors, of)).flatten(0, 1)
    return torch.stack([(own @ things.T).amax(0) for own in _gather(vectors, cells)])


def by_cells(seen: Seen, vectors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Things are cells: covered as far as a similar one is in a photo."""
    cells = _kept(weights)
    alike = _best(vectors, cells, cells).clamp(0, 1)
    shares = F.normalize(weights.gather(1, cells), p=1, dim=1).flatten() / len(cells)
    owners = torch.arange(len(cells), device=cells.device).repeat_interleave(cells.shape[1])
    return for_others(alike, owners), shares


def by_pairs(seen: Seen, vectors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Things are photos: covered as far as the mean of their cells is, by one photo alone."""
    alike, shares = by_cells(seen, vectors, weights)
    photos = (alike * shares).reshape(len(alike), len(alike), -1).sum(-1) * len(alike)
    return _of_photos(photos)


def by_means(seen: Seen, vectors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Things are photos: covered as far as the means of the cells resemble each other."""
    shares = F.normalize(weights, p=1, dim=1)
    means = (shares[..., None] * vectors).sum(1)
    means = F.normalize(means - seen.centre, dim=1)
    return _of_photos((means @ means.T).clamp(0, 1))


def _of_photos(alike: Tensor) -> tuple[Tensor, Tensor]:
    count = len(alike)
    rows = torch.arange(count, device=alike.device)
    return for_others(alike, rows), torch.full((count,), 1 / count, device=alike.device)


def first_version(seen: Seen) -> tuple[Tensor, Tensor]:
    """Means by confidence; what a photo covers of itself counts too."""
    alike, shares = by_means(seen, seen.both(), seen.confidence)
    return alike.fill_diagonal_(1.0), shares


WAYS: dict[str, Way] = {
    "mean": first_version,
    "mean-others": lambda s: by_means(s, s.both(), s.confidence),
    "cells": lambda s: by_cells(s, s.descriptors, s.confidence.square()),
    "cells-both": lambda s: by_cells(s, s.both(), s.confidence.square()),
    "kind": lambda s: by_cells(s, s.descriptors, s.own_kind()),
    "kind-both": lambda s: by_cells(s, s.both(), s.own_kind()),
    "kind-mean": lambda s: by_means(s, s.both(), s.own_kind()),
    "kind-pairs": lambda s: by_pairs(s, s.both(), s.own_kind()),
    "boxed": lambda s: by_cells(s, s.both(), s.confidence.square() * s.inside),
}
"""`kind`: cells weigh by `Seen.own_kind`; without, by squared confidence."""

CHEATS = ("boxed",)


@dataclass(frozen=True, eq=False)
class Material:
    """One set, seen once: what is chosen from, and what is asked."""

    seen: Seen
    views: ObjectViews
    test: CutObjects
    maps: Tensor
    """(test, C, h, w) of the test objects' boxes."""


def sets(data: Path, name: str, sizes: Sizes) -> tuple[KeypointSet, KeypointSet]:
    """Photos of one object each: to choose from, and to ask."""
    rng = random.Random(0)
    if name.startswith("birds"):
        whole = read_coco(data / "cub-dev/keypoints.json", images=data / "cub-dev/photos")
        objects = list(whole.objects)
        rng.shuffle(objects)
        objects = objects if name in FINAL else objects[200:]
        parts = [objects[: sizes.pool], objects[sizes.pool :]]
        category = whole.categories[0]
    else:
        splits = ("train", "val") if name in FINAL else ("train",)
        parts = []
        for split in splits:
            whole = read_coco(data / f"pascal3d/keypoints_{split}.json", images=data / "voc")
            objects = _alone(whole.only([name]))
            rng.shuffle(objects)
            parts.append(objects)
        category = whole.categories[objects[0].category]
        if len(parts) == 1:
            parts.append(parts[0][sizes.pool :])
    pool, test = (
        KeypointSet((category,), tuple(replace(item, category=0) for item in part[:count]))
        for part, count in zip(parts, (sizes.pool, sizes.test), strict=True)
    )
    return pool, test


def _alone(whole: KeypointSet) -> list[Labelled]:
    names = [item.name for item in whole.objects]
    return [
        item for item in whole.objects
        if names.count(item.name) == 1 and bool(item.visible.any())
        and longer_side(item.box) >= 80
    ]  # fmt: skip


def _grid(features: Features, box: Tensor) -> list[Tensor]:
    """What Seen has of one photo."""
    points = even_grid(features, size=voting_grid(features.frame.network, GRID))
    box = box.to(points.device)
    inside = ((points >= box[:2]) & (points <= box[2:])).all(1)
    own = [
        features.at(points), features.lower_at(points), features.confidence_at(points),
        features.common_at(points), inside.float(),
    ]  # fmt: skip
    more = GRID * GRID - len(points)
    return [F.pad(part, (0, 0, 0, more) if part.ndim == 2 else (0, more)) for part in own]


CENTRE = Path(__file__).resolve().parent / "cohort_centre.json"
"""The mean descriptor of the shipped cohort's places, which the cohort itself does not keep."""


def centre_of(cohort: Cohort) -> Tensor:
    """(C + D,): the mean of its places, as vectors whose products are similarities."""
    shares = [(weight / sum(POINT_WEIGHTS)) ** 0.5 for weight in POINT_WEIGHTS]
    descriptor = torch.tensor(json.loads(CENTRE.read_text()))
    return torch.cat([descriptor * shares[0], cohort.lower.mean(0) * shares[1]])


@torch.no_grad()
def look(model: DenseFeatures, pool: KeypointSet, test: KeypointSet) -> Material:
    assert model.cohort is not None
    centre = centre_of(model.cohort)
    grids = [_grid(model.extract(item.read())[0], item.box) for item in pool.objects]
    seen = Seen(*map(torch.stack, zip(*grids, strict=True)), centre.to(model.device))

    def describe(crops: Tensor) -> Tensor:
        return model(crops.float() / 255).descriptors

    cut: dict[str, Any] = {"size": HEAD.size, "device": model.device}
    objects = cut_objects(pool, jitter=HEAD.jitter, **cut)
    store = ViewStore(objects, describe, HEAD, seed=0)
    asked = cut_objects(test, jitter=0.0, **cut)
    maps = torch.cat([maps_of(part, describe) for part in asked.pixels.split(16)])
    return Material(seen, store.every, asked, maps)


def pck(material: Material, chosen: Sequence[int], seed: int) -> float:
    """Of a head fitted on `chosen`, at a tenth of the box's longer side, over visible keypoints."""
    views = material.views
    rows = torch.isin(views.numbers, torch.tensor(chosen, device=views.numbers.device))
    head = fit_head(
        views, rows.nonzero()[:, 0], HEAD, objects=len(chosen), kinds=1, seed=seed
    ).eval()  # fmt: skip
    test = material.test
    points, _ = find_points(head, material.maps, test.boxes)
    longer = (test.boxes[:, 2:] - test.boxes[:, :2] + 1).amax(-1, keepdim=True)
    right = (points - test.points).norm(dim=-1) < 0.1 * longer
    return float(right[test.visible].float().mean())


def curve(material: Material, seed: int, ways: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """PCK by number of labels, of each way to choose and of random choice."""
    generator = torch.Generator().manual_seed(seed)
    count = len(material.seen.confidence)
    pool = torch.randperm(count, generator=generator)[: sizes.choice].tolist()
    labels = [n for n in LABELS if n <= len(pool)]
    found: dict[str, Any] = {way: {} for way in (*ways, "random")}
    for n in labels:
        draws = [torch.randperm(len(pool), generator=generator)[:n].tolist() for _ in range(DRAWS)]
        found["random"][n] = mean(
            pck(material, [pool[row] for row in some], seed) for some in draws
        )
    with torch.no_grad():
        seen = material.seen.part(pool)
        orders = {way: cover(*WAYS[way](seen), count=max(labels))[0] for way in ways}
    for way, order in orders.items():
        for n in labels:
            found[way][n] = pck(material, [pool[row] for row in order[:n]], seed)
    return found


def summary(curves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, all values, and the gain over random choice with its deviation."""
    labels = list(curves[0]["random"])
    rows: dict[str, Any] = {}
    for way in curves[0]:
        values = {n: [one[way][n] for one in curves] for n in labels}
        rows[way] = {str(n): round(mean(some), 4) for n, some in values.items()}
        rows[f"{way}, by seed"] = {str(n): [round(v, 4) for v in s] for n, s in values.items()}
        if way == "random":
            continue
        gaps = {n: [one[way][n] - one["random"][n] for one in curves] for n in labels}
        rows[f"{way}, gain over random"] = {
            str(n): {"mean": round(mean(g), 4), "deviation": round(_deviation(g), 4)}
            for n, g in gaps.items()
        }
    return rows


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def gains(metrics: dict[str, Any], way: str, names: Sequence[str]) -> dict[str, Any]:
    """Mean gain of a way over random choice, by number of labels and over all, by set and seed."""
    by_labels: dict[str, list[float]] = {}
    for name in names:
        for n, values in metrics[name][f"{way}, by seed"].items():
            others = metrics[name]["random, by seed"][n]
            by_labels.setdefault(n, []).extend(v - o for v, o in zip(values, others, strict=True))
    each = [mean(some) for some in zip(*by_labels.values(), strict=True)]
    every = {n: round(mean(some), 4) for n, some in by_labels.items()}
    error = _deviation(each) / len(each) ** 0.5
    return {**every, "all": round(mean(each), 4), "error": round(error, 4)}


def merge(files: Sequence[Path]) -> dict[str, Any]:
    """Records of several calls as one, and which way the development sets chose."""
    records = [json.loads(file.read_text()) for file in files]
    for name in ("config", "weights_sha256", "commit"):
        if any(record[name] != records[0][name] for record in records):
            raise ValueError(f"records differ in {name}: they are not of one experiment")
    metrics = {name: rows for record in records for name, rows in record["metrics"].items()}
    if len(metrics) < sum(len(record["metrics"]) for record in records):
        raise ValueError("records have a set in common; measure a set in one call")
    ways = [way for way in WAYS if all(way in rows for rows in metrics.values())]
    sets = {"development": [name for name in metrics if name not in FINAL],
             "final": [name for name in FINAL if name in metrics]}  # fmt: skip
    means = {
        part: {way: gains(metrics, way, names) for way in ways}
        for part, names in sets.items() if names
    }  # fmt: skip
    record = {**records[0], "metrics": metrics, "mean gain over random": means}
    record["seconds"] = sum(one["seconds"] for one in records)
    record["seeds"] = {name: seeds for one in records for name, seeds in one["seeds"].items()}
    record["sets"] = sets
    if "development" in means:
        fair = [way for way in ways if way not in CHEATS]
        record["chosen"] = max(fair, key=lambda way: means["development"][way]["all"])
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--sets", nargs="+", default=list(FINAL))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--merge", type=Path, nargs="+", help="records of earlier calls")
    parser.add_argument("--device")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.merge:
        record = merge(args.merge)
        print(json.dumps(record["mean gain over random"], indent=1), record.get("chosen"))
        if args.out:
            write_json(args.out, record)
        return
    if args.data is None:
        parser.error("name the folder with the data, or --merge records")
    start = time.perf_counter()
    device = choose_device(args.device)
    about = environment(device)  # before anything is written into the tree
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    model = DenseFeatures.from_pretrained(device=device)
    metrics: dict[str, Any] = {}
    for name in args.sets:
        material = look(model, *sets(args.data, name, sizes))
        print(name, "seen", round(time.perf_counter() - start), "s", flush=True)
        metrics[name] = summary([curve(material, seed, args.ways, sizes) for seed in args.seeds])
        shown = {key: rows for key, rows in metrics[name].items() if "by seed" not in key}
        print(name, json.dumps(shown), round(time.perf_counter() - start), "s", flush=True)
    record = {
        "row": "suggested and random labels", "benchmark": "few-shot keypoints, PCK@0.1 of the box",
        "split": "50 photos to choose from, 100 others asked", "metrics": metrics,
        "config": {"head": asdict(HEAD), "labels": LABELS, "draws": DRAWS, **asdict(sizes),
                   "ways": args.ways},
        "seeds": dict.fromkeys(args.sets, args.seeds),
        "seconds": round(time.perf_counter() - start),
        "weights_sha256": file_hash(model_folder(None) / WEIGHTS), **about,
    }  # fmt: skip
    if args.out:
        write_json(args.out, record)


if __name__ == "__main__":
    main()

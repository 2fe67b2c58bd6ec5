"""Part search: which vectors, which cells of a photo, what verification gives, large photos.

    python benchmarks/experiments/part_search.py DATA --cache FOLDER --part vectors
        --out results/studies/search.json

Parts: vectors (on the development sets), budget and verify (on others), recall (faiss beside exact
search at a million cells), large (a small bird in a photo of 6,000 pixels). Each adds its numbers
to the file. Features are extracted once, into the cache; half an hour in all on one core.

A query is a labelled keypoint. Every photo but its own gives its best cell; of the ten best photos
the share counts whose place lies within a tenth of the box's longer side of the same keypoint of an
object of the same category. Sets: birds (cub-dev, one category) and PASCAL3D+ (12 categories,
equally many photos of each, where an object's longer side is at least 0.3 of the photo's).
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import environment, write_json
from surefeat.core.geometry import cell_centres
from surefeat.core.image import resize
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco
from surefeat.index.cells import Projection, described, fit_projection
from surefeat.index.search import faiss_of
from surefeat.index.shards import SCALE
from surefeat.index.store import BUDGET, DIMENSION, FITTED
from surefeat.match import search
from surefeat.match.large import best_parts, cut_part, moved_back
from surefeat.match.points import match_points, quality, spread
from surefeat.match.search import prepare
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

TOP = 10
NEAR = 0.1
LEAST = 0.3
"""Longer side of an object that is asked for, in the photo's."""

SETS = {
    "birds-dev": ("cub-dev/keypoints.json", "cub-dev/photos", 0, 200),
    "birds": ("cub-dev/keypoints.json", "cub-dev/photos", 200, 400),
    "pascal3d-dev": ("pascal3d/keypoints_train.json", "voc", 0, 240),
    "pascal3d": ("pascal3d/keypoints_val.json", "voc", 0, 400),
}
"""Labels, photos, how many of the shuffled photos are passed over, how many are taken."""

Query = tuple[int, Labelled, int]
"""Photo, object and keypoint."""


@dataclass(frozen=True, eq=False)
class Photos:
    """Photos of a set with their features and labelled objects."""

    features: list[Features]
    objects: list[list[Labelled]]

    def queries(self, count: int) -> list[Query]:
        every = [
            (number, item, part)
            for number, items in enumerate(self.objects)
            for item in items
            if _extent(item) >= LEAST * max(item.size)
            for part in item.visible.nonzero()[:, 0].tolist()
        ]
        random.Random(0).shuffle(every)
        return every[:count]

    def is_right(self, photo: int, query: Query, place: Tensor) -> bool:
        _, asked, part = query
        return any(
            item.category == asked.category
            and bool(item.visible[part])
            and float((item.points[part] - place).norm()) <= NEAR * _extent(item)
            for item in self.objects[photo]
        )

    def possible(self, queries: Sequence[Query]) -> float:
        """The precision of somebody who knows the answers: some parts are in fewer photos."""
        total = 0
        for number, asked, part in queries:
            there = sum(
                any(i.category == asked.category and bool(i.visible[part]) for i in items)
                for other, items in enumerate(self.objects)
                if other != number
            )
            total += min(TOP, there)
        return total / TOP / len(queries)


def _extent(item: Labelled) -> float:
    return float((item.box[2:] - item.box[:2] + 1).max())


def read_set(data: Path, cache: Path, name: str, model: DenseFeatures) -> Photos:
    labels, images, start, count = SETS[name]
    labelled = read_coco(data / labels, images=data / images)
    chosen, by_photo = _chosen(labelled, start, count)
    features = []
    for number, photo in enumerate(tqdm(chosen, desc=name)):
        file = cache / name / f"{number:04d}.safetensors"
        if not file.exists():
            model.extract(by_photo[photo][0].read())[0].save(file, photo=photo)
        features.append(Features.load(file))
    return Photos(features, [by_photo[photo] for photo in chosen])


def _chosen(
    labelled: KeypointSet, start: int, count: int
) -> tuple[list[str], dict[str, list[Labelled]]]:
    by_photo: dict[str, list[Labelled]] = {}
    for item in labelled.objects:
        by_photo.setdefault(item.name, []).append(item)
    names = sorted(by_photo)
    random.Random(18).shuffle(names)
    if len(labelled.categories) == 1:
        return names[start : start + count], by_photo
    kinds: dict[int, list[str]] = {}
    for name in names:
        large = max(
            by_photo[name], key=lambda item: float((item.box[2:] - item.box[:2] + 1).prod())
        )
        if int(large.visible.sum()) >= 3 and _extent(large) >= LEAST * max(large.size):
            kinds.setdefault(large.category, []).append(name)
    rounds = range(max(map(len, kinds.values())))
    order = [kinds[kind][n] for n in rounds for kind in sorted(kinds) if n < len(kinds[kind])]
    return order[:count], by_photo


def cell_points(features: Features) -> Tensor:
    rows, columns = features.descriptors.shape[1:]
    return features.frame.to_original(cell_centres(size=(rows, columns), stride=features.stride))


def joint(features: Features, points: Tensor) -> Tensor:
    """What matching compares: (N, 3200) of unit length."""
    total = sum(POINT_WEIGHTS)
    parts = (features.at(points), features.lower_at(points))
    pairs = zip(parts, POINT_WEIGHTS, strict=True)
    return torch.cat([part * (weight / total) ** 0.5 for part, weight in pairs], dim=1)


Describe = Callable[[Features, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Cells:
    """All cells of all photos, and how like each query they are."""

    points: Tensor
    """(N, 2)."""
    photo: Tensor
    """(N,) whose they are."""
    first: list[int]
    """The first cell of every photo."""
    scores: Tensor
    """(Q, N)."""

    @staticmethod
    def of(photos: Photos, queries: Sequence[Query], describe: Describe, *, small: bool) -> Cells:
        places = [cell_points(features) for features in photos.features]
        pairs = zip(photos.features, places, strict=True)
        vectors = torch.cat([describe(features, points) for features, points in pairs])
        if small:  # as an index stores them
            vectors = F.normalize((vectors * SCALE).round(), dim=1)
        asked = torch.cat(
            [describe(photos.features[n], item.points[k][None]) for n, item, k in queries]
        )
        counts = torch.tensor([len(points) for points in places])
        owners = torch.arange(len(places)).repeat_interleave(counts)
        first = (counts.cumsum(0) - counts).tolist()
        return Cells(torch.cat(places), owners, first, asked @ vectors.T)

    def best(
        self, row: int, own: int, top: int, kept: Tensor | None = None
    ) -> list[tuple[int, int]]:
        """The best photos but one's own, each with its best cell, of those kept (N,)."""
        scores = self.scores[row] if kept is None else self.scores[row].masked_fill(~kept, -2.0)
        best = torch.full((len(self.first),), -2.0)
        best = best.scatter_reduce(0, self.photo, scores, "amax")
        best[own] = -3.0
        ends = [*self.first[1:], len(self.photo)]
        return [
            (photo, self.first[photo] + int(scores[self.first[photo] : ends[photo]].argmax()))
            for photo in best.topk(top).indices.tolist()
        ]


def precision(
    photos: Photos, cells: Cells, queries: Sequence[Query], kept: Tensor | None = None
) -> float:
    total = 0
    for row, query in enumerate(queries):
        for photo, cell in cells.best(row, query[0], TOP, kept):
            total += photos.is_right(photo, query, cells.points[cell])
    return round(100 * total / TOP / len(queries), 2)


def fit(photos: Photos, dimension: int = DIMENSION) -> Projection:
    drawn = photos.features[:: max(1, len(photos.features) // FITTED)][:FITTED]
    return fit_projection(drawn, dimension=dimension, generator=torch.Generator().manual_seed(0))


def study_vectors(sets: dict[str, Photos], count: int) -> dict[str, Any]:
    """All cells kept, so that only the vectors differ."""
    table: dict[str, Any] = {}
    for name, photos in sets.items():
        queries = photos.queries(count)
        ways: dict[str, Describe] = {
            "descriptors, 128": Features.at,
            "lower layers, 3072": Features.lower_at,
            "all layers as in matching, 3200": joint,
        }
        for dimension in (64, 128, 256):
            matrix = fit(photos, dimension)
            ways[f"all layers projected, {dimension}"] = lambda f, p, m=matrix: described(f, p, m)
        table[name] = {"photos": len(photos.features), "queries": len(queries),
                       "possible": round(100 * photos.possible(queries), 2)}  # fmt: skip
        for way, describe in ways.items():
            cells = Cells.of(photos, queries, describe, small=False)
            table[name][way] = precision(photos, cells, queries)
            print(name, way, table[name][way], flush=True)
    return table


def rules(features: Features, image: Tensor, budget: int) -> dict[str, Tensor]:
    """Cells that each rule keeps of a photo."""
    points = cell_points(features)
    side = prepare(features, descriptor_weight=1.0, lower_weight=0.0)
    side = type(side)(features, side.weights, side.size, points, points.new_empty(0, 0))
    sure = quality(side)
    rows, columns = features.descriptors.shape[1:]
    picture = resize(image, size=features.frame.network).float().mean(0)
    down, across = (
        picture.diff(dim=0, append=picture[-1:]),
        picture.diff(dim=1, append=picture[:, -1:]),
    )
    edges = F.adaptive_avg_pool2d((down.square() + across.square())[None, None], (rows, columns))
    middle = sure / features.confidence_at(points)
    high = max(1, round((budget * rows / columns) ** 0.5))
    wide = max(1, budget // high)
    ys, xs = (((torch.arange(n) + 0.5) * m / n).long() for n, m in ((high, rows), (wide, columns)))
    grid = torch.cartesian_prod(ys, xs) @ torch.tensor([columns, 1])
    seeded = torch.Generator().manual_seed(int(image.long().sum()))  # other cells in every photo
    ranked = {
        "confidence, near the middle": sure,
        "near the middle, without confidence": middle,
        "confidence (default)": features.confidence_at(points),
        "edge energy": edges.flatten(),
        "edge energy, near the middle": edges.flatten() * middle,
        "at random": torch.rand(len(points), generator=seeded),
    }
    kept = {name: spread(values, points, count=budget) for name, values in ranked.items()}
    return kept | {"even grid": torch.unique(grid)}


def study_budget(sets: dict[str, Photos], count: int) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, photos in sets.items():
        queries, projection = photos.queries(count), fit(photos)

        def describe(features: Features, points: Tensor, matrix: Projection = projection) -> Tensor:
            return described(features, points, matrix)

        cells = Cells.of(photos, queries, describe, small=True)
        entry: dict[str, Any] = {
            "photos": len(photos.features), "queries": len(queries),
            "cells a photo": round(len(cells.points) / len(photos.features), 1),
            "possible": round(100 * photos.possible(queries), 2),
            "all cells": precision(photos, cells, queries),
        }  # fmt: skip
        print(name, entry, flush=True)
        images = [items[0].read() for items in photos.objects]
        for budget in (BUDGET, BUDGET // 4):
            pairs = zip(photos.features, images, strict=True)
            chosen = [rules(features, image, budget) for features, image in pairs]
            for rule in chosen[0]:
                kept = torch.zeros(len(cells.points), dtype=torch.bool)
                for start, one in zip(cells.first, chosen, strict=True):
                    kept[start + one[rule]] = True
                share = precision(photos, cells, queries, kept)
                entry.setdefault(f"{budget} cells", {})[rule] = share
                print(name, budget, rule, share, int(kept.sum()), flush=True)
        table[name] = entry
    return table


RULES = {
    "confidence": "confidence (default)",
    "without confidence": "at random",
    "even grid": "even grid",
    "edge energy": "edge energy",
}
"""Name in the verified table -> in `rules`; all but the grid are spread out."""


@dataclass(frozen=True, eq=False)
class Kept(Features):
    """Features whose grids, which matching compares, are read once: a photo is matched with many.

    Half of the time of a match goes into them otherwise, and the numbers are the same.
    """

    read: dict[tuple[str, bytes], Tensor] = field(default_factory=dict)

    def lower_at(self, points: Tensor) -> Tensor:
        if not 32 <= len(points) < 512:  # some points, or all places: `vectors_once` keeps those
            return super().lower_at(points)
        return self.once("lower", points, super().lower_at)

    def once(self, name: str, points: Tensor, look: Callable[[Tensor], Tensor]) -> Tensor:
        key = (name, points.numpy().tobytes())
        if key not in self.read:
            self.read[key] = look(points)
        return self.read[key]


def vectors_once(features: Features, points: Tensor, weights: tuple[float, float]) -> Tensor:
    """In place of match.search's own, for features that are Kept."""
    if not isinstance(features, Kept) or len(points) < 32:
        return plain_vectors(features, points, weights)
    return features.once("both", points, lambda p: plain_vectors(features, p, weights))


plain_vectors = search._vectors


Told = dict[tuple[int, int], tuple[float, float, float]]
"""(query, photo) -> x and y where matching leads, and the probability."""


def match_hits(
    photos: Photos, queries: Sequence[Query], wanted: dict[int, list[int]], journal: Path
) -> Told:
    """Every photo matched with the questions it is wanted for, photo by photo, each noted down."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    told: Told = {}
    search._vectors = vectors_once
    for line in map(json.loads, lines):
        told |= {(row, line["photo"]): tuple(place) for row, *place in line["told"]}
    asking = {n: Kept(**vars(photos.features[n])) for n in {query[0] for query in queries}}
    for photo, rows in tqdm(sorted(wanted.items()), desc=journal.stem, mininterval=30):
        rows = [row for row in rows if (row, photo) not in told]
        if not rows:
            continue
        theirs = Kept(**vars(photos.features[photo]))
        for row in rows:
            number, item, part = queries[row]
            match = match_points(asking[number], theirs, item.points[part][None])
            assert match.probability is not None
            told[row, photo] = (*match.points1[0].tolist(), float(match.probability[0]))
        with journal.open("a") as file:
            file.write(json.dumps({"photo": photo, "told": [[r, *told[r, photo]] for r in rows]}))
            file.write("\n")
    return told


def mean_of(shares: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Mean in percent and its standard error; questions about one photo (a group) count as one."""
    values = 100 * torch.tensor(shares, dtype=torch.float64)
    away, groups_ = values - values.mean(), torch.tensor(groups)
    sums = torch.stack([away[groups_ == group].sum() for group in groups_.unique()])
    factor = len(sums) / (len(sums) - 1)
    error = (factor * sums.square().sum()).sqrt() / len(values)
    return [round(float(values.mean()), 2), round(float(error), 2)]


def study_verify(
    sets: dict[str, Photos], count: int, cache: Path, looked_at: int = 20
) -> dict[str, Any]:
    """The best photos by each rule's cells, matched and put in order anew."""
    table: dict[str, Any] = {}
    for name, photos in sets.items():
        queries, projection = photos.queries(count), fit(photos)

        def describe(features: Features, points: Tensor, matrix: Projection = projection) -> Tensor:
            return described(features, points, matrix)

        cells = Cells.of(photos, queries, describe, small=True)
        pairs = zip(photos.features, photos.objects, strict=True)
        chosen = [rules(features, items[0].read(), BUDGET) for features, items in pairs]
        best: dict[str, list[list[tuple[int, int]]]] = {}
        for rule, known_as in RULES.items():
            kept = torch.zeros(len(cells.points), dtype=torch.bool)
            for start, one in zip(cells.first, chosen, strict=True):
                kept[start + one[known_as]] = True
            best[rule] = [cells.best(row, q[0], looked_at, kept) for row, q in enumerate(queries)]
        wanted: dict[int, set[int]] = {}
        for by_query in best.values():
            for row, hits in enumerate(by_query):
                for photo, _ in hits:
                    wanted.setdefault(photo, set()).add(row)
        matches = sum(map(len, wanted.values()))
        print(name, matches, "matches", flush=True)
        ordered = {photo: sorted(rows) for photo, rows in wanted.items()}
        told = match_hits(photos, queries, ordered, cache / f"verify-{name}.jsonl")
        table[name] = {
            "photos": len(photos.features), "queries": len(queries), "photos looked at": looked_at,
            "matches": matches, "possible": round(100 * photos.possible(queries), 2),
        } | verified(photos, queries, cells, best, told)  # fmt: skip
        print(name, json.dumps(table[name], indent=1), flush=True)
    return table


def verified(
    photos: Photos,
    queries: Sequence[Query],
    cells: Cells,
    best: dict[str, list[list[tuple[int, int]]]],
    told: Told,
) -> dict[str, Any]:
    """Per rule [mean, standard error] of precision@10; differences are question by question."""
    groups, shares, entry = [query[0] for query in queries], {}, {}
    for rule, by_query in best.items():
        rows: dict[str, list[float]] = {
            "by the cells alone": [], "matched places, same order": [], "verified": []
        }  # fmt: skip
        said: list[tuple[float, bool]] = []
        for row, (query, hits) in enumerate(zip(queries, by_query, strict=True)):
            places = [told[row, photo] for photo, _ in hits]
            own = [photos.is_right(photo, query, cells.points[cell]) for photo, cell in hits]
            right = [
                photos.is_right(photo, query, torch.tensor(place[:2]))
                for (photo, _), place in zip(hits, places, strict=True)
            ]
            order = sorted(range(len(hits)), key=lambda n: -places[n][2])
            rows["by the cells alone"].append(sum(own[:TOP]) / TOP)
            rows["matched places, same order"].append(sum(right[:TOP]) / TOP)
            rows["verified"].append(sum(right[n] for n in order[:TOP]) / TOP)
            said += [(place[2], hit) for place, hit in zip(places, right, strict=True)]
        entry[rule] = {way: mean_of(values, groups) for way, values in rows.items()}
        entry[rule]["gain of verifying"] = mean_of(
            [b - a for a, b in zip(rows["by the cells alone"], rows["verified"], strict=True)],
            groups,
        )
        shares[rule] = rows
        for least in (0.5, 0.9):
            sure = [hit for chance, hit in said if chance >= least]
            entry[rule][f"hits with probability {least} or more"] = len(sure)
            entry[rule][f"right among them, {least}"] = round(
                100 * sum(sure) / max(1, len(sure)), 2
            )
    for rule in [rule for rule in best if rule != "confidence"]:
        for way in ("by the cells alone", "verified"):
            pairs = zip(shares["confidence"][way], shares[rule][way], strict=True)
            entry[rule][f"confidence is better by, {way}"] = mean_of(
                [a - b for a, b in pairs], groups
            )
    return entry


def study_recall(sets: dict[str, Photos], count: int, cells: int = 1_000_000) -> dict[str, Any]:
    """faiss beside exact search: the same ten cells? Real cells, and jittered copies of them."""
    photos = [features for part in sets.values() for features in part.features]
    everything = Photos(photos, [])
    projection = fit(everything)
    vectors = torch.cat([described(f, cell_points(f), projection) for f in photos])
    real = len(vectors)
    generator = torch.Generator().manual_seed(0)
    asked_rows = torch.randperm(real, generator=generator)[:count]
    # A query is no cell of the index, but as near to one as two photos of a thing are.
    asked = jitter(vectors[asked_rows], 0.5, generator)
    copies = [vectors]
    while sum(map(len, copies)) < cells:
        copies.append(jitter(vectors, 0.5, generator))
    stored = (torch.cat(copies)[:cells] * SCALE).round().to(torch.int8).numpy()
    unit = F.normalize(torch.from_numpy(stored).float(), dim=1)
    exact = torch.cat([(part @ unit.T).topk(TOP).indices for part in asked.split(64)])
    del copies
    learn = unit.numpy()[:: max(1, cells // (4 * 1000 * 40))]
    index = faiss_of(iter(unit.numpy()[n : n + 65536] for n in range(0, cells, 65536)), learn,
                     cells=cells)  # fmt: skip
    entry: dict[str, Any] = {
        "cells": cells, "real cells": real, "the rest": "copies of them, jittered: cosine 0.89",
        "queries": count, "numbers": unit.shape[1], "lists": index.nlist,
        "bytes a vector": unit.shape[1] + 8, "of which its number": 8,
    }  # fmt: skip
    for read in (8, 16, 32, 64):
        index.nprobe = read
        names = index.search(asked.numpy(), TOP)[1]
        both = [len(set(a) & set(b)) for a, b in zip(names.tolist(), exact.tolist(), strict=True)]
        entry[f"recall@10, {read} lists read"] = round(sum(both) / TOP / count, 4)
        print(entry, flush=True)
    return entry


def jitter(vectors: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Unit vectors, each moved by a random one of length `amount`."""
    noise = torch.randn(vectors.shape, generator=generator)
    return F.normalize(vectors + amount * F.normalize(noise, dim=1), dim=1)


def study_large(data: Path, model: DenseFeatures, cases: int, size: tuple[int, int]) -> list[Any]:
    """A bird of 160 pixels, its parts about 40, among photos of other things as one large one."""
    birds = read_coco(data / "cub-dev/keypoints.json", images=data / "cub-dev/photos").objects
    things = read_coco(data / "pascal3d/keypoints_val.json", images=data / "voc").objects
    rng = random.Random(3)
    table = []
    height, width = size
    for _ in range(cases):
        asked, shown = rng.sample([b for b in birds if int(b.visible.sum()) > 8], 2)
        canvas = torch.zeros(3, height, width, dtype=torch.uint8)
        for y in range(0, height, 375):
            for x in range(0, width, 375):
                tile = resize(rng.choice(things).read(), size=(375, 375))
                room = canvas[:, y : y + 375, x : x + 375]
                room.copy_(tile[:, : room.shape[1], : room.shape[2]])
        photo = shown.read()
        scale = 160 / _extent(shown)
        small = resize(photo, size=tuple(round(scale * n) for n in photo.shape[1:]))  # type: ignore[arg-type]
        x, y = rng.randrange(width - small.shape[2]), rng.randrange(height - small.shape[1])
        canvas[:, y : y + small.shape[1], x : x + small.shape[2]] = small
        both = asked.visible & shown.visible
        points0 = asked.points[both]
        wanted = (shown.points[both] + 0.5) * scale - 0.5 + torch.tensor([x, y])
        mine = asked.read()
        parts = best_parts(model, mine, canvas, points0)
        (f0,), (f1,) = model.extract(mine), model.extract(cut_part(canvas, parts[1]))
        matches = moved_back(match_points(f0, f1, points0), parts, (mine, canvas))
        errors = (matches.points1 - wanted).norm(dim=1)
        plain = match_points(f0, model.extract(canvas)[0], points0)
        whole = (plain.points1 - wanted).norm(dim=1)
        entry = {
            "asked": asked.name, "shown": shown.name, "bird, px": 160, "at": [x, y],
            "part": list(parts[1]), "points": len(errors),
            "median error, px": round(float(errors.median()), 1),
            "within 20 px": round(float((errors <= 20).float().mean()), 3),
            "seen whole: median error, px": round(float(whole.median()), 1),
        }  # fmt: skip
        table.append(entry)
        print(entry, flush=True)
    return table


def in_one_form(parts: dict[str, Any]) -> dict[str, Any]:
    """As all results are: what was measured part by part, and with what the last one was."""
    last = max(parts.values(), key=lambda part: part["environment"]["date"])
    about = {name: value for name, value in last["environment"].items() if name != "load"}
    return {
        "row": "search for a part in other photos", "benchmark": "birds and PASCAL3D+",
        "split": "part by part: each says its commit and settings", "metrics": parts,
        "config": last["settings"], "weights_sha256": last["weights_sha256"], **about,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", required=True,
                        choices=("vectors", "budget", "verify", "recall", "large"))  # fmt: skip
    parser.add_argument("--sets", nargs="+", choices=tuple(SETS), help="default: all of the part's")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--cases", type=int, default=3)
    parser.add_argument("--size", type=int, nargs=2, default=(4000, 6000))
    given = parser.parse_args()
    torch.set_num_threads(1)
    now = environment("cpu") | {"load": round(os.getloadavg()[0], 1)}
    model = DenseFeatures.from_pretrained(device="cpu")
    names = ("birds-dev", "pascal3d-dev") if given.part == "vectors" else ("birds", "pascal3d")
    if given.part == "large":
        numbers: Any = study_large(given.data, model, given.cases, tuple(given.size))
    else:
        chosen = given.sets or names
        sets = {name: read_set(given.data, given.cache, name, model) for name in chosen}
        if given.part == "verify":
            numbers = study_verify(sets, given.queries, given.cache)
        else:
            study = {"vectors": study_vectors, "budget": study_budget,
                     "recall": study_recall}[given.part]  # fmt: skip
            numbers = study(sets, given.queries)
    before = json.loads(given.out.read_text())["metrics"] if given.out.exists() else {}
    about = {"environment": now, "weights_sha256": model.weights_hash(),
             "settings": {"budget": BUDGET, "dimension": DIMENSION, "near": NEAR, "top": TOP,
                          "queries": given.queries}}  # fmt: skip
    if given.part in ("vectors", "budget", "verify"):  # set by set, where asked so
        numbers = before.get(given.part, {}).get("numbers", {}) | numbers
    parts = before | {given.part: {"numbers": numbers, **about}}
    write_json(given.out, in_one_form(parts))


if __name__ == "__main__":
    main()

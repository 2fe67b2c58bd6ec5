"""Which photos to label: suggested ones against random ones, as a few-shot curve.

    python benchmarks/experiments/suggest.py DATA --out results/studies/suggest.json

DATA holds cub-dev, pascal3d and voc. Of each set, 50 of 100 photos are to choose from (other 50 for
every seed); a head learns from 5, 10 and 20 of them and finds the parts in 100 other photos. Both
choices get the same head, seeds and settings: descriptors alone, 192 pixels, 32 hidden channels,
3 views, so that it runs on a CPU; the detector that ships is larger and better. Random choice is
the mean of 3 draws per seed. `doubt` goes in steps: a head on what is chosen so far says of which
photos it is unsure.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.geometry import out_of_box
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import fit_head
from surefeat.keypoints.head import KeypointHead, peaks
from surefeat.keypoints.suggest import cover, mean_vector
from surefeat.keypoints.views import CutObjects, ObjectViews, ViewStore, cut_objects
from surefeat.measure.metrics import longer_side
from surefeat.model.config import POINT_WEIGHTS, WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures

HEAD = KeypointConfig(size=192, hidden=32, views=3, least_views=0)
POOL, CHOICE, TEST = 100, 50, 100
LABELS = (5, 10, 20)
DRAWS = 3


@dataclass(frozen=True, eq=False)
class Material:
    """One set, seen once: what is chosen from, and what is asked."""

    vectors: Tensor
    """(POOL, K) of whole photos."""
    views: ObjectViews
    objects: CutObjects
    test: CutObjects
    maps: Tensor
    """(TEST, C, h, w) of the test objects' boxes."""
    own: Tensor
    """(POOL, C, h, w) of the pool's."""


def sets(data: Path, name: str) -> tuple[KeypointSet, KeypointSet]:
    """Photos of one object each: to choose from, and to ask."""
    rng = random.Random(0)
    if name == "birds":
        whole = read_coco(data / "cub-dev/keypoints.json", images=data / "cub-dev/photos")
        objects = list(whole.objects)
        rng.shuffle(objects)
        parts = [objects[:POOL], objects[POOL : POOL + TEST]]
        category = whole.categories[0]
    else:
        parts = []
        for split, count in (("train", POOL), ("val", TEST)):
            whole = read_coco(data / f"pascal3d/keypoints_{split}.json", images=data / "voc")
            objects = _alone(whole.only([name]))
            rng.shuffle(objects)
            parts.append(objects[:count])
        category = whole.categories[objects[0].category]
    pool, test = (
        KeypointSet((category,), tuple(replace(item, category=0) for item in part))
        for part in parts
    )
    return pool, test


def _alone(whole: KeypointSet) -> list[Labelled]:
    names = [item.name for item in whole.objects]
    return [
        item for item in whole.objects
        if names.count(item.name) == 1 and bool(item.visible.any())
        and longer_side(item.box) >= 80
    ]  # fmt: skip


@torch.no_grad()
def look(model: DenseFeatures, pool: KeypointSet, test: KeypointSet) -> Material:
    assert model.cohort is not None
    centre = model.cohort.centre(POINT_WEIGHTS)
    means = [mean_vector(model.extract(item.read())[0]) for item in pool.objects]
    vectors = F.normalize(torch.stack(means) - centre, dim=1)

    def describe(crops: Tensor) -> Tensor:
        return model(crops.float() / 255).descriptors

    cut: dict[str, Any] = {"size": HEAD.size, "device": torch.device("cpu")}
    objects = cut_objects(pool, jitter=HEAD.jitter, **cut)
    store = ViewStore(objects, describe, HEAD, seed=0)
    asked = cut_objects(test, jitter=0.0, **cut)
    plain = cut_objects(pool, jitter=0.0, **cut)
    maps, own = (
        torch.cat([describe(part) for part in some.pixels.split(16)]) for some in (asked, plain)
    )
    return Material(vectors, store.every, objects, asked, maps, own)


def head_on(material: Material, chosen: list[int], seed: int) -> KeypointHead:
    rows = torch.isin(material.views.numbers, torch.tensor(chosen)).nonzero()[:, 0]
    return fit_head(material.views, rows, HEAD, objects=len(chosen), kinds=1, seed=seed).eval()


@torch.no_grad()
def pck(material: Material, head: KeypointHead) -> float:
    """At a tenth of the box's longer side, over all visible keypoints."""
    cells, _ = peaks(head(material.maps).sigmoid())
    test = material.test
    size = (material.maps.shape[-2], material.maps.shape[-1])
    away = (out_of_box(cells, test.boxes, size=size) - test.points).norm(dim=-1)
    longer = (test.boxes[:, 2:] - test.boxes[:, :2] + 1).amax(-1, keepdim=True)
    return float((away < 0.1 * longer)[test.visible].float().mean())


@torch.no_grad()
def doubt_of(material: Material, head: KeypointHead, rows: list[int]) -> Tensor:
    """(N,): one minus the mean height of the heat maps' peaks."""
    _, heights = peaks(head(material.own[rows]).sigmoid())
    return 1 - heights.mean(1)


def curve(material: Material, seed: int) -> dict[str, dict[int, float]]:
    """PCK by number of labels, of each way to choose."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randperm(len(material.vectors), generator=generator)[:CHOICE].tolist()
    vectors = material.vectors[pool]
    order, _ = cover(vectors, None, count=max(LABELS))
    variety, lucky, doubtful = {}, {}, {}
    chosen: list[int] = []
    head: KeypointHead | None = None
    for count in LABELS:
        head_of_variety = head_on(material, [pool[row] for row in order[:count]], seed)
        variety[count] = pck(material, head_of_variety)
        doubts = None if head is None else doubt_of(material, head, pool)
        more, _ = cover(vectors, doubts, count=count - len(chosen), chosen=chosen)
        chosen += more
        head = head_on(material, [pool[row] for row in chosen], seed)
        doubtful[count] = pck(material, head)
        draws = []
        for _ in range(DRAWS):
            some = torch.randperm(len(pool), generator=generator)[:count].tolist()
            draws.append(pck(material, head_on(material, [pool[row] for row in some], seed)))
        lucky[count] = mean(draws)
    return {"suggested": variety, "suggested, with doubt": doubtful, "random": lucky}


def summary(curves: list[dict[str, dict[int, float]]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for way in curves[0]:
        values = {n: [one[way][n] for one in curves] for n in LABELS}
        rows[way] = {str(n): round(mean(some), 4) for n, some in values.items()}
        rows[f"{way}, by seed"] = {str(n): [round(v, 4) for v in s] for n, s in values.items()}
    for way in ("suggested", "suggested, with doubt"):
        gaps = {n: [one[way][n] - one["random"][n] for one in curves] for n in LABELS}
        rows[f"{way}, gain over random"] = {
            str(n): {"mean": round(mean(g), 4), "deviation": round(stdev(g), 4)}
            for n, g in gaps.items()
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sets", nargs="+", default=["birds", "car"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", type=Path, help="folder for what was seen, to ask it again")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    about = environment(choose_device(None))  # before anything is written into the tree
    model = DenseFeatures.from_pretrained(device="cpu")
    metrics: dict[str, Any] = {}
    for name in args.sets:
        kept = args.tables / f"suggest-{name}.pt" if args.tables else None
        if kept and kept.is_file():
            material = torch.load(kept, weights_only=False)
        else:
            material = look(model, *sets(args.data, name))
            if kept:
                material.views.features = None
                torch.save(material, kept)
        print(name, "seen", round(time.perf_counter() - start), "s", flush=True)
        metrics[name] = summary([curve(material, seed) for seed in range(args.seeds)])
        print(json.dumps(metrics[name], indent=1), flush=True)
    record = {
        "row": "suggested and random labels", "benchmark": "few-shot keypoints, PCK@0.1 of the box",
        "split": f"{CHOICE} photos to choose from, {TEST} others asked; seeds {args.seeds}",
        "metrics": metrics,
        "config": {"head": asdict(HEAD), "labels": LABELS, "draws": DRAWS, "pool": POOL},
        "seconds": round(time.perf_counter() - start),
        "weights_sha256": file_hash(model_folder(None) / WEIGHTS), **about,
    }  # fmt: skip
    if args.out:
        write_json(args.out, record)


if __name__ == "__main__":
    main()

"""A small thing in a large scene: is it found by index, find and match with tiles, and how near?

    python benchmarks/experiments/large_scenes.py DATA --work FOLDER --out FILE

DATA holds cub-dev, pascal3d and voc. Of every class a photo is made so small that its object has
160 pixels (its parts about 40), and pasted into a scene of 6,000 pixels made of photos of other
classes; all are development photos. Another photo of the class, with an object that shows the same
side, is asked about: one of its keypoints by `find` in an index of all scenes and some ordinary
photos, all of them by `match`. As a control the pasted photo itself, at its own size, is asked
about too: what then goes wrong is the search's, not the likeness of two things. Scenes, stitched
features and the index are kept in the folder, so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transfer_tasks import same_side

from surefeat.core.files import environment, write_json
from surefeat.core.image import load, resize, write_png
from surefeat.data.keypoints import Labelled, read_coco
from surefeat.index import maker
from surefeat.index.find import find_part
from surefeat.index.search import PartIndex
from surefeat.index.store import index_photos
from surefeat.match import large
from surefeat.match.points import match_points
from surefeat.measure.metrics import longer_side
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.tiles import extract_tiled

CLASSES = ("bird", "aeroplane", "bicycle", "bus", "car", "chair", "motorbike", "train")

OBJECT, PATCH = 160, 250
"""Longer side of the pasted object; of the squares that a scene is made of, pixels."""

SEEN, LEAST_SIDE = 6, 160.0

ORDINARY = 32
"""Photos of usual size that are in the index too."""

LOOKED_AT = 4
"""Photos that find verifies."""


@dataclass(frozen=True, eq=False)
class Case:
    """What is asked for, and where it is."""

    kind: str
    asked: Labelled
    shown: Labelled
    scene: Path
    at: tuple[int, int]
    scale: float

    @property
    def name(self) -> str:
        """As the index lists the scene."""
        return f"scenes/{self.scene.name}"

    def there(self, points: Tensor) -> Tensor:
        """Pixels of the pasted photo -> of the scene."""
        return (points + 0.5) * self.scale - 0.5 + torch.tensor(self.at)


def read_objects(data: Path) -> dict[str, list[Labelled]]:
    """By class, objects large enough that are alone in their photo."""
    found: dict[str, list[Labelled]] = {}
    for labels, images in (
        ("cub-dev/keypoints.json", "cub-dev/photos"),
        ("pascal3d/keypoints_train.json", "voc"),
    ):
        whole = read_coco(data / labels, images=data / images)
        names = [item.name for item in whole.objects]
        for item in whole.objects:
            if names.count(item.name) == 1 and longer_side(item.box) >= LEAST_SIDE:
                found.setdefault(whole.categories[item.category].name, []).append(item)
    return found


def make_cases(objects: dict[str, list[Labelled]], work: Path, size: tuple[int, int]) -> list[Case]:
    rng = random.Random(7)
    cases = []
    for kind in CLASSES:
        mine = [item for item in objects[kind] if int(item.visible.sum()) >= SEEN]
        rng.shuffle(mine)
        pairs = (
            (one, other) for one in mine for other in mine
            if one is not other and same_side(one.visible, other.visible)
            and int((one.visible & other.visible).sum()) >= SEEN
        )  # fmt: skip
        asked, shown = next(pairs)
        others = [item for name in sorted(objects) if name != kind for item in objects[name]]
        scale = OBJECT / longer_side(shown.box)
        height, width = (round(scale * n) for n in shown.size)
        at = rng.randrange(size[1] - width), rng.randrange(size[0] - height)
        case = Case(kind, asked, shown, work / f"scenes/{kind}.png", at, scale)
        drawn = rng.sample(others, -(-size[0] // PATCH) * -(-size[1] // PATCH))
        if not case.scene.exists():
            small = resize(shown.read(), size=(height, width))
            write_png(case.scene, paste(small, at, scene_of(drawn, size)))
        cases.append(case)
    return cases


def scene_of(items: Sequence[Labelled], size: tuple[int, int]) -> Tensor:
    """(3, H, W) uint8: squares of other photos, row by row."""
    scene = torch.zeros(3, *size, dtype=torch.uint8)
    rest = iter(items)
    for y in range(0, size[0], PATCH):
        for x in range(0, size[1], PATCH):
            room = scene[:, y : y + PATCH, x : x + PATCH]
            patch = resize(next(rest).read(), size=(PATCH, PATCH))
            room.copy_(patch[:, : room.shape[1], : room.shape[2]])
    return scene


def paste(small: Tensor, at: tuple[int, int], scene: Tensor) -> Tensor:
    x, y = at
    scene[:, y : y + small.shape[1], x : x + small.shape[2]] = small
    return scene


class Stitched:
    """extract_tiled, done once for index and match and kept on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, model: DenseFeatures, pixels: Tensor, *, longest_side: int, side: int, name: str = ""
    ) -> Features:
        digest = hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()[:16]
        file = self.folder / f"{digest}-{longest_side}.safetensors"
        if not file.exists():
            features = extract_tiled(model, pixels, longest_side=longest_side, side=side, name=name)
            features.save(file)
        return Features.load(file)


def ask_find(model: DenseFeatures, index: PartIndex, case: Case, part: int) -> dict[str, Any]:
    """Where `find` puts a keypoint, asked about in another photo and in the pasted one."""
    truth = case.there(case.shown.points[part])
    entry: dict[str, Any] = {}
    for name, item, verify in (
        ("find", case.asked, True), ("find, same photo", case.shown, False)
    ):  # fmt: skip
        about = (item.read(), item.points[part].tolist(), index)
        plain = find_part(*about, model=model, count=len(index.photos), verify=False)
        names = [hit.photo for hit in plain.hits]
        rank = names.index(case.name)
        away = float((torch.tensor(plain.hits[rank].point) - truth).norm())
        entry[name] = {"rank by the cells": rank + 1, "distance, px": round(away, 1)}
        if verify:
            looked = find_part(*about, model=model, count=LOOKED_AT)
            places = {hit.photo: (n, hit) for n, hit in enumerate(looked.hits)}
            if case.name in places:
                number, hit = places[case.name]
                away = float((torch.tensor(hit.point) - truth).norm())
                entry[name] |= {"rank verified": number + 1, "verified distance, px":
                                round(away, 1), "probability": hit.probability}  # fmt: skip
    return entry


def ask_match(model: DenseFeatures, case: Case, scene: Tensor) -> dict[str, Any]:
    """How far all common keypoints come out from where they are."""
    entry = {}
    for name, item in (("match --tiles", case.asked), ("match --tiles, same photo", case.shown)):
        both = item.visible & case.shown.visible
        points, truth = item.points[both], case.there(case.shown.points[both])
        mine = item.read()
        parts = large.best_parts(model, mine, scene, points)
        (one,), (other,) = model.extract(mine), model.extract(large.cut_part(scene, parts[1]))
        matches = large.moved_back(match_points(one, other, points), parts, (mine, scene))
        entry[name] = errors(matches.points1, truth) | {"part": list(parts[1])}
        if item is case.asked:
            whole = match_points(one, model.extract(scene)[0], points)
            entry["match, seen whole"] = errors(whole.points1, truth)
    return entry


def errors(points: Tensor, truth: Tensor) -> dict[str, Any]:
    away = (points - truth).norm(dim=1)
    near = int((away <= OBJECT / 10).sum())
    return {"points": len(away), "within 16 px": near,
            "median error, px": round(float(away.median()), 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, nargs=2, default=(1000, 6000))
    args = parser.parse_args()
    torch.set_num_threads(1)
    about, start = environment("cpu"), time.perf_counter()
    model = DenseFeatures.from_pretrained(device="cpu")
    for folder in ("scenes", "ordinary", "stitched"):
        (args.work / folder).mkdir(parents=True, exist_ok=True)
    objects = read_objects(args.data)
    cases = make_cases(objects, args.work, tuple(args.size))
    rng = random.Random(8)
    used = {item.name for case in cases for item in (case.asked, case.shown)}
    rest = [one for name in sorted(objects) for one in objects[name] if one.name not in used]
    for item in rng.sample(rest, ORDINARY):
        write_png(args.work / f"ordinary/{Path(item.name).stem}.png", item.read())
    maker.extract_tiled = large.extract_tiled = Stitched(args.work / "stitched")
    sources = [args.work / "scenes", args.work / "ordinary"]
    index_photos(sources, args.work / "index", model=model, tiles=True, workers=1)
    index = PartIndex.open(args.work / "index", weights=model.weights_hash())
    journal = args.work / "journal.jsonl"
    done = (
        [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    )
    for number, case in enumerate(cases):
        both = (case.asked.visible & case.shown.visible).nonzero()[:, 0].tolist()
        part = rng.choice(both)
        if number < len(done):
            continue
        entry = {"class": case.kind, "asked": case.asked.name, "shown": case.shown.name,
                 "at": list(case.at), "scale": round(case.scale, 3), "keypoint": part}  # fmt: skip
        entry |= ask_find(model, index, case, part)
        entry |= ask_match(model, case, load(case.scene))
        print(json.dumps(entry), flush=True)
        done.append(entry)
        with journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    write_json(args.out, {
        "row": "small things in large scenes", "benchmark": "birds and PASCAL3D+",
        "split": "cub-dev and PASCAL3D+ train", "metrics": {"cases": done},
        "config": {"size": list(args.size), "object, px": OBJECT, "patch, px": PATCH,
                   "photos of the index": len(index.photos), "looked at": LOOKED_AT},
        "seconds": round(time.perf_counter() - start), "weights_sha256": model.weights_hash(),
        **about,
    })  # fmt: skip


if __name__ == "__main__":
    main()

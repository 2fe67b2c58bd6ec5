"""How far a probability without labels carries for a run's own model.

    python benchmarks/experiments/labelfree.py DATA --model RUN --photos FOLDER --keep KEEP
        --out results/studies/labelfree.json

RUN is of `surefeat pretrain FOLDER`. Three ways are compared on labelled development pairs: the
shipped model's fit as it is, the same moved by the folder's photos (learn.trust, what a run gets),
and a fit on warps alone: a photo and a warped view of it as related, two photos of the folder as
not. Beside them stands a fit by the labels of these very pairs, which nobody has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from reliability import (
    Table,
    by_set,
    calibration,
    fit_all,
    fit_pair,
    halves,
    point_chances,
    table_of,
    tabulate,
)
from reliability_cases import Case, Photo, all_cases
from reliability_seen import Layers, Seen
from torch import Tensor

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.image import load
from surefeat.core.ranking import auroc
from surefeat.data.sources import find_images
from surefeat.learn.config import ColourConfig, WarpConfig
from surefeat.learn.trust import PHOTOS, trust_without_labels
from surefeat.learn.warp import draw, two_views
from surefeat.match.related import PAIR_SIGNS
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Logistic, Reliability

LISTS = ("birds fit", "pf-pascal val")

SIZE = 320


def folder_photos(folder: Path, count: int) -> list[Photo]:
    """Photos of a folder, evenly over it."""
    paths = [Path(item.read.path) for item in find_images(folder)]
    chosen = paths[:: max(1, len(paths) // count)][:count]
    none: frozenset[str] = frozenset()
    photos = []
    for path in chosen:
        pixels = load(path)
        size = (pixels.shape[1], pixels.shape[2])
        photos.append(
            Photo(str(path), lambda p=pixels: p, size, none, "", torch.zeros(0, 4))  # type: ignore[misc]
        )
    return photos


def warped(photo: Photo, seed: int, warp: WarpConfig) -> Photo:
    """A view of a photo as training draws it."""

    def read() -> Tensor:
        pixels = load(photo.read())
        sizes = torch.tensor([list(pixels.shape[1:])])
        draws = draw(1, points=1, generator=torch.Generator().manual_seed(seed))
        views = two_views(pixels[None], sizes, draws, replace(warp, size=SIZE), ColourConfig())
        return (views.view1[0] * 255).round().clamp(0, 255).byte()

    return replace(photo, name=f"{photo.name}@{seed}", read=read, size=(SIZE, SIZE))


def by_warps(seen: Seen, photos: Sequence[Photo], centre: Tensor) -> Logistic:
    """Whether photos are related, learned from views of one photo and from two photos."""
    point = torch.zeros(1, 2)
    views = [warped(photo, number, WarpConfig()) for number, photo in enumerate(photos)]
    cases = [
        Case(photo, other, same, "same" if same else "far", point, point, ("unrelated",))
        for same, others in ((True, views), (False, [*photos[1:], photos[0]]))
        for photo, other in zip(photos, others, strict=True)
    ]
    seen.layers.add([*photos, *views])
    table = tabulate(cases, seen, centre, points=False)
    return fit_pair([table], PAIR_SIGNS, "pair", "warps")


def judged(table: Table, fits: dict[str, Logistic]) -> dict[str, Any]:
    """Calibration and ranking of both probabilities on one list."""
    odds = fits["pair"].log_odds(table.pair)
    weight = halves(table.related, torch.zeros(len(table.related)))
    said: dict[str, Any] = {
        "auroc": round(auroc(odds, table.related), 4),
        "related": calibration(odds.sigmoid(), table.related, weight),
    }
    if "point" in fits:
        related = table.related[table.case]
        chance = point_chances(table, fits)
        mixed = halves(related, torch.zeros(len(related)))
        said["probability"] = calibration(chance, table.right, mixed)
        said["auroc of points of related pairs"] = round(
            auroc(chance[related], table.right[related]), 4
        )
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--photos", type=Path, required=True, help="the folder it learned from")
    parser.add_argument("--keep", type=Path, required=True, help="as of reliability.py")
    parser.add_argument("--lists", nargs="+", default=list(LISTS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of every list")
    parser.add_argument("--out", type=Path, default=Path("results/studies/labelfree.json"))
    args = parser.parse_args()
    about = environment(choose_device(None))
    model = DenseFeatures.from_pretrained(args.model)
    digest = file_hash(model_folder(args.model) / WEIGHTS)
    shipped = DenseFeatures.from_pretrained()
    known, cohort = shipped.reliability, shipped.cohort
    assert known is not None
    assert cohort is not None
    photos = folder_photos(args.photos, 40)
    trust = trust_without_labels(model, [load(photo.read()) for photo in photos[:PHOTOS]])
    assert isinstance(trust.reliability, Reliability), trust.words
    seen = Seen(model, Layers(model, args.keep, known.sides[0]))
    seen.cohort = cohort
    centre = cohort.kinds.mean(0).to(model.device)
    cases = all_cases(args.data, names=args.lists, scale=args.scale)
    folder = args.keep / f"tables-{digest[:12]}-own-{args.scale}"
    tables = {
        name: table_of(name, some, seen, centre, points=True, folder=folder)
        for name, some in cases.items()
    }
    ways: dict[str, dict[str, Logistic]] = {
        "the shipped fit as it is": {"pair": known.pair, "point": known.point},
        "moved by photos of the folder": {
            "pair": trust.reliability.pair, "point": trust.reliability.point,
        },
        "warps alone": {"pair": by_warps(seen, photos, centre)},
        "by the labels of these pairs": fit_all(by_set(tables), "labels"),
    }  # fmt: skip
    metrics = {
        name: {way: judged(table, fits) for way, fits in ways.items()}
        for name, table in tables.items()
    }
    write_json(args.out, {
        "row": "Matches.related and Matches.probability of a run's model, without labels",
        "benchmark": "pf-pascal, birds", "split": ", ".join(metrics), "metrics": metrics,
        "config": {"lists": args.lists, "scale": args.scale, "photos": len(photos),
                   "words": trust.words},
        "weights_sha256": digest, **about,
    })  # fmt: skip
    key, least = "expected calibration error", "of true probabilities"
    for name, by_way in metrics.items():
        for way, said in by_way.items():
            shown = {k: f"{said[k][key]:.3f} ({said[k][least]:.3f})"
                     for k in ("related", "probability") if k in said}  # fmt: skip
            print(name, "|", way, "|", json.dumps(shown | {"auroc": said["auroc"]}))


if __name__ == "__main__":
    main()

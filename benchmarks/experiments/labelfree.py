"""How far a probability fitted without labels carries: warps as related, other photos as not.

    python benchmarks/experiments/labelfree.py DATA --out results/studies/labelfree.json

Every photo is paired with a warped view of itself (cut, turned, mirrored, recoloured: related) and
with another photo (unrelated); `Matches.related` is fitted on these alone and checked on labelled
pairs, on which the calibration error of the fit by labels stands beside.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from reliability import Seen, calibration, draw_cohort, fit_pair, halves, tabulate
from reliability_cases import Case, Photo, all_cases
from torch import Tensor

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.image import load
from surefeat.core.ranking import auroc
from surefeat.learn.config import ColourConfig, WarpConfig
from surefeat.learn.warp import draw, two_views
from surefeat.match.related import PAIR_SIGNS
from surefeat.model.config import POINT_WEIGHTS, WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures

SIZE = 320


def warped(photo: Photo, seed: int, warp: WarpConfig) -> Photo:
    """A view of a photo as training draws it."""

    def read() -> Tensor:
        pixels = load(photo.read())
        height, width = pixels.shape[1:]
        sizes = torch.tensor([[height, width]])
        generator = torch.Generator().manual_seed(seed)
        draws = draw(1, points=1, generator=generator)
        views = two_views(pixels[None], sizes, draws, replace(warp, size=SIZE), ColourConfig())
        return (views.view1[0] * 255).round().clamp(0, 255).byte()

    return replace(photo, name=f"{photo.name}@{seed}", read=read, size=(SIZE, SIZE))


def blank(photo0: Photo, photo1: Photo, related: bool) -> Case:
    """A case that asks about the pair alone."""
    point = torch.zeros(1, 2)
    return Case(photo0, photo1, related, "same" if related else "far", point, point, ("unrelated",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--photos", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=60, help="labelled pairs of each answer")
    parser.add_argument("--out", type=Path, default=Path("results/studies/labelfree.json"))
    args = parser.parse_args()
    model = DenseFeatures.from_pretrained(args.model)
    model.reliability = model.cohort = None
    rng, every = random.Random(0), all_cases(args.data)
    photos = [case.photo0 for case in every["pf-pascal fit"] if case.related]
    photos = rng.sample(list({photo.name: photo for photo in photos}.values()), args.photos)
    own = [blank(p, warped(p, seed, WarpConfig()), True) for seed, p in enumerate(photos)]
    own += [blank(p, q, False) for p, q in zip(photos, photos[1:] + photos[:1], strict=True)]
    cases = {"warps and other photos": own}
    for name in ("pf-pascal fit", "birds fit", "pf-pascal val", "pf-willow", "birds"):
        same = [case for case in every[name] if case.related][: args.pairs]
        cases[name] = same + [case for case in every[name] if case.kind == "far"][: args.pairs]
    shown = [p for some in cases.values() for case in some for p in (case.photo0, case.photo1)]
    stems = {Path(photo.name.split("#")[0].split("@")[0]).stem for photo in shown}
    cohort = draw_cohort(model, args.data, stems, seed=0)
    seen = Seen(model, cohort, model.config.longest_side)
    seen.add(shown)
    centre = cohort.centre(POINT_WEIGHTS)
    tables = {name: tabulate(some, seen, centre) for name, some in cases.items()}
    fits = {
        "without labels": fit_pair([tables["warps and other photos"]], PAIR_SIGNS, "pair", ""),
        "by labels": fit_pair(
            [tables["pf-pascal fit"], tables["birds fit"]], PAIR_SIGNS, "pair", ""
        ),
    }
    metrics = {}
    for name, table in tables.items():
        weight = halves(table.related, torch.zeros(len(table.related)))
        metrics[name] = {
            way: {
                "auroc": round(auroc(fit.log_odds(table.pair), table.related), 4),
                **calibration(fit.log_odds(table.pair).sigmoid(), table.related, weight),
            }
            for way, fit in fits.items()
        }
    write_json(args.out, {
        "row": "Matches.related fitted without labels", "benchmark": "pf-pascal, pf-willow, birds",
        "metrics": metrics, "config": {"photos": args.photos, "pairs": args.pairs},
        "weights_sha256": file_hash(model_folder(args.model) / WEIGHTS),
        **environment(choose_device(None)),
    })  # fmt: skip
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()

"""Which points of one photo are worth matching: right matches under a budget of 20, 60, 200.

    python benchmarks/experiments/chosen_points.py DATA --out results/studies/chosen_points.json

PF-PASCAL's development pairs and birds. Every place of photo A is matched once; each way to choose
points takes its own of them. A match is right within 0.1 of the longer side of where a thin-plate
spline through the labelled points takes the place; places outside their hull cannot be right.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from confidence import distinctiveness
from reliability_cases import Case, all_cases
from reliability_seen import Layers, Seen, cohort_photos, draw_cohort
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.geometry import fit_thin_plate
from surefeat.core.image import load
from surefeat.match.points import match_points, spread
from surefeat.match.search import Side
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures

BUDGETS = (20, 60, 200)

Qualities = dict[str, Tensor]


def qualities(side: Side, grey: Any) -> Qualities:
    """Ways to rank the places of a photo (T,): the spread of the best is taken."""
    features = side.features
    confidence = features.confidence_at(side.points)
    unlike = distinctiveness(side)
    rare = (1 - features.common_at(side.points)).clamp_min(0)
    height, width = features.frame.original
    middle = (side.points - torch.tensor([width - 1, height - 1]) / 2) / max(height, width)
    central = (-0.5 * (middle / 0.25).square().sum(1)).exp()
    edges = np.hypot(cv2.Sobel(grey, cv2.CV_32F, 1, 0), cv2.Sobel(grey, cv2.CV_32F, 0, 1))
    edges = cv2.GaussianBlur(edges, (0, 0), 0.01 * max(grey.shape))
    x, y = side.points.round().long().unbind(1)
    energy = torch.from_numpy(edges)[y.clamp(0, height - 1), x.clamp(0, width - 1)]
    return {
        "confidence x distinctiveness": confidence * unlike,
        "confidence": confidence,
        "distinctiveness": unlike,
        "rarity": rare,
        "confidence x rarity": confidence * rare,
        "confidence x distinctiveness x rarity": confidence * unlike * rare,
        "confidence x distinctiveness x middle": confidence * unlike * central,
        "confidence x middle": confidence * central,
        "confidence x rarity x middle": confidence * rare * central,
        "edge energy": energy,
    }


def detectors() -> dict[str, Callable[[Any, int], Tensor]]:
    """OpenCV's: grey image and budget -> points (N, 2), the strongest."""

    def best(found: Any, count: int) -> Tensor:
        ordered = sorted(found, key=lambda one: -one.response)[:count]
        return torch.tensor([one.pt for one in ordered]).reshape(-1, 2)

    def corners(grey: Any, count: int) -> Tensor:
        found = cv2.goodFeaturesToTrack(grey, count, 0.01, 0.5 * (grey.size / count) ** 0.5)
        return torch.zeros(0, 2) if found is None else torch.from_numpy(found.reshape(-1, 2))

    return {
        "SIFT": lambda grey, count: best(cv2.SIFT_create().detect(grey), count),
        "ORB": lambda grey, count: best(cv2.ORB_create(nfeatures=count).detect(grey), count),
        "GFTT": corners,
    }


def plain_grid(side: Side, count: int) -> Tensor:
    """Indices of about `count` places, evenly spaced."""
    rows, columns = side.size
    across = max(1, round((count * columns / rows) ** 0.5))
    down = max(1, round(count / across))
    ys = ((torch.arange(down) + 0.5) * rows / down).long()
    xs = ((torch.arange(across) + 0.5) * columns / across).long()
    return (ys[:, None] * columns + xs).flatten()


def is_right(case: Case, places: Tensor, found: Tensor) -> Tensor:
    """(T,) bool: of places of photo A and where they were found."""
    both = torch.tensor([what == "both" for what in case.what])
    points0, points1 = case.points0[both], case.points1[both]
    truth = fit_thin_plate(points0, points1)(places)
    hull = cv2.convexHull(points0.numpy())
    inside = torch.tensor([
        cv2.pointPolygonTest(hull, (float(x), float(y)), True) > -0.02 * max(case.photo0.size)
        for x, y in places
    ])  # fmt: skip
    return inside & ((found - truth).norm(dim=1) < 0.1 * max(case.photo1.size))


@torch.no_grad()
def measure(case: Case, seen: Seen) -> dict[str, dict[int, tuple[int, int]]]:
    """Way to choose -> budget -> (right matches, matches)."""
    side0, features1 = seen.side_of(case.photo0), seen.features(case.photo1)
    grey = load(case.photo0.read()).permute(1, 2, 0).numpy()
    grey = cv2.cvtColor(np.ascontiguousarray(grey), cv2.COLOR_RGB2GRAY)
    matches = match_points(side0.features, features1, side0.points)
    right = is_right(case, side0.points, matches.points1)
    counts: dict[str, dict[int, tuple[int, int]]] = {}

    def add(name: str, budget: int, chosen: Tensor) -> None:
        counts.setdefault(name, {})[budget] = (int(right[chosen].sum()), len(chosen))

    for budget in BUDGETS:
        for name, quality in qualities(side0, grey).items():
            add(name, budget, spread(quality, side0.points, count=budget))
        add("plain grid", budget, plain_grid(side0, budget)[:budget])
        for name, detect in detectors().items():
            points = detect(grey, budget)
            chosen = torch.cdist(points, side0.points).argmin(1) if len(points) else torch.zeros(0)
            add(name, budget, torch.unique(chosen.long()))
    return counts


def averaged(counts: list[dict[int, tuple[int, int]]]) -> dict[str, dict[str, float]]:
    """Budget -> right matches of a pair on average, and their share of all matches."""
    table = {}
    for budget in BUDGETS:
        right, every = (sum(count[budget][i] for count in counts) for i in (0, 1))
        table[str(budget)] = {
            "right matches a pair": round(right / len(counts), 2),
            "share of matches": round(right / max(1, every), 4),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--scale", type=float, default=1.0, help="share of reliability's lists")
    parser.add_argument("--keep", type=Path, required=True, help="as of reliability.py")
    parser.add_argument("--out", type=Path, default=Path("results/studies/chosen_points.json"))
    args = parser.parse_args()
    model = DenseFeatures.from_pretrained(args.model)
    model.reliability = model.cohort = None
    cases = {
        name: [case for case in some if case.kind == "same" and case.what.count("both") >= 5]
        for name, some in all_cases(
            args.data, scale=args.scale, names=("pf-pascal val", "birds")
        ).items()
    }
    cases = {name: some[: args.pairs] for name, some in cases.items()}
    photos = [p for some in cases.values() for case in some for p in (case.photo0, case.photo1)]
    digest, side = file_hash(model_folder(args.model) / WEIGHTS), model.config.longest_side
    seen = Seen(model, Layers(model, args.keep, side))
    others = cohort_photos(args.data, {Path(p.name).stem for p in photos}, seed=0)
    seen.cohort = draw_cohort(seen, others, seed=0)
    seen.layers.add(photos)
    metrics: dict[str, Any] = {}
    for name, some in cases.items():
        counts = [measure(case, seen) for case in tqdm(some)]
        metrics[name] = {way: averaged([c[way] for c in counts]) for way in counts[0]}
    write_json(args.out, {
        "row": "points chosen for matching", "benchmark": "pf-pascal and birds", "metrics": metrics,
        "split": "development pairs", "config": {"pairs": args.pairs, "budgets": BUDGETS},
        "weights_sha256": digest,
        **environment(choose_device(None)),
    })  # fmt: skip
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()

"""Hyperpixel Flow's matcher on our own features, beside our votes, on both development sets.

    python benchmarks/experiments/hyperpixel.py DATA --out results/studies/hyperpixel.json

Pairs are drawn with a fixed seed: PF-PASCAL's development pairs (val and train lists, none of which
shares a photo with test) and the birds of cub-dev. Ours is the shipped model, which sees photos as
`surefeat match` does; read at cells 4 px apart of photos of at most 300 px, with boxes of 27 px, it
goes through the same votes and histogram as Hyperpixel Flow's own layers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.files import environment, file_hash, write_json
from surefeat.core.geometry import Frame
from surefeat.core.image import load
from surefeat.data.benchmarks import development_pairs
from surefeat.data.pairs import Pair, load_pairs
from surefeat.match.points import match_points
from surefeat.match.search import prepare_pair
from surefeat.measure.metrics import pck_over_pairs
from surefeat.model.config import POINT_WEIGHTS, WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.peers.hyperpixel import DEFAULT, Grid, hough_transfer, hyperpixel_row, move_points

JUMP, HALF = 4, 13
"""Pixels between cells, and half a box's side."""

Way = Callable[[Pair, Features, Features], Tensor]


def even_cells(features: Features) -> tuple[Grid, Frame]:
    """Cells of a photo of at most 300 px, and how its pixels follow from the original's."""
    height, width = features.frame.original
    scale = min(1.0, DEFAULT.longest / max(height, width))
    size = (round(height * scale), round(width * scale))
    ys, xs = (torch.arange(HALF - JUMP, n - HALF + JUMP, JUMP).float() for n in size)
    return Grid(torch.cartesian_prod(ys, xs).flip(-1), size, HALF), Frame((height, width), size)


def by_hough(pair: Pair, features0: Features, features1: Features, *, hough: bool = True) -> Tensor:
    """Our descriptors and lower layer in the votes and the histogram of Hyperpixel Flow."""
    sides = prepare_pair(
        features0, features1, descriptor_weight=POINT_WEIGHTS[0], lower_weight=POINT_WEIGHTS[1]
    )
    (grid0, frame0), (grid1, frame1) = (even_cells(side.features) for side in sides)
    rows = [
        side.at(frame.to_original(grid.centres))
        for side, grid, frame in zip(sides, (grid0, grid1), (frame0, frame1), strict=True)
    ]
    cosine, asked = rows[0] @ rows[1].T, frame0.to_network(pair.points0)
    if hough:
        return frame1.to_original(hough_transfer(cosine, grid0, grid1, asked))
    return frame1.to_original(move_points(asked, grid0, grid1.centres[cosine.argmax(1)]))


def by_votes(pair: Pair, features0: Features, features1: Features) -> Tensor:
    """What `surefeat match` does."""
    seen = pair.visible
    moved = torch.full_like(pair.points1, float("nan"))
    moved[seen] = match_points(features0, features1, pair.points0[seen]).points1.cpu()
    return moved


def some(pairs: list[Pair], count: int) -> list[Pair]:
    return random.Random(0).sample(pairs, min(count, len(pairs)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with pf-pascal, cub-dev and weights")
    parser.add_argument("--pairs", type=int, default=60, help="of each set")
    parser.add_argument("--sets", nargs="+", default=["pf-pascal", "cub-dev"])
    parser.add_argument("--ways", nargs="+", help="only these; by default all")
    parser.add_argument("--out", type=Path, default=Path("results/studies/hyperpixel.json"))
    args = parser.parse_args()
    val, train = development_pairs(args.data / "pf-pascal")
    birds = load_pairs(args.data / "cub-dev" / "pairs.csv")
    model = DenseFeatures.from_pretrained(device="cpu")
    init = [args.data / "weights" / "resnet50_v1_imagenet.safetensors"]
    peer = hyperpixel_row(init=init, device=torch.device("cpu")).transfer
    assert peer is not None
    ways: dict[str, Way] = {
        "ours, votes (default)": by_votes,
        "ours, Hyperpixel Flow's votes and histogram": by_hough,
        "ours, no histogram": lambda *given: by_hough(*given, hough=False),
        "hyperpixel-flow": lambda pair, *_: peer(
            load(pair.image0), load(pair.image1), pair.points0
        ),
    }
    ways = {name: way for name, way in ways.items() if not args.ways or name in args.ways}
    about = {"weights_sha256": file_hash(model_folder(None) / WEIGHTS),
             "hyperpixel weights_sha256": file_hash(init[0])}  # fmt: skip
    study: dict[str, Any] = {"metrics": {}, "config": {}}
    if args.out.is_file():
        study = json.loads(args.out.read_text())
    study |= {"row": "ours and hyperpixel-flow", "benchmark": "development pairs", "split": "dev"}
    for name in args.sets:
        pairs = some(val + train if name == "pf-pascal" else birds, args.pairs)
        moved: dict[str, list[Tensor]] = {way: [] for way in ways}
        for pair in pairs:
            features = model.extract([pair.image0, pair.image1])
            for way, match in ways.items():
                moved[way].append(match(pair, *features))
        scores: dict[str, dict[str, float]] = {}
        for way, points in moved.items():
            scores[way] = {}
            for rule in ("scnet", "img"):
                pck = pck_over_pairs(points, pairs, convention=rule, alphas=(0.05, 0.1))
                for alpha, share in zip((0.05, 0.1), pck.per_image, strict=True):
                    scores[way][f"pck@{alpha:g} {rule}"] = round(100 * share, 2)
        study["metrics"][name] = scores
        ran = about | environment(torch.device("cpu"))
        study["config"][name] = {"pairs": len(pairs), "seed": 0, "run": ran}
        write_json(args.out, study | ran)
        print(name, scores)


if __name__ == "__main__":
    main()

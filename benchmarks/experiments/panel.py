"""Regions of two pairs of photos, matched by HOG with NAM, by ours and by SCNet-A: for a figure.

    python benchmarks/experiments/panel.py --hog FOLDER --scnet FOLDER --init VGG16
        --pairs NAME FIRST SECOND [NAME FIRST SECOND ...] --proposals FILE --out FILE.json

Photos that may be shown: two of one motorcycle, and two portraits (docs/figures.py has them).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.files import choose_device, environment, write_json
from surefeat.core.geometry import Frame
from surefeat.core.image import load, resize
from surefeat.match.proposals import DEFAULT, proposals_of
from surefeat.match.regions import match_regions
from surefeat.measure.matching import finer, to_square
from surefeat.measure.rows import RegionPair, Row, build_row
from surefeat.peers.rows import trained_row

SIDE, CELLS, KEPT = 224, 28, 100
"""Of the square, its cells when regions are pooled, and how many of the best matches are kept."""


@torch.no_grad()
def best_matches(row: Row, photos: Sequence[Tensor], boxes: Sequence[Tensor]) -> dict[str, Any]:
    """The best box of photo 1 for each of photo 0, highest scores first, original pixels."""
    device = choose_device(None)
    sizes = [(photo.shape[1], photo.shape[2]) for photo in photos]
    squares = torch.stack([resize(photo, size=(SIDE, SIDE)) for photo in photos]).to(device)
    seen = row.extract(squares)
    own = [to_square(part, Frame(size, (SIDE, SIDE))).to(device)
           for part, size in zip(boxes, sizes, strict=True)]  # fmt: skip
    if row.describe and row.rescore:
        described = [row.describe(f, b) for f, b in zip(seen, own, strict=True)]
        pair = RegionPair(own[0], own[1], (sizes[0], sizes[1]), SIDE)
        pair = replace(pair, described0=described[0], described1=described[1])
        score, index = row.rescore(described[0] @ described[1].T, pair).max(1)
    else:
        fine = [finer(features, cells=CELLS, unit=row.unit) for features in seen]
        matches = match_regions(
            fine[0], fine[1], own[0], own[1], confidence=row.confidence, lower=row.lower,
            descriptor_weight=row.region_weights[0], lower_weight=row.region_weights[1],
        )  # fmt: skip
        score, index = matches.score, matches.index
    order = score.argsort(descending=True).cpu()
    kept, index = order[:KEPT], index.cpu()
    return {
        "boxes0": boxes[0][kept].tolist(), "boxes1": boxes[1][index[kept]].tolist(),
        "score": [round(value, 4) for value in score.cpu()[kept].tolist()],
        "weights_sha256": row.weights_sha256,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hog", type=Path, required=True, help="what `peers fit hog` wrote")
    parser.add_argument("--scnet", type=Path, required=True, help="what `peers fit scnet-a` wrote")
    parser.add_argument("--init", nargs="+", default=["imagenet"])
    parser.add_argument("--pairs", nargs="+", required=True, help="NAME FIRST SECOND ...")
    parser.add_argument("--proposals", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = choose_device(None)
    rows = {
        "HOG, NAM": trained_row("hog-nam", options.hog, init=options.init, device=device),
        "ours": build_row("ours", device=device),
        "SCNet-A": trained_row("scnet-a", options.scnet, init=options.init, device=device),
    }
    found: dict[str, Any] = {}
    for n in range(0, len(options.pairs), 3):
        name, *files = options.pairs[n : n + 3]
        paths = [Path(file) for file in files]
        known = proposals_of(paths, DEFAULT, file=options.proposals, quiet=True)
        photos, boxes = [load(path) for path in paths], [known[path] for path in paths]
        found[name] = {title: best_matches(row, photos, boxes) for title, row in rows.items()}
    result = {
        "row": "HOG-NAM, ours and SCNet-A", "benchmark": "panel", "split": "none",
        "metrics": found, "weights_sha256": None, **environment(device),
        "config": {"side": SIDE, "cells": CELLS, "kept": KEPT},
    }  # fmt: skip
    write_json(options.out, result)
    print({name: list(rows) for name, rows in found.items()})


if __name__ == "__main__":
    main()

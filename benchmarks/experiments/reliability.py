"""Fit Matches.probability on PF-PASCAL development pairs and show how well it is calibrated.

    python benchmarks/experiments/reliability.py PF-PASCAL --model MODEL
        --out results/studies/reliability.json

Fitted on the pairs of the train list, checked on those of the val list; neither shares an image
with the test list. A match is right within 0.1 of the target's longer side (the img rule). With
--store the fit is written into the model's folder.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.ranking import auroc, calibration, risk_coverage
from surefeat.data.benchmarks import development_pairs
from surefeat.data.pairs import Pair
from surefeat.match.points import Matches, match_points
from surefeat.measure.metrics import pck_over_pairs
from surefeat.measure.reliability import fit_reliability, match_signs
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import SIGNS

RIGHT_WITHIN = 0.1


def match_all(
    model: DenseFeatures, pairs: list[Pair], *, side: int, voting: bool
) -> tuple[list[Matches], list[Tensor]]:
    """Matches of every pair's keypoints, and which of them are right."""
    paths = sorted({path for pair in pairs for path in (pair.image0, pair.image1)})
    features: dict[Path, Features] = dict(
        zip(paths, model.extract(paths, longest_side=side), strict=True)
    )
    matches, correct = [], []
    for pair in tqdm(pairs, desc=f"{side} px, voting {voting}"):
        points0, points1 = pair.common()
        found = match_points(features[pair.image0], features[pair.image1], points0, voting=voting)
        error = (found.points1.cpu() - points1).norm(dim=1)
        matches.append(found)
        correct.append(error < RIGHT_WITHIN * max(pair.size1))
    return matches, correct


def accuracy(matches: list[Matches], pairs: list[Pair]) -> dict[str, float]:
    """PCK@0.1 per image in two conventions."""
    predicted = [found.points1.cpu() for found in matches]
    plain = [
        Pair(**{**pair.__dict__, "points0": pair.common()[0], "points1": pair.common()[1],
                "visible": torch.ones(len(pair.common()[0]), dtype=torch.bool)})
        for pair in pairs
    ]  # fmt: skip
    found: dict[str, float] = {}
    for rule in ("scnet", "img"):
        result = pck_over_pairs(predicted, plain, convention=rule, alphas=(0.05, 0.1))
        found |= {f"pck@{a} {rule}": round(100 * float(v), 2)
                  for a, v in zip((0.05, 0.1), result.per_image, strict=True)}  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("results/studies/reliability.json"))
    parser.add_argument("--sides", type=int, nargs="*", default=[224, 320, 448])
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--store", action="store_true")
    args = parser.parse_args()
    model = DenseFeatures.from_pretrained(args.model)
    digest = file_hash(model_folder(args.model) / WEIGHTS)
    val, train = (pairs[: args.pairs] for pairs in development_pairs(args.data))
    metrics: dict[str, Any] = {}
    for side in args.sides:
        for voting in (False, True):
            matches, _ = match_all(model, val, side=side, voting=voting)
            metrics[f"val, {side} px, {'voting' if voting else 'nearest'}"] = accuracy(matches, val)
    side = model.config.longest_side
    matches, correct = match_all(model, train, side=side, voting=True)
    metrics[f"train list, {side} px, voting"] = accuracy(matches, train)
    fitted = fit_reliability(
        matches, correct, voting=True, right_within=RIGHT_WITHIN, sides=[side],
        weights_sha256=digest,
        fitted_on=f"PF-PASCAL, {len(train)} pairs of the train list without test images",
    )  # fmt: skip
    matches, correct = match_all(model, val, side=side, voting=True)
    right = torch.cat(correct)
    chance = torch.cat([
        fitted.predict(m.score, m.margin, m.round_trip / max(m.size0), m.confidence).cpu()
        for m in matches
    ])  # fmt: skip
    table = torch.cat([match_signs(m).cpu() for m in matches])
    signed = dict(zip(SIGNS, table.unbind(1), strict=True)) | {"probability": chance}
    signed["round_trip"] = -signed["round_trip"]
    metrics["auroc on val"] = {name: round(auroc(v, right), 4) for name, v in signed.items()}
    metrics["aurc on val"] = {
        name: round(risk_coverage(v, right).area, 4) for name, v in signed.items()
    }
    curve = calibration(chance, right, bins=10)
    metrics["calibration on val"] = {
        "expected calibration error": round(curve.error, 4),
        "predicted": [None if v != v else round(v, 3) for v in curve.predicted.tolist()],
        "actual": [None if v != v else round(v, 3) for v in curve.actual.tolist()],
        "count": curve.count.tolist(),
    }
    if args.store:
        fitted.save(model_folder(args.model))
    write_json(args.out, {
        "row": "Matches.probability", "benchmark": "pf-pascal",
        "split": "development pairs: fitted on the train list, measured on val",
        "metrics": metrics, "config": {"side": side, "fit": asdict(fitted)},
        "weights_sha256": digest, **environment(choose_device(None)),
    })  # fmt: skip
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()

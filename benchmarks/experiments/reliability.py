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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.ranking import auroc, risk_coverage
from surefeat.data.benchmarks import development_pairs
from surefeat.data.pairs import Pair
from surefeat.match.points import Matches, match_points
from surefeat.measure.metrics import pck_over_pairs
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import SIGNS, Reliability, signs

RIGHT_WITHIN = 0.1

Floats = npt.NDArray[np.float64]


def fit_reliability(
    matches: Sequence[Matches],
    correct: Sequence[Tensor],
    *,
    voting: bool,
    right_within: float,
    fitted_on: str,
    weights_sha256: str = "",
    sides: Sequence[int] = (),
) -> Reliability:
    """Fit on the matches of many pairs; correct: per pair (N,) bool.

    The other arguments are recorded as provenance (see Reliability).
    """
    table = torch.cat([match_signs(found).double().cpu() for found in matches])
    right = torch.cat([each.cpu() for each in correct])
    mean, scale = table.mean(0), table.std(0, correction=0)
    # A sign that never varies (confidence, from a model without it) differs by rounding alone,
    # which standardising would blow up.
    varies = scale > 1e-5 * (1 + mean.abs())
    scale = torch.where(varies, scale, 1.0)
    standard = torch.where(varies, (table - mean) / scale, 0.0)
    *weights, bias = fit_logistic(standard.numpy(), right.numpy()).tolist()
    return Reliability(
        weights=tuple(weights), bias=bias, mean=tuple(mean.tolist()), scale=tuple(scale.tolist()),
        voting=voting, right_within=right_within, fitted_on=fitted_on, matches=len(table),
        weights_sha256=weights_sha256, sides=tuple(sides),
    )  # fmt: skip


def match_signs(matches: Matches) -> Tensor:
    """The signs (N, 4) of a pair's matches that `Reliability` reads."""
    relative = matches.round_trip / max(matches.size0)
    return signs(matches.score, matches.margin, relative, matches.confidence)


def fit_logistic(table: Floats, right: npt.NDArray[np.bool_], *, ridge: float = 1e-4) -> Floats:
    """Weights of (N, F) standardised features and the bias: (F + 1,).

    Minimises the mean log loss + ridge/2 |weights|^2; the ridge keeps the weights finite where the
    features separate right from wrong. The bias is free, so the mean probability is the share of
    right answers.
    """
    if len(table) != len(right) or right.all() or not right.any():
        raise ValueError("a probability needs one answer per match, right ones and wrong ones")
    design = np.concatenate([table, np.ones((len(table), 1))], axis=1)
    penalty = np.append(np.full(table.shape[1], ridge), 0.0)

    def cost(weights: Floats) -> tuple[float, Floats]:
        logits = design @ weights
        loss = (np.logaddexp(0, logits) - right * logits).mean()
        slope = design.T @ (1 / (1 + np.exp(-logits)) - right) / len(right)
        return loss + (penalty * weights**2).sum() / 2, slope + penalty * weights

    start = np.zeros(design.shape[1])
    found: Floats = minimize(cost, start, jac=True, method="BFGS", options={"gtol": 1e-9}).x
    return found


def calibration(chance: Tensor, right: Tensor, *, bins: int = 10) -> dict[str, Any]:
    """Of probabilities (N,) in bins of equal width: mean, share of right ones, count, and gap."""
    index = (chance.double() * bins).long().clamp_max(bins - 1)
    count = torch.bincount(index, minlength=bins)
    predicted = torch.bincount(index, weights=chance.double(), minlength=bins) / count
    actual = torch.bincount(index, weights=right.double(), minlength=bins) / count
    gap = ((predicted - actual).abs() * count).nansum() / len(chance)
    return {
        "expected calibration error": round(float(gap), 4),
        "predicted": [None if v != v else round(v, 3) for v in predicted.tolist()],
        "actual": [None if v != v else round(v, 3) for v in actual.tolist()],
        "count": count.tolist(),
    }


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
    metrics["calibration on val"] = calibration(chance, right)
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

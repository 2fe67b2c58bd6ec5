"""Fit Matches.probability on development pairs of two data sets; show how well it is calibrated.

    python benchmarks/experiments/reliability.py PF-PASCAL BIRDS.csv --model MODEL
        --out results/studies/reliability.json

Fitted on PF-PASCAL's train list and every second pair of the other list, so that both count the
same; checked on PF-PASCAL's val list and on the other pairs. None shares an image with the test
list. A match is right within 0.1 of the target's longer side (the img rule). With --store the fit
is written into the model's folder, and what it was made with into fits.json beside this script: the
matches of two made-up pictures and the signs read from them. A test compares that with what
matching gives now, so that whoever changes it fits anew.

    python benchmarks/experiments/reliability.py --record

writes fits.json alone, for fits that were stored at this very state of matching.
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
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.geometry import Frame
from surefeat.core.ranking import aurc, auroc
from surefeat.data.benchmarks import development_pairs
from surefeat.data.pairs import Pair, load_pairs
from surefeat.match.points import Matches, match_points, matching_text
from surefeat.match.search import Voting
from surefeat.model.config import POINT_WEIGHTS, SHIPPED, WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import FILE as RELIABILITY
from surefeat.model.probability import SIGNS, Reliability, signs

RIGHT_WITHIN = 0.1

FITS = Path(__file__).resolve().parent / "fits.json"
"""Hash of a shipped fit's file -> what matching gave when it was made."""

Floats = npt.NDArray[np.float64]


def fit_reliability(
    matches: Sequence[Matches],
    correct: Sequence[Tensor],
    *,
    matching: str,
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
        matching=matching, right_within=right_within, fitted_on=fitted_on, matches=len(table),
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


def made_up(scale: float, shift: float) -> Features:
    """Features of a picture of waves, smooth and without repetition, of another size each."""
    rows, columns = (9, 12) if scale == 1 else (11, 10)
    y, x = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64), torch.arange(columns, dtype=torch.float64),
        indexing="ij",
    )  # fmt: skip
    x, y = scale * x + shift, scale * y + 0.5 * shift
    n = torch.arange(1, 25, dtype=torch.float64)[:, None, None]
    waves = torch.sin(n.sqrt() * x / 2 + n * n + (2 * n).sqrt() * y / 3)
    sigma = 0.3 + 0.2 * torch.sin(x / 2) * torch.cos(y / 3)
    network = (16 * rows, 16 * columns)
    maps = [F.normalize(part.float(), dim=0) for part in waves.split(12)]
    return Features(maps[0], sigma.float(), maps[1], Frame((10 * rows, 10 * columns), network), 16)


def made_with() -> dict[str, Any]:
    """What matching says of two made-up pictures, and the signs a fit reads from that."""
    places = [[x, y] for x in (15, 45, 80, 110) for y in (12, 40, 75)]
    matches = match_points(made_up(1, 0.0), made_up(0.9, 0.7), places)
    told = {name: _short(getattr(matches, name)) for name in (*SIGNS, "points1")}
    return {
        "matching": matching_text(Voting(), POINT_WEIGHTS), "right within": RIGHT_WITHIN,
        "matches": told, "signs": _short(match_signs(matches)),
    }  # fmt: skip


def _short(values: Tensor) -> list[Any]:
    listed: list[Any] = values.double().mul(1e4).round().div(1e4).tolist()
    return listed


def record_fits() -> None:
    """Write down, for every fit that ships, what matching gives now."""
    fits = [model_folder(name) / RELIABILITY for name in SHIPPED]
    write_json(FITS, {file_hash(fit): made_with() for fit in fits if fit.is_file()})


def match_all(model: DenseFeatures, pairs: list[Pair]) -> tuple[list[Matches], list[Tensor]]:
    """Matches of every pair's keypoints, and which of them are right."""
    paths = sorted({path for pair in pairs for path in (pair.image0, pair.image1)})
    features: dict[Path, Features] = dict(zip(paths, model.extract(paths), strict=True))
    matches, correct = [], []
    for pair in tqdm(pairs):
        points0, points1 = pair.common()
        matches.append(match_points(features[pair.image0], features[pair.image1], points0))
        error = (matches[-1].points1.cpu() - points1).norm(dim=1)
        correct.append(error < RIGHT_WITHIN * max(pair.size1))
    return matches, correct


def judged(fitted: Reliability, matches: list[Matches], correct: list[Tensor]) -> dict[str, Any]:
    """How well each sign and the probability tell right matches from wrong ones."""
    right = torch.cat(correct)
    chance = torch.cat([
        fitted.predict(m.score, m.margin, m.round_trip / max(m.size0), m.confidence).cpu()
        for m in matches
    ])  # fmt: skip
    table = torch.cat([match_signs(m).cpu() for m in matches])
    signed = dict(zip(SIGNS, table.unbind(1), strict=True)) | {"probability": chance}
    signed["round_trip"] = -signed["round_trip"]
    return {
        "matches": len(right), "right": round(right.double().mean().item(), 4),
        "auroc": {name: round(auroc(values, right), 4) for name, values in signed.items()},
        "aurc": {n: round(aurc(v, right), 4) for n, v in signed.items()},
        "calibration": calibration(chance, right),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("birds", type=Path, nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("results/studies/reliability.json"))
    parser.add_argument("--pairs", type=int, help="of each list at most so many, spread over it")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--record", action="store_true", help="write fits.json, and nothing else")
    args = parser.parse_args()
    if args.record:
        record_fits()
        return
    if args.data is None or args.birds is None:
        parser.error("pass the folder of PF-PASCAL and the list of birds")
    model = DenseFeatures.from_pretrained(args.model)
    digest = file_hash(model_folder(args.model) / WEIGHTS)
    val, train = development_pairs(args.data)
    birds = load_pairs(args.birds)
    lists = {"pf-pascal fit": train, "pf-pascal check": val, "birds fit": birds[::2],
             "birds check": birds[1::2]}  # fmt: skip
    if args.pairs:
        lists = {name: some[:: max(1, len(some) // args.pairs)] for name, some in lists.items()}
    found = {name: match_all(model, some) for name, some in lists.items()}
    fits = [found[name] for name in lists if name.endswith("fit")]
    fitted = fit_reliability(
        [match for matches, _ in fits for match in matches],
        [right for _, correct in fits for right in correct],
        matching=matching_text(Voting(), POINT_WEIGHTS), right_within=RIGHT_WITHIN,
        sides=[model.config.longest_side], weights_sha256=digest,
        fitted_on=f"{len(lists['pf-pascal fit'])} PF-PASCAL pairs of the train list without test "
        f"images and {len(lists['birds fit'])} pairs of birds",
    )  # fmt: skip
    metrics = {name: judged(fitted, *found[name]) for name in lists}
    if args.store:
        fitted.save(model_folder(args.model))
        record_fits()
    write_json(args.out, {
        "row": "Matches.probability", "benchmark": "pf-pascal and birds",
        "split": "development pairs: fitted on some, measured on others", "metrics": metrics,
        "config": {"fit": asdict(fitted), "pairs": {k: len(v) for k, v in lists.items()}},
        "weights_sha256": digest, **environment(choose_device(None)),
    })  # fmt: skip
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()

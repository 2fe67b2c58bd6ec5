"""Fit what a model knows of its own answers on development pairs; check it on held-out ones.

    python benchmarks/experiments/reliability.py DATA --model MODEL --store
        --out results/studies/reliability.json

DATA holds pf-pascal, pf-willow, cub-dev, voc, voc-nonrigid and pascal3d. Features are extracted
once; then the three probabilities of `Reliability` are fitted (are two photos related, in a hurry
and by their cells; has a point a counterpart and was it found) and a cohort is drawn. With --store
both are written into the model's folder, so that matches of this model have a probability.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reliability_cases import Case, Photo, all_cases
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.image import ImageLike, decode, read_bytes
from surefeat.core.ranking import auroc
from surefeat.data.sources import find_images
from surefeat.match.points import match_points, matching_text
from surefeat.match.related import (
    PAIR_SIGNS,
    POINT_SIGNS,
    Agreement,
    Cells,
    point_signs,
    pooled_vector,
)
from surefeat.match.search import Side, prepare
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS, WEIGHTS, model_folder
from surefeat.model.features import Features, compare_with
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort, Logistic, Reliability, fit_logistic

RIGHT_WITHIN = 0.1

COHORT_PHOTOS, COHORT_CELLS = 64, 8

Signs = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Table:
    """The signs and answers of one list of cases."""

    related: Tensor
    """(P,) bool."""
    kind: tuple[str, ...]
    """(P,) same, near, far, nothing."""
    pair: Signs
    """PAIR_SIGNS and pooled, (P,) each, cells weighed by confidence."""
    plain: Signs
    """The same, all cells weighing the same."""
    case: Tensor
    """(N,) of every point, its pair."""
    right: Tensor
    """(N,) bool: it has a counterpart, which was found."""
    what: tuple[str, ...]
    """(N,) as in Case."""
    point: Signs
    """POINT_SIGNS (N,)."""


def draw_cohort(model: DenseFeatures, data: Path, leave_out: set[str], *, seed: int) -> Cohort:
    """Places of photos of all classes, none of which is in any case."""
    items = [
        item
        for folder in ("voc", "voc-nonrigid")
        for item in find_images(data / folder)
        if Path(item.name).stem not in leave_out
    ]
    chosen = random.Random(seed).sample(sorted(items, key=lambda i: i.name), COHORT_PHOTOS)
    generator = torch.Generator().manual_seed(seed)
    layers: tuple[list[Tensor], list[Tensor]] = ([], [])
    for item in chosen:
        place = item.read
        data_ = read_bytes(place.path, name=item.name, offset=place.offset, size=place.size)
        (features,) = model.extract(decode(data_, name=item.name))
        draws = torch.rand(COHORT_CELLS, 2, generator=generator)
        height, width = features.frame.original
        points = (draws * torch.tensor([width, height]) - 0.5).to(features.descriptors.device)
        layers[0].append(features.at(points).cpu().half().float())
        layers[1].append(features.lower_at(points).cpu().half().float())
    return Cohort(torch.cat(layers[0]), torch.cat(layers[1]))


class Seen:
    """Features of photos, extracted once, in half precision."""

    def __init__(self, model: DenseFeatures, cohort: Cohort, side: int) -> None:
        self.model, self.cohort, self.side = model, cohort, side
        self.kept: dict[str, tuple[Tensor, Tensor, Features]] = {}

    def add(self, photos: Sequence[Photo]) -> None:
        new = {photo.name: photo for photo in photos if photo.name not in self.kept}
        names = sorted(new)
        for start in tqdm(range(0, len(names), 32), desc="extracting"):
            part = names[start : start + 32]
            images: list[ImageLike] = [new[name].read() for name in part]
            for name, features in zip(
                part, self.model.extract(images, longest_side=self.side), strict=True
            ):
                features = compare_with(self.cohort, features)
                halves = features.descriptors.half(), features.lower.half()
                empty = features.descriptors.new_zeros(0)
                kept = replace(features, descriptors=empty, lower=empty, reliability=None)
                self.kept[name] = (*halves, kept)

    def side_of(self, photo: Photo) -> Side:
        return prepare(
            self.features(photo), descriptor_weight=POINT_WEIGHTS[0],
            lower_weight=POINT_WEIGHTS[1],
        )  # fmt: skip

    def features(self, photo: Photo) -> Features:
        descriptors, lower, rest = self.kept[photo.name]
        return replace(rest, descriptors=descriptors.float(), lower=lower.float())


def seen_before(file: Path | None, digest: str, model: DenseFeatures, side: int) -> Seen | None:
    """What an earlier run kept, if it is of this model and size."""
    if file is None or not file.is_file():
        return None
    stored = torch.load(file, weights_only=False)  # written by this script
    if (stored["weights"], stored["side"]) != (digest, side):
        return None
    seen = Seen(model, stored["cohort"], side)
    seen.kept = stored["kept"]
    return seen


def on_cpu(signs: Signs) -> Signs:
    return {name: values.cpu() for name, values in signs.items()}


@torch.no_grad()
def tabulate(cases: Sequence[Case], seen: Seen, centre: Tensor) -> Table:
    """Match every case's points, and collect all signs."""
    pairs: list[Signs] = []
    plains: list[Signs] = []
    points: list[Signs] = []
    right, number = [], []
    for index, case in enumerate(tqdm(cases, desc="matching")):
        side0, side1 = seen.side_of(case.photo0), seen.side_of(case.photo1)
        cells = Cells.of(side0), Cells.of(side1)
        for rows, weighted in ((pairs, True), (plains, False)):
            signs = Agreement(*cells, weighted).signs()
            pooled = [pooled_vector(one, centre, weighted=weighted) for one in cells]
            rows.append(on_cpu(signs | {"pooled": pooled[0] @ pooled[1]}))
        matches = match_points(side0.features, side1.features, case.points0)
        tensors = {k: v for k, v in vars(matches).items() if isinstance(v, Tensor)}
        agreement = Agreement(*cells)
        points.append(on_cpu(point_signs(side0, side1, agreement, tensors)))
        error = (matches.points1.cpu() - case.points1).norm(dim=1)
        right.append(error < RIGHT_WITHIN * max(case.photo1.size))
        number.append(torch.full((len(error),), index))
    return Table(
        torch.tensor([case.related for case in cases]), tuple(case.kind for case in cases),
        {k: torch.stack([row[k] for row in pairs]) for k in pairs[0]},
        {k: torch.stack([row[k] for row in plains]) for k in plains[0]},
        torch.cat(number), torch.cat(right), tuple(w for case in cases for w in case.what),
        {k: torch.cat([row[k] for row in points]) for k in POINT_SIGNS},
    )  # fmt: skip


def halves(answer: Tensor, group: Tensor) -> Tensor:
    """Weights (N,) by which both answers of every group count the same, and groups too."""
    weights = torch.zeros(len(answer))
    for number in group.unique():
        for side in (True, False):
            chosen = (group == number) & (answer == side)
            if chosen.any():
                weights[chosen] = 1 / chosen.sum()
    return weights


def joined(tables: Sequence[Table], field: str) -> Signs:
    rows: list[Signs] = [getattr(table, field) for table in tables]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def fit_pair(tables: Sequence[Table], signs: Sequence[str], field: str, words: str) -> Logistic:
    """Of PAIR_SIGNS or the pooled one; related and unrelated pairs, and lists, count the same."""
    related = torch.cat([table.related for table in tables])
    group = torch.cat([torch.full((len(t.related),), i) for i, t in enumerate(tables)])
    table = joined(tables, field)
    chosen = {name: table[name] for name in signs}
    return fit_logistic(chosen, related, fitted_on=words, weight=halves(related, group))


def fit_point(tables: dict[str, Table], words: str) -> Logistic:
    """On related pairs; the points of PF-PASCAL count twice, as birds alone have hidden parts."""
    rows = {name: table.related[table.case] for name, table in tables.items()}
    weight = []
    for name, chosen in rows.items():
        count = int(chosen.sum())
        weight.append(torch.full((count,), (2 if "pf-pascal" in name else 1) / count))
    every = {
        sign: torch.cat([table.point[sign][rows[name]] for name, table in tables.items()])
        for sign in POINT_SIGNS
    }
    right = torch.cat([table.right[rows[name]] for name, table in tables.items()])
    return fit_logistic(every, right, fitted_on=words, weight=torch.cat(weight))


def point_chances(table: Table, fits: dict[str, Logistic]) -> Tensor:
    """(N,) Matches.probability."""
    related = torch.sigmoid(fits["pair"].log_odds(table.pair))[table.case]
    return related * torch.sigmoid(fits["point"].log_odds(table.point))


def calibration(
    chance: Tensor, right: Tensor, weight: Tensor | None = None, *, bins: int = 10
) -> dict[str, Any]:
    """Of probabilities (N,) in bins of equal width: mean, share of right ones, count, and gap."""
    weight = torch.ones(len(chance)).double() if weight is None else weight.double()
    index = (chance.double() * bins).long().clamp_max(bins - 1)
    mass = torch.bincount(index, weights=weight, minlength=bins)
    predicted = torch.bincount(index, weights=weight * chance.double(), minlength=bins) / mass
    actual = torch.bincount(index, weights=weight * right.double(), minlength=bins) / mass
    gap = ((predicted - actual).abs() * mass).nansum() / weight.sum()
    return {
        "expected calibration error": round(float(gap), 4),
        "predicted": [None if v != v else round(v, 3) for v in predicted.tolist()],
        "actual": [None if v != v else round(v, 3) for v in actual.tolist()],
        "count": torch.bincount(index, minlength=bins).tolist(),
    }


def bootstrap(
    value: Callable[[Tensor], float], answer: Tensor, *, rounds: int = 500
) -> tuple[float, float]:
    """The middle 95 % of a value over drawings of pairs with replacement, by answer."""
    generator = np.random.default_rng(0)
    sides = [np.flatnonzero(answer.numpy() == side) for side in (True, False)]
    drawn = [
        value(torch.from_numpy(np.concatenate([generator.choice(s, len(s)) for s in sides])))
        for _ in range(rounds)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return round(float(low), 4), round(float(high), 4)


def judged_pairs(table: Table, fits: dict[str, Logistic]) -> dict[str, Any]:
    """AUROC of related against far, near and nothing; with and without confidence as weight."""
    metrics: dict[str, Any] = {"pairs": {k: table.kind.count(k) for k in dict.fromkeys(table.kind)}}
    kinds = np.array(table.kind)
    odds = {
        "related": fits["pair"].log_odds(table.pair),
        "related, cells weigh the same": fits["plain"].log_odds(table.plain),
        **{f"{n}": table.pair[n] for n in (*PAIR_SIGNS, "pooled")},
        **{f"{n}, cells weigh the same": table.plain[n] for n in (*PAIR_SIGNS, "pooled")},
    }
    for against in ("far", "near", "nothing"):
        chosen = torch.from_numpy((kinds == "same") | (kinds == against))
        answer = table.related[chosen]
        if answer.all():
            continue
        metrics[f"auroc against {against}"] = {
            name: _with_interval(values[chosen], answer) for name, values in odds.items()
        }
        both = [odds[name][chosen] for name in list(odds)[:2]]
        gains = bootstrap(lambda rows, b=both, a=answer: auroc(b[0][rows], a[rows])
                          - auroc(b[1][rows], a[rows]), answer)  # fmt: skip
        metrics[f"auroc against {against}"]["gain by confidence"] = gains
    weight = halves(table.related, torch.zeros(len(kinds)))
    chance = torch.sigmoid(odds["related"])
    metrics["calibration"] = calibration(chance, table.related, weight)
    return metrics


def _with_interval(values: Tensor, answer: Tensor) -> list[Any]:
    return [round(auroc(values, answer), 4),
            bootstrap(lambda rows: auroc(values[rows], answer[rows]), answer)]  # fmt: skip


def judged_points(table: Table, fits: dict[str, Logistic]) -> dict[str, Any]:
    """Calibration on a half-and-half mix of related and unrelated pairs, and of each kind."""
    chance = point_chances(table, fits)
    related = table.related[table.case]
    weight = halves(related, torch.zeros(len(related)))
    what = np.array(table.what)
    return {
        "auroc": round(auroc(chance, table.right), 4),
        "half of them of unrelated pairs": calibration(chance, table.right, weight),
        "of related pairs": calibration(chance[related], table.right[related]),
        "by kind": {
            kind: {
                "points": int((what == kind).sum()),
                "right": round(
                    float(table.right[torch.from_numpy(what == kind)].float().mean()), 4
                ),
                "probability": round(float(chance[torch.from_numpy(what == kind)].mean()), 4),
            }
            for kind in dict.fromkeys(table.what)
        },
    }


@torch.no_grad()
def confident_share(cases: Sequence[Case], seen: Seen, fitted: Reliability) -> dict[str, Any]:
    """Of pairs as `surefeat match` treats them: has any of 60 chosen matches more than 0.5?"""
    said: dict[str, list[bool]] = {}
    for case in tqdm(cases, desc="choosing"):
        features = seen.features(case.photo0), seen.features(case.photo1)
        matches = match_points(*features, count=60, mutual=True, reliability=fitted)
        assert matches.probability is not None
        any_sure = bool((matches.probability > 0.5).any())
        said.setdefault(case.kind, []).append(any_sure)
    return {kind: {"pairs": len(v), "share": round(sum(v) / len(v), 4)} for kind, v in said.items()}


def in_words(metrics: dict[str, Any]) -> str:
    """The tables of docs/studies/related.md."""
    lines = [
        "| related against | AUROC | cells weigh the same | gain by confidence | pooled |",
        "|---|---|---|---|---|",
    ]
    for name, values in metrics.items():
        for against in ("far", "near", "nothing"):
            row = values["pairs"].get(f"auroc against {against}")
            if row:
                (value, (least, most)), (plain, _) = (
                    row[way] for way in ("related", "related, cells weigh the same")
                )
                low, high = row["gain by confidence"]
                gain = f"{value - plain:+.3f} ({low:+.3f} to {high:+.3f})"
                shown = f"{value:.3f} ({least:.3f} to {most:.3f})"
                pooled = row["pooled"][0]
                lines.append(
                    f"| {name}, {against} | {shown} | {plain:.3f} | {gain} | {pooled:.3f} |"
                )
    lines += [
        "",
        "| calibration error | related | probability, half of unrelated pairs | of related pairs "
        "| unrelated pairs with a match above 0.5 | related ones |",
        "|---|---|---|---|---|---|",
    ]
    key = "expected calibration error"
    for name, values in metrics.items():
        points, sure = values["points"], values.get("any match above 0.5", {})
        errors = [values["pairs"]["calibration"], points["half of them of unrelated pairs"],
                  points["of related pairs"]]  # fmt: skip
        cells = [name, *(f"{error[key]:.3f}" for error in errors), "", ""]
        if sure:
            others = [sure[kind] for kind in sure if kind != "same"]
            count = sum(other["pairs"] for other in others)
            share = sum(other["pairs"] * other["share"] for other in others) / count
            cells[4:] = [f"{share:.0%} of {count}", f"{sure['same']['share']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("results/studies/reliability.json"))
    parser.add_argument("--scale", type=float, default=1.0, help="share of every list")
    parser.add_argument("--side", type=int, help="longest side of the network's input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--tables", type=Path, help="keep all signs in this file")
    parser.add_argument("--features", type=Path, help="keep features here, for another run")
    args = parser.parse_args()
    start = time.perf_counter()
    about = environment(choose_device(None))  # before anything is written into the tree
    model = DenseFeatures.from_pretrained(args.model, device=choose_device(None))
    model.reliability = model.cohort = None
    digest = file_hash(model_folder(args.model) / WEIGHTS)
    cases = all_cases(args.data, scale=args.scale, seed=args.seed)
    photos = [p for some in cases.values() for case in some for p in (case.photo0, case.photo1)]
    stems = {Path(photo.name.split("#")[0]).stem for photo in photos}
    side = args.side or model.config.longest_side
    seen = seen_before(args.features, digest, model, side)
    if seen is None:
        seen = Seen(model, draw_cohort(model, args.data, stems, seed=args.seed), side)
    cohort = seen.cohort
    seen.add(photos)
    if args.features:
        stored = {"weights": digest, "side": side, "cohort": cohort, "kept": seen.kept}
        torch.save(stored, args.features)
    centre = cohort.centre(POINT_WEIGHTS).to(model.device)
    tables = {name: tabulate(some, seen, centre) for name, some in cases.items()}
    if args.tables:
        torch.save({name: vars(table) for name, table in tables.items()}, args.tables)
    known = {name: table for name, table in tables.items() if name.endswith("fit")}
    fitting = list(known.values())
    words = "pairs of PF-PASCAL's train list and of birds, and photos of other classes"
    fits = {
        "pair": fit_pair(fitting, PAIR_SIGNS, "pair", words),
        "plain": fit_pair(fitting, PAIR_SIGNS, "plain", words),
        "pooled": fit_pair(fitting, ("pooled",), "pair", words),
    }
    fits["point"] = fit_point(known, words)
    fitted = Reliability(
        fits["pair"], fits["point"], fits["pooled"], matching_text(Voting(), POINT_WEIGHTS),
        RIGHT_WITHIN, digest, (side,),
    )  # fmt: skip
    metrics = {
        name: {"pairs": judged_pairs(table, fits), "points": judged_points(table, fits)}
        for name, table in tables.items()
    }
    for name in ("pf-pascal test", "pf-willow", "birds"):
        chosen = [
            case
            for kinds, count in ((("same",), 20), (("far", "nothing"), 60))
            for case in [c for c in cases[name] if c.kind in kinds][: int(count * args.scale) + 1]
        ]
        metrics[name]["any match above 0.5"] = confident_share(chosen, seen, fitted)
    if args.store:
        before = Reliability.load(model_folder(args.model))
        keypoints = before.keypoints if before and before.weights_sha256 == digest else None
        replace(fitted, keypoints=keypoints).save(model_folder(args.model))
        cohort.save(model_folder(args.model))
    write_json(args.out, {
        "row": "Matches.related and Matches.probability",
        "benchmark": "pf-pascal, pf-willow, birds, voc", "metrics": metrics,
        "split": "lists that end in fit are fitted on, the others only measured",
        "config": {"fit": asdict(fitted), "without confidence": asdict(fits["plain"]),
                   "cohort": [COHORT_PHOTOS, COHORT_CELLS], "seed": args.seed, "side": side,
                   "scale": args.scale},
        "seconds": round(time.perf_counter() - start),
        "weights_sha256": digest, **about,
    })  # fmt: skip
    print(in_words(metrics))


if __name__ == "__main__":
    main()

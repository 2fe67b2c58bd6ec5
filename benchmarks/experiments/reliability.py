"""Fit what a model knows of its own answers on development pairs; check it on held-out ones.

    python benchmarks/experiments/reliability.py DATA --model MODEL --keep FOLDER --store
        --out results/studies/reliability.json

DATA holds pf-pascal, pf-willow, cub-dev, voc, voc-nonrigid and pascal3d. FOLDER keeps the trunk's
layers of every photo, which models that differ in the head share, and the tables of signs. Three
probabilities of `Reliability` are fitted (are two photos related, in a hurry and by their cells;
has a point a counterpart and was it found) and a cohort is drawn. With --store both are written
into the model's folder, so that matches of this model have a probability. With --pairs only
whether photos are related is asked: minutes, for one model after another.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reliability_cases import FITTED, SIZES, WHOLE, Case, Photo, all_cases, whole_cases
from reliability_seen import (
    COHORT_CELLS,
    COHORT_PHOTOS,
    Layers,
    Seen,
    cohort_photos,
    draw_cohort,
)
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.ranking import auroc
from surefeat.match.points import match_points, matching_text
from surefeat.match.related import (
    GRID,
    PAIR_SIGNS,
    POINT_SIGNS,
    Agreement,
    Cells,
    point_signs,
    pooled_vector,
)
from surefeat.match.search import even_grid
from surefeat.match.votes import Voting, voting_grid
from surefeat.model.config import POINT_WEIGHTS, WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Logistic, Reliability, fit_logistic

RIGHT_WITHIN = 0.1

SAY = {"pf-pascal": 1.5, "birds": 1.0}
"""How much a set counts in the fit of points: that of birds alone has parts that the other photo
hides, so that each alone is too low on one and too high on the other; on development pairs this
balances the two."""

PAIRS_SAY = {"pf-pascal": 1.0, "birds": 1.0, "voc": 0.25}
"""How much a set counts in the fit of pairs: whole photos of VOC are harder than what users compare
on purpose, so that with them as much as the others all pairs of these look less sure than they are.
"""

STRANGE = (
    {"bus", "cow", "bicycle", "chair", "person"}, {"train", "horse", "boat", "diningtable",
    "tvmonitor"}, {"car", "sheep", "aeroplane", "bottle", "sofa", "dog"},
    {"cat", "motorbike", "pottedplant", "bird"},
)  # fmt: skip
"""Classes that are left out together, to see what a fit says of kinds that it never saw."""

CHECKED = ("pf-pascal test", "pf-willow", "birds")
"""Lists that were not fitted on, on which whole pairs are matched too."""

ROUNDS = 40
"""Of expectation and maximisation, after which nothing changes any more."""

Signs = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Table:
    """The signs and answers of one list of cases."""

    related: Tensor
    """(P,) bool."""
    kind: tuple[str, ...]
    """(P,) same, near, far, nothing."""
    photos: tuple[tuple[str, str], ...]
    """(P,) their names."""
    shows: tuple[frozenset[str], ...]
    """(P,) what the two are photos of."""
    pair: Signs
    """PAIR_SIGNS and pooled, (P,) each, cells weighed by confidence."""
    plain: Signs
    """The same, all cells weighing the same."""
    strange: Signs
    """As `pair`, compared with a cohort of no photo that shows what either is a photo of."""
    plain_strange: Signs
    case: Tensor
    """(N,) of every point, its pair."""
    right: Tensor
    """(N,) bool: it has a counterpart, which was found."""
    what: tuple[str, ...]
    """(N,) as in Case."""
    point: Signs
    """POINT_SIGNS (N,)."""


def on_cpu(signs: Signs) -> Signs:
    return {name: values.cpu() for name, values in signs.items()}


class Known:
    """The cells of photos by name, which know what pairs are judged by, and no more."""

    def __init__(self, seen: Seen, cases: Sequence[Case]) -> None:
        self.seen, self.cells, self.common = seen, {}, {}
        shows: dict[str, set[frozenset[str]]] = {}
        for case in cases:
            for photo in (case.photo0, case.photo1):
                shows.setdefault(photo.name, set()).add(shown_in(case))
        for photo in (photo for case in cases for photo in (case.photo0, case.photo1)):
            if photo.name not in self.cells:
                self._look(photo, shows[photo.name])

    def _look(self, photo: Photo, without: set[frozenset[str]]) -> None:
        features = self.seen.features(photo)
        points = even_grid(features, size=voting_grid(features.frame.network, GRID))
        kind = features.kind_at(points)
        none, confidence = kind.new_zeros(len(points), 0), features.confidence_at(points)
        common = features.common_kind_at(points)
        self.cells[photo.name] = Cells(points, none, kind, confidence, common)
        alone = self.seen.common_by_photo(features)
        for shows in without:
            kept = [not kinds & shows for kinds in self.seen.cohort_kinds]
            fewer = replace(features, common_kind=alone[torch.tensor(kept)].amax(0))
            self.common[photo.name, shows] = fewer.common_kind_at(points)

    def pair(self, case: Case) -> tuple[Cells, Cells]:
        return self.cells[case.photo0.name], self.cells[case.photo1.name]

    def strange(self, case: Case) -> tuple[Cells, Cells]:
        """Compared with a cohort of no photo that shows what either is a photo of."""
        names, shows = (case.photo0.name, case.photo1.name), shown_in(case)
        one, other = (replace(self.cells[n], common=self.common[n, shows]) for n in names)
        return one, other


def shown_in(case: Case) -> frozenset[str]:
    return frozenset({case.photo0.kind, case.photo1.kind}) - {""}


def pair_row(cells: tuple[Cells, Cells], centre: Tensor, *, weighted: bool) -> Signs:
    """weighted: cells count by their confidence; else all the same, to see what that is worth."""
    if not weighted:
        one, other = (replace(c, confidence=torch.ones_like(c.confidence)) for c in cells)
        cells = (one, other)
    pooled = [pooled_vector(one, centre) for one in cells]
    signs = Agreement(*cells).signs()
    return on_cpu(signs | {"pooled": pooled[0] @ pooled[1]})


def pair_rows(cases: Sequence[Case], seen: Seen, centre: Tensor) -> dict[str, Signs]:
    """Of every pair all that Table has."""
    known, rows = Known(seen, cases), []
    for case in cases:
        given = {"pair": known.pair(case), "strange": known.strange(case)}
        plain = {"plain": given["pair"], "plain_strange": given["strange"]}
        rows.append(
            {name: pair_row(cells, centre, weighted=True) for name, cells in given.items()}
            | {name: pair_row(cells, centre, weighted=False) for name, cells in plain.items()}
        )
    return {
        name: {sign: torch.stack([row[name][sign] for row in rows]) for sign in signs}
        for name, signs in rows[0].items()
    }


def asked(cases: Sequence[Case]) -> list[bool]:
    """Whose points are matched: of related pairs all, of the others every second."""
    return [case.related or number % 2 == 0 for number, case in enumerate(cases)]


@torch.no_grad()
def tabulate(cases: Sequence[Case], seen: Seen, centre: Tensor, *, points: bool = True) -> Table:
    """Match every case's points, and collect all signs; without points, of the pairs alone."""
    rows: list[Signs] = []
    right, number = [torch.zeros(0, dtype=torch.bool)], [torch.zeros(0, dtype=torch.long)]
    chosen = [
        points and one and len(case.points0) > 0
        for case, one in zip(cases, asked(cases), strict=True)
    ]
    pairs = pair_rows(cases, seen, centre)
    for index, case in enumerate(tqdm(cases, desc="matching", mininterval=30)):
        if not chosen[index]:
            continue
        side0, side1 = seen.side_of(case.photo0), seen.side_of(case.photo1)
        matches = match_points(side0.features, side1.features, case.points0)
        tensors = {k: v for k, v in vars(matches).items() if isinstance(v, Tensor)}
        agreement = Agreement(Cells.of(side0), Cells.of(side1))
        rows.append(on_cpu(point_signs(side0, side1, agreement, tensors)))
        error = (matches.points1.cpu() - case.points1).norm(dim=1)
        right.append(error < RIGHT_WITHIN * max(case.photo1.size))
        number.append(torch.full((len(error),), index))
    what = tuple(w for case, one in zip(cases, chosen, strict=True) if one for w in case.what)
    return Table(
        torch.tensor([case.related for case in cases]), tuple(case.kind for case in cases),
        tuple((case.photo0.name, case.photo1.name) for case in cases),
        tuple(shown_in(case) for case in cases), **pairs,
        case=torch.cat(number), right=torch.cat(right), what=what,
        point={k: torch.cat([row[k] for row in rows]) if rows else torch.zeros(0)
               for k in POINT_SIGNS},
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


def fit_pair(
    tables: Sequence[Table], signs: Sequence[str], field: str, words: str,
    say: Sequence[float] = (),
) -> Logistic:  # fmt: skip
    """Of PAIR_SIGNS or the pooled one; related and unrelated pairs count the same, lists by `say`.

    Every pair counts twice: as it is, and as if the cohort knew nothing of what it shows. Photos of
    users are rarely of the cohort's kinds, and an excess over what is not there says less.
    """
    related = torch.cat([table.related for table in tables])
    group = torch.cat([torch.full((len(t.related),), i) for i, t in enumerate(tables)])
    strange = {"pair": "strange", "plain": "plain_strange"}[field]
    rows = [joined(tables, field), joined(tables, strange)]
    chosen = {name: torch.cat([row[name] for row in rows]) for name in signs}
    weight = halves(related, group) * torch.tensor(say or [1.0] * len(tables))[group]
    return fit_logistic(chosen, related.repeat(2), fitted_on=words, weight=weight.repeat(2))


def fit_point(sets: dict[str, Table], pair: Logistic, words: str) -> Logistic:
    """So that `related` times it is the chance that a point is right, on a half-and-half mix.

    A point that is not right may be so because the photos are not related: how probably not, the
    fit so far says, and by that it counts (expectation and maximisation).
    """
    sets = {name: table for name, table in sets.items() if name in SAY}
    tables = list(sets.values())
    related = torch.cat([table.related[table.case] for table in tables])
    group = torch.cat([torch.full((len(t.case),), i) for i, t in enumerate(tables)])
    say = torch.tensor([SAY[name] for name in sets])[group]
    chance = torch.cat([pair.log_odds(t.pair).sigmoid()[t.case] for t in tables]).double()
    right = torch.cat([table.right for table in tables])
    signs, weight = joined(tables, "point"), halves(related, group) * say
    given = torch.full_like(chance, 0.5)
    for _ in range(ROUNDS):
        counts = torch.where(right, 1.0, chance * (1 - given) / (1 - chance * given))
        fitted = fit_logistic(signs, right, fitted_on=words, weight=weight * counts, ridge=1e-3)
        given = fitted.log_odds(signs).sigmoid().double()
    return fitted


def fit_all(sets: dict[str, Table], words: str, *, points: bool = True) -> dict[str, Logistic]:
    """On one table of each set."""
    tables, say = list(sets.values()), [PAIRS_SAY.get(name, 1.0) for name in sets]
    fits = {
        "pair": fit_pair(tables, PAIR_SIGNS, "pair", words, say),
        "plain": fit_pair(tables, PAIR_SIGNS, "plain", words, say),
        "pooled": fit_pair(tables, ("pooled",), "pair", words, say),
    }
    return fits | ({"point": fit_point(sets, fits["pair"], words)} if points else {})


def by_set(tables: dict[str, Table]) -> dict[str, Table]:
    """Lists of one set as one table, so that PF-PASCAL's two count as much as that of birds."""
    sets: dict[str, list[Table]] = {}
    for name, table in tables.items():
        sets.setdefault(name.split()[0], []).append(table)
    return {name: joined_tables(some) for name, some in sets.items()}


def joined_tables(tables: Sequence[Table]) -> Table:
    first = np.cumsum([0, *(len(table.related) for table in tables)])
    names = ("pair", "plain", "strange", "plain_strange", "point")
    return Table(
        related=torch.cat([table.related for table in tables]),
        kind=sum((table.kind for table in tables), ()),
        photos=sum((table.photos for table in tables), ()),
        shows=sum((table.shows for table in tables), ()),
        case=torch.cat([t.case + int(n) for t, n in zip(tables, first, strict=False)]),
        right=torch.cat([table.right for table in tables]),
        what=sum((table.what for table in tables), ()),
        **{name: joined(tables, name) for name in names},
    )


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
        "of true probabilities": round(_least_error(chance.double(), weight, index), 4),
        "predicted": [None if v != v else round(v, 3) for v in predicted.tolist()],
        "actual": [None if v != v else round(v, 3) for v in actual.tolist()],
        "count": torch.bincount(index, minlength=bins).tolist(),
    }


def _least_error(chance: Tensor, weight: Tensor, index: Tensor, *, rounds: int = 200) -> float:
    """What a calibration error is on average where every probability is true: chance alone."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(rounds, len(chance), generator=generator).double() < chance
    gaps = weight * (chance - draws.double())
    totals = torch.zeros(rounds, int(index.max()) + 1).double().index_add_(1, index, gaps)
    return float(totals.abs().sum(1).mean() / weight.sum())


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
    far = ~table.related & torch.from_numpy(kinds != "near")
    metrics["above 0.5"] = {
        "related": round(float((chance[table.related] > 0.5).float().mean()), 4),
        "far and nothing": round(float((chance[far] > 0.5).float().mean()), 4),
    }
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


def crossed(tables: dict[str, Table]) -> dict[str, Any]:
    """The fit judged on development pairs it has not seen: two halves, each by the other's fit.

    PF-PASCAL's halves are its two lists, of birds by photo of the pair's first bird, those
    of whole photos of VOC by class.
    """
    birds, whole = tables["birds fit"], tables["voc whole fit"]
    half = torch.tensor([_half(names) for names in birds.photos])
    first = STRANGE[0] | STRANGE[1]
    inside = torch.tensor([shows <= first for shows in whole.shows])
    outside = torch.tensor([not shows & first for shows in whole.shows])
    halves_ = [
        {"pf-pascal": tables["pf-pascal fit"], "birds": part(birds, half),
         "voc": part(whole, inside)},
        {"pf-pascal": tables["pf-pascal val"], "birds": part(birds, ~half),
         "voc": part(whole, outside)},
    ]  # fmt: skip
    said: dict[str, Any] = {}
    for known, other in (halves_, halves_[::-1]):
        points = any(len(table.right) for table in known.values())
        fits = fit_all(known, "half of the development pairs", points=points)
        for name, table in other.items():
            entry = said.setdefault(name, {"related": [], "probability": []})
            key = "expected calibration error"
            entry["related"].append(judged_pairs(table, fits)["calibration"][key])
            if len(table.right):
                said_of = judged_points(table, fits)["half of them of unrelated pairs"]
                entry["probability"].append(said_of[key])
    return said


def never_seen(tables: dict[str, Table]) -> dict[str, Any]:
    """Pairs of development lists of classes that neither their fit nor their cohort has seen.

    All of STRANGE's groups in turn; both photos are of the group, related or not.
    """
    sets, said = by_set({name: tables[name] for name in FITTED}), {}
    rows: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for group in STRANGE:
        known = {
            name: part(table, torch.tensor([not shows & group for shows in table.shows]))
            for name, table in sets.items()
        }
        known = {name: table for name, table in known.items() if table.related.any()}
        fit = fit_all(known, "other classes", points=False)["pair"]
        for name, table in sets.items():
            kinds = np.array(table.kind)
            inside = torch.tensor([bool(shows) and shows <= group for shows in table.shows])
            chance = fit.log_odds(table.strange).sigmoid()[inside]
            far = torch.from_numpy(kinds != "near")[inside]
            rows.setdefault(name, []).append((chance, table.related[inside], far))
    for name, some in rows.items():
        chance, related, far = (torch.cat([row[i] for row in some]) for i in range(3))
        if related.all() or not related.any():
            continue
        said[name] = {
            "pairs": [int(related.sum()), int((~related).sum())],
            "auroc": round(auroc(chance, related), 4),
            "auroc against far": round(auroc(chance[far], related[far]), 4),
            "calibration": calibration(chance, related, halves(related, torch.zeros(len(related)))),
            "far ones above 0.5": round(float((chance[far & ~related] > 0.5).float().mean()), 4),
        }
    return said


def _half(names: tuple[str, str]) -> bool:
    """Photos of one species have neighbouring numbers."""
    bird = next((name for name in names if "cub_" in name), "cub_0")
    return int(Path(bird).stem.split("_")[1]) // 60 % 2 == 0


def part(table: Table, rows: Tensor) -> Table:
    """Some of the pairs (P,) bool, with their points."""
    number = rows.long().cumsum(0) - 1
    kept = rows[table.case]
    names = rows.nonzero()[:, 0].tolist()
    return Table(
        table.related[rows], tuple(table.kind[n] for n in names),
        tuple(table.photos[n] for n in names), tuple(table.shows[n] for n in names),
        *({k: v[rows] for k, v in signs.items()}
          for signs in (table.pair, table.plain, table.strange, table.plain_strange)),
        number[table.case[kept]], table.right[kept],
        tuple(w for w, one in zip(table.what, kept.tolist(), strict=True) if one),
        {k: v[kept] for k, v in table.point.items()},
    )  # fmt: skip


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
        "| calibration error (of true probabilities) | related | probability, half of unrelated "
        "pairs | of related pairs | unrelated pairs with a match above 0.5 | related ones |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in metrics.items():
        points, sure = values.get("points", {}), values.get("any match above 0.5", {})
        errors = [values["pairs"]["calibration"], points.get("half of them of unrelated pairs"),
                  points.get("of related pairs")]  # fmt: skip
        cells = [name, *map(_error_in_words, errors), "", ""]
        if sure:
            others = [sure[kind] for kind in sure if kind != "same"]
            count = sum(other["pairs"] for other in others)
            share = sum(other["pairs"] * other["share"] for other in others) / count
            cells[4:] = [f"{share:.0%} of {count}", f"{sure['same']['share']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _error_in_words(bins: dict[str, Any] | None) -> str:
    if bins is None:
        return ""
    return f"{bins['expected calibration error']:.3f} ({bins['of true probabilities']:.3f})"


def table_of(
    name: str, cases: Sequence[Case], seen: Seen, centre: Tensor, *, points: bool, folder: Path
) -> Table:
    """The signs of a list, kept in a folder; what was kept is tried on its first cases again."""
    file = folder / f"{name.replace(' ', '-')}{'' if points else '-pairs'}.pt"
    seen.layers.add([photo for case in cases for photo in (case.photo0, case.photo1)])
    if file.is_file():
        kept = Table(**torch.load(file, weights_only=False))  # written by this script
        again = tabulate(cases[:2], seen, centre, points=points)
        for sign, values in (again.pair | again.point).items():
            count = len(values)
            before = (kept.pair | kept.point)[sign][:count]
            torch.testing.assert_close(values, before, atol=2e-3, rtol=1e-3)
        return kept
    table = tabulate(cases, seen, centre, points=points)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(vars(table), file)
    seen.kept.clear()
    return table


def sure_shares(
    cases: dict[str, list[Case]], seen: Seen, fitted: Reliability, *, scale: float
) -> dict[str, Any]:
    """Of each list that was not fitted on: of which pairs any match is probably right."""
    shares = {}
    for name in CHECKED:
        chosen = [
            case
            for kinds, count in ((("same",), 15), (("far", "nothing"), 60))
            for case in [c for c in cases[name] if c.kind in kinds][: int(count * scale) + 1]
        ]
        shares[name] = confident_share(chosen, seen, fitted)
    return shares


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("results/studies/reliability.json"))
    parser.add_argument("--keep", type=Path, required=True, help="folder for layers and tables")
    parser.add_argument("--scale", type=float, default=1.0, help="share of every list")
    parser.add_argument("--side", type=int, help="longest side of the network's input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lists", nargs="+", default=[*SIZES, *WHOLE])
    parser.add_argument("--pairs", action="store_true", help="related or not alone")
    parser.add_argument("--store", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    start = time.perf_counter()
    about = environment(choose_device(None))  # before anything is written into the tree
    model = DenseFeatures.from_pretrained(args.model, device=choose_device(None))
    model.reliability = model.cohort = None
    digest = file_hash(model_folder(args.model) / WEIGHTS)
    side = args.side or model.config.longest_side
    every = all_cases(args.data, scale=args.scale, seed=args.seed)
    seen = Seen(model, Layers(model, args.keep, side))
    photos = [p for some in every.values() for case in some for p in (case.photo0, case.photo1)]
    stems = {Path(photo.name.split("#")[0]).stem for photo in photos}
    of_cohort = cohort_photos(args.data, stems, seed=args.seed)
    seen.cohort = draw_cohort(seen, of_cohort, seed=args.seed)
    stems |= {Path(photo.name).stem for photo in of_cohort}
    every |= whole_cases(args.data, stems, scale=args.scale, seed=args.seed)
    cases = {name: every[name] for name in args.lists}
    centre = seen.cohort.kinds.mean(0).to(model.device)
    points, matching = not args.pairs, matching_text(Voting(), POINT_WEIGHTS)
    folder = args.keep / f"tables-{digest[:12]}-{side}-{args.scale}-{args.seed}"
    tables = {
        name: table_of(name, some, seen, centre, points=points, folder=folder)
        for name, some in cases.items()
    }
    words = (
        "pairs of PF-PASCAL's development lists, of birds and of whole VOC photos, and photos of "
        "other classes"
    )
    fits = fit_all(by_set({name: tables[name] for name in FITTED}), words, points=points)
    metrics: dict[str, Any] = {
        name: {"pairs": judged_pairs(table, fits)}
        | ({"points": judged_points(table, fits)} if len(table.right) else {})
        for name, table in tables.items()
    }
    config: dict[str, Any] = {
        "fits": {name: asdict(fit) for name, fit in fits.items()}, "matching": matching,
        "cohort": [COHORT_PHOTOS, COHORT_CELLS], "seed": args.seed, "side": side,
        "scale": args.scale,
    }  # fmt: skip
    extra: dict[str, Any] = {}
    if points:
        fitted = Reliability(
            fits["pair"], fits["point"], fits["pooled"], matching, RIGHT_WITHIN, digest, (side,)
        )
        extra = {
            "two halves of the development pairs, each by the other's fit": crossed(tables),
            "classes of the development pairs that fit and cohort never saw": never_seen(tables),
        }
        if set(CHECKED) <= set(cases):
            for name, sure in sure_shares(cases, seen, fitted, scale=args.scale).items():
                metrics[name]["any match above 0.5"] = sure
        if args.store:
            before = Reliability.load(model_folder(args.model))
            kept = before if before and before.weights_sha256 == digest else None
            carried = {"keypoints": kept and kept.keypoints, "transfer": kept and kept.transfer}
            replace(fitted, **carried).save(model_folder(args.model))
            seen.cohort.save(model_folder(args.model))
    write_json(args.out, {
        "row": "Matches.related and Matches.probability",
        "benchmark": "pf-pascal, pf-willow, birds, voc", "metrics": metrics,
        "split": f"fitted on {', '.join(FITTED)}; the others are only measured", **extra,
        "config": config, "seconds": round(time.perf_counter() - start),
        "weights_sha256": digest, **about,
    })  # fmt: skip
    print(in_words(metrics))


if __name__ == "__main__":
    main()

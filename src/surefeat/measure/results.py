"""Results: what a score is called, how a row's records become one file, and two of them compared.

Every number of a result has a Score for a name, which says its route, its rule and what else it
takes to compare it. PCK is in percent, everything else lies in [0, 1].
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from surefeat.core.files import as_json, environment, write_text
from surefeat.core.ranking import aurc, auroc, expected_calibration_error
from surefeat.data.benchmarks import CONVENTIONS, Convention
from surefeat.data.pairs import Pair
from surefeat.measure.material import Case, Material
from surefeat.measure.metrics import area, pck_over_pairs, region_curves
from surefeat.measure.protocol import ALPHAS, POINT_MEASURES
from surefeat.measure.rows import Row

Record = Mapping[str, Any]

Result = dict[str, Any]

NEEDED = ("row", "benchmark", "split", "metrics", "config", "weights_sha256", "commit", "hardware",
          "date")  # fmt: skip
"""What every result file has at least."""

RATED_ALPHA = 0.1
"""A match counts as right within this when its score or confidence is judged."""

Kind = Literal[
    "pck", "pck area", "auroc", "aurc", "pcr area", "pcr area by class", "miou area", "mean iou",
    "true matches: predicted loss", "true matches: actual loss", "true matches: calibration error",
]  # fmt: skip

CONTROL = "mean position"
"""Few-shot's: each keypoint at its mean place in the box, without looking."""

Sign = Literal["score", "margin", "confidence"]
"""What a row says of its own matches."""


@dataclass(frozen=True)
class Score:
    """What a number of a result is: str() gives its name in files."""

    kind: Kind
    route: str = ""
    """How points were matched: a Measure, or a control: identity, CONTROL."""
    alpha: float | None = None
    """Of pck."""
    rule: Convention | None = None
    """Of pck and its area."""
    sign: Sign | None = None
    """What auroc and aurc rank matches by."""
    shifted: bool = False
    """Image 1 was shifted, so that knowing the place does not help."""
    per_point: bool = False
    """Share of all points, not mean of the pairs' shares."""
    images: str = ""
    """Few-shot: annotated images per class, a number or "all"."""
    spread: bool = False
    """The deviation over seeds, not the mean."""

    def __str__(self) -> str:
        parts = ["shifted" if self.shifted else "", self.route]
        parts.append(self.kind if self.alpha is None else f"{self.kind}@{self.alpha:g}")
        parts += [self.rule or "", self.sign or "", "per point" if self.per_point else ""]
        name = " ".join(part for part in parts if part)
        name += f", {self.images} per class" if self.images else ""
        return name + (", sd over seeds" if self.spread else "")

    def shown(self, value: float | None) -> str:
        """For a table: percent with one decimal, areas and the like with three; "" for None."""
        if value is None:
            return ""
        return f"{value:.1f}" if self.kind == "pck" else f"{value:.3f}"

    def of(self, result: Result) -> float | None:
        """Its value in a result; None where it was not measured."""
        value: float | None = result["metrics"].get(str(self))
        return value


def pck_score(
    route: str, rule: Convention, *, alpha: float = RATED_ALPHA, shifted: bool = False
) -> Score:
    """PCK by a route and a rule, mean of the pairs' shares."""
    return Score("pck", route, alpha=alpha, rule=rule, shifted=shifted)


def result_of(records: Sequence[Record], material: Material) -> Result:
    """All scores of a row's records, which are those of the material's cases in their order."""
    benchmark = material.benchmark
    result: Result = {
        "benchmark": benchmark.name, "split": benchmark.split, "rule": benchmark.rule,
        "metrics": {}, "counts": {}, "by_class": {}, "curves": {},
        "pairs": {"names": [pair.name for pair in benchmark.pairs]},
    }  # fmt: skip
    both = list(zip(records, material.cases, strict=True))
    for shifted in (False, True):
        own = [(record, case) for record, case in both if (case.variant == "shifted") == shifted]
        if own:
            _add_variant(result, shifted, [r for r, _ in own], [c for _, c in own], material)
    losses = [record["loss"] for record, case in both
              if case.variant == "plain" and "loss" in record]  # fmt: skip
    if losses:  # of a row that predicts confidence
        _add_losses(result, losses)
    return result


def _add_variant(
    result: Result, shifted: bool, records: list[Record], cases: list[Case], material: Material
) -> None:
    prefix = "shifted " if shifted else ""
    pairs = [_common(case.pair) for case in cases]
    points = [len(pair.points0) for pair in pairs]
    result["counts"] |= {f"{prefix}pairs": len(pairs), f"{prefix}points": sum(points)}
    by_pair: dict[str, Sequence[float]] = {f"{prefix}points": points}
    for route in ("identity", *POINT_MEASURES):
        if route in records[0]:
            matches = [record[route] for record in records]
            by_pair |= _add_pck(
                result, Score("pck", route, shifted=shifted), matches, pairs, material
            )
    if "iou_by_rank" in records[0]:
        ious = [torch.tensor(record["iou_by_rank"]) for record in records]
        by_pair[str(Score("mean iou", shifted=shifted))] = [float(iou.mean()) for iou in ious]
        if any(len(iou) for iou in ious):
            _add_regions(result, shifted, ious, [pair.category for pair in pairs])
    numbers = [case.number for case in cases]
    for name, values in by_pair.items():
        known = dict(zip(numbers, values, strict=True))
        # None for pairs that are left out.
        result["pairs"][name] = [known.get(n) for n in range(len(material.benchmark.pairs))]


def _add_pck(
    result: Result, score: Score, matches: Sequence[Record], pairs: list[Pair], material: Material
) -> dict[str, list[int]]:
    """By every rule and alpha: means, and (returned) how many points of each pair are right."""
    counts = {}
    predicted = [torch.tensor(match["points"]) for match in matches]
    for rule in CONVENTIONS:
        if rule == "bbox" and any(pair.box1 is None for pair in pairs):
            continue
        scored = pck_over_pairs(predicted, pairs, convention=rule, alphas=ALPHAS)
        for index, alpha in enumerate(ALPHAS):
            one = replace(score, rule=rule, alpha=alpha)
            result["metrics"][str(one)] = 100 * scored.per_image[index]
            result["metrics"][str(replace(one, per_point=True))] = 100 * scored.per_point[index]
            right = [marks[index] for marks in scored.right]
            counts[str(one)] = [int(marks.sum()) for marks in right]
            if rule == material.benchmark.rule and math.isclose(alpha, RATED_ALPHA):
                _add_ranking(result, score, matches, torch.cat(right))
                result["by_class"][str(one)] = {
                    key: 100 * shares[index] for key, shares in scored.by_category.items()
                }
    return counts


def _add_ranking(result: Result, score: Score, matches: Sequence[Record], right: Tensor) -> None:
    """How well score, margin and confidence tell right from wrong matches."""
    signs: tuple[Sign, ...] = get_args(Sign)
    for sign in (sign for sign in signs if sign in matches[0]):
        values = torch.tensor([value for match in matches for value in match[sign]])
        result["metrics"] |= {
            str(replace(score, kind="auroc", sign=sign)): auroc(values, right),
            str(replace(score, kind="aurc", sign=sign)): aurc(values, right),
        }


def _add_losses(result: Result, losses: Sequence[Record]) -> None:
    """Loss of the true matches, as sigma predicts it and as it is."""
    predicted, actual = (
        torch.tensor([value for loss in losses for value in loss[key]])
        for key in ("predicted", "actual")
    )
    error = expected_calibration_error(predicted, actual)
    result["metrics"] |= {
        str(Score("true matches: predicted loss")): float(predicted.mean()),
        str(Score("true matches: actual loss")): float(actual.mean()),
        str(Score("true matches: calibration error")): error,
    }


def _add_regions(
    result: Result, shifted: bool, ious: Sequence[Tensor], categories: Sequence[str]
) -> None:
    prefix, used = "shifted " if shifted else "", sum(bool(len(iou)) for iou in ious)
    result["counts"] |= {
        f"{prefix}region pairs": used,
        f"{prefix}pairs without active proposals": len(ious) - used,
        f"{prefix}active proposals": sum(map(len, ious)),
    }
    areas: dict[str, Kind] = {
        "pcr": "pcr area", "pcr by class": "pcr area by class", "miou": "miou area",
    }  # fmt: skip
    for name, curve in region_curves(ious, categories).items():
        result["metrics"][str(Score(areas[name], shifted=shifted))] = float(area(curve))
        result["curves"][f"{prefix}{name}"] = curve.tolist()


def _common(pair: Pair) -> Pair:
    """The pair with its visible points alone, as the records have them."""
    points0, points1 = pair.common()
    seen = torch.ones(len(points0), dtype=torch.bool)
    return replace(pair, points0=points0, points1=points1, visible=seen)


def cache_file(folder: Path, stem: str, decisive: Sequence[Any]) -> Path:
    """Of JSON lines with what was measured, by the hash of everything that decides it."""
    key = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "cache" / f"{stem}-{key}.jsonl"


def about_row(
    row: Row, config: Mapping[str, Any], *, device: torch.device, seconds: float | None
) -> Result:
    """What a result file says beside its scores: of what they are, and where they were measured."""
    return {
        "row": row.name, "config": config, "weights_sha256": row.weights_sha256,
        "seconds": seconds, **environment(device), "device": device.type,
    }  # fmt: skip


def write_result(path: Path, result: Result) -> Path:
    """Write a result, numbers rounded to 4 digits behind the point, one line per entry."""
    missing = [name for name in NEEDED if name not in result]
    if missing:
        raise ValueError(f"a result needs {', '.join(missing)}")
    order = [*NEEDED, *(key for key in result if key not in NEEDED)]
    short = {key: value if key == "config" else _short(value) for key, value in result.items()}
    # Pairs are many small numbers: without spaces they take a third less.
    marks = {"pairs": (",", ":")}
    lines = (
        f"{json.dumps(key)}: {json.dumps(short[key], separators=marks.get(key))}" for key in order
    )
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read_result(path: Path) -> Result:
    """A result file, or an error that says what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"no result at {path}; write one with surefeat evaluate")
    try:
        result: Result = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    given = result if isinstance(result, dict) else {}
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise ValueError(f"{path} is no result of surefeat evaluate: no {', '.join(missing)}")
    wrong = _wrong_entry(result)
    if wrong:
        raise ValueError(f"{path} is damaged: its {wrong} is not what surefeat evaluate writes")
    return result


def _wrong_entry(result: Result) -> str | None:
    """The first entry of another shape than results have; None: all are as they should be."""

    def numbers(values: Any) -> bool:
        known = values.values() if isinstance(values, dict) else values
        return all(value is None or isinstance(value, int | float) for value in known)

    for name in ("row", "benchmark", "split", "rule"):
        if name in result and not isinstance(result[name], str):
            return name
    for name in ("metrics", "by_class", "curves", "pairs"):
        if not isinstance(result.get(name, {}), dict):
            return name
    if "curves" in result and not numbers(result["metrics"]):  # of boxes they are by class
        return "metrics"
    for name, kind in (("by_class", dict), ("curves", list), ("pairs", list)):
        for key, values in result.get(name, {}).items():
            if not isinstance(values, kind) or (key != "names" and not numbers(values)):
                return f"{name}, {key}"
    return None


def _short(value: Any) -> Any:
    """Four decimals; NaN and infinity become null."""
    return json.loads(as_json(value), parse_float=lambda number: round(float(number), 4))


def pair_values(result: Result, score: Score) -> list[float | None]:
    """A score of each pair of a result: PCK in percent, mean IoU; None where a pair has none.

    Files hold how many points are right and, under "points", of how many; those written by earlier
    versions, without "points", the percentage itself.
    """
    values: list[float | None] = result["pairs"].get(str(score), [])
    points = result["pairs"].get("shifted points" if score.shifted else "points")
    if score.kind != "pck" or points is None or not values:
        return values
    return [
        None if right is None else 100 * right / total
        for right, total in zip(values, points, strict=True)
    ]


RESAMPLES = 10_000

_CHUNK = 1_000


@dataclass(frozen=True)
class Difference:
    """A score of two results on the same pairs."""

    score: Score
    first: float
    second: float
    difference: float
    """second - first, mean over the pairs that both have."""
    low: float
    """2.5th percentile of the bootstrapped difference."""
    high: float
    """97.5th percentile."""
    chance: float
    """Two-sided p: how often resampled pairs turn or remove the difference, doubled, at most 1."""
    pairs: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the score by its name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"metric": str(values.pop("score"))} | values


def compare(first: Result, second: Result, *, seed: int = 0) -> list[Difference]:
    """PCK@0.1 by the benchmark's rule, and mean IoU, by paired bootstrap over pairs.

    Of every route that both results have.
    """
    for key in ("benchmark", "split"):
        if first[key] != second[key]:
            raise ValueError(
                f"results are of different {key}s, {first[key]} and {second[key]}; "
                "compare two rows of one benchmark"
            )
    names = [result.get("pairs", {}).get("names") for result in (first, second)]
    if not names[0] or names[0] != names[1]:
        raise ValueError("the results are of different pairs; evaluate both on the same list")
    routes = ("identity", *POINT_MEASURES)
    differences = []
    for shifted in (False, True):
        scores = [pck_score(route, first["rule"], shifted=shifted) for route in routes]
        for score in (*scores, Score("mean iou", shifted=shifted)):
            if all(str(score) in result["pairs"] for result in (first, second)):
                values = paired(pair_values(first, score), pair_values(second, score))
                if len(values):
                    differences.append(difference(score, values, seed=seed))
    return differences


def paired(values0: Sequence[float | None], values1: Sequence[float | None]) -> Tensor:
    """(P, 2) float64: the pairs that both have a value for."""
    both = [(a, b) for a, b in zip(values0, values1, strict=True) if None not in (a, b)]
    return torch.tensor(both, dtype=torch.float64).reshape(-1, 2)


def difference(score: Score, values: Tensor, *, seed: int = 0) -> Difference:
    """Paired bootstrap of the mean difference of values (P, 2)."""
    change = values[:, 1] - values[:, 0]
    drawn = resampled_means(change, generator=torch.Generator().manual_seed(seed))
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    tail = min(float((drawn <= 0).double().mean()), float((drawn >= 0).double().mean()))
    first, second = values.mean(0).tolist()
    return Difference(
        score, first, second, second - first, low, high, min(1.0, 2 * tail), len(values)
    )


def resampled_means(values: Tensor, *, generator: torch.Generator) -> Tensor:
    """Means (RESAMPLES,) of as many values as given (P,), drawn with replacement."""
    parts = []
    for _ in range(RESAMPLES // _CHUNK):
        index = torch.randint(len(values), (_CHUNK, len(values)), generator=generator)
        parts.append(values[index].mean(1))
    return torch.cat(parts)

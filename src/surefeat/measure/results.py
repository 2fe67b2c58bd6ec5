"""Records -> a result: every metric under a name that says its convention, written as one file.

Names: "flow pck@0.1 scnet" is the mean per pair, in percent, by the paper's route; "... per point"
the share of all points; "shifted ..." the same with image 1 shifted; areas are in [0, 1].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.files import write_text
from surefeat.core.ranking import auroc, expected_calibration_error, risk_coverage
from surefeat.data.benchmarks import CONVENTIONS, Convention
from surefeat.data.pairs import Pair
from surefeat.measure.material import Case, Material, Variant
from surefeat.measure.metrics import hits, in_convention, pck_over_pairs, region_curves
from surefeat.measure.protocol import POINT_MEASURES

Record = Mapping[str, Any]

Result = dict[str, Any]

NEEDED = ("row", "benchmark", "split", "metrics", "config", "weights_sha256", "commit", "hardware",
          "date")  # fmt: skip
"""What every result file has at least."""

RATED_ALPHA = 0.1
"""A match counts as right within this when its score or confidence is judged."""


def result_of(records: Sequence[Record], material: Material, *, rated: bool) -> Result:
    """All metrics of a row's records, which are those of the material's cases in their order.

    rated: the row predicts confidence, whose own quality is measured too.
    """
    result: Result = {
        "benchmark": material.benchmark.name,
        "split": material.benchmark.split,
        "rule": material.benchmark.rule,
        "metrics": {},
        "counts": {},
        "by_class": {},
        "curves": {},
        "pairs": {"names": [pair.name for pair in material.benchmark.pairs]},
    }
    variants: tuple[Variant, ...] = ("plain", "shifted")
    for variant in variants:
        both = [
            (record, case)
            for record, case in zip(records, material.cases, strict=True)
            if case.variant == variant
        ]
        if both:
            _add_variant(result, variant, [b[0] for b in both], [b[1] for b in both], material)
    if rated and any("loss" in record for record in records):
        losses = [record["loss"] for record in records if record["variant"] == "plain"]
        predicted, actual = (
            torch.tensor([value for each in losses for value in each[key]])
            for key in ("predicted", "actual")
        )
        gap = expected_calibration_error(predicted, actual)
        result["metrics"]["true matches: predicted loss"] = float(predicted.mean())
        result["metrics"]["true matches: actual loss"] = float(actual.mean())
        result["metrics"]["true matches: calibration error"] = gap
    return result


def _add_variant(
    result: Result, variant: Variant, records: list[Record], cases: list[Case], material: Material
) -> None:
    prefix = "" if variant == "plain" else "shifted "
    pairs = [_common(case.pair) for case in cases]
    result["counts"] |= {
        f"{prefix}pairs": len(pairs),
        f"{prefix}points": sum(len(pair.points0) for pair in pairs),
    }
    rule, alphas = material.benchmark.rule, material.protocol.alphas
    for name in ("identity", *POINT_MEASURES):
        if name in records[0]:
            found = [torch.tensor(record[name]["points"]) for record in records]
            _add_pck(result, f"{prefix}{name}", found, pairs, rule=rule, alphas=alphas)
            title = f"{prefix}{name} pck@{RATED_ALPHA:g} {rule}"
            shares = [100 * float(each.mean()) for each in _right(found, pairs, rule)]
            result["pairs"][title] = _by_pair(shares, cases, material)
            if name in ("nearest", "voting", "wide-voting"):
                _add_ranking(result, f"{prefix}{name}", name, records, found, pairs, rule)
    if "iou_by_rank" in records[0]:
        _add_regions(result, prefix, records, cases)
        means = [_mean(record["iou_by_rank"]) for record in records]
        result["pairs"][f"{prefix}mean iou"] = _by_pair(means, cases, material)


def _add_pck(
    result: Result, name: str, found: list[Tensor], pairs: list[Pair], *, rule: Convention,
    alphas: Sequence[float],
) -> None:  # fmt: skip
    for convention in CONVENTIONS:
        if convention == "bbox" and any(pair.box1 is None for pair in pairs):
            continue
        scored = pck_over_pairs(found, pairs, convention=convention, alphas=alphas)
        for index, alpha in enumerate(alphas):
            title = f"{name} pck@{alpha:g} {convention}"
            result["metrics"][title] = 100 * scored.per_image[index]
            result["metrics"][f"{title} per point"] = 100 * scored.per_point[index]
            if convention == rule and math.isclose(alpha, RATED_ALPHA):
                result["by_class"][title] = {
                    key: 100 * shares[index] for key, shares in scored.by_category.items()
                }


def _add_ranking(
    result: Result, title: str, name: str, records: list[Record], found: list[Tensor],
    pairs: list[Pair], rule: Convention,
) -> None:  # fmt: skip
    """How well score, margin and confidence tell right from wrong matches."""
    right = torch.cat(_right(found, pairs, rule)).bool()
    for sign in ("score", "margin", "confidence"):
        if sign in records[0][name]:
            values = torch.tensor([v for record in records for v in record[name][sign]])
            result["metrics"][f"{title} auroc {sign}"] = auroc(values, right)
            result["metrics"][f"{title} aurc {sign}"] = risk_coverage(values, right).area


def _add_regions(result: Result, prefix: str, records: list[Record], cases: list[Case]) -> None:
    ious = [torch.tensor(record["iou_by_rank"]) for record in records]
    # They are stored by falling score, so their order is their rank.
    scores = [-torch.arange(len(each), dtype=torch.float32) for each in ious]
    if not any(len(each) for each in ious):
        return
    curves = region_curves(ious, scores, [case.pair.category for case in cases])
    result["metrics"] |= {
        f"{prefix}pcr area": curves.pcr_area,
        f"{prefix}pcr area by class": curves.pcr_by_class_area,
        f"{prefix}miou area": curves.miou_area,
    }
    result["counts"] |= {
        f"{prefix}region pairs": curves.pairs,
        f"{prefix}pairs without active proposals": curves.empty_pairs,
        f"{prefix}active proposals": curves.proposals,
    }
    result["curves"] |= {
        f"{prefix}pcr": list(curves.pcr),
        f"{prefix}pcr by class": list(curves.pcr_by_class),
        f"{prefix}miou": list(curves.miou),
    }


def _by_pair(values: list[float], cases: list[Case], material: Material) -> list[float | None]:
    """One value per pair of the benchmark, None for those that are left out."""
    listed: list[float | None] = [None] * len(material.benchmark.pairs)
    for value, case in zip(values, cases, strict=True):
        listed[case.number] = value
    return listed


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _right(found: list[Tensor], pairs: list[Pair], rule: Convention) -> list[Tensor]:
    """Per pair (V,): 1 where a point is right at RATED_ALPHA."""
    right = []
    for predicted, pair in zip(found, pairs, strict=True):
        moved, target, length = in_convention(predicted, pair, rule)
        right.append(hits(moved, target, RATED_ALPHA * length, pair.visible)[0].double())
    return right


def _common(pair: Pair) -> Pair:
    """The pair with its visible points alone, as the records have them."""
    points0, points1 = pair.common()
    seen = torch.ones(len(points0), dtype=torch.bool)
    return replace(pair, points0=points0, points1=points1, visible=seen)


def write_result(path: Path, result: Result) -> Path:
    """Write a result, numbers rounded to 4 digits behind the point, one line per entry."""
    missing = [name for name in NEEDED if name not in result]
    if missing:
        raise ValueError(f"a result needs {', '.join(missing)}")
    order = [*NEEDED, *(key for key in result if key not in NEEDED)]
    short = {key: value if key == "config" else _short(value) for key, value in result.items()}
    lines = (f"{json.dumps(key)}: {json.dumps(short[key])}" for key in order)
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
    missing = [name for name in NEEDED if name not in result]
    if missing:
        raise ValueError(f"{path} is no result of surefeat evaluate: no {', '.join(missing)}")
    return result


def _short(value: Any) -> Any:
    """Four decimals; NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value

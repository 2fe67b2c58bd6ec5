"""Errors -> PCK over alpha, and rounds -> a result with a convention in every name.

Names: "pck@0.1 bbox, 10 per class" is in percent, "pck area bbox, 10 per class" lies in [0, 1];
both are means over the classes, then over the seeds; "..., sd over seeds" is the spread of the
latter. "mean position ..." is the control: the mean place in the box, without looking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefeat.eval.fewshot_data import Material, Objects

Record = Mapping[str, Any]
"""One round of one seed, as a line of the cache."""
ALPHAS = torch.linspace(0, 1, 101, dtype=torch.float64)
PARTS = {"": "curves", "mean position ": "control"}
"""Prefix of a metric's name -> where a record has its curves."""


def class_curves(errors: Tensor, objects: Objects, *, classes: int) -> Tensor:
    """PCK over ALPHAS of every class: relative errors (N, K) -> (classes, 101) in [0, 1].

    A keypoint is right when its error is strictly below alpha; every visible keypoint of a class
    counts the same, whatever the object. Errors that are not finite are wrong.
    """
    alphas = ALPHAS.to(errors.device)
    curves = []
    for number in range(classes):
        of_class = objects.category == number
        own = errors[of_class][objects.visible[of_class]].double()
        ordered = own.nan_to_num(torch.inf).sort().values
        curves.append(torch.searchsorted(ordered, alphas) / max(1, len(ordered)))
    return torch.stack(curves)


def area(curve: Tensor) -> Tensor:
    """Area under curves (..., 101) over alpha in [0, 1], trapezoidal."""
    return torch.trapezoid(curve, dx=1 / (len(ALPHAS) - 1))


def at_alpha(curve: Tensor, alpha: float) -> Tensor:
    """PCK in percent at one of ALPHAS: (..., 101) -> (...)."""
    return 100 * curve[..., round(alpha * (len(ALPHAS) - 1))]


def result_of(records: Sequence[Record], material: Material) -> dict[str, Any]:
    """All metrics of a row's rounds."""
    classes = material.channels.classes
    result: dict[str, Any] = {
        "benchmark": "pascal3d", "split": material.split, "rule": "bbox", "metrics": {},
        "counts": _counts(material), "by_class": {}, "pck_curves": {"alpha": ALPHAS.tolist()},
        "rounds": [],
    }  # fmt: skip
    for size in dict.fromkeys(record["round"] for record in records):
        own = [record for record in records if record["round"] == size]
        for prefix, part in PARTS.items():
            curves = torch.tensor([record[part] for record in own], dtype=torch.float64)
            _add(result, prefix, str(size), curves, classes)
        result["counts"] |= {
            f"{what}, {size} per class": [record[what] for record in own]
            for what in ("images", "objects", "keypoints")
        }
    result["rounds"] = [_in_short(record) for record in records]
    return result


def _add(
    result: dict[str, Any], prefix: str, size: str, curves: Tensor, classes: Sequence[str]
) -> None:
    """Metrics of one round size from curves (seeds, classes, 101)."""
    values = {
        f"{prefix}pck@0.1 bbox, {size} per class": at_alpha(curves, 0.1),
        f"{prefix}pck@0.05 bbox, {size} per class": at_alpha(curves, 0.05),
        f"{prefix}pck area bbox, {size} per class": area(curves),
    }
    for name, each in values.items():
        by_seed = each.mean(1)
        result["metrics"][name] = float(by_seed.mean())
        result["metrics"][f"{name}, sd over seeds"] = _spread(by_seed)
        result["by_class"][name] = dict(zip(classes, each.mean(0).tolist(), strict=True))
    result["pck_curves"][f"{prefix}{size} per class"] = curves.mean((0, 1)).tolist()


def _spread(values: Tensor) -> float | None:
    """Standard deviation (n - 1); none of a single seed."""
    return float(values.std()) if len(values) > 1 else None


def _in_short(record: Record) -> dict[str, Any]:
    """A round's own numbers, without its curves per class."""
    short = {key: value for key, value in record.items() if key not in PARTS.values()}
    for prefix, part in PARTS.items():
        curves = torch.tensor(record[part], dtype=torch.float64)
        short[f"{prefix}pck@0.1 bbox"] = float(at_alpha(curves, 0.1).mean())
        short[f"{prefix}pck area bbox"] = float(area(curves).mean())
    return short


def _counts(material: Material) -> dict[str, Any]:
    found: dict[str, Any] = {"classes": len(material.channels.classes)}
    for name, part in (("train", material.train), ("test", material.test)):
        found[f"{name} images"] = len(torch.unique(part.photo))
        found[f"{name} objects"] = len(part)
        found[f"{name} keypoints"] = int(part.visible.sum())
    return found

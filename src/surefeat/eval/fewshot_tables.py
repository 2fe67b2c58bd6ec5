"""Tables of few-shot results: a line per row of features, a column per number of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from surefeat.eval.results import Result, read_result

PUBLISHED = {"resnet50-hc": {"pck@0.1 bbox, all per class": 54.7}}
"""What the paper prints (section 4.3); its curves exist only as a figure."""
TITLES = {
    "ours": "ours", "resnet50-hc": "ResNet-50-HC", "resnet50-dilated": "ResNet-50-dilated",
    "vgg16": "VGG16 pool4", "without-confidence": "ours w/o confidence",
}  # fmt: skip
"""Rows as figures call them; others by their own names."""
CONTROL = "mean position"
Measure = Literal["pck@0.1 bbox", "pck@0.05 bbox", "pck area bbox"]
Table = list[list[str]]


def read_fewshot(folder: Path, *, split: str = "val") -> list[Result]:
    """The few-shot results of a split in a folder, by falling PCK area of their largest round."""
    paths = sorted(folder.glob(f"pascal3d-{split}-*.json"))
    found = [result for result in map(read_result, paths) if result["split"] == split]
    if not found:
        raise ValueError(f"{folder} holds no results of {split}; surefeat evaluate pascal3d")
    return sorted(found, key=lambda result: -_value(result, "pck area bbox", sizes_of(result)[-1]))


def sizes_of(result: Result) -> list[str]:
    """Round sizes of a result as its names have them, rising: "1", ..., "all"."""
    return list(dict.fromkeys(str(each["round"]) for each in result["rounds"]))


def round_table(results: Sequence[Result], measure: Measure = "pck@0.1 bbox") -> Table:
    """A line per row: mean over classes and seeds, and its spread over the seeds.

    The control stands below: it depends on the images drawn, not on the row.
    """
    sizes = list(dict.fromkeys(size for result in results for size in sizes_of(result)))
    lines = [["images per class", *sizes]]
    for result in results:
        lines.append([result["row"], *(_cell(result, measure, size) for size in sizes)])
    control = [_cell(results[0], f"{CONTROL} {measure}", size) for size in sizes]
    lines.append([f"{CONTROL} (control)", *control])
    for row, values in PUBLISHED.items() if results[0]["split"] == "val" else ():
        found = [values.get(f"{measure}, {size} per class") for size in sizes]
        if any(found):
            shown = ("" if value is None else _shown(value, measure) for value in found)
            lines.append([f"{row}, published", *shown])
    return lines


def class_table(
    results: Sequence[Result], *, size: str = "all", measure: Measure = "pck@0.1 bbox"
) -> Table:
    """A line per row and a column per class, for one round size; the last column is their mean."""
    having = [result for result in results if size in sizes_of(result)]
    if not having:
        raise ValueError(f"no result has a round of {size} images per class")
    title = f"{measure}, {size} per class"
    classes = list(having[0]["by_class"][title])
    lines = [["row", *classes, "mean"]]
    named = [(result["row"], result, title) for result in having]
    for name, result, key in [*named, (f"{CONTROL} (control)", having[0], f"{CONTROL} {title}")]:
        cells = [_shown(result["by_class"][key][each], measure) for each in classes]
        lines.append([name, *cells, _shown(result["metrics"][key], measure)])
    return lines


def _value(result: Result, measure: str, size: str) -> float:
    return float(result["metrics"][f"{measure}, {size} per class"])


def _cell(result: Result, measure: str, size: str) -> str:
    if size not in sizes_of(result):
        return ""
    spread = result["metrics"].get(f"{measure}, {size} per class, sd over seeds")
    shown = _shown(_value(result, measure, size), measure)
    return shown if spread is None else f"{shown} ± {_shown(float(spread), measure)}"


def _shown(value: float, measure: str) -> str:
    """Percentages with one decimal, areas with three."""
    return f"{value:.3f}" if "area" in measure else f"{value:.1f}"

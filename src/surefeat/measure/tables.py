"""Tables of results beside the published numbers, as markdown.

Tables of few-shot results: a line per row of features, a column per number of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from surefeat.measure.results import Result, read_result

PUBLISHED = {
    "Thewlis et al.": 14.4, "AnchorNet": 56.3, "Ours w/o conf.": 60.6, "VGG16": 62.3, "gCNN": 62.6,
    "ResNet-50-HC": 64.0, "SCNet-A (supervised)": 66.3, "Ours": 66.5,
}  # fmt: skip
"""PCK@0.1 on PF-PASCAL by the scnet rule and the route of region matches, from the paper; on its
302 test pairs, of which 299 are public."""

PUBLISHED_AS = {"ours": "Ours", "vgg16": "VGG16", "resnet50-hc": "ResNet-50-HC",
                "without-confidence": "Ours w/o conf."}  # fmt: skip
"""Our rows' names -> the paper's."""

Table = list[list[str]]


def read_results(folder: Path, *, benchmark: str | None = None) -> list[Result]:
    """The matching results in a folder, by their file names."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = read_result(path)
        except ValueError:
            continue
        if "curves" in result and benchmark in (None, result["benchmark"]):
            found.append(result)
    if not found:
        raise ValueError(f"{folder} holds no matching results; write some with surefeat evaluate")
    return found


def groups(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by benchmark and split, each group by rising PCK of the paper's route or the next."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        found.setdefault((result["benchmark"], result["split"]), []).append(result)
    return {key: sorted(group, key=_order) for key, group in found.items()}


def main_table(results: Sequence[Result]) -> Table:
    """One benchmark: a line per row, PCK@0.1 by its own rule, region areas, the shifted control."""
    rule = results[0]["rule"]
    columns = {
        "flow": f"flow pck@0.1 {rule}", "mean pooled": f"mean-flow pck@0.1 {rule}",
        "small first": f"small-first pck@0.1 {rule}",
        "nearest": f"nearest pck@0.1 {rule}",
        "voting": f"voting pck@0.1 {rule}", "wide voting": f"wide-voting pck@0.1 {rule}",
        "location": f"location pck@0.1 {rule}",
        "shifted nearest": f"shifted nearest pck@0.1 {rule}",
        "shifted voting": f"shifted voting pck@0.1 {rule}",
        "shifted wide voting": f"shifted wide-voting pck@0.1 {rule}",
        "PCR area": "pcr area", "mIoU area": "miou area",
    }  # fmt: skip
    published = results[0]["benchmark"] == "pf-pascal" and results[0]["split"] == "test"
    head = ["row", *columns, *(["published"] if published else [])]
    lines = [head]
    for result in results:
        line = [result["row"], *(_shown(result["metrics"].get(name)) for name in columns.values())]
        if published:
            line.append(_shown(PUBLISHED.get(PUBLISHED_AS.get(result["row"], ""))))
        lines.append(line)
    same = results[0]["metrics"]
    identity = {"nearest": f"identity pck@0.1 {rule}",
                "shifted nearest": f"shifted identity pck@0.1 {rule}"}  # fmt: skip
    lines.append(
        ["identity (control)", *(_shown(same.get(identity.get(name, ""))) for name in columns)]
        + ([""] if published else [])
    )
    return lines


def convention_table(results: Sequence[Result], *, measure: str = "nearest") -> Table:
    """The same predictions by every rule, per image and per point, at every alpha."""
    prefix = f"{measure} pck@"
    every = dict.fromkeys(name for result in results for name in result["metrics"])
    names = [name for name in every if name.startswith(prefix)]
    lines = [["row", *(name.removeprefix(f"{measure} ") for name in names)]]
    for result in results:
        lines.append([result["row"], *(_shown(result["metrics"].get(name)) for name in names)])
    return lines


def class_table(results: Sequence[Result], *, measure: str) -> Table:
    """PCK@0.1 by the benchmark's rule, per class."""
    title = f"{measure} pck@0.1 {results[0]['rule']}"
    having = [result for result in results if title in result["by_class"]]
    if not having:
        return []
    classes = sorted(having[0]["by_class"][title])
    lines = [["row", *classes]]
    for result in having:
        values = result["by_class"][title]
        lines.append([result["row"], *(_shown(values.get(name)) for name in classes)])
    return lines


def markdown(table: Table) -> str:
    """A table as markdown; pipes in names are escaped."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]]) + "\n"


def _order(result: Result) -> tuple[float, str]:
    rule, metrics = result["rule"], result["metrics"]
    names = (f"{measure} pck@0.1 {rule}" for measure in ("flow", "nearest", "voting"))
    found = next((metrics[name] for name in names if metrics.get(name) is not None), 0.0)
    return float(found), str(result["row"])


def _shown(value: Any) -> str:
    """Percentages with one decimal, areas with three, nothing for what was not measured."""
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.1f}"


FEWSHOT_PUBLISHED = {"resnet50-hc": {"pck@0.1 bbox, all per class": 54.7}}
"""What the paper prints (section 4.3); its curves exist only as a figure."""

TITLES = {
    "ours": "ours", "resnet50-hc": "ResNet-50-HC", "resnet50-dilated": "ResNet-50-dilated",
    "vgg16": "VGG16 pool4", "without-confidence": "ours w/o confidence",
}  # fmt: skip
"""Rows as figures call them; others by their own names."""

CONTROL = "mean position"

FewShotMeasure = Literal["pck@0.1 bbox", "pck@0.05 bbox", "pck area bbox"]


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


def round_table(results: Sequence[Result], measure: FewShotMeasure = "pck@0.1 bbox") -> Table:
    """A line per row: mean over classes and seeds, and its spread over the seeds.

    The control stands below: it depends on the images drawn, not on the row.
    """
    sizes = list(dict.fromkeys(size for result in results for size in sizes_of(result)))
    lines = [["images per class", *sizes]]
    for result in results:
        lines.append([result["row"], *(_cell(result, measure, size) for size in sizes)])
    control = [_cell(results[0], f"{CONTROL} {measure}", size) for size in sizes]
    lines.append([f"{CONTROL} (control)", *control])
    for row, values in FEWSHOT_PUBLISHED.items() if results[0]["split"] == "val" else ():
        found = [values.get(f"{measure}, {size} per class") for size in sizes]
        if any(found):
            shown = ("" if value is None else _fewshot_shown(value, measure) for value in found)
            lines.append([f"{row}, published", *shown])
    return lines


def fewshot_class_table(
    results: Sequence[Result], *, size: str = "all", measure: FewShotMeasure = "pck@0.1 bbox"
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
        cells = [_fewshot_shown(result["by_class"][key][each], measure) for each in classes]
        lines.append([name, *cells, _fewshot_shown(result["metrics"][key], measure)])
    return lines


def _value(result: Result, measure: str, size: str) -> float:
    return float(result["metrics"][f"{measure}, {size} per class"])


def _cell(result: Result, measure: str, size: str) -> str:
    if size not in sizes_of(result):
        return ""
    spread = result["metrics"].get(f"{measure}, {size} per class, sd over seeds")
    shown = _fewshot_shown(_value(result, measure, size), measure)
    return shown if spread is None else f"{shown} ± {_fewshot_shown(float(spread), measure)}"


def _fewshot_shown(value: float, measure: str) -> str:
    """Percentages with one decimal, areas with three."""
    return f"{value:.3f}" if "area" in measure else f"{value:.1f}"

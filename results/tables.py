"""The README's tables, generated from the JSON files beside this script.

python results/tables.py          # write them into README.md
python results/tables.py --check  # exit 1 if README.md differs
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import Any

from table_files import HERE, link, markdown, read
from tables_parts import WAYS, confidence, development, parts, speed

README = HERE.parent / "README.md"

PUBLISHED = {"ours": "66.5", "resnet50-hc": "64.0", "vgg16": "62.3", "without-confidence": "60.6"}
"""Novotny et al. 2018, table 1: PCK@0.1 on 302 pairs that are not public."""

NAMES = {
    "ours": "**ours** (shipped)",
    "ours@224+320": "ours, seen at 224 and 320 px",
    "ours@224+320+448": "ours, seen at 224, 320 and 448 px",
    "without-confidence": "ours w/o confidence",
    "contrastive": "contrastive loss",
    "gtbox": "ours, trained on true boxes",
    "weakbox": "ours, trained on boxes found from labels",
    "nonrigid": "ours, trained on all 20 classes",
    "vgg16-ours": "**ours, VGG16** (shipped)",
    "paper-slow": "the paper's recipe with a slower trunk (see below)",
    "paper-slow-without-confidence": "the same w/o confidence",
    "paper-long": "the slower trunk, 6,000 steps instead of 2,000",
    "paper-long-without-confidence": "the same w/o confidence",
    "paper-without-confidence": "the paper's recipe w/o confidence (with it: stopped, see below)",
    "res4d": "res4d, untrained",
    "res4c": "res4c, untrained",
    "res4c@224+320": "res4c, seen at 224 and 320 px",
    "vgg16": "VGG16 pool4, untrained",
    "resnet50-hc": "ResNet-50-HC, untrained",
    "resnet50-dilated": "ResNet-50-dilated res5c, untrained",
    "sift": "dense SIFT",
    "hog": "HOG",
}
"""Rows of the matching tables, in their order."""


def matching(benchmark: str, rule: str) -> str:
    """A benchmark's test pairs, every row measured so far, and the spread over training seeds."""
    rows = [["", "published", *WAYS.values(), "PCR area", "mIoU@k area", "from"]]
    found: dict[str, Any] = {}
    for row, title in NAMES.items():
        name = f"{benchmark}/{benchmark}-test-{row}.json"
        if not (HERE / name).is_file():
            continue
        found = _metrics(name)
        published = PUBLISHED.get(row, "") if benchmark == "pf-pascal" else ""
        rows.append([title, published, *_cells([found], rule), _links(name)])
        seeds = [HERE / f"{benchmark}/{benchmark}-test-{row}-seed{n}.json" for n in (1, 2)]
        if all(path.is_file() for path in seeds):
            every = [found, *(_metrics(str(path.relative_to(HERE))) for path in seeds)]
            rows.append(["mean and deviation of 3 seeds", "", *_cells(every, rule), ""])
    same = [f"{found[f'{way}identity pck@0.1 {rule}']:.1f}" for way in ("", "shifted ")]
    rows.append(["the same place (control)", "", "", "", "", same[0], "", "", same[1], *[""] * 4])
    return markdown(rows)


def _metrics(name: str) -> dict[str, Any]:
    """A row's metrics, and what was measured later: by regions or by wide voting alone."""
    found = read(name)
    metrics: dict[str, Any] = found["metrics"]
    for later in _later(name):
        more = read(later)
        if more["weights_sha256"] != found["weights_sha256"]:
            raise ValueError(f"{name} and {later} are of different weights")
        metrics = more["metrics"] | metrics
    return metrics


def _later(name: str) -> list[str]:
    """The files of what was measured later."""
    files = (f"{folder}/{Path(name).name}" for folder in ("regions", "votes"))
    return [file for file in files if (HERE / file).is_file()]


def _links(name: str) -> str:
    more = (f" [{Path(later).parent}](results/{later})" for later in _later(name))
    return link(name) + "".join(more)


def _cells(found: list[dict[str, Any]], rule: str) -> list[str]:
    """The numbers of one run, or mean and standard deviation of several."""
    keys = [(f"{way} pck@0.1 {rule}", 1) for way in WAYS] + [("pcr area", 3), ("miou area", 3)]
    cells = []
    for key, digits in keys:
        values = [each[key] for each in found if key in each]
        if len(values) < len(found):
            cells.append("")
            continue
        cell = f"{statistics.mean(values):.{digits}f}"
        several = len(values) > 1
        cells.append(cell + (f" ± {statistics.stdev(values):.{digits}f}" if several else ""))
    return cells


SIZES = ("1", "2", "5", "10", "20", "50", "100", "all")


def few_shot() -> str:
    """PASCAL3D+ val: PCK@0.1 over the number of annotated images per class."""
    rows = [["annotated images per class", *SIZES, "minutes", "from"]]
    found: dict[str, Any] = {}
    for row, title in NAMES.items():
        name = f"pascal3d/pascal3d-val-{row}.json"
        if (HERE / name).is_file():
            found = read(name)
            cells = [_with_spread(found["metrics"], f"pck@0.1 bbox, {n} per class") for n in SIZES]
            spent = f"{found['seconds'] / 60:.1f}" if found["seconds"] else ""
            rows.append([title, *cells, spent, link(name)])
    control = [f"mean position pck@0.1 bbox, {n} per class" for n in SIZES]
    cells = [_with_spread(found["metrics"], key) for key in control]
    rows.append(["mean position (control)", *cells, "", ""])
    return markdown(rows)


def _with_spread(metrics: dict[str, Any], key: str) -> str:
    """Mean over seeds and their deviation; of a single seed, its value alone."""
    spread = metrics.get(f"{key}, sd over seeds")
    return f"{metrics[key]:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")


BOX_FILES = {
    "wsddn-rigid12": "12", "wsddn-all20": "20", "wsddn-rigid12-1000": "12, 1,000 photos each",
}  # fmt: skip
BOX_ROWS = {
    "detector, agreement 1": "learned from labels, boxes support each other",
    "detector": "learned from labels, each box by its own score",
    "centre box, 0.5 of the area": "centre box, half of the area",
    "largest proposal": "largest proposal",
}


def boxes() -> str:
    """Boxes from image labels: right ones on VOC train, average precision on VOC val."""
    rows = [["", "classes", "CorLoc, train", "mAP@0.5, val", "right among the kept", "from"]]
    for name, classes in BOX_FILES.items():
        result = read(f"boxes/{name}.json")
        metrics, power = result["metrics"], result["config"]["select"].get("agreement", 0.0)
        corloc, ap = metrics["corloc on train"], metrics["ap@0.5 on val"]
        kept = f"{100 * metrics['right boxes among the kept']:.1f}"
        chosen = f"detector, agreement {power:g}" if power else "detector"
        for row in (row for row in BOX_ROWS if row in corloc):
            rows.append([
                BOX_ROWS[row], classes, f"{100 * corloc[row]['mean']:.1f}",
                f"{100 * ap[row]['map (area)']:.1f}",
                *((kept, link(f"boxes/{name}.json")) if row == chosen else ("", "")),
            ])  # fmt: skip
    return markdown(rows)


TABLES = {
    "pf-pascal": lambda: matching("pf-pascal", "scnet"),
    "pf-willow": lambda: matching("pf-willow", "bbox-kp"),
    "pascal3d": few_shot,
    "boxes": boxes,
    "confidence": confidence,
    "development": development,
    "speed": speed,
    "parts": parts,
}


def filled(text: str) -> str:
    """README with every table written anew between its markers."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no place for the table {name!r}")
        text = pattern.sub(lambda m, make=make: f"{m[1]}\n{make()}\n\n{m[2]}", text)
    return text


def main() -> None:
    before = README.read_text()
    after = filled(before)
    if "--check" in sys.argv:
        sys.exit(int(before != after))
    README.write_text(after)


if __name__ == "__main__":
    main()

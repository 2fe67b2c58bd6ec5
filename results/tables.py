"""The README's tables, generated from the JSON files beside this script.

python results/tables.py          # write them into README.md
python results/tables.py --check  # exit 1 if README.md differs
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / name).read_text())
    return found


def markdown(rows: list[list[str]]) -> str:
    """Rows, the first of them the heading."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def development() -> str:
    """How the recipe was chosen, and what the shipped model reaches on development pairs."""
    found = read("recipe_search.json")["metrics"]
    ways = ("flow", "small-first", "nearest", "voting", "shifted nearest", "shifted voting")
    rows = [["trained for", *WAYS.values()]]
    for name, (search, key) in SEARCH.items():
        values = [found[search][key].get(f"{way} pck@0.1 scnet") for way in ways]
        rows.append([name, *("" if v is None else f"{v:.1f}" for v in values)])
    table = markdown(rows) + f"\n\nAll of it: {_link('recipe_search.json')}."
    final = read("reliability.json")["metrics"]
    shipped = [["shipped model, aspect kept", "nearest neighbour", "with voting", "from"]]
    for side in (224, 320, 448):
        values = [final[f"val, {side} px, {w}"]["pck@0.1 scnet"] for w in ("nearest", "voting")]
        cells = [f"{value:.1f}" for value in values]
        shipped.append([f"longest side {side}", *cells, _link("reliability.json")])
    return table + "\n\n" + markdown(shipped)


SEARCH = {
    "1,000 steps at 224 px, cosine": ("first search", "base, 1/2:1"),
    "the same, another seed": ("first search", "seed1, 1/2:1"),
    "500 steps of 32 pairs, constant rate": ("first search", "short-constant, 1/2:1"),
    "zooming in (0.5 to 1)": ("first search", "zoom-in, 1/2:1"),
    "1,000 steps at 320 px, cosine": ("second search", "view-320, 1/2:1"),
    "500 steps at 320 px, constant rate (shipped)": ("second search", "view-320-mid, 1/2:1"),
    "the same with 32 pairs a step": ("second search", "view-320-short, 1/2:1"),
    "true boxes of the 12 classes": ("third search", "boxes, 1/2:1"),
    "occluders over the second views": ("third search", "occluders, 1/2:1"),
    "the same w/o confidence": ("third search", "occluders-without-confidence, 1/2:1"),
    "VGG16 to pool4, conv4 + head": ("second search", "vgg16-ours, 1/2:1"),
    "VGG16 with conv5, conv5 + head (shipped)": ("third search", "vgg16-conv5, 1/2:1"),
}
"""Line of the table -> where it is in recipe_search.json."""

WAYS = {
    "flow": "regions, flow", "small-first": "the same, small first", "nearest": "nearest neighbour",
    "voting": "voting", "shifted nearest": "nearest, shifted", "shifted voting": "voting, shifted",
}  # fmt: skip

PUBLISHED = {"ours": "66.5", "resnet50-hc": "64.0", "vgg16": "62.3", "without-confidence": "60.6"}
"""Novotny et al. 2018, table 1: PCK@0.1 on 302 pairs that are not public."""

NAMES = {
    "ours": "**ours** (shipped)",
    "ours@224+320": "ours, seen at 224 and 320 px",
    "without-confidence": "ours w/o confidence",
    "contrastive": "contrastive loss",
    "gtbox": "ours, trained on true boxes",
    "weakbox": "ours, trained on boxes found from labels",
    "nonrigid": "ours, trained on all 20 classes",
    "vgg16-ours": "**ours, VGG16** (shipped)",
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
        found = read(name)["metrics"]
        published = PUBLISHED.get(row, "") if benchmark == "pf-pascal" else ""
        rows.append([title, published, *_cells([found], rule), _link(name)])
        seeds = [HERE / f"{benchmark}/{benchmark}-test-{row}-seed{n}.json" for n in (1, 2)]
        if all(path.is_file() for path in seeds):
            every = [found, *(read(str(path.relative_to(HERE)))["metrics"] for path in seeds)]
            rows.append(["mean and deviation of 3 seeds", "", *_cells(every, rule), ""])
    same = [f"{found[f'{way}identity pck@0.1 {rule}']:.1f}" for way in ("", "shifted ")]
    rows.append(["the same place (control)", "", "", "", same[0], "", same[1], "", "", "", ""])
    return markdown(rows)


def _cells(found: list[dict[str, Any]], rule: str) -> list[str]:
    """The numbers of one run, or mean and standard deviation of several."""
    keys = [(f"{way} pck@0.1 {rule}", 1) for way in WAYS] + [("pcr area", 3), ("miou area", 3)]
    cells = []
    for key, digits in keys:
        values = [each[key] for each in found if key in each]
        if not values:
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
            rows.append([title, *cells, spent, _link(name)])
    control = [f"mean position pck@0.1 bbox, {n} per class" for n in SIZES]
    cells = [_with_spread(found["metrics"], key) for key in control]
    rows.append(["mean position (control)", *cells, "", ""])
    return markdown(rows)


def _with_spread(metrics: dict[str, Any], key: str) -> str:
    """Mean over seeds and their deviation; of a single seed, its value alone."""
    spread = metrics.get(f"{key}, sd over seeds")
    return f"{metrics[key]:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")


BOX_ROWS = {
    "wsddn-rigid12": "detector learned from labels, on EdgeBoxes",
    "wsddn-rigid12-prim": "the same on Randomized Prim's regions, more epochs",
    "wsddn-all20": "detector learned from labels, on EdgeBoxes",
}
BOX_CONTROLS = {"centre box, 0.5 of the area": "centre box, half of the area",
                "largest proposal": "largest proposal"}  # fmt: skip


def boxes() -> str:
    """Boxes from image labels: right ones on VOC train, average precision on VOC val."""
    rows = [["", "classes", "CorLoc, train", "mAP@0.5, val", "right among the kept", "from"]]
    for name, title in BOX_ROWS.items():
        if not (HERE / f"boxes/{name}.json").is_file():
            continue
        found = read(f"boxes/{name}.json")
        metrics, classes = found["metrics"], found["split"].rsplit(", ", 1)[-1].split()[0]
        corloc, ap = metrics["corloc on train"], metrics.get("ap@0.5 on val")
        for row, label in {"detector": title, **BOX_CONTROLS}.items():
            kept = f"{100 * metrics['right boxes among the kept']:.1f}"
            rows.append([
                label, classes, f"{100 * corloc[row]['mean']:.1f}",
                f"{100 * ap[row]['map (area)']:.1f}" if ap else "",
                *((kept, _link(f"boxes/{name}.json")) if row == "detector" else ("", "")),
            ])  # fmt: skip
    return markdown(rows)


RULES = (
    "confidence (one image)", "edge energy (one image)", "distinctiveness (one image)",
    "confidence x distinctiveness (one image)", "confidence of both", "score", "margin",
)  # fmt: skip


def confidence() -> str:
    """Right matches among the places each rule likes best, on the object, development pairs."""
    found = read("confidence.json")["metrics"]["places on the object, PF-PASCAL val"]
    rows = [["places on the object", "right by nearest neighbour", "right with voting", "from"]]
    every = {"all of them": "all places"}
    every |= {f"best quarter by {rule}": f"best quarter by {rule}" for rule in RULES}
    for title, key in every.items():
        cells = [f"{found['right, percent'][f'{way}, {key}']:.1f}" for way in ("nearest", "voting")]
        rows.append([title, *cells, _link("confidence.json")])
    boxes = read("confidence.json")["metrics"]["auroc of cells in VOC boxes, val photos"]
    inside = (
        f"Cells inside VOC boxes are ranked before those outside with an AUROC of "
        f"{boxes['confidence']:.2f} by confidence, {boxes['edge energy']:.2f} by edge energy and "
        f"{boxes['closeness to the centre']:.2f} by closeness to the image's centre "
        f"({boxes['photos']} val photos)."
    )
    return f"{markdown(rows)}\n\n{inside}"


def speed() -> str:
    found = read("train_speed.json")
    names = {
        "last+compile": "res5 + head, compiled",
        "all+compile": "whole trunk, compiled",
        "last": "res5 + head, eager",
    }
    heading = ["", "pairs/s", "ms a step", "loading, warping, colour", "peak memory"]
    rows = [heading]
    for key, name in names.items():
        row = found["metrics"][key]
        rows.append([
            name, f"{row['pairs_per_s']:,.0f}", f"{row['whole_step_ms']:.1f}",
            f"{row['loading_share']:.1%}", f"{row['peak_memory_gib']:.1f} GiB",
        ])  # fmt: skip
    return markdown(rows) + f"\n\n{found['hardware']}, {_link('train_speed.json')}."


def parts() -> str:
    boxes, flow = read("proposals_recall.json"), read("flow_speed.json")
    match, fit = read("match_speed.json"), read("reliability.json")
    prim, search = boxes["metrics"]["prim"], boxes["metrics"]["selective_random"]
    ratio = boxes["metrics"]["speed_ratio"]["prim"]
    solver, auroc = flow["metrics"], fit["metrics"]["auroc on val"]
    error = fit["metrics"]["calibration on val"]["expected calibration error"]
    rows = [["part", "measured", "beside", "from"]]
    rows.append([
        "region proposals, recall at IoU .5 / .7, 1000 boxes, VOC val",
        f"{prim['recall@0.5']:.3f} / {prim['recall@0.7']:.3f}",
        f"selective search {search['recall@0.5']:.3f} / {search['recall@0.7']:.3f}, "
        f"{ratio:.1f} times slower", _link("proposals_recall.json"),
    ])  # fmt: skip
    rows.append([
        "SD filter, 224 x 224", f"{1000 * solver['seconds_ours']:.0f} ms",
        f"scipy spsolve {1000 * solver['seconds_spsolve']:.0f} ms, best of scipy "
        f"{1000 * solver['seconds_splu_shared']:.0f} ms", _link("flow_speed.json"),
    ])  # fmt: skip
    rows.append([
        "dense flow of a pair from 1000 regions", f"{1000 * solver['seconds_dense_ours']:.0f} ms",
        f"plain loops and spsolve {1000 * solver['seconds_dense_plain']:,.0f} ms",
        _link("flow_speed.json"),
    ])  # fmt: skip
    for key, name in MATCH_ROWS.items():
        row = match["metrics"][key]
        rows.append([
            name, f"{row['ours_ms']:.0f} ms", f"plain numpy {row['numpy_ms']:,.0f} ms",
            _link("match_speed.json"),
        ])  # fmt: skip
    rows.append([
        "probability of a match, AUROC on val pairs", f"{auroc['probability']:.3f}",
        f"score {auroc['score']:.3f}, margin {auroc['margin']:.3f}, "
        f"confidence alone {auroc['confidence']:.3f}", _link("reliability.json"),
    ])  # fmt: skip
    rows.append(["its calibration error", f"{error:.3f}", "", _link("reliability.json")])
    return markdown(rows)


MATCH_ROWS = {
    "regions 1000 x 1000": "match 1000 x 1000 regions, features given",
    "points 200, both ways, voting": "match 200 points both ways, features given",
    "dense 60 x 80, voting": "match every pixel, features given",
}


def _link(name: str) -> str:
    return f"[json](results/{name})"


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

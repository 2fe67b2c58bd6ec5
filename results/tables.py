"""The README's tables, generated from the JSON files beside this script.

python results/tables.py          # write them into README.md
python results/tables.py --check  # exit 1 if README.md differs
"""

from __future__ import annotations

import json
import re
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
    search, final = read("recipe_search.json"), read("reliability.json")
    rows = [["224 x 224, nearest neighbour", "res4c alone", "descriptors", "both", "from"]]
    for name, values in search["metrics"].items():
        layers = ("res4c", "descriptors", "descriptors + res4c (1/2 : 1)")
        found = [values[f"pck@0.1 scnet, nearest neighbour, {layer}, val"] for layer in layers]
        rows.append([name, *(f"{v:.1f}" for v in found), _link("recipe_search.json")])
    table = markdown(rows)
    shipped = [["shipped model, aspect kept", "nearest neighbour", "with voting", "from"]]
    for side in (224, 320, 448):
        ways = [final["metrics"][f"val, {side} px, {way}"] for way in ("nearest", "voting")]
        cells = [f"{way['pck@0.1 scnet']:.1f}" for way in ways]
        shipped.append([f"longest side {side}", *cells, _link("reliability.json")])
    return table + "\n\n" + markdown(shipped)


PUBLISHED = {"ours": "66.5", "resnet50-hc": "64.0", "vgg16": "62.3"}
"""Novotny et al. 2018, table 1: PCK@0.1 on 302 pairs that are not public."""


def matching() -> str:
    """PF-PASCAL's public test list, every row measured so far."""
    heading = ["", "published", "by regions and flow", "nearest neighbour", "with voting",
               "nearest, target shifted", "voting, target shifted", "PCR area", "mIoU@k area",
               "from"]  # fmt: skip
    rows = [heading]
    for row in ("ours", "vgg16", "resnet50-hc", "res4c"):
        name = f"pf-pascal/pf-pascal-test-{row}.json"
        found = read(name)["metrics"]
        ways = ("flow", "nearest", "voting", "shifted nearest", "shifted voting")
        cells = [f"{found[f'{way} pck@0.1 scnet']:.1f}" for way in ways]
        areas = [f"{found[key]:.3f}" for key in ("pcr area", "miou area")]
        rows.append([row, PUBLISHED.get(row, ""), *cells, *areas, _link(name)])
    same = found["identity pck@0.1 scnet"], found["shifted identity pck@0.1 scnet"]
    control = f"{same[0]:.1f}", f"{same[1]:.1f}"
    rows.append(["the same place (control)", "", "", control[0], "", control[1], "", "", "", ""])
    return markdown(rows)


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


TABLES = {"matching": matching, "development": development, "speed": speed, "parts": parts}


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

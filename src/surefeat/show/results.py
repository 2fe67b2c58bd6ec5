"""Results to look at: figures of matching, and one page with all tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefeat.core.files import file_stem, write_text
from surefeat.data.pairs import Pair
from surefeat.measure import tables
from surefeat.measure.results import Result, Score, pck_score
from surefeat.show import style
from surefeat.show.page import Section, write_page

try:
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error


MOST_CURVES = 10
"""Of the region figure: more can not be told apart."""


@rc_context(style.STYLE)
def region_figure(results: Sequence[Result]) -> Figure:
    """PCR over the threshold on 1 - IoU, and mIoU over k, a curve per row (paper, figure 5)."""
    area = Score("pcr area")
    having = [result for result in results if "pcr" in result["curves"]]
    having = sorted(having, key=lambda result: -(area.of(result) or 0.0))[:MOST_CURVES]
    if not having:
        raise ValueError("no result has region curves; evaluate with --measures regions")
    name = f"{having[0]['benchmark']} {having[0]['split']}"
    figure = style.new_figure(
        3.6, f"Region matching on {name}. Left: share of regions whose best match misses the truth "
        "by less than the threshold. Right: mean overlap of each pair's k best-scored matches. In "
        f"the legend the areas under both curves; of many rows the {MOST_CURVES} best on the left."
    )  # fmt: skip
    left, right = figure.subplots(1, 2)
    for number, result in enumerate(having):
        look: dict[str, Any] = {
            "color": style.colour_of(number),
            "linestyle": "-" if number < len(style.PALETTE) else "--",
        }
        areas = [score.shown(score.of(result)) for score in (area, Score("miou area"))]
        label = "\n".join([style.shortened(result["row"], 36), "   ".join(areas)])
        left.plot([t / 100 for t in range(101)], result["curves"]["pcr"], label=label, **look)
        right.plot(range(1, 101), result["curves"]["miou"], **look)
    left.set(title="PCR", xlabel="threshold on 1 - IoU", ylabel="share", xlim=(0, 1), ylim=(0, 1))
    right.set(title="mIoU@k", xlabel="k", ylabel="mean IoU", xlim=(1, 100))
    figure.legend(loc="outside right upper", labelspacing=0.6)
    return figure


@rc_context(style.STYLE)
def pck_figure(results: Sequence[Result]) -> Figure:
    """PCK@0.1 of every row by every route, and with image 1 shifted."""
    rule = results[0]["rule"]
    figure = style.new_figure(
        0.9 + 0.25 * len(results), f"PCK@0.1 ({rule} rule) by each route; the hollow mark is the "
        "same with image 1 shifted, where knowing the place does not help."
    )  # fmt: skip
    axes = figure.subplots()
    for colour, route in zip(style.PALETTE, tables.ROUTES, strict=False):
        for shifted in (False, True):
            score = pck_score(route, rule, shifted=shifted)
            values = [(score.of(result), place) for place, result in enumerate(results)]
            known = [(value, place) for value, place in values if value is not None]
            axes.plot(
                [value for value, _ in known], [place for _, place in known], "o",
                color=colour, markerfacecolor="white" if shifted else colour,
                label=tables.ROUTES[route] if known and not shifted else None,
            )  # fmt: skip
    axes.set_yticks(range(len(results)), [style.shortened(one["row"], 36) for one in results])
    axes.set(xlabel="percent of keypoints", ylim=(-0.5, len(results) - 0.5))
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


@rc_context(style.STYLE)
def keypoint_pairs(pairs: Sequence[Pair]) -> Figure:
    """Pairs of a benchmark with their common keypoints, equal colours where they correspond."""
    aspects = [max(h / w for h, w in (pair.size0, pair.size1)) for pair in pairs]
    figure, tiles = style.pairs_of_tiles(
        aspects, label="Pairs and the keypoints both images have, in equal colours."
    )
    for pair, axes in zip(pairs, tiles, strict=True):
        points = pair.common()
        count = len(points[0])
        colours = colormaps["turbo"]([i / max(1, count - 1) for i in range(count)])
        for axis, path, common in zip(axes, (pair.image0, pair.image1), points, strict=True):
            style.show(axis, *style.picture(path))
            x, y = common.T.tolist()
            axis.scatter(x, y, c=colours, s=18, edgecolors="white", linewidths=0.7)
            style.small_title(axis, path.name)
        axes[0].annotate(
            pair.category, (0, 1), (0, 16), xycoords="axes fraction", textcoords="offset points",
            color=style.GREY, fontsize=8.5,
        )  # fmt: skip
    return figure


_LEAD = (
    "A point or region of one photo is to be found in another photo of the same "
    "kind of object. Every number names its rule; the controls stand beside it."
)

_MAIN = (
    "PCK@0.1 in percent by the benchmark's own rule, mean per pair. Voting: nearest neighbour with "
    "local offset voting, the default. Regions, flow: region matches, dense flow and SD filter, "
    "the paper's route; by means: pooled by means. Controls: location is nearest neighbour with a "
    "bonus for the same place, identity the same place itself."
)

_CONTROLS = (
    "The same with image 1 moved by 45 of 224 pixels, where knowing the place does not help, and "
    "the areas under the curves of regions, between 0 and 1."
)


def write_results(folder: Path, out: Path) -> Path:
    """Tables and figures of all matching results in a folder; returns OUT/index.html."""
    sections, text = [], [_MAIN]
    for (benchmark, split), results in tables.groups(tables.read_results(folder)).items():
        title = f"{benchmark} {split}"
        figures = [pck_figure(results)]
        if any("pcr" in result["curves"] for result in results):
            figures.append(region_figure(results))
        stem = file_stem(benchmark, split)  # a result file may come from anywhere
        for name, figure in zip(("pck", "regions"), figures, strict=False):
            style.write_figure(figure, out / f"{stem}-{name}.png")
        # Figures have the best row on top, and so have tables.
        best_first = results[::-1]
        table = tables.route_table(best_first)
        sections.append(Section(title, _MAIN, figures=tuple(figures), table=table))
        text.append(f"## {title}\n\n{tables.markdown(table)}")
        for name, table in _details(best_first).items():
            note = _CONTROLS if name == _CONTROL_TITLE else ""
            sections.append(Section(f"{title}: {name}", note, table=table, folded=True))
            text.append(f"### {name}\n\n{tables.markdown(table)}")
    write_text(out / "results.md", "\n\n".join(text))
    return write_page(out / "index.html", "Semantic matching", sections, lead=_LEAD)


_CONTROL_TITLE = "shifted, and regions"


def _details(results: Sequence[Result]) -> dict[str, tables.Table]:
    """Tables by title: the shifted control, every rule by each route, classes by the first."""
    by_title = {_CONTROL_TITLE: tables.control_table(results)}
    routes = tables.measured_routes(results)
    for route in routes:
        by_title[f"{tables.ROUTES[route]}, all rules"] = tables.rule_table(results, route)
    for route in routes[:1]:
        by_class = tables.class_table(results, pck_score(route, results[0]["rule"]))
        wide = by_class and len(by_class[0]) > len(by_class)
        title = f"{tables.ROUTES[route]}, PCK@0.1 per class"
        by_title[title] = tables.transposed(by_class) if wide else by_class
    return {title: table for title, table in by_title.items() if table and len(table[0]) > 1}

"""results/ as tables and figures: markdown, PNG and one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefeat.eval.results import Result
from surefeat.eval.tables import (
    class_table,
    convention_table,
    groups,
    main_table,
    markdown,
    read_results,
)
from surefeat.page import Section, write_page
from surefeat.runs import write_text
from surefeat.viz_results import pck_figure, region_figure

_LEAD = (
    "Semantic matching: a point or region of one photo is to be found in another photo of the same "
    "kind of object. Every number names its rule; the controls stand beside it."
)
_MAIN = (
    "PCK@0.1 in percent by the benchmark's own rule, mean per pair. flow: region matches, dense "
    "flow and SD filter, the paper's route; small first: the same with small regions before large "
    "ones of about the same score. nearest: nearest neighbour. voting: with local offset "
    "voting. location: nearest neighbour with a bonus for the same place, a control, as is "
    "identity. shifted: image 1 moved by 45 of 224 pixels. Areas lie between 0 and 1."
)


def write_results(folder: Path, out: Path) -> Path:
    """Tables and figures of all matching results in a folder; returns OUT/index.html."""
    sections, text = [], []
    out.mkdir(parents=True, exist_ok=True)
    for (benchmark, split), results in groups(read_results(folder)).items():
        title = f"{benchmark} {split}"
        figures = [pck_figure(results)]
        if any("pcr" in result["curves"] for result in results):
            figures.append(region_figure(results))
        for name, figure in zip(("pck", "regions"), figures, strict=False):
            figure.savefig(out / f"{benchmark}-{split}-{name}.png", dpi=150)
        sections.append(Section(title, _MAIN, figures=tuple(figures), table=main_table(results)))
        text.append(f"## {title}\n\n{markdown(main_table(results))}")
        for name, table in _details(results).items():
            sections.append(Section(f"{title}: {name}", table=table))
            text.append(f"### {name}\n\n{markdown(table)}")
    write_text(out / "results.md", f"{_MAIN}\n\n" + "\n".join(text))
    return write_page(out / "index.html", "Semantic matching", sections, lead=_LEAD)


def _details(results: Sequence[Result]) -> dict[str, list[list[str]]]:
    """Tables by title: every convention, every class, by the routes that were measured."""
    found: dict[str, list[list[str]]] = {}
    for measure in ("flow", "mean-flow", "small-first", "nearest", "voting", "wide-voting"):
        per_class = class_table(results, measure=measure)
        if per_class:
            found[f"{measure}, all conventions"] = convention_table(results, measure=measure)
            found[f"{measure}, PCK@0.1 per class"] = per_class
    return found

"""Figures of few-shot results: the paper's curves over the number of annotated images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefeat.eval.fewshot_tables import CONTROL, PUBLISHED, TITLES, sizes_of
from surefeat.viz_style import GREY, PALETTE, STYLE, new_figure

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

Result = dict[str, Any]


@rc_context(STYLE)
def fewshot_figure(results: Sequence[Result]) -> Figure:
    """PCK area and PCK@0.1 over images per class, a curve per row, and PCK over alpha."""
    if not results:
        raise ValueError("there are no results to draw; write some with surefeat evaluate pascal3d")
    sizes = list(dict.fromkeys(size for result in results for size in sizes_of(result)))
    seeds = len({each["seed"] for each in results[0]["rounds"]})
    figure = new_figure(
        3.9, f"Keypoints from a handful of labels, Pascal3D {results[0]['split']}: mean over "
        f"classes and {seeds} seeds, bands are one standard deviation over the seeds. Left and "
        "middle: over annotated images per class. Right: over the distance that counts as right, "
        f"in longer sides of the box, with {sizes[-1]} images per class. Grey: the mean place in "
        "the box, without looking. Star: what the paper prints."
    )  # fmt: skip
    axes = figure.subplots(1, 3)
    for number, result in enumerate(results):
        title = TITLES.get(result["row"], result["row"])
        look = {"color": PALETTE[number % len(PALETTE)], "label": title}
        _draw(axes, result, sizes, "", look)
        known = PUBLISHED.get(result["row"], {}) if result["split"] == "val" else {}
        for place, size in enumerate(sizes):
            value = known.get(f"pck@0.1 bbox, {size} per class")
            if value is not None:
                star = look | {"label": f"{title}, published"}
                axes[1].plot([place], [value], linestyle="", marker="*", markersize=9, **star)
    _draw(axes, results[0], sizes, f"{CONTROL} ", {"color": GREY, "label": CONTROL, "ls": "--"})
    for axis, title in zip(axes[:2], ("PCK area", "PCK@0.1, percent"), strict=True):
        axis.set(title=title, xlabel="annotated images per class")
        axis.set_xticks(range(len(sizes)), sizes)
    title = f"PCK, percent, {sizes[-1]} images per class"
    axes[2].set(title=title, xlabel="alpha", xlim=(0, 0.5), ylim=(0, 100))
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    return figure


def _draw(
    axes: Sequence[Axes], result: Result, sizes: list[str], prefix: str, look: dict[str, Any]
) -> None:
    own = [size for size in sizes if size in sizes_of(result)]
    places = [sizes.index(size) for size in own]
    for axis, measure in zip(axes[:2], ("pck area bbox", "pck@0.1 bbox"), strict=True):
        names = [f"{prefix}{measure}, {size} per class" for size in own]
        means = [result["metrics"][name] for name in names]
        spread = [result["metrics"].get(f"{name}, sd over seeds") or 0.0 for name in names]
        axis.plot(places, means, marker="o", markersize=3.5, **look)
        low = [mean - each for mean, each in zip(means, spread, strict=True)]
        high = [mean + each for mean, each in zip(means, spread, strict=True)]
        axis.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)
    curve = result["pck_curves"].get(f"{prefix}{sizes[-1]} per class")
    if curve:
        axes[2].plot(result["pck_curves"]["alpha"], [100 * share for share in curve], **look)

"""Figures of numbers: the loss, training, calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefeat.model.probability import mean_predicted_loss, negative_log_density
from surefeat.show.style import GREY, MAP, MINUS, PALETTE, SIGMA, STYLE, new_figure

try:
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

# Ticks of logarithms are formulas; nothing here has a name that somebody chose.
_STYLE = STYLE | {"text.parse_math": True}

Logged = Mapping[str, Any]
"""A line of metrics.jsonl."""

# Of the loss surface: range of sigma, scores to cut it at, and contours.
_SIGMAS = (0.005, 5.0)
_CUTS = (0.2, 0.5, 0.7, 0.9, 0.99)
_LEVELS = (-4, -3, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64)

_TRAINING = (
    "Training. Loss, scores, dead positives (matches with a negative inner product, which learn "
    f"nothing) and speed are means since the line before; {SIGMA} and the check are of that step."
)

# Title, unit, and the logged names with what the legend calls them.
_PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Loss", "nats", {"loss": ""}),
    ("Scores", "mean score", {"positive": "matches", "negative": "hardest non-matches"}),
    (f"Uncertainty {SIGMA}", f"{SIGMA}, log scale", {
        "sigma_p50": "median", "sigma_p10": "", "sigma_p90": "",
    }),
    ("Dead positives", "% of matches", {"dead": ""}),
    ("Speed", "pairs / s", {"pairs_per_s": ""}),
    ("Label-free check", "share", {
        "accuracy@0.1": "within 10 %", "accuracy@0.05": "within 5 %",
        "accuracy@0.025": "within 2.5 %", "auroc": "AUROC",
    }),
)  # fmt: skip


@rc_context(_STYLE)
def loss_surface() -> Figure:
    """The paper's figure 3: -log p of a matching pair over its score and its uncertainty."""
    figure = new_figure(
        4.0, "What a matching pair costs. Left: over its score and uncertainty; the orange curve "
        "is the uncertainty that costs least at each score. Below a score of 1/2 there is none: the"
        f" larger {SIGMA}, the less it costs, down to 0. Right: at five scores, minima marked."
    )  # fmt: skip
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    sigmas = torch.logspace(math.log10(_SIGMAS[0]), math.log10(_SIGMAS[1]), 200)
    _draw_surface(left, sigmas)
    left.set(ylim=_SIGMAS)
    _draw_cuts(right, sigmas)
    right.set(xlim=_SIGMAS)
    for axis in (left.yaxis, right.xaxis):
        _plain_log_ticks(axis)
    return figure


def _draw_surface(axis: Axes, sigmas: Tensor) -> None:
    scores = torch.linspace(0, 1, len(sigmas))
    cost = negative_log_density(1 - scores[None], sigmas[:, None])
    norm = BoundaryNorm(_LEVELS, colormaps[MAP].N, extend="both")
    filled = axis.contourf(scores, sigmas, cost, _LEVELS, norm=norm, cmap=MAP, extend="both")
    axis.contour(scores, sigmas, cost, [0], colors="white", linewidths=1, linestyles="--")
    # At the optimum the predicted mean loss equals the actual one, so the curve needs no solver.
    best = 1 - mean_predicted_loss(sigmas)
    axis.plot(best, sigmas, color="#ff9f1c", linewidth=2.6, label=f"optimal {SIGMA}")
    axis.plot([], [], "--", color="white", linewidth=1, label="cost 0")
    axis.legend(loc="upper left", labelcolor="white")
    axis.grid(visible=False)
    axis.set(yscale="log", xlabel="score s", ylabel=f"uncertainty {SIGMA}")
    axis.set_title(f"{MINUS}log p(s | match, {SIGMA})")
    axis.figure.colorbar(filled, ax=axis, ticks=_LEVELS, label=f"{MINUS}log p, nats", pad=0.02)


def _draw_cuts(axis: Axes, sigmas: Tensor) -> None:
    colours = colormaps[MAP](torch.linspace(0.88, 0, len(_CUTS)).numpy())
    for colour, score in zip(colours, _CUTS, strict=True):
        curve = negative_log_density(torch.full_like(sigmas, 1 - score), sigmas)
        axis.plot(sigmas, curve, color=colour, label=f"s = {score:g}")
        if 0 < (lowest := int(curve.argmin())) < len(sigmas) - 1:
            axis.plot(sigmas[lowest], curve[lowest], "o", color=colour, markersize=6)
    axis.set(xscale="log", ylim=(-4, 6), xlabel=f"uncertainty {SIGMA}", title="at five scores")
    axis.set(ylabel=f"{MINUS}log p, nats")
    axis.legend(loc="upper right")


def _plain_log_ticks(axis: Axis) -> None:
    """1, 2, 5, 10, written out."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


@rc_context(_STYLE)
def training_curves(rows: Sequence[Logged]) -> Figure:
    """The lines of metrics.jsonl over steps; panels whose values were not logged are left out."""
    if not rows:
        raise ValueError("no metrics to draw; the run has not logged a line yet (train.log_every)")
    panels = [panel for panel in _PANELS if any(name in row for row in rows for name in panel[2])]
    columns = min(3, len(panels))
    depth = math.ceil(len(panels) / columns)
    figure = new_figure(2.45 * depth, _TRAINING)
    axes = list(figure.subplots(depth, columns, squeeze=False, sharex=True).flat)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, unit, names) in zip(axes, panels, strict=False):
        _curves(axis, rows, names)
        axis.set(title=title, ylabel=unit)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for axis in axes[max(0, len(panels) - columns) : len(panels)]:
        axis.set_xlabel("step")
        axis.tick_params(labelbottom=True)
    return figure


def _curves(axis: Axes, rows: Sequence[Logged], names: Mapping[str, str]) -> None:
    for number, (name, label) in enumerate(names.items()):
        if name in ("sigma_p10", "sigma_p90"):
            continue
        logged = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if not logged:
            continue
        steps, values = zip(*logged, strict=True)
        shown = [100 * value for value in values] if name == "dead" else values
        marker = "o" if len(logged) < 25 else None
        (line,) = axis.plot(steps, shown, color=PALETTE[number], marker=marker, markersize=3)
        line.set_label(label)
    if "sigma_p50" in names:
        band = [row for row in rows if "sigma_p10" in row and "sigma_p90" in row]
        axis.fill_between(
            [row["step"] for row in band], [row["sigma_p10"] for row in band],
            [row["sigma_p90"] for row in band], color=PALETTE[0], alpha=0.18, linewidth=0,
            label="10th to 90th percentile",
        )  # fmt: skip
        axis.set_yscale("log")
        _plain_log_ticks(axis.yaxis)
    elif "loss" not in names:
        axis.set_ylim(bottom=0)
    if "auroc" in names:
        axis.set(ylim=(0, 1.42), yticks=[0, 0.25, 0.5, 0.75, 1])
        axis.legend(fontsize=8, ncols=2, loc="upper left", columnspacing=1)
    elif any(names.values()):
        axis.legend(fontsize=8)


@rc_context(_STYLE)
def calibration_curve(
    predicted: Sequence[float | None], actual: Sequence[float | None], count: Sequence[int]
) -> Figure:
    """Share of right matches over their predicted probability, by bin; None for an empty bin."""
    figure = new_figure(
        3.0, "Predicted probability of matches against the share that is right; the area of a dot "
        "is the number of matches in its bin.", width=3.6,
    )  # fmt: skip
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    bins = zip(predicted, actual, count, strict=True)
    xs, ys, sizes = zip(*(one for one in bins if one[0] is not None and one[2]), strict=True)
    axis.plot(xs, ys, color=PALETTE[0])
    most = max(sizes)
    axis.scatter(xs, ys, s=[20 + 160 * n / most for n in sizes], color=PALETTE[0], zorder=3)
    axis.set(xlabel="predicted probability", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
    return figure

"""The drawing of conventions.md, with numbers computed by the package; figures.py saves it."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, FancyArrowPatch, Polygon, Rectangle
from matplotlib.patheffects import withStroke

from surefeat.core.geometry import (
    Frame,
    apply_affine,
    compose,
    grid_to_pixel,
    invert,
    pixel_to_grid,
)
from surefeat.data.drawn import draw
from surefeat.learn.warp import render
from surefeat.show.style import GREY, INK, MINUS, PALETTE, STYLE

PRIME = "\N{PRIME}"
BLUE, ORANGE, GREEN = PALETTE[0], PALETTE[1], PALETTE[2]
ARROW = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}


def fraction(value: float) -> str:
    """Halves as people write them."""
    whole, half = divmod(abs(value), 1)
    sign = MINUS if value < 0 else ""
    digits = f"{int(whole)}" if whole or not half else ""
    return sign + digits + ("\N{VULGAR FRACTION ONE HALF}" if half else "")


def bare(axes: Axes, title: str) -> None:
    axes.set_axis_off()
    axes.set_anchor("NW")
    axes.set_title(title, fontsize=12, pad=8)


def below(axes: Axes, x: float, y: float, lines: dict[str, str], *, step: float = 0.72) -> None:
    """Lines of text and their colours, one under the other; the y axis points down."""
    for number, (line, colour) in enumerate(lines.items()):
        axes.text(x, y + number * step, line, color=colour, va="top", fontsize=9.5)


def edge_ruler(axes: Axes, positions: list[float], *, y: float, colour: str, up: bool) -> None:
    """Ticks with labels at x positions."""
    for x in positions:
        axes.plot([x, x], [y, y + (0.18 if up else -0.18)], color=colour, linewidth=1)
        axes.text(x, y + (0.28 if up else -0.28), fraction(x), ha="center", fontsize=9,
                  va="top" if up else "bottom", color=colour)  # fmt: skip


def draw_pixels(axes: Axes) -> None:
    """Pixel centres, image edges and an inclusive box."""
    width, height = 6, 4
    for y in range(height):
        for x in range(width):
            axes.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="white", edgecolor="#cbd2d9")
            )
            axes.plot(x, y, "o", color=GREY, markersize=3)
    axes.add_patch(Rectangle((-0.5, -0.5), width, height, fill=False, edgecolor=INK, linewidth=1.8))
    x1, y1, x2, y2 = 2, 1, 4, 2
    box = (x1 - 0.5, y1 - 0.5), x2 - x1 + 1, y2 - y1 + 1
    axes.add_patch(Rectangle(*box, facecolor=ORANGE, alpha=0.16))
    axes.add_patch(Rectangle(*box, fill=False, edgecolor=ORANGE, linewidth=2))
    axes.plot([x1, x2], [y1, y2], "o", color=ORANGE, markersize=6)
    axes.text(x1, y1 + 0.14, "(2, 1)", color=ORANGE, ha="center", va="top", fontsize=9)
    axes.text(x2, y2 + 0.14, "(4, 2)", color=ORANGE, ha="center", va="top", fontsize=9)
    axes.plot(0, 0, "o", color=BLUE, markersize=6)
    axes.text(0, 0.14, "(0, 0)", color=BLUE, ha="center", va="top", fontsize=9)
    edge_ruler(axes, [-0.5, width - 0.5], y=height - 0.4, colour=INK, up=True)
    edge_ruler(axes, [float(x) for x in range(width)], y=-0.6, colour=GREY, up=False)
    for y in range(height):
        axes.text(-0.72, y, str(y), ha="right", va="center", color=GREY, fontsize=9)
    axes.text(-0.72, -1.02, "y \\ x", ha="right", va="center", color=GREY, fontsize=9)
    said = f"image edges, width W = {width}"
    axes.text(width / 2 - 0.5, height - 0.12, said, ha="center", va="top")
    across = f"width {x2} {MINUS} {x1} + 1 = {x2 - x1 + 1}"
    lines = {
        f"Box ({x1}, {y1}, {x2}, {y2}) names its first and last pixels: {across}.": ORANGE,
        f"An image W pixels wide spans [{MINUS}½, W {MINUS} ½]. Sizes are (height, width).": INK,
    }
    below(axes, -0.5, height + 0.55, lines, step=0.42)
    axes.set(xlim=(-1.2, width + 0.6), ylim=(height + 1.3, -1.2), aspect="equal")
    bare(axes, "1  Pixel centres are integers; boxes are inclusive")


def draw_stride(axes: Axes) -> None:
    """Cells of a stride-4 map over the pixels of one row."""
    width, stride = 12, 4
    for x in range(width):
        axes.add_patch(Rectangle((x - 0.5, 0), 1, 1, facecolor="white", edgecolor="#cbd2d9"))
        axes.plot(x, 0.5, "o", color=GREY, markersize=3)
    edge_ruler(axes, [float(x) for x in range(width)], y=-0.1, colour=GREY, up=False)
    for cell in range(width // stride):
        centre = float(grid_to_pixel(torch.tensor(float(cell)), stride))
        left = centre - stride / 2
        axes.add_patch(
            Rectangle((left, 1.6), stride, 1.3, facecolor=BLUE, alpha=0.1 + 0.08 * (cell % 2))
        )
        axes.add_patch(
            Rectangle((left, 1.6), stride, 1.3, fill=False, edgecolor=BLUE, linewidth=1.5)
        )
        axes.plot([centre, centre], [0.5, 2.25], ":", color=BLUE, linewidth=1.2)
        axes.plot(centre, 2.25, "o", color=BLUE, markersize=6)
        axes.text(centre + 0.22, 2.25, f"cell {cell}", color=BLUE, va="center", fontsize=9.5)
        axes.text(
            centre, 3.05, f"x = {fraction(centre)}", color=BLUE, ha="center", va="top", fontsize=9.5
        )
    pixel = 7.0
    cell_of = float(pixel_to_grid(torch.tensor(pixel), stride))
    axes.plot(pixel, 0.5, "o", color=ORANGE, markersize=7)
    axes.plot([pixel, pixel], [0.5, 2.7], color=ORANGE, linewidth=1.2)
    axes.plot(pixel, 2.7, "v", color=ORANGE, markersize=5)
    lines = {
        f"cell = (x + ½) / stride {MINUS} ½   and back   x = (cell + ½) · stride {MINUS} ½": BLUE,
        f"The first cell is centred on x = (stride {MINUS} 1) / 2.": INK,
        f"Pixel {pixel:g} is cell {cell_of:g}: it is read between cells 1 and 2.": ORANGE,
    }
    below(axes, -0.5, 4.0, lines)
    axes.set(xlim=(-0.8, width - 0.2), ylim=(6.3, -1.0), aspect="equal")
    bare(axes, "2  Cells of a feature map, here of stride 4")


def draw_frames(axes: Axes) -> None:
    """Original and network pixels share their outer edges."""
    frame, length, tall = Frame((1, 6), (1, 4)), 12.0, 1.3
    rows = ((0.0, frame.original[1], INK, "original"), (3.0, frame.network[1], GREEN, "network"))
    for y, count, colour, name in rows:
        side = length / count
        for x in range(count):
            axes.add_patch(
                Rectangle((x * side, y), side, tall, facecolor="white", edgecolor=colour)
            )
            axes.plot((x + 0.5) * side, y + 0.5, "o", color=colour, markersize=3.5)
            axes.text((x + 0.5) * side + 0.2, y + 0.5, str(x), va="center", color=colour)
        axes.text(
            -0.3, y + tall / 2, f"{name}\n{count} wide", ha="right", va="center", color=colour
        )
    for x in (0, length):
        axes.plot([x, x], [tall, 3], "--", color=GREY, linewidth=1)
    x_network = float(frame.to_network(torch.tensor([4.0, 0.0]))[0])
    start, end = (4.5 * length / 6, 0.5), ((x_network + 0.5) * length / 4, 3.5)
    axes.add_patch(FancyArrowPatch(start, end, color=ORANGE, linewidth=1.6, **ARROW))
    axes.plot(*start, "o", color=ORANGE, markersize=7)
    axes.text(
        start[0] + 0.3, 2.15, f"4  \N{RIGHTWARDS ARROW}  {x_network:g}", color=ORANGE, va="center"
    )
    lines = {
        f"network = (original + ½) · 4/6 {MINUS} ½: outer edges meet, centres need not.": GREEN,
        "Every question and every answer is in original pixels.": INK,
    }
    below(axes, 0, 4.9, lines)
    axes.set(xlim=(-2.3, length + 0.3), ylim=(6.6, -0.4), aspect="equal")
    bare(axes, "3  Original and network pixels share their edges")


def view_map(
    centre: tuple[float, float], *, degrees: float, zoom: float, side: int
) -> torch.Tensor:
    """(2, 3): view pixels -> source pixels of a square view about `centre`."""
    angle, middle = math.radians(degrees), (side - 1) / 2
    linear = zoom * torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    )
    shift = torch.tensor(centre) - linear @ torch.tensor([middle, middle])
    return torch.cat([linear, shift[:, None]], dim=1)


def draw_warp(figure: Figure, view0: Axes, source: Axes, view1: Axes) -> None:
    """Two views of one image, and the point map between them."""
    size, side = 200, 128
    bird = draw(1, size=size, generator=np.random.default_rng(2))
    image, place = bird.image.float()[None] / 255, bird.keypoints[4:5]
    maps = torch.stack([
        view_map((92.0, 92.0), degrees=-14, zoom=1.15, side=side),
        view_map((106.0, 96.0), degrees=18, zoom=1.0, side=side),
    ])  # fmt: skip
    points = [apply_affine(invert(to_source), place) for to_source in maps]
    # What the drawing claims: the warp of the package is the way through the source.
    warp = compose(invert(maps[1]), maps[0])
    assert torch.allclose(apply_affine(warp, points[0]), points[1], atol=1e-3)
    show(source, image[0], size)
    corners = torch.tensor([[0, 0], [side, 0], [side, side], [0, side]]) - 0.5
    for axes, to_source, colour in zip((view0, view1), maps, (BLUE, GREEN), strict=True):
        show(axes, render(image, torch.tensor([[size, size]]), to_source[None], side=side)[0], side)
        outline = apply_affine(to_source, corners)
        source.add_patch(Polygon(outline, fill=False, edgecolor=colour, linewidth=2))
        axes.add_patch(Polygon(corners, fill=False, edgecolor=colour, linewidth=3))
    view0.set_title("view 0", loc="center", color=BLUE)
    view1.set_title("view 1", loc="center", color=GREEN)
    source.set_title("source image", loc="center", color=GREY)
    join(figure, (view0, points[0][0]), (source, place[0]))
    join(figure, (source, place[0]), (view1, points[1][0]))
    edge = [withStroke(linewidth=3, foreground=INK)]
    marks = {view0: (points[0], "u"), view1: (points[1], f"u{PRIME}"), source: (place, "")}
    for axes, (point, name) in marks.items():
        x, y = point[0].tolist()
        axes.plot(x, y, "o", color=ORANGE, markersize=9, markeredgecolor="white")
        axes.text(x, y - 11, name, color="white", ha="center", fontsize=12, path_effects=edge)


def show(axes: Axes, pixels: torch.Tensor, side: int) -> None:
    """A square picture whose pixel centres are integers."""
    axes.imshow(pixels.permute(1, 2, 0).numpy(), extent=(-0.5, side - 0.5, side - 0.5, -0.5))
    axes.set_axis_off()


def join(figure: Figure, start: tuple[Axes, torch.Tensor], end: tuple[Axes, torch.Tensor]) -> None:
    """An arrow from a point of one picture to a point of another."""
    figure.add_artist(ConnectionPatch(
        start[1].tolist(), end[1].tolist(), "data", "data", axesA=start[0], axesB=end[0],
        arrowstyle="-|>", mutation_scale=16, color=ORANGE, linewidth=2, shrinkA=7, shrinkB=7,
    ))  # fmt: skip


@rc_context(STYLE)
def conventions() -> Figure:
    """The whole drawing."""
    figure = Figure(figsize=(12, 8.3), facecolor="white")
    left, right, half = 0.03, 0.53, 0.45
    draw_pixels(figure.add_axes((left, 0.5, half, 0.45)))
    draw_stride(figure.add_axes((right, 0.5, half, 0.45)))
    draw_frames(figure.add_axes((left, 0.02, half, 0.40)))
    last = figure.add_axes((right, 0.02, half, 0.40))
    last.set(xlim=(0, 1), ylim=(1, 0))
    bare(last, "4  The warp goes from view 0 to view 1")
    lines = {
        f"u{PRIME} = g(u), g = ĝ{PRIME} ∘ ĝ⁻¹: back to the source, then on to view 1.": ORANGE,
        f"Views.warp is g, a (2, 3) affine map; ĝ and ĝ{PRIME} place the source in them.": INK,
    }
    below(last, 0, 0.80, lines, step=0.085)
    draw_warp(
        figure,
        figure.add_axes((right, 0.15, 0.125, 0.22)),
        figure.add_axes((right + 0.14, 0.12, 0.165, 0.27)),
        figure.add_axes((right + 0.32, 0.15, 0.125, 0.22)),
    )
    return figure

"""What all figures share: colours, type, page width, and how pictures are laid out and drawn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

import numpy.typing as npt
from torch import Tensor

from surefeat.core.files import write_bytes
from surefeat.core.geometry import Frame, cell_centres, sample
from surefeat.core.image import ImageLike, load, resize
from surefeat.model.features import Features

try:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

SIGMA, MINUS = "\N{GREEK SMALL LETTER SIGMA}", "\N{MINUS SIGN}"

INK, GREY, FAINT = "#1f2933", "#7b8794", "#e4e7eb"

# Okabe and Ito's colours, told apart with any colour vision.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")

# Of quantities with one sign, and of those with two: both even in lightness, for any colour vision.
MAP, SIGNED = "viridis", "RdBu_r"

WIDTH = 10.0
"""Of the page, inches; a browser draws 96 pixels for each."""

# Any: matplotlib types its settings by their names, and older versions do not.
STYLE: Any = {
    "font.family": "sans-serif", "font.size": 9, "text.color": INK, "axes.labelcolor": INK,
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": GREY, "axes.linewidth": 0.7, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT,
    "grid.linewidth": 0.7, "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "xtick.major.size": 2.5, "ytick.major.size": 2.5,
    "text.parse_math": False,  # a $ in a name is a $
    "lines.linewidth": 1.6, "legend.frameon": False, "legend.fontsize": 8.5,
    "figure.facecolor": "white", "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.05,
}  # fmt: skip

DRAWN = 512
"""Longest side at which pictures are drawn, pixels: twice what a tile has on the page."""

_LONGEST_TITLE = 24

# Inches that a figure has at least and at most.
_LOWEST, _HIGHEST = 0.8, 40.0

# Pairs of pictures in one row, and the height over width that a tile may have at most.
_PAIRS, _TALLEST = 3, 1.4


def colour_of(number: int) -> str:
    """Of the palette; it starts again where it ends."""
    return PALETTE[number % len(PALETTE)]


def new_figure(height: float, label: str, *, width: float = WIDTH) -> Figure:
    """An empty figure, inches; `label` says what it shows, and reports print it below.

    A photo one pixel wide would ask for a page of a mile: the height has bounds.
    """
    height = min(max(height, _LOWEST), _HIGHEST)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.set_label(label)
    return figure


def write_figure(figure: Figure, path: Path, *, dpi: int = 150) -> None:
    """Write a picture, whole or not at all."""
    write_bytes(path, drawn(figure, dpi=dpi, kind=path.suffix.lstrip(".") or "png").getvalue())


def drawn(figure: Figure, *, dpi: int, kind: str = "png") -> BytesIO:
    """A picture; letters that the font has not are boxes, without a warning for each."""
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(buffer, dpi=dpi, format=kind)
    return buffer


def pairs_of_tiles(
    aspects: Sequence[float], *, label: str
) -> tuple[Figure, list[tuple[Axes, Axes]]]:
    """Two frameless axes side by side for each picture; aspects are heights over widths."""
    columns, rows = min(_PAIRS, len(aspects)), math.ceil(len(aspects) / _PAIRS)
    tallest = [max(aspects[_PAIRS * row : _PAIRS * (row + 1)]) for row in range(rows)]
    heights = [min(aspect, _TALLEST) for aspect in tallest]
    side = WIDTH / (2.15 * max(columns, 2))
    figure = new_figure(
        sum(side * height + 0.3 for height in heights), label, width=side * 2.15 * columns
    )
    # Between pairs stands an empty column, so that the eye sees what belongs together.
    widths = [1.0, 1.0, 0.1] * columns
    grid = figure.add_gridspec(
        rows, 3 * columns - 1, width_ratios=widths[:-1], height_ratios=heights
    )
    tiles = []
    for number in range(len(aspects)):
        row, column = divmod(number, columns)
        pair = [figure.add_subplot(grid[row, 3 * column + side]) for side in (0, 1)]
        hide_frames(pair)
        tiles.append((pair[0], pair[1]))
    return figure, tiles


def sheet(
    count: int, columns: int, *, row: float, top: float, label: str, shown: str = ""
) -> tuple[Figure, npt.NDArray[Any]]:
    """Frameless tiles for `count` pictures, `shown` or the label above them; heights in inches."""
    rows = math.ceil(count / columns)
    figure = new_figure(row * rows + top, label)
    # The file is looked at by itself, where nobody prints the label.
    figure.suptitle(shown or label, x=0.005, ha="left", fontsize=9)
    grid: npt.NDArray[Any] = figure.subplots(rows, columns, squeeze=False)
    hide_frames(grid.flat)
    return figure, grid


def hide_frames(tiles: Iterable[Axes]) -> None:
    """No axes around pictures, which hang from the top of their tiles."""
    for axes in tiles:
        axes.set_axis_off()
        axes.set_anchor("N")


def colour_bar(
    figure: Figure, axes: Sequence[Axes], scale: Normalize, cmap: str, label: str
) -> None:
    """One for all axes."""
    colours = ScalarMappable(norm=scale, cmap=cmap)
    figure.colorbar(
        colours, ax=list(axes), shrink=0.85, aspect=32, pad=0.01, label=label, panchor=False
    )


def picture(
    image: ImageLike, *, longest: int = DRAWN, enlarged: bool = False
) -> tuple[Tensor, Frame]:
    """Pixels (3, h, w) uint8 as they are drawn, and their Frame: its network size is (h, w).

    The longer side has `longest` pixels; a smaller image stays as it is unless it is `enlarged`.
    """
    pixels = load(image).cpu()
    height, width = pixels.shape[1:]
    scale = longest / max(height, width)
    scale = scale if enlarged else min(1.0, scale)
    drawn = (max(1, round(height * scale)), max(1, round(width * scale)))
    return resize(pixels, size=drawn), Frame((height, width), drawn)


@dataclass(frozen=True, eq=False)
class ShownPhoto:
    """A photo as a page shows it: every pixel of a panorama would take minutes and gigabytes."""

    pixels: Tensor
    """(3, h, w) uint8."""
    features: Features
    """Of the whole photo, asked in these pixels."""
    frame: Frame
    """From the photo's own pixels (original) to those shown (network)."""


def shown_photo(
    image: ImageLike, features: Features, *, longest: int = DRAWN, enlarged: bool = False
) -> ShownPhoto:
    """A photo at the size of `picture`, with the features that were extracted from it."""
    pixels, frame = picture(image, longest=longest, enlarged=enlarged)
    asked = Frame(original=frame.network, network=features.frame.network)
    return ShownPhoto(pixels, replace(features, frame=asked), frame)


def show(axes: Axes, pixels: Tensor, frame: Frame) -> None:
    """Draw (3, h, w), uint8 or in [0, 1], so that the axes' units are original pixels."""
    axes.imshow(pixels.permute(1, 2, 0).cpu().numpy(), **_placed(frame))


def show_map(
    axes: Axes,
    values: Tensor,
    frame: Frame,
    *,
    scale: Normalize,
    cmap: str = MAP,
    over: Tensor | None = None,
) -> None:
    """Draw values (h, w) as colours, in the same units; over: a picture (3, h, w) seen below."""
    if over is not None:
        axes.imshow(over.float().mean(0).numpy(), cmap="gray", vmin=0, vmax=255, **_placed(frame))
    alpha = 1.0 if over is None else 0.7
    axes.imshow(values.cpu().numpy(), cmap=cmap, norm=scale, alpha=alpha, **_placed(frame))


def _placed(frame: Frame) -> dict[str, Any]:
    height, width = frame.original
    return {"extent": (-0.5, width - 0.5, height - 0.5, -0.5), "interpolation": "nearest"}


def outline(axes: Axes, box: Sequence[float], colour: str, *, width: float = 2.0) -> None:
    """An inclusive box, with a white seam that tells its edges from the photo and from others."""
    x1, y1, x2, y2 = box
    for line, tint in ((width + 1.4, "white"), (width, colour)):
        edges = Rectangle(
            (x1 - 0.5, y1 - 0.5), x2 - x1 + 1, y2 - y1 + 1, fill=False, edgecolor=tint,
            linewidth=line,
        )  # fmt: skip
        axes.add_patch(edges)


def spread(maps: Tensor, features: Features, frame: Frame) -> Tensor:
    """Maps (K, h, w) at the features' cells -> (K, H, W) at every drawn pixel, bilinearly."""
    points = frame.to_original(cell_centres(size=frame.network, stride=1.0))
    read = sample(maps[None].float().cpu(), features.cells(points)[None])
    return read[0].T.reshape(-1, *frame.network)


def small_title(axes: Axes, text: str) -> None:
    """A title above a tile."""
    axes.set_title(shortened(text, _LONGEST_TITLE), fontsize=8.5, fontweight="normal", pad=4)


def shortened(text: str, most: int) -> str:
    """Text as a figure can show it: long ones lose their middle, so that the figure has room."""
    # File names may hold dollar signs, which are no formulas, and signs no font can show.
    shown = "".join(sign if sign.isprintable() else "?" for sign in text)
    return shown if len(shown) <= most else f"{shown[: most // 2 - 1]}…{shown[-most // 2 :]}"


def short_name(features: Features, number: int) -> str:
    """The image's file name, or its number where it came from memory."""
    return PurePath(features.name).name or f"image {number + 1}"

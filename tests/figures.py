"""Figures as they are drawn: their pixels, and the axes that show pictures."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image


def drawn(figure: Figure) -> npt.NDArray[np.float64]:
    """The figure as it is saved: (H, W, 3) in [0, 1]."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    return np.asarray(Image.open(buffer).convert("RGB"), dtype=np.float64) / 255


def pixel_at(figure: Figure, axes: Axes, point: tuple[float, float]) -> npt.NDArray[np.float64]:
    """The drawn colour at a place given in the axes' data units, here original pixels."""
    picture = drawn(figure)
    x, y = axes.transData.transform(point) * (100 / figure.dpi)
    colour: npt.NDArray[np.float64] = picture[picture.shape[0] - 1 - int(y), int(x)]
    return colour


def pictures(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]

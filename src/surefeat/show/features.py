"""Figures of features: warped views, confidence, channels, main directions as colours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.core.image import ImageLike
from surefeat.learn.warp import Views
from surefeat.model.features import Features
from surefeat.show import style

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

Seen = tuple[Features, Tensor, Frame]
"""Features of an image, its pixels as drawn and their frame."""

_MARKED = 7  # points in a view


@rc_context(style.STYLE)
def views_sheet(views: Views, points0: Tensor, points1: Tensor) -> Figure:
    """Warped views side by side; points (B, N, 2), view pixels, correspond row by row.

    Some of them, well spread, are marked, each in one colour in both views.
    """
    count = len(views.view0)
    if not count:
        raise ValueError("no views to draw; pass at least one image")
    figure, axes = style.pairs_of_tiles(
        [1.0] * count, label="Two random views of each image; one colour marks one place in both.",
    )  # fmt: skip
    side = views.view0.shape[-1]
    edge = [withStroke(linewidth=2.6, foreground=style.INK)]
    for row in range(count):
        both = torch.cat([points0[row], points1[row]], dim=-1).cpu()
        chosen = _far_apart(both, _MARKED, side=side)
        for i, (view, places) in enumerate([(views.view0, points0), (views.view1, points1)]):
            axis = axes[row][i]
            style.show(axis, view[row].clamp(0, 1), Frame((side, side), (side, side)))
            style.small_title(axis, f"image {row + 1}, view {i}")
            x, y = places[row].cpu()[chosen].T.numpy()
            axis.scatter(
                x, y, c=style.PALETTE[: len(chosen)], s=36, edgecolors="white", linewidths=1.2,
                path_effects=edge, clip_on=False,
            )  # fmt: skip
    return figure


def _far_apart(both: Tensor, count: int, *, side: int) -> list[int]:
    """Rows of (N, 4), points in both views, that lie far from each other and from the edges."""
    shown = ((both > 0.06 * side) & (both < 0.94 * side)).all(-1)
    allowed = shown if shown.any() else torch.ones_like(shown)
    distance = torch.where(allowed, torch.inf, -1.0)
    chosen: list[int] = []
    for _ in range(min(count, int(allowed.sum()))):
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (both - both[chosen[-1]])[:, :2].norm(dim=-1))
    return chosen


@rc_context(style.STYLE)
def confidence_map(
    features: Features | Sequence[Features], images: ImageLike | Sequence[ImageLike]
) -> Figure:
    """Each image beside its confidence 1/sigma, in original pixels, on one scale for all."""
    seen = _together(features, images)
    figure, tiles = _photos_beside(
        seen, "confidence",
        label=f"Confidence 1/{style.SIGMA} of the descriptors: bright where they can be trusted.",
    )  # fmt: skip
    # Sigma is read between cells, then inverted, as Features.confidence_at does.
    sigmas = [style.spread(maps.uncertainty[None], maps, frame)[0] for maps, _, frame in seen]
    confidences = [sigma.reciprocal() for sigma in sigmas]
    scale = _limits(torch.cat([values.flatten() for values in confidences]))
    for axis, (_, pixels, frame), confidence in zip(tiles, seen, confidences, strict=True):
        style.show_map(axis, confidence, frame, scale=scale, over=pixels)
    style.colour_bar(figure, figure.axes, scale, style.MAP, f"confidence 1/{style.SIGMA}")
    return figure


def _limits(values: Tensor) -> Normalize:
    """A colour scale that a few extreme values do not stretch."""
    sorted_values = values.flatten().sort().values
    last = len(sorted_values) - 1
    low, high = (sorted_values[round(share * last)].item() for share in (0.01, 0.99))
    return Normalize(low, high if high > low else low + 1e-6 + abs(low) * 1e-3)


@rc_context(style.STYLE)
def channels(features: Features, image: ImageLike, *, top: int = 8) -> Figure:
    """The image and the responses of the channels that vary most over it, in [-1, 1]."""
    ((maps, pixels, frame),) = _together(features, image)
    top = min(top, len(maps.descriptors))
    chosen = maps.descriptors.flatten(1).float().std(dim=1).argsort(descending=True)[:top].tolist()
    (height, width), columns = frame.original, math.ceil(top / 2)
    side = style.WIDTH / (columns + 2)
    figure = style.new_figure(
        2 * (side * min(height / width, 1.5) + 0.3),
        "Responses of the channels that vary most over the image: red positive, blue negative.",
    )
    grid = figure.add_gridspec(2, columns + 2)
    plain = figure.add_subplot(grid[:, :2])
    style.show(plain, pixels, frame)
    style.small_title(plain, style.short_name(maps, 0))
    responses = style.spread(maps.descriptors[chosen], maps, frame)
    most = responses.abs().max().item()
    axes, scale = [plain], Normalize(-most, most)
    for number, (channel, response) in enumerate(zip(chosen, responses, strict=True)):
        axis = figure.add_subplot(grid[number // columns, 2 + number % columns])
        style.show_map(axis, response, frame, scale=scale, cmap=style.SIGNED)
        style.small_title(axis, f"channel {channel}")
        axes.append(axis)
    style.hide_frames(axes)
    style.colour_bar(figure, axes, scale, style.SIGNED, "response")
    return figure


@rc_context(style.STYLE)
def pca(
    features: Features | Sequence[Features],
    images: ImageLike | Sequence[ImageLike],
    *,
    weighted: bool = False,
) -> Figure:
    """Each image beside its descriptors' three main directions as red, green and blue.

    One basis for all images, so that a colour means the same everywhere. weighted: confident cells
    choose the basis, and colours fade to white where confidence is low.
    """
    seen = _together(features, images)
    colours = pca_colours([maps for maps, _, _ in seen], weighted=weighted)
    figure, tiles = _photos_beside(
        seen, "descriptors", label="Main directions of the descriptors as colours, shared by all "
        "images: equal colours mean similar descriptors."
        + (" Pale where confidence is low." if weighted else ""),
    )  # fmt: skip
    for axis, (maps, _, frame), colour in zip(tiles, seen, colours, strict=True):
        style.show(axis, style.spread(colour, maps, frame).clamp(0, 1), frame)
    return figure


def pca_colours(features: Sequence[Features], *, weighted: bool = False) -> list[Tensor]:
    """Colours in [0, 1] (3, h, w) for each image's cells; same basis and scale for all images."""
    rows = torch.cat([maps.descriptors.flatten(1).T.double().cpu() for maps in features])
    confidence = torch.cat([maps.confidence.flatten().double().cpu() for maps in features])
    weights = confidence if weighted else torch.ones_like(confidence)
    weights = weights / weights.sum()
    centred = rows - weights @ rows
    covariance = centred.T @ (weights[:, None] * centred)
    directions = torch.linalg.eigh(covariance).eigenvectors.flip(-1)[:, :3]
    # An eigenvector's sign is arbitrary: fixed, a figure is the same each time it is drawn.
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    values = centred @ (directions * largest.sign())
    low, high = (values.quantile(share, dim=0) for share in (0.02, 0.98))
    # A direction without any variation must not blow its rounding errors up into colours.
    span = (high - low).clamp_min(1e-3 * (high - low).max().item() + 1e-9)
    colours = ((values - (low + high) / 2) / span + 0.5).clamp(0, 1)
    if weighted:
        share = (confidence / confidence.quantile(0.95)).clamp(0, 1)[:, None]
        colours = 1 - share * (1 - colours)
    shapes = [maps.uncertainty.shape for maps in features]
    parts = colours.float().split([shape.numel() for shape in shapes])
    return [part.T.reshape(3, *shape) for part, shape in zip(parts, shapes, strict=True)]


def _together(
    features: Features | Sequence[Features], images: ImageLike | Sequence[ImageLike]
) -> list[Seen]:
    """Features, pixels and Frame of each image; what does not belong together is refused."""
    several = [features] if isinstance(features, Features) else list(features)
    pictures: list[ImageLike] = list(images) if isinstance(images, list | tuple) else [images]  # type: ignore[list-item]
    if len(several) != len(pictures) or not several:
        raise ValueError(
            f"{len(several)} features and {len(pictures)} images; pass one image for each Features"
        )
    here = [maps.to("cpu") for maps in several]
    seen = [(maps, *style.picture(image)) for maps, image in zip(here, pictures, strict=True)]
    for maps, _, frame in seen:
        if maps.frame.original != frame.original:
            raise ValueError(
                f"features of a {maps.frame.original} image, but the image is {frame.original} "
                "(height, width); pass the image they were extracted from"
            )
    return seen


def _photos_beside(seen: list[Seen], title: str, *, label: str) -> tuple[Figure, list[Axes]]:
    """Every image, and beside it a tile of this title to draw on."""
    sizes = [frame.original for _, _, frame in seen]
    figure, tiles = style.pairs_of_tiles([height / width for height, width in sizes], label=label)
    for number, ((maps, pixels, frame), (plain, other)) in enumerate(zip(seen, tiles, strict=True)):
        style.show(plain, pixels, frame)
        style.small_title(plain, style.short_name(maps, number))
        style.small_title(other, title)
    return figure, [other for _, other in tiles]

"""Matches of two photos: figures in original pixels, and the page of `surefeat match A B`."""

from __future__ import annotations

from dataclasses import replace
from math import dist
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat import __version__
from surefeat.core.files import as_json, write_bytes, write_text
from surefeat.core.geometry import Frame, box_iou, cell_centres
from surefeat.core.image import ImageLike, load
from surefeat.match.config import ProposalConfig
from surefeat.match.dense import DenseMatches, match_dense, match_dense_by_regions, warp_image
from surefeat.match.large import Part, best_parts, cut_part, moved_back
from surefeat.match.points import Matches, check_inside, match_points
from surefeat.match.proposals import propose
from surefeat.match.regions import RegionMatches, match_regions
from surefeat.match.votes import Voting
from surefeat.model.config import REGION_WEIGHTS, SHIPPED
from surefeat.model.features import slower_sides, stack_points
from surefeat.model.network import DenseFeatures
from surefeat.show import match_page, style
from surefeat.show.features import confidence_map
from surefeat.show.page import Section, write_page

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import ConnectionPatch
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

_WRONG, _RIGHT = style.PALETTE[1:3]

_FOOT = "Written by surefeat; matches.json beside this page has the matches, in original pixels."

_REGIONS = (
    "The best of the proposed regions, and every pixel moved with its region and smoothed along "
    "the photo's edges: the paper's route, without agreement between neighbours."
)


# How far, in shares of the longer side, a pixel may land from itself after matching there and back.
_RETURNS = 0.05

# Grey of the pixels that are not shown.
_BLANK = 228

_SURE = f"that return, matched there and back, within {100 * _RETURNS:.0f} % of its longer side"


def _side_by_side(
    image0: ImageLike, image1: ImageLike, label: str, *, beside: float
) -> tuple[Figure, list[Axes]]:
    """Two photos at one height, without frames, that leave this many inches beside them free."""
    pictures = [style.picture(image) for image in (image0, image1)]
    shapes = (frame.original[1] / frame.original[0] for _, frame in pictures)
    widths = [min(max(shape, 1 / 8), 8.0) for shape in shapes]  # of a strip, not a hair's
    figure = style.new_figure(min((style.WIDTH - beside) / sum(widths), 7.5) + 0.3, label)
    axes = list(figure.subplots(1, 2, width_ratios=widths))
    for axis, (pixels, frame), name in zip(axes, pictures, "AB", strict=True):
        style.show(axis, pixels, frame)
        style.small_title(axis, name)
    style.hide_frames(axes)
    return figure, axes


@rc_context(style.STYLE)
def match_lines(
    image0: ImageLike,
    image1: ImageLike,
    matches: Matches,
    *,
    right: Tensor | None = None,
    label: str = "Matched points.",
) -> Figure:
    """Lines from points of image 0 to their matches, told apart by colour, the best on top.

    Matches that are more likely wrong than right are thin and dark, and so are all of photos that
    seem to have nothing in common. right: (N,) bool, where the truth is known: green and orange.
    """
    figure, (axis0, axis1) = _side_by_side(image0, image1, label, beside=0.0)
    if not len(matches):
        figure.suptitle("no matches")
        return figure
    unrelated = right is None and match_page.is_unrelated(matches)
    if unrelated:
        figure.suptitle("these two photos seem to have nothing in common", fontsize=10)
    order, _ = match_page.ranked(matches)
    points0, points1 = matches.points0.cpu().tolist(), matches.points1.cpu().tolist()
    for rank, place in reversed(list(enumerate(order))):
        chance = 1.0 if matches.probability is None else float(matches.probability[place])
        doubtful = right is None and (unrelated or chance < match_page.DOUBTFUL)
        colour = style.INK if doubtful else match_page.line_colour(rank)
        if right is not None:
            colour = _RIGHT if bool(right[place]) else _WRONG
        look: dict[str, Any] = {"color": colour, "zorder": 3 - rank / len(order)}
        line = ConnectionPatch(
            points0[place], points1[place], "data", "data", axesA=axis0, axesB=axis1,
            linewidth=0.5 if doubtful else 1.3, alpha=0.5 if doubtful else 0.9, **look,
        )  # fmt: skip
        figure.add_artist(line)
        for axis, point in ((axis0, points0[place]), (axis1, points1[place])):
            size = 8 if doubtful else 24
            x, y = point
            axis.scatter(x, y, s=size, edgecolors="white", linewidths=0.7, **look)
    return figure


@rc_context(style.STYLE)
def region_matches(
    image0: ImageLike,
    image1: ImageLike,
    matches: RegionMatches,
    *,
    top: int = 8,
    overlap: float = 0.3,
) -> Figure:
    """The best-scored region matches: a number and a colour for the two boxes of each.

    overlap: a match is left out where one of its boxes has a larger IoU than this with that of a
    better match, as the best of a thousand regions are mostly one region; 1 leaves none out.
    """
    chosen = _apart(matches, top, overlap=overlap)
    figure, axes = _side_by_side(
        image0, image1, "Region matches, numbered from the best; a number and its colour mark one "
        f"match. None has a box of a larger IoU than {overlap:g} with a better one's.", beside=1.0,
    )  # fmt: skip
    if not chosen:
        figure.suptitle("no matches")
        return figure
    for axis, boxes in zip(axes, (matches.boxes0, matches.boxes1), strict=True):
        _numbered_boxes(axis, boxes[chosen].tolist())
    marks = [
        Line2D([], [], color=style.colour_of(place), linewidth=4, solid_capstyle="butt",
               label=f"{place + 1}   {float(matches.score[row]):.2f}")
        for place, row in enumerate(chosen)
    ]  # fmt: skip
    figure.legend(
        handles=marks, title="score", loc="outside right upper", handlelength=1.2, labelspacing=0.7,
        alignment="left",
    )  # fmt: skip
    return figure


def _apart(matches: RegionMatches, top: int, *, overlap: float) -> list[int]:
    """Rows of the best matches whose boxes repeat no better one's, best first."""
    boxes0, boxes1 = matches.boxes0.cpu(), matches.boxes1.cpu()
    chosen: list[int] = []
    for row in matches.score.argsort(descending=True).tolist():
        if len(chosen) == top:
            break
        shared = (box_iou(boxes[[row]], boxes[chosen]) for boxes in (boxes0, boxes1))
        if not any(bool((iou > overlap).any()) for iou in shared):
            chosen.append(row)
    return chosen


def _numbered_boxes(axis: Axes, boxes: list[list[float]]) -> None:
    """Inclusive boxes, the first on top, each with its number on a corner."""
    corners = _free_corners(boxes, width=axis.get_xlim()[1], height=axis.get_ylim()[0])
    for place, box in reversed(list(enumerate(boxes))):
        style.outline(axis, box, style.colour_of(place))
    for place, corner in enumerate(corners):
        axis.text(
            *corner, str(place + 1), ha="center", va="center", fontsize=8.5,
            fontweight="bold", zorder=3,
            bbox={"boxstyle": "circle,pad=0.2", "facecolor": "white", "linewidth": 1.6,
                  "edgecolor": style.colour_of(place)},
        )  # fmt: skip


def _free_corners(
    boxes: list[list[float]], *, width: float, height: float
) -> list[tuple[float, float]]:
    """A corner of each box, inside the photo; away from those of the boxes before, if one is."""
    margin = 0.03 * max(width, height)
    taken: list[tuple[float, float]] = []
    for x1, y1, x2, y2 in boxes:
        corners = [
            (min(max(x, margin), width - margin), min(max(y, margin), height - margin))
            for x, y in ((x1, y1), (x2, y1), (x2, y2), (x1, y2))
        ]
        free = [place for place in corners if all(dist(place, old) > 2 * margin for old in taken)]
        taken.append((free or corners)[0])
    return taken


@rc_context(style.STYLE)
def warped(
    image0: ImageLike, image1: ImageLike, back: DenseMatches, *, sure: Tensor | None = None
) -> Figure:
    """Photo A warped onto photo B, beside both; `back` = match_dense(features1, features0).

    sure: (H1, W1) bool, the pixels of B that are shown; by default all.
    """
    first, second = load(image0).cpu(), load(image1).cpu()
    moved = warp_image(first, back.points1.cpu())
    half = (second.float() * 0.5 + moved.float() * 0.5).to(second.dtype)
    label = "Photo B; the pixels of photo A moved to where B has their match; and both blended."
    if sure is not None:
        blank = torch.full_like(second, _BLANK)
        moved = torch.where(sure.cpu(), moved, blank)
        half = torch.where(sure.cpu(), half, (second.float() * 0.3 + 0.7 * blank).byte())
        label += f" Only the {100 * sure.float().mean():.0f} % of B {_SURE}; the rest is blank."
    height, width = second.shape[1:]
    figure = style.new_figure(style.WIDTH / 3 * height / width + 0.4, label)
    axes, frame = figure.subplots(1, 3), Frame((height, width), (height, width))
    titles = {"B": second, "A warped onto B": moved, "both": half}
    for axis, (name, pixels) in zip(axes, titles.items(), strict=True):
        style.show(axis, pixels, frame)
        style.small_title(axis, name)
    style.hide_frames(axes)
    return figure


def match_photos(
    image0: Path,
    image1: Path,
    *,
    out: Path,
    points: Any = None,
    count: int = 60,
    regions: int = 0,
    mutual: bool = True,
    voting: bool | Voting = True,
    model: str | None = None,
    side: int | None = None,
    slower: bool = False,
    tiles: bool = False,
    device: str | None = None,
) -> tuple[Matches, Path]:
    """Match photo A to photo B: OUT/matches.png, OUT/matches.json and the page OUT/index.html.

    Everything is computed before anything is written. Given points are all kept; `mutual` filters
    those that were chosen. side, slower: how the photos are seen, as of DenseFeatures.extract.
    tiles: large photos are searched for the parts to match (match.large), and the page shows those.
    """
    if regions < 0:
        raise ValueError(f"--regions is {regions}; use 0, for none, or more")
    network = DenseFeatures.from_pretrained(model, device=device)
    whole = (load(image0), load(image1))
    photos, parts, points = _parts(network, whole, points, tiles=tiles)
    features0, features1 = network.extract(photos, longest_side=side, slower=slower)
    matches = match_points(
        features0, features1, points, count=count, voting=voting, mutual=mutual and points is None
    )
    seen0, seen1 = style.shown_photo(photos[0], features0), style.shown_photo(photos[1], features1)
    named = [replace(features0, name="A"), replace(features1, name="B")]
    sections = [
        _every_pixel(seen0, seen1, matches, voting=voting),
        Section("Confidence", figures=(confidence_map(named, photos),)),
    ]
    moved = moved_back(matches, parts, whole)
    values = {"image0": image0.name, "image1": image1.name, **moved.to_dict()}
    values |= {"part0": parts[0], "part1": parts[1]} if tiles else {}
    if regions:
        boxes = [propose(photo, ProposalConfig(count=regions)) for photo in photos]
        best = match_regions(features0, features1, *boxes, lower_weight=REGION_WEIGHTS[1])
        figures = (region_matches(*photos, best), _through_regions(seen0, seen1, *boxes))
        sections.insert(0, Section("Regions", _REGIONS, figures=figures))
        columns = ("boxes0", "boxes1", "score")
        values["regions"] = {name: getattr(best, name).tolist() for name in columns}
    seen = _seen(side or network.config.longest_side, slower=slower)
    sections.append(_settings(network, model, matches, seen=seen, voting=voting, mutual=mutual))
    names = (image0.name, image1.name)
    lines = matches if points is not None else match_page.foreground(matches)
    drawn = style.drawn(match_lines(*photos, lines), dpi=150)
    # The page draws its figures first, so that what fails there leaves nothing behind.
    page = write_page(
        out / "index.html", " and ".join(names), sections, foot=_FOOT,
        viewer=match_page.viewer(photos, names, matches, all_shown=points is not None),
    )  # fmt: skip
    write_bytes(out / "matches.png", drawn.getvalue())
    write_text(out / "matches.json", as_json(values) + "\n")
    return moved, page


def _parts(
    network: DenseFeatures, photos: tuple[Tensor, Tensor], points: Any, *, tiles: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Part, Part], Any]:
    """What is matched of two photos: pixels, boxes, and the points of the first in its part."""
    if not tiles:
        whole0, whole1 = ((0, 0, photo.shape[2] - 1, photo.shape[1] - 1) for photo in photos)
        return photos, (whole0, whole1), points
    given = None if points is None else stack_points(points)
    if given is not None:
        check_inside(given, (photos[0].shape[1], photos[0].shape[2]))
    parts = best_parts(network, *photos, given)
    cut0, cut1 = (cut_part(*both) for both in zip(photos, parts, strict=True))
    return (cut0, cut1), parts, None if given is None else given - given.new_tensor(parts[0][:2])


def _every_pixel(
    seen0: style.ShownPhoto, seen1: style.ShownPhoto, matches: Matches, *, voting: bool | Voting
) -> Section:
    """Photo A moved onto B, where every pixel's match can be relied on."""
    if match_page.is_unrelated(matches):
        return Section("Every pixel", "Not drawn: the photos seem to have nothing in common.")
    back = match_dense(seen1.features, seen0.features, voting=voting)
    there = match_dense(seen0.features, seen1.features, voting=voting)
    height, width = back.points1.shape[:2]
    places = cell_centres(size=(height, width), stride=1.0).reshape(height, width, 2)
    returned = warp_image(there.points1.permute(2, 0, 1), back.points1).permute(1, 2, 0)
    apart = (returned.cpu() - places).norm(dim=-1)
    sure = apart <= _RETURNS * max(height, width)
    return Section("Every pixel", figures=(warped(seen0.pixels, seen1.pixels, back, sure=sure),))


def _seen(side: int, *, slower: bool) -> str:
    """How the network saw the photos."""
    sides = slower_sides(side) if slower else (side,)
    return f"{' and '.join(map(str, sides))} px{', mirrored too' if slower else ''}"


def _settings(
    network: DenseFeatures,
    model: str | None,
    matches: Matches,
    *,
    seen: str,
    voting: bool | Voting,
    mutual: bool,
) -> Section:
    """With what the page was made, so that it can be made again."""
    name = (
        f"{model or SHIPPED[0]}{'' if model not in (None, *SHIPPED) else ', ships with surefeat'}"
    )
    votes = "neighbours vote" if voting else "nearest neighbour, no votes"
    (h0, w0), (h1, w1) = matches.size0, matches.size1
    rows = [
        ("Model", name),
        ("Weights (sha256)", network.weights_hash()[:16]),
        ("Network", f"{network.config.trunk}, matched with {' and '.join(network.lower)}"),
        ("Longest side it saw", seen),
        ("Matching", votes),
        ("Chosen points that do not lead back", "left out" if mutual else "kept"),
        ("Photo A, photo B", f"{w0} x {h0}, {w1} x {h1} px"),
        ("surefeat", __version__),
    ]
    return Section("Model and settings", table=[("What", "Value"), *rows])


def _through_regions(
    seen0: style.ShownPhoto, seen1: style.ShownPhoto, boxes0: Tensor, boxes1: Tensor
) -> Figure:
    """Photo A moved onto B by the best regions of A for those of B; boxes in original pixels."""
    boxes0, boxes1 = _shown_boxes(seen0, boxes0), _shown_boxes(seen1, boxes1)
    regions = match_regions(
        seen1.features, seen0.features, boxes1, boxes0, lower_weight=REGION_WEIGHTS[1]
    )
    flow = match_dense_by_regions(seen1.features, seen0.features, seen1.pixels, regions)
    return warped(seen0.pixels, seen1.pixels, flow)


def _shown_boxes(seen: style.ShownPhoto, boxes: Tensor) -> Tensor:
    """In shown pixels; a box that comes out narrower than one of them keeps its middle."""
    boxes = seen.frame.boxes_to_network(boxes)
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    return torch.cat([boxes[:, :2].minimum(middle), boxes[:, 2:].maximum(middle)], dim=1)

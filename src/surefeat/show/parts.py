"""What `surefeat find` writes: a page, a sheet and crops of a part in other photos."""

from __future__ import annotations

from pathlib import Path, PurePath

from torch import Tensor

from surefeat.core.files import file_stem
from surefeat.core.image import ImageLike, load, write_png
from surefeat.index.find import PartHit, PartSearch
from surefeat.show import style
from surefeat.show.page import Section, write_page

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("needs matplotlib: pip install 'surefeat[viz]'") from error

CROP = 0.5
"""Longer side of a crop, in longer sides of what was looked at."""

_COLUMNS = 5

_FOOT = "Written by surefeat; find.json beside this page has the hits, in original pixels."


def crop_box(point: tuple[float, float], seen: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The square around a point that a crop shows, inclusive, cut to what was looked at."""
    x1, y1, x2, y2 = seen
    reach = max(8, round(CROP * max(x2 - x1 + 1, y2 - y1 + 1) / 2))
    x, y = (round(value) for value in point)
    left, top = max(x1, x - reach), max(y1, y - reach)
    # A point may lie on the photo's outer edge, half a pixel beyond the last one's centre.
    return (min(left, x2), min(top, y2), max(x1, min(x2, x + reach)), max(y1, min(y2, y + reach)))


def cut_crop(photo: Tensor, hit: PartHit) -> Tensor:
    """The pixels around a hit: (3, H, W) -> (3, h, w)."""
    x1, y1, x2, y2 = crop_box(hit.point, hit.seen)
    return photo[:, y1 : y2 + 1, x1 : x2 + 1]


@rc_context(style.STYLE)
def part_sheet(image: ImageLike, result: PartSearch) -> Figure:
    """The part that was asked for, and every hit around its place, the surest first."""
    hits = [hit for hit in result.hits if hit.photo in result.pictures]
    sure = sum((hit.probability or 0.0) > 0.5 for hit in hits)
    fitted = any(hit.probability is not None for hit in hits)
    label = f"The part (first picture) in {len(hits)} of {result.photos:,} photos, the surest first"
    label += f"; {sure} of them probably right." if fitted else "."
    figure, grid = style.sheet(1 + len(hits), _COLUMNS, row=2.1, top=0.3, label=label)
    pixels = load(image)
    whole = (0, 0, pixels.shape[2] - 1, pixels.shape[1] - 1)
    _draw_place(grid[0, 0], pixels, result.point, whole, "asked for", style.PALETTE[1])
    for axes, hit in zip(list(grid.flat)[1:], hits, strict=False):
        _draw_place(axes, result.pictures[hit.photo], hit.point, hit.seen, _said(hit),
                    _colour(hit))  # fmt: skip
    return figure


def _said(hit: PartHit) -> str:
    sure = f"score {hit.score:.2f}" if hit.probability is None else f"{hit.probability:.0%}"
    return f"{sure} {PurePath(hit.photo).name}"


def _colour(hit: PartHit) -> str:
    if hit.probability is None:
        return style.PALETTE[0]
    return style.PALETTE[2] if hit.probability > 0.5 else style.GREY


def _draw_place(
    axes: Axes,
    photo: Tensor,
    point: tuple[float, float],
    seen: tuple[int, int, int, int],
    title: str,
    colour: str,
) -> None:
    """What was looked at, in original pixels, and the place."""
    x1, y1, x2, y2 = seen
    pixels, frame = style.picture(photo[:, y1 : y2 + 1, x1 : x2 + 1], longest=256)
    style.show(axes, pixels, frame)
    x, y = point[0] - x1, point[1] - y1
    for size, tint, line in ((90, "white", 3.2), (90, colour, 1.8)):
        axes.scatter([x], [y], s=size, facecolors="none", edgecolors=tint, linewidths=line)
    style.small_title(axes, title)


def write_parts(image: ImageLike, result: PartSearch, out: Path) -> Path:
    """OUT/index.html, sheet.png and crops/01-NAME.png ...; the page."""
    figure = part_sheet(image, result)
    rows = [
        (number, PurePath(hit.photo).name, f"{hit.point[0]:.0f}, {hit.point[1]:.0f}",
         "" if hit.probability is None else f"{hit.probability:.2f}",
         "" if hit.returns is None else "yes" if hit.returns else "no", f"{hit.score:.3f}")
        for number, hit in enumerate(result.hits, start=1)
    ]  # fmt: skip
    heading = ("", "Photo", "x, y", "Probability", "Leads back", "Score")
    sections = [
        Section("Hits", figures=(figure,)),
        Section("All hits", table=[heading, *rows], folded=True),
    ]
    if result.missing:
        gone = [(entry.name, entry.reason) for entry in result.missing]
        sections.append(Section("Photos that cannot be read", table=[("Photo", "Why"), *gone]))
    title = f"One part of {PurePath(result.photo).name or 'a photo'}"
    how = "all of them compared" if result.search == "exact" else "searched with faiss"
    lead = f"{len(result.hits)} of {result.photos:,} photos; {result.cells:,} cells, {how}."
    # The page draws its figures first, so that what fails there leaves nothing behind.
    page = write_page(out / "index.html", title, sections, lead=lead, foot=_FOOT)
    style.write_figure(figure, out / "sheet.png")
    wanted = set()
    for number, hit in enumerate(result.hits, start=1):
        if hit.photo in result.pictures:
            name = f"{number:02d}-{file_stem(PurePath(hit.photo).stem)[:80]}.png"
            wanted.add(name)
            write_png(out / "crops" / name, cut_crop(result.pictures[hit.photo], hit))
    for old in (out / "crops").glob("[0-9][0-9]*-*.png"):  # of another question
        if old.name not in wanted:
            old.unlink()
    return page

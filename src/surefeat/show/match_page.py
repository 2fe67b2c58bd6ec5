"""What the page of `surefeat match A B` shows first: both photos, their matches, the verdict.

The page is one file with a script of its own and no network; its policy allows that script alone,
so that nothing in a file's name could ever run.
"""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from math import ceil, floor
from typing import Any

from PIL import Image
from torch import Tensor

from surefeat.core.image import ImageLike
from surefeat.match.points import Matches
from surefeat.show.style import picture

LONGEST = 960
"""Longest side of a photo on the page, pixels."""

SHOWN_FIRST = 24
"""Matches that are shown until the slider is moved: more lines than that hide each other."""

DOUBTFUL = 0.5
"""Matches that are less probable than this are drawn thin and dark, and photos that are less
probably of one kind are said to have nothing in common."""

BACKGROUND = 0.2
"""Chosen matches that are less probable than this are not drawn until the slider asks for them:
most are places of the background, which has no counterpart."""

_HINT = (
    "Point at a mark, or tap it, to see its partner. Coloured lines are matches, thin dark ones "
    "are more likely wrong than right, dashed ones do not lead back to where they came from."
)

_HINT_BY_SCORE = (
    "Point at a mark, or tap it, to see its partner. Dashed lines do not lead back to where they "
    "came from. This model at this size gives no probability; a high score alone promises nothing."
)


_HINT_UNRELATED = (
    "Point at a mark, or tap it, to see what was matched with it. The probabilities are of photos "
    "that show the same kind of thing, which these do not seem to."
)


@dataclass(frozen=True)
class Viewer:
    """What match.html.j2 shows above a page's sections."""

    verdict: str
    """In words, for somebody who reads nothing else."""
    warns: bool
    """The photos seem to have nothing in common: no line is drawn unless it is asked for."""
    photos: tuple[dict[str, Any], ...]
    marks: list[dict[str, Any]]
    """One per match, the best first: its places as shares of both photos, and what is said."""
    rows: list[list[object]]
    heading: list[str]
    slider: str
    unit: str
    low: float
    high: float
    step: float
    start: float
    hint: str
    order: str
    script: str
    script_hash: str


def viewer(
    photos: Sequence[ImageLike], names: Sequence[str], matches: Matches, *, all_shown: bool = False
) -> Viewer:
    """Two photos and their matches, ready for the page: the best are shown first, or all."""
    order, values = ranked(matches)
    by_score = matches.probability is None
    warns = is_unrelated(matches)
    shown = [value if by_score else 100 * value for value in values]
    table = [_row(matches, place, number) for number, place in enumerate(order, 1)]
    marks = [
        _mark(matches, place, rank, value, warns=warns)
        for rank, (place, value) in enumerate(zip(order, shown, strict=True))
    ]
    script = files("surefeat.show").joinpath("templates", "match.js").read_text("utf-8")
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    low = floor(100 * min(shown, default=0.0)) / 100 if by_score else 0
    high = ceil(100 * max(shown, default=1.0)) / 100 if by_score else 100
    limit = len(shown) if all_shown else SHOWN_FIRST
    start = low if len(shown) <= limit else sorted(shown)[-limit]
    if not (by_score or warns or all_shown):
        start = max(start, min(100 * BACKGROUND, max(shown, default=0.0)))
    return Viewer(
        verdict=verdict(matches), warns=warns, marks=marks, rows=table,
        photos=tuple(_photo(photo, name) for photo, name in zip(photos, names, strict=True)),
        heading=["", "in A", "in B", *([] if by_score else ["right with"]), "score", "confidence",
                 "leads back"],
        slider="Matches with a score of at least" if by_score else "Matches right with at least",
        unit="" if by_score else "%", low=low, high=high, step=0.01 if by_score else 1,
        start=floor(100 * start) / 100 if by_score else floor(start),
        hint=_HINT_UNRELATED if warns else _HINT_BY_SCORE if by_score else _HINT,
        order="most confident" if by_score else "most probable",
        script=script, script_hash=f"sha256-{digest}",
    )  # fmt: skip


def is_unrelated(matches: Matches) -> bool:
    """Whether the photos seem to have nothing in common."""
    return matches.related is not None and matches.related < DOUBTFUL


def ranked(matches: Matches) -> tuple[list[int], list[float]]:
    """Matches by falling probability, else confidence; and their probabilities, else scores."""
    by = matches.confidence if matches.probability is None else matches.probability
    values = matches.score if matches.probability is None else matches.probability
    order = by.cpu().argsort(descending=True, stable=True).tolist()
    return order, values.cpu()[order].tolist()


def foreground(matches: Matches) -> Matches:
    """The matches that are drawn at first; all, where none is better or nothing is in common."""
    if matches.probability is None or is_unrelated(matches):
        return matches
    kept = matches.filter(probability=BACKGROUND)
    return kept if len(kept) else matches


def verdict(matches: Matches) -> str:
    """What to make of the matches, in one or two sentences."""
    chance, count = matches.related, len(matches)
    how = ", fitted without labels" if matches.without_labels else ""
    if is_unrelated(matches):
        return (
            "These two photos seem to have nothing in common (probability that they show the same "
            f"kind of thing: {percent(chance)}{how}). What was matched is not to be trusted; tick "
            "“lines” to see it all the same."
        )
    start = f"Both seem to show the same kind of thing ({percent(chance)}{how}). "
    start = "" if chance is None else start
    points = "1 point" if count == 1 else f"{count} points"
    if not count:
        return start + "No point of A was found in B."
    if matches.probability is None:
        return f"{start}{points} of A found in B."
    right = int((matches.probability >= DOUBTFUL).sum())
    return f"{start}{points} of A found in B, {right} of them more likely right than wrong."


def percent(chance: float | Tensor | None) -> str:
    """A probability in words; nothing is promised entirely."""
    whole = round(100 * float(chance or 0.0))
    return "over 99 %" if whole > 99 else "under 1 %" if whole < 1 else f"{whole} %"


def line_colour(rank: int) -> str:
    """Of the match with this rank: neighbours in rank lie far apart on the colour circle."""
    red, green, blue = colorsys.hls_to_rgb((0.58 + 0.381966 * rank) % 1, 0.52, 0.85)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def _photo(image: ImageLike, name: str) -> dict[str, Any]:
    """As an `img` wants it: the photo in JPEG, at the page's size."""
    pixels, _ = picture(image, longest=LONGEST, enlarged=True)
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, format="jpeg", quality=86)
    height, width = pixels.shape[1:]
    address = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    # Bounded, or a strip of a photo would leave no room for the other one.
    aspect = min(max(width / height, 0.25), 4.0)
    return {"src": address, "width": width, "height": height, "name": name, "aspect": aspect}


def _mark(matches: Matches, place: int, rank: int, value: float, *, warns: bool) -> dict[str, Any]:
    ends = ((matches.points0, matches.size0), (matches.points1, matches.size1))
    doubtful = warns or (matches.probability is not None and value < 100 * DOUBTFUL)
    return {
        "places": [_share(points[place], size) for points, size in ends],
        "value": round(value, 4),
        "colour": "#101820" if doubtful else line_colour(rank),
        "doubtful": doubtful,
        "back": bool(matches.mutual[place]),
        "says": _sentence(matches, place),
    }


def _share(point: Tensor, size: tuple[int, int]) -> list[float]:
    """Original pixels (2,) -> shares of width and height, between the photo's outer edges."""
    (x, y), (height, width) = point.tolist(), size
    return [round((x + 0.5) / width, 5), round((y + 0.5) / height, 5)]


def _sentence(matches: Matches, place: int) -> str:
    (x0, y0), (x1, y1) = matches.points0[place].tolist(), matches.points1[place].tolist()
    chance = matches.probability
    sure = "" if chance is None else f"right with {percent(chance[place])}, "
    back = "leads back" if matches.mutual[place] else "does not lead back"
    return (
        f"A ({x0:.0f}, {y0:.0f}) is B ({x1:.0f}, {y1:.0f}): {sure}score "
        f"{matches.score[place]:.2f}, confidence {matches.confidence[place]:.2f}, {back}."
    )


def _row(matches: Matches, place: int, number: int) -> list[object]:
    points = [matches.points0[place].tolist(), matches.points1[place].tolist()]
    chance = matches.probability
    return [
        number,
        *(f"{x:.0f}, {y:.0f}" for x, y in points),
        *([] if chance is None else [percent(chance[place])]),
        f"{matches.score[place]:.2f}",
        f"{matches.confidence[place]:.2f}",
        "yes" if matches.mutual[place] else "no",
    ]

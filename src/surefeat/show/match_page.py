"""`surefeat match A B`: matches of two photos as a picture, a page and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefeat.core.files import write_bytes, write_text
from surefeat.core.image import load
from surefeat.match.config import ProposalConfig
from surefeat.match.dense import match_dense, match_dense_by_regions
from surefeat.match.points import Matches, match_points
from surefeat.match.proposals import propose
from surefeat.match.regions import RegionMatches, match_regions
from surefeat.match.search import Voting
from surefeat.model.config import REGION_WEIGHTS
from surefeat.model.features import extract_scales
from surefeat.model.network import DenseFeatures
from surefeat.show.features import confidence_map
from surefeat.show.matches import match_lines, region_matches, warped
from surefeat.show.page import Section, write_page
from surefeat.show.style import ShownPhoto, shown_photo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REGIONS = (
    "The best of the proposed regions, and every pixel moved with its region and smoothed along "
    "the photo's edges: the paper's route, without agreement between neighbours."
)


@dataclass(frozen=True)
class MatchedPhotos:
    """What was found and where it was written."""

    matches: Matches
    regions: RegionMatches | None
    picture: Path
    page: Path
    values: Path
    """JSON."""


def match_photos(
    image0: str | Path,
    image1: str | Path,
    *,
    out: str | Path,
    points: Any = None,
    count: int = 60,
    regions: int = 0,
    mutual: bool = True,
    voting: bool | Voting = True,
    model: str | Path | DenseFeatures | None = None,
    sides: Sequence[int] = (),
    device: str | None = None,
) -> MatchedPhotos:
    """Match photo A to photo B and write OUT/matches.png, OUT/matches.json and OUT/index.html.

    Everything is computed before anything is written. Given points are all kept; `mutual` filters
    those that were chosen. sides: longest sides at which the photos are seen, network pixels.
    """
    if not isinstance(model, DenseFeatures):
        model = DenseFeatures.from_pretrained(model, device=device)
    photo0, photo1 = load(image0), load(image1)
    sides = sides or (model.config.longest_side,)
    features0, features1 = extract_scales(model, [photo0, photo1], sides)
    matches = match_points(
        features0, features1, points, count=count, voting=voting, mutual=mutual and points is None
    )
    seen0, seen1 = shown_photo(photo0, features0), shown_photo(photo1, features1)
    back = match_dense(seen1.features, seen0.features, voting=voting)
    lines = match_lines(photo0, photo1, matches)
    maps = confidence_map([features0, features1], [photo0, photo1])
    sections = [
        Section("Points", text=_points_text(matches), figures=(lines,)),
        Section("Every pixel", figures=(warped(seen0.pixels, seen1.pixels, back),)),
        Section("Confidence", figures=(maps,)),
    ]
    matched: RegionMatches | None = None
    if regions:
        boxes = [propose(photo, ProposalConfig(count=regions)) for photo in (photo0, photo1)]
        matched = match_regions(features0, features1, *boxes, lower_weight=REGION_WEIGHTS[1])
        moved = _through_regions(seen0, seen1, *boxes)
        figures = (region_matches(photo0, photo1, matched), moved)
        sections.insert(1, Section("Regions", text=_REGIONS, figures=figures))
    return _write(Path(out), (Path(image0).name, Path(image1).name), matches, matched, sections)


def _through_regions(
    seen0: ShownPhoto, seen1: ShownPhoto, boxes0: Tensor, boxes1: Tensor
) -> Figure:
    """Photo A moved onto B by the best regions of A for those of B; boxes in original pixels."""
    boxes0, boxes1 = seen0.frame.boxes_to_network(boxes0), seen1.frame.boxes_to_network(boxes1)
    # A box of a few pixels may come out narrower than one: it keeps its middle.
    boxes0, boxes1 = (_at_least_one_pixel(boxes) for boxes in (boxes0, boxes1))
    regions = match_regions(
        seen1.features, seen0.features, boxes1, boxes0, lower_weight=REGION_WEIGHTS[1]
    )
    flow = match_dense_by_regions(seen1.features, seen0.features, seen1.pixels, regions)
    return warped(seen0.pixels, seen1.pixels, flow)


def _at_least_one_pixel(boxes: Tensor) -> Tensor:
    """Inclusive boxes (N, 4), which may be narrower than a pixel -> none that is inverted."""
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    return torch.cat([boxes[:, :2].minimum(middle), boxes[:, 2:].maximum(middle)], dim=1)


def _points_text(matches: Matches) -> str:
    return f"{len(matches)} matches in original pixels; matches.json beside this page has them."


def _write(
    out: Path,
    names: tuple[str, str],
    matches: Matches,
    regions: RegionMatches | None,
    sections: list[Section],
) -> MatchedPhotos:
    drawn = BytesIO()
    sections[0].figures[0].savefig(drawn, format="png", dpi=150)
    values: dict[str, Any] = {"image0": names[0], "image1": names[1], **matches.to_dict()}
    if regions is not None:
        parts = ("boxes0", "boxes1", "score")
        values["regions"] = {part: getattr(regions, part).tolist() for part in parts}
    text = json.dumps(values, allow_nan=False) + "\n"
    # The page draws its figures first, so that what fails there leaves nothing behind.
    page = write_page(out / "index.html", f"{names[0]} and {names[1]}", sections)
    write_bytes(out / "matches.png", drawn.getvalue())
    write_text(out / "matches.json", text)
    return MatchedPhotos(matches, regions, out / "matches.png", page, out / "matches.json")

"""`surefeat match A B`: matches of two photos as a picture, a page and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from surefeat import viz
from surefeat.dense import match_dense, match_dense_by_regions
from surefeat.image import load
from surefeat.match import Matches, match_points
from surefeat.model import DenseFeatures
from surefeat.page import Section, write_page
from surefeat.proposals import propose
from surefeat.regions import RegionMatches, match_regions
from surefeat.runs import write_bytes, write_text


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
    voting: bool = True,
    model: str | Path | DenseFeatures | None = None,
    longest_side: int | None = None,
    device: str | None = None,
) -> MatchedPhotos:
    """Match photo A to photo B and write OUT/matches.png, OUT/matches.json and OUT/index.html.

    Everything is computed before anything is written. Given points are all kept; `mutual` filters
    those that were chosen.
    """
    if not isinstance(model, DenseFeatures):
        model = DenseFeatures.from_pretrained(model, device=device)
    photo0, photo1 = load(image0), load(image1)
    features0, features1 = model.extract([photo0, photo1], longest_side=longest_side)
    matches = match_points(
        features0, features1, points, count=count, voting=voting, mutual=mutual and points is None
    )
    back = match_dense(features1, features0, voting=voting)
    lines = viz.match_lines(photo0, photo1, matches)
    maps = viz.confidence_map([features0, features1], [photo0, photo1])
    sections = [
        Section("Points", text=_points_text(matches), figures=(lines,)),
        Section("Every pixel", figures=(viz.warped(photo0, photo1, back),)),
        Section("Confidence", figures=(maps,)),
    ]
    found = None
    if regions:
        boxes0, boxes1 = propose(photo0, count=regions), propose(photo1, count=regions)
        found = match_regions(features0, features1, boxes0, boxes1)
        flow = match_dense_by_regions(
            features1, features0, photo1, match_regions(features1, features0, boxes1, boxes0)
        )
        figures = (viz.region_matches(photo0, photo1, found), viz.warped(photo0, photo1, flow))
        sections.insert(1, Section("Regions", text=_REGIONS, figures=figures))
    return _write(Path(out), (Path(image0).name, Path(image1).name), matches, found, sections)


def _points_text(matches: Matches) -> str:
    return f"{len(matches)} matches in original pixels; matches.json beside this page has them."


def _write(
    out: Path,
    names: tuple[str, str],
    matches: Matches,
    regions: RegionMatches | None,
    sections: list[Section],
) -> MatchedPhotos:
    picture = BytesIO()
    sections[0].figures[0].savefig(picture, format="png", dpi=150)
    values: dict[str, Any] = {"image0": names[0], "image1": names[1], **matches.to_dict()}
    if regions is not None:
        parts = ("boxes0", "boxes1", "score")
        values["regions"] = {part: getattr(regions, part).tolist() for part in parts}
    write_bytes(out / "matches.png", picture.getvalue())
    write_text(out / "matches.json", json.dumps(values, allow_nan=False) + "\n")
    page = write_page(out / "index.html", f"{names[0]} and {names[1]}", sections)
    return MatchedPhotos(matches, regions, out / "matches.png", page, out / "matches.json")

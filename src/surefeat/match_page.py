"""`surefeat match A B`: matches of two photos as a picture, a page and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefeat import viz
from surefeat.dense import match_dense
from surefeat.image import load
from surefeat.match import Matches, match_points
from surefeat.model import DenseFeatures
from surefeat.page import Section, write_page
from surefeat.regions import RegionMatches, match_regions
from surefeat.runs import write_bytes, write_text


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
    photos = [load(image) for image in (image0, image1)]
    features = model.extract(photos, longest_side=longest_side)
    matches = match_points(
        *features, points, count=count, voting=voting, mutual=mutual and points is None
    )
    back = match_dense(features[1], features[0], voting=voting)
    boxes = _regions(features, photos, regions) if regions else None
    lines = viz.match_lines(*photos, matches)
    sections = [
        Section("Points", text=_points_text(matches), figures=(lines,)),
        Section("Every pixel", figures=(viz.warped(*photos, back),)),
        Section("Confidence", figures=(viz.confidence_map(features, photos),)),
    ]
    if boxes is not None:
        sections.insert(1, Section("Regions", figures=(viz.region_matches(*photos, boxes),)))
    return _write(Path(out), (Path(image0).name, Path(image1).name), matches, boxes, lines, sections)


def _regions(features: list[Any], photos: list[Any], count: int) -> RegionMatches:
    from surefeat.proposals import propose

    boxes0, boxes1 = (propose(photo, count=count) for photo in photos)
    return match_regions(*features, boxes0, boxes1)


def _points_text(matches: Matches) -> str:
    return f"{len(matches)} matches, in original pixels; matches.json beside this page has them all."


def _write(
    out: Path, names: tuple[str, str], matches: Matches, boxes: RegionMatches | None, lines: Any,
    sections: list[Section],
) -> MatchedPhotos:  # fmt: skip
    from io import BytesIO

    picture = BytesIO()
    lines.savefig(picture, format="png", dpi=150)
    values: dict[str, Any] = {"image0": names[0], "image1": names[1], **matches.to_dict()}
    if boxes is not None:
        values["regions"] = {
            "boxes0": boxes.boxes0.tolist(),
            "boxes1": boxes.boxes1.tolist(),
            "score": boxes.score.tolist(),
        }
    write_bytes(out / "matches.png", picture.getvalue())
    write_text(out / "matches.json", json.dumps(values, allow_nan=False) + "\n")
    page = write_page(out / "index.html", f"{names[0]} and {names[1]}", sections)
    return MatchedPhotos(matches, boxes, out / "matches.png", page, out / "matches.json")

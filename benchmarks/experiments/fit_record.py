"""What a shipped probability says of two made-up pictures, on record beside the fit's hash.

    python benchmarks/experiments/fit_record.py

writes fits.json, for fits that were stored at this very state of matching. A test compares it with
what matching gives now: a probability holds only for the signs it was fitted on (their order,
logarithms and floors, the votes, the peak's radius), so whoever changes one of these fits anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from surefeat.core.files import file_hash, write_json
from surefeat.core.geometry import Frame
from surefeat.match.points import match_points
from surefeat.model.config import SHIPPED, model_folder, read_settings
from surefeat.model.features import Features, compare_with
from surefeat.model.probability import FILE, Cohort, Reliability

FITS = Path(__file__).resolve().parent / "fits.json"
"""Hash of a shipped fit's file -> what it says of the two pictures."""

FITTED = [name for name in SHIPPED if (model_folder(name) / FILE).is_file()]


def made_up(scale: float, shift: float, channels: tuple[int, int]) -> Features:
    """Features of a picture of waves, smooth and without repetition, of another size each."""
    rows, columns = (15, 20) if scale == 1 else (18, 16)
    y, x = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64), torch.arange(columns, dtype=torch.float64),
        indexing="ij",
    )  # fmt: skip
    x, y = scale * x + shift, scale * y + 0.5 * shift
    n = torch.arange(1, sum(channels) + 1, dtype=torch.float64)[:, None, None] / 8
    waves = torch.sin(n.sqrt() * x / 3 + n * n + (2 * n).sqrt() * y / 4)
    sigma = 0.3 + 0.2 * torch.sin(x / 2) * torch.cos(y / 3)
    maps = [F.normalize(part.float(), dim=0) for part in waves.split(channels)]
    frame = Frame((10 * rows, 10 * columns), (16 * rows, 16 * columns))
    return Features(maps[0], sigma.float(), maps[1], frame, 16)


def made_with(name: str) -> dict[str, Any]:
    """What the fit of a shipped model says of two made-up pictures."""
    fitted, cohort = (kind.load(model_folder(name)) for kind in (Reliability, Cohort))
    assert isinstance(fitted, Reliability)
    assert isinstance(cohort, Cohort)
    config, _, _ = read_settings(model_folder(name))
    channels = (config.channels, cohort.lower.shape[1])
    pictures = (made_up(1, 0.0, channels), made_up(0.9, 0.7, channels))
    pair = [compare_with(cohort, picture) for picture in pictures]
    places = [[x, y] for x in (15, 65, 120, 180) for y in (12, 70, 130)]
    matches = match_points(pair[0], pair[1], places, reliability=fitted)
    assert matches.probability is not None
    return {
        "matching": fitted.matching, "right within": fitted.right_within,
        "related": round(float(matches.related or 0), 4),
        "probability": [round(p, 4) for p in matches.probability.tolist()],
        "points1": [[round(v, 1) for v in point] for point in matches.points1.tolist()],
    }  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_json(FITS, {file_hash(model_folder(name) / FILE): made_with(name) for name in FITTED})


if __name__ == "__main__":
    main()

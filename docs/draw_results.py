"""Draws the README's pictures from results/ and the shipped model: python docs/draw_results.py"""

from __future__ import annotations

import json
from pathlib import Path

from skimage import data

import surefeat
from surefeat import viz
from surefeat.viz_results import region_figure

HERE = Path(__file__).resolve().parent
ROWS = (
    "ours", "without-confidence", "contrastive", "res4d", "res4c", "vgg16", "resnet50-hc",
    "resnet50-dilated",
)  # fmt: skip


def main() -> None:
    folder = HERE.parent / "results" / "pf-pascal"
    results = [json.loads((folder / f"pf-pascal-test-{row}.json").read_text()) for row in ROWS]
    region_figure(results).savefig(HERE / "regions.png", dpi=130)
    # Photos that come with scikit-image.
    left, right, _ = data.stereo_motorcycle()
    photos = [left, data.coffee(), data.chelsea()]
    *features, other = surefeat.DenseFeatures.from_pretrained().extract([*photos, right])
    viz.confidence_map(features, photos).savefig(HERE / "confidence.png", dpi=110)
    matches = surefeat.match_points(features[0], other, count=60, mutual=True)
    viz.match_lines(left, right, matches).savefig(HERE / "match.png", dpi=100)


if __name__ == "__main__":
    main()

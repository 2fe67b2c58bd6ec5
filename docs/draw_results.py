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
    photos = [data.stereo_motorcycle()[0], data.coffee(), data.chelsea()]
    features = surefeat.DenseFeatures.from_pretrained().extract(photos)
    viz.confidence_map(features, photos).savefig(HERE / "confidence.png", dpi=110)


if __name__ == "__main__":
    main()

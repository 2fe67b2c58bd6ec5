"""Draws the README's pictures from results/ and the shipped model: python docs/draw_results.py"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image
from skimage import data
from torch import Tensor

import surefeat
from surefeat.core.geometry import box_area
from surefeat.match.proposals import propose
from surefeat.match.regions import LOWER_WEIGHT
from surefeat.show import features as viz
from surefeat.show.results import accuracy_over_time, region_figure
from surefeat.show.style import MAP, STYLE, new_figure, picture, show, small_title, spread

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
ROWS = (
    "ours", "without-confidence", "contrastive", "res4d", "res4c", "vgg16", "resnet50-hc",
    "resnet50-dilated",
)  # fmt: skip
# Photos that come with scikit-image, the square ones cut to the shape of the others.
PHOTOS: dict[str, Callable[[], Any]] = {
    "motorcycle": lambda: data.stereo_motorcycle()[0], "coffee": data.coffee, "cat": data.chelsea,
    "astronaut": lambda: data.astronaut()[:342], "rocket": data.rocket,
    "photographer": lambda: data.camera()[60:402],
}  # fmt: skip


def main() -> None:
    draw_numbers()
    model = surefeat.DenseFeatures.from_pretrained()
    draw_maps(model)
    draw_matches(model)


def draw_numbers() -> None:
    region_figure([with_regions(row) for row in ROWS]).savefig(HERE / "regions.png", dpi=130)
    curve = json.loads((RESULTS / "training_curve.json").read_text())
    accuracy_over_time(curve).savefig(HERE / "training.png", dpi=120)


def with_regions(row: str) -> dict[str, Any]:
    """The result of a row that has its region curves, measured with its points or apart."""
    name = f"pf-pascal-test-{row}.json"
    files = [path for part in ("pf-pascal", "regions") if (path := RESULTS / part / name).is_file()]
    results: list[dict[str, Any]] = [json.loads(path.read_text()) for path in files]
    return next(result for result in results if result["curves"])


def draw_maps(model: surefeat.DenseFeatures) -> None:
    photos = [surefeat.load_image(read()) for read in PHOTOS.values()]
    named = zip(model.extract(photos), PHOTOS, strict=True)
    features = [replace(each, name=name) for each, name in named]
    save(viz.confidence_map(features, photos), "confidence.png")


def draw_matches(model: surefeat.DenseFeatures) -> None:
    left, right, _ = data.stereo_motorcycle()
    tilted = turned(Image.fromarray(right), degrees=10, zoom=1.35)
    photos = [surefeat.load_image(each) for each in (left, right, tilted)]
    features = model.extract(photos)
    matches = surefeat.match_points(features[0], features[1], count=60, mutual=True)
    save(viz.match_lines(photos[0], photos[1], matches), "match.png")
    boxes = [middling(propose(each), each) for each in photos[::2]]
    regions = surefeat.match_regions(features[0], features[2], *boxes, lower_weight=LOWER_WEIGHT)
    figure = viz.region_matches(photos[0], photos[2], regions, top=6, overlap=0.15)
    save(figure, "region_matches.png")
    save(shared_channels(features[::2], photos[::2]), "channels.png")


@rc_context(STYLE)
def shared_channels(
    features: Sequence[surefeat.Features], photos: Sequence[Tensor], *, top: int = 5
) -> Figure:
    """Rectified responses, as in the paper's figure 4, of the channels strongest in all photos."""
    peaks = torch.stack([each.descriptors.flatten(1).amax(1) for each in features])
    chosen = peaks.amin(0).argsort(descending=True)[:top].tolist()
    figure = new_figure(2.4, "")
    axes = figure.subplots(len(photos), top + 1)
    scale = Normalize(0, float(peaks[:, chosen].max()))
    for row, (each, photo) in enumerate(zip(features, photos, strict=True)):
        pixels, frame = picture(photo)
        show(axes[row, 0], pixels, frame)
        responses = spread(each.descriptors[chosen].clamp_min(0), each, frame)
        for axis, response in zip(axes[row, 1:], responses, strict=True):
            show(axis, pixels.float().mean(0), frame, cmap="gray", vmin=0, vmax=255)
            show(axis, response, frame, cmap=MAP, norm=scale, alpha=0.7)
    for axis, channel in zip(axes[0, 1:], chosen, strict=True):
        small_title(axis, f"channel {channel}")
    for axis in axes.flat:
        axis.set_axis_off()
    bar = ScalarMappable(norm=scale, cmap=MAP)
    figure.colorbar(bar, ax=axes, shrink=0.85, aspect=24, pad=0.01, label="response")
    return figure


def turned(photo: Image.Image, *, degrees: float, zoom: float) -> Image.Image:
    """The photo turned about its centre and cropped to the middle 1/zoom each way."""
    width, height = photo.size
    x, y = round(width / 2 * (1 - 1 / zoom)), round(height / 2 * (1 - 1 / zoom))
    whole = photo.rotate(degrees, Image.Resampling.BICUBIC)
    return whole.crop((x, y, width - x, height - y))


def middling(boxes: Tensor, photo: Tensor) -> Tensor:
    """Those of 1.5 to 15 % of the photo, on which a reader can see what they hold."""
    share = box_area(boxes) / photo[0].numel()
    return boxes[(share > 0.015) & (share < 0.15)]


def save(figure: Figure, name: str) -> None:
    """Colours rounded to multiples of 4, which nobody sees and which saves a third of the file."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    rounded = [min(255, (value + 2) // 4 * 4) for value in range(256)]
    Image.open(drawn).convert("RGB").point(rounded * 3).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()

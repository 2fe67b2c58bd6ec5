"""Draws the pictures of README and docs/ from results/ and the shipped model.

python docs/figures.py            all of them
python docs/figures.py match      only match.png
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch
from PIL import Image
from skimage import data
from torch import Tensor

import surefeat
from conventions import conventions
from results_page import TITLES
from surefeat import viz
from surefeat.core.files import write_bytes
from surefeat.core.geometry import box_area
from surefeat.core.image import write_png
from surefeat.data.drawn import Instance, correspondences, draw, write_folder
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.keypoints import read_coco
from surefeat.learn.config import preset
from surefeat.learn.pretrain import pretrain
from surefeat.match.proposals import propose
from surefeat.measure.results import Score, read_result
from surefeat.measure.tables import CONTROL, published, sizes_of
from surefeat.model.config import REGION_WEIGHTS
from surefeat.show.objects import keypoints as object_keypoints
from surefeat.show.results import region_figure
from surefeat.show.style import (
    GREY,
    MAP,
    PALETTE,
    STYLE,
    colour_bar,
    colour_of,
    hide_frames,
    new_figure,
    picture,
    show,
    show_map,
    small_title,
    spread,
)

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"

REGION_ROWS = (
    "ours", "without-confidence", "contrastive", "res4d", "res4c", "vgg16", "resnet50-hc",
    "resnet50-dilated",
)  # fmt: skip
PEER_ROWS = (
    "ours", "scnet-a8", "vgg16", "paper-slow-seed1", "hog-lom", "hog-phm", "hog-nam",
)  # fmt: skip
FEWSHOT_ROWS = ("ours", "without-confidence", "resnet50-hc", "vgg16", "resnet50-dilated")
"""Others differ from ours by too little to be told apart in a picture."""

# Photos that come with scikit-image, the square ones cut to the shape of the others.
PHOTOS: dict[str, Callable[[], Any]] = {
    "motorcycle": lambda: data.stereo_motorcycle()[0], "coffee": data.coffee, "cat": data.chelsea,
    "astronaut": lambda: data.astronaut()[:342], "rocket": data.rocket,
    "photographer": lambda: data.camera()[60:402],
}  # fmt: skip

# Of the astronaut: eyes, nose, mouth, chin, cheeks, forehead, hair, collar, patch, name tag.
POINTS = [
    [203, 100], [248, 102], [223, 126], [207, 144], [241, 142], [224, 182], [184, 128], [268, 128],
    [222, 74], [226, 34], [205, 255], [170, 388], [306, 356],
]  # fmt: skip

BIRDS_LEARNED, BIRDS_NEW, BIRD_STEPS, BIRD_SIDE = 200, 10, 150, 336
"""Of before_after: birds in the folder, others to match, steps of training, pixels a side."""

# What benchmarks/experiments/training_curve.py measures, and how the figure calls it.
ROUTES = {"nearest": "nearest neighbour", "voting": "voting"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    options = parser.parse_args()
    if unknown := set(options.names) - FIGURES.keys():
        parser.error(f"there is no figure {', '.join(unknown)}; choose from {', '.join(FIGURES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or FIGURES:
        save(FIGURES[name](), options.out / f"{name}.png")
        print(options.out / f"{name}.png")


def save(figure: Figure, path: Path) -> None:
    """Colours rounded to multiples of 4, which nobody sees and which saves a third of the file."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    rounded = [min(255, (value + 2) // 4 * 4) for value in range(256)]
    small = BytesIO()
    Image.open(drawn).convert("RGB").point(rounded * 3).save(small, format="png", optimize=True)
    write_bytes(path, small.getvalue())


def match() -> Figure:
    """Two people, of whom the model has never seen a label: points of one found on the other.

    Both photos are in the public domain; the points were chosen by hand and all matches are shown.
    """
    navy = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    (left, top), photos = (40, 0), (data.astronaut()[:420, 40:400], load_cut(navy))
    features = surefeat.DenseFeatures.from_pretrained().extract(photos)
    points = torch.tensor(POINTS) - torch.tensor([left, top])
    matches = surefeat.match_points(*features, points)
    return viz.match_lines(*photos, matches)


def load_cut(path: Path) -> Tensor:
    """The head and shoulders of a portrait."""
    return surefeat.load_image(path)[:, :560, 20:500]


def before_after() -> Figure:
    """A folder of drawn birds: parts matched across new ones before and after learning from it."""
    birds = [bird(number) for number in range(BIRDS_LEARNED + BIRDS_NEW)]
    config = preset("small")
    config = replace(config, train=replace(config.train, steps=BIRD_STEPS, check_every=0))
    torch.manual_seed(config.train.seed)
    untrained = surefeat.DenseFeatures(config.model).eval()
    with TemporaryDirectory() as folder:
        photos = Path(folder, "birds")
        photos.mkdir()
        for number, item in enumerate(birds[:BIRDS_LEARNED]):
            write_png(photos / f"{number:03}.png", item.image)
        learned = pretrain(
            photos, out=Path(folder, "run"), config=config, init="none", device="cpu"
        )
    after = f"after {BIRD_STEPS} steps on {BIRDS_LEARNED} birds"
    stages = {"before": untrained, after: learned.model}
    return bird_matches(stages, birds[BIRDS_LEARNED:])


def bird(number: int) -> Instance:
    """A drawn bird, none like another."""
    kind = [category.name for category in CATEGORIES].index("bird")
    return draw(kind, size=BIRD_SIDE, generator=np.random.default_rng([15, number]))


@rc_context(STYLE)
def bird_matches(stages: dict[str, surefeat.DenseFeatures], birds: Sequence[Instance]) -> Figure:
    """Rows: two pairs of birds; left and right half: the same parts, matched by either model.

    Green within a tenth of the picture's side of the true place, orange elsewhere; the share is of
    all ordered pairs of the birds.
    """
    figure = new_figure(5.2, "")
    halves = figure.subfigures(1, len(stages), wspace=0.02, squeeze=False)[0]
    for half, (stage, model) in zip(halves, stages.items(), strict=True):
        features = model.extract([item.image for item in birds], longest_side=112)
        found = [
            right_matches(features, birds, *pair)[1] for pair in permutations(range(len(birds)), 2)
        ]
        share = torch.cat(found).float().mean()
        half.suptitle(
            f"{stage}: {100 * share:.0f} % of parts found", fontsize=11, fontweight="bold"
        )
        axes = half.subplots(2, 2)
        for row, pair in zip(axes, ((0, 1), (2, 3)), strict=True):
            places, right = right_matches(features, birds, *pair)
            for axis, number in zip(row, pair, strict=True):
                axis.imshow(birds[number].image.permute(1, 2, 0).numpy())
            for start, end, good in zip(*places.tolist(), right.tolist(), strict=True):
                colour = PALETTE[2] if good else PALETTE[1]
                line = ConnectionPatch(
                    start, end, "data", "data", axesA=row[0], axesB=row[1], color=colour,
                    linewidth=1.6,
                )  # fmt: skip
                half.add_artist(line)
                for axis, (x, y) in zip(row, (start, end), strict=True):
                    axis.scatter(x, y, s=30, color=colour, edgecolors="white", linewidths=0.8)
        hide_frames(axes.flat)
    return figure


def right_matches(
    features: Sequence[surefeat.Features], birds: Sequence[Instance], first: int, second: int
) -> tuple[Tensor, Tensor]:
    """Parts of one bird and their matches in another (2, N, 2), and which are right (N,)."""
    points0, points1 = correspondences(birds[first], birds[second])
    if not len(points0):
        return torch.zeros(2, 0, 2), torch.zeros(0, dtype=torch.bool)
    places = surefeat.match_points(features[first], features[second], points0).points1
    right = (places - points1).norm(dim=1) < 0.1 * BIRD_SIDE
    return torch.stack([points0, places]), right


def confidence() -> Figure:
    photos = [surefeat.load_image(read()) for read in PHOTOS.values()]
    maps = surefeat.DenseFeatures.from_pretrained().extract(photos)
    named = [replace(one, name=name) for one, name in zip(maps, PHOTOS, strict=True)]
    return viz.confidence_map(named, photos)


def motorcycles() -> tuple[list[Tensor], list[surefeat.Features]]:
    """Two photos of one motorcycle, the second turned and closer, and their features."""
    left, right, _ = data.stereo_motorcycle()
    tilted = turned(Image.fromarray(right), degrees=10, zoom=1.35)
    photos = [surefeat.load_image(photo) for photo in (left, tilted)]
    return photos, surefeat.DenseFeatures.from_pretrained().extract(photos)


def region_matches() -> Figure:
    photos, features = motorcycles()
    boxes = [middling(propose(photo), photo) for photo in photos]
    regions = surefeat.match_regions(*features, *boxes, lower_weight=REGION_WEIGHTS[1])
    return viz.region_matches(*photos, regions, top=6, overlap=0.15)


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


def channels() -> Figure:
    photos, features = motorcycles()
    return shared_channels(features, photos)


@rc_context(STYLE)
def shared_channels(
    features: Sequence[surefeat.Features], photos: Sequence[Tensor], *, top: int = 5
) -> Figure:
    """Rectified responses, as in the paper's figure 4, of the channels strongest in all photos."""
    peaks = torch.stack([maps.descriptors.flatten(1).amax(1) for maps in features])
    chosen = peaks.amin(0).argsort(descending=True)[:top].tolist()
    figure = new_figure(2.4, "")
    axes = figure.subplots(len(photos), top + 1)
    scale = Normalize(0, float(peaks[:, chosen].max()))
    for row, (maps, photo) in enumerate(zip(features, photos, strict=True)):
        pixels, frame = picture(photo)
        show(axes[row, 0], pixels, frame)
        responses = spread(maps.descriptors[chosen].clamp_min(0), maps, frame)
        for axis, response in zip(axes[row, 1:], responses, strict=True):
            show_map(axis, response, frame, scale=scale, over=pixels)
    for axis, channel in zip(axes[0, 1:], chosen, strict=True):
        small_title(axis, f"channel {channel}")
    hide_frames(axes.flat)
    colour_bar(figure, list(axes.flat), scale, MAP, "response")
    return figure


def keypoints() -> Figure:
    """Parts of a drawn bird found from the labels of ten others: the commands of keypoints.md."""
    with TemporaryDirectory() as folder:
        for name, size, seed in (("photos", 256, 0), ("others", 200, 1)):
            write_folder(Path(folder, name), count=80, size=size, seed=seed)
        birds, others = (
            read_coco(Path(folder, name, "keypoints.json")).only(["bird"])
            for name in ("photos", "others")
        )
        detector = surefeat.KeypointDetector.fit(surefeat.DenseFeatures.from_pretrained(), birds)
        shown = detector.label(others).objects[1]
        return object_keypoints(shown.read(), [shown], detector.categories)


def calibration() -> Figure:
    stored = json.loads((RESULTS / "studies" / "reliability.json").read_text())
    bins = stored["metrics"]["pf-pascal test"]["points"]["half of them of unrelated pairs"]
    return viz.calibration_curve(bins["predicted"], bins["actual"], bins["count"])


def regions() -> Figure:
    files = [RESULTS / "first" / "pf-pascal" / f"pf-pascal-test-{row}.json" for row in REGION_ROWS]
    return region_figure([read_result(path) for path in files])  # rows without regions left out


def peers() -> Figure:
    files = [RESULTS / "pf-pascal" / f"pf-pascal-test-{row}.json" for row in PEER_ROWS]
    return region_figure([read_result(path) for path in files])


def fewshot() -> Figure:
    every = map(read_result, sorted((RESULTS / "first" / "pascal3d").glob("pascal3d-val-*.json")))
    results = [result for result in every if result["row"] in FEWSHOT_ROWS]
    area = Score("pck area", rule="bbox", images="all")
    return fewshot_figure(sorted(results, key=lambda result: -(area.of(result) or 0.0)))


@rc_context(STYLE)
def fewshot_figure(results: Sequence[dict[str, Any]]) -> Figure:
    """PCK area and PCK@0.1 over images per class, a curve per row, and PCK over alpha."""
    if not results:
        raise ValueError("there are no results to draw; write some with surefeat evaluate pascal3d")
    sizes = list(dict.fromkeys(size for result in results for size in sizes_of(result)))
    seeds = len({one["seed"] for one in results[0]["rounds"]})
    figure = new_figure(
        3.9, f"Keypoints from a handful of labels, Pascal3D {results[0]['split']}: mean over "
        f"classes and {seeds} seeds, bands are one standard deviation over the seeds. Left and "
        "middle: over annotated images per class. Right: over the distance that counts as right, "
        f"in longer sides of the box, with {sizes[-1]} images per class. Grey: the mean place in "
        "the box, without looking. Star: what the paper prints."
    )  # fmt: skip
    axes = figure.subplots(1, 3)
    for number, result in enumerate(results):
        title = TITLES.get(result["row"], result["row"])
        look = {"color": colour_of(number), "label": title}
        draw_fewshot_row(axes, result, sizes, "", look)
        for place, size in enumerate(sizes):
            score = Score("pck", alpha=0.1, rule="bbox", images=size)
            value = published(result["row"], "pascal3d", score)
            if value is not None and result["split"] == "val":
                star = look | {"label": f"{title}, published"}
                axes[1].plot([place], [value], linestyle="", marker="*", markersize=9, **star)
    control = {"color": GREY, "label": CONTROL, "linestyle": "--"}
    draw_fewshot_row(axes, results[0], sizes, f"{CONTROL} ", control)
    for axis, title in zip(axes[:2], ("PCK area", "PCK@0.1, percent"), strict=True):
        axis.set(title=title, xlabel="annotated images per class")
        axis.set_xticks(range(len(sizes)), sizes)
    title = f"PCK, percent, {sizes[-1]} images per class"
    axes[2].set(title=title, xlabel="alpha", xlim=(0, 0.5), ylim=(0, 100))
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    return figure


def draw_fewshot_row(
    axes: Sequence[Axes],
    result: dict[str, Any],
    sizes: list[str],
    prefix: str,
    look: dict[str, Any],
) -> None:
    own = [size for size in sizes if size in sizes_of(result)]
    places = [sizes.index(size) for size in own]
    for axis, measure in zip(axes[:2], ("pck area bbox", "pck@0.1 bbox"), strict=True):
        names = [f"{prefix}{measure}, {size} per class" for size in own]
        means = [result["metrics"][name] for name in names]
        deviations = [result["metrics"].get(f"{name}, sd over seeds") or 0.0 for name in names]
        axis.plot(places, means, marker="o", markersize=3.5, **look)
        low = [mean - sd for mean, sd in zip(means, deviations, strict=True)]
        high = [mean + sd for mean, sd in zip(means, deviations, strict=True)]
        axis.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)
    curve = result["pck_curves"].get(f"{prefix}{sizes[-1]} per class")
    if curve:
        axes[2].plot(result["pck_curves"]["alpha"], [100 * share for share in curve], **look)


def training() -> Figure:
    return accuracy_over_time(json.loads((RESULTS / "studies" / "training_curve.json").read_text()))


@rc_context(STYLE)
def accuracy_over_time(result: dict[str, Any]) -> Figure:
    """PCK@0.1 over seconds of training, a curve per route; the steps stand above."""
    stages = result["metrics"].get("stages")
    if not stages:
        raise ValueError(
            "no training stages to draw; write them with benchmarks/experiments/training_curve.py"
        )
    figure = new_figure(
        3.6, f"Keypoints matched right on {result['benchmark']} {result['split']} over the seconds "
        "that the steps took; dashed, where the shipped model stops."
    )  # fmt: skip
    axis = figure.subplots()
    seconds = [stage["seconds"] for stage in stages]
    shipped = result["metrics"]["shipped steps"]
    for colour, (route, name) in zip(PALETTE[:2], ROUTES.items(), strict=True):
        values = [stage["pck"][route] for stage in stages]
        axis.plot(seconds, values, "o-", color=colour, markersize=4, label=name)
        axis.annotate(
            name, (seconds[-1], values[-1]), (9, 0), textcoords="offset points", color=colour,
            fontweight="bold", va="center", annotation_clip=False,
        )  # fmt: skip
        for stage, value in zip(stages, values, strict=True):
            if stage["step"] in (stages[0]["step"], shipped):
                axis.annotate(
                    f"{value:.1f}", (stage["seconds"], value), (6, -5),
                    textcoords="offset points", color=colour, va="top",
                )  # fmt: skip
    add_step_axis(axis, stages, shipped=shipped)
    axis.set(xlabel=f"seconds of training, {result['hardware']}", ylabel="PCK@0.1, percent")
    axis.set_xlim(-0.012 * seconds[-1], 1.012 * seconds[-1])
    axis.margins(y=0.12)
    return figure


def add_step_axis(axis: Axes, stages: Sequence[dict[str, Any]], *, shipped: int) -> None:
    """The steps above their seconds, where there is room for them, and a line at the shipped."""
    above = axis.secondary_xaxis("top")
    above.set_xticks([stage["seconds"] for stage in stages], spaced_steps(stages), color=GREY)
    above.set_xlabel("steps", loc="left", color=GREY)
    above.spines["top"].set_visible(False)
    for stage in stages:
        if stage["step"] == shipped:
            axis.axvline(stage["seconds"], color=GREY, linewidth=1, linestyle="--", zorder=1)
            axis.annotate(
                f"shipped model: {shipped} steps, {stage['seconds']:.0f} s", (stage["seconds"], 0),
                (6, 6), xycoords=("data", "axes fraction"), textcoords="offset points", color=GREY,
            )  # fmt: skip


def spaced_steps(stages: Sequence[dict[str, Any]]) -> list[str]:
    """The steps as labels, empty where one would run into the label before it."""
    labels: list[str] = []
    room, last = 0.04 * stages[-1]["seconds"], -math.inf
    for stage in stages:
        fits = stage["seconds"] - last >= room
        labels.append(f"{stage['step']:,}" if fits else "")
        last = stage["seconds"] if fits else last
    return labels


FIGURES: dict[str, Callable[[], Figure]] = {
    "match": match, "before_after": before_after, "confidence": confidence,
    "region_matches": region_matches, "channels": channels, "keypoints": keypoints,
    "calibration": calibration, "regions": regions, "peers": peers, "fewshot": fewshot,
    "training": training, "conventions": conventions,
}  # fmt: skip

if __name__ == "__main__":
    main()

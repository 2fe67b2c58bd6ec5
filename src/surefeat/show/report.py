"""RUN/report.html: what a run learned, and how it looks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.files import read_json, to_dict
from surefeat.core.image import ImageError, ImageLike, load, resize
from surefeat.data.sources import walk_folder
from surefeat.learn.config import Config
from surefeat.learn.loss import held_steps
from surefeat.learn.runs import Run
from surefeat.learn.warp import Views, corresponding_points, draw, two_views
from surefeat.match.points import match_points
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.show.curves import loss_surface, training_curves
from surefeat.show.features import channels, confidence_map, pca, views_sheet
from surefeat.show.matches import match_lines
from surefeat.show.page import Number, Section, write_page

Example = tuple[str, Tensor]

_EXAMPLES, _SKIPPED_SHOWN, _POINTS, _LINES = 6, 50, 64, 8

# Keeps a number and its unit on one line.
_SPACE = "\N{NO-BREAK SPACE}"

_HINT = (
    "No example images were given. Pass a few of your own to see the warped views they give rise "
    "to, and what the model makes of them."
)

_CHECK = (
    "Two fresh views of every held-out image were drawn and {points:,} points of the one matched "
    "to the other by plain nearest neighbour. No labels are needed, because the warp is known. It "
    "measures stability on your own photos; matching different objects of one kind is harder."
)

_FELL = (
    " It was higher before training. That alone is no verdict: a model can lose here and gain "
    "where different photos are matched, or lose at both. Look at Across photos below, or measure "
    "it with a few labelled pairs: surefeat evaluate pairs."
)

_LOSS = (
    "The network predicts with every descriptor how far it can be trusted. A confident pair (small "
    "uncertainty) pays little when its score is right and much when it is wrong; an unsure one "
    "pays about nothing either way."
)

_VIEWS = (
    "What the network learns from: two views per image, warped and recoloured at random with this "
    "run's own settings, between which every point's partner is known."
)

_ACROSS = (
    "Two photos that were not learned from, matched with each other: the same points, by the model "
    "as it was before training and as it is now. This is what the features are for; no number can "
    "be given without labels, so look. Photos of unlike things have nothing to match."
)

_CONFIDENCE = (
    "How far the network trusts its descriptors, place by place. Learned, not labelled: expect "
    "high values on parts that look like nothing else, low ones on plain ground."
)

_GUESSING = 0.5
"""AUROC up to which confidence is not worth a picture."""

_GUESSED = (
    "By the check above, this run's confidence does not know which of its matches are right (AUROC "
    "{auroc:.2f}, where guessing has 0.5), so it is not drawn. Train for more steps."
)

_FOOT = "Written by surefeat. This file needs nothing else: keep it, mail it, print it."


def write_report(run_folder: str | Path, *, images: Sequence[ImageLike] = ()) -> Path:
    """RUN/report.html: what was learned, from what, with which settings, and how it looks.

    images: up to six examples (folders count as their images); without them those the run left in
    RUN/examples, if any. Unfinished runs work too.
    """
    run = Run.open(run_folder)
    config, metrics = run.settings(Config), [row for row in run.metrics() if _whole(row)]
    summary = _read_json(run.folder / "summary.json")
    sections = [_summary(metrics, summary)]
    if check := summary.get("self_check"):
        sections.append(_check_section(check, _read_json(run.folder / "before.json")))
    if metrics:
        sections.append(Section("Training", figures=(training_curves(metrics),)))
    sections += _looks(run, config, _examples(run, images))
    if config.loss.kind == "probabilistic":
        sections.append(Section("The loss", text=_LOSS, figures=(loss_surface(),)))
    sections += [*_skipped(run), _settings(config), _environment(run)]
    lead = f"What surefeat learned from {_image_count(run)}."
    lead += "" if summary else " The run is not finished."
    title = f"Run {run.folder.resolve().name}"
    return write_page(run.folder / "report.html", title, sections, lead=lead, foot=_FOOT)


# What a run writes beside its log, and reports read; none of it need be there.
_KINDS: dict[str, Any] = {
    "images": int, "held_out": int, "held_out_names": list, "steps": int, "seconds": int | float,
    "self_check": dict,
}  # fmt: skip


def _read_json(path: Path) -> dict[str, Any]:
    about = read_json(path) if path.is_file() else {}
    wrong = [name for name in _KINDS.keys() & about if not isinstance(about[name], _KINDS[name])]
    check = {} if wrong else about.get("self_check", {})
    if not all(isinstance(value, int | float | None) for value in check.values()):
        wrong.append("self_check")
    if wrong:
        raise ValueError(f"{path} is damaged (its {wrong[0]}); remove it, or put back a copy")
    return about


def _whole(row: dict[str, Any]) -> bool:
    """Whether a line of the log has what a training writes; others are left out."""
    return all(isinstance(row.get(name), int | float) for name in ("loss", "pairs_per_s"))


def _examples(run: Run, images: Sequence[ImageLike]) -> list[Example]:
    """The first few images, decoded, with the names they are shown under."""
    left = run.folder / "examples"
    given: Sequence[ImageLike] = images or ([left] if left.is_dir() else [])
    examples = (example for image in given for example in _decoded(image))
    if not images:
        names = _read_json(run.folder / "images.json").get("held_out_names", [])
        examples = ((_own_name(name, names), pixels) for name, pixels in examples)
    named = ((name or f"image {i + 1}", pixels) for i, (name, pixels) in enumerate(examples))
    return list(islice(named, _EXAMPLES))


def _own_name(file: str, names: Sequence[str]) -> str:
    """What a held-out image that the run left as 0.png, 1.png ... was called."""
    row = Path(file).stem
    known = row.isdigit() and int(row) < len(names)
    return Path(names[int(row)]).name if known else file


def _decoded(image: ImageLike) -> Iterator[Example]:
    """An image, or those of a folder, which may hold unreadable ones: they are passed over."""
    if not isinstance(image, str | Path):
        yield "", load(image)
    elif not Path(image).is_dir():
        yield Path(image).name, load(image)
    else:
        for item in walk_folder(image):
            with suppress(ImageError):
                yield Path(item.name).name, load(item.read.path)


def _image_count(run: Run) -> str:
    about = _read_json(run.folder / "images.json")
    if not {"images", "held_out"} <= about.keys():
        return "its images"
    return f"{about['images']:,} images, with {about['held_out']:,} more held out to check on"


def _summary(metrics: list[dict[str, Any]], summary: dict[str, Any]) -> Section:
    last = metrics[-1] if metrics else {}
    seconds = summary.get("seconds", sum(row.get("seconds", 0.0) for row in metrics))
    numbers = [
        Number("Steps", f"{summary.get('steps', last.get('step', 0)):,}", "Optimiser steps done."),
        Number("Time", _duration(seconds), "Spent in the training loop, logging included."),
    ]
    if metrics:
        speed = sorted(row["pairs_per_s"] for row in metrics)[len(metrics) // 2]
        numbers += [
            Number("Speed", f"{speed:,.0f} pairs/s", "Image pairs per second, median of the log."),
            Number("Loss", f"{last['loss']:.3f}", "Last logged: mean over matches and hard "
                   "non-matches; lower is better."),
        ]  # fmt: skip
    return Section("Summary", numbers=tuple(numbers))


def _check_section(check: dict[str, Any], before: dict[str, Any]) -> Section:
    """The check's numbers, and beside them what the same views give without the training."""
    rows: list[tuple[str, ...]] = []
    levels = [key.removeprefix("accuracy@") for key in check if key.startswith("accuracy@")]
    named = (
        ("after training", "accuracy", check),
        (f"before (--init {before.get('init', '')})", "accuracy", before.get("self_check")),
        ("the model that ships", "shipped", before.get("self_check")),
        ("the lower layers alone, before", "lower_layers", before.get("self_check")),
        ("every point left in its place", "same_place", check),
    )  # fmt: skip
    for title, key, values in named:
        if values and all(f"{key}@{level}" in values for level in levels):
            shares = (f"{100 * values[f'{key}@{level}']:.1f}{_SPACE}%" for level in levels)
            rows.append((title, *shares))
    heading = ("right within", *(f"{100 * float(level):g}{_SPACE}%" for level in levels))
    text, numbers = _CHECK.format(points=check.get("points", 0)), _check_numbers(check)
    text += _FELL * _fell(check, before.get("self_check") or {})
    table = [heading, *rows] if len(rows) > 1 else None
    return Section("Label-free check", text, numbers=numbers, table=table)


def _fell(check: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether the check was better before training, by its kindest level."""
    levels = [key for key in check if key.startswith("accuracy@") and key in before]
    kindest = max(levels, key=lambda key: float(key.removeprefix("accuracy@")), default=None)
    return kindest is not None and bool(check[kindest] < before[kindest])


def _check_numbers(check: dict[str, Any]) -> tuple[Number, ...]:
    numbers = []
    for key, value in check.items():
        if key.startswith("accuracy@"):
            share = f"{100 * float(key.removeprefix('accuracy@')):g}{_SPACE}%"
            meaning = f"Matches under fresh warps that are right to {share} of the view's side."
            numbers.append(Number(f"Right within {share}", f"{100 * value:.1f}{_SPACE}%", meaning))
    told = {
        "auroc": ("AUROC of confidence", "Chance that a right match is more confident than a wrong "
                  "one: 0.5 is guessing, 1 is perfect."),
        "auroc_score": ("AUROC of the score", "The same, ranked by the plain matching score."),
        "calibration_error": ("Calibration gap", "Mean difference between the loss that confidence "
                              "predicts and the actual one; 0 is perfect."),
    }  # fmt: skip
    for key, (name, meaning) in told.items():
        if key in check:
            value = check[key]
            # JSON has null where all matches were right, or all wrong, or no confidence is there.
            known = value is not None and not math.isnan(value)
            numbers.append(Number(name, f"{value:.3f}" if known else "undefined", meaning))
    return tuple(numbers)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _looks(run: Run, config: Config, examples: list[Example]) -> list[Section]:
    """Example images: their warped views, and what the finished model makes of them."""
    if not examples:
        return [Section("Example images", text=_HINT)]
    names, images = [name for name, _ in examples], [pixels for _, pixels in examples]
    sheet = views_sheet(*_example_views(images, config))
    sections = [Section("Warped views", text=_VIEWS, figures=(sheet,))]
    if not (run.folder / "model").is_dir():
        return sections
    extracted = DenseFeatures.from_pretrained(run.folder).extract(images)
    features = [replace(maps, name=name) for maps, name in zip(extracted, names, strict=True)]
    sections += _matched(run, features, images)
    sure = config.loss.kind == "probabilistic" and config.train.steps > held_steps(config)
    auroc = _read_json(run.folder / "summary.json").get("self_check", {}).get("auroc")
    if sure and auroc is not None and auroc <= _GUESSING:
        sections.append(Section("Confidence", text=_GUESSED.format(auroc=auroc)))
        sure = False
    if sure:
        maps = confidence_map(features, images)
        sections.append(Section("Confidence", text=_CONFIDENCE, figures=(maps,)))
    responses = [channels(*seen) for seen in zip(features[:2], images[:2], strict=True)]
    colours = pca(features, images, weighted=sure)
    return [*sections, Section("Descriptors", figures=(colours, *responses))]


def _matched(run: Run, features: Sequence[Features], images: Sequence[Tensor]) -> list[Section]:
    """Held-out images matched with each other by the model before training and after."""
    files = [run.folder / "examples" / f"before-{row}.safetensors" for row in range(len(features))]
    figures = []
    for row in range(0, len(features) - 1, 2):
        if not (files[row].is_file() and files[row + 1].is_file()):
            break
        after = match_points(features[row], features[row + 1], count=_LINES, mutual=True)
        earlier = [Features.load(file) for file in files[row : row + 2]]
        before = match_points(earlier[0], earlier[1], after.points0) if len(after) else after
        for when, matches in (("before", before), ("after", after)):
            figure = match_lines(images[row], images[row + 1], matches)
            figure.set_label(f"{when} training: {features[row].name}, {features[row + 1].name}")
            figures.append(figure)
    return [Section("Across photos", _ACROSS, tuple(figures))] if figures else []


def _example_views(images: list[Tensor], config: Config) -> tuple[Views, Tensor, Tensor]:
    """Views and corresponding points, drawn as in training, of the images that give any."""
    side = config.data.side
    canvas = torch.zeros(len(images), 3, side, side, dtype=torch.uint8)
    sizes = torch.zeros(len(images), 2, dtype=torch.int32)
    for row, image in enumerate(images):
        scale = min(1.0, side / max(image.shape[1:]))
        height, width = (max(1, round(length * scale)) for length in image.shape[1:])
        canvas[row, :, :height, :width] = resize(image.cpu(), size=(height, width))
        sizes[row] = torch.tensor([height, width])
    generator = torch.Generator().manual_seed(config.train.seed)
    draws = draw(len(images), points=_POINTS, generator=generator)
    views = two_views(canvas, sizes, draws, config.warp, config.colour)
    points0, points1, valid = corresponding_points(views, draws, count=_POINTS)
    kept = Views(views.view0[valid], views.view1[valid], views.warp[valid])
    return kept, points0[valid], points1[valid]


def _skipped(run: Run) -> list[Section]:
    file = run.folder / "skipped.txt"
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    if not lines:
        return []
    rows = [tuple(line.partition("\t")[::2]) for line in lines[:_SKIPPED_SHOWN]]
    text = f"{len(lines):,} {'file was' if len(lines) == 1 else 'files were'} left out"
    text += f"; the first {_SKIPPED_SHOWN} are listed." if len(lines) > _SKIPPED_SHOWN else "."
    return [Section("Skipped files", text=text, table=[("File", "Why"), *rows])]


def _settings(config: Config) -> Section:
    rows = [
        (f"{group}.{name}", _shown(value))
        for group, values in to_dict(config).items()
        for name, value in values.items()
    ]
    return Section("Settings", text="All of config.json.", table=[("Setting", "Value"), *rows])


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " to ".join(map(_shown, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _environment(run: Run) -> Section:
    about = _read_json(run.folder / "environment.json")
    rows = [(name, value or "not known") for name, value in about.items()]
    return Section("Environment", table=[("What", "Value"), *rows])

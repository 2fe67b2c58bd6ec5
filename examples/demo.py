"""What `make demo` runs: learn from drawn photos, match new ones, look at real ones, offline.

    python examples/demo.py --out demo-output

1. draws synthetic object categories (parts known, backgrounds cluttered);
2. trains the small network on them from random weights, without labels;
3. matches parts across *other instances*, before and after, and asks whether confidence tells
   object from background;
4. matches a real stereo pair with the model that ships, where the true disparity is known;
5. writes one page with pictures and numbers, and names it.
"""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from surefeat import DenseFeatures, match_points, viz
from surefeat.core.files import write_json
from surefeat.data.drawn import Instance, correspondences, draw_many, write_folder
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.learn.config import preset
from surefeat.learn.pretrain import pretrain
from surefeat.measure.evaluate import PartCheck, check_parts
from surefeat.show.report import Section, write_page, write_report

TRAINED_ON, NEW = 0, 2024
"""Seeds: the instances learned from, and others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--images", type=int, default=480)
    args = parser.parse_args()
    start = time.perf_counter()
    shutil.rmtree(args.out / "run", ignore_errors=True)
    shutil.rmtree(args.out / "photos", ignore_errors=True)

    print(f"drawing {args.images} images of {len(CATEGORIES)} categories ...")
    write_folder(args.out / "photos", count=args.images, size=112, seed=TRAINED_ON)
    fresh = draw_many(64, size=112, seed=NEW)
    config = preset("small")
    config = replace(config, train=replace(config.train, steps=args.steps))
    torch.manual_seed(config.train.seed)
    before = check_parts(DenseFeatures(config.model).eval(), fresh)
    done = pretrain(args.out / "photos", out=args.out / "run", config=config, init="none")
    after = check_parts(done.model, fresh)
    show(before, after)
    sections = [numbers(before, after), pictures(done.model, fresh), *real_photos()]
    run_page = write_report(done.folder, images=[item.image for item in fresh[:6]])
    page = write_page(
        args.out / "index.html",
        "surefeat demo",
        sections,
        lead="Learned from unlabelled drawings in a few minutes on this machine's processor.",
        foot=f"The training run's own report is {run_page.relative_to(args.out)}.",
    )
    result = {"before": asdict(before), "after": asdict(after), "seed": config.train.seed}
    write_json(args.out / "result.json", result)
    print(f"done in {time.perf_counter() - start:.0f} s; look at {page}")


def show(before: PartCheck, after: PartCheck) -> None:
    print(
        f"parts found on other instances (PCK@0.1): {before.accuracy:.0%} -> {after.accuracy:.0%}"
    )
    print(
        f"object against background (AUROC): confidence {after.object_auroc:.2f}; no learning: "
        f"edge energy {after.edge_auroc:.2f}, closeness to the centre {after.centre_auroc:.2f}"
    )


def numbers(before: PartCheck, after: PartCheck) -> Section:
    rows = [["category", "before", "after"]]
    for index, value in after.by_category.items():
        rows.append([CATEGORIES[index].name, f"{before.by_category[index]:.1%}", f"{value:.1%}"])
    rows.append(["all", f"{before.accuracy:.1%}", f"{after.accuracy:.1%}"])
    text = (
        "Parts of instances the network never saw, matched to other instances of their category by "
        "nearest neighbour in descriptors; right within a tenth of the image's side (PCK@0.1).\n\n"
        f"Confidence tells object from background with an AUROC of {after.object_auroc:.2f} "
        f"(before training {before.object_auroc:.2f}). On these drawings plain edge energy reaches "
        f"{after.edge_auroc:.2f} and closeness to the image's centre {after.centre_auroc:.2f}: "
        "the objects have crisp outlines, so this number alone does not show that confidence finds "
        "objects in photographs."
    )
    return Section("Before and after", text=text, table=rows)


def pictures(model: DenseFeatures, fresh: list[Instance]) -> Section:
    pairs = []
    for category in range(4):
        first, second = [item for item in fresh if item.category == category][:2]
        points0, points1 = correspondences(first, second)
        features = model.extract([first.image, second.image], longest_side=112)
        matches = match_points(*features, points0)
        pairs.append((first, second, matches, points1))
    figures = tuple(
        viz.match_lines(
            first.image,
            second.image,
            matches,
            right=(matches.points1 - truth).norm(dim=1) < 0.1 * 112,
            label=f"{CATEGORIES[first.category].name}: parts of one instance found on another",
        )
        for first, second, matches, truth in pairs
    )
    text = "Lines are green where the match is right, orange where it is wrong."
    return Section("New instances, matched", text=text, figures=figures)


def real_photos() -> list[Section]:
    """A stereo pair of a motorcycle whose true disparity is known, with the shipped model."""
    from skimage.data import stereo_motorcycle

    left, right, disparity = stereo_motorcycle()
    model = DenseFeatures.from_pretrained()
    features = model.extract([left, right])
    matches = match_points(*features, count=150).filter(mutual=True)
    true_shift = torch.as_tensor(disparity)[
        matches.points0[:, 1].round().long(), matches.points0[:, 0].round().long()
    ]
    known = true_shift.isfinite() & (true_shift > 0)
    truth = matches.points0 - torch.stack([true_shift, torch.zeros_like(true_shift)], dim=1)
    error = (matches.points1 - truth).norm(dim=1)[known]
    text = (
        f"{int(known.sum())} mutual matches of the most confident points with known disparity; the "
        f"median error is {error.median():.1f} px of {left.shape[1]}, and "
        f"{(error < 0.02 * left.shape[1]).float().mean():.0%} lie within 2 % of the width. "
        "Features have one cell per 16 network pixels; they are made for matching different "
        "objects, not for sub-pixel stereo."
    )
    print("real stereo pair:", text.split(";")[0] + ";", f"median error {error.median():.1f} px")
    lines = viz.match_lines(
        left, right, matches.take(known), right=error < 0.02 * left.shape[1],
        label="Matches of the two photos: green within 2 % of the width of the true place.",
    )  # fmt: skip
    maps = viz.confidence_map(features, [left, right])
    return [Section("A real photograph", text=text, figures=(lines, maps))]


if __name__ == "__main__":
    main()

"""Labels carried from one or three photos to others: how many are right, and does the score say so?

    python benchmarks/experiments/transfer.py DATA --part fit --store
    python benchmarks/experiments/transfer.py DATA --out results/studies/transfer.json

DATA holds cub-dev, pascal3d and voc. `--part fit` looks at half of the birds' species and at
PASCAL3D+'s train split, fits the logistic models that turn signs into probabilities and, with
--store, writes them into the model's reliability.json; its scores are judged by fits on the other
half of the species and classes. Without it the other half and the val
split are asked: PCK at a tenth of the box, the share of right ones among those called sure,
calibration, boxes, and photos of other things, on which no label should come to lie.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from reliability import calibration
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.geometry import Frame, box_iou
from surefeat.core.image import resize
from surefeat.core.ranking import auroc
from surefeat.data.coco import Category
from surefeat.data.decode import Place
from surefeat.data.keypoints import Labelled, read_coco
from surefeat.keypoints.carry import RIGHT_WITHIN, Carried, Joined, Source, carry_photo, join
from surefeat.keypoints.transfer import SURE
from surefeat.measure.metrics import longer_side
from surefeat.measure.rows import Row, build_row
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Reliability, TransferTrust, fit_logistic

SOURCES = 3
LEAST_SIDE = 100.0
"""Pixels of a box's longer side; photos have 300 to 384."""
ALIKE = 0.6
"""Two objects show the same side if so much of the parts seen in either are seen in both; the
annotations have no viewpoint."""

SPLITS = {
    "fit": "half of the species, and PASCAL3D+ train; scores by a fit on the other half of the "
    "species and classes",
    "check": "the other half of the species, and PASCAL3D+ val without difficult objects",
}

_KEPT = 40  # photos whose features are kept

Extract = Callable[[Tensor], Features]


@dataclass(frozen=True, eq=False)
class Task:
    """Labelled objects and a photo to which they are carried."""

    kind: str
    """The set: birds or pascal3d."""
    group: str
    """Species or class."""
    category: Category
    sources: tuple[Labelled, ...]
    target: Labelled
    related: bool
    """The photo shows the same kind of thing."""


def choose(
    objects: Sequence[Labelled], rng: random.Random, *, targets: int, sided: bool
) -> tuple[tuple[Labelled, ...], list[Labelled]] | None:
    """Three sources, which show half of what any shows, and targets; None where they are too few.

    Photos with one object alone are used, so that it is clear which is meant. sided: half of
    the targets show the first source's side, where there are as many.
    """
    names = [item.name for item in objects]
    alone = [item for item in objects if names.count(item.name) == 1]
    large = [item for item in alone if longer_side(item.box) >= LEAST_SIDE]
    large = [item for item in large if int(item.visible.sum()) >= 2]
    rng.shuffle(large)
    most = max((int(item.visible.sum()) for item in large), default=0)
    rich = [item for item in large if int(item.visible.sum()) >= most / 2][:SOURCES]
    rest = [item for item in large if all(item is not other for other in rich)]
    if len(rich) < SOURCES or len(rest) < targets:
        return None
    alike = [item for item in rest if sided and same_side(rich[0].visible, item.visible)]
    near = alike[: -(-targets // 2)]
    far = [item for item in rest if all(item is not other for other in near)]
    return tuple(rich), (near + far)[:targets]


def same_side(visible0: Tensor, visible1: Tensor) -> bool:
    """Of the parts (K,) seen in either, ALIKE or more are seen in both."""
    return int((visible0 & visible1).sum()) >= ALIKE * int((visible0 | visible1).sum())


def bird_tasks(data: Path, part: str, count: int, targets: int) -> list[Task]:
    """Groups are species; every second one is for the fit."""
    rng = random.Random(0)
    whole = read_coco(data / "cub-dev/keypoints.json", images=data / "cub-dev/photos")
    notes = json.loads((data / "cub-dev/keypoints.json").read_text())["annotations"]
    species: dict[int, list[Labelled]] = {}
    for item, note in zip(whole.objects, notes, strict=True):
        species.setdefault(note["species"], []).append(item)
    half = sorted(species)[part == "check" :: 2]
    tasks = []
    for number in half:
        chosen = choose(species[number], rng, targets=targets, sided=False)
        if chosen and len(tasks) < count * targets:
            about = ("birds", str(number), whole.categories[0], chosen[0])
            tasks += [Task(*about, target, True) for target in chosen[1]]
    return tasks


def pascal_tasks(data: Path, part: str, targets: int) -> list[Task]:
    """Groups are classes; the train split is for the fit, val for the check.

    The fit has to do with all that there is; in the check, objects that are difficult, truncated or
    occluded are not used, and half of the photos show the first source's side.
    """
    rng = random.Random(0)
    split = "train" if part == "fit" else "val"
    file = data / f"pascal3d/keypoints_{split}.json"
    whole = read_coco(file, images=data / "voc")
    notes = json.loads(file.read_text())["annotations"]
    flags = ("difficult", "truncated", "occluded")
    whole = replace(whole, objects=tuple(
        replace(item, visible=item.visible & (part == "fit" or not any(note[f] for f in flags)))
        for item, note in zip(whole.objects, notes, strict=True)
    ))  # fmt: skip
    tasks = []
    for number, category in enumerate(whole.categories):
        mine = [item for item in whole.objects if item.category == number]
        chosen = choose(mine, rng, targets=targets, sided=part == "check")
        if chosen:
            about = ("pascal3d", category.name, category, _plain(chosen[0]))
            tasks += [Task(*about, target, True) for target in _plain(chosen[1])]
    return tasks


def _plain(items: Sequence[Labelled]) -> tuple[Labelled, ...]:
    return tuple(replace(item, category=0) for item in items)


def with_unrelated(tasks: list[Task]) -> list[Task]:
    """And one photo of something else for every group: birds get one of PASCAL3D+'s things, those
    a bird and the next class but two by turns."""
    groups: dict[tuple[str, str], Task] = {}
    for task in tasks:
        groups.setdefault((task.kind, task.group), task)
    firsts = list(groups.values())
    birds = [task for task in firsts if task.kind == "birds"]
    others = [task for task in firsts if task.kind != "birds"]
    more = []
    for number, task in enumerate(birds):
        foreign = others[number % len(others)].target
        more.append(replace(task, target=foreign, related=False))
    for number, task in enumerate(others):
        foreign = birds[number % len(birds)] if number % 2 else others[(number + 3) % len(others)]
        more.append(replace(task, target=foreign.target, related=False))
    return sorted(tasks + more, key=lambda task: (task.kind, task.group))


def model_extract(model: DenseFeatures) -> Extract:
    return lambda pixels: model.extract(pixels)[0]


def row_extract(row: Row, *, side: int = 320) -> Extract:
    """A row sees squares."""

    def extract(pixels: Tensor) -> Features:
        square = resize(pixels, size=(side, side))[None]
        with torch.inference_mode():
            features = row.extract(square)[0]
        original = (pixels.shape[1], pixels.shape[2])
        return replace(features, frame=Frame(original, (side, side)))

    return extract


def cropped(item: Labelled, pixels: Tensor, context: float) -> tuple[Tensor, Labelled]:
    """An object cut out with this share of its box around it, and its labels there."""
    x1, y1, x2, y2 = item.box.tolist()
    dx, dy = context * (x2 - x1 + 1), context * (y2 - y1 + 1)
    left, top = max(0, int(x1 - dx)), max(0, int(y1 - dy))
    part = pixels[:, top : int(y2 + dy) + 2, left : int(x2 + dx) + 2]
    shift = torch.tensor([left, top], dtype=torch.float32)
    size = (part.shape[1], part.shape[2])
    box = torch.minimum(item.box - shift.repeat(2), torch.tensor([size[1], size[0]] * 2) - 1.0)
    return part, replace(item, box=box.clamp_min(0), points=item.points - shift, size=size)


@torch.no_grad()
def carry_all(
    tasks: Sequence[Task],
    extract: Extract,
    *,
    context: float | None = None,
    most: int = SOURCES,
    tables: Path | None = None,
) -> list[list[Carried]]:
    """Every task's sources, carried to its photo one by one; features of a group are kept.

    tables: where what was carried is kept, so that a run that was stopped goes on.
    """
    kept: dict[Place, Features] = {}

    def features_of(item: Labelled, cut: float | None) -> tuple[Features, Labelled]:
        pixels, about = item.read(), item
        if cut is not None:
            pixels, about = cropped(item, pixels, cut)
        features = kept.pop(item.image) if item.image in kept else extract(pixels)
        kept[item.image] = features  # the one used last is forgotten last
        if len(kept) > _KEPT:
            kept.pop(next(iter(kept)))
        return features, about

    results: list[list[Carried]] = []
    if tables is not None and tables.is_file():
        results = torch.load(tables, weights_only=False)
    for number, task in enumerate(tqdm(tasks[len(results) :], mininterval=20)):
        target, _ = features_of(task.target, None)
        carried = []
        for item in task.sources[:most]:
            features, about = features_of(item, context)
            source = Source(features, (replace(about, category=0),))
            carried += carry_photo(source, target, [task.category])
        results.append(carried)
        if tables is not None and (number % 4 == 3 or len(results) == len(tasks)):
            torch.save(results, tables)
    return results


@dataclass(frozen=True, eq=False)
class Answer:
    """What was said of a photo, and what is true."""

    task: Task
    joined: Joined
    asked: Tensor
    """(K,) bool: seen in the photo and in a source."""
    right: Tensor
    """(K,) bool: in the photo, and within a tenth of the box's longer side."""
    overlap: float
    alike: bool


def answer(task: Task, carried: Sequence[Carried]) -> Answer:
    joined = join(carried, task.target.size)
    truth, seen = task.target, task.target.visible & task.related
    if not task.related:
        nobody = torch.zeros_like(joined.known)
        return Answer(task, joined, nobody, nobody, 0.0, False)
    away = (joined.points - truth.points).norm(dim=-1)
    right = (away < RIGHT_WITHIN * longer_side(truth.box)) & seen
    shown = torch.stack([one.labelled.visible for one in carried])
    overlap = float(box_iou(joined.box[None], truth.box[None].float()))
    return Answer(
        task,
        joined,
        shown.any(0) & seen,
        right,
        overlap,
        any(same_side(one, seen) for one in shown),
    )


def pck(answers: Sequence[Answer]) -> float | None:
    asked = torch.cat([one.asked for one in answers]) if answers else torch.zeros(0)
    hit = torch.cat([one.right & one.asked for one in answers]) if answers else torch.zeros(0)
    return round(float(hit.sum() / asked.sum()), 4) if asked.sum() else None


def found(answers: Sequence[Answer]) -> dict[str, Any]:
    """What needs no probabilities."""
    mine = [one for one in answers if one.task.related]
    groups = sorted({one.task.group for one in mine})
    by_group = {g: pck([one for one in mine if one.task.group == g]) for g in groups}
    known = [value for value in by_group.values() if value is not None]
    overlap = torch.tensor([one.overlap for one in mine])
    return {
        "photos": len(mine), "keypoints": int(sum(int(one.asked.sum()) for one in mine)),
        "pck": pck(mine), "pck, mean over groups": round(sum(known) / len(known), 4),
        "pck, seen from the same side": pck([one for one in mine if one.alike]),
        "pck, from another side": pck([one for one in mine if not one.alike]),
        "photos seen from the same side": sum(one.alike for one in mine),
        "box overlap": round(float(overlap.mean()), 4),
        "boxes that overlap by half": round(float((overlap >= 0.5).float().mean()), 4),
    } | ({"pck by group": by_group} if len(groups) <= 12 else {})  # fmt: skip


def scores(joined: Joined, trust: TransferTrust) -> Tensor:
    return trust.point.log_odds(joined.signs).sigmoid() * joined.known


def trusted(judged: Sequence[tuple[Answer, TransferTrust]]) -> dict[str, Any]:
    """How far the scores of all labels that were made hold, each by its own fit."""
    fits = {id(one): trust for one, trust in judged}
    answers = [one for one, _ in judged]
    mine = [one for one in answers if one.task.related]
    known = torch.cat([one.joined.known for one in mine])
    score = torch.cat([scores(one.joined, fits[id(one)]) for one in mine])[known]
    raw = torch.cat([one.joined.chances for one in mine])[known]
    right = torch.cat([one.right for one in mine])[known]
    seen = int(sum(int((one.task.target.visible).sum()) for one in mine))
    sure, kept = score >= SURE, score >= 0.5
    foreign = [scores(one.joined, fits[id(one)])[one.joined.known] for one in answers
               if not one.task.related]  # fmt: skip
    strange = torch.cat(foreign) if foreign else torch.zeros(0)
    overlap = torch.tensor([one.overlap for one in answers]) >= 0.5
    box = torch.stack(
        [fits[id(one)].box.log_odds(one.joined.box_signs).sigmoid() for one in answers]
    )

    def share(mask: Tensor, of: Tensor) -> float | None:
        return round(float(of[mask].float().mean()), 4) if bool(mask.any()) else None

    return {
        "labels made": len(score), "right": round(float(right.float().mean()), 4),
        "called sure": int(sure.sum()), "right among sure": share(sure, right),
        "kept (0.5)": int(kept.sum()), "right among kept": share(kept, right),
        "of the photos' own keypoints labelled right and kept":
            round(int((right & kept).sum()) / seen, 4),
        "of them right and sure": round(int((right & sure).sum()) / seen, 4),
        "calibration": calibration(score, right), "auroc": round(auroc(score, right), 4),
        "calibration of the matches' own": calibration(raw, right),
        "labels on unrelated photos": len(strange),
        "of them kept": int((strange >= 0.5).sum()), "of them sure": int((strange >= SURE).sum()),
        "calibration of boxes, unrelated photos too": calibration(box, overlap),
        "boxes called sure": int((box >= SURE).sum()),
        "right among sure boxes": share(box >= SURE, overlap),
    }  # fmt: skip


def fit_trust(answers: Sequence[Answer], words: str) -> TransferTrust:
    """Both sets count the same, with as many labels of unrelated photos as their number is."""
    birds = torch.cat(
        [torch.full((int(one.joined.known.sum()),), one.task.kind == "birds") for one in answers]
    )
    weight = torch.where(birds, 0.5 / birds.sum(), 0.5 / (~birds).sum())
    signs = {
        name: torch.cat([one.joined.signs[name][one.joined.known] for one in answers])
        for name in answers[0].joined.signs
    }
    right = torch.cat([one.right[one.joined.known] for one in answers])
    point = fit_logistic(signs, right, fitted_on=words, weight=weight, ridge=1e-3)
    boxes = {
        name: torch.stack([one.joined.box_signs[name] for one in answers])
        for name in answers[0].joined.box_signs
    }
    half = torch.tensor([one.overlap >= 0.5 for one in answers])
    return TransferTrust(point, fit_logistic(boxes, half, fitted_on=words, ridge=1e-2))


def crossed(answers: Sequence[Answer]) -> list[tuple[Answer, TransferTrust]]:
    """Every answer with a fit on the half of species and classes that is not its own."""
    groups = sorted({(one.task.kind, one.task.group) for one in answers})
    half = {group: number % 2 for number, group in enumerate(groups)}
    parts = [[one for one in answers if half[one.task.kind, one.task.group] == i] for i in (0, 1)]
    fits = [fit_trust(part, "the other half") for part in parts]
    return [(one, fits[1 - i]) for i in (0, 1) for one in parts[i]]


def unswapped(carried: Carried, flip: Sequence[int]) -> Carried:
    """As if left and right kept their names."""
    if not carried.motion.mirrored:
        return carried
    rows = torch.tensor(flip)
    return replace(carried, points=carried.points[rows], chances=carried.chances[rows],
                   stray=carried.stray[rows])  # fmt: skip


def surest(carried: Sequence[Carried]) -> list[Carried]:
    """Of several sources the one that is best supported, instead of votes."""
    return [max(carried, key=lambda one: one.weight)]


def by_set(answers: Sequence[Answer], judge: Callable[..., Any]) -> dict[str, Any]:
    kinds = sorted({one.task.kind for one in answers})
    return {kind: judge([one for one in answers if one.task.kind == kind]) for kind in kinds}


def choices(tasks: Sequence[Task], carried: Sequence[Sequence[Carried]]) -> dict[str, Any]:
    """What the fit's half says of the choices: names that swap, votes."""
    pairs = list(zip(tasks, carried, strict=True))
    ways = {
        "1 source": [answer(task, some[:1]) for task, some in pairs],
        "1 source, left and right never swapped": [
            answer(t, [unswapped(one, t.category.flip) for one in some[:1]]) for t, some in pairs
        ],
        "3 sources": [answer(task, some) for task, some in pairs],
        "3 sources, left and right never swapped": [
            answer(t, [unswapped(one, t.category.flip) for one in some]) for t, some in pairs
        ],
        "3 sources, the best supported alone": [answer(t, surest(some)) for t, some in pairs],
    }
    return {way: by_set(answers, found) for way, answers in ways.items()}


def tasks_of(data: Path, part: str, *, small: bool) -> list[Task]:
    birds, targets = (3, 1) if small else (10 if part == "fit" else 6, 2)
    pascal = 1 if small else (3 if part == "fit" else 2)
    tasks = bird_tasks(data, part, birds, targets) + pascal_tasks(data, part, pascal)
    every = with_unrelated(tasks)
    if part == "fit":
        return every
    strange = [task for task in every if not task.related][::3]
    return [task for task in every if task.related or any(task is one for one in strange)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--part", choices=("fit", "check"), default="check")
    parser.add_argument("--row", default="ours", help="ours, or one of measure/rows.py")
    parser.add_argument("--init", nargs="*", default=[], help="weights of an untrained row")
    parser.add_argument("--context", type=float, help="cut sources out with this much around them")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--small", action="store_true", help="a few tasks, to try it")
    parser.add_argument("--tables", type=Path, help="keep what was carried, or read it from there")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    about = environment(choose_device(None))  # before anything is written into the tree
    tasks = tasks_of(args.data, args.part, small=args.small)
    model = DenseFeatures.from_pretrained(device="cpu")
    extract, digest = model_extract(model), file_hash(model_folder(None) / WEIGHTS)
    if args.row != "ours":
        row = build_row(args.row, device=torch.device("cpu"), init=args.init)
        extract, digest = row_extract(row), row.weights_sha256
        tasks = [task for task in tasks if task.related]
    most = SOURCES if args.context is None else 1
    carried = carry_all(tasks, extract, context=args.context, most=most, tables=args.tables)
    pairs = list(zip(tasks, carried, strict=True))
    answers = {n: [answer(task, some[:n]) for task, some in pairs] for n in {1, most}}
    metrics: dict[str, Any] = {
        f"{n} source{'s' * (n > 1)}": by_set(some, found) for n, some in answers.items()
    }
    if args.row == "ours" and args.context is None:
        if args.part == "fit":
            metrics = choices(tasks, carried)
            words = f"{len(tasks)} photos, 1 and 3 sources; birds and PASCAL3D+ train alike"
            fitted = fit_trust([*answers[1], *answers[SOURCES]], words)
            metrics["fit"] = asdict(fitted)
            trust: TransferTrust | None = fitted
            both = crossed([*answers[1], *answers[SOURCES]])
            own = {id(one): fit for one, fit in both}
        else:
            trust = model.reliability.transfer if model.reliability else None
            assert trust is not None
            own = {id(one): trust for some in answers.values() for one in some}
        for n, some in answers.items():
            judged = by_set(some, lambda part: trusted([(one, own[id(one)]) for one in part]))
            metrics[f"{n} source{'s' * (n > 1)}, scores"] = judged
        if args.store and args.part == "fit":
            folder = model_folder(None)
            known = Reliability.load(folder)
            assert known is not None
            replace(known, transfer=trust).save(folder)
    record = {
        "row": args.row, "benchmark": "label transfer: birds (cub-dev) and PASCAL3D+",
        "split": SPLITS[args.part], "metrics": metrics,
        "config": {"context": args.context, "sources": SOURCES, "alike": ALIKE,
                   "least side, px": LEAST_SIDE, "photos": len(tasks)},
        "seconds": round(time.perf_counter() - start), "weights_sha256": digest, **about,
    }  # fmt: skip
    if args.out:
        write_json(args.out, record)
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()

"""Labels carried from one or three photos to others: how many are right, and does the score say so?

    python benchmarks/experiments/transfer.py DATA --part fit --store
    python benchmarks/experiments/transfer.py DATA --out results/studies/transfer_val.json
    python benchmarks/experiments/transfer.py DATA --row res4e --init FILE --out FILE

DATA holds cub-dev, pascal3d and voc. `--part fit` looks at half of the birds' species and at
PASCAL3D+'s train split, fits the logistic models that turn signs into probabilities and, with
--store, writes them into the model's reliability.json; its scores are judged by fits on the other
half of the species and classes. Without it the other half and the val
split are asked: PCK at a tenth of the box, the share of right ones among those called sure,
calibration, boxes, and photos of other things, on which no label should come to lie. Each is asked
three times: photos seen whole, labelled objects cut out, and with a second look at what was found;
other rows in the last way alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from reliability import calibration
from torch import Tensor
from tqdm import tqdm
from transfer_tasks import ALIKE, LEAST_SIDE, SOURCES, Task, same_side, tasks_of

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.geometry import Frame, box_iou
from surefeat.core.image import resize
from surefeat.core.ranking import auroc
from surefeat.data.keypoints import Labelled
from surefeat.keypoints.carry import (
    CONTEXT,
    RIGHT_WITHIN,
    SMALL,
    Joined,
    Source,
    carry,
    cut_source,
)
from surefeat.keypoints.transfer import SURE
from surefeat.match.large import Part, cut_part
from surefeat.measure.metrics import longer_side
from surefeat.measure.rows import Row, build_row
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Reliability, TransferTrust, fit_logistic

SPLITS = {
    "fit": "half of the species, and PASCAL3D+ train; scores by a fit on the other half of the "
    "species and classes",
    "check": "the other half of the species, and PASCAL3D+ val without difficult objects",
}

WHOLE, CUT, CLOSER = "photos seen whole", "labelled objects cut out", "and a second look"
WAYS = (WHOLE, CUT, CLOSER)
"""The last one is what ships."""

COUNTS = (1, SOURCES)

Extract = Callable[[Tensor], Features]


def model_extract(model: DenseFeatures) -> Extract:
    return lambda pixels: model.extract(pixels)[0]


def row_extract(row: Row, *, side: int) -> Extract:
    """A row sees squares."""

    def extract(pixels: Tensor) -> Features:
        square = resize(pixels, size=(side, side))[None]
        with torch.inference_mode():
            features = row.extract(square)[0]
        original = (pixels.shape[1], pixels.shape[2])
        return replace(features, frame=Frame(original, (side, side)))

    return extract


Carried = dict[tuple[str, int], Joined]
"""What is said of a photo, by way and number of sources."""


class Reader:
    """Sources of a group of tasks, each seen cut out; in all ways: whole, too."""

    def __init__(self, extract: Extract, *, all_ways: bool) -> None:
        self.extract, self.all_ways = extract, all_ways
        self.group: tuple[Labelled, ...] = ()
        self.whole: list[Source] = []
        self.cut: list[Source] = []

    def read(self, items: tuple[Labelled, ...]) -> None:
        if all(a is b for a, b in zip(self.group, items, strict=False)) and self.group:
            return
        self.group = items
        if self.all_ways:
            self.whole = [Source(self.extract(item.read()), (item,)) for item in items]
        self.cut = [cut_source([item], self.extract) for item in items]

    def say(self, task: Task) -> Carried:
        self.read(task.sources)
        pixels = task.target.read()
        target = self.extract(pixels)
        kinds = [task.category]
        kept: dict[Part, Features] = {}

        def look(part: Part) -> Features:
            if part not in kept:
                kept[part] = self.extract(cut_part(pixels, part))
            return kept[part]

        said: Carried = {}
        for count in COUNTS:
            if self.all_ways:
                (said[WHOLE, count],) = carry(self.whole[:count], target, kinds)
                (said[CUT, count],) = carry(self.cut[:count], target, kinds)
            (said[CLOSER, count],) = carry(self.cut[:count], target, kinds, look)
        return said


@torch.no_grad()
def carry_all(tasks: Sequence[Task], reader: Reader, *, tables: Path | None) -> list[Carried]:
    """Of every task what is said; tables: where it is kept, so that a stopped run goes on."""
    results: list[Carried] = []
    if tables is not None and tables.is_file():
        results = torch.load(tables, weights_only=False)
    for number, task in enumerate(tqdm(tasks[len(results) :], mininterval=20)):
        results.append(reader.say(task))
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


def answer(task: Task, joined: Joined, count: int) -> Answer:
    truth, seen = task.target, task.target.visible & task.related
    if not task.related:
        nobody = torch.zeros_like(joined.known)
        return Answer(task, joined, nobody, nobody, 0.0, False)
    away = (joined.points - truth.points).norm(dim=-1)
    right = (away < RIGHT_WITHIN * longer_side(truth.box)) & seen
    shown = torch.stack([one.visible for one in task.sources[:count]])
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


def by_set(answers: Sequence[Answer], judge: Callable[..., Any]) -> dict[str, Any]:
    kinds = sorted({one.task.kind for one in answers})
    return {kind: judge([one for one in answers if one.task.kind == kind]) for kind in kinds}


def named(count: int) -> str:
    return f"{count} source{'s' * (count > 1)}"


def judged_scores(answers: dict[int, list[Answer]], trust: TransferTrust | None) -> dict[str, Any]:
    """Scores by a fit that is given, or by fits on the half that is not their own."""
    every = [one for some in answers.values() for one in some]
    pairs = [(one, trust) for one in every] if trust else crossed(every)
    own = {id(one): fit for one, fit in pairs}
    return {
        f"{named(n)}, scores": by_set(
            some, lambda part: trusted([(one, own[id(one)]) for one in part])
        )
        for n, some in answers.items()
    }


def store(trust: TransferTrust) -> None:
    """Into the folder of the model that ships."""
    folder = model_folder(None)
    known = Reliability.load(folder)
    assert known is not None
    replace(known, transfer=trust).save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--part", choices=("fit", "check"), default="check")
    parser.add_argument("--row", default="ours", help="ours, or one of measure/rows.py")
    parser.add_argument("--side", type=int, default=320, help="of the squares another row sees")
    parser.add_argument("--init", nargs="*", default=[], help="weights of an untrained row")
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
        extract, digest = row_extract(row, side=args.side), row.weights_sha256
        tasks = [task for task in tasks if task.related]
    reader = Reader(extract, all_ways=args.row == "ours")
    carried = carry_all(tasks, reader, tables=args.tables)
    ways = WAYS if reader.all_ways else (CLOSER,)
    pairs = list(zip(tasks, carried, strict=True))
    answers = {
        way: {n: [answer(task, said[way, n], n) for task, said in pairs] for n in COUNTS}
        for way in ways
    }
    metrics: dict[str, Any] = {
        way: {named(n): by_set(some, found) for n, some in answers[way].items()} for way in ways
    }
    if args.row == "ours":
        trust = model.reliability.transfer if model.reliability else None
        if args.part == "fit":
            words = f"{len(tasks)} photos, 1 and 3 sources; birds and PASCAL3D+ train alike"
            fitted = fit_trust([one for n in COUNTS for one in answers[CLOSER][n]], words)
            metrics["fit"] = asdict(fitted)
            trust = None
            if args.store:
                store(fitted)
        metrics |= judged_scores(answers[CLOSER], trust)
    record = {
        "row": args.row, "benchmark": "label transfer: birds (cub-dev) and PASCAL3D+",
        "split": SPLITS[args.part], "metrics": metrics,
        "config": {"context": CONTEXT, "small": SMALL, "sources": SOURCES, "alike": ALIKE,
                   "least side, px": LEAST_SIDE, "photos": len(tasks)},
        "seconds": round(time.perf_counter() - start), "weights_sha256": digest, **about,
    }  # fmt: skip
    if args.out:
        write_json(args.out, record)
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()

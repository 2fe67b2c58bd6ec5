"""Labels carried between views: how many are right by how far apart the two photos were taken?

    python benchmarks/experiments/viewpoint.py DATA --journal FOLDER
    python benchmarks/experiments/viewpoint.py DATA --journal FOLDER --row res4e --init FILE
    python benchmarks/experiments/viewpoint.py DATA --journal FOLDER --out FILE

PASCAL3D+ val, one labelled photo, as transfer.py carries it (labelled object cut out, second look).
The annotations have keypoints but no viewpoint: rigid_views.py finds it, class by class, from the
keypoints of both splits, for objects with six seen keypoints or more. Classes with fewer keypoints,
too few such objects or a round body are left out. Of each class six labelled objects are asked for
three photos under 30, 30 to 90 and over 90 degrees away, as far as there are; rounds go through all
classes, so that a stopped run is balanced. Each run appends its row's answers to the journal;
--out reads all rows' and writes the questions that all have answered.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rigid_views import Views, angle_between, find_views
from torch import Tensor
from tqdm import tqdm
from transfer import model_extract, row_extract, scores
from transfer_tasks import LEAST_SIDE

from surefeat.core.files import environment, file_hash, write_json
from surefeat.data.coco import Category
from surefeat.data.keypoints import Labelled, read_coco
from surefeat.keypoints.carry import RIGHT_WITHIN, Source, carry, cut_source
from surefeat.keypoints.transfer import SURE
from surefeat.match.large import Part, cut_part
from surefeat.measure.metrics import longer_side
from surefeat.measure.rows import build_row
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures

CLASSES = ("aeroplane", "bicycle", "bus", "car", "chair", "motorbike", "sofa", "train")

SEEN = 6
"""Keypoints that an object must show, for its view to be known."""

DOUBT, ERROR = 0.1, 0.25
"""Of a view; objects with more are not asked about."""

SHARED = 2
"""Keypoints that both photos must show; those that the source shows and the photo does not are not
asked for."""

BINS = (30.0, 90.0)
NAMES = ("under 30 degrees", "30 to 90 degrees", "over 90 degrees")

ROUNDS, TARGETS = 6, 3


@dataclass(frozen=True, eq=False)
class Object:
    """A labelled object whose view is known."""

    labelled: Labelled
    asked: bool
    """Of the val split, large enough, without others of its class in the photo."""


@dataclass(frozen=True, eq=False)
class Question:
    """A labelled object and a photo to which its keypoints are carried."""

    round: int
    category: Category
    source: Labelled
    target: Labelled
    degrees: float

    @property
    def key(self) -> str:
        return f"{self.category.name} {self.source.name} {self.target.name}"


def objects_of(data: Path) -> tuple[tuple[Category, ...], dict[int, list[Object]]]:
    """By class, whole objects of both splits with SEEN keypoints or more."""
    found: dict[int, list[Object]] = {}
    for split in ("train", "val"):
        file = data / f"pascal3d/keypoints_{split}.json"
        whole = read_coco(file, images=data / "voc")
        notes = json.loads(file.read_text())["annotations"]
        photos = [(item.category, item.name) for item in whole.objects]
        for item, note in zip(whole.objects, notes, strict=True):
            cut = any(note[flag] for flag in ("difficult", "truncated", "occluded"))
            if not cut and int(item.visible.sum()) >= SEEN:
                alone = photos.count((item.category, item.name)) == 1
                asked = alone and split == "val" and longer_side(item.box) >= LEAST_SIDE
                found.setdefault(item.category, []).append(Object(item, asked))
    return whole.categories, found


def views_of(objects: Sequence[Object], category: Category, seed: int) -> Views:
    return find_views(
        torch.stack([one.labelled.points for one in objects]),
        torch.stack([one.labelled.visible for one in objects]),
        flip=category.flip,
        generator=torch.Generator().manual_seed(seed),
    )


def known(views: Views) -> Tensor:
    return (views.doubt <= DOUBT) & (views.error <= ERROR)


def which_bin(degrees: Tensor) -> Tensor:
    return torch.bucketize(degrees, torch.tensor(BINS, dtype=degrees.dtype))


def agreement(views: Views, others: Views) -> dict[str, Any]:
    """How far two searches with other seeds find the same angles between views."""
    both = (known(views) & known(others)).nonzero()[:, 0]
    row, column = torch.triu_indices(len(both), len(both), 1)
    first, second = (
        angle_between(one.rotations[both[row]], one.rotations[both[column]])
        for one in (views, others)
    )
    return {
        "another seed: median difference of two views' angle, degrees":
            round(float((first - second).abs().median()), 1),
        "another seed: pairs that change their bin":
            round(float((which_bin(first) != which_bin(second)).float().mean()), 3),
    }  # fmt: skip


def read_views(data: Path, folder: Path) -> tuple[list[Question], dict[str, Any]]:
    """The questions, and what is known of each class's views; kept in the folder."""
    categories, objects = objects_of(data)
    questions: list[Question] = []
    about: dict[str, Any] = {}
    for number, category in enumerate(categories):
        if category.name not in CLASSES:
            continue
        mine, file = objects[number], folder / f"views-{category.name}.pt"
        if not file.exists():
            torch.save([vars(views_of(mine, category, seed)) for seed in (0, 1)], file)
        views, others = (Views(**one) for one in torch.load(file))
        about[category.name] = {
            "objects": len(mine), "views known": int(known(views).sum()),
            "median error of a keypoint, of the object's size":
                round(float(views.error.median()), 3),
        } | agreement(views, others)  # fmt: skip
        questions += ask(mine, views, category)
    return sorted(questions, key=lambda one: one.round), about


def ask(objects: Sequence[Object], views: Views, category: Category) -> list[Question]:
    """Of every source, as many photos of each bin as there are, at most TARGETS."""
    usable = [n for n in known(views).nonzero()[:, 0].tolist() if objects[n].asked]
    random.Random(0).shuffle(usable)
    questions: list[Question] = []
    for number, source in enumerate(usable[:ROUNDS]):
        room = [TARGETS] * len(NAMES)
        for target in usable:
            pair = objects[source].labelled, objects[target].labelled
            angle = angle_between(views.rotations[source], views.rotations[target])
            group = int(which_bin(angle[None]))
            shared = int((pair[0].visible & pair[1].visible).sum())
            if pair[0].name != pair[1].name and shared >= SHARED and room[group]:
                room[group] -= 1
                plain = (replace(item, category=0) for item in pair)
                questions.append(Question(number, category, *plain, float(angle)))
    return questions


Extract = Callable[[Tensor], Features]


class Answering:
    """Questions answered one after the other; what was seen is kept."""

    def __init__(self, extract: Extract, model: DenseFeatures | None) -> None:
        self.extract, self.model = extract, model
        self.sources: dict[str, Source] = {}
        self.targets: dict[str, Features] = {}

    @torch.no_grad()
    def answer(self, question: Question) -> dict[str, Any]:
        source, target = question.source, question.target
        pixels = target.read()
        if source.name not in self.sources:
            self.sources[source.name] = cut_source([source], self.extract)
        if target.name not in self.targets:
            self.targets[target.name] = self.extract(pixels)

        def look(part: Part) -> Features:
            return self.extract(cut_part(pixels, part))

        seen = self.targets[target.name]
        (joined,) = carry([self.sources[source.name]], seen, [question.category], look)
        away = (joined.points - target.points).norm(dim=-1)
        right = (away < RIGHT_WITHIN * longer_side(target.box)) & target.visible
        line = {
            "key": question.key, "asked": (source.visible & target.visible).tolist(),
            "known": joined.known.tolist(), "right": right.tolist(),
        }  # fmt: skip
        if self.model is None:
            return line
        assert self.model.reliability is not None
        assert self.model.reliability.transfer is not None
        chances = scores(joined, self.model.reliability.transfer)
        return line | {"score": [round(float(v), 5) for v in chances.nan_to_num(0.0)]}


def share(hits: Sequence[int], totals: Sequence[int], groups: Sequence[str]) -> list[float]:
    """Percent and standard error of sum(hits) / sum(totals); each group (a source) counts as one
    draw."""
    hit, total = (torch.tensor(values, dtype=torch.float64) for values in (hits, totals))
    mean = hit.sum() / total.sum()
    names = sorted(set(groups))
    index = torch.tensor([names.index(group) for group in groups])
    sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, index, hit - mean * total)
    factor = len(names) / max(1, len(names) - 1)
    error = (factor * sums.square().sum()).sqrt() / total.sum()
    return [round(100 * float(mean), 1), round(100 * float(error), 1)]


Lines = dict[str, dict[str, Any]]


def in_bin(questions: Sequence[Question], lines: Lines, ours: Lines | None) -> dict[str, Any]:
    """One row in one bin."""
    mine = [lines[one.key] for one in questions]
    groups = [f"{one.category.name} {one.source.name}" for one in questions]
    total = [sum(line["asked"]) for line in mine]

    def hits(some: Lines) -> list[int]:
        pairs = [(some[one.key]["right"], some[one.key]["asked"]) for one in questions]
        return [sum(r and a for r, a in zip(*pair, strict=True)) for pair in pairs]

    entry: dict[str, Any] = {
        "questions": len(mine), "keypoints": sum(total),
        "pck and its standard error": share(hits(lines), total, groups),
    }  # fmt: skip
    if ours is not None:
        gain = [a - b for a, b in zip(hits(ours), hits(lines), strict=True)]
        entry["ours is better by"] = share(gain, total, groups)
    if all("score" in line for line in mine):
        rows = [
            (score, right)
            for line in mine
            for score, right, made in zip(line["score"], line["right"], line["known"], strict=True)
            if made
        ]
        entry["labels made"] = len(rows)
        entry["right among labels made"] = round(100 * sum(r for _, r in rows) / len(rows), 1)
        for name, least in (("sure (0.9)", SURE), ("kept (0.5)", 0.5)):
            chosen = [right for score, right in rows if score >= least]
            entry[name], entry[f"right among {name}"] = len(chosen), sum(chosen)
    return entry


def joined(questions: Sequence[Question], answers: dict[str, Lines]) -> dict[str, Any]:
    """The questions that all rows have answered, in whole rounds."""
    rounds = [
        n for n in range(ROUNDS)
        if all(one.key in lines for one in questions if one.round == n
               for lines in answers.values())
    ]  # fmt: skip
    done = [one for one in questions if one.round in rounds]
    bins = which_bin(torch.tensor([one.degrees for one in done])).tolist()
    table: dict[str, Any] = {"rounds": len(rounds), "questions": len(done)}
    for row, lines in answers.items():
        ours = answers["ours"] if row != "ours" else None
        table[row] = {
            name: in_bin([one for one, b in zip(done, bins, strict=True) if b == n], lines, ours)
            for n, name in enumerate(NAMES)
        } | {"all": in_bin(done, lines, ours)}
    return table


def read_lines(file: Path) -> Lines:
    return {line["key"]: line for line in map(json.loads, file.read_text().splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--journal", type=Path, required=True, help="folder")
    parser.add_argument("--row", default="ours", help="ours, or one of measure/rows.py")
    parser.add_argument("--side", type=int, default=320, help="of the squares another row sees")
    parser.add_argument("--init", nargs="*", default=[], help="weights of an untrained row")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("cpu")
    args.journal.mkdir(parents=True, exist_ok=True)
    questions, views = read_views(args.data, args.journal)
    heads = args.journal / "rows.json"
    rows = json.loads(heads.read_text()) if heads.exists() else {}
    if args.out:
        answers = {row: read_lines(args.journal / known["file"]) for row, known in rows.items()}
        metrics = joined(questions, answers) | {"views": views}
        write_json(args.out, {
            "row": "label transfer by viewpoint", "benchmark": "PASCAL3D+",
            "split": "val; views from the keypoints of train and val", "metrics": metrics,
            "config": {"seen": SEEN, "doubt": DOUBT, "error": ERROR, "shared": SHARED,
                       "bins": BINS, "classes": CLASSES, "rounds": ROUNDS, "targets": TARGETS,
                       "least side, px": LEAST_SIDE},
            "rows": rows, "weights_sha256": rows["ours"]["weights_sha256"], **about,
        })  # fmt: skip
        print(json.dumps(metrics, indent=1))
        return
    model, digest = None, file_hash(model_folder(None) / WEIGHTS)
    if args.row == "ours":
        model = DenseFeatures.from_pretrained(device="cpu")
        extract = model_extract(model)
    else:
        row = build_row(args.row, device=torch.device("cpu"), init=args.init)
        extract, digest = row_extract(row, side=args.side), str(row.weights_sha256)
    file = args.journal / f"{args.row.replace('/', '-').replace(':', '-')}.jsonl"
    rows[args.row] = {"file": file.name, "weights_sha256": digest, **about}
    write_json(heads, rows)
    done = read_lines(file) if file.exists() else {}
    answering, start = Answering(extract, model), time.perf_counter()
    with file.open("a") as journal:
        for question in tqdm([q for q in questions if q.round < args.rounds], mininterval=20):
            if question.key not in done:
                journal.write(json.dumps(answering.answer(question)) + "\n")
                journal.flush()
    print(f"{len(done)} were there; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

"""Which labelled photos are carried to which others: the material of transfer.py.

Birds: groups are species of cub-dev, every second one for the fit. PASCAL3D+: groups are classes,
the train split for the fit, val for the check. Each group has three labelled photos, some others,
and one photo of something else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from surefeat.data.coco import Category
from surefeat.data.keypoints import Labelled, read_coco
from surefeat.measure.metrics import longer_side

SOURCES = 3
LEAST_SIDE = 100.0
"""Pixels of a box's longer side; photos have 300 to 384."""
ALIKE = 0.6
"""Two objects show the same side if so much of the parts seen in either are seen in both; the
annotations have no viewpoint."""


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


def tasks_of(data: Path, part: str, *, small: bool) -> list[Task]:
    """All tasks of a part; in the check, a photo of something else for every third group."""
    birds, targets, pascal = (3, 1, 1) if small else (12, 3, 4)
    tasks = bird_tasks(data, part, birds, targets) + pascal_tasks(data, part, pascal)
    every = with_unrelated(tasks)
    if part == "fit":
        return every
    strange = [task for task in every if not task.related][::3]
    return [task for task in every if task.related or any(task is one for one in strange)]

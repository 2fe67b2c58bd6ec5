"""Pairs of photos with known answers for reliability.py: related or not, and point by point.

Sets: PF-PASCAL (development lists, then its test list), birds (CUB-200-2011, halves by species),
VOC photos of one object with PASCAL3D+'s keypoints (its val half), PF-WILLOW, whole VOC photos of
all 20 classes, two halves, of which no points are known, and photos of nothing: crops of VOC photos
that no annotated box touches. No photo is in two halves.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.geometry import clip_boxes
from surefeat.core.image import ImageLike, decode, read_bytes
from surefeat.data.benchmarks import development_pairs, load_pf_pascal, load_pf_willow
from surefeat.data.decode import Item
from surefeat.data.keypoints import read_coco
from surefeat.data.pairs import Pair, load_pairs
from surefeat.data.sources import find_images

NEAR = (
    {"bus", "car", "train"}, {"cow", "sheep", "horse", "dog", "cat"}, {"bicycle", "motorbike"},
    {"chair", "sofa", "diningtable"},
)  # fmt: skip
"""Classes that resemble each other, or stand in one photo."""

BACKGROUND = 6
"""Places outside all boxes that are asked for in each pair."""

Place = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Photo:
    """A photo, what is in it, and where."""

    name: str
    read: Callable[[], ImageLike]
    size: tuple[int, int]
    """(height, width)."""
    kinds: frozenset[str]
    """All that is known to be in it."""
    kind: str
    """What it is a photo of; empty: nothing."""
    boxes: Tensor
    """(B, 4) inclusive, original pixels: outside them is background; none known: (0, 4)."""
    parts: Tensor | None = None
    """(K, 2) original pixels of its keypoints, NaN where not visible."""


@dataclass(frozen=True, eq=False)
class Case:
    """Two photos and points of the first with their places in the second."""

    photo0: Photo
    photo1: Photo
    related: bool
    kind: str
    """same, near, far or nothing."""
    points0: Tensor
    """(N, 2) original pixels."""
    points1: Tensor
    """(N, 2) original pixels, NaN where there is no counterpart."""
    what: tuple[str, ...]
    """Of each point: seen in both, hidden in photo 1, background, or of an unrelated pair."""


def voc_boxes(data: Path) -> dict[str, dict[str, Any]]:
    """Name of a VOC photo -> its size, boxes (B, 4) and their classes."""
    photos: dict[str, dict[str, Any]] = {}
    for folder in ("voc", "voc-nonrigid"):
        content = json.loads((data / folder / "instances.json").read_text())
        names = {entry["id"]: entry["name"] for entry in content["categories"]}
        by_id = {}
        for entry in content["images"]:
            about = {"size": (entry["height"], entry["width"]), "boxes": [], "kinds": [],
                     "pf-pascal": entry.get("pf_pascal", "no") != "no"}  # fmt: skip
            by_id[entry["id"]] = photos[Path(entry["file_name"]).stem] = about
        for note in content["annotations"]:
            x, y, width, height = note["bbox"]
            about = by_id[note["image_id"]]
            about["boxes"].append([x, y, x + width - 1, y + height - 1])
            about["kinds"].append(names[note["category_id"]])
    return photos


def _given(path: Path) -> Callable[[], ImageLike]:
    return lambda: path


def photo_of(pair: Pair, side: int, known: dict[str, dict[str, Any]]) -> Photo:
    """One photo of a benchmark's pair; boxes come from VOC's, where it has the photo."""
    path = (pair.image0, pair.image1)[side]
    size = (pair.size0, pair.size1)[side]
    about = known.get(path.stem)
    boxes = torch.zeros(0, 4)
    if about and about["boxes"]:
        boxes = torch.tensor(about["boxes"]) * (size[1] / about["size"][1])
    kinds = frozenset({pair.category, *(about["kinds"] if about else ())})
    return Photo(str(path), _given(path), size, kinds, pair.category, boxes)


def related_case(pair: Pair, known: dict[str, dict[str, Any]], rng: random.Random) -> Case:
    photos = [photo_of(pair, side, known) for side in (0, 1)]
    points0, points1 = pair.common()
    return _with_background(photos[0], photos[1], points0, points1, ["both"] * len(points0), rng)


def parts_case(photo0: Photo, photo1: Photo, rng: random.Random) -> Case:
    """Two photos of one kind with keypoints: those of the first, seen in the second or not."""
    assert photo0.parts is not None
    assert photo1.parts is not None
    seen = photo0.parts.isfinite().all(-1)
    points0, points1 = photo0.parts[seen], photo1.parts[seen]
    what = ["both" if ok else "hidden" for ok in points1.isfinite().all(-1).tolist()]
    return _with_background(photo0, photo1, points0, points1, what, rng)


def _with_background(
    photo0: Photo, photo1: Photo, points0: Tensor, points1: Tensor, what: list[str],
    rng: random.Random,
) -> Case:  # fmt: skip
    places = background(photo0, rng, count=BACKGROUND)
    points0, points1 = (t.float() for t in (points0, points1))
    points0 = torch.cat([points0, places])
    points1 = torch.cat([points1, torch.full_like(places, torch.nan)])
    return Case(photo0, photo1, True, "same", points0, points1,
                (*what, *["background"] * len(places)))  # fmt: skip


def unrelated_case(photo0: Photo, photo1: Photo, kind: str, rng: random.Random) -> Case:
    """Points on and off the object of the first; none has a counterpart."""
    inside = [] if not len(photo0.boxes) else _in_box(photo0.boxes[0].tolist(), rng, 5)
    if photo0.parts is not None:
        inside = photo0.parts[photo0.parts.isfinite().all(-1)].tolist()[:8]
    rest = background(photo0, rng, count=BACKGROUND)
    points = torch.cat([torch.tensor(inside).reshape(-1, 2), rest]) if inside else rest
    if not len(points):
        points = _anywhere(photo0, rng, 8)
    nowhere = torch.full_like(points, torch.nan)
    return Case(photo0, photo1, False, kind, points, nowhere, ("unrelated",) * len(points))


def _in_box(box: Sequence[float], rng: random.Random, count: int) -> list[Place]:
    x1, y1, x2, y2 = box
    return [(rng.uniform(x1, x2), rng.uniform(y1, y2)) for _ in range(count)]


def _anywhere(photo: Photo, rng: random.Random, count: int) -> Tensor:
    height, width = photo.size
    return torch.tensor(_in_box((0, 0, width - 1, height - 1), rng, count))


def background(photo: Photo, rng: random.Random, *, count: int) -> Tensor:
    """Up to `count` places (N, 2) clear of all boxes; none where no box is known."""
    if not len(photo.boxes):
        return torch.zeros(0, 2)
    margin = 0.04 * max(photo.size)
    places = _anywhere(photo, rng, 40)
    first, last = photo.boxes[:, :2] - margin, photo.boxes[:, 2:] + margin
    inside = ((places[:, None] >= first) & (places[:, None] <= last)).all(-1).any(-1)
    return places[~inside][:count]


def unrelated_cases(
    photos0: Sequence[Photo], photos1: Sequence[Photo], rng: random.Random, *, far: int,
    near: int = 0,
) -> list[Case]:  # fmt: skip
    """Pairs of photos of other classes, `near` of them of classes that resemble each other.

    They have no class in common at all, as far as VOC knows what is in them.
    """
    cases: list[Case] = []
    wanted = {"far": far, "near": near}
    for _ in range(200 * (far + near)):
        photo0, photo1 = rng.choice(photos0), rng.choice(photos1)
        if photo0.kind == photo1.kind:
            continue
        alike = any({photo0.kind, photo1.kind} <= group for group in NEAR)
        kind = "near" if alike else "far"
        if wanted[kind] and not photo0.kinds & photo1.kinds:
            wanted[kind] -= 1
            cases.append(unrelated_case(photo0, photo1, kind, rng))
    return cases


def birds(data: Path, rng: random.Random) -> tuple[list[Case], list[Case], list[Case]]:
    """Related pairs of two halves of the species, and pairs of two species."""
    keypoints = read_coco(data / "cub-dev/keypoints.json", images=data / "cub-dev/photos")
    folder = data / "cub-dev/photos"
    photos = {
        item.name: Photo(
            f"cub/{item.name}", _given(folder / item.name), item.size,
            frozenset({"bird"}), "bird", item.box[None],
            torch.where(item.visible[:, None], item.points, torch.nan),
        )
        for item in keypoints.objects
    }  # fmt: skip
    halves: tuple[list[Case], list[Case]] = ([], [])
    shown = []
    for pair in load_pairs(data / "cub-dev/pairs.csv"):
        first, second = (photos[path.name] for path in (pair.image0, pair.image1))
        halves[int(pair.category) % 4 == 1].append(parts_case(first, second, rng))
        shown.append((first, second, pair.category))
    species = []
    while len(species) < 100:
        one, two = rng.sample(shown, 2)
        if one[2] != two[2]:
            species.append(parts_case(one[0], two[1], rng))
    return *halves, species


def voc_objects(data: Path, split: str, known: dict[str, dict[str, Any]]) -> list[Photo]:
    """VOC photos with one object of their class, PASCAL3D+'s keypoints on it."""
    labelled = read_coco(data / f"pascal3d/keypoints_{split}.json", images=data / "voc")
    photos = []
    for item in labelled.objects:
        about = known[Path(item.name).stem]
        kind = labelled.categories[item.category].name
        large = bool((item.box[2:] - item.box[:2]).max() > 0.4 * max(item.size))
        alone = about["kinds"].count(kind) == 1 and not about["pf-pascal"]
        if alone and large and int(item.visible.sum()) >= 4:
            parts = torch.where(item.visible[:, None], item.points, torch.nan)
            photos.append(
                Photo(f"voc/{item.name}", item.read, item.size, frozenset(about["kinds"]), kind,
                      torch.tensor(about["boxes"]), parts)
            )  # fmt: skip
    return photos


def voc_cases(photos: Sequence[Photo], rng: random.Random, *, count: int) -> list[Case]:
    """Related pairs, classes in turn, a photo in one of them at most."""
    groups: dict[str, list[Photo]] = {}
    for photo in photos:
        groups.setdefault(photo.kind, []).append(photo)
    for group in groups.values():
        rng.shuffle(group)
    cases: list[Case] = []
    while len(cases) < count and any(len(group) > 1 for group in groups.values()):
        for group in groups.values():
            if len(group) > 1 and len(cases) < count:
                cases.append(parts_case(group.pop(), group.pop(), rng))
    return cases


def empty_crops(photos: Sequence[Photo], rng: random.Random, *, count: int) -> list[Photo]:
    """Crops of photos that no box touches, at least 45 % of the photo each way."""
    crops: list[Photo] = []
    for photo in rng.sample(list(photos), len(photos)):
        height, width = photo.size
        w, h = int(0.55 * width), int(0.45 * height)
        for x, y in ((0, 0), (width - w, 0), (0, height - h), (width - w, height - h)):
            x1, y1, x2, y2 = photo.boxes.unbind(-1)
            free = (x2 < x) | (x1 > x + w - 1) | (y2 < y) | (y1 > y + h - 1)
            if bool(free.all()) and len(crops) < count:
                box = torch.tensor([x, y, x + w - 1, y + h - 1]).float()
                crops.append(
                    Photo(f"{photo.name}#{x},{y}", _cropped(photo, box), (h, w), frozenset(), "",
                          torch.zeros(0, 4))
                )  # fmt: skip
                break
    return crops


def _cropped(photo: Photo, box: Tensor) -> Callable[[], ImageLike]:
    def read() -> ImageLike:
        pixels = photo.read()
        assert isinstance(pixels, Tensor)
        height, width = (int(box[i + 2] - box[i]) + 1 for i in (1, 0))
        x, y = int(box[0]), int(box[1])
        return pixels[:, y : y + height, x : x + width]

    return read


def nothing_cases(
    nothing: Sequence[Photo], others: Sequence[Photo], rng: random.Random, *, count: int
) -> list[Case]:
    """Photos of nothing against photos of something, and against each other."""
    cases = []
    for number in range(count):
        first = rng.choice(nothing)
        second = rng.choice([p for p in nothing if p is not first] if number % 3 == 0 else others)
        both = (first, second) if number % 2 else (second, first)
        cases.append(unrelated_case(*both, "nothing", rng))
    return cases


def whole(item: Item) -> Callable[[], ImageLike]:
    """Reads a photo of a folder or shard."""

    def read() -> ImageLike:
        place = item.read
        raw = read_bytes(place.path, name=item.name, offset=place.offset, size=place.size)
        return decode(raw, name=item.name)

    return read


def whole_photos(data: Path, leave_out: set[str], *, seed: int) -> dict[str, list[Photo]]:
    """Class -> VOC photos whose largest object, at least MAIN of the photo, is of it.

    leave_out: stems of names. None is of PF-PASCAL.
    """
    known, groups = voc_boxes(data), {}
    for folder in ("voc", "voc-nonrigid"):
        for item in find_images(data / folder):
            about = known[Path(item.name).stem]
            if Path(item.name).stem in leave_out or about["pf-pascal"] or not about["boxes"]:
                continue
            boxes = torch.tensor(about["boxes"])
            areas = (boxes[:, 2:] - boxes[:, :2] + 1).prod(1)
            if areas.max() < MAIN * about["size"][0] * about["size"][1]:
                continue
            kind = about["kinds"][int(areas.argmax())]
            photo = Photo(f"whole/{item.name}", whole(item), about["size"],
                          frozenset(about["kinds"]), kind, boxes[areas.argmax()][None])  # fmt: skip
            groups.setdefault(kind, []).append(photo)
    for kind in sorted(groups):
        groups[kind].sort(key=lambda photo: photo.name)
        random.Random(f"{seed} {kind}").shuffle(groups[kind])
    return {kind: groups[kind] for kind in sorted(groups)}


def whole_cases(
    data: Path, leave_out: set[str], *, scale: float = 1.0, seed: int = 0
) -> dict[str, list[Case]]:
    """WHOLE's lists: pairs of one class against pairs that share none, of which no point is asked.

    The photos of the second list are others than those of the first.
    """
    groups, cases, first = whole_photos(data, leave_out, seed=seed), {}, 0
    for name, (most, pairs) in WHOLE.items():
        rng, count = random.Random(f"{seed} {name}"), max(3, int(most * scale))
        chosen = {kind: photos[first : first + count] for kind, photos in groups.items()}
        first += most
        same = [
            Case(*rng.sample(photos, 2), True, "same", torch.zeros(0, 2), torch.zeros(0, 2), ())
            for photos in chosen.values() for _ in range(max(1, int(pairs * scale)))
        ]  # fmt: skip
        every = [photo for photos in chosen.values() for photo in photos]
        others = unrelated_cases(every, every, rng, far=len(same), near=len(same) // 4)
        none = torch.zeros(0, 2)
        cases[name] = [*same, *(replace(c, points0=none, points1=none, what=()) for c in others)]
    return cases


SIZES = {
    "pf-pascal fit": 250, "pf-pascal val": 120, "birds fit": 200,
    "pf-pascal test": 299, "pf-willow": 300, "birds": 200, "voc": 100, "two species": 100,
}  # fmt: skip
"""Related pairs of each list, at most."""

WHOLE = {"voc whole fit": (30, 30), "voc whole": (15, 15)}
"""Lists of whole photos: photos and related pairs of each class, at most."""

MAIN = 0.15
"""The least share of a whole photo that the box of its largest object covers."""

FITTED = ("pf-pascal fit", "pf-pascal val", "birds fit", "voc whole fit")
"""To choose by and to fit on; the others are only measured."""


def all_cases(
    data: Path, *, scale: float = 1.0, seed: int = 0, names: Sequence[str] = tuple(SIZES)
) -> dict[str, list[Case]]:
    """Lists of cases by name. Each is drawn by itself, whichever others are asked for.

    scale: a share of every list, for a quick look.
    """
    known = voc_boxes(data)
    related = _related_cases(data, known, seed)
    cases: dict[str, list[Case]] = {}
    for name in names:
        rng = random.Random(f"{seed} {name}")
        count = max(4, int(SIZES[name] * scale))
        same = related[name](rng)[:count]
        if name == "two species":
            cases[name] = same
            continue
        photos = [photo for case in same for photo in (case.photo0, case.photo1)]
        others = photos
        if name.startswith("birds"):
            beside = "pf-pascal fit" if name in FITTED else "pf-pascal test"
            shown = related[beside](random.Random(f"{seed} {beside}"))[:count]
            others = [p for case in shown for p in (case.photo0, case.photo1)
                      if "bird" not in p.kinds]  # fmt: skip
        objects = voc_objects(data, "train" if name in FITTED else "val", known)
        crops = empty_crops(objects, rng, count=max(4, int(60 * scale)))
        near = 0 if name.startswith(("birds", "pf-willow")) else len(same) // 4
        cases[name] = [
            *same, *unrelated_cases(photos, others, rng, far=len(same), near=near),
            *nothing_cases(crops, photos, rng, count=len(same) // 4),
        ]  # fmt: skip
    return cases


def _related_cases(
    data: Path, known: dict[str, dict[str, Any]], seed: int
) -> dict[str, Callable[[random.Random], list[Case]]]:
    """Of every list, what gives its related pairs."""
    val, train = development_pairs(data / "pf-pascal")
    held = {path for pair in val for path in (pair.image0, pair.image1)}
    train = [pair for pair in train if not {pair.image0, pair.image1} & held]

    def pascal(pairs: list[Pair]) -> Callable[[random.Random], list[Case]]:
        return lambda rng: [related_case(p, known, rng) for p in rng.sample(pairs, len(pairs))]

    def willow(rng: random.Random) -> list[Case]:
        pairs = load_pf_willow(data / "pf-willow")
        return [willow_case(p, rng) for p in rng.sample(pairs, len(pairs))]

    def bird(part: int) -> Callable[[random.Random], list[Case]]:
        # The places of the background must not depend on which half is asked for.
        return lambda rng: birds(data, random.Random(seed))[part]

    def voc(split: str) -> Callable[[random.Random], list[Case]]:
        return lambda rng: voc_cases(voc_objects(data, split, known), rng, count=SIZES["voc"])

    return {
        "pf-pascal fit": pascal(train), "pf-pascal val": pascal(val),
        "pf-pascal test": pascal(load_pf_pascal(data / "pf-pascal")), "pf-willow": willow,
        "birds fit": bird(0), "birds": bird(1), "two species": bird(2),
        "voc": voc("val"),
    }  # fmt: skip


def willow_case(pair: Pair, rng: random.Random) -> Case:
    """Sub-classes of one thing are one kind; the keypoints span the object, a little more is it."""
    photos = []
    for path, size, points in (
        (pair.image0, pair.size0, pair.points0), (pair.image1, pair.size1, pair.points1),
    ):  # fmt: skip
        first, last = points.nan_to_num(1e6).amin(0), points.nan_to_num(-1e6).amax(0)
        margin = 0.2 * (last - first)
        box = clip_boxes(torch.cat([first - margin, last + margin])[None], size=size)
        kind = pair.category.split("(")[0]
        photos.append(Photo(str(path), _given(path), size, frozenset({kind}), kind, box))
    points0, points1 = pair.common()
    return _with_background(*photos, points0, points1, ["both"] * len(points0), rng)

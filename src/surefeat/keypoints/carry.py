"""What labelled objects say of another photo: matched part by part, put together by votes.

Every labelled object is matched with the photo, its parts and a grid of places inside its box. Its
motion (keypoints.motion) gives the box and the mask, and says whether it faces the other way, in
which case left and right exchange their names. Several labelled objects of a category vote: a part
goes where most of what they believe lies. The signs that are left say how probably that is right.
Labelled objects are seen cut out of their photos. An object that turns out to be small in the other
photo is looked at a second time, cut out as well: its keypoints are then those of the second look.
Convention: original pixels; of each category one object per photo, unless one labelled photo has
several, which may then lead to several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefeat.core.geometry import box_iou
from surefeat.data.coco import Category
from surefeat.data.decode import Place
from surefeat.data.keypoints import Labelled
from surefeat.keypoints.motion import Motion, fit_motion, mask_box
from surefeat.match.large import Part, cut_part
from surefeat.match.points import Matches, match_points
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import TransferTrust

POINT_SIGNS = ("odds", "share", "voters", "stray", "support", "size")

BOX_SIGNS = ("support", "related", "overlap", "voters")

RIGHT_WITHIN = 0.1
"""Of the object's longer side: what a keypoint's score speaks of."""

GRID = 9
"""Places along each side of an object's box that are matched beside its parts."""

CONTEXT = 0.25
"""Of an object's longer side: what is cut out around it."""

SMALL = 0.75
"""A part of a photo is looked at by itself if its longer side has less than this of the photo's."""

_NEAR = 0.1
"""Of the object's longer side: places closer than about this support each other."""

_SAME = 0.3
"""Boxes that overlap by so much are of one object."""

_LEAST = 32
"""Pixels: a smaller part shows nothing, however much it is enlarged."""

_EDGE = 1e-4  # of probabilities, before their odds are taken


@dataclass(frozen=True, eq=False)
class Source:
    """A labelled photo, or the part of it that has its objects, as the model sees it."""

    features: Features
    objects: tuple[Labelled, ...]
    """Points and boxes in pixels of that part, `size` being its own."""


@dataclass(frozen=True, eq=False)
class Carried:
    """One labelled object, as it would lie in another photo."""

    labelled: Labelled
    motion: Motion
    points: Tensor
    """(K, 2) original pixels, by the names they have there; NaN where it has no such part."""
    chances: Tensor
    """(K,) of each match by itself, 0 where there is none."""
    stray: Tensor
    """(K,) how far a match lies from where the object's motion leads, its longer sides."""
    related: float
    """That both photos show the same kind of thing; 1 where nobody knows."""
    box: Tensor
    """(4,) inclusive; the whole photo where the labelled object has none."""
    mask: tuple[Tensor, ...]
    around: Tensor
    """(4,): the box, or without one, what its keypoints and their surroundings cover."""

    @property
    def weight(self) -> float:
        """What it counts beside others where boxes are joined."""
        return self.related * self.motion.support + 1e-6


@dataclass(frozen=True, eq=False)
class Joined:
    """What the labelled objects of a category say together of one object in a photo."""

    category: int
    box: Tensor
    points: Tensor
    """(K, 2); NaN where none of them has the part."""
    known: Tensor
    """(K,) bool: one of them has it."""
    signs: dict[str, Tensor]
    """POINT_SIGNS (K,)."""
    box_signs: dict[str, Tensor]
    """BOX_SIGNS, single numbers."""
    chances: Tensor
    """(K,): what the agreeing matches say by themselves, without calibration."""
    mask: tuple[Tensor, ...]
    around: Tensor
    """(4,): where the object was found, also where it has no box of its own."""


def read_sources(items: Sequence[Labelled], model: DenseFeatures) -> list[Source]:
    """Labelled objects, photo by photo, with the features of the part that holds them."""
    groups: dict[Place, list[Labelled]] = {}
    for item in items:
        groups.setdefault(item.image, []).append(item)
    return [cut_source(objects, lambda part: model.extract(part)[0]) for objects in groups.values()]


def cut_source(objects: Sequence[Labelled], extract: Callable[[Tensor], Features]) -> Source:
    """The objects of one photo, cut out together, unless they fill most of it."""
    pixels, size = objects[0].read(), objects[0].size
    boxes = torch.stack([_surroundings(item) for item in objects])
    part = part_around(torch.cat([boxes[:, :2].amin(0), boxes[:, 2:].amax(0)]), size=size)
    if part is None:
        return Source(extract(pixels), tuple(objects))
    return Source(extract(cut_part(pixels, part)), tuple(_cut(item, part) for item in objects))


def part_around(box: Tensor, *, size: tuple[int, int]) -> Part | None:
    """A box (4,) with its context, as a part of a photo of (height, width); None: it is not small.

    What fills most of its photo is seen as well in the photo itself, with all that surrounds it.
    """
    margin = CONTEXT * (box[2:] - box[:2] + 1).max()
    low = (box[:2] - margin).floor().clamp_min(0)
    high = torch.minimum((box[2:] + margin).ceil(), box.new_tensor([size[1] - 1, size[0] - 1]))
    x1, y1, x2, y2 = (int(value) for value in (*low, *high))
    longer = max(x2 - x1 + 1, y2 - y1 + 1)
    return (x1, y1, x2, y2) if _LEAST <= longer < SMALL * max(size) else None


def _cut(item: Labelled, part: Part) -> Labelled:
    """A labelled object in pixels of a part of its photo."""
    first = torch.tensor(part[:2]).float()
    size = (part[3] - part[1] + 1, part[2] - part[0] + 1)
    box = item.box - first.repeat(2)
    if not has_box(item):
        box = torch.tensor([0.0, 0.0, size[1] - 1.0, size[0] - 1.0])
    mask = tuple(ring - first for ring in item.mask)
    return replace(item, box=box, points=item.points - first, size=size, mask=mask)


Look = Callable[[Part], Features]
"""Features of a part of the photo to which labels are carried."""


def carry(
    sources: Sequence[Source], target: Features, categories: Sequence[Category],
    look: Look | None = None,
) -> list[Joined]:  # fmt: skip
    """What labelled photos say of another, object by object, category by category.

    look: for a second look at objects that are small there; without it there is none.
    """
    carried = [one for source in sources for one in carry_photo(source, target, categories)]
    size = target.frame.original
    objects = []
    for number in sorted({one.labelled.category for one in carried}):
        for group in _grouped([one for one in carried if one.labelled.category == number]):
            joined = join(group, size)
            part = part_around(joined.around, size=size) if look else None
            if look and part:
                mine = _only(sources, group)
                joined = _seen_closer(joined, part, mine, look(part), categories)
            objects.append(joined)
    return objects


def _only(sources: Sequence[Source], group: Sequence[Carried]) -> list[Source]:
    """The sources with those of their objects that speak of one object."""
    kept = {id(one.labelled) for one in group}
    pairs = [(one, tuple(x for x in one.objects if id(x) in kept)) for one in sources]
    return [replace(source, objects=objects) for source, objects in pairs if objects]


def _seen_closer(
    first: Joined, part: Part, sources: Sequence[Source], target: Features,
    categories: Sequence[Category],
) -> Joined:  # fmt: skip
    """Keypoints of a second look at a part of the photo; the box stays that of the first.

    Seen closer, keypoints are found better and boxes are not (docs/transfer.md).
    """
    carried = [one for source in sources for one in carry_photo(source, target, categories)]
    closer = join(carried, target.frame.original)
    points = closer.points + torch.tensor(part[:2])
    return replace(first, points=points, known=closer.known, signs=closer.signs,
                   chances=closer.chances)  # fmt: skip


def carry_photo(source: Source, target: Features, categories: Sequence[Category]) -> list[Carried]:
    """All objects of a labelled photo, matched at once."""
    size = source.features.frame.original
    parts = [_inside(item.points[item.visible], size) for item in source.objects]
    grids = [_grid(item) for item in source.objects]
    points = [p for both in zip(parts, grids, strict=True) for p in both]
    device = target.descriptors.device
    matches = match_points(source.features, target, torch.cat(points).to(device))
    counts = torch.tensor([len(p) for p in points]).cumsum(0).tolist()
    pieces = [
        matches.take(torch.arange(start, end, device=device))
        for start, end in zip([0, *counts], counts, strict=False)
    ]
    return [
        _carried(item, pieces[2 * i], pieces[2 * i + 1], categories[item.category].flip)
        for i, item in enumerate(source.objects)
    ]


def chances_of(matches: Matches) -> Tensor:
    """(N,) in [0, 1]: the matches' probabilities; else their similarity, if they lead back."""
    if matches.probability is not None:
        return matches.probability.cpu()
    trip = matches.round_trip / (0.1 * max(matches.size0))
    return (matches.trusted_score * (-0.5 * trip.square()).exp()).cpu()


def _carried(item: Labelled, parts: Matches, grid: Matches, flip: Sequence[int]) -> Carried:
    sizes = {"size0": grid.size0, "size1": grid.size1}
    motion = fit_motion(grid.points0.cpu(), grid.points1.cpu(), chances_of(grid), **sizes)
    rows = item.visible.nonzero()[:, 0]
    if motion.mirrored:
        rows = torch.tensor(flip, dtype=torch.long)[rows]
    points = torch.full((len(item.visible), 2), torch.nan)
    chances, stray = torch.zeros(len(points)), torch.zeros(len(points))
    points[rows] = parts.points1.cpu()
    chances[rows] = chances_of(parts)
    whole = not has_box(item)
    height, width = grid.size1
    box = torch.tensor([0.0, 0.0, width - 1.0, height - 1.0])
    mask = motion.move_mask(item.mask, size=grid.size1)
    if not whole:
        moved = mask_box(mask, size=grid.size1) if mask else None
        box = motion.move_box(item.box.float(), size=grid.size1) if moved is None else moved
    around = box if not whole else motion.move_box(_surroundings(item), size=grid.size1)
    away = parts.points1.cpu() - motion.move_points(parts.points0.cpu())
    stray[rows] = away.norm(dim=-1) / _longer(box)
    related = 1.0 if grid.related is None else grid.related
    return Carried(item, motion, points, chances, stray, related, box, mask, around)


def _grouped(carried: list[Carried]) -> list[list[Carried]]:
    """Those that speak of one object together, the best supported group first.

    Objects of one labelled photo that come to lie apart are different objects; of different photos
    all speak of the same, agreeing or not.
    """
    several = [sum(a.labelled.image == b.labelled.image for b in carried) > 1 for a in carried]
    order = sorted(range(len(carried)), key=lambda i: -carried[i].weight)
    groups: list[list[Carried]] = []
    for i in order:
        boxes = torch.stack([group[0].box for group in groups]) if groups else torch.zeros(0, 4)
        overlap = box_iou(boxes, carried[i].box[None])[:, 0]
        if not groups or (several[i] and float(overlap.max()) < _SAME):
            groups.append([carried[i]])
        else:
            groups[int(overlap.argmax())].append(carried[i])
    return groups


def join(carried: Sequence[Carried], size: tuple[int, int]) -> Joined:
    """The votes of several labelled objects for one object in a photo of (height, width)."""
    weights = torch.tensor([one.weight for one in carried])
    boxes = torch.stack([one.box for one in carried])
    overlap = box_iou(boxes, boxes)
    best = int((overlap @ weights).argmax())  # the box that the others agree with
    near = weights * (overlap[best] >= 0.5)
    box = near @ boxes / near.sum()
    longer = _longer(box)
    points, chances, stray = (
        torch.stack([getattr(one, name) for one in carried])
        for name in ("points", "chances", "stray")
    )
    has = points.isfinite().all(-1)
    places = points.nan_to_num(1e9)
    apart = (places[:, None] - places[None]).norm(dim=-1) / (_NEAR * longer)
    near_by = (-0.5 * apart.square()).exp() * has[None]  # (S, S, K)
    votes = torch.einsum("ijk,jk->ik", near_by, chances + 1e-6)
    chosen = votes.masked_fill(~has, -1.0).argmax(0)
    columns = torch.arange(points.shape[1])
    agree = near_by[chosen, :, columns]  # (K, S)
    say = agree * (chances + 1e-6).T
    known = has.any(0)
    place = (say[..., None] * places.transpose(0, 1)).sum(1) / say.sum(1, keepdim=True)
    place = torch.where(known[:, None], place, torch.nan)
    # As if the agreeing were independent: the calibration knows that they are not.
    both = 1 - (1 - agree * chances.T).prod(1)
    scale = _longer(box) / max(size)
    signs = {
        "odds": torch.logit(both.clamp(_EDGE, 1 - _EDGE)),
        "share": say.sum(1) / (has * (chances + 1e-6)).sum(0).clamp_min(1e-6),
        "voters": (agree.sum(1) + 1e-3).log(),
        "stray": ((agree * stray.T).sum(1) / agree.sum(1).clamp_min(1e-6) + 0.02).log(),
        "support": (torch.tensor([one.motion.support for one in carried]) @ near / near.sum())
        .expand(len(columns)),
        "size": torch.tensor(scale).log().expand(len(columns)),
    }  # fmt: skip
    return Joined(
        carried[0].labelled.category, box, place, known, signs,
        _box_signs(carried, overlap[best], near), both * known, _best_mask(carried, near),
        near @ torch.stack([one.around for one in carried]) / near.sum(),
    )  # fmt: skip


def _best_mask(carried: Sequence[Carried], near: Tensor) -> tuple[Tensor, ...]:
    """Of those that agree on the box, and have one, the best supported one's."""
    outlined = [(float(near[i]), one.mask) for i, one in enumerate(carried) if one.mask]
    weight, mask = max(outlined, key=lambda pair: pair[0], default=(0.0, ()))
    return mask if weight > 0 else ()


def _box_signs(carried: Sequence[Carried], overlap: Tensor, near: Tensor) -> dict[str, Tensor]:
    share = near / near.sum()
    support = torch.tensor([one.motion.support for one in carried])
    related = torch.tensor([one.related for one in carried])
    values = (
        (share @ support + 0.01).log(), share @ torch.logit(related.clamp(_EDGE, 1 - _EDGE)),
        overlap.mean(), torch.tensor(float(len(carried))).log(),
    )  # fmt: skip
    return dict(zip(BOX_SIGNS, values, strict=True))


def as_labelled(joined: Joined, trust: TransferTrust | None, target: Features) -> Labelled:
    """An object with its scores; whatever is known of it is visible."""
    scores, box_score = joined.chances, None
    if trust is not None:
        scores = trust.point.log_odds(joined.signs).sigmoid() * joined.known
        box_score = float(trust.box.log_odds(joined.box_signs).sigmoid())
    return Labelled(
        image=Place(target.name), name=target.name, category=joined.category, box=joined.box,
        points=joined.points, visible=joined.known, size=target.frame.original,
        scores=scores, mask=joined.mask, box_score=box_score,
    )  # fmt: skip


def has_box(item: Labelled) -> bool:
    """It has a box of its own, which is not the whole photo, or a mask."""
    return not _is_whole(item) or bool(item.mask)


def _is_whole(item: Labelled) -> bool:
    return bool(item.box.tolist() == [0, 0, item.size[1] - 1, item.size[0] - 1])


def _surroundings(item: Labelled) -> Tensor:
    """(4,): an object's box; without one, what its keypoints cover and some more."""
    if has_box(item):
        return mask_box(item.mask, size=item.size) if _is_whole(item) else item.box.float()
    seen = item.points[item.visible]
    low, high = seen.amin(0), seen.amax(0)
    margin = 0.25 * (high - low).max().clamp_min(0.1 * max(item.size))
    return torch.cat([low - margin, high + margin])


def _grid(item: Labelled) -> Tensor:
    """(GRID * GRID, 2): places inside an object's box; without a box, around its keypoints."""
    box = _surroundings(item)
    steps = (torch.arange(GRID) + 0.5) / GRID
    ys, xs = (box[i] - 0.5 + steps * (box[i + 2] - box[i] + 1) for i in (1, 0))
    return _inside(torch.cartesian_prod(ys, xs).flip(-1), item.size)


def _inside(points: Tensor, size: tuple[int, int]) -> Tensor:
    """Labels may lie a pixel outside; matching takes what is inside."""
    top = points.new_tensor([size[1] - 1, size[0] - 1])
    return torch.minimum(points.clamp_min(0), top)


def _longer(box: Tensor) -> float:
    return float((box[2:] - box[:2] + 1).max())

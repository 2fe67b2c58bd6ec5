"""How far a detector's keypoints can be trusted: learned when it is fitted, by cross-validation.

Three numbers for every predicted keypoint: how probably the part is in the photo, how probably it
is there and found within a tenth of the box's longer side, and how far off the place is expected to
be. They are logistic models of a few signs; the objects a fold leaves out have known answers. Few
labels only correct a prior, what was learned from many detectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import out_of_box, sample
from surefeat.keypoints.head import KeypointHead, peaks
from surefeat.keypoints.views import BATCH, CutObjects, side_by_side
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import KeypointTrust, fit_logistic

RIGHT_WITHIN = 0.1
"""Of the box's longer side: PCK's usual limit."""

FOLDS = 5

SIGNS = ("peak", "gap", "agreement", "rival", "confidence", "share", "labels")

PRIOR_STRENGTH = 10.0
"""Of the prior beside the labels (see fit_logistic)."""

# Cells around a peak that belong to it.
_OWN = 2


@dataclass(frozen=True, eq=False)
class Examples:
    """What the labelled parts of K channels look like."""

    vectors: Tensor
    """(K, C): the mean of their features, unit length; 0 where none is labelled."""
    seen: Tensor
    """(K,): how many objects show the part."""
    asked: Tensor
    """(K,): of how many objects of its category."""

    def to(self, device: torch.device) -> Examples:
        return Examples(*(getattr(self, name).to(device) for name in ("vectors", "seen", "asked")))


@dataclass(frozen=True, eq=False)
class SeenCrops:
    """Objects through their own boxes, as the frozen model sees them."""

    maps: Tensor
    """(N, C, h, w): what the head reads."""
    confidence: Tensor
    """(N, h, w): 1/sigma."""


@torch.no_grad()
def see(model: DenseFeatures, crops: Tensor) -> SeenCrops:
    """Crops (B, 3, S, S) uint8 -> what a detector reads, and the features' own confidence."""
    kind = crops.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        crops = crops.contiguous(memory_format=torch.channels_last)
        maps, layers = model.forward_with_layers(crops.float() / 255)
    return SeenCrops(side_by_side(maps, layers), maps.uncertainty.float().reciprocal())


def see_objects(model: DenseFeatures, objects: CutObjects, *, size: int) -> SeenCrops:
    """All objects through their boxes; features are kept in half precision."""
    batch = BATCH.get(objects.boxes.device.type, 16)
    parts = []
    for start in range(0, len(objects), batch):
        rows = torch.arange(start, min(start + batch, len(objects)), device=objects.boxes.device)
        seen = see(model, objects.read(rows, objects.boxes[rows], size=size))
        parts.append((seen.maps.half(), seen.confidence))
    return SeenCrops(*(torch.cat(column) for column in zip(*parts, strict=True)))


def examples_of(maps: Tensor, cells: Tensor, visible: Tensor, own: Tensor) -> Examples:
    """From maps (N, C, h, w) and labels: cells (N, K, 2), visible (N, K), own (N, K)."""
    read = F.normalize(sample(maps.float(), cells.nan_to_num(0.0)), dim=-1)
    total = torch.where(visible[..., None], read, 0.0).sum(0)
    return Examples(F.normalize(total, dim=-1), visible.sum(0), own.sum(0))


@torch.no_grad()
def read_signs(
    head: KeypointHead, crops: SeenCrops, examples: Examples, own: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Peaks in cells (B, K, 2) and SIGNS (B, K) of all channels; own (B, K): the category's.

    peak: the height of the heat map; gap: above the best place elsewhere; agreement: how similar
    the place is to the labelled examples; rival: less how similar to the best other part's.
    """
    maps = crops.maps.float()
    with torch.autocast(maps.device.type, torch.bfloat16, enabled=maps.device.type == "cuda"):
        logits = head(maps)
    chances = logits.float().sigmoid()
    cells, heights = peaks(chances)
    odds = torch.logit(heights, eps=1e-4)
    vectors = F.normalize(sample(maps, cells), dim=-1)
    similar = torch.einsum("bkc,jc->bkj", vectors, examples.vectors)
    itself = torch.eye(similar.shape[-1], dtype=torch.bool, device=similar.device)
    others = similar.masked_fill(itself | ~own[:, None], -1.0).amax(-1)
    agreement = similar.diagonal(dim1=-2, dim2=-1)
    sure = sample(crops.confidence[:, None], cells)[..., 0].log()
    share = torch.logit((examples.seen + 0.5) / (examples.asked + 1.0))
    values = (
        odds, odds - torch.logit(_elsewhere(chances, cells), eps=1e-4), agreement,
        agreement - others, sure, share.expand_as(odds),
        (examples.seen + 1.0).log().expand_as(odds),
    )  # fmt: skip
    return cells, dict(zip(SIGNS, values, strict=True))


def _elsewhere(chances: Tensor, cells: Tensor) -> Tensor:
    """(B, K): the highest of maps (B, K, h, w) away from the peaks (B, K, 2)."""
    height, width = chances.shape[-2:]
    x = torch.arange(width, device=cells.device) - cells[..., :1]
    y = torch.arange(height, device=cells.device) - cells[..., 1:]
    own = (y[..., :, None].abs() <= _OWN) & (x[..., None, :].abs() <= _OWN)
    return chances.masked_fill(own, 0.0).flatten(-2).amax(-1)


@dataclass(frozen=True, eq=False)
class Answers:
    """Predictions with known answers: N keypoints that an object's category has."""

    signs: dict[str, Tensor]
    """SIGNS (N,) each."""
    visible: Tensor
    """(N,) bool: the part is in the photo."""
    error: Tensor
    """(N,) in box's longer sides; NaN where it is not."""

    @property
    def right(self) -> Tensor:
        return self.visible & (self.error < RIGHT_WITHIN)


def answers_of(
    head: KeypointHead, crops: SeenCrops, examples: Examples, objects: CutObjects, rows: Tensor
) -> Answers:
    """What a head says of objects `rows` (M,), which it did not learn from, and what is true."""
    chosen = SeenCrops(crops.maps[rows], crops.confidence[rows])
    own, visible, boxes = (t[rows] for t in (objects.own, objects.visible, objects.boxes))
    cells, signs = read_signs(head, chosen, examples, own)
    size = (crops.maps.shape[-2], crops.maps.shape[-1])
    distance = (out_of_box(cells, boxes, size=size) - objects.points[rows]).norm(dim=-1)
    longer = (boxes[:, 2:] - boxes[:, :2] + 1).amax(-1, keepdim=True)
    return Answers(
        {name: value[own] for name, value in signs.items()}, visible[own], (distance / longer)[own]
    )


def join_answers(parts: Sequence[Answers]) -> Answers:
    return Answers(
        {name: torch.cat([part.signs[name] for part in parts]) for name in parts[0].signs},
        torch.cat([part.visible for part in parts]), torch.cat([part.error for part in parts]),
    )  # fmt: skip


def fit_trust(answers: Answers, prior: KeypointTrust | None, *, words: str) -> KeypointTrust | None:
    """The three models from known answers; None where they are too few and there is no prior.

    A prior holds with PRIOR_STRENGTH.
    """
    seen = answers.visible
    varied = bool(answers.right.any()) and not bool(answers.right.all())
    if prior is None and (not varied or bool(seen.all()) or len(seen) < 20):
        return None
    visible_signs = {name: value[seen] for name, value in answers.signs.items()}
    questions = {
        "present": (answers.signs, seen),
        "right": (answers.signs, answers.right),
        "error": (visible_signs, answers.error[seen].clamp(0, 1)),
    }
    fits = {
        name: fit_logistic(
            signs, answer, fitted_on=words, ridge=1e-2, strength=PRIOR_STRENGTH,
            prior=None if prior is None else getattr(prior, name),
        )
        for name, (signs, answer) in questions.items()
    }  # fmt: skip
    return KeypointTrust(**fits)


def cross_validate(
    fit_head: Callable[[Tensor, int], KeypointHead],
    crops: SeenCrops,
    cells: Tensor,
    objects: CutObjects,
    photo: Tensor,
    *,
    seed: int,
) -> Answers | None:
    """Answers on every object by a head that learned from the other photos'; None of one photo.

    fit_head: fits a head on objects (M,), given a seed. cells (N, K, 2): the labels on the maps.
    photo (N,): objects of one photo are left out together.
    """
    photos = torch.unique(photo)
    folds = min(FOLDS, len(photos))
    if folds < 2:
        return None
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(seed))
    fold = order[torch.searchsorted(photos, photo)] % folds
    device, parts = objects.boxes.device, []
    for number in range(folds):
        known, asked = ((fold != number).nonzero()[:, 0], (fold == number).nonzero()[:, 0])
        head = fit_head(known, seed + 1 + number)
        rows = known.to(device)
        examples = examples_of(crops.maps[rows], cells[rows], objects.visible[rows],
                               objects.own[rows])  # fmt: skip
        parts.append(answers_of(head, crops, examples, objects, asked.to(device)))
    return join_answers(parts)

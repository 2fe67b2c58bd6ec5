"""SCNet (Han et al., ICCV 2017): one layer on VGG16's pooled regions, taught by keypoints of pairs.

A: appearance alone. AG: times the votes of all matches for the same offset. AG+: a second layer
gives the votes, the first stays as A left it. The only peer that learns from keypoints of the
benchmark it is measured on. Convention: boxes are inclusive pixels of the square the network sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefeat.core import progress
from surefeat.core.files import from_dict, to_dict
from surefeat.core.geometry import Frame, box_iou
from surefeat.core.image import load, resize
from surefeat.data.decode import batch_indices
from surefeat.data.pairs import Pair
from surefeat.learn.runs import Run
from surefeat.match.regions import Pooled, pool_layer
from surefeat.measure.matching import to_square
from surefeat.measure.material import region_truth
from surefeat.measure.rows import RegionPair, Row, as_features
from surefeat.model.features import Features
from surefeat.peers.fitting import (
    Extract,
    FitConfig,
    StoredPeer,
    Training,
    frozen_vgg,
    learn_peer,
    learned,
    new_network,
    save_peer,
)
from surefeat.peers.proposal_flow import OffsetGrid, offset_bins

Kind = Literal["a", "ag", "ag+"]

VOTES = OffsetGrid(finer=0.2, scales=40)
"""For 224 px 18 x 18 places and 40 sizes."""

THRESHOLD, FLOOR = 0.4, 0.01
"""Of appearance what is above the first votes; the second is added to the votes."""


@dataclass(frozen=True)
class ScnetConfig:
    """Settings; thresholds as in its authors' code, rate and decay as in their paper."""

    kind: Kind = "a"
    inputs: int = 7 * 7 * 512
    """Numbers of a pooled region."""
    outputs: int = 2048
    """Of the layer."""
    side: int = 224
    """Of the square that is seen, pixels."""
    boxes: int = 500
    """Proposals per image while it learns."""
    positive: float = 0.5
    """A box is right above this IoU with the truth."""
    negative: float = 0.2
    """And wrong up to this; as many wrong ones count as right ones, the highest scores first."""
    public: bool = False
    """The field's whole training list, which shares images with test; else those pairs that do
    not."""
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(
            steps=6140, batch=8, lr=1e-3, optimiser="sgd", weight_decay=5e-4, checkpoint_every=3000
        )
    )


class Scnet(nn.Module):
    """The layer, or two of them; VGG16 is not part of it, as it never learns."""

    def __init__(self, config: ScnetConfig) -> None:
        super().__init__()
        self.config = config
        self.look = _layer(config)
        self.vote = _layer(config) if config.kind == "ag+" else None
        if self.vote is not None:
            self.look.requires_grad_(False)

    def start_from(self, trained: dict[str, Tensor]) -> None:
        """Take over what A has learned, for looks and for votes."""
        look = {name.removeprefix("look."): value for name, value in trained.items()
                if name.startswith("look.")}  # fmt: skip
        for layer in (self.look, self.vote):
            if layer is not None:
                layer.load_state_dict(look)

    def describe(self, pooled: Tensor) -> Tensor:
        """Regions (N, inputs) -> (N, outputs), unit length; with votes twice, side by side."""
        layers = [self.look] if self.vote is None else [self.look, self.vote]
        return torch.cat(
            [F.normalize(layer(pooled).to(layer.weight.dtype), dim=1) for layer in layers], dim=1
        )


def _layer(config: ScnetConfig) -> nn.Linear:
    layer = nn.Linear(config.inputs, config.outputs)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer


def offset_votes(alike: Tensor, bins: Tensor, *, total: int) -> Tensor:
    """(N, M): what all matches of the same bin (N, M) say together; where there is none (-1), 0."""
    index = (bins + 1).flatten()  # 0: no bin
    votes = (alike - THRESHOLD).clamp_min(0).flatten()
    counts = votes.new_zeros(total + 1).index_add(0, index, votes)
    return torch.where(bins >= 0, counts[index].reshape(bins.shape), 0.0)


def region_scores_of(
    kind: Kind, described0: Tensor, described1: Tensor, boxes0: Tensor, boxes1: Tensor, *, side: int
) -> Tensor:
    """(N, M): the scores of all pairs of boxes from what `Scnet.describe` gave."""
    if kind == "a":
        return (described0 @ described1.T).clamp_min(0)
    size = (side, side)
    bins, shape = offset_bins(boxes0, boxes1, size0=size, size1=size, grid=VOTES)
    total = shape[0] * shape[1] * shape[2]
    if kind == "ag":
        alike = described0 @ described1.T
        return alike * (offset_votes(alike, bins, total=total) + FLOOR)
    half = described0.shape[1] // 2
    alike = (described0[:, :half] @ described1[:, :half].T).clamp_min(0)
    voting = (described0[:, half:] @ described1[:, half:].T).clamp_min(0)
    return alike * (offset_votes(voting, bins, total=total) + FLOOR)


def hinge_loss(
    scores: Tensor, overlap: Tensor, *, positive: float, negative: float
) -> Tensor:  # fmt: skip
    """Scores (A, M) of active boxes, and their matches' IoU with the truth (A, M) -> one number.

    Right ones are pushed above 1, as many wrong ones (of a box: its highest) below -1.
    """
    right, wrong = overlap > positive, overlap <= negative
    ranked = scores.detach().masked_fill(~wrong, float("-inf")).argsort(dim=1, descending=True)
    wanted = torch.minimum(right.sum(1), wrong.sum(1))
    hard = torch.zeros_like(right).scatter_(
        1, ranked, torch.arange(scores.shape[1], device=scores.device) < wanted[:, None]
    )
    # By masks: picking them out would wait for the device, twice a pair.
    costs = (1 - scores).clamp_min(0) * right + (1 + scores).clamp_min(0) * hard
    return costs.sum() / (right.sum() + hard.sum()).clamp_min(1)


@dataclass(frozen=True, eq=False)
class TaughtPair:
    """A pair with its answers, ready to learn from."""

    pooled0: Pooled
    pooled1: Pooled
    boxes0: Tensor
    """(N, 4) of the square."""
    boxes1: Tensor
    active: Tensor
    """(A,) boxes of image 0 whose place in image 1 is known."""
    overlap: Tensor
    """(A, M): IoU of image 1's boxes with the truth of each."""


def pooled_vectors(pooled: Pooled) -> Tensor:
    """(N, 49 C): a region's bins side by side."""
    return pooled.vectors[pooled.index].flatten(1)


def pool_square(maps: Tensor, boxes: Tensor, *, side: int) -> Pooled:
    """Maxima of a map (C, h, w) over the published bins of boxes (N, 4) of the square."""
    (features,) = as_features(maps[None], side=side, unit=False)
    return pool_layer(features, boxes, "descriptors", confidence=False, as_published=True)


def mirror_boxes(boxes: Tensor, *, side: int) -> Tensor:
    """Inclusive boxes (N, 4) of a square after it is mirrored; first and last change places."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return torch.stack([side - 1 - x2, y1, side - 1 - x1, y2], dim=-1)


def pair_losses(model: Scnet, pairs: Sequence[TaughtPair]) -> Tensor:
    """The losses of pairs (P,); all their regions go through the layer at once.

    On a GPU that is done in bfloat16; what is summed and compared afterwards is not.
    """
    config, weight = model.config, model.look.weight
    parts = [pooled_vectors(part) for pair in pairs for part in (pair.pooled0, pair.pooled1)]
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=weight.is_cuda):
        whole = model.describe(torch.cat(parts).to(weight.dtype))
    described = torch.split(whole, [len(part) for part in parts])
    losses = []
    for pair, first, second in zip(pairs, described[::2], described[1::2], strict=True):
        scores = region_scores_of(
            config.kind, first, second, pair.boxes0, pair.boxes1, side=config.side
        )
        losses.append(hinge_loss(
            scores[pair.active], pair.overlap, positive=config.positive, negative=config.negative
        ))  # fmt: skip
    return torch.stack(losses)


def teach_pairs(
    pairs: Sequence[Pair], boxes: Mapping[Path, Tensor], look: Extract, *, side: int,
    device: torch.device, quiet: bool,
) -> list[TaughtPair]:  # fmt: skip
    """Pairs with the proposals of their images (original pixels), as they are and mirrored.

    Every image is seen and pooled once. Pairs without a box whose place is known are left out.
    """
    names = dict.fromkeys(path for pair in pairs for path in (pair.image0, pair.image1))
    seen: dict[tuple[Path, bool], tuple[Pooled, Tensor]] = {}
    for path in progress.bar(names, desc="photos", quiet=quiet, leave=False):
        pixels = load(path)
        frame = Frame((pixels.shape[1], pixels.shape[2]), (side, side))
        square = resize(pixels, size=(side, side)).to(device).float() / 255
        own = to_square(boxes[path], frame)
        for mirrored in (False, True):
            maps = look(square.flip(-1)[None] if mirrored else square[None])[0]
            moved = (mirror_boxes(own, side=side) if mirrored else own).to(device)
            pooled = pool_square(maps, moved, side=side)
            half = pooled.vectors.half() if device.type == "cuda" else pooled.vectors
            seen[path, mirrored] = Pooled(half, pooled.index), moved
    taught = []
    for pair in pairs:
        truth = region_truth(pair, boxes[pair.image0])
        overlap = box_iou(truth.boxes, boxes[pair.image1]).to(device)
        for mirrored in (False, True) if len(truth.active) else ():
            first, second = seen[pair.image0, mirrored], seen[pair.image1, mirrored]
            active = truth.active.to(device)
            taught.append(TaughtPair(first[0], second[0], first[1], second[1], active, overlap))
    return taught


def learn_scnet(
    pairs: Sequence[TaughtPair], run: Run, config: ScnetConfig, *, start: StoredPeer | None,
    about: dict[str, Any], device: torch.device, quiet: bool,
) -> float:  # fmt: skip
    """Train on the pairs and write the layer to the run's model/; the last loss.

    start: a trained A, which AG and AG+ go on from.
    """
    if config.kind != "a" and start is None and not run.checkpoints():
        raise ValueError(f"scnet-{config.kind} goes on from a trained scnet-a; pass --start FOLDER")
    model = new_network(lambda: Scnet(config), seed=config.fit.seed, device=device)
    if start is not None:
        model.start_from(dict(start.tensors))

    def step(number: int) -> dict[str, Tensor]:
        fit = config.fit
        rows = batch_indices(number, batch=fit.batch, count=len(pairs), seed=fit.seed)
        losses = pair_losses(model, [pairs[row] for row in rows.tolist()])
        learning = model.look if model.vote is None else model.vote
        # The output is normalised: a growing norm is a falling rate.
        return {"loss": losses.mean(), "norm": learning.weight.detach().norm()}

    learn_peer(Training(model, step, ("loss", "norm")), run, config.fit, quiet=quiet)
    save_peer(run.folder / "model", "scnet", to_dict(config), model.state_dict(), about)
    return float(run.metrics()[-1]["loss"])


def scnet_row(
    name: str, stored: StoredPeer, *, init: Sequence[str | Path], device: torch.device
) -> Row:
    """`scnet-a` and so on: regions and flow; it has no map of its own to search."""
    config: ScnetConfig = from_dict(ScnetConfig, dict(stored.settings))
    model = learned(Scnet(config), stored.tensors, device=device)
    look, digest = frozen_vgg(init, device=device)
    settings = {"trunk_sha256": digest, "trained on": dict(stored.about)}
    return scnet_row_of(name, model, look, digest=stored.digest, settings=settings)


def scnet_row_of(
    name: str, model: Scnet, look: Extract, *, digest: str, settings: dict[str, Any]
) -> Row:
    """The row of a network in memory."""
    kind = model.config.kind

    def extract(images: Tensor) -> list[Features]:
        return as_features(look(images.float() / 255), side=images.shape[-1], unit=False)

    def describe(features: Features, boxes: Tensor) -> Tensor:
        side = features.frame.original[0]
        return model.describe(pooled_vectors(pool_square(features.descriptors, boxes, side=side)))

    def rescore(scores: Tensor, pair: RegionPair) -> Tensor:
        assert pair.described0 is not None
        assert pair.described1 is not None
        return region_scores_of(
            kind, pair.described0, pair.described1, pair.boxes0, pair.boxes1, side=pair.side
        )

    return Row(
        name, extract, weights_sha256=digest, unit=False, measures=("regions", "flow"),
        describe=describe, rescore=rescore,
        settings=settings | {"peer": to_dict(model.config), "taught by": "PF-PASCAL keypoints"},
    )  # fmt: skip

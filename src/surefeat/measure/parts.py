"""Matching and confidence measured on the synthetic categories, whose parts and masks are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import cell_centres
from surefeat.core.ranking import auroc
from surefeat.data.drawn import Instance, correspondences
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures


@dataclass(frozen=True)
class PartCheck:
    """What was found on instances that were not trained on; shares in [0, 1]."""

    accuracy: float
    """PCK@0.1: visible parts whose nearest neighbour in another instance of the category lies
    within a tenth of the image's side of the true part; mean per pair, then over ordered pairs."""
    by_category: dict[int, float]
    """The same per category."""
    object_auroc: float
    """How well confidence ranks object cells before background cells, all images together."""
    edge_auroc: float
    """The same for plain gradient energy: what needs no learning."""
    centre_auroc: float
    """The same for closeness to the image's centre."""
    pairs: int


def check_parts(model: DenseFeatures, instances: Sequence[Instance]) -> PartCheck:
    """Match all ordered pairs of instances of one category by nearest neighbour in descriptors."""
    side = instances[0].image.shape[-1]
    features = model.extract([item.image for item in instances], longest_side=side)
    hits: dict[int, list[float]] = {}
    for i, first in enumerate(instances):
        for j, second in enumerate(instances):
            if i == j or first.category != second.category:
                continue
            points0, points1 = correspondences(first, second)
            if len(points0):
                points = nearest(features[i], features[j], points0)
                right = (points - points1).norm(dim=1) < 0.1 * side
                hits.setdefault(first.category, []).append(right.float().mean().item())
    every = [value for values in hits.values() for value in values]
    if not every:
        raise ValueError(
            f"no two of the {len(instances)} instances show common parts of one category; draw "
            f"more, at least {2 * len(CATEGORIES)}"
        )
    return PartCheck(
        accuracy=sum(every) / len(every),
        by_category={c: sum(v) / len(v) for c, v in sorted(hits.items())},
        pairs=len(every),
        **_object_aurocs(features, instances),
    )


def nearest(features0: Features, features1: Features, points0: Tensor) -> Tensor:
    """Plain nearest neighbour: (N, 2) pixels of image 0 -> best cell centres (N, 2) of image 1.

    Without the lower layer, voting or refinement: what the descriptors alone can do.
    """
    queries = features0.at(points0)
    best = (queries @ features1.descriptors.flatten(1)).argmax(1)
    size = (features1.descriptors.shape[1], features1.descriptors.shape[2])
    centres = cell_centres(size=size, stride=features1.stride, device=best.device)
    return features1.frame.to_original(centres[best]).cpu()


def _object_aurocs(features: Sequence[Features], instances: Sequence[Instance]) -> dict[str, float]:
    """AUROC of confidence and of two baselines for telling object from background cells."""
    columns: list[Tensor] = []
    for item, one in zip(instances, features, strict=True):
        size = (one.confidence.shape[0], one.confidence.shape[1])
        # A cell is object or background by its centre's neighbourhood; mixed cells do not count.
        share = F.adaptive_avg_pool2d(item.mask[None].float(), size)[0]
        grid = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, n) for n in size), indexing="ij"))
        closeness = -grid.square().sum(0)
        edges = F.adaptive_avg_pool2d(_gradient_energy(item.image)[None], size)[0]
        columns.append(torch.stack([share, one.confidence.cpu(), edges, closeness]).flatten(1))
    share, confidence, edges, closeness = torch.cat(columns, dim=1)
    clear = (share > 0.9) | (share < 0.1)
    truth = share[clear] > 0.5
    scores = {"object": confidence, "edge": edges, "centre": closeness}
    return {f"{name}_auroc": auroc(values[clear], truth) for name, values in scores.items()}


def _gradient_energy(image: Tensor) -> Tensor:
    """(3, H, W) uint8 -> (H, W): squared gradient of the grey image, same size."""
    grey = image.float().mean(0) / 255
    across = F.pad(grey[:, 1:] - grey[:, :-1], (0, 1))
    down = F.pad(grey[1:] - grey[:-1], (0, 0, 0, 1))
    return across.square() + down.square()

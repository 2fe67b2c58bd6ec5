"""What a keypoint head learns from: objects cut from their photos a few times, described once.

Every object is seen through its own box and through jittered, often mirrored ones. The network's
features of all these views are computed once and kept, so that a step costs the head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import into_box, jittered_box, mirrored
from surefeat.core.image import crop
from surefeat.data.keypoints import KeypointSet, Labelled
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.head import Draw, heatmaps
from surefeat.model.network import DenseFeatures, Maps

Describe = Callable[[Tensor], Tensor]
"""Crops (B, 3, S, S) uint8 -> features (B, C, h, w) float32."""

BATCH = 16
"""Crops that are described at once."""


@dataclass(frozen=True, eq=False)
class KeypointViews:
    """N described views and what they should give."""

    features: Tensor
    """(N, C, h, w) float16."""
    targets: Tensor
    """(N, K, h, w): heat maps of all categories' keypoints."""
    own: Tensor
    """(N, K) bool: the channels that count."""

    def draw(self, *, batch: int, device: torch.device) -> Draw:
        """Random batches of these views, for keypoint_head.fit; views recur only in a new pass."""
        order: list[int] = []

        def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
            while len(order) < batch:
                order.extend(torch.randperm(len(self.own), generator=generator).tolist())
            rows = order[:batch]
            del order[:batch]
            features = self.features[rows].to(device).float()
            return features, self.targets[rows].to(device), self.own[rows].to(device)

        return draw


def describe(model: DenseFeatures) -> Describe:
    """What a head sees of crops: the features of a frozen model, on its device."""

    def features(crops: Tensor) -> Tensor:
        device = model.head.weight.device
        safe = device.type == "cuda" and torch.cuda.is_bf16_supported()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=safe):
            return side_by_side(*model.forward_with_lower(crops.to(device).float() / 255))

    return features


def side_by_side(maps: Maps, lower: Tensor) -> Tensor:
    """Descriptors and the lower layer as (B, C + D, h, w), each unit length per cell."""
    size = (maps.descriptors.shape[-2], maps.descriptors.shape[-1])
    lower = lower.float()
    if lower.shape[-2:] != size:  # some trunks' lower layer is finer
        lower = F.adaptive_avg_pool2d(lower, size)
    return torch.cat([maps.descriptors.float(), F.normalize(lower, dim=1)], dim=1)


def described_views(
    model: DenseFeatures,
    labelled: KeypointSet,
    config: KeypointConfig,
    *,
    generator: torch.Generator,
    progress: Callable[[int], None] | None = None,
) -> KeypointViews:
    """All views of all objects; `progress` is told how many are done."""
    count = max(1, min(config.views, config.most_views // len(labelled.objects)))
    total = count * len(labelled.objects)
    size = (config.size // model.stride, config.size // model.stride)
    features, found, waiting = describe(model), list[Tensor](), list[Tensor]()
    targets = torch.zeros(total, labelled.channels[-1].stop, *size)
    own = torch.zeros(targets.shape[:2], dtype=torch.bool)
    views = _views(labelled, count, size, config, generator)
    for row, (view, points, visible, item) in enumerate(views):
        channels = labelled.channels[item.category]
        maps = heatmaps(points, visible, size=size, spread=config.spread, floor=config.floor)
        targets[row, channels.start : channels.stop] = maps
        own[row, channels.start : channels.stop] = visible | (config.absent == "background")
        waiting.append(view)
        if len(waiting) == BATCH or row + 1 == total:
            found.append(features(torch.stack(waiting)).half().cpu())
            waiting.clear()
            if progress is not None:
                progress(row + 1)
    return KeypointViews(torch.cat(found), targets, own)


def _views(
    labelled: KeypointSet,
    count: int,
    size: tuple[int, int],
    config: KeypointConfig,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Labelled]]:
    """Crops (3, S, S) uint8, and the keypoints in them: cells (K, 2) and visible (K,)."""
    for item in labelled.objects:
        pixels = item.read()
        flip = torch.tensor(labelled.categories[item.category].flip)
        for number in range(count):
            box = jittered_box(item.box, generator, config.jitter) if number else item.box
            view, visible = crop(pixels, box, size=config.size), item.visible
            points = into_box(item.points, box, size=size)
            if config.mirror and number and float(torch.rand((), generator=generator)) < 0.5:
                view = view.flip(-1)
                points, visible = mirrored(points, visible, flip, size=size)
            yield view, points, visible, item

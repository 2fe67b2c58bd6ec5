"""The keypoint head on frozen features: its network, heat maps, loss, peaks, and how it is fitted.

Convention: cells are those of the feature map, centres at integers (see geometry). One channel per
keypoint of every category; an object trains and reads the channels of its own category alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefeat.core.geometry import out_of_box
from surefeat.keypoints.config import KeypointConfig
from surefeat.learn import loop

Batch = tuple[Tensor, Tensor, Tensor]
"""Features (B, C, h, w), targets (B, K, h, w) and the channels that count (B, K), on one device."""

# Heat maps are nearly everywhere 0, so the head starts by expecting little.
_EXPECTED = 0.1


class KeypointHead(nn.Module):
    """3x3 convolution, batch norm, ReLU, 3x3 convolution (paper, section 4.3)."""

    def __init__(
        self, in_channels: int, keypoints: int, *, hidden: int = 512,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # Batch norm has a shift of its own.
        self.conv1 = nn.Conv2d(in_channels, hidden, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, keypoints, 3, padding=1)
        nn.init.kaiming_normal_(self.conv1.weight, generator=generator)
        nn.init.normal_(self.conv2.weight, std=0.01, generator=generator)
        assert self.conv2.bias is not None
        nn.init.constant_(self.conv2.bias, math.log(_EXPECTED / (1 - _EXPECTED)))

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, h, w) -> logits (B, K, h, w); their sigmoid is the probability."""
        logits: Tensor = self.conv2(F.relu(self.norm(self.conv1(features))))
        return logits


def heatmaps(
    points: Tensor, visible: Tensor, *, size: tuple[int, int], spread: float = 0.5,
    floor: float = 0.2,
) -> Tensor:  # fmt: skip
    """Targets (B, K, h, w) for points (B, K, 2) in cells: a Gaussian, peak 1 at the exact point.

    `spread` is its standard deviation in cells; values under `floor` are 0. With the defaults a
    point on the map always has a cell of at least exp(-1) = 0.37, which is where four cells meet.
    Maps of keypoints that are not visible (B, K) are 0, and so are those of points off the map.
    """
    height, width = size
    x, y = points.nan_to_num(-1e4).unbind(-1)
    across = x[..., None] - torch.arange(width, device=points.device)
    down = y[..., None] - torch.arange(height, device=points.device)
    square = down.square()[..., :, None] + across.square()[..., None, :]
    target = (square / (-2 * spread**2)).exp()
    seen = visible & on_map(points, size=size)
    return torch.where((target >= floor) & seen[..., None, None], target, 0.0)


def on_map(points: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Whether points (..., 2) in cells lie within the outer edges of a (h, w) map; NaN does not."""
    x, y = points.unbind(-1)
    return (x >= -0.5) & (x <= size[1] - 0.5) & (y >= -0.5) & (y <= size[0] - 0.5)


def heatmap_loss(probabilities: Tensor, targets: Tensor, own: Tensor, *, weight: float) -> Tensor:
    """Weighted l2 of maps (B, K, h, w): [sum (p-t)^2 + weight sum (t (p-t))^2] / 2B.

    Only the channels in `own` (B, K) bool count. After Tulsiani and Malik, who weigh by 15 on maps
    of 6x6 and by 50 on 12x12: without it, a map of zeros is nearly right.
    """
    error = (probabilities - targets).square()
    per_map = (error * (1 + weight * targets.square())).sum((-2, -1))
    return torch.where(own, per_map, 0.0).sum() / (2 * len(own))


def peaks(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """(B, K, h, w) -> cells (B, K, 2), finer than a cell, and scores (B, K) of the best cell.

    The peak is the mean of the 3x3 cells around the best one, weighted by probability: on the
    targets of `heatmaps` it is within a quarter of a cell of the point, on average 0.07.
    """
    width = probabilities.shape[-1]
    scores, best = probabilities.flatten(-2).max(-1)
    x, y = best % width, best // width
    around = torch.arange(9, device=best.device)
    dx, dy = around % 3, around // 3
    padded = F.pad(probabilities, (1, 1, 1, 1)).flatten(-2)
    mass = padded.gather(-1, (y[..., None] + dy) * (width + 2) + x[..., None] + dx)
    mass = mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
    fine = torch.stack([x + (mass * (dx - 1)).sum(-1), y + (mass * (dy - 1)).sum(-1)], dim=-1)
    return fine, scores


def fit(
    head: KeypointHead,
    batches: Iterable[Batch],
    *,
    steps: int,
    config: KeypointConfig,
    quiet: bool = True,
) -> list[float]:
    """Train the head by AdamW, its rate falling to 0 along half a cosine -> the loss of each step.

    The head is new or from an earlier fit, and left in eval mode; `batches` gives `steps` of them.
    Detectors are fitted by this, and so is every round of the benchmark: minutes at most, so there
    is no run folder. On CUDA products are in bf16; nothing waits for the device before the last
    step. The same batches give the same weights, bit for bit, on one machine.
    """
    device = head.conv2.weight.device
    head.train().to(memory_format=torch.channels_last)
    optimiser = loop.make_optimiser(
        "adamw", [(head.parameters(), config.learning_rate)], weight_decay=config.weight_decay
    )
    losses = list[Tensor]()

    def descended() -> Iterator[loop.Taken]:
        for step, (features, targets, own) in enumerate(batches):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = head(features.to(memory_format=torch.channels_last))
            loss = heatmap_loss(logits.float().sigmoid(), targets, own, weight=config.weight)
            factor = loop.rate(step, steps, warmup=0, decay="cosine")
            loop.descend(optimiser, loss, factor=factor)
            losses.append(loss.detach())
            yield {"loss": losses[-1]}

    schedule = loop.Schedule(steps, log_every=0, checkpoint_every=0)
    log = loop.Log(device, batch=config.batch, unit="views")
    with (
        torch.backends.cudnn.flags(enabled=True, deterministic=True),
        loop.progress_bar(steps, ("loss",), quiet=quiet) as (report, tick),
    ):
        job = loop.Job(
            head, optimiser, None, schedule, log, advice="lower --learning-rate", report=report,
            tick=tick,
        )  # fmt: skip
        loop.run_steps(job, descended(), fast=False)
    head.eval()
    return torch.stack(losses).tolist() if losses else []


@torch.no_grad()
def find_points(head: KeypointHead, maps: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """What a head sees in crops: features (B, C, h, w) of boxes (B, 4) -> points, scores.

    Points (B, K, 2) of all channels are in the pixels the boxes are given in, scores (B, K) lie in
    [0, 1].
    """
    with torch.autocast(maps.device.type, torch.bfloat16, enabled=maps.device.type == "cuda"):
        logits = head(maps)
    cells, scores = peaks(logits.float().sigmoid())
    return out_of_box(cells, boxes, size=(maps.shape[-2], maps.shape[-1])), scores

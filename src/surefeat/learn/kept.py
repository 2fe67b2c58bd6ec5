"""Views kept as the frozen layers see them: a small folder is learned in minutes on a CPU.

Where only the head learns, or the last stage too, everything below says the same of a view at every
step. So a few views of each photo are drawn and sent through the frozen layers once; a step pairs
two views of one photo and runs what learns alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.geometry import compose, invert
from surefeat.data.decode import Batches, batch_indices
from surefeat.learn.config import Config, TrainConfig
from surefeat.learn.loss import PairLoss, held_steps, loss_of_maps, step_draws
from surefeat.learn.warp import change_colour, draw, render, shared_points, view_maps
from surefeat.model.network import DenseFeatures

LEAST_VIEWS, MOST_VIEWS = 4, 8
"""Of a photo. With two, 200 steps on 200 photos of birds gain half as much."""

# Photos that are drawn and seen at once.
_CHUNK = 4


@dataclass(frozen=True)
class KeptViews:
    """Views of N photos, V each, as what learns gets them."""

    maps: tuple[Tensor, ...]
    """(N, V, C, h, w) each, half precision: of `DenseFeatures.frozen_maps`."""
    to_source: Tensor
    """(N, V, 2, 3): view pixels -> photo pixels."""


def photos_and_views(photos: int, total: int) -> tuple[int, int]:
    """How many photos, and views of each, make about `total` views; views come in twos."""
    used = max(1, min(photos, total // LEAST_VIEWS))
    return used, min(MOST_VIEWS, max(LEAST_VIEWS, total // used // 2 * 2))


def half_precision(device: torch.device, settings: TrainConfig) -> torch.autocast:
    """Convolutions in bfloat16 where the machine has them: about twice as fast on such a CPU."""
    # The public list of a processor's abilities is younger than the oldest torch we support.
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    able = device.type == "cuda" or (device.type == "cpu" and known())
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.amp and able)


@torch.no_grad()
def keep_views(
    model: DenseFeatures, batches: Batches, config: Config, *, quiet: bool = True
) -> KeptViews:
    """Draw and look at `train.kept_views` views in all, of photos chosen by the seed."""
    device, seed, trained = model.device, config.train.seed, config.train.trained
    count, views = photos_and_views(len(batches.pixels), config.train.kept_views)
    order = torch.randperm(len(batches.pixels), generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + 3)
    layers: list[list[Tensor]] = []
    to_source = []
    with progress.bar(total=count, desc="looking at views", unit="img", quiet=quiet) as bar:
        for rows in torch.split(order[:count], _CHUNK):
            pixels = batches.pixels[rows.to(batches.pixels.device)].to(device).float() / 255
            sizes = batches.sizes[rows.to(batches.sizes.device)].to(device)
            seen, placed = [], []
            for _ in range(views // 2):
                draws = draw(len(rows), points=1, generator=generator)
                both = view_maps(sizes, draws, config.warp)
                for i in (0, 1):
                    view = render(pixels, sizes, both[:, i], side=config.warp.size)
                    view = change_colour(view, draws.colour[:, i], config.colour)
                    with half_precision(device, config.train):
                        seen.append([maps.half() for maps in model.frozen_maps(view, trained)])
                    placed.append(both[:, i])
            layers.append([torch.stack(views_of, 1) for views_of in zip(*seen, strict=True)])
            to_source.append(torch.stack(placed, 1))
            bar.update(len(rows))
    maps = tuple(torch.cat(chunks) for chunks in zip(*layers, strict=True))
    return KeptViews(maps, torch.cat(to_source))


def kept_losses(
    model: DenseFeatures, kept: KeptViews, steps: range, config: Config
) -> Iterator[tuple[PairLoss, Tensor]]:
    """Of each step: two views of every photo of a batch, all pairs of their points."""
    device, seed, trained = kept.to_source.device, config.train.seed, config.train.trained
    count, views = kept.to_source.shape[:2]
    for step in steps:
        draws = step_draws(step, config, device)
        rows = batch_indices(step, batch=config.train.batch, count=count, seed=seed).to(device)
        first = (draws.affine[:, 0, 0] * views).long()
        second = (first + 1 + (draws.affine[:, 1, 0] * (views - 1)).long()) % views
        to_source0, to_source1 = (kept.to_source[rows, view] for view in (first, second))
        warp = compose(invert(to_source1), to_source0)
        points = shared_points(warp, draws, side=config.warp.size, count=config.loss.points)
        maps = [
            torch.cat([layer[rows, view] for view in (first, second)]).float()
            for layer in kept.maps
        ]
        hold = torch.full((), step < held_steps(config), device=device)
        with half_precision(device, config.train):
            described = model.from_frozen(maps, trained)
        yield loss_of_maps(described, points, config.loss, hold)

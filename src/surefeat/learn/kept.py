"""Views kept as the frozen layers see them: a small folder is learned in minutes on a CPU.

Where only the last stage learns, everything below it says the same of a view at every step. So a
few views of each photo are drawn and sent through the frozen layers once; a step pairs two views of
one photo and runs the last stage and the head alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.geometry import compose, invert
from surefeat.data.decode import Batches, batch_indices
from surefeat.learn.config import Config
from surefeat.learn.loss import PairLoss, held_steps, loss_of_maps, step_draws
from surefeat.learn.warp import change_colour, draw, render, shared_points, view_maps
from surefeat.model.network import DenseFeatures

LEAST_VIEWS, MOST_VIEWS = 4, 8
"""Of a photo. With two, 200 steps on 200 photos of birds gain half as much."""

# Photos that are drawn and seen at once.
_CHUNK = 4


@dataclass(frozen=True)
class KeptViews:
    """Views of N photos, V each, as the last stage gets them."""

    maps: Tensor
    """(N, V, C, h, w), half precision: the layer below the last stage."""
    to_source: Tensor
    """(N, V, 2, 3): view pixels -> photo pixels."""


def photos_and_views(photos: int, total: int) -> tuple[int, int]:
    """How many photos, and views of each, make about `total` views; views come in twos."""
    used = max(1, min(photos, total // LEAST_VIEWS))
    return used, min(MOST_VIEWS, max(LEAST_VIEWS, total // used // 2 * 2))


@torch.no_grad()
def keep_views(
    model: DenseFeatures, batches: Batches, config: Config, *, quiet: bool = True
) -> KeptViews:
    """Draw and look at `train.kept_views` views in all, of photos chosen by the seed."""
    device, seed = model.head.weight.device, config.train.seed
    count, views = photos_and_views(len(batches.pixels), config.train.kept_views)
    order = torch.randperm(len(batches.pixels), generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + 3)
    maps, to_source = [], []
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
                    seen.append(model.before_last(view).half())
                    placed.append(both[:, i])
            maps.append(torch.stack(seen, 1))
            to_source.append(torch.stack(placed, 1))
            bar.update(len(rows))
    return KeptViews(torch.cat(maps), torch.cat(to_source))


def kept_losses(
    model: DenseFeatures, kept: KeptViews, steps: range, config: Config
) -> Iterator[tuple[PairLoss, Tensor]]:
    """Of each step: two views of every photo of a batch, all pairs of their points."""
    device, seed = kept.maps.device, config.train.seed
    count, views = kept.to_source.shape[:2]
    for step in steps:
        draws = step_draws(step, config, device)
        rows = batch_indices(step, batch=config.train.batch, count=count, seed=seed).to(device)
        first = (draws.affine[:, 0, 0] * views).long()
        second = (first + 1 + (draws.affine[:, 1, 0] * (views - 1)).long()) % views
        to_source0, to_source1 = (kept.to_source[rows, view] for view in (first, second))
        warp = compose(invert(to_source1), to_source0)
        points = shared_points(warp, draws, side=config.warp.size, count=config.loss.points)
        maps = torch.cat([kept.maps[rows, view] for view in (first, second)]).float()
        hold = torch.full((), step < held_steps(config), device=device)
        yield loss_of_maps(model.from_before_last(maps), points, config.loss, hold)

"""Rounds of growing annotation: which images, the training of the head, the errors on the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from surefeat.crops import into_box, out_of_box
from surefeat.eval.fewshot_data import Objects
from surefeat.eval.fewshot_settings import FewShot, Round
from surefeat.eval.fewshot_views import Views
from surefeat.keypoint_head import Draw, KeypointHead, fit, heatmaps, peaks

TEST_BATCH = 512


def image_ranks(category: Tensor, photo: Tensor, *, generator: torch.Generator) -> Tensor:
    """(N,) place of each object's photo in a random order of its class's photos.

    A round of n images per class takes the objects with a rank below n: rounds are nested, and
    every class has the same number of images. All objects of a class in a photo come together;
    a photo with two classes has a rank in each.
    """
    ranks = torch.empty_like(category)
    for number in torch.unique(category).tolist():
        of_class = category == number
        photos, which = torch.unique(photo[of_class], return_inverse=True)
        order = torch.randperm(len(photos), generator=generator)
        ranks[of_class] = order[which]
    return ranks


def round_objects(ranks: Tensor, size: Round) -> Tensor:
    """Numbers of the objects whose annotation a round may use."""
    return torch.arange(len(ranks)) if size == "all" else (ranks < size).nonzero()[:, 0]


def drawer(views: Views, rows: Tensor, settings: FewShot) -> Draw:
    """What `fit` draws its batches with: random ones of the views `rows` (M,), on their device."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.randint(len(rows), (settings.batch,), generator=generator, device=rows.device)
        row = rows[index]
        targets = heatmaps(
            views.points[row], views.visible[row], size=views.size, spread=settings.spread,
            floor=settings.floor,
        )  # fmt: skip
        counts = views.own if settings.absent == "background" else views.visible
        return views.maps(row), targets, counts[row]

    return draw


def train_round(
    head: KeypointHead, views: Views, rows: Tensor, *, objects: int, seed: int, settings: FewShot
) -> float:
    """Train the head further on the views `rows`; the mean loss of the last tenth of the steps."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    losses = fit(
        head, drawer(views, rows, settings), steps=settings.steps(objects),
        learning_rate=settings.learning_rate, weight_decay=settings.weight_decay,
        weight=settings.emphasis, generator=generator,
    )  # fmt: skip
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


@torch.inference_mode()
def predict(head: KeypointHead, views: Views, boxes: Tensor) -> Tensor:
    """Keypoints of all channels in the crops of boxes (N, 4): (N, K, 2), pixels of the photos."""
    device = boxes.device
    found = []
    for start in range(0, len(boxes), TEST_BATCH):
        part = slice(start, start + TEST_BATCH)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = head(views.maps(part))
        cells, _ = peaks(logits.float().sigmoid())
        found.append(out_of_box(cells, boxes[part], size=views.size))
    return torch.cat(found)


def relative_errors(predicted: Tensor, objects: Objects) -> Tensor:
    """(N, K) distances to the truth over the longer side of the box; only visible ones count."""
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2] + 1
    distance: Tensor = torch.linalg.vector_norm(predicted - objects.points, dim=-1)
    return distance / sides.amax(-1, keepdim=True)


UNIT = (1, 1)
"""A grid of one cell: into_box gives shares of the box, 0 in its middle, +-1/2 at its edges."""


def mean_positions(objects: Objects) -> Tensor:
    """(K, 2): each keypoint's mean place where it is visible, in its box as UNIT has it.

    A keypoint that no object shows is taken to be in the middle.
    """
    places = into_box(objects.points, objects.boxes, size=UNIT)
    count = objects.visible.sum(0)[:, None]
    total = torch.where(objects.visible[..., None], places, 0.0).sum(0)
    return total / count.clamp_min(1)

"""What weakly supervised detection learns from: image labels alone (Bilen & Vedaldi 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from surefeat.geometry import box_iou


def class_region_scores(
    classes: Tensor, regions: Tensor, valid: Tensor, *, temperature: float
) -> Tensor:
    """Softmax over classes times softmax over regions: (B, R, K) twice -> (B, R, K) in [0, 1].

    classes, regions: outputs of the two heads; valid (B, R): padding takes no part and scores 0.
    Every image needs a valid region.
    """
    kind = classes.float().softmax(-1)
    hidden = (regions.float() / temperature).masked_fill(~valid[..., None], -torch.inf)
    return kind * hidden.softmax(1)


def image_scores(scores: Tensor) -> Tensor:
    """Sum over regions: (B, R, K) -> (B, K), inside (0, 1) so that no logarithm is infinite."""
    small = 1e-6
    return scores.sum(1).clamp(small, 1 - small)


def image_log_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Binary log loss of image labels: region scores (B, R, K), labels (B, K) -> (B,).

    labels: +1 shown, -1 not shown, 0 not known, which counts for nothing; summed over classes.
    """
    total = image_scores(scores)
    right = torch.where(labels > 0, total, 1 - total)
    return -(right.log() * (labels != 0)).sum(-1)


def spatial_regulariser(
    scores: Tensor, hidden: Tensor, boxes: Tensor, labels: Tensor, valid: Tensor, *, overlap: float
) -> Tensor:
    """Pulls fc7 of the boxes around the best one to it: (B,), the mean over classes.

    scores (B, R, K), hidden (B, R, D) fc7, boxes (B, R, 4) inclusive, labels (B, K), valid (B, R).
    For each class an image shows: half the sum, over boxes with IoU above `overlap` with the best
    scored box, of the squared distance of their fc7, times the best score squared [P, section 3.4].
    """
    best, top = scores.detach().max(1)
    chosen = boxes.gather(1, top[..., None].expand(-1, -1, 4))
    around = torch.vmap(box_iou)(chosen, boxes) > overlap
    hidden = hidden.float()
    centre = hidden.gather(1, top[..., None].expand(-1, -1, hidden.shape[-1]))
    square = (
        centre.square().sum(-1)[:, :, None]
        + hidden.square().sum(-1)[:, None]
        - 2 * centre @ hidden.transpose(1, 2)
    ).clamp_min(0)
    counted = around & valid[:, None] & (labels > 0)[:, :, None]
    return 0.5 * (best.square()[..., None] * square * counted).sum((1, 2)) / labels.shape[1]

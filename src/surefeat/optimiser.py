"""How the weights move: AdaGrad as in the paper or AdamW, their rates, and one step of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from surefeat.config import TrainConfig
from surefeat.model import DenseFeatures


def make_optimiser(model: DenseFeatures, config: TrainConfig) -> torch.optim.Optimizer:
    """AdaGrad as in the paper, or AdamW; the head has its own rate."""
    head = [p for p in model.head.parameters() if p.requires_grad]
    trunk = [p for p in model.trunk.parameters() if p.requires_grad]
    groups = [{"params": head, "lr": config.head_lr}]
    if trunk:
        groups.append({"params": trunk, "lr": config.lr})
    for group in groups:
        group["initial_lr"] = group["lr"]
    if config.optimiser == "adagrad":
        return torch.optim.Adagrad(groups, weight_decay=config.weight_decay)
    fused = head[0].device.type == "cuda"
    return torch.optim.AdamW(groups, weight_decay=config.weight_decay, fused=fused)


def rate(step: int, config: TrainConfig) -> float:
    """Factor on the learning rates at a step: linear warm-up, then constant or half a cosine."""
    warm = min(1.0, (step + 1) / config.lr_warmup) if config.lr_warmup else 1.0
    if config.decay == "constant":
        return warm
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / config.steps)))


def update(
    model: DenseFeatures,
    optimiser: torch.optim.Optimizer,
    loss: Tensor,
    step: int,
    config: TrainConfig,
) -> None:
    """One step down the gradient, at this step's rate."""
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    if config.clip:
        learning = [p for p in model.parameters() if p.requires_grad]
        nn.utils.clip_grad_norm_(learning, config.clip)
    for group in optimiser.param_groups:
        group["lr"] = group["initial_lr"] * rate(step, config)
    optimiser.step()

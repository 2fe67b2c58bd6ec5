"""Random regions, and a picture with smooth parts and sharp edges."""

from __future__ import annotations

import torch
from torch import Tensor


def random_boxes(count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    corners = torch.rand(count, 2, 2, generator=generator) * torch.tensor([size[1], size[0]]) - 0.5
    low, high = corners.amin(1).ceil(), corners.amax(1).floor()
    return torch.cat([low, torch.maximum(low, high)], dim=1)


def photo(height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth colours, two sharp objects and sensor noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 5, generator=generator) * 200
    image = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
    image[:, height // 4 : height // 2, width // 3 : width // 2] += 90
    image[:, height // 2 :, : width // 4] -= 70
    noise = torch.randn(3, height, width, generator=generator) * 4
    return (image + noise).clamp(0, 255).byte()

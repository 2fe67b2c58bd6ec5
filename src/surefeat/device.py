"""Which device to work on."""

from __future__ import annotations

import os

import torch


def best_device() -> torch.device:
    """CUDA, else Apple's GPU, else the CPU; under torchrun every process has its own GPU."""
    if torch.cuda.is_available():
        return choose_device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device that was asked for, or the best there is; one that is not there is an error."""
    if device is None:
        return best_device()
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; choose cuda, cuda:N, mps or cpu") from error
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("there is no Apple GPU here; choose cpu, or leave the device out")
    if chosen.type != "cuda":
        return chosen
    count = torch.cuda.device_count()
    if (chosen.index or 0) >= count:
        raise ValueError(
            f"there is no {chosen} here ({count} CUDA devices); choose cpu, or leave the device out"
        )
    if chosen.index is not None:
        return chosen
    # More processes than GPUs share them in turn.
    local = os.environ.get("LOCAL_RANK")
    index = torch.cuda.current_device() if local is None else int(local) % count
    return torch.device("cuda", index)

"""A moment of a training: the tensors of model and optimiser, and where the loop was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Checkpoint:
    """Model and optimiser after a step, all that is needed to continue exactly."""

    step: int
    tensors: dict[str, Tensor]
    """Named `model.*` and `optimiser.*`."""
    progress: dict[str, Any]
    """Plain values of the loop (best loss, seconds spent)."""

    def restore(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Put model and optimiser back into this state."""
        weights: dict[str, Tensor] = {}
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in self.tensors.items():
            kind, name = key.split(".", 1)
            if kind == "model":
                weights[name] = value
            else:
                index, _, part = name.partition(".")
                state.setdefault(int(index), {})[part] = value
        model.load_state_dict(weights)
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})
        for parameter, held in optimiser.state.items():
            for part, value in held.items():
                if part != "step" and value.shape == parameter.shape:
                    # In the parameter's own layout (channels last, on CUDA), or fused steps refuse.
                    held[part] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def state_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of a checkpoint; they share memory with model and optimiser."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{key}": torch.as_tensor(v) for key, v in state.items()}
    return tensors

"""A moment of a training: the tensors of model and optimiser, and where the loop was.

A run folder: config.json, environment.json, metrics.jsonl, skipped.txt, checkpoints, model/.

Everything is written whole or not at all: to a temporary name, flushed to disk, then renamed.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefeat.core.files import (
    as_json,
    environment,
    from_dict,
    to_dict,
    write_bytes,
    write_json,
    write_text,
)
from surefeat.learn.config import Config


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


_LOG = logging.getLogger(__name__)

# The newest checkpoint and one before it, should the disk have failed in the middle.
_KEPT = 2


@dataclass(frozen=True)
class Run:
    """One folder of one training."""

    folder: Path

    @classmethod
    def start(cls, folder: str | Path, config: Config, *, device: torch.device | str) -> Run:
        """A new run; a folder that holds one already is refused, unless it never got to train."""
        run = cls(Path(folder))
        if run.checkpoints() or run.metrics_file.exists():
            raise FileExistsError(
                f"{run.folder} already holds a run; pass --resume to continue it, or another --out"
            )
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / "environment.json", environment(device))
        run.store_config(config)
        return run

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """An existing run."""
        run = cls(Path(folder))
        if not run.config_file.is_file():
            raise FileNotFoundError(f"{run.folder} holds no run (no config.json); start one first")
        return run

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def config(self) -> Config:
        """The settings of the run."""
        loaded: Config = from_dict(Config, json.loads(self.config_file.read_text()))
        return loaded

    def store_config(self, config: Config) -> None:
        """Write the settings; a folder with settings is a run."""
        write_json(self.config_file, to_dict(config))

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with self.metrics_file.open("a") as file:
            file.write(as_json({"step": step, **values}) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; a line cut off by a crash is left out."""
        if not self.metrics_file.is_file():
            return []
        rows = []
        for line in self.metrics_file.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def forget_after(self, step: int) -> None:
        """Drop what a resumed run will do again, and what a crash left half written."""
        if self.metrics_file.exists():
            rows = [row for row in self.metrics() if row["step"] <= step]
            write_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))
        newer = [path for path in self.checkpoints() if path > self._checkpoint_file(step)]
        for path in (*newer, *self.folder.glob(".*.part")):
            path.unlink()

    def save_checkpoint(self, checkpoint: Checkpoint) -> Path:
        """Write one file, atomically, and remove all but the newest two."""
        from safetensors.torch import save

        path = self._checkpoint_file(checkpoint.step)
        about = {"step": checkpoint.step, "progress": checkpoint.progress}
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in checkpoint.tensors.items()}
        write_bytes(path, save(tensors, {"about": json.dumps(about)}))
        for old in self.checkpoints()[:-_KEPT]:
            old.unlink()
        return path

    def checkpoints(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        return sorted(self.folder.glob("checkpoint-*.safetensors"))

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest readable checkpoint, or None where there is none at all."""
        from safetensors import SafetensorError, safe_open

        paths = self.checkpoints()
        for path in reversed(paths):
            try:
                with safe_open(path, framework="pt") as file:
                    about = json.loads((file.metadata() or {})["about"])
                    tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            except (SafetensorError, KeyError, ValueError, OSError) as error:
                _LOG.warning("%s cannot be read (%s); trying the one before it", path.name, error)
                continue
            return Checkpoint(about["step"], tensors, about["progress"])
        if paths:
            raise ValueError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be read; "
                "put back a copy of one, or start a new run with another --out"
            )
        return None

    def _checkpoint_file(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step:08d}.safetensors"

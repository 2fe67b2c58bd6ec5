"""A run folder and its checkpoints: one kind for everything that is trained.

config.json, environment.json, images.json, metrics.jsonl, skipped.txt, learned.txt (pretraining's),
checkpoint-*.safetensors and model/, each written whole or not at all. What kind of settings
config.json holds, its reader says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

import torch
from torch import Tensor, nn

from surefeat.core import files
from surefeat.data.decode import Skipped, write_skipped

Settings = TypeVar("Settings")

_LOG = logging.getLogger("surefeat")

# The newest checkpoint and one before it, should the disk have failed in the middle.
_KEPT = 2


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


Given = ParamSpec("Given")
Left = TypeVar("Left")

LOCK = ".lock"
"""In a run folder while it is trained: which process is at work there."""


def alone(training: Callable[Given, Left]) -> Callable[Given, Left]:
    """The training with its folder `out` to itself; a second one there is refused."""

    @wraps(training)
    def one(*args: Given.args, **settings: Given.kwargs) -> Left:
        # Of several processes of one training the first one holds the lock.
        first = int(os.environ.get("RANK", 0)) == 0
        with locked(Path(str(settings["out"]))) if first else nullcontext():
            return training(*args, **settings)

    return one


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this process alone, until the end or its death: the system frees the lock."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = _take(folder / LOCK)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        file.close()
        with suppress(OSError):  # what never began leaves no folder
            for path in made:
                path.rmdir()


def _take(path: Path) -> TextIO:
    """The lock, open, with this process in it."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # Windows: runs are not kept apart there
        return path.open("w")
    while True:
        file = path.open("a+")
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            file.close()
            who = path.read_text() if path.exists() else ""
            fix = "wait for it, stop it, or pass another --out"
            said = f"{path.parent} is in use by {who or 'another process'}; {fix}"
            raise BlockingIOError(said) from error
        except OSError:
            _LOG.warning("%s: the disk knows no locks, so nothing keeps a second run away", path)
        # Whoever held it may have removed it just now; then the lock is on a file of no name.
        if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            break
        file.close()
    file.truncate(0)
    since = datetime.now().isoformat(" ", "seconds")
    file.write(f"process {os.getpid()} on {platform.node()}, since {since}")
    file.flush()
    return file


@dataclass(frozen=True)
class Run:
    """One folder of one training."""

    folder: Path

    @classmethod
    def start(cls, folder: str | Path, settings: Any, *, device: torch.device | str) -> Run:
        """A new run; a folder that holds one already is refused, unless it never got to train."""
        run = cls(Path(folder))
        if run.checkpoints() or run.metrics_file.exists():
            raise FileExistsError(
                f"{run.folder} already holds a run; pass --resume to continue it, or another --out"
            )
        files.write_json(run.folder / "environment.json", files.environment(device))
        run.store_settings(settings)
        return run

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """An existing run."""
        run = cls(Path(folder))
        if not run.settings_file.is_file():
            raise FileNotFoundError(f"{run.folder} holds no run (no config.json); start one first")
        return run

    @classmethod
    def resume(cls, folder: str | Path) -> Run:
        """An existing run, as it was at its newest readable checkpoint."""
        run = cls.open(folder)
        checkpoint = run.load_checkpoint()
        run.forget_after(checkpoint.step if checkpoint else 0)
        return run

    @contextmanager
    def beginning(self, *, new: bool) -> Iterator[None]:
        """What is done before the first step: where it fails, a new run leaves nothing."""
        try:
            yield
        except BaseException:  # Ctrl-C too
            for name in ("config.json", "environment.json") if new else ():
                (self.folder / name).unlink(missing_ok=True)
            raise

    @property
    def settings_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def learned_file(self) -> Path:
        """Names of the images that were learned from, a line each."""
        return self.folder / "learned.txt"

    def settings(self, kind: type[Settings]) -> Settings:
        """The settings of the run, which is to be one of this kind."""
        try:
            settings: Settings = files.from_dict(kind, json.loads(self.settings_file.read_text()))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self.settings_file} holds no {kind.__name__} ({error}); the run is of another "
                "command or version, or damaged: start a new one with another --out"
            ) from error
        return settings

    def refuse_others(self, given: Settings, *, usual: Settings) -> None:
        """ValueError for a setting that was asked for (it is not the usual one) and is not ours."""
        own, asked, known = (files.by_flag(s) for s in (self.settings(type(given)), given, usual))
        for name, value in asked.items():
            if value not in (own[name], known[name]):
                fix = "leave it out, or start a new run with another --out"
                raise ValueError(
                    f"{self.folder} keeps its own settings: --{name} is {own[name]} there, not "
                    f"{value}; {fix}"
                )

    def store_settings(self, settings: Any) -> None:
        """Write the settings; a folder with settings is a run."""
        files.write_json(self.settings_file, files.to_dict(settings))

    def store_images(self, about: dict[str, Any]) -> None:
        """Write images.json; a resumed run must see what it saw before.

        The same `sha256`, of what they are called, and `content`, where both runs have it.
        """
        file = self.folder / "images.json"
        if self.checkpoints() and file.is_file():
            before = files.read_json(file)
            if before.get("sha256") != about["sha256"]:
                raise ValueError(
                    f"the images changed since the run began ({before.get('images')} then, "
                    f"{about['images']} now; their labels and proposals count too); put them back, "
                    "or start a new run with another --out"
                )
            if before.get("content") not in (None, about.get("content")):
                raise ValueError(
                    "there are other photos under the same names than when the run began; "
                    "put them back, or start a new run with another --out"
                )
        files.write_json(file, about)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        files.add_lines(self.metrics_file, [{"step": step, **values}])

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; a line cut off by a crash, or not yet whole, is left out."""
        rows = []
        for line in (
            self.metrics_file.read_text(errors="replace").splitlines()
            if self.metrics_file.exists()
            else ()
        ):
            with suppress(json.JSONDecodeError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
        return rows

    def forget_after(self, step: int) -> None:
        """Drop what a resumed run will do again, and what a crash left half written."""
        if self.metrics_file.exists():
            rows = [row for row in self.metrics() if row["step"] <= step]
            files.write_lines(self.metrics_file, rows)
        newer = [path for path in self.checkpoints() if path > self._checkpoint_file(step)]
        for path in (*newer, *self.folder.glob(".*.part")):
            path.unlink()

    def save_checkpoint(self, checkpoint: Checkpoint) -> Path:
        """Write one file, atomically, and remove all but the newest two."""
        path = self._checkpoint_file(checkpoint.step)
        about = json.dumps({"step": checkpoint.step, "progress": checkpoint.progress})
        # Copies: weights that share memory are refused.
        tensors = {k: v.detach().cpu().clone() for k, v in checkpoint.tensors.items()}
        meta = {"about": about, "sha256": _digest(tensors, about)}
        files.write_bytes(path, files.pack_tensors(tensors, meta))
        for old in self.checkpoints()[:-_KEPT]:
            old.unlink()
        return path

    def checkpoints(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        return sorted(self.folder.glob("checkpoint-*.safetensors"))

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest readable checkpoint, or None where there is none at all."""
        paths = self.checkpoints()
        for path in reversed(paths):
            try:
                tensors, meta = files.read_tensors(path)
                about = json.loads(meta["about"])
                # Those of earlier versions have no hash.
                if len(meta) > 1 and meta.get("sha256") != _digest(tensors, meta["about"]):
                    raise ValueError("its content is not what was written")
            except (KeyError, ValueError, OSError) as error:
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


def _digest(tensors: dict[str, Tensor], about: str) -> str:
    """SHA-256 of a checkpoint's content."""
    digest = hashlib.sha256(about.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def list_skipped(folder: Path, skipped: Sequence[Skipped]) -> None:
    """Write skipped.txt, a line with name and reason each, and say how many there are."""
    file = folder / "skipped.txt"
    write_skipped(file, skipped)
    if skipped:
        _LOG.warning("%d skipped, listed in %s", len(skipped), file)

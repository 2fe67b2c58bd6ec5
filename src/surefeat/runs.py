"""A run folder: config.json, environment.json, metrics.jsonl, skipped.txt, checkpoints, model/.

Everything is written whole or not at all: to a temporary name, flushed to disk, then renamed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from surefeat.checkpoints import Checkpoint
from surefeat.config import Config, from_dict, to_dict

_LOG = logging.getLogger(__name__)

# The newest checkpoint and one before it, should the disk have failed in the middle.
_KEPT = 2


@dataclass(frozen=True)
class Run:
    """One folder of one training."""

    folder: Path

    @classmethod
    def start(cls, folder: str | Path, config: Config) -> Run:
        """A new run; a folder that holds one already is refused, unless it never got to train."""
        run = cls(Path(folder))
        if run.checkpoints() or run.metrics_file.exists():
            raise FileExistsError(
                f"{run.folder} already holds a run; pass --resume to continue it, or another --out"
            )
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / "environment.json", environment())
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


def environment() -> dict[str, Any]:
    """Where and when something ran: versions, hardware, commit, date."""
    from surefeat import __version__

    return {
        "surefeat": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "hardware": hardware(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hardware() -> str:
    """The accelerator's name, or the processor's and its number of cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """Commit of the source tree surefeat runs from; empty for an installed package."""
    override = os.environ.get("SUREFEAT_COMMIT")
    if override:
        return override
    here = Path(__file__)
    try:
        # An installed copy may lie inside somebody else's repository, which does not track it.
        for command in (
            ["ls-files", "--error-unmatch", here.name],
            ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        ):
            done = subprocess.run(
                ["git", *command], cwd=here.parent, capture_output=True, text=True, timeout=10,
                check=True,
            )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text, NaN and infinity as null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN and infinity as null."""
    write_text(path, as_json(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, also across a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)

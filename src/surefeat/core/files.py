"""Files written whole or not at all, settings as JSON, hashes, and where something runs.

Imports torch only where a function needs it: the command line's help reads settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    import torch


def environment() -> dict[str, Any]:
    """Where and when something ran: versions, hardware, commit, date."""
    import torch

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
    import torch

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


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return asdict(config)


def from_dict(kind: type[Any], values: dict[str, Any]) -> Any:
    """Rebuild a config dataclass from JSON; an unknown key is an error that names it."""
    hints = get_type_hints(kind)
    known = {item.name for item in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise ValueError(f"unknown setting {unknown[0]!r} for {kind.__name__}; known: {names}")
    built: dict[str, Any] = {}
    for name, value in values.items():
        hint = hints[name]
        if is_dataclass(hint):
            built[name] = from_dict(hint, value)  # type: ignore[arg-type]
        else:
            built[name] = tuple(value) if isinstance(value, list) else value
    return kind(**built)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def best_device() -> torch.device:
    """CUDA, else Apple's GPU, else the CPU; under torchrun every process has its own GPU."""
    import torch

    if torch.cuda.is_available():
        return choose_device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device that was asked for, or the best there is; one that is not there is an error."""
    import torch

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

"""Files written whole or not at all, settings as JSON, hashes, and where something runs.

Imports torch only where a function needs it: the command line's help reads settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# Bytes; safetensors itself reads no longer ones.
_LONGEST_HEAD = 100_000_000


def environment(device: torch.device | str) -> dict[str, Any]:
    """Where and when something ran on this device: versions, hardware, commit, date."""
    import torch

    from surefeat import __version__

    return {
        "surefeat": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "hardware": hardware(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def hardware(device: torch.device | str) -> str:
    """The accelerator's name, or the processor's and its number of cores."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
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
    """What JSON does not know: NaN and infinity become null, paths text."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text, NaN and infinity as null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def check_free(path: Path) -> None:
    """Refuse a place that holds something already, before anything is begun."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        kind = "folder" if path.is_dir() else "name"
        raise FileExistsError(f"{path} exists already; remove it or pass another {kind}")


@contextmanager
def folder_at_once(folder: Path) -> Iterator[Path]:
    """A new folder, whole or not at all: what is put into the one given here takes its place."""
    check_free(folder)
    folder = folder.absolute()
    part = folder.with_name(f".{folder.name[:40]}.{secrets.token_hex(8)}.part")
    try:
        yield part
        if folder.exists():
            folder.rmdir()
        move(part, folder)
    except BaseException:  # Ctrl-C too leaves nothing behind
        shutil.rmtree(part, ignore_errors=True)
        raise


def check_folder(path: Path) -> None:
    """Refuse a file where a folder of results will be written, before anything is begun."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file where a folder has to be; pass another --out")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN and infinity as null."""
    write_text(path, as_json(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of values by name; ValueError: it is none."""
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("values without names")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or put back a copy") from error
    return values


def write_text(path: Path, text: str) -> None:
    """Write text atomically; bytes of a name that are no UTF-8 are escaped."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def add_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records to a file of JSON lines; they survive a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), path.open("a") as file:
        file.write(_lines(records))
        file.flush()
        os.fsync(file.fileno())


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines anew, atomically."""
    write_text(path, _lines(records))


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    return "".join(as_json(dict(record)) + "\n" for record in records)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; what a crash cut off is removed from the file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            write_text(path, "".join(lines[: len(records)]))
            break
    return records


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, also across a power cut; folders are made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Random, not the process's number: two machines may write to one disk.
    part = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.part")
    try:
        with _naming(path), part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        move(part, path)
    except BaseException:  # Ctrl-C too leaves nothing behind
        part.unlink(missing_ok=True)
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A full or failing disk does not say of which file, or names the part of one; this does."""
    try:
        yield
    except OSError as error:
        if error.errno is None or not str(error.filename or ".part").endswith(".part"):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def move(part: Path, path: Path) -> None:
    """Rename, and make the rename itself survive a power cut."""
    part.replace(path)
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def pack_tensors(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a .safetensors file; tensors may be on any device."""
    from safetensors.torch import save

    packed = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return save(packed, metadata)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a .safetensors file; ValueError: it is none, or not whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    about = read_tensor_metadata(path)
    try:
        # From its bytes: safetensors opens no file whose name is not UTF-8.
        return load(path.read_bytes()), about
    except (SafetensorError, KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); copy it anew") from error


def read_tensor_metadata(path: Path) -> dict[str, str]:
    """The metadata of a .safetensors file, from its head alone; ValueError: as read_tensors."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEAD:
                raise ValueError("its head is none")
            head = json.loads(file.read(length))
            about = {str(k): str(v) for k, v in head.pop("__metadata__", {}).items()}
            size = max((entry["data_offsets"][1] for entry in head.values()), default=0)
            if file.seek(0, os.SEEK_END) != 8 + length + size:
                raise ValueError("it is cut short")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); copy it anew") from error
    return about


def write_model(
    weights: Path, tensors: Mapping[str, Tensor], settings: Path, about: dict[str, Any]
) -> None:
    """Write weights, and settings with their hash, into one folder: as one, or not at all.

    Two files cannot be renamed at once. The new weights wait under a name made of their hash until
    the settings that ask for them are there; `checked_weights` finds them under either name.
    """
    data = pack_tensors(tensors)
    digest = hashlib.sha256(data).hexdigest()
    waiting = _waiting(weights, digest)
    write_bytes(waiting, data)
    write_json(settings, about | {"sha256": digest})
    move(waiting, weights)


def checked_weights(weights: Path, digest: object) -> Path:
    """The file whose hash the settings name, as write_model left it; ValueError: damaged."""
    for path in (weights, _waiting(weights, str(digest))):
        if path.is_file() and file_hash(path) == digest:
            return path
    raise ValueError(f"{weights} is damaged: the settings have another hash; copy it anew")


def _waiting(weights: Path, digest: str) -> Path:
    return weights.with_name(f".{weights.stem}-{digest[:16]}{weights.suffix}")


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return asdict(config)


def from_dict(kind: type[Any], values: dict[str, Any]) -> Any:
    """Rebuild a config dataclass from JSON; an unknown key, or a value of another kind than the
    setting's, is an error that names it."""
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} is {values!r}, not settings by name")
    hints = get_type_hints(kind)
    known = {item.name for item in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise ValueError(f"unknown setting {unknown[0]!r} for {kind.__name__}; known: {names}")
    built: dict[str, Any] = {}
    for name, value in values.items():
        # Of `Kind | None`, the kind.
        inner = next((k for k in (hints[name], *get_args(hints[name])) if is_dataclass(k)), None)
        if inner is not None and value is not None:
            built[name] = from_dict(inner, value)  # type: ignore[arg-type]
        else:
            built[name] = tuple(value) if isinstance(value, list) else value
            if not _fits(built[name], hints[name]):
                raise ValueError(f"{kind.__name__}.{name} is {value!r}, which it cannot be")
    return kind(**built)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a setting's type: a plain one, a tuple, one of several, or None."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return value in inner
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is tuple:
        wanted = [inner[0]] * len(value) if inner[-1] is ... and isinstance(value, tuple) else inner
        several = isinstance(value, tuple) and len(value) == len(wanted)
        return several and all(map(_fits, value, wanted))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def by_flag(settings: Any, above: str = "") -> dict[str, Any]:
    """A config's values by the flags that set them: group.name."""
    flags: dict[str, Any] = {}
    for item in fields(settings):
        value, flag = getattr(settings, item.name), above + item.name.replace("_", "-")
        flags |= by_flag(value, f"{flag}.") if is_dataclass(value) else {flag: value}
    return flags


def check_settings(
    settings: Any, *, least: Mapping[str, float] | None = None, most: Mapping[str, float],
    above: str = "",
) -> None:  # fmt: skip
    """Refuse numbers that cannot work, by their flag: NaN, infinity, what is beyond its bounds.

    No number of ours may be negative; least: where 0 is too little, and no number at all. above:
    what all flags begin with.
    """
    for flag, value in by_flag(settings, above).items():
        low, high = (least or {}).get(flag, 0), most.get(flag, math.inf)
        several = isinstance(value, tuple)
        if several and not value and flag in (least or {}):
            raise ValueError(f"--{flag} names nothing; give at least one number")
        for number in value if several else (value,):
            if isinstance(number, int | float) and not low <= number <= high:
                bound = f"at most {high:g}" if number > high else f"at least {low:g}"
                raise ValueError(f"--{flag} is {number}; use {bound}")
            if isinstance(number, float) and math.isinf(number):
                raise ValueError(f"--{flag} is {number}; use a finite number")


def file_stem(*parts: str) -> str:
    """Names joined into one name of a file, whatever they hold: it leads to no other folder."""
    name = "-".join(parts).translate(dict.fromkeys(map(ord, "/\\:\0"), "-")).lstrip(".")
    return name.encode("utf-8", "backslashreplace").decode()[:200] or "unnamed"


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device that was asked for, else CUDA, Apple's GPU or the CPU; one not there is an error.

    Under torchrun every process has its own GPU.
    """
    import torch

    if device is None:
        apple = "mps" if torch.backends.mps.is_available() else "cpu"
        device = "cuda" if torch.cuda.is_available() else apple
    try:
        chosen = torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"unknown device {device!r}; choose cuda, cuda:N, mps or cpu") from error
    if chosen.type not in ("cuda", "mps", "cpu") or (chosen.type != "cuda" and chosen.index):
        raise ValueError(f"unknown device {str(device)!r}; choose cuda, cuda:N, mps or cpu")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("there is no Apple GPU here; choose cpu, or leave the device out")
    if chosen.type != "cuda":
        return chosen
    count = torch.cuda.device_count()
    if (chosen.index or 0) >= count:
        what = f"there is no {chosen} here ({count} CUDA devices)"
        raise ValueError(f"{what}; choose cpu, or leave the device out")
    if chosen.index is not None:
        return chosen
    # More processes than GPUs share them in turn.
    local = os.environ.get("LOCAL_RANK")
    index = torch.cuda.current_device() if local is None else int(local) % count
    return torch.device("cuda", index)

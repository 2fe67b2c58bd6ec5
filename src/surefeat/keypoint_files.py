"""The files of a keypoint detector: a folder with detector.json and head.safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from surefeat.model import DenseFeatures
from surefeat.model_files import file_hash
from surefeat.runs import write_bytes, write_json

HEAD, SETTINGS = "head.safetensors", "detector.json"

_FORMAT = "surefeat-keypoints-1"
_FIX = "pass a folder written by `surefeat keypoints fit`"


def fingerprint(model: DenseFeatures) -> dict[str, str]:
    """What must agree for a head to understand a model's features."""
    from safetensors.torch import save

    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    digest = hashlib.sha256(save(state)).hexdigest()
    return {"trunk": model.config.trunk, "lower": model.lower, "sha256": digest}


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something already, before anything is begun."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; remove it or pass another folder")


def write_detector(folder: Path, state: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Write a new folder, whole or not at all."""
    from safetensors.torch import save

    check_free(folder)
    data = save({name: value.cpu().contiguous() for name, value in state.items()})
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        write_bytes(part / HEAD, data)
        digest = hashlib.sha256(data).hexdigest()
        write_json(part / SETTINGS, {"format": _FORMAT, "sha256": digest} | settings)
        part.replace(folder)
    except BaseException:  # Ctrl-C too leaves nothing behind
        shutil.rmtree(part, ignore_errors=True)
        raise


def read_detector(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What write_detector wrote, after a check that the two files belong together."""
    from safetensors.torch import load_file

    path = folder / SETTINGS
    if not path.is_file() or not (folder / HEAD).is_file():
        raise FileNotFoundError(
            f"no detector at {folder} (looked for {SETTINGS} and {HEAD}); {_FIX}"
        )
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        wanted = {"sha256", "features", "categories", "config"}
        missing = sorted(wanted - settings.keys())
        if settings.get("format") != _FORMAT or missing:
            raise ValueError(f"format {settings.get('format')!r}, without {missing}")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not what a detector writes ({error}); {_FIX}") from error
    if file_hash(folder / HEAD) != settings["sha256"]:
        raise ValueError(f"{folder / HEAD} is damaged: {SETTINGS} has another hash; copy it anew")
    return load_file(folder / HEAD), settings

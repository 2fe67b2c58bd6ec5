"""One file with the proposals of a benchmark's images, shared by all rows and machines.

Boxes are kept under the hash of the image file's bytes, in quarter pixels: 4 MB for 500 images. A
machine without OpenCV can measure with a file made elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.image import decode, read_bytes
from surefeat.proposals import CACHE_VERSION, PRIM, propose
from surefeat.runs import write_bytes

_FORMAT = "surefeat-proposals-1"
_PARTS = 4  # of a pixel
_SAVE_EVERY = 50


@dataclass(frozen=True)
class ProposalSettings:
    """Which proposals; the same for all rows (method, section 3)."""

    count: int = 1000
    """Randomized Prim boxes per image [P]."""
    seed: int = 0
    """Of their drawing."""

    def text(self) -> str:
        """All that decides the boxes."""
        return json.dumps(
            {"version": CACHE_VERSION, "method": "prim", **asdict(self), **asdict(PRIM)},
            sort_keys=True,
        )


def proposals_of(
    images: Iterable[Path], settings: ProposalSettings, *, file: Path, quiet: bool = False
) -> dict[Path, Tensor]:
    """Boxes (N, 4) float32 of every image, inclusive, original pixels.

    What `file` lacks is computed and added to it, every 50 images, so it can be interrupted.
    """
    known = load_file(file, settings) if file.exists() else {}
    paths = sorted(set(images))
    content = {path: read_bytes(path) for path in paths}
    keys = {path: hashlib.sha256(content[path]).hexdigest()[:32] for path in paths}
    missing = [path for path in paths if keys[path] not in known]
    bar = tqdm(missing, desc="proposals", disable=quiet or not missing, leave=False)
    for number, path in enumerate(bar, start=1):
        pixels = decode(content[path], name=str(path))
        boxes = propose(pixels, count=settings.count, seed=settings.seed)
        known[keys[path]] = (boxes * _PARTS).round() / _PARTS
        if number % _SAVE_EVERY == 0 or number == len(missing):
            save_file(known, settings, file)
    return {path: known[keys[path]] for path in paths}


def load_file(file: Path, settings: ProposalSettings) -> dict[str, Tensor]:
    """Hash of an image file -> boxes; ValueError if the file is of other settings."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
            found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it and run again") from error
    if about.get("format") != _FORMAT:
        raise ValueError(f"{file} holds no proposals; pass a file that surefeat evaluate wrote")
    if about.get("settings") != settings.text():
        raise ValueError(
            f"{file} holds proposals of other settings ({about.get('settings')}); pass another "
            "--proposals file or the same count and seed"
        )
    return {key: boxes.float() / _PARTS for key, boxes in found.items()}


def save_file(boxes: dict[str, Tensor], settings: ProposalSettings, file: Path) -> None:
    """Write all boxes, whole or not at all."""
    from safetensors.torch import save

    packed = {}
    for key, found in sorted(boxes.items()):
        parts = (found * _PARTS).round()
        fits = bool(parts.abs().max() < torch.iinfo(torch.int16).max)
        packed[key] = parts.to(torch.int16 if fits else torch.int32).contiguous()
    write_bytes(file, save(packed, {"format": _FORMAT, "settings": settings.text()}))

"""Features of whole folders to disk: resumable, and shared by processes under torchrun."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from surefeat.core.files import write_json, write_text
from surefeat.core.image import EXTENSIONS, ImageError
from surefeat.data.decode import Skipped
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures


@dataclass(frozen=True)
class Extracted:
    """What was done."""

    folder: Path
    written: int
    already_there: int
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"folder": str(self.folder)}


def extract_to_folder(
    images: Sequence[str | Path],
    out: str | Path,
    *,
    model: str | Path | DenseFeatures | None = None,
    longest_side: int | None = None,
    batch: int = 16,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Extracted:
    """One OUT/name.safetensors per image; those already there are not computed again.

    Under torchrun every process takes its own share of the images. Unreadable images are skipped
    and listed in OUT/skipped-RANK.txt; OUT/extract.json says which model saw them at which size.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}; use at least 1")
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    out = Path(out)
    targets = _targets(images, out)
    mine = sorted(targets)[rank::world]
    if not isinstance(model, DenseFeatures):
        model = DenseFeatures.from_pretrained(model, device=device)
    _same_model(model, longest_side or model.config.longest_side, out)
    todo = [path for path in mine if not targets[path].is_file()]
    skipped: list[Skipped] = []
    with tqdm(total=len(todo), desc="extracting", unit="img", disable=quiet or rank > 0) as bar:
        for start in range(0, len(todo), batch):
            part = todo[start : start + batch]
            seen = {"longest_side": longest_side, "batch": batch}
            for path, features in _readable(model, part, skipped, **seen):
                features.save(targets[path])
            bar.update(len(part))
    if skipped:
        lines = (f"{entry.name}\t{entry.reason}\n" for entry in skipped)
        write_text(out / f"skipped-{rank}.txt", "".join(lines))
    return Extracted(out, len(todo) - len(skipped), len(mine) - len(todo), tuple(skipped))


def _same_model(model: DenseFeatures, longest_side: int, out: Path) -> None:
    """Files of two models in one folder would look alike and match badly: that is an error."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    about = {"weights": digest.hexdigest(), "longest_side": longest_side}
    file = out / "extract.json"
    if not file.is_file():
        write_json(file, about)
    elif json.loads(file.read_text()) != about:
        raise ValueError(
            f"{out} holds features of another model or of photos seen at another size; "
            "pass another --out"
        )


def _readable(
    model: DenseFeatures, paths: list[Path], skipped: list[Skipped], **seen: Any
) -> Iterator[tuple[Path, Features]]:
    """Features of the images that can be read, in one batch if all can."""
    try:
        yield from zip(paths, model.extract(paths, **seen), strict=True)
    except ImageError:
        for path in paths:
            try:
                yield path, model.extract(path, **seen)[0]
            except ImageError as error:
                skipped.append(Skipped(str(path), str(error)))


def _targets(images: Sequence[str | Path], out: Path) -> dict[Path, Path]:
    """Every image with its file below `out`; folders keep their structure."""
    found: dict[Path, Path] = {}
    for given in map(Path, images):
        if not given.exists():
            raise FileNotFoundError(f"no image or folder at {given}; check the path")
        inside = [p for p in sorted(given.rglob("*")) if p.suffix.lower() in EXTENSIONS]
        paths = inside if given.is_dir() else [given]
        # Several folders keep their own names, so that equal names below them do not meet.
        root = given if given.is_dir() and len(images) == 1 else given.parent
        found |= {p: out / f"{p.relative_to(root)}.safetensors" for p in paths}
    if not found:
        raise ValueError(f"no images under {images[0]} (looked for {' '.join(EXTENSIONS)})")
    first: dict[Path, Path] = {}
    for path, target in found.items():
        if first.setdefault(target, path) != path:
            raise ValueError(
                f"{first[target]} and {path} would both be {target}; extract them apart"
            )
    return found

"""Features of whole folders to disk: resumable, and shared by processes under torchrun."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from surefeat.core.files import to_dict, write_json, write_text
from surefeat.core.image import EXTENSIONS, ImageError
from surefeat.data.decode import Item, Place, Skipped
from surefeat.data.sources import walk_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures


@dataclass(frozen=True)
class Extracted:
    """What was done."""

    folder: Path
    written: int
    already_there: int
    skipped: tuple[Skipped, ...]
    listed: Path | None
    """Where the skipped images are listed with the reasons."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        listed = None if self.listed is None else str(self.listed)
        return to_dict(self) | {"folder": str(self.folder), "listed": listed}


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
    mine = [targets[path] for path in sorted(targets)[rank::world]]
    if not isinstance(model, DenseFeatures):
        model = DenseFeatures.from_pretrained(model, device=device)
    side = longest_side or model.config.longest_side
    _check_same_model(model, side, out)
    refused = [item.read for item, _ in mine if item.read.refused]
    skipped = [Skipped(place.path, str(place.refused)) for place in refused]
    readable = {Path(item.read.path): target for item, target in mine if not item.read.refused}
    todo = [path for path, target in readable.items() if not target.is_file()]
    written = 0
    with tqdm(total=len(todo), desc="extracting", unit="img", disable=quiet or rank > 0) as bar:
        for start in range(0, len(todo), batch):
            part = todo[start : start + batch]
            for path, features in _readable_ones(model, part, skipped, longest_side=side):
                features.save(readable[path])
                written += 1
            bar.update(len(part))
    listed = out / f"skipped-{rank}.txt" if skipped else None
    if listed is not None:
        write_text(listed, "".join(f"{entry.name}\t{entry.reason}\n" for entry in skipped))
    return Extracted(out, written, len(readable) - len(todo), tuple(skipped), listed)


def _check_same_model(model: DenseFeatures, longest_side: int, out: Path) -> None:
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


def _readable_ones(
    model: DenseFeatures, paths: list[Path], skipped: list[Skipped], *, longest_side: int
) -> Iterator[tuple[Path, Features]]:
    """Features of the images that can be read, in one batch if all can."""
    size = {"longest_side": longest_side, "batch": len(paths)}
    try:
        yield from zip(paths, model.extract(paths, **size), strict=True)
    except ImageError:
        for path in paths:
            try:
                yield path, model.extract(path, **size)[0]
            except ImageError as error:
                skipped.append(Skipped(str(path), str(error).removeprefix(f"{path}: ")))


def _targets(images: Sequence[str | Path], out: Path) -> dict[str, tuple[Item, Path]]:
    """Every image, by its path, with its file below `out`; folders keep their structure."""
    targets: dict[str, tuple[Item, Path]] = {}
    for given in map(Path, images):
        if not given.exists():
            raise FileNotFoundError(f"no image or folder at {given}; check the path")
        items = walk_folder(given) if given.is_dir() else [Item(given.name, Place(str(given)))]
        # Several folders keep their own names, so that equal names below them do not meet.
        above = out / given.name if given.is_dir() and len(images) > 1 else out
        targets |= {item.read.path: (item, above / f"{item.name}.safetensors") for item in items}
    if all(item.read.refused for item, _ in targets.values()):
        refused = [f"; {item.name} {item.read.refused}" for item, _ in targets.values()]
        fix = refused[0] if refused else "; pass another folder"
        raise ValueError(f"no images under {images[0]} (looked for {' '.join(EXTENSIONS)}){fix}")
    first: dict[Path, str] = {}
    for path, (_, target) in targets.items():
        if first.setdefault(target, path) != path:
            raise ValueError(
                f"{first[target]} and {path} would both be {target}; extract them apart"
            )
    return targets

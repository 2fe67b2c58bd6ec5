"""Features of whole folders to disk: resumable, and shared by processes under torchrun."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.files import read_json, write_json
from surefeat.core.geometry import Frame
from surefeat.core.image import ImageError, prepare, printable
from surefeat.data.decode import Item, Place, Skipped, SourceError, write_skipped
from surefeat.data.sources import check_any_readable, walk_folder
from surefeat.model.features import Features, saved_for
from surefeat.model.network import DenseFeatures

# What a disk says to a name that is too long, or that a file and a folder would share.
_NO_NAME = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


@dataclass(frozen=True)
class Extracted:
    """What was done."""

    folder: Path
    written: int
    already_there: int
    skipped: tuple[Skipped, ...]
    listed: Path | None
    """Where the skipped images are listed with the reasons."""


def extract_to_folder(
    images: Sequence[str | Path],
    out: str | Path,
    *,
    model: str | Path | DenseFeatures | None = None,
    longest_side: int | None = None,
    batch: int = 16,
    tiles: bool = False,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Extracted:
    """One OUT/name.safetensors per image; whole ones of unchanged photos are not computed again.

    Under torchrun every process takes its own share of the images. Unreadable images are skipped
    and listed in OUT/skipped-RANK.txt; OUT/extract.json says which model saw them at which size.
    tiles: large photos are seen at their own size (model.tiles).
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    out = Path(out)
    targets = _targets(images, out)
    mine = [targets[path] for path in sorted(targets)[rank::world]]
    if not isinstance(model, DenseFeatures):
        model = DenseFeatures.from_pretrained(model, device=device)
    side = model._side(longest_side, batch=batch)
    _check_same_model(model, side, out, tiles=tiles)
    skipped = [Skipped(item.read.path, item.read.refused) for item, _ in mine if item.read.refused]
    readable = {Path(item.read.path): target for item, target in mine if not item.read.refused}
    states = {path: file_state(path) for path in readable}
    todo = [path for path, target in readable.items() if saved_for(target) != states[path]]
    written = 0
    with progress.bar(
        total=len(todo), desc="extracting", unit="img", quiet=quiet or rank > 0
    ) as bar:
        for start in range(0, len(todo), batch):
            part = todo[start : start + batch]
            for path, features in extract_readable(
                model, part, skipped, longest_side=side, tiles=tiles
            ):
                try:
                    features.save(readable[path], photo=states[path])
                    written += 1
                except OSError as error:
                    if error.errno not in _NO_NAME:
                        raise
                    what = f"has a name that {out} cannot hold ({error.strerror}); rename it"
                    skipped.append(Skipped(str(path), what))
            bar.update(len(part))
    skipped.sort(key=lambda entry: entry.name)
    listed = out / f"skipped-{rank}.txt"
    write_skipped(listed, skipped)
    if skipped and world == 1 and len(skipped) == len(mine):
        first = f"{printable(skipped[0].name)} {skipped[0].reason}"
        fix = "lists, tar shards and Parquet files go with --format parquet"
        said = f"none of {len(mine)} images can be read (listed in {listed})"
        raise SourceError(f"{said}; {first}; {fix}")
    there = len(readable) - len(todo)
    return Extracted(out, written, there, tuple(skipped), listed if skipped else None)


def _check_same_model(model: DenseFeatures, longest_side: int, out: Path, *, tiles: bool) -> None:
    """Files of two models in one folder would look alike and match badly: that is an error."""
    about: dict[str, object] = {"weights": model.weights_hash(), "longest_side": longest_side}
    about |= {"tiles": True} if tiles else {}
    file = out / "extract.json"
    if not file.is_file():
        write_json(file, about)
    elif read_json(file) != about:
        what = "features of another model or of photos seen at another size"
        raise ValueError(f"{out} holds {what}; pass another --out")


def extract_readable(
    model: DenseFeatures,
    paths: list[Path],
    skipped: list[Skipped],
    *,
    longest_side: int,
    tiles: bool = False,
) -> Iterator[tuple[Path, Features]]:
    """Features of the images that can be read, in one batch for each size.

    tiles: large ones at their own size, one by one.
    """
    groups: dict[tuple[int, int], list[tuple[int, Tensor, Frame, str]]] = {}
    for number, path in enumerate(paths):
        try:
            large = model.extract_large(path, longest_side=longest_side) if tiles else None
            if large is not None:
                yield path, large
                continue
            pixels, frame = prepare(path, longest_side=longest_side, multiple=model.stride)
        except ImageError as error:
            skipped.append(Skipped(str(path), error.reason))
        else:
            groups.setdefault(frame.network, []).append((number, pixels, frame, str(path)))
    for group in groups.values():
        with torch.inference_mode():
            done = list(model.extract_group(group))
        yield from ((paths[number], features) for number, features in done)


def file_state(photo: Path) -> str:
    """Size and time of a photo's file: others, where it was replaced."""
    info = photo.stat() if photo.exists() else None
    return "" if info is None else f"{info.st_size} bytes, {info.st_mtime_ns}"


def _targets(images: Sequence[str | Path], out: Path) -> dict[str, tuple[Item, Path]]:
    """Every image, by its path, with its file below `out`; folders keep their structure."""
    if not images:
        raise ValueError("no images are given; name images or folders")
    targets: dict[str, tuple[Item, Path]] = {}
    for given in map(Path, images):
        if not given.exists():
            raise FileNotFoundError(f"no image or folder at {given}; check the path")
        items = walk_folder(given) if given.is_dir() else [Item(given.name, Place(str(given)))]
        # Several folders keep their own names, so that equal names below them do not meet.
        above = out / given.name if given.is_dir() and len(images) > 1 else out
        for item in items:
            # Others may open the file with safetensors, which takes no other names than UTF-8.
            name = item.name.encode("utf-8", "backslashreplace").decode()
            targets[item.read.path] = (item, above / f"{name}.safetensors")
    check_any_readable([item for item, _ in targets.values()], images[0])
    first: dict[Path, str] = {}
    for path, (_, target) in targets.items():
        if first.setdefault(target, path) != path:
            clash = f"{first[target]} and {path} would both be {target}"
            raise ValueError(f"{clash}; extract them apart")
    return targets

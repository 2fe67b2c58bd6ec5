"""The proposals of many images in one compact file, made once, resumable, read anywhere.

Boxes are kept under the hash of the image file's bytes, in whole pixels, compressed: about 4 KB for
1000 boxes. A machine without OpenCV's contrib modules can learn with a file made elsewhere.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.data.items import Item
from surefeat.detect_config import ProposalConfig
from surefeat.edge_boxes import edge_boxes
from surefeat.geometry import clip_boxes
from surefeat.image import decode, read_bytes
from surefeat.pixels import ImageError
from surefeat.proposals import CACHE_VERSION, propose
from surefeat.runs import write_bytes

_FORMAT = "surefeat-box-proposals-1"
_SAVE_EVERY = 200


@dataclass(frozen=True, eq=False)
class Proposals:
    """The boxes that compete in one image."""

    boxes: Tensor
    """(N, 4) float32, inclusive, original pixels; N may be 0."""
    scores: Tensor | None = None
    """(N,) the proposer's own scores; None where it has none."""

    def first(self, count: int) -> Proposals:
        """At most the first `count`: proposers give the more different or better ones first."""
        return Proposals(self.boxes[:count], None if self.scores is None else self.scores[:count])


def propose_for(image: Tensor, config: ProposalConfig) -> Proposals:
    """Image (3, H, W) uint8 -> its proposals, in whole pixels, as the file keeps them."""
    scores = None
    if config.method == "edges":
        boxes, scores = edge_boxes(image, count=config.count, model=config.edge_model)
        scores = scores.half().float()
    else:
        boxes = propose(image, method=config.method, count=config.count, seed=config.seed)
    return Proposals(clip_boxes(boxes.round(), size=(image.shape[1], image.shape[2])), scores)


def item_bytes(item: Item) -> bytes:
    """The bytes of an item's image file."""
    place = item.read
    if place.refused:
        raise ImageError(f"{item.name}: {place.refused}")
    return read_bytes(place.path, name=item.name, offset=place.offset, size=place.size)


def key_of(content: bytes) -> str:
    """What an image's proposals are kept under."""
    return hashlib.sha256(content).hexdigest()[:32]


def make_proposals(
    items: Sequence[Item],
    config: ProposalConfig,
    *,
    file: Path,
    workers: int = 2,
    quiet: bool = False,
) -> int:
    """Add to `file` the proposals it lacks, saving every 200 images; -> how many were added.

    Images that cannot be read are left out: reading them later says why.
    """
    known = read_proposals(file, config) if file.exists() else {}

    def work(item: Item) -> tuple[str, Proposals | None]:
        try:
            content = item_bytes(item)
            key = key_of(content)
            if key in known:
                return key, None
            return key, propose_for(decode(content, name=item.name), config)
        except ImageError:
            return "", None

    added = 0
    with ThreadPoolExecutor(workers) as pool:
        # In short lists, so that an interruption need not wait for all that is queued.
        bar = tqdm(total=len(items), desc="proposals", unit="img", disable=quiet)
        for start in range(0, len(items), _SAVE_EVERY):
            part = items[start : start + _SAVE_EVERY]
            done = {key: found for key, found in pool.map(work, part) if found is not None}
            known.update(done)
            added += len(done)
            bar.update(len(part))
            if done:
                write_proposals(known, config, file)
        bar.close()
    return added


def write_proposals(found: dict[str, Proposals], config: ProposalConfig, file: Path) -> None:
    """Write all proposals, whole or not at all."""
    keys = sorted(found)
    boxes = [found[key].boxes for key in keys]
    scores = [found[key].scores for key in keys]
    if any((each is None) != (scores[0] is None) for each in scores):
        raise ValueError("some proposals have scores and some have none; give all of one kind")
    stacked = torch.cat([torch.zeros(0, 4), *boxes]).round().numpy()
    arrays: dict[str, Any] = {
        "format": np.array(_FORMAT), "settings": np.array(settings_text(config)),
        "keys": np.array(keys, dtype="U32"), "counts": np.array([len(b) for b in boxes], np.int32),
        # Column by column: neighbours are alike, which compresses better.
        "boxes": np.ascontiguousarray(stacked.T.astype(np.uint16)),
    }  # fmt: skip
    kept = [each for each in scores if each is not None]
    if kept:
        arrays["scores"] = torch.cat(kept).numpy().astype(np.float16)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_bytes(file, buffer.getvalue())


def read_proposals(file: Path, config: ProposalConfig | None = None) -> dict[str, Proposals]:
    """Hash of an image file -> its proposals; ValueError if they are of other settings."""
    if not file.is_file():
        raise FileNotFoundError(f"no proposals at {file}; make them with `surefeat boxes propose`")
    try:
        with np.load(file, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
        if str(arrays["format"]) != _FORMAT:
            raise KeyError("format")
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{file} is damaged or holds no proposals ({error}); remove it and run again"
        ) from error
    said = str(arrays["settings"])
    if config is not None and said != settings_text(config):
        raise ValueError(
            f"{file} holds proposals of other settings ({said}); pass another --proposals-file, or "
            "the same method, count and seed"
        )
    ends = np.cumsum(arrays["counts"])[:-1].tolist()
    boxes = torch.from_numpy(arrays["boxes"].astype(np.float32).T.copy()).tensor_split(ends)
    keys = [str(key) for key in arrays["keys"]]
    if "scores" not in arrays:
        return {key: Proposals(each) for key, each in zip(keys, boxes, strict=True)}
    scores = torch.from_numpy(arrays["scores"].astype(np.float32)).tensor_split(ends)
    return {k: Proposals(b, s) for k, b, s in zip(keys, boxes, scores, strict=True)}


def settings_text(config: ProposalConfig) -> str:
    """All that decides the boxes; of an edge model its name alone, not where it lies."""
    values = asdict(config) | {"edge_model": Path(config.edge_model).name}
    return json.dumps({"version": CACHE_VERSION, **values}, sort_keys=True)

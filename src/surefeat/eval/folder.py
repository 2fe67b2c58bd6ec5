"""`surefeat evaluate self`: the label-free check of a model on a user's own photos."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from surefeat.config import Config, preset
from surefeat.data.canvas import decode_all
from surefeat.data.items import Item
from surefeat.data.sources import find_images
from surefeat.eval.selfcheck import SelfCheck, self_check
from surefeat.model import DenseFeatures
from surefeat.runs import Run

_LOG = logging.getLogger("surefeat")


def check_folder(
    source: str | Path,
    *,
    model: str | Path | None = None,
    count: int = 64,
    seed: int = 1,
    device: str | torch.device | None = None,
) -> SelfCheck:
    """Check a model (a run or model folder; None: the one that ships) on up to `count` images.

    On the photos that a run learned from, only those that it held out are used. The warps are
    those the model was trained with, where its run folder says them.
    """
    found = DenseFeatures.from_pretrained(model, device=device)
    config = _settings(model, found)
    items = _not_learned_from(find_images(source), model)
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed))
    chosen = [items[i] for i in order[:count].tolist()]
    canvas = decode_all(chosen, side=config.data.side, workers=config.data.workers)
    if not canvas.names:
        raise ValueError(f"none of the {len(chosen)} files drawn from {source} can be read")
    return self_check(
        found, canvas.pixels, canvas.sizes, warp=config.warp, colour=config.colour, seed=seed
    )


def _not_learned_from(items: list[Item], source: str | Path | None) -> list[Item]:
    """Those of the images that the run held out; all, where it knows none of them."""
    file = None if source is None else Path(source) / "images.json"
    names = (
        json.loads(file.read_text()).get("held_out_names", ()) if file and file.is_file() else ()
    )
    apart = [item for item in items if item.name in set(names)]
    if apart:
        _LOG.info("checking on %d of %d images, which the run held out", len(apart), len(items))
    return apart or items


def _settings(source: str | Path | None, model: DenseFeatures) -> Config:
    if source is not None and Run(Path(source)).config_file.is_file():
        return Run(Path(source)).config()
    return preset("small" if model.config.trunk == "small" else "ours")

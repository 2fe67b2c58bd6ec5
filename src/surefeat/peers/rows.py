"""Peers by name: as rows, beside those of measure, and as trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from surefeat.core.files import choose_device
from surefeat.measure.rows import Row, build_row
from surefeat.peers.anchornet import anchornet_row
from surefeat.peers.fitting import holds_peer, load_peer
from surefeat.peers.gcnn import gcnn_row
from surefeat.peers.hyperpixel import hyperpixel_row
from surefeat.peers.landmarks import landmarks_row
from surefeat.peers.proposal_flow import WAYS, hog_row, with_way
from surefeat.peers.scnet import scnet_row


@dataclass(frozen=True)
class About:
    """What is known of a peer before it is measured."""

    rows: str
    """As `surefeat evaluate --rows` takes them."""
    taught: str
    """What it learns from, beside ImageNet."""
    published: str
    """PCK@0.1 on PF-PASCAL, with its rule."""


PEERS = {
    "hyperpixel-flow": About(
        "hyperpixel-flow", "nothing; its layers were chosen on PF-PASCAL val keypoints",
        "83.4 img",
    ),
    "gcnn": About(
        "gcnn=FOLDER gcnn-affine=FOLDER gcnn-tps=FOLDER", "warps of photos", "62.6 scnet",
    ),
    "scnet-a, scnet-ag, scnet-ag+": About(
        "scnet-a=FOLDER scnet-ag=FOLDER scnet-ag+=FOLDER", "keypoints of PF-PASCAL's train pairs",
        "66.3 scnet (A), 72.2 scnet (AG+)",
    ),
    "anchornet": About("anchornet=FOLDER anchornet-hc=FOLDER", "image labels", "56.3 scnet"),
    "landmarks-10, landmarks-64, landmarks-64-per-class": About(
        "landmarks-64=FOLDER", "warps of boxes; per class: labels too", "14.4 scnet (64)",
    ),
    "hog": About("hog-nam=FOLDER hog-phm=FOLDER hog-lom=FOLDER", "nothing; photos whiten it", ""),
    "nam, phm, lom": About("NAME+nam NAME+phm NAME+lom, of any row NAME", "nothing", ""),
}  # fmt: skip
"""By name."""


def peer_row(
    name: str, *, init: Sequence[str | Path], device: torch.device, model: str | Path | None = None
) -> Row | None:
    """The peer of this name; None where it is no peer's.

    NAME=FOLDER is one that was trained; NAME+phm, and so on, scores the regions of any row anew.
    """
    if name == "hyperpixel-flow":
        return hyperpixel_row(init=init, device=device)
    title, _, folder = name.partition("=")
    if folder and holds_peer(folder):
        return trained_row(title, folder, init=init, device=device)
    base, plus, way = name.rpartition("+")
    if plus and way in WAYS:
        row = peer_row(base, init=init, device=device, model=model)
        row = row or build_row(base, init=init, device=device, model=model)
        return with_way(row, way)
    return None


def trained_row(
    title: str, folder: str | Path, *, init: Sequence[str | Path], device: torch.device
) -> Row:
    """The row of a trained peer; its title may choose among several ways to use it."""
    stored = load_peer(folder)
    if stored.kind == "hog":
        way = title.rpartition("-")[2]
        if way not in WAYS:
            raise ValueError(f"row {title}={folder}: call it hog-nam, hog-phm or hog-lom")
        return hog_row(title, stored, way, device=device)
    if stored.kind == "anchornet":
        return anchornet_row(title, stored, init=init, device=device)
    if stored.kind == "landmarks":
        return landmarks_row(title, stored, device=device)
    if stored.kind == "scnet":
        return scnet_row(title, stored, init=init, device=device)
    if stored.kind == "gcnn":
        return gcnn_row(title, stored, init=init, device=device)
    raise ValueError(f"{folder} holds the peer {stored.kind!r}, which this version does not know")


def with_peers(
    names: Sequence[str], *, init: Sequence[str | Path], model: str | Path | None = None,
    device: str | torch.device | None = None,
) -> list[str | Row]:  # fmt: skip
    """Names of rows, those of peers replaced by their rows."""
    where = choose_device(device)
    return [peer_row(name, init=init, device=where, model=model) or name for name in names]

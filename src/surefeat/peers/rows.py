"""Peers as rows by name, beside the rows of measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from surefeat.core.files import choose_device
from surefeat.measure.rows import Row
from surefeat.peers.hyperpixel import hyperpixel_row


def peer_row(name: str, *, init: Sequence[str | Path], device: torch.device) -> Row | None:
    """The peer of this name; None where it is no peer's."""
    if name == "hyperpixel-flow":
        return hyperpixel_row(init=init, device=device)
    return None


def with_peers(
    names: Sequence[str], *, init: Sequence[str | Path], device: str | torch.device | None = None
) -> list[str | Row]:
    """Names of rows, those of peers replaced by their rows."""
    where = choose_device(device)
    return [peer_row(name, init=init, device=where) or name for name in names]

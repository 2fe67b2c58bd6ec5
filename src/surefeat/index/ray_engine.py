"""Shards made by workers on Ray: on this machine, or on the cluster at an address.

A worker is a process with a model of its own that makes one shard after the other. One that is lost
(killed, out of memory, its machine gone) is started anew and its shard made again; the files of all
other shards stand. Nothing is sent to anybody, and no dashboard is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from surefeat.index.maker import CellMaker, ShardJob, ShardReport
from surefeat.index.photos import SCALE_EXTRA
from surefeat.index.shards import CellsAbout

RETRIES = 3
"""How often a shard is made again after its worker was lost, before it is given up."""


def make_on_ray(
    maker: CellMaker,
    jobs: Sequence[ShardJob],
    about: CellsAbout,
    *,
    address: str | None = None,
    workers: int | None = None,
    device: str | torch.device | None = None,
) -> Iterator[ShardReport]:
    """Shards in the order in which they are done.

    workers: by default one a GPU of the cluster, or one a core where there is none or the CPU is
    asked for. A shard whose worker is lost RETRIES + 1 times is named in the error after all others
    are done.
    """
    raise ImportError(f"Ray is needed: {SCALE_EXTRA}")
    yield

"""Features of a benchmark's pictures, computed once, in batches, and kept on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from surefeat.baselines.rows import Row
from surefeat.eval.material import Key
from surefeat.eval.protocol import Protocol
from surefeat.features import Features
from surefeat.geometry import Frame
from surefeat.image import resize
from surefeat.scales import join_scales

BATCH = 16
"""Pictures per pass. A picture always shares its batch with the same others, so that a resumed
evaluation gives the same bits."""


class FeatureStore:
    """The features of one row; the batches used longest ago make room for new ones."""

    def __init__(
        self,
        row: Row,
        pictures: Mapping[Key, Tensor],
        protocol: Protocol,
        *,
        device: torch.device,
        limit: int,
    ) -> None:
        """`limit`: bytes of features kept at once."""
        self._row, self._pictures, self._protocol = row, pictures, protocol
        self._device, self._limit = device, limit
        keys = list(pictures)
        self._groups = [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]
        self._group_of = {key: n for n, group in enumerate(self._groups) for key in group}
        self._kept: OrderedDict[int, dict[Key, Features]] = OrderedDict()
        self._bytes: dict[int, int] = {}

    def __getitem__(self, key: Key) -> Features:
        number = self._group_of[key]
        if number not in self._kept:
            self._compute(number)
        self._kept.move_to_end(number)
        return self._kept[number][key]

    @torch.no_grad()
    def _compute(self, number: int) -> None:
        group = self._groups[number]
        images = torch.stack([self._pictures[key] for key in group]).to(self._device)
        found = seen_at(self._row, images, self._protocol)
        self._kept[number] = dict(zip(group, found, strict=True))
        self._bytes[number] = _bytes(found)
        while len(self._kept) > 1 and sum(self._bytes[n] for n in self._kept) > self._limit:
            self._kept.popitem(last=False)


def seen_at(row: Row, images: Tensor, protocol: Protocol) -> list[Features]:
    """Features of squares (B, 3, S, S) uint8 at the protocol's inputs, in the frame of its side."""
    by_input = [row.extract(resize(images, size=(n, n))) for n in protocol.seen]
    joined = [join_scales(parts) for parts in zip(*by_input, strict=True)]
    side = (protocol.side, protocol.side)
    return [replace(each, frame=Frame(side, each.frame.network)) for each in joined]


def _bytes(found: list[Features]) -> int:
    """Memory behind features, which may be parts of common tensors."""
    tensors = (t for one in found for t in (one.descriptors, one.uncertainty, one.lower))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def memory_for_features(device: torch.device) -> int:
    """Bytes that features may take: a third of the accelerator's free memory, or 3 GB."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 3
    return 3 << 30

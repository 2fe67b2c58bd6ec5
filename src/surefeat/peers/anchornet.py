"""AnchorNet (Novotny, Larlus, Vedaldi, CVPR 2017): filters anchored by labels, class-agnostic.

Hypercolumns of a frozen ResNet-50, reduced; per class filters that fire somewhere on its photos and
nowhere on others, each at another place; all their maps packed into a few channels. Its loss
weights, number of filters, optimiser and sampling are in no source we could read: they are our
choices, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefeat.core.files import from_dict, to_dict
from surefeat.core.ranking import auroc
from surefeat.data.decode import batch_indices
from surefeat.learn.runs import Run
from surefeat.measure.rows import Row, as_features, imagenet_trunk, run_taps
from surefeat.model.features import Features
from surefeat.peers.fitting import (
    Extract,
    FitConfig,
    StoredPeer,
    Training,
    generator_of,
    learn_peer,
    learned,
    new_network,
    save_peer,
)

TAPS = ("res2c", "res4c", "res5c")
"""Of the network as published, not dilated, after the ReLU."""


@dataclass(frozen=True)
class AnchorConfig:
    """Settings; all but the first three are our choices."""

    classes: int = 12
    filters: int = 64
    """Per class; the paper's figure draws 200."""
    channels: int = 256
    """Each layer is reduced to so many, and so are all maps in the end."""
    cells: int = 56
    """Of all maps, each way."""
    dropped: float = 0.25
    """Share of the channels that the packing must do without while it learns."""
    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Of discriminability, silence on others, different filters, different places."""
    side: int = 224
    """At which photos are seen, pixels."""
    packing: float = 0.28
    """Share of the steps, the last, in which the maps are packed; before them filters learn."""
    fit: FitConfig = field(default_factory=lambda: FitConfig(steps=5300, batch=16, lr=1e-3))


@dataclass(frozen=True, eq=False)
class Reduction:
    """The mean and leading directions of a layer's cells."""

    mean: Tensor
    """(C,)."""
    directions: Tensor
    """(K, C), orthonormal."""

    def __call__(self, maps: Tensor) -> Tensor:
        """(B, C, h, w) -> (B, K, h, w)."""
        return torch.einsum("kc,bchw->bkhw", self.directions, maps - self.mean[:, None, None])


def reduce_cells(cells: Tensor, count: int) -> Reduction:
    """Principal directions of cells (N, C), float32, where they lie."""
    exact = cells.double()
    mean = exact.mean(0)
    exact -= mean
    covariance = exact.T @ exact / len(exact)
    _, vectors = torch.linalg.eigh(covariance)
    return Reduction(mean.float(), vectors.flip(1)[:, :count].T.contiguous().float())


def fit_reductions(
    batches: Iterable[Sequence[Tensor]], *, count: int, per_map: int, generator: torch.Generator
) -> list[Reduction]:
    """Of each layer, from a few cells per map; batches give the layers (B, C, h, w) of photos."""
    columns: list[list[Tensor]] = []
    for layers in batches:
        columns = columns or [[] for _ in layers]
        for column, maps in zip(columns, layers, strict=True):
            flat = maps.flatten(2).transpose(1, 2)
            picked = torch.randint(flat.shape[1], (per_map,), generator=generator)
            column.append(flat[:, picked.to(flat.device)].flatten(0, 1))
    return [reduce_cells(torch.cat(column), count) for column in columns]


def hypercolumns(layers: Sequence[Tensor], reductions: Sequence[Reduction], cells: int) -> Tensor:
    """Layers -> (B, 3 K, cells, cells): reduced, at one size, each of unit length in every cell."""
    parts = []
    for maps, reduction in zip(layers, reductions, strict=True):
        small = F.interpolate(
            reduction(maps.float()), size=(cells, cells), mode="bilinear", align_corners=False
        )
        parts.append(F.normalize(small, dim=1))
    return torch.cat(parts, dim=1)


class AnchorNet(nn.Module):
    """All classes' filters, 3 x 3, of unit length with a bias; and the packing of their maps."""

    def __init__(self, config: AnchorConfig) -> None:
        super().__init__()
        self.config = config
        maps = config.classes * config.filters
        self.filters = nn.Parameter(torch.randn(maps, 3 * config.channels, 3, 3))
        self.bias = nn.Parameter(torch.zeros(maps))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.pack = nn.Parameter(torch.randn(config.channels, maps) / maps**0.5)
        self.register_buffer("mean", torch.zeros(maps))

    def unit_filters(self) -> Tensor:
        """(K, 3 channels, 3, 3) of length 1: L1 is linear in it, and nothing else holds it."""
        flat = F.normalize(self.filters.flatten(1), dim=1)
        return flat.reshape(self.filters.shape)

    def forward(self, columns: Tensor) -> Tensor:
        """Hypercolumns (B, 3 channels, h, w) -> filters' answers (B, K, h, w), any sign."""
        with torch.autocast(columns.device.type, torch.bfloat16, enabled=columns.is_cuda):
            raw = F.conv2d(columns, self.unit_filters(), padding=1)
        return raw.to(columns.dtype) * self.temperature.exp() + self.bias[:, None, None]

    def packed(self, maps: Tensor) -> Tensor:
        """Answers after softplus (B, K, h, w) -> (B, channels, h, w)."""
        mean: Tensor = self.mean  # type: ignore[assignment]
        return torch.einsum("ck,bkhw->bchw", self.pack, maps - mean[:, None, None])


# Losses; a positive label is 1, a negative -1, what is neither 0.


def discriminability(maps: Tensor, labels: Tensor) -> Tensor:
    """Maps (B, N, K, h, w) of N classes, labels (B, N) -> (B, N): -y times the filters' maxima."""
    return -labels * maps.flatten(3).amax(-1).mean(-1)


def silence(raw: Tensor, labels: Tensor) -> Tensor:
    """(B, N): on photos without the class, the filters' mean answer above 0."""
    return (labels < 0) * raw.clamp_min(0).flatten(3).mean(-1).mean(-1)


def filter_likeness(filters: Tensor) -> Tensor:
    """Filters (N, K, C, 3, 3) -> (N,): |sum over taps of cosines|, mean over pairs i != j."""
    taps = F.normalize(filters.flatten(3), dim=2)
    table = torch.einsum("nicp,njcp->nij", taps, taps).abs()
    return _mean_off_diagonal(table)


def place_likeness(maps: Tensor) -> Tensor:
    """Maps (B, N, K, h, w) -> (B, N): squared cosine between maps, mean over pairs i != j."""
    flat = F.normalize(maps.flatten(3), dim=-1)
    return _mean_off_diagonal((flat @ flat.transpose(-1, -2)).square())


def _mean_off_diagonal(table: Tensor) -> Tensor:
    count = table.shape[-1]
    total = table.sum((-1, -2)) - table.diagonal(dim1=-2, dim2=-1).sum(-1)
    return total / max(1, count * (count - 1))


def label_losses(model: AnchorNet, columns: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The four terms and their weighted sum; positives together weigh as much as negatives."""
    config = model.config
    raw: Tensor = model(columns)
    raw = raw.reshape(len(raw), config.classes, config.filters, *raw.shape[2:])
    maps = F.softplus(raw)
    shown, absent = (labels > 0).float(), (labels < 0).float()
    share = shown / shown.sum().clamp_min(1) + absent / absent.sum().clamp_min(1)
    filters = model.unit_filters()
    filters = filters.reshape(config.classes, config.filters, *filters.shape[1:])
    terms = {
        "discriminability": (share * discriminability(maps, labels)).sum(),
        "silence": (absent * silence(raw, labels)).sum() / absent.sum().clamp_min(1),
        "filters": filter_likeness(filters).mean(),
        "places": (shown * place_likeness(maps)).sum() / shown.sum().clamp_min(1),
    }
    loss = sum((w * t for w, t in zip(config.weights, terms.values(), strict=True)),
               torch.zeros((), device=columns.device))  # fmt: skip
    return {"loss": loss, **terms}


def packing_loss(model: AnchorNet, maps: Tensor, generator: torch.Generator) -> Tensor:
    """|a/|a| - b/|b||^2 of maps (B, K, h, w) and what the packing makes of most of them."""
    mean: Tensor = model.mean  # type: ignore[assignment]
    centred = maps - mean[:, None, None]
    kept = torch.rand(maps.shape[:2], generator=generator, device=maps.device)
    seen = centred * (kept >= model.config.dropped)[..., None, None]
    packed = torch.einsum("ck,bkhw->bchw", model.pack, seen)
    back = torch.einsum("ck,bchw->bkhw", model.pack, packed)
    first, second = (F.normalize(part.flatten(1), dim=1) for part in (centred, back))
    return (first - second).square().sum(1).mean()


def anchor_step(
    model: AnchorNet, columns: Tensor, labels: Tensor, step: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Filters learn first; in the last steps they are fixed and the packing learns.

    The mean of the maps follows them, so that it is that of the finished filters.
    """
    config = model.config
    if step < (1 - config.packing) * config.fit.steps:
        taken = label_losses(model, columns, labels)
        return {**taken, "packing": torch.zeros_like(taken["loss"])}
    with torch.no_grad():
        maps = F.softplus(model(columns))
        mean: Tensor = model.mean  # type: ignore[assignment]
        mean.lerp_(maps.mean((0, 2, 3)), 0.05)
    loss = packing_loss(model, maps, generator)
    names, none = ("discriminability", "silence", "filters", "places"), torch.zeros_like(loss)
    return {"loss": loss, **dict.fromkeys(names, none), "packing": loss}


def learn_anchornet(
    columns_of: Extract, photos: Tensor, labels: Tensor, reductions: Sequence[Reduction], run: Run,
    config: AnchorConfig, *, about: dict[str, Any], device: torch.device, quiet: bool,
) -> float:  # fmt: skip
    """Train on photos (P, 3, S, S) uint8 with labels (P, N), write to model/; the last loss."""
    model = new_network(lambda: AnchorNet(config), seed=config.fit.seed, device=device)
    if device.type == "cuda":
        photos, labels = photos.to(device), labels.to(device)

    def step(number: int) -> dict[str, Tensor]:
        fit = config.fit
        rows = batch_indices(number, batch=fit.batch, count=len(photos), seed=fit.seed)
        rows = rows.to(photos.device)
        columns = columns_of(photos[rows].to(device))
        drawn = generator_of(fit.seed, number, device)
        return anchor_step(model, columns, labels[rows].to(device), number, drawn)

    shown = ("loss", "discriminability", "places", "packing")
    learn_peer(Training(model, step, shown), run, config.fit, quiet=quiet)
    about = about | filter_report(model, columns_of, photos, labels.cpu(), device=device)
    tensors = dict(model.state_dict())
    for n, reduction in enumerate(reductions):
        tensors |= {f"mean{n}": reduction.mean, f"directions{n}": reduction.directions}
    save_peer(run.folder / "model", "anchornet", to_dict(config), tensors, about)
    return float(run.metrics()[-1]["loss"])


@torch.no_grad()
def filter_report(
    model: AnchorNet, columns_of: Extract, photos: Tensor, labels: Tensor, *, device: torch.device
) -> dict[str, float]:
    """Whether training worked: do a class's filters tell its photos, and are any of them dead?"""
    highest, alike = [], []
    for rows in torch.split(torch.arange(len(photos)), 16):
        raw: Tensor = model(columns_of(photos[rows].to(device)))
        shape = (len(raw), model.config.classes, model.config.filters, *raw.shape[2:])
        maps = F.softplus(raw.reshape(shape))
        highest.append(maps.flatten(3).amax(-1).cpu())
        alike.append(place_likeness(maps).sqrt().mean().cpu())
    tops = torch.cat(highest)  # (P, N, K)
    areas = []
    for n in range(model.config.classes):
        sure = labels[:, n] != 0
        if float(labels[:, n].amin()) < 0 < float(labels[:, n].amax()):
            areas.append(auroc(tops[sure, n].mean(1), labels[sure, n] > 0))
    dead = (tops.amax(0) < 0.05).float().mean()
    return {
        "auroc of the filters' maxima": round(sum(areas) / max(1, len(areas)), 4),
        "dead filters": round(float(dead), 4),
        "likeness of maps": round(float(torch.stack(alike).mean()), 4),
    }


def anchor_columns(
    reductions: Sequence[Reduction], init: Sequence[str | Path], config: AnchorConfig, *,
    device: torch.device,
) -> tuple[Extract, str]:  # fmt: skip
    """Hypercolumns of uint8 images, and the hash of the trunk's weights."""
    layers, digest = anchor_layers(init, device=device)
    ready = [Reduction(r.mean.to(device), r.directions.to(device)) for r in reductions]

    def columns_of(images: Tensor) -> Tensor:
        return hypercolumns(layers(images), ready, config.cells)

    return columns_of, digest


def anchor_layers(
    init: Sequence[str | Path], *, device: torch.device
) -> tuple[Any, str]:  # fmt: skip
    """A function from uint8 images to the three layers, and the hash of the trunk's weights."""
    trunk, digest = imagenet_trunk("resnet50", init, device=device, dilated=False)

    @torch.no_grad()
    def layers(images: Tensor) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            taps = run_taps(trunk, images, TAPS)
        return [taps[name].float() for name in TAPS]

    return layers, digest


def photo_batches(photos: Tensor, *, batch: int, device: torch.device) -> Iterator[Tensor]:
    """Photos (P, 3, S, S) in turn."""
    for start in range(0, len(photos), batch):
        yield photos[start : start + batch].to(device)


def anchornet_row(
    name: str, stored: StoredPeer, *, init: Sequence[str | Path], device: torch.device
) -> Row:
    """`anchornet`: the packed maps; a name that ends in -hc: the hypercolumns without learning."""
    config: AnchorConfig = from_dict(AnchorConfig, dict(stored.settings))
    tensors = dict(stored.tensors)
    reductions = [
        Reduction(tensors.pop(f"mean{n}"), tensors.pop(f"directions{n}")) for n in range(len(TAPS))
    ]
    model = learned(AnchorNet(config), tensors, device=device)
    columns_of, digest = anchor_columns(reductions, init, config, device=device)
    settings = {"trunk_sha256": digest, "trained on": dict(stored.about)}
    bare = name.endswith("-hc")
    return anchor_row_of(name, None if bare else model, columns_of, stored.digest, settings)


def anchor_row_of(
    name: str, model: AnchorNet | None, columns_of: Extract, digest: str, settings: dict[str, Any]
) -> Row:
    """The row of a network in memory; without one, of its hypercolumns."""

    def maps_of(images: Tensor) -> Tensor:
        columns = columns_of(images)
        return columns if model is None else model.packed(F.softplus(model(columns)))

    def extract(images: Tensor) -> list[Features]:
        return as_features(maps_of(images), side=images.shape[-1])

    taught = "nothing" if model is None else "image labels"
    return Row(
        name, extract, lambda images: [maps_of(images)], weights_sha256=digest,
        settings=settings | {"taught by": taught},
    )  # fmt: skip

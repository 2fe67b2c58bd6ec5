"""Landmarks by factorised spatial embeddings (Thewlis, Bilen, Vedaldi, ICCV 2017), without labels.

A small network learns K maps, each one landmark's place: the same point of a photo and of its warp,
and no two landmarks in one place. What of it the paper pooled is not printed: here the maps before
the softmax are the features. Convention: places are in cells of the network's map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefeat.core.files import from_dict, to_dict
from surefeat.core.geometry import apply_affine, fit_thin_plate
from surefeat.core.image import resize
from surefeat.data.decode import Canvas, batch_indices
from surefeat.learn.config import ColourConfig, WarpConfig
from surefeat.learn.runs import Run
from surefeat.learn.warp import draw, two_views
from surefeat.measure.rows import Row, as_features
from surefeat.model.features import Features
from surefeat.peers.fitting import (
    FitConfig,
    StoredPeer,
    Training,
    generator_of,
    learn_peer,
    learned,
    new_network,
    save_peer,
)

BLOCK = 4
"""Cells each way of a block that holds one landmark."""


@dataclass(frozen=True)
class LandmarkConfig:
    """Settings of two public copies that agree, but for what is said to be ours."""

    landmarks: int = 64
    """Per class."""
    classes: int = 0
    """With labels: so many sets of landmarks, of which a photo's own learn; 0: one set for all."""
    side: int = 128
    """Of the network's input, pixels."""
    channels: tuple[int, ...] = (20, 48, 64, 80, 256)
    diversity: float = 500.0
    """Weight of the diversity beside the alignment."""
    photo: int = 256
    """Longest side at which training photos are kept, pixels."""
    warp: WarpConfig = field(default_factory=lambda: WarpConfig(size=128, mirrored=0.0))
    """Of the two views; ours."""
    fit: FitConfig = field(
        default_factory=lambda: FitConfig(
            steps=19_000, batch=32, lr=1e-4, weight_decay=5e-4, log_every=100
        )
    )

    @property
    def maps(self) -> int:
        """Of all classes together."""
        return self.landmarks * max(1, self.classes)


class Landmarks(nn.Module):
    """Six 5 x 5 convolutions without padding, one pooling: 128 x 128 -> 42 x 42."""

    def __init__(self, config: LandmarkConfig) -> None:
        super().__init__()
        self.config = config
        layers: list[nn.Module] = []
        widths = (3, *config.channels)
        for n, (inputs, outputs) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(inputs, outputs, 5), nn.BatchNorm2d(outputs), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if n == 0 else []
        self.layers = nn.Sequential(*layers)
        self.last = nn.Conv2d(widths[-1], config.maps, 5)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) in [0, 1] -> logits (B, K, h, w)."""
        logits: Tensor = self.last(self.layers(images - 0.5))
        return logits


def cell_places(side: int, *, device: torch.device) -> Tensor:
    """(side * side, 2) cells (x, y), row by row."""
    line = torch.arange(side, device=device, dtype=torch.float32)
    return torch.cartesian_prod(line, line).flip(-1)


def pixels_per_cell(config: LandmarkConfig, cells: int) -> tuple[float, float]:
    """Of the network's input: pixels between cells, and where the first one's centre lies."""
    # The first 5 x 5 and the pooling by 2 put a cell between two pixels; the others take margins.
    return 2.0, (config.side - 1) / 2 - (cells - 1)


def warp_cells(warp: Tensor, cells: int, config: LandmarkConfig) -> Tensor:
    """Where each cell of view 0 lies in view 1: (B, cells * cells, 2), in cells, by (B, 2, 3)."""
    step, first = pixels_per_cell(config, cells)
    places = cell_places(cells, device=warp.device)
    return (apply_affine(warp, (places * step + first)[None]) - first) / step


def alignment(share0: Tensor, share1: Tensor, moved: Tensor) -> Tensor:
    """Mean over landmarks of sum p(u) p'(v) |v - g(u)|^2, in linear time.

    share0, share1: (B, K, P) probabilities over the cells of both views; moved: g(u), (B, P, 2).
    """
    places = cell_places(round(share1.shape[-1] ** 0.5), device=share1.device).to(share1.dtype)
    first = (share0 * moved.square().sum(-1)[:, None]).sum(-1)
    second = (share1 * places.square().sum(-1)).sum(-1)
    cross = ((share0 @ moved) * (share1 @ places)).sum(-1)
    return (first + second - 2 * cross).mean()


def diversity(share: Tensor) -> Tensor:
    """K minus the sum over blocks of the most any landmark has there: (B, K, h, w) -> one number.

    0 when all sit in different blocks, K - 1 when all sit in one.
    """
    height, width = (n // BLOCK * BLOCK for n in share.shape[-2:])
    blocks = F.avg_pool2d(share[..., :height, :width], BLOCK) * BLOCK**2
    return (share.shape[1] - blocks.amax(1).sum((-1, -2))).mean()


def own_maps(logits: Tensor, classes: Tensor | None, config: LandmarkConfig) -> Tensor:
    """Of all classes' maps (B, N K, h, w) those of each photo's own (B,): (B, K, h, w)."""
    if classes is None or not config.classes:
        return logits
    sets = logits.reshape(len(logits), config.classes, config.landmarks, *logits.shape[2:])
    return sets[torch.arange(len(logits), device=logits.device), classes]


def landmark_losses(
    model: Landmarks, view0: Tensor, view1: Tensor, warp: Tensor, classes: Tensor | None = None
) -> dict[str, Tensor]:
    """Losses of two views (B, 3, S, S) in [0, 1] and the map (B, 2, 3) between their pixels."""
    config = model.config
    both = [own_maps(model(view), classes, config) for view in (view0, view1)]
    cells = both[0].shape[-1]
    shares = [logits.flatten(2).softmax(-1) for logits in both]
    moved = warp_cells(warp, cells, config)
    near = alignment(shares[0], shares[1], moved)
    spread = sum((diversity(s.reshape(both[0].shape)) for s in shares),
                 torch.zeros((), device=near.device)) / 2  # fmt: skip
    places = shares[0] @ cell_places(cells, device=near.device)
    loss = near + config.diversity * spread
    return {"loss": loss, "alignment": near, "diversity": spread, "collapsed": collapsed(places)}


@torch.no_grad()
def collapsed(places: Tensor) -> Tensor:
    """Share of pairs of landmarks (B, K, 2) nearer to each other than a block."""
    apart = torch.cdist(places, places)
    count = places.shape[1]
    near = (apart < BLOCK).float().sum((-1, -2)) - count
    return (near / max(1, count * (count - 1))).mean()


def learn_landmarks(
    canvas: Canvas, run: Run, config: LandmarkConfig, *, classes: Tensor | None,
    about: dict[str, Any], device: torch.device, quiet: bool,
) -> float:  # fmt: skip
    """Train on decoded photos, or crops, and write the network to model/; the last loss."""
    model = new_network(lambda: Landmarks(config), seed=config.fit.seed, device=device)
    pixels, sizes = canvas.pixels, canvas.sizes
    if device.type == "cuda":
        pixels, sizes = pixels.to(device), sizes.to(device)

    def step(number: int) -> dict[str, Tensor]:
        fit = config.fit
        rows = batch_indices(number, batch=fit.batch, count=len(pixels), seed=fit.seed)
        there = rows.to(pixels.device)
        drawn = draw(fit.batch, points=1, generator=generator_of(fit.seed, number, device))
        views = two_views(
            pixels[there].to(device), sizes[there].to(device), drawn, config.warp, ColourConfig()
        )
        own = None if classes is None else classes[rows].to(device)
        return landmark_losses(model.train(), views.view0, views.view1, views.warp, own)

    shown = ("loss", "alignment", "diversity", "collapsed")
    learn_peer(Training(model, step, shown), run, config.fit, quiet=quiet)
    last = run.metrics()[-1]
    about = about | {name: last[name] for name in shown[1:]}
    save_peer(run.folder / "model", "landmarks", to_dict(config), model.state_dict(), about)
    return float(last["loss"])


def landmarks_row(name: str, stored: StoredPeer, *, device: torch.device) -> Row:
    """The maps before the softmax as features; of several classes the highest of them."""
    config: LandmarkConfig = from_dict(LandmarkConfig, dict(stored.settings))
    model = learned(Landmarks(config), stored.tensors, device=device)
    settings = {"trained on": dict(stored.about), "peer": dict(stored.settings)}
    return landmarks_row_of(name, model, digest=stored.digest, settings=settings)


def landmarks_row_of(name: str, model: Landmarks, *, digest: str, settings: dict[str, Any]) -> Row:
    """The row of a network in memory."""
    config = model.config

    @torch.no_grad()
    def maps_of(images: Tensor) -> Tensor:
        small = resize(images, size=(config.side, config.side)).float() / 255
        return whole_maps(model(small), config)

    def extract(images: Tensor) -> list[Features]:
        maps = F.interpolate(maps_of(images), size=(28, 28), mode="bilinear", align_corners=False)
        return as_features(maps, side=images.shape[-1])

    def transfer(image0: Tensor, image1: Tensor, points0: Tensor) -> Tensor:
        return by_landmarks(model, (image0, image1), points0)

    return Row(
        name, extract, lambda images: [maps_of(images)], weights_sha256=digest, transfer=transfer,
        settings=settings,
    )  # fmt: skip


def whole_maps(logits: Tensor, config: LandmarkConfig) -> Tensor:
    """Logits (B, N K, h, w) -> (B, K, H, W) over the whole input, whose margins repeat the edge."""
    if config.classes:
        shape = (len(logits), config.classes, config.landmarks, *logits.shape[2:])
        logits = logits.reshape(shape).amax(1)
    step, first = pixels_per_cell(config, logits.shape[-1])
    margin = round(first / step)
    return F.pad(logits, (margin,) * 4, mode="replicate")


@torch.no_grad()
def by_landmarks(model: Landmarks, images: Sequence[Tensor], points0: Tensor) -> Tensor:
    """Points by the thin-plate spline through the landmarks' mean places: our way, not theirs."""
    config, places = model.config, []
    for image in images:
        small = resize(image, size=(config.side, config.side))[None].float() / 255
        logits = model(small)
        if config.classes:
            shape = (1, config.classes, config.landmarks, *logits.shape[2:])
            logits = logits.reshape(shape).amax(1)
        step, first = pixels_per_cell(config, logits.shape[-1])
        share = logits.flatten(2).softmax(-1)[0]
        cells = share @ cell_places(logits.shape[-1], device=share.device)
        scale = cells.new_tensor([image.shape[-1], image.shape[-2]]) / config.side
        places.append((cells * step + first + 0.5) * scale - 0.5)
    spline = fit_thin_plate(places[0].double().cpu(), places[1].double().cpu())
    return spline(points0.double().cpu()).float()

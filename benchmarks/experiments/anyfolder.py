"""Recipes, layers and ways of voting on two development sets at once: PF-PASCAL's pairs and birds.

    python benchmarks/experiments/anyfolder.py --pf-pascal DIR --birds pairs.csv --photos DIR
        --photos-of-birds DIR --init resnet50.safetensors --out FILE.json [--recipes NAME ...]

Similarities of a layer's points and voting cells are computed once for each model; layers are
mixtures of them, and votes read the same cells. Squares of 320 pixels; PCK@0.1 by the scnet rule.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import choose_device, environment, from_dict, to_dict, write_json
from surefeat.core.image import decode, read_bytes, resize
from surefeat.data.benchmarks import development_pairs
from surefeat.data.pairs import Pair, load_pairs
from surefeat.learn.config import Config, preset
from surefeat.learn.pretrain import pretrain
from surefeat.match.search import Voting, collect, peak_offset
from surefeat.model.network import DenseFeatures

SIDE, PLACES, BATCH = 320, 40, 32

WIDE = {"warp.rotation": 30.0, "warp.linear": 0.3, "warp.zoom": (0.5, 1.5)}
RECIPES: dict[str, dict[str, Any]] = {
    "soft, none mirrored": {"warp.mirrored": 0.0},
    "soft, .2 mirrored": {"warp.mirrored": 0.2},
    "soft, .5 mirrored": {"warp.mirrored": 0.5},
    "wide, none mirrored": WIDE | {"warp.mirrored": 0.0},
    "wide, .5 mirrored": WIDE | {"warp.mirrored": 0.5},
    "soft, .2 mirrored, without sigma": {"warp.mirrored": 0.2, "loss.kind": "plain"},
}
LAYERS: dict[str, dict[str, float]] = {
    "descriptors": {"descriptors": 1.0},
    "descriptors + res4c": {"descriptors": 0.5, "res4c": 1.0},
    "descriptors + res4e": {"descriptors": 0.7, "res4e": 1.0},
    "res5c + res4e": {"res5c": 1.0, "res4e": 1.0},
    "all": {"descriptors": 1.0, "res5b": 1.0, "res5c": 1.0, "res4d": 1.0, "res4e": 1.0},
}
TAPS = ("res4c", "res4d", "res4e", "res5b", "res5c")


@dataclass(frozen=True)
class Pairs:
    """A development set as squares on the device; points in their pixels."""

    images: Tensor
    """(I, 3, S, S) uint8."""
    which: Tensor
    """(P, 2): numbers of the images of each pair."""
    points: Tensor
    """(P, K, 2, 2): where each keypoint lies in image 0 and in image 1."""
    visible: Tensor
    """(P, K) bool."""


def load_squares(pairs: Sequence[Pair], device: torch.device) -> Pairs:
    paths = sorted({path for pair in pairs for path in (pair.image0, pair.image1)})

    def square(path: Path) -> Tensor:
        return resize(decode(read_bytes(path, name=path.name), name=path.name), size=(SIDE, SIDE))

    with ThreadPoolExecutor(16) as pool:
        images = torch.stack(list(pool.map(square, paths)))
    most = max(int(pair.visible.sum()) for pair in pairs)
    points, visible = torch.zeros(len(pairs), most, 2, 2), torch.zeros(len(pairs), most)
    for row, pair in enumerate(pairs):
        common = pair.common()
        visible[row, : len(common[0])] = 1
        for i, size in enumerate((pair.size0, pair.size1)):
            scale = torch.tensor([SIDE / size[1], SIDE / size[0]])
            points[row, : len(common[i]), i] = (common[i] + 0.5) * scale - 0.5
    which = [[paths.index(pair.image0), paths.index(pair.image1)] for pair in pairs]
    return Pairs(
        images.to(device), torch.tensor(which).to(device), points.to(device),
        visible.bool().to(device),
    )  # fmt: skip


def pck(pairs: Pairs, found: Tensor) -> float:
    """Percent of the visible keypoints within 0.1 of the side, mean over pairs."""
    right = ((found - pairs.points[:, :, 1]).norm(dim=-1) < 0.1 * SIDE) & pairs.visible
    return round(100 * (right.sum(1) / pairs.visible.sum(1)).mean().item(), 1)


@torch.no_grad()
def maps_of(model: DenseFeatures, images: Tensor) -> dict[str, Tensor]:
    """Layer -> (I, C, h, w) half precision, unit length."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("descriptors", *TAPS)}
    for some in images.split(BATCH):
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            taps = model.trunk(model.normalise_input(some.float() / 255), TAPS)
            taps["descriptors"] = model(some.float() / 255).descriptors
        for name, kept in parts.items():
            kept.append(F.normalize(taps[name].float(), dim=1).half())
    return {name: torch.cat(kept) for name, kept in parts.items()}


def even_points(count: int, device: torch.device) -> Tensor:
    """(count^2, 2): an even grid of pixels, row by row."""
    steps = (torch.arange(count, device=device) + 0.5) * SIDE / count - 0.5
    return torch.cartesian_prod(steps, steps).flip(-1)


def read_maps(maps: Tensor, points: Tensor) -> Tensor:
    """(B, C, h, w) at pixels (B, N, 2) -> (B, N, C), unit length."""
    grid = ((points + 0.5) / SIDE * 2 - 1)[:, None]
    read = F.grid_sample(maps.float(), grid, padding_mode="border", align_corners=False)
    return F.normalize(read[:, :, 0].transpose(1, 2), dim=-1)


@torch.no_grad()
def similarities(maps: Tensor, pairs: Pairs, cells: int) -> tuple[Tensor, Tensor]:
    """Of keypoints with places (P, K, T), and of voting cells with each other (P, n, n)."""
    places, grid = (even_points(n, maps.device) for n in (PLACES, cells))
    of_points, of_cells = [], []
    for rows in torch.arange(len(pairs.which), device=maps.device).split(BATCH):
        first, second = (maps[pairs.which[rows, i]] for i in (0, 1))
        targets, seen0, seen1 = (
            read_maps(some, where.expand(len(rows), -1, -1))
            for some, where in ((second, places), (first, grid), (second, grid))
        )
        asked = read_maps(first, pairs.points[rows, :, 0])
        of_points.append((asked @ targets.transpose(1, 2)).half())
        of_cells.append((seen0 @ seen1.transpose(1, 2)).half())
    return torch.cat(of_points), torch.cat(of_cells)


def mixed(
    layers: Mapping[str, tuple[Tensor, Tensor]], weights: Mapping[str, float]
) -> list[Tensor]:
    total = sum(weights.values())
    return [sum(layers[k][i].float() * (w / total) for k, w in weights.items()) for i in (0, 1)]  # type: ignore[misc]


@torch.no_grad()
def located(points: Tensor, cells: Tensor, pairs: Pairs, voting: Voting | None) -> Tensor:
    """(P, K, 2): the best place of each keypoint, with votes or without."""
    places = even_points(PLACES, points.device)
    found = torch.zeros_like(pairs.points[:, :, 1])
    for row, similarity in enumerate(points):
        if voting is not None:
            grid = (voting.grid, voting.grid)
            votes = collect(cells[row].reshape(*grid, *grid), voting)
            asked, targets = (
                (p + 0.5) / SIDE * voting.grid - 0.5 for p in (pairs.points[row, :, 0], places)
            )
            similarity = similarity + votes.bonus(asked, targets)
        index = similarity.argmax(1)
        offset = peak_offset(similarity.reshape(-1, PLACES, PLACES), index)
        found[row] = places[index] + offset * SIDE / PLACES
    return found


def changed(changes: Mapping[str, Any]) -> Config:
    values = to_dict(preset("ours"))
    for name, value in changes.items():
        group, field = name.split(".")
        values[group][field] = value
    config: Config = from_dict(Config, values)
    return replace(config, train=replace(config.train, checkpoint_every=10**9, compile="off"))


def measure(model: DenseFeatures, sets: Mapping[str, Pairs], voting: Voting) -> dict[str, Any]:
    """Layers -> set -> PCK by nearest neighbour and with votes."""
    scores: dict[str, Any] = {name: {} for name in LAYERS}
    for name, pairs in sets.items():
        maps = maps_of(model, pairs.images)
        layers = {tap: similarities(some, pairs, voting.grid) for tap, some in maps.items()}
        for mixture, weights in LAYERS.items():
            both = mixed(layers, weights)
            ways = (("nearest", None), ("voting", voting))
            scores[mixture][name] = {way: pck(pairs, located(*both, pairs, v)) for way, v in ways}
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--pf-pascal", "--birds", "--photos", "--photos-of-birds", "--init", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="list of the photos to learn from")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--pairs", type=int, help="of each set only so many, for a try")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    device = choose_device(None)
    val, train = development_pairs(args.pf_pascal)
    lists = {"pf-pascal": val + train, "birds": load_pairs(args.birds)}
    sets = {name: load_squares(pairs[: args.pairs], device) for name, pairs in lists.items()}
    metrics: dict[str, Any] = {}
    for recipe in args.recipes:
        for source, keep in ((args.photos, args.keep), (args.photos_of_birds, None)):
            start = time.perf_counter()
            with TemporaryDirectory() as folder:
                done = pretrain(
                    source, out=Path(folder) / "run", config=changed(RECIPES[recipe]), keep=keep,
                    init=args.init, steps=args.steps, quiet=True, device=device,
                )  # fmt: skip
            title = f"{recipe}, trained on {'birds' if keep is None else 'photos'}"
            metrics[title] = measure(done.model, sets, Voting())
            metrics[title]["seconds"] = round(time.perf_counter() - start, 1)
            print(title, metrics[title], flush=True)
            write_json(args.out, {
                "row": "search", "benchmark": "pf-pascal and birds", "split": "development pairs",
                "metrics": metrics, "config": {"recipes": RECIPES, "layers": LAYERS},
                "weights_sha256": None, **environment(device),
            })  # fmt: skip


if __name__ == "__main__":
    main()

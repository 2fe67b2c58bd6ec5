"""Do matches land where a known warp says? Affine and thin-plate warps of photographs.

    python benchmarks/experiments/warps.py --out results/studies/warp_errors.json

Photos that come with scikit-image are warped by random maps; points matched from the photo to its
warped copy, and the dense matches, are compared with the truth. Errors are in shares of the
photo's longer side, so that sizes can be compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import skimage.data
import torch
from torch import Tensor

from surefeat.core.files import choose_device, environment, file_hash, write_json
from surefeat.core.geometry import apply_affine, fit_thin_plate, invert, sample
from surefeat.core.image import load, resize
from surefeat.match.dense import match_dense
from surefeat.match.points import match_points
from surefeat.model.config import WEIGHTS, model_folder
from surefeat.model.network import DenseFeatures

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)


def affine(size: tuple[int, int], generator: torch.Generator) -> tuple[Any, Any]:
    """A random map about the centre (rotation to 15 deg, scale .85 to 1.15) and its inverse."""
    draws = torch.rand(5, generator=generator) * 2 - 1
    angle = draws[0] * 0.26
    turn = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
    linear = turn * (1 + 0.15 * draws[1])
    centre = (torch.tensor([size[1], size[0]]) - 1) / 2
    shift = centre - linear @ centre + draws[3:] * 0.06 * max(size)
    matrix = torch.cat([linear, shift[:, None]], dim=1)
    back = invert(matrix)
    return (lambda p: apply_affine(matrix, p)), (lambda p: apply_affine(back, p))


def thin_plate(size: tuple[int, int], generator: torch.Generator) -> tuple[Any, Any]:
    """A smooth map that moves a 3 x 3 net by up to 5 % of the side; its inverse by iteration."""
    ys, xs = torch.meshgrid(*(torch.linspace(0, n - 1, 3) for n in size), indexing="ij")
    net = torch.stack([xs, ys], -1).reshape(-1, 2)
    moved = net + (torch.rand(9, 2, generator=generator) * 2 - 1) * 0.05 * max(size)
    spline = fit_thin_plate(net, moved)

    def inverse(points: Tensor) -> Tensor:
        found = points.clone()
        for _ in range(40):
            found = found - (spline(found) - points)
        return found

    return spline, inverse


def warped(photo: Tensor, inverse: Any) -> Tensor:
    """The photo as the map moves it: its value at inverse(p) for every pixel p."""
    height, width = photo.shape[1:]
    ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = inverse(torch.stack([xs, ys], -1).reshape(-1, 2).float())
    read = sample(photo[None].float(), places[None])[0].T
    return read.reshape(-1, height, width).round().to(torch.uint8)


def errors(model: DenseFeatures, photo: Tensor, maps: tuple[Any, Any]) -> dict[str, Tensor]:
    """Distances to the truth, in longer sides, of chosen points and of every tenth pixel."""
    forward, inverse = maps
    size = (photo.shape[1], photo.shape[2])
    f0, f1 = model.extract([photo, warped(photo, inverse)])
    points = match_points(f0, f1, count=150)
    found = {"points": (points.points0, points.points1)}
    mutual = points.filter(mutual=True)
    found["mutual points"] = (mutual.points0, mutual.points1)
    ys, xs = torch.meshgrid(*(torch.arange(5, n, 10) for n in size), indexing="ij")
    dense = match_dense(f0, f1).points1.cpu()[ys, xs].reshape(-1, 2)
    found["every pixel"] = (torch.stack([xs, ys], -1).reshape(-1, 2).float(), dense)
    result = {}
    for name, (start, end) in found.items():
        truth = forward(start.cpu())
        inside = ((truth >= 0) & (truth <= torch.tensor([size[1], size[0]]) - 1)).all(1)
        result[name] = (end.cpu() - truth).norm(dim=1)[inside] / max(size)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/studies/warp_errors.json"))
    parser.add_argument("--warps", type=int, default=3)
    args = parser.parse_args()
    model = DenseFeatures.from_pretrained()
    metrics: dict[str, Any] = {}
    for kind, make in (("affine", affine), ("thin-plate", thin_plate)):
        rows: dict[str, list[Tensor]] = {}
        for index, name in enumerate(PHOTOS):
            photo = load(getattr(skimage.data, name)())
            scale = 480 / max(photo.shape[1:])
            photo = resize(photo, size=tuple(round(n * scale) for n in photo.shape[1:]))  # type: ignore[arg-type]
            for turn in range(args.warps):
                generator = torch.Generator().manual_seed(100 * index + turn)
                maps = make((photo.shape[1], photo.shape[2]), generator)
                for what, values in errors(model, photo, maps).items():
                    rows.setdefault(what, []).append(values)
        for what, parts in rows.items():
            every = torch.cat(parts)
            levels = torch.quantile(every, torch.tensor(LEVELS)).tolist()
            metrics[f"{kind}, {what}"] = {
                "count": len(every),
                **{f"quantile {q}": round(v, 4) for q, v in zip(LEVELS, levels, strict=True)},
                "share within 0.02": round((every < 0.02).float().mean().item(), 4),
                "share within 0.05": round((every < 0.05).float().mean().item(), 4),
            }
            print(kind, what, metrics[f"{kind}, {what}"], flush=True)
    write_json(args.out, {
        "row": "shipped ResNet-50", "benchmark": "known warps of photos", "split": "scikit-image",
        "metrics": metrics, "config": {"photos": PHOTOS, "warps": args.warps, "side": 480,
                                       "unit": "errors in longer sides of the photo"},
        "weights_sha256": file_hash(model_folder(None) / WEIGHTS),
        **environment(choose_device(None)),
    })  # fmt: skip


if __name__ == "__main__":
    main()

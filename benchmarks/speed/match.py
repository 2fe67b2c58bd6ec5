"""How fast matching is beside straightforward numpy, features given: results/speed/match.json.

    python benchmarks/speed/match.py --out results/speed/match.json

Both sides answer the same questions on the same maps in the same run, and the answers are compared:
1000 x 1000 regions, the 200 best points, and a dense field, the last two with voting. The reference
pools box by box and bin by bin, multiplies whole region descriptors, and matches point by point.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from surefeat.core.files import environment, write_json
from surefeat.core.geometry import Frame
from surefeat.match.dense import match_dense
from surefeat.match.points import match_points
from surefeat.match.regions import match_regions
from surefeat.match.search import PEAK_RADIUS, even_grid, prepare
from surefeat.match.votes import Voting, voting_grid
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features

Array = npt.NDArray[np.float32]
WEIGHTS = dict(zip(("descriptor_weight", "lower_weight"), POINT_WEIGHTS, strict=True))


def features(seed: int, device: str) -> Features:
    """Maps as ResNet-50 gives them at 320 x 240: smooth random ones, so that peaks are peaks."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.Generator().manual_seed(0)

    def maps(channels: int) -> torch.Tensor:
        world = torch.randn(1, channels, 8, 10, generator=shared)
        own = torch.randn(1, channels, 8, 10, generator=generator)
        smooth = F.interpolate(world + 0.7 * own, size=(15, 20), mode="bicubic")
        return F.normalize(smooth[0], dim=0).to(device)

    sigma = (torch.rand(15, 20, generator=generator) + 0.1).to(device)
    return Features(maps(128), sigma, maps(1024), Frame((375, 500), (240, 320)), 16)


def random_boxes(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=generator) * torch.tensor([499.0, 374.0])
    return corners.sort(dim=1).values.reshape(count, 4).round()


def numpy_pool(maps: Array, boxes: Array, original: tuple[int, int]) -> Array:
    """(C, h, w) over (N, 4) -> (N, C * 49), one bin after the other."""
    out = np.empty((len(boxes), maps.shape[0], 7, 7), np.float32)
    for row, (x1, y1, x2, y2) in enumerate(boxes):
        spans = []
        for first, last, pixels, cells in (
            (y1, y2, original[0], maps.shape[1]),
            (x1, x2, original[1], maps.shape[2]),
        ):
            start = int(np.floor(first * cells / pixels + 0.5))
            end = int(np.floor((last + 1) * cells / pixels + 0.5))
            if end <= start:
                start = int((first + last + 1) * cells / (2 * pixels))
                end = start + 1
            edges = np.arange(8) * (end - start)
            spans.append((start + edges[:-1] // 7, start - (-edges[1:] // 7)))
        for i in range(7):
            for j in range(7):
                part = maps[:, spans[0][0][i] : spans[0][1][i], spans[1][0][j] : spans[1][1][j]]
                out[row, :, i, j] = part.max((1, 2))
    return out.reshape(len(boxes), -1)


def numpy_regions(pair: list[Features], boxes: list[Array]) -> npt.NDArray[np.int64]:
    """The best box of image 1 for each of image 0."""
    rows = []
    for f, given in zip(pair, boxes, strict=True):
        sure = (f.descriptors / f.uncertainty).cpu().numpy()
        blocks = [numpy_pool(m, given, f.frame.original) for m in (sure, f.lower.cpu().numpy())]
        blocks = [block / np.linalg.norm(block, axis=1, keepdims=True) for block in blocks]
        rows.append(np.concatenate(blocks, axis=1) / np.float32(np.sqrt(2)))
    scores: npt.NDArray[np.int64] = np.maximum(rows[0] @ rows[1].T, 0).argmax(1)
    return scores


class NumpyVoting:
    """Votes of image 0 and the search point by point; vectors are read beforehand."""

    def __init__(self, pair: list[Features]) -> None:
        self.settings = Voting()
        self.sides = [prepare(f, **WEIGHTS) for f in pair]
        self.grids = [voting_grid(f.frame.network, self.settings.grid) for f in pair]
        self.places = self.sides[1].vectors.cpu().numpy()
        vectors = [
            side.at(even_grid(side.features, size=grid)).cpu().numpy()
            for side, grid in zip(self.sides, self.grids, strict=True)
        ]
        self.histograms = self._collect(vectors[0] @ vectors[1].T)

    def _collect(self, similarity: Array) -> Array:
        (h0, w0), (h1, w1) = self.grids
        votes = np.exp((similarity - similarity.max(1, keepdims=True)) / self.settings.temperature)
        votes /= votes.sum(1, keepdims=True)
        out = np.zeros((h0, w0, h0 + h1 - 1, w0 + w1 - 1), np.float32)
        for y in range(h0):
            for x in range(w0):
                top, left = h0 - 1 - y, w0 - 1 - x
                out[y, x, top : top + h1, left : left + w1] = votes[y * w0 + x].reshape(h1, w1)
        return out

    def match(self, point: Array, vector: Array) -> int:
        """The best place for one point (original pixels) of image 0."""
        from scipy.ndimage import gaussian_filter, map_coordinates

        (h0, w0), settings = self.grids[0], self.settings
        height, width = self.sides[0].features.frame.original
        x, y = (point + 0.5) * np.array([w0 / width, h0 / height]) - 0.5
        reach = settings.reach * settings.grid
        square = (np.arange(h0)[:, None] - y) ** 2 + (np.arange(w0) - x) ** 2
        near = np.exp(-0.5 * square / reach**2)
        summed = np.tensordot(near.astype(np.float32), self.histograms, 2)
        support = gaussian_filter(summed, settings.blur, mode="constant", truncate=6)
        support /= support.max()
        height, width = self.sides[1].features.frame.original
        scale = np.array([self.grids[1][1] / width, self.grids[1][0] / height])
        cells = (self.sides[1].points.cpu().numpy() + 0.5) * scale - 0.5
        where = np.stack([cells[:, 1] - y + h0 - 1, cells[:, 0] - x + w0 - 1])
        read = map_coordinates(support, where, order=1, mode="nearest")
        total = self.places @ vector + settings.weight * np.log(read + settings.floor)
        return int(total.argmax())

    def match_all(self, points: torch.Tensor) -> npt.NDArray[np.int64]:
        vectors = self.sides[0].at(points).cpu().numpy()
        pairs = zip(points.cpu().numpy(), vectors, strict=True)
        return np.array([self.match(point, vector) for point, vector in pairs])


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds of `work`, device synchronised, and its last answer."""
    spans = []
    for attempt in range(repeats + (repeats > 1)):
        start = time.perf_counter()
        answer = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        # The first call warms up, where there is more than one.
        if attempt or repeats == 1:
            spans.append(time.perf_counter() - start)
    return statistics.median(spans), answer


def row(ours: float, reference: float, agreement: float) -> dict[str, float]:
    print(f"{ours * 1000:.1f} ms against {reference * 1000:.1f} ms, agreement {agreement:.4f}")
    return {
        "ours_ms": round(ours * 1000, 2),
        "numpy_ms": round(reference * 1000, 2),
        "ratio": round(reference / ours, 2),
        "agreement": round(agreement, 4),
    }


def region_row(pair: list[Features], count: int, repeats: int) -> dict[str, float]:
    """Agreement: share of boxes for which both name the same match."""
    boxes = [random_boxes(seed, count) for seed in (2, 3)]
    ours, found = timed(lambda: match_regions(*pair, *boxes), repeats)
    arrays = [b.numpy() for b in boxes]
    reference, index = timed(lambda: numpy_regions(pair, arrays), 1)
    same = (pair[1].pool(boxes[1])[found.index] == pair[1].pool(boxes[1])[index]).flatten(1).all(1)
    return row(ours, reference, same.float().mean().item())


def point_row(pair: list[Features], repeats: int) -> dict[str, float]:
    """200 given points, with voting, match and match back; agreement: share at the same place."""
    points = match_points(*pair, count=200).points0
    ours, found = timed(lambda: match_points(*pair, points, refine=False), repeats)

    def both_ways() -> npt.NDArray[np.int64]:
        there = NumpyVoting(pair)
        index = there.match_all(points)
        NumpyVoting(pair[::-1]).match_all(there.sides[1].points[index])
        return index

    reference, index = timed(both_ways, 1)
    places = prepare(pair[1], **WEIGHTS).points[index]
    same = (places - found.points1).abs().amax(1) < 1e-2
    return row(ours, reference, same.float().mean().item())


def dense_row(pair: list[Features], repeats: int) -> dict[str, float]:
    """Every fourth network pixel; agreement: share within the reach of refinement of each other."""
    size = (60, 80)
    ours, found = timed(lambda: match_dense(*pair, size=size), repeats)
    points = even_grid(pair[0], size=size)
    reference, index = timed(lambda: NumpyVoting(pair).match_all(points), 1)
    places = prepare(pair[1], **WEIGHTS).points[index]
    x, y = points.round().long().unbind(-1)
    apart = (found.points1[y, x] - places).norm(dim=-1)
    return row(ours, reference, (apart < PEAK_RADIUS * 500 / 2).float().mean().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results/speed/match.json"))
    parser.add_argument("--boxes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pair = [features(seed, args.device) for seed in (1, 2)]
    metrics = {
        f"regions {args.boxes} x {args.boxes}": region_row(pair, args.boxes, args.repeats),
        "points 200, both ways, voting": point_row(pair, args.repeats),
        "dense 60 x 80, voting": dense_row(pair, args.repeats),
    }
    write_json(args.out, {
        "row": "match", "benchmark": "match-speed", "split": "none", "metrics": metrics,
        "config": {"original": [375, 500], "network": [240, 320], "stride": 16, "channels": 128,
                   "lower": 1024, "threads": args.threads, "device": args.device,
                   "repeats": args.repeats, "features": "smooth random maps"},
        "weights_sha256": None,
        **environment(args.device),
    })  # fmt: skip
    print("wrote", args.out)


if __name__ == "__main__":
    main()

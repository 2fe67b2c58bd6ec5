"""The cells of one photo that go into an index: where they are, their vectors, their confidence.

Convention: a cell is numbered row by row over the photo's descriptors; its point is its centre, in
original pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import pack_tensors, read_tensors, write_bytes
from surefeat.core.geometry import cell_centres
from surefeat.match.points import spread
from surefeat.match.search import Side
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features
from surefeat.model.tiles import windows

# The file says what it is, so that another safetensors file is refused in words.
_FORMAT = "surefeat-projection-1"

# Cells that a projection is fitted on, rounds of products, and directions beyond those wanted.
_FITTED, _ROUNDS, _SPARE = 16_000, 6, 32


@dataclass(frozen=True, eq=False)
class PhotoCells:
    """N cells of one photo."""

    number: Tensor
    """(N,) int64: row * columns + column in the photo's descriptors."""
    points: Tensor
    """(N, 2) original pixels: the cells' centres."""
    vectors: Tensor
    """(N, D) float32, unit length; inner products are similarities."""
    confidence: Tensor
    """(N,) 1/sigma."""

    def __len__(self) -> int:
        return len(self.number)


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map, without a mean, of what matching compares to vectors that an index can hold.

    What goes in is descriptors and lower layers side by side, weighted as matching weights them
    (POINT_WEIGHTS); what comes out is brought to unit length.
    """

    matrix: Tensor
    """(D_in, D_out) float32."""

    @property
    def digest(self) -> str:
        """SHA-256 of the matrix: two indexes with the same one can be compared."""
        return hashlib.sha256(pack_tensors({"matrix": self.matrix.float()})).hexdigest()

    def apply(self, vectors: Tensor) -> Tensor:
        """(N, D_in) -> (N, D_out), unit length."""
        if vectors.shape[-1] != len(self.matrix):
            what = f"this projection takes vectors of {len(self.matrix)} numbers"
            fix = "use the one that was made for this model"
            raise ValueError(f"{what}, not of {vectors.shape[-1]}; {fix}")
        return F.normalize(vectors @ self.matrix.to(vectors), dim=-1)

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file, whole or not at all."""
        data = pack_tensors({"matrix": self.matrix.float()}, {"format": _FORMAT})
        write_bytes(Path(path), data)

    @staticmethod
    def load(path: str | Path) -> Projection:
        """Read what `save` wrote."""
        try:
            stored, about = read_tensors(Path(path))
        except ValueError as error:
            fix = "remove its folder, run `surefeat index` again"
            raise ValueError(f"{path} is damaged; {fix}") from error
        matrix = stored.get("matrix")
        if about.get("format") != _FORMAT or matrix is None or matrix.ndim != 2:
            raise ValueError(f"{path} holds no projection; write it with Projection.save")
        return Projection(matrix)


@torch.no_grad()
def all_cells(features: Features, *, projection: Projection | None = None) -> PhotoCells:
    """Every descriptor cell of a photo.

    The vectors are its descriptors; with a projection, what matching compares, projected.
    """
    side = _side(features, projection)
    return _chosen(side, torch.arange(len(side.points), device=side.points.device), projection)


@torch.no_grad()
def kept_cells(
    features: Features, *, budget: int, projection: Projection | None = None
) -> PhotoCells:
    """Up to `budget` cells, confident and spread out, in the photo's order.

    Unlike matching, where it chooses points itself, nothing counts more near the photo's middle: of
    100 cells more of what is asked for is kept so (docs/search.md).
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} cells a photo keeps none; use at least 1")
    side = _side(features, projection)
    chosen = spread(features.confidence_at(side.points), side.points, count=budget)
    return _chosen(side, chosen.sort().values, projection)


@torch.no_grad()
def tile_cells(
    stitched: Features,
    *,
    side: int,
    budget: int | None,
    projection: Projection | None = None,
    first: int = 0,
) -> Iterator[PhotoCells]:
    """The cells of a large photo's stitched map: of every tile of `side` as many as of a photo.

    first: the number of its first cell.
    """
    columns = stitched.uncertainty.shape[1]
    for part in windows(stitched, side=side, overlap=0.0):
        view = part.features
        cells = (
            all_cells(view, projection=projection)
            if budget is None
            else kept_cells(view, budget=budget, projection=projection)
        )
        wide = view.uncertainty.shape[1]
        row, column = part.first[0] + cells.number // wide, part.first[1] + cells.number % wide
        corner = cells.points.new_tensor(part.box[:2])
        yield replace(cells, number=first + row * columns + column, points=cells.points + corner)


def join_cells(parts: Sequence[PhotoCells]) -> PhotoCells:
    """Cells of one photo, put together in order of their numbers; none twice."""
    names = PhotoCells.__dataclass_fields__
    joined = PhotoCells(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
    order = joined.number.argsort(stable=True)
    number = joined.number[order]
    order = order[torch.cat([number.new_ones(1, dtype=torch.bool), number.diff() > 0])]
    return PhotoCells(*(getattr(joined, name)[order] for name in names))


@torch.no_grad()
def fit_projection(
    photos: Iterable[Features], *, dimension: int, generator: torch.Generator
) -> Projection:
    """The directions in which the cells of some photos differ most.

    The direction of their mean is left out: all cells share it, so it only makes them alike. Of
    many cells some are drawn. Found by repeated products with a few vectors, since all directions
    of 3,200 numbers would take a minute.
    """
    rows = []
    for features in photos:
        side = _side(features, Projection(torch.empty(0, 0)))
        rows.append(side.at(side.points).cpu())
    vectors = torch.cat(rows)
    drawn = torch.randperm(len(vectors), generator=generator)[:_FITTED]
    vectors = vectors[drawn.sort().values]
    mean = F.normalize(vectors.mean(0), dim=0)
    vectors = vectors - (vectors @ mean)[:, None] * mean
    dimension = min(dimension, vectors.shape[1] - 1, len(vectors) - 1)
    count = min(dimension + _SPARE, vectors.shape[1])
    basis = torch.randn(vectors.shape[1], count, generator=generator)
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(vectors.T @ (vectors @ basis)).Q
    seen = vectors @ basis
    turned = torch.linalg.eigh(seen.T @ seen).eigenvectors.flip(1)[:, :dimension]
    matrix = basis @ turned
    return Projection(matrix - torch.outer(mean, mean @ matrix))


@torch.no_grad()
def described(features: Features, points: Tensor, projection: Projection) -> Tensor:
    """Original pixels (N, 2) of a photo -> (N, D): what cells there would have in an index."""
    side = _side(features, projection)
    return projection.apply(side.at(points.to(side.points)))


def _side(features: Features, projection: Projection | None) -> Side:
    """A photo whose places are its cells; vectors are read where they are kept."""
    rows, columns = features.descriptors.shape[1:]
    device = features.descriptors.device
    centres = cell_centres(size=(rows, columns), stride=features.stride, device=device)
    points = features.frame.to_original(centres)
    total = sum(POINT_WEIGHTS)
    compared = (POINT_WEIGHTS[0] / total, POINT_WEIGHTS[1] / total)
    weights = (1.0, 0.0) if projection is None else compared
    return Side(features, weights, (rows, columns), points, points.new_empty(0, 0))


def _chosen(side: Side, numbers: Tensor, projection: Projection | None) -> PhotoCells:
    points = side.points[numbers]
    vectors = side.at(points)
    vectors = vectors if projection is None else projection.apply(vectors)
    return PhotoCells(numbers, points, vectors, side.features.confidence_at(points))

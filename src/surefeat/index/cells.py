"""The cells of one photo that go into an index: where they are, their vectors, their confidence.

Convention: a cell is numbered row by row over the photo's descriptors; its point is its centre, in
original pixels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import pack_tensors, read_tensors, write_bytes
from surefeat.core.geometry import cell_centres
from surefeat.match.points import quality, spread
from surefeat.match.search import Side
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features

# The file says what it is, so that another safetensors file is refused in words.
_FORMAT = "surefeat-projection-1"


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
        stored, about = read_tensors(Path(path))
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
    """Up to `budget` cells, confident, near the middle and spread out, in the photo's order.

    They are chosen as matching chooses the points it is not given.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} cells a photo keeps none; use at least 1")
    side = _side(features, projection)
    chosen = spread(quality(side), side.points, count=budget)
    return _chosen(side, chosen.sort().values, projection)


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

"""Probabilities: the paper's density of the matching loss, and how probably a match is right.

The second is a logistic model of four signs: similarity, peak margin, round trip and the confidence
of the two places. It is fitted on pairs with known answers: benchmarks/experiments/reliability.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefeat.core.files import from_dict, to_dict, write_json

# Below this 1/sigma the closed form of the log-normaliser loses digits and its series takes over.
_SERIES = 1e-3


def log_normaliser(inverse_sigma: Tensor) -> Tensor:
    """log((1 - exp(-b)) / b) for b = 1/sigma > 0, any shape; stable from b = 1e-6 to 1e6.

    It is log C(sigma) - 1/sigma with the paper's C(sigma) = sigma (exp(1/sigma) - 1).
    """
    small = inverse_sigma < _SERIES
    # Both branches must stay finite for the gradient of torch.where.
    b = torch.where(small, torch.ones_like(inverse_sigma), inverse_sigma)
    series = torch.where(small, inverse_sigma, torch.zeros_like(inverse_sigma))
    exact = torch.log(-torch.expm1(-b) / b)
    return torch.where(small, -series / 2 + series.square() / 24, exact)


def negative_log_density(loss: Tensor, sigma: Tensor) -> Tensor:
    """-log p(s | y, sigma) of the matching loss l in [0, 1] (paper, eq. 4); float32 or better."""
    inverse = sigma.reciprocal()
    return loss * inverse + log_normaliser(inverse)


def mean_predicted_loss(sigma: Tensor) -> Tensor:
    """The matching loss that sigma predicts: m = sigma - 1/(exp(1/sigma) - 1), in (0, 1/2)."""
    b = sigma.reciprocal()
    safe = b.clamp_min(1e-2)
    return torch.where(b < 1e-2, 0.5 - b / 12, safe.reciprocal() - torch.expm1(safe).reciprocal())


FILE = "reliability.json"
"""Its name beside the weights in a model folder."""

SIGNS = ("score", "margin", "round_trip", "confidence")

# Added to the round trip before the logarithm, in longer sides: below a cell it says nothing more.
_ROUND_TRIP_FLOOR = 0.01

_FORMAT = "surefeat-reliability-2"


@dataclass(frozen=True)
class Reliability:
    """p(right) = sigmoid(weights . (signs - mean) / scale + bias), and what it was fitted on."""

    weights: tuple[float, ...]
    """Of the signs, in the order of SIGNS."""
    bias: float
    mean: tuple[float, ...]
    """Of the signs where it was fitted."""
    scale: tuple[float, ...]
    """Their standard deviation there."""
    matching: str
    """How the matches it was fitted on were found (match.points.matching_text): signs change with
    every setting, so matches found in another way get no probability from it."""
    right_within: float
    """A match counts as right up to this distance, in longer sides of image 1."""
    fitted_on: str
    """The pairs, in words."""
    matches: int
    """How many matches those pairs gave."""
    weights_sha256: str = ""
    """The model whose features were matched."""
    sides: tuple[int, ...] = ()
    """Longest sides of the network's input it was fitted at, pixels: signs change with them."""

    def __post_init__(self) -> None:
        if any(len(row) != len(SIGNS) for row in (self.weights, self.mean, self.scale)):
            raise ValueError(f"weights, mean and scale must have one number each for {SIGNS}")

    def predict(
        self, score: Tensor, margin: Tensor, round_trip: Tensor, confidence: Tensor
    ) -> Tensor:
        """Probabilities (N,), from (N,) each; round_trip in longer sides of image 0."""
        table = signs(score, margin, round_trip, confidence)
        rows = (self.weights, self.mean, self.scale)
        weights, mean, scale = (table.new_tensor(row) for row in rows)
        return torch.sigmoid((table - mean) / scale @ weights + self.bias)

    def holds_at(self, network: tuple[int, int]) -> bool:
        """Whether it speaks of inputs of this (height, width): from its least side to its most."""
        return bool(self.sides) and min(self.sides) <= max(network) <= max(self.sides)

    def save(self, folder: str | Path) -> None:
        """Write reliability.json into a model folder, whole or not at all."""
        write_json(Path(folder) / FILE, {"format": _FORMAT, **to_dict(self)})

    @staticmethod
    def load(folder: str | Path) -> Reliability | None:
        """Read what `save` wrote; None where the folder has none."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text())
            if values.pop("format", None) != _FORMAT:
                raise ValueError("another format")
            known: Reliability = from_dict(Reliability, values)
        except (AttributeError, TypeError, ValueError) as error:
            fault = f"{path} is not what Reliability.save writes ({error})"
            raise ValueError(f"{fault}; delete it or fit it again") from error
        return known


def signs(score: Tensor, margin: Tensor, round_trip: Tensor, confidence: Tensor) -> Tensor:
    """(N, 4): what the model looks at. Round trip and confidence count by their logarithms,
    because both spread over orders of magnitude."""
    trip = (round_trip + _ROUND_TRIP_FLOOR).log()
    return torch.stack([score, margin, trip, confidence.log()], dim=-1)

"""Probabilities: the paper's density of the matching loss, and what a model knows of its answers.

The second are logistic models of a few signs, fitted on pairs with known answers
(benchmarks/experiments/reliability.py), and a cohort: places of other photos, so that a similarity
can be told from what any two photos have in common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.files import (
    from_dict,
    pack_tensors,
    read_tensors,
    to_dict,
    write_bytes,
    write_json,
)

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


FILE, COHORT = "reliability.json", "cohort.safetensors"
"""Their names beside the weights in a model folder."""

_FORMAT = "surefeat-reliability-5"

_EARLIER = tuple(f"surefeat-reliability-{version}" for version in (1, 2, 3, 4))
"""Of other questions (1, 2: whether a match is right, given that both photos are related), or of
signs that were read from other layers (3, 4)."""


@dataclass(frozen=True)
class Logistic:
    """p = sigmoid(weights . (signs - mean) / scale + bias), and what it was fitted on."""

    signs: tuple[str, ...]
    """What it looks at, by name, in this order."""
    weights: tuple[float, ...]
    bias: float
    mean: tuple[float, ...]
    """Of the signs where it was fitted."""
    scale: tuple[float, ...]
    """Their standard deviation there."""
    fitted_on: str
    """In words."""
    cases: int
    """How many known answers."""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.signs) for row in (self.weights, self.mean, self.scale)):
            raise ValueError(f"weights, mean and scale must have one number each for {self.signs}")

    def log_odds(self, signs: Mapping[str, Tensor]) -> Tensor:
        """log(p / (1 - p)) of signs by name, each of one shape."""
        table = torch.stack([signs[name] for name in self.signs], dim=-1)
        rows = (self.weights, self.mean, self.scale)
        weights, mean, scale = (table.new_tensor(row) for row in rows)
        return (table - mean) / scale @ weights + self.bias


def fit_logistic(
    signs: Mapping[str, Tensor], right: Tensor, *, fitted_on: str, weight: Tensor | None = None,
    ridge: float = 1e-4, prior: Logistic | None = None, strength: float = 0.0,
) -> Logistic:  # fmt: skip
    """Fit on signs (N,) each and answers (N,), bool or shares in [0, 1], by Newton's method.

    Minimises the weighted mean log loss + ridge/2 |weights|^2: the ridge keeps weights finite where
    signs separate right from wrong. The bias is free, so the mean probability is the share of right
    answers. With a prior, its mean and scale are kept, and leaving its weights and bias costs
    strength/2 |change|^2 beside the log loss of all answers, so that few can only correct it.
    """
    names = prior.signs if prior else tuple(signs)
    table = torch.stack([signs[name] for name in names], dim=-1).double().cpu()
    answers = right.double().cpu()
    counts = torch.ones_like(answers) if weight is None else weight.double().cpu()
    counts = counts / counts.sum()
    if prior is None:
        if len(table) != len(answers) or answers.min() >= 1 or answers.max() <= 0:
            raise ValueError("a probability needs one answer per case, right ones and wrong ones")
        mean = counts @ table
        scale = (counts @ (table - mean).square()).sqrt()
        # A sign that never varies (confidence, from a model without it) differs by rounding alone,
        # which standardising would blow up.
        scale = torch.where(scale > 1e-5 * (1 + mean.abs()), scale, torch.inf)
        start, penalty = torch.zeros(len(names) + 1).double(), torch.full((len(names) + 1,), ridge)
        penalty[-1] = 0.0
    else:
        mean, scale = (torch.tensor(row).double() for row in (prior.mean, prior.scale))
        start = torch.tensor([*prior.weights, prior.bias]).double()
        penalty = torch.full((len(start),), ridge + strength / max(1, len(answers)))
    design = torch.cat([(table - mean) / scale, torch.ones(len(table), 1)], dim=1)
    *weights, bias = _newton(design, answers, counts, start, penalty.double()).tolist()
    shown = torch.where(scale.isinf(), 1.0, scale)
    return Logistic(
        names, tuple(weights), bias, tuple(mean.tolist()), tuple(shown.tolist()), fitted_on,
        len(answers),
    )  # fmt: skip


def _newton(
    design: Tensor, answers: Tensor, counts: Tensor, start: Tensor, penalty: Tensor
) -> Tensor:
    """Weights that minimise the log loss + penalty/2 |weights - start|^2, by damped steps."""

    def cost(weights: Tensor) -> Tensor:
        logits = design @ weights
        loss = F.softplus(logits) - answers * logits
        return counts @ loss + (penalty * (weights - start).square()).sum() / 2

    weights = start
    for _ in range(50):
        chance = torch.sigmoid(design @ weights)
        slope = design.T @ (counts * (chance - answers)) + penalty * (weights - start)
        bend = (design * (counts * chance * (1 - chance))[:, None]).T @ design
        step = torch.linalg.solve(bend + torch.diag(penalty + 1e-12), slope)
        share = 1.0
        while cost(weights - share * step) > cost(weights) and share > 1e-6:
            share /= 2
        weights = weights - share * step
        if float(step.abs().max()) < 1e-9:
            break
    return weights


@dataclass(frozen=True)
class KeypointTrust:
    """How far a detector's keypoints can be trusted (keypoints.trust.SIGNS)."""

    present: Logistic
    """The probability that the part is in the photo."""
    right: Logistic
    """That it is, and within a tenth of the box's longer side of the place that was found."""
    error: Logistic
    """How far off the place is expected to be where the part is in the photo: not a probability,
    but a share of the box's longer side, at most 1."""


@dataclass(frozen=True)
class TransferTrust:
    """How far labels that were carried over by matching can be trusted (keypoints.transfer)."""

    point: Logistic
    """That the part is in the photo, and within a tenth of the object's longer side of the place
    (keypoints.carry.POINT_SIGNS)."""
    box: Logistic
    """That the box overlaps the object's own by half or more (keypoints.carry.BOX_SIGNS)."""


@dataclass(frozen=True)
class Reliability:
    """What a model knows of its own answers: three probabilities, each of its own question."""

    pair: Logistic
    """That two photos show the same kind of thing (match.related.PAIR_SIGNS)."""
    point: Logistic
    """That a point of two related photos has a counterpart in the other, and that it was found:
    within `right_within` of it (match.related.POINT_SIGNS)."""
    pooled: Logistic
    """The first question, answered in a hurry: from one vector of each photo."""
    matching: str
    """How the matches it was fitted on were found (match.points.matching_text): signs change with
    every setting, so matches found in another way get no probability from it."""
    right_within: float
    """A match counts as right up to this distance, in longer sides of image 1."""
    weights_sha256: str = ""
    """The model whose features were matched."""
    sides: tuple[int, ...] = ()
    """Longest sides of the network's input it was fitted at, pixels: signs change with them."""
    keypoints: KeypointTrust | None = None
    """Where the trust in a new keypoint detector starts from, before its own labels speak."""
    transfer: TransferTrust | None = None
    """Of labels carried from a few photos to others."""
    without_labels: bool = False
    """Of a run's own model: moved from the shipped model's by the run's photos (learn.trust)."""

    def holds_at(self, network: tuple[int, int]) -> bool:
        """Whether it speaks of inputs of this (height, width): from its least side to its most."""
        return bool(self.sides) and min(self.sides) <= max(network) <= max(self.sides)

    def save(self, folder: str | Path) -> None:
        """Write reliability.json into a model folder, whole or not at all."""
        write_json(Path(folder) / FILE, {"format": _FORMAT, **to_dict(self)})

    @staticmethod
    def load(folder: str | Path) -> Reliability | None:
        """Read what `save` wrote; None where the folder has none, or one of an earlier version."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text())
            version = values.pop("format", None)
            if version in _EARLIER:
                return None
            if version != _FORMAT:
                raise ValueError("another format")
            known: Reliability = from_dict(Reliability, values)
        except (AttributeError, TypeError, ValueError) as error:
            fault = f"{path} is not what Reliability.save writes ({error})"
            raise ValueError(f"{fault}; delete it or fit it again") from error
        return known


def last_channels(vectors: Tensor, count: int) -> Tensor:
    """(N, D) -> (N, count): the last channels alone, unit length; count 0: all, as they are."""
    return F.normalize(vectors[:, -count:], dim=1) if count else vectors


@dataclass(frozen=True, eq=False)
class Cohort:
    """Places of many other photos, as one model sees them.

    Two photos have always something in common: grass, sky, edges. How similar a place is to the
    most similar place of the cohort says how little that means. Lower layers are compared alone:
    where only the head learns they stay as they are, so one cohort serves every head. The last of
    them tells kinds of things; those before it see outlines, in which a cup resembles a face.
    """

    lower: Tensor
    """(M, D), unit length."""
    last: int = 0
    """How many of the D channels are the last lower layer's, which tells kinds; 0: all."""

    @property
    def kinds(self) -> Tensor:
        """(M, last): its places by the last lower layer alone, unit length."""
        return last_channels(self.lower, self.last)

    def nearest(self, lower: Tensor) -> Tensor:
        """(N, D) -> (N,): the highest similarity of the lower layers."""
        return (lower @ self.lower.to(lower).T).amax(1)

    def nearest_kind(self, lower: Tensor) -> Tensor:
        """(N, D) -> (N,): the highest similarity of the last lower layer alone."""
        return (last_channels(lower, self.last) @ self.kinds.to(lower).T).amax(1)

    def save(self, folder: str | Path) -> None:
        """Write cohort.safetensors into a model folder, in half precision."""
        data = pack_tensors({"lower": self.lower.half()}, {"last": str(self.last)})
        write_bytes(Path(folder) / COHORT, data)

    @staticmethod
    def load(folder: str | Path) -> Cohort | None:
        """Read what `save` wrote; None where the folder has none."""
        path = Path(folder) / COHORT
        if not path.is_file():
            return None
        try:
            stored, about = read_tensors(path)
            return Cohort(stored["lower"].float(), int(about.get("last", 0)))
        except (KeyError, ValueError) as error:
            fault = f"{path} is not what Cohort.save writes ({error})"
            raise ValueError(f"{fault}; delete it or fit it again") from error

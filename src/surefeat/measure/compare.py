"""Two results side by side: is the difference more than the choice of pairs?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefeat.measure.results import Result

RESAMPLES = 10_000

_CHUNK = 1_000


@dataclass(frozen=True)
class Difference:
    """A metric of two results on the same pairs."""

    metric: str
    first: float
    second: float
    difference: float
    """second - first, mean over the pairs that both have."""
    low: float
    """2.5th percentile of the bootstrapped difference."""
    high: float
    """97.5th percentile."""
    chance: float
    """Two-sided p: how often resampled pairs turn or remove the difference, doubled, at most 1."""
    pairs: int


def compare(first: Result, second: Result, *, seed: int = 0) -> list[Difference]:
    """All metrics that both results keep per pair, by paired bootstrap over pairs."""
    for key in ("benchmark", "split"):
        if first[key] != second[key]:
            raise ValueError(
                f"results are of different {key}s, {first[key]} and {second[key]}; "
                "compare two rows of one benchmark"
            )
    pairs0, pairs1 = first.get("pairs", {}), second.get("pairs", {})
    if not pairs0.get("names") or pairs0.get("names") != pairs1.get("names"):
        raise ValueError("the results are of different pairs; evaluate both on the same list")
    found = []
    for metric in pairs0:
        if metric != "names" and metric in pairs1:
            values = paired(pairs0[metric], pairs1[metric])
            if len(values):
                found.append(difference(metric, values, seed=seed))
    return found


def paired(values0: Sequence[float | None], values1: Sequence[float | None]) -> Tensor:
    """(P, 2) float64: the pairs that both have a value for."""
    both = [(a, b) for a, b in zip(values0, values1, strict=True) if None not in (a, b)]
    return torch.tensor(both, dtype=torch.float64).reshape(-1, 2)


def difference(metric: str, values: Tensor, *, seed: int = 0) -> Difference:
    """Paired bootstrap of the mean difference of values (P, 2)."""
    change = values[:, 1] - values[:, 0]
    drawn = resampled_means(change, generator=torch.Generator().manual_seed(seed))
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    tail = min(float((drawn <= 0).double().mean()), float((drawn >= 0).double().mean()))
    first, second = values.mean(0).tolist()
    return Difference(
        metric, first, second, second - first, low, high, min(1.0, 2 * tail), len(values)
    )


def resampled_means(values: Tensor, *, generator: torch.Generator) -> Tensor:
    """Means (RESAMPLES,) of as many values as given (P,), drawn with replacement."""
    parts = []
    for _ in range(RESAMPLES // _CHUNK):
        index = torch.randint(len(values), (_CHUNK, len(values)), generator=generator)
        parts.append(values[index].mean(1))
    return torch.cat(parts)


def difference_table(found: Sequence[Difference], names: tuple[str, str]) -> str:
    """The differences as a markdown table."""
    lines = [
        f"| metric | {names[0]} | {names[1]} | difference | 95 % interval | p | pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        digits = 3 if "iou" in each.metric else 1
        first, second, change, low, high = (
            f"{value:.{digits}f}"
            for value in (each.first, each.second, each.difference, each.low, each.high)
        )
        lines.append(
            f"| {each.metric} | {first} | {second} | {change} | {low} to {high} "
            f"| {each.chance:.3f} | {each.pairs} |"
        )
    return "\n".join(lines) + "\n"

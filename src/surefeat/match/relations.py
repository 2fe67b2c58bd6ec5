"""Which photos of many show the same kind of thing: all pairs, and groups of them.

Every photo becomes one vector, the confidence-weighted mean of its cells; where those leave a pair
in doubt, the two photos are compared cell by cell, as `Matches.related` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.data.decode import Skipped
from surefeat.data.sources import photos_of
from surefeat.match.related import Agreement, Cells, pooled_vector
from surefeat.match.search import prepare
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.extract import extract_readable
from surefeat.model.network import DenseFeatures

DOUBT = 0.05
"""A pair whose vectors say yes or no with more than 1 - DOUBT is not looked at more closely."""

_BATCH = 16


@dataclass(frozen=True, eq=False)
class Relations:
    """N photos and how probably each two of them show the same kind of thing."""

    names: tuple[str, ...]
    """As they were given, or found in a folder."""
    probability: Tensor
    """(N, N), symmetric, 1 on the diagonal."""
    groups: tuple[tuple[int, ...], ...]
    """Photos that belong together, the largest group first; each photo is in one."""
    compared: int
    """Pairs that were compared cell by cell."""
    skipped: tuple[Skipped, ...] = ()
    """Photos that cannot be read."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; probabilities with three digits."""
        rows = [[round(value, 3) for value in row] for row in self.probability.tolist()]
        return {
            "photos": list(self.names), "groups": [list(group) for group in self.groups],
            "probability": rows, "compared": self.compared,
            "skipped": [{"photo": s.name, "reason": s.reason} for s in self.skipped],
        }  # fmt: skip


@torch.no_grad()
def relate(
    images: str | Path | Sequence[str | Path],
    model: DenseFeatures | None = None,
    *,
    threshold: float = 0.5,
    quiet: bool = True,
) -> Relations:
    """Photos (paths, folders) -> which of them show the same kind of thing.

    threshold: photos form a group while the mean probability between its parts is above it. Photos
    that cannot be read are skipped and listed. The model (default: the one that ships) must know
    its own reliability.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; probabilities are between 0 and 1")
    model = model or DenseFeatures.from_pretrained()
    if model.reliability is None or model.cohort is None:
        what = "this model was never fitted on pairs of known relation"
        raise ValueError(f"{what}; use the model that ships (leave --model out)")
    names, cells, skipped = _cells_of(images, model, quiet=quiet)
    centre = model.cohort.kinds.mean(0).to(cells[0].kind.device)
    vectors = torch.stack([pooled_vector(one, centre) for one in cells])
    odds = model.reliability.pooled.log_odds({"pooled": vectors @ vectors.T}).cpu()
    limit = torch.logit(torch.tensor(1 - DOUBT))
    doubtful = torch.triu(odds.abs() < limit, diagonal=1).nonzero().tolist()
    for i, j in progress.bar(doubtful, desc="comparing", unit="pair", quiet=quiet):
        signs = Agreement(cells[i], cells[j]).signs()
        odds[i, j] = odds[j, i] = model.reliability.pair.log_odds(signs).cpu()
    probability = odds.sigmoid().fill_diagonal_(1.0)
    groups = group(probability, threshold=threshold)
    return Relations(names, probability, groups, len(doubtful), tuple(skipped))


def _cells_of(
    images: str | Path | Sequence[str | Path], model: DenseFeatures, *, quiet: bool
) -> tuple[tuple[str, ...], list[Cells], list[Skipped]]:
    """Names and cells of the photos that can be read."""
    given = [images] if isinstance(images, str | Path) else images
    paths = [path for one in given for path in photos_of(Path(one))]
    skipped: list[Skipped] = []
    names, cells = [], []
    with progress.bar(total=len(paths), desc="extracting", unit="img", quiet=quiet) as bar:
        for start in range(0, len(paths), _BATCH):
            part = paths[start : start + _BATCH]
            side = model.config.longest_side
            for path, features in extract_readable(model, part, skipped, longest_side=side):
                names.append(str(path))
                weights = {"descriptor_weight": POINT_WEIGHTS[0], "lower_weight": POINT_WEIGHTS[1]}
                cells.append(Cells.of(prepare(features, **weights)))
            bar.update(len(part))
    if not cells:
        why = f" ({skipped[0].reason})" if skipped else ""
        raise ValueError(f"none of {len(paths)} photos can be read{why}; pass others")
    return tuple(names), cells, skipped


def group(probability: Tensor, *, threshold: float) -> tuple[tuple[int, ...], ...]:
    """Groups of N photos from probabilities (N, N), the largest first.

    The two groups with the highest mean probability between their photos are joined, again and
    again, while it is above the threshold: one doubtful photo cannot chain two groups together.
    """
    mean = probability.numpy().astype(np.float64).copy()
    np.fill_diagonal(mean, -1.0)
    members = {number: [number] for number in range(len(mean))}
    while len(members) > 1:
        i, j = np.unravel_index(int(mean.argmax()), mean.shape)
        if mean[i, j] <= threshold:
            break
        sizes = len(members[int(i)]), len(members[int(j)])
        joined = (sizes[0] * mean[i] + sizes[1] * mean[j]) / sum(sizes)
        gone = mean[i] < 0
        joined[gone | (mean[j] < 0)] = -1.0
        mean[i], mean[:, i] = joined, joined
        mean[j], mean[:, j], mean[i, i] = -1.0, -1.0, -1.0
        members[int(i)] += members.pop(int(j))
    ordered = sorted(members.values(), key=lambda one: (-len(one), min(one)))
    return tuple(tuple(sorted(one)) for one in ordered)

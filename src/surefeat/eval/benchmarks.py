"""The benchmarks of semantic matching by name: their pairs, and the rule their numbers go by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from surefeat.data.pairs import Pair, load_pairs
from surefeat.data.pf_pascal import development_pairs, load_pf_pascal
from surefeat.data.pf_willow import load_pf_willow
from surefeat.data.spair import load_spair
from surefeat.eval.metrics import Convention, shifted_target

Name = Literal["pf-pascal", "pf-willow", "spair", "pairs"]
NAMES: tuple[Name, ...] = get_args(Name)
RULES: dict[Name, Convention] = {
    "pf-pascal": "scnet", "pf-willow": "bbox-kp", "spair": "bbox", "pairs": "img",
}  # fmt: skip
"""The convention each benchmark's own tables use; all others are computed beside it."""


@dataclass(frozen=True, eq=False)
class Benchmark:
    """Pairs to measure on."""

    name: Name
    split: str
    pairs: list[Pair]

    @property
    def rule(self) -> Convention:
        """The convention of its own tables."""
        return RULES[self.name]


def load_benchmark(
    name: Name, data: str | Path, *, split: str = "test", images: str | Path | None = None
) -> Benchmark:
    """Read a benchmark in its public layout.

    Splits: pf-pascal has test, and val and train for choosing settings (no test image; keypoints
    from its Annotations folder, or rebuilt ones); spair has test, val and trn; pf-willow and pairs
    are all test. `pairs` is a CSV list in PF-PASCAL's columns, its images beside it or under
    `images`.
    """
    data = Path(data)
    if name not in NAMES:
        raise ValueError(f"unknown benchmark {name!r}; choose from {', '.join(NAMES)}")
    if name == "spair":
        return Benchmark(name, split, load_spair(data, split))
    if name == "pf-pascal" and split in ("val", "train"):
        validation, training = development_pairs(data)
        return Benchmark(name, split, validation if split == "val" else training)
    if split != "test":
        raise ValueError(f"{name} has no split {split!r}; leave --split out")
    if name == "pf-pascal":
        return Benchmark(name, split, load_pf_pascal(data))
    if name == "pf-willow":
        return Benchmark(name, split, load_pf_willow(data))
    return Benchmark(name, split, load_pairs(_list(data), images))


def shifted(pair: Pair, pixels_of_224: float) -> Pair | None:
    """Control: the pair with image 1 shifted (see `shifted_target`); None if no point stays in it.

    Points that leave the image are no longer visible.
    """
    blank = torch.zeros(1, *pair.size1)
    _, points1, inside = shifted_target(blank, pair.points1, pixels_of_224)
    visible = pair.visible & inside
    if not bool(visible.any()):
        return None
    box1 = pair.box1
    if box1 is not None:
        box1 = shifted_target(blank, box1.reshape(2, 2), pixels_of_224)[1].flatten()
    return replace(pair, points1=points1, visible=visible, box1=box1)


def shifted_boxes(boxes: Tensor, *, size: tuple[int, int], pixels_of_224: float) -> Tensor:
    """Boxes (N, 4) moved with the image's content and cut at its right edge.

    A box of which less than half its width stays inside is left out.
    """
    nothing = torch.zeros(1, *size)
    moved = shifted_target(nothing, boxes.reshape(-1, 2), pixels_of_224)[1].reshape(-1, 4)
    cut = moved.minimum(moved.new_tensor([size[1] - 1.0, float("inf")] * 2))
    width, left = moved[:, 2] - moved[:, 0] + 1, cut[:, 2] - moved[:, 0] + 1
    return cut[2 * left >= width]


def _list(data: Path) -> Path:
    """The CSV itself, or the only one in a folder."""
    if not data.is_dir():
        return data
    found = sorted(data.glob("*.csv"))
    if len(found) != 1:
        raise ValueError(f"{data} holds {len(found)} CSV lists; name the one to use")
    return found[0]

"""What all rows share: the benchmark's pictures at the network's size, proposals and truth."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.data.pairs import Pair
from surefeat.eval.benchmarks import Benchmark, shifted, shifted_boxes
from surefeat.eval.metrics import shifted_target
from surefeat.eval.proposal_file import proposals_of
from surefeat.eval.protocol import REGION_MEASURES, Measure, Protocol
from surefeat.eval.regions import RegionTruth, region_truth
from surefeat.geometry import Frame
from surefeat.image import load, resize

Variant = Literal["plain", "shifted"]
Key = tuple[Path, Variant]
"""A picture: its file, and whether it was shifted."""


@dataclass(frozen=True, eq=False)
class Case:
    """One pair in one variant, ready to be measured by any row."""

    number: int
    """Of the pair in the benchmark."""
    variant: Variant
    pair: Pair
    measures: tuple[Measure, ...]
    boxes0: Tensor
    """(N, 4) proposals of image 0, original pixels; none where regions are not measured."""
    boxes1: Tensor
    """(M, 4) proposals of image 1."""
    truth: RegionTruth | None

    @property
    def keys(self) -> tuple[Key, Key]:
        """Of image 0, which is never shifted, and image 1."""
        return (self.pair.image0, "plain"), (self.pair.image1, self.variant)

    def frame(self, side: int, image: Literal[0, 1]) -> Frame:
        """Between the image's original pixels and the square the network sees."""
        return Frame(self.pair.size1 if image else self.pair.size0, (side, side))


@dataclass(frozen=True, eq=False)
class Material:
    """A benchmark under a protocol."""

    benchmark: Benchmark
    protocol: Protocol
    cases: tuple[Case, ...]
    """First all pairs as they are, then all that were shifted."""
    pictures: dict[Key, Tensor]
    """(3, S, S) uint8 each, S the largest input, in the order the cases need them."""

    def fingerprint(self) -> str:
        """Hash of everything a row is shown and asked."""
        digest = hashlib.sha256()
        for (path, variant), pixels in self.pictures.items():
            digest.update(f"{path.name} {variant}".encode() + pixels.numpy().tobytes())
        for case in self.cases:
            for each in (*case.pair.common(), case.boxes0, case.boxes1):
                digest.update(each.contiguous().numpy().tobytes())
        return digest.hexdigest()


def prepare_material(
    benchmark: Benchmark, protocol: Protocol, *, proposals: Path, quiet: bool = False
) -> Material:
    """Read pictures, find or read proposals (kept in the file `proposals`), work out the truth."""
    both = (*protocol.measures, *protocol.shifted_measures)
    boxes: dict[Path, Tensor] = {}
    if set(REGION_MEASURES) & set(both):
        images = (path for pair in benchmark.pairs for path in (pair.image0, pair.image1))
        boxes = proposals_of(images, protocol.proposals, file=proposals, quiet=quiet)
    cases = []
    bar = tqdm(benchmark.pairs, desc="ground truth", disable=quiet, leave=False)
    for number, pair in enumerate(bar):
        cases.append(_case(number, "plain", pair, boxes, protocol))
    for number, pair in enumerate(benchmark.pairs if protocol.shifted_measures else ()):
        moved = shifted(pair, protocol.shift)
        if moved is not None:
            cases.append(_case(number, "shifted", moved, boxes, protocol))
    keys = list(dict.fromkeys(key for case in cases for key in case.keys))
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(lambda key: _picture(key, protocol), keys)
        bar = tqdm(read, desc="pictures", total=len(keys), disable=quiet, leave=False)
        pictures = dict(zip(keys, bar, strict=True))
    return Material(benchmark, protocol, tuple(cases), pictures)


def _case(
    number: int, variant: Variant, pair: Pair, boxes: dict[Path, Tensor], protocol: Protocol
) -> Case:
    measures = protocol.measures if variant == "plain" else protocol.shifted_measures
    if not set(REGION_MEASURES) & set(measures):
        none = torch.zeros(0, 4)
        return Case(number, variant, pair, measures, none, none, None)
    boxes0, boxes1 = boxes[pair.image0], boxes[pair.image1]
    if variant == "shifted":
        boxes1 = shifted_boxes(boxes1, size=pair.size1, pixels_of_224=protocol.shift)
    return Case(number, variant, pair, measures, boxes0, boxes1, region_truth(pair, boxes0))


def _picture(key: Key, protocol: Protocol) -> Tensor:
    path, variant = key
    pixels = load(path)
    if variant == "shifted":
        pixels = shifted_target(pixels, torch.zeros(0, 2), protocol.shift)[0]
    largest = max(protocol.seen)
    return resize(pixels, size=(largest, largest))

"""What a matching measurement works on: pictures, proposals and their truth, a row's features.

All rows share pictures, proposals and truth. A proposal has a known answer where keypoints surround
it (Proposal Flow, Ham et al. 2016). Features are computed once, in batches, and kept on the device.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.geometry import Frame, box_area, box_intersection, clip_boxes, fit_thin_plate
from surefeat.core.image import decoded, image_threads, read_bytes, resize
from surefeat.data.benchmarks import Benchmark, shifted, shifted_boxes, shifted_image
from surefeat.data.pairs import Pair
from surefeat.match.proposals import proposals_of
from surefeat.measure.metrics import keypoint_box
from surefeat.measure.protocol import REGION_MEASURES, Measure, Protocol
from surefeat.measure.rows import Row
from surefeat.model.features import Features, join_scales

ACTIVE_SHARE = 0.75
"""More than this share of a proposal's area must lie in the box of the keypoints."""


@dataclass(frozen=True, eq=False)
class RegionTruth:
    """The active proposals of image 0 and the boxes in image 1 they correspond to."""

    active: Tensor
    """(A,) indices into the proposals of image 0, rising."""
    boxes: Tensor
    """(A, 4) inclusive boxes, original pixels of image 1, inside it."""


def active_proposals(boxes: Tensor, points: Tensor) -> Tensor:
    """(N,) bool: proposals (N, 4) whose place is fixed by the keypoints (V, 2) around them.

    Active: more than 0.75 of the area (inclusive widths) lies in the keypoints' box, and at least
    one keypoint lies between the proposal's first and last pixel centres. The box of a single
    keypoint is one pixel, that of keypoints in one row a pixel high: hardly a proposal is active.
    """
    everything = torch.ones(len(points), dtype=torch.bool, device=points.device)
    frame = keypoint_box(points.double(), everything)[None]
    boxes = boxes.double()
    # No division: a proposal of no area (inverted) must not count as wholly inside.
    inside = box_intersection(boxes, frame)[:, 0] > ACTIVE_SHARE * box_area(boxes)
    after = points.double()[None] >= boxes[:, None, :2]
    before = points.double()[None] <= boxes[:, None, 2:]
    return inside & (after & before).all(-1).any(-1)


def ground_truth_boxes(
    boxes: Tensor, points0: Tensor, points1: Tensor, *, size1: tuple[int, int]
) -> Tensor:
    """Where boxes (A, 4) of image 0 lie in image 1, inclusive (A, 4), by the common keypoints.

    A thin-plate spline through the keypoints (V, 2) maps the four corners; x1 is the mean of the
    two smallest x, x2 of the two largest, the same for y; cut to the image of size1.

    Degenerate sets: one keypoint gives a mere shift; two, or several on one line, are followed
    along that line and leave lengths across it as they are; keypoints at one place of image 0 with
    different targets go to the targets' mean. A box mapped wholly outside becomes the nearest
    pixels of the border.
    """
    spline = fit_thin_plate(points0.double(), points1.double())
    corners = boxes.double()[:, [0, 1, 2, 1, 0, 3, 2, 3]].reshape(-1, 2)
    moved = spline(corners).reshape(-1, 4, 2).sort(dim=1).values
    mapped = torch.cat([moved[:, :2].mean(1), moved[:, 2:].mean(1)], dim=-1)
    return clip_boxes(mapped, size=size1).to(boxes.dtype)


def region_truth(pair: Pair, boxes0: Tensor) -> RegionTruth:
    """Active ones among proposals boxes0 (N, 4), original pixels of image 0, and their truth."""
    points0, points1 = pair.common()
    active = active_proposals(boxes0, points0).nonzero()[:, 0]
    truth = ground_truth_boxes(boxes0[active], points0, points1, size1=pair.size1)
    return RegionTruth(active=active, boxes=truth)


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
    originals: dict[Key, Tensor] = field(default_factory=dict)
    """(3, H, W) uint8 each, at its own size; only where the measure `own` is asked for."""

    def fingerprint(self) -> str:
        """Hash of everything a row is shown and asked."""
        digest = hashlib.sha256()
        both = (*self.pictures.items(), *self.originals.items())
        for (path, variant), pixels in both:
            digest.update(f"{path.name} {variant}".encode() + pixels.numpy().tobytes())
        for case in self.cases:
            for asked in (*case.pair.common(), case.boxes0, case.boxes1):
                digest.update(asked.contiguous().numpy().tobytes())
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
    bar = progress.bar(benchmark.pairs, desc="ground truth", quiet=quiet, leave=False)
    for number, pair in enumerate(bar):
        cases.append(_case(number, "plain", pair, boxes, protocol))
    for number, pair in enumerate(benchmark.pairs if protocol.shifted_measures else ()):
        moved = shifted(pair, protocol.shift)
        if moved is not None:
            cases.append(_case(number, "shifted", moved, boxes, protocol))
    keys = list(dict.fromkeys(key for case in cases for key in case.keys))
    with image_threads(8) as pool:
        read = pool.map(lambda key: _picture(key, protocol), keys)
        bar = progress.bar(read, desc="pictures", total=len(keys), quiet=quiet, leave=False)
        pictures = dict(zip(keys, bar, strict=True))
        own = list(dict.fromkeys(k for case in cases if "own" in case.measures for k in case.keys))
        whole = pool.map(lambda key: _original(key, protocol), own)
        originals = dict(zip(own, whole, strict=True))
    return Material(benchmark, protocol, tuple(cases), pictures, originals)


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
    """The square that rows see."""
    largest = max(protocol.seen)
    with _seen(key, protocol) as pixels:
        return resize(pixels, size=(largest, largest))


def _original(key: Key, protocol: Protocol) -> Tensor:
    with _seen(key, protocol) as pixels:
        return pixels


@contextmanager
def _seen(key: Key, protocol: Protocol) -> Iterator[Tensor]:
    """A picture at its own size, shifted if its key says so; holds memory while it is used."""
    path, variant = key
    with decoded(read_bytes(path), name=str(path)) as pixels:
        yield shifted_image(pixels, protocol.shift) if variant == "shifted" else pixels


BATCH = 16
"""Pictures per pass. A picture always shares its batch with the same others, so that a resumed
evaluation gives the same bits."""


class FeatureStore:
    """The features of one row; the batches used longest ago make room for new ones."""

    def __init__(
        self, row: Row, pictures: Mapping[Key, Tensor], protocol: Protocol, *,
        device: torch.device, limit: int,
    ) -> None:  # fmt: skip
        """`limit`: bytes of features kept at once."""
        self._row, self._pictures, self._protocol = row, pictures, protocol
        self.device, self._limit = device, limit
        keys = list(pictures)
        self._groups = [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]
        self._group_of = {key: n for n, group in enumerate(self._groups) for key in group}
        self._kept: OrderedDict[int, dict[Key, Features]] = OrderedDict()
        self._bytes: dict[int, int] = {}

    def __getitem__(self, key: Key) -> Features:
        number = self._group_of[key]
        if number not in self._kept:
            self._compute(number)
        self._kept.move_to_end(number)
        return self._kept[number][key]

    @torch.no_grad()
    def _compute(self, number: int) -> None:
        group = self._groups[number]
        images = torch.stack([self._pictures[key] for key in group]).to(self.device)
        features = seen_at(self._row, images, self._protocol)
        self._kept[number] = dict(zip(group, features, strict=True))
        tensors = (t for one in features for t in (one.descriptors, one.uncertainty, one.lower))
        self._bytes[number] = sum(tensor.nbytes for tensor in tensors)
        while len(self._kept) > 1 and sum(self._bytes[n] for n in self._kept) > self._limit:
            self._kept.popitem(last=False)


def seen_at(row: Row, images: Tensor, protocol: Protocol) -> list[Features]:
    """Features of squares (B, 3, S, S) uint8 at the protocol's inputs, in the frame of its side."""
    by_input = [row.extract(resize(images, size=(n, n))) for n in protocol.seen]
    joined = [join_scales(parts) for parts in zip(*by_input, strict=True)]
    side = (protocol.side, protocol.side)
    return [replace(one, frame=Frame(side, one.frame.network)) for one in joined]


def memory_for_features(device: torch.device) -> int:
    """Bytes that features may take: a third of the accelerator's free memory, or 3 GB."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 3
    return 3 << 30

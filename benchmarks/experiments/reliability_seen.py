"""Features of many photos for the studies of probability: the trunk's layers once, on disk.

A head that learns alone reads layers of a trunk that never changes, so models that differ in the
head only (training seeds, heads of other folders) share what takes the time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from reliability_cases import Photo, voc_boxes, whole
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import pack_tensors, read_tensors, write_bytes
from surefeat.core.geometry import Frame, cell_centres
from surefeat.core.image import prepare as prepare_image
from surefeat.data.sources import find_images
from surefeat.match.search import Side, prepare
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features, compare_with
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort

COHORT_PHOTOS, COHORT_CELLS = 64, 8

_BATCH = 8


class Layers:
    """The layers that head and matching read, at unit length, in half precision, in a folder."""

    def __init__(self, model: DenseFeatures, folder: Path, side: int) -> None:
        if model.config.head != "deep":
            raise ValueError("only a deep head reads layers at unit length; pass such a model")
        self.model, self.side = model, side
        trunk = pack_tensors({k: v.cpu() for k, v in model.trunk.state_dict().items()})
        self.folder = folder / f"{hashlib.sha256(trunk).hexdigest()[:12]}-{side}"
        self.names = tuple(dict.fromkeys((*model.lower, *model.seen)))

    def file(self, photo: Photo) -> Path:
        return self.folder / f"{hashlib.sha256(photo.name.encode()).hexdigest()[:24]}.safetensors"

    @torch.no_grad()
    def add(self, photos: Sequence[Photo]) -> None:
        """Look at the photos that are not there yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = {p.name: p for p in photos if not self.file(p).is_file()}
        waiting: dict[tuple[int, int], list[tuple[Photo, Tensor, Frame]]] = {}
        for photo in tqdm(new.values(), desc="extracting", mininterval=10):
            pixels, frame = prepare_image(
                photo.read(), longest_side=self.side, multiple=self.model.stride
            )
            group = waiting.setdefault(frame.network, [])
            group.append((photo, pixels, frame))
            if len(group) == _BATCH:
                self._store(waiting.pop(frame.network))
        for group in waiting.values():
            self._store(group)

    def _store(self, group: list[tuple[Photo, Tensor, Frame]]) -> None:
        device = self.model.device
        stack = torch.stack([pixels for _, pixels, _ in group]).to(device).float() / 255
        taps = self.model.trunk(self.model.normalise_input(stack), self.names)
        unit = {name: F.normalize(taps[name].float(), dim=1).half().cpu() for name in self.names}
        for row, (photo, _, frame) in enumerate(group):
            sizes = torch.tensor([frame.original, frame.network])
            kept = {name: unit[name][row].clone() for name in self.names}
            write_bytes(self.file(photo), pack_tensors(kept | {"sizes": sizes}))

    def read(self, photo: Photo) -> tuple[dict[str, Tensor], Frame]:
        stored, _ = read_tensors(self.file(photo))
        original, network = stored.pop("sizes").tolist()
        taps = {name: stored[name].to(self.model.device).float() for name in self.names}
        return taps, Frame(tuple(original), tuple(network))


class Seen:
    """Features of photos by one model, from layers on disk."""

    def __init__(self, model: DenseFeatures, layers: Layers) -> None:
        self.model, self.layers = model, layers
        self.cohort: Cohort | None = None
        self.cohort_kinds: tuple[frozenset[str], ...] = ()
        """What each photo of the cohort shows; empty: not known."""
        self.kept: dict[str, Features] = {}

    @torch.no_grad()
    def features(self, photo: Photo) -> Features:
        """As `DenseFeatures.extract` gives them, but for rounding, compared with the cohort."""
        taps, frame = self.layers.read(photo)
        parts = [taps[name] for name in self.model.lower]
        lower = torch.cat(parts) / len(parts) ** 0.5
        if photo.name not in self.kept:
            maps = self.model._head({name: taps[name][None] for name in self.model.seen})
            features = Features(
                maps.descriptors[0], maps.uncertainty[0], lower, frame, self.model.stride,
                photo.name,
            )  # fmt: skip
            if self.cohort is not None:
                features = compare_with(self.cohort, features)
            self.kept[photo.name] = replace(features, lower=lower.new_zeros(0))
        return replace(self.kept[photo.name], lower=lower)

    def side_of(self, photo: Photo) -> Side:
        weights = {"descriptor_weight": POINT_WEIGHTS[0], "lower_weight": POINT_WEIGHTS[1]}
        return prepare(self.features(photo), **weights)

    def common_by_photo(self, features: Features) -> Tensor:
        """(COHORT_PHOTOS, h, w): as `common_kind`, with each photo of the cohort alone."""
        assert self.cohort is not None
        height, width = features.uncertainty.shape
        centres = cell_centres(size=(height, width), stride=features.stride)
        kinds = features.kind_at(features.frame.to_original(centres))
        alike = kinds @ self.cohort.kinds.to(kinds).T
        return alike.unflatten(1, (-1, COHORT_CELLS)).amax(2).T.reshape(-1, height, width)


def cohort_photos(data: Path, leave_out: set[str], *, seed: int) -> list[Photo]:
    """Photos of all classes, none of which is left out (stems of names)."""
    items = [
        item
        for folder in ("voc", "voc-nonrigid")
        for item in find_images(data / folder)
        if Path(item.name).stem not in leave_out
    ]
    known = voc_boxes(data)
    chosen = random.Random(seed).sample(sorted(items, key=lambda i: i.name), COHORT_PHOTOS)
    photos = []
    for item in chosen:
        about = known[Path(item.name).stem]
        photos.append(
            Photo(f"cohort/{item.name}", whole(item), about["size"], frozenset(about["kinds"]), "",
                  torch.zeros(0, 4))
        )  # fmt: skip
    return photos


def draw_cohort(seen: Seen, photos: Sequence[Photo], *, seed: int) -> Cohort:
    """Places of photos, COHORT_CELLS of each; of which kinds they are is told to `seen`."""
    seen.layers.add(photos)
    generator = torch.Generator().manual_seed(seed)
    layers: list[Tensor] = []
    for photo in photos:
        features = seen.features(photo)
        draws = torch.rand(COHORT_CELLS, 2, generator=generator)
        height, width = features.frame.original
        points = (draws * torch.tensor([width, height]) - 0.5).to(features.descriptors.device)
        layers.append(features.lower_at(points).cpu().half().float())
    seen.kept.clear()
    seen.cohort_kinds = tuple(photo.kinds for photo in photos)
    last = seen.model.trunk.taps[seen.model.lower[-1]] if len(seen.model.lower) > 1 else 0
    return Cohort(torch.cat(layers), last)

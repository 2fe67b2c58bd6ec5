"""The files of a keypoint detector: a folder with detector.json and head.safetensors.

KeypointDetector: the parts of objects, learned from a handful of labels on frozen features.

Paper, section 4.3: the object's box (or the whole image) and its category are known; every
keypoint gets a heat map, whose peak is its place and whose height is its confidence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.core.files import file_hash, from_dict, write_bytes, write_json
from surefeat.core.geometry import out_of_box
from surefeat.core.image import ImageLike, crop, load
from surefeat.data.decode import Place
from surefeat.data.keypoints import (
    Category,
    KeypointSet,
    Labelled,
    channels,
    make_category,
    read_coco,
)
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.head import KeypointHead, fit, peaks
from surefeat.keypoints.views import BATCH, describe, described_views
from surefeat.model.features import stack_boxes
from surefeat.model.network import DenseFeatures

__all__ = ["KeypointConfig", "KeypointDetector", "Labelled"]

HEAD, SETTINGS = "head.safetensors", "detector.json"

_FORMAT = "surefeat-keypoints-1"

_FIX = "pass a folder written by `surefeat keypoints fit`"


def fingerprint(model: DenseFeatures) -> dict[str, str]:
    """What must agree for a head to understand a model's features."""
    from safetensors.torch import save

    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    digest = hashlib.sha256(save(state)).hexdigest()
    return {"trunk": model.config.trunk, "lower": model.lower, "sha256": digest}


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something already, before anything is begun."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists already; remove it or pass another folder")


def write_detector(folder: Path, state: dict[str, Tensor], settings: dict[str, Any]) -> None:
    """Write a new folder, whole or not at all."""
    from safetensors.torch import save

    check_free(folder)
    data = save({name: value.cpu().contiguous() for name, value in state.items()})
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        write_bytes(part / HEAD, data)
        digest = hashlib.sha256(data).hexdigest()
        write_json(part / SETTINGS, {"format": _FORMAT, "sha256": digest} | settings)
        part.replace(folder)
    except BaseException:  # Ctrl-C too leaves nothing behind
        shutil.rmtree(part, ignore_errors=True)
        raise


def read_detector(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What write_detector wrote, after a check that the two files belong together."""
    from safetensors.torch import load_file

    path = folder / SETTINGS
    if not path.is_file() or not (folder / HEAD).is_file():
        raise FileNotFoundError(
            f"no detector at {folder} (looked for {SETTINGS} and {HEAD}); {_FIX}"
        )
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        wanted = {"sha256", "features", "categories", "config"}
        missing = sorted(wanted - settings.keys())
        if settings.get("format") != _FORMAT or missing:
            raise ValueError(f"format {settings.get('format')!r}, without {missing}")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not what a detector writes ({error}); {_FIX}") from error
    if file_hash(folder / HEAD) != settings["sha256"]:
        raise ValueError(f"{folder / HEAD} is damaged: {SETTINGS} has another hash; copy it anew")
    return load_file(folder / HEAD), settings


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeypointDetector:
    """Finds the keypoints of some categories; places are in original pixels."""

    model: DenseFeatures
    """The frozen features it was fitted on."""
    head: KeypointHead
    categories: tuple[Category, ...]
    config: KeypointConfig

    @classmethod
    def fit(
        cls,
        model: DenseFeatures,
        annotations: str | Path | KeypointSet,
        *,
        images: str | Path | None = None,
        config: KeypointConfig | None = None,
        quiet: bool = True,
    ) -> KeypointDetector:
        """Learn from a COCO keypoints json (see data.keypoints.read_coco) or a set in memory.

        One label is enough to run, ten are enough to be of use. The model stays as it is.
        """
        config = config or KeypointConfig()
        if not isinstance(annotations, KeypointSet):
            annotations = read_coco(annotations, images=images)
        labelled = _usable(annotations, config, stride=model.stride)
        generator = torch.Generator().manual_seed(config.seed)
        with tqdm(desc="describing views", unit="view", disable=quiet) as bar:
            views = described_views(
                model, labelled, config, generator=generator,
                progress=lambda done: bar.update(done - bar.n),
            )  # fmt: skip
        head = KeypointHead(
            views.features.shape[1], views.own.shape[1], hidden=config.hidden, generator=generator
        )
        device = model.head.weight.device
        steps = max(config.steps, math.ceil(config.epochs * len(views.own) / config.batch))
        with tqdm(total=steps, desc="learning", unit="step", disable=quiet) as bar:
            fit(
                head.to(device), views.draw(batch=config.batch, device=device), steps=steps,
                learning_rate=config.learning_rate, weight_decay=config.weight_decay,
                weight=config.weight, generator=generator, progress=lambda _: bar.update(),
            )  # fmt: skip
        return cls(model, head, labelled.categories, config)

    def predict(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        boxes: Sequence[object] | None = None,
        category: str | None = None,
        threshold: float = 0.0,
    ) -> list[Labelled]:
        """The keypoints of objects of one category, image by image.

        boxes: for every image its inclusive boxes (N, 4), original pixels; without them each
        image is one object. category may be left out when the detector knows only one. Keypoints
        with a score under `threshold` are marked as not visible.
        """
        many: list[Any] = list(images) if isinstance(images, list | tuple) else [images]
        if boxes is not None and len(boxes) != len(many):
            raise ValueError(
                f"{len(boxes)} sets of boxes for {len(many)} images; pass one for each"
            )
        number = self._number(category)
        jobs = _jobs(many, boxes, number, len(self.categories[number].keypoints))
        return list(self._find(jobs, threshold))

    def label(self, objects: KeypointSet, *, threshold: float = 0.0) -> KeypointSet:
        """The same objects (their images, boxes and categories' names) with found keypoints."""
        numbers = [self._number(objects.categories[item.category].name) for item in objects.objects]
        jobs = (
            (item.read(), replace(item, category=number))
            for item, number in zip(objects.objects, numbers, strict=True)
        )
        return KeypointSet(self.categories, tuple(self._find(jobs, threshold)))

    def _number(self, category: str | None) -> int:
        names = [each.name for each in self.categories]
        if category is None and len(names) == 1:
            return 0
        if category not in names:
            what = "say which category" if category is None else f"no category {category!r}"
            raise ValueError(f"{what}; the detector knows {', '.join(names)}")
        return names.index(category)

    def _find(
        self, jobs: Iterable[tuple[Tensor, Labelled]], threshold: float
    ) -> Iterator[Labelled]:
        waiting: list[tuple[Tensor, Labelled]] = []
        for pixels, item in jobs:
            waiting.append((crop(pixels.cpu(), item.box, size=self.config.size), item))
            if len(waiting) == BATCH:
                yield from self._find_batch(waiting, threshold)
                waiting = []
        if waiting:
            yield from self._find_batch(waiting, threshold)

    @torch.no_grad()
    def _find_batch(
        self, batch: list[tuple[Tensor, Labelled]], threshold: float
    ) -> Iterator[Labelled]:
        features = describe(self.model)(torch.stack([pixels for pixels, _ in batch]))
        maps = self.head(features).sigmoid().cpu()
        cells, scores = peaks(maps)
        size = (maps.shape[-2], maps.shape[-1])
        spans = channels(self.categories)
        for row, (_, item) in enumerate(batch):
            own = slice(spans[item.category].start, spans[item.category].stop)
            points = out_of_box(cells[row, own], item.box, size=size)
            seen = scores[row, own] >= threshold
            yield replace(item, points=points, visible=seen, scores=scores[row, own])

    def save(self, folder: str | Path) -> None:
        """Write head.safetensors and detector.json to a new folder, whole or not at all."""
        settings = {
            "features": fingerprint(self.model),
            "categories": [asdict(category) for category in self.categories],
            "config": asdict(self.config),
        }
        write_detector(Path(folder), self.head.state_dict(), settings)

    @classmethod
    def load(cls, folder: str | Path, model: DenseFeatures | None = None) -> KeypointDetector:
        """A detector that `save` wrote, on the model it was fitted with (default: the shipped).

        Any other model is refused: a head understands only the features it has learned on.
        """
        state, settings = read_detector(Path(folder))
        model = model or DenseFeatures.from_pretrained()
        found, wanted = fingerprint(model), settings["features"]
        if found != wanted:
            said = [f"{f['trunk']} {f['lower']} {f['sha256'][:12]}" for f in (wanted, found)]
            raise ValueError(
                f"{folder} was fitted on another feature model ({said[0]}) than this one "
                f"({said[1]}); pass the model it was fitted with"
            )
        categories = tuple(make_category(**each) for each in settings["categories"])
        hidden, in_channels = state["conv1.weight"].shape[:2]
        head = KeypointHead(
            in_channels, len(state["conv2.bias"]), hidden=hidden, generator=torch.Generator()
        )
        head.load_state_dict(state)
        config = from_dict(KeypointConfig, settings["config"])
        return cls(model, head.eval().to(model.head.weight.device), categories, config)


def _usable(given: KeypointSet, config: KeypointConfig, *, stride: int) -> KeypointSet:
    """The objects with a keypoint to learn from, and their categories alone."""
    if config.size < stride or config.size % stride:
        raise ValueError(f"size is {config.size}; use a multiple of the model's stride, {stride}")
    objects = [item for item in given.objects if bool(item.visible.any())]
    if not objects:
        raise ValueError(
            f"none of the {len(given.objects)} objects has a labelled keypoint (v of 1 or 2); "
            "label at least one"
        )
    if len(objects) < len(given.objects):
        _LOG.warning("%d objects without labels are left out", len(given.objects) - len(objects))
    used = sorted({item.category for item in objects})
    for number in used:
        category = given.categories[number]
        seen = torch.stack([item.visible for item in objects if item.category == number]).any(0)
        for name, ever in zip(category.keypoints, seen.tolist(), strict=True):
            if not ever:
                _LOG.warning("%s: no object has %r, so it is never found", category.name, name)
    kept = tuple(replace(item, category=used.index(item.category)) for item in objects)
    return KeypointSet(tuple(given.categories[number] for number in used), kept)


def _jobs(
    images: Sequence[ImageLike], boxes: Sequence[object] | None, number: int, keypoints: int
) -> Iterator[tuple[Tensor, Labelled]]:
    """Every object to look at: its image's pixels, and what is known of it."""
    for index, image in enumerate(images):
        pixels = load(image)
        height, width = pixels.shape[1:]
        whole = [[0, 0, width - 1, height - 1]]
        name = str(image) if isinstance(image, str | Path) else f"image {index + 1}"
        for box in stack_boxes(whole if boxes is None else boxes[index], size=(height, width)):
            yield pixels, Labelled(
                image=Place(name), name=name, category=number, box=box,
                points=torch.full((keypoints, 2), torch.nan),
                visible=torch.zeros(keypoints, dtype=torch.bool), size=(height, width),
            )  # fmt: skip

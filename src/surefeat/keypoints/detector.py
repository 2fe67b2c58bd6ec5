"""KeypointDetector: the parts of objects, learned from a handful of labels on frozen features.

Paper, section 4.3: the object's box (or the whole image) and its category are known; every
keypoint gets a heat map, whose peak is its place; `keypoints.trust` says how far it can be trusted.
A detector is a folder with detector.json and head.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core.files import (
    checked_weights,
    folder_at_once,
    from_dict,
    pack_tensors,
    read_tensors,
    write_model,
)
from surefeat.core.geometry import into_box, out_of_box
from surefeat.core.image import ImageError, ImageLike, crop, load
from surefeat.data.coco import Category, make_category
from surefeat.data.decode import Place, Skipped
from surefeat.data.keypoints import KeypointSet, Labelled, channels, read_coco
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.head import KeypointHead, fit
from surefeat.keypoints.trust import (
    Examples,
    cross_validate,
    examples_of,
    fit_trust,
    read_signs,
    see,
    see_objects,
)
from surefeat.keypoints.views import (
    BATCH,
    CutObjects,
    ObjectViews,
    ViewStore,
    cut_objects,
    describe,
)
from surefeat.model.config import model_folder
from surefeat.model.features import stack_boxes
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import KeypointTrust, Reliability
from surefeat.model.weights import check_finite

__all__ = ["KeypointConfig", "KeypointDetector", "Labelled"]

HEAD, SETTINGS = "head.safetensors", "detector.json"

FORMAT, OLDER = "surefeat-keypoints-2", "surefeat-keypoints-1"
"""Of detector.json. The older one has settings of its fit that are no more; they are left out."""

_EXAMPLES = "examples."
"""Before the names of its examples, beside the head's weights."""

_FIX = "pass a folder written by `surefeat keypoints fit`"

_LOG = logging.getLogger(__name__)

Work = tuple[Tensor, Labelled]
"""An image's pixels, and an object in it."""


@dataclass(frozen=True, eq=False)
class KeypointDetector:
    """Finds the keypoints of some categories; places are in original pixels."""

    model: DenseFeatures
    """The frozen features it was fitted on."""
    head: KeypointHead
    categories: tuple[Category, ...]
    config: KeypointConfig
    examples: Examples | None = None
    """What its labelled parts look like; None: fitted before there was calibration."""
    trust: KeypointTrust | None = None
    """How far its keypoints can be trusted; None: unknown, scores are heights of heat maps."""

    @classmethod
    def fit(
        cls,
        model: DenseFeatures,
        annotations: str | Path | KeypointSet,
        *,
        images: str | Path | None = None,
        config: KeypointConfig | None = None,
        seed: int = 0,
        calibrate: bool = True,
        quiet: bool = True,
    ) -> KeypointDetector:
        """Learn from COCO keypoints or another tool's labels (data.pose), or a set in memory.

        One label is enough to run, ten are enough to be of use. The model stays as it is. The seed
        determines everything drawn, on one machine. calibrate: also learn how far the keypoints
        can be trusted, from up to five more fits that leave photos out.
        """
        config = config or KeypointConfig()
        if not isinstance(annotations, KeypointSet):
            annotations = read_coco(annotations, images=images)
        labelled = _usable(annotations, config, stride=model.stride)
        device = model.device
        objects = cut_objects(labelled, size=config.size, jitter=config.jitter, device=device)
        store = ViewStore(objects, describe(model), config, seed=seed, quiet=quiet)
        views, rows = store.views_of(torch.arange(len(objects)), seed=seed)
        kinds = len(labelled.categories)
        head = fit_head(views, rows, config, objects=len(objects), kinds=kinds, seed=seed,
                         quiet=quiet)  # fmt: skip
        detector = cls(model, head, labelled.categories, config)
        return detector._learn_trust(labelled, objects, views, seed) if calibrate else detector

    def _learn_trust(
        self, labelled: KeypointSet, objects: CutObjects, views: ObjectViews, seed: int
    ) -> KeypointDetector:
        """The same detector with its examples, and with trust where labels or a prior allow it."""
        crops = see_objects(self.model, objects, size=self.config.size)
        size = (crops.maps.shape[-2], crops.maps.shape[-1])
        cells = into_box(objects.points, objects.boxes, size=size)
        numbers: dict[str, int] = {}
        photo = [numbers.setdefault(item.name, len(numbers)) for item in labelled.objects]

        def fit_on(chosen: Tensor, seed: int) -> KeypointHead:
            rows = torch.isin(views.numbers, chosen.to(views.numbers.device)).nonzero()[:, 0]
            kinds = len({labelled.objects[n].category for n in chosen.tolist()})
            return fit_head(views, rows, self.config, objects=len(chosen), kinds=kinds, seed=seed)

        answers = cross_validate(
            fit_on, crops, cells, objects, torch.tensor(photo), seed=1000 * (seed + 1)
        )
        examples = examples_of(crops.maps, cells, objects.visible, objects.own)
        known = self.model.reliability or Reliability.load(model_folder(None))
        prior = known.keypoints if known else None
        # A prior alone says nothing: how often parts are seen differs too much.
        trust = None
        if answers is not None:
            words = f"{len(objects)} labelled objects, by cross-validation"
            trust = fit_trust(answers, prior, words=words)
        return replace(self, examples=examples, trust=trust)

    def predict(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        boxes: Sequence[object] | None = None,
        category: str | None = None,
        threshold: float = 0.5,
        skipped: list[Skipped] | None = None,
    ) -> list[Labelled]:
        """The keypoints of objects of one category, image by image.

        boxes: for every image its inclusive boxes (N, 4), original pixels; without them each
        image is one object. category may be left out when the detector knows only one. Keypoints
        are marked as not visible where the part is in the photo with a probability under
        `threshold`; their points are given all the same. Images that cannot be read are an error,
        or, with a list for `skipped`, left out and added to it.
        """
        many: list[Any] = list(images) if isinstance(images, list | tuple) else [images]
        if boxes is not None and len(boxes) != len(many):
            raise ValueError(
                f"{len(boxes)} sets of boxes for {len(many)} images; pass one for each"
            )
        number = self._number(category)
        keypoints = len(self.categories[number].keypoints)
        work = _read_images(many, boxes, number, keypoints, skipped)
        return list(self._find(work, threshold))

    def label(
        self, objects: KeypointSet, *, threshold: float = 0.5, skipped: list[Skipped] | None = None
    ) -> KeypointSet:
        """The same objects (their images, boxes and categories' names) with found keypoints.

        Images that cannot be read: as in `predict`.
        """
        names = [category.name for category in objects.categories]
        items = [replace(item, category=self._number(names[item.category]))
                 for item in objects.objects]  # fmt: skip
        labelled = self._find(_read_objects(items, skipped), threshold)
        return KeypointSet(self.categories, tuple(labelled))

    def _number(self, category: str | None) -> int:
        names = [known.name for known in self.categories]
        if category is None and len(names) == 1:
            return 0
        if category not in names:
            what = "say which category" if category is None else f"no category {category!r}"
            raise ValueError(f"{what}; the detector knows {', '.join(names)}")
        return names.index(category)

    def _find(self, work: Iterable[Work], threshold: float) -> Iterator[Labelled]:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}; confidences are between 0 and 1")
        device, size = self.model.device, self.config.size
        spans = channels(self.categories)
        cut = ((crop(pixels.cpu(), item.box, size=size), item) for pixels, item in work)
        while batch := list(islice(cut, BATCH.get(device.type, 16))):
            crops = torch.stack([pixels for pixels, _ in batch]).to(device)
            items = [item for _, item in batch]
            points, scores, present, errors = self._judge(crops, items)
            for row, item in enumerate(items):
                own = slice(spans[item.category].start, spans[item.category].stop)
                yield replace(
                    item, points=points[row, own], scores=scores[row, own],
                    visible=present[row, own] >= threshold if present is not None
                    else torch.ones_like(scores[row, own], dtype=torch.bool),
                    errors=None if errors is None else errors[row, own],
                )  # fmt: skip

    def _judge(
        self, crops: Tensor, items: Sequence[Labelled]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Points (B, K, 2), scores, how probably present, and expected errors in pixels (B, K).

        Of all channels, on the CPU; the last two are None of a detector without calibration.
        """
        spans, device = channels(self.categories), crops.device
        boxes = torch.stack([item.box for item in items]).to(device)
        seen = see(self.model, crops)
        size = (seen.maps.shape[-2], seen.maps.shape[-1])
        own = torch.zeros(len(items), spans[-1].stop, dtype=torch.bool, device=device)
        for row, item in enumerate(items):
            own[row, spans[item.category].start : spans[item.category].stop] = True
        examples = self.examples or _no_examples(seen.maps.shape[1], own.shape[1])
        cells, signs = read_signs(self.head, seen, examples.to(device), own)
        points = out_of_box(cells, boxes, size=size).cpu()
        if self.trust is None:
            return points, signs["peak"].sigmoid().cpu(), None, None
        right, present, error = (
            fitted.log_odds(signs).sigmoid().cpu()
            for fitted in (self.trust.right, self.trust.present, self.trust.error)
        )
        longer = (boxes[:, 2:] - boxes[:, :2] + 1).amax(-1, keepdim=True).cpu()
        # Of two questions, one within the other, the answers must not contradict each other.
        return points, torch.minimum(right, present), present, error * longer

    def save(self, folder: str | Path) -> None:
        """Write head.safetensors and detector.json to a new folder, whole or not at all."""
        settings = {
            "format": FORMAT,
            "features": fingerprint(self.model),
            "categories": [asdict(category) for category in self.categories],
            "config": asdict(self.config),
            "trust": None if self.trust is None else asdict(self.trust),
        }
        tensors = dict(self.head.state_dict())
        if self.examples is not None:
            tensors |= {f"{_EXAMPLES}{k}": v for k, v in vars(self.examples).items()}
        with folder_at_once(Path(folder)) as part:
            write_model(part / HEAD, tensors, part / SETTINGS, settings)

    @classmethod
    def load(cls, folder: str | Path, model: DenseFeatures | None = None) -> KeypointDetector:
        """A detector that `save` wrote, on the model it was fitted with (default: the shipped).

        Any other model is refused: a head understands only the features it has learned on.
        """
        state, settings = read_detector(Path(folder))
        model = model or DenseFeatures.from_pretrained()
        given, wanted = fingerprint(model), settings["features"]
        if given != wanted:
            said = [f"{f['trunk']} {f['lower']} {f['sha256'][:12]}" for f in (wanted, given)]
            raise ValueError(
                f"{folder} was fitted on another feature model ({said[0]}) than this one "
                f"({said[1]}); pass the model it was fitted with"
            )
        categories = tuple(make_category(**category) for category in settings["categories"])
        hidden, in_channels = state["conv1.weight"].shape[:2]
        head = KeypointHead(
            in_channels, len(state["conv2.bias"]), hidden=hidden, generator=torch.Generator()
        )
        known = {name: state.pop(name) for name in list(state) if name.startswith(_EXAMPLES)}
        check_finite(state, what=str(folder))
        head.load_state_dict(state)
        config = from_dict(KeypointConfig, settings["config"])
        device = model.device
        labelled = {name.removeprefix(_EXAMPLES): value for name, value in known.items()}
        examples = Examples(**labelled).to(device) if labelled else None
        fitted = settings.get("trust")
        trust = None if fitted is None else from_dict(KeypointTrust, fitted)
        return cls(model, head.eval().to(device), categories, config, examples, trust)


def fit_head(
    views: ObjectViews, rows: Tensor, config: KeypointConfig, *, objects: int, kinds: int,
    seed: int, quiet: bool = True,
) -> KeypointHead:  # fmt: skip
    """A new head, fitted on the views `rows` (M,) of so many objects of so many categories."""
    head = KeypointHead(
        views.maps(rows[:1]).shape[1], len(views.objects.flip), hidden=config.hidden,
        generator=torch.Generator().manual_seed(seed),
    ).to(rows.device)  # fmt: skip
    steps = config.steps(objects, categories=kinds)
    batches = views.batches(rows, steps=steps, config=config, seed=seed)
    fit(head, batches, steps=steps, config=config, quiet=quiet)
    return head


def _no_examples(size: int, keypoints: int) -> Examples:
    none = torch.zeros(keypoints)
    return Examples(torch.zeros(keypoints, size), none, none)


def fingerprint(model: DenseFeatures) -> dict[str, str]:
    """What must agree for a head to understand a model's features."""
    digest = hashlib.sha256(pack_tensors(model.state_dict())).hexdigest()
    return {"trunk": model.config.trunk, "lower": "+".join(model.lower), "sha256": digest}


def read_detector(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The head's weights and the settings, after a check that the two files belong together."""
    path = folder / SETTINGS
    if not path.is_file() or not (folder / HEAD).is_file():
        raise FileNotFoundError(
            f"no detector at {folder} (looked for {SETTINGS} and {HEAD}); {_FIX}"
        )
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = sorted({"sha256", "features", "categories", "config"} - settings.keys())
        if settings.get("format") not in (FORMAT, OLDER) or missing:
            raise ValueError(f"format {settings.get('format')!r}, without {missing}")
        if settings["format"] == OLDER:
            known = {field.name for field in fields(KeypointConfig)}
            kept = {name: value for name, value in settings["config"].items() if name in known}
            settings["config"] = kept
        _check_shape(settings)
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not what a detector writes ({error}); {_FIX}") from error
    return read_tensors(checked_weights(folder / HEAD, settings["sha256"]))[0], settings


def _check_shape(settings: dict[str, Any]) -> None:
    """Whatever error, where the features, categories or settings of a detector are none."""
    from_dict(KeypointConfig, settings["config"])
    for category in settings["categories"]:
        make_category(**category)
    for name in ("trunk", "lower", "sha256"):
        if not isinstance(settings["features"][name], str):
            raise ValueError(f"its features have no {name}")


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


def _read_images(
    images: Sequence[ImageLike], boxes: Sequence[object] | None, number: int, keypoints: int,
    skipped: list[Skipped] | None,
) -> Iterator[Work]:  # fmt: skip
    """Every object to look at: its image's pixels, and what is known of it."""
    for index, image in enumerate(images):
        name = str(image) if isinstance(image, str | Path) else f"image {index + 1}"
        try:
            pixels = load(image)
        except ImageError as error:
            _leave_out(name, error, skipped)
            continue
        height, width = pixels.shape[1:]
        whole = [[0, 0, width - 1, height - 1]]
        for box in stack_boxes(whole if boxes is None else boxes[index], size=(height, width)):
            yield pixels, Labelled(
                image=Place(name), name=name, category=number, box=box,
                points=torch.full((keypoints, 2), torch.nan),
                visible=torch.zeros(keypoints, dtype=torch.bool), size=(height, width),
            )  # fmt: skip


def _read_objects(items: Sequence[Labelled], skipped: list[Skipped] | None) -> Iterator[Work]:
    bad: set[str] = set()
    for item in items:
        try:
            if item.name not in bad:
                yield item.read(), item
        except ImageError as error:
            _leave_out(item.name, error, skipped)
            bad.add(item.name)


def _leave_out(name: str, error: ImageError, skipped: list[Skipped] | None) -> None:
    if skipped is None:
        raise error
    skipped.append(Skipped(name, str(error)))

"""Photos with image labels in, boxes out: `fit_boxes` learns, `predict_boxes` uses it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from surefeat.boxes.config import BoxesConfig, check_boxes_config
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import Photo, read_photos
from surefeat.boxes.select import (
    Candidate,
    Selection,
    best_boxes,
    score_photos,
    select,
    to_coco,
    to_csv,
)
from surefeat.boxes.train import calibrate, learn_boxes
from surefeat.core.files import choose_device, write_text
from surefeat.data.coco import write_annotations
from surefeat.data.decode import Skipped
from surefeat.data.labels import LabelledImages, PhotoLabels
from surefeat.learn.runs import Run, list_skipped
from surefeat.match.proposals import make_proposals, read_proposals

_LOG = logging.getLogger("surefeat")

# Photos decoded and scored at once.
_CHUNK = 256


@dataclass(frozen=True)
class Fitted:
    """What learning left behind."""

    detector: Detector
    folder: Path
    images: int
    """That were learned from."""
    steps: int
    skipped: tuple[Skipped, ...]
    """Images that were not, and why."""


@dataclass(frozen=True)
class Predicted:
    """What predicting left behind."""

    selection: Selection
    folder: Path
    skipped: tuple[Skipped, ...]
    """Images, or single labels of theirs, for which there is no box, and why."""


def fit_boxes(
    labels: LabelledImages,
    *,
    out: str | Path,
    config: BoxesConfig | None = None,
    init: str | Path = "imagenet",
    proposals: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> Fitted:
    """Learn a detector from image labels alone; boxes in `labels` are not looked at.

    out: the run folder. init: `imagenet` (downloaded), a file, or `none`. proposals: their file,
    made or added to where it lacks images; by default in the run folder. resume: continue the run
    in `out` exactly, with its own settings. An image without label is left out, and listed.
    """
    where, config = choose_device(device), config or BoxesConfig()
    check_boxes_config(config)
    run = Run.resume(out) if resume else Run.start(out, config, device=where)
    detector = _create(run, labels.categories, init=init).to(where)
    config = detector.fitted
    labelled = labels.labelled()
    silent = [Skipped(image.name, "has no label") for image in labels.images if not image.labels]
    known = ready_proposals(labelled, config, file=_file(proposals, run.folder), quiet=quiet)
    photos, bad = usable_photos(labelled, known, config)
    skipped = (*silent, *bad)
    list_skipped(run.folder, skipped)
    _check_classes(photos, labels.categories)
    run.store_images({"images": len(photos), "sha256": _digest(photos)})
    if not detector.hidden_given and not run.checkpoints():
        calibrate(detector, photos, config.learn)
    steps = learn_boxes(detector, photos, run, config.learn, quiet=quiet)
    detector.eval().save(run.folder / "model")
    return Fitted(detector, run.folder, len(photos), steps, skipped)


def predict_boxes(
    labels: LabelledImages,
    detector: Detector,
    *,
    out: str | Path,
    config: BoxesConfig | None = None,
    proposals: str | Path | None = None,
    quiet: bool = False,
) -> Predicted:
    """The best box of every image label, selected; writes boxes.json (COCO) and selection.csv.

    config: that which the detector was fitted with, where it is not given.
    A label the detector does not know, an image without label and one that cannot be read are
    listed in skipped.txt; nothing else is lost: what was dropped is in selection.csv.
    """
    config = config or detector.fitted
    check_boxes_config(config)
    folder = Path(out)
    images, skipped = _known_labels(labels, detector)
    known = ready_proposals(images, config, file=_file(proposals, folder), quiet=quiet)
    candidates: list[Candidate] = []
    sizes: dict[str, tuple[int, int]] = {}
    bar = tqdm(total=len(images), desc="boxes", unit="img", disable=quiet)
    for start in range(0, len(images), _CHUNK):
        part = images[start : start + _CHUNK]
        photos, bad = usable_photos(part, known, config)
        skipped += bad
        scales, amp = config.select.scales, config.learn.amp
        for scored in score_photos(detector, photos, scales=scales, amp=amp):
            sizes[scored.photo.image.name] = scored.photo.size
            candidates += best_boxes(scored, detector.categories, agreement=config.select.agreement)
        bar.update(len(part))
    bar.close()
    selection = select(candidates, config.select)
    write_annotations(folder / "boxes.json", to_coco(selection, sizes, detector.categories))
    write_text(folder / "selection.csv", to_csv(selection))
    list_skipped(folder, skipped)
    return Predicted(selection, folder, tuple(skipped))


def ready_proposals(
    images: Sequence[PhotoLabels], config: BoxesConfig, *, file: Path, quiet: bool
) -> dict[str, Tensor]:
    """Proposals by the hash of the image file; those that `file` lacks are made and added."""
    make_proposals([image.item for image in images], config.proposals, file=file, quiet=quiet)
    return read_proposals(file, config.proposals) if file.exists() else {}


def usable_photos(
    images: Sequence[PhotoLabels], known: dict[str, Tensor], config: BoxesConfig
) -> tuple[list[Photo], tuple[Skipped, ...]]:
    """Images with the proposals that compete, and what cannot be used."""
    return read_photos(
        images, known, side=config.side, count=config.regions, smallest=config.smallest
    )


def _known_labels(
    labels: LabelledImages, detector: Detector
) -> tuple[list[PhotoLabels], list[Skipped]]:
    """Images with labels the detector knows, and what is left out."""
    known = frozenset(detector.categories)
    images, skipped = [], []
    for image in labels.images:
        strange = sorted(image.labels - known)
        skipped += [Skipped(image.name, f"the detector knows no {name!r}") for name in strange]
        if not image.labels:
            skipped.append(Skipped(image.name, "has no label"))
        if image.labels & known:
            images.append(replace(image, labels=image.labels & known))
    if not images:
        raise ValueError(
            f"the detector knows {list(detector.categories)}, the images are labelled "
            f"{list(labels.categories)}; fit a detector on these labels"
        )
    return images, skipped


def _check_classes(photos: Sequence[Photo], categories: Sequence[str]) -> None:
    for name in categories:
        count = sum(name in photo.image.labels for photo in photos)
        if not count:
            raise ValueError(f"no readable image shows {name!r}; add some, or leave it out")
        if count == 1:
            _LOG.warning("only one image shows %r: expect its box to be anything in it", name)


def _digest(photos: Sequence[Photo]) -> str:
    """Of images, labels and proposals in their order."""
    digest = hashlib.sha256()
    for photo in photos:
        labels = [*sorted(photo.image.labels), "?", *sorted(photo.image.unsure)]
        digest.update(f"{photo.image.name}\t{labels}\n".encode())
        digest.update(photo.proposals.numpy().tobytes())
    return digest.hexdigest()


def _file(proposals: str | Path | None, folder: Path) -> Path:
    return folder / "proposals.sqlite" if proposals is None else Path(proposals)


def _create(run: Run, categories: tuple[str, ...], *, init: str | Path) -> Detector:
    """The detector before training, with the settings of its run."""
    config = run.settings(BoxesConfig)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.learn.seed)
        # A checkpoint holds all weights; then the initial ones need not be at hand again.
        init = "none" if run.checkpoints() else init
        detector = Detector.create(config.detector, categories, init=init)
    if config.learn.trained == "last" and detector.tap != detector.trunk.last:
        fix = "pass --detector.tap auto, or train all or none of it"
        raise ValueError(f"{detector.tap} comes before the stage that --learn.trained last; {fix}")
    # Weights may say which variant of the network they are for; a resumed run must know.
    detector.fitted = replace(config, detector=detector.config)
    run.store_settings(detector.fitted)
    return detector

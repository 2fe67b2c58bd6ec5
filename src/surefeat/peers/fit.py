"""`fit_peer`: a peer trained, or estimated, on photos; what it leaves is a row's FOLDER."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.files import choose_device
from surefeat.core.image import resize
from surefeat.data.benchmarks import development_pairs, load_list
from surefeat.data.decode import Canvas, Item, Skipped
from surefeat.data.sources import LabelledImages, PhotoLabels, find_images, find_labels
from surefeat.learn.runs import Run, alone
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import proposals_of
from surefeat.peers.anchornet import (
    AnchorConfig,
    anchor_columns,
    anchor_layers,
    fit_reductions,
    learn_anchornet,
    photo_batches,
)
from surefeat.peers.fitting import (
    StoredPeer,
    frozen_vgg,
    load_peer,
    note_photos,
    read_canvas,
    save_peer,
    start_run,
)
from surefeat.peers.gcnn import GcnnConfig, learn_gcnn
from surefeat.peers.hog import fit_background
from surefeat.peers.landmarks import LandmarkConfig, learn_landmarks
from surefeat.peers.scnet import Kind, ScnetConfig, learn_scnet, teach_pairs

Trained = Literal["hog", "gcnn", "scnet-a", "scnet-ag", "scnet-ag+", "anchornet", "landmarks-10",
                  "landmarks-64", "landmarks-64-per-class"]  # fmt: skip

NAMES: tuple[Trained, ...] = get_args(Trained)

Settings = TypeVar("Settings", GcnnConfig, ScnetConfig, AnchorConfig, LandmarkConfig)
"""Of a peer that learns: its own, with how long under `fit`."""

SIDE = 224
"""Square at which rows see photos, pixels."""

SAMPLED = 200_000
"""Cells, about, from which AnchorNet's layers are reduced."""


@dataclass(frozen=True)
class Asked:
    """What may be asked of a training; None: the peer's own default."""

    steps: int | None = None
    """Batches."""
    batch: int | None = None
    """Photos, or pairs, of a step."""
    lr: float | None = None
    """Learning rate."""
    seed: int = 0
    """Of the weights, the order of photos and all that is drawn."""


@dataclass(frozen=True)
class FittedPeer:
    """What a training left behind."""

    folder: Path
    photos: int
    steps: int
    loss: float | None
    """Mean of the last line of the log."""
    skipped: tuple[Skipped, ...]


@alone
def fit_peer(
    name: str,
    source: str | Path,
    *,
    out: str | Path,
    asked: Asked | None = None,
    init: Sequence[str | Path] = ("imagenet",),
    images: str | Path | None = None,
    keep: str | Path | None = None,
    crop: str | Path | None = None,
    labels: str | Path | None = None,
    categories: tuple[str, ...] | None = None,
    public: bool = False,
    start: str | Path | None = None,
    proposals: str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    quiet: bool = False,
) -> FittedPeer:
    """Train a peer on the photos of a folder, a list, tar shards or a COCO json.

    out: the run folder; `NAME=OUT` is then a row. init: weights of the ImageNet trunk. images and
    keep as of data.sources.find_images. resume: go on with the run in `out`, by its own settings.
    labels, categories: of anchornet, as of data.sources.find_labels. crop, categories: of
    landmarks, as of data.sources.find_images; those per class learn from the crops of each.
    scnet: `source` is PF-PASCAL's folder; public: its whole training list, of which a third shares
    images with test; start: a trained scnet-a, which the other two go on from;
    proposals: their file, made or added to; by default in `out`.
    """
    if name not in NAMES:
        raise ValueError(f"no peer {name!r} to train; choose {', '.join(NAMES)}")
    task = Task(
        Path(out), asked or Asked(), tuple(init), choose_device(device), resume=resume, quiet=quiet
    )
    if name.startswith("scnet-"):
        kind = cast("Kind", name.removeprefix("scnet-"))
        config = ScnetConfig(kind=kind, public=public)
        file = Path(proposals or task.out / "proposals.sqlite")
        trained = load_peer(start) if start else None
        return _fit_scnet(Path(source), task, config, start=trained, proposals=file)
    if name == "anchornet":
        known = find_labels(source, labels=labels, images=images, keep=keep, categories=categories)
        return _fit_anchornet(known, task)
    if name.startswith("landmarks-"):

        def items_of(wanted: tuple[str, ...] | None) -> list[Item]:
            return find_images(source, images=images, crop=crop, keep=keep, categories=wanted)

        return _fit_landmarks(name, items_of, categories, task)
    items = find_images(source, images=images, keep=keep)
    return _fit_hog(items, task) if name == "hog" else _fit_gcnn(items, task)


@dataclass(frozen=True)
class Task:
    """What all trainings are told."""

    out: Path
    asked: Asked
    init: tuple[str | Path, ...]
    device: torch.device
    resume: bool
    quiet: bool

    def settings(self, usual: Settings) -> tuple[Run, Settings]:
        """The run, and its settings: the peer's usual ones with what was asked, or its own."""
        asked = {name: value for name, value in vars(self.asked).items() if value is not None}
        given = replace(usual, fit=replace(usual.fit, **asked))
        run = start_run(self.out, given, resume=self.resume, device=self.device)
        return run, run.settings(type(given))


def _fit_anchornet(labelled: LabelledImages, task: Task) -> FittedPeer:
    """Reduce the layers, learn the filters, then pack their maps."""
    run, config = task.settings(AnchorConfig(classes=len(labelled.categories)))
    images = labelled.labelled()
    canvas = read_canvas([image.item for image in images], side=config.side, quiet=task.quiet)
    about = note_photos(run, [image.item for image in images], canvas)
    photos = torch.cat([
        part.cpu() for part in _squares(canvas, device=task.device, quiet=task.quiet,
                                        side=config.side)
    ])  # fmt: skip
    named = {image.item.name: image for image in images}
    labels = label_table([named[name] for name in canvas.names], labelled.categories)
    layers, digest = anchor_layers(task.init, device=task.device)
    reductions = fit_reductions(
        (layers(part) for part in photo_batches(photos, batch=16, device=task.device)),
        count=config.channels, per_map=max(1, min(49, SAMPLED // len(photos))),
        generator=torch.Generator().manual_seed(config.fit.seed),
    )  # fmt: skip
    columns_of, _ = anchor_columns(reductions, task.init, config, device=task.device)
    about |= {"categories": list(labelled.categories), "trunk_sha256": digest}
    loss = learn_anchornet(
        columns_of, photos, labels, reductions, run, config, about=about, device=task.device,
        quiet=task.quiet,
    )  # fmt: skip
    return FittedPeer(task.out, len(photos), config.fit.steps, loss, canvas.skipped)


def _fit_landmarks(
    name: str, items_of: Callable[[tuple[str, ...] | None], list[Item]],
    categories: tuple[str, ...] | None, task: Task,
) -> FittedPeer:  # fmt: skip
    count = int(name.split("-")[1])
    items: list[Item] = []
    classes: list[int] = []
    if name.endswith("-per-class"):
        if not categories:
            raise ValueError(f"{name} needs to know the classes; pass --crop and --categories")
        for number, category in enumerate(categories):
            own = items_of((category,))
            items, classes = [*items, *own], [*classes, *[number] * len(own)]
    else:
        items = items_of(categories)
    usual = LandmarkConfig(landmarks=count, classes=len(categories or ()) if classes else 0)
    run, config = task.settings(usual)
    canvas = read_canvas(items, side=config.photo, quiet=task.quiet)
    about = note_photos(run, items, canvas) | {"categories": list(categories or ())}
    named = dict(zip((item.name for item in items), classes, strict=False))
    own_classes = torch.tensor([named[n] for n in canvas.names]) if classes else None
    loss = learn_landmarks(
        canvas, run, config, classes=own_classes, about=about, device=task.device, quiet=task.quiet
    )
    return FittedPeer(task.out, len(canvas.pixels), config.fit.steps, loss, canvas.skipped)


def label_table(images: Sequence[PhotoLabels], categories: Sequence[str]) -> Tensor:
    """(P, N): 1 where a photo shows a category, -1 where not, 0 where only a difficult one."""
    return torch.tensor([
        [1.0 if name in image.labels else 0.0 if name in image.unsure else -1.0
         for name in categories]
        for image in images
    ])  # fmt: skip


def _fit_scnet(
    root: Path, task: Task, usual: ScnetConfig, *, start: StoredPeer | None, proposals: Path
) -> FittedPeer:
    run, config = task.settings(usual)
    look, digest = frozen_vgg(task.init, device=task.device)
    pairs = development_pairs(root)[1]
    if config.public:
        listed = load_list(root, "train_pairs_rebuilt_keypoints.csv")
        pairs = [pair for pair in listed if pair.category != "person"]
    paths = list(dict.fromkeys(p for pair in pairs for p in (pair.image0, pair.image1)))
    boxes = proposals_of(
        paths, ProposalConfig(count=config.boxes), file=proposals, quiet=task.quiet
    )
    taught = teach_pairs(pairs, boxes, look, side=config.side, device=task.device, quiet=task.quiet)
    about = {
        "pairs": len(pairs), "photos": len(paths), "mirrored too": True, "public": config.public,
        "trunk_sha256": digest, "started from": start.digest if start else None,
    }  # fmt: skip
    names = "\n".join(pair.name for pair in pairs)
    run.store_images({"images": len(paths), "sha256": hashlib.sha256(names.encode()).hexdigest()})
    loss = learn_scnet(
        taught, run, config, start=start, about=about, device=task.device, quiet=task.quiet
    )
    return FittedPeer(task.out, len(paths), config.fit.steps, loss, ())


def _fit_gcnn(items: Sequence[Item], task: Task) -> FittedPeer:
    run, config = task.settings(GcnnConfig())
    extract, digest = frozen_vgg(task.init, device=task.device)
    canvas = read_canvas(items, side=config.photo, quiet=task.quiet)
    about = note_photos(run, items, canvas) | {"trunk_sha256": digest}
    loss = learn_gcnn(
        canvas, run, config, extract, about=about, device=task.device, quiet=task.quiet
    )
    return FittedPeer(task.out, len(canvas.pixels), config.fit.steps, loss, canvas.skipped)


def _fit_hog(items: Sequence[Item], task: Task) -> FittedPeer:
    """Mean and covariance of the photos' HOG cells: a pass over them, no training."""
    run = start_run(task.out, Asked(), resume=False, device=task.device)
    canvas = read_canvas(items, side=SIDE, quiet=task.quiet)
    about = note_photos(run, items, canvas)
    background = fit_background(_squares(canvas, device=task.device, quiet=task.quiet))
    tensors = {"mean": background.mean, "covariance": background.covariance}
    save_peer(task.out / "model", "hog", {"ridge": background.ridge}, tensors, about)
    return FittedPeer(task.out, len(canvas.pixels), 0, None, canvas.skipped)


def _squares(
    canvas: Canvas, *, device: torch.device, quiet: bool, side: int = SIDE
) -> Iterator[Tensor]:
    """Batches (B, 3, side, side) uint8 of the photos, squashed as rows see them."""
    starts = range(0, len(canvas.pixels), 16)
    for start in progress.bar(starts, desc="photos", quiet=quiet, leave=False):
        part = [
            resize(pixels[:, : int(size[0]), : int(size[1])].to(device), size=(side, side))
            for pixels, size in zip(
                canvas.pixels[start : start + 16], canvas.sizes[start : start + 16], strict=True
            )
        ]
        yield torch.stack(part)

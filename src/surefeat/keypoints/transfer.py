"""From a few labelled photos to all others: keypoints, boxes and masks, carried over by matching.

`keypoints.carry` says what labelled objects tell of one photo; here a folder is gone through, what
was done is kept should it be stopped, and scores become probabilities.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefeat.core import progress
from surefeat.core.files import add_lines, as_json, read_lines, write_lines
from surefeat.core.image import load
from surefeat.data.coco import Category
from surefeat.data.decode import Place, Skipped, SourceError
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco
from surefeat.data.sources import find_images
from surefeat.keypoints.carry import Look, Source, as_labelled, carry, has_box, read_sources
from surefeat.match.large import Part, cut_part
from surefeat.model.extract import extract_readable, file_state
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import TransferTrust

SURE = 0.9
"""From this score on a label is called sure."""

_BATCH = 16


@dataclass(frozen=True, eq=False)
class Transferred:
    """Labels of all photos that had none."""

    categories: tuple[Category, ...]
    sources: tuple[Labelled, ...]
    """The labelled objects, as they were given, with scores of 1."""
    objects: tuple[Labelled, ...]
    """Photo by photo, one or more per category, those without a visible keypoint too: places are
    given for all parts, `visible` only where the score reaches the threshold."""
    skipped: tuple[Skipped, ...]
    """Photos that cannot be read."""
    calibrated: bool
    """Scores are probabilities; False: the model was never fitted to say so (see `transfer`)."""
    threshold: float

    def found(self, *, least: float | None = None, sources: bool = True) -> KeypointSet:
        """What is worth keeping, as `write_coco` and `KeypointDetector.fit` take it.

        Keypoints with a score below `least` (default: the threshold) are not visible; objects with
        none left are left out, but those that have a box alone and whose box is as probable.
        sources: the labelled objects come first.
        """
        limit = self.threshold if least is None else least
        kept = list(self.sources) if sources else []
        for item in self.objects:
            assert item.scores is not None
            seen = item.scores >= limit
            boxed = not len(seen) and (item.box_score or 0.0) >= limit
            if bool(seen.any()) or boxed:
                kept.append(replace(item, visible=seen))
        return KeypointSet(self.categories, tuple(kept))

    def asked(self) -> tuple[Tensor, ...]:
        """Of every category the parts (K,) that a labelled object has, or its mirrored twin."""
        masks = [torch.zeros(len(kind.keypoints), dtype=torch.bool) for kind in self.categories]
        for item in self.sources:
            flip = torch.tensor(self.categories[item.category].flip, dtype=torch.long)
            masks[item.category] |= item.visible | item.visible[flip]
        return tuple(masks)

    def empty(self) -> tuple[str, ...]:
        """Photos in which nothing was found."""
        full = {item.name for item in self.found(sources=False).objects}
        return tuple(dict.fromkeys(item.name for item in self.objects if item.name not in full))


@torch.no_grad()
def transfer(
    labels: str | Path | KeypointSet,
    photos: str | Path | Sequence[str | Path],
    model: DenseFeatures | None = None,
    *,
    images: str | Path | None = None,
    threshold: float = 0.5,
    journal: str | Path | None = None,
    quiet: bool = True,
) -> Transferred:
    """Labels of a few photos -> of all others.

    labels: a COCO json (its photos under `images`, default: beside it, or else in the folder
    `photos`) or a set in memory.
    photos: a folder, or photos and folders; labelled ones among them are left out, those that
    cannot be read are skipped and listed. model: by default the one that ships; of one that was
    never fitted on pairs of known relation, scores are mere similarities that lead back.
    threshold: keypoints with a lower score are not visible. journal: a file to which every photo's
    labels are written at once; what it has of the same labels, photos and model is not done again.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; scores are between 0 and 1")
    known = labels if isinstance(labels, KeypointSet) else read_labels(labels, photos, images)
    items = [item for item in known.objects if bool(item.visible.any()) or has_box(item)]
    if not items:
        raise ValueError("no labelled object has a keypoint (v of 1 or 2) or a box; label one")
    targets = photo_names(photos)
    labelled = {os.path.realpath(item.image.path) for item in known.objects}
    todo = {path: name for path, name in targets.items() if os.path.realpath(path) not in labelled}
    if not todo:
        raise ValueError("all photos are labelled already; pass others, or a folder with others")
    model = model or DenseFeatures.from_pretrained()
    done = _read_journal(journal, items, model)
    lines = [_line_of(path, done) for path in todo]
    missing = [path for path, line in zip(todo, lines, strict=True) if line is None]
    if missing:
        sources = read_sources(items, model)
        with progress.bar(total=len(missing), desc="transferring", unit="img", quiet=quiet) as bar:
            for batch in _batches(model, missing, sources, known.categories):
                if journal is not None:
                    add_lines(Path(journal), batch)
                done |= {line["photo"]: line for line in batch}
                bar.update(len(batch))
    objects: list[Labelled] = []
    skipped: list[Skipped] = []
    for path, name in todo.items():
        line = done[str(path)]
        if "skipped" in line:
            skipped.append(Skipped(name, line["skipped"]))
        for about in line.get("objects", ()):
            item = _item_of(about, threshold)
            objects.append(replace(item, image=Place(str(path)), name=name))
    given = tuple(_as_given(item, targets) for item in items)
    calibrated = trust_of(model) is not None
    return Transferred(
        known.categories, given, tuple(objects), tuple(skipped), calibrated, threshold
    )


def read_labels(
    labels: str | Path, photos: str | Path | Sequence[str | Path], images: str | Path | None
) -> KeypointSet:
    """Labels, with their photos where they are said to be; else beside them or among `photos`."""
    try:
        return read_coco(labels, images=images)
    except SourceError:
        if images is not None or not isinstance(photos, str | Path) or not Path(photos).is_dir():
            raise
        return read_coco(labels, images=photos)


def _batches(
    model: DenseFeatures,
    paths: Sequence[Path],
    sources: Sequence[Source],
    categories: Sequence[Category],
) -> Iterator[list[dict[str, Any]]]:
    """Labels of some photos at a time, a line of the journal each."""
    trust, side = trust_of(model), model.config.longest_side
    for start in range(0, len(paths), _BATCH):
        part, skipped = list(paths[start : start + _BATCH]), list[Skipped]()
        lines = []
        for path, features in extract_readable(model, part, skipped, longest_side=side):
            joined = carry(sources, features, categories, _looker(model, path))
            objects = [_record(as_labelled(one, trust, features)) for one in joined]
            lines.append({"photo": str(path), "file": file_state(path), "objects": objects})
        lines += [
            {"photo": one.name, "file": file_state(Path(one.name)), "skipped": one.reason}
            for one in skipped
        ]
        yield lines


def _looker(model: DenseFeatures, path: Path) -> Look:
    """Parts of a photo as the model sees them; it is read once, and only if it is asked for."""
    pixels: list[Tensor] = []

    def look(part: Part) -> Features:
        if not pixels:
            pixels.append(load(path))
        return model.extract(cut_part(pixels[0], part))[0]

    return look


def _record(item: Labelled) -> dict[str, Any]:
    """An object in plain numbers; a part without a place has null."""
    assert item.scores is not None
    return {
        "category": item.category, "box": item.box.tolist(), "points": item.points.tolist(),
        "scores": item.scores.tolist(), "size": list(item.size), "box_score": item.box_score,
        "mask": [ring.tolist() for ring in item.mask],
    }  # fmt: skip


def _item_of(about: Mapping[str, Any], threshold: float) -> Labelled:
    """What `_record` wrote."""
    rows = [[torch.nan if v is None else v for v in point] for point in about["points"]]
    scores = torch.tensor(about["scores"])
    height, width = about["size"]
    return Labelled(
        image=Place(""), name="", category=about["category"], box=torch.tensor(about["box"]),
        points=torch.tensor(rows).reshape(-1, 2), visible=scores >= threshold,
        size=(height, width), scores=scores, box_score=about["box_score"],
        mask=tuple(torch.tensor(ring) for ring in about["mask"]),
    )  # fmt: skip


def _read_journal(
    journal: str | Path | None, items: Sequence[Labelled], model: DenseFeatures
) -> dict[str, dict[str, Any]]:
    """Path -> line of what was done of these labels with this model; another's is begun anew."""
    if journal is None:
        return {}
    labels = [[item.image.path, *_record(_scored(item)).values()] for item in items]
    trust = str(trust_of(model))
    content = as_json([labels, model.weights_hash(), trust])
    head = {"labels": hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()}
    path = Path(journal)
    lines = read_lines(path)
    if lines[:1] != [head]:
        write_lines(path, [head])
        return {}
    return {line["photo"]: line for line in lines[1:]}


def _line_of(path: Path, done: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """What was done of a photo, if it is still the same."""
    line = done.get(str(path))
    return line if line and line["file"] == file_state(path) else None


def trust_of(model: DenseFeatures) -> TransferTrust | None:
    """What turns signs into probabilities, where the model was fitted for it."""
    return model.reliability.transfer if model.reliability and model.cohort else None


def photo_names(photos: str | Path | Sequence[str | Path]) -> dict[Path, str]:
    """Photos with their names: below a single folder, else as they are given."""
    many = [photos] if isinstance(photos, str | Path) else list(photos)
    if not many:
        raise ValueError("no photos are given; name a folder, or photos")
    targets: dict[Path, str] = {}
    for given in map(Path, many):
        if given.is_dir():
            for item in find_images(given):
                path = Path(item.read.path)
                targets[path] = item.name if len(many) == 1 else str(path)
        elif given.exists():
            targets[given] = str(given)
        else:
            raise FileNotFoundError(f"no photo or folder at {given}; check the path")
    return targets


def _as_given(item: Labelled, targets: dict[Path, str]) -> Labelled:
    """A labelled object under the name its photo has among the targets, else under its path."""
    names = {os.path.realpath(path): name for path, name in targets.items()}
    where = os.path.realpath(item.image.path)
    name = item.name if item.image.size is not None else names.get(where, where)
    return replace(_scored(item), name=name)


def _scored(item: Labelled) -> Labelled:
    """A labelled object: what is labelled is beyond doubt."""
    return replace(item, scores=item.visible.float(), box_score=1.0)

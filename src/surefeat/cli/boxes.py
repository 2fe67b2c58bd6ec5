"""`surefeat boxes`: objects from image labels alone; heavy imports inside run()."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from surefeat.boxes.config import BoxesConfig, SelectConfig
from surefeat.cli.output import Device, Json, drawing, say
from surefeat.match.config import ProposalConfig

if TYPE_CHECKING:
    from surefeat.boxes.select import Predicted
    from surefeat.data.sources import LabelledImages


@dataclass(frozen=True)
class LabelledPhotos:
    """Which photos, and where their labels are."""

    labels: Path | None = None
    """CSV (columns image, label) or COCO json; by default folder names are the labels."""
    images: Path | None = None
    """Where a list or COCO json finds its images: a folder or tar shards."""
    keep: Path | None = None
    """List of the image names to use."""
    categories: tuple[str, ...] | None = None
    """Only these labels."""

    def find_labels(self, source: Path) -> LabelledImages:
        from surefeat.data.sources import find_labels

        return find_labels(
            source, labels=self.labels, images=self.images, keep=self.keep,
            categories=self.categories,
        )  # fmt: skip


@dataclass(frozen=True)
class BoxesFit:
    """Learn to box objects from image labels: for crops to train on, right in about 4 of 10 photos.

    Photos come as photos/chair/*.jpg, with a CSV or as COCO json; a hundred per label are few.
    """

    source: Positional[Path]
    """Folder with one folder per category, or any source of images with --labels, or COCO json."""
    out: Path
    """Run folder to create."""
    init: str | None = None
    """Initial weights: imagenet (downloaded; the default), shipped (the default without a network),
    a model's folder, a file (safetensors, state dict), or none."""
    proposals_file: Path | None = None
    """Proposals, made or added to where it lacks images; by default in the run folder."""
    resume: bool = False
    """Continue the run in --out exactly, with its own settings."""
    device: Device = None
    json: Json = False
    photos: OmitArgPrefixes[LabelledPhotos] = field(default_factory=LabelledPhotos)
    config: Annotated[BoxesConfig, arg(name="")] = field(default_factory=BoxesConfig)

    def run(self) -> None:
        from surefeat.boxes.train import fit_boxes
        from surefeat.learn.runs import Run

        if self.resume:
            Run.open(self.out).refuse_others(self.config, usual=BoxesConfig())
        done = fit_boxes(
            self.photos.find_labels(self.source), out=self.out, config=self.config, init=self.init,
            proposals=self.proposals_file, resume=self.resume, device=self.device, quiet=self.json,
        )  # fmt: skip
        result = {
            "detector": str(done.folder / "model"), "images": done.images, "steps": done.steps,
            "skipped": len(done.skipped),
        }  # fmt: skip
        say(result, to_script=self.json)


@dataclass(frozen=True)
class BoxesPredict:
    """The best box of every label of every photo, selected: boxes.json for pretrain --crop."""

    source: Positional[Path]
    """Photos with labels, as for fit."""
    model: Path
    """Run folder of `surefeat boxes fit`."""
    out: Path = Path("boxes")
    """Folder for boxes.json, selection.csv, sheet.png and skipped.txt."""
    proposals_file: Path | None = None
    """Proposals, made or added to where it lacks images; by default in --out."""
    sheet: int = 36
    """Boxes on the contact sheet; 0 for none."""
    device: Device = None
    json: Json = False
    photos: OmitArgPrefixes[LabelledPhotos] = field(default_factory=LabelledPhotos)
    select: SelectConfig = field(default_factory=SelectConfig)

    def run(self) -> None:
        from surefeat.boxes.network import Detector
        from surefeat.boxes.select import predict_boxes

        labels = self.photos.find_labels(self.source)
        detector = Detector.load(self.model, device=self.device)
        done = predict_boxes(
            labels, detector, out=self.out, proposals=self.proposals_file, quiet=self.json,
            config=replace(detector.fitted, select=self.select),
        )  # fmt: skip
        result = {
            "boxes": str(done.folder / "boxes.json"),
            "sheet": _sheet(done, labels, self.sheet) if self.sheet else None,
            "skipped": len(done.skipped), **done.selection.counts(),
        }  # fmt: skip
        say(result, to_script=self.json)


@dataclass(frozen=True)
class BoxesPropose:
    """Make the proposals of many photos once, in one file; continues where it was stopped."""

    source: Positional[Path]
    """Photos with labels, as for fit."""
    file: Path
    """File to write or add to."""
    workers: int = 2
    """Threads."""
    json: Json = False
    photos: OmitArgPrefixes[LabelledPhotos] = field(default_factory=LabelledPhotos)
    proposals: ProposalConfig = field(default_factory=ProposalConfig)

    def run(self) -> None:
        from surefeat.match.proposals import make_proposals

        items = [image.item for image in self.photos.find_labels(self.source).labelled()]
        added = make_proposals(items, self.proposals, file=self.file, workers=self.workers)
        result = {"file": str(self.file), "added": added, "images": len(items)}
        words = f"{added} of {len(items)} images added to {self.file}"
        say(result, to_script=self.json, words=words)


@dataclass(frozen=True)
class Boxes:
    """Rough boxes of objects from image labels alone, to crop photos for pretrain --crop."""

    what: Annotated[
        Annotated[BoxesFit, subcommand("fit")]
        | Annotated[BoxesPredict, subcommand("predict")]
        | Annotated[BoxesPropose, subcommand("propose")],
        arg(name=""),
    ]


def _sheet(done: Predicted, labels: LabelledImages, count: int) -> str | None:
    """Draw the contact sheet, if there is anything on it; where it is."""
    from surefeat.core.image import ImageLike, decode
    from surefeat.match.proposals import item_bytes

    items = {image.name: image.item for image in labels.images}

    def read(name: str) -> ImageLike:
        return decode(item_bytes(items[name]), name=name)

    if count < 1 or not done.selection.candidates:
        return None
    path = done.folder / "sheet.png"
    with drawing("contact sheet"):
        from surefeat.show.objects import contact_sheet
        from surefeat.show.style import write_figure

        write_figure(contact_sheet(done.selection, read, count=count), path)
        return str(path)
    return None

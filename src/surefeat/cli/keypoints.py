"""`surefeat keypoints`: parts of objects from a few labels; heavy imports inside run()."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg, subcommand

from surefeat.cli.output import Device, Json, say, say_aside
from surefeat.cli.transfer import KeypointsSuggest, KeypointsTransfer, draw_objects
from surefeat.data.pose import USUAL, PoseFormat, is_labels
from surefeat.keypoints.config import KeypointConfig

if TYPE_CHECKING:
    from surefeat.data.decode import Skipped
    from surefeat.data.keypoints import KeypointSet
    from surefeat.keypoints.detector import KeypointDetector


@dataclass(frozen=True)
class KeypointsFit:
    """Learn to find parts from labelled keypoints; ten labelled photos are enough to begin."""

    annotations: Positional[Path]
    """COCO keypoints json, or labels of DeepLabCut, SLEAP, Label Studio, CVAT or YOLO. Objects
    without a box have the whole image."""
    out: Path
    """Folder of the detector to create."""
    images: Path | None = None
    """Where the images are: a folder or tar shards; by default beside the labels."""
    categories: tuple[str, ...] | None = None
    """Learn only these categories; by default all that have labels."""
    model: str | None = None
    """With the features: model or run folder, or one that ships (resnet50, vgg16)."""
    device: Device = None
    json: Json = False
    seed: int = 0
    """Determines everything drawn, on one machine."""
    config: Annotated[KeypointConfig, arg(name="")] = field(default_factory=KeypointConfig)

    def run(self) -> None:
        from time import perf_counter

        from surefeat.core.files import check_free
        from surefeat.data.keypoints import read_coco
        from surefeat.keypoints.detector import KeypointDetector
        from surefeat.model.network import DenseFeatures

        check_free(self.out)
        labelled = read_coco(self.annotations, images=self.images)
        labelled = labelled if self.categories is None else labelled.only(self.categories)
        model = DenseFeatures.from_pretrained(self.model, device=self.device)
        start = perf_counter()
        detector = KeypointDetector.fit(
            model, labelled, config=self.config, seed=self.seed, quiet=self.json
        )
        detector.save(self.out)
        result = {
            "detector": str(self.out),
            "objects": len(labelled.objects),
            "keypoints": {kind.name: list(kind.keypoints) for kind in detector.categories},
            "seconds": round(perf_counter() - start, 1),
        }
        say(result, to_script=self.json)


@dataclass(frozen=True)
class KeypointsPredict:
    """Find the parts in other photos: writes keypoints.json (COCO), sheet.png, a picture each."""

    images: Positional[tuple[Path, ...]]
    """Photos and folders; or one file of labels (COCO or another tool's), whose boxes and
    categories are used. Where it has keypoints too, the result is compared with them."""
    detector: Path
    """Folder that `surefeat keypoints fit` wrote."""
    out: Path = Path("keypoints")
    """Folder for keypoints.json, sheet.png (all photos at a glance) and a picture per photo."""
    folder: Path | None = None
    """Where the images of a file of labels are: a folder or tar shards; by default beside it."""
    category: str | None = None
    """Of the objects, when the detector knows several; of a json, only these are looked at."""
    threshold: float = 0.5
    """Parts that are less probably in the photo, 0 to 1, are left out (v = 0)."""
    pictures: bool = True
    """Draw every photo with its keypoints."""
    format: PoseFormat | None = None
    """Also write the keypoints as another tool's file, into --out."""
    model: str | None = None
    """The model it was fitted with: folder, or one that ships (resnet50, vgg16)."""
    device: Device = None
    json: bool = False
    """Print the keypoints as JSON instead of a summary."""

    def run(self) -> None:
        from surefeat.core.files import as_json, check_free
        from surefeat.data.keypoints import write_coco, write_keypoints
        from surefeat.keypoints.detector import KeypointDetector
        from surefeat.model.network import DenseFeatures

        if not self.images:
            raise ValueError("no photos are given; name photos, folders or a COCO json to look at")
        if self.format == "yolo":
            check_free(self.out / USUAL["yolo"])
        model = DenseFeatures.from_pretrained(self.model, device=self.device)
        detector = KeypointDetector.load(self.detector, model)
        objects, labelled, skipped = self._find(detector)
        if not objects.objects:
            raise ValueError(f"none of the {len(skipped)} photos can be read: {skipped[0].reason}")
        self.out.mkdir(parents=True, exist_ok=True)
        record = self.out / "keypoints.json"
        write_coco(record, objects)
        if self.format not in (None, "coco"):
            lost = write_keypoints(self.out / USUAL[self.format], objects, self.format)
            _say_lost(lost, self.format)
        if self.pictures:
            draw_objects(objects, self.out)
        if self.json:
            left_out = [asdict(photo) for photo in skipped]
            coco = json.loads(record.read_text(encoding="utf-8"))
            print(as_json(coco | {"skipped": left_out}))
            return
        for photo in skipped:
            print(f"skipped {photo.reason}")
        print(_summary(objects, labelled, skipped), f"look at {self.out}", sep="; ")

    def _find(
        self, detector: KeypointDetector
    ) -> tuple[KeypointSet, KeypointSet | None, list[Skipped]]:
        """Objects with keypoints; as they were labelled, from a json; photos that were no use."""
        from surefeat.data.keypoints import KeypointSet, read_coco
        from surefeat.data.sources import photos_of

        skipped: list[Skipped] = []
        if len(self.images) == 1 and is_labels(self.images[0]):
            labelled = read_coco(self.images[0], images=self.folder)
            labelled = labelled.only([self.category]) if self.category else labelled
            objects = detector.label(labelled, threshold=self.threshold, skipped=skipped)
            bad = {photo.name for photo in skipped}
            readable = tuple(item for item in labelled.objects if item.name not in bad)
            return objects, replace(labelled, objects=readable), skipped
        paths = [path for given in self.images for path in photos_of(given)]
        found = detector.predict(
            paths, category=self.category, threshold=self.threshold, skipped=skipped
        )
        return KeypointSet(detector.categories, tuple(found)), None, skipped


def _summary(objects: KeypointSet, labelled: KeypointSet | None, skipped: Sequence[Skipped]) -> str:
    """How many objects; of labelled ones also how many keypoints are right."""
    from surefeat.measure.metrics import hits, longer_side

    photos = len({item.name for item in objects.objects})
    said = f"{len(objects.objects)} objects in {photos} photos"
    said += f"; {len(skipped)} photos skipped" if skipped else ""
    both = (objects.objects, labelled.objects) if labelled else ((), ())
    pairs = list(zip(*both, strict=True))
    right = [
        hits(mine.points, true.points, 0.1 * longer_side(true.box), true.visible)[0]
        for mine, true in pairs
    ]
    total = sum(map(len, right))
    if not total:
        return said
    share = sum(int(hit.sum()) for hit in right) / total
    said += f"; {share:.0%} of {total} labelled keypoints right (PCK@0.1 of the box)"
    absent = sum(int((~true.visible).sum()) for _, true in pairs)
    alarms = sum(int((mine.visible & ~true.visible).sum()) for mine, true in pairs)
    missed = sum(int((~mine.visible & true.visible).sum()) for mine, true in pairs)
    said += f"; {missed} of {total} left out"
    return f"{said}, {alarms} of {absent} marked that are not there" if absent else said


@dataclass(frozen=True)
class KeypointsConvert:
    """Labels of one tool as those of another: COCO, DeepLabCut, SLEAP, Label Studio, CVAT, YOLO."""

    labels: Positional[Path]
    """What is there: .json (COCO, Label Studio), .csv or .h5 (DeepLabCut), .slp (SLEAP), .xml
    (CVAT), data.yaml or its folder (YOLO), a folder of DeepLabCut's tables."""
    out: Positional[Path]
    """What to write, by the same endings; a folder is YOLO's, a .json COCO's."""
    source: Annotated[PoseFormat | None, arg(name="from")] = None
    """Format of what is there, where it cannot be told."""
    to: PoseFormat | None = None
    """Format to write, where the ending does not say it: label-studio for a .json."""
    images: Path | None = None
    """Where the photos are: a folder or tar shards; by default beside the labels."""
    categories: tuple[str, ...] | None = None
    """Only these categories; by default all."""
    copy: bool = True
    """Copy photos to where the new labels look for them: into YOLO's folder, out of SLEAP's
    packages."""
    json: Json = False

    def run(self) -> None:
        from surefeat.core.files import check_free
        from surefeat.data import pose

        check_free(self.out)
        form = self.to or pose.format_for(self.out)
        source = self.source or pose.tell_format(self.labels)
        coco = pose.read_pose(self.labels, source)
        coco = coco if self.categories is None else pose.only_categories(coco, self.categories)
        find = pose.photo_finder(self.labels, self.images)
        lost = pose.write_pose(self.out, coco, form, find, copy=self.copy)
        unpacked = pose.unpack_photos(self.out, coco, form, find) if self.copy else 0
        _say_lost(lost, form)
        result = {
            "labels": str(self.out), "from": source, "format": form, "photos": len(coco.images),
            "objects": len(coco.annotations), "unpacked": unpacked, "lost": lost,
        }  # fmt: skip
        words = f"{len(coco.annotations)} objects in {len(coco.images)} photos, from {source} to"
        words = f"{words} {form}: {self.out}"
        more = f"; {unpacked} photos unpacked beside it" * bool(unpacked)
        say(result, to_script=self.json, words=words + more)


def _say_lost(lost: Sequence[str], form: PoseFormat) -> None:
    """What a format cannot hold, in a line of warning each."""
    for what in lost:
        say_aside(f"lost: {what}; {form} cannot hold it")


@dataclass(frozen=True)
class Keypoints:
    """Find object parts from a handful of labels."""

    what: Annotated[
        Annotated[KeypointsFit, subcommand("fit")]
        | Annotated[KeypointsPredict, subcommand("predict")]
        | Annotated[KeypointsTransfer, subcommand("transfer")]
        | Annotated[KeypointsSuggest, subcommand("suggest")]
        | Annotated[KeypointsConvert, subcommand("convert")],
        arg(name=""),
    ]

"""`surefeat keypoints transfer` and `suggest`: label one photo, have the rest labelled; which next.

Heavy imports inside run().
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from surefeat.cli.output import Device, Json, Model, drawing, say

if TYPE_CHECKING:
    from surefeat.data.keypoints import KeypointSet, Labelled
    from surefeat.keypoints.suggest import Suggested
    from surefeat.keypoints.transfer import Transferred
    from surefeat.model.network import DenseFeatures


@dataclass(frozen=True)
class KeypointsTransfer:
    """Label one to three photos, have the rest labelled: keypoints, boxes and masks, by matching.

    Writes keypoints.json (COCO), sheet.png with the least sure first, and a picture per photo.
    """

    labels: Positional[Path]
    """COCO keypoints json of the labelled photos; boxes and polygons are used where it has them."""
    photos: Positional[tuple[Path, ...]]
    """A folder with the others; or photos and folders."""
    out: Path = Path("transfer")
    """Folder for keypoints.json, sheet.png, skipped.txt and a picture per photo; journal.jsonl
    keeps what is done, so that a stopped run goes on."""
    images: Path | None = None
    """Where the labelled photos are: a folder or tar shards; by default beside the json, or else
    in the folder with the others."""
    threshold: float = 0.5
    """Keypoints that are less probably right, 0 to 1, are left out (v = 0)."""
    fit: Path | None = None
    """Also fit a detector on the labels and on the sure ones (see --sure); folder to create."""
    sure: float = 0.9
    """Keypoints with this probability or more are what --fit learns from."""
    pictures: bool = True
    """Draw every photo with its keypoints."""
    model: Model = None
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.core.files import check_free
        from surefeat.learn.runs import locked

        if not self.photos:
            raise ValueError("no photos are given; name the folder whose photos to label")
        if not 0 <= self.sure <= 1:
            raise ValueError(f"--sure is {self.sure:g}; scores are between 0 and 1")
        if self.fit is not None:
            check_free(self.fit)
        with locked(self.out):  # two at once would mix what the journal has of each
            self._transfer()

    def _transfer(self) -> None:
        from surefeat.data.decode import write_skipped
        from surefeat.data.keypoints import write_coco
        from surefeat.keypoints.transfer import transfer
        from surefeat.model.network import DenseFeatures

        model = DenseFeatures.from_pretrained(self.model, device=self.device)
        transferred = transfer(
            self.labels, self.photos if len(self.photos) > 1 else self.photos[0], model,
            images=self.images, threshold=self.threshold, quiet=self.json,
            journal=self.out / "journal.jsonl",
        )  # fmt: skip
        if not transferred.objects:
            why = transferred.skipped[0].reason
            raise ValueError(f"none of the {len(transferred.skipped)} photos can be read: {why}")
        write_coco(self.out / "keypoints.json", transferred.found())
        write_skipped(self.out / "skipped.txt", transferred.skipped)
        if self.pictures:
            self._draw(transferred)
        if self.fit is not None:
            self._fit(transferred, model)
        say(self._result(transferred), to_script=self.json, words=self._words(transferred))

    def _draw(self, transferred: Transferred) -> None:
        if not transferred.found(sources=False).objects:
            return  # nothing to be seen
        with drawing("pictures"):
            draw_objects(transferred.found(sources=False), self.out, asked=transferred.asked())

    def _fit(self, transferred: Transferred, model: DenseFeatures) -> None:
        """A detector from the labels and what is sure; what is not sure teaches nothing."""
        from surefeat.keypoints.config import KeypointConfig
        from surefeat.keypoints.detector import KeypointDetector

        assert self.fit is not None
        sure = transferred.found(least=self.sure)
        config = KeypointConfig(absent="ignored")
        KeypointDetector.fit(model, sure, config=config, quiet=self.json).save(self.fit)

    def _result(self, transferred: Transferred) -> dict[str, Any]:
        import json

        coco: dict[str, Any] = json.loads((self.out / "keypoints.json").read_text(encoding="utf-8"))
        more = {
            "calibrated": transferred.calibrated, "empty": list(transferred.empty()),
            "skipped": [{"photo": s.name, "reason": s.reason} for s in transferred.skipped],
        }  # fmt: skip
        return coco | more | ({"detector": str(self.fit)} if self.fit else {})

    def _words(self, transferred: Transferred) -> str:
        found = transferred.found(sources=False)
        photos = len({item.name for item in transferred.objects})
        labelled = len({item.name for item in found.objects})
        kept = sum(int(item.visible.sum()) for item in found.objects)
        lines = [f"skipped {one.name}: {one.reason}" for one in transferred.skipped]
        said = f"{labelled} of {photos} photos labelled, {kept} keypoints"
        if transferred.calibrated:
            sure = sum(int((item.scores >= self.sure).sum()) for item in found.objects
                       if item.scores is not None)  # fmt: skip
            said += f", {sure} of them sure ({self.sure:g} or more)"
        else:
            said += "; their scores are no probabilities, this model was not fitted for them"
        empty = transferred.empty()
        said += f"; nothing found in {len(empty)}" * bool(empty)
        said += f"; {len(transferred.skipped)} skipped" * bool(transferred.skipped)
        said += f"; detector in {self.fit}" if self.fit else ""
        return "\n".join([*lines, f"{said}; look at {self.out}"])


@dataclass(frozen=True)
class KeypointsSuggest:
    """Which photos to label next: those that stand for many others.

    Writes suggest.json, suggest.txt (a name per line) and sheet.png.
    """

    photos: Positional[tuple[Path, ...]]
    """A folder; or photos and folders."""
    count: int = 10
    """How many to suggest."""
    labels: Path | None = None
    """COCO keypoints json of what is labelled already: those photos count as chosen."""
    images: Path | None = None
    """Where its photos are; by default beside it, or else in the folder to choose from."""
    out: Path = Path("suggest")
    """Folder for suggest.json, suggest.txt and sheet.png."""
    model: Model = None
    device: Device = None
    json: Json = False

    def run(self) -> None:
        from surefeat.core.files import write_json, write_text
        from surefeat.keypoints.suggest import suggest
        from surefeat.model.network import DenseFeatures

        if not self.photos:
            raise ValueError("no photos are given; name the folder to choose from")
        model = DenseFeatures.from_pretrained(self.model, device=self.device)
        suggested = suggest(
            self.photos if len(self.photos) > 1 else self.photos[0], model, count=self.count,
            labels=self.labels, images=self.images, quiet=self.json,
        )  # fmt: skip
        write_json(self.out / "suggest.json", suggested.to_dict())
        names = [one.photo for one in suggested.suggestions]
        write_text(self.out / "suggest.txt", "".join(f"{name}\n" for name in names))
        _draw_suggested(suggested, self.out)
        lines = [f"skipped {one.name}: {one.reason}" for one in suggested.skipped]
        said = f"{len(names)} photos to label, which with {suggested.labelled} labelled ones cover"
        said += f" {suggested.covered:.0%} of what the {len(suggested.paths)} photos show"
        words = "\n".join([*lines, *names, f"{said}; look at {self.out}"])
        say(suggested.to_dict(), to_script=self.json, words=words)


def _draw_suggested(suggested: Suggested, out: Path) -> None:
    with drawing("sheet"):
        from surefeat.show.objects import photo_sheet
        from surefeat.show.style import write_figure

        notes = [f"stands for {one.stands_for}" for one in suggested.suggestions]
        photos = [suggested.paths[one.photo] for one in suggested.suggestions]
        label = f"{len(photos)} photos to label, the most useful first."
        write_figure(photo_sheet(photos, notes, label=label), out / "sheet.png")


def draw_objects(labelled: KeypointSet, out: Path, *, asked: tuple[Any, ...] | None = None) -> None:
    """One PNG per photo, named after it, and sheet.png, a look at them all; equal names get a
    number."""
    from surefeat.core.files import file_stem
    from surefeat.show.objects import keypoint_sheet, keypoints
    from surefeat.show.style import write_figure

    sheet = keypoint_sheet(labelled.objects, labelled.categories, asked=asked)
    write_figure(sheet, out / "sheet.png")
    photos: dict[str, list[Labelled]] = {}
    for item in labelled.objects:
        photos.setdefault(item.name, []).append(item)
    taken, equal = {"sheet"}, Counter[str]()
    for name, objects in photos.items():
        plain = stem = file_stem(Path(name).stem)
        while stem in taken:
            equal[plain] += 1
            stem = f"{plain}_{equal[plain] + 1}"
        taken.add(stem)
        drawn = keypoints(objects[0].read(), objects, labelled.categories)
        write_figure(drawn, out / f"{stem}.png", dpi=100)

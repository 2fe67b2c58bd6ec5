"""The page's tab for a folder: label one photo, have the others labelled, correct, download.

Photos are those that were uploaded, and those of the folder that the page was started with; no
request can name another.
"""

from __future__ import annotations

import html
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from surefeat.core import progress
from surefeat.core.image import ImageError, decode, printable, read_bytes
from surefeat.data.keypoints import KeypointSet, Labelled, write_coco
from surefeat.data.sources import check_any_readable, walk_folder
from surefeat.demo.board import sheet_value
from surefeat.demo.desk import LISTED, MOST_PHOTOS, QUIET, build_desk, part_photo, show
from surefeat.demo.labels import PartPhoto, Parts
from surefeat.demo.parts import doubt
from surefeat.demo.pictures import KEPT, MAX_PIXELS
from surefeat.keypoints.transfer import SURE, transfer
from surefeat.model.network import DenseFeatures

_HELP = (
    "1. {first} Name the parts that you want to have labelled.\n"
    "2. Click the parts in one photo that shows them well; a second and a third one, seen from "
    "elsewhere, make it surer.\n"
    "3. Label the others. Below are the photos, the most doubtful first: open one, drag what is "
    "wrong to its place, or off the photo if it is not to be seen.\n"
    "4. Download the labels."
)

MOST_SOURCES = 3
"""Labelled photos that are matched with each of the others."""

_AT_ONCE = 16
"""Photos between two lines that say how far it is."""

_SAVE = "() => document.querySelector('#folder_file')?.click()"
"""The browser takes the file as soon as it is written."""


@dataclass(frozen=True, eq=False)
class FolderLabels:
    """What the photos that had no clicks were given, by where they are."""

    objects: dict[str, Labelled]
    probable: bool = False


def read_folder(folder: str | Path) -> tuple[PartPhoto, ...]:
    """The photos below a folder, as the desk shows them; what cannot be read is said."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"no folder at {folder}; pass one with photos")
    items = walk_folder(folder)
    check_any_readable(items, folder)
    if len(items) > MOST_PHOTOS:
        fix = "surefeat keypoints transfer labels them all"
        print(f"the page takes the first {MOST_PHOTOS} of {len(items)} photos; {fix}")
    photos = []
    for item in progress.bar(items[:MOST_PHOTOS], desc="reading photos", unit="img"):
        if item.read.refused:
            print(f"skipped {printable(item.name)}: {item.read.refused}")
            continue
        try:
            data = read_bytes(item.read.path, name=item.name)
            pixels = decode(data, name=item.name, max_pixels=MAX_PIXELS)
            photos.append(part_photo(item.name, item.read.path, pixels))
        except ImageError as error:
            print(f"skipped {error}")
    return tuple(photos)


def folder_tab(model: DenseFeatures, photos: tuple[PartPhoto, ...], page: gr.Blocks) -> None:
    """Build the tab; photos: what it starts with."""
    first = (
        f"{len(photos)} photos are here." if photos else "Add photos that show one kind of object."
    )
    gr.Markdown(_HELP.format(first=first))
    desk = build_desk(Parts(photos=photos, desk="folder"), example="beak, left eye, tail")
    with desk.actions:
        go = gr.Button("label the other photos", variant="primary", elem_id="folder_go")
        told = gr.Markdown(elem_id="folder_told")
        least = gr.Slider(
            0, 1, 0.5, step=0.05, label="keep parts from this score on", elem_id="folder_least",
            visible=False,
        )  # fmt: skip
        save = gr.Button("download labels (COCO json)", size="sm", elem_id="folder_save")
        file = gr.DownloadButton("labels.json", visible="hidden", elem_id="folder_file")
    carried = gr.State(FolderLabels({}), time_to_live=KEPT)
    begun = go.click(lambda: gr.Button(interactive=False), None, go, **QUIET)
    done = begun.then(partial(_on_go, model), desk.session, [carried, told], **QUIET)
    known, outputs = [desk.session, carried, least], [*desk.shown, told, desk.sheet, least]
    merged = done.then(_on_carried, known, outputs, **QUIET)
    merged.then(lambda: gr.Button(interactive=True), None, go, **QUIET)
    least.input(_on_carried, known, outputs, trigger_mode="always_last", **QUIET)
    written = save.click(_on_save, desk.session, file, **QUIET)
    written.then(None, None, None, js=_SAVE, **QUIET)
    page.load(show, desk.session, desk.shown, **QUIET)


def _clicked(session: Parts, photo: PartPhoto) -> bool:
    known = set(session.names)
    return bool(known & (photo.marks.places.keys() | photo.marks.absent))


def _sources(session: Parts) -> list[PartPhoto]:
    """Photos that were labelled by hand alone; those that were corrected are not asked again."""
    own = [p for p in session.photos if p.marks.places.keys() & set(session.names) and not p.scores]
    return own[:MOST_SOURCES]


def _on_go(model: DenseFeatures, session: Parts) -> Iterator[list[Any]]:
    """What was carried over, and how far it is; photos with clicks stay as they are."""
    sources = _sources(session)
    paths = [photo.path for photo in session.photos if not _clicked(session, photo)]
    if not sources or not paths:
        gr.Warning("click the parts in a photo first" if not sources else "add other photos first")
        yield [FolderLabels({}), ""]
        return
    labels = session.labelled(sources)
    objects: dict[str, Labelled] = {}
    probable = False
    try:
        for start in range(0, len(paths), _AT_ONCE):
            yield [gr.skip(), f"{start} of {len(paths)} photos …"]
            done = transfer(labels, paths[start : start + _AT_ONCE], model)
            objects |= {item.image.path: item for item in done.objects}
            probable = done.calibrated
            for photo in done.skipped:
                gr.Warning(html.escape(f"{Path(photo.name).name}: {photo.reason}"))
    except ImageError as error:  # the server forgets uploads after a while
        gr.Warning(html.escape(str(error)))
    yield [FolderLabels(objects, probable), f"{len(paths)} of {len(paths)} photos …"]


def _on_carried(session: Parts, carried: FolderLabels, least: float) -> list[Any]:
    """Desk, what is told, sheet, slider: parts with a score of `least` or more are kept.

    Photos that were clicked in the meantime stay as they are.
    """
    items = {
        number: _kept(carried.objects[photo.path], least)
        for number, photo in enumerate(session.photos)
        if photo.path in carried.objects and not _clicked(session, photo)
    }
    numbers = [n for n, item in items.items() if len(item.visible) == len(session.names)]
    if not numbers:
        return [*show(session), "", gr.skip(), gr.skip()]
    session = session.with_found(numbers, [items[number] for number in numbers])
    session = replace(session, probable=carried.probable)
    listed = sorted(numbers, key=lambda number: _sureness(items[number]))[:LISTED]
    notes = [doubt(items[n], session.names, probable=carried.probable) for n in listed]
    told = _told([items[n] for n in numbers], len(listed), probable=carried.probable)
    sheet = sheet_value(session, listed, notes)
    return [*show(session), told, sheet, gr.Slider(visible=True)]


def _kept(item: Labelled, least: float) -> Labelled:
    assert item.scores is not None
    return replace(item, visible=(item.scores >= least) & item.points.isfinite().all(-1))


def _sureness(item: Labelled) -> float:
    """Of the least sure part that was found; nothing found: that comes first."""
    assert item.scores is not None
    seen = item.scores[item.visible]
    return float(seen.min()) if len(seen) else -1.0


def _told(items: list[Labelled], listed: int, *, probable: bool) -> str:
    """How much was found, and how much of it is sure."""
    parts = sum(int(item.visible.sum()) for item in items)
    said = f"{parts} parts found in {len(items)} photo{'s' * (len(items) != 1)}"
    if probable:
        sure = sum(int((item.scores >= SURE).sum()) for item in items if item.scores is not None)
        said += f", {sure or 'none'} of them right with {100 * SURE:.0f} % or more"
    else:
        said += "; how probably they are right is not known for this model"
    below = "" if listed == len(items) else f" Below are the {listed} most doubtful photos."
    return f"{said}.{below} Open one to correct it."


def _on_save(session: Parts) -> Any:
    """A file with every photo that has a part, clicked, corrected or found."""
    known = set(session.names)
    photos = [photo for photo in session.photos if photo.parts().keys() & known]
    if not photos:
        gr.Warning("there is nothing to save yet: click the parts in a photo first")
        return gr.DownloadButton(value=None)
    labels: KeypointSet = session.labelled(photos, found=True)
    path = Path(tempfile.mkdtemp(prefix="surefeat-"), "labels.json")
    write_coco(path, labels)
    return gr.DownloadButton(value=str(path))

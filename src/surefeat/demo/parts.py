"""The page's tab for parts: add photos, click the parts in a few, fit, correct what was found."""

from __future__ import annotations

import html
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from surefeat.core.image import ImageError
from surefeat.data.keypoints import Labelled, write_coco
from surefeat.demo.board import how_sure, sheet_value
from surefeat.demo.desk import LISTED, QUIET, Desk, build_desk, show
from surefeat.demo.labels import Parts
from surefeat.keypoints.detector import KeypointDetector
from surefeat.model.network import DenseFeatures

_HELP = (
    "1. Name the parts, and add photos of one kind of object. Labels you saved before can be "
    "loaded.\n"
    "2. Click the parts in five to ten photos. Skip a part that cannot be seen: choose the next.\n"
    "3. Fit. What was found in the other photos is below: click a photo there, drag a part that "
    "is wrong to where it belongs, and fit again."
)

_BUSY = "Learning: about half a minute without a GPU …"

_FILES = ("labels (COCO json)", "found (COCO json)", "detector (zip)")


def parts_tab(model: DenseFeatures) -> None:
    """Build the tab."""
    gr.Markdown(_HELP)
    desk = build_desk(Parts(desk="part"), example="left wheel, right wheel, roof")
    with desk.actions:
        fit = gr.Button("fit", variant="primary", elem_id="part_fit")
        told = gr.Markdown(elem_id="part_told")
        files = [gr.DownloadButton(word, visible=False, size="sm") for word in _FILES]
    _fit_button(model, fit, desk, [told, *files])


def _fit_button(model: DenseFeatures, fit: gr.Button, desk: Desk, outputs: list[Any]) -> None:
    """What happens on `fit`, and the sheet below that shows it; it waits until it is done."""
    begun = fit.click(
        lambda: [gr.Button(interactive=False), _BUSY], None, [fit, outputs[0]], **QUIET
    )
    everything = [*desk.shown, *outputs, desk.sheet]
    done = begun.then(partial(_on_fit, model), desk.session, everything, **QUIET)
    done.then(lambda: gr.Button(interactive=True), None, fit, **QUIET)


def _on_fit(model: DenseFeatures, session: Parts) -> list[Any]:
    """Session, picture, choice, line; what is told, three files, sheet."""
    known = set(session.names)
    clicked = [bool(photo.marks.places.keys() & known) for photo in session.photos]
    others = [number for number, labelled in enumerate(clicked) if not labelled]
    nothing = [gr.skip()] * 4
    if not any(clicked):
        gr.Warning("click the parts in at least one photo first")
        return [*nothing, "", *nothing]
    labelled = session.labelled([p for p, own in zip(session.photos, clicked, strict=True) if own])
    rest = session.labelled([session.photos[number] for number in others])
    try:
        detector = KeypointDetector.fit(model, labelled, calibrate=False)  # clicks should not wait
        objects = detector.label(rest)
    except ImageError as error:  # the server forgets photos after a while
        gr.Warning(html.escape(str(error)))
        return [*nothing, "", *nothing]
    session = session.forgotten().with_found(others, objects.objects)
    notes = [doubt(item, session.names) for item in objects.objects]
    folder = Path(tempfile.mkdtemp(prefix="surefeat-"))
    write_coco(folder / "labels.json", labelled)
    write_coco(folder / "found.json", objects)
    detector.save(folder / "detector")
    packed = shutil.make_archive(str(folder / "detector"), "zip", folder, "detector")
    files = (str(folder / "labels.json"), str(folder / "found.json"), packed)
    buttons = [gr.DownloadButton(value=file, visible=True) for file in files]
    buttons[1] = gr.DownloadButton(value=files[1], visible=bool(others))
    told = _told(len(labelled.objects), len(others))
    return [*show(session), told, *buttons, sheet_value(session, others[:LISTED], notes[:LISTED])]


def _told(learned: int, others: int) -> str:
    """What a fit has come to, and what to do next."""
    words = ["1 photo" if count == 1 else f"{count} photos" for count in (learned, others)]
    if not others:
        return f"Learned from {words[0]}; add others to try it on."
    return (
        f"Learned from {words[0]}; the parts found in {words[1]} are below. Click one to correct "
        "it, then fit again.\n\nThe detector works without this page. Unzip it and type "
        "`surefeat keypoints predict photos/ --detector detector`"
    )


def doubt(item: Labelled, names: Sequence[str], *, probable: bool = False) -> str:
    """The line below a photo: the part that is least sure, or those that were not found."""
    assert item.scores is not None
    seen = item.visible.tolist()
    absent = [name for name, here in zip(names, seen, strict=True) if not here]
    if absent:
        return f"not found: {', '.join(absent)}"
    least = int(item.scores.argmin())
    sure = how_sure(float(item.scores[least]), probable=probable)
    return f"least sure: {least + 1} {names[least]}, {sure}"

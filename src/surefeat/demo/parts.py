"""The page's tab for parts: add photos, click the parts in a few, fit, correct what was found."""

from __future__ import annotations

import html
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from surefeat.core.image import ImageError
from surefeat.data.keypoints import Labelled, write_coco
from surefeat.demo.desk import QUIET, Desk, build_desk, on_listed, show, shown_picture
from surefeat.demo.labels import PartPhoto, Parts
from surefeat.demo.pictures import with_discs
from surefeat.keypoints.detector import KeypointDetector
from surefeat.model.network import DenseFeatures

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the web page needs gradio: pip install 'surefeat[demo]'") from error

_HELP = (
    "1. Name the parts, and add photos of one kind of object. Labels you saved before can be "
    "loaded.\n"
    "2. Click the parts in five to ten photos. Skip a part that cannot be seen: choose the next.\n"
    "3. Fit. What was found in the other photos is below: click a photo there, drag a part that "
    "is wrong to where it belongs, and fit again."
)

_BUSY = "Learning: about half a minute without a GPU …"

# Pixels below a found photo, where the page puts its caption.
_MARGIN = 80

_FILES = ("labels (COCO json)", "found (COCO json)", "detector (zip)")


def parts_tab(model: DenseFeatures) -> None:
    """Build the tab."""
    gr.Markdown(_HELP)
    desk = build_desk("part", start=Parts(), example="left wheel, right wheel, roof")
    with desk.actions:
        fit = gr.Button("fit", variant="primary", elem_id="part_fit")
        told = gr.Markdown(elem_id="part_told")
        files = [gr.DownloadButton(word, visible=False, size="sm") for word in _FILES]
    _fit_button(model, fit, desk, [told, *files])


def _fit_button(model: DenseFeatures, fit: gr.Button, desk: Desk, outputs: list[Any]) -> None:
    """What happens on `fit`, and the gallery below that shows it; it waits until it is done."""
    found = found_gallery("part_found", desk)
    begun = fit.click(
        lambda: [gr.Button(interactive=False), _BUSY], None, [fit, outputs[0]], **QUIET
    )
    everything = [*desk.shown, *outputs, found]
    done = begun.then(partial(_on_fit, model), desk.session, everything, **QUIET)
    done.then(lambda: gr.Button(interactive=True), None, fit, **QUIET)


def found_gallery(name: str, desk: Desk) -> gr.Gallery:
    """Photos with what was found in them; a click on one opens it above."""
    gallery = gr.Gallery(
        show_label=False, columns=3, object_fit="contain", elem_id=name, format="jpeg",
        buttons=[], visible=False, allow_preview=False,
    )  # fmt: skip
    gallery.select(on_listed, desk.session, desk.shown, **QUIET)
    return gallery


def _on_fit(model: DenseFeatures, session: Parts) -> list[Any]:
    """Session, picture, choice, line; what is told, three files, gallery."""
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
    both = zip(others, objects.objects, strict=True)
    pictures = [found_picture(session.photos[n], item, session.names) for n, item in both]
    folder = Path(tempfile.mkdtemp(prefix="surefeat-"))
    write_coco(folder / "labels.json", labelled)
    write_coco(folder / "found.json", objects)
    detector.save(folder / "detector")
    packed = shutil.make_archive(str(folder / "detector"), "zip", folder, "detector")
    files = (str(folder / "labels.json"), str(folder / "found.json"), packed)
    buttons = [gr.DownloadButton(value=file, visible=True) for file in files]
    buttons[1] = gr.DownloadButton(value=files[1], visible=bool(others))
    told = _told(len(labelled.objects), len(others))
    return [*show(session), told, *buttons, gr.Gallery(value=pictures, visible=bool(others))]


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


def found_picture(
    photo: PartPhoto, item: Labelled, names: Sequence[str]
) -> tuple[Image.Image, str]:
    """A photo with what was found, above an empty strip for its caption, and that."""
    assert item.scores is not None
    seen = item.visible.nonzero()[:, 0].tolist()
    pixels = torch.from_numpy(np.array(shown_picture(photo))).permute(2, 0, 1)
    marked = with_discs(pixels, photo.frame.to_network(item.points[seen]), seen)
    picture = Image.new("RGB", (marked.width, marked.height + _MARGIN), "white")
    picture.paste(marked)
    absent = [names[k] for k in range(len(names)) if k not in seen]
    if absent:
        return picture, f"not seen: {', '.join(absent)}"
    least = int(item.scores.argmin())
    return picture, f"least sure: {least + 1} {names[least]} {float(item.scores[least]):.2f}"

"""The page's tab for parts: add photos, click the parts in a few, fit, correct what was found.

Convention: clicks arrive in shown pixels; places are kept in the photos' own pixels (labels.py).
"""

from __future__ import annotations

import html
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from surefeat.core.image import ImageError
from surefeat.data.decode import SourceError
from surefeat.data.keypoints import Labelled, write_coco
from surefeat.demo.labels import Marks, PartPhoto, Parts, Point, read_labels, with_labels
from surefeat.demo.pictures import KEPT, SHOWN, read_upload, to_pil, with_discs
from surefeat.keypoints.detector import KeypointDetector
from surefeat.model.network import DenseFeatures
from surefeat.show.style import picture

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the web page needs gradio: pip install 'surefeat[demo]'") from error

_HELP = (
    "1. Name the parts, and add photos of one kind of object. Labels you saved before can be "
    "loaded.\n"
    "2. Click the parts in five to ten photos. Skip a part that cannot be seen: choose the next.\n"
    "3. Fit. What was found in the other photos is below: click a photo there, click a part that "
    "is wrong, click where it belongs, and fit again."
)

_BUSY = "Learning: about half a minute without a GPU …"

_QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}

# Pixels below a found photo, where the page puts its caption.
_MARGIN = 80

BOX = "\x00box"
"""Of the choice of what is clicked next; no part can be called so."""

_REACH = SHOWN / 30
"""How far from a part's disc a click may be to take it up, shown pixels."""

_FILES = ("labels (COCO json)", "found (COCO json)", "detector (zip)")


def parts_tab(model: DenseFeatures) -> None:
    """Build the tab."""
    session = gr.State(Parts(), time_to_live=KEPT)
    gr.Markdown(_HELP)
    with gr.Row():
        with gr.Column(scale=1):
            names = gr.Textbox(
                label="parts, separated by commas", placeholder="left wheel, right wheel, roof",
                elem_id="part_names",
            )  # fmt: skip
            kinds: dict[str, Any] = {"file_count": "multiple", "file_types": ["image"]}
            with gr.Row():
                add = gr.UploadButton("add photos", elem_id="part_files", **kinds)
                load = gr.UploadButton(
                    "load labels", elem_id="part_labels", file_count="single", file_types=[".json"]
                )
            part = gr.Radio([], label="the next click is", elem_id="part")
            fit = gr.Button("fit", variant="primary", elem_id="part_fit")
            told = gr.Markdown(elem_id="part_told")
            files = [gr.DownloadButton(word, visible=False) for word in _FILES]
        with gr.Column(scale=2):
            image = gr.Image(
                show_label=False, interactive=False, format="png", elem_id="part_photo",
                height=440, buttons=[],
            )  # fmt: skip
            said = gr.Markdown(elem_id="part_said")
            buttons = _buttons()
    shown = [session, image, part, said]
    names.change(_on_names, [names, session], shown, **_QUIET)
    add.upload(_on_files, [add, session], shown, **_QUIET)
    load.upload(_on_labels, [load, session], [names, *shown], **_QUIET)
    for button, change in buttons:
        # Every press counts, also one that comes before the last is answered.
        every = {"trigger_mode": "multiple", **_QUIET}
        button.click(partial(_on_button, change), session, shown, **every)
    image.select(_on_click, [session, part], shown, **_QUIET)
    _fit_button(model, fit, shown, [told, *files])


def _buttons() -> list[tuple[gr.Button, Any]]:
    """Below the photo, each with what it makes of a session."""
    changes = {
        "previous photo": partial(_moved, -1),
        "next photo": partial(_moved, 1),
        "undo": Parts.undone,
        "accept what was found": Parts.accepted,
        "clear its clicks": lambda session: session.marked(Marks()),
    }
    with gr.Row():
        return [(gr.Button(word, size="sm", min_width=110), c) for word, c in changes.items()]


def _fit_button(model: DenseFeatures, fit: gr.Button, shown: list[Any], outputs: list[Any]) -> None:
    """What happens on `fit`, and the gallery below that shows it; it waits until it is done."""
    gallery = gr.Gallery(
        show_label=False, columns=3, object_fit="contain", elem_id="part_found", format="png",
        buttons=[], visible=False, allow_preview=False,
    )  # fmt: skip
    begun = fit.click(
        lambda: [gr.Button(interactive=False), _BUSY], None, [fit, outputs[0]], **_QUIET
    )
    done = begun.then(partial(_on_fit, model), shown[0], [*shown, *outputs, gallery], **_QUIET)
    done.then(lambda: gr.Button(interactive=True), None, fit, **_QUIET)
    gallery.select(_on_listed, shown[0], shown, **_QUIET)


def _on_names(text: str, session: Parts) -> list[Any]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    return _shown(replace(session, names=names))


def _on_files(files: list[str], session: Parts) -> list[Any]:
    added: dict[str, PartPhoto] = {}
    for file in files:
        name = Path(file).name
        if name in added or name in (photo.name for photo in session.photos):
            gr.Warning(f"{html.escape(name)} is here already; rename it if it is another photo")
            continue
        try:
            pixels = read_upload(file, name=name)
            added[name] = PartPhoto(name, file, *picture(pixels, longest=SHOWN, enlarged=True))
        except ImageError as error:
            gr.Warning(html.escape(str(error)))  # gradio shows it as HTML
    return _shown(session.with_photos(list(added.values())))


def _on_labels(file: str, session: Parts) -> list[Any]:
    name = Path(file).name
    try:
        session = with_labels(session, *read_labels(file, name=name))
    except (SourceError, ValueError, OSError) as error:
        # The reader names the file by its place on the server, which is nobody's business.
        gr.Warning(html.escape(str(error).replace(str(file), name)))
    if session.waiting:
        gr.Info(f"labels of {len(session.waiting)} photos wait until these are added")
    return [", ".join(session.names), *_shown(session)]


def _moved(step: int, session: Parts) -> Parts:
    at = (session.at + step) % max(1, len(session.photos))
    return replace(session, at=at, corner=None)


def _on_button(change: Any, session: Parts) -> list[Any]:
    return _shown(change(session) if session.photos else session)


def _on_listed(session: Parts, event: gr.SelectData) -> list[Any]:
    """A photo of the gallery is shown above, where what was found can be corrected."""
    return _shown(replace(session, at=session.listed[event.index], corner=None))


def _on_click(session: Parts, part: str | None, event: gr.SelectData) -> list[Any]:
    if not session.photos:
        gr.Warning("add a photo first")
        return _shown(session)
    photo = session.photos[session.at]
    (x, y), (height, width) = event.index, photo.frame.network
    clicked = torch.tensor([float(min(x, width - 1)), float(min(y, height - 1))])
    place = photo.frame.to_original(clicked).tolist()
    point: Point = (place[0], place[1])
    if part == BOX:
        session = session.with_corner(point)
        return _shown(session, part=BOX if session.corner else None)
    if part in session.names:
        return _shown(session.with_part(part, point))
    # Nothing is chosen: a click on a part takes it up, the next one puts it down.
    scale = photo.frame.original[1] / width
    taken = session.nearest(point, within=_REACH * scale)
    if taken is None:
        gr.Warning(
            "all parts have their place: click or choose one to move it, or go to the next photo"
            if session.names
            else "name the parts first, separated by commas"
        )
    return _shown(session, part=taken)


def _shown(session: Parts, *, part: str | None = None) -> list[Any]:
    """Everything the tab shows of a session; the next click places the first missing part."""
    missing = session.missing()
    placed = session.photos[session.at].marks.places if session.photos else {}
    choices = [
        (f"{number} {name}{' ✓' if name in placed else '' if name in missing else ' ?'}", name)
        for number, name in enumerate(session.names, 1)
    ]
    choices += [("a corner of the box", BOX)] if session.photos else []
    chosen = part or (missing[0] if missing else None)
    radio = gr.Radio(choices=choices, value=chosen)
    if not session.photos:
        return [session, None, radio, ""]
    photo, count = session.photos[session.at], sum(bool(p.marks.places) for p in session.photos)
    where = f"photo {session.at + 1} of {len(session.photos)}, {html.escape(photo.name)}"
    said = f"{where} · photos with clicks: {count}"
    if photo.found.keys() - placed.keys():
        said += " · pale discs were found, not clicked"
    if session.corner:
        said += " · now click the opposite corner"
    elif part in session.names:
        said += f" · now click where {html.escape(str(part))} belongs"
    return [session, _marked_picture(photo, session), radio, said]


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
    session = session.with_found(others, objects.objects)
    both = zip(others, objects.objects, strict=True)
    pictures = [_found_picture(session.photos[n], item, session.names) for n, item in both]
    folder = Path(tempfile.mkdtemp(prefix="surefeat-"))
    write_coco(folder / "labels.json", labelled)
    write_coco(folder / "found.json", objects)
    detector.save(folder / "detector")
    packed = shutil.make_archive(str(folder / "detector"), "zip", folder, "detector")
    files = (str(folder / "labels.json"), str(folder / "found.json"), packed)
    buttons = [gr.DownloadButton(value=file, visible=True) for file in files]
    buttons[1] = gr.DownloadButton(value=files[1], visible=bool(others))
    told = _told(len(labelled.objects), len(others))
    return [*_shown(session), told, *buttons, gr.Gallery(value=pictures, visible=bool(others))]


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


def _marked_picture(photo: PartPhoto, session: Parts) -> Image.Image:
    """A photo with its box, the parts clicked in it and, pale, those found."""
    names = session.names
    layers = []
    found = {name: place for name, place in photo.found.items() if name not in photo.marks.places}
    for parts in (found, photo.marks.places):
        places = {name: place for name, place in parts.items() if name in names}
        points = photo.frame.to_network(torch.tensor(list(places.values())).reshape(-1, 2))
        layers.append((points, [names.index(name) for name in places]))
    pale = Image.blend(to_pil(photo.pixels), with_discs(photo.pixels, *layers[0]), 0.55)
    marked = with_discs(torch.from_numpy(np.array(pale)).permute(2, 0, 1), *layers[1])
    if photo.marks.box or session.corner:
        _draw_box(marked, photo, session.corner)
    return marked


def _draw_box(marked: Image.Image, photo: PartPhoto, corner: Point | None) -> None:
    pen = ImageDraw.Draw(marked)
    if photo.marks.box is not None:
        box = photo.frame.boxes_to_network(torch.tensor([photo.marks.box]))[0].tolist()
        for width, colour in ((5, "white"), (2, "#1f2933")):
            pen.rectangle(box, outline=colour, width=width)
    if corner is not None:
        x, y = photo.frame.to_network(torch.tensor(corner)).tolist()
        pen.line([x - 12, y, x + 12, y], fill="white", width=4)
        pen.line([x, y - 12, x, y + 12], fill="white", width=4)


def _found_picture(
    photo: PartPhoto, item: Labelled, names: Sequence[str]
) -> tuple[Image.Image, str]:
    """A photo with what was found, above an empty strip for its caption, and that."""
    assert item.scores is not None
    seen = item.visible.nonzero()[:, 0].tolist()
    marked = with_discs(photo.pixels, photo.frame.to_network(item.points[seen]), seen)
    picture = Image.new("RGB", (marked.width, marked.height + _MARGIN), "white")
    picture.paste(marked)
    absent = [names[k] for k in range(len(names)) if k not in seen]
    if absent:
        return picture, f"not seen: {', '.join(absent)}"
    least = int(item.scores.argmin())
    return picture, f"least sure: {least + 1} {names[least]} {float(item.scores[least]):.2f}"

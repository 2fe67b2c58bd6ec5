"""The page's tab for parts: add photos, click the parts in a few, fit, see them in the others.

Convention: clicks arrive in shown pixels; places are kept in the photos' own pixels. Each photo is
one object, seen whole.
"""

from __future__ import annotations

import html
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.core.image import ImageError
from surefeat.data.coco import make_category
from surefeat.data.decode import Place
from surefeat.data.keypoints import KeypointSet, Labelled, write_coco
from surefeat.demo.pictures import KEPT, SHOWN, read_upload, with_discs
from surefeat.keypoints.detector import KeypointDetector
from surefeat.model.network import DenseFeatures
from surefeat.show.style import picture

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the web page needs gradio: pip install 'surefeat[demo]'") from error

_HELP = (
    "1. Name the parts, and add photos of one kind of object.\n"
    "2. Click the parts in five to ten of them. Skip a part that cannot be seen: choose the next.\n"
    "3. Fit. The photos without clicks show what was found."
)

_BUSY = "Learning: about half a minute without a GPU …"

_QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}

# Pixels below a found photo, where the page puts its caption.
_MARGIN = 80


@dataclass(frozen=True, eq=False)
class PartPhoto:
    """A photo and the parts clicked in it."""

    name: str
    path: str
    pixels: Tensor
    """(3, h, w) uint8, as shown."""
    frame: Frame
    """From the photo's own pixels (original) to those shown (network)."""
    places: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Clicked parts, original pixels."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What one visitor has on the tab; never shared with another."""

    names: tuple[str, ...] = ()
    photos: tuple[PartPhoto, ...] = ()
    at: int = 0
    """The photo that is shown."""

    def missing(self) -> list[str]:
        """Parts that have no place yet in the photo that is shown."""
        placed = self.photos[self.at].places if self.photos else {}
        return [name for name in self.names if name not in placed]

    def labelled(self, photos: list[PartPhoto]) -> KeypointSet:
        """Photos as objects with keypoints: those that were clicked are visible."""
        objects = []
        for photo in photos:
            unknown = (torch.nan, torch.nan)
            points = torch.tensor([photo.places.get(name, unknown) for name in self.names])
            height, width = photo.frame.original
            box = torch.tensor([0.0, 0.0, width - 1, height - 1])
            seen = points.isfinite().all(-1)
            place = Place(photo.path)
            objects.append(Labelled(place, photo.name, 0, box, points, seen, (height, width)))
        return KeypointSet((make_category("object", self.names),), tuple(objects))

    def with_places(self, places: dict[str, tuple[float, float]]) -> Parts:
        """The same with other clicks in the photo that is shown."""
        photos = list(self.photos)
        if photos:
            photos[self.at] = replace(photos[self.at], places=places)
        return replace(self, photos=tuple(photos))


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
            add = gr.UploadButton("add photos", elem_id="part_files", **kinds)
            part = gr.Radio([], label="the next click is", elem_id="part")
            fit = gr.Button("fit", variant="primary", elem_id="part_fit")
            told = gr.Markdown(elem_id="part_told")
            words = ("labels (COCO json)", "found (COCO json)")
            files = [gr.DownloadButton(word, visible=False) for word in words]
        with gr.Column(scale=2):
            image = gr.Image(
                show_label=False, interactive=False, format="png", elem_id="part_photo",
                height=440, buttons=[],
            )  # fmt: skip
            said = gr.Markdown(elem_id="part_said")
            with gr.Row():
                moves = [gr.Button(f"{word} photo", size="sm") for word in ("previous", "next")]
                wipe = gr.Button("clear its clicks", size="sm")
    shown = [session, image, part, said]
    names.change(_on_names, [names, session], shown, **_QUIET)
    add.upload(_on_files, [add, session], shown, **_QUIET)
    for button, step in zip(moves, (-1, 1), strict=True):
        button.click(partial(_on_move, step), session, shown, **_QUIET)
    wipe.click(lambda session: _shown(session.with_places({})), session, shown, **_QUIET)
    image.select(_on_click, [session, part], shown, **_QUIET)
    _fit_button(model, fit, session, [told, *files])


def _fit_button(
    model: DenseFeatures, fit: gr.Button, session: gr.State, outputs: list[Any]
) -> None:
    """What happens on `fit`, and the gallery below that shows it; it waits until it is done."""
    gallery = gr.Gallery(
        show_label=False, columns=3, object_fit="contain", elem_id="part_found", format="png",
        buttons=["fullscreen", "download"], visible=False,
    )  # fmt: skip
    begun = fit.click(
        lambda: [gr.Button(interactive=False), _BUSY], None, [fit, outputs[0]], **_QUIET
    )
    done = begun.then(partial(_on_fit, model), session, [*outputs, gallery], **_QUIET)
    done.then(lambda: gr.Button(interactive=True), None, fit, **_QUIET)


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
    first = len(session.photos) if added else session.at
    return _shown(replace(session, photos=(*session.photos, *added.values()), at=first))


def _on_move(step: int, session: Parts) -> list[Any]:
    return _shown(replace(session, at=(session.at + step) % max(1, len(session.photos))))


def _on_click(session: Parts, part: str | None, event: gr.SelectData) -> list[Any]:
    if part is None or part not in session.names:
        gr.Warning(
            "all parts have their place: choose one to move it, or go to the next photo"
            if session.names
            else "name the parts first, separated by commas"
        )
        return _shown(session)
    photo = session.photos[session.at]
    (x, y), (height, width) = event.index, photo.frame.network
    clicked = torch.tensor([float(min(x, width - 1)), float(min(y, height - 1))])
    place = photo.frame.to_original(clicked).tolist()
    return _shown(session.with_places(photo.places | {part: (place[0], place[1])}))


def _shown(session: Parts) -> list[Any]:
    """Everything the tab shows of a session; the next click places the first missing part."""
    missing = session.missing()
    choices = [
        (f"{number} {name}{'' if name in missing else ' ✓'}", name)
        for number, name in enumerate(session.names, 1)
    ]
    part = gr.Radio(choices=choices, value=missing[0] if missing else None)
    if not session.photos:
        return [session, None, part, ""]
    photo, count = session.photos[session.at], sum(bool(p.places) for p in session.photos)
    where = f"photo {session.at + 1} of {len(session.photos)}, {html.escape(photo.name)}"
    said = f"{where} · photos with clicks: {count}"
    return [session, _clicked_picture(photo, session.names), part, said]


def _on_fit(model: DenseFeatures, session: Parts) -> list[Any]:
    clicked = [photo for photo in session.photos if photo.places.keys() & set(session.names)]
    others = [photo for photo in session.photos if photo not in clicked]
    if not clicked:
        gr.Warning("click the parts in at least one photo first")
        return ["", gr.skip(), gr.skip(), gr.skip()]
    labelled = session.labelled(clicked)
    try:
        detector = KeypointDetector.fit(model, labelled, calibrate=False)  # clicks should not wait
        objects = detector.label(session.labelled(others))
    except ImageError as error:  # the server forgets photos after a while
        gr.Warning(html.escape(str(error)))
        return ["", gr.skip(), gr.skip(), gr.skip()]
    both = zip(others, objects.objects, strict=True)
    pictures = [_found_picture(photo, item, session.names) for photo, item in both]
    folder = Path(tempfile.mkdtemp(prefix="surefeat-"))
    write_coco(folder / "labels.json", labelled)
    write_coco(folder / "found.json", objects)
    rest = f"the parts found in {_count(others)} are below" if others else "add others to try it on"
    return [
        f"Learned from {_count(clicked)}; {rest}.",
        gr.DownloadButton(value=str(folder / "labels.json"), visible=True),
        gr.DownloadButton(value=str(folder / "found.json"), visible=bool(others)),
        gr.Gallery(value=pictures, visible=bool(others)),
    ]


def _count(photos: list[PartPhoto]) -> str:
    return "1 photo" if len(photos) == 1 else f"{len(photos)} photos"


def _clicked_picture(photo: PartPhoto, names: Sequence[str]) -> Image.Image:
    """A photo with the parts clicked in it."""
    places = {name: place for name, place in photo.places.items() if name in names}
    points = photo.frame.to_network(torch.tensor(list(places.values())).reshape(-1, 2))
    return with_discs(photo.pixels, points, [names.index(name) for name in places])


def _found_picture(
    photo: PartPhoto, item: Labelled, names: Sequence[str]
) -> tuple[Image.Image, str]:
    """A photo with what was found, above an empty strip for its caption, and that."""
    assert item.scores is not None
    points = photo.frame.to_network(item.points)
    marked = with_discs(photo.pixels, points, range(len(points)))
    picture = Image.new("RGB", (marked.width, marked.height + _MARGIN), "white")
    picture.paste(marked)
    least = int(item.scores.argmin())
    return picture, f"least sure: {least + 1} {names[least]} {float(item.scores[least]):.2f}"

"""The page's tab for parts: add photos, click the parts in a few, fit, see them in the others.

Convention: the page shows photos with a longest side of 800 pixels; places are kept in the photos'
own pixels. Each photo is one object, seen whole.
"""

from __future__ import annotations

import html
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from surefeat.data.keypoints import KeypointSet, Labelled, make_category, write_coco
from surefeat.data.sources import Place
from surefeat.demo_pictures import SHOWN, disc, to_pil
from surefeat.geometry import Frame
from surefeat.image import ImageError, decode, read_bytes, resize
from surefeat.keypoints import KeypointDetector
from surefeat.model import DenseFeatures
from surefeat.viz_style import PALETTE

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the web page needs gradio: pip install 'surefeat[demo]'") from error

_HELP = (
    "Name the parts, add photos of one kind of object, click the parts in some of them (five to "
    "ten are a good start), and fit: the photos without clicks show what was found."
)


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


def parts_tab(model: DenseFeatures, *, max_pixels: int, kept: int) -> None:
    """Build the tab; photos of more than `max_pixels` are refused, and forgotten after `kept` s."""
    session = gr.State(Parts(), time_to_live=kept)
    gr.Markdown(_HELP)
    look: dict[str, Any] = {"show_label": False, "interactive": False, "format": "png"}
    with gr.Row():
        with gr.Column(scale=1):
            names = gr.Textbox(label="parts, separated by commas", elem_id="part_names")
            add = gr.UploadButton(
                "add photos", file_count="multiple", file_types=["image"], elem_id="part_files"
            )
            part = gr.Radio([], label="the next click is", elem_id="part")
            with gr.Row():
                back, on = gr.Button("previous", size="sm"), gr.Button("next", size="sm")
                wipe = gr.Button("clear clicks", size="sm")
            fit = gr.Button("fit", variant="primary", elem_id="part_fit")
            said = gr.Markdown(elem_id="part_said")
            labels = gr.DownloadButton("labels (COCO json)", visible=False)
        with gr.Column(scale=2):
            image = gr.Image(elem_id="part_photo", height=440, **look)
    found = gr.Gallery(label="found", columns=4, elem_id="part_found", format="png")
    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
    shown = [session, image, part, said]
    names.change(_on_names, [names, session], shown, **quiet)
    add.upload(partial(_on_files, max_pixels), [add, session], shown, **quiet)
    back.click(partial(_on_move, -1), [session, part], shown, **quiet)
    on.click(partial(_on_move, 1), [session, part], shown, **quiet)
    wipe.click(_on_wipe, session, shown, **quiet)

    # Not a partial: gradio passes the event by the type it finds in the signature.
    def on_click(session: Parts, part: str | None, event: gr.SelectData) -> list[Any]:
        return _on_click(session, part, event.index)

    image.select(on_click, [session, part], shown, **quiet)
    fit.click(partial(_on_fit, model), session, [said, labels, found], **quiet)


def _on_names(text: str, session: Parts) -> list[Any]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    return _shown(replace(session, names=names), names[0] if names else None)


def _on_files(max_pixels: int, files: list[str], session: Parts) -> list[Any]:
    added = []
    for file in files:
        name = Path(file).name
        try:
            pixels = decode(read_bytes(file, name=name), name=name, max_pixels=max_pixels)
        except ImageError as error:
            gr.Warning(html.escape(str(error)))  # gradio shows it as HTML
            continue
        original = (pixels.shape[1], pixels.shape[2])
        height, width = (max(1, round(side * SHOWN / max(original))) for side in original)
        frame = Frame(original, (height, width))
        added.append(PartPhoto(name, file, resize(pixels, size=frame.network), frame))
    first = len(session.photos) if added else session.at
    session = replace(session, photos=(*session.photos, *added), at=first)
    return _shown(session, session.names[0] if session.names else None)


def _on_move(step: int, session: Parts, part: str | None) -> list[Any]:
    at = (session.at + step) % max(1, len(session.photos))
    return _shown(replace(session, at=at), session.names[0] if session.names else part)


def _on_wipe(session: Parts) -> list[Any]:
    return _shown(_with_places(session, {}), session.names[0] if session.names else None)


def _on_click(session: Parts, part: str | None, clicked: tuple[int, int]) -> list[Any]:
    if part is None or part not in session.names:
        gr.Warning("name the parts first, separated by commas")
        return _shown(session, None)
    photo = session.photos[session.at]
    (x, y), (height, width) = clicked, photo.frame.network
    shown = torch.tensor([float(min(x, width - 1)), float(min(y, height - 1))])
    place = photo.frame.to_original(shown).tolist()
    session = _with_places(session, photo.places | {part: (place[0], place[1])})
    following = (session.names.index(part) + 1) % len(session.names)
    return _shown(session, session.names[following])


def _with_places(session: Parts, places: dict[str, tuple[float, float]]) -> Parts:
    photos = list(session.photos)
    if photos:
        photos[session.at] = replace(photos[session.at], places=places)
    return replace(session, photos=tuple(photos))


def _shown(session: Parts, part: str | None) -> list[Any]:
    """Everything the tab shows of a session, and the part that the next click places."""
    choices = gr.Radio(choices=list(session.names), value=part)
    if not session.photos:
        return [session, None, choices, ""]
    photo, count = session.photos[session.at], sum(bool(p.places) for p in session.photos)
    places = {name: place for name, place in photo.places.items() if name in session.names}
    numbers = [session.names.index(name) for name in places]
    points = photo.frame.to_network(torch.tensor(list(places.values())).reshape(-1, 2))
    where = f"photo {session.at + 1} of {len(session.photos)}, {html.escape(photo.name)}"
    said = f"{where}; {count} photos have clicks"
    return [session, _marked(photo, numbers, points), choices, said]


def _marked(photo: PartPhoto, numbers: list[int], points: Tensor) -> Image.Image:
    """The photo with a numbered disc per part; points (N, 2) in shown pixels."""
    picture = to_pil(photo.pixels)
    for number, (x, y) in zip(numbers, points.tolist(), strict=True):
        mark = disc(SHOWN / 50, PALETTE[number % len(PALETTE)], str(number + 1))
        picture.paste(mark, (round(x - mark.width / 2), round(y - mark.height / 2)), mark)
    return picture


def _on_fit(model: DenseFeatures, session: Parts) -> list[Any]:
    clicked = [photo for photo in session.photos if photo.places.keys() & set(session.names)]
    others = [photo for photo in session.photos if photo not in clicked]
    if not clicked:
        gr.Warning("click the parts in at least one photo first")
        return [gr.skip(), gr.skip(), gr.skip()]
    labelled = session.labelled(clicked)
    detector = KeypointDetector.fit(model, labelled)
    found = detector.label(session.labelled(others)).objects if others else ()
    pictures = []
    for photo, item in zip(others, found, strict=True):
        assert item.scores is not None
        points = photo.frame.to_network(item.points)
        names = zip(session.names, item.scores.tolist(), strict=True)
        caption = ", ".join(f"{n} {name} {score:.2f}" for n, (name, score) in enumerate(names, 1))
        pictures.append((_marked(photo, list(range(len(points))), points), caption))
    record = Path(tempfile.mkdtemp(prefix="surefeat-")) / "labels.json"
    write_coco(record, labelled)
    said = f"learned from {len(clicked)} photos, looked at {len(others)} others"
    return [said, gr.DownloadButton(value=str(record), visible=True), pictures]

"""The page's tab for parts: add photos, click the parts in a few, fit, see them in the others.

`surefeat demo`: a page on this machine to match two photos by hand; needs no network.

Convention: the page shows photos with a longest side of 800 pixels and works in those; what it
says in words is in original pixels. Every tab is a function that `build_page` calls.
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefeat.core.image import ImageError, decode, read_bytes
from surefeat.data.drawn import draw
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.keypoints import write_coco
from surefeat.demo.parts import PartPhoto, Parts, clicked_picture, found_picture, read_photo
from surefeat.demo.pictures import (
    Candidates,
    Photo,
    candidates,
    confidence_maps,
    marked,
    prepare_photo,
    to_pil,
    warped,
)
from surefeat.keypoints.detector import KeypointDetector
from surefeat.match.dense import match_dense
from surefeat.match.points import Matches, match_points
from surefeat.model.files import model_folder
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Reliability

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the web page needs gradio: pip install 'surefeat[demo]'") from error

_PARTS_HELP = (
    "1. Name the parts, and add photos of one kind of object.\n"
    "2. Click the parts in five to ten of them. Skip a part that cannot be seen: choose the next.\n"
    "3. Fit. The photos without clicks show what was found."
)

_BUSY = "Learning: about half a minute without a GPU …"


def parts_tab(model: DenseFeatures, *, max_pixels: int, kept: int) -> None:
    """Build the tab; photos of more than `max_pixels` are refused, and forgotten after `kept` s."""
    session = gr.State(Parts(), time_to_live=kept)
    gr.Markdown(_PARTS_HELP)
    with gr.Row():
        with gr.Column(scale=1):
            names = gr.Textbox(
                label="parts, separated by commas", placeholder="left wheel, right wheel, roof",
                elem_id="part_names",
            )  # fmt: skip
            add = gr.UploadButton(
                "add photos", file_count="multiple", file_types=["image"], elem_id="part_files"
            )
            part = gr.Radio([], label="the next click is", elem_id="part")
            fit = gr.Button("fit", variant="primary", elem_id="part_fit")
            told = gr.Markdown(elem_id="part_told")
            files = [
                gr.DownloadButton(f"{what} (COCO json)", visible=False)
                for what in ("labels", "found")
            ]
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
    add.upload(partial(_on_files, max_pixels), [add, session], shown, **_QUIET)
    for button, step in zip(moves, (-1, 1), strict=True):
        button.click(partial(_on_move, step), session, shown, **_QUIET)
    wipe.click(lambda session: _shown(session.with_places({})), session, shown, **_QUIET)
    image.select(_on_part_click, [session, part], shown, **_QUIET)
    _fit_button(model, fit, session, [told, *files])


_QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}


def _fit_button(
    model: DenseFeatures, fit: gr.Button, session: gr.State, outputs: list[Any]
) -> None:
    """What happens on `fit`, and the gallery below that shows it; it waits until it is done."""
    found = gr.Gallery(
        show_label=False, columns=3, object_fit="contain", elem_id="part_found", format="png",
        buttons=["fullscreen", "download"], visible=False,
    )  # fmt: skip
    begun = fit.click(
        lambda: [gr.Button(interactive=False), _BUSY], None, [fit, outputs[0]], **_QUIET
    )
    done = begun.then(partial(_on_fit, model), session, [*outputs, found], **_QUIET)
    done.then(lambda: gr.Button(interactive=True), None, fit, **_QUIET)


def _on_names(text: str, session: Parts) -> list[Any]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    return _shown(replace(session, names=names))


def _on_files(max_pixels: int, files: list[str], session: Parts) -> list[Any]:
    added: dict[str, PartPhoto] = {}
    for file in files:
        name = Path(file).name
        if name in added or name in (photo.name for photo in session.photos):
            gr.Warning(f"{html.escape(name)} is here already; rename it if it is another photo")
            continue
        try:
            added[name] = read_photo(file, name=name, max_pixels=max_pixels)
        except ImageError as error:
            gr.Warning(html.escape(str(error)))  # gradio shows it as HTML
    first = len(session.photos) if added else session.at
    return _shown(replace(session, photos=(*session.photos, *added.values()), at=first))


def _on_move(step: int, session: Parts) -> list[Any]:
    return _shown(replace(session, at=(session.at + step) % max(1, len(session.photos))))


def _on_part_click(session: Parts, part: str | None, event: gr.SelectData) -> list[Any]:
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
    return [session, clicked_picture(photo, session.names), part, said]


def _on_fit(model: DenseFeatures, session: Parts) -> list[Any]:
    clicked = [photo for photo in session.photos if photo.places.keys() & set(session.names)]
    others = [photo for photo in session.photos if photo not in clicked]
    if not clicked:
        gr.Warning("click the parts in at least one photo first")
        return ["", gr.skip(), gr.skip(), gr.skip()]
    labelled = session.labelled(clicked)
    try:
        detector = KeypointDetector.fit(model, labelled)
        found = detector.label(session.labelled(others))
    except ImageError as error:  # the server forgets photos after a while
        gr.Warning(html.escape(str(error)))
        return ["", gr.skip(), gr.skip(), gr.skip()]
    both = zip(others, found.objects, strict=True)
    pictures = [found_picture(photo, item, session.names) for photo, item in both]
    folder = Path(tempfile.mkdtemp(prefix="surefeat-"))
    write_coco(folder / "labels.json", labelled)
    write_coco(folder / "found.json", found)
    rest = f"the parts found in {_count(others)} are below" if others else "add others to try it on"
    return [
        f"Learned from {_count(clicked)}; {rest}.",
        gr.DownloadButton(value=str(folder / "labels.json"), visible=True),
        gr.DownloadButton(value=str(folder / "found.json"), visible=bool(others)),
        gr.Gallery(value=pictures, visible=bool(others)),
    ]


def _count(photos: list[PartPhoto]) -> str:
    return "1 photo" if len(photos) == 1 else f"{len(photos)} photos"


MAX_FILE, MAX_PIXELS = "25mb", 80_000_000
"""Larger uploads are refused."""

_KEPT = 3600  # seconds after which a visitor's photos are forgotten, in memory and on disk

_STYLE = (
    ".gradio-container {width: 100%; max-width: 1240px !important; margin: 0 auto !important}"
    "#drawn button {min-width: 76px} #said table {width: auto}"
    "#said :is(td, th) {border-color: var(--border-color-primary) !important; padding: 4px 12px}"
)

_HELP = "Drop two photos of the same kind of object, then click a point in the first."

_DRAWN = f"{_HELP}  \nNo photos at hand? Take a fresh pair of drawn objects:"

_CAPTIONS = ("**A** · click a point", "**B** · its match (1) and the next best places")

_WAYS = ("A onto B", "B onto A")


@dataclass(frozen=True, eq=False)
class Session:
    """What one visitor has on the page; never shared with another."""

    photos: tuple[Photo | None, Photo | None] = (None, None)
    targets: dict[int, Tensor] = field(default_factory=dict)
    """Per way of warping, for every pixel of the one photo its place in the other (h, w, 2)."""
    drawn: int = 0
    """Pairs of drawn objects so far: each button press gives new ones."""

    def pair(self) -> tuple[Photo, Photo] | None:
        """Both photos; while one is missing, None, and the visitor is told."""
        first, second = self.photos
        if first is None or second is None:
            gr.Warning("drop a photo into both A and B first")
            return None
        return first, second


def build_page(model: DenseFeatures, *, reliability: Reliability | None = None) -> gr.Blocks:
    """The page; `launch` serves it. reliability: also say how probably a match is right."""
    page: gr.Blocks
    old = (_KEPT, _KEPT)
    with gr.Blocks(title="surefeat", analytics_enabled=False, delete_cache=old) as page:
        gr.Markdown("## surefeat")
        with gr.Tab("Match"):
            _match_tab(model, reliability)
        with gr.Tab("Parts"):
            parts_tab(model, max_pixels=MAX_PIXELS, kept=_KEPT)
    return page


def launch(
    source: str | Path | None = None,
    *,
    port: int = 7860,
    device: str | None = None,
    open_browser: bool = False,
    block: bool = True,
) -> gr.Blocks:
    """Serve the page on 127.0.0.1 only, with a model: folder or shipped name (default resnet50).

    block: stay until interrupted; otherwise the caller closes the page that is returned.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    model = DenseFeatures.from_pretrained(source, device=device)
    page = build_page(model, reliability=Reliability.load(model_folder(source)))
    # Fonts of the machine: gradio's own themes would ask for others.
    plain, mono = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
    theme = gr.themes.Soft(primary_hue="blue", font=plain, font_mono=mono)
    try:
        page.queue(max_size=32).launch(
            server_name="127.0.0.1", server_port=port, share=False, inbrowser=open_browser,
            max_file_size=MAX_FILE, theme=theme, css=_STYLE, footer_links=[], ssr_mode=False,
            enable_monitoring=False, mcp_server=False, pwa=False, quiet=True, show_error=True,
            prevent_thread_lock=True,
        )  # fmt: skip
    except OSError as error:
        raise OSError(f"port {port} cannot be used ({error}); pass another port") from error
    if block:
        print(f"surefeat demo at {page.local_url} (Ctrl-C ends it)")
        page.block_thread()
    return page


def _match_tab(model: DenseFeatures, reliability: Reliability | None) -> None:
    session = gr.State(Session(), time_to_live=_KEPT)
    gr.Markdown(_DRAWN)
    with gr.Row(elem_id="drawn"):
        buttons = [gr.Button(kind.name, size="sm") for kind in CATEGORIES]
    look: dict[str, Any] = {"show_label": False, "buttons": ["fullscreen"], "format": "png"}
    drop = look | {"sources": ["upload", "clipboard"], "height": 440}
    still = look | {"interactive": False, "height": 300}
    with gr.Row():
        images = _columns(_CAPTIONS, ("photo0", "photo1"), **drop)
    said = gr.Markdown(elem_id="said")
    with gr.Row():
        trust = [f"**Confidence in {name}**: trust the bright places" for name in "AB"]
        maps = _columns(trust, ("confidence0", "confidence1"), **still)
        with gr.Column():
            gr.Markdown("**Dense warp**: one photo takes the other's shape")
            warp = gr.Image(elem_id="warped", **still)
            way = gr.Radio(list(_WAYS), value=_WAYS[0], container=False, type="index")
            amount = gr.Slider(0, 1, 0, step=0.05, label="how far", elem_id="amount")
    shown = [session, *images, *maps, said, warp, amount]
    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
    for side, image in enumerate(images):
        # Unprocessed, so that our own reader and its messages meet the file first.
        raw = {"preprocess": False, **quiet}
        image.upload(partial(_on_photo, model, side), [image, session], shown, **raw)
        image.clear(partial(_on_clear, side), session, shown, **quiet)
    for category, button in enumerate(buttons):
        button.click(partial(_on_drawn, model, category), session, shown, **quiet)

    # Not a partial: gradio passes the event by the type it finds in the signature.
    def on_click(session: Session, event: gr.SelectData) -> tuple[Any, Any, Any]:
        return _on_click(session, event.index, reliability)

    images[0].select(on_click, session, [*images, said], **quiet)
    quiet["trigger_mode"] = "always_last"
    for control in (way, amount):
        control.input(_on_warp, [session, way, amount], [session, warp], **quiet)


def _columns(captions: Sequence[str], names: Sequence[str], **look: Any) -> list[gr.Image]:
    """Pictures side by side, a line of text above each."""
    found = []
    for caption, name in zip(captions, names, strict=True):
        with gr.Column():
            gr.Markdown(caption)
            found.append(gr.Image(elem_id=name, **look))
    return found


def _on_photo(model: DenseFeatures, side: int, file: dict[str, Any], session: Session) -> list[Any]:
    name = Path(file.get("orig_name") or "the photo").name
    try:
        pixels = decode(read_bytes(file["path"], name=name), name=name, max_pixels=MAX_PIXELS)
    except ImageError as error:
        # A warning: an error would be stamped over every picture on the page. gradio shows it as
        # HTML, and a file may be called anything.
        gr.Warning(html.escape(str(error)))
        return _with_photo(session, side, None)
    return _with_photo(session, side, prepare_photo(model, pixels))


def _on_clear(side: int, session: Session) -> list[Any]:
    return _with_photo(session, side, None)


def _on_drawn(model: DenseFeatures, category: int, session: Session) -> list[Any]:
    seeds = [[session.drawn, category, side] for side in (0, 1)]
    drawn = [draw(category, size=448, generator=np.random.default_rng(seed)) for seed in seeds]
    first, second = (prepare_photo(model, each.image) for each in drawn)
    session = replace(session, photos=(first, None), drawn=session.drawn + 1)
    return _with_photo(session, 1, second)


def _with_photo(session: Session, side: int, photo: Photo | None) -> list[Any]:
    """Everything the page shows after a photo has changed."""
    first, second = session.photos
    photos = (photo, second) if side == 0 else (first, photo)
    pictures = [to_pil(each.pixels) if each else None for each in photos]
    maps = confidence_maps(photos)
    return [replace(session, photos=photos, targets={}), *pictures, *maps, "", None, 0]


def _on_click(
    session: Session, clicked: tuple[int, int], reliability: Reliability | None
) -> tuple[Any, Any, Any]:
    if (pair := session.pair()) is None:
        return gr.skip(), gr.skip(), gr.skip()
    first, second = pair
    (x, y), (height, width) = clicked, first.frame.network
    point = torch.tensor([[min(x, width - 1), min(y, height - 1)]]).float()
    match = match_points(first.features, second.features, point, reliability=reliability)
    found = candidates(match, first.features, second.features)
    said = _say(first, second, match, found)
    return marked(first, point), marked(second, found.points), said


def _say(first: Photo, second: Photo, match: Matches, found: Candidates) -> str:
    """The match and its alternatives in words, original pixels."""
    x0, y0 = first.frame.to_original(match.points0)[0].tolist()
    trip = 100 * match.round_trip.item() / max(match.size0)
    sure = "" if match.probability is None else f"right with **{match.probability.item():.0%}**, "
    places = second.frame.to_original(found.points).tolist()
    rows = {
        f"A ({x0:.0f}, {y0:.0f}) to": [f"B ({x:.0f}, {y:.0f})" for x, y in places],
        "similarity": [f"{value:.2f}" for value in found.similarity.tolist()],
        "with its neighbours' votes": [f"{value:.2f}" for value in found.score.tolist()],
    }
    ranks = ["", *map(str, range(1, len(places) + 1))]
    table = [ranks, ["-"] * len(ranks), *([name, *row] for name, row in rows.items())]
    lead = (
        f"The match: {sure}confidence {match.confidence.item():.2f}, matched back it lands "
        f"{trip:.1f} % of A's longer side away.\n"
    )
    return "\n".join([lead, *(f"| {' | '.join(row)} |" for row in table)])


def _on_warp(session: Session, way: int, amount: float) -> tuple[Session, Any]:
    """One photo, moved by a share of the way from its own shape to the other's."""
    if (pair := session.pair()) is None:
        return session, gr.skip()
    source, target = pair if way == 0 else pair[::-1]
    if way not in session.targets:
        found = match_dense(target.features, source.features).points1
        session = replace(session, targets={**session.targets, way: found})
    return session, warped(source, target, session.targets[way], amount)

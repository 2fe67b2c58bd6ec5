"""`surefeat demo`: a page on this machine to match two photos by hand; needs no network.

Every tab is a function that `build_page` calls: the match of two photos, here, parts.py and
folder.py.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import torch
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from surefeat.core.image import ImageError
from surefeat.data.drawn import draw
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.demo import pictures
from surefeat.demo.folder import folder_tab, read_folder
from surefeat.demo.labels import PartPhoto
from surefeat.demo.parts import parts_tab
from surefeat.match.dense import match_dense
from surefeat.match.points import Matches, match_points
from surefeat.model.config import model_folder
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Reliability
from surefeat.show.match_page import is_unrelated, percent
from surefeat.show.style import ShownPhoto

MAX_FILE = "25mb"
"""Larger uploads are refused."""

_STYLE = (
    ".gradio-container {width: 100%; max-width: 1240px !important; margin: 0 auto !important}"
    "#drawn button {min-width: 76px} #said table {width: auto} #said {overflow-x: auto}"
    "#said :is(td, th) {word-break: normal; overflow-wrap: normal; white-space: nowrap}"
    "#said :is(td, th) {border-color: var(--border-color-primary) !important; padding: 4px 12px}"
    "@media (max-width: 640px) {:is(#photo0, #photo1) {height: 300px !important}"
    "#said :is(td, th) {padding: 4px 6px}}"
)

_HELP = (
    "Drop two photos of the same kind of object, then click a point in the first.  \n"
    "No photos at hand? Take a fresh pair of drawn objects:"
)

_CAPTIONS = ("**A** · click a point", "**B** · its match (1) and the next best places")

_WAYS = ("A onto B", "B onto A")


@dataclass(frozen=True, eq=False)
class Session:
    """What one visitor has on the page; never shared with another."""

    photos: tuple[ShownPhoto | None, ShownPhoto | None] = (None, None)
    targets: dict[int, Tensor] = field(default_factory=dict)
    """Per way of warping, for every pixel of the one photo its place in the other (h, w, 2)."""
    drawn: int = 0
    """Pairs of drawn objects so far: each button press gives new ones."""

    def pair(self) -> tuple[ShownPhoto, ShownPhoto] | None:
        """Both photos; while one is missing, None, and the visitor is told."""
        first, second = self.photos
        if first is None or second is None:
            gr.Warning("drop a photo into both A and B first")
            return None
        return first, second


def build_page(
    model: DenseFeatures, *, reliability: Reliability | None = None,
    photos: tuple[PartPhoto, ...] = (),
) -> gr.Blocks:  # fmt: skip
    """The page; `launch` serves it. reliability: also say how probably a match is right.

    photos: what the tab for a folder starts with; it is then the one that is open.
    """
    page: gr.Blocks
    old = (pictures.KEPT, pictures.KEPT)
    with gr.Blocks(title="surefeat", analytics_enabled=False, delete_cache=old) as page:
        gr.Markdown("## surefeat")
        with gr.Tabs(selected="folder" if photos else "match"):
            with gr.Tab("Match", id="match"):
                _match_tab(model, reliability)
            with gr.Tab("Parts", id="parts"):
                parts_tab(model)
            with gr.Tab("Folder", id="folder"):
                folder_tab(model, photos, page)
    return page


def launch(
    source: str | Path | None = None, *, photos: str | Path | None = None, port: int = 7860,
    device: str | None = None, block: bool = True,
) -> gr.Blocks:  # fmt: skip
    """Serve the page on 127.0.0.1 only, with a model: folder or shipped name (default resnet50).

    Other web pages' requests are refused; a photo is read only if it was uploaded to this one, or
    lies in the folder `photos`, which is read at the start.

    block: stay until interrupted; otherwise the caller closes the page that is returned.
    """
    if not 1 <= port <= 65_535:
        raise ValueError(f"port is {port}; use 1 to 65535")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    given = () if photos is None else read_folder(photos)
    model = DenseFeatures.from_pretrained(source, device=device)
    page = build_page(model, reliability=Reliability.load(model_folder(source)), photos=given)
    # Fonts of the machine: gradio's own themes would ask for others.
    plain, mono = ("system-ui", "sans-serif"), ("ui-monospace", "monospace")
    theme = gr.themes.Soft(primary_hue="blue", font=plain, font_mono=mono)
    try:
        page.queue(max_size=32).launch(
            server_name="127.0.0.1", server_port=port, share=False, max_file_size=MAX_FILE,
            theme=theme, css=_STYLE, footer_links=[], ssr_mode=False, enable_monitoring=False,
            mcp_server=False, pwa=False, quiet=True, show_error=True, prevent_thread_lock=True,
            app_kwargs={"middleware": [Middleware(OwnPageAlone)]},
        )  # fmt: skip
    except OSError as error:
        why = "another program may have it"
        raise OSError(f"port {port} cannot be used, {why}; pass another port") from error
    if block:
        print(f"surefeat demo at {page.local_url} (Ctrl-C ends it)")
        page.block_thread()
    return page


class OwnPageAlone:
    """Refuses what other web pages ask for, under another host's name or with their own origin.

    A page anywhere can send requests to a browser's own machine, or let its name point there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            own = re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", host) is not None
            if not own or headers.get("origin", f"http://{host}") != f"http://{host}":
                refusal = PlainTextResponse("open the page under its own address", 403)
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _match_tab(model: DenseFeatures, reliability: Reliability | None) -> None:
    session = gr.State(Session(), time_to_live=pictures.KEPT)
    gr.Markdown(_HELP)
    with gr.Row(elem_id="drawn"):
        buttons = [gr.Button(kind.name, size="sm") for kind in CATEGORIES]
    look: dict[str, Any] = {"show_label": False, "buttons": ["fullscreen"], "format": "png"}
    drop = look | {"sources": ["upload", "clipboard"], "height": 440}
    still = look | {"interactive": False, "height": 300}
    with gr.Row():
        images = _columns(_CAPTIONS, ("photo0", "photo1"), drop)
    said = gr.Markdown(elem_id="said")
    with gr.Row(visible=False) as below:
        trust = [f"**Confidence in {name}**: trust the bright places" for name in "AB"]
        maps = _columns(trust, ("confidence0", "confidence1"), still)
        with gr.Column():
            gr.Markdown("**Dense warp**: one photo takes the other's shape; say how far")
            warp = gr.Image(elem_id="warped", **still)
            way = gr.Radio(list(_WAYS), value=_WAYS[0], container=False, type="index")
            amount = gr.Slider(0, 1, 0, step=0.05, label="how far", elem_id="amount")
    shown = [session, *images, *maps, said, warp, amount, below]
    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
    for side, image in enumerate(images):
        # Unprocessed, so that our own reader and its messages meet the file first.
        raw = {"preprocess": False, **quiet}
        image.upload(partial(_on_photo, model, side), [image, session], shown, **raw)
        image.clear(partial(_with_photo, None, side), session, shown, **quiet)
    for category, button in enumerate(buttons):
        button.click(partial(_on_drawn, model, category), session, shown, **quiet)

    # Not a partial: gradio passes the event by the type it finds in the signature.
    def on_click(session: Session, event: gr.SelectData) -> tuple[Any, Any, Any]:
        return _on_click(session, event.index, reliability)

    images[0].select(on_click, session, [*images, said], **quiet)
    quiet["trigger_mode"] = "always_last"
    for control in (way, amount):
        control.input(_on_warp, [session, way, amount], [session, warp], **quiet)


def _columns(captions: Sequence[str], names: Sequence[str], look: dict[str, Any]) -> list[gr.Image]:
    """Pictures side by side, a line of text above each."""
    images = []
    for caption, name in zip(captions, names, strict=True):
        with gr.Column():
            gr.Markdown(caption)
            images.append(gr.Image(elem_id=name, **look))
    return images


def _on_photo(
    model: DenseFeatures, side: int, file: dict[str, Any] | None, session: Session
) -> list[Any]:
    file = file or {}
    name = Path(file.get("orig_name") or "the photo").name
    try:
        pixels = pictures.read_upload(file.get("path"), name=name)
    except ImageError as error:
        # An error would be stamped over every picture. gradio shows HTML: names are escaped.
        gr.Warning(html.escape(str(error)))
        return _with_photo(None, side, session)
    return _with_photo(pictures.prepare_photo(model, pixels), side, session)


def _on_drawn(model: DenseFeatures, category: int, session: Session) -> list[Any]:
    seeds = [[session.drawn, category, side] for side in (0, 1)]
    drawn = [draw(category, size=448, generator=np.random.default_rng(seed)) for seed in seeds]
    first, second = (pictures.prepare_photo(model, instance.image) for instance in drawn)
    session = replace(session, photos=(first, None), drawn=session.drawn + 1)
    return _with_photo(second, 1, session)


def _with_photo(photo: ShownPhoto | None, side: int, session: Session) -> list[Any]:
    """Everything the page shows after a photo has changed."""
    first, second = session.photos
    photos = (photo, second) if side == 0 else (first, photo)
    plain = [pictures.to_pil(shown.pixels) if shown else None for shown in photos]
    maps = pictures.confidence_maps(photos)
    below = gr.Row(visible=any(photos))
    return [replace(session, photos=photos, targets={}), *plain, *maps, "", None, 0, below]


def _on_click(
    session: Session, clicked: tuple[int, int], reliability: Reliability | None
) -> tuple[Any, Any, Any]:
    if (pair := session.pair()) is None:
        return gr.skip(), gr.skip(), gr.skip()
    first, second = pair
    (x, y), (height, width) = clicked, first.frame.network
    point = torch.tensor([[min(x, width - 1), min(y, height - 1)]]).float()
    match = match_points(first.features, second.features, point, reliability=reliability)
    best = pictures.best_places(match, first.features, second.features)
    marked = pictures.with_discs(first.pixels, point)
    shown = pictures.with_discs(second.pixels, best[0])
    return marked, shown, _say(first, second, match, *best)


def _say(
    first: ShownPhoto, second: ShownPhoto, match: Matches, places: Tensor, similarity: Tensor,
    score: Tensor,
) -> str:  # fmt: skip
    """The match and its alternatives in words, original pixels."""
    x0, y0 = first.frame.to_original(match.points0)[0].tolist()
    trip = 100 * match.round_trip.item() / max(match.size0)
    sure = "" if match.probability is None else f"right with **{percent(match.probability)}**, "
    table = [["", "place", "similarity", "with votes"], ["-"] * 4]
    originals = second.frame.to_original(places).tolist()
    rows = zip(originals, similarity.tolist(), score.tolist(), strict=True)
    for rank, ((x, y), plain, voted) in enumerate(rows, 1):
        table.append([str(rank), f"B ({x:.0f}, {y:.0f})", f"{plain:.2f}", f"{voted:.2f}"])
    lead = (
        f"A ({x0:.0f}, {y0:.0f}): {sure}confidence {match.confidence.item():.2f}, matched back it "
        f"lands {trip:.1f} % of A's longer side away. Places are the match (1) and the next best; "
        "votes are those of the neighbouring matches.\n"
    )
    if is_unrelated(match):
        lead = f"**These two photos seem to have nothing in common.** {lead}"
    return "\n".join([lead, *(f"| {' | '.join(row)} |" for row in table)])


def _on_warp(session: Session, way: int, amount: float) -> tuple[Session, Any]:
    """One photo, moved by a share of the way from its own shape to the other's."""
    if (pair := session.pair()) is None:
        return session, gr.skip()
    source, target = pair if way == 0 else pair[::-1]
    if way not in session.targets:
        places = match_dense(target.features, source.features).points1
        session = replace(session, targets={**session.targets, way: places})
    return session, pictures.warped(source, target, session.targets[way], amount)

"""The web page in a real browser, and what it computes."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.core.image import load, resize
from surefeat.data.drawn import draw
from surefeat.match.dense import match_dense
from surefeat.match.points import match_points
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures

pytest.importorskip("gradio", reason="needs the demo extra")

from browser import chromium, serve
from surefeat.demo.app import _say, launch
from surefeat.demo.pictures import SHOWN, best_places, prepare_photo, warped
from surefeat.match.search import PEAK_RADIUS

CLICK = (0.3, 0.6)
SIZES = ((300, 200), (210, 240))  # width, height


def small_model() -> DenseFeatures:
    torch.manual_seed(5)
    config = ModelConfig(trunk="small", head="linear", lower="conv4", channels=32, longest_side=160)
    return DenseFeatures(config).eval()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    paths = [folder / "first.png", folder / "second.png"]
    for number, (path, (width, height)) in enumerate(zip(paths, SIZES, strict=True)):
        drawn = draw(0, size=300, generator=np.random.default_rng(number)).image
        Image.fromarray(drawn[:, :height, :width].permute(1, 2, 0).numpy()).save(path)
    return paths


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(folder)
    with serve(folder) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Visitor:
    """A tab of its own session, and every address it asked for."""

    def __init__(self, browser: Any, address: str) -> None:
        self.tab = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
        self.asked: list[str] = []
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(address)
        self.tab.wait_for_selector("#photo0 input[type=file]", state="attached")

    def upload(self, side: int, path: Path) -> None:
        self.tab.set_input_files(f"#photo{side} input[type=file]", path)

    def source(self, name: str) -> str:
        return str(self.tab.locator(f"#{name} img").get_attribute("src"))

    def changed(self, name: str, before: str | None) -> None:
        """Wait until a picture is there and another one than before."""
        script = """([name, before]) => {
            const image = document.querySelector(`#${name} img`);
            return image && image.complete && image.naturalWidth && image.src !== before;
        }"""
        self.tab.wait_for_function(script, arg=[name, before])

    def picture(self, name: str) -> Image.Image:
        data = self.tab.request.get(self.source(name)).body()
        return Image.open(io.BytesIO(data)).convert("RGB")

    def click(self) -> str:
        """Click on A; what the page says then."""
        photo = self.tab.locator("#photo0 img")
        box = photo.bounding_box()
        before = self.source("photo1")
        place = {"x": CLICK[0] * box["width"], "y": CLICK[1] * box["height"]}
        photo.click(position=place)
        self.changed("photo1", before)
        # The words may come after the picture.
        places = r"() => /A \(\d/.test(document.querySelector('#said')?.innerText)"
        self.tab.wait_for_function(places)
        return str(self.tab.inner_text("#said"))


def with_both(browser: Any, address: str, photos: list[Path]) -> Visitor:
    visitor = Visitor(browser, address)
    for side, path in enumerate(photos):
        visitor.upload(side, path)
        # Shown at the page's own size, the photo has been read.
        script = """([side, shown]) => {
            const image = document.querySelector(`#photo${side} img`);
            return image && Math.max(image.naturalWidth, image.naturalHeight) === shown;
        }"""
        visitor.tab.wait_for_function(script, arg=[side, SHOWN])
    return visitor


def said_places(photo: str, said: str) -> list[list[int]]:
    return [[int(x), int(y)] for x, y in re.findall(rf"{photo} \((\d+), (\d+)\)", said)]


def test_a_click_in_a_shows_its_match_in_b_and_nothing_leaves_the_machine(
    page: Any, browser: Any, photos: list[Path]
) -> None:
    visitor = with_both(browser, page.local_url, photos)
    plain = visitor.picture("photo1")
    said = visitor.click()
    clicked = said_places("A", said)[0]
    assert clicked == pytest.approx([CLICK[0] * SIZES[0][0], CLICK[1] * SIZES[0][1]], abs=2.5)
    match = match_points(*small_model().extract(list(photos)), [clicked])
    matched = said_places("B", said)[0]
    assert matched == pytest.approx(match.points1[0].tolist(), abs=4)
    # The mark lies over the match, and the pictures differ only where marks are.
    width, height = SIZES[1]
    scale = SHOWN / max(width, height)
    moved = np.abs(np.asarray(visitor.picture("photo1"), int) - np.asarray(plain, int)).sum(-1)
    column, row = (
        min(int((v + 0.5) * scale), s - 1) for v, s in zip(matched, plain.size, strict=True)
    )
    assert moved[row, column] > 30
    assert 0 < (moved > 0).mean() < 0.05
    visitor.tab.locator("#amount input[type=range]").focus()
    visitor.tab.keyboard.press("End")
    visitor.changed("warped", None)
    assert visitor.picture("warped").size == plain.size
    assert visitor.asked
    outside = [
        url for url in visitor.asked if not re.match(r"http://127\.0\.0\.1:|data:|blob:", url)
    ]
    assert outside == []


def test_visitors_do_not_see_each_other(page: Any, browser: Any, photos: list[Path]) -> None:
    first = with_both(browser, page.local_url, photos)
    second = Visitor(browser, page.local_url)
    second.tab.get_by_role("button", name="teapot").click()
    second.changed("photo1", None)
    # Each click is answered in the pixels of the visitor's own photo; drawn ones have 448.
    for visitor, (width, height) in ((second, (448, 448)), (first, SIZES[0])):
        place = [CLICK[0] * width, CLICK[1] * height]
        # The browser counts whole screen pixels, which are up to 1.2 of the photo's.
        assert said_places("A", visitor.click())[0] == pytest.approx(place, abs=2.5)


def test_a_damaged_photo_gets_one_line_that_names_it(
    page: Any, browser: Any, tmp_path: Path
) -> None:
    damaged = tmp_path / "<b>holiday.jpg"
    damaged.write_text("this is no picture")
    visitor = Visitor(browser, page.local_url)
    visitor.upload(0, damaged)
    visitor.tab.wait_for_selector("text=<b>holiday.jpg: is text, not an image; convert it to JPEG")
    visitor.tab.wait_for_selector("#photo0 img", state="detached")


def test_the_page_listens_on_this_machine_only_and_limits_uploads(page: Any) -> None:
    import httpx

    port = int(page.local_url.rstrip("/").rsplit(":", 1)[1])
    # A server on all addresses would answer here too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    assert page.share_url is None
    assert page.config["analytics_enabled"] is False
    large = {"files": ("large.png", bytes(26 * 2**20))}
    answer = httpx.post(f"{page.local_url}gradio_api/upload", files=large, trust_env=False)
    assert answer.status_code == 413
    with pytest.raises(OSError, match=f"port {port} cannot be used, another program may"):
        launch(port=port, device="cpu", block=False)


def test_alternatives_are_apart_and_follow_the_match(photos: list[Path]) -> None:
    first, second = (prepare_photo(small_model(), load(path)) for path in photos)
    match = match_points(first.features, second.features, [[240.0, 300.0]])
    places, similarity, score = best_places(match, first.features, second.features)
    assert torch.equal(places[:1], match.points1)
    assert similarity[0].item() == pytest.approx(match.score.item(), abs=1e-5)
    assert len(places) == 4
    assert bool((score.diff() <= 0).all())
    # The match itself is refined, by up to two places of half a cell.
    apart = torch.cdist(places, places) + 1e9 * torch.eye(4)
    assert apart[1:, 1:].min() > PEAK_RADIUS * SHOWN
    assert apart.min() > 0.8 * PEAK_RADIUS * SHOWN


def test_warping_starts_at_the_photo_itself_and_ends_at_the_matches(photos: list[Path]) -> None:
    first, second = (prepare_photo(small_model(), load(path)) for path in photos)
    places = match_dense(second.features, first.features).points1
    start, end = (
        np.asarray(warped(first, second, places, amount), int).transpose(2, 0, 1)
        for amount in (0.0, 1.0)
    )
    # The photo stretched to the other's size, as torch does it.
    stretched = torch.nn.functional.interpolate(
        first.pixels[None].float(), size=second.frame.network, mode="bilinear"
    )[0]
    assert np.abs(start - stretched.numpy()).max() <= 1
    row, column = 200, 310
    x, y = places[row, column].round().long().tolist()
    near = first.pixels[:, max(0, y - 1) : y + 2, max(0, x - 1) : x + 2].flatten(1).int()
    low, high = near.amin(1).numpy(), near.amax(1).numpy()
    assert ((low <= end[:, row, column]) & (end[:, row, column] <= high)).all()


def test_a_photo_is_shown_at_the_pages_size_and_seen_in_full() -> None:
    pixels = draw(2, size=64, generator=np.random.default_rng(1)).image[:, :32]
    model = small_model()
    photo = prepare_photo(model, pixels)
    assert photo.frame.network == (SHOWN // 2, SHOWN)
    assert torch.equal(photo.pixels, resize(pixels, size=(SHOWN // 2, SHOWN)))
    alone = model.extract(pixels)[0]
    assert torch.equal(photo.features.descriptors, alone.descriptors)
    place = torch.tensor([[40.0, 10.0]])
    torch.testing.assert_close(
        photo.features.at(photo.frame.to_network(place)), alone.at(place), atol=1e-5, rtol=0
    )


def test_a_click_in_photos_with_nothing_in_common_is_told_so(photos: list[Path]) -> None:
    first, second = (prepare_photo(small_model(), load(path)) for path in photos)
    match = match_points(first.features, second.features, [[240.0, 300.0]])
    for related, told in ((0.1, True), (0.9, False), (None, False)):
        object.__setattr__(match, "related", related)
        said = _say(first, second, match, *best_places(match, first.features, second.features))
        assert ("seem to have nothing in common" in said) == told

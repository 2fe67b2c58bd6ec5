"""A part is put down by a click, moved by mouse, finger or key, and undone: in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sets import write_model
from surefeat.core.geometry import Frame
from surefeat.demo.labels import PartPhoto, Parts

pytest.importorskip("gradio", reason="needs the demo extra")

from browser import chromium, serve
from surefeat.demo.board import board_value, part_of, place_of

WIDTH, HEIGHT = 200, 100
NAMES = ("beak", "<img src=x onerror=alert(1)>")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serve(write_model(tmp_path_factory.mktemp("model"))) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def opened(browser: Any, page: Any, folder: Path, **screen: Any) -> Any:
    """The parts tab with a photo and two names; `asked` keeps what the tab asks for."""
    tab = browser.new_context(**screen).new_page()
    tab.asked = []
    tab.on("request", lambda request: tab.asked.append(request.url))
    tab.goto(page.local_url)
    tab.get_by_role("tab", name="Parts").click()
    tab.locator("#part_names textarea, #part_names input").fill(", ".join(NAMES))
    tab.wait_for_selector("#part_choice label:has-text('beak')")
    Image.new("RGB", (WIDTH, HEIGHT), "#8090a0").save(folder / "grey.png")
    with tab.expect_file_chooser() as choosing:
        tab.locator("#part_files").click()
    choosing.value.set_files(folder / "grey.png")
    tab.wait_for_selector("#part_said >> text=photo 1 of 1, grey.png")
    tab.locator("#part_photo img").scroll_into_view_if_needed()
    return tab


def box_of(tab: Any, what: str) -> dict[str, float]:
    """Of an element on the window; an answer replaces it, and for a moment there is none."""
    for _ in range(50):
        if box := tab.locator(what).bounding_box():
            return box
        tab.wait_for_timeout(100)
    raise AssertionError(f"{what} is not to be seen")


def on_page(tab: Any, x: float, y: float) -> tuple[float, float]:
    """Shares of the photo -> pixels of the window."""
    box = box_of(tab, "#part_photo img")
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


def at(tab: Any, part: int) -> tuple[float, float]:
    """Where a part's disc is, shares of the photo."""
    photo = box_of(tab, "#part_photo img")
    disc = box_of(tab, f"#part_photo .mark >> text=/^{part}$/")
    x, y = (disc["x"] + disc["width"] / 2, disc["y"] + disc["height"] / 2)
    return (x - photo["x"]) / photo["width"], (y - photo["y"]) / photo["height"]


def test_a_part_is_dragged_by_the_mouse_and_taken_back_and_names_are_only_text(
    browser: Any, page: Any, tmp_path: Path
) -> None:
    tab = opened(browser, page, tmp_path, viewport={"width": 1280, "height": 900})
    for number, place in ((1, (0.25, 0.5)), (2, (0.6, 0.3))):
        tab.mouse.click(*on_page(tab, *place))
        tab.wait_for_selector(f"#part_choice label:has-text('{number} ') >> text=✓")
        assert at(tab, number) == pytest.approx(place, abs=0.01)
    tab.mouse.move(*on_page(tab, 0.25, 0.5))
    tab.mouse.down()
    tab.mouse.move(*on_page(tab, 0.5, 0.6), steps=4)
    assert tab.locator("#part_photo .loupe").is_visible()
    tab.mouse.move(*on_page(tab, 0.75, 0.8), steps=4)
    tab.mouse.up()
    assert tab.locator("#part_photo .loupe").is_hidden()
    assert at(tab, 1) == pytest.approx((0.75, 0.8), abs=0.01)  # it waits there for the answer
    tab.get_by_role("button", name="undo").first.click()
    tab.wait_for_function("document.querySelector('#part_photo .mark').style.left === '25%'")
    tab.mouse.move(*on_page(tab, 0.6, 0.3))
    tab.mouse.down()
    tab.mouse.move(*on_page(tab, 1.05, 0.3), steps=4)  # off the photo: it is not to be seen
    tab.mouse.up()
    tab.wait_for_selector("#part_choice label:has-text('2 ') >> text=✗")
    assert tab.locator("#part_photo .mark").count() == 1
    assert tab.locator("#part_photo img").count() == 1  # a name never becomes an element
    tab.locator("#part_photo .mark").focus()
    tab.keyboard.press("Shift+ArrowRight")
    tab.wait_for_function("parseFloat(document.querySelector('#part_photo .mark').style.left) > 26")
    outside = [url for url in tab.asked if not url.startswith((page.local_url, "data:", "blob:"))]
    assert outside == []


def test_a_part_is_dragged_by_a_finger_on_a_phone(browser: Any, page: Any, tmp_path: Path) -> None:
    screen = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    tab = opened(browser, page, tmp_path, **screen)
    tab.touchscreen.tap(*on_page(tab, 0.3, 0.5))
    tab.wait_for_selector("#part_choice label:has-text('1 beak ✓')")
    tab.locator("#part_photo img").scroll_into_view_if_needed()
    finger = tab.context.new_cdp_session(tab)

    def touch(kind: str, *places: tuple[float, float]) -> None:
        points = [dict(zip("xy", on_page(tab, *place), strict=True)) for place in places]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", (0.3, 0.5))
    for share in (0.4, 0.5, 0.6, 0.7):
        touch("touchMove", (share, 0.7))
    touch("touchEnd")
    tab.wait_for_function(
        "Math.abs(parseFloat(document.querySelector('#part_photo .mark').style.left) - 70) < 1"
    )
    assert at(tab, 1) == pytest.approx((0.7, 0.7), abs=0.02)
    wide = tab.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390  # nothing sticks out of the screen


def session(**changes: Any) -> Parts:
    photo = PartPhoto("a.png", "a.png", b"jpeg", Frame((HEIGHT, WIDTH), (400, 800)))
    return replace(Parts(("beak", "tail")).with_photos([photo]), **changes)


def test_what_is_shown_and_what_comes_back_are_the_same_place() -> None:
    # Pixel centres are at integers: the middle of a photo of 200 pixels is 99.5.
    frame = Frame((HEIGHT, WIDTH), (400, 800))
    for point in ((0.0, 0.0), (99.5, 49.5), (199.0, 99.0), (17.25, 80.5)):
        (mark,) = board_value(session().with_part("beak", point))["marks"]  # type: ignore[index]
        back = place_of(SimpleNamespace(_data={"place": [mark["x"], mark["y"]]}), frame)
        assert back == pytest.approx(point, abs=0.01)
    assert place_of(SimpleNamespace(_data={"place": [0.5, 0.5]}), frame) == (99.5, 49.5)
    # The outer edges are half a pixel outside the centres of the outermost pixels.
    assert place_of(SimpleNamespace(_data={"place": [1, 7.0]}), frame) == (199.0, 99.0)


@pytest.mark.parametrize(
    "data", [None, [], {}, {"place": None}, {"place": [1]}, {"place": ["a", 0]},
             {"place": [float("nan"), 0]}, {"place": {"x": 1}}, {"part": 3}]
)  # fmt: skip
def test_an_event_written_by_hand_is_nowhere(data: Any) -> None:
    event = SimpleNamespace(_data=data)
    assert place_of(event, Frame((10, 10), (10, 10))) is None
    assert part_of(event) is None


def test_a_part_that_is_not_seen_has_no_mark_and_comes_back_when_it_is_placed() -> None:
    gone = session().with_part("beak", (3.0, 4.0)).with_part("beak", None)
    assert board_value(gone)["marks"] == []  # type: ignore[index]
    assert gone.missing() == ["tail"]
    assert gone.undone().photos[0].marks.places == {"beak": (3.0, 4.0)}
    again = gone.with_part("beak", (5.0, 6.0))
    assert [mark["part"] for mark in board_value(again)["marks"]] == ["beak"]  # type: ignore[index]

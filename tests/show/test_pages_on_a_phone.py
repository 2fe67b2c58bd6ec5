"""Pages of tables and figures fit a phone, and ask for nothing outside their file."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the viz extra")

from browser import chromium
from surefeat.show.page import Section, write_page
from surefeat.show.style import new_figure

LONG = "timm:vit_small_patch14_reg4_dinov2/block8@322"


@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_the_screen_and_a_long_name_leaves_room_for_numbers(
    tmp_path: Path, width: int
) -> None:
    figure = new_figure(2.0, "What it shows.")
    figure.subplots().plot([0, 1], [0, 1])
    table = [["row", "voting", "nearest neighbour", "location"], [LONG, "75.6", "79.9", "78.2"]]
    sections = [Section("Results", text="Text.", figures=(figure,), table=table)]
    page = write_page(tmp_path / "index.html", "Results", sections, lead="A lead.")
    asked: list[str] = []
    with chromium() as browser:
        tab = browser.new_context(viewport={"width": width, "height": 844}).new_page()
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        name, value = (tab.locator("tbody td").nth(column).bounding_box() for column in (0, 1))
        hint = tab.evaluate(
            "getComputedStyle(document.querySelector('figcaption'), '::before').content"
        )
    assert name["width"] <= 0.5 * width
    assert value["x"] + value["width"] <= width  # seen without moving anything
    assert ("swipe" in hint) == (width == 390)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []

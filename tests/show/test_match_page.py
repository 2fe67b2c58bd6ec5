"""The page of two photos in a real browser: partners, the slider, the verdict, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from browser import chromium
from surefeat.match.points import Matches
from surefeat.show.match_page import SHOWN_FIRST, foreground, line_colour, verdict, viewer
from surefeat.show.page import Section, write_page

HOSTILE = "</script><img src=x onerror=alert(1)>.jpg"
SIZES = ((40, 60), (50, 30))  # height, width


def photos() -> list[torch.Tensor]:
    return [torch.full((3, *size), 128, dtype=torch.uint8) for size in SIZES]


def make_matches(chances: list[float] | None, *, related: float | None = None) -> Matches:
    """Four matches, the third of which does not lead back; B is A mirrored and half as wide."""
    places = torch.tensor([[5.0, 5.0], [20.0, 15.0], [35.0, 25.0], [50.0, 35.0]])
    matches = Matches(
        points0=places,
        points1=torch.stack([29 - places[:, 0] / 2, places[:, 1]], dim=1),
        score=torch.tensor([0.2, 0.4, 0.6, 0.8]),
        confidence=torch.tensor([4.0, 3.0, 2.0, 1.0]),
        margin=torch.zeros(4),
        round_trip=torch.zeros(4),
        mutual=torch.tensor([True, True, False, True]),
        index=torch.arange(4),
        size0=SIZES[0],
        size1=SIZES[1],
        probability=None if chances is None else torch.tensor(chances),
    )
    object.__setattr__(matches, "related", related)
    return matches


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def look(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page of some matches; afterwards it must have asked for no other address."""
    asked: list[str] = []
    said: list[str] = []

    def opened(matches: Matches, *, width: int = 1000, name: str = "a.jpg") -> Any:
        shown = viewer(photos(), (name, "b.jpg"), matches)
        sections = [Section("Settings", table=[("What", "Value"), ("Model", name)])]
        page = write_page(tmp_path / "index.html", f"{name} and b.jpg", sections, viewer=shown)
        context = browser.new_context(viewport={"width": width, "height": 800})
        tab = context.new_page()
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("dialog", lambda dialog: (said.append("a dialog"), dialog.dismiss()))
        tab.goto(page.as_uri())
        return tab

    yield opened
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []
    assert said == []


def hover(tab: Any, side: int, point: tuple[float, float]) -> str:
    """Move the pointer to a place of a photo, in its own pixels; what the page says then."""
    box, (height, width) = tab.locator(f"#photo{side}").bounding_box(), SIZES[side]
    x, y = ((v + 0.5) / length for v, length in zip(point, (width, height), strict=True))
    tab.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    return str(tab.inner_text("#said"))


def drawn_lines(tab: Any) -> list[Any]:
    lines = tab.locator("#marks line:not(.seam)").all()
    return [line for line in lines if line.is_visible()]


def test_a_point_under_the_pointer_shows_its_partner_from_either_photo(look: Any) -> None:
    tab = look(make_matches([0.9, 0.8, 0.7, 0.3]))
    for side, point in ((0, (20, 15)), (1, (19, 15))):
        said = hover(tab, side, point)
        assert said.startswith("A (20, 15) is B (19, 15): right with 80 %, score 0.40")
        chosen = tab.locator("#marks line.chosen:not(.seam)")
        ends = [float(chosen.get_attribute(name)) for name in ("x1", "y1", "x2", "y2")]
        from_ = tab.locator("#stage").bounding_box()
        for photo, (x, y) in ((0, (20.5 / 60, 15.5 / 40)), (1, (19.5 / 30, 15.5 / 50))):
            box = tab.locator(f"#photo{photo}").bounding_box()
            place = [
                box["x"] - from_["x"] + x * box["width"],
                box["y"] - from_["y"] + y * box["height"],
            ]
            assert ends[2 * photo : 2 * photo + 2] == pytest.approx(place, abs=0.6)
    assert "does not lead back" in hover(tab, 0, (35, 25))
    assert hover(tab, 0, (58, 2)).startswith("Point at a mark")


def test_the_slider_leaves_the_more_probable_ones(look: Any) -> None:
    tab = look(make_matches([0.9, 0.8, 0.7, 0.3]))
    assert tab.inner_text("#count") == "4 of 4 shown"
    tab.locator("#slider").fill("75")
    assert tab.inner_text("#count") == "2 of 4 shown"
    assert tab.inner_text("#least") == "75 %"
    assert len(drawn_lines(tab)) == 2
    tab.locator("summary").click()
    cells = tab.locator("#points tbody tr:visible td:nth-child(4)").all_inner_texts()
    assert cells == ["90 %", "80 %"]


def test_lines_differ_in_colour_and_doubtful_ones_are_thin_and_dark(look: Any) -> None:
    tab = look(make_matches([0.9, 0.8, 0.7, 0.3]))
    script = (
        "lines => lines.map(l => [getComputedStyle(l).stroke, getComputedStyle(l).strokeWidth])"
    )
    looks = tab.locator("#marks line:not(.seam)").evaluate_all(script)
    assert len({stroke for stroke, _ in looks}) == 4
    assert looks[0] == ["rgb(16, 24, 32)", "0.8px"]  # the least probable is drawn first
    assert {width for _, width in looks[1:]} == {"1.8px"}
    assert len({line_colour(rank) for rank in range(60)}) == 60


def test_photos_with_nothing_in_common_are_said_to_and_get_no_lines(look: Any) -> None:
    tab = look(make_matches([0.9, 0.8, 0.7, 0.3], related=0.07))
    assert "nothing in common" in tab.inner_text(".verdict")
    assert "7 %" in tab.inner_text(".verdict")
    assert "which these do not seem to" in tab.inner_text("#said")
    assert drawn_lines(tab) == []
    tab.locator("#lines").check()
    assert len(drawn_lines(tab)) == 4
    assert tab.locator("#marks line.sure").count() == 0


def test_without_probabilities_the_slider_is_of_scores(look: Any) -> None:
    tab = look(make_matches(None))
    assert tab.inner_text(".verdict") == "4 points of A found in B."
    tab.locator("#slider").fill("0.5")
    assert tab.inner_text("#count") == "2 of 4 shown"
    assert "gives no probability" in tab.inner_text("#said")


def test_a_phone_shows_everything_without_moving_sideways(look: Any) -> None:
    tab = look(make_matches([0.9, 0.8, 0.7, 0.3]), width=360, name="a" * 90 + ".jpg")
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    first, second = (tab.locator(f"#photo{side}").bounding_box() for side in (0, 1))
    assert second["y"] > first["y"] + first["height"]
    assert first["width"] > 200
    # A finger is not as exact as a mouse.
    tab.mouse.click(
        first["x"] + 20.5 / 60 * first["width"] + 9, first["y"] + 15.5 / 40 * first["height"]
    )
    assert tab.inner_text("#said").startswith("A (20, 15) is B (19, 15)")


def test_names_cannot_run_anything(look: Any) -> None:
    tab = look(make_matches([0.9, 0.8, 0.7, 0.3]), name=HOSTILE)
    assert tab.inner_text("h1") == f"{HOSTILE} and b.jpg"
    assert tab.locator("img").count() == 2
    assert tab.inner_text("#count") == "4 of 4 shown"


def test_no_matches_is_said(look: Any) -> None:
    none = make_matches([0.9, 0.8, 0.7, 0.3]).take(torch.zeros(4, dtype=torch.bool))
    tab = look(none)
    assert tab.inner_text(".verdict") == "No point of A was found in B."


def test_of_many_matches_the_best_are_shown_first_unless_they_were_asked_for() -> None:
    few = make_matches([0.9, 0.8, 0.7, 0.3])
    many = few.take(torch.arange(4).repeat(15))
    many = replace(many, probability=torch.linspace(0, 0.99, 60))
    shown = viewer(photos(), ("a", "b"), many)
    assert sum(mark["value"] >= shown.start for mark in shown.marks) == SHOWN_FIRST
    assert viewer(photos(), ("a", "b"), many, all_shown=True).start == 0
    assert [mark["value"] for mark in shown.marks] == sorted(
        (mark["value"] for mark in shown.marks), reverse=True
    )


def test_the_background_is_not_drawn_until_it_is_asked_for() -> None:
    """Chosen matches below a fifth wait for the slider; asked-for points and unrelated ones not."""
    mixed = make_matches([0.9, 0.21, 0.19, 0.02], related=0.9)
    assert viewer(photos(), ("a", "b"), mixed).start == 20
    assert foreground(mixed).index.tolist() == [0, 1]
    assert viewer(photos(), ("a", "b"), mixed, all_shown=True).start == 0
    poor = make_matches([0.1, 0.05, 0.04, 0.02], related=0.9)
    assert viewer(photos(), ("a", "b"), poor).start == 10
    assert len(foreground(poor)) == 4
    unrelated = make_matches([0.3, 0.05, 0.04, 0.02], related=0.3)
    assert viewer(photos(), ("a", "b"), unrelated).start == 0
    assert len(foreground(unrelated)) == len(foreground(make_matches(None))) == 4


@pytest.mark.parametrize(
    ("related", "words"),
    [
        (None, "4 points of A found in B, 3 of them more likely right than wrong."),
        (0.93, "Both seem to show the same kind of thing (93 %). 4 points of A found in B"),
        (0.999, "(over 99 %)"),
        (0.2, "These two photos seem to have nothing in common"),
    ],
)
def test_the_verdict_in_words(related: float | None, words: str) -> None:
    assert words in verdict(make_matches([0.9, 0.8, 0.7, 0.3], related=related))

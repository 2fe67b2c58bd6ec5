"""The page's tab for parts in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.core.geometry import Frame
from surefeat.data.decode import SourceError
from surefeat.data.drawn import draw
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.keypoints import read_coco, write_coco
from surefeat.demo.labels import PartPhoto, Parts, read_labels, with_labels
from surefeat.keypoints.detector import KeypointDetector
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures

pytest.importorskip("gradio", reason="needs the demo extra")

from browser import chromium, serve
from sets import QUICK

BIRD = 1
PARTS = ("beak", "tail")
SIDE = 224


def small_model() -> DenseFeatures:
    torch.manual_seed(5)
    return DenseFeatures(
        ModelConfig(trunk="small", head="linear", lower="conv4", channels=32)
    ).eval()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(folder)
    # How well parts are found is tested elsewhere.
    quick = partial(KeypointDetector.fit, config=QUICK)
    with pytest.MonkeyPatch.context() as patch, serve(folder) as served:
        patch.setattr(KeypointDetector, "fit", quick)
        yield served


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with chromium() as started:
        yield started.new_context(viewport={"width": 1280, "height": 1000}).new_page()


def test_parts_clicked_in_two_photos_are_found_in_a_third(
    page: Any, tab: Any, tmp_path: Path
) -> None:
    drawn = [draw(BIRD, size=SIDE, generator=np.random.default_rng(seed)) for seed in range(3)]
    paths = [tmp_path / f"bird{number}.png" for number in range(3)]
    for path, each in zip(paths, drawn, strict=True):
        Image.fromarray(each.image.permute(1, 2, 0).numpy()).save(path)
    tab.goto(page.local_url)
    tab.get_by_role("tab", name="Parts").click()
    tab.locator("#part_fit").click()
    tab.wait_for_selector("text=click the parts in at least one photo first")
    tab.locator("#part_names textarea, #part_names input").fill(", ".join(PARTS))
    tab.wait_for_selector("#part_choice label:has-text('tail')")
    with tab.expect_file_chooser() as choosing:
        tab.locator("#part_files").click()
    choosing.value.set_files(paths)
    tab.wait_for_selector("#part_said >> text=photo 1 of 3, bird0.png")
    for number, each in enumerate(drawn[:2]):
        for count, part in enumerate(PARTS):
            names = CATEGORIES[BIRD].keypoint_names
            tab.locator("#part_photo .stage").click(
                position=on_screen(tab, *each.keypoints[names.index(part)].tolist())
            )
            # The next part is chosen; after the last one none, so that no click moves the first.
            left = PARTS[count + 1 :]
            tab.wait_for_selector(f"#part_choice label:has-text('{count + 1} {part} ✓')")
            assert tab.locator("#part_choice input:checked").count() == len(left)
            assert not left or tab.locator("#part_choice input:checked").input_value() == left[0]
        tab.wait_for_selector(f"#part_said >> text=photos labelled by hand: {number + 1}")
        tab.get_by_role("button", name="next photo").click()
        tab.wait_for_selector(f"#part_said >> text=photo {number + 2} of 3")
    tab.locator("#part_fit").click()
    tab.wait_for_selector("#part_told >> text=Learned from 2 photos; the parts found in 1 photo")
    tab.wait_for_selector("#part_found .tile img")
    with tab.expect_download() as waiting:
        tab.get_by_text("labels (COCO json)").click()
    record = tmp_path / "labels.json"
    waiting.value.save_as(record)
    labelled = read_coco(record)  # beside the photos, as a user would keep it
    assert labelled.categories[0].keypoints == PARTS
    for item, each in zip(labelled.objects, drawn, strict=False):
        true = each.keypoints[[CATEGORIES[BIRD].keypoint_names.index(part) for part in PARTS]]
        # A click is a whole pixel of the screen, where the photo is shown about twice as large.
        torch.testing.assert_close(item.points, true, atol=1.0, rtol=0)
    tab.get_by_text("labels (COCO json)").wait_for()
    tab.get_by_text("found (COCO json)").wait_for()
    correct_the_third(tab, drawn[2].keypoints[CATEGORIES[BIRD].keypoint_names.index("beak")])
    with tab.expect_download() as waiting:
        tab.get_by_text("detector (zip)").click()
    waiting.value.save_as(tmp_path / "detector.zip")
    shutil.unpack_archive(tmp_path / "detector.zip", tmp_path)
    detector = KeypointDetector.load(tmp_path / "detector", small_model())
    assert detector.categories[0].keypoints == PARTS


def on_screen(tab: Any, x: float, y: float) -> dict[str, float]:
    """A place of the photo, in its own pixels -> where it is shown, from the photo's corner."""
    box = tab.locator("#part_photo img").bounding_box()
    return {"x": (x + 0.5) / SIDE * box["width"], "y": (y + 0.5) / SIDE * box["height"]}


def click(tab: Any, x: float, y: float) -> None:
    """Click a place of the photo, in its own pixels."""
    before = tab.inner_text("#part_said")
    tab.locator("#part_photo .stage").click(position=on_screen(tab, x, y))
    changed = "before => document.querySelector('#part_said').innerText.trim() !== before.trim()"
    tab.wait_for_function(changed, arg=before)


def correct_the_third(tab: Any, beak: torch.Tensor) -> None:
    """Take a found part up, put it where it belongs, take that back, draw a box, fit again."""
    tab.locator("#part_found .tile").first.click()
    tab.wait_for_selector("#part_said >> text=photo 3 of 3")
    tab.wait_for_selector("#part_said >> text=white discs were found")
    tab.wait_for_timeout(300)  # the choice is drawn anew after the words
    tab.locator("#part_choice label:has-text('1 beak ?')").click()
    tab.wait_for_selector("#part_choice input:checked")
    x, y = beak.tolist()
    click(tab, x, y)
    tab.wait_for_selector("#part_choice label:has-text('1 beak ✓')")
    tab.wait_for_selector("#part_said >> text=photos labelled by hand: 3")
    # Nothing is chosen now: a click on the part takes it up.
    click(tab, x, y)
    tab.wait_for_selector("#part_said >> text=now click where beak belongs")
    click(tab, x + 20, y + 20)
    tab.get_by_role("button", name="undo").click()
    tab.get_by_role("button", name="undo").click()
    tab.wait_for_selector("#part_said >> text=photos labelled by hand: 2")
    tab.get_by_role("button", name="accept found").click()
    tab.wait_for_selector("#part_said >> text=photos labelled by hand: 3")
    tab.locator("#part_choice label:has-text('the box (two corners)')").click()
    click(tab, 10, 20)
    tab.wait_for_selector("#part_said >> text=now click the opposite corner")
    click(tab, 200, 180)
    tab.locator("#part_fit").click()
    tab.wait_for_selector("#part_told >> text=Learned from 3 photos; add others to try it on")
    tab.get_by_text("found (COCO json)").wait_for(state="hidden")


def part_photo(name: str = "a.png", size: tuple[int, int] = (100, 200)) -> PartPhoto:
    return PartPhoto(name, name, b"", Frame(size, (size[0] * 2, size[1] * 2)))


def test_every_click_can_be_taken_back_where_it_was_made() -> None:
    start = Parts(("beak", "tail")).with_photos([part_photo("a.png"), part_photo("b.png")])
    first = start.with_part("beak", (3.0, 4.0)).with_part("beak", (5.0, 6.0))
    there = replace(first, at=1).with_corner((9.0, 2.0)).with_corner((1.0, 8.0))
    assert there.photos[1].marks.box == (1.0, 2.0, 9.0, 8.0)
    back = there.undone()
    assert back.photos[1].marks.box is None
    back = back.with_corner((1.0, 1.0)).undone()  # a first corner alone is forgotten
    assert (back.corner, back.photos[0].marks.places) == (None, {"beak": (5.0, 6.0)})
    back = back.undone()
    assert (back.at, back.photos[0].marks.places) == (0, {"beak": (3.0, 4.0)})
    assert back.undone().undone().photos[0].marks.places == {}


def test_what_was_found_is_learned_from_once_it_is_accepted_or_corrected() -> None:
    session = Parts(("beak", "tail")).with_photos([part_photo()])
    item = session.labelled(session.photos).objects[0]
    points = torch.tensor([[10.0, 11.0], [50.0, 51.0]])
    found = replace(item, points=points, visible=torch.tensor([True, False]))
    session = session.with_found([0], [found])
    assert session.missing() == ["tail"]  # it is not to be seen, says the detector
    assert not session.labelled(session.photos).objects[0].visible.any()
    assert session.nearest((12.0, 11.0), within=5) == "beak"
    assert session.nearest((30.0, 11.0), within=5) is None
    corrected = session.accepted().with_part("tail", (70.0, 20.0))
    learned = corrected.labelled(corrected.photos).objects[0]
    assert learned.points.tolist() == [[10.0, 11.0], [70.0, 20.0]]


def test_saved_labels_are_loaded_before_or_after_their_photos(tmp_path: Path) -> None:
    first = Parts(("beak", "tail")).with_photos([part_photo("a.png"), part_photo("b.png")])
    first = replace(first, at=0).with_part("beak", (3.0, 4.0)).with_corner((2.0, 2.0))
    first = replace(first.with_corner((90.0, 80.0)), at=1).with_part("tail", (7.0, 8.0))
    write_coco(tmp_path / "labels.json", first.labelled(first.photos))
    names, labels = read_labels(tmp_path / "labels.json", name="labels.json")
    before = with_labels(Parts(), names, labels).with_photos([part_photo("a.png")])
    after = with_labels(Parts().with_photos([part_photo("a.png")]), names, labels)
    for session in (before, after):
        assert session.names == ("beak", "tail")
        assert session.photos[0].marks.places == {"beak": (3.0, 4.0)}
        assert session.photos[0].marks.box == (2.0, 2.0, 90.0, 80.0)
        assert session.waiting.keys() == {"b.png"}
    small = with_labels(Parts(), names, labels).with_photos([part_photo("a.png", size=(3, 3))])
    assert small.photos[0].marks.places == {}


def test_labels_without_keypoints_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(
        SourceError, match=r"x\.json holds no keypoints; load a COCO keypoints json"
    ):
        read_labels(tmp_path / "x.json", name="x.json")

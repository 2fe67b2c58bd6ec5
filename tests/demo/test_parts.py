"""The page's tab for parts in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.data.drawn import draw
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.keypoints import read_coco
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures

pytest.importorskip("gradio", reason="needs the demo extra")

from browser import chromium, serve

BIRD = 1
PARTS = ("beak", "tail")
SIDE = 224


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    DenseFeatures(ModelConfig(trunk="small", lower="conv4", channels=32)).save_pretrained(folder)
    with serve(folder) as served:
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
    tab.wait_for_selector("#part label:has-text('tail')")
    with tab.expect_file_chooser() as choosing:
        tab.locator("#part_files").click()
    choosing.value.set_files(paths)
    tab.wait_for_selector("#part_said >> text=photo 1 of 3, bird0.png")
    for number, each in enumerate(drawn[:2]):
        for count, part in enumerate(PARTS):
            photo = tab.locator("#part_photo img")
            before, box = photo.get_attribute("src"), photo.bounding_box()
            names = CATEGORIES[BIRD].keypoint_names
            x, y = each.keypoints[names.index(part)].tolist()
            place = {"x": (x + 0.5) / SIDE * box["width"], "y": (y + 0.5) / SIDE * box["height"]}
            photo.click(position=place)
            tab.wait_for_function(
                "before => document.querySelector('#part_photo img')?.src !== before", arg=before
            )
            # The next part is chosen; after the last one none, so that no click moves the first.
            left = PARTS[count + 1 :]
            tab.wait_for_selector(f"#part label:has-text('{count + 1} {part} ✓')")
            assert tab.locator("#part input:checked").count() == len(left)
            assert not left or tab.locator("#part input:checked").input_value() == left[0]
        tab.wait_for_selector(f"#part_said >> text=photos with clicks: {number + 1}")
        tab.get_by_role("button", name="next photo").click()
        tab.wait_for_selector(f"#part_said >> text=photo {number + 2} of 3")
    tab.locator("#part_fit").click()
    tab.wait_for_selector("#part_told >> text=Learned from 2 photos; the parts found in 1 photo")
    tab.wait_for_selector("#part_found img")
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

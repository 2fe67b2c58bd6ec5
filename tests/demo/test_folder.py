"""Labels of one photo are carried to the folder; that folder is read and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.core.geometry import Frame
from surefeat.data.decode import SourceError
from surefeat.data.drawn import draw
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.keypoints import Labelled, read_coco, write_coco
from surefeat.demo.labels import PartPhoto, Parts

pytest.importorskip("gradio", reason="needs the demo extra")

from browser import ask, chromium, event_of, given, serve
from sets import write_model
from surefeat.demo.folder import FolderLabels, _kept, _on_carried, _sources, read_folder

BIRD, SIDE, COUNT = 1, 160, 3
PARTS = ("beak", "tail")
KNOWN = CATEGORIES[BIRD].keypoint_names


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "more").mkdir()
    for number in range(COUNT):
        bird = draw(BIRD, size=SIDE, generator=np.random.default_rng(number)).image
        name = f"more/bird{number}.png" if number else "bird0.png"
        Image.fromarray(bird.permute(1, 2, 0).numpy()).save(folder / name)
    (folder / "notes.txt").write_text("no photo")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Iterator[Any]:
    with serve(write_model(tmp_path_factory.mktemp("model")), photos=photos) as served:
        yield served


def test_labels_of_one_photo_are_carried_over_corrected_and_saved(
    page: Any, photos: Path, tmp_path: Path
) -> None:
    true = draw(BIRD, size=SIDE, generator=np.random.default_rng(0)).keypoints
    true = true[[KNOWN.index(part) for part in PARTS]]
    with chromium() as started:
        tab = started.new_context(viewport={"width": 1280, "height": 1000}).new_page()
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(page.local_url)
        tab.wait_for_selector(f"#folder_said >> text=photo 1 of {COUNT}, bird0.png")
        tab.locator("#folder_go").click()
        tab.wait_for_selector("text=click the parts in a photo first")
        tab.locator("#folder_names textarea, #folder_names input").fill(", ".join(PARTS))
        for number, (x, y) in enumerate(true.tolist(), 1):
            tab.wait_for_selector(f"#folder_choice label:has-text('{number} ') >> input:checked")
            box = tab.locator("#folder_photo img").bounding_box()
            place = {"x": (x + 0.5) / SIDE * box["width"], "y": (y + 0.5) / SIDE * box["height"]}
            tab.locator("#folder_photo .stage").click(position=place)
            tab.wait_for_selector(f"#folder_choice label:has-text('{number} ') >> text=✓")
        tab.locator("#folder_go").click()
        tab.wait_for_selector(f"#folder_told >> text=found in {COUNT - 1} photos")
        slider = tab.locator("#folder_least input[type=range]")
        slider.focus()
        tab.keyboard.press("Home")  # a score of 0: every part has a place
        tab.wait_for_selector(f"#folder_told >> text={2 * (COUNT - 1)} parts found")
        tab.locator("#folder_found .tile:has-text('bird2.png')").click()
        tab.wait_for_selector("#folder_said >> text=photo 3 of 3, more/bird2.png")
        drag(tab, 1, (0.25, 0.5))
        tab.wait_for_selector("#folder_found .tile.checked:has-text('bird2.png')")
        drag(tab, 2, (1.1, 0.5))
        tab.wait_for_selector("#folder_choice label:has-text('2 tail ✗')")
        with tab.expect_download() as waiting:
            tab.locator("#folder_save").click()
        waiting.value.save_as(tmp_path / "labels.json")
        assert [
            url for url in asked if not url.startswith((page.local_url, "data:", "blob:"))
        ] == []
    labels = read_coco(tmp_path / "labels.json", images=photos)
    assert [item.name for item in labels.objects] == [
        "bird0.png",
        "more/bird1.png",
        "more/bird2.png",
    ]
    assert labels.categories[0].keypoints == PARTS
    torch.testing.assert_close(labels.objects[0].points, true, atol=1.0, rtol=0)
    corrected = labels.objects[2]
    assert corrected.visible.tolist() == [True, False]
    # A quarter and half of the photo, in its own pixels, whose centres are at integers.
    assert corrected.points[0].tolist() == pytest.approx([39.5, 79.5], abs=1.0)


def drag(tab: Any, part: int, to: tuple[float, float]) -> None:
    disc = tab.locator(f"#folder_photo .mark >> text=/^{part}$/").bounding_box()
    box = tab.locator("#folder_photo img").bounding_box()
    tab.mouse.move(disc["x"] + disc["width"] / 2, disc["y"] + disc["height"] / 2)
    tab.mouse.down()
    x, y = box["x"] + to[0] * box["width"], box["y"] + to[1] * box["height"]
    tab.mouse.move(x, y, steps=4)
    tab.mouse.up()


def test_no_request_reads_what_was_neither_uploaded_nor_in_the_folder(
    page: Any, photos: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.png"
    Image.new("RGB", (48, 32), "red").save(secret)
    event = event_of(page, "folder_files", "upload")
    with httpx.Client(base_url=page.local_url, trust_env=False, timeout=60) as client:
        for path in (secret, photos / "notes.txt", photos / "bird0.png", tmp_path / "missing.png"):
            answer = ask(client, event, [[given(path)], None])
            shown = answer["output"].get("data")
            # What is there, is there from the start: the folder's own first photo.
            assert not shown or shown[1]["name"] == "bird0.png"
            assert not shown or "photo 1 of 3" in shown[3]
            assert client.get(f"gradio_api/file={path}").status_code in (403, 404)
        opened = event_of(page, "folder_found", "open")
        for at in (-1, 3, "../secret.png", str(secret), None):
            answer = ask(client, opened, [None], event_data={"at": at})
            assert answer["output"]["data"][1]["name"] == "bird0.png"
        sent = client.post("gradio_api/upload", files={"files": ("b.png", secret.read_bytes())})
        answer = ask(client, event, [[given(sent.json()[0])], None])
        assert "photo 4 of 4" in answer["output"]["data"][3]


@pytest.mark.parametrize("marked", [True, False])
def test_no_request_loads_labels_that_were_not_uploaded(
    page: Any, tmp_path: Path, marked: bool
) -> None:
    session = Parts(("secret part",), desk="folder").with_photos([part_photo("bird0.png")])
    session = session.with_part("secret part", (3.0, 4.0))
    write_coco(tmp_path / "secret.json", session.labelled(session.photos))
    said = []
    for name in ("secret.json", "absent.json"):  # equally long: long ones are cut
        file = given(tmp_path / name) if marked else {"path": str(tmp_path / name)}
        with httpx.Client(base_url=page.local_url, trust_env=False, timeout=60) as client:
            answer = ask(client, event_of(page, "folder_labels", "upload"), [file, None])
        assert "secret part" not in str(answer)
        said.append([answer["output"].get("error"), answer["warnings"]])
    assert str(said[0]).replace("secret.json", "absent.json") == str(said[1])


def test_a_folder_without_photos_or_none_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder at .*/none; pass one with photos"):
        read_folder(tmp_path / "none")
    with pytest.raises(SourceError, match="no images under"):
        read_folder(tmp_path)


def test_a_broken_photo_is_left_out_and_said(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.png").write_bytes((photos / "bird0.png").read_bytes())
    (tmp_path / "bad.png").write_bytes(b"\x89PNG no more")
    assert [photo.name for photo in read_folder(tmp_path)] == ["good.png"]
    assert "skipped bad.png" in capsys.readouterr().out


def part_photo(name: str) -> PartPhoto:
    Image.new("RGB", (20, 10)).save(packed := BytesIO(), format="jpeg")
    return PartPhoto(name, f"nowhere/{name}", packed.getvalue(), Frame((100, 200), (400, 800)))


def carried(session: Parts, **scores: tuple[float, float]) -> FolderLabels:
    objects = {}
    for photo in session.photos:
        if photo.name in scores:
            (item,) = session.labelled([photo]).objects
            points = torch.tensor([[10.0, 11.0], [50.0, 51.0]])
            objects[photo.path] = replace(
                item, points=points, scores=torch.tensor(scores[photo.name])
            )
    return FolderLabels(objects, probable=True)


def test_what_was_clicked_in_the_meantime_stays_and_doubt_comes_first() -> None:
    session = Parts(PARTS, desk="folder").with_photos([part_photo(name) for name in "abcd"])
    session = replace(session, at=0).with_part("beak", (3.0, 4.0))
    session = replace(session, at=3).with_part("tail", (7.0, 8.0))
    answer = _on_carried(session, carried(session, b=(0.9, 0.6), c=(0.7, 0.2), d=(1.0, 1.0)), 0.5)
    changed, told, sheet = answer[0], answer[4], answer[5]
    assert changed.photos[3].parts() == {"tail": (7.0, 8.0)}
    assert changed.photos[1].parts() == {"beak": (10.0, 11.0), "tail": (50.0, 51.0)}
    assert changed.photos[2].parts() == {"beak": (10.0, 11.0)}
    assert [tile["name"] for tile in sheet["tiles"]] == ["b", "c"]  # .6 before .7
    assert [tile["note"] for tile in sheet["tiles"]] == [
        "least sure: 2 tail, right with 60 %",
        "not found: tail",
    ]
    assert told.startswith("3 parts found in 2 photos, 1 of them right with 90 % or more.")


def test_a_part_without_a_place_is_not_kept_at_any_score() -> None:
    session = Parts(PARTS, desk="folder").with_photos([part_photo("a")])
    (item,) = carried(session, a=(0.9, 0.0)).objects.values()
    nowhere = replace(item, points=torch.tensor([[10.0, 11.0], [torch.nan, torch.nan]]))
    assert _kept(item, 0.0).visible.tolist() == [True, True]
    assert _kept(nowhere, 0.0).visible.tolist() == [True, False]


def test_only_what_was_labelled_by_hand_is_carried_over() -> None:
    session = Parts(PARTS, desk="folder").with_photos([part_photo(name) for name in "abcdef"])
    session = replace(session, at=1).with_part("beak", (3.0, 4.0))
    assert [photo.name for photo in _sources(session)] == ["b"]
    session = _on_carried(session, carried(session, c=(0.9, 0.6)), 0.5)[0]
    session = replace(session, at=2).with_part("beak", (5.0, 5.0))  # a correction is no source
    assert [photo.name for photo in _sources(session)] == ["b"]
    for at in (0, 3, 4):
        session = replace(session, at=at).with_part("tail", (1.0, 1.0))
    assert [photo.name for photo in _sources(session)] == ["a", "b", "d"]


def test_saved_scores_are_of_the_carried_the_clicked_are_certain() -> None:
    session = Parts(PARTS, desk="folder").with_photos([part_photo("a")])
    session = _on_carried(session, carried(session, a=(0.9, 0.6)), 0.5)[0]
    item: Labelled = session.labelled(session.photos, found=True).objects[0]
    assert item.scores is not None
    assert item.scores.tolist() == pytest.approx([0.9, 0.6])
    session = session.with_part("beak", (3.0, 3.0)).with_part("tail", None)
    item = session.labelled(session.photos, found=True).objects[0]
    assert item.scores is not None
    assert item.scores.tolist() == [1.0, 0.0]
    assert item.visible.tolist() == [True, False]

"""The page reads what was dropped on it and nothing else, and answers itself alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from sets import write_model

pytest.importorskip("gradio", reason="needs the demo extra")

from browser import ask, event_of, given, serve
from surefeat.demo.app import launch


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serve(write_model(tmp_path_factory.mktemp("model"))) as served:
        yield served


@pytest.fixture
def visitor(page: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page.local_url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.png"
    Image.new("RGB", (48, 32), "red").save(path)
    return path


@pytest.mark.parametrize("marked", [True, False])
def test_a_path_that_was_not_uploaded_is_not_read_nor_told_from_a_missing_one(
    page: Any, visitor: httpx.Client, secret: Path, tmp_path: Path, marked: bool
) -> None:
    answers = []
    for path in (secret, tmp_path / "missing.png", tmp_path, f"{tmp_path}/../{tmp_path.name}/x"):
        photo = given(path) if marked else {"path": str(path), "orig_name": "a.png"}
        answer = ask(visitor, event_of(page, "photo0", "upload"), [photo, None])
        shown = answer["output"].get("data")
        assert not shown or shown[1] is None
        said = json.dumps([answer["warnings"], answer["output"].get("error")])
        answers.append(said.replace(os.path.abspath(path), "PATH"))
    assert len(set(answers)) == 1


def test_the_parts_tab_reads_uploads_alone(page: Any, visitor: httpx.Client, secret: Path) -> None:
    event = event_of(page, "part_files", "upload")
    for photo in (given(secret), {"path": str(secret)}, "http://127.0.0.1:9/x.png", str(secret)):
        answer = ask(visitor, event, [[photo], None])
        shown = answer["output"].get("data")
        assert not shown or shown[1] is None


def test_an_upload_is_read(page: Any, visitor: httpx.Client, secret: Path) -> None:
    sent = visitor.post("gradio_api/upload", files={"files": ("a.png", secret.read_bytes())})
    (path,) = sent.json()
    for name, data in (("photo0", given(path)), ("part_files", [given(path)])):
        answer = ask(visitor, event_of(page, name, "upload"), [data, None])
        assert answer["success"]
        shown = answer["output"]["data"][1]
        assert shown.get("path") or shown["photo"].startswith("data:image/jpeg;base64,")
        assert answer["warnings"] == []


@pytest.mark.parametrize(
    "data", [None, {}, {"path": None}, {"path": "a\0b"}, {"path": ""}, {"path": "/proc/self/cwd"}]
)
def test_what_is_no_upload_at_all_is_one_line(page: Any, visitor: httpx.Client, data: Any) -> None:
    answer = ask(visitor, event_of(page, "photo0", "upload"), [data, None])
    assert answer["success"]
    (said,) = answer["warnings"]
    assert said == "the photo: was not uploaded here; drop the photo on the page"


def test_a_click_where_no_photo_is_gets_an_answer(page: Any, visitor: httpx.Client) -> None:
    ask(visitor, event_of(page, "part_names", "change"), ["wheel", None], session="clicker")
    event = event_of(page, "part_photo", "put")
    answer = ask(
        visitor, event, [None, "wheel"], event_data={"place": [0.3, 0.4]},
        session="clicker",
    )  # fmt: skip
    assert answer["success"]
    assert "add a photo first" in answer["warnings"][0]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:7860"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "127.0.0.1:@evil.example"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "http://127.0.0.1.evil.example"},
    ],
)
def test_other_hosts_and_origins_are_refused(
    page: Any, visitor: httpx.Client, headers: dict[str, str]
) -> None:
    photo = {"files": ("a.png", b"x")}
    assert visitor.get("", headers=headers).status_code == 403
    assert visitor.get("config", headers=headers).status_code == 403
    assert visitor.post("gradio_api/upload", files=photo, headers=headers).status_code == 403


def test_the_page_answers_itself_under_both_names_and_through_a_tunnel(
    page: Any, visitor: httpx.Client
) -> None:
    own = page.local_url.removeprefix("http://").rstrip("/")
    for host in (own, own.replace("127.0.0.1", "localhost"), "localhost:9000", "127.0.0.1"):
        headers = {"host": host, "origin": f"http://{host}"}
        assert visitor.get("", headers=headers).status_code == 200


@pytest.mark.parametrize("port", [80_000, 0, -1])
def test_a_port_that_is_none_is_said(port: int) -> None:
    with pytest.raises(ValueError, match=f"port is {port}; use 1 to 65535"):
        launch(port=port, device="cpu", block=False)

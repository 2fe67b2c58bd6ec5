"""A browser, a served page and requests written by hand, for the tests that look at the page."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def serve(model: Path, *, photos: Path | None = None) -> Iterator[Any]:
    """The web page with a model, perhaps with a folder of photos, on a port that is free."""
    from surefeat.demo.app import launch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = launch(model, photos=photos, port=port, device="cpu", block=False)
    yield served
    served.close(verbose=False)


@contextmanager
def chromium() -> Iterator[Any]:
    """Debian's chromium, driven by playwright; where one is missing the test is skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs the chromium browser: apt-get install chromium")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=quiet)
        yield started
        started.close()


def event_of(page: Any, name: str, event: str) -> int:
    """The number under which the queue knows what happens at an event of a named element."""
    (element,) = [part for part in page.config["components"]
                  if part["props"].get("elem_id") == name]  # fmt: skip
    (number,) = [known["id"] for known in page.config["dependencies"]
                 if [element["id"], event] in map(list, known["targets"])]  # fmt: skip
    return int(number)


def ask(client: Any, event: int, data: list[Any], **more: Any) -> dict[str, Any]:
    """What the queue answers when an event is sent by hand, and the warnings on the way."""
    session = more.pop("session", "0123456789")
    sent = {"data": data, "fn_index": event, "session_hash": session, **more}
    client.post("gradio_api/queue/join", json=sent).raise_for_status()
    warnings = []
    with client.stream("GET", "gradio_api/queue/data", params={"session_hash": session}) as lines:
        for line in lines.iter_lines():
            said = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if said.get("msg") == "log":
                warnings.append(said["log"])
            if said.get("msg") == "process_completed":
                return {**said, "warnings": warnings}
    raise AssertionError("the queue did not answer")


def given(path: Path | str) -> dict[str, Any]:
    """A photo as the browser names it after the upload."""
    return {"path": str(path), "orig_name": "a.png", "meta": {"_type": "gradio.FileData"}}

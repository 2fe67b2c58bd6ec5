"""A browser and a served page, for the tests that look at them."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def serve(model: Path) -> Iterator[Any]:
    """The web page with a model, on a port that is free."""
    from surefeat.demo.app import launch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = launch(model, port=port, device="cpu", block=False)
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

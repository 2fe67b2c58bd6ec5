"""Fixtures shared by the tests."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sets import write_model, write_pairs, write_proposals
from tiny import save_blank

# Other work on the machine must not fail a test: examples have no deadline. Without hypothesis the
# files that need it are not collected; the others run.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("surefeat", deadline=None)
    settings.load_profile("surefeat")


def pytest_configure() -> None:
    """pytest-xdist runs one worker per core, so each worker keeps to one thread.

    Fixtures of a file and processes that tests start too: two threads on one core wait for each
    other longer than they compute.
    """
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """A test that asked for more keeps them to itself."""
    torch.set_num_threads(1)


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A reader that blocks ends the run with a traceback instead of stopping it for ever."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of a pixel, where what is drawn does not matter: drawing takes most of the time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save_blank)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The development data: SUREFEAT_DATA, or shared/data beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("SUREFEAT_DATA", beside))
    if not (root / "lists").is_dir():
        pytest.skip(f"needs the development data (not at {root}); set SUREFEAT_DATA")
    return root


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The list of a drawn benchmark."""
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network for the drawn benchmark."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def boxes(listed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Proposals of the drawn benchmark, computed once for all tests of a file."""
    return write_proposals(listed, tmp_path_factory.mktemp("proposals") / "p.safetensors")

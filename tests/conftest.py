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


# Files that take longest come first: with pytest-xdist the one that is begun last decides when all
# are done, and by itself it begins with those of most tests.
LONG = (
    "cli/test_main.py", "test_commands_in_pages.py", "cli/test_every_command.py",
    "demo/test_app.py", "index/test_ray_engine.py", "test_export.py", "learn/test_resume.py",
    "boxes/test_drawn.py", "keypoints/test_keypoint_detector.py", "learn/test_learning.py",
    "test_notebook.py", "match/test_match_rendered.py", "demo/test_board.py",
    "demo/test_parts.py", "demo/test_folder.py", "model/test_backbone.py", "index/test_find.py",
    "keypoints/test_transfer.py", "learn/test_start.py", "cli/test_keypoint_cli.py",
    "peers/test_proposal_flow.py", "measure/test_evaluate.py", "show/test_report.py",
    "peers/test_landmarks.py", "show/test_match_page.py", "measure/test_rows.py",
    "boxes/test_learned.py", "peers/test_scnet.py", "data/test_pascal3d.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turn = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: turn.get(item.path, len(LONG)))


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

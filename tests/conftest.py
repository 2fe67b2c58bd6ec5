"""Fixtures shared by the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Other work on the machine must not fail a test: examples have no deadline.
settings.register_profile("surefeat", deadline=None)
settings.load_profile("surefeat")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """pytest-xdist runs one worker per core, so each worker keeps to one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The development data: SUREFEAT_DATA, or shared/data beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("SUREFEAT_DATA", beside))
    if not (root / "lists").is_dir():
        pytest.skip(f"needs the development data (not at {root}); set SUREFEAT_DATA")
    return root

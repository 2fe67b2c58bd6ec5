"""The proposals file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.boxes.config import BoxesConfig, check_boxes_config
from surefeat.data.sources import find_images
from surefeat.match import proposals as detect_proposals
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import (
    key_of,
    make_proposals,
    propose_for,
    read_proposals,
    write_proposals,
)

GRID = ProposalConfig(method="grid", count=30)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for i in range(5):
        Image.new("RGB", (60 + i, 40), (40 * i, 0, 0)).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path / "photos"


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    boxes = torch.tensor([[0.0, 1, 30, 40], [5, 5, 6, 700]])
    given = {"b" * 32: boxes, "a" * 32: torch.zeros(0, 4)}
    write_proposals(given, GRID, tmp_path / "p.npz")
    found = read_proposals(tmp_path / "p.npz", GRID)
    assert found.keys() == given.keys()
    assert torch.equal(found["b" * 32], boxes)
    assert found["a" * 32].shape == (0, 4)


def test_proposals_are_made_once_and_added_to(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, file = find_images(photos), tmp_path / "p.npz"
    assert make_proposals(items[:3], GRID, file=file, quiet=True) == 3
    asked: list[torch.Tensor] = []
    make = detect_proposals.propose_for
    monkeypatch.setattr(
        detect_proposals, "propose_for", lambda image, c: asked.append(image) or make(image, c)
    )
    assert make_proposals(items, GRID, file=file, quiet=True) == 2
    assert len(asked) == 2
    assert make_proposals(items, GRID, file=file, quiet=True) == 0
    found = read_proposals(file, GRID)
    assert found.keys() == {key_of(path.read_bytes()) for path in photos.iterdir()}


def test_the_file_keeps_what_the_proposer_gives(photos: Path, tmp_path: Path) -> None:
    items, file = find_images(photos), tmp_path / "p.npz"
    make_proposals(items, GRID, file=file, quiet=True)
    pixels = torch.from_numpy(np.array(Image.open(photos / "2.png"))).permute(2, 0, 1)
    found = read_proposals(file)[key_of((photos / "2.png").read_bytes())]
    assert torch.equal(found, propose_for(pixels, GRID))
    assert found.max() <= 61


def test_a_corrupt_image_does_not_stop_the_others(photos: Path, tmp_path: Path) -> None:
    (photos / "2.png").write_bytes(b"nothing")
    assert make_proposals(find_images(photos), GRID, file=tmp_path / "p.npz", quiet=True) == 4


def test_other_settings_and_damaged_files_are_refused(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.npz"
    make_proposals(find_images(photos), GRID, file=file, quiet=True)
    with pytest.raises(ValueError, match="of other settings"):
        read_proposals(file, replace(GRID, seed=1))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged or holds no proposals"):
        read_proposals(file, GRID)
    with pytest.raises(FileNotFoundError, match="surefeat boxes propose"):
        read_proposals(tmp_path / "gone.npz")


def test_a_number_that_cannot_work_is_said_before_anything_begins() -> None:
    with pytest.raises(ValueError, match=r"--proposals\.count is 0"):
        check_boxes_config(BoxesConfig(proposals=ProposalConfig(count=0)))

"""The proposals file and EdgeBoxes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.boxes.config import BoxesConfig, check_boxes_config
from surefeat.core.geometry import box_iou
from surefeat.data.sources import find_images
from surefeat.match import proposals as detect_proposals
from surefeat.match.config import ProposalConfig
from surefeat.match.edge_boxes import edge_boxes, gradient_edges
from surefeat.match.proposals import (
    Proposals,
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
    given = {"b" * 32: Proposals(boxes, torch.tensor([0.25, 0.5])),
             "a" * 32: Proposals(torch.zeros(0, 4), torch.zeros(0))}  # fmt: skip
    write_proposals(given, GRID, tmp_path / "p.npz")
    found = read_proposals(tmp_path / "p.npz", GRID)
    assert found.keys() == given.keys()
    assert torch.equal(found["b" * 32].boxes, boxes)
    scores = found["b" * 32].scores
    assert scores is not None
    assert scores.tolist() == [0.25, 0.5]
    assert found["a" * 32].boxes.shape == (0, 4)


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
    assert torch.equal(found.boxes, propose_for(pixels, GRID).boxes)
    assert found.boxes.max() <= 61


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


def test_gradient_edges_lie_on_the_outline() -> None:
    picture = np.zeros((60, 80, 3), np.float32)
    picture[20:40, 30:60] = 1
    edges, angles = gradient_edges(picture)
    assert (edges.min(), edges.max()) == (0, 1)
    strong = edges > 0.5
    rows, columns = np.nonzero(strong)
    near = (np.abs(rows - 19.5) <= 1.5) | (np.abs(rows - 39.5) <= 1.5)
    near |= (np.abs(columns - 29.5) <= 1.5) | (np.abs(columns - 59.5) <= 1.5)
    assert near.all()
    # Thin: an upright edge is crossed by at most two strong pixels in a row.
    assert strong[30, 20:45].sum() in (1, 2)
    # The angle is that of the normal: 0 at upright edges, pi/2 at level ones.
    upright, level = angles[25:35, 28:32][strong[25:35, 28:32]], angles[18:22, 35:55]
    assert np.abs(np.sin(upright)).max() < 0.1
    assert np.abs(level[strong[18:22, 35:55]] - np.pi / 2).max() < 0.1
    assert ((angles >= 0) & (angles < np.pi)).all()


def test_edge_boxes_find_a_plain_object_and_score_it_best() -> None:
    pytest.importorskip("cv2").ximgproc  # noqa: B018
    image = torch.full((3, 120, 160), 30, dtype=torch.uint8)
    image[:, 40:90, 50:120] = torch.tensor([220, 60, 60], dtype=torch.uint8)[:, None, None]
    boxes, scores = edge_boxes(image, count=200)
    assert 0 < len(boxes) <= 200
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)
    assert box_iou(torch.tensor([[50.0, 40, 119, 89]]), boxes[:5]).max() > 0.8


def test_an_image_without_edges_has_no_edge_boxes() -> None:
    pytest.importorskip("cv2").ximgproc  # noqa: B018
    found = propose_for(torch.zeros(3, 50, 50, dtype=torch.uint8), ProposalConfig(method="edges"))
    assert found.boxes.shape == (0, 4)
    assert found.scores is not None


def test_a_missing_edge_model_is_said_before_anything_begins() -> None:
    config = BoxesConfig(proposals=ProposalConfig(method="edges", edge_model="nowhere.yml.gz"))
    with pytest.raises(FileNotFoundError, match="no edge model at nowhere"):
        check_boxes_config(config)
    with pytest.raises(ValueError, match=r"--proposals\.count is 0"):
        check_boxes_config(BoxesConfig(proposals=ProposalConfig(count=0)))

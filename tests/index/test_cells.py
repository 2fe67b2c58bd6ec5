"""Cells of a photo: where they lie, what they hold, which are kept, how they are projected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from surefeat.core.files import pack_tensors
from surefeat.core.geometry import Frame
from surefeat.index.cells import Projection, all_cells, kept_cells
from surefeat.match.search import prepare
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features

ROWS, COLUMNS, STRIDE = 5, 7, 16


def features(seed: int = 0, *, scale: int = 3) -> Features:
    """Random maps of a photo `scale` times as large as the network saw it."""
    generator = torch.Generator().manual_seed(seed)
    network = (ROWS * STRIDE, COLUMNS * STRIDE)
    return Features(
        descriptors=F.normalize(torch.randn(6, ROWS, COLUMNS, generator=generator), dim=0),
        uncertainty=torch.rand(ROWS, COLUMNS, generator=generator) + 0.1,
        lower=F.normalize(torch.randn(9, 2 * ROWS, 2 * COLUMNS, generator=generator), dim=0),
        frame=Frame((scale * network[0], scale * network[1]), network),
        stride=STRIDE,
    )


def test_every_cell_has_its_descriptor_its_place_in_the_photo_and_its_confidence() -> None:
    photo = features()
    cells = all_cells(photo)
    assert len(cells) == ROWS * COLUMNS
    for row in range(ROWS):
        for column in range(COLUMNS):
            number = row * COLUMNS + column
            assert cells.number[number] == number
            # A cell covers 48 original pixels; its centre lies 23.5 pixels behind its first.
            assert cells.points[number].tolist() == pytest.approx(
                [48 * column + 23.5, 48 * row + 23.5], abs=1e-3
            )
            own = photo.descriptors[:, row, column]
            assert torch.allclose(cells.vectors[number], own, atol=1e-5)
            sigma = float(photo.uncertainty[row, column])
            assert float(cells.confidence[number]) == pytest.approx(1 / sigma, rel=1e-4)


def test_kept_cells_are_the_best_that_are_not_too_close_by_a_slow_loop() -> None:
    photo, budget = features(1), 9
    every, kept = all_cells(photo), kept_cells(photo, budget=budget)
    worth = every.confidence.tolist()
    span = every.points.amax(0) - every.points.amin(0)
    apart = float(span[0] * span[1]) / (4 * budget)
    chosen: list[int] = []
    for number in sorted(range(len(worth)), key=lambda n: -worth[n]):
        far = (
            float((every.points[number] - every.points[o]).square().sum()) >= apart for o in chosen
        )
        if len(chosen) < budget and all(far):
            chosen.append(number)
    assert kept.number.tolist() == sorted(chosen)
    assert len(kept) == budget
    for name in ("points", "vectors", "confidence"):
        assert torch.allclose(getattr(kept, name), getattr(every, name)[kept.number])


def test_a_budget_beyond_all_cells_keeps_all_and_one_of_none_is_refused() -> None:
    assert kept_cells(features(), budget=1000).number.tolist() == list(range(ROWS * COLUMNS))
    with pytest.raises(ValueError, match="use at least 1"):
        kept_cells(features(), budget=0)


def test_a_projection_that_only_turns_keeps_the_similarities_that_matching_compares() -> None:
    photo = features(2)
    turn = torch.linalg.qr(torch.randn(15, 15, generator=torch.Generator().manual_seed(3)))[0]
    cells = all_cells(photo, projection=Projection(turn))
    side = prepare(photo, descriptor_weight=POINT_WEIGHTS[0], lower_weight=POINT_WEIGHTS[1])
    compared = side.at(cells.points)
    assert torch.allclose(cells.vectors @ cells.vectors.T, compared @ compared.T, atol=1e-5)
    assert cells.vectors.shape == (ROWS * COLUMNS, 15)


def test_projected_vectors_have_unit_length_and_the_projection_survives_its_file(
    tmp_path: Path,
) -> None:
    projection = Projection(torch.randn(15, 4, generator=torch.Generator().manual_seed(4)))
    cells = kept_cells(features(), budget=5, projection=projection)
    assert torch.allclose(cells.vectors.norm(dim=1), torch.ones(len(cells)), atol=1e-5)
    projection.save(tmp_path / "p.safetensors")
    again = Projection.load(tmp_path / "p.safetensors")
    assert torch.equal(again.matrix, projection.matrix)
    assert again.digest == projection.digest
    assert Projection(projection.matrix + 1e-3).digest != projection.digest


def test_another_models_projection_and_another_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vectors of 8 numbers, not of 15; use the one"):
        all_cells(features(), projection=Projection(torch.eye(8)))
    (tmp_path / "x.safetensors").write_bytes(pack_tensors({"matrix": torch.eye(3)}))
    with pytest.raises(ValueError, match="holds no projection"):
        Projection.load(tmp_path / "x.safetensors")

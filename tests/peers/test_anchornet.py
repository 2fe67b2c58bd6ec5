"""AnchorNet: losses against loops, its reduction against numpy, and filters that know a class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.data.drawn import draw_many
from surefeat.data.sources import PhotoLabels
from surefeat.learn.runs import Run
from surefeat.peers.anchornet import (
    AnchorConfig,
    AnchorNet,
    Reduction,
    anchor_row_of,
    discriminability,
    filter_likeness,
    filter_report,
    fit_reductions,
    hypercolumns,
    label_losses,
    learn_anchornet,
    packing_loss,
    place_likeness,
    reduce_cells,
    silence,
)
from surefeat.peers.fit import label_table
from surefeat.peers.fitting import FitConfig, load_peer
from tiny import CPU

SMALL = AnchorConfig(
    classes=3, filters=4, channels=8, cells=12, side=48, packing=0.2,
    fit=FitConfig(steps=180, batch=8, lr=2e-2, log_every=20, checkpoint_every=50),
)  # fmt: skip


def layers(images: Tensor) -> list[Tensor]:
    """Three sizes of small patches instead of a network."""
    floats = images.float() / 255
    return [F.pixel_unshuffle(floats, 4), F.pixel_unshuffle(floats, 8), F.avg_pool2d(
        F.pixel_unshuffle(floats, 4), 4)]  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> tuple[Tensor, Tensor]:
    """Photos of three drawn categories, and their labels."""
    instances = [one for one in draw_many(90, size=48, seed=0) if one.category < 3]
    labels = torch.full((len(instances), 3), -1.0)
    for row, one in enumerate(instances):
        labels[row, one.category] = 1
    return torch.stack([one.image for one in instances]), labels


@pytest.fixture(scope="module")
def reductions(drawn: tuple[Tensor, Tensor]) -> list[Reduction]:
    generator = torch.Generator().manual_seed(0)
    return fit_reductions([layers(drawn[0])], count=8, per_map=9, generator=generator)


def test_the_reduction_is_that_of_a_singular_value_decomposition() -> None:
    cells = torch.randn(50, 6) @ torch.randn(6, 6)
    ours = reduce_cells(cells, 3)
    centred = (cells - cells.mean(0)).numpy()
    directions = np.linalg.svd(centred, full_matrices=False)[2][:3]
    for mine, other in zip(ours.directions.numpy(), directions, strict=True):
        assert abs(float(mine @ other)) == pytest.approx(1, abs=1e-3)
    moved = ours(cells.T.reshape(1, 6, 5, 10))
    expected = torch.from_numpy(centred @ ours.directions.numpy().T)
    torch.testing.assert_close(moved.flatten(2)[0].T, expected, atol=1e-4, rtol=1e-3)


def test_losses_are_those_of_loops() -> None:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randn(2, 3, 4, 5, 5, generator=generator, dtype=torch.float64)
    maps, labels = F.softplus(raw), torch.tensor([[1.0, -1, 0], [-1, 1, 1]])
    for b in range(2):
        for n in range(3):
            y = float(labels[b, n])
            tops = sum(float(maps[b, n, k].max()) for k in range(4)) / 4
            loud = sum(float(raw[b, n, k].clamp_min(0).mean()) for k in range(4)) / 4
            assert float(discriminability(maps, labels)[b, n]) == pytest.approx(-y * tops)
            expected = loud if y < 0 else 0.0
            assert float(silence(raw, labels)[b, n]) == pytest.approx(expected)
            pairs = [
                float(F.cosine_similarity(maps[b, n, i].flatten(), maps[b, n, j].flatten(), dim=0))
                for i in range(4) for j in range(4) if i != j
            ]  # fmt: skip
            expected = sum(value**2 for value in pairs) / 12
            assert float(place_likeness(maps)[b, n]) == pytest.approx(expected)
    filters = torch.randn(1, 3, 6, 3, 3, generator=generator, dtype=torch.float64)
    total = 0.0
    for i in range(3):
        for j in range(3):
            taps = [
                float(F.cosine_similarity(filters[0, i, :, y, x], filters[0, j, :, y, x], dim=0))
                for y in range(3) for x in range(3)
            ]  # fmt: skip
            total += abs(sum(taps)) if i != j else 0.0
    assert float(filter_likeness(filters)) == pytest.approx(total / 6)


def test_losses_have_the_gradients_of_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    raw = torch.randn(1, 2, 3, 4, 4, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([[1.0, -1]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda r: discriminability(F.softplus(r), labels), raw)
    assert torch.autograd.gradcheck(lambda r: silence(r, labels), raw)
    assert torch.autograd.gradcheck(lambda r: place_likeness(F.softplus(r)), raw)
    filters = torch.randn(1, 3, 4, 3, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(filter_likeness, filters)


def test_maps_in_different_places_are_unlike_and_equal_ones_alike() -> None:
    apart = torch.zeros(1, 1, 4, 4, 4)
    for k in range(4):
        apart[0, 0, k, k] = 1
    assert float(place_likeness(apart)) == 0
    assert float(place_likeness(torch.ones(1, 1, 4, 4, 4))) == pytest.approx(1)
    taps = torch.zeros(1, 3, 3, 3, 3)
    for k in range(3):
        taps[0, k, k] = 1
    assert float(filter_likeness(taps)) == 0


def test_an_orthonormal_packing_of_full_rank_loses_nothing() -> None:
    config = replace(SMALL, classes=1, filters=8, dropped=0.0)
    model = AnchorNet(config)
    with torch.no_grad():
        model.pack.copy_(torch.linalg.qr(torch.randn(8, 8))[0])
    maps = torch.rand(2, 8, 5, 5)
    generator = torch.Generator().manual_seed(0)
    assert float(packing_loss(model, maps, generator).detach()) < 1e-9
    noisy = AnchorNet(replace(config, dropped=0.5))
    noisy.load_state_dict(model.state_dict())
    assert float(packing_loss(noisy, maps, generator).detach()) > 0.1


def test_classes_are_weighed_alike_and_unsure_photos_count_for_neither() -> None:
    torch.manual_seed(0)
    model = AnchorNet(SMALL)
    columns = F.normalize(torch.randn(4, 24, 6, 6), dim=1)
    labels = torch.tensor([[1.0, -1, 0]] * 4)
    taken = label_losses(model, columns, labels)
    maps = F.softplus(model(columns)).unflatten(1, (3, 4))
    tops = maps.flatten(3).amax(-1).mean((0, 2))
    assert taken["discriminability"].item() == pytest.approx(float(tops[1] - tops[0]), abs=1e-5)
    photos = [PhotoLabels("a", None, frozenset("x"), frozenset("z"))]  # type: ignore[arg-type]
    assert label_table(photos, ("x", "y", "z")).tolist() == [[1, -1, 0]]


def test_filters_of_a_class_fire_on_it(
    tmp_path: Path, drawn: tuple[Tensor, Tensor], reductions: list[Reduction]
) -> None:
    photos, labels = drawn

    def columns_of(images: Tensor) -> Tensor:
        return hypercolumns(layers(images), reductions, SMALL.cells)

    assert columns_of(photos[:2]).shape == (2, 24, 12, 12)
    run = Run.start(tmp_path / "run", SMALL, device="cpu")
    learn_anchornet(
        columns_of, photos, labels, reductions, run, SMALL, about={}, device=CPU, quiet=True
    )
    stored = load_peer(tmp_path / "run")
    assert stored.about["auroc of the filters' maxima"] > 0.9
    assert stored.about["dead filters"] < 1
    torch.manual_seed(0)
    before = filter_report(AnchorNet(SMALL), columns_of, photos, labels, device=CPU)
    assert before["auroc of the filters' maxima"] < stored.about["auroc of the filters' maxima"]
    lines = run.metrics()
    assert lines[-1]["packing"] > 0 == lines[0]["packing"]
    model = AnchorNet(SMALL)
    model.load_state_dict({k: v for k, v in stored.tensors.items() if k in model.state_dict()})
    row = anchor_row_of("anchornet", model, columns_of, "0" * 64, {})
    (features,) = row.extract(photos[:1])
    assert features.descriptors.shape == (8, 12, 12)
    torch.testing.assert_close(features.descriptors.norm(dim=0), torch.ones(12, 12))
    assert row.maps(photos[:2], cells=6).shape == (2, 8, 6, 6)

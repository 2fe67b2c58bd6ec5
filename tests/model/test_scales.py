"""Several sizes of one image as one set of features: scores are means over the sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.match.search import find, prepare
from surefeat.model import features
from surefeat.model.config import ModelConfig
from surefeat.model.features import Features, join_scales
from surefeat.model.network import DenseFeatures
from tiny import a_reliability


def seen(rows: int, columns: int, seed: int, *, finer: int = 1) -> Features:
    """Random features of a 60 x 90 image seen at stride 8."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    return Features(
        descriptors=F.normalize(torch.randn(5, *shape, generator=generator), dim=0),
        uncertainty=torch.rand(*shape, generator=generator) + 0.1,
        lower=F.normalize(torch.rand(7, rows * finer, columns * finer, generator=generator), dim=0),
        frame=Frame((60, 90), (8 * rows, 8 * columns)),
        stride=8,
    )


def grown(maps: Tensor, rows: int, columns: int) -> np.ndarray:
    """Maps (C, h, w) read between their cells' centres, one place after the other."""
    table = maps.numpy().astype(np.float64)
    _, height, width = table.shape
    found = np.zeros((len(table), rows, columns))
    for y in range(rows):
        for x in range(columns):
            v = min(max((y + 0.5) * height / rows - 0.5, 0), height - 1)
            u = min(max((x + 0.5) * width / columns - 0.5, 0), width - 1)
            top, left = min(int(v), height - 1), min(int(u), width - 1)
            low, beside = min(top + 1, height - 1), min(left + 1, width - 1)
            above = (1 - u + left) * table[:, top, left] + (u - left) * table[:, top, beside]
            below = (1 - u + left) * table[:, low, left] + (u - left) * table[:, low, beside]
            found[:, y, x] = (1 - v + top) * above + (v - top) * below
    return found


def unit(maps: np.ndarray) -> np.ndarray:
    return maps / np.linalg.norm(maps, axis=0)


@pytest.mark.parametrize("layer", ["descriptors", "lower"])
@pytest.mark.parametrize("grids", [[(4, 6), (6, 9)], [(6, 9), (4, 6)], [(4, 6), (5, 7), (6, 9)]])
def test_a_score_is_the_mean_over_the_sizes(layer: str, grids: list[tuple[int, int]]) -> None:
    """Every place of one image with every place of another, by a loop over the sizes."""
    finer = 2 if layer == "lower" else 1
    images = [[seen(*grid, seed=10 * i + n, finer=finer) for n, grid in enumerate(grids)]
              for i in range(2)]  # fmt: skip
    rows, columns = 6 * finer, 9 * finer
    expected = np.zeros((rows * columns, rows * columns))
    for part0, part1 in zip(*images, strict=True):
        maps = [unit(grown(getattr(part, layer), rows, columns)) for part in (part0, part1)]
        expected += maps[0].reshape(len(maps[0]), -1).T @ maps[1].reshape(len(maps[1]), -1)
    joined = [getattr(join_scales(parts), layer) for parts in images]
    assert joined[0].shape[1:] == (rows, columns)
    scores = joined[0].flatten(1).T @ joined[1].flatten(1)
    assert np.allclose(scores.numpy(), expected / len(grids), atol=1e-5)


def test_sigma_is_the_mean_over_the_sizes() -> None:
    parts = [seen(4, 6, seed=0), seen(6, 9, seed=1)]
    expected = (grown(parts[0].uncertainty[None], 6, 9)[0] + parts[1].uncertainty.numpy()) / 2
    assert np.allclose(join_scales(parts).uncertainty.numpy(), expected, atol=1e-6)


def test_joined_features_answer_in_the_frame_of_the_largest() -> None:
    parts = [seen(6, 9, seed=0), seen(4, 6, seed=1)]
    joined = join_scales(parts)
    assert (joined.frame, joined.stride) == (parts[0].frame, 8)
    points = torch.tensor([[4.5, 4.5], [44.5, 29.5], [80.0, 50.0]])
    torch.testing.assert_close(joined.at(points).norm(dim=1), torch.ones(3))
    # The part that was finest is only scaled, so it still lies where it lay.
    torch.testing.assert_close(F.normalize(joined.descriptors[:5], dim=0), parts[0].descriptors)
    side = prepare(joined, descriptor_weight=1.0, lower_weight=0.0)
    found = find(side, side, points, None, refine=False).points
    assert float((found - points).abs().max()) < 5  # a cell is 10 px


def test_the_slower_way_sees_an_image_larger_and_mirrored_too() -> None:
    torch.manual_seed(0)
    model = DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).eval()
    image = torch.randint(0, 255, (3, 48, 64), dtype=torch.uint8)
    (joined,) = model.extract(image, longest_side=80, slower=True)
    small, large, small_mirrored, large_mirrored = (
        model.extract(pixels, longest_side=side)[0]
        for pixels in (image, image.flip(-1)) for side in (80, 112)
    )  # fmt: skip
    assert joined.frame == large.frame == Frame((48, 64), (88, 112))
    parts = joined.descriptors.split(8)
    # All four count the same, and the larger ones' cells are its own.
    torch.testing.assert_close(2 * parts[2], large.descriptors)
    torch.testing.assert_close(2 * parts[3], large_mirrored.descriptors.flip(-1))
    point = torch.tensor([[33.0, 20.0]])
    cell = large.cells(point)[0].round().long()
    centre = (cell + 0.5) * 8 * torch.tensor([64 / 112, 48 / 88]) - 0.5
    there = torch.tensor([63.0, 0.0]) + centre * torch.tensor([-1.0, 1.0])
    for part, seen_at, known in ((parts[0], centre, small), (parts[1], there, small_mirrored)):
        mine = 2 * part[:, cell[1], cell[0]]
        torch.testing.assert_close(mine, known.at(seen_at[None])[0], atol=1e-4, rtol=1e-3)


def test_the_slower_way_keeps_names_and_order_and_takes_one_image(tmp_path: Path) -> None:
    model = DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).eval()
    for number, size in enumerate(((64, 48), (48, 64), (64, 48))):
        Image.new("RGB", size, (80 * number, 40, 10)).save(tmp_path / f"{number}.png")
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    seen = model.extract(paths, longest_side=64, slower=True)
    assert [one.name for one in seen] == [str(path) for path in paths]
    assert [one.frame.original for one in seen] == [(48, 64), (64, 48), (48, 64)]
    assert len(model.extract(paths[0], longest_side=64, slower=True)) == 1
    few = model.extract(paths, longest_side=64, slower=True, batch=1)
    for one, other in zip(few, seen, strict=True):
        torch.testing.assert_close(one.descriptors, other.descriptors)


def test_the_slower_way_holds_no_more_mirrored_images_than_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = list[str]()
    for name in ("load", "join_scales"):
        known = getattr(features, name)
        noted = lambda given, name=name, known=known: (order.append(name), known(given))[1]  # noqa: E731
        monkeypatch.setattr(features, name, noted)
    model = DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).eval()
    images = [torch.zeros(3, 32, 32, dtype=torch.uint8)] * 5
    assert len(model.extract(images, longest_side=32, slower=True, batch=2)) == 5
    two = ["load", "load", "join_scales", "join_scales"]
    assert order == [*two, *two, "load", "join_scales"]


def test_the_slower_way_does_not_pass_over_tiles() -> None:
    model = DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).eval()
    with pytest.raises(ValueError, match="leave out slower=True or tiles=True"):
        model.extract(torch.zeros(3, 32, 32, dtype=torch.uint8), slower=True, tiles=True)


def test_what_holds_for_one_size_is_not_said_of_several() -> None:
    known = a_reliability()
    parts = [replace(seen(*grid, seed=0), reliability=known) for grid in ((4, 6), (6, 9))]
    assert join_scales(parts[:1]).reliability is known
    assert join_scales(parts).reliability is None


def test_one_size_is_left_as_it_is() -> None:
    only = seen(4, 6, seed=0)
    assert join_scales([only]) is only

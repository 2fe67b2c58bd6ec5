"""HOG, its whitening, and NAM, PHM and LOM against loops and known answers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sets import SIZE
from surefeat.core.geometry import box_iou
from surefeat.data.drawn import draw_many, write_folder
from surefeat.measure.evaluate import evaluate_rows
from surefeat.measure.results import Score, read_result
from surefeat.measure.rows import RegionPair
from surefeat.peers.fit import fit_peer
from surefeat.peers.fitting import load_peer
from surefeat.peers.hog import RIDGE, crops, describe_boxes, fit_background, hog_cells
from surefeat.peers.hyperpixel import gaussian
from surefeat.peers.proposal_flow import (
    OffsetGrid,
    lom,
    median_offsets,
    nam,
    offset_bins,
    phm,
    same_aspect,
)
from surefeat.peers.rows import with_peers

BOXES0 = torch.tensor([
    [10.0, 12, 49, 41], [20, 20, 69, 79], [60, 60, 99, 99], [30, 5, 89, 34], [5, 70, 44, 99],
    [100, 100, 109, 149],
])  # fmt: skip
BOXES1 = torch.tensor([
    [16.0, 15, 55, 44], [24, 18, 83, 88], [64, 58, 103, 97], [30, 15, 85, 40], [0, 60, 59, 99],
    [110, 90, 119, 139],
])  # fmt: skip


@pytest.fixture
def pair() -> RegionPair:
    return RegionPair(BOXES0, BOXES1, ((160, 160), (160, 160)), 160)


@pytest.fixture
def scores() -> Tensor:
    return torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) - 0.1


def test_hog_of_a_ramp_has_one_orientation() -> None:
    """Brighter to the right: the first of the signed, and of the unsigned; no other."""
    ramp = torch.arange(80.0).expand(1, 3, 80, 80)
    cells = hog_cells(ramp)[0]
    assert cells.shape == (31, 8, 8)
    strong = (cells.amax((1, 2)) > 1e-6).nonzero()[:, 0].tolist()
    assert strong == [0, 18, 27, 28, 29, 30]
    # Four blocks of four equal cells: each normalised value is 1/2, cut at 0.2, four halves.
    assert float(cells[0, 3, 3]) == pytest.approx(0.4, abs=1e-5)
    assert float(cells[27, 3, 3]) == pytest.approx(0.2357 * 0.2, abs=1e-5)
    back = hog_cells(ramp.flip(-1))[0]
    assert (back.amax((1, 2)) > 1e-6).nonzero()[:2, 0].tolist() == [9, 18]


def slow_hog(image: np.ndarray) -> np.ndarray:
    """Felzenszwalb's features of the one inner cell of (3, 24, 24), pixel by pixel."""
    counts = np.zeros((3, 3, 18))
    turns = [(math.cos(n * math.pi / 9), math.sin(n * math.pi / 9)) for n in range(18)]
    for y, x in product(range(1, 23), range(1, 23)):
        steps = [(c[y, x + 1] - c[y, x - 1], c[y + 1, x] - c[y - 1, x]) for c in image]
        dx, dy = max(steps, key=lambda step: math.hypot(*step))
        best = max(range(18), key=lambda n: dx * turns[n][0] + dy * turns[n][1])
        for row, column in product(range(3), range(3)):
            near = [max(0.0, 1 - abs((at + 0.5) / 8 - 0.5 - cell))
                    for at, cell in ((y, row), (x, column))]  # fmt: skip
            counts[row, column, best] += near[0] * near[1] * math.hypot(dx, dy)
    energy = ((counts[..., :9] + counts[..., 9:]) ** 2).sum(-1)
    corners = [energy[y : y + 2, x : x + 2].sum() for y in (1, 0) for x in (1, 0)]
    signed = [np.minimum(counts[1, 1] / math.sqrt(corner + 1e-4), 0.2) for corner in corners]
    unsigned = [
        np.minimum((counts[1, 1, :9] + counts[1, 1, 9:]) / math.sqrt(corner + 1e-4), 0.2)
        for corner in corners
    ]
    texture = [0.2357 * part.sum() for part in signed]
    return np.concatenate([sum(signed) / 2, sum(unsigned) / 2, texture])


def test_hog_is_that_of_a_loop_over_pixels() -> None:
    images = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0)) * 255
    for cells, image in zip(hog_cells(images), images, strict=True):
        assert np.allclose(cells[:, 0, 0], slow_hog(image.double().numpy()), atol=1e-4)


def test_a_crop_for_hog_has_an_eighth_around_the_box_on_each_side() -> None:
    """A box of 32 x 16 pixels becomes 40 x 20: half a pixel, and a quarter, between samples."""
    ramp = torch.arange(90.0).expand(80, 90)
    image = torch.stack([ramp, ramp, torch.arange(80.0)[:, None].expand(80, 90)])
    (cut,) = crops(image, torch.tensor([[20.0, 10.0, 51.0, 25.0]]), side=80)
    steps = torch.arange(80) + 0.5
    assert torch.allclose(cut[0, 40], 20 - 0.5 - 4 + steps / 2, atol=1e-3)
    assert torch.allclose(cut[2, :, 40], 10 - 0.5 - 2 + steps / 4, atol=1e-3)


def test_hog_of_a_flat_crop_is_zero_and_moves_with_the_crop() -> None:
    assert not hog_cells(torch.full((1, 3, 80, 80), 99.0)).any()
    image = draw_many(1, size=96, seed=0)[0].image.float()
    whole = hog_cells(image[None])
    part = hog_cells(image[None, :, 8:, 16:])
    torch.testing.assert_close(part[..., 2:-2, 2:-2], whole[..., 3:-2, 4:-2])
    box = torch.tensor([[20.0, 20, 59, 59]])
    moved = describe_boxes(torch.roll(image, (5, 7), (1, 2)), box + torch.tensor([7.0, 5, 7, 5]))
    torch.testing.assert_close(moved, describe_boxes(image, box), atol=1e-4, rtol=1e-4)


def test_whitened_background_has_the_identity_for_covariance() -> None:
    """Of the windows that were counted, to 5 %, under a ridge that few photos allow."""
    generator = torch.Generator().manual_seed(0)
    images = (255 * torch.rand(48, 3, 96, 96, generator=generator)).byte()
    background = replace(fit_background([images], halved=False), ridge=4)
    table = background.table()
    lag, first, second = background.covariance, 3 * 31, (8 * 2 + 5) * 31
    block = table[first : first + 31, second : second + 31].float()  # two down, two across
    torch.testing.assert_close(block, lag[9, 9], atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(lag, lag.flip(0, 1).transpose(2, 3), atol=1e-6, rtol=1e-4)
    maps = hog_cells(images.float())
    windows = maps.unfold(2, 8, 1).unfold(3, 8, 1).permute(0, 2, 3, 4, 5, 1).reshape(-1, 1984)
    apart = windows.double() - background.mean.repeat(64)
    own = apart.T @ apart / len(apart) + background.ridge * RIDGE * torch.eye(1984)
    factor = background.factor()
    white = torch.linalg.solve_triangular(factor, own, upper=False)
    white = torch.linalg.solve_triangular(factor, white.T, upper=False)
    assert float(white.diagonal().mean()) == pytest.approx(1, abs=0.05)
    assert float((white - torch.eye(1984)).abs().mean()) < 0.05
    # The score of two boxes, as its authors write it, is the product of their whitened cells.
    first, second = windows[:2].double() - background.mean.repeat(64)
    score = torch.linalg.solve(table, first) @ second
    whitened = torch.linalg.solve_triangular(factor, torch.stack([first, second]).T, upper=False)
    assert float(whitened[:, 0] @ whitened[:, 1]) == pytest.approx(float(score), rel=1e-6)


def test_stationary_covariance_is_that_of_a_double_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    images = (255 * torch.rand(2, 3, 96, 96, generator=generator)).byte()
    background = fit_background([images])  # too few to be inverted without a large ridge
    levels = [images.float(), torch.nn.functional.avg_pool2d(images.float(), 2)]
    maps = [hog_cells(view) for level in levels for view in (level, level.flip(-1))]
    cells = torch.cat([m.permute(0, 2, 3, 1).reshape(-1, 31) for m in maps]).double()
    mean, down, across, products = cells.mean(0), 1, -2, []
    for m in maps:
        for image in m:
            for y in range(m.shape[-2] - down):
                for x in range(2, m.shape[-1]):
                    here, there = image[:, y, x].double(), image[:, y + down, x + across].double()
                    products.append(torch.outer(here - mean, there - mean))
    expected = torch.stack(products).mean(0)
    torch.testing.assert_close(
        background.covariance[7 + down, 7 + across].double(), expected, atol=1e-5, rtol=1e-3
    )


def test_boxes_of_other_shapes_do_not_match(scores: Tensor, pair: RegionPair) -> None:
    alike = same_aspect(BOXES0, BOXES1)
    for n, (x1, y1, x2, y2) in enumerate(BOXES0.tolist()):
        for m, (u1, v1, u2, v2) in enumerate(BOXES1.tolist()):
            ratio = ((x2 - x1 + 1) / (y2 - y1 + 1)) / ((u2 - u1 + 1) / (v2 - v1 + 1))
            assert bool(alike[n, m]) == (0.5 < ratio < 2)
    assert torch.equal(nam(scores, pair), scores.clamp_min(0) * alike)


def slow_bin(box0: list[float], box1: list[float], size: int, grid: OffsetGrid) -> int | None:
    """The bin of one pair, from the two frames' map written out."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = box0, box1
    width0, height0, width1, height1 = x2 - x1 + 1, y2 - y1 + 1, u2 - u1 + 1, v2 - v1 + 1
    across = (size - ((x1 + x2) / 2 + 1)) / width0 * width1 + (u1 + u2) / 2 + 1
    down = (size - ((y1 + y2) / 2 + 1)) / height0 * height1 + (v1 + v2) / 2 + 1
    scale = math.log2(width1 * height1 / (width0 * height0))
    ratio = (width0 / height0) / (width1 / height1)
    if not (1 <= across <= 2 * size and 1 <= down <= 2 * size and 0.5 < ratio < 2):
        return None
    count = round(2 * size / max(math.sqrt(4 * size * size / 8000), 5) * grid.finer)
    place = [min(count - 1, math.floor((v - 1) / (2 * size - 1) * count)) for v in (down, across)]
    level = min(grid.scales - 1, math.floor((scale + 4) / 8 * grid.scales))
    return (level * count + place[0]) * count + place[1]


def test_offset_bins_are_those_of_a_loop_over_frames() -> None:
    for grid in (OffsetGrid(), OffsetGrid(0.2, 40)):
        bins, shape = offset_bins(BOXES0, BOXES1, size0=(160, 160), size1=(160, 160), grid=grid)
        for n in range(6):
            for m in range(6):
                expected = slow_bin(BOXES0[n].tolist(), BOXES1[m].tolist(), 160, grid)
                assert int(bins[n, m]) == (-1 if expected is None else expected)
        assert shape[0] == grid.scales
    sizes = {"size0": (224, 224), "size1": (224, 224)}
    assert offset_bins(BOXES0, BOXES1, **sizes, grid=OffsetGrid())[1] == (20, 89, 89)
    assert offset_bins(BOXES0, BOXES1, **sizes, grid=OffsetGrid(0.2, 40))[1] == (40, 18, 18)


def test_the_histogram_of_phm_is_that_of_a_loop(scores: Tensor, pair: RegionPair) -> None:
    grid, rough = OffsetGrid(), nam(scores, pair)
    count = 64
    table = torch.zeros(20, count, count)
    for n in range(6):
        best: dict[int, float] = {}
        for m in range(6):
            key = slow_bin(BOXES0[n].tolist(), BOXES1[m].tolist(), 160, grid)
            if key is not None:
                best[key] = max(best.get(key, 0.0), float(rough[n, m]))
        for key, value in best.items():
            table.view(-1)[key] += value
    line = gaussian(5).sum(0)
    scored = phm(scores, pair)
    for n in range(6):
        for m in range(6):
            key = slow_bin(BOXES0[n].tolist(), BOXES1[m].tolist(), 160, grid)
            total = 0.0
            if key is not None:
                s, y, x = key // count**2, key // count % count, key % count
                for a, b, c in ((a, b, c) for a in range(5) for b in range(5) for c in range(5)):
                    place = (s + a - 2, y + b - 2, x + c - 2)
                    if all(0 <= p < n for p, n in zip(place, table.shape, strict=True)):
                        total += float(line[a] * line[b] * line[c] * table[place])
            assert float(scored[n, m]) == pytest.approx(total * float(rough[n, m]), abs=1e-5)


def test_scaling_one_image_leaves_the_best_matches_of_phm(scores: Tensor) -> None:
    """Offsets in place scale with the image; those in size all move by the same five bins."""
    same = RegionPair(BOXES0, BOXES1, ((160, 160), (160, 160)), 160)
    # As if photo 1 had twice as many pixels each way; the square that rows see is the same.
    twice = RegionPair(BOXES0, BOXES1, ((160, 160), (320, 320)), 160)
    assert torch.equal(phm(scores, same).argmax(1), phm(scores, twice).argmax(1))
    assert twice.originals()[1][0].tolist() == [32, 30, 111, 89]


def test_lom_is_that_of_a_loop(scores: Tensor, pair: RegionPair) -> None:
    rough = nam(scores, pair)
    best, index = rough.max(1)
    centres = [(b[:, :2] + b[:, 2:]) / 2 for b in (BOXES0, BOXES1)]
    areas = [(b[:, 2:] - b[:, :2] + 1).prod(1) for b in (BOXES0, BOXES1)]

    def offset(n: int, m: int) -> list[float]:
        shift = (centres[1][m] - centres[0][n]).tolist()
        return [*shift, float(areas[1][m] / areas[0][n])]

    scored, near = lom(scores, pair), box_iou(BOXES0, BOXES0) > 0
    for n in range(6):
        around = [k for k in range(6) if near[n, k]]
        middle = []
        for axis in range(3):
            values, place = [offset(k, int(index[k]))[axis] for k in around], 1.0
            for _ in range(20):
                shares = [1 / max(abs(v - place), 1e-4) for v in values]
                place = sum(s * v for s, v in zip(shares, values, strict=True)) / sum(shares)
            middle.append(place)
        sure = sum(float(best[k]) for k in around) / float(best.sum())
        for m in range(6):
            away = [a - b for a, b in zip(offset(n, m), middle, strict=True)]
            cost = 0.05 * math.hypot(away[0], away[1]) + 0.3 * abs(away[2])
            expected = float(rough[n, m]) * math.exp(-cost) * sure
            assert float(scored[n, m]) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_median_offset_is_the_middle_one_of_its_neighbours() -> None:
    offsets = torch.tensor([[0.0, 3, 1], [10, 3, 2], [200, 4, 9]])
    medians = median_offsets(offsets, torch.ones(3, 3))
    assert medians[0].tolist() == pytest.approx([10, 3, 2], abs=0.05)


def test_hog_is_fitted_stored_and_measured_as_rows(
    tmp_path: Path, listed: Path, boxes: Path
) -> None:
    write_folder(tmp_path / "photos", count=4, size=64, seed=0)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no image")
    done = fit_peer("hog", tmp_path / "photos", out=tmp_path / "hog", device="cpu", quiet=True)
    assert (done.photos, len(done.skipped)) == (4, 1)
    stored = load_peer(tmp_path / "hog")
    assert stored.about["photos"] == 4
    assert stored.settings["ridge"] >= 1
    names = [f"hog-{way}={tmp_path / 'hog'}" for way in ("nam", "phm")]
    rows = with_peers([*names, "hog+lom"], init=("none",), device="cpu")
    paths = evaluate_rows(
        "pairs", listed, rows=rows, out=tmp_path / "results", proposals=boxes, side=SIZE, boxes=60,
        measures=("regions", "nearest"), shifted=(), device="cpu", quiet=True,
    )  # fmt: skip
    results = [read_result(path) for path in paths]
    assert [r["row"] for r in results] == ["hog-nam", "hog-phm", "hog+lom"]
    areas = [Score("pcr area").of(r) for r in results]
    assert len(set(areas)) > 1
    assert all(area is not None and 0 < area < 1 for area in areas)
    assert results[0]["config"]["row"]["background"]["photos"] == 4


def test_wrong_names_and_folders_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose hog"):
        fit_peer("hock", tmp_path, out=tmp_path / "x", device="cpu")
    with pytest.raises(FileNotFoundError, match="surefeat peers fit"):
        load_peer(tmp_path)

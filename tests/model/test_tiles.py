"""Large photos in tiles: one map in original pixels, the same as one pass away from the seams."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from surefeat.core.geometry import Frame, cell_centres
from surefeat.model import tiles
from surefeat.model.config import ModelConfig
from surefeat.model.extract import extract_to_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from tiny import a_cohort, a_reliability, smooth_photo

SIDE = 96
STRIDE = 8
REACH = 6
"""Cells from which a cell of the network below is made, each way: 47 pixels by its convolutions."""


@pytest.fixture(scope="module")
def model() -> DenseFeatures:
    """Local: without norms, which look at the whole picture."""
    torch.manual_seed(0)
    config = ModelConfig(trunk="small", head="linear", channels=16, longest_side=SIDE)
    network = DenseFeatures(config).eval()
    for layer in network.trunk.layers:  # type: ignore[union-attr]
        layer[1] = nn.Identity()  # type: ignore[operator,index]
    return network


@pytest.fixture(scope="module")
def photo() -> Tensor:
    return smooth_photo(400, 608)


@given(st.integers(1, 300), st.integers(3, 60), st.data())
def test_tiles_cover_a_photo_and_overlap(length: int, tile: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(1, tile // 2))
    starts = tiles.tile_starts(length, tile, overlap)
    covered = {cell for start in starts for cell in range(start, min(start + tile, length))}
    assert covered == set(range(length))
    assert all(0 <= start <= max(0, length - tile) for start in starts)
    steps = [after - before for before, after in pairwise(starts)]
    assert all(0 < step <= tile - overlap for step in steps)


def away_from_seams(size: tuple[int, int], *, tile: int, overlap: int) -> Tensor:
    """(rows, columns): cells whose every tile sees all they are made of, or the photo's end."""
    keep = []
    for length in size:
        starts, inside = tiles.tile_starts(length, tile, overlap), []
        for cell in range(length):
            seen = [s for s in starts if s <= cell < s + tile]
            before = all(s == 0 or cell - s >= REACH for s in seen)
            after = all(s + tile >= length or s + tile - 1 - cell >= REACH for s in seen)
            inside.append(before and after)
        keep.append(torch.tensor(inside))
    return keep[0][:, None] & keep[1]


def test_a_tile_speaks_in_full_at_the_photo_s_own_edge_and_less_at_a_seam() -> None:
    """Two tiles of 6 cells in a row of 7, an overlap of 3: of 1 and of 3, by hand."""
    stitch = tiles._Stitch((6, 7), 3)
    for first, value in ((0, 1.0), (1, 3.0)):
        one = F.normalize(torch.ones(2, 6, 6), dim=0)
        frame = Frame((48, 48), (48, 48))
        stitch.add(Features(one, torch.full((6, 6), value), one, frame, 8), (0, first))
    # Weights of the left tile 3 3 3 3 2 1 and of the right one 1 2 3 3 3 3, in thirds.
    mixed = [(left * 1 + right * 3) / (left + right)
             for left, right in ((3, 1), (3, 2), (3, 3), (2, 3), (1, 3))]  # fmt: skip
    expected = [1.0, *mixed, 3.0]
    row = stitch.joined().uncertainty[0]
    assert row.tolist() == pytest.approx(expected, abs=1e-5)


def test_where_tiles_differ_descriptors_lie_between_and_have_unit_length() -> None:
    """Two tiles of 3 cells in a row of 4, an overlap of 2: weights 2 2 1 and 1 2 2, in halves."""
    stitch = tiles._Stitch((3, 4), 2)
    for first, axis in ((0, 0), (1, 1)):
        one = torch.eye(2)[axis][:, None, None].expand(2, 3, 3)
        frame = Frame((24, 24), (24, 24))
        stitch.add(Features(one, torch.ones(3, 3), one, frame, 8), (0, first))
    joined = stitch.joined()
    for maps in (joined.descriptors, joined.lower):
        angles = torch.atan2(maps[1].float(), maps[0].float())[1].tolist()
        assert angles == pytest.approx(
            [0, math.atan2(1, 2), math.atan2(2, 1), math.pi / 2], abs=2e-3
        )
        assert torch.allclose(maps.float().norm(dim=0), torch.ones(3, 4), atol=2e-3)


def test_the_stitched_map_is_that_of_one_pass_away_from_the_seams(
    model: DenseFeatures, photo: Tensor
) -> None:
    stitched = tiles.extract_tiled(model, photo, longest_side=608, side=SIDE)
    (whole,) = model.extract(photo, longest_side=608)
    assert stitched.frame == whole.frame == Frame((400, 608), (400, 608))
    keep = away_from_seams((50, 76), tile=24, overlap=3)
    assert 0.1 < keep.float().mean() < 0.9
    for name in ("descriptors", "lower", "uncertainty"):
        ours, one = getattr(stitched, name).float(), getattr(whole, name)
        assert float((ours - one)[..., keep].abs().max()) < 2e-3, name  # half precision
    # And on the seams the overlap keeps it close: the same place, not a neighbour.
    alike = (stitched.descriptors.float() * whole.descriptors).sum(0)
    assert float(alike.min()) > 0.8
    torch.testing.assert_close(alike[keep], torch.ones(int(keep.sum())), atol=2e-3, rtol=0)


def test_a_seam_shows_no_edge(model: DenseFeatures, photo: Tensor) -> None:
    """Neighbouring cells differ across seams as they do in one pass."""
    stitched = tiles.extract_tiled(model, photo, longest_side=608, side=SIDE)
    (whole,) = model.extract(photo, longest_side=608)
    steps = [f.descriptors.float().diff(dim=2).norm(dim=0) for f in (stitched, whole)]
    assert float((steps[0] - steps[1]).amax()) < 0.5 * float(steps[1].amax())


def test_pixels_and_points_move_together_through_tiles(model: DenseFeatures) -> None:
    """A mark in a large photo is where the features change, in original pixels."""
    plain = torch.full((3, 700, 900), 110, dtype=torch.uint8)
    x, y = 531, 333
    marked = plain.clone()
    marked[:, y - 3 : y + 4, x - 3 : x + 4] = 250
    first, second = (model.extract(image, tiles=True)[0] for image in (plain, marked))
    changed = (first.lower.float() - second.lower.float()).square().sum(0)
    points = first.frame.to_original(
        cell_centres(size=(changed.shape[0], changed.shape[1]), stride=first.stride)
    )
    middle = (points * changed.flatten()[:, None]).sum(0) / changed.sum()
    assert float((middle - torch.tensor([x, y])).abs().max()) < 4  # half a cell


def test_only_large_photos_are_seen_in_tiles(model: DenseFeatures, photo: Tensor) -> None:
    small = photo[:, :150, :192]
    plain, tiled = model.extract([small, photo]), model.extract([small, photo], tiles=True)
    assert torch.equal(plain[0].descriptors, tiled[0].descriptors)
    assert plain[1].frame.network == (64, 96)
    assert tiled[1].frame.network == (400, 608)
    assert tiled[1].descriptors.dtype == torch.float16


@pytest.mark.parametrize(
    ("size", "wanted"),
    [((192, 100), (96,)), ((300, 400), (96, 196, 400)), ((5, 96 * 8), (96, 192, 384, 768))],
)
def test_levels_double_up_to_the_photos_own_size(
    size: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    assert tiles.levels(size, side=96, stride=8) == wanted


def test_features_of_a_large_file_have_its_name(
    model: DenseFeatures, photo: Tensor, tmp_path: Path
) -> None:
    file = tmp_path / "large.png"
    Image.fromarray(photo.permute(1, 2, 0).numpy()).save(file)
    large = model.extract_large(file, longest_side=SIDE)
    assert large is not None
    assert large.name == str(file)


def test_a_map_has_a_bounded_number_of_cells() -> None:
    side = tiles.finest_side((60_000, 90_000), side=320, stride=16)
    assert 0.98 * tiles.MOST_CELLS < (side / 16) ** 2 / 1.5 <= tiles.MOST_CELLS


def test_a_window_is_the_part_of_the_map_it_says(model: DenseFeatures, photo: Tensor) -> None:
    stitched = tiles.extract_tiled(model, photo, longest_side=304, side=SIDE)
    known = a_reliability(sides=(SIDE,))
    parts = list(tiles.windows(stitched, side=SIDE, reliability=known))
    seen = torch.zeros(400, 608, dtype=torch.bool)
    for part in parts:
        x1, y1, x2, y2 = part.box
        seen[y1 : y2 + 1, x1 : x2 + 1] = True
        assert part.features.frame.original == (y2 - y1 + 1, x2 - x1 + 1)
        assert part.features.reliability is known
        points = torch.tensor([[30.0, 41.0], [100.5, 77.0]])
        whole = stitched.at(points + torch.tensor([x1, y1]))
        assert float((whole * part.features.at(points)).sum(1).min()) > 0.99
    assert bool(seen.all())
    assert len(parts) == 4 * 6  # 25 x 38 cells in windows of 12 that share 6 or more


def test_boxes_around_points_hold_them_at_every_level() -> None:
    points = torch.tensor([[5.0, 390.0], [60.0, 300.0]])
    boxes = tiles.boxes_around(points, (400, 608), (96, 200, 608), side=96)
    assert boxes[0] == (0, 0, 607, 399)
    for x1, y1, x2, y2 in boxes:
        assert 0 <= x1 <= 5
        assert 60 <= x2 < 608
        assert 0 <= y1 <= 300
        assert 390 <= y2 < 400
    widths = [box[2] - box[0] + 1 for box in boxes]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 96


def test_the_cohort_is_compared_in_tiles_too(photo: Tensor) -> None:
    torch.manual_seed(1)
    network = DenseFeatures(
        ModelConfig(trunk="small", head="linear", channels=8, longest_side=SIDE)
    ).eval()
    network.cohort = replace(a_cohort(network.extract(photo)[0]), last=3)
    (stitched,) = network.extract(photo, tiles=True)
    assert stitched.last == 3
    assert stitched.common_kind is not None
    assert stitched.common_kind.shape == stitched.uncertainty.shape
    assert stitched.common is not None
    assert stitched.common.shape == stitched.uncertainty.shape
    assert stitched.reliability is None


def test_tiles_go_to_disk_and_are_not_mixed_with_others(
    model: DenseFeatures, photo: Tensor, tmp_path: Path
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.fromarray(photo.permute(1, 2, 0).numpy()).save(folder / "large.png")
    Image.fromarray(photo[:, :90, :120].permute(1, 2, 0).numpy()).save(folder / "small.png")
    done = extract_to_folder([folder], tmp_path / "out", model=model, tiles=True, quiet=True)
    assert done.written == 2
    kept = Features.load(tmp_path / "out" / "large.png.safetensors")
    assert kept.frame == Frame((400, 608), (400, 608))
    assert Features.load(tmp_path / "out" / "small.png.safetensors").frame.network == (72, 96)
    with pytest.raises(ValueError, match="another size"):
        extract_to_folder([folder], tmp_path / "out", model=model, quiet=True)

"""Landmarks without labels: the two losses against double sums, and places that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from surefeat.data.decode import Canvas
from surefeat.data.drawn import draw
from surefeat.learn.config import WarpConfig
from surefeat.learn.runs import Run
from surefeat.peers.fitting import FitConfig, load_peer
from surefeat.peers.landmarks import (
    LandmarkConfig,
    Landmarks,
    alignment,
    by_landmarks,
    cell_places,
    collapsed,
    diversity,
    landmark_losses,
    landmarks_row,
    learn_landmarks,
    own_maps,
    pixels_per_cell,
    warp_cells,
    whole_maps,
)
from tiny import CPU

WARP = WarpConfig(size=48, rotation=5, linear=0.05, translation=0.1, zoom=(0.9, 1.1), mirrored=0)
SMALL = LandmarkConfig(
    landmarks=4, side=48, channels=(8, 16), diversity=20.0, photo=48, warp=WARP,
    fit=FitConfig(steps=80, batch=6, lr=5e-3, log_every=25, checkpoint_every=75),
)  # fmt: skip


TEN = replace(
    SMALL, landmarks=10, side=64, channels=(16, 32), diversity=100.0, photo=64,
    warp=replace(WARP, size=64), fit=replace(SMALL.fit, steps=140),
)  # fmt: skip
"""5 x 5 blocks: room for ten that keep apart."""


def crops(count: int = 24, *, size: int = 64) -> Canvas:
    """Drawn things of one category."""
    drawn = [draw(0, size=size, generator=np.random.default_rng([0, n])) for n in range(count)]
    pixels = torch.stack([one.image for one in drawn])
    sizes = torch.full((len(pixels), 2), size, dtype=torch.int32)
    return Canvas(pixels, sizes, tuple(f"{n}.png" for n in range(len(pixels))), ())


def test_alignment_is_the_double_sum_and_has_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 2, 16, generator=generator, dtype=torch.float64)
    first, second = logits[:, :, 0].softmax(-1), logits[:, :, 1].softmax(-1)
    moved = torch.randn(2, 16, 2, generator=generator, dtype=torch.float64)
    total = 0.0
    for b in range(2):
        for k in range(3):
            for u in range(16):
                for v in range(16):
                    place = torch.tensor([v % 4, v // 4], dtype=torch.float64)
                    apart = float((place - moved[b, u]).square().sum())
                    total += float(first[b, k, u] * second[b, k, v]) * apart
    assert float(alignment(first, second, moved)) == pytest.approx(total / 6, abs=1e-12)
    assert torch.autograd.gradcheck(
        lambda a, b: alignment(a.softmax(-1), b.softmax(-1), moved),
        (logits[:, :, 0].clone().requires_grad_(), logits[:, :, 1].clone().requires_grad_()),
    )


def test_diversity_counts_landmarks_that_share_a_block() -> None:
    share = torch.zeros(1, 3, 8, 8)
    for k, (y, x) in enumerate([(0, 0), (1, 6), (7, 7)]):
        share[0, k, y, x] = 1
    assert float(diversity(share)) == pytest.approx(0)
    together = torch.zeros(1, 3, 8, 8)
    together[:, :, 2, 2] = 1
    assert float(diversity(together)) == pytest.approx(2)
    assert float(diversity(torch.full((1, 3, 8, 8), 1 / 64))) == pytest.approx(2)
    logits = torch.randn(1, 3, 8, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a: diversity(a.flatten(2).softmax(-1).reshape(1, 3, 8, 8)), logits
    )


def test_cells_lie_where_the_convolutions_put_them() -> None:
    """42 cells from 128 pixels, two apart; found by what a cell can see."""
    assert Landmarks(LandmarkConfig(landmarks=3))(torch.zeros(1, 3, 128, 128)).shape[-2:] == (
        42,
        42,
    )
    model = Landmarks(SMALL).eval()
    image = torch.rand(1, 3, 48, 48, requires_grad=True)
    logits = model(image)
    cells = logits.shape[-1]
    step, first = pixels_per_cell(SMALL, cells)
    (slope,) = torch.autograd.grad(logits[0, :, 3, 5].abs().sum(), image)
    seen = slope.abs().sum((0, 1)).nonzero()
    middle = (seen.amin(0) + seen.amax(0)).float() / 2
    expected = [first + step * 3, first + step * 5]
    assert float((middle - torch.tensor(expected)).abs().max()) <= 1.5
    still = warp_cells(torch.tensor([[[1.0, 0, 4], [0, 1, -2]]]), cells, SMALL)[0]
    torch.testing.assert_close(still, cell_places(cells, device=CPU) + torch.tensor([2.0, -1.0]))
    assert whole_maps(logits, SMALL).shape[-1] == pytest.approx(24, abs=1)


def test_a_photo_s_own_class_alone_is_looked_at() -> None:
    config = replace(SMALL, classes=3)
    logits = torch.arange(2 * 12.0).reshape(2, 12, 1, 1).expand(2, 12, 4, 4)
    own = own_maps(logits, torch.tensor([2, 0]), config)
    assert own[:, :, 0, 0].tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert whole_maps(logits, config).shape[1] == 4


def test_ten_landmarks_keep_their_place_and_spread(tmp_path: Path) -> None:
    """Of one drawn category under small warps: they move with the photo, few share a block."""
    canvas = crops()
    run = Run.start(tmp_path / "run", TEN, device="cpu")
    learn_landmarks(canvas, run, TEN, classes=None, about={}, device=CPU, quiet=True)
    stored = load_peer(tmp_path / "run")
    model = Landmarks(TEN)
    model.load_state_dict(dict(stored.tensors))
    model.eval()
    moved = torch.roll(canvas.pixels, (0, 6), (2, 3))  # three cells to the right
    with torch.no_grad():
        shares = [
            model(part.float() / 255).flatten(2).softmax(-1) for part in (canvas.pixels, moved)
        ]
    side = round(shares[0].shape[-1] ** 0.5)
    places = [share @ cell_places(side, device=CPU) for share in shares]
    away: Tensor = (places[1] - places[0] - torch.tensor([3.0, 0])).norm(dim=-1)
    assert float(away.mean()) < 2  # those that stay where they were have 3
    spread = diversity(shares[0].reshape(len(moved), 10, side, side))
    assert float(spread) < 2  # of 9
    assert stored.about["collapsed"] < 0.3
    row = landmarks_row("landmarks-10", stored, device=CPU)
    (features,) = row.extract(canvas.pixels[:1])
    assert features.descriptors.shape == (10, 28, 28)
    assert row.transfer is not None
    points = torch.tensor([[20.0, 20], [30, 25]])
    same = row.transfer(canvas.pixels[0], canvas.pixels[0], points)
    torch.testing.assert_close(same, points, atol=1e-2, rtol=0)


def test_landmarks_in_one_place_count_as_collapsed() -> None:
    places = torch.tensor([[[0.0, 0], [1, 1], [20, 20]]])
    assert float(collapsed(places)) == pytest.approx(2 / 6)
    warp = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]])
    views = torch.rand(1, 3, 48, 48)
    taken = landmark_losses(Landmarks(SMALL), views, views, warp)
    expected = taken["alignment"] + SMALL.diversity * taken["diversity"]
    torch.testing.assert_close(taken["loss"], expected)


def test_points_move_with_the_landmarks_in_photos_of_any_shape() -> None:
    """Maps with one peak each; the spline leads a landmark's place to its place in the other."""
    peaks = (((1, 1), (8, 2), (2, 7), (7, 8)), ((2, 1), (8, 3), (1, 8), (6, 7)))

    class Peaked:
        """Ten by ten cells, two pixels of the network's 48 apart, the first centred on 14.5."""

        config, left = SMALL, iter(peaks)

        def __call__(self, images: Tensor) -> Tensor:
            logits = torch.full((len(images), 4, 10, 10), -99.0)
            for number, (x, y) in enumerate(next(self.left)):
                logits[:, number, y, x] = 99.0
            return logits

    photos = [torch.zeros(3, 96, 192, dtype=torch.uint8), torch.zeros(3, 240, 120).byte()]
    places = [
        (torch.tensor(each) * 2 + 14.5 + 0.5) * torch.tensor(size) / 48 - 0.5
        for each, size in zip(peaks, ((192, 96), (120, 240)), strict=True)
    ]
    found = by_landmarks(Peaked(), photos, places[0])  # type: ignore[arg-type]
    assert torch.allclose(found, places[1], atol=1e-3)

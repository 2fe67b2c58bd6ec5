"""gCNN: its layers against loops, its warps against scipy and rendered photos, and its learning."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import fit_thin_plate
from surefeat.data.decode import Canvas
from surefeat.data.drawn import draw_many
from surefeat.learn.runs import Run
from surefeat.peers.fitting import FitConfig, load_peer
from surefeat.peers.gcnn import (
    CONTROL,
    Gcnn,
    GcnnConfig,
    correlate,
    draw_warps,
    even_points,
    from_unit,
    gcnn_row,
    gcnn_transfer,
    grid_loss,
    identity,
    learn_gcnn,
    move_by,
    plate_matrix,
    render_views,
    resample,
    step_losses,
    to_unit,
    warp_points,
)
from tiny import CPU

SMALL = GcnnConfig(
    side=64, cells=8, kernels=(3, 3), channels=(32, 16), photo=64,
    fit=FitConfig(steps=6, batch=4, lr=3e-3, log_every=3, checkpoint_every=3),
)  # fmt: skip


def patches(images: Tensor) -> Tensor:
    """A trunk that knows each cell by its pixels: (B, 3, 64, 64) -> (B, 48, 8, 8)."""
    return F.pixel_unshuffle(F.avg_pool2d(images, 2), 4) - 0.5


@pytest.fixture(scope="module")
def canvas() -> Canvas:
    pixels = torch.stack([one.image for one in draw_many(8, size=64, seed=0)])
    noise = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rough = F.interpolate(255 * noise, size=(64, 64), mode="bilinear")
    pixels = (0.4 * pixels.float() + 0.6 * rough).byte()
    names = tuple(f"{n}.png" for n in range(8))
    return Canvas(pixels, torch.full((8, 2), 64, dtype=torch.int32), names, ())


def test_correlation_is_that_of_three_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 5, 3, 4, generator=generator) for _ in range(2))
    table = correlate(first, second)
    assert table.shape == (2, 12, 3, 4)

    def unit(vector: Tensor) -> Tensor:
        return vector / math.sqrt(float(vector.square().sum()) + 1e-6)

    for b in range(2):
        for i in range(3):
            for j in range(4):
                cells = [
                    max(0.0, float(unit(first[b, :, k // 4, k % 4]) @ unit(second[b, :, i, j])))
                    for k in range(12)
                ]
                expected = unit(torch.tensor(cells))
                torch.testing.assert_close(table[b, :, i, j], expected, atol=1e-5, rtol=1e-4)
    length = table.norm(dim=1)
    assert float((length[length > 0.5] - 1).abs().max()) < 1e-4
    # Another order of A's cells is another order of channels.
    turned = correlate(first.flip(-1, -2), second)
    torch.testing.assert_close(turned, table.flip(1))


def test_thin_plate_warps_are_those_of_scipy() -> None:
    interpolate = pytest.importorskip("scipy.interpolate")
    theta = draw_warps("tps", 1, GcnnConfig(), torch.Generator().manual_seed(1)).double()
    points = even_points(7).double() * 1.3
    targets = theta.reshape(2, 9).T
    spline = interpolate.RBFInterpolator(
        CONTROL.double().numpy(), targets.numpy(), kernel="thin_plate_spline", degree=1
    )
    moved = warp_points(theta, points)[0]
    torch.testing.assert_close(moved, torch.from_numpy(spline(points.numpy())), atol=1e-9, rtol=0)
    ours = fit_thin_plate(CONTROL.double(), targets)(points)
    torch.testing.assert_close(moved, ours, atol=1e-9, rtol=0)
    torch.testing.assert_close(plate_matrix(points).sum(-1), torch.ones(49, dtype=torch.float64))


def test_the_identity_shows_the_same_view(canvas: Canvas) -> None:
    photos, sizes = canvas.pixels.float() / 255, canvas.sizes
    views = [
        render_views(photos, sizes, identity(warp).expand(8, -1), side=48)
        for warp in ("affine", "tps")
    ]
    assert float((views[0] - views[1]).abs().max()) < 1e-5
    # The middle 9/16: the first pixel of the view lies at 7/32 of the way across the photo.
    around = photos[:, :, 13:15, 13:15].flatten(2)
    assert bool((views[0][..., 0, 0] <= around.amax(-1) + 1e-5).all())
    assert bool((views[0][..., 0, 0] >= around.amin(-1) - 1e-5).all())
    thrice = resample(photos, identity("tps").expand(8, -1))
    torch.testing.assert_close(thrice, photos, atol=1e-5, rtol=0)


@pytest.mark.parametrize("warp", ["affine", "tps"])
def test_a_known_warp_is_undone_by_it(warp: str) -> None:
    """A smooth picture seen through theta, and itself sampled by theta, are the same inside."""
    line = torch.linspace(-1, 1, 200)
    y, x = torch.meshgrid(line, line, indexing="ij")
    photo = torch.stack([x, y, torch.sin(3 * x * y)])[None] / 2 + 0.5
    sizes = torch.tensor([[200, 200]])
    config = GcnnConfig(rotation=10, linear=0.1, shift=0.1, control=0.1)
    theta = draw_warps(warp, 1, config, torch.Generator().manual_seed(3))
    first = render_views(photo, sizes, identity("affine")[None], side=120)
    second = render_views(photo, sizes, theta, side=120)
    undone = resample(first, theta)
    inside = (warp_points(theta, even_points(120))[0].abs().amax(-1) < 0.98).reshape(120, 120)
    apart = (undone - second).abs().amax(1)[0][inside]
    # Red and green are the place itself: 0.5 px of the view are 0.5 * 9/16 / 119.
    assert float(inside.float().mean()) > 0.4
    assert float(apart.mean()) < 0.5 * 0.5625 / 119


def test_the_grid_loss_is_zero_at_the_truth_and_its_gradient_as_derived() -> None:
    generator = torch.Generator().manual_seed(2)
    for warp in ("affine", "tps"):
        truth = draw_warps(warp, 2, GcnnConfig(), generator).double()
        theta = (truth + 0.1 * torch.randn_like(truth)).requires_grad_()
        assert float(grid_loss(truth, truth)) == 0
        assert torch.autograd.gradcheck(lambda t, fixed=truth: grid_loss(t, fixed), theta)
    loss = grid_loss(theta, truth)
    (slope,) = torch.autograd.grad(loss, theta)
    matrix = plate_matrix(even_points(20).double())
    apart = (theta - truth).detach().reshape(2, 2, 9)
    expected = 2 * apart @ (matrix.T @ matrix) / 400 / 2  # mean over points, and two warps
    torch.testing.assert_close(slope.reshape(2, 2, 9), expected)


def test_stages_act_in_the_order_that_makes_sense_of_both() -> None:
    """Thin-plate first, then affine: point by point, with two known maps."""
    generator = torch.Generator().manual_seed(4)
    first = draw_warps("affine", 1, GcnnConfig(), generator)
    second = draw_warps("tps", 1, GcnnConfig(), generator)
    points = even_points(3) * 0.7
    moved = move_by([first, second], points)
    for point, target in zip(points, moved, strict=True):
        bent = plate_matrix(point[None])[0] @ second.reshape(2, 9).T
        straight = first.reshape(2, 3)[:, :2] @ bent + first.reshape(2, 3)[:, 2]
        torch.testing.assert_close(target, straight, atol=1e-5, rtol=1e-4)


def test_pixels_and_normalised_points_lead_to_each_other() -> None:
    points = torch.tensor([[0.0, 0], [99, 49], [49.5, 24.5]])
    unit = to_unit(points, (50, 100))
    assert unit.tolist() == [[-1, -1], [1, 1], [0, 0]]
    torch.testing.assert_close(from_unit(unit, (50, 100)), points)


def test_draws_keep_to_their_ranges() -> None:
    generator, config = torch.Generator().manual_seed(0), GcnnConfig()
    plates = draw_warps("tps", 500, config, generator) - identity("tps")
    assert 0.38 < float(plates.abs().max()) <= 0.4
    affine = draw_warps("affine", 500, config, generator)
    assert float(affine[:, [2, 5]].abs().max()) <= 0.5
    assert float(affine[:, 0].max()) <= 1.5
    assert float(affine[:, 0].min()) >= 0.5 * math.cos(math.radians(30)) - 1e-6


def test_it_learns_eight_photos_by_heart(canvas: Canvas) -> None:
    """Fixed warps: the grid losses of both nets fall below 1e-3 within 300 steps."""
    torch.manual_seed(0)
    model = Gcnn(SMALL)
    photos, sizes = canvas.pixels.float() / 255, canvas.sizes
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(300):
        fixed = torch.Generator().manual_seed(9)
        taken = step_losses(model, patches, photos, sizes, fixed)
        optimiser.zero_grad()
        taken["loss"].backward()
        optimiser.step()
        if step % 10 == 0 and taken["loss"].item() < 1e-3:
            break
    assert taken["affine"].item() < 1e-3
    assert taken["tps"].item() < 1e-3


def test_a_run_writes_a_peer_that_moves_points_and_can_be_resumed(
    tmp_path: Path, canvas: Canvas
) -> None:
    def fitted(folder: Path) -> dict[str, Tensor]:
        run = Run.start(folder, SMALL, device="cpu")
        learn_gcnn(canvas, run, SMALL, patches, about={"photos": 8}, device=CPU, quiet=True)
        return dict(load_peer(folder).tensors)

    whole, again = fitted(tmp_path / "a"), fitted(tmp_path / "b")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    (tmp_path / "b" / "checkpoint-00000006.safetensors").unlink()
    run = Run.resume(tmp_path / "b")
    learn_gcnn(canvas, run, SMALL, patches, about={}, device=CPU, quiet=True)
    resumed = load_peer(tmp_path / "b").tensors
    torch.testing.assert_close(dict(resumed), whole)
    stored = load_peer(tmp_path / "a")
    assert stored.about["photos"] == 8
    row = gcnn_row("gcnn-affine", stored, init=("none",), device=CPU)
    assert (row.settings["stages"], row.asked(("own", "nearest"))) == (["affine"], ("own",))
    model = Gcnn(SMALL)
    model.load_state_dict(dict(stored.tensors))
    transfer = gcnn_transfer(model.eval(), patches, ("affine", "tps"))
    points = torch.tensor([[10.0, 20], [40, 30]])
    image0, image1 = canvas.pixels[0], canvas.pixels[1]
    moved = transfer(image0, image1, points)
    assert moved.shape == points.shape
    first, second = image1[None].float() / 255, image0[None].float() / 255
    with torch.no_grad():
        theta1 = model("affine", patches(first), patches(second))
        theta2 = model("tps", patches(resample(first, theta1)), patches(second))
    expected = warp_points(theta1, warp_points(theta2, to_unit(points, (64, 64))))[0]
    torch.testing.assert_close(moved, from_unit(expected, (64, 64)))

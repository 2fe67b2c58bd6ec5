"""Voting against a slow loop of its definition, and what it is for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.match.search import POSES, Voting, collect, voting_grid

GENERATOR = torch.Generator()


def slow_support(
    similarity: Tensor, point: tuple[float, float], settings: Voting
) -> list[list[float]]:
    """The definition, term by term, for a point of image 0: the support of every target cell."""
    h0, w0, h1, w1 = similarity.shape
    reach, kernel = settings.reach * settings.grid, 2 * settings.blur**2
    raised = (similarity.double() / settings.temperature).exp()
    rows, columns = raised.sum((2, 3)), raised.sum((0, 1))
    middle0, middle1 = ((w0 - 1) / 2, (h0 - 1) / 2), ((w1 - 1) / 2, (h1 - 1) / 2)
    best = [[0.0] * w1 for _ in range(h1)]
    for number, (xx, xy, yx, yy) in enumerate(POSES if settings.turned else POSES[:1]):

        def led(x: float, y: float, m: tuple[float, ...] = (xx, xy, yx, yy)) -> tuple[float, float]:
            x, y = x - middle0[0], y - middle0[1]
            return m[0] * x + m[1] * y, m[2] * x + m[3] * y

        offsets: dict[tuple[int, int], tuple[float, float]] = {}
        leads = [led(x, y) for y in range(h0) for x in range(w0)]
        first = [math.floor(-middle1[i] - max(lead[i] for lead in leads) + 1e-6) for i in (0, 1)]
        histogram: dict[tuple[int, int], float] = {}
        for sy in range(h0):
            for sx in range(w0):
                near = math.exp(-((sx - point[0]) ** 2 + (sy - point[1]) ** 2) / 2 / reach**2)
                at = led(sx, sy)
                for ty in range(h1):
                    for tx in range(w1):
                        share = raised[sy, sx, ty, tx].item() ** 2
                        share /= rows[sy, sx].item() * columns[ty, tx].item()
                        key = (
                            round(tx - middle1[0] - at[0] - first[0]),
                            round(ty - middle1[1] - at[1] - first[1]),
                        )
                        histogram[key] = histogram.get(key, 0.0) + near * share
        at = led(*point)
        for ty in range(h1):
            for tx in range(w1):
                x, y = tx - middle1[0] - at[0] - first[0], ty - middle1[1] - at[1] - first[1]
                assert abs(x - round(x)) + abs(y - round(y)) < 1e-6, "between bins"
                offsets[tx, ty] = x, y
                total = sum(
                    count * math.exp(-((bx - x) ** 2 + (by - y) ** 2) / kernel)
                    for (bx, by), count in histogram.items()
                )
                best[ty][tx] = max(best[ty][tx], total * (settings.turned if number else 1.0))
    top = max(map(max, best))
    return [[value / top for value in row] for row in best]


@pytest.mark.parametrize("turned", [0.0, 0.9])
def test_support_equals_the_definition(turned: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the poses that lead from cells to cells: as it is, and mirrored."""
    monkeypatch.setattr("surefeat.match.search.POSES", (POSES[0], POSES[len(POSES) // 2]))
    monkeypatch.setitem(slow_support.__globals__, "POSES", (POSES[0], POSES[len(POSES) // 2]))
    similarity = torch.rand(3, 4, 5, 4, generator=GENERATOR.manual_seed(0)) * 0.3
    settings = Voting(grid=4, blur=0.8, temperature=0.1, turned=turned)
    votes = collect(similarity, settings)
    for point in ((1.0, 2.0), (3.0, 0.0), (0.0, 1.0)):
        support = votes.support(torch.tensor([point]))[0]
        expected = torch.tensor(slow_support(similarity, point, settings))
        inside = support > 0  # beyond the outermost bin nobody has voted
        assert inside.float().mean() > 0.6
        torch.testing.assert_close(support[inside], expected[inside], atol=1e-4, rtol=1e-4)


def test_the_bonus_is_the_logarithm_of_the_support_between_cells() -> None:
    similarity = torch.rand(5, 6, 6, 5, generator=GENERATOR.manual_seed(1))
    settings = Voting(grid=6, weight=0.3, floor=0.05)
    votes = collect(similarity, settings)
    places, targets = torch.tensor([[0.3, 1.7], [4.9, 1.7]]), torch.tensor([[2.0, 3.0], [2.5, 3.0]])
    support = votes.support(places)
    assert torch.allclose(support.amax((1, 2)), torch.ones(2))
    between = (support[:, 3, 2] + support[:, 3, 3]) / 2
    expected = 0.3 * (torch.stack([support[:, 3, 2], between], 1) + 0.05).log()
    torch.testing.assert_close(votes.bonus(places, targets), expected)


def world_of(size: int, margin: int) -> Tensor:
    world = torch.randn(size + 2 * margin, size + 2 * margin, 24, generator=GENERATOR)
    return F.avg_pool2d(world.permute(2, 0, 1)[None], 3, 1, 1)[0].permute(1, 2, 0)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("degrees", [0.0, 20.0])
def test_voting_knows_a_thing_that_faces_the_other_way_or_leans(
    mirrored: bool, degrees: float
) -> None:
    """One drawing, seen again turned and behind noise: votes find what similarity cannot."""
    GENERATOR.manual_seed(2)
    size = 16
    picture = torch.randn(1, 24, size, size, generator=GENERATOR)
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    if mirrored:
        turn = turn @ torch.diag(torch.tensor([-1.0, 1.0]))
    steps = torch.arange(size) - (size - 1) / 2
    places = torch.cartesian_prod(steps, steps).flip(-1)
    truth = places @ turn.T  # where each place of image 0 lies in image 1
    # Image 1 shows at y what image 0 shows at turn^-1 y.
    grid = (places @ turn) / (size / 2)
    seen = F.grid_sample(picture, grid.reshape(1, size, size, 2), align_corners=False)[0]

    def noisy(maps: Tensor) -> Tensor:
        vectors = maps.flatten(1).T
        noise = torch.randn(vectors.shape, generator=GENERATOR)
        return F.normalize(vectors + 1.1 * noise, dim=-1)

    similarity = noisy(picture[0]) @ noisy(seen).T
    inside = (truth.abs() < 5).all(-1) & (places.abs() < 5).all(-1)

    def share_right(scores: Tensor) -> float:
        reached = places[scores.argmax(1)]
        return ((reached - truth).norm(dim=-1) < 1.6)[inside].float().mean().item()

    whole = places + (size - 1) / 2
    voting = Voting(grid=size, temperature=0.1, reach=0.25, blur=1.0)
    votes = collect(similarity.reshape(size, size, size, size), voting)
    blind = collect(
        similarity.reshape(size, size, size, size),
        Voting(grid=size, temperature=0.1, reach=0.25, blur=1.0, turned=0.0),
    )
    plain = share_right(similarity)
    voted = share_right(similarity + votes.bonus(whole, whole))
    assert 1 - voted < 0.6 * (1 - plain)
    if mirrored:
        assert share_right(similarity + blind.bonus(whole, whole)) < voted - 0.1


@pytest.mark.parametrize("shift", [(3, -2), (-5, 0)])
def test_voting_recovers_a_translation_that_noise_hides(shift: tuple[int, int]) -> None:
    generator = GENERATOR.manual_seed(2)
    size, margin = 16, 6
    world = torch.randn(size + 2 * margin, size + 2 * margin, 24, generator=generator)

    def view(dx: int, dy: int) -> Tensor:
        part = world[margin + dy : margin + dy + size, margin + dx : margin + dx + size]
        noise = torch.randn(part.shape, generator=generator)
        return F.normalize(part + 1.3 * noise, dim=-1).reshape(-1, 24)

    view0, view1 = view(0, 0), view(*shift)
    similarity = view0 @ view1.T
    places = torch.cartesian_prod(torch.arange(size), torch.arange(size)).flip(-1).float()
    truth = places - torch.tensor(shift)
    inside = ((truth >= 0) & (truth < size)).all(-1)

    def share_right(scores: Tensor) -> float:
        right = (places[scores.argmax(1)] == truth).all(-1)
        return right[inside].float().mean().item()

    votes = collect(
        similarity.reshape(size, size, size, size), Voting(grid=size, temperature=0.1, blur=1.0)
    )
    plain, voted = share_right(similarity), share_right(similarity + votes.bonus(places, places))
    assert plain < 0.6
    assert 1 - voted < (1 - plain) / 3


def test_the_grid_follows_the_aspect_ratio() -> None:
    assert voting_grid((224, 224), 28) == (28, 28)
    assert voting_grid((240, 320), 28) == (21, 28)
    assert voting_grid((16, 1600), 28) == (1, 28)


@pytest.mark.parametrize("name", ["grid", "temperature", "reach", "floor"])
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        Voting(**{name: 0})

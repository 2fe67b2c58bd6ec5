"""Local offset voting against a slow loop of its definition, and what it is for."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.match.search import Voting, collect, voting_grid

GENERATOR = torch.Generator()


def slow_bonus(
    similarity: Tensor, point: tuple[float, float], target: tuple[int, int], settings: Voting
) -> float:
    """The definition, term by term, for a target that lies a whole number of cells away."""
    h0, w0, h1, w1 = similarity.shape
    reach = settings.reach * settings.grid
    histogram: dict[tuple[int, int], float] = {}
    for sy in range(h0):
        for sx in range(w0):
            near = math.exp(-((sx - point[0]) ** 2 + (sy - point[1]) ** 2) / 2 / reach**2)
            row = [[math.exp(similarity[sy, sx, y, x].item() / settings.temperature)
                    for x in range(w1)] for y in range(h1)]  # fmt: skip
            total = sum(map(sum, row))
            for y in range(h1):
                for x in range(w1):
                    key = (x - sx, y - sy)
                    histogram[key] = histogram.get(key, 0.0) + near * row[y][x] / total

    def blurred(offset: tuple[int, int]) -> float:
        if settings.blur == 0:
            return histogram.get(offset, 0.0)
        kernel = {d: math.exp(-0.5 * (d / settings.blur) ** 2) for d in range(-40, 41)}
        whole = sum(kernel.values()) ** 2
        return (
            sum(
                kernel[dx] * kernel[dy] * histogram.get((offset[0] + dx, offset[1] + dy), 0.0)
                for dx in kernel
                for dy in kernel
            )
            / whole
        )

    offsets = [(x, y) for x in range(1 - w0, w1) for y in range(1 - h0, h1)]
    peak = max(blurred(offset) for offset in offsets)
    offset = (round(target[0] - point[0]), round(target[1] - point[1]))
    return settings.weight * math.log(blurred(offset) / peak + settings.floor)


@pytest.mark.parametrize("blur", [0.0, 0.8])
def test_bonus_equals_the_definition(blur: float) -> None:
    similarity = torch.rand(3, 4, 5, 2, generator=GENERATOR.manual_seed(0)) * 0.3
    settings = Voting(grid=4, blur=blur, temperature=0.1)
    votes = collect(similarity, settings)
    for point, target in (((1.0, 2.0), (0, 4)), ((3.0, 0.0), (1, 0)), ((0.0, 1.0), (1, 2))):
        found = votes.bonus(torch.tensor([point]), torch.tensor([target], dtype=torch.float32))
        expected = slow_bonus(similarity, point, target, settings)
        assert found.item() == pytest.approx(expected, abs=1e-5)


def test_a_row_of_points_gets_what_each_point_gets_alone() -> None:
    similarity = torch.rand(5, 6, 6, 5, generator=GENERATOR.manual_seed(1))
    votes = collect(similarity, Voting(grid=6))
    row = torch.tensor([[0.3, 1.7], [2.0, 1.7], [4.9, 1.7]])
    mixed = torch.cat([row, torch.tensor([[1.0, 3.0]])])
    assert torch.allclose(votes.around(row), votes.around(mixed)[:3], atol=1e-6)
    assert torch.allclose(votes.around(row).amax((1, 2)), torch.ones(3))


def test_between_cells_the_bonus_follows_the_offset() -> None:
    """All cells vote for one offset; half a cell beside it half the support is left."""
    similarity = torch.full((6, 6, 6, 6), -10.0)
    for y in range(6):
        for x in range(5):
            similarity[y, x, y, x + 1] = 10.0
    similarity[:, 5] = similarity[:, 4].roll(1, dims=-1)
    votes = collect(similarity, Voting(grid=6, blur=0.0))
    found = votes.bonus(torch.tensor([[2.0, 2.0]]), torch.tensor([[3.0, 2.0], [3.5, 2.0]]))
    expected = [0.4 * math.log(1.02), 0.4 * math.log(0.52)]
    assert found[0].tolist() == pytest.approx(expected, abs=0.02)


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

    votes = collect(similarity.reshape(size, size, size, size), Voting(grid=size))
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

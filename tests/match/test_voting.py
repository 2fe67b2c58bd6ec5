"""Voting against a slow loop of its definition, and what it is for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.match.votes import (
    COARSE,
    OBJECTION,
    POSES,
    Pose,
    Voting,
    collect,
    mirrored_share,
    voting_grid,
)

GENERATOR = torch.Generator()


def led(pose: Pose, x: float, y: float) -> tuple[float, float]:
    return pose[0] * x + pose[1] * y, pose[2] * x + pose[3] * y


def binned(
    shares: Tensor, pose: Pose, weights: dict[tuple[int, int], float]
) -> tuple[dict[tuple[int, int], float], list[int]]:
    """Votes (h0, w0, h1, w1) of cells that count by their weight, by offset, and the first bin."""
    h0, w0, h1, w1 = shares.shape
    middle0, middle1 = ((w0 - 1) / 2, (h0 - 1) / 2), ((w1 - 1) / 2, (h1 - 1) / 2)
    leads = {
        (x, y): led(pose, x - middle0[0], y - middle0[1]) for y in range(h0) for x in range(w0)
    }
    first = [
        math.floor(-middle1[i] - max(lead[i] for lead in leads.values()) + 1e-6) for i in (0, 1)
    ]
    histogram: dict[tuple[int, int], float] = {}
    for (sx, sy), at in leads.items():
        for ty in range(h1):
            for tx in range(w1):
                key = (
                    round(tx - middle1[0] - at[0] - first[0]),
                    round(ty - middle1[1] - at[1] - first[1]),
                )
                share = shares[sy, sx, ty, tx].item() * weights[sx, sy]
                histogram[key] = histogram.get(key, 0.0) + share
    return histogram, first


def slow_shares(similarity: Tensor, temperature: float) -> Tensor:
    raised = (similarity.double() / temperature).exp()
    rows, columns = raised.sum((2, 3), keepdim=True), raised.sum((0, 1), keepdim=True)
    return raised * raised / (rows * columns)


def slow_support(
    similarity: Tensor, point: tuple[float, float], settings: Voting, poses: tuple[Pose, ...]
) -> list[list[float]]:
    """The definition, term by term, for a point of image 0: the support of every target cell."""
    h0, w0, h1, w1 = similarity.shape
    reach, kernel = settings.reach * settings.grid, 2 * settings.blur**2
    shares = slow_shares(similarity, settings.temperature)
    near = {
        (x, y): math.exp(-((x - point[0]) ** 2 + (y - point[1]) ** 2) / 2 / reach**2)
        for y in range(h0)
        for x in range(w0)
    }
    best = [[0.0] * w1 for _ in range(h1)]
    for number, pose in enumerate(poses):
        histogram, first = binned(shares, pose, near)
        at = led(pose, point[0] - (w0 - 1) / 2, point[1] - (h0 - 1) / 2)
        for ty in range(h1):
            for tx in range(w1):
                x, y = tx - (w1 - 1) / 2 - at[0] - first[0], ty - (h1 - 1) / 2 - at[1] - first[1]
                assert abs(x - round(x)) + abs(y - round(y)) < 1e-6, "between bins"
                total = sum(
                    count * math.exp(-((bx - x) ** 2 + (by - y) ** 2) / kernel)
                    for (bx, by), count in histogram.items()
                )
                best[ty][tx] = max(best[ty][tx], total * (settings.turned if number else 1.0))
    top = max(map(max, best))
    return [[value / top for value in row] for row in best]


HALF = 0.5
"""A pair that may face either way."""

UNSURE = torch.tensor([1e6])
"""Sigma of a place where votes count in full."""


@pytest.mark.parametrize("facing", [0, 1])
def test_support_equals_the_definition(facing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With poses that lead from cells to cells: as it is, or mirrored; and upside down."""
    poses = tuple((ways[0], (-ways[0][0], 0.0, 0.0, -1.0)) for ways in POSES)
    monkeypatch.setattr("surefeat.match.votes.POSES", poses)
    similarity = torch.rand(3, 4, 5, 4, generator=GENERATOR.manual_seed(0)) * 0.3
    settings = Voting(grid=4, blur=0.8, temperature=0.1, turned=0.7)
    votes = collect(similarity, settings, mirrored=HALF)
    for point in ((1.0, 2.0), (3.0, 0.0), (0.0, 1.0)):
        support = votes.support(torch.tensor([point]), facing)[0]
        expected = torch.tensor(slow_support(similarity, point, settings, poses[facing]))
        inside = support > 0  # beyond the outermost bin nobody has voted
        assert inside.float().mean() > 0.6
        torch.testing.assert_close(support[inside], expected[inside], atol=1e-4, rtol=1e-4)


def test_the_bonus_is_the_logarithm_of_the_support_of_both_facings_by_their_say() -> None:
    similarity = torch.rand(5, 6, 6, 5, generator=GENERATOR.manual_seed(1))
    votes = collect(similarity, Voting(grid=6, weight=0.3, floor=0.05), mirrored=0.2)
    places, targets = torch.tensor([[0.3, 1.7], [4.9, 1.7]]), torch.tensor([[2.0, 3.0], [2.5, 3.0]])
    expected = torch.zeros(2, 2)
    for facing, say in ((0, 0.8), (1, 0.2)):
        support = votes.support(places, facing)
        assert torch.allclose(support.amax((1, 2)), torch.ones(2))
        between = (support[:, 3, 2] + support[:, 3, 3]) / 2
        read = torch.stack([support[:, 3, 2], between], 1)
        expected += say * 0.3 * (read + 0.05).log()
    torch.testing.assert_close(votes.bonus(places, targets, UNSURE.expand(2)), expected)


def test_the_surer_a_place_is_the_less_its_neighbours_say() -> None:
    """In proportion to the loss that sigma predicts, 1/b - 1/(e^b - 1) with b = 1/sigma."""
    similarity = torch.rand(5, 6, 6, 5, generator=GENERATOR.manual_seed(1))
    votes = collect(similarity, Voting(grid=6, doubt=0.3))
    place, target = torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    full = votes.bonus(place, target, UNSURE)
    for sigma in (0.05, 0.2, 0.3):
        share = (sigma - 1 / (math.exp(1 / sigma) - 1)) / 0.3
        part = votes.bonus(place, target, torch.tensor([sigma]))
        torch.testing.assert_close(part, full * share, rtol=1e-4, atol=0)
    # From `doubt` on all of them count.
    torch.testing.assert_close(votes.bonus(place, target, torch.tensor([0.5])), full)


def test_a_facing_without_a_say_is_not_counted() -> None:
    similarity = torch.rand(4, 4, 4, 4, generator=GENERATOR.manual_seed(3))
    assert [len(ways) for ways in collect(similarity, Voting(grid=4)).poses] == [9, 0]
    mirrored = collect(similarity, Voting(grid=4), mirrored=1.0)
    assert [len(ways) for ways in mirrored.poses] == [0, 9]
    assert [len(ways) for ways in collect(similarity, Voting(), mirrored=0.5).poses] == [9, 9]


def slow_ratio(similarity: Tensor, confidence: tuple[Tensor, Tensor], temperature: float) -> float:
    """log of the two facings' best agreement on one pose and offset, counted by confidence."""
    h0, w0, h1, w1 = similarity.shape
    first, second = confidence[0].reshape(h0, w0, 1, 1), confidence[1].reshape(1, 1, h1, w1)
    shares = slow_shares(similarity, temperature) * first * second
    even = {(x, y): 1.0 for y in range(h0) for x in range(w0)}
    agreed = []
    for poses in POSES:
        peaks = []
        for pose in poses:
            histogram, _ = binned(shares, pose, even)
            wide, high = (max(key[i] for key in histogram) for i in (0, 1))
            peaks.append(
                max(
                    sum(
                        count * math.exp(-((bx - x) ** 2 + (by - y) ** 2) / 2 / COARSE**2)
                        for (bx, by), count in histogram.items()
                    )
                    for x in range(wide + 1)
                    for y in range(high + 1)
                )
            )
        agreed.append(max(peaks))
    return math.log(agreed[0] / agreed[1])


def test_which_way_a_pair_faces_follows_its_definition() -> None:
    """A slow loop; what all layers object beyond OBJECTION counts against a mirrored pair."""
    GENERATOR.manual_seed(5)
    settings = Voting(grid=4, temperature=0.2, decisive=3.0)
    confidence = (torch.rand(12, generator=GENERATOR) + 0.2, torch.rand(16, generator=GENERATOR))
    objections = 0
    for strength in (0.2, 1.0, 3.0):
        lower = torch.rand(3, 4, 4, 4, generator=GENERATOR)
        everything = strength * torch.rand(3, 4, 4, 4, generator=GENERATOR)
        # The same way: cells resemble those at their own place.
        everything += strength * torch.eye(4)[None, :, None] * (torch.eye(4)[:3, None, :, None])
        own = slow_ratio(everything, confidence, settings.temperature)
        objection = max(0.0, own - OBJECTION)
        objections += objection > 0
        ratio = slow_ratio(lower, confidence, settings.temperature) + objection
        share = mirrored_share(everything, lower, confidence, settings)
        assert share == pytest.approx(1 / (1 + math.exp(3.0 * ratio)), abs=1e-4)
    assert 0 < objections < 3


def test_confident_cells_say_which_way_a_pair_faces() -> None:
    """A mirrored thing before a background that stays: what is sure of itself decides."""
    size = 12
    GENERATOR.manual_seed(6)
    background = F.normalize(torch.randn(size, size, 32, generator=GENERATOR), dim=-1)
    thing = F.normalize(torch.randn(size, 4, 32, generator=GENERATOR), dim=-1)
    first, second = background.clone(), background.clone()
    first[:, 4:8], second[:, 4:8] = thing, thing.flip(1)
    similarity = torch.einsum("ijc,klc->ijkl", first, second)
    sure = torch.full((size, size), 0.1)
    sure[:, 4:8] = 1.0
    even, settings = torch.ones(size * size), Voting(grid=size)
    told = mirrored_share(similarity, similarity, (sure.flatten(), sure.flatten()), settings)
    untold = mirrored_share(similarity, similarity, (even, even), settings)
    assert told > 0.9
    assert untold < 0.1


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
    voting = Voting(grid=size, temperature=0.1, reach=0.25, blur=1.0, floor=0.1)
    cells, even = similarity.reshape(size, size, size, size), torch.ones(size * size)
    turned = mirrored_share(cells, cells, (even, even), voting)
    assert turned > 0.99 if mirrored else turned < 0.01

    def with_votes(settings: Voting, facing: float) -> float:
        votes = collect(cells, settings, mirrored=facing)
        return share_right(similarity + votes.bonus(whole, whole, UNSURE.expand(len(whole))))

    plain, voted = share_right(similarity), with_votes(voting, turned)
    assert 1 - voted < 0.6 * (1 - plain)
    if mirrored:
        assert with_votes(voting, 0.0) < voted - 0.1
    if degrees:
        assert with_votes(replace(voting, turned=0.0), turned) < voted - 0.05


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
        similarity.reshape(size, size, size, size),
        Voting(grid=size, temperature=0.1, reach=0.35, blur=1.0, floor=0.1),
    )
    bonus = votes.bonus(places, places, UNSURE.expand(len(places)))
    plain, voted = share_right(similarity), share_right(similarity + bonus)
    assert plain < 0.6
    assert 1 - voted < (1 - plain) / 3


def test_the_grid_follows_the_aspect_ratio() -> None:
    assert voting_grid((224, 224), 28) == (28, 28)
    assert voting_grid((240, 320), 28) == (21, 28)
    assert voting_grid((16, 1600), 28) == (1, 28)


@pytest.mark.parametrize("name", ["grid", "temperature", "reach", "floor", "doubt"])
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        Voting(**{name: 0})

"""Heat maps, their loss, their peaks and the loop, against cases worked out by hand."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.head import (
    Batch,
    KeypointHead,
    find_points,
    fit,
    heatmap_loss,
    heatmaps,
    on_map,
    peaks,
)
from surefeat.learn.loop import TrainingStoppedError


def test_a_heat_map_is_a_gaussian_around_the_exact_point_cut_at_the_floor() -> None:
    found = heatmaps(torch.tensor([[[1.25, 1.0]]]), torch.tensor([[True]]), size=(3, 4))[0, 0]
    # exp(-2 d^2): distances .25 and .75 along the row; one row off adds 1 to d^2. Kept: > 0.2.
    expected = torch.zeros(3, 4)
    expected[1, 1], expected[1, 2] = math.exp(-2 * 0.0625), math.exp(-2 * 0.5625)
    torch.testing.assert_close(found, expected)
    on_the_cell = heatmaps(torch.tensor([[[2.0, 0.0]]]), torch.tensor([[True]]), size=(3, 4))
    assert on_the_cell.sum() == on_the_cell[0, 0, 0, 2] == 1


def test_keypoints_without_a_place_on_the_map_have_an_empty_one() -> None:
    points = torch.tensor([[[1.0, 1.0], [torch.nan, torch.nan], [-0.6, 1.0], [3.4, 2.5]]])
    visible = torch.tensor([[False, True, True, True]])
    found = heatmaps(points, visible, size=(3, 4))[0]
    assert found.sum((-2, -1)).tolist()[:3] == [0, 0, 0]
    assert found[3, 2, 3] == pytest.approx(math.exp(-2 * (0.4**2 + 0.5**2)))
    assert on_map(points, size=(3, 4)).tolist() == [[True, False, False, True]]
    # Three rows of four columns, up to their outer edges.
    edges = torch.tensor([[3.5, 2.5], [3.6, 1.0], [1.0, 2.6], [-0.5, -0.5], [1.0, -0.6]])
    assert on_map(edges, size=(3, 4)).tolist() == [True, False, False, True, False]


@given(st.floats(-0.5, 5.5), st.floats(-0.5, 4.5))
def test_peaks_find_any_point_of_a_target_within_about_a_quarter_of_a_cell(
    x: float, y: float
) -> None:
    point = torch.tensor([[[x, y]]])
    target = heatmaps(point, torch.tensor([[True]]), size=(5, 6))
    # Where four cells meet, each still has exp(-1).
    assert target.max() >= math.exp(-1) - 1e-5
    found, score = peaks(target)
    inside = point.clamp_min(0).minimum(torch.tensor([5.0, 4.0]))  # no cells beyond the outermost
    # A quarter, and a little more where the second best cell falls below what a target keeps.
    assert (found - inside).norm() <= 0.26
    assert score == target.max()


def test_the_loss_is_the_sum_written_out() -> None:
    """Two objects, two channels of two cells; the second object's first channel does not count."""
    p = torch.tensor([[[[0.5, 0.25]], [[0.0, 1.0]]], [[[0.9, 0.9]], [[0.5, 0.5]]]])
    t = torch.tensor([[[[1.0, 0.0]], [[0.0, 0.5]]], [[[0.0, 0.0]], [[0.0, 0.0]]]])
    own = torch.tensor([[True, True], [False, True]])
    plain = (0.25 + 0.0625) + 0.25 + (0.25 + 0.25)
    weighted = (1.0 * 0.5) ** 2 + (0.5 * 0.5) ** 2
    assert heatmap_loss(p, t, own, weight=10.0) == pytest.approx((plain + 10 * weighted) / 4)


def test_a_new_head_expects_little_anywhere() -> None:
    """Nearly all of a target is 0: a head that began at one half would first unlearn that."""
    generator = torch.Generator().manual_seed(0)
    head = KeypointHead(3, 4, hidden=64, generator=generator)
    chances = head(torch.randn(8, 3, 12, 12, generator=generator)).sigmoid().detach()
    assert 0.05 < float(chances.mean()) < 0.2


def test_only_the_own_categorys_channels_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    head = KeypointHead(3, 4, hidden=5, generator=generator).eval()
    own = torch.tensor([[True, True, False, False]])
    loss = heatmap_loss(
        head(torch.ones(1, 3, 4, 4)).sigmoid(), torch.ones(1, 4, 4, 4), own, weight=1.0
    )
    loss.backward()
    moved = head.conv2.weight.grad.abs().sum((1, 2, 3)) > 0  # type: ignore[union-attr]
    assert moved.tolist() == [True, True, False, False]


def a_batch(generator: torch.Generator) -> Batch:
    """One channel of the features says where the point is."""
    places = torch.randint(0, 6, (8, 1, 2), generator=generator).float()
    features = torch.rand(8, 4, 6, 6, generator=generator) * 0.1
    targets = heatmaps(places, torch.ones(8, 1, dtype=torch.bool), size=(6, 6))
    features[:, :1] += targets
    return features, targets, torch.ones(8, 1, dtype=torch.bool)


def learn(
    seed: int,
    *,
    batches: Callable[[torch.Generator], Batch] = a_batch,
    steps: int = 60,
    learning_rate: float = 1e-2,
    weight_decay: float = 0.0,
) -> tuple[KeypointHead, list[float]]:
    generator = torch.Generator().manual_seed(seed)
    head = KeypointHead(4, 1, hidden=16, generator=generator)
    config = KeypointConfig(learning_rate=learning_rate, weight_decay=weight_decay)
    drawn = (batches(generator) for _ in range(steps))
    return head, fit(head, drawn, steps=steps, config=config)


def test_the_loop_learns_and_the_same_seed_gives_the_same_head() -> None:
    torch.manual_seed(1)
    head, losses = learn(0)
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.1 * sum(losses[:5])
    assert not head.training
    features, targets, _ = a_batch(torch.Generator().manual_seed(7))
    found, _ = peaks(head(features).sigmoid().detach())
    assert (found - peaks(targets)[0]).norm(dim=-1).max() < 0.5
    torch.manual_seed(2)  # the global state has no say
    again, same = learn(0)
    assert losses == same
    for first, second in zip(head.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(first, second)
    assert learn(1)[1] != losses


def test_the_rate_falls_along_half_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    plain = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *arguments: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return plain(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    learn(0, steps=4, learning_rate=0.1)
    # cos of 0, 45, 90 and 135 degrees.
    root = math.sqrt(0.5)
    assert rates == pytest.approx([0.1, 0.05 * (1 + root), 0.05, 0.05 * (1 - root)])


def test_weight_decay_shrinks_what_is_not_learned() -> None:
    """Without features and with nothing that counts, AdamW multiplies by 1 - rate x decay."""

    def nothing(generator: torch.Generator) -> Batch:
        none = torch.zeros(2, 1, dtype=torch.bool)
        return torch.zeros(2, 4, 6, 6), torch.zeros(2, 1, 6, 6), none

    start = KeypointHead(4, 1, hidden=16, generator=torch.Generator().manual_seed(0))
    for decay in (0.0, 0.5):
        head, _ = learn(0, batches=nothing, steps=1, learning_rate=0.1, weight_decay=decay)
        torch.testing.assert_close(head.conv1.weight, start.conv1.weight * (1 - 0.1 * decay))


def test_a_fit_that_ends_in_no_number_is_refused() -> None:
    def broken(generator: torch.Generator) -> Batch:
        features, targets, own = a_batch(generator)
        return features / 0, targets, own

    with pytest.raises(TrainingStoppedError, match=r"the loss is nan.*; lower --learning-rate$"):
        learn(0, batches=broken, steps=2)


def test_ctrl_c_ends_a_fit_after_its_step() -> None:
    """It promises no checkpoint, as there is none."""
    shown = []

    def stopped(generator: torch.Generator) -> Batch:
        shown.append(signal.raise_signal(signal.SIGINT) if len(shown) == 2 else None)
        return a_batch(generator)

    with pytest.raises(KeyboardInterrupt, match=r"^stopped after step 3$"):
        learn(0, batches=stopped)
    assert len(shown) == 3


def test_points_are_found_in_the_pixels_of_their_boxes() -> None:
    head, _ = learn(0)
    features, targets, _ = a_batch(torch.Generator().manual_seed(7))
    boxes = torch.tensor([[10.0, 20.0, 69.0, 31.0]]).expand(8, 4)  # 60 x 12 pixels, 6 x 6 cells
    points, scores = find_points(head, features, boxes)
    cells, _ = peaks(targets)
    expected = torch.tensor([10.0, 20.0]) - 0.5 + (cells + 0.5) * torch.tensor([10.0, 2.0])
    assert ((points - expected) / torch.tensor([10.0, 2.0])).abs().max() < 0.5
    assert scores.min() > 0.3
    assert scores.max() <= 1

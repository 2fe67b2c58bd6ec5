"""PCK in its conventions, against hand-computed cases, a slow loop and real pairs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefeat.data.benchmarks import (
    CONVENTIONS,
    development_pairs,
    load_benchmark,
    load_pf_pascal,
    load_pf_willow,
)
from surefeat.data.pairs import Pair
from surefeat.measure.metrics import hits, identity_points, in_convention, pck_over_pairs

NAN = math.nan


def make_pair(
    points1: list[list[float]],
    *,
    size1: tuple[int, int] = (100, 200),
    box1: list[float] | None = None,
    category: str = "car",
) -> Pair:
    target = torch.tensor(points1)
    visible = target.isfinite().all(-1)
    box = None if box1 is None else torch.tensor(box1)
    here = Path("a.png")
    return Pair(
        here, here, category, target.clone(), target, visible, (50, 50), size1, "pair", None, box
    )


def random_pairs(count: int, seed: int) -> tuple[list[Pair], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pairs, predictions = [], []
    for index in range(count):
        number = int(torch.randint(3, 9, (), generator=generator))
        points = torch.rand(number, 2, generator=generator) * 90
        points[1:][torch.rand(number - 1, generator=generator) < 0.3] = NAN
        box = [5.0, 4.0, 5.0 + 11 * (index % 4), 60.0]
        pair = make_pair(
            points.tolist(), size1=(95 + index, 120), box1=box, category="abc"[index % 3]
        )
        pairs.append(pair)
        noise = torch.randn(number, 2, generator=generator) * 12
        predictions.append(points.nan_to_num(7.0) + noise)
    return pairs, predictions


def slow_pck(
    pairs: list[Pair], predictions: list[Tensor], convention: str, alpha: float
) -> tuple[float, float]:
    """Plain Python, straight from the table of conventions: (per image, per point)."""
    shares, right, total = [], 0, 0
    for pair, predicted in zip(pairs, predictions, strict=True):
        height, width = pair.size1
        seen = [p for p, v in zip(pair.points1.tolist(), pair.visible.tolist(), strict=True) if v]
        guess = [p for p, v in zip(predicted.tolist(), pair.visible.tolist(), strict=True) if v]
        sx, sy = (224 / width, 224 / height) if convention == "scnet" else (1.0, 1.0)
        if convention == "scnet":
            length = 224.0
        elif convention == "img":
            length = max(height, width)
        elif convention == "bbox-kp":
            xs, ys = [p[0] for p in seen], [p[1] for p in seen]
            length = max(max(xs) - min(xs), max(ys) - min(ys))
        else:
            x1, y1, x2, y2 = pair.box1.tolist()
            length = max(x2 - x1, y2 - y1)
        good = [
            math.hypot((g[0] - s[0]) * sx, (g[1] - s[1]) * sy) < alpha * length
            for g, s in zip(guess, seen, strict=True)
        ]
        shares.append(sum(good) / len(good))
        right, total = right + sum(good), total + len(good)
    return sum(shares) / len(shares), right / total


def test_pck_counts_distances_strictly_below_each_threshold() -> None:
    target = torch.zeros(4, 2)
    predicted = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 6.0], [10.0, 0.0]])
    everything = torch.ones(4, dtype=torch.bool)
    right = hits(predicted, target, torch.tensor([5.0, 5.01, 11.0]), everything)
    assert right.sum(1).tolist() == [1, 2, 4]
    assert hits(predicted, target, 7.0, everything).sum().item() == 3


def test_pck_ignores_invisible_points() -> None:
    # A -1 padded point "matches" any other -1 padded point: counting it would give 2/3.
    target = torch.tensor([[10.0, 10.0], [50.0, 50.0], [-1.0, -1.0]])
    predicted = torch.tensor([[10.0, 11.0], [90.0, 90.0], [-1.0, -1.0]])
    visible = torch.tensor([True, True, False])
    assert hits(predicted, target, 5.0, visible).tolist() == [[True, False]]


def test_pck_counts_a_prediction_that_is_not_a_number_as_wrong() -> None:
    target = torch.zeros(2, 2)
    predicted = torch.tensor([[NAN, 0.0], [0.0, 0.0]])
    assert hits(predicted, target, 1e9, torch.ones(2, dtype=torch.bool)).tolist() == [[False, True]]


def test_pck_refuses_shapes_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="keep invisible points in place"):
        hits(torch.zeros(2, 2), torch.zeros(3, 2), 1.0, torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("convention", "length", "x_error", "right"),
    [
        # Image 1 is 200 wide and 100 high. scnet: 19 px in x are 19*224/200 = 21.28 < 22.4.
        ("scnet", 224.0, 19.0, True),
        ("scnet", 224.0, 20.5, False),  # 22.96
        ("img", 200.0, 19.9, True),
        ("img", 200.0, 20.1, False),
        # Visible keypoints span 80 x 30; the invisible one does not stretch the box.
        ("bbox-kp", 80.0, 7.9, True),
        ("bbox-kp", 80.0, 8.1, False),
        # The object box is 10..110: its side is 100, not the inclusive 101.
        ("bbox", 100.0, 9.9, True),
        ("bbox", 100.0, 10.05, False),
    ],
)
def test_each_convention_has_its_own_threshold(
    convention: str, length: float, x_error: float, right: bool
) -> None:
    pair = make_pair([[20.0, 40.0], [100.0, 70.0], [NAN, NAN]], box1=[10.0, 30.0, 110.0, 80.0])
    predicted = pair.points1.nan_to_num(0) + torch.tensor([x_error, 0.0])
    assert in_convention(predicted, pair, convention)[2] == length  # type: ignore[arg-type]
    result = pck_over_pairs([predicted], [pair], convention=convention, alphas=[0.1])  # type: ignore[arg-type]
    assert result.per_image == (1.0 if right else 0.0,)


def test_scnet_distances_stretch_with_the_image() -> None:
    # Image 1 is 200 wide, 100 high: 9 px down are 20.2 of 224, 19 across 21.3, 11 down 24.6.
    pair = make_pair([[50.0, 50.0]])
    for error, right in (((0.0, 9.0), 1.0), ((19.0, 0.0), 1.0), ((0.0, 11.0), 0.0)):
        predicted = pair.points1 + torch.tensor(error)
        assert pck_over_pairs([predicted], [pair], convention="scnet", alphas=[0.1]).per_image[
            0
        ] == pytest.approx(right)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_pck_over_pairs_agrees_with_a_slow_loop(convention: str) -> None:
    pairs, predictions = random_pairs(24, seed=3)
    alphas = (0.02, 0.05, 0.1, 0.15, 0.5)
    result = pck_over_pairs(predictions, pairs, convention=convention, alphas=alphas)  # type: ignore[arg-type]
    for index, alpha in enumerate(alphas):
        image, point = slow_pck(pairs, predictions, convention, alpha)
        assert result.per_image[index] == pytest.approx(image)
        assert result.per_point[index] == pytest.approx(point)
    for name in "abc":
        own = [index for index, pair in enumerate(pairs) if pair.category == name]
        image, _ = slow_pck([pairs[i] for i in own], [predictions[i] for i in own], convention, 0.1)
        assert result.by_category[name][2] == pytest.approx(image)


def test_per_image_and_per_point_means_differ() -> None:
    one = make_pair([[0.0, 0.0]])
    three = make_pair([[0.0, 0.0], [10.0, 0.0], [20.0, 0.0]])
    result = pck_over_pairs(
        [one.points1, three.points1 + 1000], [one, three], convention="img", alphas=[0.1]
    )
    assert result.per_image == (0.5,)
    assert result.per_point == (0.25,)
    assert [marks.tolist() for marks in result.right] == [[[True]], [[False] * 3]]


def test_pck_says_what_is_missing() -> None:
    pair = make_pair([[1.0, 2.0]])
    with pytest.raises(ValueError, match="has no object box"):
        pck_over_pairs([pair.points1], [pair], convention="bbox", alphas=[0.1])
    with pytest.raises(ValueError, match="choose from scnet, img, bbox-kp, bbox"):
        pck_over_pairs([pair.points1], [pair], convention="box", alphas=[0.1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 predictions for 1 pairs"):
        pck_over_pairs([], [pair], convention="img", alphas=[0.1])


def test_identity_scores_what_was_measured_before(data_root: Path) -> None:
    """Same place in the other image, PCK@0.1: 37.0 on test, 27.0 on WILLOW, in an earlier study."""
    for pairs, convention, expected in (
        (load_pf_pascal(data_root / "pf-pascal"), "scnet", 0.370),
        (load_pf_willow(data_root / "pf-willow"), "bbox-kp", 0.270),
    ):
        predicted = [identity_points(p.points0, size0=p.size0, size1=p.size1) for p in pairs]
        result = pck_over_pairs(predicted, pairs, convention=convention, alphas=[0.1])  # type: ignore[arg-type]
        assert result.per_image[0] == pytest.approx(expected, abs=0.003)
    assert sum(marks.numel() for marks in result.right) == 9000


def test_conventions_differ_on_real_pairs_by_more_than_most_methods_do(data_root: Path) -> None:
    pairs = development_pairs(data_root / "pf-pascal")[0]
    predicted = [identity_points(p.points0, size0=p.size0, size1=p.size1) for p in pairs]
    by_rule = {
        rule: pck_over_pairs(predicted, pairs, convention=rule, alphas=[0.1]).per_image[0]  # type: ignore[arg-type]
        for rule in ("scnet", "img", "bbox-kp")
    }
    assert by_rule["img"] > by_rule["scnet"] > by_rule["bbox-kp"] + 0.05


def test_birds_are_read_as_they_are_and_the_same_place_scores_as_documented(
    data_root: Path,
) -> None:
    """cub-dev's own README: 400 pairs, 4,185 points, 18.4 % at 0.1 by copying (the scnet rule)."""
    if not (data_root / "cub-dev").is_dir():
        pytest.skip("needs cub-dev in the development data")
    benchmark = load_benchmark("pairs", data_root / "cub-dev" / "pairs.csv")
    assert (len(benchmark.pairs), benchmark.rule) == (400, "img")
    copied = [identity_points(p.points0, size0=p.size0, size1=p.size1) for p in benchmark.pairs]
    result = pck_over_pairs(copied, benchmark.pairs, convention="scnet", alphas=(0.1,))
    assert sum(marks.numel() for marks in result.right) == 4185
    assert 100 * result.per_image[0] == pytest.approx(18.4, abs=0.05)

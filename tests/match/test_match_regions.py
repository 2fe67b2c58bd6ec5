"""Region matching against a direct numpy computation, and its promises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefeat.core.geometry import Frame
from surefeat.match import regions
from surefeat.match.dense import match_dense
from surefeat.match.regions import match_regions, pool_layer
from surefeat.model.features import Features, Pooling


def make(seed: int, *, finer: int = 2) -> Features:
    generator = torch.Generator().manual_seed(seed)
    return Features(
        descriptors=F.normalize(torch.randn(6, 9, 12, generator=generator), dim=0),
        uncertainty=torch.rand(9, 12, generator=generator) + 0.1,
        lower=F.normalize(torch.rand(8, 9 * finer, 12 * finer, generator=generator), dim=0),
        frame=Frame((150, 211), (144, 192)),
        stride=16,
    )


def boxes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=generator) * torch.tensor([210.0, 149.0])
    return corners.sort(dim=1).values.reshape(count, 4).round()


def direct_scores(
    features: tuple[Features, Features], given: tuple[Tensor, Tensor], *, confidence: bool = True,
    normalised: bool = True, lower: bool = True, pooling: Pooling = "max",
) -> np.ndarray:  # fmt: skip
    """Whole region descriptors, concatenated, and one product."""
    rows = []
    for f, b in zip(features, given, strict=True):
        found = [f.pool(b, confidence=confidence, pooling=pooling)]
        if lower:
            found.append(f.pool(b, layer="lower", pooling=pooling))
        blocks = [each.flatten(1).double().numpy() for each in found]
        if normalised:
            blocks = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in blocks]
        row = np.concatenate(blocks, axis=1)
        if normalised:
            row = row / np.linalg.norm(row, axis=1, keepdims=True)
        rows.append(row)
    return np.maximum(rows[0] @ rows[1].T, 0)


def test_regions_that_contradict_each_other_score_nothing() -> None:
    """Opposite descriptors: every inner product is below 0, which is no score."""
    one = make(0)
    maps = F.normalize(one.descriptors.abs(), dim=0)
    there = replace(one, descriptors=maps, lower=F.normalize(one.lower.abs(), dim=0))
    other = replace(there, descriptors=-maps, lower=-there.lower)
    given = boxes(8, 2)
    assert match_regions(there, other, given, given).score.tolist() == [0.0] * 8
    assert float(match_regions(there, there, given, given).score.min()) > 0.5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"confidence": False},
        {"normalised": False},
        {"lower": False},
        {"lower": False, "normalised": False},
        {"pooling": "mean"},
    ],
)
def test_scores_are_those_of_whole_region_descriptors(options: dict[str, Any]) -> None:
    pair, given = (make(0), make(1)), (boxes(40, 2), boxes(50, 3))
    expected = direct_scores(pair, given, **options)
    found = match_regions(*pair, *given, **options)
    assert np.allclose(found.score.numpy(), expected.max(1), rtol=1e-4)
    chosen = expected[np.arange(40), found.index.numpy()]
    assert np.allclose(chosen, expected.max(1), rtol=1e-4)
    assert torch.equal(found.boxes0, given[0])
    assert torch.equal(found.boxes1, given[1][found.index])


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("weights", [(1.0, 3.0), (2.0, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_weights_say_what_descriptors_and_lower_layer_count(
    weights: tuple[float, float], normalised: bool
) -> None:
    """Box by box: the weighted mean of two cosines, or the weighted sum of two inner products."""
    pair, given = (make(0), make(1)), (boxes(12, 2), boxes(15, 3))
    pooled = [
        [f.pool(b, confidence=True).flatten(1).double(), f.pool(b, layer="lower").flatten(1)]
        for f, b in zip(pair, given, strict=True)
    ]
    expected = np.zeros((12, 15))
    for i in range(12):
        for j in range(15):
            for weight, first, second in zip(weights, *pooled, strict=True):
                a, b = first[i].double().numpy(), second[j].double().numpy()
                scale = np.linalg.norm(a) * np.linalg.norm(b) * sum(weights) if normalised else 1.0
                expected[i, j] += weight * float(a @ b) / scale
    found = match_regions(
        *pair, *given, normalised=normalised, descriptor_weight=weights[0], lower_weight=weights[1]
    )
    best = np.maximum(expected, 0).max(1)
    assert np.allclose(found.score.numpy(), best, rtol=1e-4, atol=1e-6)
    assert np.allclose(expected[np.arange(12), found.index.numpy()], best, rtol=1e-4, atol=1e-6)


def test_equal_weights_are_the_paper_s_descriptor_whatever_their_size() -> None:
    pair, given = (make(0), make(1)), (boxes(40, 2), boxes(50, 3))
    plain = match_regions(*pair, *given)
    scaled = match_regions(*pair, *given, descriptor_weight=7.0, lower_weight=7.0)
    assert torch.equal(plain.index, scaled.index)
    torch.testing.assert_close(plain.score, scaled.score)


def test_small_chunks_and_large_tables_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, given = (make(0), make(1)), (boxes(40, 2), boxes(50, 3))
    whole = match_regions(*pair, *given)
    monkeypatch.setattr(regions, "_CHUNK", 350)
    parts = match_regions(*pair, *given)
    assert torch.equal(whole.index, parts.index)
    assert torch.allclose(whole.score, parts.score, atol=1e-5)


def test_an_image_matched_with_itself_finds_every_box_again() -> None:
    features, given = make(0), boxes(60, 2)
    found = match_regions(features, features, given, given)
    assert torch.allclose(found.score, torch.ones(60), atol=1e-5)
    pooled = features.pool(given)
    assert torch.equal(pooled[found.index], pooled)


def test_a_common_factor_of_confidence_cancels_when_normalised() -> None:
    f0, f1, b0, b1 = make(0), make(1), boxes(30, 2), boxes(30, 3)
    unsure = Features(f1.descriptors, f1.uncertainty * 7, f1.lower, f1.frame, f1.stride)
    found, same = match_regions(f0, f1, b0, b1), match_regions(f0, unsure, b0, b1)
    assert torch.allclose(found.score, same.score, atol=1e-5)


def test_bad_boxes_and_pairs_are_refused_in_words() -> None:
    f0, f1 = make(0), make(1)
    with pytest.raises(ValueError, match=r"box 1 .* inverted"):
        match_regions(f0, f1, [[0, 0, 5, 5], [9, 9, 3, 12]], boxes(3, 0))
    with pytest.raises(ValueError, match=r"box 0 .* outside"):
        match_regions(f0, f1, boxes(3, 0), [[300, 0, 310, 5]])
    with pytest.raises(ValueError, match="boxes1 is empty"):
        match_regions(f0, f1, boxes(3, 0), [])
    assert len(match_regions(f0, f1, [], boxes(3, 0))) == 0
    other = Features(f1.descriptors[:4], f1.uncertainty, f1.lower, f1.frame, f1.stride)
    with pytest.raises(ValueError, match=r"6 and 4 channels .* same model"):
        match_regions(f0, other, boxes(3, 0), boxes(3, 1))


def test_dense_matches_by_regions_follow_shifted_boxes() -> None:
    """All regions move by (6, -3): so does every pixel that can, and the score is the region's."""
    from surefeat.match.dense import match_dense_by_regions
    from surefeat.match.regions import RegionMatches

    frame = Frame((48, 64), (48, 64))
    generator = torch.Generator().manual_seed(0)
    features = Features(
        descriptors=F.normalize(torch.randn(4, 6, 8, generator=generator), dim=0),
        uncertainty=torch.full((6, 8), 0.5),
        lower=F.normalize(torch.randn(4, 6, 8, generator=generator), dim=0),
        frame=frame,
        stride=8,
    )
    boxes0 = torch.tensor([[4.0, 8.0, 30.0, 40.0], [20.0, 10.0, 50.0, 44.0]])
    moved = boxes0 + torch.tensor([6.0, -3.0, 6.0, -3.0])
    matches = RegionMatches(boxes0, moved, torch.tensor([0.9, 0.4]), torch.arange(2))
    image = torch.randint(0, 255, (3, 48, 64), generator=generator, dtype=torch.uint8)
    found = match_dense_by_regions(features, features, image, matches)
    ys, xs = torch.meshgrid(torch.arange(48), torch.arange(64), indexing="ij")
    expected = torch.stack([(xs + 6).clamp_max(63), (ys - 3).clamp_min(0)], -1).float()
    torch.testing.assert_close(found.points1, expected, atol=1e-2, rtol=0)
    assert found.score[20, 10].item() == pytest.approx(0.9)
    assert found.score[20, 45].item() == pytest.approx(0.4)
    assert found.score[0, 0].item() == 0
    torch.testing.assert_close(found.confidence, torch.full((48, 64), 2.0))


def test_dense_matches_reach_the_whole_of_an_image_of_another_shape_and_no_further() -> None:
    """A wide image onto a tall one and back: the far corner is matched with the far corner."""

    def picture(size: tuple[int, int]) -> Features:
        rows, columns = size[0] // 8, size[1] // 8
        axes = torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns)
        waves = [wave(k * a) for a in torch.meshgrid(*axes, indexing="ij") for k in (1.0, 2.0)
                 for wave in (torch.sin, torch.cos)]  # fmt: skip
        place = torch.stack(waves)
        unit = F.normalize(place, dim=0)
        return Features(unit, torch.ones(rows, columns), unit, Frame(size, size), 8)

    wide, tall = picture((48, 96)), picture((96, 48))
    for first, second in ((wide, tall), (tall, wide)):
        dense = match_dense(first, second, voting=False)
        height, width = second.frame.original
        assert dense.points1.shape == (*first.frame.original, 2)
        assert dense.points1.amin() >= 0
        assert (dense.points1 <= torch.tensor([width - 1.0, height - 1.0])).all()
        torch.testing.assert_close(
            dense.points1[-1, -1], torch.tensor([width - 1.0, height - 1.0]), atol=3, rtol=0
        )


def test_published_bins_are_those_of_scnet_s_code_cell_by_cell() -> None:
    """1-based corners, round(x / 16) - 1, maxima; outside the map 0: against slow loops."""
    maps = torch.rand(5, 14, 14, generator=torch.Generator().manual_seed(0)) + 0.1
    frame = Frame((224, 224), (224, 224))
    features = Features(maps, torch.ones(14, 14), maps, frame, 16)
    boxes = torch.tensor([[0.0, 0, 223, 223], [3, 2, 6, 5], [40, 50, 130, 99], [7, 0, 200, 8]])
    pooled = pool_layer(features, boxes, "descriptors", confidence=False, as_published=True)
    empty = 0
    for n, box in enumerate(boxes.tolist()):
        low = [math.floor((v + 1) / 16 + 0.5) - 1 for v in box[:2]]
        high = [math.floor((v + 1) / 16 + 0.5) - 1 for v in box[2:]]
        for k in range(49):
            spans = []
            for axis, part in ((0, k % 7), (1, k // 7)):
                count = max(1, high[axis] - low[axis] + 1)
                first = low[axis] + math.floor(part * count / 7)
                last = low[axis] + math.ceil((part + 1) * count / 7)
                spans.append([c for c in range(first, last) if 0 <= c < 14])
            cells = [maps[:, y, x] for y in spans[1] for x in spans[0]]
            empty += not cells
            expected = torch.stack(cells).amax(0) if cells else torch.zeros(5)
            assert torch.equal(pooled.vectors[pooled.index[n, k]], expected)
    assert empty

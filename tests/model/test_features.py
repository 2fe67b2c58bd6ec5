"""Features: reading at points, pooling over boxes, errors in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torchvision.ops import roi_pool

from surefeat.core.files import pack_tensors, read_tensors
from surefeat.core.geometry import Frame
from surefeat.match.points import match_points, matching_text
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS
from surefeat.model.features import Features, compare_with, stack_boxes, stack_points
from tiny import a_cohort, a_reliability


def make(
    *, original: tuple[int, int] = (75, 100), cells: tuple[int, int] = (6, 8), finer: int = 1
) -> Features:
    generator = torch.Generator().manual_seed(0)
    rows, columns = cells
    lower = torch.rand(7, rows * finer, columns * finer, generator=generator)
    return Features(
        descriptors=F.normalize(torch.randn(5, rows, columns, generator=generator), dim=0),
        uncertainty=torch.rand(rows, columns, generator=generator) + 0.1,
        lower=F.normalize(lower, dim=0),
        frame=Frame(original, (rows * 16, columns * 16)),
        stride=16,
    )


def slow_pool(
    maps: Tensor, box: list[float], original: tuple[int, int], size: int, *, pooling: str = "max"
) -> Tensor:
    """The definition in plain loops: edges to the nearest cell edge, floor and ceil per bin."""
    ranges = []
    for first, last, pixels, cells in (
        (box[1], box[3], original[0], maps.shape[1]),
        (box[0], box[2], original[1], maps.shape[2]),
    ):
        start = math.floor(first / pixels * cells + 0.5)
        end = math.floor((last + 1) / pixels * cells + 0.5)
        if end <= start:
            start = math.floor((first + last + 1) / 2 / pixels * cells)
            end = start + 1
        n = end - start
        ranges.append([
            range(start + math.floor(k * n / size), start + math.ceil((k + 1) * n / size))
            for k in range(size)
        ])  # fmt: skip
    out = torch.empty(maps.shape[0], size, size)
    for i, ys in enumerate(ranges[0]):
        for j, xs in enumerate(ranges[1]):
            for c in range(maps.shape[0]):
                cells = [maps[c, y, x].item() for y in ys for x in xs]
                out[c, i, j] = max(cells) if pooling == "max" else sum(cells) / len(cells)
    return out


def random_boxes(count: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=generator) * (torch.tensor(size).flip(0) - 1)
    # Off the halves and quarters where two ways of rounding may differ.
    return (corners.sort(dim=1).values.reshape(count, 4) * 10).round() / 10 + 0.013


@pytest.mark.parametrize("layer", ["descriptors", "lower"])
@pytest.mark.parametrize("finer", [1, 2])
def test_pool_equals_the_definition(layer: str, finer: int) -> None:
    features = make(finer=finer)
    boxes = random_boxes(30, features.frame.original)
    pooled = features.pool(boxes, layer=layer)
    maps = getattr(features, layer)
    expected = [slow_pool(maps, box, features.frame.original, 7) for box in boxes.tolist()]
    assert torch.equal(pooled, torch.stack(expected))


def test_mean_pooling_equals_the_definition() -> None:
    features = make()
    boxes = random_boxes(30, features.frame.original)
    expected = [
        slow_pool(features.lower, box, features.frame.original, 7, pooling="mean")
        for box in boxes.tolist()
    ]
    found = features.pool(boxes, layer="lower", pooling="mean")
    torch.testing.assert_close(found, torch.stack(expected))


def test_an_unknown_pooling_is_an_error_that_names_the_choices() -> None:
    with pytest.raises(ValueError, match="'avg'; choose 'max' or 'mean'"):
        make().pool([[0, 0, 9, 9]], pooling="avg")  # type: ignore[arg-type]


def test_pool_equals_torchvision_given_the_same_cells() -> None:
    features = make(original=(96, 128))
    boxes = torch.tensor([[0, 0, 127, 95], [16, 32, 79, 63], [48, 0, 63, 95], [20, 30, 70, 68.0]])
    cells = torch.tensor([[0, 0, 7, 5], [1, 2, 4, 3], [3, 0, 3, 5], [1, 2, 3, 3.0]])
    expected = roi_pool(features.descriptors[None], [cells], 7, 1.0)
    assert torch.equal(features.pool(boxes), expected)


def test_pool_scales_descriptors_by_confidence_before_the_maximum() -> None:
    features = make()
    boxes = random_boxes(5, features.frame.original)
    scaled = features.descriptors / features.uncertainty
    expected = [slow_pool(scaled, box, features.frame.original, 3) for box in boxes.tolist()]
    found = features.pool(boxes, size=3, confidence=True)
    assert torch.allclose(found, torch.stack(expected))


@given(
    st.lists(st.floats(0, 99, width=32), min_size=4, max_size=4),
    st.sampled_from([1, 2, 7]),
)
def test_no_bin_is_empty_and_all_lie_in_the_map(corners: list[float], size: int) -> None:
    features = make(original=(100, 100))
    x, y = sorted(corners[:2]), sorted(corners[2:])
    pooled = features.pool([[x[0], y[0], x[1], y[1]]], size=size)
    values = features.descriptors.flatten(1)
    assert all(bool((pooled[0, c].flatten()[:, None] == values[c]).any(1).all()) for c in range(5))


def test_edges_on_cell_boundaries_are_exact_in_any_original_size() -> None:
    """Cells of 25 pixels: boxes of whole cells, and one pixel pair around an edge, which is a tie
    that goes to the later cell."""
    features = make(original=(150, 200))
    pooled = features.pool([[25, 50, 49, 74], [99, 50, 100, 74], [100, 50, 100, 74]], size=1)
    values = features.descriptors[:, 2, [1, 4, 4]].T
    assert torch.equal(pooled[:, :, 0, 0], values)


def test_a_box_may_stick_out_and_is_cut() -> None:
    features = make()
    assert torch.equal(features.pool([[-9, -9, 400, 30]]), features.pool([[0, 0, 99, 30]]))


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ([30, 10, 20, 40], "box 1 .30, 10, 20, 40. is empty or inverted"),
        ([30, 10, 29, 40], "empty or inverted"),
        ([math.nan, 10, 29, 40], "empty or inverted"),
        ([100, 10, 120, 40], "box 1 .* lies outside.* 100 x 75"),
        ([10, -20, 20, -1], "lies outside"),
    ],
)
def test_bad_boxes_are_named(box: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make().pool([[0, 0, 5, 5], box])


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"boxes must be \(N, 4\).*\(2, 3\)"):
        stack_boxes([[1, 2, 3], [4, 5, 6]], size=(10, 10))
    with pytest.raises(ValueError, match=r"points must be \(N, 2\).*\(3,\)"):
        stack_points([1, 2, 3])


def test_no_boxes_and_no_points_are_empty_not_errors() -> None:
    assert make().pool([]).shape == (0, 5, 7, 7)
    assert stack_points([]).shape == (0, 2)
    assert stack_points([3, 4]).tolist() == [[3, 4]]


def test_saved_features_come_back(tmp_path: Path) -> None:
    features = make(finer=2)
    features.save(tmp_path / "a.safetensors")
    loaded = Features.load(tmp_path / "a.safetensors")
    assert (loaded.frame, loaded.stride) == (features.frame, features.stride)
    assert torch.allclose(loaded.lower, features.lower, atol=1e-3)
    assert torch.equal(loaded.uncertainty, features.uncertainty)
    assert loaded.reliability is None


def test_another_file_is_refused_in_words(tmp_path: Path) -> None:
    """A safetensors file of somebody else's, with and without words in it, and no such file."""
    for number, meta in enumerate((None, {"format": "pt"})):
        path = tmp_path / f"{number}.safetensors"
        save_file({"descriptors": torch.zeros(2, 3, 4)}, path, meta)
        with pytest.raises(ValueError, match=r"holds no surefeat features; write it with Features"):
            Features.load(path)
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        Features.load(tmp_path / "x.safetensors")


def test_saved_features_still_know_how_far_their_matches_can_be_trusted(tmp_path: Path) -> None:
    matching = matching_text(Voting(), POINT_WEIGHTS)
    known = a_reliability(matching=matching)
    features = compare_with(a_cohort(make()), make())
    replace(features, reliability=known).save(tmp_path / "a.safetensors")
    loaded = Features.load(tmp_path / "a.safetensors")
    assert loaded.reliability == known
    assert match_points(loaded, loaded, [[3, 4]]).probability is not None


def test_what_is_common_is_the_highest_similarity_with_the_cohort() -> None:
    """Against a slow loop; a cell that is in the cohort itself has 1."""
    features, cohort = make(), a_cohort(make(), count=5)
    common = compare_with(cohort, features).common
    assert common is not None
    for row in range(6):
        for column in range(8):
            best = max(float(features.lower[:, row, column] @ one) for one in cohort.lower)
            assert float(common[row, column]) == pytest.approx(best, abs=1e-5)
    assert common[0, :5].tolist() == pytest.approx([1.0] * 5, abs=1e-5)


def test_the_last_lower_layer_is_compared_by_itself_too(tmp_path: Path) -> None:
    """Against a slow loop: its channels alone, at unit length; a file of it holds it all."""
    features, cohort = make(), replace(a_cohort(make(), count=5), last=2)
    known = compare_with(cohort, features)
    assert known.common_kind is not None
    assert known.common is not None
    last = F.normalize(features.lower[-2:], dim=0)
    places = [F.normalize(one[-2:], dim=0) for one in cohort.lower]
    for row in range(6):
        for column in range(8):
            best = max(float(last[:, row, column] @ one) for one in places)
            assert float(known.common_kind[row, column]) == pytest.approx(best, abs=1e-5)
    assert not torch.allclose(known.common, known.common_kind, atol=1e-3)
    centres = torch.tensor([[8.0, 8.0], [40.0, 24.0]])
    lower = F.normalize(known.lower_at(centres)[:, -2:], dim=1)
    torch.testing.assert_close(known.kind_at(centres), lower)
    known.save(tmp_path / "a.safetensors")
    loaded = Features.load(tmp_path / "a.safetensors")
    assert loaded.last == 2
    assert loaded.common_kind is not None
    torch.testing.assert_close(loaded.common_kind, known.common_kind)
    assert known.to("cpu").common_kind is not None
    with pytest.raises(ValueError, match="has no cohort"):
        features.common_kind_at(centres)


def test_features_saved_before_the_last_layer_counted_have_no_probability(tmp_path: Path) -> None:
    known = replace(compare_with(a_cohort(make()), make()), reliability=a_reliability())
    known.save(tmp_path / "a.safetensors")
    stored, meta = read_tensors(tmp_path / "a.safetensors")
    about = json.loads(meta["about"])
    del about["last"]
    meta["about"] = json.dumps(about)
    (tmp_path / "a.safetensors").write_bytes(pack_tensors(stored, meta))
    loaded = Features.load(tmp_path / "a.safetensors")
    assert loaded.reliability is None
    assert loaded.common is None
    assert match_points(loaded, loaded, [[3, 4]]).probability is None


def test_a_finer_lower_layer_is_read_at_the_same_place() -> None:
    """Maps that hold the position itself must say the same x at any fineness."""
    features = make(original=(96, 128), finer=2)
    ramp = torch.arange(16.0)[None].expand(12, 16)
    angle = (ramp + 0.5) / 16
    finer = torch.stack([angle.cos(), angle.sin()])
    coarse = F.avg_pool2d(finer[None], 2)[0]
    features = Features(coarse, features.uncertainty, finer, features.frame, 16)
    points = torch.tensor([[40.0, 20.0], [71.5, 60.0]])
    expected = torch.stack([((points[:, 0] + 0.5) / 128).cos(), ((points[:, 0] + 0.5) / 128).sin()])
    assert torch.allclose(features.lower_at(points).T, expected, atol=1e-3)
    assert torch.allclose(features.at(points).T, expected, atol=1e-3)

"""Point and dense matching by rendering: what is matched must land where the warp says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from surefeat.core.geometry import Frame, apply_affine, cell_centres, invert
from surefeat.learn.config import preset
from surefeat.match.dense import match_dense
from surefeat.match.points import match_points
from surefeat.match.search import even_grid, find, peak_offset, prepare
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from tiny import analytic, photo, warped_pair, warps


@pytest.mark.parametrize("name", ["affine", "spline"])
@pytest.mark.parametrize("voting", [True, False])
def test_matches_and_dense_field_land_where_the_warp_says(name: str, voting: bool) -> None:
    """Median within half a cell of 8 px, and within two cells nine in ten with voting, seven in ten
    by plain nearest neighbour, which these simple features leave alone in flat parts."""
    size = (176, 160)
    features0, features1 = warped_pair(name, size=size)
    points = torch.cartesian_prod(torch.arange(16.0, 144, 7), torch.arange(16.0, 160, 7))
    truth = warps()[name](points)
    inside = ((truth > 8) & (truth < 183)).all(-1)
    found = match_points(features0, features1, points, voting=voting)
    dense = match_dense(features0, features1, voting=voting)
    x, y = points.long().unbind(-1)
    for landed in (found.points1, dense.points1[y, x]):
        error = (landed - truth).norm(dim=-1)[inside]
        assert error.median() < 4.5  # of cells of 16
        assert error.quantile(0.9 if voting else 0.7) < 16
    assert dense.points1.shape == (*size, 2)
    assert dense.score.shape == dense.confidence.shape == size


def smooth_pair(seed: int) -> tuple[Features, Features, Tensor]:
    """Maps of one smooth field of unit vectors seen through two frames, and the affine between."""
    generator = torch.Generator().manual_seed(seed)
    waves = torch.randn(48, 2, generator=generator) * (2 * math.pi / 60)
    phase = torch.rand(48, generator=generator) * 2 * math.pi
    linear = torch.eye(2) + 0.08 * torch.randn(2, 2, generator=generator)
    shift = torch.rand(2, 1, generator=generator) * 20 - 10
    affine = torch.cat([linear, shift], dim=1)
    centres = cell_centres(size=(12, 14), stride=16)

    def features(places: Tensor) -> Features:
        maps = F.normalize((places @ waves.T + phase).cos(), dim=-1).T.reshape(48, 12, 14)
        return Features(maps, torch.ones(12, 14), maps, Frame((192, 224), (192, 224)), 16)

    return features(centres), features(apply_affine(affine, centres)), invert(affine)


def test_refinement_lands_closer_than_the_bare_place() -> None:
    coarse, fine = [], []
    for seed in range(4):
        features0, features1, truth = smooth_pair(seed)
        points = torch.rand(150, 2, generator=torch.Generator().manual_seed(seed))
        points = points * torch.tensor([140.0, 110.0]) + 40
        for refine, errors in ((False, coarse), (True, fine)):
            found = match_points(features0, features1, points, voting=False, refine=refine)
            errors.append((found.points1 - apply_affine(truth, points)).norm(dim=-1))
    assert torch.cat(fine).mean() < 0.75 * torch.cat(coarse).mean()
    assert torch.cat(fine).median() < 16 / 5


def test_a_refined_peak_is_the_weighted_mean_around_it_cut_evenly_at_the_border() -> None:
    surface = torch.rand(3, 6, 7, generator=torch.Generator().manual_seed(0)) * 0.1
    places = [(3, 2), (1, 3), (6, 5)]  # inside; one column from the border; the corner
    index = torch.tensor([y * 7 + x for x, y in places])
    found = peak_offset(surface, index)
    for row, (x, y) in enumerate(places):
        across, down = min(2, x, 6 - x), min(2, y, 5 - y)
        total, mean_x, mean_y = 0.0, 0.0, 0.0
        for dy in range(-down, down + 1):
            for dx in range(-across, across + 1):
                weight = math.exp(surface[row, y + dy, x + dx].item() / 0.05)
                total, mean_x, mean_y = total + weight, mean_x + weight * dx, mean_y + weight * dy
        assert found[row].tolist() == pytest.approx([mean_x / total, mean_y / total], abs=1e-5)


def test_score_is_the_weighted_sum_of_both_layers() -> None:
    features0, features1 = analytic(photo()), analytic(photo("chelsea"))
    points = [[30.0, 40.5], [100, 20]]
    weights = {"descriptor_weight": 3.0, "lower_weight": 1.0}
    found = match_points(features0, features1, points, voting=False, refine=False, **weights)
    given = torch.tensor(points)
    high = (features0.at(given) * features1.at(found.points1)).sum(-1)
    low = (features0.lower_at(given) * features1.lower_at(found.points1)).sum(-1)
    assert torch.allclose(found.score, 0.75 * high + 0.25 * low, atol=1e-5)


def test_margin_is_the_peak_minus_the_best_far_away() -> None:
    features0, features1 = warped_pair("affine")
    side0, side1 = (prepare(f, descriptor_weight=1, lower_weight=1) for f in (features0, features1))
    points = torch.tensor([[30.0, 40.5], [100, 20], [120, 150]])
    peaks = find(side0, side1, points, None, refine=False, margin=True)
    for row, point in enumerate(points):
        scores = (side1.vectors @ side0.at(point[None])[0]).tolist()
        best = max(range(len(scores)), key=scores.__getitem__)
        far = [
            score
            for score, place in zip(scores, side1.points, strict=True)
            if (place - side1.points[best]).norm() > 30 / 224 * 192
        ]
        assert peaks.margin[row].item() == pytest.approx(scores[best] - max(far), abs=1e-5)


@pytest.mark.parametrize("voting", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_flipping_the_pair_flips_mutual_matches(voting: bool, given: bool) -> None:
    features0, features1 = warped_pair("affine")
    options = {"voting": voting, "mutual": True, "refine": False, "count": 60}
    grids = [even_grid(f, size=(2 * f.descriptors.shape[1], 2 * f.descriptors.shape[2]))
             if given else None for f in (features0, features1)]  # fmt: skip
    there = match_points(features0, features1, grids[0], **options)  # type: ignore[arg-type]
    back = match_points(features1, features0, grids[1], **options)  # type: ignore[arg-type]

    def pairs(first: Tensor, second: Tensor) -> set[tuple[float, ...]]:
        return {tuple(row) for row in torch.cat([first, second], dim=1).round(decimals=2).tolist()}

    assert len(there) >= 40
    assert pairs(there.points0, there.points1) == pairs(back.points1, back.points0)
    assert bool(there.mutual.all())


def test_refined_mutual_matches_flip_to_within_a_place() -> None:
    features0, features1 = warped_pair("spline")
    there = match_points(features0, features1, mutual=True, count=60)
    back = match_points(features1, features0, mutual=True, count=60)
    distance = torch.cdist(there.points0, back.points1) + torch.cdist(there.points1, back.points0)
    assert len(there) == len(back)
    # Each side of a pair is refined in one direction only, by at most two places of 4 px each way.
    assert distance.amin(1).max() <= 2 * 8 * math.sqrt(2)


@pytest.mark.parametrize("original", [(333, 517), (101, 340)])
def test_results_are_in_original_pixels_for_any_size(original: tuple[int, int]) -> None:
    """The same maps under another original size: all answers scale, none moves."""
    base, target = analytic(photo()), analytic(photo(), original=(97, 203))
    scaled = analytic(photo(), original=original)
    points = torch.tensor([[20.0, 31.0], [90.0, 150.0], [171.0, 60.0]])
    expected = match_points(base, target, points)
    moved = scaled.frame.to_original(points)
    found = match_points(scaled, target, moved)
    assert torch.allclose(found.points1, expected.points1, atol=1e-2)
    assert torch.allclose(target.frame.to_original(points), found.points1, atol=2.5)
    stretch = torch.tensor([original[1] / 192, original[0] / 192])
    assert bool((found.round_trip <= expected.round_trip * stretch.max() + 0.05).all())
    dense = match_dense(scaled, target)
    assert dense.points1.shape == (*original, 2)
    row, column = original[0] // 2, original[1] // 3
    same = torch.tensor([(column + 0.5) * 203 / original[1], (row + 0.5) * 97 / original[0]]) - 0.5
    assert (dense.points1[row, column] - same).norm() < 5


def test_rotated_files_are_matched_as_they_are_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = DenseFeatures(preset("small").model).eval()
    pixels = (photo("coffee", size=(120, 180)) * 255).byte()
    upright = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    turns = {2: [0], 3: [3], 4: [1], 5: [5], 6: [2], 7: [6], 8: [4]}  # undo what a viewer applies
    files = []
    for orientation in range(1, 9):
        stored = upright
        for turn in turns.get(orientation, []):
            stored = stored.transpose(Image.Transpose(turn))
        exif = Image.Exif()
        exif[0x0112] = orientation
        files.append(tmp_path / f"{orientation}.png")
        stored.save(files[-1], exif=exif)
    plain, *turned = small.extract([upright, *files])
    for features in turned:
        assert features.frame.original == (120, 180)
        assert torch.allclose(features.descriptors, plain.descriptors, atol=1e-5)
    points = torch.tensor([[20.0, 30.0], [150.0, 100.0], [90.0, 60.0]])
    found = match_points(turned[5], plain, points)
    assert (found.points1 - points).norm(dim=-1).max() < 6

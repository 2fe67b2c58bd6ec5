"""The drawn categories: exact annotations, varied instances, and no short cut to a match."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from surefeat.core.geometry import boxes_from_xywh
from surefeat.data.drawn import Instance, correspondences, draw, draw_many, write_folder
from surefeat.data.drawn_categories import CATEGORIES

SIZE = 112


@cache
def instances() -> list[Instance]:
    return draw_many(200, size=SIZE, seed=11)


def pairs() -> list[tuple[Instance, Instance]]:
    """Neighbouring instances of one category."""
    drawn, kinds = instances(), len(CATEGORIES)
    return list(zip(drawn, drawn[kinds:], strict=False))


def pixel_of(points: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of the pixel a point falls into."""
    return points[:, 1].round().long(), points[:, 0].round().long()


def share_right(guesses: list[Tensor], truths: list[Tensor]) -> float:
    """PCK@0.1 of the image side over all points."""
    distance = (torch.cat(guesses) - torch.cat(truths)).norm(dim=1)
    return float((distance < 0.1 * SIZE).float().mean())


def test_every_instance_is_well_formed() -> None:
    for instance in instances():
        points = len(CATEGORIES[instance.category].keypoints)
        assert instance.image.shape == (3, SIZE, SIZE)
        assert instance.image.dtype == torch.uint8
        assert instance.mask.shape == (SIZE, SIZE)
        assert instance.mask.dtype == torch.bool
        assert instance.keypoints.shape == (points, 2)
        assert instance.visible.shape == (points,)
        assert instance.keypoints.dtype == instance.canonical.dtype == torch.float32
        assert 0.08 < instance.mask.float().mean() < 0.7
        assert instance.image.float().std() > 15


def test_canonical_coordinates_are_given_exactly_on_the_object() -> None:
    for instance in instances():
        known = ~instance.canonical.isnan().any(-1)
        assert torch.equal(known, instance.mask)
        assert instance.canonical[instance.mask].abs().max() <= 1


def test_visible_keypoints_lie_on_the_object_at_their_canonical_place() -> None:
    for instance in instances():
        places = torch.tensor([p[1:] for p in CATEGORIES[instance.category].keypoints])
        rows, columns = pixel_of(instance.keypoints[instance.visible])
        assert instance.mask[rows, columns].all()
        found = instance.canonical[rows, columns]
        # At the smallest scale a unit is 0.28 * 112 = 31 pixels, before it is squeezed.
        assert (found - places[instance.visible]).norm(dim=1).max() < 1 / 25


def test_keypoints_agree_with_the_canonical_map_to_a_fraction_of_a_pixel() -> None:
    """Inverting the canonical map around a keypoint, by least squares, gives the keypoint back."""
    errors = []
    for instance in instances():
        places = torch.tensor([p[1:] for p in CATEGORIES[instance.category].keypoints])
        for place, point in zip(
            places[instance.visible], instance.keypoints[instance.visible], strict=True
        ):
            column, row = (int(v) for v in point.round())
            if not (2 <= row < SIZE - 2 and 2 <= column < SIZE - 2):
                continue
            patch = instance.canonical[row - 2 : row + 3, column - 2 : column + 3].reshape(-1, 2)
            if patch.isnan().any():
                continue
            ys, xs = torch.meshgrid(torch.arange(-2, 3.0), torch.arange(-2, 3.0), indexing="ij")
            offsets = torch.stack([xs.flatten(), ys.flatten()], -1)
            design = torch.cat([patch - place, torch.ones(25, 1)], dim=1)
            fit = torch.linalg.lstsq(design, offsets).solution[2]
            errors.append((torch.tensor([column, row]) + fit - point).norm())
    assert len(errors) > 500
    assert torch.stack(errors).max() < 0.1


def test_hidden_keypoints_occur_and_are_not_on_the_mask() -> None:
    hidden = 0
    for instance in instances():
        inside = ((instance.keypoints > -0.5) & (instance.keypoints < SIZE - 0.5)).all(-1)
        rows, columns = pixel_of(instance.keypoints[inside & ~instance.visible])
        assert not instance.mask[rows, columns].any()
        hidden += len(rows)
    total = sum(len(i.visible) for i in instances())
    assert 0 < hidden < 0.1 * total


def test_a_seed_fixes_every_instance_whatever_the_count() -> None:
    few, many = draw_many(3, size=64, seed=5), draw_many(10, size=64, seed=5)
    for one, other in zip(few, many, strict=False):
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.keypoints, other.keypoints)
    assert not torch.equal(few[0].image, draw_many(1, size=64, seed=6)[0].image)


def test_instances_of_a_category_differ_in_pose_and_colour() -> None:
    shifts, colours = [], []
    for instance0, instance1 in pairs():
        points0, points1 = correspondences(instance0, instance1)
        shifts.append((points0 - points1).norm(dim=1))
        read = [
            i.image[:, pixel_of(p)[0], pixel_of(p)[1]].float()
            for i, p in ((instance0, points0), (instance1, points1))
        ]
        colours.append((read[0] - read[1]).norm(dim=0))
    assert torch.cat(shifts).median() > 0.15 * SIZE
    assert torch.cat(colours).median() > 60


def test_staying_in_place_does_not_match_parts() -> None:
    found = [correspondences(*pair) for pair in pairs()]
    assert share_right([p[0] for p in found], [p[1] for p in found]) < 0.35


def test_colour_alone_does_not_match_parts() -> None:
    guesses, truths = [], []
    for instance0, instance1 in pairs():
        points0, points1 = correspondences(instance0, instance1)
        rows, columns = pixel_of(points0)
        colours = instance0.image[:, rows, columns].float().T
        nearest = torch.cdist(colours, instance1.image.flatten(1).float().T).argmin(dim=1)
        guesses.append(torch.stack([nearest % SIZE, nearest // SIZE], dim=-1).float())
        truths.append(points1)
    assert share_right(guesses, truths) < 0.35


def test_keypoint_names_are_unique_and_enough() -> None:
    assert len(CATEGORIES) >= 6
    assert len({c.name for c in CATEGORIES}) == len(CATEGORIES)
    for category in CATEGORIES:
        assert 6 <= len(category.keypoints) <= 12
        assert len(set(category.keypoint_names)) == len(category.keypoints)


@pytest.mark.parametrize("size", [32, 200])
def test_any_size_shows_the_same_kind_of_object(size: int) -> None:
    for category in range(len(CATEGORIES)):
        instance = draw(category, size=size, generator=np.random.default_rng(3))
        assert instance.image.shape == (3, size, size)
        assert 0.08 < instance.mask.float().mean() < 0.7


def test_wrong_arguments_are_refused_with_the_fix() -> None:
    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="pass 0 to 7"):
        draw(8, size=64, generator=generator)
    with pytest.raises(ValueError, match="pass 32 or more"):
        draw(0, size=16, generator=generator)
    with pytest.raises(ValueError, match="pass one category"):
        correspondences(*draw_many(2, size=32, seed=0))


def test_folder_is_readable_coco(tmp_path: Path) -> None:
    write_folder(tmp_path / "new" / "toys", count=20, size=64, seed=2)
    record = json.loads((tmp_path / "new" / "toys" / "keypoints.json").read_text())
    names = {c["id"]: c["keypoints"] for c in record["categories"]}
    files = {i["id"]: i for i in record["images"]}
    assert len(record["annotations"]) == len(files) == 20
    for note, instance in zip(record["annotations"], draw_many(20, size=64, seed=2), strict=True):
        image = files[note["image_id"]]
        with Image.open(tmp_path / "new" / "toys" / image["file_name"]) as file:
            stored = torch.from_numpy(np.array(file)).permute(2, 0, 1)
        assert torch.equal(stored, instance.image)
        assert stored.shape == (3, image["height"], image["width"])
        triples = torch.tensor(note["keypoints"]).reshape(-1, 3)
        assert len(triples) == len(names[note["category_id"]]) == len(instance.keypoints)
        assert torch.equal(triples[:, 2] == 2, instance.visible)
        assert note["num_keypoints"] == int((triples[:, 2] > 0).sum())
        seen = instance.visible
        torch.testing.assert_close(triples[seen, :2], instance.keypoints[seen], atol=0.01, rtol=0)
        x1, y1, x2, y2 = boxes_from_xywh(torch.tensor(note["bbox"])).tolist()
        inside = torch.zeros_like(instance.mask)
        inside[y1 : y2 + 1, x1 : x2 + 1] = True
        assert not (instance.mask & ~inside).any()
        assert instance.mask[y1].any()
        assert instance.mask[y2].any()
        assert instance.mask[:, x1].any()
        assert instance.mask[:, x2].any()

"""Views: what a head learns from shows what its labels say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sets import COLOURS, HEAD, colours, feature_model, write_photos
from surefeat.core.image import Image, crop
from surefeat.data.decode import Place
from surefeat.data.keypoints import KeypointSet
from surefeat.keypoints import views as views_module
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.views import CutObjects, ObjectViews, ViewStore, cut_objects, room_for
from surefeat.model.network import Maps
from tiny import CPU, SIDE


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> KeypointSet:
    return write_photos(tmp_path_factory.mktemp("photos"), count=9, seed=1)


@pytest.fixture(scope="module")
def objects(labelled: KeypointSet) -> CutObjects:
    return cut_objects(labelled, size=SIDE, jitter=1 / 6, device=CPU)


def own_boxes(objects: CutObjects, *, mirror: bool) -> ObjectViews:
    numbers = torch.arange(len(objects))
    turned = torch.full((len(objects),), mirror)
    return ObjectViews(objects, numbers, objects.boxes, turned, features=colours, size=SIDE)


def store(objects: CutObjects, features: Any = colours, **changes: Any) -> ViewStore:
    return ViewStore(objects, features, replace(HEAD, **changes))


def mirror_image(labelled: KeypointSet, folder: Path) -> KeypointSet:
    """Every photo turned over with its labels, by hand: what was left is called right."""
    turned = []
    for one in labelled.objects:
        path = folder / one.name
        Image.fromarray(one.read().flip(2).permute(1, 2, 0).numpy()).save(path)
        last = one.size[1] - 1
        x1, y1, x2, y2 = one.box.tolist()
        order = [1, 0, 2] if one.category == 0 else [0, 1]
        points = torch.stack([last - one.points[:, 0], one.points[:, 1]], dim=1)[order]
        box = torch.tensor([last - x2, y1, last - x1, y2])
        turned.append(
            replace(one, image=Place(str(path)), box=box, points=points, visible=one.visible[order])
        )
    return KeypointSet(labelled.categories, tuple(turned))


def test_a_mirrored_view_is_the_view_of_the_mirrored_photo(
    labelled: KeypointSet, objects: CutObjects, tmp_path: Path
) -> None:
    turned = mirror_image(labelled, tmp_path)
    other = cut_objects(turned, size=SIDE, jitter=1 / 6, device=CPU)
    here, there = own_boxes(objects, mirror=True), own_boxes(other, mirror=False)
    seen = here.visible
    assert torch.equal(seen, there.visible)
    assert seen.sum() > 20
    assert torch.allclose(here.points[seen], there.points[seen], atol=1e-4)
    every = slice(None)
    assert torch.allclose(here.maps(every), there.maps(every), atol=0.02)
    plain = own_boxes(objects, mirror=False).maps(every)
    assert not torch.allclose(here.maps(every), plain, atol=0.1)


@pytest.mark.parametrize("mirror", [False, True])
def test_views_hold_what_their_points_say(objects: CutObjects, mirror: bool) -> None:
    """In a view, a keypoint's cell has the keypoint's colour: pixels and points moved together."""
    views = store(objects, mirror=mirror).every
    assert views.mirror[:4].tolist() == [False, mirror, False, mirror]
    red, green = ((torch.unique(COLOURS, dim=0) == torch.tensor(rgb)).all(1).nonzero().item()
                  for rgb in ([255, 0, 0], [0, 255, 0]))  # fmt: skip
    maps, columns = views.maps(slice(None)), []
    for row in range(len(views.points)):
        for channel, colour in enumerate((red, red, green)):
            x, y = views.points[row, channel].nan_to_num(-9).round().int().tolist()
            if views.visible[row, channel] and 0 <= x < 12 and 0 <= y < 12:
                assert maps[row, colour, y, x] > 0.15
                columns.append((channel, x))
    assert len(columns) > 40
    # A left wheel is left, mirrored or not.
    left, right = ([x for channel, x in columns if channel == part] for part in (0, 1))
    assert sum(left) / len(left) < sum(right) / len(right) - 2


def _nothing(crops: Tensor) -> Tensor:
    return torch.zeros(len(crops), 1, 2, 2)


def test_jitter_moves_each_side_by_up_to_its_share_and_the_seed_decides(
    objects: CutObjects,
) -> None:
    chosen = torch.arange(len(objects))
    shifts = []
    for seed, jitter in ((5, 1 / 6), (5, 1 / 6), (6, 1 / 6), (5, 1 / 12)):
        views, _ = store(objects, _nothing, least_views=600, jitter=jitter).views_of(
            chosen, seed=seed
        )
        boxes = objects.boxes[views.numbers]
        sides = (boxes[:, 2:] - boxes[:, :2] + 1).repeat(1, 2)
        shifts.append((views.boxes - boxes) / sides)
    assert torch.equal(shifts[0], shifts[1])
    assert not torch.equal(shifts[0], shifts[2])
    for shift, most in ((shifts[0], 1 / 6), (shifts[3], 1 / 12)):
        assert shift.abs().max() <= most + 1e-5
        assert (shift.amax(0) > 0.9 * most).all()
        assert (shift.amin(0) < -0.9 * most).all()


def test_views_are_read_where_the_crop_of_the_photo_is(labelled: KeypointSet) -> None:
    """On a photo whose pixels are their own coordinates, a view shows where it was read."""
    ys, xs = torch.meshgrid(torch.arange(70), torch.arange(130), indexing="ij")
    ramp = torch.stack([xs, ys, ys + xs]).to(torch.uint8)
    item = replace(labelled.objects[0], box=torch.tensor([10.0, 5.0, 80.5, 60.0]))

    class Ramp:
        image, name, category = item.image, item.name, item.category
        box, points, visible, size = item.box, item.points, item.visible, (70, 130)

        def read(self) -> Tensor:
            return ramp

    one = KeypointSet(labelled.categories, (Ramp(),))  # type: ignore[arg-type]
    for size in (32, 96):
        cut = cut_objects(one, size=size, jitter=1 / 6, device=CPU)
        for box in ([10.0, 5.0, 80.5, 60.0], [-1.0, 14.0, 70.0, 69.0]):
            boxes = torch.tensor([box])
            view = cut.read(torch.tensor([0]), boxes, size=size)[0]
            apart = (view.int() - crop(ramp, boxes[0], size=size).int()).abs()
            assert apart.max() <= 2  # rounded twice as often
            assert apart.float().mean() < 0.5
        # Without jitter a cut is the crop a detector sees, to the last bit.
        plain = cut_objects(one, size=size, jitter=0.0, device=CPU)
        same = crop(ramp, item.box, size=size)
        assert torch.equal(plain.pixels[0], same)
        assert torch.equal(plain.read(torch.tensor([0]), plain.boxes, size=size)[0], same)


def test_channels_are_those_of_all_categories(objects: CutObjects, labelled: KeypointSet) -> None:
    assert objects.flip.tolist() == [1, 0, 2, 3, 4]
    for item, own in zip(labelled.objects, objects.own.tolist(), strict=True):
        assert own == ([True] * 3 + [False] * 2 if item.category == 0 else [False] * 3 + [True] * 2)
    assert not (objects.visible & ~objects.own).any()


def test_few_objects_get_more_views_and_many_share_theirs(objects: CutObjects) -> None:
    kept = store(objects, views=3, least_views=10)
    chosen = torch.tensor([1, 4])
    few, rows = kept.views_of(chosen, seed=0)
    assert few.numbers[rows].bincount().tolist() == [0, 5, 0, 0, 5]
    other, _ = kept.views_of(chosen, seed=1)
    assert not torch.equal(few.boxes, other.boxes)
    chosen = torch.tensor([0, 3, 5, 7])
    many, rows = kept.views_of(chosen, seed=0)
    assert many is kept.every
    assert many.numbers[rows].tolist() == [n for n in (0, 3, 5, 7) for _ in range(3)]
    assert len(kept.every.numbers) == 3 * len(objects)


def test_batches_show_every_view_once_before_any_twice(objects: CutObjects) -> None:
    kept = store(objects, batch=5)
    seen: list[list[int]] = []
    for seed in (0, 0, 1):
        rows = torch.arange(12)
        batches = kept.every.batches(rows, steps=5, config=kept.config, seed=seed)
        every = kept.every.maps(rows)
        drawn = torch.cat([features for features, _, _ in batches])
        assert len(drawn) == 25
        match = (drawn[:, None] == every[None]).flatten(2).all(-1)
        seen.append(match.int().argmax(1).tolist())
    assert sorted(seen[0][:12]) == sorted(seen[0][12:24]) == list(range(12))
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


def test_keypoints_that_are_not_visible_count_as_absent_or_not_at_all(
    objects: CutObjects,
) -> None:
    config = KeypointConfig(batch=4)
    views = own_boxes(objects, mirror=False)
    rows = (views.visible.sum(1) < objects.own.sum(1)).nonzero()[:1, 0]
    for absent, counted in (("background", objects.own), ("ignored", objects.visible)):
        settings = replace(config, absent=absent)  # type: ignore[arg-type]
        (batch,) = views.batches(rows, steps=1, config=settings, seed=0)
        _, targets, counts = batch
        assert torch.equal(counts, counted[rows].expand(4, 5))
        assert torch.equal(targets.amax((-2, -1)) > 0, objects.visible[rows].expand(4, 5))


@pytest.mark.parametrize(("floor", "spread"), [(0.2, 0.5), (0.9, 0.5), (0.2, 1.5)])
def test_the_targets_are_those_of_the_settings(
    objects: CutObjects, floor: float, spread: float
) -> None:
    settings = KeypointConfig(batch=1, floor=floor, spread=spread)
    views = own_boxes(objects, mirror=False)
    row = torch.tensor([2])
    (batch,) = views.batches(row, steps=1, config=settings, seed=0)
    x, y = views.points[2, views.visible[2]].T[..., None, None]
    across, down = torch.arange(12.0)[None, None], torch.arange(12.0)[None, :, None]
    gauss = (((x - across) ** 2 + (y - down) ** 2) / (-2 * spread**2)).exp()
    expected = torch.where(gauss >= floor, gauss, 0.0)
    torch.testing.assert_close(batch[1][0, views.visible[2]], expected)


def test_features_have_room_in_16_bits_or_none_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    maps = torch.empty(2, 5, 3, 4)
    monkeypatch.setattr(views_module, "_free", lambda place: 7 * 60 * 2)
    room = room_for(7, maps)
    assert room is not None
    assert (room.dtype, tuple(room.shape)) == (torch.float16, (7, 3, 4, 5))
    assert room_for(8, maps) is None
    assert "more than is free on cpu" in caplog.text


def test_features_that_fit_nowhere_are_made_anew_and_are_the_same(
    objects: CutObjects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = torch.tensor([3, 17, 8])
    kept = store(objects).every.maps(rows)
    monkeypatch.setattr(views_module, "_free", lambda place: 0)
    seen = 0

    def counted(crops: Tensor) -> Tensor:
        nonlocal seen
        seen += len(crops)
        return partial(colours, cells=12)(crops)

    views = store(objects, counted).every
    assert views.kept is None
    assert "made anew in every step" in caplog.text
    before = seen
    torch.testing.assert_close(views.maps(rows), kept, atol=1e-3, rtol=0)
    assert seen == before + 3


def test_a_detector_sees_of_a_crop_what_the_model_sees_of_a_photo() -> None:
    """Descriptors and lower layer of the same pixels, each of unit length in every cell."""
    model = feature_model()
    pixels = torch.randint(0, 256, (3, 64, 64), generator=torch.Generator().manual_seed(0))
    crop = pixels.to(torch.uint8)
    (features,) = model.extract(crop, longest_side=64)
    with torch.no_grad():
        maps = views_module.describe(model)(crop[None])[0]
    torch.testing.assert_close(maps[:16], features.descriptors, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(maps[16:], features.lower, atol=1e-5, rtol=1e-4)


def test_a_finer_lower_layer_is_averaged_to_the_cells_of_the_descriptors() -> None:
    generator = torch.Generator().manual_seed(0)
    descriptors = F.normalize(torch.randn(2, 3, 4, 5, generator=generator), dim=1)
    lower = torch.randn(2, 6, 8, 10, generator=generator)
    both = views_module.side_by_side(Maps(descriptors, torch.ones(2, 4, 5), 8), [lower])
    assert both.shape == (2, 9, 4, 5)
    assert torch.equal(both[:, :3], descriptors)
    torch.testing.assert_close(both[:, 3:], F.normalize(F.avg_pool2d(lower, 2), dim=1))


def test_a_cut_is_finer_than_the_views_read_from_it(objects: CutObjects) -> None:
    """By a quarter, over all that jitter can show: reading it twice costs no sharpness."""
    reach, boxes = (
        (rows[:, 2:] - rows[:, :2] + 1).amax(1) for rows in (objects.reach, objects.boxes)
    )
    shown = reach / boxes  # boxes that the cut is wide
    assert (objects.pixels.shape[-1] / (shown * SIDE) >= 1.24).all()


def test_a_view_up_to_the_edge_of_what_was_cut_out_is_not_darker_there() -> None:
    """Half a pixel beyond the outermost centres there is no other pixel: the border's counts."""
    box, none = torch.tensor([[10.0, 20.0, 17.0, 27.0]]), torch.zeros(1, 0)
    grey = torch.full((1, 3, 8, 8), 200, dtype=torch.uint8)
    cut = CutObjects(grey, box, box, none[..., None], none > 0, none > 0, none[0].long())
    assert cut.read(torch.tensor([0]), box, size=32).unique().tolist() == [200]

"""Crops, splits and views of the few-shot benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefeat.core.image import Image, crop
from surefeat.data.decode import Place
from surefeat.data.keypoints import KeypointSet
from surefeat.measure import fewshot_data
from surefeat.measure.fewshot_data import (
    Material,
    held_out,
    load_sets,
    prepare_material,
    some_objects,
)
from surefeat.measure.fewshot_views import Plan, Views, cut, extract, plain_plan, random_plan
from surefeat.measure.rows import at_size, build_row
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from tiny import COLOURS, KINDS, SIDE, colours, write_benchmark, write_photos

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> KeypointSet:
    return write_photos(tmp_path_factory.mktemp("photos"), count=9, seed=1)


@pytest.fixture(scope="module")
def material(found: KeypointSet) -> Material:
    return prepare_material(found, found, split="val", device=CPU, workers=2)


def mirror_image(found: KeypointSet, folder: Path) -> KeypointSet:
    """Every photo turned over with its labels, by hand: what was left is called right."""
    turned = []
    for one in found.objects:
        pixels = one.read().flip(2)
        path = folder / one.name
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
        last = one.size[1] - 1
        x1, y1, x2, y2 = one.box.tolist()
        order = [1, 0, 2] if one.category == 0 else [0, 1]
        points = torch.stack([last - one.points[:, 0], one.points[:, 1]], dim=1)[order]
        box = torch.tensor([last - x2, y1, last - x1, y2])
        turned.append(
            replace(one, image=Place(str(path)), box=box, points=points, visible=one.visible[order])
        )
    return KeypointSet(found.categories, tuple(turned))


def views_of(material: Material, plan: Plan) -> Views:
    return extract(
        plan, material.train, photos=material.photos, channels=material.channels, features=colours,
        side=SIDE,
    )  # fmt: skip


def test_a_mirrored_view_is_the_view_of_the_mirrored_photo(
    found: KeypointSet, material: Material, tmp_path: Path
) -> None:
    turned = mirror_image(found, tmp_path)
    other = prepare_material(turned, turned, split="val", device=CPU)
    plain = plain_plan(material.train)
    here = views_of(material, replace(plain, mirror=torch.ones_like(plain.mirror)))
    there = views_of(other, plain_plan(other.train))
    assert torch.equal(here.visible, there.visible)
    assert torch.equal(here.own, there.own)
    seen = here.visible
    assert seen.sum() > 20
    assert torch.allclose(here.points[seen], there.points[seen], atol=1e-4)
    assert torch.allclose(here.features, there.features, atol=0.02)
    assert not torch.allclose(here.features, views_of(material, plain).features, atol=0.1)


def test_views_hold_what_their_points_say(material: Material) -> None:
    """In a view, a keypoint's cell has the keypoint's colour: pixels and points moved together."""
    chosen = torch.arange(len(material.train))
    plan = random_plan(
        material.train, chosen, count=4, jitter=1 / 6, generator=torch.Generator().manual_seed(3)
    )
    views = views_of(material, plan)
    assert torch.equal(plan.mirror[:4], torch.tensor([False, True, False, True]))
    red, green = ((torch.unique(COLOURS, dim=0) == torch.tensor(rgb)).all(1).nonzero().item()
                  for rgb in ([255, 0, 0], [0, 255, 0]))  # fmt: skip
    checked = 0
    for row in range(len(views.points)):
        for channel, colour in enumerate((red, red, green)):
            x, y = views.points[row, channel].nan_to_num(-9).round().int().tolist()
            if views.visible[row, channel] and 0 <= x < 12 and 0 <= y < 12:
                assert views.features[row, y, x, colour] > 0.15
                checked += 1
    assert checked > 40


def test_jitter_moves_each_side_by_up_to_its_share_and_the_seed_decides(material: Material) -> None:
    chosen = torch.arange(len(material.train)).repeat(50)
    plans = [
        random_plan(
            material.train,
            chosen,
            count=2,
            jitter=1 / 6,
            generator=torch.Generator().manual_seed(s),
        )
        for s in (5, 5, 6)
    ]
    assert torch.equal(plans[0].boxes, plans[1].boxes)
    assert not torch.equal(plans[0].boxes, plans[2].boxes)
    boxes = material.train.boxes[plans[0].objects]
    sides = (boxes[:, 2:] - boxes[:, :2] + 1).repeat(1, 2)
    shift = (plans[0].boxes - boxes) / sides
    assert shift.abs().max() <= 1 / 6 + 1e-5
    assert (shift.amax(0) > 0.15).all()
    assert (shift.amin(0) < -0.15).all()


def test_cut_reads_where_the_crop_of_the_detector_reads() -> None:
    """On a photo whose pixels are their own coordinates, a crop shows where it was read."""
    ys, xs = torch.meshgrid(torch.arange(70), torch.arange(130), indexing="ij")
    ramp = torch.stack([xs, ys, ys + xs]).to(torch.uint8)
    photos = fewshot_data.Photos(ramp.repeat(2, 1, 1, 1), torch.tensor([[70, 130], [50, 90]]))
    boxes = torch.tensor([[10.0, 5, 80.5, 60], [-12.0, 20, 70, 58.25]])
    for side in (32, 96):
        crops = cut(photos, torch.tensor([0, 1]), boxes, side=side)
        alone = crop(ramp, boxes[0], size=side)
        assert (crops[0].int() - alone.int()).abs().max() <= 1
        steps = torch.arange(side)
        for row, (height, width) in enumerate(photos.sizes.tolist()):
            x1, y1, x2, y2 = boxes[row].tolist()
            x = x1 - 0.5 + (steps + 0.5) * (x2 - x1 + 1) / side
            y = y1 - 0.5 + (steps + 0.5) * (y2 - y1 + 1) / side
            # The last pixels of the photo itself, not of the buffer, are repeated beyond it.
            assert (crops[row, 0] - x.clamp(0, width - 1)).abs().max() <= 1
            assert (crops[row, 1] - y.clamp(0, height - 1)[:, None]).abs().max() <= 1


def test_large_photos_are_made_smaller_and_labels_move_along(
    found: KeypointSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare_material(found, found, split="val", device=CPU)
    monkeypatch.setattr(fewshot_data, "LONGEST_SIDE", 65)
    small = prepare_material(found, found, split="val", device=CPU)
    assert small.photos.pixels.shape[-2:] == (35, 65)
    # Outer edges move: half a pixel before the first centre, and half a pixel behind the last.
    assert torch.allclose(small.train.boxes[:, :2], whole.train.boxes[:, :2] / 2)
    assert torch.allclose(small.train.boxes[:, 2:] + 1, (whole.train.boxes[:, 2:] + 1) / 2)
    seen = whole.train.visible
    expected = (whole.train.points[seen] + 0.5) / 2 - 0.5
    assert torch.allclose(small.train.points[seen], expected)


def test_channels_are_those_of_all_classes(material: Material) -> None:
    assert material.channels.flip.tolist() == [1, 0, 2, 3, 4]
    assert material.channels.own.tolist() == [[True] * 3 + [False] * 2, [False] * 3 + [True] * 2]
    assert not (material.train.visible & ~material.channels.own[material.train.category]).any()
    assert len({bytes(p.numpy()) for p in material.photos.pixels}) == 9


def test_the_development_split_is_a_quarter_of_the_training_images(tmp_path: Path) -> None:
    write_benchmark(tmp_path)
    learn, check = load_sets(tmp_path, split="dev")
    names = [{one.name for one in part.objects} for part in (learn, check)]
    assert not names[0] & names[1]
    train, val = load_sets(tmp_path, split="val")
    assert names[0] | names[1] == {one.name for one in train.objects}
    assert not names[1] & {one.name for one in val.objects}
    share = sum(held_out(f"2008_{n:06d}.jpg") for n in range(4000)) / 4000
    assert 0.22 < share < 0.28
    assert held_out("a/2008_000002.jpg") == held_out("2008_000002.webp")
    with pytest.raises(ValueError, match="unknown split 'test'; choose val, or dev"):
        load_sets(tmp_path, split="test")  # type: ignore[arg-type]


def test_some_objects_are_those_of_a_class_that_show_something(found: KeypointSet) -> None:
    nothing = torch.zeros(2, dtype=torch.bool)
    first = next(one for one in found.objects if one.category == 1)
    blind = [replace(one, visible=nothing) if one is first else one for one in found.objects]
    kites = some_objects(KeypointSet(KINDS, tuple(blind)), classes=["kite"])
    assert [kind.name for kind in kites.categories] == ["kite"]
    assert {one.category for one in kites.objects} == {0}
    assert len(kites.objects) == sum(one.category == 1 for one in found.objects) - 1
    assert len(some_objects(found, most=2).objects) == 4
    with pytest.raises(ValueError, match="there is no class boat; choose from cart, kite"):
        some_objects(found, classes=["boat"])
    gone = [replace(one, visible=torch.zeros_like(one.visible)) for one in found.objects]
    with pytest.raises(ValueError, match="no object of 'cart' shows a keypoint"):
        some_objects(KeypointSet(KINDS, tuple(gone)))


def test_maps_come_to_the_common_size() -> None:
    maps = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert at_size(maps, 2).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert at_size(maps, 4) is maps
    up = at_size(torch.tensor([[[[0.0, 4.0]] * 2]]), 4)
    assert up[0, 0, 0].tolist() == [0, 1, 3, 4]


def test_rows_are_unit_length_per_layer_with_the_weights_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    DenseFeatures(ModelConfig(trunk="small", channels=8)).save_pretrained(tmp_path)
    crops = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    row = build_row("mine=" + str(tmp_path), device=CPU, layer_weights=(1.0, 2.0))
    maps = row.maps(crops, cells=4)
    assert row.name == "mine"
    assert maps.shape == (2, 8 + 96, 4, 4)
    assert torch.allclose(maps[:, :8].norm(dim=1), torch.ones(2, 4, 4), atol=1e-5)
    assert torch.allclose(maps[:, 8:].norm(dim=1), torch.full((2, 4, 4), 2.0), atol=1e-5)
    alone = build_row("ours", model=tmp_path, device=CPU, layer_weights=(1.0, 0.0))
    assert torch.equal(alone.maps(crops, cells=4), maps[:, :8])
    assert alone.weights_sha256 == row.weights_sha256
    for wrong in ((0.0, 0.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="none may be negative, nor all 0"):
            build_row("ours", model=tmp_path, device=CPU, layer_weights=wrong)
    with pytest.raises(ValueError, match="unknown row 'resnet'; choose ours, resnet50-hc"):
        build_row("resnet", device=CPU)


def test_untrained_rows_are_their_layers_side_by_side() -> None:
    crops = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    torch.manual_seed(0)
    maps = build_row("resnet50-hc", device=CPU, init=("none",)).maps(crops, cells=4)
    assert maps.shape == (1, 512 + 1024 + 2048, 4, 4)
    assert torch.allclose(maps[:, :512].norm(dim=1), torch.ones(1, 4, 4), atol=1e-5)
    torch.manual_seed(0)
    raw = build_row("resnet50-hc", device=CPU, init=("none",), raw=True)
    unit = torch.nn.functional.normalize(raw.maps(crops, cells=4)[:, 512:1536], dim=1)
    assert torch.allclose(unit, maps[:, 512:1536], atol=1e-5)

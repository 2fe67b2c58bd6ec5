"""Splits of the few-shot benchmark, and its rows as maps of one size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sets import KINDS, write_benchmark, write_photos
from surefeat.data.keypoints import KeypointSet
from surefeat.measure.fewshot import cut_sets, held_out, load_sets, some_objects
from surefeat.measure.rows import at_size, build_row
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from tiny import CPU


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> KeypointSet:
    return write_photos(tmp_path_factory.mktemp("photos"), count=9, seed=1)


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


def test_the_fingerprint_is_that_of_every_label(found: KeypointSet) -> None:
    def fingerprint(train: KeypointSet, test: KeypointSet) -> str:
        cut = cut_sets(train, test, split="val", size=8, jitter=0.1, device=CPU)
        return cut.fingerprint

    half = KeypointSet(KINDS, found.objects[:6])
    first, *others = half.objects
    plain = fingerprint(half, half)
    assert plain == fingerprint(half, KeypointSet(KINDS, half.objects))
    moved = replace(first, points=first.points + 0.25)
    wider = replace(first, box=first.box + torch.tensor([0.0, 0.0, 1.0, 0.0]))
    named = replace(first, name="other.png")
    for other in (moved, wider, named):
        changed = KeypointSet(KINDS, (other, *others))
        assert plain != fingerprint(changed, half)
        assert plain != fingerprint(half, changed)
    with pytest.raises(ValueError, match="have other classes or keypoints"):
        fingerprint(half, KeypointSet(KINDS[:1], half.objects))


def test_maps_come_to_the_common_size() -> None:
    maps = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert at_size(maps, 2).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert at_size(maps, 4) is maps
    up = at_size(torch.tensor([[[[0.0, 4.0]] * 2]]), 4)
    assert up[0, 0, 0].tolist() == [0, 1, 3, 4]


def test_rows_are_unit_length_per_layer_with_the_weights_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8)).save_pretrained(tmp_path)
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
    with pytest.raises(ValueError, match="unknown row 'resnet'; choose ours, match, match-slower"):
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

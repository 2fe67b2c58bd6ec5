"""The rows: maps of the right size and length, the same every time, moved by what moves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from surefeat.core.files import file_hash
from surefeat.data.drawn import draw_many
from surefeat.measure.rows import (
    UNTRAINED,
    ImageNetLayers,
    as_features,
    build_row,
    imagenet_row,
    join_layers,
    model_row,
    run_taps,
)
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from surefeat.model.trunks import ResNet50, Vgg16, build_trunk

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.stack([one.image for one in draw_many(2, size=96, seed=3)])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Random weights of both trunks, as files."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    for name, trunk in (("resnet", ResNet50()), ("vgg", Vgg16())):
        save_file(trunk.state_dict(), folder / f"{name}.safetensors")
    return folder / "resnet.safetensors", folder / "vgg.safetensors"


def assert_unit(maps: Tensor) -> None:
    torch.testing.assert_close(maps.norm(dim=0), torch.ones(maps.shape[1:]))


@pytest.mark.parametrize(
    ("name", "channels", "cells", "stride"),
    [
        ("resnet50-hc", 512 + 1024 + 2048, 12, 8),
        ("resnet50-dilated", 2048, 6, 16),
        ("res4c", 1024, 6, 16),
        ("res4d", 1024, 6, 16),
        ("vgg16", 512, 6, 16),
        ("sift", 128, 12, 8),
        ("hog", 81, 12, 8),
    ],
)
def test_a_row_gives_unit_maps_of_its_size(
    name: str, channels: int, cells: int, stride: int, images: Tensor, weights: tuple[Path, Path]
) -> None:
    row = build_row(name, init=weights, device=CPU)
    found = row.extract(images)
    assert row.name == name
    assert len(found) == 2
    for each in found:
        assert each.descriptors.shape == (channels, cells, cells)
        assert (each.stride, each.frame.original) == (stride, (96, 96))
        assert_unit(each.descriptors)
        assert torch.equal(each.uncertainty, torch.ones(cells, cells))
    assert (row.weights_sha256 is None) == (name in ("sift", "hog"))


@pytest.mark.parametrize("name", ["sift", "hog", "vgg16"])
def test_a_row_gives_an_image_the_same_maps_in_any_batch(
    name: str, images: Tensor, weights: tuple[Path, Path]
) -> None:
    row = build_row(name, init=weights, device=CPU)
    alone, together = row.extract(images[1:])[0], row.extract(images)[1]
    torch.testing.assert_close(alone.descriptors, together.descriptors, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["sift", "hog"])
def test_handmade_maps_move_with_the_picture(name: str) -> None:
    """Two cells to the right and one down; what is near the border sees other pixels."""
    large = F.interpolate(
        torch.rand(1, 3, 20, 20, generator=torch.Generator().manual_seed(0)), size=(136, 136),
        mode="bicubic",
    ).clamp(0, 1)  # fmt: skip
    large = (255 * large).byte()
    row = build_row(name, device=CPU)
    before = row.extract(large[:, :, :112, :112])[0].descriptors
    after = row.extract(large[:, :, 8:120, 16:128])[0].descriptors
    inner = slice(4, 8)
    moved = before[:, 5:9, 6:10]
    torch.testing.assert_close(after[:, inner, inner], moved, atol=0.02, rtol=0)
    still = before[:, inner, inner]
    assert float((after[:, inner, inner] * still).sum(0).mean()) < 0.9


def test_the_hypercolumn_holds_each_layer_at_one_length() -> None:
    fine, coarse = torch.rand(1, 3, 4, 4) + 0.1, 50 * torch.rand(1, 5, 2, 2) + 0.1
    joined = join_layers([fine, coarse])
    assert joined.shape == (1, 8, 4, 4)
    torch.testing.assert_close(joined[:, :3], F.normalize(fine, dim=1))
    # A corner of the finer map lies beyond the coarser one's outermost centre: its own value.
    torch.testing.assert_close(joined[0, 3:, 0, 0], F.normalize(coarse, dim=1)[0, :, 0, 0])


def test_the_hypercolumn_is_of_the_plain_network(
    images: Tensor, weights: tuple[Path, Path]
) -> None:
    row = imagenet_row("hc", UNTRAINED["resnet50-hc"], init=weights, device=CPU)
    trunk = build_row("res4c", init=weights, device=CPU)
    lower = trunk.extract(images)[0].descriptors
    middle = row.extract(images)[0].descriptors[512 : 512 + 1024]
    # res4c is the same in both networks; at the finer size its four copies average to it, roughly.
    shrunk = F.normalize(F.avg_pool2d(middle, 2), dim=0)
    assert float((shrunk * lower).sum(0).mean()) > 0.97


def test_raw_maps_keep_the_lengths_the_network_gave() -> None:
    """Known lengths: 5 at the left place, 13 at the right."""
    maps = torch.tensor([[3.0, 5.0], [4.0, 12.0]]).reshape(1, 2, 1, 2)
    raw, unit = (as_features(maps, side=2, unit=keep)[0] for keep in (False, True))
    assert torch.equal(raw.descriptors, maps[0])
    assert raw.descriptors.norm(dim=0).flatten().tolist() == [5.0, 13.0]
    torch.testing.assert_close(unit.descriptors, maps[0] / torch.tensor([5.0, 13.0]))
    # A lower layer of its own is always of unit length.
    both = as_features(maps, side=2, lower=10 * maps, unit=False)[0]
    assert_unit(both.lower)


def test_raw_rows_are_the_unit_rows_before_scaling(
    images: Tensor, weights: tuple[Path, Path]
) -> None:
    which = ImageNetLayers("resnet50", ("res4c",))
    raw, unit = (
        imagenet_row("x", which, init=weights, device=CPU, unit=keep) for keep in (False, True)
    )
    assert (raw.unit, unit.unit) == (False, True)
    given, expected = raw.extract(images)[0].descriptors, unit.extract(images)[0].descriptors
    torch.testing.assert_close(F.normalize(given, dim=0), expected)
    lengths = given.norm(dim=0)
    assert float(lengths.max() / lengths.min()) > 1.05


def test_a_raw_hypercolumn_is_its_layers_side_by_side() -> None:
    fine, coarse = 3 * torch.rand(1, 3, 4, 4), 50 * torch.rand(1, 5, 4, 4)
    assert torch.equal(join_layers([fine, coarse], unit=False), torch.cat([fine, coarse], dim=1))


def test_weights_are_found_by_what_they_hold(weights: tuple[Path, Path], images: Tensor) -> None:
    first = build_row("vgg16", init=weights, device=CPU)
    second = build_row("vgg16", init=weights[::-1], device=CPU)
    assert first.weights_sha256 == second.weights_sha256
    with pytest.raises(ValueError, match="no weights of vgg16; add its file to --init"):
        build_row("vgg16", init=weights[:1], device=CPU)


def test_a_layer_of_any_timm_network_is_a_row(images: Tensor, tmp_path: Path) -> None:
    trunk = build_trunk("timm:resnet18")
    file = tmp_path / "own.safetensors"
    save_file({name: value.contiguous() for name, value in trunk.state_dict().items()}, file)
    row = build_row("timm:resnet18/stage2", device=CPU, init=[file])
    maps = run_taps(trunk.eval(), images, ("stage2",))["stage2"]
    for features, layer in zip(row.extract(images), maps, strict=True):
        torch.testing.assert_close(features.descriptors, F.normalize(layer, dim=0))
    assert row.weights_sha256 == file_hash(file)
    with pytest.raises(ValueError, match=r"has no layer 'stage9'; add one of /stage0, stage1"):
        build_row("timm:resnet18/stage9", device=CPU, init=["none"])


def test_an_unknown_row_names_the_known_ones() -> None:
    said = r"unknown row 'dino'; choose ours, match, .*hog, timm:NETWORK/TAP, or"
    with pytest.raises(ValueError, match=said):
        build_row("dino", init=(), device=CPU)


def test_a_model_row_is_the_model_with_its_lower_layer(tmp_path: Path, images: Tensor) -> None:
    torch.manual_seed(0)
    model = DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8))
    model.save_pretrained(tmp_path / "model")
    row = build_row(f"mine={tmp_path}", init=(), device=CPU)
    assert (row.name, row.confidence, row.lower) == ("mine", True, True)
    found, expected = row.extract(images)[0], model.eval().extract(images[0], longest_side=96)[0]
    for name in ("descriptors", "uncertainty", "lower"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("int8", [False, True])
def test_a_model_that_has_no_confidence_is_measured_without(tmp_path: Path, int8: bool) -> None:
    model = DenseFeatures(ModelConfig(trunk="small", head="linear", channels=8))
    model.without_confidence()
    model.save_pretrained(tmp_path, int8=int8)
    assert not model_row("plain", tmp_path, device=CPU).confidence

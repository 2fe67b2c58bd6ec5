"""The detector as a network: its layers, what it refuses, and what is saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from surefeat.boxes.config import BoxesConfig, DetectorConfig, check_boxes_config
from surefeat.boxes.network import Detector, drop
from surefeat.match.config import ProposalConfig
from surefeat.model.trunks import Vgg16
from tiny import generator

SMALL = DetectorConfig(trunk="small", hidden=16, pooled=3)


def test_dropout_keeps_the_mean_and_repeats_with_its_generator() -> None:
    values = torch.ones(200, 200)
    first, second = drop(values, 0.5, generator(5)), drop(values, 0.5, generator(5))
    assert torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert first.mean().item() == pytest.approx(1, abs=0.02)
    assert drop(values, 0.5, None) is values


def test_a_detector_needs_two_categories() -> None:
    with pytest.raises(ValueError, match="two categories or more"):
        Detector(SMALL, ("chair",))


def test_an_unknown_layer_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="small has no layer 'res9z'; choose one of conv1, "):
        Detector(DetectorConfig(trunk="small", tap="res9z"), ("a", "b"))


def test_the_name_of_conv5_for_pretraining_names_that_of_the_detector() -> None:
    with pytest.raises(ValueError, match=r"vgg16-conv5 .* pass vgg16, which is conv5 here"):
        Detector(DetectorConfig(trunk="vgg16-conv5", pooled=1, hidden=8), ("a", "b"))


def test_a_saved_detector_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    detector = Detector(SMALL, ("cat", "dog")).eval()
    detector.scale.fill_(0.37)
    detector.save(tmp_path / "run" / "model")
    again = Detector.load(tmp_path / "run", device="cpu")
    assert again.categories == ("cat", "dog")
    assert again.scale.item() == pytest.approx(0.37)
    images, cells = torch.rand(1, 3, 48, 48), torch.tensor([[[0.0, 0, 5, 5], [1, 1, 3, 4]]])
    valid = torch.ones(1, 2, dtype=torch.bool)
    both = [d(d.maps(images), cells, valid).scores for d in (detector, again)]
    torch.testing.assert_close(both[0], both[1], atol=1e-3, rtol=1e-2)
    weights = tmp_path / "run" / "model" / "detector.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="damaged"):
        Detector.load(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="surefeat boxes fit"):
        Detector.load(tmp_path / "nowhere")


def test_vgg16_brings_its_own_hidden_layers_where_they_fit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = dict(Vgg16(conv5=True).state_dict())
    shapes = {"0.weight": (8, 512), "0.bias": (8,), "3.weight": (8, 8), "3.bias": (8,)}
    given = {f"classifier.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(state | given, tmp_path / "full.safetensors")
    save_file(state, tmp_path / "bare.safetensors")
    config = DetectorConfig(trunk="vgg16", pooled=1, hidden=8)
    full = Detector.create(config, ("a", "b"), init=tmp_path / "full.safetensors")
    bare = Detector.create(config, ("a", "b"), init=tmp_path / "bare.safetensors")
    assert full.hidden_given
    assert not bare.hidden_given
    assert torch.equal(full.fc6.weight, given["classifier.0.weight"])
    assert torch.equal(full.fc7.bias, given["classifier.3.bias"])
    assert torch.equal(bare.trunk.features[28].weight, state["features.28.weight"])


def test_conv5_continues_vgg16(data_root: Path) -> None:
    """Against torchvision's own network, with its last pooling left out."""
    from torchvision.models import vgg16

    from surefeat.model.weights import read_weights

    file = data_root / "weights" / "vgg16_imagenet_features.safetensors"
    detector = Detector.create(DetectorConfig(pooled=1, hidden=8), ("a", "b"), init=file).eval()
    other = vgg16().features[:30].eval()
    other.load_state_dict(
        {k.removeprefix("features."): v.float() for k, v in read_weights(file).items()}
    )
    images = torch.rand(1, 3, 64, 48, generator=generator())
    with torch.no_grad():
        normal = (images - detector.mean) / detector.std
        torch.testing.assert_close(detector.maps(images), other(normal))


def test_a_number_that_cannot_work_is_said_before_anything_begins() -> None:
    with pytest.raises(ValueError, match=r"--proposals\.count is 0"):
        check_boxes_config(BoxesConfig(proposals=ProposalConfig(count=0)))

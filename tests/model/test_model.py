"""DenseFeatures: extraction, saving, loading, and the model that ships."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.core.files import file_hash
from surefeat.model.files import SETTINGS, SHIPPED, WEIGHTS, ModelConfig, model_folder
from surefeat.model.network import DenseFeatures
from surefeat.model.weights import quantise, widen

SMALL = ModelConfig(trunk="small", channels=8, longest_side=64)


@pytest.fixture
def small() -> DenseFeatures:
    torch.manual_seed(0)
    return DenseFeatures(SMALL).eval()


def _photo(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)


def test_extract_is_the_same_in_a_batch(small: DenseFeatures) -> None:
    """Mixed sizes in one call: each image gets what it gets alone."""
    photos = [_photo((50, 90), 0), _photo((90, 50), 1), _photo((50, 90), 2), _photo((200, 31), 3)]
    together = small.extract(photos)
    for photo, found in zip(photos, together, strict=True):
        (alone,) = small.extract(photo)
        assert found.frame == alone.frame
        torch.testing.assert_close(found.descriptors, alone.descriptors, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.uncertainty, alone.uncertainty, atol=1e-5, rtol=1e-4)


def test_extract_takes_paths_pil_arrays_tensors_and_folders(
    small: DenseFeatures, tmp_path: Path
) -> None:
    photo = _photo((40, 60))
    Image.fromarray(photo).save(tmp_path / "a.png")
    Image.fromarray(photo).save(tmp_path / "b.png")
    tensor = torch.from_numpy(photo).permute(2, 0, 1)
    ways = [tmp_path / "a.png", str(tmp_path / "a.png"), Image.fromarray(photo), photo, tensor]
    found = small.extract(ways)
    assert all(torch.equal(f.descriptors, found[0].descriptors) for f in found)
    assert [Path(f.name).name for f in small.extract(tmp_path)] == ["a.png", "b.png"]


def test_extract_keeps_the_order_of_the_images(small: DenseFeatures) -> None:
    sizes = [(30 + 10 * (i % 3), 64) for i in range(9)]
    found = small.extract([_photo(size, i) for i, size in enumerate(sizes)], batch=2)
    assert [f.frame.original for f in found] == sizes


def test_too_small_a_side_is_refused(small: DenseFeatures) -> None:
    with pytest.raises(ValueError, match="use at least 16"):
        small.extract(_photo((40, 40)), longest_side=8)


def test_save_and_load_give_the_same_model(small: DenseFeatures, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    again = DenseFeatures.from_pretrained(tmp_path, device="cpu")
    image = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(again(image).descriptors, small(image).descriptors)
    assert again.config == small.config


def test_int8_weights_stay_within_half_a_step_of_each_filter() -> None:
    weight = torch.randn(5, 7, 3, 3) * torch.logspace(-3, 1, 5)[:, None, None, None]
    state = {"a.weight": weight, "a.bias": torch.randn(5), "n": torch.tensor(3)}
    back = widen(quantise(state))
    assert set(back) == set(state)
    step = weight.flatten(1).abs().amax(1) / 127
    worst = (back["a.weight"] - weight).flatten(1).abs().amax(1)
    assert (worst <= step / 2 * 1.001).all()
    assert torch.equal(back["a.bias"], state["a.bias"])


def test_int8_model_is_close_and_a_quarter_of_the_size(
    small: DenseFeatures, tmp_path: Path
) -> None:
    small.save_pretrained(tmp_path / "full")
    small.save_pretrained(tmp_path / "int8", int8=True)
    sizes = [(tmp_path / kind / WEIGHTS).stat().st_size for kind in ("full", "int8")]
    assert sizes[1] < 0.35 * sizes[0]
    image = torch.rand(1, 3, 64, 64)
    with torch.inference_mode():
        close = DenseFeatures.from_pretrained(tmp_path / "int8", device="cpu")(image)
        cosine = (close.descriptors * small(image).descriptors).sum(1)
    assert cosine.min() > 0.98


def test_damaged_weights_are_refused(small: DenseFeatures, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    data = bytearray((tmp_path / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        DenseFeatures.from_pretrained(tmp_path)


def test_a_folder_of_another_architecture_is_refused(small: DenseFeatures, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    settings["config"]["channels"] = 9
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="of different models"):
        DenseFeatures.from_pretrained(tmp_path)


def test_a_missing_model_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.json and model\.safetensors"):
        DenseFeatures.from_pretrained(tmp_path)


def test_an_unknown_lower_layer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="choose auto or one of conv1"):
        DenseFeatures(ModelConfig(trunk="small", lower="res4c"))


@pytest.mark.parametrize(("name", "channels"), [(None, 1024), ("resnet50", 1024), ("vgg16", 512)])
def test_shipped_models_are_whole_and_load_without_network(name: str | None, channels: int) -> None:
    folder = model_folder(name)
    settings = json.loads((folder / SETTINGS).read_text())
    assert file_hash(folder / WEIGHTS) == settings["sha256"]
    model = DenseFeatures.from_pretrained(name, device="cpu")
    (found,) = model.extract(_photo((96, 128)), longest_side=128)
    assert found.descriptors.shape == (128, 6, 8)
    assert found.lower.shape == (channels, 6, 8)
    assert found.reliability is not None
    torch.testing.assert_close(found.descriptors.norm(dim=0), torch.ones(6, 8))


def test_shipped_models_fit_into_forty_megabytes() -> None:
    sizes = [(model_folder(name) / WEIGHTS).stat().st_size for name in SHIPPED]
    assert sum(sizes) < 40e6


def test_a_folder_of_a_shipped_models_name_counts_if_it_holds_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vgg16").mkdir()
    assert model_folder("vgg16") == model_folder(None).parent / "vgg16"
    DenseFeatures(ModelConfig(trunk="small", channels=4)).save_pretrained("vgg16")
    assert model_folder("vgg16") == Path("vgg16")

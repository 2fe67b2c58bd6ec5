"""DenseFeatures: extraction, saving, loading, and the model that ships."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.core.files import file_hash, pack_tensors
from surefeat.match.points import match_points, matching_text
from surefeat.match.votes import Voting
from surefeat.model.config import (
    POINT_WEIGHTS,
    SETTINGS,
    SHIPPED,
    WEIGHTS,
    ModelConfig,
    model_folder,
)
from surefeat.model.network import DenseFeatures
from surefeat.model.probability import Cohort, Logistic, Reliability
from surefeat.model.weights import quantise, widen
from tiny import a_cohort, a_reliability

SMALL = ModelConfig(trunk="small", head="linear", channels=8, longest_side=64)


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


def test_a_pass_holds_at_most_a_batch(
    small: DenseFeatures, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    true = small.forward_with_lower

    def watched(images: torch.Tensor) -> Any:
        passes.append(len(images))
        return true(images)

    monkeypatch.setattr(small, "forward_with_lower", watched)
    sizes = [(50, 90), (50, 90), (90, 50), (50, 90), (50, 90), (50, 90)]
    assert len(small.extract([_photo(size) for size in sizes], batch=2)) == 6
    assert sorted(passes) == [1, 1, 2, 2]


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


def test_the_hash_is_of_the_weights_as_they_are(small: DenseFeatures, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    model = DenseFeatures.from_pretrained(tmp_path, device="cpu")
    stored = file_hash(tmp_path / "model.safetensors")
    assert model.weights_hash() == stored
    model.set_trained("head")
    assert model.weights_hash() == stored  # nothing was learned
    with torch.no_grad():
        model.head.bias += 1
    assert model.weights_hash() != stored
    model.save_pretrained(tmp_path / "new")
    assert model.weights_hash() == file_hash(tmp_path / "new" / "model.safetensors")


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


def test_a_missing_model_says_what_was_looked_for_and_what_is_there(
    small: DenseFeatures, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.json and model\.safetensors"):
        DenseFeatures.from_pretrained(tmp_path)
    small.save_pretrained(tmp_path / "birds" / "model")
    with pytest.raises(FileNotFoundError, match=r"no model at .*brids .* there are \S*birds; "):
        DenseFeatures.from_pretrained(tmp_path / "brids")


def test_only_a_name_that_says_so_is_fetched_from_the_hub(
    small: DenseFeatures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small.save_pretrained(tmp_path / "fetched")
    asked: list[str] = []
    client = ModuleType("huggingface_hub")

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        if name != "somebody/birds":
            raise RuntimeError
        return str(tmp_path / "fetched")

    client.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    for typo in ("runs/x", "somebody/birds"):
        with pytest.raises(FileNotFoundError, match=f"no model at {typo} .* hub:OWNER/NAME"):
            DenseFeatures.from_pretrained(typo)
    assert not asked
    assert DenseFeatures.from_pretrained("hub:somebody/birds").config == small.config
    with pytest.raises(FileNotFoundError, match=r"could not fetch somebody/brids .*check the name"):
        DenseFeatures.from_pretrained("hub:somebody/brids")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        DenseFeatures.from_pretrained("hub:somebody/birds")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(
    number: float, small: DenseFeatures, tmp_path: Path
) -> None:
    with torch.no_grad():
        small.head.weight[3, 2] = number
        small.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"head\.weight holds NaN or infinite numbers"):
        DenseFeatures.from_pretrained(tmp_path)
    trunk = small.trunk.state_dict()
    first = next(iter(trunk))
    trunk[first] = trunk[first].clone()
    trunk[first].view(-1)[0] = number
    torch.save(trunk, tmp_path / "trunk.pth")
    with pytest.raises(ValueError, match=f"{first} holds NaN"):
        DenseFeatures.create(SMALL, init=tmp_path / "trunk.pth")


def judging(small: DenseFeatures, sides: tuple[int, ...]) -> DenseFeatures:
    """A copy that says how far its matches can be trusted at these sides."""
    model = deepcopy(small)
    model.reliability = a_reliability(sides=sides)
    model.cohort = replace(a_cohort(model.extract(_photo((60, 60), 9))[0]), last=4)
    return model


def test_what_a_model_knows_of_its_matches_stays_with_its_own_weights(
    small: DenseFeatures, tmp_path: Path
) -> None:
    small = judging(small, (64,))
    small.save_pretrained(tmp_path)
    again = DenseFeatures.from_pretrained(tmp_path, device="cpu")
    assert again.reliability is not None
    assert again.reliability.weights_sha256 == again.weights_sha256 == file_hash(tmp_path / WEIGHTS)
    photo = _photo((60, 80))
    common = [model.extract(photo)[0].common for model in (small, again)]
    torch.testing.assert_close(*common, atol=2e-3, rtol=0)
    kinds = [model.extract(photo)[0].common_kind for model in (small, again)]
    torch.testing.assert_close(*kinds, atol=2e-3, rtol=0)
    assert again.cohort is not None
    assert again.cohort.last == 4
    a_reliability(weights_sha256="0" * 64).save(tmp_path)
    stranger = DenseFeatures.from_pretrained(tmp_path, device="cpu")
    assert stranger.reliability is None
    assert stranger.extract(photo)[0].common is None
    again.reliability = again.cohort = None
    again.save_pretrained(tmp_path)
    assert Reliability.load(tmp_path) is None
    assert Cohort.load(tmp_path) is None


def test_a_cohort_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It had its places' descriptors too, and a run whose head learned on had none."""
    lower = torch.eye(3, 5)
    packed = pack_tensors({"lower": lower.half(), "descriptors": torch.ones(3, 2)}, {"last": "2"})
    (tmp_path / "cohort.safetensors").write_bytes(packed)
    known = Cohort.load(tmp_path)
    assert known is not None
    assert torch.equal(known.lower, lower)
    assert known.last == 2
    (tmp_path / "cohort.safetensors").write_bytes(pack_tensors({"places": lower}))
    with pytest.raises(ValueError, match=r"cohort.safetensors is not what Cohort.save writes"):
        Cohort.load(tmp_path)


@pytest.mark.parametrize(
    ("sides", "given", "said"),
    [((64,), 64, True), ((64,), 96, False), ((64,), 48, False), ((48, 96), 64, True),
     ((48, 96), 104, False), ((), 64, False)],
)  # fmt: skip
def test_matches_have_a_probability_only_at_sizes_it_was_fitted_for(
    sides: tuple[int, ...], given: int, said: bool, small: DenseFeatures
) -> None:
    small = judging(small, sides)
    pair = small.extract([_photo((60, 80), 0), _photo((80, 70), 1)], longest_side=given)
    assert (match_points(*pair, count=9).probability is not None) is said
    (other,) = small.extract(_photo((80, 70), 1), longest_side=200)
    assert match_points(pair[0], other, count=9).probability is None
    assert match_points(other, pair[0], count=9).probability is None


def test_other_settings_than_the_fitted_ones_give_no_probability(small: DenseFeatures) -> None:
    small = judging(small, (64,))
    pair = small.extract([_photo((60, 80), 0), _photo((80, 70), 1)])
    assert match_points(*pair, count=9).probability is not None
    for changed in (
        {"voting": False}, {"voting": Voting(weight=0.2)}, {"voting": Voting(turned=0.0)},
        {"descriptor_weight": 1.0}, {"lower_weight": 0.5},
    ):  # fmt: skip
        assert match_points(*pair, count=9, **changed).probability is None, changed


def test_log_odds_follow_the_printed_formula() -> None:
    """Each sign by itself, by name, so that none can stand for another."""
    weights, mean, scale = (1.5, -0.7, 0.4), (0.5, 0.1, -3.0), (0.2, 0.5, 0.7)
    fitted = Logistic(("a", "b", "c"), weights, -0.2, mean, scale, "pairs", 9)
    signs = {"c": torch.tensor([0.3, -2.0]), "a": torch.tensor([0.1, 0.8]), "b": torch.ones(2)}
    for row, odds in enumerate(fitted.log_odds(signs).tolist()):
        given = [float(signs[name][row]) for name in "abc"]
        total = sum(w * (s - m) / d for w, s, m, d in zip(weights, given, mean, scale, strict=True))
        assert odds == pytest.approx(total - 0.2, rel=1e-5)


def test_sigma_never_falls_below_its_floor(small: DenseFeatures) -> None:
    with torch.no_grad():
        small.head.bias[-1] = -100.0
        sigma = small(torch.rand(1, 3, 64, 64)).uncertainty
    torch.testing.assert_close(sigma, torch.full_like(sigma, SMALL.sigma_floor))
    floor = replace(SMALL, sigma_floor=0.2)
    torch.manual_seed(0)
    higher = DenseFeatures(floor).eval()
    with torch.no_grad():
        assert higher(torch.rand(1, 3, 64, 64)).uncertainty.min() > 0.2


def test_an_unknown_lower_layer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"choose auto, or of conv1, .* one or several"):
        DenseFeatures(ModelConfig(trunk="small", lower="res4c"))


@pytest.mark.parametrize(("name", "channels"), [(None, 3072), ("resnet50", 3072), ("vgg16", 512)])
def test_shipped_models_are_whole_and_load_without_network(name: str | None, channels: int) -> None:
    folder = model_folder(name)
    settings = json.loads((folder / SETTINGS).read_text())
    assert file_hash(folder / WEIGHTS) == settings["sha256"]
    model = DenseFeatures.from_pretrained(name, device="cpu")
    (found,) = model.extract(_photo((96, 128)), longest_side=128)
    assert found.descriptors.shape == (128, 6, 8)
    assert found.lower.shape == (channels, 6, 8)
    assert found.reliability is None  # it is fitted at 320 pixels
    if name in (None, "resnet50"):  # the others have no probability of their own
        assert model.reliability is not None
        assert model.reliability.sides == (320,)
        assert model.reliability.matching == matching_text(Voting(), POINT_WEIGHTS)
        assert model.reliability.keypoints is not None
        assert model.cohort is not None
    torch.testing.assert_close(found.descriptors.norm(dim=0), torch.ones(6, 8))


def test_shipped_models_fit_into_64_megabytes() -> None:
    sizes = [(model_folder(name) / WEIGHTS).stat().st_size for name in SHIPPED]
    assert sum(sizes) < 64e6


def test_a_folder_of_a_shipped_models_name_counts_if_it_holds_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vgg16").mkdir()
    assert model_folder("vgg16") == model_folder(None).parent / "vgg16"
    DenseFeatures(ModelConfig(trunk="small", channels=4)).save_pretrained("vgg16")
    assert model_folder("vgg16") == Path("vgg16")

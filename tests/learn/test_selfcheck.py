"""The label-free check gives what it must for models whose answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sets import write_model
from surefeat.core.files import write_json
from surefeat.learn.config import ColourConfig, WarpConfig
from surefeat.learn.selfcheck import (
    SelfCheck,
    _match,
    _summary,
    beside_shipped,
    check_folder,
    self_check,
)
from surefeat.model.network import DenseFeatures, Maps
from tiny import SIDE, canvas, images

STRIDE = 4
NO_COLOUR = ColourConfig(strength=0.0)
NO_WARP = WarpConfig(size=SIDE, rotation=0, linear=0, translation=0, zoom=(1.0, 1.0))
WARP = WarpConfig(size=SIDE)


class Fake(nn.Module):
    """Answers with maps made from its input."""

    has_confidence = True
    device = torch.device("cpu")

    def __init__(self, *, seed: int | None = None) -> None:
        super().__init__()
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def forward(self, images: Tensor) -> Maps:
        if self.generator is not None:
            shape = (len(images), 16, SIDE // STRIDE, SIDE // STRIDE)
            maps = torch.randn(shape, generator=self.generator)
        else:
            maps = self.describe(nn.functional.avg_pool2d(images, STRIDE))
        maps = nn.functional.normalize(maps, dim=1)
        return Maps(maps, torch.ones_like(maps[:, 0]), STRIDE)

    def forward_with_lower(self, images: Tensor) -> tuple[Maps, Tensor]:
        """The lower layers know the place in the source, whatever the maps say, twice as fine."""
        pooled = nn.functional.avg_pool2d(images, STRIDE // 2)
        return self(images), nn.functional.normalize(Fake.describe(self, pooled), dim=1)

    def describe(self, pooled: Tensor) -> Tensor:
        """The first two colours are the place in the source: points on a sphere, far apart."""
        angles = pooled[:, :2] * 1.5
        x, y = angles.unbind(1)
        return torch.stack([x.sin(), x.cos() * y.sin(), x.cos() * y.cos()], dim=1)


class Here(Fake):
    """Knows only the place in the view."""

    def describe(self, pooled: Tensor) -> Tensor:
        steps = torch.linspace(0, 1, pooled.shape[-1])
        y, x = torch.meshgrid(steps, steps, indexing="ij")
        return super().describe(torch.stack([x, y]).expand(len(pooled), -1, -1, -1))


def places(count: int) -> tuple[Tensor, Tensor]:
    """Images whose colour is the place: red rises along x, green along y."""
    ramp = torch.linspace(0, 255, SIDE)
    y, x = torch.meshgrid(ramp, ramp, indexing="ij")
    image = torch.stack([x, y, torch.zeros_like(x)]).round().to(torch.uint8)
    return image.expand(count, -1, -1, -1), torch.full((count, 2), SIDE, dtype=torch.int32)


def check(model: nn.Module, warp: WarpConfig, **more: int) -> SelfCheck:
    pixels, sizes = places(6)
    return self_check(
        model,  # type: ignore[arg-type]
        pixels,
        sizes,
        warp=warp,
        colour=NO_COLOUR,
        **more,
    )


def test_a_model_that_knows_the_source_place_is_right_everywhere() -> None:
    """Zoomed in, so that no mirror image shows a place twice."""
    inside = WarpConfig(size=SIDE, rotation=10, linear=0.1, translation=0.2, zoom=(0.5, 0.7))
    found = check(Fake(), inside)
    assert found.accuracy[0.1] > 0.995
    assert found.accuracy[0.05] > 0.95
    assert found.points == 6 * 200


def test_a_model_that_knows_the_view_place_is_right_without_a_warp_only() -> None:
    still, moved = check(Here(), NO_WARP), check(Here(), WARP)
    assert still.accuracy[0.05] == 1
    assert moved.accuracy[0.05] < 0.2
    assert still.actual_loss == pytest.approx(0, abs=1e-5)


def test_what_the_lower_layers_alone_get_stands_beside_it() -> None:
    """They know the source; the maps know the view, or nothing."""
    inside = WarpConfig(size=SIDE, rotation=10, linear=0.1, translation=0.2, zoom=(0.5, 0.7))
    for model in (Here(), Fake(seed=0)):
        found = check(model, inside)
        assert found.accuracy[0.05] < 0.3
        assert found.lower_layers[0.05] > 0.95
        assert found.to_dict()["lower_layers@0.05"] == found.lower_layers[0.05]


def test_random_descriptors_are_right_by_chance_only() -> None:
    found = check(Fake(seed=0), WARP)
    # A disc of 5 % of the side covers at most pi 0.05^2 = 0.8 % of the view.
    assert found.accuracy[0.05] < 0.03
    assert 0.3 < found.auroc < 0.7
    assert list(found.accuracy) == sorted(found.accuracy)
    values = list(found.accuracy.values())
    assert values == sorted(values)


def test_sigma_of_one_predicts_its_own_mean_loss() -> None:
    """m(1) = 1 - 1/(e - 1)."""
    found = check(Fake(seed=0), WARP)
    expected = 1 - 1 / (math.e - 1)
    assert found.predicted_loss == pytest.approx(expected, abs=1e-5)
    assert found.calibration_error >= abs(found.predicted_loss - found.actual_loss) - 1e-6


def test_the_check_repeats_itself_and_another_seed_differs() -> None:
    first, again = check(Fake(), WARP), check(Fake(), WARP)
    assert first == again
    assert check(Fake(), WARP, seed=2) != first


def test_when_all_are_right_there_is_no_ranking_and_json_stays_valid(tmp_path: Path) -> None:
    found = check(Here(), NO_WARP)
    assert math.isnan(found.auroc)
    assert math.isnan(found.auroc_score)
    write_json(tmp_path / "check.json", found.to_dict())
    text = (tmp_path / "check.json").read_text()
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert stored["auroc"] is None
    assert stored["accuracy@0.05"] == 1


def test_views_that_never_meet_are_an_error() -> None:
    far = WarpConfig(size=SIDE, zoom=(0.01, 0.01), translation=100.0)
    with pytest.raises(ValueError, match="no two views overlapped; soften the warps"):
        check(Fake(), far)


def test_a_real_model_is_checked_on_drawn_images() -> None:
    from surefeat.model.network import DenseFeatures
    from tiny import tiny

    torch.manual_seed(0)
    model = DenseFeatures.create(tiny().model, init="none")
    held = canvas(5)
    found = self_check(
        model, held.pixels, held.sizes, warp=tiny().warp, colour=ColourConfig(), points=50, batch=2
    )
    assert found.points == 250
    assert 0 <= found.accuracy[0.025] <= found.accuracy[0.05] <= found.accuracy[0.1] <= 1
    assert found.predicted_loss == pytest.approx(0.418, abs=0.02)  # sigma starts near 1
    model.without_confidence()
    plain = self_check(
        model, held.pixels, held.sizes, warp=tiny().warp, colour=ColourConfig(), points=50, batch=2
    )
    assert all(map(math.isnan, (plain.auroc, plain.predicted_loss, plain.calibration_error)))
    assert plain == replace(
        found, auroc=plain.auroc, predicted_loss=plain.predicted_loss,
        calibration_error=plain.calibration_error,
    )  # fmt: skip


def test_a_match_is_right_within_a_twentieth_of_the_side_when_signs_are_ranked() -> None:
    """Errors of 2, 5, 6 and 11 of 100 pixels; the two right ones are the surest, the worst next."""
    error = torch.tensor([2.0, 5.0, 6.0, 11.0])
    confidence, score = torch.tensor([4.0, 3.0, 1.0, 2.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    predicted, actual = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.3, 0.2, 0.1, 0.4])
    stayed, below = torch.tensor([1.0, 30.0, 4.0, 9.0]), torch.tensor([3.0, 4.0, 4.0, 60.0])
    rows = torch.stack([error, confidence, score, predicted, actual, stayed, below], dim=1)
    found = _summary(rows, side=100, sure=True)
    assert found.accuracy == {0.025: 0.25, 0.05: 0.5, 0.1: 0.75}
    assert (found.auroc, found.auroc_score) == (1.0, 0.0)
    assert found.predicted_loss == pytest.approx(0.25)
    assert found.actual_loss == pytest.approx(0.25)
    assert found.calibration_error == pytest.approx(0.1)
    assert found.same_place == {0.025: 0.25, 0.05: 0.5, 0.1: 0.75}
    assert found.lower_layers == {0.025: 0.0, 0.05: 0.75, 0.1: 0.75}


def test_what_is_said_of_a_match_is_of_its_two_places() -> None:
    """Two cells that look like each other's opposite number, each with its own sigma."""
    axes = torch.eye(3)
    first = Maps(axes[:2].T.reshape(1, 3, 1, 2), torch.tensor([[[0.2, 0.4]]]), STRIDE)
    second = Maps(axes[[1, 0]].T.reshape(1, 3, 1, 2), torch.tensor([[[0.5, 1.0]]]), STRIDE)
    middles = torch.tensor([[[1.5, 1.5], [5.5, 1.5]]])
    moved = middles + torch.tensor([0.0, 3.0])
    error, confidence, score, predicted, actual, _ = _match(first, second, middles, middles)[0].T
    assert _match(first, second, middles, moved)[0, :, 5].tolist() == [3.0, 3.0]
    # The best place lies on the other side, up to a quarter of a cell beyond the middle.
    assert error.tolist() == pytest.approx([5.0, 5.0], abs=0.2)
    assert score.tolist() == pytest.approx([1.0, 1.0])
    assert confidence.tolist() == pytest.approx([2 / (0.2 + 1.0), 2 / (0.4 + 0.5)])
    # What was to be found looks like nothing of it; the mean sigmas of true places are .35 and .7.
    assert actual.tolist() == pytest.approx([1.0, 1.0])
    sigmas = torch.tensor([0.35, 0.7]).double()
    expected = sigmas - 1 / torch.expm1(1 / sigmas)
    assert predicted.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_every_batch_has_views_of_its_own() -> None:
    """The same photo twice, one at a time, is seen in two ways."""
    once, twice = (
        self_check(Here(), *places(count), warp=WARP, colour=NO_COLOUR, batch=1)  # type: ignore[arg-type]
        for count in (1, 2)
    )
    assert twice.points == 2 * once.points
    assert twice.actual_loss != pytest.approx(once.actual_loss, abs=1e-6)


def test_a_folder_is_checked_on_as_many_photos_as_asked_for(tmp_path: Path) -> None:
    model, photos = write_model(tmp_path / "model"), images(tmp_path / "photos", count=7)
    found = [check_folder(photos, model=model, count=n, device="cpu") for n in (3, 3, 50)]
    assert [one.points for one in found] == [600, 600, 1400]
    assert found[0] == found[1]
    assert check_folder(photos, model=model, count=3, seed=2, device="cpu") != found[0]


def test_the_model_that_ships_stands_beside_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = images(tmp_path / "photos", count=4)
    shipped, other = (write_model(tmp_path / name) for name in ("shipped", "other"))
    model = DenseFeatures.from_pretrained(other)
    torch.nn.init.normal_(model.head.last.weight)
    model.save_pretrained(other)
    load = DenseFeatures.from_pretrained
    monkeypatch.setattr(
        DenseFeatures, "from_pretrained", lambda name=None, **more: load(name or shipped, **more)
    )
    alone, beside = (check_folder(photos, model=m, device="cpu") for m in (shipped, other))
    assert alone.shipped == {}
    assert beside.shipped == alone.accuracy
    assert beside.to_dict()["shipped@0.1"] == alone.accuracy[0.1]
    # Before a training that starts from it, the model that ships is no other model either.
    start = DenseFeatures.from_pretrained(shipped)
    start.set_trained("head")
    assert beside_shipped(start.eval(), lambda _: alone).shipped == {}
    assert beside.lower_layers == alone.lower_layers  # which another head leaves as they are

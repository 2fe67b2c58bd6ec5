"""A detector from a few labels: what it finds, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import surefeat
from surefeat.core.geometry import into_box, out_of_box
from surefeat.data.drawn import write_folder
from surefeat.data.keypoints import KeypointSet, read_coco
from surefeat.keypoints import views as keypoint_views
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.views import described_views
from surefeat.model.network import DenseFeatures
from tiny import COLOURS, QUICK, colours, feature_model, write_labelled, write_photos


@pytest.fixture(scope="module")
def small() -> DenseFeatures:
    return feature_model()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("photos"))


def are_right(points: list[Tensor], truth: KeypointSet) -> Tensor:
    """For every visible keypoint: nearer than 0.05 of the box's longer side."""
    return torch.cat([
        (mine - item.points).norm(dim=-1)[item.visible] < 0.05 * (item.box[2:] - item.box[:2]).max()
        for mine, item in zip(points, truth.objects, strict=True)
    ])  # fmt: skip


def mean_place(known: KeypointSet, asked: KeypointSet) -> list[Tensor]:
    """Where each part is in its box on average: what a detector finds that looks at nothing."""
    cells = torch.stack([into_box(o.points, o.box, size=(1, 1)) for o in known.objects])
    average = cells.nanmean(0)
    return [out_of_box(average, item.box, size=(1, 1)) for item in asked.objects]


def birds(folder: Path, *, seed: int, count: int) -> KeypointSet:
    """Drawn birds without boxes, so that each may be anywhere in what is looked at."""
    write_folder(folder, count=8 * count, size=160, seed=seed)
    record = json.loads((folder / "keypoints.json").read_text())
    for label in record["annotations"]:
        del label["bbox"]
    (folder / "keypoints.json").write_text(json.dumps(record))
    return read_coco(folder / "keypoints.json").only(["bird"])


def test_parts_of_drawn_birds_are_found_on_other_birds_before_other_backgrounds(
    tmp_path: Path,
) -> None:
    known, new = birds(tmp_path / "a", seed=0, count=10), birds(tmp_path / "b", seed=1, count=12)
    model = DenseFeatures.from_pretrained(device="cpu")
    config = KeypointConfig(size=160, views=3, steps=60)
    found = KeypointDetector.fit(model, known, config=config).label(new).objects
    blind = are_right(mean_place(known, new), new)
    right = are_right([item.points for item in found], new)
    # Measured: 0.03 against 0.89 of 108 keypoints.
    assert blind.float().mean() < 0.15
    assert right.float().mean() > 0.75
    # The confidence is worth something: those that are right have more of it.
    scores = torch.cat([i.scores[t.visible] for i, t in zip(found, new.objects, strict=True)])  # type: ignore[index]
    assert scores[right].mean() > scores[~right].mean() + 0.02
    assert scores.min() >= 0
    assert scores.max() <= 1


def test_the_same_seed_gives_the_same_detector_and_another_another(
    small: DenseFeatures, photos: Path
) -> None:
    states = [
        KeypointDetector.fit(small, photos, config=replace(QUICK, seed=seed)).head.state_dict()
        for seed in (0, 0, 1)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["conv2.weight"], states[2]["conv2.weight"])


def test_a_detector_loads_without_its_data_and_finds_the_same(
    small: DenseFeatures, photos: Path, tmp_path: Path
) -> None:
    detector = surefeat.KeypointDetector.fit(small, photos, config=QUICK)
    detector.save(tmp_path / "parts")
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "detector.json", "head.safetensors", "parts",
    ]  # fmt: skip
    again = KeypointDetector.load(tmp_path / "parts", small)
    assert (again.categories, again.config) == (detector.categories, QUICK)
    image = read_coco(photos).objects[0].read()
    first, second = (d.predict(image, category="bird")[0] for d in (detector, again))
    assert torch.equal(first.points, second.points)
    assert torch.equal(first.scores, second.scores)  # type: ignore[arg-type]
    with pytest.raises(FileExistsError, match="parts exists already; remove it or pass another"):
        detector.save(tmp_path / "parts")


def test_another_feature_model_or_a_damaged_folder_is_refused(
    small: DenseFeatures, photos: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "parts"
    KeypointDetector.fit(small, photos, config=QUICK).save(folder)
    other = feature_model(seed=6)
    with pytest.raises(
        ValueError, match=r"fitted on another feature model .*small conv4.*pass the"
    ):
        KeypointDetector.load(folder, other)
    (folder / "head.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match=r"head.safetensors is damaged"):
        KeypointDetector.load(folder, small)
    (folder / "detector.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"detector.json is not what a detector writes"):
        KeypointDetector.load(folder, small)
    with pytest.raises(FileNotFoundError, match=r"no detector at .*looked for detector.json"):
        KeypointDetector.load(tmp_path, small)


def test_predictions_are_in_original_pixels_whatever_the_images_size(
    small: DenseFeatures, photos: Path, tmp_path: Path
) -> None:
    detector = KeypointDetector.fit(small, photos, config=QUICK)
    pixels = read_coco(photos).objects[1].read()
    wide = pixels.repeat_interleave(2, dim=2)  # each pixel twice, so x becomes 2 x + 1/2
    boxes = [[[0, 0, 95, 95]], [[0, 0, 191, 95], [10, 5, 90, 80]]]
    found = detector.predict([pixels, wide], boxes=boxes, category="bird")
    assert [item.size for item in found] == [(96, 96), (96, 192), (96, 192)]
    assert found[2].box.tolist() == [10, 5, 90, 80]
    stretched = found[0].points * torch.tensor([2.0, 1.0]) + torch.tensor([0.5, 0.0])
    torch.testing.assert_close(found[1].points, stretched, atol=1.0, rtol=0)
    for item in found:
        x1, y1, x2, y2 = item.box.tolist()
        assert (item.points >= torch.tensor([x1, y1]) - 0.5).all()
        assert (item.points <= torch.tensor([x2, y2]) + 0.5).all()
    # Without boxes the image is the object; alone it is found as in a batch.
    (whole,) = detector.predict(pixels, category="bird", threshold=0.999)
    torch.testing.assert_close(whole.points, found[0].points, atol=1e-3, rtol=0)
    assert not whole.visible.any()
    with pytest.raises(ValueError, match="1 sets of boxes for 2 images"):
        detector.predict([pixels, wide], boxes=[[]], category="bird")
    with pytest.raises(ValueError, match="say which category; the detector knows car, bird"):
        detector.predict(pixels)
    with pytest.raises(ValueError, match="no category 'dog'; the detector knows"):
        detector.predict(pixels, category="dog")


def described(small: DenseFeatures, labelled: KeypointSet, **changes: Any) -> Any:
    config = replace(QUICK, **changes)
    return described_views(small, labelled, config, generator=torch.Generator().manual_seed(0))


def test_keypoints_without_a_place_are_background_or_ignored(
    small: DenseFeatures, photos: Path
) -> None:
    """Of the own category; channels of the others never count."""
    labelled = read_coco(photos)
    item = labelled.objects[1]
    span = labelled.channels[item.category]
    hidden = item.visible.clone()
    hidden[0], hidden[2] = False, False
    one = KeypointSet(labelled.categories, (replace(item, visible=hidden),))
    for absent, counts in (("background", torch.ones_like(hidden)), ("ignored", hidden)):
        views = described(small, one, absent=absent, mirror=False)
        assert torch.equal(views.own[0, span.start : span.stop], counts)
        assert views.own[0].sum() == counts.sum()
        seen = views.targets[0].amax((-2, -1)) > 0
        assert torch.equal(seen[span.start : span.stop], hidden)
        assert seen.sum() == hidden.sum()


@pytest.mark.parametrize("mirror", [False, True])
def test_views_hold_what_their_targets_say(
    small: DenseFeatures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: bool
) -> None:
    """A keypoint's cell has the keypoint's colour, and a left wheel is left, mirrored or not."""
    found = write_photos(tmp_path, count=12, seed=2)
    cells = partial(colours, cells=48 // small.stride)
    monkeypatch.setattr(keypoint_views, "describe", lambda _: cells)
    views = described(small, found, size=48, views=6, mirror=mirror)
    columns, shown = views.targets.amax(-2).argmax(-1), views.targets.amax((-2, -1)) > 0
    for part, rgb in enumerate([[255, 0, 0], [255, 0, 0], [0, 255, 0]]):
        colour = (torch.unique(COLOURS, dim=0) == torch.tensor(rgb)).all(1).nonzero().item()
        rows = shown[:, part].nonzero()[:, 0]
        assert len(rows) > 20
        for row in rows:
            # Elsewhere it is 0.001.
            assert views.features[row, colour][views.targets[row, part] > 0].max() > 0.01
    left, right = (columns[shown[:, part], part].float().mean() for part in (0, 1))
    assert left < right - 1
    plain = described(small, found, size=48, views=6, mirror=False)
    turned = (plain.features != views.features).flatten(1).any(1)
    assert turned[::6].sum() == 0  # the first view of each object is its own box
    assert (turned.float().mean() > 0.2) == mirror


def test_many_objects_get_fewer_views_each(small: DenseFeatures, photos: Path) -> None:
    labelled = read_coco(photos)
    assert len(described(small, labelled, views=3).own) == 48
    assert len(described(small, labelled, views=3, most_views=33).own) == 32
    assert len(described(small, labelled, views=3, most_views=5).own) == 16


def test_one_label_is_enough_to_run(
    small: DenseFeatures, photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labelled = read_coco(photos)
    item = labelled.objects[0]
    single = torch.zeros_like(item.visible)
    single[item.visible.nonzero()[0, 0]] = True
    with caplog.at_level(logging.WARNING):
        one = KeypointSet(labelled.categories, (replace(item, visible=single),))
        detector = KeypointDetector.fit(small, one, config=QUICK)
    assert len(caplog.messages) == len(single) - 1
    assert "so it is never found" in caplog.messages[0]
    # Categories without labels are not part of the detector.
    assert [category.name for category in detector.categories] == ["car"]
    (found,) = detector.predict(item.read())
    assert found.points.shape == item.points.shape


def test_labels_that_say_nothing_and_impossible_sizes_are_refused(
    small: DenseFeatures, photos: Path
) -> None:
    labelled = read_coco(photos)
    blank = [replace(o, visible=torch.zeros_like(o.visible)) for o in labelled.objects]
    with pytest.raises(ValueError, match=r"none of the 16 objects has a labelled keypoint \(v of"):
        KeypointDetector.fit(small, replace(labelled, objects=tuple(blank)), config=QUICK)
    with pytest.raises(ValueError, match="size is 70; use a multiple of the model's stride"):
        KeypointDetector.fit(small, labelled, config=replace(QUICK, size=70))

"""A detector from a few labels: what it finds, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import surefeat
from sets import QUICK, feature_model, write_labelled
from surefeat.core.geometry import into_box, out_of_box
from surefeat.data.coco import make_category
from surefeat.data.decode import Place, Skipped
from surefeat.data.drawn import draw
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco
from surefeat.keypoints.config import KeypointConfig
from surefeat.keypoints.detector import KeypointDetector, fit_head
from surefeat.keypoints.head import Batch
from surefeat.keypoints.views import ViewStore, cut_objects, describe
from surefeat.model.network import DenseFeatures


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
    """Drawn birds whose box is the whole photo, so that each may be anywhere in it."""
    number = next(n for n, kind in enumerate(CATEGORIES) if kind.name == "bird")
    folder.mkdir()
    drawn = []
    for n in range(count):
        one = draw(number, size=160, generator=np.random.default_rng([seed, n]))
        path = folder / f"{n}.png"
        Image.fromarray(one.image.permute(1, 2, 0).numpy()).save(path)
        whole = torch.tensor([0.0, 0.0, 159.0, 159.0])
        drawn.append(
            Labelled(Place(str(path)), path.name, 0, whole, one.keypoints, one.visible, (160, 160))
        )
    kind = make_category("bird", CATEGORIES[number].keypoint_names)
    return KeypointSet((kind,), tuple(drawn))


def test_parts_of_drawn_birds_are_found_on_other_birds_before_other_backgrounds(
    tmp_path: Path,
) -> None:
    known, new = birds(tmp_path / "a", seed=0, count=10), birds(tmp_path / "b", seed=1, count=12)
    model = DenseFeatures.from_pretrained(device="cpu")
    config = KeypointConfig(size=160, views=3, least_views=0, epochs=1, least_steps=450)
    fitted = KeypointDetector.fit(model, known, config=config, calibrate=False)
    found = fitted.label(new).objects
    blind = are_right(mean_place(known, new), new)
    right = are_right([item.points for item in found], new)
    # Measured: 0.01 against 0.82 of 108 keypoints.
    assert blind.float().mean() < 0.15
    assert right.float().mean() > 0.7
    # The height of the heat map is worth something: those that are right have more of it.
    scores = torch.cat([i.scores[t.visible] for i, t in zip(found, new.objects, strict=True)])  # type: ignore[index]
    assert scores[right].mean() > scores[~right].mean() + 0.02
    assert scores.min() >= 0
    assert scores.max() <= 1


def test_the_same_seed_gives_the_same_detector_and_another_another(
    small: DenseFeatures, photos: Path
) -> None:
    states = [
        KeypointDetector.fit(small, photos, config=QUICK, seed=seed).head.state_dict()
        for seed in (0, 0, 1)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["conv2.weight"], states[2]["conv2.weight"])


def test_the_seed_says_in_which_order_views_are_shown(small: DenseFeatures, photos: Path) -> None:
    """Not only where the head starts."""
    labelled = read_coco(photos)
    objects = cut_objects(labelled, size=64, jitter=QUICK.jitter, device=torch.device("cpu"))
    store = ViewStore(objects, describe(small), QUICK)

    class Watched:
        """The same views, which notes what is shown."""

        objects, maps = store.every.objects, store.every.maps

        def batches(self, *given: Any, **settings: Any) -> Iterator[Batch]:
            for batch in store.every.batches(*given, **settings):
                shown[-1].append(batch[1])
                yield batch

    shown: list[list[Tensor]] = []
    for seed in (0, 0, 1):
        shown.append([])
        rows = torch.arange(len(store.every.numbers))
        fit_head(Watched(), rows, QUICK, objects=16, kinds=8, seed=seed)  # type: ignore[arg-type]
    first, again, other = (torch.stack(batches) for batches in shown)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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


def test_a_detector_with_nan_is_refused(small: DenseFeatures, photos: Path, tmp_path: Path) -> None:
    detector = KeypointDetector.fit(small, photos, config=QUICK)
    with torch.no_grad():
        detector.head.conv1.weight[0, 0] = torch.nan
    detector.save(tmp_path / "parts")
    with pytest.raises(ValueError, match=r"conv1\.weight holds NaN or infinite numbers"):
        KeypointDetector.load(tmp_path / "parts", small)


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


def test_a_detector_of_an_earlier_version_is_read(
    small: DenseFeatures, photos: Path, tmp_path: Path
) -> None:
    """Format 1 has the settings of its own fit, some of which are no more."""
    detector = KeypointDetector.fit(small, photos, config=QUICK)
    detector.save(tmp_path / "parts")
    path = tmp_path / "parts" / "detector.json"
    record = json.loads(path.read_text())
    older = record | {"format": "surefeat-keypoints-1"}
    older["config"] = {
        "size": 64, "hidden": 16, "spread": 0.5, "floor": 0.2, "weight": 50.0,
        "absent": "background", "jitter": 1 / 6, "mirror": True, "views": 4, "most_views": 2000,
        "batch": 8, "steps": 100, "epochs": 3, "learning_rate": 1e-3, "weight_decay": 1e-2,
        "seed": 0,
    }  # fmt: skip
    path.write_text(json.dumps(older))
    again = KeypointDetector.load(tmp_path / "parts", small)
    image = read_coco(photos).objects[0].read()
    first, second = (d.predict(image, category="bird")[0] for d in (detector, again))
    assert torch.equal(first.points, second.points)
    path.write_text(json.dumps(record | {"format": "surefeat-keypoints-9"}))
    with pytest.raises(ValueError, match=r"format 'surefeat-keypoints-9'.*pass a folder written"):
        KeypointDetector.load(tmp_path / "parts", small)


def test_every_setting_of_the_fit_acts(small: DenseFeatures, photos: Path) -> None:
    """One that is read but has no effect gives the same head, bit for bit."""
    labelled = read_coco(photos)
    some = replace(labelled, objects=labelled.objects[:6])

    def learned(config: KeypointConfig) -> Tensor:
        return KeypointDetector.fit(small, some, config=config).head.conv2.weight

    plain = learned(QUICK)
    assert torch.equal(plain, learned(QUICK))
    for change in (
        {"jitter": 0.1}, {"mirror": False}, {"views": 3}, {"least_views": 40}, {"batch": 3},
        {"epochs": 2}, {"least_steps": 48}, {"weight": 5.0}, {"spread": 0.9}, {"floor": 0.5},
        {"learning_rate": 1e-2}, {"weight_decay": 0.5}, {"size": 96}, {"hidden": 8},
    ):  # fmt: skip
        other = learned(replace(QUICK, **change))  # type: ignore[arg-type]
        assert other.shape != plain.shape or not torch.equal(other, plain), change


def test_photos_that_cannot_be_read_are_an_error_or_listed(
    small: DenseFeatures, photos: Path, tmp_path: Path
) -> None:
    detector = KeypointDetector.fit(small, read_coco(photos).only(["bird"]), config=QUICK)
    good, bad = photos.parent / "bird_00001.png", tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"bad.png: cannot be decoded"):
        detector.predict([good, bad, good])
    skipped: list[Skipped] = []
    found = detector.predict([good, bad, good], skipped=skipped)
    assert [item.name for item in found] == [str(good), str(good)]
    assert [photo.name for photo in skipped] == [str(bad)]
    assert "cannot be decoded" in skipped[0].reason
    birds = read_coco(photos).only(["bird"])
    broken = replace(birds.objects[0], image=Place(str(bad)), name="bad.png")
    objects = KeypointSet(birds.categories, (broken, broken, birds.objects[1]))
    skipped = []
    assert len(detector.label(objects, skipped=skipped).objects) == 1
    assert [photo.name for photo in skipped] == ["bad.png"]


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
    (whole,) = detector.predict(pixels, category="bird", threshold=1.0)
    torch.testing.assert_close(whole.points, found[0].points, atol=1e-3, rtol=0)
    assert not whole.visible.any()
    with pytest.raises(ValueError, match="1 sets of boxes for 2 images"):
        detector.predict([pixels, wide], boxes=[[]], category="bird")
    with pytest.raises(ValueError, match="say which category; the detector knows car, bird"):
        detector.predict(pixels)
    with pytest.raises(ValueError, match="no category 'dog'; the detector knows"):
        detector.predict(pixels, category="dog")


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


def test_a_folder_that_holds_something_is_left_alone(
    small: DenseFeatures, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when writing fails in the middle: then nothing is left behind."""
    detector = KeypointDetector.fit(small, photos, config=replace(QUICK, least_steps=12))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        detector.save(tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    detector.save(tmp_path / "empty")
    assert KeypointDetector.load(tmp_path / "empty", small).categories == detector.categories

    def broken(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("surefeat.core.files.move", broken)
    with pytest.raises(OSError, match="no space"):
        detector.save(tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty"}


def test_a_saved_detector_survives_a_power_cut(
    small: DenseFeatures, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is moved to its place, and that too has to reach the disk."""
    detector = KeypointDetector.fit(small, photos, config=replace(QUICK, least_steps=12))
    seen: list[tuple[int, list[str]]] = []

    def watched(number: int) -> None:
        seen.append((os.fstat(number).st_ino, [path.name for path in tmp_path.iterdir()]))

    monkeypatch.setattr(os, "fsync", watched)
    detector.save(tmp_path / "parts")
    assert seen[-1] == (tmp_path.stat().st_ino, ["parts"])


def test_a_detector_is_loaded_on_the_shipped_model_unless_told_otherwise(
    small: DenseFeatures, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector = KeypointDetector.fit(small, photos, config=replace(QUICK, least_steps=12))
    detector.save(tmp_path / "parts")
    monkeypatch.setattr(DenseFeatures, "from_pretrained", lambda: small)
    assert KeypointDetector.load(tmp_path / "parts").model is small

"""Keypoints from the command line, as pictures and as ONNX."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sets import QUICK, feature_model, write_labelled
from surefeat.cli.keypoints import _summary
from surefeat.cli.main import main
from surefeat.cli.transfer import KeypointsTransfer
from surefeat.data.coco import make_category
from surefeat.data.decode import Place
from surefeat.data.keypoints import KeypointSet, Labelled, read_coco
from surefeat.keypoints.detector import KeypointDetector
from surefeat.keypoints.transfer import Transferred
from surefeat.model.network import DenseFeatures
from surefeat.show.objects import keypoint_sheet, keypoints
from surefeat.show.style import write_figure


@pytest.fixture(scope="module")
def small() -> DenseFeatures:
    return feature_model()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def model_folder(small: DenseFeatures, tmp_path: Path) -> str:
    small.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


# fmt: off
FLAGS = ["--size", "64", "--hidden", "16", "--least-steps", "4", "--epochs", "1", "--least-views",
         "0", "--device", "cpu"]
# fmt: on


def test_fit_and_predict_from_the_command_line(
    model_folder: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, out = str(tmp_path / "parts"), tmp_path / "found"
    start = ["keypoints", "fit", str(photos), "--model", model_folder, "--out", parts, "--json"]
    main([*start, "--categories", "bird", *FLAGS])
    said = json.loads(capsys.readouterr().out)
    assert said["objects"] == 2
    assert list(said["keypoints"]) == ["bird"]
    small_photo = tmp_path / "bird.png"
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(small_photo)
    ask = ["keypoints", "predict", "--detector", parts, "--model", model_folder, "--out", str(out)]
    (tmp_path / "few").mkdir()
    for path in sorted(photos.parent.glob("*.png"))[:3]:
        shutil.copy(path, tmp_path / "few")
    main([*ask, str(small_photo), str(tmp_path / "few"), "--json", "--device", "cpu"])
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((out / "keypoints.json").read_text()) | {"skipped": []}
    assert len(record["images"]) == len(record["annotations"]) == 4
    assert record["images"][0] | {"id": 0} == {
        "id": 0, "file_name": str(small_photo), "width": 60, "height": 40,
    }  # fmt: skip
    assert len(list(out.glob("*.png"))) == 4 + 1
    assert (out / "sheet.png").is_file()
    assert len(record["annotations"][0]["keypoint_scores"]) == len(said["keypoints"]["bird"])
    # What was written is read back; a labelled json is also compared with.
    assert len(read_coco(out / "keypoints.json", images="/").objects) == 4
    moved = tmp_path / "labels.json"
    moved.write_text(photos.read_text())
    where = ["--folder", str(photos.parent)]
    main([*ask, str(moved), *where, "--category", "bird", "--device", "cpu", "--no-pictures"])
    assert "2 objects in 2 photos" in (line := capsys.readouterr().out)
    assert "labelled keypoints right (PCK@0.1 of the box)" in line


def test_the_summary_counts_what_lies_within_a_tenth_of_the_box_s_longer_side() -> None:
    """From 0 to 100: 9 pixels off is right, 11 is not; the third is marked and is not there."""
    seen = torch.tensor([True, True, False])
    true = Labelled(
        Place("a.png"), "a.png", 0, torch.tensor([0.0, 0.0, 100.0, 40.0]), torch.full((3, 2), 20.0),
        seen, (60, 120),
    )  # fmt: skip
    off = torch.tensor([[9.0, 0.0], [0.0, 11.0], [0.0, 0.0]])
    found = replace(true, points=true.points + off, visible=torch.tensor([True, False, True]))
    kinds = (make_category("bird", ("beak", "tail", "eye")),)
    said = _summary(KeypointSet(kinds, (found,)), KeypointSet(kinds, (true,)), [])
    assert said == (
        "1 objects in 1 photos; 50% of 2 labelled keypoints right (PCK@0.1 of the box); 1 of 2 "
        "left out, 1 of 1 marked that are not there"
    )


def test_a_detector_is_fitted_on_labels_that_are_sure_not_on_all_that_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scores = torch.tensor([0.95, 0.6, 0.2])
    item = Labelled(
        Place("a.png"), "a.png", 0, torch.tensor([0.0, 0.0, 9.0, 9.0]), torch.zeros(3, 2),
        scores >= 0.5, (60, 120), scores=scores,
    )  # fmt: skip
    kinds = (make_category("bird", ("beak", "tail", "eye")),)
    carried = Transferred(kinds, (), (item,), (), calibrated=True, threshold=0.5)
    taught: list[Any] = []

    def fit(model: object, labelled: KeypointSet, **settings: Any) -> SimpleNamespace:
        taught.append((labelled, settings["config"].absent))
        return SimpleNamespace(save=taught.append)

    monkeypatch.setattr(KeypointDetector, "fit", fit)
    asked = KeypointsTransfer(Path("a.json"), (Path("b"),), fit=tmp_path / "parts", sure=0.9)
    asked._fit(carried, None)  # type: ignore[arg-type]
    (labelled, absent), folder = taught
    assert [one.visible.tolist() for one in labelled.objects] == [[True, False, False]]
    assert (absent, folder) == ("ignored", tmp_path / "parts")


def test_a_broken_photo_is_skipped_and_no_photos_are_an_error(
    small: DenseFeatures,
    model_folder: str,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    birds = read_coco(photos).only(["bird"])
    KeypointDetector.fit(small, birds, config=QUICK).save(tmp_path / "parts")
    good, bad = photos.parent / "bird_00001.png", tmp_path / "bad.png"
    bad.write_bytes(b"not an image")
    ask = ["keypoints", "predict", "--detector", str(tmp_path / "parts"), "--model", model_folder,
           "--out", str(tmp_path / "out"), "--device", "cpu", "--no-pictures"]  # fmt: skip
    main([*ask, str(bad), str(good)])
    said = capsys.readouterr().out
    assert "1 objects in 1 photos; 1 photos skipped" in said
    assert "bad.png: is text, not an image" in said
    main([*ask, str(bad), str(good), "--json"])
    record = json.loads(capsys.readouterr().out)
    assert [photo["name"] for photo in record["skipped"]] == [str(bad)]
    assert len(record["annotations"]) == 1
    # The same of a labelled json, whose other photos are still compared.
    folder = tmp_path / "photos"
    shutil.copytree(photos.parent, folder)
    (folder / birds.objects[0].name).write_bytes(b"not an image")
    main([*ask, str(photos), "--folder", str(folder), "--category", "bird"])
    assert "1 objects in 1 photos; 1 photos skipped; " in (said := capsys.readouterr().out)
    assert "labelled keypoints right" in said
    for photo, fault in (([], "no photos are given; name photos"), ([bad], "none of the 1 photos")):
        with pytest.raises(SystemExit) as refused:
            main([*ask, *map(str, photo)])
        assert refused.value.code == 2
        assert fault in capsys.readouterr().err


def test_a_fit_that_is_stopped_or_refused_leaves_nothing(
    model_folder: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new" / "parts"
    command = ["keypoints", "fit", str(photos), "--model", model_folder, "--out", str(out), *FLAGS]

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for name in ("surefeat.keypoints.detector.fit", "surefeat.core.files.write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(name, interrupted)
            with pytest.raises(SystemExit) as stopped:
                main(command)
        assert stopped.value.code == 130
        assert not [path for path in tmp_path.rglob("*") if "parts" in path.name]
    out.mkdir(parents=True)
    (out / "mine.txt").write_text("keep")
    with pytest.raises(SystemExit) as refused:
        main(command)
    assert refused.value.code == 2
    assert "exists already; remove it or pass another" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_an_exported_detector_finds_the_same(
    small: DenseFeatures,
    model_folder: str,
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("onnxscript", reason="needs the export extra")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    from surefeat.exporting import export_detector

    birds = read_coco(photos).only(["bird"])
    detector = KeypointDetector.fit(small, birds, config=QUICK, calibrate=False)
    detector.save(tmp_path / "parts")
    file, more = tmp_path / "parts.onnx", ["--model", model_folder, "--json"]
    main(["export", str(file), "--detector", str(tmp_path / "parts"), *more])
    difference = json.loads(capsys.readouterr().out)["difference"]
    assert 0 <= difference < 1e-4
    session = onnxruntime.InferenceSession(file)
    about = session.get_modelmeta().custom_metadata_map
    assert about["size"] == "64"
    assert json.loads(about["categories"])[0]["name"] == "bird"
    image = torch.randint(0, 256, (3, 64, 64), generator=torch.Generator().manual_seed(0)).byte()
    points, scores, _ = session.run(None, {"crops": image[None].float().div(255).numpy()})
    (found,) = detector.predict(image)
    np.testing.assert_allclose(points[0], found.points.numpy(), atol=1e-2)
    np.testing.assert_allclose(scores[0], found.scores.numpy(), atol=1e-4)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="a detector is written as ONNX"):
        export_detector(detector, tmp_path / "parts.pt2")


def test_a_picture_names_every_keypoint_and_marks_those_that_are_visible(photos: Path) -> None:
    labelled = read_coco(photos)
    car, bird = labelled.objects[:2]
    figure = keypoints(bird.read(), [bird], labelled.categories)
    names = labelled.categories[bird.category].keypoints
    (legend,) = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert said == [f"{number}  {name}" for number, name in enumerate(names, 1)]
    (axes,) = figure.axes
    marks = {text.get_text(): text.get_position() for text in axes.texts}
    assert len(marks) == int(bird.visible.sum())
    for number, place in marks.items():
        assert place == pytest.approx(tuple(bird.points[int(number) - 1].tolist()))
    both = keypoints(bird.read(), [car, bird], labelled.categories).legends[0]
    said = [text.get_text() for text in both.get_texts()]
    assert said[0] == f"1  car {labelled.categories[0].keypoints[0]}"
    assert said[-1] == f"{len(names)}  bird {names[-1]}"


@pytest.mark.filterwarnings("error:Glyph")
def test_names_are_drawn_as_they_are_written(photos: Path, tmp_path: Path) -> None:
    r"""What looks like a formula, such as $\frac$, ended in a traceback; other letters warned."""
    birds = read_coco(photos).only(["bird"])
    kind = birds.categories[birds.objects[0].category]
    odd = replace(kind, keypoints=(r"a $\frac$ b", "日本", *kind.keypoints[2:]))
    kinds = [odd] * len(birds.categories)
    scored = [replace(bird, scores=torch.full((len(bird.points),), 0.5)) for bird in birds.objects]
    figures = keypoint_sheet(scored, kinds), keypoints(scored[0].read(), scored, kinds)
    for number, figure in enumerate(figures):
        write_figure(figure, tmp_path / f"{number}.png", dpi=30)
    assert r"1 a $\frac$ b" in figures[0].get_suptitle()


def test_the_sheet_shows_the_least_sure_first_and_says_what_is_not_seen(photos: Path) -> None:
    birds = read_coco(photos).only(["bird"])
    sure, unsure = birds.objects
    count = len(sure.points)
    every = torch.ones(count, dtype=torch.bool)
    unseen = every.clone()
    unseen[1] = False
    sure = replace(sure, scores=torch.full((count,), 0.9), visible=every)
    unsure = replace(unsure, scores=torch.linspace(0.2, 0.8, count), visible=unseen)
    figure = keypoint_sheet([sure, unsure], birds.categories)
    names = birds.categories[sure.category].keypoints
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == [
        Path(unsure.name).name, Path(sure.name).name,
    ]  # fmt: skip
    notes = [axes.texts[-1].get_text() for axes in figure.axes[:2]]
    assert notes == [f"not seen: {names[1]}", f"1 {names[0]} 0.90"]
    only = keypoint_sheet([sure, unsure], birds.categories, count=1)
    assert "1 of 2 objects, the least sure first" in only.get_suptitle()

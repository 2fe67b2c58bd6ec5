"""`surefeat keypoints convert`, and other tools' labels for `fit` and `predict`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import sets
from surefeat.cli.main import main
from surefeat.data.keypoints import read_coco
from surefeat.data.pose import USUAL, read_pose

pytest.importorskip("sleap_io", reason="needs the pose extra")

FILES = Path(__file__).parents[1] / "data" / "pose_files"


def test_a_file_is_converted_and_what_is_lost_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["keypoints", "convert", str(FILES / "truth.json"), str(tmp_path / "a.csv")]
    main(command)
    said = capsys.readouterr()
    assert said.out == f"3 objects in 3 photos, from coco to deeplabcut: {tmp_path / 'a.csv'}\n"
    lost = said.err.splitlines()
    assert "lost: boxes; deeplabcut cannot hold it" in lost
    assert all(line.startswith("lost: ") for line in lost)
    with pytest.raises(SystemExit):  # what is there stays
        main(command)
    assert "a.csv exists already; remove it or pass another name" in capsys.readouterr().err
    main(["keypoints", "convert", str(tmp_path / "a.csv"), str(tmp_path / "b.json"), "--json"])
    record = json.loads(capsys.readouterr().out)
    assert (record["from"], record["format"], record["objects"]) == ("deeplabcut", "coco", 3)
    assert record["lost"] == []


def test_formats_are_asked_for_only_where_they_cannot_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(FILES / "studio.json", tmp_path / "tasks")
    start = ["keypoints", "convert", str(tmp_path / "tasks"), str(tmp_path / "a.json")]
    with pytest.raises(SystemExit):
        main(start)
    assert "tasks is of no known kind of labels" in capsys.readouterr().err
    main([*start, "--from", "label-studio"])
    assert "from label-studio to coco" in capsys.readouterr().out
    again = ["keypoints", "convert", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    main([*again, "--to", "label-studio", "--json"])
    assert json.loads(capsys.readouterr().out)["format"] == "label-studio"
    assert (tmp_path / "b.config.xml").is_file()
    with pytest.raises(SystemExit):
        main([*again[:3], str(tmp_path / "c.doc")])
    assert "c.doc: unknown ending; use one of" in capsys.readouterr().err


def test_photos_come_out_of_a_package_and_into_a_folder_of_yolo_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = str(FILES / "birds.pkg.slp")
    main(["keypoints", "convert", package, str(tmp_path / "new" / "a.json")])
    assert "2 photos unpacked beside it" in capsys.readouterr().out
    labelled = read_coco(tmp_path / "new" / "a.json")
    wanted = read_coco(FILES / "truth.json").objects
    assert all((a.read() == b.read()).all() for a, b in zip(labelled.objects, wanted, strict=True))
    # The package pads its photos to one length; a PNG ends with the checksum of its last chunk.
    alone = sorted((tmp_path / "new").rglob("*.png"))
    assert [path.read_bytes()[-12:] for path in alone] == 2 * [b"\0\0\0\0IEND\xaeB`\x82"]
    main(["keypoints", "convert", package, str(tmp_path / "yolo"), "--json"])
    lost = json.loads(capsys.readouterr().out)["lost"]
    assert any("objects without a box (3 got one around" in line for line in lost)
    assert len(list((tmp_path / "yolo" / "images").rglob("*.png"))) == 2
    main(["keypoints", "convert", str(FILES / "truth.json"), str(tmp_path / "bare"), "--no-copy"])
    assert "3 photos that were not copied (put them into" in capsys.readouterr().err
    assert not (tmp_path / "bare" / "images").exists()


def test_nothing_is_left_of_what_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(FILES / "studio.json", tmp_path / "a.json")
    before = sorted(tmp_path.rglob("*"))
    for out, said in (("x.pkg.slp", "a.png is not where it was looked for"),
                      ("a.xml", "none.png is not there, and its size is needed")):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["keypoints", "convert", str(tmp_path / "a.json"), str(tmp_path / out)])
        assert said in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_detector_is_fitted_on_another_tool_s_labels_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, parts = sets.write_model(tmp_path / "model"), tmp_path / "parts"
    labels = sets.write_labelled(tmp_path / "photos")
    for name in ("birds.slp", "birds.xml"):
        made = labels.parent / name
        main(["keypoints", "convert", str(labels), str(made), "--categories", "bird"])
    quick = [
        "--size",
        "64",
        "--hidden",
        "8",
        "--epochs",
        "1",
        "--least-steps",
        "2",
        "--device",
        "cpu",
    ]
    main(["keypoints", "fit", str(made), "--out", str(parts), "--model", str(model), *quick])
    given = read_coco(made).categories
    assert given[0].name == "bird"
    for form in ("deeplabcut", "sleap", "yolo"):
        main(["keypoints", "predict", str(made), "--detector", str(parts), "--model", str(model),
              "--out", str(tmp_path / form), "--no-pictures", "--format", form, "--device", "cpu",
              ])  # fmt: skip
        assert "labelled keypoints right" in capsys.readouterr().out
        assert (tmp_path / form / "keypoints.json").is_file()
        found = read_pose(tmp_path / form / USUAL[form])  # type: ignore[index]
        assert len(found.annotations) <= len(read_coco(made).objects)
        assert found.categories[0].keypoints == given[0].keypoints

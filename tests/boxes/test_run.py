"""From photos with image labels to boxes: what competes, what is listed, bad input."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hostile import strange_names
from sets import HUES, SIZE, fit, make, random_proposals, settings
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import read_photos
from surefeat.boxes.select import predict_boxes
from surefeat.boxes.train import fit_boxes
from surefeat.cli.main import main
from surefeat.data.sources import LabelledImages, find_images, find_labels
from surefeat.learn.runs import locked
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import key_of, read_proposals, write_proposals


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("few"), count=4, boxes=12)


def test_proposals_too_small_do_not_compete(few: Path) -> None:
    found, known = find_labels(few / "photos"), read_proposals(few / "proposals.npz")
    plain, large, none = (
        read_photos(found.images, known, replace(settings(), regions=5, smallest=share))[0]
        for share in (0.0, 0.4, 2.0)
    )
    least = [float((p.proposals[:, 2:] - p.proposals[:, :2] + 1).min()) for p in large]
    assert min(least) >= 0.4 * SIZE
    assert any(len(p.proposals) == 5 for p in plain)
    # Without any the whole image is left.
    assert none[0].proposals.tolist() == [[0, 0, SIZE - 1, SIZE - 1]]


def test_a_class_of_one_image_is_learned_with_a_warning(
    few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_labels(few / "photos")
    names = {f"{i}.png" for i in range(4)}
    kept = [i for i in found.images if "sky" not in i.labels or i.name.endswith("0.png")]
    assert len(kept) == 2 * len(names) + 1
    less = LabelledImages(tuple(kept), found.categories)
    with caplog.at_level(logging.WARNING):
        detector = fit(few, tmp_path / "run", settings(epochs=1), found=less)
    assert "only one image shows 'sky'" in caplog.text
    done = predict_boxes(
        less, detector, out=tmp_path, config=settings(), proposals=few / "proposals.npz", quiet=True
    )
    # The only box of a class is its own median, and stays.
    assert [c.verdict for c in done.selection.candidates if c.category == "sky"] == ["kept"]


def test_names_that_are_no_text_are_learned_from_found_again_and_listed(
    few: Path, tmp_path: Path
) -> None:
    shutil.copytree(few, tmp_path / "data")
    photos = tmp_path / "data" / "photos"
    good, bad = strange_names(photos / "sky", (photos / "sky" / "0.png").read_bytes())
    found, out = find_labels(photos), tmp_path / "boxes"
    detector = fit(tmp_path / "data", tmp_path / "run", settings(epochs=1), found=found)
    lines = (tmp_path / "run" / "skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"sky/{name}" for name in bad]
    predict_boxes(
        found, detector, out=out, config=settings(), quiet=True,
        proposals=tmp_path / "data" / "proposals.npz",
    )  # fmt: skip
    names = [image["file_name"] for image in json.loads((out / "boxes.json").read_text())["images"]]
    assert f"sky/{good}" in names
    assert f"sky/{good}" in {item.name for item in find_images(photos)}
    assert "sky/caf\\udce9.png" in (out / "selection.csv").read_text()


def test_a_live_run_is_not_begun_again(few: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(BlockingIOError, match="in use by process"):
        fit(few, tmp_path / "run", settings(epochs=1))
    assert not (tmp_path / "run").exists()


def test_images_without_label_and_corrupt_ones_are_listed(few: Path, tmp_path: Path) -> None:
    shutil.copytree(few, tmp_path / "data")
    photos = tmp_path / "data" / "photos"
    shutil.copy(photos / "sky" / "0.png", photos / "stray.png")
    (photos / "sky" / "1.png").write_bytes(b"\x89PNG, no more")
    found = find_labels(photos)
    done = fit_boxes(
        found, out=tmp_path / "run", config=settings(epochs=1), init="none", device="cpu",
        proposals=tmp_path / "data" / "proposals.npz", quiet=True,
    )  # fmt: skip
    assert done.images == 11
    reasons = {each.name: each.reason for each in done.skipped}
    assert reasons.keys() == {"stray.png", "sky/1.png"}
    assert reasons["stray.png"] == "has no label"
    assert "cannot be decoded" in reasons["sky/1.png"]
    assert "sky/1.png\t" in (tmp_path / "run" / "skipped.txt").read_text()
    after = predict_boxes(
        found, done.detector, out=tmp_path / "out", config=settings(),
        proposals=tmp_path / "data" / "proposals.npz", quiet=True,
    )  # fmt: skip
    assert {each.name for each in after.skipped} == reasons.keys()
    assert len(after.selection.candidates) == 11


def test_an_unknown_label_is_listed_and_the_rest_is_done(few: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    detector = Detector(settings().detector, ("leaf", "ruby")).eval()
    done = predict_boxes(
        find_labels(few / "photos"), detector, out=tmp_path, config=settings(),
        proposals=few / "proposals.npz", quiet=True,
    )  # fmt: skip
    assert {c.category for c in done.selection.candidates} == {"leaf", "ruby"}
    assert {s.reason for s in done.skipped} == {"the detector knows no 'sky'"}
    assert len(done.skipped) == 4
    strangers = Detector(settings().detector, ("cat", "dog"))
    with pytest.raises(ValueError, match=r"knows \['cat', 'dog'\], the images are labelled"):
        predict_boxes(find_labels(few / "photos"), strangers, out=tmp_path, config=settings())


def test_an_image_without_proposals_has_the_whole_image(few: Path, tmp_path: Path) -> None:
    path = few / "photos" / "sky" / "0.png"
    none = {key_of(path.read_bytes()): torch.zeros(0, 4)}
    write_proposals(none, ProposalConfig(), tmp_path / "none.npz")
    torch.manual_seed(0)
    detector = Detector(settings().detector, tuple(HUES)).eval()
    found = find_labels(few / "photos", categories=("sky",))
    one = LabelledImages(tuple(i for i in found.images if i.name == "sky/0.png"), ("sky",))
    done = predict_boxes(
        one, detector, out=tmp_path, config=settings(), proposals=tmp_path / "none.npz", quiet=True
    )
    assert [c.box for c in done.selection.candidates] == [(0, 0, SIZE - 1, SIZE - 1)]


def test_only_the_first_regions_compete(few: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    detector = Detector(settings().detector, tuple(HUES)).eval()
    done = predict_boxes(
        find_labels(few / "photos"), detector, out=tmp_path, quiet=True,
        config=replace(settings(), regions=1), proposals=few / "proposals.npz",
    )  # fmt: skip
    first = [tuple(random_proposals(i, 12)[0].tolist()) for i in range(4)]
    assert sorted(c.box for c in done.selection.candidates) == sorted(first * 3)


def test_one_category_alone_says_what_to_add(few: Path, tmp_path: Path) -> None:
    found = find_labels(few / "photos", categories=("sky",))
    with pytest.raises(ValueError, match="photos that show something else"):
        fit(few, tmp_path / "run", settings(), found=found)


def test_the_command_line_goes_from_photos_to_boxes(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (
        "--detector.trunk small --detector.hidden 16 --detector.pooled 2 --learn.epochs 1 "
        "--learn.scales 64 --regions 30"
    )
    fast = "--proposals.draws 100 --proposals.count 40"
    run, out, file = tmp_path / "run", tmp_path / "out", tmp_path / "p.npz"
    main(f"boxes propose {few / 'photos'} --file {file} {fast}".split())
    assert "12 of 12 images added" in capsys.readouterr().out
    main(
        f"boxes fit {few / 'photos'} --out {run} --init none --device cpu --json "
        f"--proposals-file {file} {fast} {small}".split()
    )
    assert json.loads(capsys.readouterr().out)["images"] == 12
    main(
        f"boxes predict {few / 'photos'} --model {run} --out {out} --device cpu --json "
        f"--select.scales 64".split()
    )
    result = json.loads(capsys.readouterr().out)
    assert result["kept"] + result["below the floor"] + result["below the median"] == 12
    assert Path(result["sheet"]).stat().st_size > 10_000
    # Without a word about them the proposals are made as in fitting.
    made = read_proposals(out / "proposals.sqlite", ProposalConfig(draws=100, count=40))
    assert len(made) == 12
    assert Detector.load(run).fitted.regions == 30
    lines = (out / "selection.csv").read_text().splitlines()
    assert lines[0] == "image,category,x1,y1,x2,y2,score,verdict"
    assert len(lines) == 13

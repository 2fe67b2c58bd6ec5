"""From a folder of photos to a model, whatever else lies in the folder."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image

from hostile import make, strange_names
from surefeat.data.decode import Batches, Item, Part, Place, SourceError, decode_all
from surefeat.data.sources import find_images
from surefeat.learn.config import Config
from surefeat.learn.loop import join_processes
from surefeat.learn.pretrain import split
from surefeat.learn.runs import Run
from surefeat.learn.selfcheck import _not_learned_from, check_folder
from surefeat.model.config import ModelConfig
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.show.report import write_report
from tiny import SIDE, images, learn, same_bits, tiny, weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("images"))


def skipped_names(run: Path) -> list[str]:
    lines = (run / "skipped.txt").read_text().splitlines()
    assert all(line.count("\t") == 1 and line.split("\t")[1] for line in lines)
    return [line.split("\t")[0] for line in lines]


def test_200_hostile_files_do_not_stop_a_run_and_are_listed(tmp_path: Path) -> None:
    trap = make(tmp_path, np.random.default_rng(0))
    bad: set[str] = set()
    for folder, steps in ((trap.folder, 3), (trap.shards, 2)):
        out = tmp_path / f"run-{folder.name}"
        found = learn(folder, out, tiny(), steps=steps)
        assert found.progress.step == steps
        assert all(bool(value.isfinite().all()) for value in weights(out).values())
        about = json.loads((out / "images.json").read_text())
        assert about["skipped"] == len(found.skipped) == len(skipped_names(out))
        bad |= set(skipped_names(out))
        assert about["images"] + about["held_out"] == sum(
            name.startswith("a.tar") == (folder is trap.shards) for name in trap.good
        )
    assert len(trap.bad) == 200
    assert bad == set(trap.bad)


@pytest.mark.usefixtures("undrawn")
def test_names_that_are_no_text_are_learned_from_and_listed_on_one_line_each(
    source: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "images", tmp_path / "run"
    shutil.copytree(source, folder)
    good, bad = strange_names(folder, next(source.glob("*.png")).read_bytes())
    config = tiny()
    config = replace(config, data=replace(config.data, held_out=0))
    learn(folder, out, config, steps=2)
    assert skipped_names(out) == list(bad)
    learned = (out / "learned.txt").read_text().splitlines()
    assert len(learned) == 12
    assert "caf\\udce9.png" in learned
    # What was learned from is found again under its name, and so left out.
    kept = {item.name for item in _not_learned_from(find_images(folder), Run(out))}
    assert kept == {os.fsdecode(b"bad\xe9.png"), "two\nlines\ttab.png"}
    learn(folder, out, config, steps=3, resume=True)
    write_report(out, images=(folder / good,))


def test_a_stream_lists_the_bad_files_it_met(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    shutil.copytree(source, folder)
    for n in range(3):
        (folder / f"bad_{n}.png").write_bytes(b"no image")
    config = tiny()
    config = replace(config, data=replace(config.data, memory="stream", workers=2))
    found = learn(folder, tmp_path / "run", config, steps=8)
    assert skipped_names(tmp_path / "run") == [f"bad_{n}.png" for n in range(3)]
    assert [entry.name for entry in found.skipped] == [f"bad_{n}.png" for n in range(3)]


@pytest.mark.parametrize("memory", ["device", "stream"])
def test_where_images_live_does_not_change_what_is_learned(
    source: Path, tmp_path: Path, memory: Any
) -> None:
    config = tiny(steps=4)
    learn(source, tmp_path / "host", config)
    other = replace(config, data=replace(config.data, memory=memory))
    learn(source, tmp_path / "other", other)
    assert same_bits(weights(tmp_path / "other"), weights(tmp_path / "host"))


def test_a_run_leaves_a_model_a_summary_and_the_check(source: Path, tmp_path: Path) -> None:
    found = learn(source, tmp_path / "run", tiny(check_every=5), steps=5)
    assert found.check is not None
    summary = json.loads((found.folder / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["self_check"] == found.check.to_dict()
    assert summary["probability"] == found.trust
    assert found.trust.startswith("no probability of matches: no model with small ships")
    line = Run.open(found.folder).metrics()[-1]
    assert line["accuracy@0.1"] == found.check.accuracy[0.1]
    model = DenseFeatures.from_pretrained(found.folder, device="cpu")
    assert same_bits(dict(model.state_dict()), dict(found.model.state_dict()))
    (features,) = model.extract(next(source.glob("*.png")))
    assert features.frame.original == (SIDE, SIDE)
    assert not any(module.training for module in found.model.modules())
    # Held-out photos as the model saw them before the first step, for the report.
    torch.manual_seed(tiny().train.seed)
    start = DenseFeatures.create(tiny().model, init="none").eval()
    for row in (0, 1):
        (first,) = start.extract(found.folder / "examples" / f"{row}.png")
        before = Features.load(found.folder / "examples" / f"before-{row}.safetensors")
        torch.testing.assert_close(before.descriptors, first.descriptors, atol=2e-3, rtol=0)


@pytest.mark.parametrize("kind", ["probabilistic", "plain", "contrastive"])
def test_only_a_loss_with_sigma_leaves_a_confidence(
    source: Path, tmp_path: Path, kind: Literal["probabilistic", "plain", "contrastive"]
) -> None:
    config = replace(tiny(), loss=replace(tiny().loss, kind=kind))
    found = learn(source, tmp_path / "run", config, steps=5)
    assert found.model.has_confidence == (kind == "probabilistic")
    (features,) = found.model.extract(next(source.glob("*.png")))
    spread = features.confidence.max() - features.confidence.min()
    assert (spread > 1e-3) == (kind == "probabilistic")


def test_the_check_is_on_images_that_were_not_learned_from(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import surefeat.learn.pretrain

    seen: dict[str, Any] = {}
    true_train, true_check = surefeat.learn.pretrain.train, surefeat.learn.pretrain.self_check

    def train(model: Any, batches: Any, *args: Any, **more: Any) -> Any:
        feed = batches.iterate(range(30), batch=4, seed=0, part=Part())
        seen["learned"] = {pixels.numpy().tobytes() for batch, _ in feed for pixels in batch}
        return true_train(model, batches, *args, **more)

    def check(model: Any, pixels: Any, *args: Any, **more: Any) -> Any:
        seen["checked"] = {image.numpy().tobytes() for image in pixels}
        return true_check(model, pixels, *args, **more)

    monkeypatch.setattr(surefeat.learn.pretrain, "train", train)
    monkeypatch.setattr(surefeat.learn.pretrain, "self_check", check)
    learn(source, tmp_path / "run", tiny(), steps=1)
    assert (len(seen["learned"]), len(seen["checked"])) == (9, 2)
    assert not seen["learned"] & seen["checked"]


def boxes_of(source: Path, file: Path) -> Path:
    """Two boxes in every image of a folder, as COCO."""
    names = sorted(path.name for path in source.glob("*.png"))
    images = [{"id": n, "file_name": name} for n, name in enumerate(names)]
    boxes = [
        {"id": 2 * n + k, "image_id": n, "category_id": 1, "bbox": [5 * k, 4, 34, 33]}
        for n in range(len(names))
        for k in (0, 1)
    ]
    categories = [{"id": 1, "name": "thing"}]
    content = {"images": images, "annotations": boxes, "categories": categories}
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize("cropped", [False, True])
def test_a_later_check_leaves_out_what_the_run_learned_from(
    cropped: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    crop = boxes_of(source, tmp_path / "boxes.json") if cropped else None
    done = learn(source, tmp_path / "run", tiny(), steps=1, crop=crop)
    about = json.loads((done.folder / "images.json").read_text())
    held_out = sorted({name.split("#")[0] for name in about["held_out_names"]})
    seen: list[str] = []

    def watched(items: list[Item], **options: Any) -> Any:
        seen.extend(item.name for item in items)
        return decode_all(items, **options)

    def checked(folder: Path, model: Path) -> list[str]:
        seen.clear()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            check_folder(folder, model=model, device="cpu")
        return sorted(seen)

    monkeypatch.setattr("surefeat.learn.selfcheck.decode_all", watched)
    assert len(held_out) == (1 if cropped else 2)
    for model in (done.folder, done.folder / "model"):
        assert checked(source, model) == held_out
        assert f"checking on {len(held_out)} of 11 images" in caplog.text
    seen_before = tmp_path / "seen"
    shutil.copytree(source, seen_before)
    for name in held_out:
        (seen_before / name).unlink()
    assert len(checked(seen_before, done.folder)) == 11 - len(held_out)
    assert "learned from all of these" in caplog.text
    images(tmp_path / "more" / "new", count=3)
    assert len(checked(tmp_path / "more", done.folder)) == 3
    assert not caplog.text


def test_the_seed_decides_the_first_weights_and_what_is_held_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    true = Batches.iterate

    def watched(self: Batches, *args: Any, seed: int, **more: Any) -> Any:
        seeds.append(seed)
        return true(self, *args, seed=seed, **more)

    monkeypatch.setattr(Batches, "iterate", watched)
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        learn(source, tmp_path / name, tiny(seed=seed), steps=0)
    assert seeds == [3, 3, 4]
    assert same_bits(weights(tmp_path / "first"), weights(tmp_path / "again"))
    assert not same_bits(weights(tmp_path / "first"), weights(tmp_path / "other"))
    held_out = [
        json.loads((tmp_path / name / "images.json").read_text())["held_out_names"]
        for name in ("first", "again", "other")
    ]
    assert held_out[0] == held_out[1]
    for names, seed in zip(held_out[1:], (3, 4), strict=True):
        apart = split(find_images(source), held_out=2, seed=seed)[1]
        assert sorted(names) == sorted(item.name for item in apart)
    assert set(held_out[0]) != set(held_out[2])
    drawn = [split(items(20), held_out=4, seed=seed)[1] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def items(count: int) -> list[Item]:
    return [Item(f"{n}.png", Place(f"{n}.png")) for n in range(count)]


@pytest.mark.parametrize(("count", "wanted", "held"), [(20, 64, 4), (20, 3, 3), (4, 64, 0)])
def test_at_most_a_fifth_of_the_images_is_held_out(count: int, wanted: int, held: int) -> None:
    learned, apart = split(items(count), held_out=wanted, seed=0)
    assert (len(learned), len(apart)) == (count - held, held)
    assert {item.name for item in learned + apart} == {item.name for item in items(count)}


def test_numbers_that_cannot_work_leave_no_run_behind(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--train\.batch is 0; use at least 1"):
        learn(source, tmp_path / "run", tiny(batch=0))
    assert not (tmp_path / "run").exists()


def test_the_callers_random_numbers_are_left_alone(source: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    learn(source, tmp_path / "run", tiny(), steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_overfit_learns_so_many_images(source: Path, tmp_path: Path) -> None:
    found = learn(source, tmp_path / "run", tiny(), steps=2, overfit=3)
    assert json.loads((found.folder / "images.json").read_text())["images"] == 3
    assert found.check is None
    assert "self_check" not in json.loads((found.folder / "summary.json").read_text())


def test_a_single_image_is_enough_but_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 30), "red").save(tmp_path / "images" / "one.png")
    with caplog.at_level(logging.WARNING):
        assert learn(tmp_path / "images", tmp_path / "run", tiny(), steps=1).check is None
    assert "only 1 images" in caplog.text


def test_a_wrong_source_leaves_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        learn(tmp_path / "photos", tmp_path / "run", tiny())
    assert not (tmp_path / "run").exists()


def test_the_run_remembers_the_variant_that_the_weights_are_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may change the network's settings; on resume they are not at hand any more."""
    create = DenseFeatures.create

    def variant(config: ModelConfig, *, init: str | Path = "imagenet") -> DenseFeatures:
        known = config if str(init) == "none" else replace(config, stride_in_1x1=True)
        return create(known, init="none")

    monkeypatch.setattr(DenseFeatures, "create", variant)
    learn(source, tmp_path / "run", tiny(), steps=1, init="v1.safetensors")
    assert Run.open(tmp_path / "run").settings(Config).model.stride_in_1x1
    resumed = learn(source, tmp_path / "run", steps=2, resume=True, init="imagenet")
    assert resumed.model.config.stride_in_1x1


def test_processes_find_their_part_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join_processes("cpu") == (Part(0, 1), torch.device("cpu"))
    joined: list[str] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", joined.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert join_processes("cpu") == (Part(3, 4), torch.device("cpu"))
    # A device without a number is this process's own, not the first for all.
    assert join_processes("cuda") == (Part(3, 4), torch.device("cuda", 1))
    assert join_processes("cuda:5") == (Part(3, 4), torch.device("cuda", 5))
    assert joined == ["gloo", "nccl", "nccl"]


def test_tensorboard_is_written_where_wanted(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    learn(source, tmp_path / "run", tiny(), steps=1, tensorboard=True)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))

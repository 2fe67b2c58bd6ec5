"""Learning boxes: resuming, stopping, what learns."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sets import HUES, SIZE, fit, make, settings
from surefeat.boxes import train as detect_train
from surefeat.boxes.config import BoxesConfig, LearnConfig
from surefeat.boxes.network import Detector
from surefeat.boxes.photos import Photo, read_photos
from surefeat.boxes.train import _digest, calibrate, draw, learn_boxes
from surefeat.data.sources import LabelledImages, find_labels
from surefeat.learn import loop
from surefeat.learn.config import Config
from surefeat.learn.loop import TrainingStoppedError
from surefeat.learn.runs import Run
from surefeat.match.proposals import read_proposals
from surefeat.model.trunks import Small
from tiny import same_bits


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("few"), count=4, boxes=12)


RUN: dict[str, Any] = {"epochs": 4, "log_every": 2, "checkpoint_every": 4}


def test_a_run_that_broke_off_resumes_to_the_same_bits(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or stopped by Ctrl-C: tests/learn/test_resume.py, of the same loop and folder."""
    config, init = settings(**RUN), tmp_path / "small.safetensors"
    with torch.random.fork_rng(devices=[]):
        # Another seed than the run's: a resumed run that made its trunk anew would have another.
        torch.manual_seed(config.learn.seed + 1)
        save_file(Small().state_dict(), init)
    whole, out = fit(few, tmp_path / "whole", config, init=init), tmp_path / "run"
    steps = detect_train.box_steps

    def broken(*args: Any, **more: Any) -> Any:
        for step, taken in enumerate(steps(*args, **more)):
            if step == 5:
                raise RuntimeError("the machine fell over")
            yield taken

    with monkeypatch.context() as patch:
        patch.setattr(detect_train, "box_steps", broken)
        with pytest.raises(RuntimeError, match="fell over"):
            fit(few, out, config, init=init)
    assert Run.open(out).checkpoints()[-1].name == "checkpoint-00000004.safetensors"
    with pytest.raises(FileExistsError, match="--resume"):
        fit(few, out, config, init=init)
    # The initial weights are asked for no more: this file does not exist.
    again = fit(few, out, BoxesConfig(), init="nowhere.safetensors", resume=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    logged = [
        {row["step"]: row["loss"] for row in Run(folder).metrics()}
        for folder in (out, tmp_path / "whole")
    ]
    assert logged[0] == logged[1]
    assert logged[0].keys() == {2, 4, 6, 8, 10, 12}


def test_a_run_begins_with_a_checkpoint_and_keeps_no_broken_one(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of NaN behind a loss that is a number, at the third step."""
    true, calls = detect_train.image_log_loss, iter(range(100))

    def spoiled(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = true(scores, labels)
        return loss + ((loss - loss).sqrt() if next(calls) == 2 else 0)

    monkeypatch.setattr(detect_train, "image_log_loss", spoiled)
    with pytest.raises(TrainingStoppedError, match=r"weights are not finite; lower --learn.lr; .*"):
        fit(few, tmp_path / "run", settings(epochs=4, checkpoint_every=3))
    run = Run.open(tmp_path / "run")
    assert [path.name for path in run.checkpoints()] == ["checkpoint-00000000.safetensors"]
    assert run.settings(BoxesConfig) == settings(epochs=4, checkpoint_every=3)
    with pytest.raises(ValueError, match=r"holds no Config .*of another command"):
        run.settings(Config)


def test_a_resumed_run_refuses_other_labels(few: Path, tmp_path: Path) -> None:
    fit(few, tmp_path / "run", settings(epochs=1, checkpoint_every=2))
    found = find_labels(few / "photos")
    less = LabelledImages(found.images[1:], found.categories)
    with pytest.raises(ValueError, match="changed since the run"):
        fit(few, tmp_path / "run", settings(), found=less, resume=True)


def test_the_trunk_stays_as_it_was(few: Path, tmp_path: Path) -> None:
    """Random ones too: the run's own seed says what they are."""
    config = settings(epochs=1, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(config.learn.seed)
        before = Detector(config.detector, tuple(sorted(HUES))).state_dict()
    after = fit(few, tmp_path / "run", config).state_dict()
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"scale", "fc6", "fc7", "classify", "localise"}


# Settings and draws.


@pytest.fixture(scope="module")
def photos(few: Path) -> list[Photo]:
    known = read_proposals(few / "proposals.npz")
    return read_photos(find_labels(few / "photos").images, known, settings())[0]


def learned(photos: list[Photo], out: Path, config: BoxesConfig) -> dict[str, torch.Tensor]:
    """Weights after a few steps from the same start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        detector = Detector(config.detector, tuple(sorted(HUES)))
    calibrate(detector, photos, config.learn)
    learn_boxes(detector, photos, Run(out), config.learn, quiet=True)
    return detector.state_dict()


BASE = settings(epochs=1, batch=4, regulariser=1.0, flips=False)  # 3 steps of 12 photos
CHANGES: dict[str, Any] = {
    "epochs": 2, "batch": 6, "lr": 1e-4, "weight_decay": 0.5, "regulariser": 0.0, "overlap": 0.05,
    "scales": (64,), "flips": True, "seed": 1,
}  # fmt: skip


def test_every_setting_of_learning_acts(photos: list[Photo], tmp_path: Path) -> None:
    base = learned(photos, tmp_path / "base", BASE)
    assert same_bits(base, learned(photos, tmp_path / "again", BASE))
    for name, value in CHANGES.items():
        other = replace(BASE, learn=replace(BASE.learn, **{name: value}))
        assert not same_bits(base, learned(photos, tmp_path / name, other)), name
    for name, value in (("dropout", 0.0), ("temperature", 5.0)):
        other = replace(BASE, detector=replace(BASE.detector, **{name: value}))
        assert not same_bits(base, learned(photos, tmp_path / name, other)), name


def test_what_fc6_sees_has_a_mean_square_of_one_unless_there_is_nothing(
    photos: list[Photo],
) -> None:
    torch.manual_seed(0)
    detector = Detector(BASE.detector, tuple(sorted(HUES)))
    calibrate(detector, photos, BASE.learn)
    assert 0 < float(detector.scale) < 100
    for parameter in detector.trunk.parameters():
        parameter.zero_()
    calibrate(detector, photos, BASE.learn)
    assert bool(detector.scale.isfinite())


def test_the_second_half_is_learned_at_a_tenth_of_the_rate(
    photos: list[Photo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors: list[float] = []
    true = loop.descend

    def watched(*args: Any, factor: float, **more: Any) -> None:
        factors.append(factor)
        true(*args, factor=factor, **more)

    monkeypatch.setattr(loop, "descend", watched)
    learned(photos, tmp_path, settings(epochs=1, batch=2))
    assert factors == [1.0, 1.0, 1.0, 0.1, 0.1, 0.1]


def test_boxes_are_mirrored_with_their_photo(
    photos: list[Photo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirrored photo teaches what a photo teaches that lies mirrored on the disk."""
    turned = []
    for photo in photos:
        x1, y1, x2, y2 = photo.proposals.unbind(-1)
        last = photo.size[1] - 1
        boxes = torch.stack([last - x2, y1, last - x1, y2], dim=-1)
        turned.append(replace(photo, pixels=photo.pixels.flip(-1), proposals=boxes))
    states = {}
    for name, given, flip in (("there", turned, False), ("here", photos, True)):
        rows = iter([[0, 5, 9], [3, 4, 11], [1, 2, 6], [7, 8, 10]])
        monkeypatch.setattr(
            detect_train,
            "draw",
            lambda *_, rows=rows, flip=flip, **__: (next(rows), [flip] * 3, SIZE),
        )
        torch.manual_seed(0)
        detector = Detector(BASE.detector, tuple(sorted(HUES)))
        learn_boxes(
            detector, given, Run(tmp_path / name), LearnConfig(epochs=1, batch=3), quiet=True
        )
        states[name] = detector.state_dict()
    for name, value in states["here"].items():
        torch.testing.assert_close(value, states["there"][name], atol=1e-4, rtol=1e-3)


def test_scales_and_flips_are_drawn_evenly_and_every_photo_in_turn() -> None:
    config = LearnConfig(batch=4, scales=(10, 20, 30), seed=3)
    drawn = [draw(step, config, count=12) for step in range(900)]
    counts = Counter(scale for _, _, scale in drawn)
    assert set(counts) == {10, 20, 30}
    assert all(abs(count - 300) < 60 for count in counts.values())
    flips = torch.tensor([flips for _, flips, _ in drawn]).float()
    assert flips.mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.06)
    for epoch in range(3):
        rows = [row for one in drawn[3 * epoch : 3 * epoch + 3] for row in one[0]]
        assert sorted(rows) == list(range(12))
    assert not any(any(draw(step, replace(config, flips=False), count=12)[1]) for step in range(50))
    assert draw(5, config, count=12) == drawn[5]
    other = [draw(step, replace(config, seed=4), count=12) for step in range(20)]
    assert [one[1:] for one in other] != [one[1:] for one in drawn[:20]]
    assert [one[0] for one in other] != [one[0] for one in drawn[:20]]


def test_a_run_knows_its_photos_labels_and_proposals_again(photos: list[Photo]) -> None:
    first = photos[0]
    others = {
        "name": replace(first, image=replace(first.image, name="x")),
        "labels": replace(first, image=replace(first.image, labels=frozenset({"sky", "ruby"}))),
        "unsure": replace(first, image=replace(first.image, unsure=frozenset({"sky"}))),
        "proposals": replace(first, proposals=first.proposals + 1),
    }
    digests = {_digest([photo, *photos[1:]]) for photo in (first, *others.values())}
    assert len(digests) == 5
    assert _digest(photos) == _digest(list(photos))

"""Where a training starts and how it fits folder and machine, with nothing but the package."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from surefeat.learn.config import Config, Preset, default_init, fit_to, preset
from surefeat.learn.loop import stop_requests
from surefeat.learn.pretrain import pretrain
from surefeat.learn.runs import Run
from surefeat.model.config import SHIPPED, ModelConfig, model_folder
from surefeat.model.network import DenseFeatures
from surefeat.show.report import write_report
from tiny import images, same_bits, tiny


@pytest.mark.parametrize(
    ("name", "init"),
    [("ours", "shipped"), ("quick", "shipped"), ("one-way", "shipped"), ("paper", "imagenet"),
     ("small", "none")],
)  # fmt: skip
def test_a_training_starts_from_what_ships_unless_all_layers_learn(name: Preset, init: str) -> None:
    assert default_init(preset(name)) == init


def test_other_trunks_start_from_imagenet() -> None:
    config = replace(Config(), model=ModelConfig(trunk="timm:resnet18"))
    assert default_init(config) == "imagenet"


@pytest.fixture(scope="module")
def shipped() -> DenseFeatures:
    return DenseFeatures.from_pretrained(device="cpu")


@pytest.mark.parametrize("init", ["shipped", "resnet50", "folder", "file"])
def test_the_shipped_model_can_be_started_from_by_any_of_its_names(
    init: str, shipped: DenseFeatures
) -> None:
    folder = model_folder(None)
    given = {"folder": str(folder), "file": str(folder / "model.safetensors")}.get(init, init)
    model = DenseFeatures.create(ModelConfig(), init=given)
    assert model.config.stride_in_1x1 == shipped.config.stride_in_1x1
    assert same_bits(model.state_dict(), shipped.state_dict())


def test_another_head_starts_anew_on_the_shipped_trunk(shipped: DenseFeatures) -> None:
    model = DenseFeatures.create(ModelConfig(channels=16), init="shipped")
    assert model.head.last.weight.shape[0] == 17
    assert same_bits(model.trunk.state_dict(), shipped.trunk.state_dict())


def test_a_trunk_without_a_shipped_model_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match=r"no model with small ships .* --init imagenet"):
        DenseFeatures.create(ModelConfig(trunk="small"), init="shipped")
    with pytest.raises(FileNotFoundError, match="a file, a model, shipped, imagenet or none"):
        DenseFeatures.create(ModelConfig(), init="nowhere.safetensors")
    assert "resnet50" in SHIPPED


def test_a_cpu_gets_the_quick_recipe_and_keeps_what_was_asked_for() -> None:
    asked = replace(Config(), warp=replace(Config().warp, rotation=40.0))
    fitted = fit_to(asked, photos=200, cpu=True)
    quick = preset("quick")
    assert fitted.warp.rotation == 40.0
    assert replace(fitted.warp, rotation=quick.warp.rotation) == quick.warp
    assert (fitted.train, fitted.loss) == (quick.train, quick.loss)
    everything = replace(Config(), train=replace(Config().train, trained="all"))
    assert fit_to(everything, photos=200, cpu=True) == everything


@pytest.mark.parametrize(("photos", "steps"), [(8, 250), (400, 250), (600, 375), (5000, 500)])
def test_steps_follow_the_number_of_photos(photos: int, steps: int) -> None:
    fitted = fit_to(Config(), photos=photos, cpu=False)
    assert fitted.train.steps == steps
    assert replace(fitted, train=replace(fitted.train, steps=500), warp=Config().warp) == Config()
    assert fitted.warp.rotation > Config().warp.rotation
    assert fitted.warp.mirrored == Config().warp.mirrored
    small = replace(Config(), model=replace(Config().model, trunk="small"))
    assert fit_to(small, photos=photos, cpu=False).warp == small.warp
    longer = replace(Config(), train=replace(Config().train, steps=900))
    assert fit_to(longer, photos=photos, cpu=False).train == longer.train


@pytest.mark.usefixtures("undrawn")
@pytest.mark.usefixtures("undrawn")
def test_a_run_tells_what_it_was_like_before(tmp_path: Path) -> None:
    """The check of the initial model, matches across photos, and staying in place beside it."""
    done = pretrain(
        images(tmp_path / "p", count=22), out=tmp_path / "run", config=tiny(steps=4), quiet=True
    )
    before = json.loads((done.folder / "before.json").read_text())
    assert before["init"] == "none"
    assert done.check is not None
    after = done.check.to_dict()
    shipped = {key for key in before["self_check"] if key.startswith("shipped@")}
    assert before["self_check"].keys() == after.keys() | shipped
    # Nothing learns where points stay: the same views, the same share.
    for key in (k for k in after if k.startswith("same_place@")):
        assert before["self_check"][key] == after[key]
    assert 0 < after["same_place@0.1"] < 1
    page = write_report(done.folder).read_text()
    assert "every point left in its place" in page
    assert "before (--init none)" in page
    assert len(shipped) == 3
    share = f"{100 * before['self_check']['shipped@0.1']:.1f}"
    assert share in page.split("the model that ships")[1]
    assert "the lower layers alone, before" in page
    assert "How far the network trusts" in page
    untouched = pretrain(
        images(tmp_path / "q", count=22), out=tmp_path / "none", config=tiny(steps=0), quiet=True
    )
    assert untouched.check is not None
    first = json.loads((untouched.folder / "before.json").read_text())["self_check"]
    assert first["accuracy@0.1"] == untouched.check.to_dict()["accuracy@0.1"]
    # Of a sigma that was never let go there is nothing to show.
    assert "How far the network trusts" not in write_report(untouched.folder).read_text()


def test_a_stop_before_the_first_step_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    source, out = images(tmp_path / "p", count=22), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("surefeat.learn.pretrain.self_check", stopped)
        with pytest.raises(KeyboardInterrupt, match=r"^stopped; --resume goes on$"):
            pretrain(source, out=out, config=tiny(steps=2), quiet=True)
    assert pretrain(source, out=out, resume=True, quiet=True).progress.step == 2


def test_an_unfinished_run_is_a_model_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = pretrain(images(tmp_path / "p"), out=tmp_path / "run", config=tiny(), quiet=True)
    for file in (done.folder / "model").iterdir():
        file.unlink()
    (done.folder / "model").rmdir()
    model = DenseFeatures.from_pretrained(done.folder, device="cpu")
    assert same_bits(model.state_dict(), done.model.state_dict())
    assert "checkpoint-00000012" in caplog.text
    newest = Run(done.folder).checkpoints()[-1]
    newest.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="resume the run, or pass another"):
        DenseFeatures.from_pretrained(done.folder, device="cpu")


def interrupted(times: int) -> None:
    """A step that would take half a minute, with so many Ctrl-C in it."""
    with stop_requests(Run(Path("run"))) as asked:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        until = time.monotonic() + 30
        while time.monotonic() < until:
            time.sleep(0.01)


def test_a_long_step_is_left_soon_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefeat.learn.loop._PATIENCE", 0.2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="within a step"):
        interrupted(1)
    # The timer is off again, and the handlers are what they were.
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_step_at_once() -> None:
    with pytest.raises(KeyboardInterrupt, match="--resume"):
        interrupted(2)


def test_the_first_step_says_how_long_a_cpu_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("surefeat.learn.loop._LONG", 0.0)
    source = images(tmp_path / "p")
    pretrain(source, out=tmp_path / "run", config=tiny(), quiet=True, device="cpu")
    assert "a step takes" in caplog.text
    assert "fewer steps are sooner done" in caplog.text  # boxes have no --steps
    caplog.clear()
    monkeypatch.setattr("surefeat.learn.loop._LONG", 10_000.0)
    pretrain(source, out=tmp_path / "soon", config=tiny(), quiet=True, device="cpu")
    assert "a step takes" not in caplog.text

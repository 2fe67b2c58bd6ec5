"""The command line: quick help, one-line errors with exit code 2, JSON for scripts."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sets
import surefeat
import tiny
from surefeat.cli import main as cli
from surefeat.cli.main import main
from surefeat.cli.output import say
from surefeat.data.drawn import write_folder
from surefeat.learn import pretrain as pretraining
from surefeat.learn.config import Config, preset
from surefeat.match.points import match_points
from surefeat.model.config import ModelConfig
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures
from surefeat.show import matches as match_page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    DenseFeatures(
        ModelConfig(trunk="small", head="linear", channels=8, longest_side=64)
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_folder(folder, count=10, size=64, seed=0)
    return folder


def _images(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.png"))


def test_help_does_not_import_torch() -> None:
    """In one process: what one help imported would still be there after the next."""
    code = (
        "import sys\nfrom surefeat.cli.main import main\n"
        "for command in ([], ['pretrain'], ['match'], ['evaluate'], ['data']):\n"
        "    try: main([*command, '--help'])\n"
        "    except SystemExit: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("usage: surefeat") == 5
    assert done.stderr.split() == ["False"] * 5


def test_a_preset_sets_the_defaults_that_help_shows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pretrain", "--preset", "paper", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: adagrad)" in text


def test_a_preset_is_taken_however_it_is_spelled_and_a_wrong_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[tuple[str, Config]] = []
    monkeypatch.setattr(cli.Pretrain, "run", lambda self: taken.append((self.preset, self.config)))
    start = ["pretrain", "photos", "--out", "run"]
    for words in (["--preset", "paper"], ["--preset=paper"], ["--preset=ours", "--preset=paper"]):
        main([*start, *words])
    assert taken == [("paper", preset("paper"))] * 3
    main([*start, "--preset=small", "--train.steps", "7"])
    assert taken[-1][1].train == replace(preset("small").train, steps=7)
    for words in (["--preset=pap"], ["--preset", "pap"], ["--pre", "paper"], ["--preset="]):
        with pytest.raises(SystemExit) as end:
            main([*start, *words])
        assert end.value.code == 2
    assert len(taken) == 4
    assert "--preset cannot be 'pap'; choose auto, ours, quick" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_pretrain_extract_evaluate_and_report_work_together(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    main(
        f"pretrain {photos} --out {run} --preset small --init none --device cpu --json "
        "--train.steps 3 --train.batch 2 --warp.size 48 --loss.points 32 --data.side 64".split()
    )
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 3
    assert Path(result["report"]).is_file()
    main(f"evaluate self {photos} --model {run} --count 4 --device cpu --json".split())
    assert 0 <= json.loads(capsys.readouterr().out)["accuracy@0.1"] <= 1
    main(f"extract {photos} --model {run} --out {tmp_path / 'f'} --device cpu --json".split())
    assert json.loads(capsys.readouterr().out)["written"] == 10
    main(f"extract {photos} --model {run} --out {tmp_path / 'f'} --device cpu --json".split())
    again = json.loads(capsys.readouterr().out)
    assert (again["written"], again["already_there"]) == (0, 10)
    files = sorted((tmp_path / "f").rglob("*.safetensors"))
    assert Features.load(files[0]).frame.original == (64, 64)


def test_match_writes_picture_page_and_json(
    photos: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _images(photos)[:2]
    main(f"match {first} {second} --out {tmp_path} --model {model} --count 9 --json".split())
    shown = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "matches.json").read_text())
    assert shown["points1"] == stored["points1"]
    assert all(-0.5 <= x <= 63.5 and -0.5 <= y <= 63.5 for x, y in stored["points1"])
    page = (tmp_path / "index.html").read_text()
    assert "A warped onto B" not in page.split("<img")[0]
    assert page.count("data:image/") >= 3
    assert (tmp_path / "matches.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("undrawn")
def test_given_points_are_all_matched(
    photos: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _images(photos)[:2]
    command = f"match {first} {second} --out {tmp_path} --model {model} --json --points"
    for words in ("3 4 50 60", "3,4 50,60"):
        main([*command.split(), *words.split()])
        assert json.loads(capsys.readouterr().out)["points0"] == [[3, 4], [50, 60]]


def _fails(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("surefeat: ")
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("second", "message"),
    [("missing.png", "missing.png"), ("text.jpg", "text.jpg"), ("folder.jpg", "folder.jpg")],
)
def test_match_refuses_bad_photos_and_writes_nothing(
    second: str,
    message: str,
    photos: Path,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.jpg").write_text("no photo")
    (tmp_path / "folder.jpg").mkdir()
    out = tmp_path / "out"
    first = _images(photos)[0]
    said = _fails(f"match {first} {tmp_path / second} --out {out} --model {model}", capsys)
    assert message in said
    assert not out.exists()


def test_points_outside_and_wrong_models_are_one_line_errors(
    photos: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _images(photos)[:2]
    pair, out = f"{first} {second}", tmp_path / "out"
    said = _fails(f"match {pair} --out {out} --model {model} --points 500 4", capsys)
    assert "500" in said
    assert "no model at" in _fails(f"match {pair} --out {out} --model {photos}", capsys)
    assert not out.exists()


@pytest.mark.usefixtures("undrawn")
def test_a_large_photo_is_drawn_small_and_matched_in_its_own_pixels(
    photos: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    fields: list[tuple[int, ...]] = []
    plain = match_page.match_dense

    def watched(*features: Features, voting: bool) -> object:
        found = plain(*features, voting=voting)
        fields.append(tuple(found.points1.shape))
        return found

    monkeypatch.setattr(match_page, "match_dense", watched)
    first, second = _images(photos)[:2]
    Image.open(second).resize((1000, 500)).save(tmp_path / "large.jpg")
    command = f"match {first} {tmp_path / 'large.jpg'} --model {model} --regions 20"
    main([*command.split(), "--out", str(tmp_path / "out"), "--no-mutual"])
    assert max(fields[0]) <= 512
    found = json.loads((tmp_path / "out" / "matches.json").read_text())
    assert found["size1"] == [500, 1000]
    assert 520 < max(x for x, _ in found["points1"]) < 1000
    assert max(box[2] for box in found["regions"]["boxes1"]) > 600


@pytest.mark.usefixtures("undrawn")
def test_votes_and_the_slower_way_reach_the_matches(
    photos: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _images(photos)[:2]
    points = torch.tensor([[20.0, 30.0], [40.0, 25.0], [11.0, 50.0]])
    given = " ".join(str(value) for value in points.flatten().tolist())
    command = f"match {first} {second} --model {model} --out {tmp_path} --json"
    main([*f"{command} --side 48 --slower --points {given}".split()])
    found = json.loads(capsys.readouterr().out)
    assert "48 and 67 px, mirrored too" in (tmp_path / "index.html").read_text()
    network = DenseFeatures.from_pretrained(model)
    features = network.extract([first, second], longest_side=48, slower=True)
    expected = match_points(*features, points).points1
    assert torch.allclose(torch.tensor(found["points1"]), expected, atol=1e-3)
    alone = match_points(*features, points, voting=False).points1
    assert not torch.allclose(expected, alone, atol=1e-3)


def test_every_option_of_evaluate_reaches_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}

    def watched(*given: object, **settings: object) -> None:
        asked.update(settings, given=given)
        raise ValueError("seen")

    monkeypatch.setattr("surefeat.measure.evaluate.evaluate_rows", watched)
    command = (
        "evaluate pairs list.csv --rows res4c --model run --init a.pth --out results --split val "
        "--images photos --proposals p.sqlite --boxes 7 --seed 3 --measures nearest regions "
        "--shifted voting --side 96 --inputs 64 128 --pairs 5 --device cpu --json"
    )
    assert "seen" in _fails(command, capsys)
    assert asked == {
        "given": ("pairs", Path("list.csv")), "rows": ["res4c"], "model": "run",
        "init": ("a.pth",), "out": Path("results"), "split": "val", "images": Path("photos"),
        "proposals": Path("p.sqlite"), "boxes": 7, "seed": 3,
        "measures": ("nearest", "regions"), "shifted": ("voting",), "side": 96,
        "inputs": (64, 128), "pairs": 5, "device": "cpu", "quiet": True,
    }  # fmt: skip


def test_every_option_of_find_reaches_the_search(
    monkeypatch: pytest.MonkeyPatch, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def watched(image: Path, point: object, index: object, **settings: object) -> None:
        settings.pop("model")
        asked.extend((image, point, index, settings))
        raise ValueError("seen")

    monkeypatch.setattr("surefeat.index.find.find_part", watched)
    opened = staticmethod(lambda folder, weights: (folder, len(weights)))
    monkeypatch.setattr("surefeat.index.search.PartIndex.open", opened)
    command = f"find a.png --point 3,4 --index parts --count 7 --no-verify --model {model} --json"
    assert "seen" in _fails(command, capsys)
    settings = {"count": 7, "verify": False, "quiet": True}
    assert asked == [Path("a.png"), (3, 4), (Path("parts"), 64), settings]


@pytest.mark.parametrize(("count", "shown"), [(3, [0, 3, 6]), (10, [*range(10)]), (1, [0])])
def test_pairs_that_are_shown_are_spread_over_the_list(
    count: int, shown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[object] = []
    ten = SimpleNamespace(pairs=range(10))
    monkeypatch.setattr("surefeat.data.benchmarks.load_benchmark", lambda *_, **__: ten)
    monkeypatch.setattr("surefeat.show.results.keypoint_pairs", drawn.extend)
    monkeypatch.setattr("surefeat.show.style.write_figure", lambda *_: None)
    main(["data", "show", "pairs", "list.csv", "--count", str(count)])
    assert drawn == shown


def test_other_files_where_a_model_is_wanted_are_one_line_errors(
    photos: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = _images(photos)[:2]
    weights = (Path(model) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    match = f"match {first} {second} --out {tmp_path / 'out'} --model"
    for text in ("", "[]", '{"architectures": ["Bert"]}', '{"config": {"x": 1}, "sha256": ""}'):
        (tmp_path / "model.json").write_text(text)
        assert "is not what save_pretrained writes" in _fails(f"{match} {tmp_path}", capsys)
    said = _fails(f"{match} {model} --device tpu", capsys)
    assert "unknown device 'tpu'; choose cuda" in said
    assert "there is no cuda:99 here" in _fails(f"{match} {model} --device cuda:99", capsys)
    assert not (tmp_path / "out").exists()
    (tmp_path / "bad.safetensors").write_text("no weights")
    start = f"pretrain {photos} --out {tmp_path / 'run'} --preset small --init"
    assert "no whole safetensors file" in _fails(f"{start} {tmp_path / 'bad.safetensors'}", capsys)
    assert not (tmp_path / "run").exists()  # once a folder with settings alone
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    for out in ("new/run", "mine"):
        _fails(f"pretrain {photos} --out {tmp_path / out} --init nonsense", capsys)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_resumed_run_keeps_its_settings_and_takes_more_steps(
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "_report", lambda folder: None)  # drawing takes most of the time
    same = (
        f"pretrain {photos} --out {tmp_path / 'run'} --preset small --init none --device cpu "
        "--json --warp.size 48 --loss.points 32 --data.side 64"
    )
    main(f"{same} --train.batch 2 --steps 2".split())
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    said = _fails(f"{same} --train.batch 4 --steps 3 --resume", capsys)
    assert "keeps its own settings: --train.batch is 2 there, not 4; leave it out" in said
    other = same.replace("--preset small", "--preset paper")
    said = _fails(f"{other} --train.batch 2 --steps 3 --resume", capsys)  # once ignored
    assert "keeps its own settings, not those of paper: --model.trunk is small there, not" in said
    assert "leave --preset out, or start a new run with another --out" in said
    # Its own settings may be repeated, or left out.
    main(f"{same} --train.batch 2 --steps 3 --resume".split())
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    main(f"pretrain {photos} --out {tmp_path / 'run'} --json --device cpu --resume".split())
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    train = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
    assert (train["steps"], train["batch"]) == (3, 2)


def test_ctrl_c_before_the_first_step_is_said(
    photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretraining, "find_images", interrupted)
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(f"pretrain {photos} --out {run} --init none --preset small".split())
    assert ended.value.code == 130
    assert capsys.readouterr().err == "surefeat: stopped\n"
    assert not run.exists()


def test_ctrl_c_while_the_program_loads_is_said() -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'surefeat.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "runpy.run_module('surefeat', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "surefeat: stopped\n")


def test_ctrl_c_does_not_wait_for_a_thread_that_decodes() -> None:
    code = (
        "import sys, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import surefeat.cli.main as cli\n"
        "from surefeat.__main__ import main\n"
        "def stopped():\n"
        "    ThreadPoolExecutor(1).submit(time.sleep, 60)\n"
        "    print('written')\n"
        "    sys.exit(130)\n"
        "cli.main = stopped\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (130, b"written\n")


def test_pretrain_on_nothing_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    run = tmp_path / "run"
    said = _fails(f"pretrain {tmp_path / 'empty'} --out {run} --init none --preset small", capsys)
    assert "no images under" in said
    assert not run.exists()


def test_one_pixel_and_panorama_photos_are_matched(
    photos: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    Image.new("RGB", (1, 1), "red").save(tmp_path / "dot.png")
    Image.new("RGB", (20_000, 40), "blue").save(tmp_path / "wide.png")
    for photo in ("dot.png", "wide.png"):
        command = f"match {_images(photos)[0]} {tmp_path / photo} --model {model} --json"
        main([*command.split(), "--out", str(tmp_path / "out"), "--points", "5", "5"])
        found = json.loads(capsys.readouterr().out)
        assert len(found["points1"]) == 1


def test_what_is_not_defined_is_null_for_a_script_and_said_to_a_person(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say({"auroc": math.nan, "points": 3}, to_script=True)
    assert json.loads(capsys.readouterr().out) == {"auroc": None, "points": 3}
    say({"auroc": math.nan, "points": 3}, to_script=False)
    assert capsys.readouterr().out.split() == ["auroc", "undefined", "points", "3"]


def test_numbered_entries_are_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    say({"right_of": {5: 0.25, 7: None}, "skipped": ("a.jpg", "b.jpg")}, to_script=False)
    words = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert words == ["5 0.250", "7 none", "skipped a.jpg, b.jpg"]


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"surefeat {surefeat.__version__}\n"


def test_usage_is_not_broken_in_the_middle_of_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: surefeat [-h] COMMAND\n")


def test_surefeat_alone_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert not end.value.code
    said = capsys.readouterr().out
    assert all(command in said for command in ("pretrain", "match", "keypoints", "evaluate"))


def test_a_run_that_was_stopped_is_a_model_for_every_command(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has checkpoints and no model folder yet."""
    run = tiny.learn(tiny.images(tmp_path / "drawn"), tmp_path / "run", tiny.tiny(steps=2)).folder
    shutil.rmtree(run / "model")
    (run / "summary.json").unlink()
    first, second = _images(photos)[:2]
    listed = sets.write_pairs(tmp_path / "pairs", most=1)
    for command in (
        f"match {first} {second} --count 4",
        f"evaluate pairs {listed} --measures nearest --shifted nearest",
        f"extract {first}",
        f"index {photos} --budget 4",
    ):
        out = tmp_path / command.split()[0]
        main(f"{command} --out {out} --model {run} --device cpu".split())
        assert capsys.readouterr().out.strip()
        assert any(out.iterdir())

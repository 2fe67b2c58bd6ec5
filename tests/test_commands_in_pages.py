"""Every command that README and the pages show is taken by the command line, and runs."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
import tyro
from PIL import Image
from torchvision.models import resnet50, vgg16

import sets
import tiny
from commands import all_commands
from surefeat.cli import main as cli
from surefeat.cli.main import _commands, main
from surefeat.data.drawn import write_folder
from surefeat.data.keypoints import read_coco, write_coco, write_keypoints
from surefeat.exporting import Exported
from surefeat.keypoints.detector import KeypointDetector
from surefeat.model.network import DenseFeatures

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ("CHANGELOG.md", "log.md")
"""Of what was, with commands that are no more."""
PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if page.name not in RECORDS
]
NAMES = sorted(all_commands(), key=len, reverse=True)
GROUPED = [name for name in NAMES if " " in name]


def shown_in(text: str) -> list[str]:
    """Commands in code blocks and between backquotes, without prompt, settings and remarks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    calls = [re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*surefeat (.+)", line) for line in lines]
    found = [call[1].split("  #")[0].strip() for call in calls if call]
    # A sentence that goes on says `evaluate self photos/`, without the program's name.
    return found + [line for line in lines if line.startswith(tuple(f"{n} " for n in GROUPED))]


def is_mention(command: str) -> bool:
    """A command's name alone or with an option's, or a group of them, as a sentence has it."""
    words = [word for word in command.split() if not word.startswith("--")]
    return any(name.split()[: len(words)] == words for name in NAMES) or words[0].isupper()


def parse(command: str) -> Any:
    words = shlex.split(command)
    return tyro.cli(_commands(words), args=words, prog="surefeat")


SHOWN = sorted({(c, page.name) for page in PAGES for c in shown_in(page.read_text())})
WHOLE = [
    pytest.param(command, id=f"{page}: {command}"[:90])
    for command, page in SHOWN
    if not is_mention(command) and not {"--version", "--help"} & set(command.split())
]


def test_the_pages_show_commands() -> None:
    """Guards the tests below against reading nothing."""
    assert len(WHOLE) > 30
    told = {name for name in NAMES if any(f"{c} ".startswith(f"{name} ") for c, _ in SHOWN)}
    assert set(NAMES) == told


@pytest.mark.parametrize("command", WHOLE)
def test_a_command_in_a_page_is_taken(command: str) -> None:
    try:
        asked = parse(command)
        assert getattr(asked, "what", asked).run
    except SystemExit:
        pytest.fail(f"surefeat {command}: is no command")


@pytest.mark.parametrize("command", [c for c, _ in SHOWN if is_mention(c) and "--" in c])
def test_an_option_in_a_sentence_is_one_of_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()
    with pytest.raises(SystemExit):
        main([*(w for w in words if w[0] != "-"), "--help"])
    said = capsys.readouterr().out
    assert [word for word in words if word[0] == "-" and word not in said] == []


def test_a_wrong_command_would_be_noticed() -> None:
    assert shown_in("`surefeat match a.jpg b.jpg --sides 3`") == ["match a.jpg b.jpg --sides 3"]
    with pytest.raises(SystemExit):
        parse("match a.jpg b.jpg --sides 3")
    assert shown_in("```\n$ OMP_NUM_THREADS=1 surefeat report RUN  # anew\n```") == ["report RUN"]


# Every command of every page, run page by page, in its order, where what it asks for is prepared.

_FIT = "--size 64 --hidden 8 --least-steps 2 --epochs 1 --least-views 4"
_PAIRS = "--measures nearest voting --shifted nearest"

QUICKLY = {
    "pretrain": "--preset small --init none --steps 2 --train.batch 2 --warp.size 48"
    " --loss.points 32 --data.side 64",
    "extract": "--batch 4",
    "match": "--count 9",
    "boxes fit": "--init none --proposals-file proposals.npz --detector.trunk small --detector.tap"
    " conv2 --detector.hidden 16 --detector.pooled 2 --learn.epochs 1 --learn.scales 96",
    "boxes predict": "--proposals-file proposals.npz --select.scales 96 --sheet 4",
    "keypoints fit": _FIT,
    "keypoints predict": "--no-pictures",
    "keypoints convert": "--categories bird",
    "evaluate self": "--count 4",
    "evaluate pairs": _PAIRS,
    "evaluate pf-pascal": f"--pairs 2 {_PAIRS}",
    "evaluate pf-willow": f"--pairs 2 {_PAIRS}",
    "evaluate spair": f"--pairs 1 {_PAIRS}",
    "evaluate pascal3d": "--classes kite --rounds 1 --seeds 0 --size 48 --views 2 --least-views 4"
    " --epochs 1 --least-steps 2 --batch 4 --hidden 8 --objects 4",
    "find": "--point 20,20 --count 3",
    "boxes propose": "--proposals.draws 100 --proposals.count 20",
    "data synthetic": "--count 16 --size 64",
    "data show": "--count 2",
}
"""What makes a command quick; options that come twice count as the last one says. Others run as
they are."""

SERVES = "demo"
"""Stays until it is stopped."""

QUICKLY_HERE = {
    "mean-flow": "--pairs 1 --inputs 48 --measures mean-flow",
    "match-slower": "--pairs 1 --measures own --shifted",
    "--rows ours resnet50-hc": "--init {weights} --inputs 64",
    "--rows resnet50-hc": "--init {weights}",
    "--fit detector": "--sure 0.1 --no-pictures",
}
"""What else makes a command quick that has these words, after what its name has."""

OUT_OF_REACH = {
    "data/weights/": "a peer's training, or rows of one: tests/peers",
    "hyperpixel-flow": "ImageNet's weights of a whole network: tests/peers",
    "vgg16+phm": "proposals and ImageNet's weights: tests/peers",
    "peers fit gcnn": "ImageNet's weights: tests/peers",
    "gcnn=runs/gcnn": "a peer that was trained: tests/peers",
    "peers fit hog": "PASCAL VOC: tests/peers",
    "hog-nam=runs/hog": "a peer that was trained: tests/peers",
    "peers fit landmarks": "PASCAL VOC: tests/peers",
    "landmarks-64=runs": "a peer that was trained: tests/peers",
    "--engine ray": "a cluster, 15 seconds: tests/index/test_ray_engine.py",
    "--paper": "minutes: the paper's head is large, and nothing makes it smaller",
}
"""What stands in commands that cannot run without network or in seconds, and what they need."""


def whole_commands(page: Path) -> list[str]:
    """The commands of a page, in its order."""
    shown = [c for c in shown_in(page.read_text()) if not is_mention(c)]
    return [c for c in dict.fromkeys(shown) if not {"--version", "--help"} & set(c.split())]


def name_of(command: str) -> str:
    return next(name for name in NAMES if f"{command} ".startswith(f"{name} "))


def must_run(command: str) -> bool:
    absent = any(words in command for words in OUT_OF_REACH)
    return not absent


def first_shown() -> dict[Path, list[str]]:
    """Page -> the commands to run for it; those that write nowhere in particular run once."""
    pages: dict[Path, list[str]] = {}
    seen: set[str] = set()
    for page in PAGES:
        commands = [command for command in whole_commands(page) if must_run(command)]
        new = [c for c in commands if "--out" in c or c.rstrip("/") not in seen]
        seen |= {command.rstrip("/") for command in commands}
        pages |= {page: new} if new else {}
    return pages


RUN = first_shown()


def test_what_is_not_run_is_still_shown() -> None:
    every = [command for page in PAGES for command in whole_commands(page)]
    assert all(any(w in c for c in every) for w in (*OUT_OF_REACH, *QUICKLY_HERE))
    assert QUICKLY.keys() <= {name_of(command) for command in every}
    assert len(RUN) > 6


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' commands ask for: photos, pairs, labels, benchmarks, a run, a detector."""
    root = tmp_path_factory.mktemp("pages")
    write_folder(root / "photos", count=10, size=64, seed=0)
    birds = read_coco(root / "photos" / "keypoints.json").only(["bird"])
    for bird, name in zip(birds.objects, "ab", strict=True):
        shutil.copy(root / "photos" / bird.name, root / f"{name}.jpg")
    write_keypoints(root / "photos" / "CollectedData_Ann.csv", birds, "deeplabcut")
    beside = [replace(bird, name=f"photos/{bird.name}") for bird in birds.objects]
    write_coco(root / "parts.json", replace(birds, objects=tuple(beside)))
    shutil.copy(root / "parts.json", root / "labels.json")
    sets.write_pairs(root, most=1)
    small = DenseFeatures.from_pretrained(sets.write_model(root / "small"), device="cpu")
    small.reliability = tiny.a_reliability()
    small.cohort = tiny.a_cohort(small.extract(root / "a.jpg")[0])
    small.save_pretrained(root / "small")
    shutil.copytree(root / "small", root / "run" / "model")
    KeypointDetector.fit(small, birds, config=sets.QUICK).save(root / "parts")
    tiny.learn(tiny.images(root / "drawn"), root / "runs" / "mine", tiny.tiny(steps=2))
    for name in ("runs/plain", "RUN"):
        shutil.copytree(root / "runs" / "mine", root / name)
    Image.open(root / "b.jpg").resize((144, 108)).save(root / "large.jpg")
    (root / "VOC-SHARDS").mkdir()
    with tarfile.open(root / "VOC-SHARDS" / "0.tar", "w") as shard:
        for path in sorted((root / "photos").glob("*.png")):
            shard.add(path, path.name)
    names = [path.name for path in sorted((root / "photos").glob("*.png"))]
    (root / "LIST").write_text("\n".join(names[:8]))
    sets.make(root / "scenes", count=2, boxes=12)
    data = root / "data"
    sets.willow(data / "pf-willow")
    sets.spair(data / "spair")
    sets.write_benchmark(data / "pascal3d")
    shutil.copytree(data / "pascal3d", data / "voc")
    # As many as the public list has, or it is taken for a broken copy.
    rows = [f"{sets.BOTH},2,1;5,1;6,30;9,20;8"] * 299
    sets.pascal(data / "pf-pascal", *rows, header=sets.HEADER)
    lists = data / "pf-pascal" / "image_pairs"
    (lists / "list.csv").rename(lists / "test_pairs.csv")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Files in the place of ImageNet's weights, which are all alike here."""
    folder = tmp_path_factory.mktemp("weights")
    for build in (resnet50, vgg16):
        with torch.device("meta"):
            named = build().state_dict()
        last = ("fc.", "classifier.")
        kept = {name: torch.full_like(values, 0.02, device="cpu") for name, values in named.items()
                if not name.startswith(last)}  # fmt: skip
        torch.save(kept, folder / f"{build.__name__}.pth")
    return f"{folder / 'resnet50.pth'} {folder / 'vgg16.pth'}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def only_this_machine(socket: Any, address: Any) -> None:
    """In the place of a socket's `connect`."""
    if address[0] != "127.0.0.1":
        pytest.fail(f"asks the network: {address}")
    CONNECT(socket, address)


CONNECT = socket.socket.connect


def ask_and_stop(page: Any) -> None:
    """In the place of waiting for Ctrl-C: the page is asked for once, then Ctrl-C comes."""
    assert b"surefeat" in urlopen(page.local_url).read()
    page.close(verbose=False)
    raise KeyboardInterrupt


def export_detector_of_a_page(detector: KeypointDetector, path: Path) -> Exported:
    """In the place of seconds of torch.onnx: tests/cli/test_keypoint_cli.py runs the command."""
    assert detector.categories
    path.write_bytes(b"onnx")
    return Exported(path, "onnx", 4, 0.0)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_s_commands_run_in_their_order_without_network(
    page: Path,
    prepared: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    if page.name == "boxes.md":  # its photos lie in a folder per category
        shutil.rmtree(tmp_path / "photos")
        shutil.copytree(prepared / "scenes" / "photos", tmp_path / "photos")
        shutil.copy(prepared / "scenes" / "proposals.npz", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", only_this_machine)
    monkeypatch.setattr(cli, "_report", lambda folder: None)  # drawing takes most of the time
    monkeypatch.setattr("surefeat.exporting.export_detector", export_detector_of_a_page)
    monkeypatch.setattr("surefeat.show.page._DPI", 40)
    quick = partial(replace, sets.QUICK)  # --fit has no options for the detector's size
    monkeypatch.setattr("surefeat.keypoints.config.KeypointConfig", quick)
    load = DenseFeatures.from_pretrained
    monkeypatch.setattr(
        DenseFeatures,
        "from_pretrained",
        lambda source=None, **more: load(source or prepared / "small", **more),
    )
    for command in RUN[page]:
        name = name_of(command)
        for folder in re.findall(r"--out (\S+)", command):
            if name in ("pretrain", "boxes fit", "keypoints fit"):
                shutil.rmtree(folder, ignore_errors=True)  # prepared for other pages
        quickly = [more for words, more in QUICKLY_HERE.items() if words in command]
        if any("{weights}" in more for more in quickly):
            quickly = [m.format(weights=request.getfixturevalue("weights")) for m in quickly]
        words = shlex.split(" ".join([command, QUICKLY.get(name, ""), *quickly]))
        if name == SERVES:
            blocks = pytest.importorskip("gradio", reason="needs the demo extra").Blocks
            monkeypatch.setattr(blocks, "block_thread", ask_and_stop)
            with pytest.raises(SystemExit):
                main([*words, "--port", str(free_port())])
        else:
            main(words)
        assert capsys.readouterr().out.strip(), command


def test_a_new_page_is_run_too(tmp_path: Path) -> None:
    """Whatever command a page shows is run, but for those that are listed."""
    (tmp_path / "new.md").write_text(
        "`surefeat match a.jpg b.jpg`, then `surefeat relate x/`,"
        " `surefeat extract x/ --engine ray`."
    )
    commands = whole_commands(tmp_path / "new.md")
    assert [must_run(command) for command in commands] == [True, True, False]

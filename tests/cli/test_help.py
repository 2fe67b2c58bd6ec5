"""Help of every command: few options first, all of them somewhere, in words a user knows."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from commands import all_commands
from surefeat.cli.help import FIRST, rewritten
from surefeat.cli.main import main

COMMANDS = list(all_commands())


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert not end.value.code
    return capsys.readouterr().out


def options(text: str) -> dict[str, list[str]]:
    """The options that each heading lists."""
    by_heading: dict[str, list[str]] = {}
    for line in text.splitlines():
        if re.match(r"\w.*:$", line):
            by_heading[line.rstrip(":")] = []
        elif by_heading and (named := re.match(r"  (-[\w.-]+)", line)):
            list(by_heading.values())[-1].append(named[1])
    return by_heading


@pytest.mark.parametrize("command", COMMANDS)
def test_few_options_come_first_in_plain_words(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    assert text.startswith(f"usage: surefeat {command}")
    first = options(text)["options"]
    assert len(first) <= 6  # five, and --help
    assert not re.search(r"\[[PCM]\b", text)
    assert "None" not in text
    assert not re.search(r"\b(STR|INT|FLOAT)\b", text)
    assert "{[" not in text
    assert max(map(len, text.splitlines())) <= 100
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  -"):  # it says what it is for, here or below
            assert re.search(r"\S  +\S", line) or following.startswith(" " * 24)


@pytest.mark.parametrize("command", FIRST)
def test_what_comes_first_exists_and_nothing_is_lost(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    by_heading = options(help_of(command, capsys))
    assert by_heading["options"] == [*FIRST[command], "-h"]
    listed = [name for names in by_heading.values() for name in names]
    assert len(listed) == len(set(listed))
    assert "--json" in listed


def test_pretrain_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    by_heading = options(help_of("pretrain", capsys))
    assert by_heading["advanced, train"][:2] == ["--train.steps", "--train.batch"]
    groups = ["model", "warp", "colour", "loss", "train", "data"]
    assert list(by_heading)[-6:] == [f"advanced, {name}" for name in groups]


def test_the_version_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert options(help_of("", capsys))["options"] == ["-h", "--version"]


def test_a_page_without_boxes_is_left_as_it_is() -> None:
    assert rewritten("usage: x\n\n options\n", "match", columns=80) == "usage: x\n\n options\n"


@pytest.mark.parametrize(
    ("unbuffered", "command", "start"),
    [("-u", "pretrain --help", "usage:"), ("", "peers list", "hyperpixel-flow")],
)
def test_reading_only_the_start_of_a_page_is_no_error(
    unbuffered: str, command: str, start: str
) -> None:
    """Whether the page is longer than what waits in the pipe, or is written at the end alone."""
    line = f"{sys.executable} {unbuffered} -m surefeat {command} | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(start)
    assert done.stderr == ""


MISTYPED = {
    "match a.jpg b.jpg --cuont 3": "there is no option --cuont; perhaps --count",
    "match a.jpg b.jpg --count three": "--count cannot be 'three' (How many points",
    "match a.jpg b.jpg --side 64 x": "'x' is one too many",
    "match a.jpg b.jpg c.jpg": "'c.jpg' is one too many",
    "match a.jpg b.jpg --model": "--model needs a value",
    "match a.jpg": "missing: Photo B;",
    "match a.jpg --cuont 3": "missing: image1",
    "match": "missing: Photo A and Photo B;",
    "boxes fit": "missing: Folder with one folder per category, or any source of images with",
    "data show": "missing: one of pf-pascal,pf-willow,spair,pairs and Folder of the benchmark",
    "data get x": "name cannot be 'x'; choose pf-pascal, pf-willow, spair, pascal3d",
    "demo --port x": "--port cannot be 'x' (Local port);",
    "evaluate pairs a.csv --inputs x": "--inputs cannot be 'x' (Sides at which",
    "keypoints convert a b --to x": "--to cannot be 'x'; choose coco, cvat, deeplabcut, label-",
    "pretrain photos": "missing: --out",
    "pretrain photos --out x --preset quik": "--preset cannot be 'quik'; choose auto, ours, quick",
    "pretrain photos --out x --train.decay x": "--train.decay cannot be 'x'; choose constant",
    "boxes fit photos --out x --learn.epochs x": "--learn.epochs cannot be 'x' (Passes",
    "data synthetic --out x": "missing: out, here without --",
    "data synthetic x --size x": "--size cannot be 'x' (Side",
    "data get spair-71k": "name cannot be 'spair-71k'; choose pf-pascal, pf-willow, spair",
    "evaluate parts --out x": "there is no option --out",
    "relate photos --foo": "there is no option --foo",
    "keypoints": "one word is missing; choose fit, predict, transfer",
    "keypoints trnsfer a b": "there is no command 'trnsfer'; choose fit, predict, transfer",
    "matsch a.jpg": "there is no command 'matsch'; choose pretrain, extract, match",
}


@pytest.mark.parametrize("command", MISTYPED)
def test_a_mistyped_command_is_one_line_that_names_the_fix(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"surefeat: {MISTYPED[command]}")
    named = " ".join(word for word in command.split()[:2] if word in " ".join(COMMANDS).split())
    assert line.endswith(f"; {' '.join(['surefeat', *named.split()])} --help says what there is")
    assert not re.search(r"None|FLOAT|INT|\[[PCM]\b|[{}]", line)

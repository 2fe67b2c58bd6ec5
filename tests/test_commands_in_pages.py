"""Every command that README and the pages show is one that the command line takes."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

import tiny
from commands import all_commands
from surefeat.cli.main import _commands, main
from surefeat.data.drawn import write_folder
from surefeat.data.keypoints import read_coco, write_coco
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
        assert parse(command).run
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


QUICKLY = {
    "pretrain": "--preset small --steps 2",
    "extract": "--batch 4",
    "match": "--count 9",
    "keypoints fit": "--size 64 --hidden 8 --least-steps 2 --epochs 1 --least-views 4",
    "keypoints predict": "--no-pictures",
    "evaluate self": "--count 4",
    "evaluate pairs": "--measures nearest voting --shifted nearest",
}
"""Commands that README shows, and what makes them quick; the web page, and relate, which needs the
model that ships, have tests of their own."""


def test_readme_s_commands_run_from_a_clean_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos", count=16, size=64, seed=0)
    birds = read_coco(tmp_path / "photos" / "keypoints.json").only(["bird"])
    for bird, name in zip(birds.objects, "ab", strict=True):
        shutil.copy(tmp_path / "photos" / bird.name, tmp_path / f"{name}.jpg")
    beside = [replace(bird, name=f"photos/{bird.name}") for bird in birds.objects]
    write_coco(tmp_path / "parts.json", replace(birds, objects=tuple(beside)))
    tiny.write_pairs(tmp_path, most=1)
    small, load = tiny.write_model(tmp_path / "small"), DenseFeatures.from_pretrained
    monkeypatch.setattr(
        DenseFeatures, "from_pretrained", lambda source=None, **k: load(source or small, **k)
    )
    shown = [c for c in shown_in((ROOT / "README.md").read_text()) if not is_mention(c)]
    ran = set()
    for command in shown:
        for name, more in QUICKLY.items():
            if command.startswith(f"{name} "):
                main(f"{command} {more}".split())
                assert capsys.readouterr().out.strip()
                ran.add(name)
    assert ran == QUICKLY.keys()

"""`--help` as a page to read: what people need first, the rest under "advanced", plain words.

tyro knows every option, its type, default and sentence, and prints them in boxes; this file reads
those boxes and sets them anew. So it does with what tyro says of a command that was mistyped: one
line that names the fix.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

FIRST = {
    "pretrain": ("--out", "--preset", "--init", "--steps", "--resume"),
    "extract": ("--out", "--model", "--side", "--format", "--json"),
    "match": ("--out", "--points", "--count", "--model", "--json"),
    "index": ("--out", "--budget", "--tiles", "--engine", "--model"),
    "find": ("--point", "--index", "--count", "--out", "--model"),
    "boxes fit": ("--out", "--labels", "--init", "--resume"),
    "boxes predict": ("--model", "--out", "--labels", "--sheet"),
    "boxes propose": ("--file", "--labels", "--workers"),
    "keypoints fit": ("--out", "--images", "--categories", "--model"),
    "keypoints transfer": ("--out", "--images", "--threshold", "--fit", "--json"),
    "keypoints suggest": ("--count", "--labels", "--out", "--json"),
    "keypoints predict": ("--detector", "--out", "--category", "--threshold", "--model"),
    "keypoints convert": ("--images", "--categories", "--to", "--from"),
    "peers fit": ("--out", "--init", "--keep", "--steps", "--resume"),
    "evaluate self": ("--model", "--count", "--json"),
    "evaluate pf-pascal": ("--rows", "--model", "--measures", "--out", "--pairs"),
    "evaluate pf-willow": ("--rows", "--model", "--measures", "--out", "--pairs"),
    "evaluate spair": ("--rows", "--model", "--measures", "--out", "--pairs"),
    "evaluate pairs": ("--rows", "--model", "--measures", "--out", "--images"),
    "evaluate pascal3d": ("--rows", "--model", "--out", "--images", "--classes"),
}
"""Of every command with many options, those that are needed first."""

_GROUPS = ("boxes", "keypoints", "evaluate", "peers", "data")
"""Commands whose second word says which."""

# Where a setting comes from, for who reads the code: the paper, measured, chosen.
_SOURCES = re.compile(r",? ?\[[PCM][^\]]*\]")

_WORDS = {"INT": "N", "FLOAT": "X", "STR": "NAME"}

_WIDEST, _INDENT = 100, 24


@dataclass
class _Group:
    """A box of tyro's: its title, what it says of itself, and its entries."""

    title: str
    about: str = ""
    entries: list[tuple[str, str]] = field(default_factory=list)
    """What is typed, and what it means."""


@contextmanager
def _boxes() -> Iterator[io.TextIOWrapper]:
    """Where what tyro prints is kept: boxes, which it draws where the encoding has them."""
    text, width = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"  # a width at which the boxes stand below each other
    try:
        with redirect_stdout(text), redirect_stderr(text):
            yield text
    finally:
        del os.environ["COLUMNS"]
        if width is not None:
            os.environ["COLUMNS"] = width


def print_help(argv: Sequence[str], parse: Callable[[], object]) -> None:
    """Print what `parse` prints when it meets --help, set anew, and end as it does."""
    try:
        with _boxes() as text:
            parse()
    except SystemExit as end:
        code = end.code
    text.seek(0)
    command = " ".join(word for word in argv[:2] if not word.startswith("-"))
    columns = min(_WIDEST, shutil.get_terminal_size().columns)
    print(rewritten(text.read(), command, columns=columns), flush=True)
    sys.exit(code)


def parse_or_say(argv: Sequence[str], parse: Callable[[], Any]) -> Any:
    """What `parse` makes of a command; if it was mistyped, an error that says so in a line."""
    try:
        with _boxes() as text:
            return parse()
    except SystemExit as end:
        text.seek(0)
        box = text.read()
        if not end.code or not box.startswith("╭"):
            print(box, end="", file=sys.stderr)
            raise
    raise ValueError(mistyped(box, argv))


def mistyped(box: str, argv: Sequence[str]) -> str:
    """tyro's box about a command as one line: what is wrong, and what to type instead."""
    inside = [line.strip("│").rstrip()[1:] for line in box.splitlines()[1:-1]]
    joined = "\n".join("" if line.startswith("──") else line for line in inside)
    what, *more = [" ".join(part.split()) for part in joined.split("\n\n")]
    unknown = re.search(r"options: ([^, ]+)", what) if "Available subc" in joined else None
    command = " ".join(["surefeat", *_command(argv, before=unknown and unknown[1])])
    fault = _fault(what, " ".join(more), command)
    if f"--{fault.removeprefix('missing: ')}" in argv:
        fault += ", here without --"
    return f"{fault}; {command} --help says what there is"


def _command(argv: Sequence[str], *, before: str | None) -> list[str]:
    """The words that name the command, as far as they do: not the one that is none."""
    words = list(takewhile(lambda word: word != before and word[:1] != "-", argv[:2]))
    return words[: 2 if argv[0] in _GROUPS else 1]


def _fault(what: str, more: str, command: str) -> str:
    what = re.sub(r" \(applied to [^)]*\)", "", what)
    if unknown := re.match(r"Unrecognized (?:or misplaced )?options: ([^, ]+)", what):
        return _unknown(unknown[1], more, command)
    if wrong := re.match(r"Error parsing (\S+): .*?(\[.*?\]|'[^']*')\.?(?: Got|$)", what):
        given = " ".join(re.findall(r"'([^']*)'", wrong[2]))
        about = re.search(rf"{re.escape(wrong[1])} (.*?)(?: \(default|$)", more)
        takes = f" ({_SOURCES.sub('', _without_type(about[1]))})" if about else ""
        return f"{wrong[1]} cannot be {given!r}{takes}"
    if wrong := re.match(
        r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\)", what
    ):
        names = wrong[3].replace("'", "").split(", ")
        if "None" in names:  # of a set, in any order
            names = sorted(name for name in names if name != "None")
        return f"{_typed(wrong[2])} cannot be {wrong[1]!r}; choose {', '.join(names)}"
    if "Missing from" in what:
        entries = what.partition(": ")[2].split(" (required)")[:-1]
        return f"missing: {' and '.join(_wanted(entry.strip()) for entry in entries)}"
    if missing := re.match(r"Missing value for argument '(.*?)'", what):
        name = _typed(missing[1])
        return f"{name} needs a value" if name[0] == "-" else f"missing: {name}"
    if names := re.match(r"Expected one of \{(.*)\}", what):
        return f"one word is missing; choose {names[1]}"
    return what.rstrip(".")


def _typed(argument: str) -> str:
    """An argument as people know it: an option, or the last part of what.name."""
    return argument if argument.startswith("-") else argument.rpartition(".")[2]


def _wanted(entry: str) -> str:
    """What is missing: a flag, or what an argument means."""
    if entry.startswith("-"):
        return entry.split()[0]
    choices = re.match(r"\{(\S+)\}", entry)
    return f"one of {choices[1]}" if choices else _without_type(entry)


def _without_type(about: str) -> str:
    """[INT [INT ...]] Sides of it. -> Sides of it"""
    return re.sub(r"^(?:(?:PATH|NAME|N|X|\.\.\.) )+", "", _plain(about)).rstrip(".")


def _unknown(word: str, more: str, command: str) -> str:
    if names := re.search(r"Available subcommands: ([\w, -]+?)(?: For full|$)", more):
        return f"there is no command {word!r}; choose {names[1]}"
    if not word.startswith("-"):
        return f"{word!r} is one too many"
    alike = re.search(r"Perhaps you meant: (--[\w.-]+)", more)
    meant = ""
    if alike and alike[1] != word and f"in {command} --help" in more:
        meant = f"; perhaps {alike[1]}"
    return f"there is no option {word}{meant}"


def rewritten(text: str, command: str, *, columns: int) -> str:
    """tyro's page of a command, set anew; as it is where it has no boxes."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("╭")), None)
    if first is None:
        return text
    head = "\n".join(_plain(line) if line.startswith("usage:") else line for line in lines[:first])
    head = re.sub(r"\{[a-z-]+(?:,\s*[a-z-]+)+\}", "COMMAND", head)
    groups = _ordered([_cleaned(group) for group in _groups(lines[first:])], command)
    blocks = [textwrap.fill(part, columns) for part in head.strip().split("\n\n")]
    blocks += [_set(group, columns) for group in groups if group.entries]
    return "\n\n".join(blocks)


def _groups(lines: Sequence[str]) -> list[_Group]:
    """The boxes; an entry begins at a box's edge, what belongs to it is indented."""
    groups: list[_Group] = []
    for line in lines:
        if line.startswith("╭"):
            groups.append(_Group(line.strip("╭╮─ ")))
        elif line.startswith("│") and line.strip("│─ ") != "":
            _read_line(groups[-1], line.strip("│").rstrip()[1:])
    return groups


def _read_line(group: _Group, line: str) -> None:
    listed = group.title == "subcommands"
    starts = line.strip().startswith("•") if listed else not line.startswith(" ")
    if listed and line.strip() == "(required)":
        return
    if starts and (listed or line.startswith("-") or group.title == "positional arguments"):
        typed, _, meaning = line.strip("• ").partition("  ")
        group.entries.append((typed, meaning.strip()))
    elif group.entries:
        typed, meaning = group.entries[-1]
        group.entries[-1] = (typed, f"{meaning} {line.strip()}".strip())
    else:
        group.about = f"{group.about} {line.strip()}".strip()


def _cleaned(group: _Group) -> _Group:
    entries = [_entry(typed, meaning) for typed, meaning in group.entries]
    return _Group(group.title, _SOURCES.sub("", group.about), entries)


def _entry(typed: str, meaning: str) -> tuple[str, str]:
    """A switch that is off is named by what switches it on; what is None by default is not said."""
    meaning = _SOURCES.sub("", meaning)
    if ", --" in typed and "(default: False)" in meaning:
        typed = typed.split(", --")[0]
    meaning = re.sub(r" ?\(default: (None|False|)\)", "", meaning)
    return _plain(typed), meaning.replace("(default: True)", "(default: on)")


def _plain(typed: str) -> str:
    """{None}|{[FLOAT FLOAT [FLOAT FLOAT ...]]} -> X X ..."""
    typed = typed.replace("{None}|", "").replace("{None,", "{")
    typed = re.sub(r"\{?\[([^\[\]]+) \[(?:\1 )?\.\.\.\]\]\}?", r"\1 ...", typed)
    return re.sub(r"\b(INT|FLOAT|STR)\b", lambda word: _WORDS[word[0]], typed)


def _ordered(groups: list[_Group], command: str) -> list[_Group]:
    """What is needed first first; all other options are advanced."""
    if not command:
        for group in groups:
            if group.title == "options":
                group.entries.append(("--version", "say which version this is and exit"))
    names = FIRST.get(command)
    if names is None:
        return groups
    ahead = [group for group in groups if group.title == "positional arguments"]
    rest = [group for group in groups if group.title != "positional arguments"]
    every = {entry[0].split()[0].rstrip(","): entry for group in rest for entry in group.entries}
    needed = [every[name] for name in (*names, "-h") if name in every]
    for group in rest:
        group.entries = [entry for entry in group.entries if entry not in needed]
        group.title = "advanced" if group.title == "options" else f"advanced, {group.title}"
    return [*ahead, _Group("options", entries=needed), *rest]


def _set(group: _Group, columns: int) -> str:
    about = [textwrap.fill(group.about, columns)] if group.about else []
    lines = [f"{group.title.removesuffix(' options')}:", *about]
    for typed, meaning in group.entries:
        indent = " " * _INDENT
        start = f"  {typed}".ljust(_INDENT)
        if not start.endswith("  "):
            lines.append(start)
            start = indent
        lines.append(
            textwrap.fill(meaning, columns, initial_indent=start, subsequent_indent=indent)
        )
    return "\n".join(line.rstrip() for line in lines)

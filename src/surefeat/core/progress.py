"""The one progress bar: a bar that moves in a terminal, a line a minute where output is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

_UP = "\x1b[A"

EVERY = 60.0
"""Seconds between the lines of a log; what ends sooner leaves none."""


def bar(
    items: Iterable[Any] | None = None,
    *,
    desc: str,
    total: int | None = None,
    unit: str = "it",
    quiet: bool = False,
    leave: bool = True,
) -> Any:
    """A tqdm bar on stderr, to be iterated or updated. leave: its last state stays to be read."""
    if quiet or sys.stderr.isatty():
        return tqdm(items, desc=desc, total=total, unit=unit, disable=quiet, leave=leave)
    return tqdm(
        items, desc=desc, total=total, unit=unit, leave=leave, file=_Lines(sys.stderr),
        mininterval=EVERY, maxinterval=EVERY, delay=EVERY, miniters=0,
    )  # fmt: skip


class _Lines:
    """A stream that turns what would overwrite a line into lines of their own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.last = stream, ""

    def write(self, text: str) -> None:
        line = text.replace(_UP, "").strip()  # bars below each other move the cursor
        if line and line != self.last:  # tqdm repeats its last state
            self.last = line
            self.stream.write(f"{line}\n")

    def flush(self) -> None:
        self.stream.flush()

"""What commands share: options with one meaning, and how a result is said or printed as JSON."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from tyro.conf import arg

from surefeat.core.files import by_flag

Device = Annotated[str | None, arg(help="cuda, cpu, mps; by default the best there is.")]

Json = Annotated[bool, arg(help="Print the result as JSON.")]

_MODEL = "Model or run folder, one that ships (resnet50, vgg16), or hub:OWNER/NAME."

Model = Annotated[str | None, arg(help=_MODEL)]

_TILES = "See large photos at their own size, in tiles: for small things; it takes longer."

Tiles = Annotated[bool, arg(help=_TILES)]


def read_points(words: Sequence[str], *, flag: str) -> tuple[tuple[float, float], ...]:
    """Points as they are typed: 120,80 or 120 80, one or more."""
    try:
        numbers = [float(number) for word in words for number in word.rstrip(",").split(",")]
    except ValueError:
        numbers = []
    if not numbers or len(numbers) % 2 or not all(map(math.isfinite, numbers)):
        fix = "write X,Y in pixels of the photo, such as 120,80"
        raise ValueError(f"{flag} is {' '.join(words)!r}; {fix}")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


_LARGEST = 2**31 - 1


def refuse_numbers(command: object, argv: Sequence[str]) -> None:
    """ValueError for numbers no option means: NaN, infinity, beyond 31 bits, a seed below 0."""
    typed = {word.partition("=")[0] for word in argv}
    for name, value in by_flag(command).items():
        parts = name.split(".")  # groups without a name of their own are among them
        flags = [f"--{'.'.join(parts[first:])}" for first in range(len(parts))]
        flag = next((known for known in flags if known in typed), flags[-1])
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{flag} is {number}; use a finite number")
            if isinstance(number, int) and abs(number) > _LARGEST:
                raise ValueError(f"{flag} is {number}; use at most {_LARGEST}")
            if isinstance(number, int) and number < 0 and "seed" in parts[-1]:
                raise ValueError(f"{flag} is {number}; use at least 0")


def say(result: Mapping[str, Any], *, to_script: bool, words: str | None = None) -> None:
    """A result as one line of JSON; for a person in these words, or as a line per value."""
    if to_script:
        from surefeat.core.files import as_json

        print(as_json(dict(result)))
        return
    if words is not None:
        print(words)
        return
    for name, value in result.items():
        entries = value if isinstance(value, Mapping) else {name: value}
        for key, entry in entries.items():
            print(f"{str(key).replace('_', ' '):<20} {_in_words(entry)}")


def _in_words(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return "undefined" if math.isnan(value) else f"{value:.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value)) or "none"
    return str(value)


_CURES = {
    errno.EEXIST: "is a file where a folder has to be; pass another --out",
    errno.ENOTDIR: "leads through a file where a folder has to be; pass another path",
    errno.ENOENT: "does not exist and cannot be made; check the path",
    errno.EACCES: "may not be read or written by you; check permissions or pass another path",
    errno.EPERM: "may not be read or written by you; check permissions or pass another path",
    errno.EROFS: "lies on a disk that cannot be written; pass another --out",
    errno.EISDIR: "is a folder where a file has to be; pass another path",
    errno.ENAMETOOLONG: "is too long a name for the disk; pass a shorter one",
    errno.ENOSPC: "cannot be written, the disk is full; free some space or pass another --out",
    errno.EDQUOT: "cannot be written, your share of the disk is full; free some space",
    errno.EFBIG: "cannot be written, it is too large for the disk; pass another --out",
}

_SHORT = ("allocate memory", "out of memory", "bad_alloc", "Storage size calculation overflowed")
_NO_MEMORY = "there is not enough memory for this; lower sides, counts or batch, or give fewer"


def in_a_line(error: Exception) -> str:
    """What went wrong and the fix, on one line; the system's own words about a path made plain."""
    if isinstance(error, OSError) and (cure := _CURES.get(error.errno or 0)):
        path = error.filename2 or error.filename  # of a rename, the one that was asked for
        if isinstance(path, str | bytes):
            return f"{os.fsdecode(path)} {cure}"
    said = " ".join(str(error).split())
    short = isinstance(error, MemoryError) or any(words in said for words in _SHORT)
    return _NO_MEMORY if short else said


@contextmanager
def drawing(what: str) -> Iterator[None]:
    """Where an extra is missing the result still stands: the picture is left out, with the fix."""
    try:
        yield
    except ImportError as error:
        say_aside(f"no {what}: {error}")


def say_aside(line: str) -> None:
    """What happens on the way, apart from the result, so that a script can read that."""
    print(line, file=sys.stderr)

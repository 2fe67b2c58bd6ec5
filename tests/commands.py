"""The commands of the package, as its own help lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args, get_type_hints

from surefeat.cli.main import _commands


def all_commands() -> Iterator[str]:
    """The names that `surefeat --help` and the help of its groups list."""
    for command in get_args(_commands([])):
        kind, name = get_args(command)[0], get_args(command)[1].name
        hints = get_type_hints(kind, include_extras=True)
        groups = get_args(get_args(hints["what"])[0]) if "what" in hints else ()
        yield from [f"{name} {get_args(inner)[1].name}" for inner in groups] or [name]

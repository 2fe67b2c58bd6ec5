"""What the tables have in common: reading results, writing markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / name).read_text())
    return found


def markdown(rows: list[list[str]]) -> str:
    """Rows, the first of them the heading."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def link(name: str) -> str:
    return f"[json](results/{name})"

"""Every script beside the package still starts: its imports are there, and it explains itself."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    path
    for part in ("benchmarks", "docs", "examples")
    for path in sorted((ROOT / part).rglob("*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_script_starts_and_explains_itself(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code in (0, None)
    said = capsys.readouterr().out
    first = (ast.get_docstring(ast.parse(script.read_text())) or "").split()[0]
    assert "usage:" in said
    assert first in said

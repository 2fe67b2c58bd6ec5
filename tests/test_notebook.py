"""The notebook of the first hour runs from a clean folder, offline, on what ships."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "first_hour.ipynb"


def cells(kind: str) -> list[str]:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    return ["".join(c["source"]) for c in content["cells"] if c["cell_type"] == kind]


def test_the_notebook_runs_offline_from_a_clean_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> NoReturn:
        pytest.fail("the notebook asked for the network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    names: dict[str, Any] = {}
    for number, code in enumerate(cells("code")):
        exec(compile(code, f"cell {number}", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert sum("right with" in line for line in said) == 5
    right, _, total = said[5].split()[:3]
    assert int(right) > int(total) / 2
    assert (tmp_path / "first_hour" / "run" / "model").is_dir()


def test_the_notebook_is_kept_without_its_outputs() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert not [c for c in content["cells"] if c.get("outputs") or c.get("execution_count")]


def test_links_of_the_notebook_lead_to_files() -> None:
    import re

    links = re.findall(r"\]\(([^)#]+)\)", "\n".join(cells("markdown")))
    assert len(links) >= 4
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []

"""Every published number has a file: README's tables are those of results/."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "results").rglob("*.json"))


def test_readme_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    spec = importlib.util.spec_from_file_location("tables", ROOT / "results" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (ROOT / "README.md").read_text()
    assert tables.filled(text) == text, "README.md drifted from results/; run `make results`"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_result_says_where_it_comes_from(path: Path) -> None:
    found = json.loads(path.read_text())
    for key in ("row", "benchmark", "split", "metrics", "config", "commit", "hardware", "date"):
        assert found.get(key), f"{path.name} lacks {key}"
    assert "weights_sha256" in found

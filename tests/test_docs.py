"""The pages lead somewhere: files, scripts and names of the package that they mention exist."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import surefeat

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


def test_where_is_what_asks_thirty_questions_with_one_file_each() -> None:
    rows = re.findall(r"^\| (?!Where|-).*$", (ROOT / "docs" / "where.md").read_text(), re.MULTILINE)
    assert len(rows) >= 30
    assert all(len(LINK.findall(row)) == 1 for row in rows)


def test_scripts_and_files_named_in_the_pages_exist() -> None:
    folders = "benchmarks|docs|examples|results|tests"
    named = re.compile(rf"`(?:python )?((?:{folders})/[a-z\d_./-]+\.\w+)")
    missing = {
        (page.name, path)
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "log.md")
        for path in named.findall(page.read_text())
        if not (ROOT / path).exists()
    }
    assert missing == set()


def named_in(text: str) -> set[str]:
    """Dotted names of the package that a page mentions or imports."""
    imported = re.findall(r"^from (surefeat[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    names = {f"{module}.{name.strip()}" for module, some in imported for name in some.split(",")}
    return names | set(re.findall(r"\bsurefeat(?:\.(?!json\b)[A-Za-z_]\w*)+", text))


def is_there(dotted: str) -> bool:
    """Whether modules, and attributes below them, lead to a name."""
    place: object = surefeat
    for depth, part in enumerate(dotted.split(".")[1:], start=2):
        module = ".".join(dotted.split(".")[:depth])
        if not hasattr(place, part):
            if not isinstance(place, ModuleType) or not find_spec(module):
                return False
            import_module(module)
        place = getattr(place, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_of_the_package_in_the_pages_exist(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "log.md"):
        pytest.skip("a record of what was")
    assert {name for name in named_in(page.read_text()) if not is_there(name)} == set()

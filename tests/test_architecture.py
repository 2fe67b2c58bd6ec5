"""The house rules: rooms and their direction, sizes, public names, imports that do nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import house
import surefeat
from house import ROOMS, ROOT, for_types_only, imports, modules, room

PUBLIC = [
    "DenseFeatures", "Features", "KeypointDetector", "Matches", "evaluate", "export", "load_image",
    "match_dense", "match_many", "match_points", "match_regions", "pretrain", "relate", "viz",
]  # fmt: skip


def optional(node: ast.AST) -> bool:
    """An import that may fail, with the extra to install in the error."""
    return (
        isinstance(node, ast.Try)
        and all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body)
        and all(isinstance(h.body[0], ast.Raise) and len(h.body) == 1 for h in node.handlers)
    )


def test_rooms_import_from_lower_rooms_only() -> None:
    assert not house.against_direction()


def test_every_room_is_known() -> None:
    assert {name.split(".")[0] for name in modules()} == set(ROOMS)


def test_a_class_name_stands_for_one_class() -> None:
    assert not house.classes_defined_twice()


def test_the_init_of_a_room_is_one_line() -> None:
    assert not house.long_room_files()


def test_functions_fit_a_screen_and_are_typed() -> None:
    assert not house.long_functions()
    assert all(house.is_typed(node) for _, node in house.functions())
    assert not house.open_options()


def test_nothing_in_the_package_is_for_tests_and_benchmarks_alone() -> None:
    assert not house.unreached()


def test_the_check_of_what_is_used_follows_names_through_files(tmp_path: Path) -> None:
    files = {
        "__init__.py": "_WHERE = {'shown': 'core.a'}\n",
        "viz.py": "from surefeat.core.a import drawn\n",
        "core/a.py": "def shown(): return _inner()\ndef _inner(): return LIMIT\nLIMIT = limit()\n"
        "def limit(): ...\ndef drawn(): ...\ndef alone(): return shown()\nclass Alone: ...\n",
        "core/b.py": "from surefeat.core.a import alone\ndef other(): return alone()\n",
        "cli/main.py": "from surefeat.core import c\ndef main(): c.asked()\n",
        "core/c.py": "def asked(): ...\ndef unasked(): ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    alone = ["core.a.alone", "core.a.Alone", "core.b.other", "core.c.unasked"]
    assert house.unreached(tmp_path) == alone


def test_the_package_stays_small_enough_to_read() -> None:
    lines = house.sizes()
    assert len(lines) <= house.MOST_FILES
    assert sum(lines.values()) <= house.MOST_LINES
    assert house.median_lines() > house.LEAST_MEDIAN


def test_modules_do_not_import_in_circles() -> None:
    known = modules()
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(known)


def test_the_check_of_imports_sees_those_in_functions(tmp_path: Path) -> None:
    """Guards the tests of imports against seeing nothing."""
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport surefeat.learn.loss\n"
        "from surefeat import viz\nfrom surefeat.data.decode import Canvas\n"
        "if TYPE_CHECKING:\n    from surefeat import demo\n"
        "def f():\n    if f:\n        from surefeat.model.network import DenseFeatures\n"
    )
    known = dict.fromkeys(["learn.loss", "viz", "data.decode", "model.network", "demo"], file)
    known["data"] = tmp_path / "data" / "__init__.py"
    assert imports(file, known) == {"learn.loss", "viz", "data.decode", "model.network"}
    assert "model.network" in imports(ROOT / "learn" / "pretrain.py", modules())


def test_inference_does_not_import_training() -> None:
    known = modules()
    waiting, seen = ["model.network", "match.points", "match.dense"], set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting += imports(known[name], known) - seen
    assert not [name for name in seen if room(name) >= ROOMS.index("learn")]


def test_pictures_are_drawn_into_memory_and_written_by_the_one_writer() -> None:
    """Whatever is saved by matplotlib or Pillow goes into a buffer, never straight to a file."""
    scripts = [*ROOT.rglob("*.py"), *(ROOT.parents[1] / "docs").glob("*.py")]
    straight = [
        f"{path.name}, line {node.lineno}"
        for path in scripts
        for node in ast.walk(house.tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "savefig"
        or (node.func.attr == "save" and "Image." in ast.unparse(node.func.value))
        if ast.unparse(node.args[0]) not in ("drawn", "buffer", "small")
    ]
    assert straight == []


@pytest.mark.parametrize("name", modules())
def test_a_module_does_nothing_when_imported(name: str) -> None:
    """Docstrings, imports, definitions and constants; no loops, no bare calls."""
    allowed = (
        ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign,
    )  # fmt: skip
    for node in house.tree_of(modules()[name]).body:
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        fine = constant or main or for_types_only(node) or optional(node)
        fine = fine or isinstance(node, allowed)
        assert fine, f"{name}, line {node.lineno}: {ast.unparse(node)[:60]!r} runs at import"


def test_the_public_names_are_these() -> None:
    """A frozen surface: change it here on purpose, and in the README and the changelog."""
    assert sorted(surefeat.__all__) == PUBLIC
    assert dir(surefeat) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there(name: str) -> None:
    """And stands for what it says."""
    own = {"load_image": "load", "viz": "surefeat.viz"}.get(name, name)
    assert getattr(surefeat, name).__name__ == own


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"surefeat has no 'Feature'; public names: Dense"):
        surefeat.Feature  # noqa: B018


def test_import_surefeat_is_light() -> None:
    script = (
        "import sys, surefeat, surefeat.learn.config\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'PIL', 'matplotlib', 'scipy', 'cv2', 'tqdm'}\n"
        "print(sorted(heavy & sys.modules.keys()), surefeat.__version__)"
    )
    command = [sys.executable, "-c", script]
    environment = {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("] ")[0] == "["
    assert done.stdout.split("] ")[1].strip() == surefeat.__version__

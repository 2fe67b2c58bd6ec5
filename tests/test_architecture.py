"""One import direction, a frozen public surface, and imports that do nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import surefeat

ROOT = Path(surefeat.__file__).parent

ROOMS = (
    "core", "data", "model", "match", "learn", "keypoints", "boxes", "measure", "show", "viz",
    "exporting", "demo", "cli", "__main__",
)  # fmt: skip
"""Lowest first: a room imports from those before it, and from itself without a circle."""

PUBLIC = [
    "DenseFeatures", "Features", "KeypointDetector", "Matches", "evaluate", "export", "load_image",
    "match_dense", "match_points", "match_regions", "pretrain", "viz",
]  # fmt: skip


def modules() -> dict[str, Path]:
    """Name below surefeat -> file; packages by their own name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            found[".".join(parts)] = path
    return found


def room(name: str) -> int:
    return ROOMS.index(name.split(".")[0])


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def optional(node: ast.AST) -> bool:
    """An import that may fail, with the extra to install in the error."""
    return (
        isinstance(node, ast.Try)
        and all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body)
        and all(isinstance(h.body[0], ast.Raise) and len(h.body) == 1 for h in node.handlers)
    )


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those in functions too, without what only a type checker imports."""
    for child in ast.iter_child_nodes(tree):
        if not for_types_only(child):
            yield child
            yield from nodes(child)


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of surefeat that a file imports anywhere."""
    found = set()
    for node in nodes(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute (from surefeat...)"
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        below = {name.removeprefix("surefeat.") for name in names if name.startswith("surefeat.")}
        found |= below & known.keys()
    return found - set(ROOMS[:-6])


def test_rooms_import_from_lower_rooms_only() -> None:
    known = modules()
    wrong = [
        f"{name} imports {used}"
        for name, path in known.items()
        for used in sorted(imports(path, known))
        if room(used) > room(name)
    ]
    assert not wrong, f"against the import direction: {'; '.join(wrong)}"


def test_modules_do_not_import_in_circles() -> None:
    known = modules()
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(known)


def test_the_check_of_imports_sees_those_in_functions(tmp_path: Path) -> None:
    """Guards the three tests above against seeing nothing."""
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport surefeat.learn.loss\n"
        "from surefeat import viz\nfrom surefeat.data.decode import Canvas\n"
        "if TYPE_CHECKING:\n    from surefeat import demo\n"
        "def f():\n    if f:\n        from surefeat.model.network import DenseFeatures\n"
    )
    known = dict.fromkeys(
        ["learn.loss", "viz", "data", "data.decode", "model.network", "demo"], file
    )
    assert imports(file, known) == {"learn.loss", "viz", "data.decode", "model.network"}
    assert "model.network" in imports(ROOT / "learn" / "loop.py", modules())


def test_inference_does_not_import_training() -> None:
    known = modules()
    waiting, seen = ["model.network", "match.points", "match.dense"], set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting += imports(known[name], known) - seen
    assert not [name for name in seen if room(name) >= ROOMS.index("learn")]


@pytest.mark.parametrize("name", modules())
def test_a_module_does_nothing_when_imported(name: str) -> None:
    """Docstrings, imports, definitions and constants; no loops, no bare calls."""
    allowed = (
        ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign,
    )  # fmt: skip
    for node in ast.parse(modules()[name].read_text()).body:
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
    assert getattr(surefeat, name) is not None


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

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

# Lowest first: a module imports from lower levels, or from its own without a cycle. `x.*` stands
# for every module of a package. A new module goes where its imports allow and its users need it.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("config", "keypoint_config", "detect_config"),
    ("geometry", "pixels", "image", "device", "model_files"),
    (
        "warp", "crops", "folding", "backbone", "weights", "loss", "proposals", "prim", "grid_plan",
        "grid_front", "grid_solve", "row_elimination", "static_dynamic", "reliability",
        "edge_boxes", "detect_loss",
    ),
    ("features", "scales", "model"),
    (
        "match", "nearest", "regions", "voting", "distinctive", "dense", "flow",
        "keypoint_head", "detect",
    ),
    ("data.*",),
    (
        "detect_proposals", "detect_data", "detect_maps", "detect_train",
        "detect_select", "boxes",
        "checkpoints", "runs", "monitor", "optimiser", "train", "pretraining", "extract",
        "keypoint_files", "keypoint_views", "keypoints", "eval.*", "baselines.*",
    ),
    (
        "viz", "viz_style", "viz_curves", "viz_matches", "viz_results", "viz_boxes", "viz_fewshot",
        "viz_keypoints", "page", "match_page", "results_page", "report", "exporting",
        "exporting_keypoints",
    ),
    (
        "demo_pictures", "demo_parts", "demo_keypoints", "demo", "cli_fewshot", "cli_evaluate",
        "cli_data", "cli_export", "cli_keypoints", "cli_boxes", "cli",
    ),
    ("__main__",),
)  # fmt: skip

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


def level(name: str) -> int | None:
    for number, names in enumerate(LEVELS):
        if name in names or f"{name.split('.')[0]}.*" in names:
            return number
    return None


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
    return found - {"data", "eval", "baselines"}


def test_every_module_has_a_level() -> None:
    missing = [name for name in modules() if level(name) is None]
    assert not missing, f"add {missing} to LEVELS in {Path(__file__).name}, where they belong"


def test_modules_import_from_lower_levels_only() -> None:
    known = modules()
    wrong = [
        f"{name} imports {used}"
        for name, path in known.items()
        for used in sorted(imports(path, known))
        if (level(used) or 0) > (level(name) or 0)
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
        "from typing import TYPE_CHECKING\nimport surefeat.loss\n"
        "from surefeat import viz\nfrom surefeat.data.canvas import Canvas\n"
        "if TYPE_CHECKING:\n    from surefeat import demo\n"
        "def f():\n    if f:\n        from surefeat.model import DenseFeatures\n"
    )
    known = dict.fromkeys(["loss", "viz", "data", "data.canvas", "model", "demo"], file)
    assert imports(file, known) == {"loss", "viz", "data.canvas", "model"}
    assert "model" in imports(ROOT / "train.py", modules())


def test_inference_does_not_import_training() -> None:
    known = modules()
    training = {"train", "pretraining", "checkpoints", "runs", "monitor", "optimiser"}
    waiting, seen = ["model", "features", "image"], set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting += imports(known[name], known) - seen
    assert not seen & training


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
        "import sys, surefeat, surefeat.config\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'PIL', 'matplotlib', 'scipy', 'cv2', 'tqdm'}\n"
        "print(sorted(heavy & sys.modules.keys()), surefeat.__version__)"
    )
    command = [sys.executable, "-c", script]
    environment = {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("] ")[0] == "["
    assert done.stdout.split("] ")[1].strip() == surefeat.__version__

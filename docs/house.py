"""The package as a house: its rooms, how large they are, and what is against the rules.

    python docs/house.py

Rooms import from lower rooms only, and from themselves without a circle. A file is one subject, a
room's `__init__` one line, and a class name stands for one class.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1] / "src" / "surefeat"

ROOMS = (
    "core", "data", "model", "match", "index", "learn", "keypoints", "boxes", "measure", "peers",
    "show", "viz", "exporting", "demo", "cli", "__main__",
)  # fmt: skip
"""Lowest first."""

MOST_FILES, MOST_LINES, LEAST_MEDIAN = 138, 29_900, 180
"""Of the package without its models: 85 files and 16,500 lines before there were probabilities of
pairs, an index, transfer, other tools' files, clusters and the paper's peers."""

LONG_FUNCTION = 60
"""Lines; a function that fits a screen has about 40."""


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Name below surefeat -> file; packages by their own name."""
    named = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        named[".".join(parts)] = path
    return {name: path for name, path in named.items() if name}


def room(name: str) -> int:
    """Of a module: how far up it is."""
    return ROOMS.index(name.split(".")[0])


@cache
def tree_of(path: Path) -> ast.Module:
    """A file as Python reads it."""
    return ast.parse(path.read_text())


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those in functions too, without what only a type checker imports."""
    for child in ast.iter_child_nodes(tree):
        if not for_types_only(child):
            yield child
            yield from nodes(child)


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of surefeat that a file imports anywhere; a room by itself is none."""
    below: set[str] = set()
    for node in nodes(tree_of(path)):
        if isinstance(node, ast.Import):
            below |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path.name}: imports are absolute (from surefeat...)")
            below |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    inside = {name.removeprefix("surefeat.") for name in below if name.startswith("surefeat.")}
    return {name for name in inside & known.keys() if known[name].name != "__init__.py"}


def against_direction() -> list[str]:
    """Imports from a higher room."""
    known = modules()
    return [
        f"{name} imports {used}"
        for name, path in known.items()
        for used in sorted(imports(path, known))
        if room(used) > room(name)
    ]


def classes_defined_twice() -> list[str]:
    """Class names that stand for several classes; those of one module alone, _Named, too."""
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    return [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Module and definition of every function and method."""
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                yield name, node


def long_functions() -> list[str]:
    lengths = [(name, f.name, 1 + (f.end_lineno or 0) - f.lineno) for name, f in functions()]
    return [f"{name}.{f}, {lines} lines" for name, f, lines in lengths if lines > LONG_FUNCTION]


def is_typed(node: ast.FunctionDef) -> bool:
    """All arguments but self and cls, and what comes back."""
    given = node.args
    stars = [star for star in (given.vararg, given.kwarg) if star]
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *stars]
    named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    return node.returns is not None and all(argument.annotation for argument in named)


def open_options() -> list[str]:
    """Functions that take `**anything: Any`, which no type checker can look into."""
    stars = [(name, node.name, node.args.kwarg) for name, node in functions()]
    return [
        f"{name}.{function}"
        for name, function, star in stars
        if star and star.annotation and ast.unparse(star.annotation) == "Any"
    ]


Definition = tuple[str, str]
"""Module, and the name of a function, class or constant in it."""


def imported_names(tree: ast.Module, known: dict[str, Path]) -> dict[str, Definition]:
    """What a file calls what it has of surefeat; of a module the definition has no name."""
    found: dict[str, Definition] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("surefeat"):
            module = str(node.module).removeprefix("surefeat").lstrip(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".lstrip(".")
                own = (inner, "") if inner in known else (module, alias.name)
                found[alias.asname or alias.name] = own
    return found


def uses(node: ast.AST, module: str, found: dict[str, Definition]) -> Iterator[Definition]:
    """The definitions of surefeat that a piece of a module names."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield found.get(inner.id, (module, inner.id))
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            owner = found.get(inner.value.id)
            if owner and not owner[1]:
                yield owner[0], inner.attr


def unreached(root: Path = ROOT) -> list[str]:
    """Functions and classes that neither a command nor a public name leads to: for tests alone."""
    below: dict[Definition, set[Definition]] = {}
    kinds, waiting = dict[Definition, ast.stmt](), list[Definition]()
    public, known = ast.unparse(tree_of(root / "__init__.py")), modules(root)
    for module, path in known.items():
        found = imported_names(tree_of(path), known)
        waiting += found.values() if module == "viz" else ()
        for node in tree_of(path).body:
            used = set(uses(node, module, found))
            named = isinstance(node, ast.FunctionDef | ast.ClassDef)
            targets = [node.name] if named else [  # type: ignore[attr-defined]
                inner.id for inner in ast.walk(node)
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            ]  # fmt: skip
            for name in targets:
                below.setdefault((module, name), set()).update(used)
                kinds[module, name] = node
            start = module.split(".")[0] in ("cli", "viz", "__main__") or not targets
            waiting += used if start else ()
            waiting += [(module, name) for name in targets if start or f"'{name}'" in public]
    reached = set[Definition]()
    while waiting:
        one = waiting.pop()
        if one not in reached:
            reached.add(one)
            waiting += below.get(one, ())
    return [
        ".".join(one)
        for one, node in kinds.items()
        if one not in reached and isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]


def sizes() -> dict[str, int]:
    """Lines of every file, packages' own `__init__` too."""
    return {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in sorted(ROOT.rglob("*.py"))
    }


def long_room_files() -> list[str]:
    """A room's `__init__` with more than its one line."""
    return [name for name, lines in sizes().items() if name.endswith("/__init__.py") and lines > 1]


def median_lines() -> float:
    """Of the files that hold something."""
    return median(lines for lines in sizes().values() if lines > 1)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    lines = sizes()
    for name in ROOMS:
        own = [n for file, n in lines.items() if file.startswith((f"{name}/", f"{name}.py"))]
        print(f"{name:<12} {len(own):>3} files {sum(own):>6,} lines")
    longest = max(lines, key=lambda file: lines[file])
    print(f"files        {len(lines)} (at most {MOST_FILES})")
    print(f"lines        {sum(lines.values()):,} (at most {MOST_LINES:,})")
    print(f"median file  {median_lines():g} lines (at least {LEAST_MEDIAN})")
    print(f"longest file {longest}, {lines[longest]} lines")
    typed = [is_typed(node) for _, node in functions()]
    print(f"typed        {100 * sum(typed) / len(typed):.1f} % of {len(typed):,} functions")
    for title, wrong in {
        "imports against the direction": against_direction(),
        "class names defined twice": classes_defined_twice(),
        f"functions over {LONG_FUNCTION} lines": long_functions(),
        "functions that take **anything: Any": open_options(),
        "rooms whose __init__ is more than a line": long_room_files(),
        "functions and classes that no command or public name leads to": unreached(),
    }.items():
        print(f"{title}: {len(wrong) or 'none'}")
        print(*(f"  {line}\n" for line in wrong), sep="", end="")


if __name__ == "__main__":
    main()

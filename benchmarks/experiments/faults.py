"""One-line faults of Python source: what a slip of the hand could have written instead.

`faults_of` lists them by the syntax tree: a comparison made inclusive or turned round, a number
changed, plus for minus, min for max, an argument left out or two swapped, a condition negated, a
setting replaced by its default, a statement dropped. Annotations, texts, messages of errors and
what a progress bar shows are left alone.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip

COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip

TWINS = (
    ("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("argmin", "argmax"), ("any", "all"),
    ("ceil", "floor"), ("sum", "mean"), ("sin", "cos"), ("exp", "log"), ("std", "var"),
    ("clamp_min", "clamp_max"), ("softmax", "log_softmax"), ("zeros", "ones"),
    ("zeros_like", "ones_like"), ("sqrt", "square"), ("height", "width"), ("points0", "points1"),
    ("boxes0", "boxes1"), ("side0", "side1"), ("features0", "features1"), ("size0", "size1"),
    ("sigma0", "sigma1"),
)  # fmt: skip
"""Names that are easily written for one another, either way."""

WITHOUT_EFFECT = (
    "abs", "clamp", "clamp_min", "clamp_max", "round", "sigmoid", "square", "sqrt", "log", "exp",
    "flip", "neg", "reciprocal", "cumsum", "sort", "relu", "sorted", "reversed", "normalize",
)  # fmt: skip
"""Calls that may be left out: what they are called on, or with, stands in their place."""

UNSEEN = ("tqdm", "warning", "warn", "info", "debug", "set_postfix", "print", "update", "close")
"""Calls whose arguments only say something on the terminal."""


@dataclass(frozen=True)
class Fault:
    """A change of one place of one file."""

    file: str
    """Below src/surefeat."""
    line: int
    end_line: int
    span: tuple[int, int]
    """Offsets in the file, in characters."""
    old: str
    new: str
    kind: str
    where: str
    """Name of the enclosing function, or of what is assigned."""
    in_function: bool
    """Not in one: it acts when the module is imported."""
    turn: int = 0
    """Of those with the same text in the same place, which one."""

    @property
    def key(self) -> str:
        """The same as long as the line and its function stay as they are."""
        named = f"{self.file}:{self.where}:{self.kind}:{self.old}->{self.new}:{self.turn}"
        return hashlib.sha256(named.encode()).hexdigest()[:12]

    def put_into(self, text: str) -> str:
        """The file's text with the fault."""
        start, stop = self.span
        return text[:start] + self.new + text[stop:]

    @property
    def room(self) -> str:
        return self.file.split("/")[0]


def faults_of(file: str, text: str, defaults: dict[str, str], needed: set[str]) -> list[Fault]:
    """Every fault of a file's text; defaults, needed: as `settings_of` gives them."""
    tree, starts = ast.parse(text), [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines, faults = text.splitlines(), list[Fault]()
    turns: dict[tuple[str, ...], int] = {}

    def offset(line: int, column: int) -> int:
        # Columns of the tree count bytes.
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node, where, inside in _places(tree):
        span = (offset(node.lineno, node.col_offset),
                offset(node.end_lineno or node.lineno, node.end_col_offset or 0))  # fmt: skip
        old = text[slice(*span)]
        for kind, new in dict.fromkeys(_changes(node, defaults, needed)):
            if new == old:
                continue
            same = (where, kind, old, new)
            turns[same] = turns.get(same, -1) + 1
            faults.append(Fault(file, node.lineno, node.end_lineno or node.lineno, span, old, new,
                                kind, where, inside, turns[same]))  # fmt: skip
    return faults


@cache
def _places_of(text: str) -> list[tuple[ast.expr | ast.stmt, str, bool]]:
    return list(_places(ast.parse(text)))


def faults_by_hand(listed: Path, source: Path) -> list[Fault]:
    """Those of a list, a line each: file ::: text that stands there once ::: what the fault puts.

    What stands there no more, or several times, is said and passed over.
    """
    faults = []
    for line in listed.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        file, old, new = (part.replace("\\n", "\n") for part in line.split(" ::: "))
        text = (source / file).read_text() if (source / file).is_file() else ""
        if text.count(old) != 1:
            print(f"{listed.name}: stands {text.count(old)} times, not once: {line}")
            continue
        start = text.index(old)
        first, last = (text.count("\n", 0, end) + 1 for end in (start, start + len(old.rstrip())))
        where, inside = "", False
        for node, name, within in _places_of(text):
            if node.lineno <= first and (node.end_lineno or 0) >= last:
                where, inside = name, within
        faults.append(Fault(file, first, last, (start, start + len(old)), old, new, "by hand",
                            where, inside))  # fmt: skip
    return faults


def settings_of(paths: Iterable[Path]) -> tuple[dict[str, str], set[str]]:
    """Defaults of the fields of settings, by name; and keywords that a call cannot do without."""
    defaults: dict[str, str] = {}
    needed: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Voting")):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        value = item.value
                        if isinstance(value, ast.Constant | ast.Tuple | ast.BinOp):
                            defaults[item.target.id] = ast.unparse(value)
            if isinstance(node, ast.FunctionDef):
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                needed |= {arg.arg for arg, default in pairs if default is None}
    return defaults, needed


def _places(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, bool]]:
    """Nodes that may hold a fault, what they belong to, and whether that is a function."""

    def walk(node: ast.AST, where: str, inside: bool) -> Iterator[tuple[ast.AST, str, bool]]:
        yield node, where, inside
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment", "bases", "decorator_list"):
                continue
            for item in child if isinstance(child, list) else [child]:
                if not isinstance(item, ast.AST) or _is_left_alone(item):
                    continue
                if isinstance(item, ast.FunctionDef | ast.ClassDef):
                    function = isinstance(item, ast.FunctionDef)
                    below = f"{where}.{item.name}" if where else item.name
                    yield from walk(item, below, inside or function)
                elif not inside and isinstance(item, ast.Assign | ast.AnnAssign):
                    target = item.targets[0] if isinstance(item, ast.Assign) else item.target
                    yield from walk(item, f"{where}.{ast.unparse(target)}".lstrip("."), inside)
                else:
                    yield from walk(item, where, inside)

    for node, where, inside in walk(tree, "", False):
        if isinstance(node, ast.expr | ast.stmt):
            yield node, where, inside
            if isinstance(node, ast.If | ast.IfExp):
                node.test.asked = True  # type: ignore[attr-defined]


def _is_left_alone(node: ast.AST) -> bool:
    """Texts, messages, type checkers' imports and what only a terminal shows."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("dict", "list", "tuple"):
        return True
    return isinstance(node, ast.Call) and _name_of(node.func) in (*UNSEEN, "TypeVar", "cast")


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _changes(
    node: ast.expr | ast.stmt, defaults: dict[str, str], needed: set[str]
) -> Iterator[tuple[str, str]]:
    """Kinds of fault, and what stands in the node's place."""
    if hasattr(node, "asked") and isinstance(node, ast.Name | ast.Attribute | ast.Call):
        yield "condition", f"(not {ast.unparse(node)})"
    match node:
        case ast.Compare(left, ops, comparators):
            for other in COMPARED.get(type(ops[0]), ()):
                yield "compared", _text(ast.Compare(left, [other(), *ops[1:]], comparators))
        case ast.BinOp(left, op, right) if type(op) in COMPUTED and not _is_type(node):
            yield "computed", _text(ast.BinOp(left, COMPUTED[type(op)](), right))
        case ast.BoolOp(op, values):
            other_op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and, or", _text(ast.BoolOp(other_op, values))
            yield "condition left out", _text(values[0])
            yield "condition left out", _text(values[-1])
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield "sign", _text(operand)
        case ast.Constant(bool(value)):
            yield "constant", str(not value)
        case ast.Constant(int(value)):
            yield "constant", str(value + 1)
        case ast.Constant(float(value)):
            yield "constant", repr(value * 2 if value else 1.0)
        case ast.IfExp(_, body, orelse):
            yield "condition", _text(body)
            yield "condition", _text(orelse)
        case ast.Call(func, args, keywords):
            yield from _call_changes(node, func, args, keywords, needed)
        case ast.Name(name, ast.Load()):
            yield from (("twin", new) for new in _twins(name))
        case ast.Attribute(value, name, ast.Load()):
            for new in _twins(name):
                yield "twin", ast.unparse(ast.Attribute(value, new, ast.Load()))
            owner = ast.unparse(value).split(".")[-1]
            if name in defaults and owner in (
                "config", "settings", "learn", "train", "warp", "loss", "colour", "voting", "data",
                "select", "model", "detector", "proposals", "filtering",
            ):  # fmt: skip
                yield "setting", f"({defaults[name]})"
        case ast.Return(ast.Tuple([first, second, *rest])):
            swapped = ast.Tuple([second, first, *rest], ast.Load())
            yield "return", f"return {ast.unparse(swapped)}"
        case _:
            yield from _statement_changes(node)


def _is_type(node: ast.BinOp) -> bool:
    """A union of types, not a number's bits."""
    parts = {_name_of(part) for part in (node.left, node.right)} | {ast.unparse(node.right)}
    return isinstance(node.op, ast.BitOr) and bool(
        parts & {"None", "str", "int", "float", "tuple", "list", "dict", "Path", "Tensor", "Add"}
    )


def _call_changes(
    node: ast.Call,
    func: ast.expr,
    args: list[ast.expr],
    keywords: list[ast.keyword],
    needed: set[str],
) -> Iterator[tuple[str, str]]:
    for keyword in keywords:
        if keyword.arg is not None and keyword.arg not in needed:
            others = [other for other in keywords if other is not keyword]
            yield "argument left out", ast.unparse(ast.Call(func, args, others))
    for n in range(len(args) - 1):
        first, second = args[n : n + 2]
        plain = not any(isinstance(arg, ast.Starred | ast.Constant) for arg in (first, second))
        if plain and _name_of(func) not in ("isinstance", "min", "max", "minimum", "maximum"):
            swapped = [*args[:n], second, first, *args[n + 2 :]]
            yield "arguments swapped", ast.unparse(ast.Call(func, swapped, keywords))
    if _name_of(func) in WITHOUT_EFFECT:
        if isinstance(func, ast.Attribute) and _name_of(func.value) not in ("torch", "math", "F"):
            yield "call left out", _text(func.value)
        elif args:
            yield "call left out", _text(args[0])


def _statement_changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Expr(ast.Call()):
            yield "statement left out", "pass"
        case ast.AugAssign(target, op, value):
            yield "statement left out", "pass"
            if type(op) in COMPUTED:
                other = COMPUTED[type(op)]()
                yield "computed", ast.unparse(ast.AugAssign(target, other, value))
        case ast.Raise(exc) if exc is not None:
            yield "statement left out", "pass"
        case ast.Break() | ast.Continue():
            yield "statement left out", "pass"


def _twins(name: str) -> Iterator[str]:
    for one, other in TWINS:
        if name in (one, other):
            yield other if name == one else one

"""Which tests run which lines of the package, and how long they take: one run, noted by file.

By coverage where it is installed, else by Python 3.12's own monitoring. A test file that cannot be
collected, as it needs what is not installed, has no tests; one that is skipped or fails notices
nothing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from copies import Copy, each_in_a_copy, in_fork
from faults import Fault

SLOW = 2.0
"""A test that takes longer comes after all others."""


class Monitored:
    """In place of coverage: which test runs which lines, as Python 3.12 tells."""

    def __init__(self, source: Path) -> None:
        self.source, self.test = str(source), ""
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))

    def start(self) -> None:
        if sys.version_info < (3, 12):
            raise SystemExit("needs coverage, or Python 3.12; try: pip install coverage")
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
        event = monitoring.events.LINE

        def run(code: CodeType, line: int) -> Any:
            if code.co_filename.startswith(self.source):
                self.lines[code.co_filename][line] |= {self.test} - {""}
            return monitoring.DISABLE  # until the next test: once is enough

        monitoring.register_callback(monitoring.COVERAGE_ID, event, run)
        monitoring.set_events(monitoring.COVERAGE_ID, event)

    def switch_context(self, test: str) -> None:
        self.test = test
        sys.monitoring.restart_events()

    def stop(self) -> None:
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)

    def get_data(self) -> Monitored:
        return self

    def contexts_by_lineno(self, path: str) -> dict[int, set[str]]:
        return self.lines[path]


class Recorder:
    """A pytest plugin: which lines a test runs, how long it takes, and whether it passes."""

    def __init__(self, tracer: Any) -> None:
        self.tracer, self.seconds, self.failed = tracer, dict[str, float](), set[str]()
        self.begun = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tracer.switch_context(nodeid)
        self.begun = sum(os.times()[:4])

    def pytest_runtest_logreport(self, report: Any) -> None:
        now = sum(os.times()[:4])
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + now - self.begun
        self.begun = now
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def record(copies: list[Copy], work: Path, *, keep: bool, until: float | None) -> None:
    """Run every test file once; its tests, their seconds and the lines they run go to record/.

    A file that is as it was is not run again; with `keep`, not even where the source has changed.
    """
    tree, missing = copies[0].tree, list[tuple[str, Path, list[str]]]()
    source = "".join(p.read_text() for p in sorted((tree / "src" / "surefeat").rglob("*.py")))
    (work / "record").mkdir(exist_ok=True)
    for path in sorted((tree / "tests").rglob("test_*.py"), key=lambda p: -p.stat().st_size):
        name = path.relative_to(tree).as_posix()
        noted = work / "record" / f"{name.replace('/', '-')}.json"
        hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (path.read_text(), source)]
        before = json.loads(noted.read_text())["hashes"] if noted.is_file() else ["", ""]
        if before[: 1 if keep else 2] != hashes[: 1 if keep else 2]:
            missing.append((name, noted, hashes))
    count = 0
    for said in each_in_a_copy(record_file, missing, copies, until=until):
        count += 1
        print(f"{count}/{len(missing)} recorded {said}", flush=True)
    if count < len(missing):
        raise SystemExit("the time is over before all tests were recorded; run this again")


def record_file(about: tuple[str, Path, list[str]], copy: Copy) -> str:
    """Record one test file; a line about it."""
    name, noted, hashes = about
    code = in_fork(copy, 1800, lambda: _record(name, copy, noted, hashes))
    if code != 0:
        end = copy.log.read_text()[-300:]
        noted.write_text(json.dumps({"hashes": hashes, "seconds": {}, "failed": [], "lines": {}}))
        return f"{name}: DID NOT RUN TO ITS END, so it has no tests: {end}"
    written = json.loads(noted.read_text())
    tests, failed = len(written["seconds"]), len(written["failed"])
    if not tests:
        said = [line for line in copy.log.read_text().splitlines() if line.startswith("E  ")]
        return f"{name}: no tests {' '.join(said[-1:])}"
    return f"{name}: {tests} tests in {sum(written['seconds'].values()):.0f} s, {failed} not passed"


def _record(name: str, copy: Copy, noted: Path, hashes: list[str]) -> int:
    import pytest

    source = copy.tree / "src" / "surefeat"
    tracer: Any = Monitored(source)
    if importlib.util.find_spec("coverage"):
        import coverage

        tracer = coverage.Coverage(data_file=None, source=[str(source)])
    tracer.start()
    plugin = Recorder(tracer)
    pytest.main([*copy.options, name], plugins=[plugin])
    tracer.stop()
    data, tests = tracer.get_data(), list(plugin.seconds)
    index = {test: n for n, test in enumerate(tests)}
    lines = {
        path.relative_to(source).as_posix(): {
            line: [index[test] for test in by if test in index]
            for line, by in data.contexts_by_lineno(str(path)).items()
        }
        for path in source.rglob("*.py")
    }
    about = {"hashes": hashes, "seconds": plugin.seconds, "failed": sorted(plugin.failed)}
    text = json.dumps(about | {"lines": {k: v for k, v in lines.items() if v}})
    part = noted.with_suffix(".part")
    part.write_text(text)
    part.replace(noted)  # a run that is stopped leaves no half of it
    return 0


class TestsOfLines:
    """Which tests run a line, by the recorded run."""

    def __init__(self, tree: Path, work: Path, *, longest: float) -> None:
        self.longest = longest
        self.seconds, self.failed, self.tree = dict[str, float](), set[str](), tree
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in sorted((tree / "tests").rglob("test_*.py")):
            name = path.relative_to(tree).as_posix().replace("/", "-")
            about = json.loads((work / "record" / f"{name}.json").read_text())
            self.seconds |= about["seconds"]
            self.failed |= set(about["failed"])
            tests = list(about["seconds"])
            for file, lines in about["lines"].items():
                for line, numbers in lines.items():
                    self.lines[file][int(line)] |= {tests[n] for n in numbers}
        self.texts = {path: path.read_text() for path in (tree / "tests").rglob("test_*.py")}

    def coverage(self) -> dict[str, float]:
        """Share of every room's lines that any test runs, imports too."""
        source, share = self.tree / "src" / "surefeat", dict[str, list[int]]()
        for path in sorted(source.rglob("*.py")):
            name = path.relative_to(source)
            statements = _statements(path)
            total = share.setdefault(name.parts[0].removesuffix(".py"), [0, 0])
            total[0] += len(statements & set(self.lines[name.as_posix()]))
            total[1] += len(statements)
        return {room: round(run / max(1, lines), 4) for room, (run, lines) in share.items()}

    def of(self, fault: Fault) -> list[str]:
        """Tests for a fault: the quick before the slow, near ones before others, up to a time.

        Near are those of its room and those whose file names what the fault changes at import.
        """
        tests = self._running(fault) - self.failed
        own = f"tests/{fault.room}/"
        named = set() if fault.in_function else self._naming(fault)

        def turn(test: str) -> tuple[bool, bool, float]:
            near = test.startswith(own) or test.split("::")[0] in named
            return self.seconds[test] > SLOW, not near, self.seconds[test]

        # What a fixture runs for a whole file is noted of the first test that asked for it.
        files = {test.split("::")[0] for test in tests}
        beside = {t for t in self.seconds if t.split("::")[0] in files} - tests - self.failed
        order = sorted(tests, key=turn) + sorted(beside, key=turn)
        taken, total = [], 0.0
        for test in order:
            total += self.seconds[test]
            if total > self.longest and taken:
                break
            taken.append(test)
        return taken

    def _names(self, fault: Fault) -> set[str]:
        """What a fault that acts at import goes by: a constant, or the class it is a default of.

        Of a function: the constants that are made by it at import.
        """
        names = set(re.findall(r"\w+", fault.where))
        for node in ast.parse(self._text(fault.file)).body:
            if isinstance(node, ast.Assign) and fault.where in ast.unparse(node.value):
                names |= set(re.findall(r"\w+", ast.unparse(node.targets[0])))
        return names

    def _text(self, file: str) -> str:
        return (self.tree / "src" / "surefeat" / file).read_text()

    def _test_text(self, test: str) -> str:
        return self.texts[self.tree / test.split("::")[0]]

    def _naming(self, fault: Fault) -> set[str]:
        """Test files that name what the fault changes."""
        names = self._names(fault)
        return {path.relative_to(self.tree).as_posix() for path, text in self.texts.items()
                if any(name in text for name in names)}  # fmt: skip

    def _running(self, fault: Fault) -> set[str]:
        lines, text = self.lines[fault.file], self._text(fault.file)
        tests = {t for n in range(fault.line, fault.end_line + 1) for t in lines.get(n, ())}
        if fault.in_function:
            name = fault.where.split(".")[-1]
            for node in ast.walk(ast.parse(text)):
                # Defaults run at import: a function's tests are those that run its body.
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
                    tests |= {test for n in body for test in lines.get(n, ())}
            made = self._names(fault) - set(fault.where.split("."))
            tests |= {test for test in self.seconds
                      if any(name in self._test_text(test) for name in made)}  # fmt: skip
        else:
            files = self._naming(fault)
            tests |= {test for test in self.seconds if test.split("::")[0] in files}
            made = self._names(fault)
        # What is set at import acts where its name stands.
        for file, by_line in self.lines.items() if made else ():
            for n in _lines_with(self._text(file), made):
                tests |= by_line.get(n, set())
        return tests or {t for by in lines.values() for t in by}


def _lines_with(text: str, names: set[str]) -> Iterator[int]:
    for node in ast.walk(ast.parse(text)):
        if getattr(node, "id", None) in names or getattr(node, "attr", None) in names:
            yield node.lineno  # type: ignore[attr-defined]


def _statements(path: Path) -> set[int]:
    """Lines that can run: as coverage counts them, else as they were compiled."""
    if importlib.util.find_spec("coverage"):
        from coverage import Coverage

        return set(Coverage(data_file=None).analysis2(str(path))[1])
    waiting, lines = [compile(path.read_text(), str(path), "exec")], set[int]()
    while waiting:
        code = waiting.pop()
        lines |= {line for _, _, line in code.co_lines() if line}
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return lines

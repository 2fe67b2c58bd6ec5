"""Mutants: put one-line faults into a copy of the source, one at a time; see whether tests notice.

    python benchmarks/experiments/mutants.py              (or: make mutants)
    python benchmarks/experiments/mutants.py --rooms match --each 20 --survivors

Every room has the same number of faults, chosen by the hash of their text: the same as long as the
line is. Those of faults_by_hand.txt are tried too. The tests run once, with a note of which test
runs which line; a fault is then tried by the tests that run its line, the quick and near ones
first, until one fails. All goes on in a copy below .mutants/, one line of JSON per fault, and goes
on where it was stopped. A fault that ends a test by time is noticed. `unseen.json` beside this file
holds the faults that change nothing anybody can see, with the reason.

Needs coverage (pip install coverage). The summary goes to results/studies/mutants.json.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from faults import Fault, faults_by_hand, faults_of, settings_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ROOMS = ("core", "model", "match", "learn", "keypoints", "boxes", "measure")
PRELOADED = (
    "torch", "torchvision", "numpy", "PIL.Image", "scipy.optimize", "scipy.stats", "cv2", "numba",
    "skimage.feature", "matplotlib.pyplot", "safetensors.torch", "hypothesis", "pytest", "tqdm",
    "jinja2", "tyro", "torch._dynamo", "coverage", "gradio", "pyarrow.parquet", "timm", "onnx",
    "onnxscript", "sleap_io", "playwright.sync_api",
)  # fmt: skip
"""Imported once, where they are installed; every fault is tried in a fork, which has them."""
OTHERS = ("data", "index", "peers", "show", "demo", "cli")
"""Rooms that can be asked for by name; the stored summary is of ROOMS."""
LONGEST = 60.0
"""Seconds of tests per fault, by the time they take without it: the quick ones come first. All
seconds of tests are the processor's, theirs and of what they start, so that other work on the
machine changes nothing."""
SLOW = 2.0
"""A test that takes longer comes after all others."""
PATIENCE = 20
"""A fork that computes little and does not end is given up after so many times its seconds."""
UNSEEN, BY_HAND = HERE / "unseen.json", HERE / "faults_by_hand.txt"
LIVED = ("lived", "no test runs it")
UNSURE = (*LIVED, "too slow")
"""Tried again by --again: on a busy machine a fault may be too slow without being noticed."""


def copy_tree(target: Path) -> Path:
    """The tracked and new files of the repository as they are now, under target/tree."""
    tree = target / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
        check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        source, copied = ROOT / name, tree / name
        if not source.is_file():
            continue
        stamp = (source.stat().st_size, source.stat().st_mtime_ns)
        if copied.exists() and (copied.stat().st_size, copied.stat().st_mtime_ns) == stamp:
            continue
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copied)
    for path in [p for p in tree.rglob("*.py") if p.relative_to(tree).as_posix() not in listed]:
        path.unlink()
    for compiled in (tree / "src").rglob("*.pyc"):  # what numba compiled knows its source's time
        compiled.unlink()
    return tree


def chosen_faults(tree: Path, rooms: Iterable[str], *, each: int) -> list[Fault]:
    """`each` faults of every room, by the order of their hashes; room by room in turn."""
    source = tree / "src" / "surefeat"
    defaults, needed = settings_of(source.rglob("*.py"))
    columns = []
    for room in rooms:
        faults = [
            fault
            for path in sorted((source / room).glob("*.py"))
            for fault in faults_of(
                path.relative_to(source).as_posix(), path.read_text(), defaults, needed
            )
        ]
        columns.append(sorted(faults, key=lambda fault: fault.key)[:each])
    longest = max(map(len, columns), default=0)
    return [column[n] for n in range(longest) for column in columns if n < len(column)]


class Recorder:
    """A pytest plugin: which lines a test runs, how long it takes, and whether it passes."""

    def __init__(self, coverage: Any) -> None:
        self.coverage, self.seconds, self.failed = coverage, dict[str, float](), set[str]()
        self.begun = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self.begun = sum(os.times()[:4])

    def pytest_runtest_logreport(self, report: Any) -> None:
        now = sum(os.times()[:4])
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + now - self.begun
        self.begun = now
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def in_fork(tree: Path, log: Path, seconds: float, work: Any) -> int | None:
    """Run `work` in a fork that sees the copy's package; its exit code, or None when too slow.

    seconds: of the processor.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:] = [str(tree / "src"), *(p for p in sys.path if p != str(HERE))]
        code = 70
        try:
            code = int(work())
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + PATIENCE * seconds
    while time.monotonic() < end and _used(child) < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end_group(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    _end_group(child)
    os.waitpid(child, 0)
    return None


def _used(child: int) -> float:
    """Seconds of the processor that a process and its ended children have had."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _end_group(child: int) -> None:
    """What the tests of a fork have started ends with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def record(tree: Path, work: Path, *, keep: bool) -> None:
    """Run every test file once; its tests, their seconds and the lines they run go to record/.

    A file that is as it was is not run again; with `keep`, not even where the source has changed.
    """
    source = "".join(p.read_text() for p in sorted((tree / "src" / "surefeat").rglob("*.py")))
    for path in sorted((tree / "tests").rglob("test_*.py")):
        name = path.relative_to(tree).as_posix()
        noted = work / "record" / f"{name.replace('/', '-')}.json"
        hashes = [hashlib.sha256(text.encode()).hexdigest() for text in (path.read_text(), source)]
        before = json.loads(noted.read_text())["hashes"] if noted.is_file() else ["", ""]
        if before[: 1 if keep else 2] == hashes[: 1 if keep else 2]:
            continue
        noted.parent.mkdir(exist_ok=True)
        begun = time.monotonic()
        code = in_fork(tree, work / "record.log", 1800, lambda: _record(name, tree, noted, hashes))  # noqa: B023
        print(f"recorded {name} in {time.monotonic() - begun:.0f} s", flush=True)
        if code != 0:
            raise SystemExit(f"{name} did not run to its end; see {work / 'record.log'}")


def _record(name: str, tree: Path, noted: Path, hashes: list[str]) -> int:
    import coverage
    import pytest

    source = tree / "src" / "surefeat"
    tracer = coverage.Coverage(data_file=None, source=[str(source)])
    tracer.start()
    plugin = Recorder(tracer)
    pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", name], plugins=[plugin])
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
    noted.write_text(json.dumps(about | {"lines": {k: v for k, v in lines.items() if v}}))
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
        from coverage import Coverage

        source, share = self.tree / "src" / "surefeat", dict[str, list[int]]()
        for path in sorted(source.rglob("*.py")):
            name = path.relative_to(source)
            _, statements, *_ = Coverage(data_file=None).analysis2(str(path))
            total = share.setdefault(name.parts[0].removesuffix(".py"), [0, 0])
            total[0] += len(set(statements) & set(self.lines[name.as_posix()]))
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


def attempt(fault: Fault, number: int, tests: list[str], tree: Path, work: Path) -> dict[str, Any]:
    """Put one fault in, run its tests until one fails, take it out again."""
    path = tree / "src" / "surefeat" / fault.file
    text, stat = path.read_text(), path.stat()
    files = len({test.split("::")[0] for test in tests})  # importing them takes its time too
    expected = 20.0 + files + 4 * sum(map(TESTS.seconds.__getitem__, tests))

    def run() -> int:
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--durations=0", "--tb=line"]
        # First without the files of other rooms, whose imports take longer than most tests.
        near = [test for test in tests if test.startswith(f"tests/{fault.room}/")]
        far = [test for test in tests if test not in set(near)]
        codes = (int(pytest.main([*options, *part])) for part in (near, far) if part)
        return next((code for code in codes if code), 0)

    begun = time.monotonic()
    try:
        path.write_text(fault.put_into(text))
        # Compiled files are told apart by the second of a change, which tests may be quicker than.
        os.utime(path, (stat.st_mtime + 2 * number + 2,) * 2)
        code = in_fork(tree, work / "last.log", expected, run) if tests else 0
    finally:
        path.write_text(text)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    outcome = {None: "too slow", 0: "lived", 5: "lived"}.get(code, "noticed")
    said = [line for line in (work / "last.log").read_text().splitlines()
            if line.startswith(("FAILED", "ERROR"))] if outcome == "noticed" else []  # fmt: skip
    return {
        "key": fault.key, "outcome": outcome if tests else "no test runs it", "tests": len(tests),
        "seconds": round(time.monotonic() - begun, 1), "by": said[0][:160] if said else "",
        **{name: asdict(fault)[name] for name in ("file", "line", "where", "kind", "old", "new")},
    }  # fmt: skip


TESTS: TestsOfLines


def reasons() -> dict[str, str]:
    """Key of a fault -> why nobody can see it, written by hand."""
    return json.loads(UNSEEN.read_text()) if UNSEEN.is_file() else {}


def summary(tried: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by room, survivors with their reasons, and the coverage of every room."""
    why, rooms = reasons(), defaultdict[str, Counter[str]](Counter)
    for one in tried:
        outcome = (
            "noticed" if one["outcome"] not in LIVED else "unseen" if one["key"] in why else "lived"
        )
        rooms[one["file"].split("/")[0]][outcome] += 1
    total = sum(rooms.values(), Counter[str]())
    lived = [one for one in tried if one["outcome"] in LIVED]
    about = [
        {name: one[name] for name in ("key", "file", "where", "kind", "old", "new", "tests")}
        | {"reason": why.get(one["key"], "")}
        for one in lived
    ]
    drawn = [one for one in tried if one["kind"] != "by hand"]
    return {
        "mutants": sum(total.values()),
        "of which drawn by the hash of their text": len(drawn),
        "noticed": total["noticed"],
        "changing nothing anybody can see": total["unseen"],
        "lived": total["lived"],
        "noticed of those that can be seen": round(
            total["noticed"] / max(1, sum(total.values()) - total["unseen"]), 4
        ),
        "rooms": {room: dict(counts) for room, counts in rooms.items()},
        "line coverage": TESTS.coverage(),
        "survivors": sorted(about, key=lambda one: (one["reason"] != "", one["file"])),
    }


def main() -> None:
    global TESTS
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS),
                        choices=ROOMS + OTHERS)  # fmt: skip
    parser.add_argument("--each", type=int, default=60, help="faults per room")
    parser.add_argument("--hand", action=argparse.BooleanOptionalAction, default=True,
                        help="also those of faults_by_hand.txt")  # fmt: skip
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds of tests a fault")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutants", help="what is kept between")
    parser.add_argument("--keep-record", action="store_true", help="of lines, if src changed")
    parser.add_argument("--again", action="store_true", help="try survivors anew, before others")
    parser.add_argument("--survivors", action="store_true", help="print them all")
    parser.add_argument("--summary", action="store_true", help="of what was tried; try no more")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "studies" / "mutants.json")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    tree = copy_tree(work)
    record(tree, work, keep=options.keep_record)
    TESTS = TestsOfLines(tree, work, longest=options.longest)
    if TESTS.failed:
        print(f"{len(TESTS.failed)} tests fail or are skipped without any fault")
    by_hand = faults_by_hand(BY_HAND, tree / "src" / "surefeat") if options.hand else []
    drawn = chosen_faults(tree, options.rooms, each=options.each)
    # In turn, so that a run that is stopped has tried some of both.
    faults = [one for both in zip_longest(drawn, by_hand) for one in both if one is not None]
    done_file = work / "tried.jsonl"
    done = {}
    for line in done_file.read_text().splitlines() if done_file.is_file() else ():
        done[json.loads(line)["key"]] = json.loads(line)
    if options.again:  # survivors first
        unsure = {key for key, one in done.items() if one["outcome"] in UNSURE}
        faults.sort(key=lambda fault: fault.key not in unsure)
    for number, fault in enumerate(faults):
        before = done.get(fault.key)
        lived = before and before["outcome"] in UNSURE and fault.key not in reasons()
        if options.summary or (before and not (options.again and lived)):
            continue
        done[fault.key] = attempt(fault, number, TESTS.of(fault), tree, work)
        with done_file.open("a") as file:
            file.write(json.dumps(done[fault.key]) + "\n")
        shown = done[fault.key]
        print(
            f"{number + 1}/{len(faults)} {shown['outcome']:<8} {shown['seconds']:>5} s "
            f"{fault.file}:{fault.line} {fault.old!r:.50} -> {fault.new!r:.60}",
            flush=True,
        )
    report(summary([done[fault.key] for fault in faults if fault.key in done]), options)


def report(counted: dict[str, Any], options: argparse.Namespace) -> None:
    """Print what was found, and store it when all rooms were tried."""
    for room, counts in counted["rooms"].items():
        total = sum(counts.values())
        share = counted["line coverage"].get(room, 0.0)
        print(
            f"{room:<10} {counts.get('noticed', 0)}/{total} noticed, "
            f"{counts.get('unseen', 0)} unseen, {100 * share:.1f} % of lines run"
        )
    print(f"{100 * counted['noticed of those that can be seen']:.1f} % noticed")
    if options.survivors:
        for one in counted["survivors"]:
            print(
                f"{one['key']} {one['file']} {one['where']}: {one['old']!r} -> {one['new']!r} "
                f"({one['tests']} tests) {one['reason']}"
            )
    if set(options.rooms) == set(ROOMS):
        from surefeat.core.files import environment, write_json

        config = {"faults per room": options.each, "by hand too": options.hand,
                  "seconds of tests per fault, at most": options.longest}  # fmt: skip
        write_json(options.out, {
            "row": "tests", "benchmark": "one-line faults", "split": ", ".join(options.rooms),
            "metrics": counted, "config": config, "weights_sha256": None, **environment("cpu"),
        })  # fmt: skip


if __name__ == "__main__":
    main()

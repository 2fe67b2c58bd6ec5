"""Mutants: put one-line faults into a copy of the source, one at a time; see whether tests notice.

    python benchmarks/experiments/mutants.py              (or: make mutants)
    python benchmarks/experiments/mutants.py --rooms match --faults-per-room 20 --survivors
    python benchmarks/experiments/mutants.py --processes 8 --minutes 9   (again until it is done)
    python benchmarks/experiments/mutants.py --coverage   (lines that tests run, room by room)

Every room has the same number of faults, chosen by the hash of their text: the same as long as the
line is. Those of faults_by_hand.txt are tried too. The tests run once, with a note of which test
runs which line; a fault is then tried by the tests that run its line, the quick and near ones
first, until one fails. Every process has a copy of the tree below .mutants/; what was tried is
kept there, one line of JSON per fault, and a run goes on where the last one was stopped. A fault
that ends a test by time is noticed. `unseen.json` beside this file holds the faults that change
nothing anybody can see, with the reason.

Test files that cannot be collected have no tests: what they need may be missing on a machine with
many cores. The record of that machine and what was tried there can be brought home, and counted by
--summary --keep-record.

Needs coverage (pip install coverage), or Python 3.12. The summary goes to
results/studies/mutants.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from copies import ROOT, Copy, copy_tree, each_in_a_copy, in_fork
from faults import Fault, faults_by_hand, faults_of, settings_of
from lines_run import TestsOfLines, record

HERE = Path(__file__).resolve().parent
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
UNSEEN, BY_HAND = HERE / "unseen.json", HERE / "faults_by_hand.txt"
LIVED = ("lived", "no test runs it")
UNSURE = (*LIVED, "too slow")
"""Tried again by --again: on a busy machine a fault may be too slow without being noticed."""


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


def attempt(numbered: tuple[int, Fault], copy: Copy) -> dict[str, Any]:
    """Put one fault in, run its tests until one fails, take it out again."""
    number, fault = numbered
    tests, path = TESTS.of(fault), copy.tree / "src" / "surefeat" / fault.file
    text, stat = path.read_text(), path.stat()
    files = len({test.split("::")[0] for test in tests})  # importing them takes its time too
    expected = 20.0 + files + 4 * sum(map(TESTS.seconds.__getitem__, tests))

    def run() -> int:
        import pytest

        options = [*copy.options, "-x", "--durations=0", "--tb=line"]
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
        code = in_fork(copy, expected, run) if tests else 0
    finally:
        path.write_text(text)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    outcome = {None: "too slow", 0: "lived", 5: "lived"}.get(code, "noticed")
    said = [line for line in copy.log.read_text().splitlines()
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
    parser.add_argument("--faults-per-room", type=int, default=60, metavar="N",
                        help="drawn by the hash of their text")  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, metavar="N",
                        help="each with a copy of the tree")  # fmt: skip
    parser.add_argument("--minutes", type=float, help="stop after so many; run again to go on")
    parser.add_argument("--hand", action=argparse.BooleanOptionalAction, default=True,
                        help="also those of faults_by_hand.txt")  # fmt: skip
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds of tests a fault")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutants", help="what is kept between")
    parser.add_argument("--copies", type=Path, help="where the copies go, else to --work")
    parser.add_argument("--keep-record", action="store_true", help="of lines, if src changed")
    parser.add_argument("--again", action="store_true", help="try survivors anew, before others")
    parser.add_argument("--survivors", action="store_true", help="print them all")
    parser.add_argument("--summary", action="store_true", help="of what was tried; try no more")
    parser.add_argument("--coverage", action="store_true", help="print it, and try no fault")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "studies" / "mutants.json")
    options = parser.parse_args()
    until = options.minutes and time.monotonic() + 60 * options.minutes
    prepare()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    folder = (options.copies or work).resolve()
    copies = [copy_tree(folder / f"copy{n}") for n in range(options.processes)]
    record(copies, work, keep=options.keep_record, until=until)
    tree = copies[0].tree
    TESTS = TestsOfLines(tree, work, longest=options.longest)
    without = len(TESTS.seconds) - len(TESTS.failed)
    print(f"{without} tests pass without any fault, {len(TESTS.failed)} fail or are skipped")
    if not without:
        raise SystemExit(f"no test passes; see {copies[0].log}")
    if options.coverage:
        for room, share in TESTS.coverage().items():
            print(f"{room:<10} {100 * share:.1f} % of lines run")
        return
    by_hand = faults_by_hand(BY_HAND, tree / "src" / "surefeat") if options.hand else []
    drawn = chosen_faults(tree, options.rooms, each=options.faults_per_room)
    # In turn, so that a run that is stopped has tried some of both.
    faults = [one for both in zip_longest(drawn, by_hand) for one in both if one is not None]
    tried = try_all(faults, copies, work, options, until=until)
    report(summary([tried[fault.key] for fault in faults if fault.key in tried]), work, options)


def prepare() -> None:
    """One thread and no accelerator for each test, the libraries once, and the data's place."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    beside = ROOT.parent / "shared" / "data"
    if (beside / "lists").is_dir():
        os.environ.setdefault("SUREFEAT_DATA", str(beside))
    for name in PRELOADED:
        with contextlib.suppress(Exception):  # not installed, or not for this version of another
            importlib.import_module(name)


def try_all(
    faults: list[Fault],
    copies: list[Copy],
    work: Path,
    options: argparse.Namespace,
    *,
    until: float | None,
) -> dict[str, dict[str, Any]]:
    """What came of each fault, by its key: what was tried before, then the others."""
    file, tried = work / "tried.jsonl", dict[str, dict[str, Any]]()
    for line in file.read_text().splitlines() if file.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):  # the last one of a run that was killed
            tried[json.loads(line)["key"]] = json.loads(line)

    def unsure(fault: Fault) -> bool:
        before = tried.get(fault.key, {"outcome": ""})
        return before["outcome"] in UNSURE and fault.key not in reasons()

    waiting = [fault for fault in faults if fault.key not in tried]
    if options.again:  # survivors first
        waiting = [*filter(unsure, faults), *waiting]
    if options.summary or not waiting:
        return tried
    # One process writes, in whole lines, what the others answer.
    for one in each_in_a_copy(attempt, list(enumerate(waiting)), copies, until=until):
        tried[one["key"]] = one
        with file.open("a") as lines:
            lines.write(json.dumps(one) + "\n")
        print(
            f"{sum(fault.key in tried for fault in faults)}/{len(faults)} {one['outcome']:<8} "
            f"{one['seconds']:>5} s {one['file']}:{one['line']} {one['old']!r:.50} "
            f"-> {one['new']!r:.60}",
            flush=True,
        )
    sys.path.insert(0, str(ROOT / "src"))
    from surefeat.core.files import environment

    (work / "environment.json").write_text(json.dumps(environment("cpu")))
    return tried


def report(counted: dict[str, Any], work: Path, options: argparse.Namespace) -> None:
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
        sys.path.insert(0, str(ROOT / "src"))
        from surefeat.core.files import commit, environment, write_json

        # Where the faults were tried, which need not be where they are counted.
        where = work / "environment.json"
        ran_on = json.loads(where.read_text()) if where.is_file() else environment("cpu")
        config = {"faults per room": options.faults_per_room, "by hand too": options.hand,
                  "seconds of tests per fault, at most": options.longest}  # fmt: skip
        write_json(options.out, {
            "row": "tests", "benchmark": "one-line faults", "split": ", ".join(options.rooms),
            "metrics": counted, "config": config, "weights_sha256": None,
            **ran_on, "commit": ran_on["commit"] or commit(),
        })  # fmt: skip


if __name__ == "__main__":
    main()

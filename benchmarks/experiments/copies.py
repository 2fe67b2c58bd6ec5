"""Copies of the tree beside one another, and processes that try something in them.

Every process has a copy of its own, so that what one puts into the source no other one sees. What
is tried runs in a fork: the libraries are there already, and what it leaves behind ends with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENCE = 20
"""A fork that computes little and does not end is given up after so many times its seconds."""
NOT_COPIED = {"__pycache__", "runs", "shared", "demo-output", "dist"}


@dataclass(frozen=True)
class Copy:
    """A place for one process."""

    folder: Path

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    @property
    def log(self) -> Path:
        """What the last fork printed."""
        return self.folder / "last.log"

    @property
    def options(self) -> list[str]:
        """Of pytest: without this repository's ones for several workers, and files kept here."""
        return ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib",
                f"--basetemp={self.folder / 'tmp'}"]  # fmt: skip


def copy_tree(folder: Path) -> Copy:
    """The repository's files as they are now, under folder/tree; what is there already stays."""
    copy, listed = Copy(folder), files_of(ROOT)
    for name in listed:
        source, copied = ROOT / name, copy.tree / name
        stamp = (source.stat().st_size, source.stat().st_mtime_ns)
        if copied.exists() and (copied.stat().st_size, copied.stat().st_mtime_ns) == stamp:
            continue
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copied)
    for path in list(copy.tree.rglob("*.py")):
        if path.relative_to(copy.tree).as_posix() not in listed:
            path.unlink()
    for compiled in (copy.tree / "src").rglob(
        "*.pyc"
    ):  # what numba compiled knows its source's time
        compiled.unlink()
    return copy


def files_of(root: Path) -> set[str]:
    """Tracked and new files; where there is no repository, all but what is made here."""
    try:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
        names = set(filter(None, listed.stdout.split("\0")))
    except (OSError, subprocess.CalledProcessError):
        names = {
            path.relative_to(root).as_posix()
            for top in root.iterdir()
            if not top.is_dir() or top.name == ".ci" or top.name[0] != "."
            for path in ([top] if top.is_file() else top.rglob("*"))
            if NOT_COPIED.isdisjoint(path.relative_to(root).parts)
        }  # fmt: skip
    return {name for name in names if (root / name).is_file()}


def each_in_a_copy(
    do: Callable[..., Any], items: Sequence[Any], copies: list[Copy], *, until: float | None
) -> Iterator[Any]:
    """do(item, copy) for all items, a process per copy; the answers in the order they come.

    until: of time.monotonic(). What is not done by then is left.
    """
    context = multiprocessing.get_context("fork")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the others end too
    free = context.SimpleQueue()
    for copy in copies:
        free.put(copy)
    with context.Pool(len(copies), _take, (free,)) as pool:
        answers = pool.imap_unordered(partial(_do, do), items)
        while True:
            try:
                yield answers.next(until and max(0.0, until - time.monotonic()))
            except (StopIteration, multiprocessing.TimeoutError):
                return


_OWN: Copy
_PARENT: int


def _take(free: Any) -> None:
    global _OWN, _PARENT
    _OWN, _PARENT = free.get(), os.getppid()


def _do(do: Callable[..., Any], item: Any) -> Any:
    if os.getppid() != _PARENT:  # it was killed, and nobody would hear the answer
        os._exit(1)
    return do(item, _OWN)


def in_fork(copy: Copy, seconds: float, work: Callable[[], int]) -> int | None:
    """Run `work` in a fork that sees the copy's package; its exit code, or None when too slow.

    seconds: of the processor.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The workers of a pool may not start processes; tests may.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        with copy.log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(copy.tree)
        os.environ["PYTHONPATH"] = str(copy.tree / "src")
        sys.path[:] = [str(copy.tree / "src"), *(p for p in sys.path if p != str(HERE))]
        code = 70
        try:
            code = int(work())
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + PATIENCE * seconds
    try:
        while time.monotonic() < end and _used(child) < seconds:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
    finally:
        # What the tests of a fork have started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _used(child: int) -> float:
    """Seconds of the processor that a process and its ended children have had."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

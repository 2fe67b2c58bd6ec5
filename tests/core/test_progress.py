"""Progress: a bar that moves in a terminal, a line a minute in a log."""

from __future__ import annotations

import io
import sys

import pytest
import tqdm.std

from surefeat.core.progress import bar


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """tqdm's clock, which stands still until it is moved."""
    now = [1000.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    # Its thread, which looks after bars that hang, has a clock of its own.
    monkeypatch.setattr(tqdm.std.tqdm, "monitor_interval", 0)
    return now


def counted(clock: list[float], seconds: int) -> None:
    for _ in bar(range(seconds), desc="training", unit="step"):
        clock[0] += 1


def test_a_log_gets_a_line_a_minute_and_a_last_one(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    log = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", log)
    counted(clock, 200)
    assert "\r" not in log.getvalue()
    lines = log.getvalue().splitlines()
    assert [line.split("|")[0].strip() for line in lines] == [
        "training:  30%", "training:  60%", "training:  90%", "training: 100%"
    ]  # fmt: skip


def test_what_ends_within_a_minute_leaves_a_log_alone(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    log = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", log)
    counted(clock, 50)
    assert log.getvalue() == ""


def test_a_log_says_nothing_twice(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    log = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", log)
    with bar(desc="ours", total=2) as rows:
        for _ in range(2):
            clock[0] += 90
            rows.update()
    lines = log.getvalue().splitlines()
    assert len(lines) == len(set(lines)) == 2


def test_bars_below_each_other_leave_no_signs_in_a_log(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    log = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", log)
    with bar(desc="training", total=2) as outer:
        counted(clock, 130)
        outer.update(2)
    assert log.getvalue().isprintable() or log.getvalue().replace("\n", "").isprintable()
    lines = log.getvalue().splitlines()
    assert len(lines) == len(set(lines)) == 4


def test_a_terminal_sees_one_line_that_moves(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    terminal = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    counted(clock, 50)
    assert terminal.getvalue().count("\r") > 40
    assert terminal.getvalue().count("\n") == 1


def test_quiet_says_nothing_and_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(bar(range(3), desc="training", quiet=True)) == [0, 1, 2]
    assert terminal.getvalue() == ""


def test_no_room_draws_a_bar_of_its_own() -> None:
    """Or a log would fill up again."""
    import house

    users = [n for n, path in house.modules().items() if "tqdm import" in path.read_text()]
    assert users == ["core.progress"]

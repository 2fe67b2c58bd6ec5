"""Studies beside the package that leave something in it: the fit of Matches.probability."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import faults_by_hand, faults_of, settings_of
from fit_record import FITS, FITTED, made_with
from mutants import BY_HAND
from reliability import calibration, halves

import surefeat
from surefeat.core.files import file_hash
from surefeat.match.points import matching_text
from surefeat.match.votes import Voting
from surefeat.model.config import POINT_WEIGHTS, model_folder
from surefeat.model.probability import FILE

SOURCE = """\
LIMIT = 3


@dataclass
class Config:
    rate: float = 0.5


def f(a: int | None, config: Config) -> int:
    'A text with 7.'
    if a is None:
        raise ValueError(f"no {a:5d}")
    return min(a, LIMIT) + g(a, config.rate, limit=2)
"""


def test_calibration_of_a_hand_computed_case() -> None:
    chance = torch.tensor([0.05, 0.55, 0.59, 1.0])
    bins = calibration(chance, torch.tensor([False, True, False, True]))
    assert bins["count"] == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert bins["predicted"][0] == pytest.approx(0.05)
    assert (bins["predicted"][1], bins["predicted"][5]) == (None, pytest.approx(0.57))
    assert (bins["actual"][5], bins["actual"][9]) == (0.5, 1.0)
    # One of 0.05 off by 0.05, two of mean 0.57 off by 0.07, one exact.
    assert bins["expected calibration error"] == pytest.approx((0.05 + 2 * 0.07) / 4, abs=1e-4)


def test_weights_make_both_answers_and_all_groups_count_the_same() -> None:
    answer = torch.tensor([True, False, False, False, True, True])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    weights = halves(answer, group)
    assert weights.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3, 0.5, 0.5])


@pytest.mark.parametrize("name", FITTED)
def test_a_shipped_fit_was_made_with_what_matching_is_today(name: str) -> None:
    """Its numbers mean something for the very signs they were fitted on: their order, logarithms
    and floors, the peak's radius, the votes. Whoever changes one of these fits anew, by
    benchmarks/experiments/reliability.py --store, and records it by fit_record.py."""
    record, now = (
        json.loads(FITS.read_text())[file_hash(model_folder(name) / FILE)],
        made_with(name),
    )
    assert now["matching"] == record["matching"] == matching_text(Voting(), POINT_WEIGHTS)
    assert now["right within"] == record["right within"]
    assert now["related"] == pytest.approx(record["related"], abs=5e-3)
    assert np.allclose(now["points1"], record["points1"], atol=0.3)
    assert np.allclose(now["probability"], record["probability"], atol=5e-3)


def test_faults_are_one_place_each_and_leave_texts_alone(tmp_path: Path) -> None:
    """Every slip that these lines allow, once, by where it stands."""
    (tmp_path / "x.py").write_text(SOURCE)
    faults = faults_of("room/x.py", SOURCE, *settings_of([tmp_path / "x.py"]))
    found = {(fault.where, fault.old, fault.new) for fault in faults}
    assert found == {
        ("LIMIT", "3", "4"),
        ("Config.rate", "0.5", "1.0"),
        ("f", "a is None", "(a is not None)"),
        ("f", 'raise ValueError(f"no {a:5d}")', "pass"),
        ("f", "min(a, LIMIT) + g(a, config.rate, limit=2)",
         "(min(a, LIMIT) - g(a, config.rate, limit=2))"),
        ("f", "min", "max"),
        ("f", "g(a, config.rate, limit=2)", "g(a, config.rate)"),
        ("f", "g(a, config.rate, limit=2)", "g(config.rate, a, limit=2)"),
        ("f", "config.rate", "(0.5)"),
        ("f", "2", "3"),
    }  # fmt: skip
    assert len({fault.key for fault in faults}) == len(faults) == len(found)
    for fault in faults:
        changed = fault.put_into(SOURCE)
        compile(changed, "x.py", "exec")
        assert changed != SOURCE
        assert SOURCE[: fault.span[0]] + fault.old + SOURCE[fault.span[1] :] == SOURCE
    # A line further down is the same fault.
    lower = faults_of("room/x.py", "\n\n" + SOURCE, *settings_of([tmp_path / "x.py"]))
    assert [fault.key for fault in lower] == [fault.key for fault in faults]


def test_faults_by_hand_are_those_whose_text_stands_there_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.py").write_text(SOURCE)
    lines = ("# a note", "x.py ::: LIMIT = 3\\n ::: LIMIT = 4\\n", "x.py ::: min( ::: max(",
             "x.py ::: gone ::: x", "y.py ::: a ::: b")  # fmt: skip
    (tmp_path / "list.txt").write_text("\n".join(lines))
    faults = faults_by_hand(tmp_path / "list.txt", tmp_path)
    assert [(fault.where, fault.in_function, fault.line) for fault in faults] == [
        ("LIMIT", False, 1), ("f", True, 13),
    ]  # fmt: skip
    assert faults[1].put_into(SOURCE) == SOURCE.replace("min(", "max(")
    assert capsys.readouterr().out.count("stands 0 times, not once") == 2


def test_every_fault_of_the_list_can_still_be_put_in(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever changes such a line says what the fault would be now, or takes it out."""
    faults = faults_by_hand(BY_HAND, Path(surefeat.__file__).parent)
    assert capsys.readouterr().out == ""
    assert len(faults) > 400

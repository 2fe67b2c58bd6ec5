"""What an evaluation is given: pairs, pictures, features, proposals, and wrong requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import surefeat
import surefeat.match.proposals as proposal_file
from sets import PROTOCOL, SIZE, write_pairs
from surefeat.core.geometry import Frame
from surefeat.core.image import resize
from surefeat.data.benchmarks import load_benchmark, shifted, shifted_boxes
from surefeat.data.pairs import Pair, load_pairs
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import proposals_of
from surefeat.measure.evaluate import evaluate_rows, some_pairs
from surefeat.measure.material import BATCH, FeatureStore, prepare_material, seen_at
from surefeat.measure.protocol import Protocol
from surefeat.measure.rows import Row, as_features, build_row
from tiny import CPU


def test_a_shifted_pair_loses_the_points_that_leave() -> None:
    points = torch.tensor([[10.0, 5.0], [90.0, 5.0]])
    seen = torch.tensor([True, True])
    pair = Pair(Path("a"), Path("b"), "c", points, points, seen, (50, 100), (50, 100), "c/a-b",
                box1=torch.tensor([0.0, 0.0, 20.0, 20.0]))  # fmt: skip
    moved = shifted(pair, 45)
    assert moved is not None
    assert moved.visible.tolist() == [True, False]
    assert moved.points1[0].tolist() == [30.0, 5.0]  # 45/224 of 100, rounded
    assert moved.box1 is not None
    assert moved.box1.tolist() == [20.0, 0.0, 40.0, 20.0]
    assert torch.equal(moved.points0, points)
    assert shifted(replace(pair, visible=torch.tensor([False, True])), 45) is None


def test_shifted_boxes_are_cut_at_the_edge_or_left_out() -> None:
    boxes = torch.tensor([[0.0, 0, 9, 9], [70, 0, 89, 9], [85, 0, 99, 9]])
    found = shifted_boxes(boxes, size=(50, 100), pixels_of_224=45)
    assert found.tolist() == [[20, 0, 29, 9], [90, 0, 99, 9]]


def test_features_are_computed_once_while_they_fit() -> None:
    seen: list[int] = []

    def extract(images: Tensor) -> list[Any]:
        seen.append(len(images))
        return as_features(images.float() + 1, side=16)

    generator = torch.Generator().manual_seed(0)
    pictures: dict[Any, Tensor] = {
        (Path(f"{i}"), "plain"): torch.randint(0, 255, (3, 16, 16), generator=generator).byte()
        for i in range(2 * BATCH + 3)
    }
    keys, row, protocol = list(pictures), Row("x", extract), Protocol(side=16)
    roomy = FeatureStore(row, pictures, protocol, device=CPU, limit=1 << 30)
    kept = [roomy[key].descriptors for key in [*keys, *keys]]
    assert seen == [BATCH, BATCH, 3]
    seen.clear()
    tight = FeatureStore(row, pictures, protocol, device=CPU, limit=1)
    again = [tight[key].descriptors for key in [*keys, *keys]]
    assert seen == 2 * [BATCH, BATCH, 3]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_proposals_are_kept_for_the_next_time(
    listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, file = load_pairs(listed)[0].image0, tmp_path / "boxes.sqlite"
    settings = ProposalConfig(count=20)
    first = proposals_of([image], settings, file=file, quiet=True)

    def never(*_: Any, **__: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(proposal_file, "propose", never)
    elsewhere = tmp_path / "renamed.png"
    elsewhere.write_bytes(image.read_bytes())
    again = proposals_of([elsewhere], settings, file=file, quiet=True)
    assert torch.equal(again[elsewhere], first[image])
    assert torch.equal(first[image] * 4, (first[image] * 4).round())
    with pytest.raises(ValueError, match="proposals of other settings"):
        proposals_of([image], ProposalConfig(count=21), file=file, quiet=True)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"boxes\.sqlite is damaged .*; remove it"):
        proposals_of([image], settings, file=file, quiet=True)


def test_pictures_are_read_at_the_largest_input_and_answer_in_the_square(
    listed: Path, model: Path, tmp_path: Path
) -> None:
    """Points stay in the square of `side`, whatever the networks see; scores are means."""
    protocol = Protocol(side=64, inputs=(64, SIZE), measures=("nearest",), shifted_measures=())
    benchmark = load_benchmark("pairs", listed)
    shown = prepare_material(benchmark, protocol, proposals=tmp_path / "p", quiet=True)
    assert {tuple(picture.shape) for picture in shown.pictures.values()} == {(3, SIZE, SIZE)}
    row = build_row(f"mine={model}", init=(), device=CPU)
    picture = next(iter(shown.pictures.values()))[None]
    (joined,) = seen_at(row, picture, protocol)
    (large,) = row.extract(picture)
    (small,) = row.extract(resize(picture, size=(64, 64)))
    assert joined.frame == Frame((64, 64), (SIZE, SIZE))
    assert joined.descriptors.shape == (32, 12, 12)
    cell = joined.descriptors[:, 5, 7]
    torch.testing.assert_close(2**0.5 * cell[16:], large.descriptors[:, 5, 7])
    # The cell's centre, at 5.5/12 and 7.5/12 of the picture, in the smaller map of 8 x 8 cells.
    centre = torch.tensor([[7.5 / 12 * 64 - 0.5, 5.5 / 12 * 64 - 0.5]])
    torch.testing.assert_close(2**0.5 * cell[:16], small.at(centre)[0], atol=1e-5, rtol=1e-4)


def test_evaluate_refuses_what_it_does_not_know(listed: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown benchmark 'pf-paris'"):
        surefeat.evaluate(model, "pf-paris", data=listed, out=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="colour"):
        surefeat.evaluate(model, "pairs", data=listed, out=tmp_path, colour="red")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"benchmark": "pf-paris"}, "unknown benchmark 'pf-paris'; choose from pf-pascal,"),
        ({"split": "val"}, "pairs has no split 'val'; leave --split out"),
        ({"rows": ["nothing"]}, "unknown row 'nothing'"),
        ({"pairs": 7}, "pairs has 6 pairs, so pairs=7 is not possible"),
    ],
)
def test_a_wrong_request_is_refused(
    call: dict[str, Any], message: str, listed: Path, model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"benchmark": "pairs", "rows": [f"m={model}"], **call}
    with pytest.raises(ValueError, match=message):
        evaluate_rows(
            settings.pop("benchmark"), listed, init=(), device="cpu", out=tmp_path, **settings
        )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.png", "gone.png", r"pairs\.csv, line \d+: .*gone\.png"),
        ("\n0.png,", "\n0.png,extra,", r"pairs\.csv, line 2"),
        ("car,", "car,99999;", r"pairs\.csv, line 2"),
        (
            "23.41;",
            "99999;",
            r"pairs\.csv, line 2, image 0: point 1 at .* lies outside",
        ),
    ],
)
def test_a_malformed_list_is_never_a_smaller_benchmark(
    old: str, new: str, message: str, model: Path, tmp_path: Path
) -> None:
    path = write_pairs(tmp_path)
    head, body = path.read_text().split("\n", 1)
    assert old in "\n" + body
    path.write_text(head + ("\n" + body).replace(old, new))
    with pytest.raises(ValueError, match=message):
        evaluate_rows(
            "pairs", path, rows=[f"m={model}"], init=(), device="cpu", out=tmp_path / "out"
        )


def test_a_part_of_a_benchmark_is_called_so(listed: Path) -> None:
    part = some_pairs(load_benchmark("pairs", listed), 2)
    assert (len(part.pairs), part.split) == (2, "test-2-of-6")


def test_the_control_is_shifted_by_the_protocol_s_share(listed: Path, tmp_path: Path) -> None:
    """Pictures and points together, image 1 alone; 56 of 224 are a quarter of the width."""
    benchmark = load_benchmark("pairs", listed)
    protocol = replace(PROTOCOL, measures=("nearest",), shifted_measures=("nearest",), shift=56.0)
    material = prepare_material(benchmark, protocol, proposals=tmp_path / "none", quiet=True)
    plain, moved = (
        next(case for case in material.cases if case.variant == variant and case.number == 0)
        for variant in ("plain", "shifted")
    )
    assert (plain.keys[0], plain.keys[1][0]) == (moved.keys[0], moved.keys[1][0])
    assert (plain.keys[1][1], moved.keys[1][1]) == ("plain", "shifted")
    by = moved.pair.points1 - plain.pair.points1
    torch.testing.assert_close(by, torch.tensor([SIZE / 4, 0.0]).expand_as(by))
    before, after = material.pictures[plain.keys[1]], material.pictures[moved.keys[1]]
    assert torch.equal(after[:, :, SIZE // 4 :], before[:, :, : -SIZE // 4])
    assert torch.equal(after[:, :, : SIZE // 4], before[:, :, : SIZE // 4].flip(-1))

"""Rows with ways of their own: points they move, regions they describe or score themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sets import PROTOCOL, SIZE
from surefeat.core.geometry import box_iou
from surefeat.core.image import load
from surefeat.data.benchmarks import load_benchmark, shifted_image
from surefeat.measure.evaluate import evaluate_rows
from surefeat.measure.matching import measure, to_square
from surefeat.measure.material import Case, FeatureStore, Material, prepare_material
from surefeat.measure.results import pck_score, read_result, result_of
from surefeat.measure.rows import RegionPair, Row, as_features
from surefeat.measure.tables import main_table
from surefeat.model.features import Features
from tiny import CPU

WITH_OWN = replace(PROTOCOL, measures=("nearest", "own"), shifted_measures=("own",))


def extract(images: Tensor) -> list[Features]:
    return as_features(F.avg_pool2d(images.float(), 8), side=images.shape[-1])


def told(pairs: dict[tuple[int, int], Tensor]) -> Row:
    """A row that knows every answer by the pictures it is shown."""

    def transfer(image0: Tensor, image1: Tensor, points0: Tensor) -> Tensor:
        return pairs[int(image0.sum()), int(image1.sum())]

    return Row("told", extract, transfer=transfer)


@pytest.fixture(scope="module")
def material(listed: Path, boxes: Path) -> Material:
    return prepare_material(load_benchmark("pairs", listed), WITH_OWN, proposals=boxes, quiet=True)


@pytest.fixture(scope="module")
def regions(listed: Path, boxes: Path) -> Material:
    protocol = replace(PROTOCOL, measures=("regions", "flow"), shifted_measures=())
    return prepare_material(load_benchmark("pairs", listed), protocol, proposals=boxes, quiet=True)


def measured(row: Row, material: Material, cases: list[Case]) -> list[dict[str, object]]:
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    return measure(cases, row, store, material.pictures, material.protocol, material.originals)


def test_a_row_that_knows_the_answers_is_right_by_its_own_way(material: Material) -> None:
    plain = [case for case in material.cases if case.variant == "plain"]
    answers = {
        (int(load(c.pair.image0).sum()), int(load(c.pair.image1).sum())): c.pair.common()[1]
        for c in plain
    }
    records = measured(told(answers), material, plain)
    whole = replace(material, cases=tuple(plain))
    metrics = result_of(records, whole)["metrics"]
    assert metrics[str(pck_score("own", "img", alpha=0.05))] == 100
    assert metrics[str(pck_score("nearest", "img", alpha=0.05))] < 100


def test_own_way_is_shown_the_pictures_as_they_are_and_the_target_shifted(
    material: Material,
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def transfer(image0: Tensor, image1: Tensor, points0: Tensor) -> Tensor:
        seen.append((image0, image1))
        return points0

    row = Row("looks", extract, transfer=transfer, measures=("own",))
    last = material.cases[-1]
    assert last.variant == "shifted"
    (record,) = measured(row, material, [last])
    assert torch.equal(seen[0][0], load(last.pair.image0))
    moved = shifted_image(load(last.pair.image1), material.protocol.shift)
    assert torch.equal(seen[0][1], moved)
    assert set(record) == {"pair", "variant", "identity", "own"}


def test_a_row_is_measured_by_what_it_can_be_asked(
    listed: Path, boxes: Path, tmp_path: Path
) -> None:
    def transfer(image0: Tensor, image1: Tensor, points0: Tensor) -> Tensor:
        return points0

    rows = (Row("still", extract, transfer=transfer, measures=("own",)), Row("plain", extract))
    paths = evaluate_rows(
        "pairs", listed, rows=rows, out=tmp_path, proposals=boxes, side=SIZE, boxes=60,
        measures=("nearest", "own"), shifted=(), device="cpu", quiet=True,
    )  # fmt: skip
    results = [read_result(path) for path in paths]
    own, nearest = pck_score("own", "img"), pck_score("nearest", "img")
    assert [own.of(results[0]) is None, nearest.of(results[0]) is None] == [False, True]
    assert [own.of(results[1]) is None, nearest.of(results[1]) is None] == [True, False]
    # Points that stay are the identity, these pictures being of one size.
    assert own.of(results[0]) == pytest.approx(pck_score("identity", "img").of(results[0]))
    assert "own way" in main_table(results)[0]
    with pytest.raises(ValueError, match="plain: nothing to measure by own"):
        evaluate_rows("pairs", listed, rows=rows[1:], measures=("own",), out=tmp_path, device="cpu")


def test_a_row_may_describe_regions_and_score_them_again(regions: Material) -> None:
    """Scores against loops: products of descriptors, then whatever the row makes of them."""
    case = next(c for c in regions.cases if c.truth is not None and len(c.truth.active) > 3)
    assert case.truth is not None
    asked: list[tuple[Tensor, RegionPair]] = []

    def describe(features: Features, boxes: Tensor) -> Tensor:
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        return F.normalize(features.at(centres) - 0.5, dim=1)

    def rescore(scores: Tensor, pair: RegionPair) -> Tensor:
        asked.append((scores, pair))
        return scores.roll(1, dims=1)

    square = [
        to_square(boxes, case.frame(SIZE, n)) for n, boxes in ((0, case.boxes0), (1, case.boxes1))
    ]
    for row in (
        Row("x", extract, describe=describe),
        Row("y", extract, describe=describe, rescore=rescore),
    ):
        store = FeatureStore(row, regions.pictures, PROTOCOL, device=CPU, limit=1 << 30)
        (record,) = measure([case], row, store, regions.pictures, regions.protocol)
        fine = [store[key] for key in case.keys]
        table = torch.stack([
            torch.stack([one @ other for other in describe(fine[1], square[1])])
            for one in describe(fine[0], square[0])
        ])  # fmt: skip
        scores = table.roll(1, dims=1) if row.rescore else table
        score, index = scores.clamp_min(0).max(1)
        active = case.truth.active
        order = score[active].argsort(descending=True, stable=True)
        iou = box_iou(case.boxes1[index[active]], case.truth.boxes).diagonal()[order]
        assert record["iou_by_rank"] == pytest.approx(iou.tolist(), abs=1e-5)
        assert len(record["flow"]["points"]) == len(case.pair.common()[0])
    scores, pair = asked[0]
    assert float(scores.min()) < 0
    assert pair.side == SIZE
    assert pair.described0 is not None
    assert torch.equal(pair.boxes1, square[1])


def test_pooled_features_reach_a_row_s_own_scoring_as_regions_score_them(
    regions: Material,
) -> None:
    case = next(c for c in regions.cases if c.truth is not None and len(c.truth.active) > 3)
    records = [
        measured(Row(name, extract, rescore=own), regions, [case])[0]
        for name, own in (("plain", None), ("same", lambda scores, pair: scores))
    ]
    assert records[0]["iou_by_rank"] == pytest.approx(records[1]["iou_by_rank"], abs=1e-5)

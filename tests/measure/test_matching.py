"""The steps of a matching evaluation, each by itself against public functions and loops."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sets import PROTOCOL, SIZE
from surefeat.core.geometry import Frame, box_iou
from surefeat.core.image import resize
from surefeat.data.benchmarks import load_benchmark
from surefeat.match.dense import flow_from_regions, transfer_points
from surefeat.match.points import match_points
from surefeat.match.regions import dense_products, match_regions, pool_layer, region_scores
from surefeat.match.sd_filter import sd_filter
from surefeat.match.search import find, prepare
from surefeat.measure.matching import find_near, finer, measure, to_square
from surefeat.measure.material import FeatureStore, Material, prepare_material
from surefeat.measure.protocol import LocationBonus, Measure
from surefeat.measure.results import result_of
from surefeat.measure.rows import Row, as_features, build_row
from surefeat.model.features import Features, Pooling
from tiny import CPU


@pytest.fixture(scope="module")
def material(listed: Path, boxes: Path) -> Material:
    benchmark = load_benchmark("pairs", listed)
    return prepare_material(benchmark, PROTOCOL, proposals=boxes, quiet=True)


def test_flow_and_regions_come_from_the_same_matches(material: Material, model: Path) -> None:
    """IoUs by rank against a slow loop over the best matches."""
    row = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    case = next(c for c in material.cases if c.truth is not None and len(c.truth.active) > 3)
    coarse = replace(PROTOCOL, pooled_cells=1)
    (record,) = measure([case], row, store, material.pictures, coarse)
    assert case.truth is not None
    features0, features1 = (store[key] for key in case.keys)
    found = match_regions(
        features0, features1, case.boxes0, case.boxes1, descriptor_weight=1, lower_weight=3
    )
    slow = []
    for place, active in enumerate(case.truth.active.tolist()):
        match, truth = case.boxes1[found.index[active]], case.truth.boxes[place]
        slow.append((-float(found.score[active]), place, float(box_iou(match[None], truth[None]))))
    assert record["iou_by_rank"] == pytest.approx([iou for _, _, iou in sorted(slow)], abs=1e-5)


@pytest.mark.parametrize(
    ("route", "pooling", "lower_weight"),
    [("flow", "max", 3.0), ("mean-flow", "mean", 1.0), ("published-flow", "max", 3.0)],
)
def test_each_route_by_regions_is_its_public_functions_one_after_the_other(
    material: Material, model: Path, route: Measure, pooling: Pooling, lower_weight: float
) -> None:
    """What is measured under one name must not be what another name stands for."""
    row = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    coarse = replace(PROTOCOL, pooled_cells=1)
    routes: tuple[Measure, ...] = ("flow", "mean-flow", "published-flow")
    cases = [replace(case, measures=routes) for case in material.cases[:4]]
    apart = dict.fromkeys(routes, 0.0)
    for case, record in zip(
        cases, measure(cases, row, store, material.pictures, coarse), strict=True
    ):
        frames = [case.frame(coarse.side, i) for i in (0, 1)]
        boxes = [to_square(b, f) for b, f in zip((case.boxes0, case.boxes1), frames, strict=True)]
        matches = match_regions(
            *(store[key] for key in case.keys), *boxes, pooling=pooling, lower_weight=lower_weight,
            as_published=route == "published-flow",
        )  # fmt: skip
        guide = resize(material.pictures[case.keys[0]][None], size=(coarse.side, coarse.side))[0]
        size = (coarse.side, coarse.side)
        field, known = flow_from_regions(
            matches.boxes0, matches.boxes1, matches.score, size0=size, size1=size
        )
        smooth = sd_filter(field.permute(2, 0, 1)[None], known[None] > 0, guide[None])[0]
        moved = transfer_points(
            smooth.permute(1, 2, 0), frames[0].to_network(case.pair.common()[0])
        )
        expected = frames[1].to_original(moved)
        for name in routes:
            off = torch.tensor(record[name]["points"]) - expected
            apart[name] = max(apart[name], float(off.norm(dim=1).max()))
    assert apart.pop(route) < 5e-3
    assert min(apart.values()) > 1  # so that a route taken for another is noticed


def test_the_loss_of_a_true_match_is_one_minus_its_rectified_similarity(
    material: Material, model: Path
) -> None:
    """Point by point; and as sigma predicts it, from the mean of both places' sigmas. Image 1 is
    said to be of another shape than image 0, and its points lie where they lay."""
    row = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    pair = material.cases[0].pair
    stretched = (pair.points1 + 0.5) * torch.tensor([3, 2]) - 0.5
    pair = replace(pair, size1=(2 * SIZE, 3 * SIZE), points1=stretched)
    case = replace(material.cases[0], measures=("nearest",), pair=pair)
    (record,) = measure([case], row, store, material.pictures, PROTOCOL)
    features0, features1 = (store[key] for key in case.keys)
    actual, predicted = [], []
    for point0, point1 in zip(*case.pair.common(), strict=True):
        place0 = case.frame(SIZE, 0).to_network(point0[None])
        place1 = case.frame(SIZE, 1).to_network(point1[None])
        similarity = float(features0.at(place0)[0] @ features1.at(place1)[0])
        actual.append(1 - max(0.0, similarity))
        sigmas = [
            1 / float(f.confidence_at(p)) for f, p in ((features0, place0), (features1, place1))
        ]
        inverse = 2 / sum(sigmas)
        # Mean of l under exp((1 - l) / sigma) / C(sigma) on [0, 1].
        predicted.append(1 / inverse - 1 / math.expm1(inverse))
    assert record["loss"]["actual"] == pytest.approx(actual, abs=2e-6)
    assert record["loss"]["predicted"] == pytest.approx(predicted, abs=1e-4)
    assert max(actual) - min(actual) > 1e-4


def test_a_row_without_confidence_is_measured_without(material: Material, model: Path) -> None:
    """Its sigma is not used in regions, and nothing is said of its confidence."""
    sure = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(sure, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    case = next(c for c in material.cases if c.truth is not None and len(c.truth.active) > 3)
    case = replace(case, measures=("nearest", "regions"))
    assert case.truth is not None
    coarse = replace(PROTOCOL, pooled_cells=1)
    for confidence in (True, False):
        row = replace(sure, confidence=confidence)
        (record,) = measure([case], row, store, material.pictures, coarse)
        assert ("confidence" in record["nearest"]) == ("loss" in record) == confidence
        matches = match_regions(
            *(store[key] for key in case.keys), case.boxes0, case.boxes1, confidence=confidence,
            lower_weight=3,
        )  # fmt: skip
        active = case.truth.active
        order = matches.score[active].argsort(descending=True, stable=True)
        iou = box_iou(case.boxes1[matches.index[active]], case.truth.boxes).diagonal()[order]
        assert record["iou_by_rank"] == pytest.approx(iou.tolist(), abs=1e-5)


def test_signs_that_know_right_from_wrong_rank_as_such(material: Material) -> None:
    """Made-up records: score is 1 for right points and 0 for wrong ones, margin the other way."""
    plain = [case for case in material.cases if case.variant == "plain"]
    some = replace(material, cases=tuple(plain))
    records = []
    for case in plain:
        points = case.pair.common()[1].clone()
        points[::2] += 500.0
        right = [float(n % 2) for n in range(len(points))]
        nearest = {"points": points.tolist(), "score": right, "margin": [1 - r for r in right],
                   "confidence": [0.5] * len(right)}  # fmt: skip
        ious = [0.9, 0.3, 0.1]
        record = {"pair": case.number, "variant": "plain", "nearest": nearest, "iou_by_rank": ious,
                  "identity": {"points": points.tolist()}}  # fmt: skip
        records.append(record)
    result = result_of(records, some)
    metrics = result["metrics"]
    total = sum(len(case.pair.common()[0]) for case in plain)
    wrong = sum((len(case.pair.common()[0]) + 1) // 2 for case in plain)
    assert metrics["nearest auroc score"] == 1
    assert metrics["nearest auroc margin"] == 0
    assert metrics["nearest auroc confidence"] == 0.5
    assert metrics["nearest aurc score"] < wrong / total < metrics["nearest aurc margin"]
    assert metrics["nearest pck@0.1 img per point"] == pytest.approx(100 * (1 - wrong / total))
    right = [len(case.pair.common()[0]) // 2 for case in plain]
    assert result["pairs"]["nearest pck@0.1 img"] == right
    # A pair without active proposals leaves the others to speak of regions.
    fewer = result_of([records[0] | {"iou_by_rank": []}, *records[1:]], some)
    assert fewer["metrics"]["pcr area"] == pytest.approx(metrics["pcr area"])
    assert fewer["counts"]["pairs without active proposals"] == 1
    assert fewer["counts"]["region pairs"] == len(plain) - 1
    # The bbox rule needs a box of every pair.
    box = torch.tensor([0.0, 0.0, 49.0, 29.0])
    boxed = [replace(case, pair=replace(case.pair, box1=box)) for case in plain]
    for cases, there in ((boxed, True), ([plain[0], *boxed[1:]], False)):
        judged = result_of(records, replace(material, cases=tuple(cases)))
        assert ("nearest pck@0.1 bbox" in judged["metrics"]) == there
    # The best ranked regions come first: mIoU@1, @2, @3 and, with no more of them, the same on.
    assert result["curves"]["miou"][:4] == pytest.approx([0.9, 0.6, 1.3 / 3, 1.3 / 3])


def test_signs_are_judged_by_the_benchmark_s_own_rule(material: Material) -> None:
    """Made-up matches between the limits of two rules: of the image's side, of the keypoints'."""
    plain = [case for case in material.cases if case.variant == "plain"]
    records = []
    for case in plain:
        points = case.pair.common()[1]
        narrow = float((points.amax(0) - points.amin(0)).max())
        assert narrow < 0.95 * SIZE
        off = torch.zeros_like(points)
        off[::2, 0] = 0.05 * (narrow + SIZE)  # a tenth of the mean of both
        right = [float(n % 2) for n in range(len(points))]
        nearest = {"points": (points + off).tolist(), "score": right}
        records.append({"identity": {"points": points.tolist()}, "nearest": nearest})
    some = replace(material, cases=tuple(plain))
    for name, rule in (("pairs", "img"), ("pf-willow", "bbox-kp")):
        asked = replace(some, benchmark=replace(material.benchmark, name=name))  # type: ignore[arg-type]
        result = result_of(records, asked)
        assert result["rule"] == rule
        assert {key.split()[-1] for key in result["by_class"]} == {rule}
        auroc = result["metrics"]["nearest auroc score"]
        # By the image's side all are right, so that there is nothing to tell apart.
        assert auroc == 1 if rule == "bbox-kp" else math.isnan(auroc)


def test_the_loss_of_true_matches_is_that_of_pairs_as_they_are(material: Material) -> None:
    """Shifted pictures have other sigmas; of a row without confidence nothing is said."""
    records = []
    for case in material.cases:
        points = case.pair.common()[1].tolist()
        loss = (0.25, 0.75) if case.variant == "plain" else (0.5, 0.0)
        told = {"predicted": [loss[0]] * len(points), "actual": [loss[1]] * len(points)}
        records.append({"identity": {"points": points}, "loss": told})
    metrics = result_of(records, material)["metrics"]
    names = ("predicted loss", "actual loss", "calibration error")
    assert [metrics[f"true matches: {name}"] for name in names] == pytest.approx([0.25, 0.75, 0.5])
    assert metrics["identity pck@0.1 img"] == metrics["shifted identity pck@0.1 img"] == 100
    without = [{"identity": record["identity"]} for record in records]
    silent = result_of(without, material)["metrics"]
    assert not any(name.startswith("true matches") for name in silent)


@pytest.mark.parametrize("name", ["nearest", "voting"])
def test_points_are_those_of_public_matching(material: Material, model: Path, name: str) -> None:
    """And so is how sure a row is of them, by every sign."""
    row = build_row(f"mine={model}", init=(), device=CPU)
    weights = {"descriptor_weight": 1.0, "lower_weight": 0.25}
    row = replace(row, **weights)  # type: ignore[arg-type]
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    moved = 0.0
    for case in material.cases[:4]:
        (record,) = measure([case], row, store, material.pictures, PROTOCOL)
        frames = [case.frame(PROTOCOL.side, i) for i in (0, 1)]
        points = frames[0].to_network(case.pair.common()[0])
        pair = (store[key] for key in case.keys)
        found = match_points(*pair, points, voting=name == "voting", **weights)  # type: ignore[arg-type]
        expected = frames[1].to_original(found.points1)
        assert torch.allclose(torch.tensor(record[name]["points"]), expected, atol=2e-3)
        for sign in ("score", "margin", "confidence"):
            assert record[name][sign] == pytest.approx(getattr(found, sign).tolist(), abs=2e-5)
        other = "voting" if name == "nearest" else "nearest"
        moved += float((torch.tensor(record[other]["points"]) - expected).norm(dim=1).max())
    assert moved > 1  # the two do not agree on everything


def test_a_location_bonus_pulls_to_the_same_place(material: Material, model: Path) -> None:
    row = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    sides = [
        prepare(store[key], descriptor_weight=1.0, lower_weight=0.0)
        for key in material.cases[0].keys
    ]
    points = torch.tensor([[20.0, 30.0], [70.0, 40.0]])
    pulled = find_near(sides[0], sides[1], points, LocationBonus(weight=100.0, reach=0.2))
    assert float((pulled - points).norm(dim=1).max()) < 4  # half a place's diagonal
    free = find_near(sides[0], sides[1], points, LocationBonus(weight=0.0))
    expected = find(sides[0], sides[1], points, None, refine=True).points
    torch.testing.assert_close(free, expected)


@pytest.mark.parametrize(("weight", "reach"), [(0.2, 0.3), (0.2, 0.05), (2.0, 0.3)])
def test_the_location_control_is_the_sum_written_out(
    material: Material, model: Path, weight: float, reach: float
) -> None:
    """Similarity, and a Gaussian around the same place, whose spread is in sides of the square."""
    row = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    bonus = LocationBonus(weight=weight, reach=reach)
    case = replace(material.cases[0], measures=("location",))
    protocol = replace(PROTOCOL, location=bonus)
    (record,) = measure([case], row, store, material.pictures, protocol)
    weights = {"descriptor_weight": row.descriptor_weight, "lower_weight": row.lower_weight}
    side0, side1 = (prepare(store[key], **weights) for key in case.keys)
    points0 = case.frame(SIZE, 0).to_network(case.pair.common()[0])
    alike = side0.at(points0) @ side1.vectors.T
    near = (-0.5 * (torch.cdist(points0, side1.points) / (reach * SIZE)) ** 2).exp()
    best = side1.points[(alike + weight * near).argmax(1)]
    moved = case.frame(SIZE, 1).to_network(torch.tensor(record["location"]["points"]))
    assert float((moved - best).abs().max()) < 2 * 4 + 0.1  # refined by up to two places of 4 px


def test_finer_maps_are_read_alike_between_their_cells(material: Material, model: Path) -> None:
    row = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    given = store[material.cases[0].keys[0]]
    fine = finer(given, cells=24)
    assert fine.descriptors.shape == (16, 24, 24)
    assert (fine.uncertainty.shape, fine.stride, given.stride) == ((24, 24), 4, 8)
    # The finer cells' centres lie a quarter of a cell beside the coarser ones.
    points = torch.cartesian_prod(torch.arange(24), torch.arange(24)).flip(-1) * 4 + 1.5
    torch.testing.assert_close(fine.at(points), given.at(points), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fine.confidence_at(points), given.confidence_at(points))
    assert torch.equal(finer(fine, cells=24).lower, F.normalize(fine.lower, dim=0))


def test_raw_maps_are_grown_without_changing_their_lengths() -> None:
    maps = 9 * torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    raw = as_features(maps, side=SIZE, unit=False)[0]
    fine = finer(raw, cells=12, unit=False).descriptors
    # At two cells for one, the mean of neighbouring fine cells is what lies between their centres.
    middle = (fine[:, 1:-1:2] + fine[:, 2::2]) / 2
    middle = (middle[..., 1:-1:2] + middle[..., 2::2]) / 2
    between = F.avg_pool2d(maps[0], 2, stride=1)
    torch.testing.assert_close(middle, between)
    unit = finer(raw, cells=12).descriptors
    torch.testing.assert_close(unit, F.normalize(fine, dim=0))


def test_a_raw_row_s_regions_are_matched_by_raw_maps(material: Material) -> None:
    """Lengths that differ between places change which regions match; Row.unit says so."""
    case = next(c for c in material.cases if c.truth is not None and len(c.truth.active) > 3)
    assert case.truth is not None

    def extract(images: Tensor) -> list[Features]:
        return as_features(F.avg_pool2d(images.float(), 8), side=SIZE, unit=False)

    found = {}
    for unit in (False, True):
        row = Row("x", extract, unit=unit)
        store = FeatureStore(row, material.pictures, PROTOCOL, device=CPU, limit=1 << 30)
        (record,) = measure([case], row, store, material.pictures, PROTOCOL)
        fine = [finer(store[key], cells=28, unit=unit) for key in case.keys]
        match = match_regions(*fine, case.boxes0, case.boxes1, confidence=False, lower=False)
        active = case.truth.active
        order = match.score[active].argsort(descending=True, stable=True)
        iou = box_iou(case.boxes1[match.index[active]], case.truth.boxes).diagonal()[order]
        assert record["iou_by_rank"] == pytest.approx(iou.tolist(), abs=1e-5)
        found[unit] = record["iou_by_rank"]
    assert found[False] != found[True]


def test_boxes_stay_upright_in_the_square() -> None:
    frame = Frame(original=(300, 300), network=(100, 100))
    boxes = torch.tensor([[30.0, 30, 30, 30], [0, 0, 299, 299], [299, 20, 299, 40]])
    found = to_square(boxes, frame)
    assert bool((found[:, 2:] >= found[:, :2]).all())
    assert bool((found >= 0).all())
    assert bool((found <= 99).all())
    assert found[1].tolist() == pytest.approx([0, 0, 99, 99], abs=1e-4)


def test_products_per_bin_in_half_precision_give_the_same_scores(
    material: Material, model: Path
) -> None:
    """What a GPU computes, run here in the CPU's half precision."""
    row = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    case = material.cases[0]
    pooled = [
        pool_layer(store[key], boxes[:20], "descriptors", confidence=True)
        for key, boxes in zip(case.keys, (case.boxes0, case.boxes1), strict=True)
    ]
    exact = region_scores(pooled[:1], pooled[1:], (1.0,), normalised=False)
    dense = dense_products(pooled[0], pooled[1]).clamp_min(0)
    torch.testing.assert_close(dense, exact, rtol=1e-3, atol=1e-3 * float(exact.max()))

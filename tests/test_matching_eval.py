"""Semantic matching measured end to end on drawn pairs, and each of its steps by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import surefeat
import surefeat.eval.evaluate as evaluation
import surefeat.eval.proposal_file as proposal_file
from bench import SIZE, write_model, write_pairs
from surefeat.baselines.known import build_row
from surefeat.baselines.rows import Row, as_features
from surefeat.data.pairs import Pair, load_pairs
from surefeat.eval.benchmarks import load_benchmark, shifted, shifted_boxes
from surefeat.eval.matching import find_near, finer, measure, to_square
from surefeat.eval.material import Material, prepare_material
from surefeat.eval.proposal_file import ProposalSettings, proposals_of
from surefeat.eval.protocol import LocationBonus, Protocol
from surefeat.eval.results import read_result
from surefeat.eval.run import evaluate_rows, some_pairs
from surefeat.eval.store import BATCH, FeatureStore, seen_at
from surefeat.features import Features
from surefeat.flow import dense_from_regions, transfer_points
from surefeat.geometry import Frame, box_iou
from surefeat.image import resize
from surefeat.model import DenseFeatures
from surefeat.nearest import find, prepare
from surefeat.regions import dense_products, match_regions, pool_layer, region_scores

CPU = torch.device("cpu")
PROTOCOL = Protocol(side=SIZE, proposals=ProposalSettings(count=60))


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def boxes(listed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Proposals of the list, computed once for all tests."""
    file = tmp_path_factory.mktemp("proposals") / "p.safetensors"
    images = [path for pair in load_pairs(listed) for path in (pair.image0, pair.image1)]
    proposals_of(images, PROTOCOL.proposals, file=file, quiet=True)
    return file


@pytest.fixture(scope="module")
def material(listed: Path, boxes: Path) -> Material:
    benchmark = load_benchmark("pairs", listed)
    return prepare_material(benchmark, PROTOCOL, proposals=boxes, quiet=True)


@pytest.fixture
def run(listed: Path, model: Path, boxes: Path) -> Callable[..., dict[str, Any]]:
    """Evaluate the small model; returns its result."""

    def evaluated(out: Path, **more: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "rows": [f"mine={model}"], "init": (), "proposals": boxes, "boxes": 60, "side": SIZE,
            "device": "cpu", "quiet": True,
        }  # fmt: skip
        paths = evaluate_rows("pairs", listed, out=out, **settings | more)
        return read_result(paths[0])

    return evaluated


def without_clock(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("date", "seconds")}


def test_a_result_says_what_was_measured_and_how(
    run: Callable[..., dict[str, Any]], tmp_path: Path, listed: Path
) -> None:
    result = run(tmp_path)
    pairs = load_pairs(listed)
    assert (result["row"], result["benchmark"], result["split"]) == ("mine", "pairs", "test")
    assert result["counts"]["pairs"] == len(pairs) == 6
    assert result["counts"]["points"] == sum(int(pair.visible.sum()) for pair in pairs)
    assert result["config"]["protocol"]["proposals"]["count"] == 60
    assert len(result["weights_sha256"]) == 64
    for route in ("flow", "nearest", "voting", "location", "identity", "shifted nearest"):
        for rule in ("scnet", "img", "bbox-kp"):
            for alpha in ("0.05", "0.1", "0.15"):
                assert 0 <= result["metrics"][f"{route} pck@{alpha} {rule}"] <= 100
                assert f"{route} pck@{alpha} {rule} per point" in result["metrics"]
    assert "shifted flow pck@0.1 img" not in result["metrics"]
    assert not any(name.endswith(" bbox") for name in result["metrics"])
    assert 0 < result["metrics"]["pcr area"] < 1
    assert {"nearest auroc confidence", "nearest aurc score", "true matches: calibration error",
            "voting auroc margin"} <= result["metrics"].keys()  # fmt: skip
    assert len(result["curves"]["pcr"]) == 101
    assert len(result["curves"]["miou"]) == 100
    per_pair = result["pairs"]["nearest pck@0.1 img"]
    expected = result["metrics"]["nearest pck@0.1 img"]
    assert sum(per_pair) / len(per_pair) == pytest.approx(expected, abs=1e-3)
    names = {pair.category for pair in pairs}
    assert result["by_class"]["flow pck@0.1 img"].keys() == names


def test_identity_is_what_a_loop_over_the_list_gives(
    run: Callable[..., dict[str, Any]], tmp_path: Path, listed: Path
) -> None:
    """All images have one size, so the same place is the same pixel."""
    result = run(tmp_path, measures=("nearest",), shifted=())
    shares = []
    for pair in load_pairs(listed):
        points0, points1 = pair.common()
        near = [(a - b).norm() < 0.1 * SIZE for a, b in zip(points0, points1, strict=True)]
        shares.append(100 * sum(map(bool, near)) / len(near))
    expected = sum(shares) / len(shares)
    assert result["metrics"]["identity pck@0.1 img"] == pytest.approx(expected, abs=1e-3)
    assert "pcr area" not in result["metrics"]


def test_an_image_is_found_in_itself(model: Path, tmp_path: Path, boxes: Path) -> None:
    """Known answer: every route leads back to the point, every region to itself."""
    write_pairs(tmp_path)
    own = [line.split(",") for line in (tmp_path / "pairs.csv").read_text().splitlines()]
    for line in own[1:]:
        line[1], line[5], line[6] = line[0], line[3], line[4]
    (tmp_path / "pairs.csv").write_text("".join(",".join(line) + "\n" for line in own))
    (path,) = evaluate_rows(
        "pairs", tmp_path, rows=[f"mine={model}"], out=tmp_path / "out", init=(),
        proposals=boxes, boxes=60, side=SIZE, device="cpu", quiet=True,
    )  # fmt: skip
    metrics = read_result(path)["metrics"]
    for route in ("nearest", "voting", "location", "flow", "identity"):
        assert metrics[f"{route} pck@0.1 img"] == 100, route
    assert metrics["pcr area"] > 0.98
    assert metrics["miou area"] > 0.97
    assert metrics["shifted identity pck@0.1 img"] == 0


def test_an_interrupted_evaluation_continues_to_the_same_result(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", {"cpu": 2})
    whole = run(tmp_path / "whole")
    calls = []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts")
    (cache,) = (tmp_path / "parts" / "cache").glob("*.jsonl")
    assert len(cache.read_text().splitlines()) == 4
    # A crash in the middle of a line, too.
    cache.write_text(cache.read_text()[:-20])
    assert without_clock(run(tmp_path / "parts")) == without_clock(whole)
    assert len(cache.read_text().splitlines()) == 12


def test_a_finished_evaluation_is_read_back(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path)

    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(evaluation, "measure", never)
    assert without_clock(run(tmp_path)) == without_clock(first)
    with pytest.raises(AssertionError):
        run(tmp_path, side=64)


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


def test_mean_flow_is_the_printed_route_from_regions_pooled_by_means(
    material: Material, model: Path
) -> None:
    """Against the public functions, one after the other."""
    row = build_row(f"mine={model}", init=(), device=CPU)
    store = FeatureStore(row, material.pictures, material.protocol, device=CPU, limit=1 << 30)
    coarse = replace(PROTOCOL, pooled_cells=1)
    case = replace(material.cases[0], measures=("mean-flow",))
    (record,) = measure([case], row, store, material.pictures, coarse)
    assert set(record) == {"pair", "variant", "identity", "mean-flow"}
    frames = [case.frame(coarse.side, i) for i in (0, 1)]
    boxes = [to_square(b, f) for b, f in zip((case.boxes0, case.boxes1), frames, strict=True)]
    found = match_regions(*(store[key] for key in case.keys), *boxes, pooling="mean")
    guide = resize(material.pictures[case.keys[0]][None], size=(coarse.side, coarse.side))[0]
    field = dense_from_regions(
        found.boxes0, found.boxes1, found.score, guide, size1=(coarse.side, coarse.side)
    )
    moved = transfer_points(field, frames[0].to_network(case.pair.common()[0]))
    expected = frames[1].to_original(moved)
    torch.testing.assert_close(
        torch.tensor(record["mean-flow"]["points"]), expected, atol=2e-3, rtol=0
    )


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


def test_a_raw_row_s_regions_are_matched_by_raw_maps(material: Material, model: Path) -> None:
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
    image, file = load_pairs(listed)[0].image0, tmp_path / "boxes.safetensors"
    settings = ProposalSettings(count=20)
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
        proposals_of([image], ProposalSettings(count=21), file=file, quiet=True)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"boxes\.safetensors is damaged .*; remove it"):
        proposals_of([image], settings, file=file, quiet=True)


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


def test_inputs_are_the_sizes_the_network_sees(
    run: Callable[..., dict[str, Any]], listed: Path, model: Path, tmp_path: Path
) -> None:
    result = run(tmp_path, inputs=(64, SIZE), measures=("nearest",), shifted=())
    assert result["row"] == f"mine@64+{SIZE}"
    assert result["config"]["protocol"]["inputs"] == [64, SIZE]
    assert (tmp_path / f"pairs-test-mine@64+{SIZE}.json").is_file()


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


def test_evaluate_gives_what_the_files_hold(
    listed: Path, model: Path, boxes: Path, tmp_path: Path
) -> None:
    """A model in memory and its folder measure the same; the table has a line per row."""
    options: dict[str, Any] = {
        "data": listed, "proposals": boxes, "boxes": 60, "side": SIZE, "quiet": True,
        "measures": ("nearest", "regions"), "shifted": (),
    }  # fmt: skip
    given = DenseFeatures.from_pretrained(model, device="cpu").train()
    found = surefeat.evaluate(
        given, "pairs", rows=[f"again={model}"], out=tmp_path / "a", **options
    )
    assert given.training
    assert [path.name for path in found.paths] == ["pairs-test-ours.json", "pairs-test-again.json"]
    assert found.metrics == json.loads(found.paths[0].read_text())["metrics"]
    assert found.metrics == found.results[1]["metrics"]
    head, _, ours, again, identity = found.table().splitlines()
    shown = f"| {found.metrics['nearest pck@0.1 img']:.1f} |"
    assert head.startswith("| row |")
    assert "| nearest |" in head
    assert ours.startswith("| ours |")
    assert again.startswith("| again |")
    assert shown in ours
    assert shown in again
    assert identity.startswith("| identity (control) |")
    folder = surefeat.evaluate(model, "pairs", out=tmp_path / "b", device="cpu", **options)
    assert folder.metrics == found.metrics
    assert folder.results[0]["weights_sha256"] == found.results[0]["weights_sha256"]


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
        ("1.png", "gone.png", r"pairs\.csv, line \d+: there is no image .*gone\.png"),
        ("\n0.png,", "\n0.png,extra,", r"pairs\.csv, line 2"),
        (".", "9999.", r"pairs\.csv, line \d+"),
    ],
)
def test_a_malformed_list_is_never_a_smaller_benchmark(
    old: str, new: str, message: str, model: Path, tmp_path: Path
) -> None:
    path = write_pairs(tmp_path)
    head, body = path.read_text().split("\n", 1)
    changed = ("\n" + body).replace(old, new) if old != "." else "\n" + body.replace(".", "9999.")
    path.write_text(head + changed)
    with pytest.raises(ValueError, match=message):
        evaluate_rows(
            "pairs", path, rows=[f"m={model}"], init=(), device="cpu", out=tmp_path / "out"
        )


def test_a_part_of_a_benchmark_is_called_so(listed: Path) -> None:
    part = some_pairs(load_benchmark("pairs", listed), 2)
    assert (len(part.pairs), part.split) == (2, "test-2-of-6")


def test_a_result_file_is_small_and_json(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run(tmp_path)
    text = (tmp_path / "pairs-test-mine.json").read_text()
    assert len(text) < 40_000
    assert json.loads(text)["row"] == "mine"
    assert len(text.splitlines()) < 40

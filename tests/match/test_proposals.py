"""Proposals: the sampler against its definition, what the boxes promise, the file of many."""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from surefeat.core.geometry import box_iou, boxes_from_xywh
from surefeat.core.image import ImageError
from surefeat.data.sources import find_images
from surefeat.match import proposals
from surefeat.match.config import ProposalConfig
from surefeat.match.proposals import (
    key_of,
    make_proposals,
    proposals_of,
    propose,
    read_proposals,
    write_proposals,
)
from tiny import smooth_photo

prim = pytest.importorskip("surefeat.match.prim", reason="needs pip install 'surefeat[proposals]'")

FAST = ProposalConfig(draws=300)
FEW = ProposalConfig(count=30, draws=100)
# Four superpixels in a ring with a chord: areas and edge similarities made up by hand.
AREAS = [0.02, 0.08, 0.3, 0.6]
EDGES = {(0, 1): 0.9, (1, 2): 0.5, (2, 3): 0.7, (0, 3): 0.3, (0, 2): 0.6}


def hand_made_graph() -> object:
    half = sorted((*pair, rho) for (i, j), rho in EDGES.items() for pair in ((i, j), (j, i)))
    index = {(i, j): n for n, (i, j, _) in enumerate(half)}
    boxes = np.array([[0, 0, 9, 9], [10, 0, 19, 9], [10, 10, 19, 19], [0, 10, 9, 19]])
    return prim.Graph(
        areas=np.array(AREAS),
        boxes=boxes,
        starts=np.array([sum(i < n for i, _, _ in half) for n in range(5)]),
        ends=np.array([j for _, j, _ in half]),
        twins=np.array([index[j, i] for i, j, _ in half]),
        similarity=np.array([rho for _, _, rho in half]),
    )


def exact_distribution() -> dict[frozenset[int], float]:
    """Every tree's probability, by following all draws; E0 is integrated out in closed form."""
    found: dict[frozenset[int], float] = {}

    def grow(tree: frozenset[int], chance: float, bar: float) -> None:
        # E0 = 2U is at least `bar`, the largest alpha + 1 - rho passed so far, with probability
        # 1 - bar / 2; `chance` is that of the edges drawn, given E0 allows them.
        frontier = [
            (rho, j if i in tree else i)
            for (i, j), rho in EDGES.items()
            if (i in tree) != (j in tree)
        ]
        if not frontier:
            found[tree] = found.get(tree, 0) + chance * (1 - bar / 2)
            return
        total = sum(rho for rho, _ in frontier)
        alpha = float(np.interp(sum(AREAS[i] for i in tree), prim.SIZE_AREAS, prim.SIZE_CDF))
        for rho, node in frontier:
            level = max(bar, min(2.0, alpha + 1 - rho))
            found[tree] = found.get(tree, 0) + chance * rho / total * (level - bar) / 2
            grow(tree | {node}, chance * rho / total, level)

    for seed in range(4):
        grow(frozenset([seed]), 0.25, 0.0)
    return found


def photo(height: int = 96, width: int = 128) -> Tensor:
    """Coloured rectangles on a gradient, with a little noise."""
    rng = np.random.default_rng(0)
    image = np.linspace(40, 90, width)[None, :, None] + rng.normal(0, 2, (height, width, 3))
    for _ in range(8):
        y, x = rng.integers(0, height - 20), rng.integers(0, width - 20)
        image[y : y + rng.integers(10, 40), x : x + rng.integers(10, 40)] = rng.integers(0, 255, 3)
    return torch.from_numpy(image.clip(0, 255).astype(np.uint8)).permute(2, 0, 1)


def test_sampler_draws_trees_with_the_probabilities_of_its_definition() -> None:
    graph, draws = hand_made_graph(), 200_000
    members = prim.draw_trees(
        graph.areas, graph.starts, graph.ends, graph.twins, graph.similarity,
        np.array(prim.SIZE_AREAS), np.array(prim.SIZE_CDF), draws, np.random.default_rng(0),
    )  # fmt: skip
    expected = exact_distribution()
    assert math.isclose(sum(expected.values()), 1)
    codes, counts = np.unique(members @ (1 << np.arange(4)), return_counts=True)
    drawn = {
        frozenset(i for i in range(4) if code >> i & 1): n
        for code, n in zip(codes, counts, strict=True)
    }
    assert set(drawn) <= {tree for tree, chance in expected.items() if chance > 0}
    chi2 = sum(
        (drawn.get(tree, 0) - draws * p) ** 2 / (draws * p) for tree, p in expected.items() if p > 0
    )
    # 14 connected sets, 13 degrees of freedom: 34.5 is exceeded once in 1,000 seeds.
    assert len([p for p in expected.values() if p > 0]) == 14
    assert chi2 < 34.5


def test_drawn_boxes_are_those_of_the_drawn_trees() -> None:
    graph = hand_made_graph()
    boxes = prim.draw(graph, 2000, np.random.default_rng(1))
    hulls = set()
    for tree, chance in exact_distribution().items():
        own = graph.boxes[sorted(tree)]
        hulls |= {(*own[:, :2].min(0), *own[:, 2:].max(0))} if chance > 1e-3 else set()
    assert {tuple(box) for box in boxes.tolist()} == {tuple(map(int, hull)) for hull in hulls}


def test_graph_has_the_similarity_of_the_paper() -> None:
    # Two halves of a 4 x 6 image, left and right, and a third superpixel of one row below them.
    labels = np.array([[0, 0, 0, 1, 1, 1]] * 4 + [[2] * 6], dtype=np.int32)
    lab = np.zeros((5, 6, 3), np.uint8)
    lab[:, :, 0] = np.where(np.arange(6) < 4, 100, 112)  # of 16 levels: HISTOGRAM_BITS
    graph = prim.build_graph(labels, lab)
    assert graph.starts.tolist() == [0, 2, 4, 6]
    assert graph.ends.tolist() == [1, 2, 0, 2, 0, 1]
    assert graph.ends[graph.twins].tolist() == [0, 0, 1, 1, 2, 2]
    assert graph.boxes.tolist() == [[0, 0, 2, 3], [3, 0, 5, 3], [0, 4, 5, 4]]
    # Perimeters 14, 14, 14; 0 and 1 share 4 sides, 0 and 2 share 3. Colours: 0 all dark, 1 a third
    # dark, 2 two thirds dark.
    for edge, size, common, overlap in ((0, 24 / 30, 4 / 14, 1 / 3), (1, 18 / 30, 3 / 14, 2 / 3)):
        energy = 3.0017 - 2.3655 * (1 - size) - 1.0029 * common - 2.6864 * overlap
        assert graph.similarity[edge] == pytest.approx(1 / (1 + math.exp(energy)), rel=1e-6)


def test_spread_prefers_boxes_unlike_those_it_has() -> None:
    boxes = np.array([[0, 0, 9, 9], [0, 0, 9, 8], [50, 50, 59, 59], [0, 0, 9, 4]], dtype=np.float64)
    levels = np.array([0.7, 1.0])
    assert prim.spread(boxes, levels, 3).tolist() == [0, 2, 3]
    assert prim.spread(boxes, levels, 9).tolist() == [0, 2, 3, 1]
    assert prim.spread(boxes, np.array([1.0]), 2).tolist() == [0, 1]


def test_boxes_are_distinct_and_inside_the_image() -> None:
    boxes = propose(photo(), replace(FAST, count=50))
    assert boxes.dtype == torch.float32
    assert 10 <= len(boxes) <= 50
    assert len(boxes.unique(dim=0)) == len(boxes)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= boxes[:, :2]).all()
    assert (boxes[:, 2:] <= torch.tensor([127.0, 95.0])).all()


def test_a_large_image_gets_the_boxes_of_its_shrunk_copy() -> None:
    small = photo()
    large = small.repeat_interleave(4, 1).repeat_interleave(4, 2)
    few = ProposalConfig(draws=300, side=128)
    edges = torch.tensor([0, 0, 1, 1])
    assert torch.allclose(propose(large, few), (propose(small, few) + edges) * 4 - edges)


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (40, 30)])
def test_a_flat_image_gives_the_whole_image(size: tuple[int, int]) -> None:
    flat = torch.full((3, *size), 128, dtype=torch.uint8)
    boxes = propose(flat, ProposalConfig(draws=50))
    assert boxes.tolist() == [[0.0, 0.0, size[1] - 1.0, size[0] - 1.0]]


def test_a_seed_reproduces_its_boxes_and_another_does_not() -> None:
    first, again, other = (propose(photo(), replace(FAST, count=30, seed=s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def rows(boxes: Tensor) -> list[tuple[float, ...]]:
    return [tuple(box) for box in boxes.tolist()]


def test_the_seed_decides_which_trees_are_drawn_and_in_which_order_they_stand() -> None:
    image = smooth_photo(60, 80)
    many = ProposalConfig(count=100_000, draws=40, overlaps=(1.0,))
    drawn = [set(rows(propose(image, replace(many, seed=seed)))) for seed in (0, 1)]
    assert drawn[0] != drawn[1]
    # Four stripes have ten boxes, which many trees all find.
    stripes = torch.tensor([0, 80, 160, 240]).repeat_interleave(20).expand(3, 40, 80)
    every = replace(many, draws=2000)
    orders = [rows(propose(stripes.to(torch.uint8), replace(every, seed=n))) for n in (0, 1, 2)]
    assert len(orders[0]) >= 10
    assert set(orders[0]) == set(orders[1]) == set(orders[2])
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (ProposalConfig(count=0), "count is 0"),
        (ProposalConfig(side=70_000), "side is 70000"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: ProposalConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        propose(photo(), wrong)


def test_missing_extra_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match=r"pip install 'surefeat\[proposals\]'"):
        propose(photo())


@pytest.mark.parametrize(
    "image", [torch.zeros(1, 8, 8, dtype=torch.uint8), torch.zeros(3, 8, 8), torch.zeros(3, 0, 4)]
)
def test_an_image_of_the_wrong_kind_is_refused_with_the_fix(image: Tensor) -> None:
    with pytest.raises(ValueError, match="load_image"):
        propose(image)


def test_the_share_of_objects_below_a_size_is_the_method_s() -> None:
    """The knots of method, section 3, and half way between them."""
    knots = np.array(prim.SIZE_AREAS), np.array(prim.SIZE_CDF)
    areas = [0.0, 0.001, 0.0055, 0.01, 0.1, 0.25, 0.375, 0.5, 0.75, 1.0]
    wanted = [0.0, 0.069, 0.146, 0.223, 0.589, 0.797, 0.8645, 0.932, 1.0, 1.0]
    assert [prim._size_cdf(area, *knots) for area in areas] == pytest.approx(wanted)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for i in range(5):
        Image.new("RGB", (60 + i, 40), (40 * i, 0, 0)).save(tmp_path / "photos" / f"{i}.png")
    return tmp_path / "photos"


def test_what_is_written_comes_back_in_quarter_pixels(tmp_path: Path) -> None:
    boxes = torch.tensor([[0.0, 1.25, 30.5, 40], [5, 5, 6, 700.75], [0.1, 0, 5, 9]])
    given = {"b" * 32: boxes, "a" * 32: torch.zeros(0, 4)}
    write_proposals(given, FEW, tmp_path / "deep" / "p.sqlite")
    known = read_proposals(tmp_path / "deep" / "p.sqlite", FEW)
    assert known.keys() == given.keys()
    assert torch.equal(known["b" * 32], (boxes * 4).round() / 4)
    assert known["a" * 32].shape == (0, 4)


def test_boxes_of_a_very_wide_image_are_kept_as_they_are(tmp_path: Path) -> None:
    """70,000 pixels are more than two bytes hold."""
    wide = tmp_path / "wide.png"
    Image.new("RGB", (70_000, 3), (90, 0, 0)).save(wide)
    boxes = proposals_of([wide], FEW, file=tmp_path / "p", quiet=True)[wide]
    assert torch.equal(boxes, propose(torch.zeros(3, 3, 70_000, dtype=torch.uint8), FEW))
    assert boxes[:, 2].max() > 65_535


def test_proposals_are_made_once_and_added_to(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, file = find_images(photos), tmp_path / "p.sqlite"
    assert make_proposals(items[:3], FEW, file=file, quiet=True) == 3
    asked: list[Tensor] = []
    make = proposals.propose

    def counted(image: Tensor, config: ProposalConfig) -> Tensor:
        asked.append(image)
        return make(image, config)

    monkeypatch.setattr(proposals, "propose", counted)
    assert make_proposals(items, FEW, file=file, quiet=True) == 2
    assert len(asked) == 2
    assert make_proposals(items, FEW, file=file, quiet=True) == 0
    known = read_proposals(file, FEW)
    assert known.keys() == {key_of(path.read_bytes()) for path in photos.iterdir()}
    renamed = (photos / "0.png").rename(tmp_path / "elsewhere.png")
    kept = proposals_of([renamed], FEW, file=file, quiet=True)[renamed]
    assert torch.equal(kept, known[key_of(renamed.read_bytes())])
    assert len(asked) == 2


def test_what_was_made_before_an_interruption_is_kept_and_written_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving an image costs the same however many the file holds."""
    monkeypatch.setattr(proposals, "_SAVE_EVERY", 1)
    items, file = find_images(photos), tmp_path / "p.sqlite"
    packed, make, compress = [], proposals.propose, zlib.compress

    def interrupted(image: Tensor, config: ProposalConfig) -> Tensor:
        if image.shape[2] == 63:
            raise KeyboardInterrupt
        return make(image, config)

    monkeypatch.setattr(proposals, "propose", interrupted)
    monkeypatch.setattr(zlib, "compress", lambda data: packed.append(data) or compress(data))
    with pytest.raises(KeyboardInterrupt):
        make_proposals(items, FEW, file=file, workers=1, quiet=True)
    monkeypatch.setattr(proposals, "propose", make)
    assert make_proposals(items, FEW, file=file, quiet=True) == 2
    assert len(packed) == len(read_proposals(file, FEW)) == 5


def test_a_file_is_read_where_nothing_can_be_made(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "p.sqlite"
    make_proposals(find_images(photos), FAST, file=file, quiet=True)
    for missing in ("cv2", "numba", "surefeat.match.prim"):
        monkeypatch.setitem(sys.modules, missing, None)
    file.chmod(0o444)
    paths = list(photos.iterdir())
    known = read_proposals(file, FAST)
    assert [len(known[key_of(path.read_bytes())]) > 0 for path in paths] == [True] * 5


def test_a_corrupt_image_does_not_stop_the_others(photos: Path, tmp_path: Path) -> None:
    (photos / "2.png").write_bytes(b"nothing")
    file = tmp_path / "p.sqlite"
    assert make_proposals(find_images(photos), FEW, file=file, quiet=True) == 4
    with pytest.raises(ImageError, match=r"2\.png"):
        proposals_of(photos.iterdir(), FEW, file=file, quiet=True)


def test_other_settings_and_damaged_files_are_refused(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.sqlite"
    make_proposals(find_images(photos), FEW, file=file, quiet=True)
    with pytest.raises(ValueError, match="of other settings"):
        read_proposals(file, replace(FEW, seed=1))
    with pytest.raises(ValueError, match="of other settings"):
        make_proposals(find_images(photos), replace(FEW, count=31), file=file, quiet=True)
    whole = file.read_bytes()
    for damaged in (whole[:100], b"PK\3\4" + whole[4:], b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged or holds no proposals"):
            read_proposals(file, FEW)
    with pytest.raises(FileNotFoundError, match="surefeat boxes propose"):
        read_proposals(tmp_path / "gone.sqlite")


def test_boxes_cover_the_objects_of_real_photos(data_root: Path) -> None:
    index = json.loads((data_root / "voc" / "instances.json").read_text())
    best = []
    with tarfile.open(data_root / "voc" / "voc-00.tar") as archive:
        records = {r["file_name"]: r["id"] for r in index["images"] if r["voc_split"] == "val"}
        for member in [m for m in archive if m.name in records][:60:5]:
            file = archive.extractfile(member)
            assert file is not None
            pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(file.read())).convert("RGB")))
            truth = [
                a["bbox"]
                for a in index["annotations"]
                if a["image_id"] == records[member.name] and not a["difficult"]
            ]
            boxes = propose(pixels.permute(2, 0, 1))
            best.append(box_iou(boxes_from_xywh(torch.tensor(truth)), boxes).amax(1))
    # 0.89 on 300 images (results/studies/proposals_recall.json); a grid of as many boxes has 0.67.
    assert (torch.cat(best) >= 0.5).float().mean() > 0.75

"""SCNet: its loss, its votes and its mirrors against loops, and its learning of two pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sets import PROTOCOL, SIZE
from surefeat.data.pairs import load_pairs
from surefeat.learn.runs import Run
from surefeat.match.proposals import proposals_of
from surefeat.measure.evaluate import evaluate_rows
from surefeat.measure.results import Score, read_result
from surefeat.peers import fit, scnet
from surefeat.peers.fitting import FitConfig, load_peer
from surefeat.peers.proposal_flow import offset_bins
from surefeat.peers.scnet import (
    VOTES,
    Kind,
    Scnet,
    ScnetConfig,
    TaughtPair,
    hinge_loss,
    learn_scnet,
    mirror_boxes,
    offset_votes,
    pair_losses,
    pool_square,
    pooled_vectors,
    region_scores_of,
    scnet_row,
    scnet_row_of,
    teach_pairs,
)
from tiny import CPU

CHANNELS = 12
SMALL = ScnetConfig(
    inputs=49 * CHANNELS, outputs=64, side=SIZE, boxes=60,
    fit=FitConfig(steps=30, batch=4, lr=1e-2, log_every=10, checkpoint_every=15),
)  # fmt: skip


def look(images: Tensor) -> Tensor:
    """A trunk that knows each cell of 8 px by its pixels: (B, 12, 12, 12)."""
    return F.pixel_unshuffle(F.avg_pool2d(images, 4), 2)


def some_boxes(count: int, *, side: int = 224, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(count, 2, generator=generator) * side * 0.5
    extent = (0.2 + 0.3 * torch.rand(count, 2, generator=generator)) * side
    return torch.cat([low, low + extent], dim=1).floor()


@pytest.fixture(scope="module")
def pairs(listed: Path, boxes: Path) -> list[TaughtPair]:
    chosen = load_pairs(listed)[:2]
    images = dict.fromkeys(p for pair in chosen for p in (pair.image0, pair.image1))
    known = proposals_of(images, PROTOCOL.proposals, file=boxes, quiet=True)
    return teach_pairs(chosen, known, look, side=SIZE, device=CPU, quiet=True)


def test_the_loss_is_that_of_a_triple_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, overlap = (torch.rand(5, 9, generator=generator) for _ in range(2))
    costs = []
    for row in range(5):
        right = [m for m in range(9) if overlap[row, m] > 0.5]
        wrong = sorted((m for m in range(9) if overlap[row, m] <= 0.2),
                       key=lambda m, r=row: -float(scores[r, m]))  # fmt: skip
        for m in right:
            costs.append(max(0.0, 1 - float(scores[row, m])))
        for m in wrong[: len(right)]:
            assert float(overlap[row, m]) <= 0.2
            costs.append(max(0.0, 1 + float(scores[row, m])))
    loss = hinge_loss(scores, overlap, positive=0.5, negative=0.2)
    assert float(loss) == pytest.approx(sum(costs) / len(costs))


def test_wrong_boxes_are_never_more_than_right_ones_nor_overlap() -> None:
    """Their gradient says which they are: as many a row as right ones, at most."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(40, 30, generator=generator, requires_grad=True)
    overlap = torch.rand(40, 30, generator=generator)
    (slope,) = torch.autograd.grad(hinge_loss(scores, overlap, positive=0.5, negative=0.2), scores)
    right, wrong = slope < 0, slope > 0
    assert torch.equal(right, overlap > 0.5)
    assert bool((overlap[wrong] <= 0.2).all())
    few = torch.minimum((overlap > 0.5).sum(1), (overlap <= 0.2).sum(1))
    assert torch.equal(wrong.sum(1), few)
    nothing = hinge_loss(scores, torch.full((40, 30), 0.3), positive=0.5, negative=0.2)
    assert nothing.item() == 0


def test_votes_are_sums_over_bins_in_a_loop() -> None:
    boxes0, boxes1 = some_boxes(7), some_boxes(8, seed=1)
    alike = torch.rand(7, 8, generator=torch.Generator().manual_seed(2))
    bins, shape = offset_bins(boxes0, boxes1, size0=(224, 224), size1=(224, 224), grid=VOTES)
    votes = offset_votes(alike, bins, total=math.prod(shape))
    singles = 0
    for n in range(7):
        for m in range(8):
            members = [] if bins[n, m] < 0 else (bins == bins[n, m]).nonzero().tolist()
            expected = sum(max(0.0, float(alike[i, j]) - 0.4) for i, j in members)
            assert float(votes[n, m]) == pytest.approx(expected, abs=1e-5)
            singles += len(members) == 1
    assert singles  # a bin with one member holds that one's own vote
    assert bool((bins < 0).any())


def model_of(kind: Kind, *, inputs: int = 49 * 2) -> Scnet:
    torch.manual_seed(3)
    model = Scnet(ScnetConfig(kind=kind, inputs=inputs, outputs=5)).double()
    for layer in (model.look, model.vote):
        if layer is not None:
            torch.nn.init.normal_(layer.weight, std=0.5)
    return model


@pytest.mark.parametrize("kind", ["a", "ag", "ag+"])
def test_scores_are_those_of_loops_and_their_gradient_that_of_differences(kind: Kind) -> None:
    """Six boxes in double precision."""
    model, boxes0, boxes1 = model_of(kind), some_boxes(6).double(), some_boxes(6, seed=1).double()
    pooled = [torch.rand(6, 98, dtype=torch.float64) for _ in range(2)]
    described = [model.describe(part) for part in pooled]
    scores = region_scores_of(kind, *described, boxes0, boxes1, side=224)
    bins, _ = offset_bins(boxes0, boxes1, size0=(224, 224), size1=(224, 224), grid=VOTES)

    def alike(layer: torch.nn.Linear, n: int, m: int) -> float:
        first, second = layer(pooled[0][n]), layer(pooled[1][m])
        return F.cosine_similarity(first, second, dim=0).item()

    for n in range(6):
        for m in range(6):
            own = alike(model.look, n, m)
            if kind == "a":
                expected = max(0.0, own)
            else:
                layer = model.vote or model.look
                same = [] if bins[n, m] < 0 else (bins == bins[n, m]).nonzero().tolist()
                votes = sum(max(0.0, alike(layer, i, j) - 0.4) for i, j in same)
                expected = (own if kind == "ag" else max(0.0, own)) * (votes + 0.01)
            assert float(scores[n, m]) == pytest.approx(expected, abs=1e-9)
    first, second = (part.detach().requires_grad_() for part in described)
    assert torch.autograd.gradcheck(
        lambda a, b: region_scores_of(kind, a, b, boxes0, boxes1, side=224), (first, second)
    )


def test_the_second_layer_alone_learns_and_starts_where_a_ended() -> None:
    model, trained = model_of("ag+"), model_of("a")
    model.start_from(trained.state_dict())
    assert model.vote is not None
    assert torch.equal(model.vote.weight, trained.look.weight)
    learning = [name for name, value in model.named_parameters() if value.requires_grad]
    assert learning == ["vote.weight", "vote.bias"]


@pytest.mark.parametrize("kind", ["a", "ag", "ag+"])
def test_a_mirrored_pair_under_mirrored_features_has_the_same_loss(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes whose rounding to cells is the same from both sides, and layers mirrored too.

    The histogram of offsets counts from the left, whose bins' edges part other matches than from
    the right: which matches vote together is kept.
    """
    model = model_of(kind, inputs=49 * 3)
    maps = torch.rand(2, 3, 14, 14, dtype=torch.float64)
    starts = torch.tensor([[0, 1], [2, 3], [4, 0], [1, 5], [3, 2]])
    boxes = torch.cat([16 * starts + 7, 16 * (starts + torch.tensor([7, 6])) + 8], dim=1).double()
    overlap, size = torch.rand(5, 5), (224, 224)
    bins = offset_bins(boxes, boxes, size0=size, size1=size, grid=VOTES)
    assert len(bins[0].unique()) < 25  # some vote together
    monkeypatch.setattr(scnet, "offset_bins", lambda *_, **__: bins)

    def loss(mirrored: bool) -> Tensor:
        own = mirror_boxes(boxes, side=224) if mirrored else boxes
        seen = maps.flip(-1) if mirrored else maps
        pooled = [pool_square(part, own, side=224) for part in seen]
        pair = TaughtPair(pooled[0], pooled[1], own, own, torch.arange(5), overlap)
        return pair_losses(model, [pair]).detach()

    before, unlike = loss(mirrored=False), loss(mirrored=True)
    with torch.no_grad():  # bins are rows, columns, channels
        for layer in (part for part in (model.look, model.vote) if part is not None):
            layer.weight.copy_(layer.weight.reshape(5, 7, 7, 3).flip(2).reshape(5, -1))
    torch.testing.assert_close(loss(mirrored=True), before)
    assert float((unlike - before).abs()) > 1e-6
    upright = mirror_boxes(boxes, side=224)
    assert bool((upright[:, 2:] >= upright[:, :2]).all())
    torch.testing.assert_close(mirror_boxes(upright, side=224), boxes)


def share_right(model: Scnet, pair: TaughtPair) -> float:
    """PCR at 0.5, of the active boxes that have a match as good as that."""
    described = [model.describe(pooled_vectors(p)) for p in (pair.pooled0, pair.pooled1)]
    scores = region_scores_of(
        model.config.kind, *described, pair.boxes0, pair.boxes1, side=model.config.side
    )
    best = scores[pair.active].argmax(1)
    possible = (pair.overlap > 0.5).any(1)
    hit = pair.overlap.gather(1, best[:, None])[:, 0] > 0.5
    return float(hit[possible].float().mean())


def test_it_learns_two_pairs_by_heart(tmp_path: Path, pairs: list[TaughtPair]) -> None:
    """Their PCR becomes 1. All that is not right is taught as wrong, or nothing forbids it."""
    assert len(pairs) == 4  # two, and two mirrored
    torch.manual_seed(0)
    before = Scnet(SMALL)
    config = replace(
        SMALL, negative=0.5, fit=replace(SMALL.fit, steps=900, lr=5e-3, batch=2)
    )  # fmt: skip
    run = Run.start(tmp_path / "run", config, device="cpu")
    learn_scnet(pairs[::2], run, config, start=None, about={}, device=CPU, quiet=True)
    after = Scnet(SMALL)
    after.load_state_dict(dict(load_peer(tmp_path / "run").tensors))
    shares = [[share_right(model, pair) for pair in pairs[::2]] for model in (before, after)]
    assert shares[1] == [1, 1]
    assert max(shares[0]) < 0.9
    assert run.metrics()[-1]["norm"] > 0


def test_trained_layers_are_rows_and_ag_goes_on_from_a(
    tmp_path: Path, pairs: list[TaughtPair], listed: Path, boxes: Path
) -> None:
    quick = replace(SMALL, fit=replace(SMALL.fit, steps=3, log_every=1))
    run = Run.start(tmp_path / "a", quick, device="cpu")
    learn_scnet(pairs, run, quick, start=None, about={"pairs": 2}, device=CPU, quiet=True)
    stored = load_peer(tmp_path / "a")
    rows = []
    for kind in ("ag", "ag+"):
        config = replace(quick, kind=kind)
        again = Run.start(tmp_path / kind, config, device="cpu")
        with pytest.raises(ValueError, match="--start FOLDER"):
            learn_scnet(pairs, again, config, start=None, about={}, device=CPU, quiet=True)
        learn_scnet(pairs, again, config, start=stored, about={}, device=CPU, quiet=True)
        model = Scnet(config)
        model.load_state_dict(dict(load_peer(tmp_path / kind).tensors))
        name = f"scnet-{kind}"
        rows.append(scnet_row_of(name, model.eval(), look, digest="0" * 64, settings={}))
    paths = evaluate_rows(
        "pairs", listed, rows=rows, out=tmp_path / "results", proposals=boxes, side=SIZE, boxes=60,
        measures=("regions", "voting"), shifted=(), device="cpu", quiet=True,
    )  # fmt: skip
    results = [read_result(path) for path in paths]
    assert all(0 < (Score("pcr area").of(result) or 0) < 1 for result in results)
    assert "voting" not in str(list(results[0]["metrics"]))
    row = scnet_row("scnet-a", stored, init=("none",), device=CPU)
    assert row.asked(("nearest", "regions", "flow")) == ("regions", "flow")


def test_overlap_is_with_the_truth_of_image_1(pairs: list[TaughtPair]) -> None:
    first = pairs[0]
    assert first.overlap.shape == (len(first.active), len(first.boxes1))
    assert float(first.overlap.max()) > 0.5
    mirrored = pairs[1]
    torch.testing.assert_close(mirror_boxes(mirrored.boxes0, side=SIZE), first.boxes0)
    assert torch.equal(mirrored.overlap, first.overlap)


def test_the_command_s_way_leads_from_a_list_of_pairs_to_a_row(
    tmp_path: Path, listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small layer instead of 51 million numbers, and patches instead of VGG16."""
    few = replace(SMALL, boxes=20, fit=replace(SMALL.fit, steps=2, log_every=1))
    monkeypatch.setattr(fit, "ScnetConfig", lambda **asked: replace(few, **asked))
    monkeypatch.setattr(fit, "frozen_vgg", lambda init, *, device: (look, "0" * 64))
    monkeypatch.setattr(fit, "development_pairs", lambda root: ([], load_pairs(listed)[:2]))
    done = fit.fit_peer("scnet-a", listed.parent, out=tmp_path / "a", device="cpu", quiet=True)
    assert done.steps == 2
    done = fit.fit_peer(
        "scnet-ag+", listed.parent, out=tmp_path / "g", start=tmp_path / "a", device="cpu",
        quiet=True, asked=fit.Asked(steps=1, seed=3),
    )  # fmt: skip
    stored = load_peer(tmp_path / "g")
    assert (stored.settings["kind"], stored.settings["fit"]["seed"]) == ("ag+", 3)
    assert stored.about["started from"] == load_peer(tmp_path / "a").digest
    assert stored.about["pairs"] == 2

"""What to label next: every kind once before any twice, doubt counts, labelled ones are done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sets
import tiny
from surefeat.data.drawn import write_folder
from surefeat.data.keypoints import KeypointSet, read_coco
from surefeat.keypoints.suggest import LEAST_DOUBT, cover, covered_share, suggest

GROUPS = 6


def groups(seed: int, *, spread: float = 0.05) -> tuple[Tensor, Tensor]:
    """Vectors of GROUPS clearly different groups of 3 to 20 photos, and which group each is of."""
    generator = tiny.generator(seed)
    sizes = torch.randint(3, 21, (GROUPS,), generator=generator)
    kind = torch.repeat_interleave(torch.arange(GROUPS), sizes)
    kind = kind[torch.randperm(len(kind), generator=generator)]
    centres = torch.eye(GROUPS, 32)
    noise = torch.randn(len(kind), 32, generator=generator) * spread
    return F.normalize(centres[kind] + noise, dim=1), kind


@pytest.mark.parametrize("seed", range(5))
def test_every_group_comes_once_before_any_comes_twice(seed: int) -> None:
    vectors, kind = groups(seed)
    order, gains = cover(vectors, None, count=GROUPS + 4)
    assert sorted(kind[order[:GROUPS]].tolist()) == list(range(GROUPS))
    sizes = torch.bincount(kind)[kind[order[:GROUPS]]].tolist()
    # What stands for many comes first, what stands for few last.
    assert (sizes[0], sizes[-1]) == (max(sizes), min(sizes))
    assert gains == sorted(gains, reverse=True)
    assert len(set(order)) == GROUPS + 4


def test_the_choice_is_the_best_single_addition_by_a_slow_loop() -> None:
    vectors, _ = groups(7, spread=0.4)
    doubts = torch.rand(len(vectors), generator=tiny.generator(1))
    order, gains = cover(vectors, doubts, count=4, chosen=[2, 5])
    taken = [2, 5]
    for place, row in enumerate(order):
        before = _covered(vectors, doubts, taken)
        values = [_covered(vectors, doubts, [*taken, i]) for i in range(len(vectors))]
        assert values[row] == pytest.approx(max(values), abs=1e-6)
        assert gains[place] == pytest.approx(values[row] - before, abs=1e-5)
        taken.append(row)
    assert covered_share(vectors, doubts, taken) == pytest.approx(
        _covered(vectors, doubts, taken), abs=1e-5
    )


def _covered(vectors: Tensor, doubts: Tensor, chosen: list[int]) -> float:
    """The slow way: of every photo its best cosine with a chosen one, at least 0, by its weight."""
    weights = [LEAST_DOUBT + (1 - LEAST_DOUBT) * float(d) for d in doubts]
    total = 0.0
    for vector, weight in zip(vectors, weights, strict=True):
        best = max(float(vector @ vectors[i]) for i in chosen)
        total += weight * min(max(best, 0.0), 1.0)
    return total / sum(weights)


def test_labels_of_what_is_suggested_tell_more_than_labels_drawn_at_random() -> None:
    """Every photo gets the name of the labelled photo it resembles most: how many are right?"""
    for seed in range(5):
        vectors, kind = groups(seed, spread=0.08)
        chosen, _ = cover(vectors, None, count=GROUPS)
        draws = [
            torch.randperm(len(kind), generator=tiny.generator(100 + i))[:GROUPS].tolist()
            for i in range(20)
        ]
        mine, others = _right(vectors, kind, chosen), [_right(vectors, kind, d) for d in draws]
        assert mine > 0.97
        assert mine > sum(others) / len(others) + 0.1


def _right(vectors: Tensor, kind: Tensor, chosen: list[int]) -> float:
    nearest = (vectors @ vectors[chosen].T).argmax(1)
    return float((kind[chosen][nearest] == kind).float().mean())


def test_labelled_photos_are_done_and_doubt_asks_for_more() -> None:
    vectors, kind = groups(3)
    first = [int((kind == group).nonzero()[0, 0]) for group in range(GROUPS - 1)]
    order, _ = cover(vectors, None, count=1, chosen=first)
    assert int(kind[order[0]]) == GROUPS - 1  # the one group that has no label
    # All groups have a label; one is in doubt all the same, and gets the next.
    everyone = [int((kind == group).nonzero()[0, 0]) for group in range(GROUPS)]
    doubts = (kind == 2).float()
    order, _ = cover(vectors, doubts, count=1, chosen=everyone)
    assert int(kind[order[0]]) == 2
    assert order[0] not in everyone


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "photos"
    write_folder(folder, count=6, size=64, seed=0)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    return folder


def test_a_folder_gets_suggestions_from_what_is_not_labelled(drawn: Path) -> None:
    model = sets.feature_model()
    plain = suggest(drawn, model, count=3)
    assert len({one.photo for one in plain.suggestions}) == 3
    assert all(one.doubt is None for one in plain.suggestions)
    assert sum(one.stands_for for one in plain.suggestions) == 6
    assert [one.name for one in plain.skipped] == ["broken.png"]
    whole = read_coco(drawn / "keypoints.json")
    some = KeypointSet(whole.categories, whole.objects[:2])
    more = suggest(drawn, model, count=20, labels=some)
    assert more.labelled == len({item.name for item in some.objects})
    names = {one.photo for one in more.suggestions}
    assert len(names) == 6 - more.labelled  # no more than there are
    assert not names & {item.name for item in some.objects}
    assert all(one.doubt is not None and 0 <= one.doubt <= 1 for one in more.suggestions)
    assert more.covered == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ValueError, match="at least 1"):
        suggest(drawn, model, count=0)

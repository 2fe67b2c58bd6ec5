"""What to label next: every kind once before any twice, for the others' sake; labelled are done."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sets
import tiny
from surefeat.data.drawn import write_folder
from surefeat.data.keypoints import KeypointSet, read_coco
from surefeat.keypoints.suggest import cover, covered_share, for_others, resemblance, suggest

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


def table(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """How far the photos cover each other, and equal shares."""
    count = len(vectors)
    return for_others(resemblance(vectors), torch.arange(count)), torch.full((count,), 1 / count)


def random_table(seed: int, *, photos: int = 9, things: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """How far photos cover things of each other, the things' shares and owners: plain noise."""
    generator = tiny.generator(seed)
    alike = torch.rand(photos, photos * things, generator=generator)
    shares = torch.rand(photos * things, generator=generator)
    return alike, shares / shares.sum(), torch.arange(photos).repeat_interleave(things)


@pytest.mark.parametrize("seed", range(5))
def test_every_group_comes_once_before_any_comes_twice(seed: int) -> None:
    vectors, kind = groups(seed)
    order, gains = cover(*table(vectors), count=GROUPS + 4)
    assert sorted(kind[order[:GROUPS]].tolist()) == list(range(GROUPS))
    sizes = torch.bincount(kind)[kind[order[:GROUPS]]].tolist()
    # What stands for many comes first, what stands for few last.
    assert (sizes[0], sizes[-1]) == (max(sizes), min(sizes))
    assert gains == sorted(gains, reverse=True)
    assert len(set(order)) == GROUPS + 4


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_best_single_addition_by_a_slow_loop(seed: int) -> None:
    alike, shares, owners = random_table(seed)
    order, gains = cover(for_others(alike, owners), shares, count=4, chosen=[2, 5])
    taken = [2, 5]
    for place, row in enumerate(order):
        before = _covered(alike, shares, owners, taken)
        left = [i for i in range(len(alike)) if i not in taken]
        values = {i: _covered(alike, shares, owners, [*taken, i]) for i in left}
        assert values[row] == pytest.approx(max(values.values()), abs=1e-6)
        assert gains[place] == pytest.approx(values[row] - before, abs=1e-5)
        taken.append(row)
    every = _covered(alike, shares, owners, list(range(len(alike))))
    assert covered_share(for_others(alike, owners), shares, taken) == pytest.approx(
        _covered(alike, shares, owners, taken) / every, abs=1e-5
    )


def _covered(alike: Tensor, shares: Tensor, owners: Tensor, chosen: list[int]) -> float:
    """The slow way: each thing by its best chosen photo; by its own like by the best other one."""
    total = 0.0
    for thing, (share, owner) in enumerate(zip(shares.tolist(), owners.tolist(), strict=True)):
        others = [float(alike[i, thing]) for i in range(len(alike)) if i != owner]
        values = [max(others) if i == owner else float(alike[i, thing]) for i in chosen]
        total += share * max(values)
    return total


@pytest.mark.parametrize("seed", range(3))
def test_adding_photos_never_covers_less_and_adds_less_the_more_there_are(seed: int) -> None:
    alike, shares, owners = random_table(seed, photos=12)
    alike = for_others(alike, owners)
    order = torch.randperm(12, generator=tiny.generator(seed)).tolist()
    shares_covered = [covered_share(alike, shares, order[:n]) for n in range(13)]
    assert shares_covered == sorted(shares_covered)
    assert (shares_covered[0], shares_covered[-1]) == (0.0, pytest.approx(1.0))
    last = order[-1]
    added = [
        covered_share(alike, shares, [*order[:n], last]) - shares_covered[n] for n in range(11)
    ]
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(added))


def test_a_photo_that_only_resembles_itself_is_no_help_to_others() -> None:
    """Nine photos of one kind and one of its own: the odd one out would cover itself alone."""
    vectors = F.normalize(
        torch.eye(3)[[0] * 9 + [1]] + 0.2 * torch.rand(10, 3, generator=tiny.generator(0)), dim=1
    )
    alone, shares = resemblance(vectors), torch.full((10,), 0.1)
    assert 9 in cover(alone, shares, count=2)[0]
    assert 9 not in cover(*table(vectors), count=4)[0]
    # Two of it are a kind, and one of them stands for both.
    twice = torch.cat([vectors, vectors[9:]])
    assert len({9, 10} & set(cover(*table(twice), count=2)[0])) == 1


def test_labels_of_what_is_suggested_tell_more_than_labels_drawn_at_random() -> None:
    """Every photo gets the name of the labelled photo it resembles most: how many are right?"""
    for seed in range(5):
        vectors, kind = groups(seed, spread=0.08)
        chosen, _ = cover(*table(vectors), count=GROUPS)
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


def test_a_photo_of_the_kind_without_labels_is_chosen() -> None:
    vectors, kind = groups(3)
    for missing in range(GROUPS):
        first = [int((kind == group).nonzero()[0, 0]) for group in range(GROUPS)]
        del first[missing]
        order, _ = cover(*table(vectors), count=1, chosen=first)
        assert int(kind[order[0]]) == missing


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
    assert sum(one.stands_for for one in plain.suggestions) == 6
    assert 0 < plain.covered <= 1
    assert [one.name for one in plain.skipped] == ["broken.png"]
    whole = read_coco(drawn / "keypoints.json")
    some = KeypointSet(whole.categories, whole.objects[:2])
    more = suggest(drawn, model, count=20, labels=some)
    assert more.labelled == len({item.name for item in some.objects})
    names = {one.photo for one in more.suggestions}
    assert len(names) == 6 - more.labelled  # no more than there are
    assert not names & {item.name for item in some.objects}
    assert more.covered == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ValueError, match="at least 1"):
        suggest(drawn, model, count=0)


def test_one_photo_alone_is_suggested(drawn: Path) -> None:
    photo = next(drawn.glob("*[0-9].*"))
    only = suggest([photo], sets.feature_model(), count=3)
    assert [(one.photo, one.stands_for) for one in only.suggestions] == [(str(photo), 1)]

"""What to label next: every kind once before any twice, for the others' sake; labelled are done."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sets
import tiny
from surefeat.data.decode import Place
from surefeat.data.drawn import write_folder
from surefeat.data.keypoints import KeypointSet, read_coco
from surefeat.keypoints import suggest as subject
from surefeat.keypoints.suggest import (
    KEPT,
    Kind,
    Looked,
    PhotoGrid,
    compare,
    cover,
    covered_share,
    for_others,
    suggest,
)
from surefeat.model.config import POINT_WEIGHTS

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


def resemblance(vectors: Tensor) -> Tensor:
    return (vectors @ vectors.T).clamp(0, 1)


def table(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """How far the photos cover each other, and equal shares."""
    count = len(vectors)
    return for_others(resemblance(vectors), torch.arange(count)), torch.full((count,), 1 / count)


def unit(*size: int, seed: int, spread: float = 1.0, around: Tensor | None = None) -> Tensor:
    noise = torch.randn(*size, generator=tiny.generator(seed)) * spread
    return F.normalize(noise if around is None else around + noise, dim=-1)


def noise_grids(cells: list[int]) -> list[PhotoGrid]:
    """Photos of so many cells that have nothing in common."""
    return [
        PhotoGrid(
            unit(n, 4, seed=seed), unit(n, 6, seed=100 + seed),
            0.5 + torch.rand(n, generator=tiny.generator(200 + seed)),
            torch.rand(n, generator=tiny.generator(300 + seed)),
        )
        for seed, n in enumerate(cells)
    ]  # fmt: skip


def photos_of(kinds: list[int], *, cells: int = 100, things: int = 30) -> list[PhotoGrid]:
    """Photos whose first `things` cells are of a thing of their kind, all others sky, which the
    cohort knows; all cells are as confident."""
    sky = unit(16, seed=90)
    grids = []
    for seed, kind in enumerate(kinds):
        thing = unit(things, 16, seed=kind)
        lower = torch.cat([thing, sky.expand(cells - things, -1)])
        lower = unit(cells, 16, seed=50 + seed, spread=0.05, around=lower)
        common = torch.where(torch.arange(cells) < things, 0.2, 0.99)
        grids.append(PhotoGrid(lower[:, :8], lower, torch.ones(cells), common))
    return grids


def as_looked(grids: list[PhotoGrid]) -> Looked:
    return compare(iter([(Path(f"{number}.png"), grid) for number, grid in enumerate(grids)]))


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


def test_what_photos_cover_of_each_other_is_what_a_slow_loop_finds() -> None:
    grids = noise_grids([60, 20, 75])
    looked = as_looked(grids)
    kept = [_slow_kept(grids, number) for number in range(len(grids))]
    for covered, (cells, shares) in enumerate(kept):
        for place in range(KEPT):
            column = covered * KEPT + place
            share = shares[place] / len(grids) if place < len(cells) else 0.0
            assert float(looked.shares[column]) == pytest.approx(share, abs=1e-6)
            if place >= len(cells):
                continue
            best = [
                max(_slow_similarity(grids[covered], cells[place], grids[i], c) for c in kept[i][0])
                for i in range(len(grids))
            ]
            best[covered] = max(value for i, value in enumerate(best) if i != covered)
            expected = torch.tensor(best).clamp(0, 1)
            torch.testing.assert_close(
                looked.alike[:, column].float(), expected, atol=1e-3, rtol=0
            )  # fmt: skip


def _slow_kept(grids: list[PhotoGrid], number: int) -> tuple[list[int], list[float]]:
    """The cells that count most and their shares, as the docstring has it."""
    every = [_slow_excess(grids, i) for i in range(len(grids))]
    flat = sorted(value for some in every for value in some)
    middle = flat[(len(flat) - 1) // 2]
    confidence = grids[number].confidence.tolist()
    weights = [
        c * c * max(e - middle, 1e-6) for c, e in zip(confidence, every[number], strict=True)
    ]
    cells = sorted(range(len(weights)), key=lambda n: -weights[n])[:KEPT]
    return cells, [weights[n] / sum(weights[c] for c in cells) for n in cells]


def _slow_excess(grids: list[PhotoGrid], number: int) -> list[float]:
    own, found = grids[number], []
    assert own.common is not None
    for n in range(len(own.lower)):
        best = []
        for other, grid in enumerate(grids):
            surest = sorted(range(len(grid.lower)), key=lambda c: -float(grid.confidence[c]))
            if other != number:
                best.append(max(float(own.lower[n] @ grid.lower[c]) for c in surest[:KEPT]))
        found.append(sum(best) / len(best) - float(own.common[n]))
    return found


def _slow_similarity(grid0: PhotoGrid, cell0: int, grid1: PhotoGrid, cell1: int) -> float:
    descriptors = float(grid0.descriptors[cell0] @ grid1.descriptors[cell1])
    lower = float(grid0.lower[cell0] @ grid1.lower[cell1])
    both = POINT_WEIGHTS[0] * descriptors + POINT_WEIGHTS[1] * lower
    return both / sum(POINT_WEIGHTS)


def test_cells_count_that_other_photos_resemble_and_the_cohort_does_not() -> None:
    grids = photos_of([1] * 6)
    kind = Kind.of(grids)
    sky = grids[0].lower[-1]
    for grid in grids:
        vectors, shares = kind.kept(grid)
        is_sky = vectors[:, 8:] @ sky > 0.7
        assert shares[is_sky].sum() < 0.1  # of 70 % of the cells
        assert float(shares.sum()) == pytest.approx(1)


def test_without_a_cohort_or_another_photo_confidence_alone_counts() -> None:
    (plain,) = noise_grids([KEPT])
    bare = [replace(grid, common=None) for grid in noise_grids([KEPT, KEPT])]
    for grid, grids in ((plain, [plain]), (bare[0], bare)):
        _, shares = Kind.of(grids).kept(grid)
        squares = grid.confidence.square().sort(descending=True).values
        torch.testing.assert_close(shares, squares / squares.sum())


def test_a_photo_of_an_uncovered_kind_is_chosen_whatever_sky_is_behind_it() -> None:
    kinds = [1] * 8 + [2] * 4 + [3] * 3
    looked = as_looked(photos_of(kinds))
    order, _ = cover(looked.alike, looked.shares, count=3)
    assert sorted(kinds[row] for row in order) == [1, 2, 3]
    assert sorted(looked.stands_for(order)) == [3, 4, 8]
    order, _ = cover(looked.alike, looked.shares, count=1, chosen=[0, 12])
    assert kinds[order[0]] == 2


def test_of_a_large_folder_a_part_says_what_is_to_be_covered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = [1, 2] * 12
    monkeypatch.setattr(subject, "_REFERENCES", 4)
    monkeypatch.setattr(subject, "_ASKED", 8)
    looked = as_looked(photos_of(kinds))
    assert looked.alike.shape == (24, 8 * KEPT)
    assert len(looked.paths) == 24
    order, _ = cover(looked.alike, looked.shares, count=2)
    assert sorted(kinds[row] for row in order) == [1, 2]
    assert looked.stands_for(order) == [12, 12]
    assert covered_share(looked.alike, looked.shares, range(24)) == pytest.approx(1)


def test_every_beginning_of_the_order_is_spread_over_all_photos() -> None:
    paths = [Path(f"{number:03}") for number in range(100)]
    order = [int(path.name) for path in subject._spread(paths)]
    assert sorted(order) == list(range(100))
    for count in (8, 16, 32):
        widest = max(b - a for a, b in pairwise([*sorted(order[:count]), 100]))
        assert widest <= 2 * 100 / count + 4


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


def test_labelled_photos_that_lie_elsewhere_count_as_chosen(drawn: Path, tmp_path: Path) -> None:
    model, whole = sets.feature_model(), read_coco(drawn / "keypoints.json")
    best = suggest(drawn, model, count=1).suggestions[0].photo
    copied = shutil.copy(drawn / best, tmp_path / "apart.png")
    apart = replace(whole.objects[0], name="apart.png", image=Place(str(copied)))
    found = suggest(drawn, model, count=9, labels=KeypointSet(whole.categories, (apart,)))
    assert found.labelled == 1
    names = [one.photo for one in found.suggestions]
    assert len(names) == 6
    assert "apart.png" not in names
    # Its copy shows nothing that is not labelled already.
    assert found.suggestions[names.index(best)].gain == pytest.approx(0, abs=1e-3)


def test_one_photo_alone_is_suggested(drawn: Path) -> None:
    photo = next(drawn.glob("*[0-9].*"))
    only = suggest([photo], sets.feature_model(), count=3)
    assert [(one.photo, one.stands_for) for one in only.suggestions] == [(str(photo), 1)]

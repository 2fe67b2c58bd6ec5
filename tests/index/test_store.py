"""An index of parts: searched exactly or by faiss, grown photo by photo, refused where damaged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sets import feature_model
from surefeat.data.drawn import write_folder
from surefeat.index import search, store
from surefeat.index.cells import Projection, described, fit_projection
from surefeat.index.search import PartIndex, build_faiss, faiss_of, nearest_per_photo
from surefeat.index.shards import ABOUT, read_cells, shard_file
from surefeat.index.store import index_photos
from surefeat.model.network import DenseFeatures
from tiny import write


def small(seed: int) -> DenseFeatures:
    model = feature_model(seed)
    model.config = replace(model.config, longest_side=96)
    return model


@pytest.fixture(scope="module")
def model() -> DenseFeatures:
    return small(5)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    write_folder(folder, count=12, size=64, seed=0)
    return folder


@pytest.fixture(scope="module")
def built(model: DenseFeatures, drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "index"
    index_photos([drawn], out, model=model, budget=20, quiet=True)
    return out


@pytest.fixture
def index(built: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(built, tmp_path / "index")
    return tmp_path / "index"


def rows(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Photo -> its cells' numbers, places and vectors, whichever shard they are in."""
    table: dict[str, list[tuple[int, ...]]] = {}
    for part in read_cells(folder):
        columns = (part.cell, *part.points.T, part.confidence, *part.vectors.T)
        for owner, row in zip(part.photo, np.stack(columns, axis=1).tolist(), strict=True):
            table.setdefault(part.names[owner], []).append(tuple(row))
    return table


def random_unit(count: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, size, generator=generator), dim=1)


def test_exact_search_is_what_a_loop_over_all_cells_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_CHUNK", 37)
    vectors = (random_unit(300, 16, 0) * 127).round().to(torch.int8).numpy()
    photo = np.sort(np.random.default_rng(0).integers(0, 20, 300)).astype(np.int32)
    photo[photo == 7] = 8  # a photo without cells
    asked = random_unit(3, 16, 1)
    scores, cells = nearest_per_photo(asked, vectors, photo, 20)
    for number in range(20):
        best, place = -np.inf, -1
        for cell in range(300):
            if photo[cell] == number:
                stored = vectors[cell].astype(np.float64)
                for query in asked.numpy().astype(np.float64):
                    score = query @ stored / np.linalg.norm(stored)
                    if score > best + 1e-9:
                        best, place = score, cell
        assert int(cells[number]) == place
        assert float(scores[number]) == pytest.approx(best, abs=1e-5)
    assert int(cells[7]) == -1


def test_faiss_names_the_cells_that_exact_search_names() -> None:
    pytest.importorskip("faiss")
    centres = random_unit(60, 32, 0).repeat_interleave(84, 0)[:5000]
    vectors = F.normalize(centres + 0.5 * random_unit(5000, 32, 1), dim=1)
    asked = F.normalize(vectors[::50] + 0.3 * random_unit(100, 32, 2), dim=1)
    parts = iter([vectors[:1999].numpy(), vectors[1999:].numpy()])
    lists = faiss_of(parts, vectors.numpy(), cells=5000)
    scores, cells = lists.search(asked.numpy(), 10)
    exact = (asked @ vectors.T).topk(10)
    shared = [
        len(set(a) & set(b)) for a, b in zip(cells.tolist(), exact.indices.tolist(), strict=True)
    ]
    assert sum(shared) / 1000 > 0.9
    # A byte a number costs little: the scores are those of the vectors themselves.
    assert np.allclose(scores[:, 0], exact.values[:, 0], atol=0.02)
    assert lists.ntotal == 5000


def test_a_projection_keeps_what_tells_cells_apart_and_drops_what_they_share(
    model: DenseFeatures, drawn: Path
) -> None:
    photos = model.extract(drawn)
    draw = torch.Generator().manual_seed(0)
    projection = fit_projection(photos, dimension=12, generator=draw)
    points = torch.tensor([[20.0, 20.0], [40.0, 31.0], [10.0, 50.0]])
    mine = described(photos[0], points, projection)
    assert mine.shape == (3, 12)
    torch.testing.assert_close(mine.norm(dim=1), torch.ones(3))
    # By hand: principal directions of all cells after the direction of their mean is taken out.
    weights = (0.4 / 1.4) ** 0.5, (1.0 / 1.4) ** 0.5
    cells = torch.cat([
        torch.cat([f.descriptors.flatten(1) * weights[0], f.lower.flatten(1) * weights[1]]).T
        for f in photos
    ])  # fmt: skip
    mean = F.normalize(cells.mean(0), dim=0)
    assert float((projection.matrix.T @ mean).abs().max()) < 1e-4
    left = cells - torch.outer(cells @ mean, mean)
    _, values, directions = torch.linalg.svd(left, full_matrices=False)
    held = (left @ projection.matrix).square().sum() / values[:12].square().sum()
    assert 0.99 < float(held) < 1.0001
    assert float((directions[:3] @ projection.matrix).norm(dim=1).min()) > 0.99


def test_cells_are_found_where_they_are(model: DenseFeatures, drawn: Path, built: Path) -> None:
    """Asked for a cell of a photo, the index names that photo and place first."""
    index = PartIndex.open(built, weights=model.weights_hash())
    assert (len(index.photos), len(index), index.search) == (12, 240, "exact")
    for part in read_cells(built):
        for number in range(0, len(part), 37):
            features = model.extract(drawn / part.names[part.photo[number]])[0]
            point = torch.from_numpy(part.points[number])[None]
            hit, *others = index.best(described(features, point, index.projection), count=5)
            assert hit.photo == part.names[part.photo[number]]
            assert hit.point == pytest.approx(tuple(part.points[number]))
            assert hit.score > 0.99
            assert hit.size == features.frame.original
            assert len({one.photo for one in (hit, *others)}) == 5


def grow(source: Path, folder: Path, count: int) -> None:
    """The first `count` photos, sorted backwards: new ones come before old ones."""
    folder.mkdir(exist_ok=True)
    for path in sorted(source.glob("*.png"), reverse=True)[:count]:
        shutil.copy2(path, folder / path.name)


def test_a_grown_index_is_the_one_built_at_once_and_only_new_photos_are_seen(
    model: DenseFeatures, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, out = tmp_path / "photos", tmp_path / "grown"
    grow(drawn, photos, 5)
    index_photos([photos], out, model=model, budget=20, quiet=True)
    first = shard_file(out, 0).read_bytes()
    grow(drawn, photos, 12)
    seen = []
    plain = model.extract_group
    monkeypatch.setattr(model, "extract_group", lambda group: seen.extend(group) or plain(group))
    done = index_photos([photos], out, model=model, budget=20, quiet=True)
    assert (done.written, done.already_there, done.photos, done.cells) == (1, 1, 12, 240)
    assert len(seen) == 7
    assert shard_file(out, 0).read_bytes() == first
    again = index_photos([photos], out, model=model, budget=20, quiet=True)
    assert (again.written, len(seen)) == (0, 7)
    # At once, with the projection that the first photos gave.
    (tmp_path / "whole").mkdir()
    shutil.copy2(out / search.PROJECTION, tmp_path / "whole")
    index_photos([photos], tmp_path / "whole", model=model, budget=20, quiet=True)
    assert rows(out) == rows(tmp_path / "whole")


def test_photos_that_are_gone_or_changed_leave_the_index(
    model: DenseFeatures, drawn: Path, tmp_path: Path
) -> None:
    photos, out = tmp_path / "photos", tmp_path / "index"
    grow(drawn, photos, 6)
    index_photos([photos], out, model=model, budget=20, quiet=True)
    before = rows(out)
    gone, changed, *_ = sorted(path.name for path in photos.iterdir() if path.suffix == ".png")
    (photos / gone).unlink()
    shutil.copy2(sorted(drawn.glob("*.png"))[0], photos / changed)
    done = index_photos([photos], out, model=model, budget=20, quiet=True)
    after = rows(out)
    assert (done.photos, done.written) == (5, 1)
    assert after.keys() == before.keys() - {gone}
    assert [name for name in after if after[name] != before[name]] == [changed]


def test_a_lost_shard_is_made_again_as_it_was(
    model: DenseFeatures, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CellSettings", lambda **given: _small_shards(**given))
    out = tmp_path / "index"
    index_photos([drawn], out, model=model, budget=20, quiet=True)
    shards = {path.name: path.read_bytes() for path in out.glob("*.parquet")}
    assert len(shards) == 3
    shard_file(out, 1).write_bytes(shards[shard_file(out, 1).name][:100])
    with pytest.raises(ValueError, match="run the command that made the folder"):
        PartIndex.open(out, weights=model.weights_hash())
    done = index_photos([drawn], out, model=model, budget=20, quiet=True)
    assert (done.written, done.already_there) == (1, 2)
    assert {path.name: path.read_bytes() for path in out.glob("*.parquet")} == shards


def _small_shards(**given: object) -> object:
    from surefeat.index.shards import CellSettings

    return CellSettings(**given, photos=4)  # type: ignore[arg-type]


@pytest.fixture
def listed(index: Path, model: DenseFeatures, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with more cells than are searched one by one."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(search, "EXACT", 100)
    monkeypatch.setattr(store, "EXACT", 100)
    build_faiss(index)
    return index


def test_many_cells_are_searched_with_faiss_as_few_are_exactly(
    listed: Path, model: DenseFeatures, drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = PartIndex.open(listed, weights=model.weights_hash())
    monkeypatch.setattr(search, "EXACT", 1000)
    exact = PartIndex.open(listed, weights=model.weights_hash())
    assert (lists.search, exact.search) == ("faiss", "exact")
    features = model.extract(sorted(drawn.glob("*.png"))[3])[0]
    asked = described(features, torch.tensor([[30.0, 30.0], [12.0, 40.0]]), exact.projection)
    hits = [one.best(asked, count=6) for one in (lists, exact)]
    assert [hit.photo for hit in hits[0]] == [hit.photo for hit in hits[1]]
    assert [hit.point for hit in hits[0]] == [hit.point for hit in hits[1]]
    assert [h.score for h in hits[0]] == pytest.approx([h.score for h in hits[1]], abs=0.02)
    # The very first cell is one as any other.
    shard = next(read_cells(listed))
    (found,) = lists.best(torch.from_numpy(shard.unit_vectors()[:1]), count=1)
    assert (found.photo, list(found.point)) == (shard.names[0], shard.points[0].tolist())


def refused(index: Path, model: DenseFeatures, *words: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        PartIndex.open(index, weights=model.weights_hash())
    said = str(error.value)
    assert "\n" not in said
    for word in (*words, "surefeat index"):
        assert word in said


def test_a_damaged_or_foreign_search_file_is_refused(listed: Path, model: DenseFeatures) -> None:
    whole = (listed / search.FAISS).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for data in (b"", whole[:-1], bytes(flipped), b"not an index"):
        (listed / search.FAISS).write_bytes(data)
        refused(listed, model, "damaged", search.FAISS)
    (listed / search.FAISS).write_bytes(whole)
    PartIndex.open(listed, weights=model.weights_hash())
    (listed / search.PLACES).write_bytes(b"")
    refused(listed, model, "damaged", search.PLACES)
    record = json.loads((listed / search.RECORD).read_text())
    (listed / search.RECORD).write_text(json.dumps(record | {"made_from": "others"}))
    refused(listed, model, "other shards")
    for text in ("[]", "{", '{"format": "another"}'):
        (listed / search.RECORD).write_text(text)
        refused(listed, model, "not ours")


def test_the_search_file_is_made_once_and_anew_when_the_index_grows(
    listed: Path, model: DenseFeatures, drawn: Path, tmp_path: Path
) -> None:
    before = (listed / search.FAISS).stat().st_mtime_ns
    build_faiss(listed)
    assert (listed / search.FAISS).stat().st_mtime_ns == before
    more = tmp_path / "more"
    shutil.copytree(drawn, more)
    shutil.copy2(next(more.glob("*.png")), more / "zz.png")
    done = index_photos([more], listed, model=model, budget=20, quiet=True)
    assert done.search == "faiss"
    index = PartIndex.open(listed, weights=model.weights_hash())
    assert (index.search, len(index), "zz.png" in index.photos) == ("faiss", 260, True)


def test_an_index_of_another_model_or_none_at_all_is_refused(
    index: Path, model: DenseFeatures, drawn: Path, tmp_path: Path
) -> None:
    refused(index, small(6), "another model")
    refused(drawn, model, "no index")
    with pytest.raises(ValueError, match="another model"):
        index_photos([drawn], index, model=small(6), budget=20, quiet=True)
    with pytest.raises(ValueError, match="--budget 20"):
        index_photos([drawn], index, model=model, budget=30, quiet=True)
    Projection(torch.eye(112)[:, :12]).save(index / search.PROJECTION)
    refused(index, model, search.PROJECTION)
    (index / search.PROJECTION).unlink()
    refused(index, model, search.PROJECTION)
    with pytest.raises(ValueError, match="anew"):
        index_photos([drawn], index, model=model, budget=20, quiet=True)
    with pytest.raises(ValueError, match="at least 1"):
        index_photos([drawn], tmp_path / "none", model=model, budget=0)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", [search.PROJECTION, ABOUT])
def test_what_a_refusal_says_mends_a_damaged_index(
    name: str, index: Path, model: DenseFeatures, drawn: Path
) -> None:
    """Remove it, or its folder, and the same command again; finding and indexing both say so."""
    whole = rows(index)
    (index / name).write_text("damaged")
    for ask in (
        lambda: PartIndex.open(index, weights=model.weights_hash()),
        lambda: index_photos([drawn], index, model=model, budget=20, quiet=True),
    ):
        with pytest.raises(ValueError, match=r"is damaged.*; remove (it|its folder)") as error:
            ask()
        assert "again" in str(error.value)
    if name == ABOUT:
        (index / name).unlink()
    else:  # what the cells were brought to is lost
        shutil.rmtree(index)
    index_photos([drawn], index, model=model, budget=20, quiet=True)
    assert rows(index) == whole


def test_broken_photos_are_listed_and_the_rest_is_indexed(
    model: DenseFeatures, drawn: Path, tmp_path: Path
) -> None:
    photos = tmp_path / "photos"
    grow(drawn, photos, 3)
    (photos / "broken.jpg").write_bytes(b"")
    write(photos / "plain.png", size=(40, 30))
    done = index_photos([photos], tmp_path / "index", model=model, budget=20, quiet=True)
    assert [entry.name for entry in done.skipped] == ["broken.jpg"]
    assert done.listed is not None
    assert "is empty" in done.listed.read_text()
    again = index_photos([photos], tmp_path / "index", model=model, budget=20, quiet=True)
    assert (again.written, [entry.name for entry in again.skipped]) == (0, ["broken.jpg"])

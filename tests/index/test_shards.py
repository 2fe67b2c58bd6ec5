"""Shards of cells: what they hold, what makes them anew, what is refused; threads' are alike."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from PIL import Image

from surefeat.cli.main import main
from surefeat.data.drawn import write_folder
from surefeat.index import engines, shards
from surefeat.index.cells import Projection
from surefeat.index.engines import write_cells
from surefeat.index.maker import CellMaker
from surefeat.index.photos import decode_photos, list_photos, read_photo
from surefeat.index.shards import CellSettings, read_about, read_cells
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from surefeat.model.tiles import extract_tiled, levels
from tiny import smooth_photo

pyarrow = pytest.importorskip("pyarrow", reason="the scale extra is not installed")
parquet = pytest.importorskip("pyarrow.parquet")

TWO = CellSettings(budget=6, photos=2)


def small(seed: int = 0) -> DenseFeatures:
    torch.manual_seed(seed)
    return DenseFeatures(
        ModelConfig(trunk="small", head="linear", channels=8, longest_side=64)
    ).eval()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five photos of two sizes, and one that is broken."""
    folder = tmp_path / "photos"
    write_folder(folder, count=3, size=48, seed=0)
    write_folder(folder / "more", count=2, size=64, seed=1)
    for path in folder.rglob("*.json"):
        path.unlink()
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}


@pytest.mark.parametrize(("kind", "within"), [("half", 1e-3), ("int8", 0.51 / 127)])
def test_rows_are_the_model_s_own_cells_and_pandas_reads_the_folder_as_it_is(
    kind: shards.Kind, within: float, photos: Path, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    model, out = small(), tmp_path / "out"
    done = write_cells(
        [photos], out, model=model, settings=CellSettings(kind=kind, photos=2), quiet=True
    )
    table = pandas.read_parquet(out)
    assert list(table.columns) == ["photo", "cell", "x", "y", "descriptor", "confidence"]
    good = [p for p in list_photos([photos]) if p.name != "broken.png"]
    assert list(table.photo.unique()) == [photo.name for photo in good]
    assert len(table) == done.rows
    scale = 127 if kind == "int8" else 1
    for photo in good:
        (own,) = model.extract(photos / photo.name)
        mine = table[table.photo == photo.name]
        assert mine.cell.tolist() == list(range(own.uncertainty.numel()))
        stored = np.stack(mine.descriptor.to_list()).astype(np.float32) / scale
        assert np.abs(stored - own.descriptors.flatten(1).T.numpy()).max() < within
        assert np.allclose(mine.confidence, own.confidence.flatten().numpy(), rtol=1e-4)
        height, width = own.frame.original
        rows, columns = own.uncertainty.shape
        assert np.allclose(mine.x, (mine.cell % columns + 0.5) * width / columns - 0.5, atol=1e-3)
        assert np.allclose(mine.y, (mine.cell // columns + 0.5) * height / rows - 0.5, atol=1e-3)


def test_the_schema_is_the_documented_one_and_a_file_says_who_made_it(
    photos: Path, tmp_path: Path
) -> None:
    model = small()
    write_cells([photos], tmp_path / "out", model=model, settings=TWO, quiet=True)
    schema = parquet.read_schema(shards.shard_file(tmp_path / "out", 0))
    kinds = {field.name: str(field.type) for field in schema}
    assert kinds == {
        "photo": "string", "cell": "int32", "x": "float", "y": "float",
        "descriptor": "fixed_size_list<element: int8 not null>[8]", "confidence": "float",
    }  # fmt: skip
    about = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    assert about["surefeat.weights_sha256"] == model.weights_hash()
    assert (about["surefeat.kind"], about["surefeat.scale"]) == ("int8", "127")
    assert json.loads(about["surefeat.settings"])["budget"] == 6


def test_what_is_read_is_what_was_written_shard_by_shard(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lower = small().extract(photos / "more")[0].lower.shape[0]
    projection = Projection(torch.randn(8 + lower, 5, generator=torch.Generator().manual_seed(0)))
    write_cells([photos], out, model=small(), settings=TWO, projection=projection, quiet=True)
    about, read = read_about(out), list(read_cells(out))
    assert (about.shards, about.photos, about.dimension) == (3, 6, 5)
    assert about.projection == projection.digest
    assert [len(shard.names) for shard in read] == [1, 2, 2]
    names = [name for shard in read for name in shard.names]
    assert names == [p.name for p in list_photos([photos]) if p.name != "broken.png"]
    assert [entry.name for shard in read for entry in shard.skipped] == ["broken.png"]
    for shard in read:
        assert shard.vectors.shape == (len(shard), 5)
        assert np.allclose(np.linalg.norm(shard.unit_vectors(), axis=1), 1, atol=1e-6)
        assert np.bincount(shard.photo).max() <= 6
        for number, name in enumerate(shard.names):
            assert tuple(shard.sizes[number]) == ((64, 64) if "more" in name else (48, 48))


def test_threads_and_processes_write_the_same_bytes_as_one(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    write_cells([photos], tmp_path / "one", model=model, settings=TWO, workers=1, quiet=True)
    write_cells([photos], tmp_path / "threads", model=model, settings=TWO, workers=3, quiet=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, shares in (("1", 1), ("0", 2)):
        monkeypatch.setenv("RANK", rank)
        done = write_cells([photos], tmp_path / "ranks", model=model, settings=TWO, quiet=True)
        assert (done.written, done.shards) == (shares, 3)
    assert len(files(tmp_path / "one")) == 3
    assert files(tmp_path / "one") == files(tmp_path / "threads") == files(tmp_path / "ranks")


def test_whole_shards_stay_and_empty_cut_or_outdated_ones_are_made_anew(
    photos: Path, tmp_path: Path
) -> None:
    model, out = small(), tmp_path / "out"
    first = write_cells([photos], out, model=model, settings=TWO, quiet=True)
    assert (first.written, first.already_there, len(first.skipped)) == (3, 0, 1)
    before = files(out)
    again = write_cells([photos], out, model=model, settings=TWO, quiet=True)
    assert (again.written, again.already_there) == (0, 3)
    assert (again.rows, again.bytes, again.skipped) == (first.rows, first.bytes, first.skipped)
    assert "broken.png" in (out / "_skipped-0.txt").read_text()
    shards.shard_file(out, 0).write_bytes(b"")
    whole = shards.shard_file(out, 1).read_bytes()
    shards.shard_file(out, 1).write_bytes(whole[: len(whole) // 2])
    assert write_cells([photos], out, model=model, settings=TWO, quiet=True).written == 2
    assert files(out) == before
    last = photos / list_photos([photos])[-1].name
    os.utime(last, ns=(1, 1))
    assert write_cells([photos], out, model=model, settings=TWO, quiet=True).written == 1
    last.unlink()
    (photos / "broken.png").unlink()
    gone = write_cells([photos], out, model=model, settings=TWO, quiet=True)
    assert (gone.shards, gone.skipped, gone.listed) == (2, (), None)
    assert list(files(out)) == ["cells-000000.parquet", "cells-000001.parquet"]
    assert sum(len(shard.names) for shard in read_cells(out)) == 4


def test_cells_of_two_models_or_settings_do_not_lie_in_one_folder(
    photos: Path, tmp_path: Path
) -> None:
    write_cells([photos], tmp_path, model=small(), settings=TWO, quiet=True)
    before = files(tmp_path)
    for model, settings in ((small(1), TWO), (small(), CellSettings(budget=7, photos=2))):
        with pytest.raises(ValueError, match="pass another --out"):
            write_cells([photos], tmp_path, model=model, settings=settings, quiet=True)
    assert files(tmp_path) == before


def test_a_full_disk_leaves_whole_shards_and_the_next_run_goes_on(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, plain = small(), tmp_path / "out", shards.write_bytes

    def full(path: Path, data: bytes) -> None:
        if path.name == "cells-000001.parquet":
            raise OSError(28, "No space left on device", str(path))
        plain(path, data)

    monkeypatch.setattr(shards, "write_bytes", full)
    for workers in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            write_cells([photos], out, model=model, settings=TWO, workers=workers, quiet=True)
    with pytest.raises(ValueError, match="shards are not there"):
        next(read_cells(out))
    monkeypatch.undo()
    done = write_cells([photos], out, model=model, settings=TWO, quiet=True)
    assert done.already_there >= 1
    assert len(list(read_cells(out))) == 3
    write_cells([photos], tmp_path / "other", model=model, settings=TWO, quiet=True)
    assert files(out) == files(tmp_path / "other")


def test_tar_shards_lists_and_parquet_files_give_the_folder_s_rows(
    photos: Path, tmp_path: Path
) -> None:
    model, names = small(), [photo.name for photo in list_photos([photos])]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in names:
            tar.add(photos / name, name)
    (tmp_path / "list.txt").write_text("\n".join(f"photos/{name}" for name in names))
    data = [(photos / name).read_bytes() for name in names]
    table = pyarrow.table({"photo": names, "bytes": data})
    parquet.write_table(table, tmp_path / "p.parquet", row_group_size=4)
    wanted = write_cells([photos], tmp_path / "folder", model=model, settings=TWO, quiet=True)
    rows = np.concatenate([shard.vectors for shard in read_cells(tmp_path / "folder")])
    for source, prefix in (("a.tar", "a.tar/"), ("list.txt", "photos/"), ("p.parquet", "")):
        out = tmp_path / f"of {source}"
        done = write_cells([tmp_path / source], out, model=model, settings=TWO, quiet=True)
        assert (done.rows, len(done.skipped)) == (wanted.rows, 1)
        read = list(read_cells(out))
        assert [n for shard in read for n in shard.names] == [
            prefix + name for name in names if name != "broken.png"
        ]
        assert np.array_equal(np.concatenate([shard.vectors for shard in read]), rows)


def test_every_row_of_a_parquet_file_is_read_by_itself(tmp_path: Path) -> None:
    """Seven photos of one grey each in groups of three: the first of a group, its last, the end."""
    paths = [tmp_path / f"{number}.png" for number in range(7)]
    for grey, path in enumerate(paths):
        Image.new("L", (8, 8), grey).save(path)
    data = {"photo": [path.name for path in paths], "bytes": [p.read_bytes() for p in paths]}
    parquet.write_table(pyarrow.table(data), tmp_path / "p.parquet", row_group_size=3)
    listed = list_photos([tmp_path / "p.parquet"])
    assert [int(read_photo(photo).max()) for photo in listed] == list(range(7))
    some = decode_photos([listed[row] for row in (2, 3, 6)], longest_side=8, multiple=8)
    assert [int(photo.pixels.max()) for photo in some if photo.pixels is not None] == [2, 3, 6]


def test_names_that_would_meet_are_told_apart_or_refused(photos: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "more").mkdir()
    inside = next((photos / "more").glob("*.png"))
    (copy / "more" / inside.name).write_bytes(inside.read_bytes())
    names = [photo.name for photo in list_photos([photos, copy])]
    assert f"copy/more/{inside.name}" in names
    assert f"photos/more/{inside.name}" in names
    with pytest.raises(ValueError, match="two photos are named"):
        list_photos([inside, copy / "more" / inside.name])


def test_damaged_missing_and_foreign_shards_are_refused_in_a_line(
    photos: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    write_cells([photos], out, model=small(), settings=TWO, quiet=True)
    write_cells([photos], other, model=small(1), settings=TWO, quiet=True)
    file = shards.shard_file(out, 1)
    whole = file.read_bytes()
    column = parquet.read_metadata(file).row_group(0).column(4)
    place = column.data_page_offset + column.total_compressed_size // 2
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
    with pytest.raises(ValueError, match="is damaged"):
        list(read_cells(out))
    file.write_bytes(shards.shard_file(other, 1).read_bytes())
    with pytest.raises(ValueError, match="another model"):
        list(read_cells(out))
    parquet.write_table(pyarrow.table({"a": [1]}), file)
    with pytest.raises(ValueError, match="no whole shard"):
        list(read_cells(out))
    file.unlink()
    with pytest.raises(ValueError, match="1 of 3 shards are not there"):
        list(read_cells(out))
    (out / shards.ABOUT).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        list(read_cells(out))
    with pytest.raises(FileNotFoundError, match="surefeat extract --format parquet"):
        list(read_cells(photos))


def test_a_parquet_file_without_photos_is_refused_in_a_line(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    for name, reason in (("a", "needs the columns photo"), ("b", "is no whole"), ("c", "check")):
        with pytest.raises(ValueError, match=reason):
            list_photos([tmp_path / f"{name}.parquet"])


def test_a_shard_that_is_told_to_stop_is_not_written(photos: Path, tmp_path: Path) -> None:
    maker, stop = CellMaker(small(), TWO), Event()
    (tmp_path / "out").mkdir()
    job, *_ = engines.plan_shards(list_photos([photos]), tmp_path / "out", count=2)
    about = maker.about(shards=3, photos=6)
    stop.set()
    with pytest.raises(InterruptedError, match="the same command goes on from here"):
        maker.make(job, about, stop=stop)
    assert not any((tmp_path / "out").iterdir())
    stop.clear()
    assert maker.make(job, about, stop=stop).written


def test_cells_of_a_large_photo_are_numbered_through_all_its_levels(tmp_path: Path) -> None:
    model, size = small(), (64, 304)
    pixels = smooth_photo(*size)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "wide.png")
    maker = CellMaker(model, CellSettings(tiles=True))
    ((_, _, cells),), _ = maker.cells_of(list_photos([tmp_path]))
    sides = levels(size, side=64, stride=model.stride)
    assert len(sides) == 3
    maps = [model.extract(pixels)[0]]
    maps += [extract_tiled(model, pixels, longest_side=side, side=64) for side in sides[1:]]
    assert cells.number.tolist() == list(range(sum(one.uncertainty.numel() for one in maps)))


def test_torch_has_its_threads_back_afterwards(photos: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with engines.one_torch_thread():
            assert torch.get_num_threads() == 1
        write_cells([photos], tmp_path / "out", model=small(), settings=TWO, quiet=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_command_writes_tables_in_words_and_json(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small().save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    asked = f"extract {photos} --out {out} --model {tmp_path / 'model'} --format parquet --budget 6"
    main([*asked.split(), "--shard", "2", "--device", "cpu"])
    said = capsys.readouterr().out
    assert f"1, listed in {out / '_skipped-0.txt'}" in said
    main([*asked.split(), "--shard", "2", "--device", "cpu", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["already_there"], result["written"], result["shards"]) == (3, 0, 3)
    assert [entry["name"] for entry in result["skipped"]] == ["broken.png"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--engine ray", "add --format parquet"),
        ("--budget 9", "add --format parquet"),
        ("--format parquet --address here:1", "add --engine ray"),
        ("--format parquet --budget 0", "use at least 1"),
        ("--format parquet --workers 0", "use at least 1"),
    ],
)
def test_what_cannot_work_is_a_line_and_nothing_is_written(
    asked: str, said: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small().save_pretrained(tmp_path / "model")
    words = f"extract {photos} --out {tmp_path / 'out'} --model {tmp_path / 'model'} {asked}"
    with pytest.raises(SystemExit):
        main(words.split())
    line = capsys.readouterr().err.strip()
    assert said in line
    assert "\n" not in line
    assert not (tmp_path / "out").exists()


def test_without_the_extra_the_error_names_it(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"surefeat\[scale\]"):
        write_cells([photos], tmp_path / "out", model=small(), engine="ray", quiet=True)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"surefeat\[scale\]"):
        write_cells([photos], tmp_path / "out", model=small(), quiet=True)
    assert not (tmp_path / "out").exists()

"""Features to disk: shared by processes, resumable, never mixed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hostile import strange_names
from surefeat.cli.main import main
from surefeat.data.decode import SourceError
from surefeat.data.drawn import write_folder
from surefeat.model.config import ModelConfig
from surefeat.model.extract import extract_to_folder
from surefeat.model.features import Features
from surefeat.model.network import DenseFeatures


def small(seed: int) -> DenseFeatures:
    torch.manual_seed(seed)
    return DenseFeatures(
        ModelConfig(trunk="small", head="linear", channels=8, longest_side=64)
    ).eval()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_folder(folder, count=5, size=48, seed=0)
    return folder


def test_two_processes_write_what_one_does_each_its_own_files(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They know of each other only what torchrun says, so that one can come after the other."""
    small(0).save_pretrained(tmp_path / "model")
    (photos / "broken.png").write_bytes(b"")
    alone = extract_to_folder([photos], tmp_path / "one", model=small(0), quiet=True)
    assert (alone.written, len(alone.skipped)) == (5, 1)
    command = f"extract {photos} --model {tmp_path / 'model'} --out {tmp_path / 'two'}"
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        main([*command.split(), "--device", "cpu", "--json"])
        said.append(json.loads(capsys.readouterr().out))
    (photos / "broken.png").unlink()
    assert sorted(one["written"] for one in said) == [2, 3]
    assert sum(len(one["skipped"]) for one in said) == 1
    names = [sorted(p.name for p in (tmp_path / n).glob("*.safetensors")) for n in ("one", "two")]
    assert names[0] == names[1]
    for name in names[0]:
        first, second = (Features.load(tmp_path / n / name) for n in ("one", "two"))
        assert torch.allclose(first.descriptors, second.descriptors, atol=1e-3)


def test_features_of_two_models_or_sizes_are_not_mixed(photos: Path, tmp_path: Path) -> None:
    extract_to_folder([photos], tmp_path, model=small(0), quiet=True)
    again = extract_to_folder([photos], tmp_path, model=small(0), longest_side=64, quiet=True)
    assert (again.written, again.already_there) == (0, 5)
    with pytest.raises(ValueError, match="another model"):
        extract_to_folder([photos], tmp_path, model=small(1), quiet=True)
    with pytest.raises(ValueError, match="another size"):
        extract_to_folder([photos], tmp_path, model=small(0), longest_side=96, quiet=True)
    (tmp_path / "extract.json").write_bytes(b"")
    with pytest.raises(ValueError, match=r"extract\.json is damaged"):
        extract_to_folder([photos], tmp_path, model=small(0), quiet=True)


def test_images_that_would_share_a_file_are_refused(photos: Path, tmp_path: Path) -> None:
    first = next(photos.glob("*.png"))
    other = tmp_path / "elsewhere" / first.name
    other.parent.mkdir()
    other.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="would both be"):
        extract_to_folder([first, other], tmp_path / "out", model=small(0), quiet=True)
    assert not (tmp_path / "out").exists()


def test_a_batch_is_as_large_as_asked_for(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = small(0), []
    plain = model.forward_with_lower

    def watched(images: torch.Tensor) -> object:
        sizes.append(len(images))
        return plain(images)

    monkeypatch.setattr(model, "forward_with_lower", watched)
    extract_to_folder([photos], tmp_path, model=model, batch=3, quiet=True)
    extract_to_folder([photos] * 8, tmp_path / "many", model=model, batch=20, quiet=True)
    assert sizes == [3, 2, 5]
    with pytest.raises(ValueError, match="at least 1"):
        extract_to_folder([photos], tmp_path, model=model, batch=0)


def test_folders_are_walked_alike_by_python_and_the_command(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for path in sorted(photos.glob("*.png"))[:2]:
        (folder / path.name).write_bytes(path.read_bytes())
        (folder / f"._{path.name}").write_bytes(b"macOS")
    (folder / "IMG.HEIC").write_bytes(b"x")
    (folder / ".trash").mkdir()
    (folder / ".trash" / "old.png").write_bytes(b"x")
    model = small(0)
    names = [Path(features.name).name for features in model.extract(folder)]
    assert names == sorted(path.name for path in photos.glob("*.png"))[:2]
    model.save_pretrained(tmp_path / "model")
    asked = f"extract {folder} --model {tmp_path / 'model'} --device cpu --out {tmp_path / 'out'}"
    main(asked.split())
    said = capsys.readouterr().out
    listed = tmp_path / "out" / "skipped-0.txt"
    assert f"1, listed in {listed}" in said
    assert "IMG.HEIC\tis .heic, which is not read; convert it to JPEG" in listed.read_text()
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == {
        f"{name}.safetensors" for name in names
    }
    main([*asked.split(), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["written"], result["already_there"]) == (0, 2)
    assert [Path(entry["name"]).name for entry in result["skipped"]] == ["IMG.HEIC"]


@pytest.fixture
def folder(photos: Path, tmp_path: Path) -> Path:
    """Four photos that may be changed."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, path in zip("abcd", sorted(photos.glob("*.png")), strict=False):
        (folder / f"{name}.png").write_bytes(path.read_bytes())
    return folder


def own_features(model: DenseFeatures, out: Path, folder: Path) -> dict[str, bool]:
    """Name of every features file -> whether its content is that of the photo it is named after."""
    right = {}
    for path in sorted(out.rglob("*.safetensors")):
        photo = folder / str(path.relative_to(out)).removesuffix(".safetensors")
        kept, own = Features.load(path), model.extract(photo)[0]
        right[photo.name] = torch.allclose(kept.descriptors, own.descriptors, atol=1e-3)
    return right


def test_a_folder_named_like_a_photo_is_skipped_and_no_photo_gets_anothers_features(
    folder: Path, photos: Path, tmp_path: Path
) -> None:
    inside = folder / "Bird.jpg"
    inside.mkdir()
    for name, path in zip(("x.png", "y.png"), sorted(photos.glob("*.png"))[::-1], strict=False):
        (inside / name).write_bytes(path.read_bytes())
    model = small(0)
    done = extract_to_folder([folder], tmp_path / "out", model=model, quiet=True)
    assert [Path(entry.name).name for entry in done.skipped] == ["Bird.jpg"]
    assert "is a folder" in done.skipped[0].reason
    right = own_features(model, tmp_path / "out", folder)
    assert list(right) == ["x.png", "y.png", "a.png", "b.png", "c.png", "d.png"]
    assert all(right.values())
    names = [Path(features.name).name for features in model.extract(folder)]
    assert names == ["x.png", "y.png", "a.png", "b.png", "c.png", "d.png"]


def test_files_that_are_empty_cut_short_or_of_another_photo_are_made_anew(
    folder: Path, tmp_path: Path
) -> None:
    model, out = small(0), tmp_path / "out"
    assert extract_to_folder([folder], out, model=model, quiet=True).written == 4
    (out / "a.png.safetensors").write_bytes(b"")
    whole = (out / "b.png.safetensors").read_bytes()
    (out / "b.png.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "c.png").write_bytes((folder / "d.png").read_bytes())
    done = extract_to_folder([folder], out, model=model, quiet=True)
    assert (done.written, done.already_there) == (3, 1)
    assert own_features(model, out, folder) == dict.fromkeys(
        ("a.png", "b.png", "c.png", "d.png"), True
    )
    assert extract_to_folder([folder], out, model=model, quiet=True).already_there == 4


def test_names_that_are_no_text_too_long_or_several_lines_are_listed_on_one(
    folder: Path, tmp_path: Path
) -> None:
    photo = (folder / "a.png").read_bytes()
    good, bad = strange_names(folder, photo)
    (folder / f"{'x' * 245}.png").write_bytes(photo)
    (folder / "b.png.safetensors").mkdir()
    (folder / "b.png.safetensors" / "inside.png").write_bytes(photo)
    model, out = small(0), tmp_path / "out"
    done = extract_to_folder([folder], out, model=model, batch=3, quiet=True)
    assert done.written == 5
    kept = Features.load(out / "caf\\udce9.png.safetensors")
    assert kept.name == str(folder / good)
    lines = (out / "skipped-0.txt").read_text().splitlines()
    reasons = dict(line.split("\t") for line in lines)
    assert [Path(name).name for name in reasons] == ["inside.png", *bad, f"{'x' * 245}.png"]
    assert "is empty" in lines[1]
    assert "cannot hold" in lines[3]
    again = extract_to_folder([folder], out, model=model, quiet=True)
    assert (again.written, again.already_there, len(again.skipped)) == (0, 5, 4)
    assert extract_to_folder([folder / "a.png"], out, model=model, quiet=True).listed is None
    assert not (out / "skipped-0.txt").exists()  # of what was skipped before


def test_an_extract_that_could_read_nothing_is_an_error(tmp_path: Path) -> None:
    model = DenseFeatures(ModelConfig(trunk="small", channels=8))
    (tmp_path / "list.txt").write_text("a.png\n")
    said = r"none of 1 images can be read \(listed in .*skipped-0.txt\); .*--format parquet"
    with pytest.raises(SourceError, match=said):
        extract_to_folder([tmp_path / "list.txt"], tmp_path / "out", model=model, quiet=True)
    assert (tmp_path / "out" / "skipped-0.txt").is_file()


def test_nothing_to_extract_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["extract", "--out", str(tmp_path / "x")])
    assert "no images are given" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

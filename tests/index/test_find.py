"""A part of one photo found in others: ranked, verified, written, and honest about what is gone."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from surefeat.core.image import resize
from surefeat.data.drawn import Instance, draw
from surefeat.data.drawn_categories import CATEGORIES
from surefeat.index.find import PartSearch, _views, find_part
from surefeat.index.store import index_photos
from surefeat.model.config import ModelConfig
from surefeat.model.network import DenseFeatures
from surefeat.show.parts import crop_box, write_parts
from tiny import photo, smooth_photo

BIRD = next(n for n, kind in enumerate(CATEGORIES) if kind.name == "bird")
TAIL = CATEGORIES[BIRD].keypoint_names.index("tail")


@pytest.fixture(scope="module")
def model() -> DenseFeatures:
    """The one that ships, on small pictures; at that size it has no probability."""
    model = DenseFeatures.from_pretrained(device="cpu")
    model.config = replace(model.config, longest_side=160)
    return model


@pytest.fixture(scope="module")
def drawn() -> dict[str, Instance]:
    """Six birds, and three other things."""
    others = [n for n in range(len(CATEGORIES)) if n != BIRD][:3]
    kinds = [BIRD] * 6 + others
    return {
        f"{CATEGORIES[kind].name}_{number}.png": draw(
            kind, size=160, generator=np.random.default_rng(number)
        )
        for number, kind in enumerate(kinds)
    }


@pytest.fixture(scope="module")
def photos(drawn: dict[str, Instance], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for name, one in drawn.items():
        Image.fromarray(one.image.permute(1, 2, 0).numpy()).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def index(model: DenseFeatures, photos: Path) -> Path:
    out = photos.parent / "index"
    index_photos([photos], out, model=model, budget=60, quiet=True)
    return out


@pytest.fixture(scope="module")
def found(
    model: DenseFeatures, photos: Path, index: Path, drawn: dict[str, Instance]
) -> PartSearch:
    point = drawn["bird_0.png"].keypoints[TAIL].tolist()
    return find_part(photos / "bird_0.png", point, index, model=model, count=5)


def test_the_part_of_a_drawn_bird_is_found_in_other_birds(
    found: PartSearch, drawn: dict[str, Instance]
) -> None:
    """Of nine drawings the five with another bird, and in each its tail."""
    assert {hit.photo for hit in found.hits} == {f"bird_{number}.png" for number in range(1, 6)}
    for hit in found.hits:
        error = (drawn[hit.photo].keypoints[TAIL] - torch.tensor(hit.point)).norm()
        assert float(error) < 0.1 * 160


def test_the_photo_itself_is_left_out_and_hits_that_return_come_first(found: PartSearch) -> None:
    assert "bird_0.png" not in [hit.photo for hit in found.hits]
    assert (len(found.hits), found.photos, found.search) == (5, 9, "exact")
    order = [(hit.returns, hit.score) for hit in found.hits]
    assert order == sorted(order, reverse=True)
    assert all(hit.probability is None for hit in found.hits)


def test_photos_that_are_gone_or_changed_are_listed(
    model: DenseFeatures, photos: Path, index: Path, found: PartSearch, tmp_path: Path
) -> None:
    """The index of photos that were moved, one of them lost and one replaced by another."""
    there = tmp_path / "photos"
    shutil.copytree(photos, there)
    shutil.copytree(index, tmp_path / "index")
    about = json.loads((tmp_path / "index" / "_cells.json").read_text())
    (tmp_path / "index" / "_cells.json").write_text(json.dumps(about | {"sources": [str(there)]}))
    first, second = (hit.photo for hit in found.hits[:2])
    (there / first).unlink()
    Image.new("RGB", (50, 40)).save(there / second)
    result = find_part(photos / "bird_0.png", found.point, tmp_path / "index", model=model, count=6)
    assert {entry.name for entry in result.missing} == {first, second}
    reasons = {entry.name: entry.reason for entry in result.missing}
    assert "no longer where it was indexed" in reasons[first]
    assert "another size" in reasons[second]
    assert not {first, second} & {hit.photo for hit in result.hits}


def test_without_verification_the_cells_are_the_answer(
    model: DenseFeatures, photos: Path, index: Path, found: PartSearch
) -> None:
    result = find_part(
        photos / "bird_0.png", found.point, index, model=model, count=5, verify=False
    )
    assert {hit.photo for hit in result.hits} == {hit.photo for hit in found.hits}
    assert all(hit.point == hit.cell and hit.returns is None for hit in result.hits)
    scores = [hit.score for hit in result.hits]
    assert scores == sorted(scores, reverse=True)


def test_photos_in_tar_shards_are_read_again(
    model: DenseFeatures, photos: Path, found: PartSearch, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "birds.tar", "w") as tar:
        for path in sorted(photos.glob("bird*.png"))[:3]:
            tar.add(path, path.name)
    index_photos([tmp_path / "birds.tar"], tmp_path / "index", model=model, budget=60, quiet=True)
    result = find_part(photos / "bird_0.png", found.point, tmp_path / "index", model=model)
    assert [entry.name for entry in result.missing] == []
    assert sorted(hit.photo for hit in result.hits) == [
        f"birds.tar/bird_{number}.png" for number in range(3)
    ]
    same = next(hit for hit in result.hits if hit.photo.endswith("bird_0.png"))
    assert same.point == pytest.approx(found.point, abs=6)


@pytest.mark.parametrize(
    ("point", "words"),
    [((500, 3), "outside"), ((1, 2, 3), "must be"), ((float("nan"), 1), "outside")],
)
def test_a_point_that_cannot_be_meant_is_refused(
    model: DenseFeatures, photos: Path, index: Path, point: tuple[float, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        find_part(photos / "bird_0.png", point, index, model=model)


def test_page_sheet_and_crops_are_written(found: PartSearch, photos: Path, tmp_path: Path) -> None:
    page = write_parts(photos / "bird_0.png", found, tmp_path)
    html = page.read_text()
    assert "http" not in html.replace("http-equiv", "")
    assert all(hit.photo in html for hit in found.hits)
    assert [hit["photo"] for hit in found.to_dict()["hits"]] == [hit.photo for hit in found.hits]
    crops = sorted((tmp_path / "crops").iterdir())
    assert len(crops) == len(found.hits)
    hit = found.hits[0]
    x1, y1, x2, y2 = crop_box(hit.point, hit.seen)
    assert x1 <= hit.point[0] <= x2
    assert y1 <= hit.point[1] <= y2
    cut = np.asarray(Image.open(photos / hit.photo).convert("RGB"))[y1 : y2 + 1, x1 : x2 + 1]
    assert np.array_equal(np.asarray(Image.open(crops[0])), cut)
    # Another question leaves no crop of this one.
    write_parts(photos / "bird_0.png", replace(found, hits=found.hits[:1]), tmp_path)
    assert len(list((tmp_path / "crops").iterdir())) == 1


def test_the_point_that_is_asked_stays_on_its_spot_in_every_part_of_a_large_photo() -> None:
    class Shown:
        """In place of features: the pixels they would be made of."""

        config, stride = ModelConfig(longest_side=96), 8

        def extract(self, part: Tensor) -> tuple[Tensor]:
            return (part,)

    pixels = torch.arange(500 * 700).reshape(500, 700).expand(3, -1, -1)
    asked = torch.tensor([[470.0, 250.0]])
    views = _views(Shown(), pixels, asked, tiles=True)  # type: ignore[arg-type]
    assert len(views) > 2
    for view in views:
        ((x, y),) = view.point.long().tolist()
        assert int(view.features[0, y, x]) == 250 * 700 + 470  # type: ignore[index]
    assert len(_views(Shown(), pixels, asked, tiles=False)) == 1  # type: ignore[arg-type]


def test_a_small_thing_in_a_large_photo_is_found_by_its_tiles(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ModelConfig(trunk="small", head="linear", channels=32, longest_side=96)
    model = DenseFeatures(config).eval()
    for layer in model.trunk.layers:  # type: ignore[union-attr]
        layer[1] = nn.Identity()  # type: ignore[operator,index]
    close_up = (photo("astronaut", size=(192, 192)) * 255).byte()
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(2):
        large = smooth_photo(304, 424, seed=number)
        if number == 1:
            # Where cells begin, so that a network of random weights sees the very same.
            large[:, 160:256, 248:344] = resize(close_up, size=(96, 96))
        Image.fromarray(large.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    index_photos([folder], tmp_path / "index", model=model, budget=144, tiles=True, quiet=True)
    for x, y in ((150.0, 150.0), (120.0, 60.0), (60.0, 70.0)):
        wanted = ((x + 0.5) / 2 - 0.5 + 248, (y + 0.5) / 2 - 0.5 + 160)
        cells = find_part(close_up, (x, y), tmp_path / "index", model=model, count=2, verify=False)
        assert cells.hits[0].photo == "1.png"
        assert cells.hits[0].cell == pytest.approx(wanted, abs=8)
    checked = find_part(close_up, (60.0, 70.0), tmp_path / "index", model=model, count=1)
    assert checked.hits[0].point == pytest.approx(wanted, abs=8)
    x1, y1, x2, y2 = checked.hits[0].seen
    assert x2 - x1 < 423
    assert x1 <= wanted[0] <= x2
    assert y1 <= wanted[1] <= y2

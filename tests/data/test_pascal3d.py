"""PASCAL3D+ in its own layout and in COCO's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from surefeat.data.keypoints import PASCAL3D_CLASSES as CLASSES
from surefeat.data.keypoints import load_pascal3d

LISTS = Path("PASCAL/VOCdevkit/VOC2012/ImageSets/Main")


def thing(
    kind: str, box: list[float], anchors: dict[str, Any] | None, **flags: int
) -> dict[str, Any]:
    """An object of a record; those of other classes have no anchors."""
    return {"class": kind, "bbox": box, "anchors": anchors if anchors else [], **flags}


def seen(x: float, y: float) -> dict[str, Any]:
    return {"location": [x, y], "status": 1}


def hidden(status: int = 2) -> dict[str, Any]:
    return {"location": [], "status": status}


def write_record(root: Path, kind: str, image: str, things: list[dict[str, Any]]) -> None:
    """Annotations and photo as the release has them; several objects are a struct array."""
    folder = root / "Annotations" / f"{kind}_pascal"
    folder.mkdir(parents=True, exist_ok=True)
    objects: Any = things[0]
    if len(things) > 1:
        fields = list(things[0])
        objects = np.empty((1, len(things)), dtype=[(name, object) for name in fields])
        for number, each in enumerate(things):
            for name in fields:
                objects[0, number][name] = each[name]
    savemat(folder / f"{image}.mat", {"record": {"filename": f"{image}.jpg", "objects": objects}})
    photos = root / "Images" / f"{kind}_pascal"
    photos.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (60, 40)).save(photos / f"{image}.jpg")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    car = {"left_wheel": seen(5.0, 30.0), "right_wheel": hidden(), "roof": seen(20.5, 3.0)}
    flags = {"difficult": 1, "truncated": 1, "occluded": 1}
    both = [
        thing("car", [1, 2, 41, 38], car, **flags),
        thing("person", [10, 10, 20, 30], None, **dict.fromkeys(flags, 0)),
    ]
    write_record(tmp_path, "car", "2008_000001", both)
    other = {"left_wheel": hidden(4), "right_wheel": seen(11, 12), "roof": hidden(5)}
    write_record(tmp_path, "car", "2008_000002", [thing("car", [1, 1, 60, 40], other)])
    sofa = {"seat_left": seen(2, 2), "seat_right": seen(3, 2), "extra": seen(1, 1)}
    write_record(tmp_path, "sofa", "2008_000002", [thing("sofa", [1, 1, 9, 9], sofa)])
    (tmp_path / LISTS).mkdir(parents=True)
    (tmp_path / LISTS / "train.txt").write_text("2008_000001\n2008_000009\n")
    (tmp_path / LISTS / "val.txt").write_text("2008_000002\n")
    return tmp_path


def test_a_release_is_read_with_pixels_counted_from_0(release: Path) -> None:
    found = load_pascal3d(release, split="train")
    assert [kind.name for kind in found.categories] == ["car", "sofa"]
    (car,) = found.objects
    assert found.categories[0].keypoints == ("left_wheel", "right_wheel", "roof")
    assert car.box.tolist() == [0, 1, 40, 37]
    assert car.visible.tolist() == [True, False, True]
    assert car.points[car.visible].tolist() == [[4, 29], [19.5, 2]]
    assert torch.isnan(car.points[1]).all()
    assert car.size == (40, 60)
    assert car.read().shape == (3, 40, 60)


def test_both_splits_have_the_same_channels_and_twins_by_name(release: Path) -> None:
    train, val = (load_pascal3d(release, split=split) for split in ("train", "val"))  # type: ignore[arg-type]
    assert train.categories == val.categories
    assert val.categories[0].flip == (1, 0, 2)
    assert val.categories[1].keypoints == ("extra", "seat_left", "seat_right")
    assert val.categories[1].flip == (0, 2, 1)
    assert [one.category for one in val.objects] == [0, 1]
    assert val.objects[0].visible.tolist() == [False, True, False]


def test_photos_may_lie_elsewhere(release: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    photos = tmp_path_factory.mktemp("photos")
    Image.new("RGB", (60, 40), "white").save(photos / "2008_000001.png")
    (car,) = load_pascal3d(release, split="train", images=photos).objects
    assert car.read().min() == 255


def test_what_is_missing_is_named_with_the_fix(release: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither keypoints_val\.json nor PASCAL3D\+'s"):
        load_pascal3d(release / "Images", split="val")
    with pytest.raises(FileNotFoundError, match=r"no photo 2008_000001\.jpg in .*pass its folder"):
        load_pascal3d(release, split="train", images=release)
    (release / LISTS / "val.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no .*val\.txt; copy VOC 2012's there"):
        load_pascal3d(release, split="val")
    (release / LISTS / "val.txt").write_text("2011_000001\n")
    with pytest.raises(ValueError, match="no annotated object in the list of val"):
        load_pascal3d(release, split="val")


def test_a_damaged_record_is_named(release: Path) -> None:
    damaged = release / "Annotations" / "car_pascal" / "2008_000003.mat"
    damaged.write_bytes(b"MATLAB 5.0 but not really")
    with pytest.raises(ValueError, match=r"2008_000003\.mat: not a PASCAL3D\+ record"):
        load_pascal3d(release, split="val")
    savemat(damaged, {"record": {"objects": thing("car", [1, 2, 3], {"roof": seen(1, 1)})}})
    with pytest.raises(ValueError, match=r"2008_000003\.mat.*a bbox has 3 numbers"):
        load_pascal3d(release, split="val")


@pytest.mark.parametrize(
    ("split", "images", "objects", "keypoints"),
    [("train", 3073, 5902, 26000), ("val", 3030, 5776, 25282)],
)
def test_the_development_copy_is_complete(
    data_root: Path, split: Any, images: int, objects: int, keypoints: int
) -> None:
    found = load_pascal3d(data_root / "pascal3d", split=split, images=data_root / "voc")
    assert tuple(kind.name for kind in found.categories) == CLASSES
    assert found.channels[-1].stop == 124
    assert len({one.name for one in found.objects}) == images
    assert len(found.objects) == objects
    assert sum(int(one.visible.sum()) for one in found.objects) == keypoints
    assert found.objects[0].read().shape[1:] == found.objects[0].size

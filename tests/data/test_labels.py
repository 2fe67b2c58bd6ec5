"""Image labels from folder names, CSV and COCO files."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from surefeat.data.decode import SourceError
from surefeat.data.sources import PhotoLabels, find_labels


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("chair/a.png", "chair/deep/b.png", "dog/c.png", "stray.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6)).save(path)
    return tmp_path / "photos"


def labels_of(images: tuple[PhotoLabels, ...]) -> dict[str, set[str]]:
    return {image.name: set(image.labels) for image in images}


def coco(**more: Any) -> dict[str, Any]:
    """Two images: a chair and a difficult dog; two chairs, of which one is difficult."""
    names = ("chair/a.png", "dog/c.png")
    return {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "categories": [{"id": 5, "name": "chair"}, {"id": 6, "name": "dog"}],
        "annotations": [
            {"image_id": 0, "category_id": 5, "bbox": [1, 2, 3, 4]},
            {"image_id": 0, "category_id": 6, "bbox": [0, 0, 2, 2], "difficult": 1},
            {"image_id": 1, "category_id": 5, "bbox": [0, 0, 4, 4], "difficult": 1},
            {"image_id": 1, "category_id": 5},
        ],
    } | more


def test_folder_names_are_labels(photos: Path) -> None:
    found = find_labels(photos)
    assert labels_of(found.images) == {
        "chair/a.png": {"chair"}, "chair/deep/b.png": {"chair"}, "dog/c.png": {"dog"},
        "stray.png": set(),
    }  # fmt: skip
    assert found.categories == ("chair", "dog")
    assert found.counts() == {"chair": 2, "dog": 1}
    assert [image.name for image in found.labelled()] == [
        "chair/a.png", "chair/deep/b.png", "dog/c.png",
    ]  # fmt: skip


def test_folders_inside_a_tar_file_are_labels(photos: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(photos, arcname=".")
    assert labels_of(find_labels(tmp_path / "all.tar").images) == labels_of(
        find_labels(photos).images
    )


def test_a_csv_labels_images(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text(
        "\ufeffimage,label,by\nchair/a.png,seat; lamp,me\nchair/a.png,rug,me\ndog/c,pet,you\n"
        "stray.png,,\ngone.png,pet,you\n"
    )
    found = find_labels(photos, labels=file)
    assert labels_of(found.images) == {
        "chair/a.png": {"seat", "lamp", "rug"}, "chair/deep/b.png": set(), "dog/c.png": {"pet"},
        "stray.png": set(), "gone.png": {"pet"},
    }  # fmt: skip
    gone = found.images[-1]
    assert gone.item.read.refused is not None
    assert "is not where it was looked for" in gone.item.read.refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\na,b\n", "has no column 'image'; its first line must be image,label"),
        ("image\na\n", "has no column 'label'"),
        ("image,label\na.png,b\n,c\n", "line 3: no image is named"),
        ("image,label\n", "none of 4 images"),
    ],
)
def test_a_bad_csv_is_said(photos: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(SourceError, match=message):
        find_labels(photos, labels=tmp_path / "labels.csv")


def test_coco_annotations_are_labels_with_or_without_boxes(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.json"
    file.write_text(json.dumps(coco()))
    found = find_labels(photos, labels=file)
    first, _, second, stray = found.images
    assert (first.labels, first.unsure) == ({"chair"}, {"dog"})
    # A box that is not difficult, or none at all, is enough for a label.
    assert (second.labels, second.unsure) == ({"chair"}, set())
    assert not stray.labels
    assert [(o.category, o.box, o.difficult) for o in first.objects] == [
        ("chair", (1, 2, 3, 5), False), ("dog", (0, 0, 1, 1), True),
    ]  # fmt: skip
    assert len(second.objects) == 1


def test_a_coco_file_names_its_own_images(photos: Path) -> None:
    extra = [*coco()["images"], {"id": 9, "file_name": "gone.png"}]
    (photos / "labels.json").write_text(json.dumps(coco(images=extra)))
    found = find_labels(photos / "labels.json")
    assert [image.name for image in found.images] == ["chair/a.png", "dog/c.png", "gone.png"]
    assert found.images[2].item.read.refused is not None


def test_categories_can_be_chosen(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.json"
    file.write_text(json.dumps(coco()))
    found = find_labels(photos, labels=file, categories=("dog",))
    assert found.categories == ("dog",)
    assert not found.labelled()
    assert found.images[0].unsure == {"dog"}
    assert [o.category for o in found.images[0].objects] == ["dog"]
    with pytest.raises(SourceError, match=r"no image is labelled \['cat'\]; there are \['chair'"):
        find_labels(photos, categories=("cat",))


@pytest.mark.parametrize("content", ["{}", "[1, 2]", "nonsense", '{"images": []}'])
def test_a_file_that_is_no_coco_file_is_said(photos: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "labels.json").write_text(content)
    with pytest.raises(SourceError, match="is not a COCO file"):
        find_labels(photos, labels=tmp_path / "labels.json")


def test_images_without_any_label_say_the_fix(tmp_path: Path) -> None:
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    with pytest.raises(SourceError, match="one folder per category, or --labels"):
        find_labels(tmp_path)

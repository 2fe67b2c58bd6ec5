"""The benchmark loaders on small copies of the public layouts, and the real counts."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from sets import BOTH, HEADER, development_layout, pascal, spair, willow
from surefeat.data import benchmarks as pf_pascal
from surefeat.data.benchmarks import (
    annotated_pairs,
    development_pairs,
    load_benchmark,
    load_list,
    load_pf_pascal,
    load_pf_willow,
    load_spair,
)


def test_pf_willow_gives_all_ordered_pairs_counted_from_zero(tmp_path: Path) -> None:
    pairs = load_pf_willow(willow(tmp_path))
    assert len(pairs) == len({pair.name for pair in pairs}) == 900
    pair = next(p for p in pairs if p.image0.stem == "i2" and p.image1.stem == "i5")
    assert pair.category == "class(0)"
    assert pair.points0[0].tolist() == [2.0, 10.0]
    assert pair.points1[9].tolist() == [14.0, 19.0]


def test_pf_willow_refuses_an_incomplete_copy(tmp_path: Path) -> None:
    root = willow(tmp_path)
    folder = root / "PF-dataset-WILLOW" / "class(3)"
    savemat(folder / "i0.mat", {"pts_coord": np.ones((2, 9))})
    with pytest.raises(ValueError, match=r"i0.mat: pts_coord must be 2 x 10"):
        load_pf_willow(root)
    (folder / "i0.mat").unlink()
    with pytest.raises(ValueError, match=r"9 \.mat files of 10"):
        load_pf_willow(root)
    for path in folder.glob("*.mat"):
        path.unlink()
    with pytest.raises(ValueError, match="9 sub-classes of 10"):
        load_pf_willow(root)
    with pytest.raises(ValueError, match="no PF-WILLOW under"):
        load_pf_willow(folder)


def test_pf_pascal_lists_name_classes_and_count_from_one(tmp_path: Path) -> None:
    root = pascal(tmp_path, f"{BOTH},20,1;2,1;2,40;3,30;3,left;right", header=HEADER + ",kp_names")
    (pair,) = load_list(root, "list.csv")
    assert pair.category == "tvmonitor"
    assert pair.points0[0].tolist() == [0.0, 0.0]
    assert pair.points1[0].tolist() == [39.0, 29.0]


def test_pf_pascal_takes_points_four_pixels_outside_and_no_further(tmp_path: Path) -> None:
    for beyond, fine in ((4.4, True), (4.6, False)):  # the last pixel, 40, reaches to 40.5
        root = pascal(tmp_path, f"{BOTH},20,{40 + beyond};2,1;2,40;3,30;3", header=HEADER)
        with nullcontext() if fine else pytest.raises(ValueError, match="outside the image"):
            assert len(load_list(root, "list.csv")) == 1


@pytest.mark.parametrize("label", ["0", "21", "cat", "1.0", "01"])
def test_pf_pascal_refuses_unknown_classes(tmp_path: Path, label: str) -> None:
    root = pascal(tmp_path, f"{BOTH},{label},1,1,1,1", header=HEADER)
    with pytest.raises(ValueError, match=r"list.csv, line 2: unknown class .*1 to 20"):
        load_list(root, "list.csv")


def test_pf_pascal_test_refuses_a_shortened_list(tmp_path: Path) -> None:
    root = pascal(tmp_path, f"{BOTH},1,1,1,1,1", header=HEADER)
    (root / "image_pairs" / "list.csv").rename(root / "image_pairs" / "test_pairs.csv")
    with pytest.raises(ValueError, match="has 1 pairs, the public list 299"):
        load_pf_pascal(root)


def test_pf_pascal_annotations_give_common_keypoints_and_boxes(tmp_path: Path) -> None:
    header = "source_image,target_image,class,flip"
    root = pascal(tmp_path, f"{BOTH},2,0", f"{BOTH},2,1", header=header)
    (pair,) = annotated_pairs(root, "list.csv")
    assert pair.visible.tolist() == [True, False, False]
    # Of a keypoint with one coordinate nothing is known.
    assert pair.points1.isnan().tolist() == [[False, False], [True, True], [False, False]]
    assert [points.tolist() for points in pair.common()] == [[[0.0, 0.0]], [[39.0, 29.0]]]
    assert pair.box0 is not None
    assert pair.box0.tolist() == [0.0, 1.0, 30.0, 21.0]
    root = pascal(tmp_path, f"{BOTH},3,0", header=header)
    with pytest.raises(ValueError, match=r"line 2: there is no annotation .*bird"):
        annotated_pairs(root, "list.csv")


def test_pf_pascal_splits_use_the_annotations_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mirrored rows and pairs with a test image are left out; without the folder, rebuilt lists."""
    monkeypatch.setattr(pf_pascal, "PASCAL_TEST_PAIRS", 1)
    crossing = BOTH.replace("b.jpg", "c.jpg")
    root = development_layout(
        tmp_path, val=f"{BOTH},2,0\n{crossing},2,0", train=f"{BOTH},2,0\n{BOTH},2,1",
        rebuilt=f"{BOTH},2,10,11,12,13\n{BOTH},15,1,1,1,1",
    )  # fmt: skip
    for split in ("val", "train"):
        (pair,) = load_benchmark("pf-pascal", root, split=split).pairs
        assert (pair.image0.stem, pair.image1.stem) == ("a", "b")
        assert [points.tolist() for points in pair.common()] == [[[0.0, 0.0]], [[39.0, 29.0]]]
        assert pair.box1 is not None
        assert pair.box1.tolist() == [0.0, 1.0, 30.0, 21.0]
    shutil.rmtree(root / "PF-dataset-PASCAL" / "Annotations")
    for split in ("val", "train"):
        (pair,) = load_benchmark("pf-pascal", root, split=split).pairs
        assert [points.tolist() for points in pair.common()] == [[[9.0, 10.0]], [[11.0, 12.0]]]
        assert pair.box1 is None


def test_pf_pascal_names_the_annotation_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pf_pascal, "PASCAL_TEST_PAIRS", 1)
    root = development_layout(tmp_path, val=f"{BOTH},2,0", train=f"{BOTH},3,0", rebuilt="")
    with pytest.raises(ValueError, match=r"train_pairs.csv, line 2: there is no annotation .*bird"):
        load_benchmark("pf-pascal", root, split="val")


def test_spair_is_read_as_it_stands(tmp_path: Path) -> None:
    (pair,) = load_spair(spair(tmp_path))
    assert pair.points1.tolist() == [[7, 8], [39, 29]]
    assert pair.box1 is not None
    assert pair.box1.tolist() == [0, 0, 39, 29]
    assert pair.category == "cat"


def test_spair_marks_missing_keypoints_by_minus_one(tmp_path: Path) -> None:
    (pair,) = load_spair(spair(tmp_path, src_kps=[[-1, -1], [5, -1]]))
    assert pair.visible.tolist() == [False, True]
    assert pair.points0.isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"category": "dog"}, "unknown category 'dog'"),
        ({"trg_kps": [[7, 8]]}, "2 points in image 0 and 1 in image 1"),
        ({"trg_kps": [[7, 8], [9]]}, "trg_kps is malformed"),
        ({"trg_bndbox": [0, 0, 39]}, "trg_bndbox is malformed"),
        ({"src_imname": "c.jpg"}, "there is no image"),
        ({"src_kps": [[3, 4], [500, 6]]}, r"point 2 at \(500, 6\)"),
    ],
)
def test_spair_refuses_malformed_pairs(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"000001-a-b.json.*{message}"):
        load_spair(spair(tmp_path, **changes))


def test_spair_says_what_it_looked_for(tmp_path: Path) -> None:
    root = spair(tmp_path)
    with pytest.raises(ValueError, match="spair has trn, val, test"):
        load_spair(root, "train")
    with pytest.raises(ValueError, match="no pair annotations"):
        load_spair(root, "val")
    path = root / "PairAnnotation" / "test" / "000001-a-b.json"
    path.write_text('{\n"category": ', encoding="utf-8")
    with pytest.raises(ValueError, match=r"json, line 2: not JSON"):
        load_spair(root)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no src_imname"):
        load_spair(root)


def test_public_benchmarks_have_their_known_sizes(data_root: Path) -> None:
    test = load_pf_pascal(data_root / "pf-pascal")
    assert (len(test), sum(int(pair.visible.sum()) for pair in test)) == (299, 2414)
    assert len({pair.name for pair in test}) == 299
    assert len({pair.category for pair in test}) == 20
    pairs = load_pf_willow(data_root / "pf-willow")
    assert (len(pairs), sum(int(pair.visible.sum()) for pair in pairs)) == (900, 9000)


def test_development_pairs_share_no_image_with_test(data_root: Path) -> None:
    validation, training = development_pairs(data_root / "pf-pascal")
    assert (len(validation), len(training)) == (171, 614)
    used = {
        p for pair in load_pf_pascal(data_root / "pf-pascal") for p in (pair.image0, pair.image1)
    }
    for pair in validation + training:
        assert pair.image0 not in used
        assert pair.image1 not in used
        assert pair.category != "person"

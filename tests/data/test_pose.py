"""Labels of other tools: real files are read, ours come back, and what is wrong is named."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from PIL import Image

from surefeat.data.coco import Annotation, Coco, CocoImage, make_category
from surefeat.data.keypoints import read_coco, write_keypoints
from surefeat.data.pose import (
    ENDINGS,
    USUAL,
    PoseFormat,
    format_for,
    losses,
    only_categories,
    photo_finder,
    read_pose,
    tell_format,
    write_pose,
)
from surefeat.data.yolo import write_yolo

pytest.importorskip("sleap_io", reason="needs the pose extra")

FILES = Path(__file__).parent / "pose_files"
TRUTH = read_pose(FILES / "truth.json")
TABLES = "deeplabcut/labeled-data/vidéo 1/CollectedData_"
FORMATS: tuple[PoseFormat, ...] = get_args(PoseFormat)

# What a format does not hold, by hand: boxes, v = 1, edges, individuals, the category's name.
LOST = {
    "coco": set[str](),
    "deeplabcut": {"boxes", "hidden", "edges", "category"},
    "sleap": {"boxes"},
    "label-studio": {"hidden", "edges", "individuals"},
    "cvat": {"individuals"},
    "yolo": {"edges", "individuals"},
}


def seen(coco: Coco) -> list[tuple[str, Annotation]]:
    """Objects with the name of their photo, photo by photo, the leftmost first."""
    named = [(coco.images[note.image].name, note) for note in coco.annotations]
    return sorted(named, key=lambda pair: (pair[0], min(pair[1].keypoints[::3], default=0)))


def same(found: Coco, wanted: Coco, lost: set[str], *, names: bool = True) -> None:
    """The same labels, to a hundredth of a pixel, but for what is lost."""
    (kind,), (true_kind,) = found.categories, wanted.categories
    assert kind.keypoints == true_kind.keypoints
    assert kind.flip == true_kind.flip
    assert kind.name == ("object" if "category" in lost else true_kind.name)
    if "edges" not in lost:
        assert kind.edges == true_kind.edges
    assert len(found.annotations) == len(wanted.annotations)
    for (photo, note), (true_photo, true) in zip(seen(found), seen(wanted), strict=True):
        assert photo == true_photo or not names
        assert note.individual == ("" if "individuals" in lost else true.individual)
        for i in range(len(kind.keypoints)):
            (x, y, v), (tx, ty, tv) = note.keypoints[3 * i :][:3], true.keypoints[3 * i :][:3]
            assert v == (2 if tv == 1 and "hidden" in lost else tv)
            assert (x, y) == (pytest.approx((tx, ty), abs=0.01) if tv else (0, 0))
        if "boxes" in lost:
            assert note.box is None
        else:
            assert note.box == pytest.approx(true.box, abs=0.01)


REAL = {
    "birds.slp": LOST["sleap"],
    "birds.pkg.slp": LOST["sleap"],
    f"{TABLES}Two.csv": {"boxes", "hidden", "category"},  # its project's config.yaml has the edges
    f"{TABLES}Two.h5": {"boxes", "hidden", "category"},
    "studio.json": LOST["label-studio"],
    "points.xml": {"edges", "individuals", "category"},
    "skeletons.xml": {"boxes", "individuals"},
    "yolo/data.yaml": LOST["yolo"],
    "yolo": LOST["yolo"],
}


@pytest.mark.parametrize(("file", "lost"), REAL.items(), ids=REAL)
def test_what_a_tool_s_own_library_wrote_is_read(file: str, lost: set[str]) -> None:
    content = read_pose(FILES / file)
    other = file.startswith(("yolo", "deeplabcut"))
    same(content, TRUTH, lost, names=not other)
    # The photos are found, and those that show nothing are not forgotten where a file lists them.
    find = photo_finder(FILES / file, None)
    for image in content.images:
        assert find(image.name).read.refused is None
    assert len(content.images) == (2 if file.endswith(".slp") else 3)


def test_the_tools_own_libraries_read_what_is_written() -> None:
    """Stored by make_files.py, which needs all of them: how many pixels off they read it."""
    record = json.loads((FILES / "read_back.json").read_text())
    assert record.keys() == {"sleap-io", "tables", "datumaro", "label-studio-sdk", "ultralytics"}
    assert all(entry["most_pixels_off"] < 0.01 for entry in record.values())


@pytest.mark.parametrize("form", FORMATS)
def test_masks_come_back_or_are_said_to_be_lost(form: PoseFormat, tmp_path: Path) -> None:
    ring = (0.5, 0.5, 9.5, 0.5, 9.5, 7.5)
    first, *others = TRUTH.annotations
    masked = replace(TRUTH, annotations=(replace(first, polygons=(ring,)), *others))
    said = write_pose(
        tmp_path / USUAL[form], masked, form, photo_finder(FILES / "truth.json", None)
    )
    again = read_pose(tmp_path / USUAL[form])
    assert ([note.polygons for note in again.annotations if note.polygons] == [(ring,)]) == (
        "masks" not in said
    )
    assert ("masks" in said) == (form != "coco")


@pytest.mark.parametrize("file", [f"{TABLES}Ann.csv", f"{TABLES}Ann.h5"])
def test_a_table_of_one_animal_has_objects_without_a_name(file: str) -> None:
    content = read_pose(FILES / file)
    tom = [note for note in TRUTH.annotations if note.individual == "tom"]
    assert [note.individual for note in content.annotations] == ["", ""]
    assert [note.keypoints[:2] for note in content.annotations] == [t.keypoints[:2] for t in tom]


@pytest.mark.parametrize("form", FORMATS)
def test_labels_survive_a_round_trip(form: PoseFormat, tmp_path: Path) -> None:
    find = photo_finder(FILES / "truth.json", None)
    for name in {"deeplabcut": ["a.csv", "a.h5"], "sleap": ["a.slp", "a.pkg.slp"]}.get(
        form, [USUAL[form]]
    ):
        said = write_pose(tmp_path / name, TRUTH, form, find)
        again = read_pose(tmp_path / name)
        assert tell_format(tmp_path / name) == form
        same(again, TRUTH, LOST[form], names=form != "yolo")
        names = {image.name.removeprefix("images/train/") for image in again.images}
        assert names == {image.name for image in TRUTH.images}
        # Everything that does not come back is said, and nothing else is.
        words = {"boxes": "boxes", "hidden": "hidden", "edges": "lines", "category": "categories",
                 "individuals": "individuals"}  # fmt: skip
        assert {key for key, word in words.items() if any(word in line for line in said)} == LOST[
            form
        ]
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("form", FORMATS)
def test_places_anywhere_in_a_large_photo_survive(form: PoseFormat, tmp_path: Path) -> None:
    draw = random.Random(form)
    kind = make_category("a & <b>", [f"p\"{i}'" for i in range(5)])
    Image.new("L", (6001, 4003)).save(tmp_path / "ü & <1>.png")
    notes = []
    for _ in range(20):
        points = [(draw.uniform(-0.5, 6000.5), draw.uniform(-0.5, 4002.5), 2) for _ in range(5)]
        notes.append(Annotation(0, 0, (1, 2, 3, 4), tuple(n for point in points for n in point)))
    coco = Coco((CocoImage("ü & <1>.png", (4003, 6001)),), (kind,), tuple(notes))
    write_pose(tmp_path / USUAL[form], coco, form, photo_finder(tmp_path / "x.json", None))
    again = read_pose(tmp_path / USUAL[form])
    assert again.categories[0].keypoints == kind.keypoints
    for (_, note), (_, true) in zip(seen(again), seen(coco), strict=True):
        assert note.keypoints == pytest.approx(true.keypoints, abs=0.01)


def test_the_centre_of_the_first_pixel_in_every_tool_s_own_numbers(tmp_path: Path) -> None:
    """By hand, for a photo of 40 x 30: from the corner it is half a pixel away, else none."""
    kind = make_category("bird", ["nose"])
    note = Annotation(0, 0, (0, 0, 39, 29), (0.0, 0.0, 2))
    coco = Coco((CocoImage("a.png", (30, 40)),), (kind,), (note,))
    for form in FORMATS:
        write_pose(tmp_path / USUAL[form], coco, form, photo_finder(FILES / "truth.json", None))
    (region,) = [r for task in json.loads((tmp_path / USUAL["label-studio"]).read_text())
                 for r in task["annotations"][0]["result"] if "parentID" in r]  # fmt: skip
    assert (region["value"]["x"], region["value"]["y"]) == pytest.approx((100 / 80, 100 / 60))
    assert 'points="0.500,0.500"' in (tmp_path / USUAL["cvat"]).read_text()
    line = (tmp_path / "yolo" / "labels" / "train" / "a.txt").read_text().split()
    assert [float(word) for word in line] == pytest.approx(
        [0, 0.5, 0.5, 1, 1, 0.5 / 40, 0.5 / 30, 2], abs=1e-7
    )
    assert (tmp_path / USUAL["deeplabcut"]).read_text().splitlines()[-1] == "a.png,0.0,0.0"
    import sleap_io

    labels = sleap_io.load_slp(str(tmp_path / USUAL["sleap"]), open_videos=False)
    assert labels[0].instances[0].numpy().tolist() == [[0, 0]]


@pytest.mark.parametrize("file", REAL)
def test_any_of_them_is_taken_for_labels_of_photos(file: str) -> None:
    """As `keypoints fit` reads them: with the photos' own pixels, those in a package too."""
    labelled = read_coco(FILES / file)
    assert len(labelled.objects) == 3
    pixels = torch.stack([item.read() for item in labelled.objects])
    wanted = read_coco(FILES / "truth.json").objects
    order = sorted(range(3), key=lambda i: labelled.objects[i].points.nan_to_num(99).min().item())
    true_order = sorted(range(3), key=lambda i: wanted[i].points.nan_to_num(99).min().item())
    for mine, true in zip(order, true_order, strict=True):
        assert torch.equal(pixels[mine], wanted[true].read())
        points, true_points = labelled.objects[mine].points, wanted[true].points
        torch.testing.assert_close(points, true_points, atol=0.01, rtol=0, equal_nan=True)


def test_a_whole_project_of_deeplabcut_is_read_at_once(tmp_path: Path) -> None:
    for video in ("one", "two"):
        folder = tmp_path / "labeled-data" / video
        folder.mkdir(parents=True)
        text = (FILES / f"{TABLES}Two.csv").read_text().replace("vidéo 1", video)
        (folder / "CollectedData_Ann.csv").write_text(text)
        for photo in (FILES / TABLES).parent.glob("*.png"):
            (folder / photo.name).write_bytes(photo.read_bytes())
    labelled = read_coco(tmp_path)
    assert len(labelled.objects) == 6
    assert {item.name.split("/")[1] for item in labelled.objects} == {"one", "two"}


def test_parts_of_no_animal_are_a_category_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "CollectedData_A.csv").write_text(
        "scorer,A,A,A,A\nindividuals,mouse,mouse,single,single\nbodyparts,nose,nose,door,door\n"
        "coords,x,y,x,y\nimg.png,1,2,3,4\n"
    )
    content = read_pose(tmp_path / "CollectedData_A.csv")
    assert [(kind.name, kind.keypoints) for kind in content.categories] == [
        ("object", ("nose",)), ("single", ("door",)),
    ]  # fmt: skip
    write_pose(tmp_path / "b.csv", content, "deeplabcut", photo_finder(tmp_path / "b.csv", None))
    assert read_pose(tmp_path / "b.csv").annotations == content.annotations


def test_keypoints_outside_any_box_are_the_photo_s_only_object(tmp_path: Path) -> None:
    unboxed = tuple(replace(note, box=None) for note in TRUTH.annotations[2:])
    coco = replace(TRUTH, annotations=unboxed)
    find = photo_finder(FILES / "truth.json", None)
    assert not any("without a box" in line for line in losses(coco, "label-studio"))
    write_pose(tmp_path / "one.json", coco, "label-studio", find)
    (note,) = read_pose(tmp_path / "one.json").annotations
    assert (note.box, note.keypoints[:2]) == (None, (10, 10))
    # Two in a photo are told apart by boxes alone, so they get some.
    both = tuple(replace(note, box=None) for note in TRUTH.annotations)
    said = write_pose(tmp_path / "two.json", replace(TRUTH, annotations=both), "label-studio", find)
    assert any("objects without a box (3 got one" in line for line in said)
    boxes = [note.box for note in read_pose(tmp_path / "two.json").annotations]
    assert boxes[0] == pytest.approx((3.25, 4.25, 12.5, 20.25))


def test_relations_lead_keypoints_to_their_box_as_parents_do(tmp_path: Path) -> None:
    tasks = json.loads((FILES / "studio.json").read_text())
    for task in tasks:
        regions = task["annotations"][0]["result"]
        regions += [
            {"type": "relation", "from_id": region["id"], "to_id": region.pop("parentID")}
            for region in list(regions)
            if "parentID" in region
        ]
        older = {"result": [], "created_at": "2020-01-01"}
        task["annotations"][0]["created_at"] = "2021-01-01"
        task["annotations"] = [task["annotations"][0], older, {"was_cancelled": True, "result": 3}]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    assert len(read_pose(tmp_path / "tasks.json").annotations) == 3
    (tmp_path / "tasks.config.xml").write_text((FILES / "studio.config.xml").read_text())
    same(read_pose(tmp_path / "tasks.json"), TRUTH, LOST["label-studio"])


def test_what_a_detector_found_is_predicted_in_sleap(tmp_path: Path) -> None:
    import sleap_io

    labelled = read_coco(FILES / "truth.json")
    scored = tuple(replace(item, scores=torch.full((4,), 0.25)) for item in labelled.objects)
    found = replace(labelled, objects=scored)
    assert any("boxes" in line for line in write_keypoints(tmp_path / "a.slp", found, "sleap"))
    labels = sleap_io.load_slp(str(tmp_path / "a.slp"), open_videos=False)
    one = labels[0].predicted_instances[0]
    assert one.points["score"].tolist() == [0.25] * 4
    assert len(read_pose(tmp_path / "a.slp").annotations) == 3


def test_old_files_of_sleap_are_shifted_from_the_corner(tmp_path: Path) -> None:
    import h5py

    (tmp_path / "old.slp").write_bytes((FILES / "birds.slp").read_bytes())
    with h5py.File(tmp_path / "old.slp", "r+") as file:
        file["metadata"].attrs["format_id"] = 1.0
        table = file["instances"][()]
        del file["instances"]
        names = [name for name in table.dtype.names if name != "tracking_score"]
        file["instances"] = table[names].astype([(name, table.dtype[name]) for name in names])
    (note, *_) = read_pose(tmp_path / "old.slp").annotations
    assert note.keypoints[:3] == (2.75, 4.0, 2)


def test_only_some_categories_and_their_photos() -> None:
    other = make_category("car", ["wheel"])
    more = Annotation(2, 1, None, (1.0, 1.0, 2))
    both = Coco(TRUTH.images, (*TRUTH.categories, other), (*TRUTH.annotations, more))
    cars = only_categories(both, ["car"])
    assert (len(cars.images), cars.images[0].name, cars.annotations[0].image) == (1, "none.png", 0)
    assert cars.annotations[0].category == 0
    with pytest.raises(ValueError, match="no category 'dog'; there are bird, car"):
        only_categories(both, ["dog"])
    find = photo_finder(FILES / "truth.json", None)
    with pytest.raises(ValueError, match=r"one kind of thing, here are bird, car; choose one with"):
        write_pose(Path("never.csv"), both, "deeplabcut", find)
    assert not Path("never.csv").exists()


def test_every_format_has_an_ending_and_a_usual_name() -> None:
    assert set(ENDINGS.values()) | {"label-studio"} == set(FORMATS) == USUAL.keys()
    assert {format_for(Path(name)) for name in USUAL.values()} == set(FORMATS) - {"label-studio"}
    with pytest.raises(ValueError, match=r"x.txt: unknown ending; use one of .json .csv"):
        format_for(Path("x.txt"))


def test_yolo_keypoints_of_two_numbers_are_there_unless_they_say_nowhere(tmp_path: Path) -> None:
    """Without a third number, 0 0 (or what is outside) stands for a part that has no place."""
    pytest.importorskip("yaml")
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (40, 20)).save(tmp_path / "images" / "a.png")
    (tmp_path / "data.yaml").write_text("train: images\nnames: [bird]\nkpt_shape: [4, 2]\n")
    line = "0 0.5 0.5 1 1  0.25 0.5  0 0  -1 0.5  0 0.5\n"
    (tmp_path / "labels" / "a.txt").write_text(line)
    (item,) = read_coco(tmp_path / "data.yaml").objects
    assert item.visible.tolist() == [True, False, False, True]
    assert item.points[[0, 3]].tolist() == [[9.5, 9.5], [-0.5, 9.5]]


YAML = "train: images\nnames: {0: bird}\nkpt_shape: [1, 3]\n"
CSV = "scorer,A,A\nbodyparts,nose,nose\ncoords,x,y\n"
XML = '<annotations><image id="0" name="a.png" width="4" height="3">{}</image></annotations>'
TURNED = json.dumps([{"data": {"image": "a.png"}, "annotations": [{"result": [
    {"id": "1", "type": "keypointlabels", "image_rotation": 90, "original_width": 4,
     "original_height": 3, "value": {"x": 1, "y": 1, "keypointlabels": ["a"]}}]}]}])  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "x", r"a.txt is of no known kind of labels \(.json .csv .*; pass one of these"),
        ("a.zip", "x", "a.zip is packed; unpack it"),
        ("a.csv", "a,b\n1,2\n", "a.csv has no lines scorer, bodyparts and coords at its top; pass"),
        ("a.csv", b"\xff\xfe\x00", "a.csv is no table .*; pass CollectedData"),
        ("a.csv", f"{CSV}img.png,one,2\n", "a.csv holds what is no number .*'one'.*; pass"),
        ("a.csv", f"{CSV}img.png,1\n", "a.csv holds what is no number"),
        ("a.csv", f"{CSV}17,1,2\n", "has a row '17', which is a frame of a video and no photo"),
        ("a.h5", "no", "a.h5 is no table of DeepLabCut's .*; pass CollectedData"),
        ("a.slp", "no", "a.slp is no file of SLEAP's .*; pass a .slp"),
        ("a.json", "[{3", "a.json is no file of Label Studio's .*; export the project as JSON"),
        ("a.json", '[{"image": "a.png", "kp": []}]', "a.json is no file of Label Studio's"),
        ("a.json", TURNED, "a photo was turned in Label Studio; turn the file itself"),
        ("a.xml", "<a", "a.xml is no XML of CVAT's .*; export the task as CVAT for images 1.1"),
        ("a.xml", "<View/>", "a.xml is no XML of CVAT's .*begins with <View>"),
        ("a.xml", "<annotations><track/></annotations>", "labels the frames of a video; export"),
        ("a.xml", "<annotations/>", "has no image; export"),
        ("a.xml", XML.format('<points label="a" points="1"/>'), "a.xml is no XML of CVAT's"),
        ("a.yaml", "names: [bird]\n", "a.yaml is no data.yaml of YOLO's.*kpt_shape.*it needs"),
        ("a.yaml", "{", "a.yaml is no data.yaml of YOLO's"),
        ("a.yaml", YAML, r"there is no .*images; correct path, train and val"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_a_tool_s_is_named_with_the_fix(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=said) as refused:
        read_pose(tmp_path / name)
    assert "\n" not in str(refused.value)


def test_more_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    import h5py

    def refused(file: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            read_pose(tmp_path / file)

    with h5py.File(tmp_path / "t.h5", "w") as file:
        file.create_group("df_with_missing/table")
    refused("t.h5", "is not in pandas' fixed layout; pass t.csv, which DeepLabCut writes beside")
    (tmp_path / "images").mkdir()
    Image.new("L", (40, 30)).save(tmp_path / "images" / "a.png")
    (tmp_path / "data.yaml").write_text(YAML)
    labels = tmp_path / "labels" / "a.txt"
    labels.parent.mkdir()
    for line in ("0 0.5 0.5 1 1", "3 0.5 0.5 1 1 0 0 2", "0 0.5 0.5 1 1 0 0 x"):
        labels.write_text(f"{line}\n")
        refused("data.yaml", r"a.txt, line 1: .*; a line is class, box and 1 keypoints of 3")
    refused("nothing.csv", "nothing.csv: cannot be read")
    refused("nothing.slp", "nothing.slp: cannot be read")
    (tmp_path / "empty").mkdir()
    refused("empty", r"has neither a data.yaml \(YOLO\) nor CollectedData")
    table = CSV.replace("scorer,A,A", "scorer,A,A\nindividuals,a,a") + "i.png,1,2\n"
    (tmp_path / "empty" / "CollectedData_a.csv").write_text(table)
    (tmp_path / "empty" / "CollectedData_b.csv").write_text(table.replace("nose", "tail"))
    refused("empty", "has other body parts; give every animal and every table the same")


def test_sizes_that_no_photo_tells_are_asked_for(tmp_path: Path) -> None:
    unknown = replace(TRUTH, images=tuple(CocoImage(image.name) for image in TRUTH.images))
    with pytest.raises(ValueError, match=r"a.png is not there, and its size is needed; pass --im"):
        write_pose(tmp_path / "yolo", unknown, "yolo", photo_finder(tmp_path / "x.json", None))
    with pytest.raises(ValueError, match=r"a.png is not where it was looked for .*plain .slp"):
        write_pose(tmp_path / "a.pkg.slp", TRUTH, "sleap", photo_finder(tmp_path / "x.json", None))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "file", "said"),
    [("sleap_io", "birds.slp", "SLEAP's files need sleap-io: pip install 'surefeat.pose.'"),
     ("h5py", f"{TABLES}Two.h5", "DeepLabCut's HDF5 files need h5py: pip install 'surefeat.pose.'"),
     ("yaml", "yolo", "YOLO's data.yaml needs PyYAML: pip install 'surefeat.pose.'")],
)  # fmt: skip
def test_a_missing_extra_is_named(
    module: str, file: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=said):
        read_pose(FILES / file)


def test_a_skeleton_that_joins_nothing_is_refused(tmp_path: Path) -> None:
    content: dict[str, Any] = json.loads((FILES / "truth.json").read_text())
    assert content["categories"][0]["skeleton"] == [[1, 3], [2, 3], [3, 4]]  # COCO counts from 1
    for lines in ([[1, 9]], [[1]], "ab"):
        content["categories"][0]["skeleton"] = lines
        (tmp_path / "a.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"a.json: .*; correct its categories"):
            read_pose(tmp_path / "a.json")


@pytest.mark.parametrize("file", [file for file in REAL if file != "yolo"])
def test_a_damaged_file_is_read_or_refused_in_one_line(file: str, tmp_path: Path) -> None:
    """Cut, overwritten, or with something else in the middle, at 40 places each."""
    draw, whole = random.Random(file), (FILES / file).read_bytes()
    shutil.copytree(FILES, tmp_path / "files")
    other = [b"null", b"[]", b"-1", b"1e999", b"NaN", b"<", b"\0", b"9" * 30]
    said: list[str] = []
    for _ in range(40):
        place = draw.randrange(len(whole))
        rest = whole[place + draw.randrange(12) :] if draw.random() < 0.7 else b""
        (tmp_path / "files" / file).write_bytes(whole[:place] + draw.choice(other) + rest)
        try:
            read_coco(tmp_path / "files" / file)
        except (ValueError, OSError) as error:
            said.append(str(error))
    assert len(said) > 10
    assert not any("\n" in line for line in said)


def test_yolo_s_numbers_stay_within_the_photo(tmp_path: Path) -> None:
    """A box of 230 x 126 pixels from (-10, -5) on in a photo of 200 x 100; a part to its right."""
    note = Annotation(0, 0, (-10.0, -5.0, 219.0, 120.0), (205.0, -3.0, 2.0))
    coco = Coco((CocoImage("a.png", (100, 200)),), (make_category("bird", ("beak",)),), (note,))
    write_yolo(tmp_path, coco, None)
    (file,) = (tmp_path / "labels").rglob("a.txt")
    numbers = [float(word) for word in file.read_text().split()]
    assert numbers == pytest.approx([0, 105 / 200, 58 / 100, 1, 1, 1, 0, 2])

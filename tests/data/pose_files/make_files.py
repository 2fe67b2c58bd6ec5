"""Labels written by the tools' own libraries, and a check that these read what surefeat writes.

    python tests/data/pose_files/make_files.py

Draws three small photos with truth.json (COCO), then has every tool's library write the same
labels: sleap-io (SLEAP), pandas with PyTables (DeepLabCut, which writes its tables so),
label-studio-sdk (Label Studio), datumaro (CVAT) and ultralytics (YOLO). The layout of CVAT's
skeletons, which its server writes, is spelled out here. The other way round, the libraries read
what surefeat makes of truth.json; read_back.json says with which versions and how far off.

Needs, in an environment of its own: sleap-io tables label-studio-sdk datumaro ultralytics.
"""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from surefeat.data.coco import Annotation, Coco, CocoImage, make_category, write_annotations
from surefeat.data.pose import photo_finder, read_pose, write_pose

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 40, 30
PHOTOS = ("a.png", "sub folder/bé 1.png", "none.png")
BIRD = make_category(
    "bird", ["left eye", "right eye", "schnäbel", "tail"], edges=[(0, 2), (1, 2), (2, 3)]
)
POINTS = {  # photo, individual -> x, y, v in our pixels: the centre of the first one is (0, 0)
    (0, "tom"): [(3.25, 4.5, 2), (8.75, 4.25, 2), (6, 9.5, 1), (12.5, 20.25, 2)],
    (0, "ann"): [(25.5, 6.75, 2), (0, 0, 0), (30.25, 12, 2), (37.5, 27.5, 2)],
    (1, "tom"): [(10, 10, 2), (15.5, 10.25, 2), (0, 0, 0), (30.75, 3.5, 1)],
}
BOXES = {(0, "tom"): (2, 3, 14, 22), (0, "ann"): (23, 5, 38, 28), (1, "tom"): (8, 2, 33, 13)}


def truth() -> Coco:
    images = tuple(CocoImage(name, (HEIGHT, WIDTH)) for name in PHOTOS)
    notes = tuple(
        Annotation(
            key[0], 0, BOXES[key], tuple(n for point in points for n in point), individual=key[1]
        )
        for key, points in POINTS.items()
    )
    return Coco(images, (BIRD,), notes)


def draw() -> None:
    ys, xs = np.mgrid[:HEIGHT, :WIDTH]
    for number, name in enumerate(PHOTOS):
        pixels = np.stack([xs * 6, ys * 8, np.full_like(xs, 80 * number)], -1).astype(np.uint8)
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(HERE / name, optimize=True)
    write_annotations(HERE / "truth.json", truth())


def seen(points: list[tuple[float, float, int]]) -> np.ndarray:
    table = np.array(points, float)
    return np.where(table[:, 2:] > 0, table[:, :2], np.nan)


def make_sleap() -> None:
    import sleap_io

    video = sleap_io.Video.from_filename(list(PHOTOS))
    skeleton = sleap_io.Skeleton(
        list(BIRD.keypoints), [("left eye", "schnäbel"), ("right eye", "schnäbel"),
                               ("schnäbel", "tail")], [("left eye", "right eye")], name="bird",
    )  # fmt: skip
    tracks = {name: sleap_io.Track(name) for name in ("tom", "ann")}
    frames = []
    for photo in (0, 1):
        instances = []
        for (where, who), points in POINTS.items():
            if where == photo:
                one = sleap_io.Instance.from_numpy(seen(points), skeleton, track=tracks[who])
                one.points["visible"] = [v == 2 for _, _, v in points]
                instances.append(one)
        frames.append(sleap_io.LabeledFrame(video, photo, instances))
    labels = sleap_io.Labels(frames, tracks=list(tracks.values()))
    labels.save("birds.pkg.slp", embed=True, verbose=False)
    labels.save("birds.slp", verbose=False)


def make_deeplabcut() -> None:
    """A project with one video's folder; photos are found two folders above their table."""
    import pandas

    project = HERE / "deeplabcut"
    folder = project / "labeled-data" / "vidéo 1"
    folder.mkdir(parents=True, exist_ok=True)
    files = ["img 01.png", "img 02.png", "img 03.png"]
    for name, file in zip(PHOTOS, files, strict=True):
        (folder / file).write_bytes((HERE / name).read_bytes())
    index = pandas.MultiIndex.from_tuples([("labeled-data", "vidéo 1", file) for file in files])
    lines = [[BIRD.keypoints[a], BIRD.keypoints[b]] for a, b in BIRD.edges]
    (project / "config.yaml").write_text(json.dumps({"Task": "birds", "skeleton": lines}))
    levels = ["scorer", "individuals", "bodyparts", "coords"]
    every = pandas.MultiIndex.from_product(
        [["Ann"], ["ann", "tom"], BIRD.keypoints, ["x", "y"]], names=levels
    )
    table = pandas.DataFrame(np.nan, index=index, columns=every)
    for (photo, who), points in POINTS.items():
        for name, (x, y) in zip(BIRD.keypoints, seen(points), strict=True):
            table.loc[index[photo], ("Ann", who, name)] = [x, y]
    alone = table.xs("tom", axis=1, level="individuals")
    for name, one in {"Ann": alone, "Two": table}.items():
        one.to_csv(folder / f"CollectedData_{name}.csv")
        one.to_hdf(folder / f"CollectedData_{name}.h5", key="df_with_missing", mode="w")


CONFIGURATION = """<View><Image name="image" value="$image"/>
<RectangleLabels name="box" toName="image"><Label value="bird"/></RectangleLabels>
<KeyPointLabels name="part" toName="image">
{}</KeyPointLabels></View>
""".format("".join(f'<Label value="{name}" model_index="{row}"/>\n'
                   for row, name in enumerate(BIRD.keypoints)))  # fmt: skip


def make_label_studio() -> None:
    """Regions by the SDK, with the fields that the server adds: sizes, and the tree's parentID."""
    from label_studio_sdk.label_interface import LabelInterface

    interface = LabelInterface(CONFIGURATION)
    (HERE / "studio.config.xml").write_text(CONFIGURATION, encoding="utf-8")
    size = {"original_width": WIDTH, "original_height": HEIGHT, "image_rotation": 0}
    tasks = []
    for number, name in enumerate(PHOTOS):
        results = []
        for (photo, who), points in POINTS.items():
            if photo != number:
                continue
            x1, y1, x2, y2 = BOXES[photo, who]
            sides = {"x": x1 / WIDTH * 100, "y": y1 / HEIGHT * 100, "rotation": 0,
                     "width": (x2 + 1 - x1) / WIDTH * 100,
                     "height": (y2 + 1 - y1) / HEIGHT * 100}  # fmt: skip
            box = interface.get_control("box").label(label=["bird"], **sides)._dict()
            results.append(box | size)
            for part, (x, y, v) in zip(BIRD.keypoints, points, strict=True):
                if v:
                    place = {"x": (x + 0.5) / WIDTH * 100, "y": (y + 0.5) / HEIGHT * 100}
                    region = interface.get_control("part").label(label=[part], **place)._dict()
                    results.append(region | size | {"parentID": box["id"]})
        address = (
            "/data/local-files/?d=" + quote(name) if number else "/data/upload/1/0a1b2c3d-a.png"
        )
        done = [{"id": number, "result": results, "was_cancelled": False}]
        tasks.append({"id": number + 1, "data": {"image": address}, "annotations": done})
    (HERE / "studio.json").write_text(json.dumps(tasks), encoding="utf-8")


def make_cvat() -> None:
    """Points and boxes by datumaro; skeletons as CVAT's server dumps them."""
    from datumaro.components.annotation import AnnotationType, Bbox, LabelCategories, Points
    from datumaro.components.dataset import Dataset
    from datumaro.components.dataset_base import DatasetItem
    from datumaro.components.media import Image as Photo

    labels = ["bird", *BIRD.keypoints]
    items = []
    for number, name in enumerate(PHOTOS):
        marks: list[Any] = []
        for group, ((photo, who), points) in enumerate(POINTS.items(), start=1):
            if photo == number:
                x1, y1, x2, y2 = BOXES[photo, who]
                occluded = {"occluded": False}
                marks.append(Bbox(x1, y1, x2 + 1 - x1, y2 + 1 - y1, label=0, group=group,
                                  attributes=occluded))  # fmt: skip
                for row, (x, y, v) in enumerate(points, start=1):
                    if v:
                        about = {"occluded": v == 1}
                        place = [x + 0.5, y + 0.5]
                        marks.append(Points(place, label=row, group=group, attributes=about))
        media = Photo.from_file(path=str(HERE / name), size=(HEIGHT, WIDTH))
        stem = name.removesuffix(".png")
        items.append(DatasetItem(id=stem, subset="default", media=media, annotations=marks,
                                 attributes={"frame": number}))  # fmt: skip
    kinds = {AnnotationType.label: LabelCategories.from_iterable(labels)}
    with tempfile.TemporaryDirectory() as made:
        data = Dataset.from_iterable(items, categories=kinds)
        data.export(made, "cvat", save_media=False, image_ext=".png")
        (file,) = Path(made).rglob("*.xml")
        (HERE / "points.xml").write_bytes(file.read_bytes())
    make_skeletons()


def make_skeletons() -> None:
    root = ElementTree.Element("annotations")
    ElementTree.SubElement(root, "version").text = "1.1"
    path = ElementTree.SubElement(ElementTree.SubElement(root, "meta"), "job")
    labels = ElementTree.SubElement(path, "labels")
    nodes = "".join(
        f'<circle r="0.75" cx="{10 * i}" cy="{10 * i}" data-type="element node" '
        f'data-element-id="{i}" data-node-id="{i}" data-label-name="{name}"></circle>'
        for i, name in enumerate(BIRD.keypoints, start=1)
    )
    lines = "".join(
        f'<line x1="1" y1="1" x2="2" y2="2" data-type="edge" data-node-from="{a + 1}" '
        f'data-node-to="{b + 1}"></line>'
        for a, b in BIRD.edges
    )
    for name, kind in (("bird", "skeleton"), *((part, "points") for part in BIRD.keypoints)):
        label = ElementTree.SubElement(labels, "label")
        ElementTree.SubElement(label, "name").text = name
        ElementTree.SubElement(label, "type").text = kind
        extra = ("svg", lines + nodes) if kind == "skeleton" else ("parent", "bird")
        ElementTree.SubElement(label, extra[0]).text = extra[1]
    for number, name in enumerate(PHOTOS):
        about = {"id": str(number), "name": name, "width": str(WIDTH), "height": str(HEIGHT)}
        image = ElementTree.SubElement(root, "image", about)
        for (photo, _), points in POINTS.items():
            if photo == number:
                about = {"label": "bird", "source": "manual", "z_order": "0"}
                skeleton = ElementTree.SubElement(image, "skeleton", about)
                for part, (x, y, v) in zip(BIRD.keypoints, points, strict=True):
                    about = {"label": part, "source": "manual", "outside": str(int(v == 0)),
                             "occluded": str(int(v == 1)),
                             "points": f"{x + 0.5:.2f},{y + 0.5:.2f}"}  # fmt: skip
                    ElementTree.SubElement(skeleton, "points", about)
    ElementTree.indent(root)
    (HERE / "skeletons.xml").write_bytes(ElementTree.tostring(root, "utf-8"))


def make_yolo() -> None:
    """Lines by Ultralytics' save_txt, as after a prediction; data.yaml as its docs have it."""
    import torch
    import yaml
    from ultralytics.engine.results import Results

    folder = HERE / "yolo"
    for number, name in enumerate(PHOTOS):
        photo = folder / "images" / ("val" if number == 1 else "train") / name
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes((HERE / name).read_bytes())
        mine = [(BOXES[key], points) for key, points in POINTS.items() if key[0] == number]
        if not mine:
            continue
        boxes = [[x1, y1, x2 + 1, y2 + 1, 1.0, 0] for (x1, y1, x2, y2), _ in mine]
        places = [[[x + 0.5, y + 0.5, v] if v else [0, 0, 0] for x, y, v in points]
                  for _, points in mine]  # fmt: skip
        result = Results(
            np.zeros((HEIGHT, WIDTH, 3), np.uint8), path=str(photo), names={0: "bird"},
            boxes=torch.tensor(boxes), keypoints=torch.tensor(places),
        )  # fmt: skip
        text = Path(str(photo).replace("/images/", "/labels/")).with_suffix(".txt")
        text.unlink(missing_ok=True)
        result.save_txt(text)
    content = {"train": "images/train", "val": "images/val", "kpt_shape": [4, 3],
               "flip_idx": [1, 0, 2, 3], "names": {0: "bird"},
               "kpt_names": {0: list(BIRD.keypoints)}}  # fmt: skip
    (folder / "data.yaml").write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")


def worst(found: dict[tuple[int, str], np.ndarray]) -> float:
    """The largest distance, in pixels, of what a tool read (NaN: no place) from what is true."""
    assert found.keys() == POINTS.keys()
    apart = [np.abs(found[key] - seen(points)) for key, points in POINTS.items()]
    gone = [np.isnan(found[key]) == np.isnan(seen(points)) for key, points in POINTS.items()]
    assert all(same.all() for same in gone)
    return round(float(np.nanmax(np.concatenate(apart))), 5)


def read_sleap(folder: Path) -> float:
    import sleap_io

    worst_of = 0.0
    for name in ("labels.slp", "labels.pkg.slp"):
        labels = sleap_io.load_slp(str(folder / name))
        found = {(frame.frame_idx, one.track.name): one.numpy(invisible_as_nan=False)
                 for frame in labels for one in frame.instances}  # fmt: skip
        worst_of = max(worst_of, worst(found))
        assert labels.skeletons[0].edge_inds == list(BIRD.edges)
    assert labels[0].image.shape == (HEIGHT, WIDTH, 3)
    return worst_of


def read_deeplabcut(folder: Path) -> float:
    import pandas

    csv = pandas.read_csv(folder / "CollectedData_x.csv", header=[0, 1, 2, 3], index_col=0)
    h5 = pandas.read_hdf(folder / "CollectedData_x.h5")
    assert list(h5.columns.names) == ["scorer", "individuals", "bodyparts", "coords"]
    np.testing.assert_allclose(h5.to_numpy(), csv.to_numpy())
    assert list(h5.index) == list(csv.index) == list(PHOTOS)
    return worst({key: h5.loc[PHOTOS[key[0]], ("x", key[1])].to_numpy().reshape(-1, 2)
                  for key in POINTS})  # fmt: skip


def read_label_studio(folder: Path) -> float:
    """Its converter makes YOLO's lines of our tasks; those we read."""
    from label_studio_sdk.converter import Converter

    config = (folder / "studio.config.xml").read_text(encoding="utf-8")
    converter = Converter(config, str(folder), download_resources=False)
    out = folder / "made by Label Studio"
    converter.convert_to_yolo(str(folder / "studio.json"), str(out), is_dir=False)
    found = {}
    for file in sorted((out / "labels").rglob("*.txt")):
        rows = [[float(word) for word in line.split()] for line in file.read_text().splitlines()]
        stem = unquote(file.stem).removeprefix("?d=")  # it names files by the end of an address
        photo = next(n for n, name in enumerate(PHOTOS) if Path(name).stem == stem)
        for who, row in zip([who for n, who in POINTS if n == photo], rows, strict=True):
            table = np.array(row[5:]).reshape(-1, 3)
            places = table[:, :2] * [WIDTH, HEIGHT] - 0.5
            found[photo, who] = np.where(table[:, 2:] > 0, places, np.nan)
    return worst(found)


def read_cvat(folder: Path) -> float:
    """datumaro knows no skeletons: it reads their points one by one, and the boxes."""
    from datumaro.components.dataset import Dataset

    (folder / "cvat").mkdir()
    (folder / "cvat" / "default.xml").write_bytes((folder / "labels.xml").read_bytes())
    data = Dataset.import_from(str(folder / "cvat"), "cvat")
    apart = []
    for number, name in enumerate(PHOTOS):
        item = data.get(name.removesuffix(".png"), "default")
        boxes = [mark.points for mark in item.annotations if mark.type.name == "bbox"]
        wanted = [(x1, y1, x2 + 1, y2 + 1) for (photo, _), (x1, y1, x2, y2) in BOXES.items()
                  if photo == number]  # fmt: skip
        apart += list(np.abs(np.array(boxes) - np.array(wanted)).ravel())
    return round(float(np.max(apart)), 5)


def read_yolo(folder: Path) -> float:
    from ultralytics.data.utils import check_det_dataset, img2label_paths, verify_image_label

    data = check_det_dataset(str(folder / "yolo" / "data.yaml"), autodownload=False)
    found = {}
    for number, name in enumerate(PHOTOS):
        photo = str(Path(data["train"]) / name)
        label = img2label_paths([photo])[0]
        row = verify_image_label((photo, label, "", True, 1, 4, 3, False))
        boxes, points = row[1], row[4]
        assert (len(boxes) == 0) == (number == 2), row[-1]
        for who, table in zip([who for n, who in POINTS if n == number], points, strict=False):
            places = table[:, :2] * [WIDTH, HEIGHT] - 0.5
            found[number, who] = np.where(table[:, 2:] > 0, places, np.nan)
    return worst(found)


def read_back() -> None:
    """What the tools' libraries make of what surefeat writes."""
    coco, find = read_pose(HERE / "truth.json"), photo_finder(HERE / "truth.json", None)
    checks = {"sleap-io": read_sleap, "tables": read_deeplabcut, "datumaro": read_cvat,
              "label-studio-sdk": read_label_studio, "ultralytics": read_yolo}  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, form in (("labels.slp", "sleap"), ("labels.pkg.slp", "sleap"),
                           ("CollectedData_x.csv", "deeplabcut"), ("yolo", "yolo"),
                           ("CollectedData_x.h5", "deeplabcut"), ("labels.xml", "cvat"),
                           ("studio.json", "label-studio")):  # fmt: skip
            write_pose(folder / name, coco, form, find)  # type: ignore[arg-type]
        record = {library: {"version": version(library), "most_pixels_off": check(folder)}
                  for library, check in checks.items()}  # fmt: skip
    print(json.dumps(record, indent=2))
    (HERE / "read_back.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    draw()
    os.chdir(HERE)  # so that files name photos as seen from here
    make_sleap()
    make_deeplabcut()
    make_label_studio()
    make_cvat()
    make_yolo()
    read_back()

"""The benchmark loaders on small copies of the public layouts, fetching, and the real counts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from surefeat.data import pf_pascal
from surefeat.data.fetch import SOURCES, Source, get, unpack
from surefeat.data.pairs import Pair, image_size, load_pairs
from surefeat.data.pf_pascal import (
    annotated_pairs,
    development_pairs,
    load_list,
    load_pf_pascal,
)
from surefeat.data.pf_willow import load_pf_willow
from surefeat.data.spair import load_spair
from surefeat.eval.benchmarks import load_benchmark
from surefeat.image import load

HEADER = "source_image,target_image,class,XA,YA,XB,YB"


def picture(path: Path, *, width: int = 40, height: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (90, 120, 60)).save(path)


def write_list(folder: Path, *rows: str, header: str = HEADER) -> Path:
    picture(folder / "a.png")
    picture(folder / "b.png", width=50)
    path = folder / "pairs.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_a_list_of_ones_own_is_read_in_the_images_own_pixels(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a.png,b.png,my chairs,0;39;10.5,0;29;7,49;1;2,3;4;5")
    (pair,) = load_pairs(path)
    assert pair.category == "my chairs"
    assert (pair.size0, pair.size1) == ((30, 40), (30, 50))
    assert pair.points0.tolist() == [[0, 0], [39, 29], [10.5, 7]]
    assert pair.points1.tolist() == [[49, 3], [1, 4], [2, 5]]
    assert pair.visible.tolist() == [True, True, True]
    assert pair.image1 == tmp_path / "b.png"


def test_lists_that_count_from_one_are_moved_by_one(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a.png,b.png,x,1;40,1;30,1;50,1;30")
    (pair,) = load_pairs(path, first_pixel=1)
    assert pair.points0.tolist() == [[0, 0], [39, 29]]
    assert pair.points1.tolist() == [[0, 0], [49, 29]]


@pytest.mark.parametrize("first_pixel", [0, 1])
def test_padding_marks_missing_keypoints(tmp_path: Path, first_pixel: int) -> None:
    path = write_list(tmp_path, "a.png,b.png,x,5;-1;nan;8,5;-1;3;8,6;7;8;-1,6;7;8;-1")
    (pair,) = load_pairs(path, first_pixel=first_pixel)
    assert pair.visible.tolist() == [True, False, False, False]
    points0, points1 = pair.common()
    assert points0.tolist() == [[5 - first_pixel] * 2]
    assert points1.tolist() == [[6 - first_pixel] * 2]
    assert pair.points0[1:3].isnan().all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a.png,b.png,x,1;2,1,1;2,1;2", "line 3: XA has 2 numbers and YA has 1"),
        ("a.png,b.png,x,1;2,1;2,1,1", "line 3: 2 points in image 0 and 1 in image 1"),
        ("a.png,b.png,x,1;two,1;2,1;2,1;2", "line 3: XA must be numbers"),
        ("a.png,b.png,x,,,,", "line 3: XA must be numbers"),
        ("a.png,b.png,x,1;inf,1;2,1;2,1;2", "line 3: XA or YA holds an infinite"),
        ("a.png,b.png,x,1,1,1", "line 3: wants 7 fields"),
        ("a.png,b.png,x,1,1,1,1,9", "line 3: wants 7 fields"),
        ("a.png,c.png,x,1,1,1,1", "line 3: there is no image"),
        ("a.png,b.png,,1,1,1,1", "line 3: the class is empty"),
        ("a.png,b.png,x,40,1,1,1", r"line 3, image 0: point 1 at \(40, 1\)"),
        ("a.png,b.png,x,1,1,3;4,3;31", "line 3: 1 points in image 0 and 2"),
        ("a.png,b.png,x,1;2,1;2,3;4,3;31", r"line 3, image 1: point 2 at \(4, 31\)"),
        ("a.png,b.png,x,-1,-1,1,1", "line 3: no keypoint is in both images"),
    ],
)
def test_malformed_lists_are_refused_with_file_and_line(
    tmp_path: Path, row: str, message: str
) -> None:
    path = write_list(tmp_path, "a.png,b.png,x,1,1,1,1", row)
    with pytest.raises(ValueError, match=f"pairs.csv, {message}"):
        load_pairs(path)


def test_lists_without_columns_rows_or_file_are_refused(tmp_path: Path) -> None:
    path = write_list(tmp_path, header="source_image,target_image,class,XA,YA")
    with pytest.raises(ValueError, match="line 1: no column XB, YB"):
        load_pairs(path)
    with pytest.raises(ValueError, match="holds no pairs"):
        load_pairs(write_list(tmp_path))
    with pytest.raises(ValueError, match="there is no pair list"):
        load_pairs(tmp_path / "other.csv")
    mirrored = write_list(tmp_path, "a.png,b.png,x,1,1,1,1,1", header=HEADER + ",flip")
    with pytest.raises(ValueError, match="line 2: mirrored"):
        load_pairs(mirrored)


def test_points_may_lie_outside_by_the_tolerance_alone(tmp_path: Path) -> None:
    path = write_list(tmp_path, "a.png,b.png,x,41.4,1,1,1")  # the edge is at 39.5
    assert len(load_pairs(path, tolerance=2.0)) == 1
    with pytest.raises(ValueError, match="outside the image of 40 x 30"):
        load_pairs(path, tolerance=1.8)


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp", "x.tif"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_image_size_is_that_of_the_loaded_picture(
    tmp_path: Path, name: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (40, 30)).save(tmp_path / name, exif=exif)
    assert image_size(tmp_path / name) == tuple(load(tmp_path / name).shape[-2:])


def test_image_size_notices_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    picture(path)
    assert image_size(path) == (30, 40)
    picture(path, width=70)
    os.utime(path, ns=(1, 1))
    assert image_size(path) == (30, 70)


def test_image_size_refuses_what_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match="cannot read the image"):
        image_size(tmp_path / "broken.jpg")


def test_a_pair_refuses_visible_points_without_position() -> None:
    points, here = torch.tensor([[1.0, torch.nan]]), Path("a.png")
    seen = torch.tensor([True])
    with pytest.raises(ValueError, match="no finite position"):
        Pair(here, here, "x", points, points, seen, (9, 9), (9, 9), "x/a-a")


def willow(root: Path) -> Path:
    for number in range(10):
        folder = root / "PF-dataset-WILLOW" / f"class({number})"
        for image in range(10):
            picture(folder / f"i{image}.png")
            points = np.stack([np.arange(1, 11) + image, np.arange(11, 21)]).astype(float)
            savemat(folder / f"i{image}.mat", {"pts_coord": points})
    return root


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


def pascal(root: Path, *rows: str, header: str) -> Path:
    images = root / "PF-dataset-PASCAL"
    for name in ("a", "b"):
        picture(images / "JPEGImages" / f"{name}.jpg")
    for name, points in (
        ("a", [[1, 1], [5, 6], [np.nan, np.nan]]),
        ("b", [[40, 30], [np.nan, 2], [3, 4]]),
    ):
        path = images / "Annotations" / "bicycle" / f"{name}.mat"
        path.parent.mkdir(parents=True, exist_ok=True)
        savemat(path, {"kps": np.array(points, dtype=float), "bbox": np.array([[1, 2, 31, 22]])})
    (root / "image_pairs").mkdir(exist_ok=True)
    text = "\n".join([header, *rows]) + "\n"
    (root / "image_pairs" / "list.csv").write_text(text, encoding="utf-8")
    return root


BOTH = "PF-dataset-PASCAL/JPEGImages/a.jpg,PF-dataset-PASCAL/JPEGImages/b.jpg"


def test_pf_pascal_lists_name_classes_and_count_from_one(tmp_path: Path) -> None:
    root = pascal(tmp_path, f"{BOTH},20,1;2,1;2,40;3,30;3,left;right", header=HEADER + ",kp_names")
    (pair,) = load_list(root, "list.csv")
    assert pair.category == "tvmonitor"
    assert pair.points0[0].tolist() == [0.0, 0.0]
    assert pair.points1[0].tolist() == [39.0, 29.0]


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
    (pair,) = annotated_pairs(root, "list.csv", drop_mirrored=True)
    assert pair.visible.tolist() == [True, False, False]
    assert [points.tolist() for points in pair.common()] == [[[0.0, 0.0]], [[39.0, 29.0]]]
    assert pair.box0 is not None
    assert pair.box0.tolist() == [0.0, 1.0, 30.0, 21.0]
    with pytest.raises(ValueError, match="line 3: a mirrored pair"):
        annotated_pairs(root, "list.csv")
    root = pascal(tmp_path, f"{BOTH},3,0", header=header)
    with pytest.raises(ValueError, match=r"line 2: there is no annotation .*bird"):
        annotated_pairs(root, "list.csv")


def development_layout(root: Path, *, val: str, train: str, rebuilt: str) -> Path:
    """PF-PASCAL as published: a test list of c and d, public lists without keypoints, .mat files.

    `rebuilt` rows go to the two lists that carry rebuilt keypoints.
    """
    pascal(root, header=HEADER)
    folder, lists = root / "PF-dataset-PASCAL", root / "image_pairs"
    for name in ("c", "d"):
        picture(folder / "JPEGImages" / f"{name}.jpg")
        content = {"kps": np.full((3, 2), 7.0), "bbox": np.array([[1, 1, 20, 20]])}
        savemat(folder / "Annotations" / "bicycle" / f"{name}.mat", content)
    there = BOTH.replace("a.jpg", "c.jpg").replace("b.jpg", "d.jpg")
    (lists / "test_pairs.csv").write_text(f"{HEADER}\n{there},2,1,1,1,1\n")
    public = "source_image,target_image,class,flip"
    for split, rows in (("val", val), ("train", train)):
        (lists / f"{split}_pairs.csv").write_text(f"{public}\n{rows}\n")
        (lists / f"{split}_pairs_rebuilt_keypoints.csv").write_text(f"{HEADER}\n{rebuilt}\n")
    return root


def test_pf_pascal_splits_use_the_annotations_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mirrored rows and pairs with a test image are left out; without the folder, rebuilt lists."""
    monkeypatch.setattr(pf_pascal, "TEST_PAIRS", 1)
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
    monkeypatch.setattr(pf_pascal, "TEST_PAIRS", 1)
    root = development_layout(tmp_path, val=f"{BOTH},2,0", train=f"{BOTH},3,0", rebuilt="")
    with pytest.raises(ValueError, match=r"train_pairs.csv, line 2: there is no annotation .*bird"):
        load_benchmark("pf-pascal", root, split="val")


def spair(root: Path, **changes: object) -> Path:
    for name in ("a", "b"):
        picture(root / "JPEGImages" / "cat" / f"{name}.jpg")
    content: dict[str, object] = {
        "src_imname": "a.jpg",
        "trg_imname": "b.jpg",
        "category": "cat",
        "src_kps": [[3, 4], [5, 6]],
        "trg_kps": [[7, 8], [39, 29]],
        "src_bndbox": [1, 2, 30, 20],
        "trg_bndbox": [0, 0, 39, 29],
    }
    folder = root / "PairAnnotation" / "test"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**content, **changes})
    (folder / "000001-a-b.json").write_text(text, encoding="utf-8")
    return root


def test_spair_is_read_as_it_stands(tmp_path: Path) -> None:
    (pair,) = load_spair(spair(tmp_path))
    assert pair.points1.tolist() == [[7, 8], [39, 29]]
    assert pair.box1 is not None
    assert pair.box1.tolist() == [0, 0, 39, 29]
    assert pair.category == "cat"


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
    with pytest.raises(ValueError, match="SPair-71k has trn, val, test"):
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


class Handler(BaseHTTPRequestHandler):
    """One file with an ETag and ranges; drops the connection after `cuts.pop(0)` bytes."""

    protocol_version = "HTTP/1.1"

    def __init__(self, server_state: dict[str, object], *args: object) -> None:
        self.state = server_state
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        content: bytes = self.state["content"]  # type: ignore[assignment]
        tag: str = self.state["tag"]  # type: ignore[assignment]
        asked = self.headers.get("Range")
        self.state["asked"].append(asked)  # type: ignore[attr-defined]
        resume = asked is not None and self.headers.get("If-Range") == tag
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and resume else 0
        if resume and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if resume else 200)
        if resume:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("Connection", "close")
        self.end_headers()
        cuts: list[int] = self.state["cuts"]  # type: ignore[assignment]
        self.wfile.write(content[start : start + cuts.pop(0)] if cuts else content[start:])
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        """Quiet."""


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as pack:
        for name, content in files.items():
            pack.writestr(name, content)
    return buffer.getvalue()


FILES = {"set/a.bin": bytes(range(256)) * 40, "set/b.txt": b"text"}


class Server:
    def __init__(self) -> None:
        self.state: dict[str, object] = {
            "content": zip_of(FILES), "tag": '"one"', "cuts": [], "asked": []
        }  # fmt: skip
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self.state))
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def sources(self, checksum: str | None = None) -> dict[str, Source]:
        url = f"http://127.0.0.1:{self.http.server_address[1]}/set.zip"
        return {"set": Source(url, "set.zip", checksum, "a test")}

    def checksum(self) -> str:
        return hashlib.sha256(self.state["content"]).hexdigest()  # type: ignore[arg-type]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    instance = Server()
    yield instance
    instance.http.shutdown()
    instance.http.server_close()


def fetched(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_get_fetches_checks_and_unpacks_once(server: Server, tmp_path: Path) -> None:
    sources = server.sources(server.checksum())
    assert get("set", tmp_path / "new", sources=sources) == tmp_path / "new"
    assert fetched(tmp_path / "new") == FILES
    get("set", tmp_path / "new", sources=sources)
    assert server.state["asked"] == [None]
    left = {path.name for path in (tmp_path / "new").iterdir()}
    assert left == {"set", "set.zip", "set.zip.unpacked"}


def test_get_resumes_after_a_cut(server: Server, tmp_path: Path) -> None:
    server.state["cuts"] = [1000, 500]
    said: list[str] = []
    get("set", tmp_path, sources=server.sources(server.checksum()), say=said.append)
    assert fetched(tmp_path) == FILES
    assert server.state["asked"] == [None, "bytes=1000-", "bytes=1500-"]
    assert "the connection ended after 1000 of" in said[0]


def test_get_resumes_at_the_next_call(server: Server, tmp_path: Path) -> None:
    sources = server.sources(server.checksum())
    server.state["cuts"] = [700]
    with pytest.raises(ConnectionError, match=r"run again to resume, or put a copy at .*set.zip"):
        get("set", tmp_path, sources=sources, attempts=1)
    assert not (tmp_path / "set.zip").exists()
    get("set", tmp_path, sources=sources)
    assert server.state["asked"] == [None, "bytes=700-"]
    assert fetched(tmp_path) == FILES


def test_get_takes_a_file_that_changed_from_the_start(server: Server, tmp_path: Path) -> None:
    server.state["cuts"] = [700]
    with pytest.raises(ConnectionError):
        get("set", tmp_path, sources=server.sources(), attempts=1)
    server.state["content"] = zip_of({**FILES, "set/b.txt": b"other"})
    server.state["tag"] = '"two"'
    get("set", tmp_path, sources=server.sources(), say=lambda _: None)
    assert (tmp_path / "set/b.txt").read_bytes() == b"other"


def test_get_keeps_a_part_that_was_complete(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.zip.part").write_bytes(server.state["content"])  # type: ignore[arg-type]
    (tmp_path / "set.zip.part.tag").write_text('"one"', encoding="utf-8")
    get("set", tmp_path, sources=server.sources(server.checksum()))
    assert fetched(tmp_path) == FILES
    assert len(server.state["asked"]) == 1  # type: ignore[arg-type]


def test_get_refuses_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"expected {'0' * 64}"):
        get("set", tmp_path, sources=server.sources("0" * 64))
    assert not (tmp_path / "set.zip").exists()
    assert not (tmp_path / "set.zip.part").exists()
    assert not (tmp_path / "set").exists()


def test_get_stores_an_unknown_checksum_and_keeps_to_it(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    get("set", tmp_path, sources=server.sources(), say=said.append)
    assert server.checksum() in said[-1]
    assert (tmp_path / "set.zip.sha256").read_text().split() == [server.checksum(), "set.zip"]
    (tmp_path / "set.zip").write_bytes(b"something else")
    with pytest.raises(ValueError, match=f"expected {server.checksum()}"):
        get("set", tmp_path, sources=server.sources(), say=said.append)


def test_get_uses_a_copy_put_there_by_hand(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.zip").write_bytes(server.state["content"])  # type: ignore[arg-type]
    get("set", tmp_path, sources=server.sources(server.checksum()))
    assert server.state["asked"] == []
    assert fetched(tmp_path) == FILES


def test_get_without_network_says_where_to_put_a_copy(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/set.zip"
    sources = {"set": Source(url, "set.zip", None, "a test")}
    with pytest.raises(ConnectionError, match=r"cannot fetch http://127.0.0.1.*put a copy at"):
        get("set", tmp_path, sources=sources, attempts=1)
    with pytest.raises(ValueError, match="unknown data set 'sets'; there are set"):
        get("sets", tmp_path, sources=sources)


@pytest.mark.parametrize("name", ["../evil.txt", "/evil.txt", "a/../../evil.txt", "C:\\evil.txt"])
def test_unpack_refuses_names_that_lead_outside(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "a.zip").write_bytes(zip_of({"good.txt": b"x", name: b"evil"}))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for each in ("good.txt", name):
            info = tarfile.TarInfo(each)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    for archive in ("a.zip", "a.tar.gz"):
        with pytest.raises(ValueError, match="unsafe name"):
            unpack(tmp_path / archive, folder)
    assert list(folder.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar.gz", "a.zip", "in"]


def test_unpack_refuses_links(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info = tarfile.TarInfo("link")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as pack:
        pack.writestr(link, "/etc/passwd")
    folder = tmp_path / "in"
    folder.mkdir()
    for archive in ("a.tar", "a.zip"):
        with pytest.raises(ValueError, match="link"):
            unpack(tmp_path / archive, folder)
    assert list(folder.iterdir()) == []
    (tmp_path / "page.zip").write_text("<html>not found</html>")
    with pytest.raises(ValueError, match="neither zip nor tar"):
        unpack(tmp_path / "page.zip", folder)


def test_unpack_reads_tar_files_with_folders(tmp_path: Path) -> None:
    source = tmp_path / "deep"
    (source / "one" / "two").mkdir(parents=True)
    (source / "one" / "two" / "x.bin").write_bytes(b"123")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(source, arcname="deep")
    folder = tmp_path / "in"
    folder.mkdir()
    unpack(tmp_path / "a.tar.gz", folder)
    assert (folder / "deep" / "one" / "two" / "x.bin").read_bytes() == b"123"


def test_sources_name_a_public_address_and_an_archive() -> None:
    assert set(SOURCES) == {"pf-willow", "pf-pascal", "spair", "pascal3d"}
    for source in SOURCES.values():
        assert source.url.split("://")[0] in ("https", "ftp")
        assert source.url.endswith(source.archive)

"""Malformed files and options end in one line that names the fix, never in a traceback."""

from __future__ import annotations

import copy
import errno
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sets
import tiny
from surefeat.cli.main import main
from surefeat.cli.output import in_a_line
from surefeat.data.coco import read_annotations
from surefeat.data.decode import SourceError
from surefeat.data.pairs import load_pairs
from surefeat.data.sources import find_images
from surefeat.learn.runs import Run, locked
from surefeat.match.proposals import read_proposals
from surefeat.measure.results import read_result
from surefeat.model.config import read_settings

Edit = Callable[[dict[str, Any]], object]


def refused(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said, which must be one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Traceback" not in said
    assert said.startswith("surefeat: ")
    assert said.count("\n") == 1
    return said


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sets.write_labelled(tmp_path_factory.mktemp("photos")).parent


BIG = 10**400


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(images={"a": 1}),
        lambda d: d["images"][0].update(id=[1]),
        lambda d: d["images"][0].update(width=BIG),
        lambda d: d["images"][0].pop("file_name"),
        lambda d: d["categories"][0].update(keypoints=3),
        lambda d: d["categories"][0].update(flip=[None]),
        lambda d: d["categories"][0].update(id={}),
        lambda d: d["annotations"][0].update(image_id=[1]),
        lambda d: d["annotations"][0].update(category_id={"a": 1}),
        lambda d: d["annotations"][0].update(bbox=[BIG, 0, 1, 1]),
        lambda d: d["annotations"][0].update(bbox=[1e308, 0, 1e308, 1]),
        lambda d: d["annotations"][0].update(bbox="abcd"),
        lambda d: d["annotations"][0].update(keypoints=[[1]]),
        lambda d: d["annotations"][0].update(keypoints=[BIG] * 3),
        lambda d: d.update(annotations=[1]),
    ],
)
def test_a_coco_file_that_cannot_be_meant_is_one_line(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Edit
) -> None:
    content = json.loads((photos / "keypoints.json").read_text())
    edit(content)
    (tmp_path / "bad.json").write_text(json.dumps(content))
    command = f"keypoints fit {tmp_path / 'bad.json'} --images {photos} --out {tmp_path / 'out'}"
    assert "bad.json" in refused(command, capsys)
    assert not (tmp_path / "out").exists()


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ANY = st.recursive(
    PLAIN, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=3), s, max_size=2)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        way
        for key, inner in entries
        for way in (
            (*path, key),
            *(places(inner, (*path, key)) if isinstance(inner, dict | list) else ()),
        )
    ]


def exchanged(content: Any, way: tuple[Any, ...], value: Any) -> Any:
    content = copy.deepcopy(content)
    inside = content
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = value
    return content


@pytest.mark.parametrize("kind", ["images", "categories"])
def test_two_entries_of_one_id_are_refused_and_a_repeated_one_is_not(
    tmp_path: Path, kind: str
) -> None:
    file, content = tmp_path / "x.json", copy.deepcopy(SMALL_COCO)
    content[kind].append(content[kind][0])
    file.write_text(json.dumps(content))
    read_annotations(file)
    content[kind][1] = content[kind][0] | {"file_name": "b.png", "name": "d"}
    file.write_text(json.dumps(content))
    with pytest.raises(SourceError, match=rf"x\.json: two {kind} have the id 1; give each"):
        read_annotations(file)


SMALL_COCO: dict[str, Any] = {
    "images": [{"id": 1, "file_name": "a.png", "width": 9, "height": 9}],
    "categories": [{"id": 1, "name": "c", "keypoints": ["l", "r"], "flip": [1, 0]}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 5, 5], "iscrowd": 0,
         "keypoints": [1, 1, 2, 3, 3, 2]}
    ],
}  # fmt: skip

FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(way=st.sampled_from(places(SMALL_COCO)), value=ANY, strict=st.booleans())
def test_any_value_anywhere_in_a_coco_file_is_read_or_refused(
    tmp_path: Path, way: tuple[Any, ...], value: Any, strict: bool
) -> None:
    (tmp_path / "x.json").write_text(json.dumps(exchanged(SMALL_COCO, way, value)))
    try:
        read_annotations(tmp_path / "x.json", strict=strict)
    except SourceError as error:
        said = str(error)
    else:
        said = "x.json is read"
    assert "x.json" in said


@FEW
@given(text=st.text(st.sampled_from('a,;1.-"\r\n\0é'), max_size=60))
def test_any_text_as_a_pair_list_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.csv"
    file.write_text("source_image,target_image,class,XA,YA,XB,YB\n" + text, newline="")
    with pytest.raises(ValueError, match=r"x\.csv"):
        load_pairs(file)


@pytest.mark.parametrize("row", ["a\rb,x\n", "x" * 200_000 + ",y\n"])
def test_a_label_list_with_a_huge_field_is_one_line(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str
) -> None:
    (tmp_path / "l.csv").write_text("image,label\n" + row, newline="")
    command = f"boxes fit {photos} --labels {tmp_path / 'l.csv'} --out {tmp_path / 'o'} --init none"
    refused(command, capsys)


@pytest.mark.parametrize("change", ["update proposals set boxes='x'", "delete from about",
                                    "update proposals set boxes=null"])  # fmt: skip
def test_a_damaged_file_of_proposals_is_one_line(tmp_path: Path, change: str) -> None:
    file = sets.make(tmp_path / "scenes", count=1, boxes=4) / "proposals.npz"
    store = sqlite3.connect(file)
    with store:
        store.execute(change)
    store.close()
    with pytest.raises(ValueError, match="remove it"):
        read_proposals(file)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sets.write_model(tmp_path_factory.mktemp("model"))


def test_any_value_anywhere_in_a_models_settings_is_read_or_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    whole = json.loads((model_folder / "model.json").read_text())
    shutil.copytree(model_folder, tmp_path / "m")
    for way in places(whole):
        for value in (None, [], {}, "x", -1, 1e400, [None], BIG, True):
            if (way[-1], value) in (("stride_in_1x1", True), ("config", {})):
                continue  # settings they may be
            text = json.dumps(exchanged(whole, way, value))
            (tmp_path / "m" / "model.json").write_text(text)
            if way[-1] in ("trunk", "lower") and value == "x":
                continue  # a name that building the network refuses
            with pytest.raises(ValueError, match=r"m[/\\]model"):
                read_settings(tmp_path / "m")


def test_a_damaged_result_is_one_line(tmp_path: Path) -> None:
    about = dict.fromkeys(("config", "weights_sha256", "commit", "hardware", "date"), "x")
    whole = {**about, "row": "r", "benchmark": "b", "split": "s", "metrics": {"pck": 1.0},
             "pairs": {"names": ["a"], "points": [1]}, "curves": {"pcr": [0.5]}}  # fmt: skip
    file = tmp_path / "r.json"
    file.write_text(json.dumps(whole))
    assert read_result(file) == whole
    for way in [("row",), ("benchmark",), ("metrics",), ("metrics", "pck"), ("pairs", "points")]:
        file.write_text(json.dumps(exchanged(whole, way, {"x": "y"})))
        with pytest.raises(ValueError, match=r"r\.json is damaged: its"):
            read_result(file)
    for text in ("3", "null", "[]", "[" * 100_000, ""):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"r\.json"):
            read_result(file)


def test_lines_of_a_log_that_are_none_are_left_out(tmp_path: Path) -> None:
    lines = [b"[]", b"3", b'{"loss": 1}', b'{"step": null}', b"\xff\xfe", b'{"step": 4}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert Run(tmp_path).metrics() == [{"step": 4}]


@pytest.mark.parametrize(
    "options",
    ["--side 0", "--side 1000000", "--side -5", "--count 0", "--points nan nan", "--device xpu",
     "--device meta", "--device cpu:5", "--regions -1"],
)  # fmt: skip
def test_match_refuses_options_that_cannot_work(
    photos: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: str,
) -> None:  # fmt: skip
    first, second = sorted(photos.glob("*.png"))[:2]
    out = tmp_path / "out"
    refused(f"match {first} {second} --model {model_folder} --out {out} {options}", capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    "options",
    ["--train.lr nan", "--train.lr -1", "--train.head-lr inf", "--loss.ignore-radius nan",
     "--warp.zoom 0 0", "--warp.rotation nan", "--model.sigma-floor 2", "--data.workers -1",
     "--steps -1", "--context nan", "--overfit -1", "--warp.zoom 2 1", "--data.side 99999999",
     "--data.workers 100000000", "--train.seed 99999999999999999999", "--train.kept-views 100",
     "--train.batch 2000000000", "--categories bird", "--context 0.1"],
)  # fmt: skip
def test_pretrain_refuses_numbers_that_cannot_work(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    start = f"pretrain {photos} --out {tmp_path / 'run'} --preset small --init none --device cpu"
    name = options.split()[0].strip("-").split(".")[-1].replace("kept-views", "views can be kept")
    assert name in refused(f"{start} {options}", capsys)
    assert not (tmp_path / "run").exists()


SMALL = "boxes fit {photos}/keypoints.json --out {out} --init none --detector.trunk small"

REFUSED = {
    "match {a} {a} --model {model} --out {out} --count 99999999999999999999": "--count is 9999",
    "match {a} {a} --model {model} --out {out}%s" % (300 * "x"): "is too long a name for the disk",
    "keypoints fit {photos}/keypoints.json --model {model} --out {out} --seed -1": "--seed is -1",
    "keypoints transfer {photos}/keypoints.json {photos} --out {out} --sure 7": "--sure is 7; ",
    "keypoints transfer {photos}/keypoints.json {photos} --out {out} --sure nan": "--sure is nan",
    "evaluate self {photos} --model {model} --seed -1": "--seed is -1; use at least 0",
    "relate {photos} --out {out} --threshold 7": "threshold is 7.0; probabilities are between",
    "evaluate parts --model {model} --seed -1": "--seed is -1; use at least 0",
    "evaluate tables {photos} --out {out}": "holds no matching results",
    "evaluate pairs {pairs} --model {model} --out {out} --inputs 0": "--inputs is 0; use 16 to",
    "evaluate pairs {pairs} --model {model} --out {out} --side 1000000": "--side is 1000000; use",
    "data synthetic {out} --size 0": "size 0 is too small",
    "data synthetic {out} --seed -1": "--seed is -1; use at least 0",
    "data show pairs {pairs} --out {photos}": "{photos} is a folder where a file has to be",
    "index {photos} --model {model} --out {out} --workers 0": "workers is 0; use at least 1",
    "extract {photos} --model {model} --out {out} --shard 4": "--shard is for tables of cells",
    "extract {photos} --out {out} --format parquet --shard 0": "shard is 0; use at least 1",
    f"{SMALL} --detector.trunk nonsense": "unknown trunk 'nonsense'",
    f"{SMALL} --detector.tap nonsense": "small has no layer 'nonsense'",
    f"{SMALL} --init typo": "no weights at typo",
    f"{SMALL} --detector.hidden 2000000000": "--detector.hidden is 2000000000; use at most",
    f"{SMALL} --learn.scales 2000000000": "--learn.scales is 2000000000; use at most 4096",
    f"{SMALL} --proposals-file {{a}}": "remove it, or pass another file",
    "boxes propose {photos}/keypoints.json --file {photos}": "is a folder where a file has to be",
    "boxes propose {photos}/keypoints.json --file {out} --proposals.blur 1e30": "--proposals.blur",
    "boxes propose {photos}/keypoints.json --file {out} --proposals.count 0": "--proposals.count",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_done_is_one_line_with_the_fix_and_leaves_nothing(
    photos: Path, model_folder: Path, listed: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], command: str,
) -> None:  # fmt: skip
    names = {"photos": photos, "model": model_folder, "out": tmp_path / "out", "pairs": listed,
             "a": min(photos.glob("*.png"))}  # fmt: skip
    assert REFUSED[command].format(**names) in refused(command.format(**names), capsys)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_short_is_said_in_plain_words() -> None:
    for error in (MemoryError(), RuntimeError("[enforce fail] can't allocate memory: you tried"),
                  RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")):  # fmt: skip
        assert in_a_line(error).startswith("there is not enough memory for this; lower sides")


def test_a_full_disk_is_said_with_the_file_and_the_fix() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "a/model.json")
    assert in_a_line(error).startswith("a/model.json cannot be written, the disk is full; free")


@pytest.mark.parametrize(
    "command",
    ["data synthetic {out} --count 0", "evaluate parts --model {model} --count 0",
     "evaluate self {photos} --model {model} --count -1",
     "boxes propose {photos} --labels {photos}/keypoints.json --file {out} --workers 0"],
)  # fmt: skip
def test_counts_of_nothing_are_refused(
    photos: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:  # fmt: skip
    refused(command.format(out=tmp_path / "o", model=model_folder, photos=photos), capsys)


def test_match_names_the_flag_that_cannot_work(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = sorted(photos.glob("*.png"))[:2]
    said = refused(f"match {first} {second} --out {tmp_path / 'm'} --regions -5", capsys)
    assert said.startswith("surefeat: --regions is -5")


@pytest.mark.parametrize("inside", ["", "/deeper"])
def test_a_file_where_a_folder_has_to_be_is_named_with_the_fix(
    photos: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    inside: str,
) -> None:  # fmt: skip
    first, second = sorted(photos.glob("*.png"))[:2]
    file = tmp_path / "file"
    file.touch()
    said = refused(f"match {first} {second} --model {model_folder} --out {file}{inside}", capsys)
    assert said.startswith(f"surefeat: {file}{inside} ")
    assert "where a folder has to be; pass another" in said


def test_a_list_that_is_no_utf8_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pairs.csv"
    file.write_bytes(b"source_image,target_image,class,XA,YA,XB,YB\ncaf\xe9.jpg,b,c,1,1,1,1\n")
    assert refused(f"evaluate pairs {file}", capsys).endswith(
        "pairs.csv is not UTF-8 text; save it as UTF-8\n"
    )


@pytest.mark.parametrize("content", [b"null", b"\xff\x00" * 300, b"[" * 100_000, b'{"a": NaN}'])
def test_what_is_no_coco_file_is_said_without_pythons_words_or_its_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "labels.json"
    file.write_bytes(content)
    said = refused(f"keypoints fit {file} --out {tmp_path / 'd'}", capsys)
    assert "is not a COCO file (" in said
    assert "Error" not in said
    assert "\\x" not in said
    assert len(said) < 300


def test_weights_of_no_known_kind_are_one_line(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.npz"
    file.write_bytes(b"PK\x05\x06" + bytes(18))
    said = refused(f"pretrain {photos} --out {tmp_path / 'r'} --init {file}", capsys)
    assert "no weights that can be read; pass a .safetensors file" in said


def test_an_unknown_option_is_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("extract photos --out x --count 3", capsys)
    assert (
        said == "surefeat: there is no option --count; surefeat extract --help says what there is\n"
    )


def test_names_of_results_lead_to_no_other_folder(
    listed: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a" / "b" / "out"
    common = f"--out {out} --measures nearest --shifted nearest --device cpu --pairs 1"
    main(f"evaluate pairs {listed} --rows ../../../x={model} {common}".split())
    (file,) = out.glob("*.json")
    result = json.loads(file.read_text())
    result["benchmark"] = "../../../x"
    file.write_text(json.dumps(result))
    main(f"evaluate tables {out} --out {out / 'tables'}".split())
    made = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert all(path.is_relative_to(out) for path in made)


def test_a_list_finds_its_images_elsewhere_when_pairs_are_shown(
    listed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, picture = tmp_path / "alone.csv", tmp_path / "pairs.png"
    alone.write_text(listed.read_text())
    assert "there is no image" in refused(f"data show pairs {alone} --out {picture}", capsys)
    main(f"data show pairs {alone} --images {listed.parent} --out {picture} --count 1".split())
    assert picture.stat().st_size > 1000


def test_hidden_tar_files_are_passed_over_like_hidden_photos(tmp_path: Path) -> None:
    tiny.shard(tmp_path / "a.tar", {"x.png": tiny.gradient(20, 20)})
    (tmp_path / "._a.tar").write_bytes(b"macOS")
    assert tiny.names(find_images(tmp_path)) == ["a.tar/x.png"]


@pytest.mark.parametrize("command", ["match {0} {0}", "relate {0}"])
def test_a_file_where_results_go_is_refused_before_any_photo_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The photo does not exist: had it been asked for, the line would name it."""
    taken = tmp_path / "taken"
    taken.write_text("mine")
    said = refused(f"{command.format(tmp_path / 'no.jpg')} --out {taken}", capsys)
    assert f"{taken} is a file where a folder has to be" in said
    assert taken.read_text() == "mine"


def test_two_that_carry_labels_do_not_share_a_folder(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"keypoints transfer {photos}/keypoints.json {photos} --out {tmp_path / 'out'}"
    with locked(tmp_path / "out"):
        assert f"{tmp_path / 'out'} is in use by process" in refused(command, capsys)
    assert not (tmp_path / "out").exists()

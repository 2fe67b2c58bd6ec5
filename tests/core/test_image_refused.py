"""Promises of surefeat.image: what is no image is refused in one line, and nothing else is said."""

from __future__ import annotations

import logging
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from hostile import COLOURS, FORMATS, bomb, encode, many_scans, noise
from surefeat.core import image as images
from surefeat.core.image import ImageError, decode, load, read_bytes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros((3, 20, 30), np.uint8), r"array of shape \(3, 20, 30\).*transpose"),
        (np.zeros((5, 5, 2), np.uint8), r"\(5, 5, 2\)"),
        (np.zeros((0, 5, 3), np.uint8), r"\(0, 5, 3\)"),
        (np.zeros(5, np.uint8), r"\(5,\)"),
        (np.zeros((5, 5), np.int64), "int64.*uint8, uint16 nor float"),
        (np.full((5, 5, 3), 200.0), r"from 200 to 200; scale floats to \[0, 1\]"),
        (np.full((5, 5, 3), np.nan), "from nan to nan"),
        (torch.zeros(20, 30, 3), r"tensor of shape \(20, 30, 3\).*permute"),
        (torch.zeros(1, 3, 20, 30), r"batch\[0\]"),
        (torch.zeros(3, 0, 30), r"\(3, 0, 30\)"),
        (torch.zeros(3, 5, 5, dtype=torch.int64), "int64.*uint8 nor float"),
        (torch.full((3, 5, 5), -1.0), "from -1 to -1"),
        (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
        (Image.fromarray(np.full((5, 5), 70_000, np.int32)), "8 or 16 bits"),
        (b"bytes", "object of type bytes.*pass a path"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused_with_what_was_got(wrong: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        load(wrong)  # type: ignore[arg-type]


def test_each_kind_of_bad_file_has_its_own_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "nowhere.jpg").symlink_to("missing")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("a page that was not found")
    (tmp_path / "binary.jpg").write_bytes(b"\x00\x01" * 50)
    (tmp_path / "cut.jpg").write_bytes(encode(COLOURS.resize((200, 200)), "JPEG")[:-500])
    expected = {
        "pipe.jpg": "is a pipe", "folder.jpg": "is a folder", "nowhere.jpg": "leads nowhere",
        "empty.jpg": "is empty", "text.jpg": "is text", "binary.jpg": "known kind",
        "cut.jpg": "truncated", "missing.jpg": "No such file", "nul\0.jpg": "null byte",
    }  # fmt: skip
    for name, reason in expected.items():
        with pytest.raises(ImageError) as caught:
            load(tmp_path / name)
        message = str(caught.value)
        assert reason in message
        assert name.split("\0")[0] in message
        assert ";" in message, "no fix"
        assert message.isprintable(), "more than one line"


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.jpg"
    path.write_bytes(encode(COLOURS, "JPEG"))
    path.chmod(0)
    if os.geteuid() == 0:  # permissions do not stop root, so the refusal is acted

        def locked(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", locked)
    with pytest.raises(ImageError, match=r"Permission denied.*check path and permissions"):
        load(path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.jpg"
    with path.open("wb") as file:
        file.truncate(1 << 42)  # sparse: takes no space
    with pytest.raises(ImageError, match="bytes, more than"):
        load(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_a_decompression_bomb_is_refused_from_its_header(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoding(_: object) -> None:
        raise AssertionError("the pixels were touched")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoding)
    with pytest.raises(ImageError, match="pixels, not 1 to 300,000,000"):
        decode(bomb(kind), name="x", longest_side=64)


def test_a_jpeg_of_thousands_of_scans_is_refused_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode(many_scans(20), name="x").shape == (3, 64, 64)
    monkeypatch.setattr(ImageFile.ImageFile, "load", pytest.fail)
    with pytest.raises(ImageError, match=r"x: has 12010 scans, more than 100; export it again"):
        decode(many_scans(12_000), name="x")
    # Markers in a table between the scans do not end the count.
    hidden = many_scans(200).replace(b"\xff\xda", b"\xff\xe5\x00\x04\xff\xd9\xff\xda")
    with pytest.raises(ImageError, match="has 210 scans"):
        decode(hidden, name="x")


def test_what_follows_a_jpeg_is_no_scan_of_it() -> None:
    plain = encode(COLOURS, "JPEG")
    film = plain + b"\xff\xda" * 5000  # as phones append their films
    assert torch.equal(decode(film, name="x"), decode(plain, name="x"))


def test_threads_together_decode_no_more_pixels_than_one_image_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, inside, most = encode(COLOURS, "PNG"), [], []  # 240 pixels

    def watched(*args: object) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()

    plain = images.to_rgb
    monkeypatch.setattr(images, "to_rgb", lambda *a, **k: (watched(), plain(*a, **k))[1])
    for pixels, together in ((100, 1), (479, 1), (480, 2)):
        monkeypatch.setattr(images, "_ROOM", images._Room(pixels))
        most.clear()
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda _: decode(data, name="x"), range(16)):
                pass
        assert max(most) <= together
        assert len(most) == 16


def test_the_room_of_an_image_is_kept_as_long_as_it_is_used() -> None:
    data = encode(COLOURS, "PNG")
    with images.decoded(data, name="x") as pixels:
        assert images._ROOM.taken == pixels[0].numel() == 240
    assert images._ROOM.taken == 0
    with pytest.raises(ImageError, match="cannot be decoded"):
        decode(data[:-30], name="x")
    assert images._ROOM.taken == 0


def test_the_pixel_limit_is_exact_and_counts_the_full_size() -> None:
    file = encode(COLOURS.resize((160, 96)), "JPEG")
    assert decode(file, name="x", max_pixels=160 * 96).shape == (3, 96, 160)
    with pytest.raises(ImageError, match="160 x 96"):
        decode(file, name="x", max_pixels=160 * 96 - 1, longest_side=20)
    with pytest.raises(ImageError, match="20 x 12"):
        load(COLOURS, max_pixels=239)


def test_pillows_own_limit_does_not_get_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert decode(encode(COLOURS, "PNG"), name="x").shape == (3, 12, 20)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cut_file_is_an_error_and_never_half_grey(kind: str) -> None:
    data = encode(noise(np.random.default_rng(1)), kind)
    whole = decode(data, name="x")
    for end in range(1, len(data), max(1, len(data) // 150)):
        try:
            cut = decode(data[:end], name="x")
        except ImageError:
            continue
        assert torch.equal(cut, whole)  # only bytes after the last pixel were missing


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(sorted(images._READERS)))
def test_random_bytes_give_only_image_errors(data: bytes, magic: bytes) -> None:
    for file in (data, magic + data):
        with pytest.raises(ImageError):
            decode(file, name="x", max_pixels=10**6)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    st.none() | st.integers(0, 400),
)
def test_damaged_files_give_an_image_or_an_image_error(
    kind: str, changes: list[tuple[int, int]], end: int | None
) -> None:
    data = bytearray(encode(COLOURS, kind))
    for at, value in changes:
        data[at % len(data)] = value
    try:
        image = decode(bytes(data[:end]), name="x", max_pixels=10**6)
    except ImageError:
        return
    assert image.shape[0] == 3
    assert image.numel() > 0


NOISY = encode(Image.new("P", (4, 4)), "PNG", transparency=bytes(range(256)))


def test_no_warning_or_log_line_reaches_the_user(
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that sets up none
    samples = (b"II*\0\x08\0\0\0\x02\0\x00\x01\x04\0\x01\0\0\0\x05\0\0\0", b"MM\0*" + bytes(40))
    tiff = encode(Image.new("RGB", (4, 4)), "TIFF")
    seven = tiff.replace(
        b"\x15\x01\x03\x00\x01\x00\x00\x00\x03", b"\x15\x01\x03\x00\x01\x00\x00\x00\x77"
    )
    assert seven != tiff
    with pytest.raises(ImageError):
        decode(seven, name="x")
    for data in samples:
        with pytest.raises(ImageError):
            decode(data, name="x")
    decode(NOISY, name="x")
    assert not recwarn.list
    assert capfd.readouterr().err == ""


def test_warnings_stay_hidden_until_the_last_thread_is_out_and_no_longer() -> None:
    filters, handlers = list(warnings.filters), list(logging.getLogger("PIL").handlers)
    images._QUIET.__enter__()
    images._QUIET.__enter__()  # a second thread starts before the first one ends
    images._QUIET.__exit__()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", lambda *_: pytest.fail("a warning was shown"))
        warnings.warn_explicit("metadata", UserWarning, "TiffImagePlugin.py", 1, module="PIL.Tiff")
    images._QUIET.__exit__()
    assert list(warnings.filters) == filters
    assert logging.getLogger("PIL").handlers == handlers


def test_decoding_in_many_threads_leaves_the_filters_alone() -> None:
    filters = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: decode(NOISY, name="x"), range(200)))
    assert list(warnings.filters) == filters


def test_part_of_a_file_is_read_or_reported_short(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, offset=3, size=4) == b"3456"
    with pytest.raises(ImageError, match="member: is cut short"):
        read_bytes(path, name="member", offset=8, size=4)


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_floats_may_leave_their_range_by_a_thousandth(kind: Any) -> None:
    """As resampling leaves them; all of [0, 1] is in it, and what is beyond is cut."""
    for low, high in ((0.0, 1.0), (-0.0009, 1.0009)):
        pixels = load(kind([[low, high], [0.5, 0.5]]))
        assert pixels[0].tolist() == [[0, 255], [128, 128]]
    for wrong in (-0.0011, 1.0011, float("nan")):
        with pytest.raises(ImageError, match=r"scale floats to \[0, 1\]"):
            load(kind([[wrong, 0.5], [0.5, 0.5]]))

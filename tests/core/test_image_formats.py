"""Promises of surefeat.image: every image comes in the same way, at the size asked for."""

from __future__ import annotations

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor

from hostile import COLOURS, FORMATS, RAMP, encode, noise
from surefeat.core.geometry import Frame
from surefeat.core.image import decode, load, network_size, prepare, resize


def array(image: Tensor) -> np.ndarray:
    assert image.dtype == torch.uint8
    assert image.is_contiguous()
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_every_mode_comes_out_as_pillow_shows_it(mode: str) -> None:
    source = COLOURS.convert(mode)
    expected = np.asarray(source.convert("RGB"))
    np.testing.assert_array_equal(array(load(source)), expected)
    if mode == "YCbCr":  # Pillow cannot read the TIFF that it writes of this mode
        return
    kind = "TIFF" if mode == "CMYK" else "PNG"
    np.testing.assert_array_equal(array(decode(encode(source, kind), name="x")), expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read_from_a_file_with_any_extension(kind: str, tmp_path: Path) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    source = RAMP.convert("RGB")
    path = tmp_path / "picture.jpg"
    path.write_bytes(encode(source, kind, **options))
    tolerance = 4 if kind == "JPEG" else 0
    difference = array(load(path)).astype(int) - np.asarray(source)
    assert abs(difference).max() <= tolerance
    assert torch.equal(load(path), load(str(path)))


def test_cmyk_jpeg_is_not_inverted() -> None:
    data = encode(
        Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"
    )  # full magenta and yellow: red
    red, green, blue = decode(data, name="x")[:, 4, 4].tolist()
    assert red > 230
    assert max(green, blue) < 25


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_transparent_pixels_are_white(mode: str) -> None:
    black = Image.new(mode, (4, 4), 0 if mode in ("L", "P") else (0,) * len(mode))
    options = {} if mode in ("RGBA", "LA") else {"transparency": (0, 0, 0) if mode == "RGB" else 0}
    assert (decode(encode(black, "PNG", **options), name="x") == 255).all()


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    expected = [228, 178, 128]  # value * 128/255 + 255 * 127/255
    half = np.full((4, 4, 4), (200, 100, 0, 128), np.uint8)
    for image in (half, Image.fromarray(half), half / np.float32(255)):
        colour = load(image)[:, 0, 0]
        assert (colour.int() - torch.tensor(expected)).abs().max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_cut(kind: str) -> None:
    deep = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    expected = np.repeat(np.rint(deep / 65535 * 255).astype(np.uint8)[..., None], 3, axis=2)
    file = encode(Image.fromarray(deep), kind)
    np.testing.assert_array_equal(array(decode(file, name="x")), expected)
    np.testing.assert_array_equal(array(load(deep)), expected)
    np.testing.assert_array_equal(array(load(deep.astype(">u2"))), expected)


@pytest.mark.parametrize("extension", [".png", ".tiff"])
def test_sixteen_bit_colour_files_keep_their_high_bits(extension: str) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (9, 7, 3)).astype(np.uint16)
    data = cv2.imencode(extension, deep)[1].tobytes()
    difference = array(decode(data, name="x")).astype(int) - (deep[..., ::-1] / 257)
    assert abs(difference).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_rotation_brings_the_red_corner_home(orientation: int, kind: str) -> None:
    shown = np.zeros((32, 48, 3), np.uint8)
    shown[:16, :16] = (255, 0, 0)  # top left as the viewer shows it
    shown[16:, 32:] = (0, 0, 255)
    # How a camera held that way stores it: EXIF gives where row 0 and column 0 are shown.
    stored = {
        1: shown, 2: shown[:, ::-1], 3: shown[::-1, ::-1], 4: shown[::-1],
        5: shown.swapaxes(0, 1), 6: shown.swapaxes(0, 1)[::-1],
        7: shown.swapaxes(0, 1)[::-1, ::-1], 8: shown.swapaxes(0, 1)[:, ::-1],
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encode(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif)
    image = array(decode(file, name="x"))
    assert image.shape == shown.shape
    assert abs(image[4, 4].astype(int) - (255, 0, 0)).max() < 30
    assert abs(image[-4, -4].astype(int) - (0, 0, 255)).max() < 30
    assert max(image[4, -4].max(), image[-4, 4].max()) < 30


def test_an_image_turned_by_its_owner_is_not_turned_again() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = encode(COLOURS, "PNG", exif=exif)
    opened = Image.open(io.BytesIO(file))
    assert torch.equal(load(ImageOps.exif_transpose(opened)), decode(file, name="x"))


def test_damaged_exif_does_not_lose_the_picture() -> None:
    file = encode(COLOURS, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xee" * 20)
    assert torch.equal(decode(file, name="x"), decode(encode(COLOURS, "JPEG"), name="x"))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "WEBP" else {}
    file = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert array(decode(file, name="x"))[3, 4].tolist() == [255, 0, 0]


def test_arrays_and_tensors_of_equal_content_give_equal_images() -> None:
    rgb = np.asarray(COLOURS)
    first = torch.from_numpy(rgb.copy()).permute(2, 0, 1)
    assert torch.equal(load(rgb), first)
    assert torch.equal(load(first), first)
    assert torch.equal(load(first.double() / 255), first)
    assert torch.equal(load((rgb / 255).astype(np.float32)), first)
    assert torch.equal(load(rgb[:, ::-1]), first.flip(2))
    grey = np.asarray(RAMP)
    expected = torch.from_numpy(grey.copy()).expand(3, -1, -1)
    for same in (grey, grey[..., None], grey / 255, torch.tensor(grey), torch.tensor(grey)[None]):
        assert torch.equal(load(same), expected)


def test_a_large_jpeg_is_decoded_smaller_but_never_too_small() -> None:
    smooth = COLOURS.resize((800, 480), Image.Resampling.BICUBIC)
    file = encode(smooth, "JPEG", quality=95)
    full = decode(file, name="x")
    for longest, expected in (
        (100, (60, 100)),
        (101, (120, 200)),
        (400, (240, 400)),
        (500, (480, 800)),
    ):
        small = decode(file, name="x", longest_side=longest)
        assert tuple(small.shape[1:]) == expected
        again = resize(full, size=expected)
        assert (small.int() - again.int()).abs().float().mean() < 2


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(16, 600),
    st.sampled_from([1, 8, 16, 32]),
)
def test_network_size_is_a_multiple_that_keeps_the_aspect(
    height: int, width: int, longest: int, multiple: int
) -> None:
    found = network_size((height, width), longest_side=longest, multiple=multiple)
    scale = longest / max(height, width)
    for side, original in zip(found, (height, width), strict=True):
        assert side % multiple == 0
        assert side >= multiple
        assert abs(side - original * scale) <= multiple / 2 or side == multiple


def test_network_size_known_answers() -> None:
    assert network_size((480, 640), longest_side=224, multiple=16) == (176, 224)  # 168 is halfway
    assert network_size((10, 4000), longest_side=320, multiple=32) == (32, 320)
    with pytest.raises(ValueError, match="at least 1"):
        network_size((0, 5), longest_side=224, multiple=16)


def test_resize_agrees_with_pillow() -> None:
    source = noise(np.random.default_rng(2), size=64)
    for size in ((20, 31), (64, 20), (90, 128)):
        expected = np.asarray(source.resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
        assert abs(array(resize(load(source), size=size)) - expected).max() <= 1


def test_prepare_returns_the_frame_of_the_upright_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels, frame = prepare(COLOURS, longest_side=64, multiple=16)
    assert frame == Frame(original=(12, 20), network=(32, 64))  # 38.4 is nearer to 32
    assert tuple(pixels.shape) == (3, 32, 64)
    turned = Image.open(io.BytesIO(encode(COLOURS, "JPEG", exif=exif)))
    assert prepare(turned, longest_side=64, multiple=16)[1].original == (20, 12)

"""The one way in for images: a path, a PIL image, an array or a tensor -> RGB uint8 (3, H, W).

What comes out is the picture as a viewer shows it: EXIF rotation applied, transparency on white,
first frame of an animation. What cannot be shown completely is an ImageError, never a guess.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from surefeat.core.files import write_bytes
from surefeat.core.geometry import Frame, normalise, out_of_box


class ImageError(ValueError):
    """An image that cannot be used: one line that names it, what is wrong and the fix."""

    reason: str
    """The line without the name."""


def problem(name: str, what: str) -> ImageError:
    """The error for this image."""
    reason = " ".join(what.split())
    error = ImageError(f"{printable(name)}: {reason}")
    error.reason = reason
    return error


def printable(name: str) -> str:
    """A name as one line of text: line breaks and bytes that are no UTF-8 are escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


ImageLike: TypeAlias = str | Path | Image.Image | npt.NDArray[Any] | Tensor

MAX_PIXELS = 300_000_000
"""Images whose header claims more than this are refused before they are decoded."""

MAX_BYTES = 8 * MAX_PIXELS
"""Larger files are refused unread: no format needs more for MAX_PIXELS (16-bit RGBA)."""

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

UNREADABLE = (
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".dng", ".cr2", ".cr3", ".nef", ".arw",
    ".orf", ".raf", ".rw2", ".psd", ".tga", ".exr",
)  # fmt: skip
"""Photos too, but of formats that are not read: they are reported, not passed over."""

# Pillow's readers are called directly: Image.open knows dozens of rare formats, some of which start
# other programs, and has its own, lower and global limit on pixels.
_READERS: dict[bytes, Callable[[BinaryIO], ImageFile.ImageFile]] = {
    b"\xff\xd8\xff": JpegImageFile,
    b"\x89PNG": PngImageFile,
    b"RIFF": WebPImageFile,
    b"BM": BmpImageFile,
    b"GIF8": GifImageFile,
    b"II*\0": TiffImageFile,
    b"MM\0*": TiffImageFile,
}


def load(image: ImageLike, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Any image -> RGB (3, H, W) uint8, upright; a tensor stays on its device.

    Arrays are (H, W), (H, W, 1), (H, W, 3) or (H, W, 4); tensors (H, W), (1, H, W) or (3, H, W).
    Values are uint8, uint16 (arrays only) or floats in [0, 1].
    """
    if isinstance(image, str | Path):
        return decode(read_bytes(image), name=str(image), max_pixels=max_pixels)
    if isinstance(image, Image.Image):
        _checked_size(image, name="PIL image", max_pixels=max_pixels)
        return _from_pil(image, name="PIL image")
    if isinstance(image, Tensor):
        return from_tensor(image)
    if isinstance(image, np.ndarray):
        return from_array(image)
    fix = "pass a path, a PIL image, a numpy array or a torch tensor"
    raise problem(f"object of type {type(image).__name__}", f"is not an image; {fix}")


def decode(
    data: bytes, *, name: str, max_pixels: int = MAX_PIXELS, longest_side: int | None = None
) -> Tensor:
    """The bytes of an image file -> RGB (3, H, W) uint8, upright. `name` is for messages.

    With `longest_side`, a JPEG may come out 2, 4 or 8 times smaller, which is faster; its longest
    side stays at least that long. The caller resizes the rest of the way.
    """
    with decoded(data, name=name, max_pixels=max_pixels, longest_side=longest_side) as pixels:
        return pixels


@contextmanager
def decoded(
    data: bytes, *, name: str, max_pixels: int = MAX_PIXELS, longest_side: int | None = None
) -> Iterator[Tensor]:
    """`decode` for threads that make an image smaller at once: it holds memory while it is used.

    All images in use together have at most MAX_PIXELS; whoever wants more waits. None inside
    another of the same thread, which would wait for itself.
    """
    reader = _reader(data[:512], name)
    _check_scans(data, name)
    with _decoding(name):
        image = reader(io.BytesIO(data))
        width, height = _checked_size(image, name=name, max_pixels=max_pixels)
        if longest_side is not None:
            scale = longest_side / max(width, height)
            image.draft(image.mode, (math.ceil(width * scale), math.ceil(height * scale)))
    pixels = image.width * image.height
    if pixels > _LARGE:
        # Pillow's usual blocks would not go back to the system, but stay with each thread.
        Image.core.set_block_size(_BLOCK)  # type: ignore[attr-defined]
    with _ROOM.of(pixels):
        yield _from_pil(image, name=name)


@contextmanager
def image_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that read images. Ctrl-C, or the first bad file, waits for none of them."""
    pool = ThreadPoolExecutor(max(1, count))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


class _Room:
    """How many pixels may be decoded at once, by all threads; one image may always."""

    def __init__(self, pixels: int) -> None:
        self.pixels, self.taken = pixels, 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self.taken or self.taken + pixels <= self.pixels)
            self.taken += pixels
        try:
            yield
        finally:
            with self._changed:
                self.taken -= pixels
                self._changed.notify_all()


_ROOM = _Room(MAX_PIXELS)

# Pixels from which Pillow takes memory in blocks of so many bytes: more than any malloc keeps.
_LARGE, _BLOCK = 1 << 22, 1 << 26

MAX_SCANS = 100
"""Of a JPEG; programs write about ten, and each one goes over the whole picture."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def _check_scans(data: bytes, name: str) -> None:
    """ImageError for a JPEG made of so many scans that decoding would take minutes."""
    if not data.startswith(b"\xff\xd8\xff") or data.count(b"\xff\xda") <= MAX_SCANS:
        return
    # What looks like a scan may be in another block, or behind the picture.
    scans, place = 0, 2
    while (marker := _MARKER.search(data, place)) and marker[0] != b"\xff\xd9":
        scans += marker[0] == b"\xff\xda"
        place = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    if scans > MAX_SCANS:
        raise problem(name, f"has {scans} scans, more than {MAX_SCANS}; export it again")


def _reader(start: bytes, name: str) -> Callable[[BinaryIO], ImageFile.ImageFile]:
    """Pillow's class for a file that starts like this."""
    if not start:
        raise problem(name, "is empty (0 bytes); fetch or export it again")
    for magic, reader in _READERS.items():
        if start.startswith(magic):
            return reader
    text = all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
    what = "is text, not an image" if text else "is not an image of a known kind"
    raise problem(name, f"{what}; convert it to JPEG, PNG, WebP, BMP, GIF or TIFF")


def read_bytes(
    path: str | Path, *, name: str | None = None, offset: int = 0, size: int | None = None
) -> bytes:
    """A regular file's bytes, or `size` bytes from `offset`; whatever could block is refused."""
    name = str(path) if name is None else name
    with _opened(path, name) as (file, length):
        wanted = length - offset if size is None else size
        if wanted > MAX_BYTES:
            raise problem(name, f"has {wanted:,} bytes, more than {MAX_BYTES:,}; shrink it")
        file.seek(offset)
        data = file.read(wanted)
    if len(data) < wanted:
        raise problem(name, f"is cut short ({len(data):,} of {wanted:,} bytes); fetch it again")
    return data


@contextmanager
def _opened(path: str | Path, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its length in bytes; all that goes wrong is an ImageError."""
    try:
        info = os.stat(path)
        if stat.S_ISDIR(info.st_mode):
            raise problem(name, "is a folder, not an image; pass a file in it")
        if not stat.S_ISREG(info.st_mode):
            raise problem(name, "is a pipe, device or socket; copy its content to a file first")
        with open(path, "rb") as file:
            yield file, info.st_size
    except ImageError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            reason = "a link that leads nowhere"
        raise problem(name, f"cannot be read ({reason}); check path and permissions") from error


def image_size(path: str | Path) -> tuple[int, int]:
    """(height, width) of an image file as `load` gives it; reads the header only."""
    changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
    return _image_size(str(path), changed)


# Benchmarks name one image in many pairs; the time stamp tells a file that was replaced.
@lru_cache(maxsize=16_384)
def _image_size(path: str, changed: int) -> tuple[int, int]:
    with _opened(path, path) as (file, _), _decoding(path):
        read = _reader(file.read(512), path)
        file.seek(0)
        image = read(file)
        width, height = _checked_size(image, name=path, max_pixels=MAX_PIXELS)
        # Pillow gives the size of a TIFF as it is shown, of other formats as it is stored.
        turned = not isinstance(image, TiffImageFile) and _orientation(image) >= 5
    return (width, height) if turned else (height, width)


class _Quiet:
    """Keeps Pillow's warnings and log lines from the user while any thread is inside.

    warnings.catch_warnings by itself is not safe in threads: when two of them overlap, the filter
    of one stays behind for good. So the first thread in sets it and the last one out removes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._handler = logging.NullHandler()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
                logging.getLogger("PIL").addHandler(self._handler)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._caught.__exit__(None, None, None)
                logging.getLogger("PIL").removeHandler(self._handler)


_QUIET = _Quiet()


def _from_pil(image: Image.Image, *, name: str) -> Tensor:
    with _decoding(name):
        image.load()
        return _upright(to_rgb(image, name=name), _orientation(image))


def _checked_size(image: Image.Image, *, name: str, max_pixels: int) -> tuple[int, int]:
    width, height = image.size
    if not 0 < width * height <= max_pixels:
        size = f"{width} x {height} pixels, not 1 to {max_pixels:,}"
        raise problem(name, f"has {size}; make it smaller (in Python also: raise max_pixels)")
    return width, height


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Whatever Pillow raises becomes an ImageError; what it merely says is not heard."""
    try:
        with _QUIET:
            yield
    except ImageError:
        raise
    # Damaged files raise nearly anything: OSError, SyntaxError, struct.error, zlib.error, KeyError,
    # MemoryError, ... A list of them would be wrong with Pillow's next version.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise problem(name, f"cannot be decoded ({reason}); fetch or export it again") from error


def _upright(rgb: Tensor, orientation: int) -> Tensor:
    if orientation >= 5:
        rgb = rgb.transpose(1, 2)
    if orientation in (3, 4, 7, 8):
        rgb = rgb.flip(1)
    return (rgb.flip(2) if orientation in (2, 3, 6, 7) else rgb).contiguous()


def _orientation(image: Image.Image) -> int:
    """EXIF's 1 to 8. Read after load(), which turns TIFFs upright by itself and drops the tag."""
    try:
        orientation = image.getexif().get(0x0112)
    except Exception:  # a damaged EXIF block does not make the picture unusable
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def to_rgb(image: Image.Image, *, name: str) -> Tensor:
    """A loaded PIL image -> (3, H, W) uint8, transparency on white."""
    if image.mode == "F" or image.mode.startswith("I"):
        return torch.from_numpy(_to_uint8(np.asarray(image), name=name)).expand(3, -1, -1)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    # A copy: torch wants to own what it is given.
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def from_array(array: npt.NDArray[Any]) -> Tensor:
    """(H, W), (H, W, 1), (H, W, 3) or (H, W, 4), 8 or 16 bits or floats in [0, 1]."""
    name = f"array of shape {array.shape} and type {array.dtype}"
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in (1, 3, 4) or array.size == 0:
        fix = "channels come last, array.transpose(1, 2, 0) moves them"
        raise problem(name, f"is none of (H, W), (H, W, 1), (H, W, 3), (H, W, 4); {fix}")
    if array.dtype.kind != "f" and (array.dtype.kind != "u" or array.dtype.itemsize > 2):
        raise problem(name, "has neither uint8, uint16 nor float values; convert it")
    pixels = _to_uint8(array if channels > 1 else array.reshape(array.shape[:2]), name=name)
    return to_rgb(Image.fromarray(np.ascontiguousarray(pixels)), name=name).contiguous()


def from_tensor(tensor: Tensor) -> Tensor:
    """(H, W), (1, H, W) or (3, H, W), uint8 or floats in [0, 1]."""
    name = f"tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}"
    image = tensor.detach().unsqueeze(0) if tensor.ndim == 2 else tensor.detach()
    if image.ndim != 3 or image.shape[0] not in (1, 3) or image.numel() == 0:
        fix = "channels come first, one image at a time: tensor.permute(2, 0, 1) or batch[0]"
        raise problem(name, f"is none of (H, W), (1, H, W), (3, H, W); {fix}")
    if image.is_floating_point():
        _check_unit_range(float(image.min()), float(image.max()), name=name)
        image = (image.float() * 255).round().clamp(0, 255).to(torch.uint8)
    if image.dtype != torch.uint8:
        raise problem(name, "has neither uint8 nor float values; convert it")
    return image.expand(3, -1, -1).contiguous()


def _to_uint8(array: npt.NDArray[Any], *, name: str) -> npt.NDArray[np.uint8]:
    if array.dtype == np.uint8:
        return array
    low, high = array.min(), array.max()
    if array.dtype.kind == "f":
        _check_unit_range(float(low), float(high), name=name)
        return np.clip(np.rint(array.astype(np.float32) * 255), 0, 255).astype(np.uint8)
    if low < 0 or high > 65535:
        raise problem(name, f"has values from {low} to {high}; convert it to 8 or 16 bits")
    return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 = 257 * 255


def _check_unit_range(low: float, high: float, *, name: str) -> None:
    slack = 1e-3  # resampling leaves values just outside
    if not (low >= -slack and high <= 1 + slack):  # also catches NaN
        raise problem(name, f"has values from {low:g} to {high:g}; scale floats to [0, 1]")


def write_png(path: Path, image: Tensor) -> None:
    """Write RGB (3, H, W) uint8 as PNG, whole or not at all."""
    drawn = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(drawn, format="png")
    write_bytes(path, drawn.getvalue())


def network_size(size: tuple[int, int], *, longest_side: int, multiple: int) -> tuple[int, int]:
    """The (height, width) for an image of this size: its longest side is `longest_side`.

    Both sides are rounded to the multiple, and at least one multiple.
    """
    if min(*size, longest_side, multiple) < 1:
        raise ValueError(f"{size=}, {longest_side=}, {multiple=}: all must be at least 1")
    cells = longest_side / max(size) / multiple
    height, width = (max(1, math.floor(side * cells + 0.5)) * multiple for side in size)
    return height, width


def resize(image: Tensor, *, size: tuple[int, int]) -> Tensor:
    """(..., 3, H, W) uint8 -> (..., 3, *size) uint8: bilinear, antialiased when it shrinks."""
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    # On the CPU torch has a fixed-point kernel for uint8 (2.5 times as fast, within 1 of the float
    # one); elsewhere it has none.
    batch = image.reshape(-1, *image.shape[-3:])
    batch = batch if image.device.type == "cpu" else batch.float()
    resized = F.interpolate(batch, size=size, mode="bilinear", align_corners=False, antialias=True)
    if resized.dtype != torch.uint8:
        resized = resized.round().clamp(0, 255).to(torch.uint8)
    return resized.reshape(*image.shape[:-2], *size).contiguous()


def prepare(image: ImageLike, *, longest_side: int, multiple: int) -> tuple[Tensor, Frame]:
    """Any image -> the network's input (3, h, w) uint8, and its Frame back to the original."""
    pixels = load(image)
    original = (pixels.shape[1], pixels.shape[2])
    size = network_size(original, longest_side=longest_side, multiple=multiple)
    return resize(pixels, size=size), Frame(original=original, network=size)


def crop(image: Tensor, box: Tensor, *, size: int) -> Tensor:
    """The pixels of a box (4,): image (3, H, W) uint8 -> (3, size, size) uint8.

    Pixel for pixel the map is `into_box`; antialiased when it shrinks, and beyond the image the
    border pixel is repeated (a mirror image would show parts twice).
    """
    part, first = _around(image, box, size)
    original = (part.shape[1], part.shape[2])
    width, height = (box[2:] - box[:2] + 1).tolist()
    # A plain bilinear read would skip pixels of a large photo: the part is made smaller first.
    network = (_shrunk(original[0], size / height), _shrunk(original[1], size / width))
    steps = torch.arange(size, device=image.device, dtype=torch.float32)
    ys, xs = torch.meshgrid(steps, steps, indexing="ij")
    places = out_of_box(torch.stack([xs, ys], dim=-1), box.to(image.device), size=(size, size))
    inside = Frame(original=original, network=network).to_network(places - first)
    source = resize(part, size=network).float()[None]
    grid = normalise(inside, size=network)[None]
    read = F.grid_sample(source, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return read[0].round().clamp(0, 255).to(torch.uint8)


def _around(image: Tensor, box: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """What a crop can need of an image: the part (3, h, w), and its first pixel (2,) as x, y."""
    margin = 2 * (box[2:] - box[:2] + 1) / size + 2
    last = torch.tensor([image.shape[2], image.shape[1]]) - 1
    low = torch.minimum((box[:2] - margin).floor().clamp_min(0), last).long()
    high = torch.minimum((box[2:] + margin).ceil().clamp_min(0), last).long()
    (x1, y1), (x2, y2) = low.tolist(), high.tolist()
    return image[:, y1 : y2 + 1, x1 : x2 + 1], low.to(image.device)


def _shrunk(side: int, scale: float) -> int:
    return max(1, math.ceil(side * min(1.0, scale)))

"""Makes a folder and tar shards of 20 good images and 200 that no program should trust."""

from __future__ import annotations

import io
import os
import socket
import struct
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIX = {
    "JPEG": ".jpg",
    "PNG": ".png",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "GIF": ".gif",
    "TIFF": ".tif",
}
RAMP = Image.fromarray(np.arange(0, 240, dtype=np.uint8).reshape(12, 20))
COLOURS = Image.merge(
    "RGB", (RAMP, RAMP.transpose(Image.Transpose.ROTATE_180), RAMP.point(lambda v: v // 2))
)
"""A good picture whose pixels all differ."""


@dataclass(frozen=True)
class Hostile:
    folder: Path
    shards: Path
    good: dict[str, tuple[int, int, int]]
    """Name -> the one colour of the image."""
    bad: tuple[str, ...]


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(rng: np.random.Generator, *, size: int = 48) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8))


def strange_names(folder: Path, photo: bytes) -> tuple[str, tuple[str, str]]:
    """A good photo whose name is no UTF-8, and two empty files with odd names, as they are said."""
    good = os.fsdecode(b"caf\xe9.png")
    (folder / good).write_bytes(photo)
    for name in (b"bad\xe9.png", b"two\nlines\ttab.png"):
        (folder / os.fsdecode(name)).write_bytes(b"")
    return good, ("bad\\udce9.png", "two\\nlines\\ttab.png")


def many_scans(count: int) -> bytes:
    """A whole progressive JPEG whose last scan comes so many times more."""
    plain = encode(COLOURS.resize((64, 64)), "JPEG", progressive=True)
    last, end = plain.rindex(b"\xff\xda"), plain.rindex(b"\xff\xd9")
    return plain[:end] + plain[last:end] * count + plain[end:]


def bomb(kind: str) -> bytes:
    """A tiny file whose header claims billions of pixels."""
    small = encode(Image.new("RGB", (8, 8)), kind)
    if kind == "PNG":
        header = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
        return small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]
    if kind == "JPEG":
        at = small.index(b"\xff\xc0") + 5
        return small[:at] + struct.pack(">HH", 65_500, 65_500) + small[at + 4 :]
    if kind == "GIF":
        return small[:6] + struct.pack("<HH", 65_535, 65_535) + small[10:]
    if kind == "BMP":
        return small[:18] + struct.pack("<ii", 100_000, 100_000) + small[26:]
    raise ValueError(kind)


def make(root: Path, rng: np.random.Generator) -> Hostile:
    """20 good images (15 loose, 5 in a shard) and 200 bad ones (184 loose, 16 in shards)."""
    folder, shards = root / "folder", root / "shards"
    (folder / "deep" / "deeper").mkdir(parents=True)
    shards.mkdir()
    good = _good_files(folder)
    files = {**_cut_short(rng), **_damaged(rng), **_not_images(rng)}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    bad = [*files, *_special_files(folder)]
    while len(bad) < 184:
        name = f"random_{len(bad):03d}.png"
        (folder / name).write_bytes(rng.bytes(200 + len(bad)))
        bad.append(name)
    good_members, bad_members = _shards(shards)
    return Hostile(folder, shards, {**good, **good_members}, (*bad, *bad_members))


def _good_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    good = {}
    for number in range(15):
        kind = FORMATS[number % len(FORMATS)]
        colour = (10 + 15 * number, 200 - 10 * number, 8 * number)
        below = ("", "deep/", "deep/deeper/")[number % 3]
        # Two PNGs carry a JPEG's name: the content counts, not the extension.
        suffix = ".jpg" if kind == "PNG" else SUFFIX[kind]
        name = f"{below}good_{number:02d}{suffix}"
        options = {"lossless": True} if kind == "WEBP" else {}
        (folder / name).write_bytes(encode(Image.new("RGB", (40, 30), colour), kind, **options))
        good[name] = colour
    return good


def _cut_short(rng: np.random.Generator) -> dict[str, bytes]:
    whole = {kind: encode(noise(rng), kind) for kind in FORMATS}
    whole["PROGRESSIVE"] = encode(noise(rng), "JPEG", progressive=True)
    return {
        f"cut_{kind.lower()}_{share:02d}{SUFFIX.get(kind, '.jpg')}": data[
            : len(data) * share // 100
        ]
        for kind, data in whole.items()
        for share in (1, 3, 6, 10, 20, 30, 40, 50, 60, 70, 80, 90)
    }


def _damaged(rng: np.random.Generator) -> dict[str, bytes]:
    files = {f"bomb{SUFFIX[kind]}": bomb(kind) for kind in ("PNG", "JPEG", "GIF", "BMP")}
    for kind in FORMATS:
        data = encode(noise(rng), kind)
        for number in range(5):  # the first bytes are overwritten
            head = rng.bytes(1 + 4 * number)
            head = bytes([head[0] & 0x0F]) + head[1:]
            files[f"head_{kind.lower()}_{number}{SUFFIX[kind]}"] = head + data[len(head) :]
        keep = 4 if kind in ("JPEG", "TIFF") else 14
        files[f"only_magic{SUFFIX[kind]}"] = data[:keep] + bytes(300)
        files[f"ones{SUFFIX[kind]}"] = data[:keep] + b"\xff" * 300
    return files


def _not_images(rng: np.random.Generator) -> dict[str, bytes]:
    texts = (b"hello\n", b"<!DOCTYPE html><html>404</html>", b'{"error": 1}', b"a,b\n1,2\n", b"\n")
    others = {
        "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "zip": b"PK\x03\x04" + bytes(60),
        "wav": b"RIFF\x24\0\0\0WAVEfmt " + bytes(40), "elf": b"\x7fELF" + bytes(60),
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n", "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "ico": b"\0\0\1\0\1\0" + bytes(40), "gz": b"\x1f\x8b\x08" + rng.bytes(40),
    }  # fmt: skip
    return {
        **{f"text_{number}.jpg": text for number, text in enumerate(texts)},
        **{f"other_{kind}.jpg": data for kind, data in others.items()},
        **{f"empty{suffix}": b"" for suffix in SUFFIX.values()},
    }


def _special_files(folder: Path) -> list[str]:
    os.mkfifo(folder / "pipe.jpg")
    (folder / "folder.jpg").mkdir()
    (folder / "nowhere.jpg").symlink_to("missing.jpg")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    (folder / "link_to_pipe.jpg").symlink_to("pipe.jpg")
    (folder / "endless.jpg").symlink_to("/dev/zero")
    (folder / "up").symlink_to(folder)  # walked for ever by the careless
    names = ["pipe", "folder", "nowhere", "loop", "link_to_pipe", "endless"]
    if os.geteuid() != 0:  # root reads everything
        (folder / "locked.jpg").write_bytes(encode(Image.new("RGB", (8, 8)), "JPEG"))
        (folder / "locked.jpg").chmod(0)
        names.append("locked")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder)  # a socket's path may have 107 bytes only
        try:
            server.bind("socket.jpg")
        finally:
            os.chdir(here)
    return [f"{name}.jpg" for name in (*names, "socket")]


def add_member(tar: tarfile.TarFile, name: str, data: bytes, **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def _shards(folder: Path) -> tuple[dict[str, tuple[int, int, int]], list[str]]:
    good, bad = {}, []
    jpeg = encode(Image.new("RGB", (16, 16), "red"), "JPEG")
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number in range(5):
            colour = (0, 50 * number, 255)
            add_member(
                tar, f"./x/good_{number}.png", encode(Image.new("RGB", (20, 9), colour), "PNG")
            )
            good[f"a.tar/x/good_{number}.png"] = colour
        for name in ("../out.jpg", "a/../../out.jpg", "/etc/out.jpg", "..//out.jpg"):
            add_member(tar, name, jpeg)
            bad.append(f"a.tar/{name}")
        kinds = (
            tarfile.SYMTYPE,
            tarfile.LNKTYPE,
            tarfile.CHRTYPE,
            tarfile.BLKTYPE,
            tarfile.FIFOTYPE,
        )
        for number, kind in enumerate(kinds):
            add_member(tar, f"kind_{number}.jpg", b"", type=kind, linkname="/etc/passwd")
            bad.append(f"a.tar/kind_{number}.jpg")
        add_member(tar, "half.jpg", jpeg[: len(jpeg) // 2])
        add_member(tar, "none.jpg", b"")
        add_member(tar, ".hidden.jpg", jpeg)
        add_member(tar, "notes.txt", b"not looked at")
        bad += ["a.tar/half.jpg", "a.tar/none.jpg"]
    whole = (folder / "a.tar").read_bytes()
    (folder / "b_cut.tar").write_bytes(whole[:540])  # in the first member's data
    (folder / "c_garbage.tar").write_bytes(b"\x07" * 2000)
    (folder / "d_empty.tar").write_bytes(b"")
    os.mkfifo(folder / "e_pipe.tar")
    return good, [
        *bad,
        "b_cut.tar/x/good_0.png",
        "b_cut.tar",
        "c_garbage.tar",
        "d_empty.tar",
        "e_pipe.tar",
    ]

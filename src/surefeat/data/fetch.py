"""Fetch public data sets: resumable, checked, unpacked without trusting the archive's paths.

Nothing is fetched at import or behind the user's back; only `get` does it.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

CHUNK = 1 << 20

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Source:
    """One public archive."""

    url: str
    archive: str
    """File name under the user's folder; a copy put there by hand is used as it is."""
    sha256: str | None
    """None: not known to us. Then the first copy's own sum is stored beside it and kept to."""
    what: str


_PROPOSAL_FLOW = "https://www.di.ens.fr/willow/research/proposalflow/dataset"

SOURCES = {
    "pf-willow": Source(
        f"{_PROPOSAL_FLOW}/PF-dataset.zip", "PF-dataset.zip", None, "10 sub-classes x 10 images"
    ),
    "pf-pascal": Source(
        f"{_PROPOSAL_FLOW}/PF-dataset-PASCAL.zip",
        "PF-dataset-PASCAL.zip",
        None,
        "images and keypoints; the public pair lists (image_pairs/*.csv) come with NC-Net's code",
    ),
    "spair": Source(
        "https://cvlab.postech.ac.kr/research/SPair-71k/data/SPair-71k.tar.gz",
        "SPair-71k.tar.gz",
        None,
        "70,958 pairs of 18 categories",
    ),
    "pascal3d": Source(
        "ftp://cs.stanford.edu/cs/cvgl/PASCAL3D+_release1.1.zip",
        "PASCAL3D+_release1.1.zip",
        None,
        "PASCAL3D+ 1.1: boxes, poses and keypoints of 12 rigid classes",
    ),
}


def get(
    name: str,
    folder: str | Path,
    *,
    sources: dict[str, Source] = SOURCES,
    say: Callable[[str], object] = print,
    attempts: int = 3,
) -> Path:
    """Fetch and unpack a data set into `folder`, which is returned; what is there is not redone.

    A broken download is resumed, within `attempts` and at the next call. `say` gets the messages.
    """
    if name not in sources:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(sorted(sources))}")
    source, folder = sources[name], Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    archive = download(source, folder, say=say, attempts=attempts)
    done = archive.with_name(archive.name + ".unpacked")
    if not done.exists():
        unpack(archive, folder)
        done.touch()
    return folder


def download(
    source: Source, folder: Path, *, say: Callable[[str], object] = print, attempts: int = 3
) -> Path:
    """The checked archive, fetched unless it is there already.

    ConnectionError: it cannot be fetched; ValueError: its checksum is wrong.
    """
    archive = folder / source.archive
    if not archive.exists():
        part = archive.with_name(archive.name + ".part")
        for attempt in range(1, attempts + 1):
            try:
                _fetch(source.url, part)
                break
            except (OSError, HTTPException) as error:
                if attempt == attempts:
                    raise ConnectionError(
                        f"cannot fetch {source.url} ({error}); run again to resume, or put a copy "
                        f"at {archive}"
                    ) from error
                say(f"{source.archive}: {error}; trying again")
        _check(part, archive, source, say)
        part.replace(archive)
        _tag_file(part).unlink(missing_ok=True)
    else:
        _check(archive, archive, source, say)
    return archive


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar file into `folder`, all of it or nothing.

    Links, devices and names that lead outside the folder are refused (ValueError).
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as scratch:
        for name, content in _members(archive):
            target = Path(scratch) / _safe(name, archive)
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file, CHUNK)
        for entry in sorted(Path(scratch).rglob("*")):
            target = folder / entry.relative_to(scratch)
            if entry.is_dir():
                target.mkdir(exist_ok=True)
            else:
                entry.replace(target)


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(url: str, part: Path) -> None:
    """Continue `part` to the end; OSError if the connection ends before it."""
    have = part.stat().st_size if part.exists() else 0
    headers = {}
    if have and _tag_file(part).exists():
        # If-Range: a file that changed on the server comes whole instead of spliced to the old.
        tag = _tag_file(part).read_text(encoding="utf-8")
        headers = {"Range": f"bytes={have}-", "If-Range": tag}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            _receive(response, part, have)
    except urllib.error.HTTPError as error:
        # 416: there is nothing after what we have, so it is complete, or wrong altogether.
        if error.code != 416:
            raise
        if error.headers.get("Content-Range") != f"bytes */{have}":
            part.unlink()
            raise


def _receive(response: Any, part: Path, have: int) -> None:
    """Write an answer's content to `part`, after its first `have` bytes if it continues them."""
    resumed = getattr(response, "status", None) == 206
    if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        part.unlink()
        raise OSError("the server sent another part of the file than asked for")
    if not resumed:
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        _tag_file(part).unlink(missing_ok=True)
        if tag and not tag.startswith("W/"):
            _tag_file(part).write_text(tag, encoding="utf-8")
    with part.open("ab" if resumed else "wb") as file:
        shutil.copyfileobj(response, file, CHUNK)
    length = response.headers.get("Content-Length")
    expected = (have if resumed else 0) + int(length or 0)
    size = part.stat().st_size
    if length is not None and size != expected:
        raise OSError(f"the connection ended after {size} of {expected} bytes")


def _tag_file(part: Path) -> Path:
    return part.with_name(part.name + ".tag")


def _check(path: Path, archive: Path, source: Source, say: Callable[[str], object]) -> None:
    """Compare with the known sum, or with the one stored beside the archive at its first use."""
    stored = archive.with_name(archive.name + ".sha256")
    known = source.sha256 or (
        stored.read_text(encoding="utf-8").split()[0] if stored.exists() else None
    )
    found = sha256(path)
    if known is None:
        stored.write_text(f"{found}  {archive.name}\n", encoding="utf-8")
        say(f"{archive.name}: no published checksum; its sha256 {found} is kept in {stored}")
    elif found != known:
        if path != archive:
            # A broken part would be resumed for ever.
            path.unlink()
        raise ValueError(
            f"{archive.name} has sha256 {found}, expected {known}; remove {archive} and "
            f"{stored.name} if they are there and run again, or put a good copy at {archive}"
        )


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and opened content of every file in a zip or tar archive."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as pack:
            for info in pack.infolist():
                # The upper half of the attributes is the Unix mode; 0o120000 marks a link.
                if (info.external_attr >> 16) & 0o170000 == 0o120000:
                    raise ValueError(f"{archive} holds the link {info.filename}; not unpacked")
                if not info.is_dir():
                    yield info.filename, pack.open(info)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name, content
                elif not member.isdir():
                    raise ValueError(f"{archive} holds {member.name}, no plain file; not unpacked")
    else:
        raise ValueError(f"{archive} is neither zip nor tar; remove it and fetch it again")


def _safe(name: str, archive: Path) -> PurePosixPath:
    path = PurePosixPath(name.replace("\\", "/"))
    drive = PureWindowsPath(name).drive
    if path.is_absolute() or ".." in path.parts or drive or not path.parts:
        raise ValueError(f"{archive} holds the unsafe name {name!r}; nothing was unpacked")
    return path

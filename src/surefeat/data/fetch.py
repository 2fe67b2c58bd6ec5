"""Fetch public data sets: whole, and unpacked without trusting the archive's paths.

Nothing is fetched at import or behind the user's back; only `get` does it.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from http.client import HTTPException
from pathlib import Path

from surefeat.core.files import move

_LOG = logging.getLogger(__name__)

_TIMEOUT_S = 30.0


_PROPOSAL_FLOW = "https://www.di.ens.fr/willow/research/proposalflow/dataset"

SOURCES = {
    "pf-willow": (f"{_PROPOSAL_FLOW}/PF-dataset.zip", "10 sub-classes x 10 images"),
    "pf-pascal": (
        f"{_PROPOSAL_FLOW}/PF-dataset-PASCAL.zip",
        "images and keypoints; the public pair lists (image_pairs/*.csv) come with NC-Net's code",
    ),
    "spair": (
        "https://cvlab.postech.ac.kr/research/SPair-71k/data/SPair-71k.tar.gz",
        "70,958 pairs of 18 categories",
    ),
    "pascal3d": (
        "ftp://cs.stanford.edu/cs/cvgl/PASCAL3D+_release1.1.zip",
        "PASCAL3D+ 1.1: boxes, poses and keypoints of 12 rigid classes",
    ),
}
"""Address of the archive and what is in it."""


def get(name: str, folder: str | Path) -> Path:
    """Fetch a data set and unpack it into FOLDER/NAME, which is returned; it is not done twice.

    A copy of the archive put into FOLDER by hand is used as it is. ConnectionError: it cannot be
    fetched; ValueError: what came is not what it should be.
    """
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(sorted(SOURCES))}")
    (url, what), folder = SOURCES[name], Path(folder)
    target, archive = folder / name, folder / url.rpartition("/")[2]
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        _LOG.info("%s: %s", url, what)
        _download(url, archive)
    _unpack(archive, target)
    return target


def _download(url: str, archive: Path) -> None:
    """Whole or not at all: an archive that is there is complete."""
    part = archive.with_name(f".{archive.name}.{secrets.token_hex(8)}.part")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer, part.open("wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
            length = answer.headers.get("Content-Length")
        if length is not None and part.stat().st_size != int(length):
            raise OSError(f"the connection ended after {part.stat().st_size} of {length} bytes")
    except (OSError, HTTPException) as error:
        part.unlink(missing_ok=True)
        fix = f"run again, or put a copy at {archive}"
        raise ConnectionError(f"cannot fetch {url} ({error}); {fix}") from error
    move(part, archive)


def _unpack(archive: Path, target: Path) -> None:
    """Unpack a zip or tar file into the new folder `target`, all of it or nothing."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-") as scratch:
        inside = Path(scratch) / target.name
        inside.mkdir()
        try:
            if zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as pack:
                    _check_names(pack, inside)
                    pack.extractall(inside)
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(inside, filter="data")
        except tarfile.ReadError as error:
            what = "is neither zip nor tar, or damaged"
            raise ValueError(f"{archive} {what}; remove it and fetch it again") from error
        except (tarfile.FilterError, zipfile.BadZipFile, EOFError, OSError) as error:
            fix = "nothing was unpacked; remove it and fetch it again"
            raise ValueError(f"{archive} cannot be unpacked ({error}); {fix}") from error
        if os.name == "posix":
            os.sync()  # what was unpacked, before its name says that it is whole
        move(inside, target)


def _check_names(pack: zipfile.ZipFile, folder: Path) -> None:
    """zipfile bends names that lead outside; such an archive is not what it should be."""
    root = folder.resolve()
    for name in pack.namelist():
        if not (root / name.replace("\\", "/")).resolve().is_relative_to(root):
            raise OSError(f"the name {name!r} leads outside")

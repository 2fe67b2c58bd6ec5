"""Fetching benchmarks: whole, and unpacked without leaving the folder."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import matplotlib.image
import pytest

from sets import willow
from surefeat.cli.main import main
from surefeat.data import fetch
from surefeat.data.fetch import SOURCES, get

FILES = {"set/a.bin": bytes(range(256)) * 40, "set/b.txt": b"text"}


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as pack:
        for name, content in files.items():
            pack.writestr(name, content)
    return buffer.getvalue()


def tar_of(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return buffer.getvalue()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive at a public address, under the name `set`."""
    archive = tmp_path / "public" / "set.zip"
    archive.parent.mkdir()
    archive.write_bytes(zip_of(FILES))
    monkeypatch.setitem(SOURCES, "set", (archive.as_uri(), "a test"))
    return archive


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_what_was_fetched_survives_a_power_cut(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive and a folder that are there count as whole, so they have to be."""
    seen: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda number: seen.append(os.readlink(f"/proc/self/fd/{number}"))
    )
    monkeypatch.setattr(os, "sync", lambda: seen.append("all"))
    get("set", tmp_path / "data")
    archive, *rest = seen
    assert Path(archive).name.startswith(".set.zip.")
    assert rest == [str(tmp_path / "data"), "all", str(tmp_path / "data")]


def test_get_fetches_and_unpacks_once(published: Path, tmp_path: Path) -> None:
    assert get("set", tmp_path / "data") == tmp_path / "data" / "set"
    assert contents(tmp_path / "data" / "set") == FILES
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"set", "set.zip"}
    published.unlink()
    assert get("set", tmp_path / "data") == tmp_path / "data" / "set"


def test_get_uses_a_copy_put_there_by_hand(published: Path, tmp_path: Path) -> None:
    (tmp_path / "set.zip").write_bytes(published.read_bytes())
    published.unlink()
    assert contents(get("set", tmp_path)) == FILES


def test_get_says_where_to_put_a_copy(published: Path, tmp_path: Path) -> None:
    published.unlink()
    with pytest.raises(ConnectionError, match=r"cannot fetch file.*put a copy at .*set.zip"):
        get("set", tmp_path)
    with pytest.raises(ValueError, match=r"unknown data set 'sets'; there are .*set"):
        get("sets", tmp_path)


class CutShort(BaseHTTPRequestHandler):
    """Promises more bytes than it sends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * 10)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.mark.usefixtures("no_hang", "published")
def test_get_keeps_nothing_of_a_download_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), CutShort) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/set.zip"
        monkeypatch.setitem(SOURCES, "set", (address, "a test"))
        with pytest.raises(ConnectionError, match="ended after 10 of 1000 bytes"):
            get("set", tmp_path / "data")
        server.shutdown()
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("name", ["../evil.txt", "/evil.txt", "a/../../evil.txt", "..\\evil.txt"])
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of({"good.txt": b"x", name: b"evil"}))
    with pytest.raises(ValueError, match=r"leads outside\); nothing was unpacked"):
        fetch._unpack(tmp_path / "a.zip", tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_members_that_lead_outside_are_refused(tmp_path: Path, kind: bytes) -> None:
    evil = tarfile.TarInfo("link" if kind != tarfile.REGTYPE else "../evil.txt")
    evil.type, evil.linkname = kind, "/etc/passwd"
    (tmp_path / "a.tar.gz").write_bytes(tar_of(tarfile.TarInfo("good.txt"), evil))
    with pytest.raises(ValueError, match="nothing was unpacked"):
        fetch._unpack(tmp_path / "a.tar.gz", tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_tar_files_with_folders_are_unpacked_and_other_files_refused(tmp_path: Path) -> None:
    deep = tarfile.TarInfo("deep/one/x.bin")
    deep.size = 3
    (tmp_path / "a.tar.gz").write_bytes(tar_of(deep))
    fetch._unpack(tmp_path / "a.tar.gz", tmp_path / "in")
    assert (tmp_path / "in" / "deep" / "one" / "x.bin").read_bytes() == bytes(3)
    (tmp_path / "page.zip").write_text("<html>not found</html>")
    with pytest.raises(ValueError, match="neither zip nor tar"):
        fetch._unpack(tmp_path / "page.zip", tmp_path / "other")


def test_the_first_commands_of_the_manual_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = willow(tmp_path / "made") / "PF-dataset-WILLOW"
    files = {
        f"PF-dataset/{path.relative_to(layout)}": path.read_bytes()
        for path in layout.rglob("*.*")
        if path.is_file()
    }
    (tmp_path / "PF-dataset.zip").write_bytes(zip_of(files))
    address = (tmp_path / "PF-dataset.zip").as_uri()
    monkeypatch.setitem(SOURCES, "pf-willow", (address, "a test"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    manual = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    for command in ("data get pf-willow --out data", "data show pf-willow data/pf-willow"):
        assert f"surefeat {command}" in manual
        main(command.split())
    assert "6 of 900 pairs in pairs.png" in capsys.readouterr().out
    assert matplotlib.image.imread("pairs.png").std() > 0


def test_help_offers_the_names_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("get", "show"):
        with pytest.raises(SystemExit):
            main(["data", command, "--help"])
        said = capsys.readouterr().out
        assert "spair" in said
        assert "spair-71k" not in said.lower()


def test_sources_name_a_public_address_of_an_archive() -> None:
    assert set(SOURCES) == {"pf-willow", "pf-pascal", "spair", "pascal3d"}
    for address, _ in SOURCES.values():
        assert address.split("://")[0] in ("https", "ftp")
        assert address.endswith((".zip", ".tar.gz"))

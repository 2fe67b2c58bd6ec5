"""Fetching benchmarks: resumed, checked, and unpacked without leaving the folder."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from surefeat.data.fetch import SOURCES, Source, get, unpack


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

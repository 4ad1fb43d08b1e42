"""Downloads from a real server on this machine: complete, interrupted, resumed, wrong, missing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import official_files
from cpnorm.lab.data import download, images
from cpnorm.lab.data.download import DownloadError, Remote, get

CONTENT = bytes(range(256)) * 4096  # 1 MiB
OTHER = b"label" * 100


@dataclass
class Server:
    """The files it serves, how it behaves, and the requests it received."""

    files: dict[str, bytes] = field(default_factory=lambda: {"/a.bin": CONTENT, "/b.bin": OTHER})
    ranges: bool = True
    announce: bool = True
    break_after: int | None = None  # close the connection after this many bytes, once
    hold_after: int | None = None  # send nothing after this many bytes until the server ends
    end: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client may hang up
                self.answer()

        def answer(self) -> None:
            wanted = self.headers["Range"]
            state.asked.append((self.path, wanted))
            body = state.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if state.announce:
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            body = body[start:]
            if state.break_after is not None:
                body, state.break_after = body[: state.break_after], None
            if state.hold_after is not None:
                self.wfile.write(body[: state.hold_after])
                state.end.wait(60)
                return
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{http.server_port}/"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    state.end.set()
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture(autouse=True)
def small_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make svhn two small files, and ignore the proxies of this machine."""
    files = tuple(
        Remote(path, len(content), hashlib.md5(content).hexdigest())
        for path, content in (("sub/a.bin", CONTENT), ("b.bin", OTHER))
    )
    monkeypatch.setitem(download.FILES, "svhn", files)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("CPNORM_DATA", raising=False)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


WHOLE = {"sub/a.bin": CONTENT, "b.bin": OTHER}


@pytest.mark.parametrize("announce", [True, False])
def test_whole(server: Server, tmp_path: Path, announce: bool) -> None:
    server.announce = announce
    seen: list[tuple[str, int, int]] = []
    paths = get("svhn", tmp_path, address=server.address, progress=lambda *step: seen.append(step))
    assert paths == [tmp_path / "sub/a.bin", tmp_path / "b.bin"]
    assert files_in(tmp_path) == WHOLE
    steps = [done for file, done, total in seen if file == "a.bin" and total == len(CONTENT)]
    assert steps[0] == 0
    assert steps == sorted(steps)
    assert steps[-1] == len(CONTENT)
    assert seen[-1] == ("b.bin", len(OTHER), len(OTHER))


def test_what_is_there_is_not_asked_for(server: Server, tmp_path: Path) -> None:
    get("svhn", tmp_path, address=server.address)
    (tmp_path / "b.bin").write_bytes(OTHER[::-1])  # right size, wrong content
    server.asked.clear()
    get("svhn", tmp_path, address=server.address)
    assert server.asked == [("/b.bin", None)]
    assert files_in(tmp_path) == WHOLE


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_taken_up_again(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.ranges, server.break_after = ranges, 300_000
    get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == WHOLE
    assert [request for request in server.asked if request[0] == "/a.bin"] == [
        ("/a.bin", None),
        ("/a.bin", "bytes=300000-"),
    ]


@pytest.mark.parametrize("ranges", [True, False])
def test_killed_and_run_again(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.hold_after, server.ranges = 700_000, ranges
    part = tmp_path / "sub/a.bin.part"
    program = (
        "import sys; from pathlib import Path; from cpnorm.lab.data.download import download\n"
        "report = lambda file, done, total: print(done, flush=True)\n"
        "download(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], report)"
    )
    checksum = hashlib.md5(CONTENT).hexdigest()
    command = [sys.executable, "-c", program, server.address + "a.bin", tmp_path / "sub/a.bin", len(CONTENT), checksum]
    package = str(Path(download.__file__).parents[3])
    with subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": package}, text=True
    ) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 700_000:
            pass
        process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    left = part.stat().st_size
    assert 0 < left <= 700_000
    assert not (tmp_path / "sub/a.bin").exists()
    server.hold_after = None
    get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == WHOLE
    assert ("/a.bin", f"bytes={left}-") in server.asked


def test_wrong_checksum_keeps_nothing(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = CONTENT[::-1]
    with pytest.raises(DownloadError, match=r"a\.bin: expected 1048576 bytes with md5 .*; kept nothing"):
        get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == {}


def test_an_old_file_survives_a_failed_download(server: Server, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.bin").write_bytes(b"old")
    server.files["/a.bin"] = CONTENT[::-1]
    with pytest.raises(DownloadError, match="kept nothing"):
        get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == {"sub/a.bin": b"old"}


def test_a_part_of_something_else(server: Server, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(DownloadError, match="kept nothing"):
        get("svhn", tmp_path, address=server.address)
    get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == WHOLE


def test_not_there(server: Server, tmp_path: Path) -> None:
    del server.files["/b.bin"]
    with pytest.raises(DownloadError, match=r"127.0.0.1:\d+/b\.bin: the server answers 404 Not Found"):
        get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == {"sub/a.bin": CONTENT}


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"1", b"<html>please log in</html>"])
def test_another_size_is_noticed_before_it_is_downloaded(server: Server, tmp_path: Path, content: bytes) -> None:
    server.files["/a.bin"] = content
    with pytest.raises(DownloadError, match=f"expected 1048576 bytes, the server announces {len(content)}"):
        get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == {}


def test_more_than_expected_without_announcement(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"], server.announce = CONTENT * 20, False
    with pytest.raises(DownloadError, match="kept nothing"):
        get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == {}


def test_less_than_announced_again_and_again(server: Server, tmp_path: Path) -> None:
    server.ranges, server.hold_after = False, 1000
    server.end.set()  # do not hold, but end the answer there
    with pytest.raises(DownloadError, match="got 1000 of 1048576 bytes, and no more came; run it again to continue"):
        get("svhn", tmp_path, address=server.address)
    server.hold_after = None
    get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == WHOLE


def test_a_part_that_cannot_be_continued(server: Server, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.bin.part").write_bytes(CONTENT[:1000])
    server.files["/a.bin"] = CONTENT[:500]
    with pytest.raises(DownloadError, match="416"):
        get("svhn", tmp_path, address=server.address)
    server.files["/a.bin"] = CONTENT
    get("svhn", tmp_path, address=server.address)
    assert files_in(tmp_path) == WHOLE


def test_no_server_answers(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"got 0 of 1048576 bytes: .*refused.*; run it again to continue"):
        get("svhn", tmp_path, address="http://127.0.0.1:1")


def test_names(tmp_path: Path) -> None:
    assert get("digits", tmp_path) == []
    known = "a data set among digits, mnist, cifar10, svhn, or weights among resnet20-cifar10, .*, resnet56-cifar10"
    with pytest.raises(ValueError, match=f"expected {known}, got 'imagenet'"):
        get("imagenet", tmp_path)


def test_published_weights_are_downloaded_and_checked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (remote,) = download.FILES["resnet56-cifar10"]
    assert remote.path == "pretrained/resnet56-4bfd9763.th"
    file = Path(remote.path).name
    known = Remote(remote.path, len(CONTENT), hashlib.md5(CONTENT).hexdigest())
    monkeypatch.setitem(download.FILES, "resnet56-cifar10", (known,))
    server.files[f"/{file}"] = OTHER
    with pytest.raises(DownloadError, match="expected 1048576 bytes"):
        get("resnet56-cifar10", tmp_path, address=server.address)
    server.files[f"/{file}"] = CONTENT
    assert get("resnet56-cifar10", tmp_path, address=server.address) == [tmp_path / remote.path]
    assert files_in(tmp_path) == {remote.path: CONTENT}


def test_downloads_are_files_that_are_looked_for() -> None:
    """Downloads are found afterwards: every file belongs to a layout, plain or packed."""
    for name in ("mnist", "cifar10"):
        wanted = {file for layout in images.LAYOUTS[name] for file in layout.files}
        for remote in download.FILES[name]:
            assert remote.path in wanted or remote.path.removesuffix(".gz") in wanted
            assert remote.size < 2**28


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_what_lies_there_unpacked_is_not_downloaded(name: str, tmp_path: Path) -> None:
    files = images.LAYOUTS[name][0].files
    assert not {remote.path for remote in download.FILES[name]} & set(files)
    getattr(official_files, f"write_{name}")(tmp_path, official_files.make(name))
    assert get(name, tmp_path, address="http://127.0.0.1:9") == [tmp_path / file for file in files]
    damaged = tmp_path / files[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=re.escape(damaged.name)):
        get(name, tmp_path, address="http://127.0.0.1:9")

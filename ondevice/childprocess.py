"""A process of this program's own: a fresh interpreter, a pipe to it, and an end in every case.

The two sides talk in pickles over a private socket pair that the child inherits. The child is
started as a fresh interpreter, not by multiprocessing, which would import the user's script a
second time, and not by fork, which Apple's frameworks do not survive (coremltools issue 963).
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from ondevice.errors import OnDeviceError, UnitFailed

# sys.path comes first: neither this package nor what the caller names need be on the default one.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from importlib import import_module; "
    "import_module(sys.argv[2]).serve(int(sys.argv[1]))"
)

_PICKLE = pickle.HIGHEST_PROTOCOL

END_SECONDS = 5.0
"""How long a process may take to be gone once its pipe has closed or it was killed."""


class Ended(Exception):
    """The process is gone; the message says how, and what it said last on stderr."""


class ChildProcess:
    """The parent's side; one caller at a time, but `kill` may come from any thread."""

    def __init__(self, module: str) -> None:
        """Starts `module.serve(handle)` in the process; it makes its `Parent` of the handle."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._connection, theirs = Pipe()
        with theirs:
            self._process = self._start(module, theirs.fileno())

    def _start(self, module: str, handle: int) -> subprocess.Popen[bytes]:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(handle), module, *path],
            stdin=subprocess.PIPE,  # its end of file tells the child that this process is gone
            stdout=self._output,
            stderr=self._output,
            pass_fds=[handle],
            start_new_session=True,  # Ctrl-C in a terminal is for the parent alone
        )

    @property
    def process_id(self) -> int:
        """The operating system's number of the process."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Give it something that pickles. Raises Ended."""
        data = pickle.dumps(message, _PICKLE)
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise self._ended() from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """What it sent next. Raises Ended; TimeoutError when nothing came for `timeout_s`."""
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                raise TimeoutError
            return pickle.loads(self._connection.recv_bytes())
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def close(self) -> None:
        """End the process at once; it has nothing to save."""
        self.kill()
        self._connection.close()
        self._output.close()

    def kill(self) -> None:
        """End the process, whatever it does; a call under way raises Ended."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _ended(self) -> Ended:
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        self._output.seek(0)
        lines = self._output.read()[-2000:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return Ended(f"was ended {how}" + (f": {last}" if last else ""))


class Parent:
    """The child's side: what it is asked, and where it answers. It ends when the parent does."""

    def __init__(self, handle: int) -> None:
        """handle: what `serve` was called with."""
        threading.Thread(target=_end_with_the_parent, daemon=True).start()
        self._connection = Connection(handle)

    def receive(self) -> Any:
        """The parent's next message, waiting for it; raises EOFError when there will be none."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError from error

    def asks(self, within_s: float) -> bool:
        """Whether the parent says something within that time."""
        try:
            return self._connection.poll(within_s)
        except OSError:
            return True  # `receive` will find out

    def send(self, message: object) -> None:
        """Answer; ends the process when nobody listens any more."""
        try:
            self._connection.send_bytes(pickle.dumps(message, _PICKLE))
        except OSError:
            os._exit(0)


def _end_with_the_parent() -> None:
    """Also in the middle of a step: the parent's end of stdin closes when it ends, however."""
    while os.read(0, 1):
        pass
    os._exit(0)


def portable(error: Exception, what: str) -> OnDeviceError:
    """An error that pickles, with the traceback of this side as a note. what: what failed."""
    named: OnDeviceError
    if isinstance(error, OnDeviceError):
        named = type(error)(str(error))
    else:
        named = UnitFailed(f"{what} failed: {type(error).__name__}: {error}")
    named.add_note("".join(traceback.format_exception(error)))
    return named

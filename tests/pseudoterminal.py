"""A program on a terminal of its own, and a person who types."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

# CPR: prompt_toolkit asks the terminal where its cursor is, and nobody here would answer.
PLAIN_TERMINAL = {"TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}


class Terminal:
    """A program on a pseudo-terminal; what it writes collects in `screen`."""

    def __init__(self, line: list[str], columns: int = 80, **environment: str) -> None:
        self._here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            line,
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, **PLAIN_TERMINAL, **environment},
        )
        os.close(there)
        self.screen = ""

    def type(self, keys: str, answer: str, seconds: float = 30) -> str:
        """Send `keys`; wait for `answer` (a pattern) on the screen that they made; return it."""
        self.screen = ""
        os.write(self._here, keys.encode())
        return self.wait_for(answer, seconds)

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.screen, re.DOTALL):
            assert self._read(deadline), f"no {pattern!r} in {self.screen!r}"
        return self.screen

    def finish(self, keys: str, seconds: float = 30) -> int:
        """Send `keys` and read until the program ends; its exit status."""
        os.write(self._here, keys.encode())
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.process.wait(max(0, deadline - time.monotonic()))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._here)

    def _read(self, deadline: float) -> bool:
        """Add what comes next to the screen; False when nothing more comes, or not in time."""
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._here], [], [], left)[0]:
            return False
        try:
            self.screen += os.read(self._here, 65536).decode("utf-8", "replace")
        except OSError:  # EIO: nobody has the other end any more
            return False
        return True


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

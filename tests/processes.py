"""Looking at processes, and small drafters that a child process can open by name."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ondevice.errors import UnitFailed


def runs(process_id: int) -> bool:
    """Whether there is such a process, one that waits to be reaped not counted."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process_id}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def is_gone(process_id: int, within_s: float = 20.0) -> bool:
    """Wait for the end of a process."""
    until = time.monotonic() + within_s
    while runs(process_id):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class SmallDrafter:
    """Counts; its calls can end the process, hang it, or raise."""

    name, runtime_name = "small", "nothing"

    def __init__(self, opening: str = "") -> None:
        print("said while opening")
        if opening == "die":
            print("library: cannot go on", file=sys.stderr)
            os._exit(3)
        if opening == "raise":
            raise RuntimeError("no such model")

    def open_session(self) -> int:
        return os.getpid()

    def close_session(self, session: int) -> None:
        raise UnitFailed("kept its type")

    def prefill(self, session, tokens, stopped) -> int:
        done = 0
        while done < len(tokens) and not stopped():
            done += 1
        return done

    def truncate(self, session: int, length: int) -> None:
        if length == 1:
            time.sleep(600)
        if length == 2:
            print("library: broken", file=sys.stderr)
            os._exit(9)
        raise ValueError("not explained")

    def close(self) -> None:
        pass

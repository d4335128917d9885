"""Progress over answers or other work: a bar on a terminal, a few lines in a log."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ondevice.apps.terminal import note, notes

LINES = 10
"""How many lines of progress a whole command writes where there is no terminal."""


@contextmanager
def counting(
    command: str,
    total: int,
    what: str = "answers",
    *,
    left: bool = False,
    deadline: float | None = None,
) -> Iterator[Callable[[], None]]:
    """The function to call after each of `what`: it moves a bar, or writes a line now and then.

    left: the lines say how long the rest will take; a bar always does. deadline: on
    `time.monotonic`, when it will be over at the latest.
    """
    console = notes()
    done, bounds = itertools.count(1), _Bounds(total, time.monotonic(), deadline)
    if not console.is_terminal:

        def line() -> None:
            number = next(done)
            rest = _left(number, bounds) if left else ""
            _count_line(command, number, total, what, rest)

        yield line
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    # Drawn between them alone: a thread that draws would take time from what is measured.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task(what, total=total, left="")
        progress.refresh()

        def count() -> None:
            progress.update(task, advance=1, left=_left(next(done), bounds))
            progress.refresh()

        yield count


@dataclass(frozen=True, slots=True)
class _Bounds:
    """All of the work, when it began, and when it will be over at the latest."""

    total: int
    began: float
    deadline: float | None


def _left(done: int, bounds: _Bounds) -> str:
    """How long the rest takes at the pace so far; "" for no rest."""
    if done >= bounds.total:
        return ""
    now = time.monotonic()
    rest_s = (now - bounds.began) / done * (bounds.total - done)
    if bounds.deadline is not None:
        rest_s = min(rest_s, max(0.0, bounds.deadline - now))
    return f"{rest_s:.0f} s left"


def _count_line(command: str, done: int, total: int, what: str, left: str) -> None:
    """A line for a log, so that it does not look hung, at every tenth of the work."""
    if done * LINES // total > (done - 1) * LINES // total:
        note(f"{command}: {done} of {total} {what}" + (f", {left}" if left else ""))

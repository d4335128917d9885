"""Progress over answers or other work: a bar on a terminal, a few lines in a log."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ondevice.apps.terminal import note, notes

LINES = 10
"""How many lines of progress a whole command writes where there is no terminal."""


@contextmanager
def counting(
    command: str, total: int, what: str = "answers", *, left: bool = False
) -> Iterator[Callable[[], None]]:
    """The function to call after each of `what`: it moves a bar, or writes a line now and then.

    left: the lines say how long the rest will take; a bar always does.
    """
    console = notes()
    if not console.is_terminal:
        done, began = itertools.count(1), time.monotonic()
        yield lambda: _count_line(command, next(done), total, what, began if left else None)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between them alone: a thread that draws would take time from what is measured.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task(what, total=total)
        progress.refresh()

        def count() -> None:
            progress.advance(task)
            progress.refresh()

        yield count


def _count_line(command: str, done: int, total: int, what: str, began: float | None) -> None:
    """A line for a log, so that it does not look hung, at every tenth of the work."""
    if done * LINES // total > (done - 1) * LINES // total:
        line = f"{command}: {done} of {total} {what}"
        if began is not None:
            rest_s = (time.monotonic() - began) / done * (total - done)
            line += f", {rest_s:.0f} s left" if done < total else ""
        note(line)

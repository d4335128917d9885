"""What a distillation is doing, on stderr: a live line on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_S = 30.0  # between two lines where there is no terminal


class Watch:
    """The progress of one stage; `quiet` shows nothing. A context manager."""

    def __init__(self, title: str, quiet: bool) -> None:
        self._title, self._quiet = title, quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._begun = self._shown = time.monotonic()
        self._first: float | None = None

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar, self._task = _bar(self._title)
            self._bar.start()
        elif not self._quiet:
            print(self._title, file=sys.stderr, flush=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: float, words: str) -> None:
        """progress: share of the stage that is done; words: its figures."""
        if self._quiet:
            return
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=progress, figures=words)
            return
        if self._first is None:
            self._first = progress
        now = time.monotonic()
        if now - self._shown >= LINE_S:
            self._shown = now
            left = self._left(now, progress)
            print(f"{progress:4.0%} {words}{left}", file=sys.stderr, flush=True)

    def _left(self, now: float, progress: float) -> str:
        """Remaining time, by the pace since this stage began here."""
        assert self._first is not None
        gained = progress - self._first
        if gained <= 0:
            return ""
        seconds = (now - self._begun) * (1 - progress) / gained
        return f", {seconds / 60:.0f} min left"


def _bar(title: str) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        Left(),
        TextColumn("{task.fields[figures]}"),
        console=Console(stderr=True),
    )
    return bar, bar.add_task(title, total=1.0, figures="")

"""What a long preparation is doing, on stderr: a bar on a terminal, otherwise a line a stage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called with (done, in all), in bytes or steps of equal cost, as a stage goes on."""

_BAR_WIDTH = 80
"""Columns of a terminal from which on there is room for a bar, sizes and times."""


class Reporter:
    """Announces stages on stderr; stdout is never touched. `quiet` announces nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def say(self, line: str) -> None:
        """One line."""
        if not self._quiet:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, title: str, in_bytes: bool = False) -> Iterator[Progress]:
        """A stage of work: yields the function that moves its bar. `in_bytes` shows MB and MB/s."""
        if self._quiet or not sys.stderr.isatty():
            self.say(title)
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        size = [DownloadColumn(), TransferSpeedColumn()] if in_bytes else [TaskProgressColumn()]
        columns = [TextColumn("{task.description}"), BarColumn(), *size, TimeRemainingColumn()]
        if console.width < _BAR_WIDTH:  # rich would cut every column to an ellipsis
            columns = [columns[0], TaskProgressColumn()]
        with Bar(*columns, console=console) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

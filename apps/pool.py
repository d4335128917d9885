"""Independent pieces of work, on several processes where that is wanted."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def mapped(work: Callable[[Item], Found], items: Sequence[Item], jobs: int) -> Iterator[Found]:
    """`work` of each item, in order, as it comes; jobs: processes, 1 for this one alone.

    With several, `work` must be a function of a module, and item and result must be picklable.
    """
    jobs = min(jobs, len(items))
    if jobs <= 1:
        yield from map(work, items)
        return
    # Spawned, not forked: the parent may have threads (a progress bar, OpenBLAS).
    with multiprocessing.get_context("spawn").Pool(jobs, _leave_interrupts_alone) as pool:
        yield from pool.imap(work, items)


def _leave_interrupts_alone() -> None:
    """The parent ends its workers; their tracebacks would be noise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

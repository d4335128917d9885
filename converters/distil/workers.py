"""Threads that compute with MLX side by side, where a CPU does the work.

MLX computes the operations of one thread one after another, and those that are no products on one
core. Two threads with a core each made 1.25 to 1.4 times the tokens of one whose products used both
cores (64 rows each, contexts of 100 and 300 tokens).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from ondevice import blas

Result = TypeVar("Result")

MOST_WORKERS = 4
"""Each holds a cache of the verifier of its own; further cores are shared out among these."""


class Workers:
    """`count` threads, or the caller's own for one; a context, at whose end they are gone.

    What is given to a worker must be evaluated: MLX's streams belong to their threads.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._threads = [ThreadPoolExecutor(1) for _ in range(count if count > 1 else 0)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Clear the threads' streams, then join them.

        MLX 0.32 aborts a process that ends while a finished thread's streams are being taken down.
        """
        import mlx.core as mx

        ended = [thread.submit(mx.clear_streams) for thread in self._threads]
        for each in ended:
            each.result()
        for thread in self._threads:
            thread.shutdown()

    def map(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """The results of all jobs; job i is done by worker i modulo their count, in order."""
        if not self._threads:
            return [job() for job in jobs]
        ours = [self._threads[place % self.count] for place in range(len(jobs))]
        waiting = [thread.submit(job) for thread, job in zip(ours, jobs, strict=True)]
        return [each.result() for each in waiting]


def prepared_workers() -> int:
    """Share this machine's cores out; how many workers fit it. To be called before MLX is imported.

    One where a GPU computes, and one where the user has said how many threads a product uses.
    """
    told = blas.THREADS_VARIABLE in os.environ
    cores = os.cpu_count() or 1
    count = 1 if told else min(cores, MOST_WORKERS)
    os.environ.setdefault(blas.THREADS_VARIABLE, str(cores // count))
    blas.prepare()
    import mlx.core as mx

    return 1 if mx.default_device() == mx.Device(mx.gpu) else count

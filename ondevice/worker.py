"""The threads that units live on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from ondevice.errors import Closed
from ondevice.records import UnitName
from ondevice.units import DrafterUnit, VerifierUnit

Unit = TypeVar("Unit", bound=VerifierUnit | DrafterUnit)
Result = TypeVar("Result")


class _ParkedThreads:
    """Threads that are lent, given back, and never ended.

    A thread that has used MLX destroys Python objects after its last line of Python. If the
    interpreter exits meanwhile, that aborts the process ("terminate called without an active
    exception"; 3 of 10 exits on a loaded machine). A thread that waits for ever is harmless.
    """

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._lock = threading.Lock()

    def start(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, on a thread of its own."""
        with self._lock:
            tasks = self._idle.pop() if self._idle else self._new()
        tasks.put(task)

    def _new(self) -> queue.SimpleQueue[Callable[[], None]]:
        tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

        def work() -> None:
            while True:
                tasks.get()()
                with self._lock:
                    self._idle.append(tasks)

        threading.Thread(target=work, name="ondevice-unit", daemon=True).start()
        return tasks


_threads = _ParkedThreads()


class UnitWorker(Generic[Unit]):
    """One thread that opens a unit and is the only one ever to touch it (MLX demands that)."""

    def __init__(self, name: UnitName, open_unit: Callable[[], Unit]) -> None:
        """Starts at once; `opened` waits for the unit."""
        self.name = name
        self.closing = threading.Event()
        """Set by `stop`: long jobs end at the next occasion."""
        self._jobs: queue.SimpleQueue[Callable[[Unit], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._opened: Future[Unit] = Future()
        self._ended = threading.Event()
        _threads.start(partial(self._work, open_unit))

    def _work(self, open_unit: Callable[[], Unit]) -> None:
        try:
            unit = open_unit()
        except BaseException as error:
            self._opened.set_exception(error)
        else:
            self._opened.set_result(unit)
            while (job := self._jobs.get()) is not None:
                job(unit)
            unit.close()
        finally:
            self._ended.set()

    def opened(self) -> Unit:
        """Wait for the unit, for its constant properties; raises what opening it raised."""
        return self._opened.result()

    def submit(self, job: Callable[[Unit], None]) -> bool:
        """Run `job`, which must not raise, after those before it; False when it is too late."""
        with self._lock:
            if self.closing.is_set():
                return False
            self._jobs.put(job)
            return True

    def call(self, function: Callable[[Unit], Result]) -> Result:
        """Run `function` on the worker and wait for what it returns or raises.

        Raises what opening the unit raised, or Closed.
        """
        self.opened()
        future: Future[Result] = Future()

        def job(unit: Unit) -> None:
            try:
                future.set_result(function(unit))
            except BaseException as error:
                future.set_exception(error)

        if not self.submit(job):
            raise Closed(f"the {self.name} is closed; open another engine")
        return future.result()

    def stop(self) -> None:
        """Close the unit once what runs has ended; does not wait, and again is harmless."""
        with self._lock:
            if not self.closing.is_set():
                self.closing.set()
                self._jobs.put(None)

    def close(self) -> None:
        """`stop`, and wait for the end."""
        self.stop()
        self._ended.wait()

"""The threads that units live on: one a unit, shared by its sessions in rotation."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from ondevice.deadline import NEVER, Deadline, Stopwatch
from ondevice.errors import Closed, OnDeviceError, UnitFailed, UnitLost
from ondevice.records import UnitName
from ondevice.rotation import Rotation
from ondevice.units import DrafterUnit, Killable, VerifierUnit

log = logging.getLogger(__name__)

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


CLOSE_SECONDS = 5.0
"""How long `close` waits for a unit that has a deadline; one that hangs is left behind."""


@dataclass(slots=True, eq=False)
class Job(Generic[Unit]):
    """What a session wants of a unit.

    work: does it when called, or returns an iterator that does, one turn at a step. failed: called
    once with the reason, on any thread, unless the work came to its end. It must not raise. timed:
    whether its steps tell how long the unit's steps take.
    """

    work: Callable[[Unit], Iterator[None] | None]
    failed: Callable[[OnDeviceError], None]
    timed: bool = False
    turns: Iterator[None] | None = None

    def turn(self, unit: Unit) -> bool:
        """Have one turn; True when there is nothing left to do."""
        if self.turns is None:
            self.turns = self.work(unit)
            if self.turns is None:
                return True
        return next(self.turns, self) is self


class UnitWorker(Generic[Unit]):
    """One thread that opens a unit and is the only one ever to touch it (MLX demands that).

    `lost` is set once the unit can do no more work. A verifier is lost when it raises what it does
    not explain by an OnDeviceError: what its caches hold is in doubt then, and the text hangs on
    them. A drafter is lost when it says so (`UnitLost`) or takes longer than its deadline. Then a
    unit that is `Killable` is killed; one that is not keeps the thread, until it returns if ever.
    A step that hangs with the interpreter's lock held cannot be noticed by anyone.
    """

    def __init__(
        self,
        name: UnitName,
        open_unit: Callable[[], Unit],
        deadline: Deadline = NEVER,
        on_lost: Callable[[UnitLost], None] = lambda _: None,
    ) -> None:
        """Starts at once; `opened` waits for the unit. Opening has no deadline.

        on_lost: called on any thread before the jobs fail; must not raise and must not wait.
        """
        self.name = name
        self.closing = threading.Event()
        """Set by `stop` and when the unit is lost: long jobs end at the next occasion."""
        self.lost: UnitLost | None = None
        self._jobs: Rotation[Job[Unit]] = Rotation()
        self._bounded = deadline is not NEVER
        self._watch = Stopwatch(deadline)
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._opened: Future[Unit] = Future()
        self._ended = threading.Event()
        _threads.start(partial(self._work, open_unit))

    # On the unit's thread

    def _work(self, open_unit: Callable[[], Unit]) -> None:
        try:
            unit = open_unit()
        except BaseException as error:
            self.closing.set()
            self._opened.set_exception(error)
        else:
            self._opened.set_result(unit)
            while (taken := self._jobs.take()) is not None:
                self._turns(unit, *taken)
            self._close(unit)
        finally:
            self._ended.set()

    def _turns(self, unit: Unit, owner: Hashable, job: Job[Unit]) -> None:
        """Let a job work until it is done or somebody else waits."""
        failure = None
        self._watch.start()
        try:
            while not (done := job.turn(unit)) and not self._jobs.others_wait():
                self._watch.start()
        except BaseException as error:
            done, failure = True, self._explained(error)
        if job.timed and failure is None:
            self._watch.step()
        self._watch.stop()
        with self._lock:
            if self.lost is not None:
                return  # it was given up, and its job has failed
            if done:
                self._jobs.done(owner)
            else:
                self._jobs.again(owner)
        if failure is not None:
            if isinstance(failure, UnitLost):
                self.lose(failure)
            job.failed(failure)

    def _explained(self, error: BaseException) -> OnDeviceError:
        log.debug("the %s failed", self.name, exc_info=error)
        if isinstance(error, OnDeviceError):
            return error
        kind = UnitLost if self.name == "verifier" else UnitFailed
        explained = kind(f"the {self.name} failed: {type(error).__name__}: {error}")
        explained.__cause__ = error
        return explained

    def _close(self, unit: Unit) -> None:
        for job in self._jobs.drain():
            job.turns = None  # a generator ends on the thread it ran on
            job.failed(self._closed())
        try:
            unit.close()
        except Exception as error:
            log.debug("the %s did not close", self.name, exc_info=error)

    def _closed(self) -> OnDeviceError:
        return self.lost or Closed(f"the {self.name} is closed; open another engine")

    # On any thread

    def opened(self) -> Unit:
        """Wait for the unit, for its constant properties; raises what opening it raised."""
        return self._opened.result()

    @property
    def usable(self) -> bool:
        """Whether the unit is open and takes jobs."""
        return self._opened.done() and not self.closing.is_set()

    @property
    def killable(self) -> bool:
        """Whether the unit can be ended while it works."""
        opened = self._opened.done() and self._opened.exception() is None
        return opened and isinstance(self._opened.result(), Killable)

    def others_wait(self) -> bool:
        """Whether another session waits while this job works."""
        return self._jobs.others_wait()

    def step_done(self) -> None:
        """One of several steps of a job is done; the next one has a deadline of its own."""
        self._watch.step()

    def submit(self, owner: Hashable, job: Job[Unit]) -> None:
        """Run `job` after its owner's earlier ones, in turn with other owners."""
        with self._lock:
            if not self.closing.is_set():
                self._jobs.put(owner, job)
                return
        job.failed(self._closed())

    def call(self, function: Callable[[Unit], Result]) -> Result:
        """Run `function` on the worker and wait for what it returns or raises.

        Raises what opening the unit raised, or Closed, or UnitLost.
        """
        self.opened()
        future: Future[Result] = Future()

        def work(unit: Unit) -> None:
            try:
                result = function(unit)
            except UnitLost:
                raise  # `failed` tells the caller, after all others who must know
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        def failed(error: OnDeviceError) -> None:
            if not future.done():
                future.set_exception(error)

        self.submit(object(), Job(work, failed))
        while not wait([future], self.patience_s()).done:
            self.check()
        return future.result()

    def patience_s(self) -> float | None:
        """When whoever waits for this unit shall `check` it again, in seconds; None for never."""
        watched = self._bounded and not self.closing.is_set()
        return self._watch.patience_s() if watched else None

    def check(self) -> None:
        """Give the unit up if its step takes too long."""
        if self._bounded and self._watch.overdue():
            hung = f"the {self.name} took longer than {self._watch.limit_s:.3g} s for a step"
            self.lose(UnitLost(hung))

    def lose(self, error: UnitLost) -> None:
        """The unit can do no more work: every job fails with `error`."""
        with self._lock:
            if self.closing.is_set():
                return
            self.lost = error
            self.closing.set()
            jobs = self._jobs.drain()
        self._on_lost(error)
        self._end_what_runs()
        for job in jobs:
            job.failed(error)

    def stop(self) -> None:
        """Close the unit once what runs has ended; does not wait, and again is harmless."""
        with self._lock:
            if self.closing.is_set():
                return
            self.closing.set()
        self._end_what_runs()

    def _end_what_runs(self) -> None:
        if self.killable:
            self._opened.result().kill()  # type: ignore[union-attr]
        self._jobs.stop()

    def close(self) -> None:
        """`stop`, and wait for the end; not longer than CLOSE_SECONDS where there is a deadline."""
        self.stop()
        self._ended.wait(CLOSE_SECONDS if self._bounded else None)

"""Runs the coordinator on real units: one worker thread each, one inbox a session."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from ondevice.coordinator import Coordinator
from ondevice.errors import Closed, OnDeviceError, UnitFailed
from ondevice.policy import Schedule
from ondevice.records import (
    AnswerLimits,
    Command,
    Emit,
    Prefill,
    StartDraft,
    StartRun,
    StartVerify,
    Stop,
    Truncate,
    UnitName,
)
from ondevice.sampling import Law
from ondevice.units import DrafterUnit, DraftRequest, RunRequest, VerifierUnit, VerifyRequest
from ondevice.worker import UnitWorker

log = logging.getLogger(__name__)

Event = Callable[[int], list[Command]]


class Driver:
    """One session's coordinator on two workers. An answer is pumped by the thread that reads it."""

    def __init__(
        self, verifier: UnitWorker[VerifierUnit], drafter: UnitWorker[DrafterUnit] | None
    ) -> None:
        self.coordinator = Coordinator(drafter=drafter is not None)
        self._verifier = verifier
        self._drafter = drafter
        self._verifier_session = verifier.call(lambda unit: unit.open_session())
        self._drafter_session = drafter.call(lambda unit: unit.open_session()) if drafter else -1
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = self._run_over = threading.Event()
        self._closed = False
        self._lock = threading.Lock()

    def answer(
        self,
        tokens: Sequence[int],
        limits: AnswerLimits,
        schedule: Schedule,
        law: Law,
        cancelled: threading.Event,
    ) -> Generator[Emit | Stop, None, None]:
        """Everything that becomes text after `tokens`, then one Stop.

        cancelled: set it, then call `wake`, from any thread and at any moment, to end the answer.
        Closing the iterator, or an exception thrown into it, ends it too. Raises Closed.
        """
        with self._lock:
            if self._closed:
                raise Closed("this session is closed; open another one")
            self._cancelled = cancelled
        self._law, self._schedule = law, schedule
        coordinator = self.coordinator
        commands = coordinator.on_prompt(
            time.monotonic_ns(), tokens, limits, schedule, greedy=law.greedy
        )
        stopped = False
        try:
            while not stopped:
                commands += self._cancel_if_asked()
                for command in self._carry_out(commands):
                    stopped = stopped or isinstance(command, Stop)
                    yield command
                if not stopped:
                    event = self._inbox.get()
                    # First, since a prefill that was cut short says so in its event.
                    commands = self._cancel_if_asked()
                    commands += event(time.monotonic_ns())
        finally:
            if not stopped:
                cancelled.set()
                self._carry_out(self._cancel_if_asked())

    def _cancel_if_asked(self) -> list[Command]:
        if not self._cancelled.is_set():
            return []
        return self.coordinator.on_cancel(time.monotonic_ns())

    def wake(self) -> None:
        """Let the answer under way look at its `cancelled`. Harmless when there is none."""
        self._inbox.put(lambda _: [])

    def close(self) -> None:
        """Free both caches, once what runs has run out; an answer under way is cancelled.

        From any thread: the thread that reads the answer gets its Stop.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._cancelled.set()
        self.wake()
        self._verifier.submit(lambda unit: unit.close_session(self._verifier_session))
        if self._drafter is not None:
            self._drafter.submit(lambda unit: unit.close_session(self._drafter_session))

    def _carry_out(self, commands: Sequence[Command]) -> list[Emit | Stop]:
        """Give the units their commands; what is for the reader is returned.

        Units come first: a reader that takes its time shall not keep them waiting.
        """
        for command in commands:
            match command:
                case Prefill(unit="verifier") | StartVerify() | StartRun():
                    self._submit(self._verifier, self._verifier_job(command))
                case Prefill(unit="drafter") | StartDraft():
                    assert self._drafter is not None
                    self._submit(self._drafter, self._drafter_job(command))
                case Truncate(unit="verifier", length=length):
                    self._run_over.set()
                    self._truncate(self._verifier, self._verifier_session, length)
                case Truncate(unit="drafter", length=length):
                    assert self._drafter is not None
                    self._truncate(self._drafter, self._drafter_session, length)
        return [command for command in commands if isinstance(command, Emit | Stop)]

    def _verifier_job(
        self, command: Prefill | StartVerify | StartRun
    ) -> Callable[[VerifierUnit], None]:
        session, law = self._verifier_session, self._law
        self._run_over = run_over = threading.Event()
        cancelled = _any_of(self._cancelled, self._verifier.closing)
        ended = _any_of(run_over, self._cancelled, self._verifier.closing)

        def job(unit: VerifierUnit) -> None:
            match command:
                case Prefill(step=step, tokens=tokens):
                    length = unit.prefill(session, tokens, cancelled)
                    self._prefilled("verifier", step, length)
                case StartVerify(step=step, rows=rows, rule=rule):
                    request = VerifyRequest(
                        session, step, rows, rule, law, command.riders, command.want_hidden
                    )
                    (verdict,) = unit.verify([request])
                    self._post(partial(self.coordinator.on_verdict, verdict=verdict))
                case StartRun(step=step, root=root, limit=limit):
                    run = RunRequest(session, step, root.token, limit, law)
                    for verdict in unit.run(run, ended):
                        self._post(partial(self.coordinator.on_verdict, verdict=verdict))

        return self._guarded("verifier", job)

    def _drafter_job(self, command: Prefill | StartDraft) -> Callable[[DrafterUnit], None]:
        assert self._drafter is not None
        session, law, schedule = self._drafter_session, self._law, self._schedule
        cancelled = _any_of(self._cancelled, self._drafter.closing)

        def job(unit: DrafterUnit) -> None:
            match command:
                case Prefill(step=step, tokens=tokens):
                    length = unit.prefill(session, tokens, cancelled)
                    self._prefilled("drafter", step, length)
                case StartDraft(step=step, rows=rows, committed=committed, dropped=dropped):
                    request = DraftRequest(
                        session=session,
                        step=step,
                        rows=rows,
                        committed=committed,
                        dropped=dropped,
                        children=schedule.children,
                        rule=schedule.rule,
                        law=law,
                    )
                    result = unit.draft(request)
                    self._post(partial(self.coordinator.on_draft, result=result))

        return self._guarded("drafter", job)

    def _submit(self, worker: UnitWorker[Any], job: Callable[[Any], None]) -> None:
        if not worker.submit(job):
            error = Closed(f"the {worker.name} is closed; open another engine")
            self._post(partial(self.coordinator.on_failure, unit=worker.name, error=error))

    def _truncate(self, worker: UnitWorker[Any], session: int, length: int) -> None:
        worker.submit(self._guarded(worker.name, lambda unit: unit.truncate(session, length)))

    def _guarded(self, name: UnitName, job: Callable[[Any], None]) -> Callable[[Any], None]:
        """The job, with an exception made an event."""

        def guarded(unit: Any) -> None:
            try:
                job(unit)
            except Exception as error:
                log.debug("the %s failed", name, exc_info=error)
                if not isinstance(error, OnDeviceError):
                    error = UnitFailed(f"the {name} failed: {type(error).__name__}: {error}")
                self._post(partial(self.coordinator.on_failure, unit=name, error=error))

        return guarded

    def _prefilled(self, unit: UnitName, step: int, length: int) -> None:
        done = partial(self.coordinator.on_prefill, unit=unit, step=step, length=length)
        self._post(done)

    def _post(self, event: Event) -> None:
        self._inbox.put(event)


def _any_of(*events: threading.Event) -> Callable[[], bool]:
    return lambda: any(event.is_set() for event in events)

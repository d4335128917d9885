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
                case Prefill(unit=unit):
                    self._submit(unit, self._prefill_job(command))
                case StartDraft():
                    self._submit("drafter", self._draft_job(command))
                case StartVerify():
                    self._submit("verifier", self._verify_job(command))
                case StartRun():
                    self._submit("verifier", self._run_job(command))
                case Truncate(unit=unit):
                    if unit == "verifier":
                        self._run_over.set()
                    self._submit(unit, self._truncate_job(command))
        return [command for command in commands if isinstance(command, Emit | Stop)]

    def _lent(self, unit: UnitName) -> tuple[UnitWorker[Any], int]:
        """The worker of `unit`, and this session's handle there."""
        if unit == "verifier":
            return self._verifier, self._verifier_session
        assert self._drafter is not None
        return self._drafter, self._drafter_session

    def _prefill_job(self, command: Prefill) -> Callable[[Any], None]:
        worker, session = self._lent(command.unit)
        stopped = _any_of(self._cancelled, worker.closing)

        def job(unit: VerifierUnit | DrafterUnit) -> None:
            length = unit.prefill(session, command.tokens, stopped)
            on_prefill = partial(self.coordinator.on_prefill, unit=command.unit, step=command.step)
            self._post(partial(on_prefill, length=length))

        return job

    def _verify_job(self, command: StartVerify) -> Callable[[VerifierUnit], None]:
        request = VerifyRequest(
            session=self._verifier_session,
            step=command.step,
            rows=command.rows,
            rule=command.rule,
            law=self._law,
            riders=command.riders,
            want_hidden=command.want_hidden,
        )

        def job(unit: VerifierUnit) -> None:
            (verdict,) = unit.verify([request])
            self._post(partial(self.coordinator.on_verdict, verdict=verdict))

        return job

    def _run_job(self, command: StartRun) -> Callable[[VerifierUnit], None]:
        request = RunRequest(
            self._verifier_session, command.step, command.root.token, command.limit, self._law
        )
        self._run_over = threading.Event()
        stopped = _any_of(self._run_over, self._cancelled, self._verifier.closing)

        def job(unit: VerifierUnit) -> None:
            for verdict in unit.run(request, stopped):
                self._post(partial(self.coordinator.on_verdict, verdict=verdict))

        return job

    def _draft_job(self, command: StartDraft) -> Callable[[DrafterUnit], None]:
        request = DraftRequest(
            session=self._drafter_session,
            step=command.step,
            rows=command.rows,
            committed=command.committed,
            dropped=command.dropped,
            children=self._schedule.children,
            rule=self._schedule.rule,
            law=self._law,
        )

        def job(unit: DrafterUnit) -> None:
            self._post(partial(self.coordinator.on_draft, result=unit.draft(request)))

        return job

    def _truncate_job(self, command: Truncate) -> Callable[[Any], None]:
        _, session = self._lent(command.unit)
        return lambda unit: unit.truncate(session, command.length)

    def _submit(self, name: UnitName, job: Callable[[Any], None]) -> None:
        """Give the worker of `name` its job; that it fails, or comes too late, becomes an event."""

        def guarded(unit: Any) -> None:
            try:
                job(unit)
            except Exception as error:
                log.debug("the %s failed", name, exc_info=error)
                if not isinstance(error, OnDeviceError):
                    error = UnitFailed(f"the {name} failed: {type(error).__name__}: {error}")
                self._fail(name, error)

        if not self._lent(name)[0].submit(guarded):
            self._fail(name, Closed(f"the {name} is closed; open another engine"))

    def _fail(self, name: UnitName, error: OnDeviceError) -> None:
        self._post(partial(self.coordinator.on_failure, unit=name, error=error))

    def _post(self, event: Event) -> None:
        self._inbox.put(event)


def _any_of(*events: threading.Event) -> Callable[[], bool]:
    return lambda: any(event.is_set() for event in events)

"""Runs the coordinator on real units: one worker each, shared by all sessions, one inbox a session.

A command becomes a job of the unit's worker. What the job finds, or that it failed, becomes an
event in the inbox of its session, and the thread that reads the answer gives it to the coordinator.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ondevice.coordinator import Coordinator
from ondevice.draftcheck import check_result
from ondevice.drafters import Drafters
from ondevice.errors import Closed, OnDeviceError, UnitFailed, UnitLost
from ondevice.policy import Experience
from ondevice.records import (
    AnswerLimits,
    Command,
    Emit,
    EndRun,
    Prefill,
    StartDraft,
    StartRun,
    StartVerify,
    Stop,
    Truncate,
    UnitName,
)
from ondevice.sampling import Law
from ondevice.schedule import Schedule
from ondevice.units import DrafterUnit, DraftRequest, RunRequest, VerifierUnit, VerifyRequest
from ondevice.weightless import Weightless
from ondevice.worker import Job, UnitWorker

Event = Callable[[int], list[Command]]

LOOK_S = 0.005
"""How long a run waits for its coordinator at most: a reader that takes its time holds up none."""


class Watch:
    """Lets a coordinator look at every token of a run before another forward is queued.

    The forward of that token is under way meanwhile, so the look (some 0.3 ms) costs nothing.
    """

    def __init__(self) -> None:
        self.seen, self.over = threading.Event(), threading.Event()
        self.seen.set()

    def goes_on(self) -> bool:
        """Asked by the verifier's thread."""
        self.seen.wait(LOOK_S)
        return not self.over.is_set()


class Driver:
    """One session's coordinator on two workers. An answer is pumped by the thread that reads it."""

    def __init__(
        self,
        verifier: UnitWorker[VerifierUnit],
        drafters: Drafters | None,
        experience: Experience | None = None,
        weightless: Weightless | None = None,
    ) -> None:
        """Opens a session in each unit. Raises Closed, or UnitLost for the verifier.

        experience: what is known of the units, weightless: the proposers without a model; both are
        this session's own.
        """
        self._verifier, self._drafters = verifier, drafters
        self._verifier_session = verifier.call(lambda unit: unit.open_session())
        self._drafter: UnitWorker[DrafterUnit] | None = None
        self._drafter_session = -1
        self.coordinator = Coordinator(
            drafter=self._lend_drafter(), weightless=weightless, experience=experience
        )
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = self._run_over = threading.Event()
        self._watch = Watch()
        self._closed = False
        self._lock = threading.Lock()

    def _lend_drafter(self) -> bool:
        """Have a session in the engine's present drafter; whether it is one that was not had."""
        worker = self._drafters.current() if self._drafters is not None else None
        if worker is None or worker is self._drafter:
            return False
        try:
            self._drafter_session = worker.call(lambda unit: unit.open_session())
        except OnDeviceError:
            return False  # lost in this moment
        self._drafter = worker
        return True

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
            self.check_open()
            self._cancelled = cancelled
        self._law, self._schedule = law, schedule
        coordinator = self.coordinator
        if self._lend_drafter():
            coordinator.on_recovery("drafter")
        elif self._drafter is None and self._drafters is not None:
            coordinator.drafter_error = self._drafters.loss
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
                    event = self._next_event()
                    # First, since a prefill that was cut short says so in its event.
                    commands = self._cancel_if_asked()
                    commands += event(time.monotonic_ns())
        finally:
            if not stopped:
                cancelled.set()
                self._carry_out(self._cancel_if_asked())

    def check_open(self) -> None:
        """Raise Closed once `close` was called."""
        if self._closed:
            raise Closed("this session is closed; open another one")

    def _next_event(self) -> Event:
        """Wait for an event; meanwhile, see that the drafter does not hang."""
        drafter = self._drafter
        while True:
            try:
                return self._inbox.get(timeout=drafter.patience_s() if drafter else None)
            except queue.Empty:
                assert drafter is not None
                drafter.check()

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
        for name in ("verifier", "drafter"):
            worker, session = self._lent(name)
            if worker is not None:
                worker.submit(self, Job(partial(_close_session, session), _ignore))

    def _carry_out(self, commands: Sequence[Command]) -> list[Emit | Stop]:
        """Give the units their commands; what is for the reader is returned.

        Units come first: a reader that takes its time shall not keep them waiting. And of them the
        verifier: the drafter's thread, woken first, would take the interpreter from it (100 us).
        """
        for command in sorted(commands, key=_is_for_the_drafter):
            match command:
                case Prefill(unit=unit):
                    self._submit(unit, self._prefill_job(command), timed=True)
                case StartDraft():
                    self._submit("drafter", self._draft_job(command), timed=True)
                case StartVerify():
                    self._submit("verifier", self._verify_job(command))
                case StartRun():
                    self._submit("verifier", self._run_job(command))
                case EndRun():
                    self._watch.over.set()
                case Truncate(unit=unit):
                    if unit == "verifier":
                        self._run_over.set()
                    self._submit(unit, self._truncate_job(command))
        self._watch.seen.set()
        return [command for command in commands if isinstance(command, Emit | Stop)]

    def _lent(self, unit: UnitName) -> tuple[UnitWorker[Any] | None, int]:
        """The worker of `unit`, and this session's handle there."""
        if unit == "verifier":
            return self._verifier, self._verifier_session
        return self._drafter, self._drafter_session

    def _prefill_job(self, command: Prefill) -> Callable[[Any], Iterator[None]]:
        """As many turns as other sessions want in between; a chunk a turn at least.

        A unit that makes no progress so (the drafter, when its text slides: a cut would bring older
        text back) does the rest in one turn.
        """
        worker, session = self._lent(command.unit)
        assert worker is not None
        stopped = _any_of(self._cancelled, worker.closing)
        on_prefill = partial(self.coordinator.on_prefill, unit=command.unit, step=command.step)

        def job(unit: VerifierUnit | DrafterUnit) -> Iterator[None]:
            first = length = unit.prefill(session, (), stopped)
            wanted, patient = first + len(command.tokens), True
            while True:
                before, rest = length, command.tokens[length - first :]
                length = unit.prefill(session, rest, _between_chunks(worker, stopped, patient))
                if stopped() or length == wanted or not (patient or length > before):
                    break
                patient = length > before
                yield
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

    def _run_job(self, command: StartRun) -> Callable[[VerifierUnit], Iterator[None]]:
        watch = self._watch = Watch()
        request = RunRequest(
            self._verifier_session, command.step, command.root.token, command.limit, self._law
        )
        if command.watched:
            request = replace(request, goes_on=watch.goes_on)
        self._run_over = threading.Event()
        stopped = _any_of(self._run_over, self._cancelled, self._verifier.closing)

        def job(unit: VerifierUnit) -> Iterator[None]:
            for verdict in unit.run(request, stopped):
                watch.seen.clear()
                self._post(partial(self.coordinator.on_verdict, verdict=verdict))
                if verdict.more:
                    yield

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
            result = unit.draft(request)
            check_result(result, request)
            self._post(partial(self.coordinator.on_draft, result=result))

        return job

    def _truncate_job(self, command: Truncate) -> Callable[[Any], None]:
        _, session = self._lent(command.unit)

        def job(unit: VerifierUnit | DrafterUnit) -> None:
            try:
                unit.truncate(session, command.length)
            except UnitFailed as error:
                if command.unit == "drafter":
                    raise
                raise UnitLost(f"{error}; its cache is not what the session takes it for") from None

        return job

    def _submit(self, name: UnitName, work: Callable[[Any], Any], *, timed: bool = False) -> None:
        """Give the worker of `name` its job; that it fails, or comes too late, becomes an event."""
        worker, _ = self._lent(name)
        assert worker is not None
        worker.submit(self, Job(work, partial(self._fail, name), timed))

    def _fail(self, name: UnitName, error: OnDeviceError) -> None:
        if name == "drafter" and isinstance(error, UnitLost) and self._drafters is not None:
            error = self._drafters.loss or error
        self._post(partial(self.coordinator.on_failure, unit=name, error=error))

    def _post(self, event: Event) -> None:
        self._inbox.put(event)


def _is_for_the_drafter(command: Command) -> bool:
    return isinstance(command, StartDraft) or getattr(command, "unit", None) == "drafter"


def _any_of(*events: threading.Event) -> Callable[[], bool]:
    return lambda: any(event.is_set() for event in events)


def _between_chunks(
    worker: UnitWorker[Any], stopped: Callable[[], bool], patient: bool
) -> Callable[[], bool]:
    """For a prefill: stop when told to; if `patient`, when others wait too, but not at once."""
    begun = False

    def stop() -> bool:
        nonlocal begun
        if not begun:
            begun = True
            return stopped()
        worker.step_done()
        return stopped() or (patient and worker.others_wait())

    return stop


def _close_session(session: int, unit: VerifierUnit | DrafterUnit) -> None:
    unit.close_session(session)


def _ignore(_: OnDeviceError) -> None:
    """A session of a unit that is gone needs no closing."""

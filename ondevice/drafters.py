"""The engine's drafter, and the one replacement that a lost process may have."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ondevice.deadline import Deadline
from ondevice.errors import UnitLost
from ondevice.units import DrafterUnit
from ondevice.worker import UnitWorker

MAX_RESTARTS = 1
"""Per engine. A process that was lost twice would be lost again, a second of work each time."""


class Drafters:
    """Who drafts for the sessions of an engine: today's worker, tomorrow another one.

    A process that ended or was killed is started again at once, in the background, for later
    answers. A thread that hangs cannot be ended, and what it holds may be held for ever: it is not
    started again. `loss` says what happened last, and what becomes of it.
    """

    def __init__(self, open_unit: Callable[[], DrafterUnit], deadline: Deadline) -> None:
        """Opens the first one; `first` waits for it."""
        self.loss: UnitLost | None = None
        self._open_unit, self._deadline = open_unit, deadline
        self._restarts = 0
        self._closed = False
        self._lock = threading.Lock()
        self.first = self._worker = self._start()

    def current(self) -> UnitWorker[DrafterUnit] | None:
        """The drafter that a new answer may use; None while there is none."""
        worker = self._worker
        return worker if worker.usable else None

    def stop(self) -> None:
        """Close the drafter once its step has ended, a process at once; does not wait."""
        self._shut().stop()

    def close(self) -> None:
        """`stop`, and wait for the end."""
        self._shut().close()

    def _shut(self) -> UnitWorker[DrafterUnit]:
        with self._lock:
            self._closed = True
            return self._worker

    def _start(self) -> UnitWorker[DrafterUnit]:
        return UnitWorker("drafter", self._open_unit, self._deadline, self._lost)

    def _lost(self, loss: UnitLost) -> None:
        with self._lock:
            outlook = "this engine uses it no more"
            if self._worker.killable and self._restarts < MAX_RESTARTS and not self._closed:
                outlook = "it was started again for later answers"
                self._restarts += 1
                self._worker = self._start()
            self.loss = UnitLost(f"{loss}; {outlook}")

"""Units that do what a plan says: late, wrong, dead or hung at a given call."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ondevice.errors import UnitFailed, UnitLost
from ondevice.records import DraftResult, Proposal

Nonsense = Callable[[DraftResult, Proposal], DraftResult]


def _one(**changes: Any) -> Nonsense:
    """The result's first proposal, changed."""
    return lambda result, first: replace(
        result, proposals=(replace(first, **changes), *result.proposals[1:])
    )


NONSENSE: dict[str, Nonsense] = {
    "a token beyond the vocabulary": _one(token=264),
    "a negative token": _one(token=-1),
    "a token that is no number": _one(token="the"),
    "a parent nobody asked about": _one(parent=10**9),
    "log q that is not a number": _one(log_q=float("nan")),
    "positive log q": _one(log_q=0.5),
    "a gap that is not a number": _one(gap=float("nan")),
    "a negative rank": _one(rank=-1),
    "q of another vocabulary": _one(q=np.full(7, 1 / 7, np.float32)),
    "q that is not a number": _one(q=np.full(264, np.nan, np.float32)),
    "q that sums to two": _one(q=np.full(264, 2 / 264, np.float32)),
    "the same token twice": lambda result, first: replace(
        result, proposals=(first, replace(first, rank=1))
    ),
    "too many children": lambda result, first: replace(
        result, proposals=tuple(replace(first, token=i, rank=i) for i in range(40))
    ),
    "an answer to another step": lambda result, first: replace(result, step=result.step + 1),
    "no result": lambda result, first: None,  # type: ignore[arg-type, return-value]
}


@dataclass
class Fault:
    """What happens at the call number `at` of `method`, counted from 0. kind: see `Faulty`."""

    kind: str
    method: str
    at: int
    release: threading.Event = field(default_factory=threading.Event)
    """Ends a hang."""
    met: threading.Event = field(default_factory=threading.Event)


class Faulty:
    """A unit that delegates to a real one, with delays, until the fault of its plan is due.

    Kinds: "raise" (not explained), "fail" (UnitFailed), "lose" (UnitLost), "hang", or a NONSENSE.
    """

    def __init__(self, unit: Any, fault: Fault | None = None, longest_delay_s: float = 0.0) -> None:
        self._unit, self._fault, self._delay_s = unit, fault, longest_delay_s
        self._rng = random.Random(0 if fault is None else fault.at)
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._unit, name)
        if not callable(value) or name in ("close", "run"):
            return value
        return lambda *args: self._called(name, value, args)

    def _pause(self) -> None:
        if self._delay_s:
            time.sleep(self._rng.uniform(0, self._delay_s))

    def _called(self, name: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._pause()
        if not self._due(name):
            return method(*args)
        fault = self._fault
        assert fault is not None
        if fault.kind not in NONSENSE:
            self._break(fault)
        result = method(*args)
        if not result.proposals:
            return result
        fault.met.set()
        return NONSENSE[fault.kind](result, result.proposals[0])

    def run(self, request: Any, stopped: Callable[[], bool]) -> Any:
        """Plain decoding; the fault may come at any token."""
        for verdict in self._unit.run(request, stopped):
            self._pause()
            if self._due("run"):
                assert self._fault is not None
                self._break(self._fault)
            yield verdict

    def _due(self, name: str) -> bool:
        if self._fault is None or name != self._fault.method:
            return False
        self._calls += 1
        return self._calls == self._fault.at + 1

    def _break(self, fault: Fault) -> None:
        fault.met.set()
        if fault.kind == "raise":
            raise OSError("planned")
        if fault.kind == "fail":
            raise UnitFailed("planned")
        if fault.kind == "lose":
            raise UnitLost("planned")
        assert fault.kind == "hang"
        assert fault.release.wait(60)

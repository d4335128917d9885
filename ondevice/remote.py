"""A drafter in a process of its own: any DrafterUnit, opened there by a function that pickles.

Why a process, and not a thread: it can be ended when it hangs, and takes its memory with it; and
the verifier is faster beside it. SmolLM2 and its emulated drafter at 8 rows a step, on two x86
cores, interleaved, two runs: a forward of 1 row took 1.06 and 1.12 times as long beside a drafting
process, 1.21 and 1.28 times beside a drafting thread, which competes for the interpreter's lock;
one of 8 rows 1.07 and 1.08, against 1.11 and 1.18. A drafter step took 55 ms in either. The process
adds 0.4 to 0.5 ms to it (0.03 an empty round trip, 0.06 packing and pickling, the rest cold
caches), 0.5 s to the drafter's opening, which runs beside the verifier's, and 75 MiB to its 390.

Times need no translation between the two sides, since the monotonic clock is the machine's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ondevice.childprocess import ChildProcess, Ended, Parent, portable
from ondevice.errors import OnDeviceError, UnitLost
from ondevice.records import AcceptanceRule, DraftResult, DraftRow, NodeToken, Proposal
from ondevice.sampling import Law, SamplingParams
from ondevice.units import DrafterUnit, DraftRequest, Sleepy, UnitMemory

_PICKLE = pickle.HIGHEST_PROTOCOL


class _LawSpec(NamedTuple):
    """A Law as it travels. constraint: pickled, None when there is none or it does not pickle."""

    params: SamplingParams
    vocab_size: int
    answer_start: int
    constraint: bytes | None

    @classmethod
    def of(cls, law: Law) -> _LawSpec:
        constraint = None
        if law.params.constraint is not None:
            try:
                constraint = pickle.dumps(law.params.constraint, _PICKLE)
            except Exception:
                constraint = None  # pickling runs the user's code; whatever it raises
        params = replace(law.params, constraint=None, logit_bias=dict(law.params.logit_bias))
        return cls(params, law.vocab_size, law.answer_start, constraint)

    def law(self) -> Law:
        constraint = None
        if self.constraint is not None:
            try:
                constraint = pickle.loads(self.constraint)
            except Exception:
                constraint = None  # a class of the user's __main__, say
        params = replace(self.params, constraint=constraint)
        return Law(params, self.vocab_size, self.answer_start)


Pairs = list[tuple[int, int]]


class _WireRequest(NamedTuple):
    """A DraftRequest in plain tuples: pickled and read back in a third of the dataclasses' time.

    law: only when it is not the one of the session's last request.
    """

    session: int
    step: int
    rows: list[tuple[int, Pairs]]
    committed: Pairs
    dropped: tuple[int, ...]
    children: int
    rule: AcceptanceRule
    law: _LawSpec | None

    @classmethod
    def of(cls, request: DraftRequest, law: _LawSpec | None) -> _WireRequest:
        return cls(
            request.session,
            request.step,
            [(row.node, _pairs(row.path)) for row in request.rows],
            _pairs(request.committed),
            request.dropped,
            request.children,
            request.rule,
            law,
        )

    def request(self, law: Law) -> DraftRequest:
        return DraftRequest(
            session=self.session,
            step=self.step,
            rows=tuple(DraftRow(node, _entries(path)) for node, path in self.rows),
            committed=_entries(self.committed),
            dropped=self.dropped,
            children=self.children,
            rule=self.rule,
            law=law,
        )


def _pairs(entries: Sequence[NodeToken]) -> Pairs:
    return [(entry.node, entry.token) for entry in entries]


def _entries(pairs: Pairs) -> tuple[NodeToken, ...]:
    return tuple(NodeToken(node, token) for node, token in pairs)


def _wire_result(result: DraftResult) -> tuple[Any, ...]:
    proposals = [
        (each.parent, each.token, each.log_q, each.rank, each.gap, each.proposer, each.q)
        for each in result.proposals
    ]
    times = result.start_ns, result.end_ns
    counts = result.catch_up_steps, result.function_rows, result.window
    return result.step, proposals, *times, *counts


def _result(wire: tuple[Any, ...]) -> DraftResult:
    step, proposals, *rest = wire
    return DraftResult(step, tuple(Proposal(*each) for each in proposals), *rest)


class ProcessDrafter:
    """See `ondevice.units.DrafterUnit`; one caller at a time, but `kill` may come from any thread.

    What a constraint needs to travel is a pickle that the child can load. One that has none is left
    out there: the drafter then proposes what the verifier will refuse, and the text is the same.
    The noise of a sampled position is made in both processes (0.2 ms for 49,152 tokens).
    """

    def __init__(self, open_unit: Callable[..., DrafterUnit], *args: object) -> None:
        """Starts the process and waits until `open_unit(*args)` has returned there.

        Both must pickle: a function of a module, not of a script. Raises what it raised; UnitLost
        when the process ended, with what it said on stderr.
        """
        self._laws: dict[int, Law] = {}
        self._child = ChildProcess(__name__)
        try:
            self._send((open_unit, args))
            self.name, self.runtime_name = self._answer()
        except BaseException:
            self.close()
            raise

    def open_session(self) -> int:
        """A new, empty cache; returns its handle."""
        handle: int = self._call("open_session")
        return handle

    def close_session(self, session: int) -> None:
        """Free the cache."""
        self._laws.pop(session, None)
        self._call("close_session", session)

    def prefill(self, session: int, tokens: Sequence[int], stopped: Callable[[], bool]) -> int:
        """As in the protocol; `stopped` is asked here, a round trip a chunk."""
        length: int = self._call("prefill", session, list(tokens), stopped=stopped)
        return length

    def draft(self, request: DraftRequest) -> DraftResult:
        """As in the protocol. Raises UnitLost when the process has ended."""
        spec = None
        if self._laws.get(request.session) is not request.law:
            spec = _LawSpec.of(request.law)
        answer = self._call("draft", _WireRequest.of(request, spec))
        self._laws[request.session] = request.law
        return _result(answer)

    def truncate(self, session: int, length: int) -> None:
        """Forget all nodes and every committed token from `length` on."""
        self._call("truncate", session, length)

    def memory(self) -> UnitMemory:
        """As in `SaysMemory`: of the other process."""
        held: UnitMemory = self._call("memory")
        return held

    def close(self) -> None:
        """End the process at once; it has nothing to save."""
        self._child.close()

    def kill(self) -> None:
        """End the process, whatever it does; a call under way raises UnitLost."""
        self._child.kill()

    @property
    def process_id(self) -> int:
        """The operating system's number of the process."""
        return self._child.process_id

    def _call(self, method: str, *args: object, stopped: Callable[[], bool] = lambda: False) -> Any:
        self._send((method, *args))
        return self._answer(stopped)

    def _send(self, message: object) -> None:
        try:
            self._child.send(message)
        except Ended as error:
            raise _lost(error) from error

    def _answer(self, stopped: Callable[[], bool] = lambda: False) -> Any:
        while True:
            try:
                kind, value = self._child.receive()
            except Ended as error:
                raise _lost(error) from error
            if kind == "error":
                raise value
            if kind == "done":
                return value
            self._send(stopped())


def _lost(error: Ended) -> UnitLost:
    return UnitLost(f"the drafter's process {error}")


# The child

WAKE_SECONDS = 0.9
"""How long a unit that falls asleep when it has nothing to do is left alone: the Neural Engine
wants a second or less between calls (a call after 5 s took 260 ms more)."""
AWAKE_SECONDS = 60.0
"""How long after the last request it is kept awake."""


def serve(handle: int) -> None:
    """The child's main program: open the unit, then do what is asked, until the pipe closes."""
    parent = Parent(handle)
    open_unit, args = parent.receive()
    try:
        unit = open_unit(*args)
    except Exception as error:
        parent.send(("error", portable(error, "the drafter")))
        return
    parent.send(("done", (unit.name, unit.runtime_name)))
    server = _Server(unit, parent)
    while True:
        _wait_awake(unit, parent)
        try:
            message = parent.receive()
        except EOFError:
            return
        try:
            answer = "done", server.do(*message)
        except Exception as error:
            answer = "error", portable(error, "the drafter")
        parent.send(answer)


def _wait_awake(unit: DrafterUnit, parent: Parent) -> None:
    """Wait for the parent; a unit that sleeps is woken meanwhile, on its own thread."""
    if not isinstance(unit, Sleepy):
        return
    for _ in range(int(AWAKE_SECONDS / WAKE_SECONDS)):
        if parent.asks(WAKE_SECONDS):
            return
        with suppress(OnDeviceError):  # who asks next will hear of it
            unit.stay_awake()


class _Server:
    """The unit, and what the parent need not say twice."""

    def __init__(self, unit: DrafterUnit, parent: Parent) -> None:
        self._unit, self._parent = unit, parent
        self._laws: dict[int, Law] = {}

    def do(self, method: str, *args: Any) -> Any:
        match method:
            case "draft":
                return self._draft(*args)
            case "prefill":
                session, tokens = args
                return self._unit.prefill(session, tokens, self._stopped)
            case "close_session":
                self._laws.pop(args[0], None)
        return getattr(self._unit, method)(*args)

    def _draft(self, wire: _WireRequest) -> tuple[Any, ...]:
        if wire.law is not None:
            self._laws[wire.session] = wire.law.law()
        return _wire_result(self._unit.draft(wire.request(self._laws[wire.session])))

    def _stopped(self) -> bool:
        self._parent.send(("stopped?", None))
        answer: bool = self._parent.receive()
        return answer

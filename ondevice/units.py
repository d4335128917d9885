"""What the driver expects of the two units, and what it hands them.

A unit is owned by one worker thread: every method is called there, one at a time. Units know
nothing of the coordinator; they keep one cache per session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ondevice.records import (
    AcceptanceRule,
    DraftResult,
    DraftRow,
    NodeToken,
    Verdict,
    VerifyRow,
)
from ondevice.sampling import Law

TreeShape = Literal["tree", "chain", "plain"]


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One session's rows for a verifier forward.

    rows: row 0 is the root, parents come before their children. riders: rows that ride along and
    never enter the cache (lookahead): parents index rows, then riders; they see the prefix and
    their own ancestors; their first choice, without noise, comes back. want_hidden: return the
    final norm's output of the walk's last row.
    """

    session: int
    step: int
    rows: tuple[VerifyRow, ...]
    rule: AcceptanceRule
    law: Law
    riders: tuple[VerifyRow, ...] = ()
    want_hidden: bool = False


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Plain decoding from `root`, whose row is not in the cache, for at most `limit` tokens.

    goes_on: asked before another forward is queued; when it says no, the one under way is the last.
    """

    session: int
    step: int
    root: int
    limit: int
    law: Law
    goes_on: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One drafter step. children: how many proposals per row; 1 under `rejection`.

    committed, dropped: see `records.StartDraft`.
    """

    session: int
    step: int
    rows: tuple[DraftRow, ...]
    committed: tuple[NodeToken, ...]
    dropped: tuple[int, ...]
    children: int
    rule: AcceptanceRule
    law: Law


class VerifierUnit(Protocol):
    """The model whose text it is.

    shape: which rows a forward may hold (a tree, a chain, or the root alone); shape_reason says
    why it is not a tree. context: in tokens. A method that raises UnitFailed has refused one
    request: the session's cache holds at least what it held before, and at most that and what the
    request appended to it in order; all sessions can go on. Whatever else it raises ends the unit.
    """

    vocab_size: int
    context: int
    shape: TreeShape
    shape_reason: str

    def open_session(self) -> int:
        """A new, empty cache; returns its handle."""

    def close_session(self, session: int) -> None:
        """Free the cache."""

    def prefill(self, session: int, tokens: Sequence[int], stopped: Callable[[], bool]) -> int:
        """Append `tokens` to the cache, chunk by chunk until `stopped()`; returns its length.

        `stopped` is asked before every chunk. What was left out may be given to a later call.
        """

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """Score, walk and commit: the cache gains the root and the accepted path, no other row."""

    def run(self, request: RunRequest, stopped: Callable[[], bool]) -> Iterator[Verdict]:
        """Plain decoding, one verdict a token, forward t + 1 submitted before token t is read.

        Ends after `limit` tokens, or when `goes_on` says no (the last verdict has `more` False), or
        when `stopped()`: then a verdict without tokens closes the run, and the caller truncates the
        cache. Closing the iterator early is allowed.
        """

    def truncate(self, session: int, length: int) -> None:
        """Keep the first `length` tokens of the cache; it must hold that many."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class Killable(Protocol):
    """A unit that can be ended while it works, because it lives in a process of its own."""

    def kill(self) -> None:
        """End it, from any thread; the call under way raises UnitLost. Again is harmless."""


@runtime_checkable
class Sleepy(Protocol):
    """A unit on hardware that powers down when idle, and takes long to wake."""

    def stay_awake(self) -> None:
        """Use the hardware a little; called between requests, by the unit's own thread."""


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """What a unit holds, in bytes.

    weights: of the model. caches: of all its sessions, as allocated. peak: the most that it held at
    once since it was last asked, or, where its whole process is what is counted, since it began.
    """

    weights_bytes: int
    caches_bytes: int
    peak_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """What the peak had beside weights and caches: activations, buffers, program code."""
        return max(0, self.peak_bytes - self.weights_bytes - self.caches_bytes)


@runtime_checkable
class SaysMemory(Protocol):
    """A unit that knows what it holds."""

    def memory(self) -> UnitMemory:
        """What it holds now, and the most since the last call."""


class DrafterUnit(Protocol):
    """A small model that proposes. It may be wrong, late or dead; the text stays the same.

    A step has a deadline, so whatever is slow once (compiling) belongs into opening. UnitLost says
    that the unit is gone; after any other error the session that met it goes on without, others
    keep it.

    name: the proposer's, in proposals. runtime_name: what runs it, for people to read.
    """

    name: str

    @property
    def runtime_name(self) -> str:
        """Such as "emulator-fp32"."""

    def open_session(self) -> int:
        """A new, empty cache; returns its handle."""

    def close_session(self, session: int) -> None:
        """Free the cache."""

    def prefill(self, session: int, tokens: Sequence[int], stopped: Callable[[], bool]) -> int:
        """Append committed `tokens`; returns how many committed tokens the session now has.

        `stopped` is asked before every step. What was left out may be given to a later call.
        """

    def draft(self, request: DraftRequest) -> DraftResult:
        """Expand the rows: the likeliest children of each, ranked."""

    def truncate(self, session: int, length: int) -> None:
        """Forget all nodes and every committed token from `length` on."""

    def close(self) -> None:
        """Free everything."""

"""Proposers that need no model of their own: what they give, and how their guesses are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ondevice.records import StartVerify, Verdict, VerifyRow, Window

Kind = tuple[int, ...]
"""What a proposer knows of a guess that tells how likely it is; guesses of a kind are alike."""


class Guess(NamedTuple):
    """A token that may follow the root, or the guess number `parent` of the same list (-1: root).

    kind: of the chance that it is right once its parent is, if no earlier sibling is. proposer:
    whose it is called, where that is not the proposer's own name.
    """

    parent: int
    token: int
    kind: Kind
    proposer: str = ""


class HostProposer(Protocol):
    """Guesses on the host at every commit, in bounded time: it is on the critical path.

    name: the proposer's, in nodes and statistics.
    """

    name: str

    def prior(self, kind: Kind) -> float:
        """The chance of a kind before any guess of it was judged."""

    def propose(self, committed: Sequence[int]) -> Sequence[Guess]:
        """What may follow `committed`, parents first; its last token is the root.

        Called with a text that has grown, or, at a new turn, that shares a prefix with the last.
        """


class VerifierProposer(HostProposer, Protocol):
    """Learns from the verifier's own outputs, and may let rows of its own ride in the forward."""

    def riders(self, window: Window, committed: Sequence[int]) -> Sequence[VerifyRow]:
        """Rows to ride along; a parent is -1 for the root's row, or the index of another rider."""

    def observe(self, command: StartVerify, verdict: Verdict) -> None:
        """What the forward said; called before its tokens are committed.

        The first of `verdict.rider_tokens` are those of this proposer's riders, if it sent any.
        """


LEAST_CHANCE = 1e-6
"""Of a guess that is to be in the tree whatever is thought of it."""
NEW_KIND_TRUST = 6.0
"""The prior counts as this many judged guesses."""
MEMORY = 300.0
"""Guesses of a kind until an old one weighs 1/e: a conversation changes its subject."""


class HitRates:
    """How often guesses of each kind were right, old ones fading; learned from answer to answer."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, tuple[float, float]] = {}

    def chance(self, kind: Kind, prior: float) -> float:
        """The chance of the next one of this kind."""
        right, judged = self._kinds.get(kind, (0.0, 0.0))
        return (right + NEW_KIND_TRUST * prior) / (judged + NEW_KIND_TRUST)

    def learn(self, kind: Kind, hit: bool) -> None:
        """One was judged."""
        right, judged = self._kinds.get(kind, (0.0, 0.0))
        keep = 1 - 1 / MEMORY
        self._kinds[kind] = right * keep + hit, judged * keep + 1


class Chances:
    """What is thought of one proposer's guesses: its prior, and what was learned since."""

    def __init__(self, rates: HitRates, prior: Callable[[Kind], float]) -> None:
        """rates: learned on."""
        self._rates, self._prior = rates, prior
        self._known: dict[Kind, float] = {}

    def __call__(self, kind: Kind) -> float:
        """The chance of the next guess of this kind; at least LEAST_CHANCE."""
        known = self._known.get(kind)
        if known is None:
            chance = self._rates.chance(kind, self._prior(kind))
            known = self._known[kind] = max(LEAST_CHANCE, chance)
        return known

    def learn(self, kind: Kind, hit: bool) -> None:
        """One was judged."""
        self._rates.learn(kind, hit)
        self._known.pop(kind, None)

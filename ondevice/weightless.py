"""The proposers of one session that need no model of their own, and what becomes of their guesses.

Prompt lookup, the n-gram pool of lookahead and the verifier's own last outputs (Jacobi) put their
guesses into the one tree at every commit. Each guess has a chance by how often those of its kind
were right, which is learned from the text as it grows, however it came about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ondevice.jacobi import Jacobi
from ondevice.lookahead import Lookahead
from ondevice.lookup import Lookup, SuffixIndex
from ondevice.proposers import LEAST_CHANCE, Chances, Guess, HitRates, HostProposer
from ondevice.records import StartVerify, Verdict, VerifyRow, Window
from ondevice.tree import Node, SpeculationTree

ProposerName = Literal["lookup", "lookahead", "jacobi"]
ALL: tuple[ProposerName, ...] = ("lookup", "lookahead", "jacobi")


@dataclass(frozen=True, slots=True)
class Use:
    """Which proposers an answer uses, and how.

    names: the first to name a node owns it. chain: at most one child a node. least_reach: guesses
    less likely than this are not put into the tree.
    """

    names: tuple[ProposerName, ...] = ()
    chain: bool = False
    least_reach: float = 0.0


class Weightless:
    """All of them; one a session."""

    def __init__(self, ends: Collection[int] = (), corpus: SuffixIndex | None = None) -> None:
        """ends: tokens that end an answer. corpus: text to look into beside the session's own."""
        self._lookup, self._lookahead, self._jacobi = Lookup(corpus), Lookahead(ends), Jacobi()
        self._proposers: dict[ProposerName, HostProposer] = {
            "lookup": self._lookup,
            "lookahead": self._lookahead,
            "jacobi": self._jacobi,
        }
        self._use = Use()
        self._chances: dict[ProposerName, Chances] = {}
        self._guessed: dict[ProposerName, Sequence[Guess]] = {}
        self._guessed_at = 0

    def begin(self, use: Use, rates: defaultdict[str, HitRates]) -> None:
        """A new answer. rates: what is known of the proposers, by name; learned on."""
        self._use = use
        self._chances = {
            name: Chances(rates[name], self._proposers[name].prior) for name in use.names
        }
        if "lookup" in use.names:
            self._lookup.chance = self._chances["lookup"]
        self._guessed.clear()

    @property
    def active(self) -> bool:
        """Whether this answer uses any."""
        return bool(self._use.names)

    def propose(self, tree: SpeculationTree, committed: Sequence[int], block: int = 0) -> None:
        """Add guesses below the root of `tree`, which is the last token of `committed`.

        block: tokens that Jacobi's guess shall have.
        """
        self._judge(committed)
        self._jacobi.block = block
        for name in self._use.names:
            guesses = self._proposers[name].propose(committed)
            self._guessed[name] = guesses
            self._add(tree, name, guesses)
        tree.settle()
        self._guessed_at = len(committed)

    def riders(self, window: Window | None, committed: Sequence[int]) -> Sequence[VerifyRow]:
        """Rows that shall ride in the next forward; see `VerifierProposer.riders`."""
        return [] if window is None else self._lookahead.riders(window, committed)

    def observe(self, command: StartVerify, verdict: Verdict) -> None:
        """A forward is done; called before its tokens are committed."""
        if "lookahead" in self._use.names:
            self._lookahead.observe(command, verdict)
        if "jacobi" in self._use.names:
            self._jacobi.observe(command, verdict)

    def _add(self, tree: SpeculationTree, name: ProposerName, guesses: Sequence[Guess]) -> None:
        """On the critical path: some 20 nodes a round, a microsecond or two each."""
        chances, use = self._chances[name], self._use
        root, nodes = tree[tree.root], list[Node | None]()
        for parent, token, kind, whose in guesses:
            above = root if parent < 0 else nodes[parent]
            nodes.append(None)
            if above is None:
                continue
            chance = chances(kind)
            children = above.children
            known = children.get(token)
            if children and (known is None or len(children) > 1):
                if known is None and use.chain:
                    continue
                others = sum([tree[node].chance for node in children.values() if node != known])
                chance = max(LEAST_CHANCE, chance * (1 - others))
            if known is not None or above.reach * chance >= use.least_reach:
                nodes[-1] = tree.put(above, token, chance, whose or name)

    def _judge(self, committed: Sequence[int]) -> None:
        """Learn which of the last guesses are now text."""
        for name, guesses in self._guessed.items():
            chances, parent, place = self._chances[name], -1, self._guessed_at
            for at, guess in enumerate(guesses):  # parents come first
                if place == len(committed):
                    break
                if guess.parent == parent:
                    hit = guess.token == committed[place]
                    chances.learn(guess.kind, hit)
                    if hit:  # a later sibling's chance is for when no earlier one is right
                        parent, place = at, place + 1
        self._guessed.clear()

"""The proposers of one session that need no model of their own, and what becomes of their guesses.

Prompt lookup, the n-gram pool of lookahead and the verifier's own last outputs (Jacobi) put their
guesses into the one tree at every commit. Each guess has a chance by how often those of its kind
were right, which is learned from the text as it grows, however it came about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Literal

from ondevice.jacobi import Jacobi
from ondevice.lookahead import Lookahead
from ondevice.lookup import Lookup, SuffixIndex
from ondevice.proposers import Guess, HitRates, HostProposer
from ondevice.records import Proposal, StartVerify, Verdict, VerifyRow, Window
from ondevice.tree import NOWHERE, SpeculationTree

ProposerName = Literal["lookup", "lookahead", "jacobi"]
ALL: tuple[ProposerName, ...] = ("lookup", "lookahead", "jacobi")
LEAST_CHANCE = 1e-6
"""Of a guess that is to be in the tree whatever is thought of it."""


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
        self._lookahead, self._jacobi = Lookahead(ends), Jacobi()
        self._proposers: dict[ProposerName, HostProposer] = {
            "lookup": Lookup(corpus),
            "lookahead": self._lookahead,
            "jacobi": self._jacobi,
        }
        self._use = Use()
        self._rates: dict[str, HitRates] = {}
        self._guessed: dict[ProposerName, Sequence[Guess]] = {}
        self._guessed_at = 0

    def begin(self, use: Use, rates: defaultdict[str, HitRates]) -> None:
        """A new answer. rates: what is known of the proposers, by name; learned on."""
        self._use = use
        self._rates = {name: rates[name] for name in use.names}
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
        prior, rates = self._proposers[name].prior, self._rates[name]
        use, nodes = self._use, [NOWHERE] * len(guesses)
        for at, guess in enumerate(guesses):
            parent = tree.root if guess.parent < 0 else nodes[guess.parent]
            if parent not in tree:
                continue
            above = tree[parent]
            known = above.children.get(guess.token)
            if known is not None:
                nodes[at] = known
            elif use.chain and above.children:
                continue
            others = sum(tree[node].chance for node in above.children.values() if node != known)
            chance = max(LEAST_CHANCE, min(rates.chance(guess.kind, prior(guess.kind)), 1 - others))
            if known is None and above.reach * chance < use.least_reach:
                continue
            proposal = Proposal(parent, guess.token, log(chance), 0, inf, guess.proposer or name)
            nodes[at] = tree.add(proposal, chance) or NOWHERE

    def _judge(self, committed: Sequence[int]) -> None:
        """Learn which of the last guesses are now text."""
        for name, guesses in self._guessed.items():
            rates, below = self._rates[name], defaultdict[int, list[int]](list)
            for at, guess in enumerate(guesses):
                below[guess.parent].append(at)
            parent = -1
            for token in committed[self._guessed_at :]:
                taken = None
                for at in below[parent]:
                    hit = guesses[at].token == token
                    rates.learn(guesses[at].kind, hit)
                    if hit:
                        taken = at
                        break  # a later sibling's chance is for when no earlier one is right
                if taken is None:
                    break
                parent = taken
        self._guessed.clear()

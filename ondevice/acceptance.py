"""How likely the verifier takes a proposed child: the drafter's claim, corrected by what happened.

A drafter states its own confidence. Whether it is to be believed is learned online: claims of a
rank are counted in bins, and each bin's claims are scaled by what was accepted over what was
claimed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from ondevice.records import Outcome, Proposal

ClaimKind = Literal["greedy", "noisy", "sampled"]
"""What a claim is made of: at temperature 0 the drafter's probability; under `coupled` with noise
the lead of the perturbed score; under `rejection` nothing that depends on the sampled token."""

RANKS = 4
"""Children of a rank this high or higher are counted together."""
MOST_CHILDREN = 16
"""Of one node."""
BIN_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Claims between two edges are corrected together."""
TRUST = 8.0
"""Claims as stated count as this many observations that agreed with them."""
LEAST_CLAIMED = 0.5
"""Added to accepted and to claimed: one hit among unlikely claims says little."""
MEMORY = 400.0
"""Observations until an old one weighs 1/e: a conversation changes its subject."""
SIBLING_SHARE = 0.45
"""Each later child takes this part of the probability left (the model of DESIGN section 1)."""
FIRST_CHOICE = 0.6
"""Assumed chance of a drafter's first choice, until TRUST observations have been made."""


def claims(children: Sequence[Proposal], kind: ClaimKind) -> list[float]:
    """What the drafter claims for each of one node's children, given in rank order.

    With noise the perturbed order decides, so the first child's chance is a logistic of its lead
    (the difference of two Gumbels is logistic), and every later child takes SIBLING_SHARE of the
    rest. Under rejection all children claim the same.
    """
    if kind == "greedy":
        return [math.exp(min(child.log_q, 0.0)) for child in children]
    if kind == "sampled":
        return [FIRST_CHOICE] * len(children)
    result: list[float] = []
    left = 1.0
    for child in children:
        share = 1 / (1 + math.exp(-min(child.gap, 30.0))) if child.rank == 0 else SIBLING_SHARE
        result.append(left * share)
        left -= result[-1]
    return result


class _Bin:
    """Claims of one rank and size: how many were made, claimed and accepted, old ones fading."""

    __slots__ = ("accepted", "claimed")

    def __init__(self) -> None:
        self.claimed = self.accepted = 0.0

    def corrected(self, claim: float) -> float:
        prior = TRUST * claim + LEAST_CLAIMED
        return claim * (self.accepted + prior) / (self.claimed + prior)

    def learn(self, claim: float, accepted: bool) -> None:
        fade = 1 - 1 / MEMORY
        self.claimed = self.claimed * fade + claim
        self.accepted = self.accepted * fade + accepted


class Acceptance:
    """Learns from outcomes; one per session and kind of claim."""

    def __init__(self) -> None:
        self._bins = [[_Bin() for _ in range(len(BIN_EDGES) + 1)] for _ in range(RANKS)]
        self._bins_by_rank = [*self._bins, *self._bins[-1:] * (MOST_CHILDREN - RANKS)]
        share = FIRST_CHOICE
        self._by_rank: list[float] = []
        for _ in range(RANKS):
            self._by_rank.append(share)
            share = (1 - sum(self._by_rank)) * SIBLING_SHARE
        self._seen = 0.0

    @property
    def seen(self) -> float:
        """Outcomes learned from, old ones fading."""
        return self._seen

    @property
    def first_choice(self) -> float:
        """How often the drafter's first choice is the verifier's token."""
        return self._by_rank[0]

    def expected(self, children: int) -> list[float]:
        """Chances of the children of a node that has none yet, by rank; at most 1 together.

        At most RANKS of them.
        """
        left, result = 1.0, []
        for share in self._by_rank[:children]:
            result.append(min(share, left))
            left -= result[-1]
        return result

    def chances(self, claimed: Sequence[float]) -> list[float]:
        """The claims of one node's children in rank order, corrected; at most 1 together."""
        corrected = [
            bins[bisect_right(BIN_EDGES, claim)].corrected(claim)
            for bins, claim in zip(self._bins_by_rank, claimed, strict=False)
        ]
        total = sum(corrected)
        return [chance / total for chance in corrected] if total > 1 else corrected

    def learn(self, outcome: Outcome) -> None:
        """Take in what became of one node's children."""
        if not outcome.claims:
            return
        self._seen = self._seen * (1 - 1 / MEMORY) + 1
        weight = 1 / min(self._seen + TRUST, MEMORY)
        for rank, claim in enumerate(outcome.claims):
            hit = rank == outcome.taken
            self._bins[min(rank, RANKS - 1)][bisect_right(BIN_EDGES, claim)].learn(claim, hit)
            if rank < RANKS:
                self._by_rank[rank] += weight * (hit - self._by_rank[rank])

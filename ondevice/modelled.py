"""Modelled text and units for virtual time: who would say what.

The model is that of DESIGN section 1. At every position the verifier's token is fixed. A drafter
has a confidence c ~ Beta(1.6 a, 1.6 (1 - a)) there; its children 1 to 4 are right with probability
c, then 0.45 of the rest each, and it says so. A token is the rank of the child that holds it, or
NO_CHILD. Everything is drawn from (seed, position), so no schedule changes what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ondevice.acceptance import SIBLING_SHARE
from ondevice.records import (
    DraftResult,
    Outcome,
    Proposal,
    StartDraft,
    StartVerify,
    Verdict,
)
from ondevice.sampling import walk_coupled

CHILDREN = 4
"""Children that the model knows."""
CONCENTRATION = 1.6
"""Of the Beta distribution of confidences (DESIGN section 1)."""
NO_CHILD = 1_000
"""The verifier's token where no child holds it; the drafter never proposes it."""
DRAWN_AT_ONCE = 4096
"""Positions; drawing one at a time would take most of the simulation."""

Claims = tuple[float, ...]


class Text(Protocol):
    """What the verifier says and what the drafter thinks of it."""

    def claims(self, position: int) -> Claims:
        """The drafter's claimed chances of its children at `position` of the text, by rank."""

    def token(self, position: int) -> int:
        """The verifier's token at `position`: the rank of the right child, or NO_CHILD."""

    def stray_claims(self, node: int) -> Claims:
        """Claims below a node that is not on the text."""


class BetaText:
    """The model above. a: probability, in (0, 1), that the first child is right."""

    def __init__(self, a: float, seed: int = 0) -> None:
        self.a, self._seed = a, seed
        self._drawn: dict[tuple[int, int], tuple[list[Claims], list[int]]] = {}

    def claims(self, position: int) -> Claims:
        """See `Text`."""
        return self._at(0, position // DRAWN_AT_ONCE)[0][position % DRAWN_AT_ONCE]

    def token(self, position: int) -> int:
        """See `Text`."""
        return self._at(0, position // DRAWN_AT_ONCE)[1][position % DRAWN_AT_ONCE]

    def stray_claims(self, node: int) -> Claims:
        """See `Text`."""
        return self._at(1, node // DRAWN_AT_ONCE)[0][node % DRAWN_AT_ONCE]

    def _at(self, stream: int, block: int) -> tuple[list[Claims], list[int]]:
        found = self._drawn.get((stream, block))
        if found is None:
            if len(self._drawn) > 8:  # a text is read forwards; both streams fit twice
                self._drawn.clear()
            found = self._drawn[stream, block] = self._draw(stream, block)
        return found

    def _draw(self, stream: int, block: int) -> tuple[list[Claims], list[int]]:
        rng = np.random.default_rng([self._seed, stream, block])
        first = rng.beta(CONCENTRATION * self.a, CONCENTRATION * (1 - self.a), DRAWN_AT_ONCE)
        shares, left = [first], 1 - first
        for _ in range(CHILDREN - 1):
            shares.append(left * SIBLING_SHARE)
            left = left - shares[-1]
        table = np.stack(shares, axis=1)
        right = (rng.random((DRAWN_AT_ONCE, 1)) >= np.cumsum(table, axis=1)).sum(axis=1)
        tokens = np.where(right < CHILDREN, right, NO_CHILD)
        return [tuple(row) for row in table.tolist()], tokens.tolist()


class RecordedText:
    """What a real run recorded, over and over.

    A position that the drafter had not expanded borrows the claims of another one, and then what
    was right there is drawn from them.
    """

    def __init__(self, outcomes: Sequence[Outcome], seed: int = 0) -> None:
        """outcomes: of consecutive committed tokens, at least one of them with claims."""
        known = [outcome for outcome in outcomes if outcome.claims]
        rng = np.random.default_rng(seed)
        self._strays = known
        self._outcomes = [
            outcome if outcome.claims else known[int(rng.integers(len(known)))]
            for outcome in outcomes
        ]

    def claims(self, position: int) -> Claims:
        """See `Text`."""
        return self._outcomes[position % len(self._outcomes)].claims

    def token(self, position: int) -> int:
        """See `Text`."""
        taken = self._outcomes[position % len(self._outcomes)].taken
        return taken if taken >= 0 else NO_CHILD

    def stray_claims(self, node: int) -> Claims:
        """See `Text`."""
        return self._strays[node * 7919 % len(self._strays)].claims


class ModelledDrafter:
    """Ranks its children by the claims of `text`."""

    def __init__(self, text: Text, children: int, length: int) -> None:
        """children: proposals per node. length: tokens before the root of the first command."""
        self._text, self._children = text, children
        self._length = length

    def draft(self, command: StartDraft, start_ns: int, end_ns: int, rows: int) -> DraftResult:
        """Children of the command's nodes; rows: of the function that would have run."""
        self._length += len(command.committed)
        proposals: list[Proposal] = []
        for row in command.rows:
            position, right = self._length, True
            for entry in row.path:
                right = right and entry.token == self._text.token(position)
                position += 1
            claims = self._text.claims(position) if right else self._text.stray_claims(row.node)
            for rank, claim in enumerate(claims[: self._children]):
                log_q = math.log(max(claim, 1e-9))
                proposals.append(Proposal(row.node, rank, log_q, rank, math.inf, "modelled"))
        return DraftResult(command.step, tuple(proposals), start_ns, end_ns, function_rows=rows)


class ModelledVerifier:
    """Says `text`."""

    def __init__(self, text: Text, length: int) -> None:
        """length: tokens of the text so far, the root included."""
        self._text = text
        self.length = length

    def verify(self, command: StartVerify, start_ns: int, end_ns: int) -> Verdict:
        """The walk from the root."""
        depths = [0]
        for row in command.rows[1:]:
            depths.append(depths[row.parent] + 1)

        def choose(row: int) -> int:
            return self._text.token(self.length + depths[row])

        accepted, tokens = walk_coupled(command.rows, choose)
        self.length += len(tokens)
        nodes = tuple(command.rows[index].node for index in accepted)
        return Verdict(command.step, nodes, tuple(tokens), (0.0,) * len(tokens), start_ns, end_ns)

    def run_one(self, step: int, start_ns: int, end_ns: int, more: bool) -> Verdict:
        """The next token of a run."""
        token = self._text.token(self.length)
        self.length += 1
        return Verdict(step, (), (token,), (0.0,), start_ns, end_ns, more=more)

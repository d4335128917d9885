"""Modelled text and units for virtual time: who would say what, and how long it would take.

The model of DESIGN section 1. At every position the verifier's token is fixed. A drafter has a
confidence c ~ Beta(1.6 a, 1.6 (1 - a)) there; its children 1 to 4 are right with probability c,
then 0.45 of the rest each, and it says so. Tokens are small integers: child r is token r, and a
verifier's token that no child holds is token 4. Everything is drawn from (seed, position), so it
does not depend on the schedule that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ondevice.records import DraftResult, DraftRow, NodeToken, Proposal, StartDraft, StartVerify
from ondevice.records import Verdict, VerifyRow
from ondevice.sampling import walk_coupled

CHILDREN = 4
"""Children that the model knows; the text's token is CHILDREN where none of them is right."""
CONCENTRATION = 1.6
"""Of the Beta distribution of confidences."""
SIBLING_SHARE = 0.45
BLOCK = 4096


class Acceptances(Protocol):
    """What happens at each position."""

    def claims(self, position: int) -> Sequence[float]:
        """The drafter's claimed chance of its children at `position` on the text, by rank."""

    def token(self, position: int) -> int:
        """The verifier's token at `position`: the rank of the right child, CHILDREN for none."""

    def stray(self, node: int) -> Sequence[float]:
        """Claims at a node that is not on the text."""


class BetaAcceptances:
    """The model above, for first-choice acceptance `a` in (0, 1)."""

    def __init__(self, a: float, seed: int = 0) -> None:
        self.a, self._seed = a, seed
        self._blocks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _block(self, stream: int, index: int) -> tuple[list[tuple[float, ...]], list[int]]:
        key = (stream, index)
        known = self._blocks.get(key)
        if known is None:
            rng = np.random.default_rng([self._seed, stream, index])
            c = rng.beta(CONCENTRATION * self.a, CONCENTRATION * (1 - self.a), BLOCK)
            shares = [c]
            left = 1 - c
            for _ in range(CHILDREN - 1):
                shares.append(left * SIBLING_SHARE)
                left = left - shares[-1]
            table = np.stack(shares, axis=1)
            u = rng.random(BLOCK)
            tokens = (u[:, None] >= np.cumsum(table, axis=1)).sum(axis=1)
            if len(self._blocks) > 8:
                self._blocks.clear()
            known = self._blocks[key] = ([tuple(row) for row in table.tolist()], tokens.tolist())
        return known

    def claims(self, position: int) -> Sequence[float]:
        return self._block(0, position // BLOCK)[0][position % BLOCK]

    def token(self, position: int) -> int:
        return self._block(0, position // BLOCK)[1][position % BLOCK]

    def stray(self, node: int) -> Sequence[float]:
        return self._block(1, node // BLOCK)[0][node % BLOCK]


class ModelledDrafter:
    """Knows the text; ranks its children by the claims of `acceptances`."""

    def __init__(self, acceptances: Acceptances, children: int, length: int) -> None:
        """length: tokens of the session's text so far."""
        self._acceptances, self._children = acceptances, children
        self.length = length

    def draft(self, command: StartDraft, start_ns: int, end_ns: int) -> DraftResult:
        self.length += len(command.committed)
        proposals: list[Proposal] = []
        for row in command.rows:
            at = self.length
            right = True
            for entry in row.path:
                right = right and entry.token == self._acceptances.token(at)
                at += 1
            claims = self._acceptances.claims(at) if right else self._acceptances.stray(row.node)
            for rank, claim in enumerate(claims[: self._children]):
                log_q = math.log(max(claim, 1e-9))
                proposals.append(Proposal(row.node, rank, log_q, rank, math.inf, "modelled"))
        return DraftResult(command.step, tuple(proposals), start_ns, end_ns)


class ModelledVerifier:
    """Says the text."""

    def __init__(self, acceptances: Acceptances, length: int) -> None:
        """length: tokens of the text so far, the root included."""
        self._acceptances = acceptances
        self.length = length

    def verify(self, command: StartVerify, start_ns: int, end_ns: int) -> Verdict:
        depth = {0: 0}
        for index, row in enumerate(command.rows[1:], start=1):
            depth[index] = depth[row.parent] + 1

        def choose(row: int) -> int:
            return self._acceptances.token(self.length + depth[row])

        accepted, tokens = walk_coupled(command.rows, choose)
        self.length += len(tokens)
        nodes = tuple(command.rows[index].node for index in accepted)
        return Verdict(command.step, nodes, tuple(tokens), (0.0,) * len(tokens), start_ns, end_ns)

    def run_one(self, step: int, start_ns: int, end_ns: int, more: bool) -> Verdict:
        token = self._acceptances.token(self.length)
        self.length += 1
        return Verdict(step, (), (token,), (0.0,), start_ns, end_ns, more=more)

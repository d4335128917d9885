"""Proposers that need no unit of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ondevice.records import Proposal


class HostProposer(Protocol):
    """Proposes on the host at every commit, in bounded time (prompt lookup, n-gram pool)."""

    def propose(self, committed: Sequence[int], root: int) -> Sequence[Proposal]:
        """Proposals below node `root`, whose token is the last of `committed`.

        A proposal's parent is `root`, or -(i + 1) for the i-th of the same list. Its log_q is the
        proposer's confidence that the verifier takes it.
        """

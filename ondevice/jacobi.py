"""Jacobi decoding (Santilli et al. 2023, arXiv 2305.10427): a block refined until it stands.

The block is a chain of guesses below the root. A forward gives for every place what the verifier
says there, given the guesses before it. The guesses that were right are text; what was said at the
places behind them is the next block. A guess that is said again after the true text is right: the
fixed point of the iteration is the text itself.

That holds at any temperature. Under the position-keyed sampling law the token of a position is a
function of the text before it and of the position's own noise, which is the same in every
iteration. So the iteration is that of a deterministic function, and its fixed point is the very
text that plain decoding samples with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.proposers import Guess, Kind
from ondevice.records import ROOT_ROW, StartVerify, Verdict, VerifyRow, Window

MOST_GUESSES = 31
"""Of a block."""


class Jacobi:
    """Proposes what the verifier said at the places behind the accepted ones."""

    name = "jacobi"

    def __init__(self) -> None:
        self.block = 0
        """Guesses that a block shall have; shorter ones are filled up with tokens of the text."""
        self._said: list[int] = []
        self._before: list[int] = []

    def prior(self, kind: Kind) -> float:
        """A guess that was said twice is likelier; a filled one is hardly ever right."""
        depth, times = kind
        return (0.02, 0.15, 0.35)[times] + (0.1 if depth and times else 0.0)

    def propose(self, committed: Sequence[int]) -> list[Guess]:
        """The block, a chain; see `HostProposer`."""
        block = self._said[:MOST_GUESSES]
        self._said = []  # of one forward; plain decoding says nothing
        kinds: list[Kind] = []
        for depth, token in enumerate(block):
            same = depth < len(self._before) and self._before[depth] == token
            kinds.append((min(depth, 3), 2 if same else 1))
        while len(block) < self.block:
            # Any token will do; those of the text are at least of its language.
            block = [*block, committed[-1 - len(block) % len(committed)]]
            kinds.append((3, 0))
        return [Guess(at - 1, token, kinds[at]) for at, token in enumerate(block)]

    def riders(self, window: Window, committed: Sequence[int]) -> list[VerifyRow]:
        """None: its guesses are nodes, which take the law's noise as the text does."""
        return []

    def observe(self, command: StartVerify, verdict: Verdict) -> None:
        """Keep what was said below the longest line of rows that begins with the accepted ones."""
        rows, said = command.rows, verdict.row_tokens
        if len(said) < len(rows):  # a verifier that does not tell
            return
        line = _longest_line(rows, verdict.accepted)
        committed = len(verdict.tokens)
        behind = line[committed:]
        self._said = [said[row] for row in behind]
        self._before = [rows[row].token for row in behind[1:]]


def _longest_line(rows: Sequence[VerifyRow], accepted: Sequence[int]) -> list[int]:
    """The rows from the root through the accepted nodes down to the deepest row they lead to."""
    index = {row.node: at for at, row in enumerate(rows)}
    line = [0, *(index[node] for node in accepted)]
    below: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        if row.parent != ROOT_ROW:
            below.setdefault(row.parent, []).append(at)
    height = [0] * len(rows)
    for at in range(len(rows) - 1, 0, -1):
        parent = rows[at].parent
        height[parent] = max(height[parent], height[at] + 1)
    while children := below.get(line[-1]):
        line.append(max(children, key=height.__getitem__))
    return line

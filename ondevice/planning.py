"""The rate formula: how many rows to verify, and whether to wait for more.

A round is worth its expected tokens less its time at the pace that was reached so far: tokens -
pace * time. Taking in every round what is worth most gives the best pace in the long run, once
`pace` is that pace (Dinkelbach 1967, on fractional programming; the same argument as for the
average reward of a renewal process). So a node earns its row while its reach exceeds what the row
costs at this pace, and waiting is right while what the drafter brings exceeds the time it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

MOST_ROWS = 32
"""Rows of a verifier forward, root and fill included, unless a schedule says otherwise."""
PACE_MEMORY_MS = 3000.0
"""Time until an old round weighs 1/e in the pace."""
STEPS_AHEAD = 6
"""How many drafter steps are looked ahead when deciding whether to wait."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Of a round. value: expected tokens - pace * time; nodes: below the root, the likeliest."""

    value: float
    nodes: int


def best_round(reaches: Sequence[float], curve_ms: Sequence[float], pace: float) -> Worth:
    """The best number of nodes to verify.

    reaches: of the nodes below the root, falling. curve_ms: of a forward, by rows; as many rows as
    it covers may be used. pace: tokens per millisecond.
    """
    tokens = 1.0
    best, count = tokens - pace * curve_ms[1], 0
    for nodes, (reach, cost_ms) in enumerate(zip(reaches, curve_ms[2:], strict=False), start=1):
        tokens += reach
        value = tokens - pace * cost_ms
        if value > best:
            best, count = value, nodes
    return Worth(best, count)


@dataclass(frozen=True, slots=True)
class Growth:
    """What the drafter would add. Reaches fall.

    ready: of all nodes below the root; running: of the rows under expansion; unexpanded: of those
    that wait. shares: chances of a node's children by rank, on average. step_rows, step_ms: of
    the steps to come. remaining_ms: until the running step ends.
    """

    ready: Sequence[float]
    running: Sequence[float]
    unexpanded: Sequence[float]
    shares: Sequence[float]
    step_rows: int
    step_ms: float
    remaining_ms: float

    def best_wait(self, curve_ms: Sequence[float], pace: float) -> float:
        """The greatest value of a round that starts after one or more of the steps to come."""
        most = len(curve_ms) - 2
        ready, running, waiting = list(self.ready), self.running, list(self.unexpanded)
        wait_ms, best = self.remaining_ms, float("-inf")
        for _ in range(STEPS_AHEAD):
            if not running:
                break
            grown = [reach * share for reach in running for share in self.shares]
            ready = nlargest(most, [*ready, *grown])
            value = best_round(ready, curve_ms, pace).value - pace * wait_ms
            if value <= best:
                break
            best = value
            waiting = sorted([*waiting, *grown], reverse=True)
            running, waiting = waiting[: self.step_rows], waiting[self.step_rows :]
            wait_ms += self.step_ms
        return best


@dataclass(slots=True)
class Pace:
    """Tokens per millisecond of the rounds so far, old ones fading; kept from answer to answer."""

    tokens: float
    elapsed_ms: float

    @property
    def value(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.elapsed_ms

    def learn(self, tokens: int, elapsed_ms: float) -> None:
        """Take in a round."""
        keep = max(0.5, 1 - elapsed_ms / PACE_MEMORY_MS)
        self.tokens = self.tokens * keep + tokens
        self.elapsed_ms = self.elapsed_ms * keep + elapsed_ms


class Block:
    """How far a block of guesses was right, of the latest rounds."""

    def __init__(self) -> None:
        self.reaches = [0.5**depth for depth in range(1, MOST_ROWS)]
        """By depth from 1 on, how often so many of a block were right."""

    def learn(self, accepted: int) -> None:
        """A block's first `accepted` guesses were right."""
        for at, reach in enumerate(self.reaches):
            self.reaches[at] = reach + BLOCK_WEIGHT * ((accepted > at) - reach)


BLOCK_WEIGHT = 0.05
"""Of the newest block."""


def best_step(
    reaches: Sequence[float], counts: Sequence[int], curve_ms: Sequence[float]
) -> tuple[int, float]:
    """(rows, milliseconds) of the drafter step that expands the most reach per millisecond.

    reaches: of nodes to expand, falling, at least one. counts: exported row counts, ascending.
    curve_ms: of a step, by rows.
    """
    best_rate, best_rows = 0.0, 1
    expanded, taken = 0.0, 0
    for count in counts:
        upto = min(count, len(reaches))
        expanded += sum(reaches[taken:upto])
        taken = upto
        rate = expanded / curve_ms[count]
        if rate > best_rate:
            best_rate, best_rows = rate, upto
        if upto == len(reaches):
            break
    return best_rows, curve_ms[best_rows]

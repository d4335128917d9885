"""Fixed schedules at their best sizes, found by sweep in virtual time.

All candidates meet the same text (common random numbers), short at first: the better ones go on to
longer texts (successive halving: Jamieson and Talwalkar 2016), so that the last comparison is long
and the first one cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ondevice.costs import CostTable
from ondevice.modelled import CHILDREN, Text
from ondevice.schedule import Schedule, Sizes, Strategy
from ondevice.simulate import Simulated, simulate

Kind = Literal["sequential chain", "sequential tree", "overlapped chain", "overlapped tree"]
KINDS: tuple[Kind, ...] = (
    "sequential chain",
    "sequential tree",
    "overlapped chain",
    "overlapped tree",
)
STRATEGY: dict[Kind, Strategy] = {
    "sequential chain": "sequential",
    "sequential tree": "sequential",
    "overlapped chain": "pipelined",
    "overlapped tree": "pipelined",
}

CHAIN_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
TREE_ROWS = (3, 4, 6, 8, 10, 12, 16, 24, 32)
TREE_DEPTHS = (1, 2, 3, 4, 6, 8)
PIPELINED_DEPTHS = (3, 5, 8, 12, 16)
AHEAD = (2, 4)
"""An overlapped chain is drafted this many times as deep as it is verified."""
DRAFT_ROWS = (2, 4, 8)
"""Nodes expanded a step, where the drafter has functions of so few rows that are cheaper."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A schedule and how it did: times plain decoding."""

    schedule: Schedule
    speed: float


@dataclass(frozen=True, slots=True)
class World:
    """A modelled machine and its text. text: makes the same text anew."""

    table: CostTable
    text: Callable[[], Text]

    def run(self, schedule: Schedule, tokens: int) -> Simulated:
        """One answer, knowing the costs beforehand and nothing of the drafter."""
        return simulate(self.table, self.text(), schedule, tokens)


def fixed(kind: Kind, table: CostTable) -> list[Schedule]:
    """The schedules of `kind` that a sweep tries."""
    strategy, chain = STRATEGY[kind], kind.endswith("chain")
    if chain:
        sizes = list(_chain_sizes(strategy))
    else:
        sizes = [
            Sizes(rows, depth, draft_rows)
            for draft_rows in worthwhile_draft_rows(table)
            for depth in (TREE_DEPTHS if strategy == "sequential" else PIPELINED_DEPTHS)
            for rows in TREE_ROWS
            if depth < rows <= 1 + CHILDREN * (1 + draft_rows * (depth - 1))
        ]
    return [Schedule(strategy, 1 if chain else CHILDREN, sizes=each) for each in sizes]


def _chain_sizes(strategy: Strategy) -> Iterable[Sizes]:
    for depth in CHAIN_DEPTHS:
        if strategy == "sequential":
            yield Sizes(depth + 1, depth)
        else:
            yield from (Sizes(depth + 1, depth * ahead) for ahead in AHEAD)


def worthwhile_draft_rows(table: CostTable) -> list[int]:
    """The most nodes a step that there is a function for, up to 8, and fewer where they cost less.

    Fewer of DRAFT_ROWS, those whose step is cheaper than the next one's.
    """
    widest = min(max(DRAFT_ROWS), max(point.rows for point in table.drafter))
    costs_ms: dict[int, float] = {}
    for rows in sorted({widest, *(count for count in DRAFT_ROWS if count < widest)}, reverse=True):
        here_ms = min(point.alone_ms for point in table.drafter if point.rows >= rows)
        if here_ms < min(costs_ms.values(), default=float("inf")):
            costs_ms[rows] = here_ms
    return sorted(costs_ms)


def race(
    world: World, schedules: Sequence[Schedule], heats: Sequence[tuple[int, int]]
) -> list[Entrant]:
    """Those of `schedules` that are left after the last heat, the fastest first.

    heats: (tokens of the text, how many schedules are kept).
    """
    left = [Entrant(schedule, 0.0) for schedule in schedules]
    for tokens, kept in heats:
        ran = [Entrant(each.schedule, world.run(each.schedule, tokens).speed) for each in left]
        left = sorted(ran, key=lambda entrant: -entrant.speed)[:kept]
    return left

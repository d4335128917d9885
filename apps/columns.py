"""One row of `simulate`'s table: every kind of schedule at its best, on one machine and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ondevice.apps.cases import Case
from ondevice.apps.sweep import KINDS, STRATEGY, Entrant, Kind, World, fixed, race
from ondevice.costs import CostPoint, CostTable
from ondevice.modelled import CHILDREN
from ondevice.schedule import STRATEGIES, Schedule, Sizes, Strategy
from ondevice.simulate import Simulated

NAIVE: Kind = "overlapped chain"
"""It verifies whatever is there, as all published experiments did; so its sizes are fixed."""
HEATS = ((80, 5), (400, 2), (1000, 1))
"""Of each kind's sweep, before the best one's run over all tokens."""
FREE_MS = 1e-6
"""A step of a drafter that takes no time."""
FREE_DRAFT_ROWS = 8
FREE_ROWS, FREE_DEPTHS = (8, 10, 12, 16, 20, 24, 32), (4, 8, 12)
FREE_HEATS = ((80, 3), (400, 1))


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of schedule. rate: sized round by round by the rate formula; None for NAIVE."""

    fixed: Entrant
    rate: Entrant | None = None

    @property
    def best(self) -> Entrant:
        """The faster one."""
        return max((self.fixed, self.rate or self.fixed), key=lambda entrant: entrant.speed)


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: of the longest runs. strategies: whose columns are wanted."""

    tokens: int
    strategies: tuple[Strategy, ...] = STRATEGIES

    @property
    def kinds(self) -> list[Kind]:
        """The columns of fixed schedules."""
        return [kind for kind in KINDS if STRATEGY[kind] in self.strategies]


@dataclass(frozen=True, slots=True)
class Row:
    """The best of each kind; speeds are times plain decoding.

    free: the reference of the pipeline's efficiency, a drafter that takes no time; None without
    `auto`.
    """

    case: Case
    plain_tok_s: float
    columns: Mapping[Kind, Column]
    auto: Simulated | None
    free: Entrant | None

    @property
    def efficiency(self) -> float | None:
        """What `auto` reaches of the speed with a drafter that takes no time."""
        if self.auto is None or self.free is None:
            return None
        return self.auto.speed / self.free.speed

    def difference(self, kind: Kind) -> float | None:
        """Our best over the published figure, less 1; None where there is none."""
        if kind not in self.columns or kind not in self.case.published:
            return None
        return self.columns[kind].best.speed / self.case.published[kind] - 1


def measured(case: Case, plan: Plan) -> Row:
    """Run everything that `plan` asks for."""
    world, automatic = case.world, "auto" in plan.strategies
    return Row(
        case=case,
        plain_tok_s=1000 / world.table.plain[0].alone_ms,
        columns={kind: best_of(kind, world, plan.tokens) for kind in plan.kinds},
        auto=world.run(Schedule("auto"), plan.tokens) if automatic else None,
        free=free_drafter(world, plan.tokens) if automatic else None,
    )


def best_of(kind: Kind, world: World, tokens: int) -> Column:
    """The best fixed sizes by sweep, and the rate policy beside them, on the same text."""
    (best,) = race(world, fixed(kind, world.table), _upto(HEATS, tokens))
    if kind == NAIVE:
        return Column(best)
    ours = Schedule(STRATEGY[kind], children=best.schedule.children)
    return Column(best, Entrant(ours, world.run(ours, tokens).speed))


def free_drafter(world: World, tokens: int) -> Entrant:
    """The best sequential tree of a drafter that takes no time and slows nothing down.

    Of fixed sizes or sized by the rate formula; or plain decoding, where not even that is faster.
    """
    point = CostPoint(FREE_DRAFT_ROWS, 0, FREE_MS, FREE_MS)
    table = CostTable(world.table.verifier, world.table.plain, (point,))
    schedules = [Schedule("plain"), Schedule("sequential", CHILDREN)] + [
        Schedule("sequential", CHILDREN, sizes=Sizes(rows, depth, FREE_DRAFT_ROWS))
        for rows in FREE_ROWS
        for depth in FREE_DEPTHS
    ]
    (best,) = race(World(table, world.text), schedules, _upto(FREE_HEATS, tokens))
    return best


def _upto(heats: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """Those of `heats` that are shorter than `tokens`, and a last one of so many."""
    return [*(heat for heat in heats if heat[0] < tokens), (tokens, 1)]

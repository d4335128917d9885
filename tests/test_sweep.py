"""Sweeps of fixed schedules, against brute force and against the published formula."""

from __future__ import annotations

from functools import partial

import pytest

from ondevice.apps.pool import mapped
from ondevice.apps.sweep import KINDS, Kind, World, fixed, race, worthwhile_draft_rows
from ondevice.costs import CostTable, table_from
from ondevice.modelled import NO_CHILD, BetaText, Claims
from ondevice.schedule import Schedule, Sizes


class EvenText:
    """The drafter's one child is right with probability a, anywhere, whatever came before."""

    def __init__(self, a: float) -> None:
        self.a = a

    def claims(self, position: int) -> Claims:
        return (self.a,)

    def token(self, position: int) -> int:
        # Multiplication by an odd number: the positions' order is scattered, their share even.
        scattered = (position + 1) * 0x9E3779B97F4A7C15 % 2**64
        scattered = (scattered ^ scattered >> 31) * 0xBF58476D1CE4E5B9 % 2**64
        return 0 if (scattered >> 11) / 2**53 < self.a else NO_CHILD

    def stray_claims(self, node: int) -> Claims:
        return (self.a,)


def table(verify_ms: float = 20.0, draft_ms: float = 4.0, row_cost: float = 0.03) -> CostTable:
    return table_from([verify_ms * (1 + row_cost * n) for n in range(32)], [(8, draft_ms)])


@pytest.mark.parametrize("a", [0.5, 0.8])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_sequential_chain_has_the_speed_that_leviathan_et_al_derive(a: float, depth: int) -> None:
    """Expected tokens a round: (1 - a^(d+1)) / (1 - a) (arXiv 2211.17192, section 3.1)."""
    world = World(table(), partial(EvenText, a))
    ran = world.run(Schedule("sequential", children=1, sizes=Sizes(depth + 1, depth)), 4000)
    tokens = (1 - a ** (depth + 1)) / (1 - a)
    round_ms = depth * 4.0 + 20.0 * (1 + 0.03 * depth)
    assert ran.speed == pytest.approx(tokens / round_ms * 20.0, rel=0.03)


def test_the_sweep_finds_what_brute_force_finds() -> None:
    world = World(table(), partial(BetaText, 0.7, 5))
    schedules = fixed("sequential chain", world.table)
    (found,) = race(world, schedules, ((100, 5), (600, 1)))
    speeds = {schedule: world.run(schedule, 600).speed for schedule in schedules}
    assert found.speed == max(speeds.values())
    assert speeds[found.schedule] == found.speed


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_swept_in_its_own_shape(kind: Kind) -> None:
    schedules = fixed(kind, table())
    assert len(set(schedules)) == len(schedules) >= 10
    for schedule in schedules:
        assert schedule.sizes is not None
        assert schedule.strategy == ("sequential" if "sequential" in kind else "pipelined")
        assert (schedule.children == 1) == kind.endswith("chain")
        assert 1 < schedule.sizes.verify_rows <= 33


def test_few_rows_are_drafted_only_where_that_is_cheaper() -> None:
    assert worthwhile_draft_rows(table_from([20.0], [(8, 4.0)])) == [8]
    assert worthwhile_draft_rows(table_from([20.0], [(1, 4.0), (8, 4.0)])) == [8]
    assert worthwhile_draft_rows(table_from([20.0], [(1, 4.0)])) == [1]
    assert worthwhile_draft_rows(table_from([20.0], [(3, 4.0), (64, 9.0)])) == [2, 8]
    costs_by_row = table_from([20.0], [(rows, 6 + rows) for rows in range(1, 9)])
    assert worthwhile_draft_rows(costs_by_row) == [2, 4, 8]


def test_work_comes_back_in_order_from_any_number_of_processes() -> None:
    assert list(mapped(abs, [-3, 2, -1], 1)) == list(mapped(abs, [-3, 2, -1], 2)) == [3, 2, 1]

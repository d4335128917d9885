"""The rate formula against brute force."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.costs import CostPoint, StepCosts
from ondevice.planning import STEPS_AHEAD, Growth, best_round, best_step

CHANCES = st.floats(0, 1)
PACES = st.floats(0.001, 1)
MS = st.floats(1, 100)


def falling(values: list[float]) -> list[float]:
    return sorted(values, reverse=True)


REACHES = st.lists(CHANCES, max_size=40).map(falling)
CURVES = st.lists(MS, min_size=1, max_size=33).map(lambda steps: [0.0, *sorted(steps)])


def value(taken: list[float], curve_ms: list[float], pace: float) -> float:
    return 1 + sum(taken) - pace * curve_ms[len(taken) + 1]


@settings(max_examples=300, deadline=None)
@given(REACHES, CURVES, PACES)
def test_the_best_round_is_the_best_of_all(reaches, curve_ms, pace):
    counts = range(min(len(reaches), len(curve_ms) - 2) + 1)
    values = [value(reaches[:count], curve_ms, pace) for count in counts]
    found = best_round(reaches, curve_ms, pace)
    assert found.value == pytest.approx(max(values))
    assert values[found.nodes] == pytest.approx(found.value)
    assert all(found.value - each > -1e-9 for each in values)


def test_of_equal_rounds_the_smallest_is_taken():
    assert best_round([0.0, 0.0], [0, 1, 1, 1], 0.5).nodes == 0
    assert best_round([], [0, 7.0], 0.1).value == pytest.approx(1 - 0.7)


@settings(max_examples=100, deadline=None)
@given(REACHES, CURVES, st.floats(0.0001, 0.5))
def test_at_the_pace_that_it_reaches_the_best_round_has_the_best_rate(reaches, curve_ms, pace):
    """Dinkelbach: improving the pace by the round that is best at it ends at the best rate."""
    for _ in range(100):
        taken = best_round(reaches, curve_ms, pace).nodes
        pace = (1 + sum(reaches[:taken])) / curve_ms[taken + 1]
    counts = range(min(len(reaches), len(curve_ms) - 2) + 1)
    rates = [(1 + sum(reaches[:count])) / curve_ms[count + 1] for count in counts]
    assert pace == pytest.approx(max(rates))


def waits_by_hand(growth: Growth, curve_ms: list[float], pace: float) -> list[float]:
    """Value of a round after 1, 2, ... more steps: grow the tree as the drafter is said to."""
    ready, running = list(growth.ready), list(growth.running)
    waiting, wait_ms = list(growth.unexpanded), growth.remaining_ms
    values = []
    for _ in range(STEPS_AHEAD):
        if not running:
            break
        children = [above * share for above in running for share in growth.shares]
        ready += children
        values.append(best_round(falling(ready), curve_ms, pace).value - pace * wait_ms)
        waiting += children
        running = falling(waiting)[: growth.step_rows]
        waiting = falling(waiting)[growth.step_rows :]
        wait_ms += growth.step_ms
    return values


GROWTHS = st.builds(
    Growth,
    ready=REACHES,
    running=st.lists(CHANCES, max_size=8).map(falling),
    unexpanded=REACHES,
    shares=st.lists(st.floats(0, 0.25), min_size=1, max_size=4).map(falling),
    step_rows=st.integers(1, 8),
    step_ms=MS,
    remaining_ms=MS,
)


@settings(max_examples=300, deadline=None)
@given(GROWTHS, CURVES, PACES)
def test_the_best_wait_is_the_first_that_the_next_step_does_not_improve(growth, curve_ms, pace):
    values = waits_by_hand(growth, curve_ms, pace)
    found = growth.best_wait(curve_ms, pace)
    if not values:
        assert found == float("-inf")
        return
    peak = next(
        (index for index, (one, later) in enumerate(pairwise(values)) if later <= one),
        len(values) - 1,
    )
    assert found == pytest.approx(values[peak])


@settings(max_examples=200, deadline=None)
@given(REACHES.filter(bool), st.dictionaries(st.sampled_from([1, 8, 32, 64]), MS, min_size=1))
def test_the_best_step_expands_the_most_reach_per_millisecond(reaches, exported):
    costs = StepCosts(CostPoint(rows, 0, ms, ms) for rows, ms in exported.items())
    curve_ms, _ = costs.curve(64)
    rows, step_ms = best_step(reaches, costs.row_counts, curve_ms)
    possible = {
        upto: sum(reaches[:upto]) / curve_ms[upto]
        for upto in {min(count, len(reaches)) for count in exported}
    }
    assert 1 <= rows <= len(reaches)
    assert step_ms == curve_ms[rows]
    best = max(possible.values())
    assert sum(reaches[:rows]) / step_ms >= best * (1 - 1e-9)


def test_eight_rows_for_the_price_of_one_are_taken_and_64_are_not():
    curve_ms, _ = StepCosts(
        CostPoint(rows, 0, ms, ms) for rows, ms in {1: 4.0, 8: 4.2, 64: 15.0}.items()
    ).curve(64)
    reaches = [0.8**level for level in range(100)]
    assert best_step(reaches, [1, 8, 64], curve_ms) == (8, 4.2)
    assert best_step(reaches[:3], [1, 8, 64], curve_ms) == (3, 4.2)
    assert best_step([0.5] * 100, [1, 8, 64], curve_ms) == (64, 15.0)

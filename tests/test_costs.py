"""The cost curve: what is measured stands, what is not is never guessed low, and it learns."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.costs import (
    ASSUMED,
    TREND,
    CostModel,
    CostPoint,
    CostTable,
    StepCosts,
    table_from,
)

CLIFFS = {1: 1.0, 2: 1.0, 3: 1.27, 4: 1.0, 7: 1.49, 8: 1.23, 16: 1.61}
"""DESIGN section 3, at context 200: times one row."""

TIMES_MS = st.floats(1, 100, allow_nan=False)
POINTS = st.dictionaries(st.integers(1, 24), TIMES_MS, min_size=1, max_size=8)


def costs_of(ms_by_rows: dict[int, float], slowdown: float = 1.0) -> StepCosts:
    return StepCosts(CostPoint(n, 0, ms, ms * slowdown) for n, ms in ms_by_rows.items())


# The curve


@settings(max_examples=200, deadline=None)
@given(POINTS, st.integers(1, 24))
def test_between_measured_counts_nothing_is_interpolated_downwards(points, rows):
    """A request costs one of the measured times of its own or a wider count: the least of them."""
    wider = [ms for count, ms in points.items() if count >= rows]
    found = costs_of(points).ms(rows)
    if wider:
        assert found == pytest.approx(min(wider))
    else:
        assert found >= points[max(points)]


@settings(max_examples=100, deadline=None)
@given(POINTS)
def test_more_rows_never_cost_less_and_none_costs_more_than_a_wider_one(points):
    costs = costs_of(points)
    curve, counts = costs.curve(40)
    assert curve[0] == 0
    assert curve[1:] == sorted(curve[1:])
    for rows in range(1, 41):
        assert counts[rows] >= rows
        assert curve[rows] == pytest.approx(costs.exactly(counts[rows]))
        assert all(curve[rows] <= costs.exactly(n) + 1e-9 for n in points if n >= rows)


def test_requests_are_filled_up_to_the_cheap_counts_of_a_real_machine():
    costs = costs_of(CLIFFS)
    filled = {rows: costs.filled(rows) for rows in range(1, 17)}
    assert filled == {
        **{1: 1, 2: 2, 3: 4, 4: 4},  # of equals the narrowest
        **dict.fromkeys(range(5, 9), 8),
        **dict.fromkeys(range(9, 17), 16),
    }
    assert costs.ms(3) == 1.0
    assert costs.exactly(3) == 1.27


def test_beyond_the_widest_count_rows_are_never_free():
    falling = costs_of({1: 20.0, 8: 18.0})
    assert 18 < falling.ms(9) < falling.ms(32)
    rising = costs_of({1: 20.0, 11: 30.0})
    assert rising.ms(21) == pytest.approx(40)


def test_contexts_are_interpolated_upwards_only():
    rising = StepCosts([CostPoint(1, 200, 10, 10), CostPoint(1, 1000, 18, 18)])
    at = [rising.ms(1, context) for context in (0, 200, 600, 1000, 1800)]
    assert at == pytest.approx([10, 10, 14, 18, 26])
    noisy = StepCosts([CostPoint(1, 200, 18, 18), CostPoint(1, 1000, 10, 10)])
    assert [noisy.ms(1, context) for context in (0, 600, 4000)] == [18, 18, 18]


@pytest.mark.parametrize("context", [0, 63, 64, 500, 10_000])
def test_a_share_of_a_step_beside_the_other_unit_costs_its_share(context):
    costs = costs_of({1: 10.0}, slowdown=1.5)
    shares = [costs.exactly(1, context, share) for share in (0.0, 0.4, 1.0)]
    assert shares == pytest.approx([10, 12, 15])
    assert costs.ms(1, context, 1.0) == pytest.approx(15)


# Learning


def test_a_count_that_was_not_measured_is_learned_when_it_is_used():
    costs = costs_of({1: 10.0, 8: 30.0})
    assert costs.ms(4) == 30
    costs.observe(4, 0, 0.0, 12.0)
    assert costs.ms(4) == pytest.approx(12)
    assert costs.ms(3) == pytest.approx(12)
    assert costs.filled(2) == 4
    assert costs.ms(8) == 30
    assert costs.row_counts == [1, 4, 8]
    costs.observe(20, 0, 0.0, 90.0)
    assert costs.ms(20) == pytest.approx(90)


def test_the_first_step_scales_an_assumed_table_and_not_a_measured_one():
    assumed, measured = StepCosts(ASSUMED.verifier, assumed=True), StepCosts(ASSUMED.verifier)
    for costs in (assumed, measured):
        costs.observe(1, 0, 0.0, 5.0)
    assert [assumed.ms(1), assumed.ms(16)] == pytest.approx([5, 7])
    assert measured.ms(16) == pytest.approx(70, rel=0.02)
    model = CostModel()
    model.plain.observe(1, 0, 0.0, 5.0)
    model.drafter.observe(8, 0, 0.0, 1.5)
    assert (model.plain.ms(1), model.drafter.ms(64)) == pytest.approx((5, 6))


def test_what_one_count_shows_of_heat_moves_all_of_them_a_little():
    costs = costs_of({1: 10.0, 8: 30.0})
    for _ in range(200):
        costs.observe(8, 0, 0.0, 36.0)
    assert costs.ms(8) == pytest.approx(36, rel=0.02)
    assert 10.2 < costs.ms(1) < 12


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_one_stall_is_no_trend(factor):
    costs = costs_of({1: 10.0})
    costs.observe(1, 0, 0.0, 10 * factor)
    assert costs.ms(1) == pytest.approx(10, rel=0.06)
    for _ in range(6):  # a stall now and then
        for _ in range(TREND - 1):
            costs.observe(1, 0, 0.0, 10 * factor)
        for _ in range(9):
            costs.observe(1, 0, 0.0, 10.0)
    assert costs.ms(1) == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("wrong_by", [0.02, 0.1, 10.0, 50.0])
def test_a_table_that_is_wrong_is_right_after_a_few_steps(wrong_by):
    rng = random.Random(1)
    costs = costs_of({1: 10.0 * wrong_by, 8: 30.0 * wrong_by})
    for _ in range(2 * TREND):
        costs.observe(1, 0, 0.0, 10 * rng.uniform(0.95, 1.05))
        costs.observe(8, 0, 0.0, 30 * rng.uniform(0.95, 1.05))
    assert costs.ms(8) == pytest.approx(30, rel=0.25)
    for _ in range(40):
        costs.observe(1, 0, 0.0, 10.0)
        costs.observe(8, 0, 0.0, 30.0)
    assert costs.exactly(1) == pytest.approx(10, rel=0.05)
    assert costs.ms(8) == pytest.approx(30, rel=0.05)


def test_steady_noise_does_not_move_the_curve():
    rng = random.Random(2)
    costs = costs_of({1: 10.0, 8: 12.0})
    for _ in range(3000):
        rows = rng.choice([1, 8])
        costs.observe(rows, 0, 0.0, (10 if rows == 1 else 12) * rng.lognormvariate(0, 0.1))
    assert costs.ms(1) == pytest.approx(10, rel=0.08)
    assert costs.ms(8) == pytest.approx(12, rel=0.08)


@pytest.mark.parametrize("took_ms", [0.0, -5.0])
def test_no_time_at_all_is_no_measurement(took_ms):
    costs = costs_of({1: 10.0})
    costs.observe(1, 0, 0.0, took_ms)
    costs.observe(4, 0, 0.0, took_ms)
    assert costs.ms(4) == pytest.approx(10.3)
    assert costs.row_counts == [1]


def test_what_is_kept_does_not_grow_with_what_is_learned():
    costs = costs_of({1: 10.0, 8: 12.0})
    for step in range(20_000):
        costs.observe(1 + step % 8, step, step % 2, 30.0 if step % 3 else 1.0)
        costs.ms(8, step)
    assert len(costs._curves) <= 1
    assert all(len(run) < TREND for run in costs._surprises.values())


# The model of a pair


def test_the_assumed_table_is_complete_and_names_no_free_step():
    model = CostModel()
    assert model.table is ASSUMED
    for costs in (model.verifier, model.plain, model.drafter):
        assert costs.ms(1) > 0
    assert model.slowdown(100) == 1
    only_verifier = CostModel(CostTable(ASSUMED.verifier, ASSUMED.plain))
    assert only_verifier.drafter.ms(8) == CostModel().drafter.ms(8)


def test_a_pairs_slowdown_is_that_of_its_forwards():
    table = table_from(
        [20, 21, 22], [(8, 4.0)], plain_ms=19, verifier_slowdown=1.2, drafter_slowdown=1.5
    )
    model = CostModel(table)
    assert model.slowdown(0, rows=3) == pytest.approx(1.2)
    assert model.plain.ms(1) == 19
    assert model.drafter.ms(3, 0, 1.0) == pytest.approx(6)

"""Units whose steps take known virtual times: what is measured is exactly that."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtualunits import (
    DRAFTER_ROWS,
    DRAFTER_SLOWDOWN,
    VERIFIER_SLOWDOWN,
    Bed,
    forward_ms,
)

from ondevice import calibration as module
from ondevice.calibration import (
    LIMIT_S,
    ROW_COUNTS,
    at_work,
    tree_parents,
    without_cliffs,
)
from ondevice.costs import ASSUMED, CostModel
from ondevice.errors import UnitFailed


@pytest.fixture
def bed() -> Iterator[Callable[..., Bed]]:
    made: list[Bed] = []

    def make(*args, **more) -> Bed:
        made.append(Bed(*args, **more))
        return made[-1]

    yield make
    for each in made:
        for worker in each.workers:
            worker.close()


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-6)


def test_every_figure_is_what_the_units_took(bed) -> None:
    found = bed().calibrate()
    assert found.trouble == ""
    assert found.spread == near(0)
    expected = {(rows, context) for rows in ROW_COUNTS for context in (128, 1024)}
    assert {(point.rows, point.context) for point in found.table.verifier} == expected
    for point in found.table.verifier:
        assert point.alone_ms == near(forward_ms(point.rows, point.context))
        assert point.beside_ms == near(point.alone_ms * VERIFIER_SLOWDOWN)
    for point in found.table.plain:
        assert point.alone_ms == near(15 + point.context / 128)
        assert point.beside_ms == near(point.alone_ms * VERIFIER_SLOWDOWN)
    assert [point.rows for point in found.table.drafter] == list(DRAFTER_ROWS)
    for point in found.table.drafter:
        assert point.alone_ms == near(5 + point.rows / 4)
        assert point.beside_ms == near(point.alone_ms * DRAFTER_SLOWDOWN)


def test_the_cost_model_reads_the_cliffs(bed) -> None:
    costs = CostModel(bed().calibrate().table).verifier
    assert costs.filled(3, 128) == 4
    assert costs.ms(3, 128) == near(forward_ms(4, 128))


def test_the_first_call_of_a_shape_does_not_count(bed) -> None:
    each = bed()
    seen: set[tuple[str, int]] = set()

    def compiles(unit: str, rows: int) -> float:
        first = (unit, rows) not in seen
        seen.add((unit, rows))
        return 20.0 if first else 1.0

    each.world.disturb = compiles
    found = each.calibrate()
    assert found.spread == near(0)
    assert found.table.verifier[0].alone_ms == near(forward_ms(1, 128))
    assert found.table.drafter[0].alone_ms == near(5.25)


def test_single_stalls_do_not_count(bed) -> None:
    each = bed()
    steps = itertools.count(1)
    each.world.disturb = lambda unit, rows: 6.0 if next(steps) % 17 == 0 else 1.0
    for point in each.calibrate().table.verifier:
        assert point.alone_ms == near(forward_ms(point.rows, point.context))
        assert point.beside_ms == near(point.alone_ms * VERIFIER_SLOWDOWN)


def test_cliffs_are_believed_only_where_the_passes_agree(bed) -> None:
    each = bed()
    noise = random.Random(5)
    each.world.disturb = lambda unit, rows: noise.choice([1.0, 2.0, 1.3, 1.7, 3.1, 1.2, 1.1])
    found = each.calibrate()
    assert found.spread > module.LARGE_SPREAD
    for context in (128, 1024):
        row = [point for point in found.table.verifier if point.context == context]
        costs_ms = [point.alone_ms for point in row]
        assert costs_ms == sorted(costs_ms)
        assert len({round(point.beside_ms / point.alone_ms, 6) for point in row}) == 1


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=8))
@settings(deadline=None, max_examples=100)
def test_without_cliffs_is_the_closest_that_never_falls(costs_ms: list[float]) -> None:
    """Against the formula of minima and maxima of means (Barlow et al. 1972, theorem 1.4)."""
    last = len(costs_ms)
    expected = [
        max(
            min(sum(costs_ms[low:high]) / (high - low) for high in range(at + 1, last + 1))
            for low in range(at + 1)
        )
        for at in range(last)
    ]
    assert without_cliffs(costs_ms) == pytest.approx(expected)


def test_what_seems_faster_beside_the_other_was_disturbed_alone(bed) -> None:
    each = bed()
    each.world.disturb = lambda unit, rows: 1.0 if each.world.load else 4.0
    assert all(point.beside_ms >= point.alone_ms for point in each.calibrate().table.verifier)


def test_passes_end_when_they_agree_and_go_on_when_they_do_not(bed) -> None:
    quiet, noisy = bed(), bed()
    noisy.world.pace = 0.5
    noise = itertools.cycle([1.0, 1.3, 1.6, 1.1, 1.9])
    noisy.world.disturb = lambda unit, rows: next(noise)
    found = noisy.calibrate(), quiet.calibrate()
    counts = [each.verifier.parents.count(tree_parents(16, "tree")) for each in (quiet, noisy)]
    # Alone and beside at two contexts a pass, and once to warm up.
    assert counts == [1 + 4 * module.LEAST_PASSES, 1 + 4 * module.MOST_PASSES]
    assert found[0].spread > 0.1


def test_trees_have_branches_and_a_verifier_of_chains_gets_chains(bed) -> None:
    trees, chains = bed(), bed("chain")
    trees.calibrate()
    chains.calibrate()
    assert all(parents == list(range(-1, len(parents) - 1)) for parents in chains.verifier.parents)
    assert [-1, 0, 1, 0] in trees.verifier.parents
    assert {len(parents) for parents in chains.verifier.parents} == set(ROW_COUNTS)


@pytest.mark.parametrize("rows", range(1, 17))
def test_the_tree_has_the_likeliest_nodes(rows: int) -> None:
    """Against all nodes down to the sixth level, sorted."""
    shares = (0.5, 0.225, 0.12375, 0.0680625)
    levels = [[1.0]]
    for _ in range(6):
        levels.append([chance * share for chance in levels[-1] for share in shares])
    best = sorted(itertools.chain(*levels), reverse=True)[:rows]
    children: dict[int, int] = {}
    found = []
    for parent in tree_parents(rows, "tree"):
        assert parent < len(found)
        rank = children.get(parent, 0)
        children[parent] = rank + 1
        found.append(1.0 if parent < 0 else found[parent] * shares[rank])
    assert sorted(found, reverse=True) == pytest.approx(best)


@pytest.mark.parametrize(("shape", "drafter"), [("plain", True), ("plain", False)])
def test_without_speculation_only_plain_runs_are_measured_and_quickly(bed, shape, drafter) -> None:
    each = bed(shape, drafter)
    found = each.calibrate()
    assert each.verifier.parents == []
    assert max(each.verifier.prefilled) == 128
    assert len(found.table.plain) == 1
    assert found.table.plain == found.table.verifier
    assert found.table.drafter == ()
    assert found.took_s < 1


def test_without_a_drafter_the_verifiers_forwards_are_measured_all_the_same(bed) -> None:
    """Lookup, lookahead and Jacobi need them."""
    found = bed("tree", False).calibrate()
    assert {point.rows for point in found.table.verifier} == set(ROW_COUNTS)
    assert found.table.drafter == ()
    assert found.trouble == ""


def test_a_short_context_is_not_exceeded(bed) -> None:
    each = bed(context=200)
    found = each.calibrate()
    assert {point.context for point in found.table.verifier} == {84, 168}


@pytest.mark.parametrize("pace", [3, 10, 50, 400])
def test_a_slow_machine_is_measured_as_far_as_time_allows(bed, pace: int) -> None:
    each = bed()
    each.world.pace = pace
    found = each.calibrate()
    longest_s = pace * 5 * 2 * 16 / 1e3  # a plain run, twice
    # Nothing can be measured without the texts of 16 and of 128 tokens.
    assert found.took_s <= max(LIMIT_S, pace * 0.144) + longest_s
    assert found.table.plain[0].alone_ms == near(pace * 16)
    for context in {point.context for point in found.table.verifier}:
        row = [point for point in found.table.verifier if point.context == context]
        truth = [pace * forward_ms(point.rows, context) for point in row]
        if found.spread is None:
            truth = without_cliffs(truth)
        if found.table.verifier != found.table.plain:
            assert [point.alone_ms for point in row] == pytest.approx(truth)
        assert all(point.beside_ms >= point.alone_ms for point in row)
    assert found.table.drafter
    assert bool(found.trouble) == (pace == 400)
    CostModel(found.table).verifier.ms(16, 2000, 1.0)


@pytest.mark.parametrize("context", [18, 40, 64])
def test_a_tiny_context_will_do(bed, context: int) -> None:
    found = bed(context=context).calibrate()
    assert max(point.context for point in found.table.plain) <= max(1, context - 2 * ROW_COUNTS[-1])


def test_progress_never_goes_back_and_ends_full(bed) -> None:
    seen: list[float] = []
    bed().calibrate(progress=lambda done, total: seen.append(done / total))
    assert seen == sorted(seen)
    assert seen[-1] == 1


@pytest.mark.parametrize("steps", [0, 1, 5, 12, 20, 30])
def test_a_drafter_that_fails_costs_its_own_figures_only(bed, steps: int) -> None:
    each = bed()
    each.drafter.steps_left = steps
    found = each.calibrate()
    assert "no step today" in found.trouble
    for point in found.table.verifier:
        assert point.alone_ms == near(forward_ms(point.rows, point.context))
        assert point.beside_ms == point.alone_ms
    if steps < 2:
        pace = found.table.verifier[0].alone_ms / ASSUMED.verifier[0].alone_ms
        assert found.table.drafter[0].alone_ms == near(pace * ASSUMED.drafter[0].alone_ms)
    assert each.drafter.sessions == set()
    assert each.verifier.caches == {}


def test_a_verifier_that_fails_is_the_callers_to_explain(bed) -> None:
    each = bed()
    each.verifier.fails = True
    with pytest.raises(UnitFailed, match="no forward today"):
        each.calibrate()
    assert each.verifier.caches == {}
    assert each.drafter.sessions == set()


def test_work_goes_on_all_through_the_block_and_not_after_it() -> None:
    steps = threading.Semaphore(0)
    count = itertools.count(1)
    done = 0

    def step() -> None:
        nonlocal done
        time.sleep(0.002)
        done = next(count)
        steps.release()

    with at_work(step):
        assert done >= 1, "the block began before the work"
        for _ in range(20):
            assert steps.acquire(timeout=10)
    after = done
    assert after >= 20
    assert threading.active_count() == len(threading.enumerate())
    assert not any(thread.name == "ondevice-load" for thread in threading.enumerate())
    assert done == after


def test_work_that_fails_does_not_hang_and_is_reported_after_the_block() -> None:
    def step() -> None:
        raise UnitFailed("at once")

    reached = False
    with pytest.raises(UnitFailed, match="at once"), at_work(step):
        reached = True
    assert reached

"""Units whose steps take known virtual times: what is measured is exactly that."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice import calibration as module
from ondevice.calibration import (
    LIMIT_S,
    ROW_COUNTS,
    at_work,
    calibrate,
    tree_parents,
    without_cliffs,
)
from ondevice.costs import ASSUMED, CostModel
from ondevice.errors import UnitFailed
from ondevice.records import DraftResult, Verdict
from ondevice.worker import UnitWorker

DRAFTER_ROWS = (1, 8, 64)
VERIFIER_SLOWDOWN, DRAFTER_SLOWDOWN = 1.5, 1.25
CLIFFS = {3: 12.0, 6: 9.0}


class World:
    """The time, who keeps the units busy, and what else happens to a step."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.called = self.load = ""
        self.pace = 1.0
        self.disturb: Callable[[str, int], float] = lambda unit, rows: 1.0

    def step(self, unit: str, rows: int, ms: float) -> tuple[int, int]:
        self.called = unit
        start_ns = self.now_ns
        self.now_ns += round(1e6 * self.pace * ms * self.disturb(unit, rows))
        return start_ns, self.now_ns

    @contextmanager
    def busy(self, step: Callable[[], object]) -> Iterator[None]:
        step()
        self.load = self.called
        yield
        self.load = ""


def forward_ms(rows: int, context: int) -> float:
    return 20 + rows + CLIFFS.get(rows, 0.0) + context / 128


class VirtualVerifier:
    vocab_size, shape_reason = 100, "as scripted"

    def __init__(self, world: World, shape: str = "tree", context: int = 4096) -> None:
        self.world, self.shape, self.context = world, shape, context
        self.caches: dict[int, list[int]] = {}
        self.parents: list[list[int]] = []
        self.prefilled: list[int] = []
        self.fails = False

    def open_session(self) -> int:
        self.caches[len(self.prefilled)] = []
        return len(self.prefilled)

    def close_session(self, session):
        del self.caches[session]

    def prefill(self, session, tokens, stopped):
        self.world.now_ns += round(1e6 * self.world.pace * len(tokens))
        self.caches[session] += tokens
        self.prefilled.append(len(tokens))
        return len(tokens)

    def _slower(self) -> float:
        return VERIFIER_SLOWDOWN if self.world.load == "drafter" else 1.0

    def verify(self, requests):
        (request,) = requests
        if self.fails:
            raise UnitFailed("no forward today")
        cache = self.caches[request.session]
        self.parents.append([row.parent for row in request.rows])
        ms = forward_ms(len(request.rows), len(cache)) * self._slower()
        span = self.world.step("verifier", len(request.rows), ms)
        cache += [request.rows[0].token, request.rows[-1].token]
        return [Verdict(0, (1,), (1, 2), (0.0, 0.0), *span)]

    def run(self, request, stopped):
        cache = self.caches[request.session]
        ms = (15 + len(cache) / 128) * self._slower()
        for index in range(request.limit):
            span = self.world.step("verifier", 1, ms * (3 if index == 0 else 1))
            cache.append(1)
            yield Verdict(0, (), (1,), (0.0,), *span, more=index < request.limit - 1)

    def truncate(self, session, length):
        assert self.shape != "plain", "rolling back costs a prefill there"
        assert length < len(self.caches[session])
        del self.caches[session][length:]

    def close(self):
        pass


class VirtualDrafter:
    name = runtime_name = "virtual"

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions: set[int] = set()
        self.steps_left: int | None = None
        self.known: set[int] = set()

    def open_session(self):
        self.sessions.add(7)
        return 7

    def close_session(self, session):
        self.sessions.remove(session)

    def prefill(self, session, tokens, stopped):
        return len(tokens)

    def draft(self, request):
        if self.steps_left == 0:
            raise UnitFailed("no step today")
        if self.steps_left is not None:
            self.steps_left -= 1
        self.known -= set(request.dropped)
        assert not self.known, "nodes that nobody needs are not kept"
        self.known = {row.node for row in request.rows} - {0}
        slower = DRAFTER_SLOWDOWN if self.world.load == "verifier" else 1.0
        rows = len(request.rows)
        return DraftResult(0, (), *self.world.step("drafter", rows, (5 + rows / 4) * slower))

    def truncate(self, session, length):
        pass

    def close(self):
        pass


class Bed:
    """Both units on real workers."""

    def __init__(self, shape: str = "tree", drafter: bool = True, context: int = 4096) -> None:
        self.world = World()
        self.verifier = VirtualVerifier(self.world, shape, context)
        self.drafter = VirtualDrafter(self.world)
        self.workers = [UnitWorker("verifier", lambda: self.verifier)]
        if drafter:
            self.workers.append(UnitWorker("drafter", lambda: self.drafter))

    def calibrate(self, **more):
        verifier, drafter = (*self.workers, None)[:2]
        return calibrate(
            verifier,
            drafter,
            DRAFTER_ROWS if drafter else (),
            clock=lambda: self.world.now_ns / 1e9,
            busy=self.world.busy,
            **more,
        )


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
        assert point.alone_ms == near(15 + point.context / 128)  # not three times that
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


def test_a_token_that_is_read_late_does_not_make_plain_decoding_cheaper(bed) -> None:
    each = bed(drafter=False)
    late = itertools.cycle([0.9, 1.0, 1.4, 0.6])  # the pace of a run is that of all its tokens
    each.world.disturb = lambda unit, rows: next(late)
    assert each.calibrate().table.plain[0].alone_ms == near(16)


def test_cliffs_are_believed_only_where_the_passes_agree(bed) -> None:
    each = bed()
    noise = itertools.cycle([1.0, 2.0, 1.3, 1.7, 3.1, 1.2, 1.1])
    each.world.disturb = lambda unit, rows: next(noise)
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


@pytest.mark.parametrize(("shape", "drafter"), [("plain", True), ("tree", False)])
def test_without_speculation_only_plain_runs_are_measured_and_quickly(bed, shape, drafter) -> None:
    each = bed(shape, drafter)
    found = each.calibrate()
    assert each.verifier.parents == []
    assert max(each.verifier.prefilled) == 128
    assert len(found.table.plain) == 1
    assert found.table.plain == found.table.verifier
    assert found.table.drafter == ()
    assert found.took_s < 1


def test_a_short_context_is_not_exceeded(bed) -> None:
    each = bed(context=200)
    found = each.calibrate()
    assert {point.context for point in found.table.verifier} == {84, 168}


@pytest.mark.parametrize("pace", [3, 10, 50, 400])
def test_a_slow_machine_is_measured_as_far_as_time_allows(bed, pace: int) -> None:
    each = bed()
    each.world.pace = pace
    found = each.calibrate()
    longest_s = pace * 3 * 60 / 1e3  # a plain run with its first forward
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

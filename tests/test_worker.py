"""One thread a unit: sessions in rotation, jobs that end exactly once, units that hang or die."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.deadline import GRACE_S, Deadline, Stopwatch
from ondevice.errors import Closed, UnitFailed, UnitLost
from ondevice.rotation import Rotation
from ondevice.worker import Job, UnitWorker

SHORT = Deadline(floor_s=0.1, factor=10.0, first_s=0.1, first_steps=0)


class Unit:
    """Does nothing; remembers that it was closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class KillableUnit(Unit):
    """Its `hang` ends when it is killed, as a call into a process does."""

    def __init__(self) -> None:
        super().__init__()
        self.killed = threading.Event()

    def hang(self) -> None:
        assert self.killed.wait(30)
        raise UnitLost("the process is gone")

    def kill(self) -> None:
        self.killed.set()


class Outcome:
    """What becomes of one job."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.failed = threading.Event()

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.failed.set()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=25),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_nobody_has_two_turns_while_another_waits(arrivals, seed):
    """Against a model: lists of waiting owners, filled at random moments."""
    rng = random.Random(seed)
    rotation: Rotation[list[int]] = Rotation()
    to_come, waiting, left = deque(arrivals), {}, {}
    turns: list[int] = []
    while to_come or left:
        while to_come and (not left or rng.random() < 0.4):
            owner, count = to_come.popleft()
            rotation.put(owner, [owner, count])
            left.setdefault(owner, deque()).append(count)
            waiting.setdefault(owner, len(turns))
        owner, item = rotation.take()
        assert item == [owner, left[owner][0]], "its own items lost their order"
        since = turns[waiting.pop(owner) :]
        assert all(count <= 1 for count in Counter(since).values()), "somebody had two turns"
        turns.append(owner)
        item[1] -= 1
        left[owner][0] -= 1
        if item[1] == 0:
            left[owner].popleft()
            rotation.done(owner)
        else:
            rotation.again(owner)
        if left[owner]:
            waiting[owner] = len(turns)
        else:
            del left[owner]
    assert not rotation.others_wait()


def test_a_long_job_lets_others_in_between_and_keeps_its_place():
    worker: UnitWorker = UnitWorker("verifier", Unit)
    order: list[str] = []
    begun, all_there = threading.Event(), threading.Event()

    def long(unit):
        for step in range(4):
            begun.set()
            all_there.wait(30)
            order.append(f"long {step}")
            yield

    def short(name):
        return Job(lambda unit: order.append(name), pytest.fail)

    worker.submit("a", Job(long, pytest.fail))
    assert begun.wait(30)
    worker.submit("a", short("a after"))
    for name in ("b 0", "b 1"):
        worker.submit("b", short(name))
    last = threading.Event()
    worker.submit("a", Job(lambda unit: last.set(), pytest.fail))
    all_there.set()
    assert last.wait(30)
    worker.close()
    assert order == ["long 0", "b 0", "long 1", "b 1", "long 2", "long 3", "a after"]


def test_a_job_that_raises_fails_alone():
    worker: UnitWorker = UnitWorker("drafter", Unit)
    bad, good = Outcome(), Outcome()
    worker.submit("a", Job(lambda unit: 1 / 0, bad.fail))
    worker.submit("a", Job(lambda unit: None, good.fail))
    assert worker.call(lambda unit: 7) == 7
    assert [type(error) for error in bad.errors] == [UnitFailed]
    assert "ZeroDivisionError" in str(bad.errors[0])
    assert good.errors == []
    assert worker.lost is None
    worker.close()


def test_a_verifier_that_raises_the_unexplained_is_lost_and_an_explained_error_is_not():
    losses: list[UnitLost] = []
    worker: UnitWorker = UnitWorker("verifier", Unit, on_lost=losses.append)
    explained, unexplained, later = Outcome(), Outcome(), Outcome()

    def refuse(unit):
        raise UnitFailed("not these rows")

    worker.submit("a", Job(refuse, explained.fail))
    assert worker.call(lambda unit: 1) == 1
    worker.submit("a", Job(lambda unit: 1 / 0, unexplained.fail))
    assert unexplained.failed.wait(30)
    worker.submit("b", Job(lambda unit: None, later.fail))
    assert losses == unexplained.errors == later.errors == [worker.lost]
    with pytest.raises(UnitLost, match="division"):
        worker.call(lambda unit: 1)
    assert worker.opened().closed.wait(30)
    worker.close()


@pytest.mark.parametrize("kind", [Unit, KillableUnit])
def test_a_step_beyond_its_deadline_loses_the_unit_and_fails_every_job_once(kind):
    worker: UnitWorker = UnitWorker("drafter", kind, SHORT)
    release = threading.Event()
    stuck, waiting = Outcome(), Outcome()

    def hang(unit):
        if kind is KillableUnit:
            unit.hang()
        assert release.wait(30)

    worker.submit("a", Job(hang, stuck.fail, timed=True))
    worker.submit("b", Job(lambda unit: None, waiting.fail))
    started = time.monotonic()
    with pytest.raises(UnitLost, match=r"longer than 0\.1 s"):
        worker.call(lambda unit: None)  # whoever waits, watches
    assert time.monotonic() - started < 5
    release.set()
    worker.close()
    assert worker.opened().closed.wait(30), "a thread that comes back frees its unit"
    assert [len(outcome.errors) for outcome in (stuck, waiting)] == [1, 1]
    assert worker.patience_s() is None


def test_closing_ends_a_process_at_once_and_leaves_a_hung_thread_behind(monkeypatch):
    monkeypatch.setattr("ondevice.worker.CLOSE_SECONDS", 0.2)
    release = threading.Event()
    for kind, hang in ((KillableUnit, KillableUnit.hang), (Unit, lambda unit: release.wait(30))):
        worker: UnitWorker = UnitWorker("drafter", kind, Deadline())
        worker.opened()
        outcome = Outcome()
        worker.submit("a", Job(hang, outcome.fail))
        started = time.monotonic()
        worker.close()
        assert time.monotonic() - started < 5
        late = Outcome()
        worker.submit("a", Job(hang, late.fail))
        assert [type(error) for error in late.errors] == [Closed]
        assert worker.lost is None
    release.set()


def test_the_first_steps_have_more_time_and_do_not_count_as_slow_ones(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ondevice.deadline.monotonic", lambda: now[0])
    watch = Stopwatch(Deadline(floor_s=2.0, factor=10.0, first_s=60.0, first_steps=1))

    def step(seconds: float) -> None:
        watch.start()
        now[0] += seconds
        watch.step()
        watch.stop()

    assert watch.limit_s == 60
    step(50)
    assert watch.limit_s == 2
    step(0.1)
    assert watch.limit_s == 2
    step(0.5)
    assert watch.limit_s == 5


def test_a_step_is_overdue_at_the_second_look_only(monkeypatch):
    """So a program that was stopped, and finds all steps late when it goes on, kills none."""
    now = [0.0]
    monkeypatch.setattr("ondevice.deadline.monotonic", lambda: now[0])
    watch = Stopwatch(SHORT)
    watch.start()
    now[0] = 0.05
    assert not watch.overdue()
    assert watch.patience_s() == pytest.approx(0.05)
    now[0] = 100.0
    assert not watch.overdue()
    assert watch.patience_s() == pytest.approx(GRACE_S)
    watch.stop()
    watch.start()
    now[0] += 50
    assert not watch.overdue(), "another step, another first look"
    now[0] += GRACE_S
    assert watch.overdue()
    watch.stop()
    assert not watch.overdue()

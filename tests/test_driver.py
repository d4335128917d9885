"""Several sessions on the same two units: exact, in turn, and nobody waits for a whole answer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial

import pytest
from engines import open_here
from faults import Faulty

from ondevice import verifier as verifier_module
from ondevice.errors import UnitLost
from ondevice.rotation import Rotation
from ondevice.sampling import SamplingParams
from ondevice.schedule import STRATEGIES
from ondevice.session import Options

PROMPT = [9, 40, 77, 41, 9]
BRIEF = Options(max_tokens=8, strategy="pipelined")


class WatchedRotation(Rotation):
    """Notes who had the turns, and how many each other owner had while one waited."""

    def __init__(self) -> None:
        super().__init__()
        self._watch = threading.Lock()
        self.turns: list[object] = []
        self.most_turns_of_another = 0
        self._waiting: dict[object, int] = {}

    def put(self, owner, item):
        with self._watch:
            super().put(owner, item)
            self._waiting.setdefault(owner, len(self.turns))

    def again(self, owner):
        with self._watch:
            self._waiting.setdefault(owner, len(self.turns))
            super().again(owner)

    def done(self, owner):
        with self._watch:
            super().done(owner)
            if owner in self._items:
                self._waiting[owner] = len(self.turns)
            else:
                self._waiting.pop(owner, None)

    def take(self):
        taken = super().take()
        if taken is None:
            return None
        owner = taken[0]
        with self._watch:
            since = Counter(self.turns[self._waiting.pop(owner, len(self.turns)) :])
            del since[owner]
            self.most_turns_of_another = max([self.most_turns_of_another, *since.values()])
            self.turns.append(owner)
        return taken


@pytest.fixture
def watched(tiny_pair, monkeypatch):
    """An engine whose units are late at random; its two rotations are watched."""
    monkeypatch.setattr("ondevice.worker.Rotation", WatchedRotation)
    late = partial(Faulty, longest_delay_s=0.003)
    with open_here(tiny_pair, late, late) as engine:
        yield engine


class Reader(threading.Thread):
    def __init__(self, session, prompt, options: Options) -> None:
        super().__init__(daemon=True)
        self.session, self.asked, self.answer = session, (prompt, options), None

    def run(self) -> None:
        self.answer = self.session.generate(*self.asked)


def join(readers: list[Reader]) -> None:
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive(), "a reader hangs"
        assert reader.answer is not None


def test_sessions_at_once_write_what_each_writes_alone_and_take_turns(watched, engine):
    asked = [
        (PROMPT[i % 3 :], Options(SamplingParams(0.8, seed=i), 40, strategy=strategy))
        for i, strategy in enumerate([*STRATEGIES, *STRATEGIES])
    ]
    readers = [Reader(watched.session(), *each) for each in asked]
    for reader in readers:
        reader.start()
    join(readers)
    for reader, each in zip(readers, asked, strict=True):
        assert reader.answer.token_ids == engine.generate(*each).token_ids
    for worker in (watched._verifier, watched._drafters.first):
        assert worker._jobs.most_turns_of_another <= 1
        assert len(worker._jobs.turns) > 40


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_answer_does_not_wait_for_the_end_of_a_plain_run(watched, strategy):
    plain = watched.session()
    stream = plain.stream(PROMPT, Options(max_tokens=3000, strategy="plain"))
    next(stream)
    reader = Reader(watched.session(), PROMPT, Options(max_tokens=30, strategy=strategy))
    reader.start()
    join([reader])
    handle = plain._driver._verifier_session
    written = watched._verifier.call(lambda unit: len(unit._sessions[handle].tokens))
    assert written < 1000, "it waited for the run"
    stream.close()


def test_a_long_prefill_lets_other_sessions_in_between_its_chunks(tiny_pair, monkeypatch, engine):
    monkeypatch.setattr("ondevice.worker.Rotation", WatchedRotation)
    monkeypatch.setattr(verifier_module, "PREFILL_ROWS", 16)
    long = [(7 * i) % 200 + 4 for i in range(900)]
    with open_here(tiny_pair, SlowChunks, SlowChunks) as chunked:
        sessions = [chunked.session(), chunked.session()]
        reader = Reader(sessions[0], long, BRIEF)
        reader.start()
        time.sleep(0.05)
        answer = sessions[1].generate(PROMPT, BRIEF)
        assert reader.answer is None, "the long prompt was read first"
        join([reader])
        assert answer.token_ids == engine.generate(PROMPT, BRIEF).token_ids
        assert reader.answer.token_ids == engine.generate(long, BRIEF).token_ids
        for worker, session in (
            (chunked._verifier, sessions[0]._driver._verifier_session),
            (chunked._drafters.first, sessions[0]._driver._drafter_session),
        ):
            assert worker._jobs.most_turns_of_another <= 1
            assert worker.call(lambda unit, at=session: unit.prefill(at, (), lambda: False)) > 880


class SlowChunks:
    """A unit whose prefill takes 5 ms a chunk."""

    def __init__(self, unit) -> None:
        self._unit = unit

    def __getattr__(self, name: str):
        return getattr(self._unit, name)

    def prefill(self, session, tokens, stopped):
        def slowly() -> bool:
            time.sleep(0.005)
            return stopped()

        return self._unit.prefill(session, tokens, slowly)


def test_a_cancel_at_any_moment_frees_both_units(tiny_pair, engine):
    """From another thread, in prefill, in a forward, between two: the next answer is right."""
    options = Options(SamplingParams(0.8, seed=2), 40, strategy="pipelined")
    right = engine.generate(PROMPT, options).token_ids
    with open_here(tiny_pair, *[partial(Faulty, longest_delay_s=0.002)] * 2) as late:
        session = late.session()
        for trial in range(12):
            timer = threading.Timer(trial * 0.005, session.cancel)
            timer.start()
            answer = session.generate(PROMPT, options)
            timer.cancel()
            timer.join()
            assert answer.token_ids == right[: len(answer.token_ids)]
            assert session.generate(PROMPT, options).token_ids == right


def test_a_session_opened_after_the_drafters_loss_says_why_it_has_none(tiny_pair):
    with open_here(tiny_pair) as engine:
        engine._drafters.first.lose(UnitLost("gone"))
        reason = engine.generate(PROMPT, BRIEF).stats.reason
        assert "without the drafter since it failed: gone; this engine uses it no more" in reason

"""Whatever a unit does, an answer is exact or a clear error, and what is left can be used."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from engines import open_here
from faults import NONSENSE, Fault, Faulty
from processes import is_gone

from ondevice.deadline import Deadline
from ondevice.engine import Engine
from ondevice.errors import Closed, OnDeviceError, UnitFailed, UnitLost
from ondevice.sampling import SamplingParams
from ondevice.schedule import STRATEGIES
from ondevice.session import Answer, Options, Session

PROMPT = [9, 40, 77, 41, 9]
TOKENS = 12
SOON = Deadline(floor_s=0.15, factor=10.0, first_s=0.15, first_steps=0)
SAMPLINGS = (SamplingParams(), SamplingParams(0.8, seed=4), SamplingParams(1.0, seed=5, top_k=20))
LONG = Options(SAMPLINGS[1], 600, strategy="pipelined")


@pytest.fixture(scope="module")
def sound(tiny_pair) -> Iterator[Engine]:
    with open_here(tiny_pair) as engine:
        yield engine


@pytest.fixture(scope="module")
def text(sound):
    """The right text: prompt's length, index of the sampling -> token ids."""

    @cache
    def decode(sampling: int, tokens: int = TOKENS) -> tuple[int, ...]:
        options = Options(SAMPLINGS[sampling], tokens, strategy="plain")
        return sound.generate(PROMPT, options).token_ids

    return decode


DRAFTER_KINDS = ("raise", "fail", "lose", "hang", *NONSENSE)
VERIFIER_KINDS = ("raise", "fail")


class Plan:
    """One of the 200: faults, delays, sessions, and who ends what, all from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.drafter = self.verifier = None
        if rng.random() < 0.7:
            kind = rng.choice(DRAFTER_KINDS)
            method = rng.choice(["draft", "draft", "prefill", "truncate"])
            at = rng.randrange(3) if method != "draft" else rng.randrange(8)
            self.drafter = Fault(kind, "draft" if kind in NONSENSE else method, at)
        if rng.random() < 0.35:
            method = rng.choice(["verify", "run", "prefill"])
            at = 0 if method == "prefill" else rng.randrange(8)
            self.verifier = Fault(rng.choice(VERIFIER_KINDS), method, at)
        hangs = self.drafter is not None and self.drafter.kind == "hang"
        self.deadline = SOON if hangs else Deadline()
        self.delay_s = rng.choice([0.0, 0.001, 0.002])
        self.sessions = rng.choice([1, 1, 2, 3])
        self.cancel_after_s = rng.uniform(0, 0.05) if rng.random() < 0.4 else None

    def options(self) -> tuple[int, Options]:
        sampling = self.rng.randrange(len(SAMPLINGS))
        children = self.rng.choice([None, 1])
        strategy = self.rng.choice(STRATEGIES)
        return sampling, Options(SAMPLINGS[sampling], TOKENS, strategy=strategy, children=children)


class Reader(threading.Thread):
    """Two answers of one session, the second one after whatever became of the first."""

    def __init__(self, session: Session, asked: list[tuple[int, Options]]) -> None:
        super().__init__(daemon=True)
        self.session, self.asked = session, asked
        self.answers: list[tuple[int, Answer | OnDeviceError]] = []

    def run(self) -> None:
        for sampling, options in self.asked:
            try:
                self.answers.append((sampling, self.session.generate(PROMPT, options)))
            except OnDeviceError as error:
                self.answers.append((sampling, error))


@pytest.mark.parametrize(
    "seed", [*range(80), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(80, 200))]
)
def test_an_answer_is_exact_or_a_clear_error_and_both_units_can_be_used_afterwards(
    tiny_pair, text, seed
):
    plan = Plan(seed)
    with open_here(
        tiny_pair,
        lambda unit: Faulty(unit, plan.verifier, plan.delay_s),
        lambda unit: Faulty(unit, plan.drafter, plan.delay_s),
        plan.deadline,
    ) as engine:
        readers = [
            Reader(engine.session(), [plan.options(), plan.options()]) for _ in range(plan.sessions)
        ]
        for reader in readers:
            reader.start()
        if plan.cancel_after_s is not None:
            timer = threading.Timer(plan.cancel_after_s, readers[0].session.cancel)
            timer.start()
        for reader in readers:
            reader.join(60)
            assert not reader.is_alive(), "a reader hangs"
            assert len(reader.answers) == 2, "an error that the product does not explain"
            for sampling, answer in reader.answers:
                judge(plan, answer, text(sampling))
        check_what_is_left(plan, engine, text)
        if plan.drafter is not None:
            plan.drafter.release.set()


def judge(plan: Plan, answer: Answer | OnDeviceError, truth: tuple[int, ...]) -> None:
    if isinstance(answer, OnDeviceError):
        assert plan.verifier is not None
        assert plan.verifier.met.is_set()
        assert isinstance(answer, UnitFailed | Closed)
        assert "planned" in str(answer) or "new session" in str(answer)
    elif answer.finish_reason == "cancelled":
        assert plan.cancel_after_s is not None
        assert answer.token_ids == truth[: len(answer.token_ids)]
    else:
        assert answer.token_ids == truth


def check_what_is_left(plan: Plan, engine: Engine, text) -> None:
    verifier, drafter = plan.verifier, plan.drafter
    if verifier is not None and verifier.kind == "raise" and verifier.met.is_set():
        with pytest.raises(Closed, match="planned"):
            engine.generate(PROMPT)
        return
    if verifier is not None:
        verifier.method = "none"  # a request that was refused is no reason to refuse the next
    for strategy in ("plain", "pipelined"):
        answer = engine.generate(PROMPT, Options(SAMPLINGS[1], TOKENS, strategy=strategy))
        assert answer.token_ids == text(1)
    for _ in range(3):  # let it do all that it was asked, and be seen to hang if it does
        worker = engine._drafters.current()
        if worker is not None:
            with suppress(OnDeviceError):
                worker.call(lambda unit: None)
    worker = engine._drafters.current()
    if drafter is not None and drafter.kind in ("lose", "hang") and drafter.met.is_set():
        assert worker is None
        reason = engine.generate(PROMPT, replace(LONG, max_tokens=4)).stats.reason
        assert "uses it no more" in reason
    else:
        assert worker.call(lambda unit: unit.open_session()) >= 0


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_refused_with_its_name_and_costs_no_token(tiny_pair, text, kind):
    fault = Fault(kind, "draft", 1)
    with open_here(tiny_pair, drafter=lambda unit: Faulty(unit, fault)) as engine:
        session = engine.session()
        answer = session.generate(PROMPT, replace(LONG, max_tokens=100))
        assert answer.token_ids == text(1, 100)
        assert fault.met.is_set()
        assert "without the drafter since it failed: " in answer.stats.reason
        assert "expected" in answer.stats.reason
        other = engine.session()
        assert other.generate(PROMPT, replace(LONG, max_tokens=100)).stats.drafter_busy > 0


def process_id(engine: Engine) -> int:
    return engine._drafters.current().opened().process_id


def wait_for_another_drafter(engine: Engine) -> None:
    until = time.monotonic() + 60
    while engine._drafters.current() is None:
        assert time.monotonic() < until, "it was not started again"
        time.sleep(0.01)


def answer_and_signal(engine: Engine, session: Session, number: int) -> Answer:
    """One answer, in whose middle the drafter's process is sent a signal."""
    pieces = session.stream(PROMPT, LONG)
    for _ in range(3):
        next(pieces)
    os.kill(process_id(engine), number)
    *_, last = pieces
    assert last.answer is not None
    return last.answer


def test_a_drafter_that_is_killed_is_started_again_once(tiny_pair, text):
    with open_here(tiny_pair, process=True) as engine, engine.session() as session:
        first = process_id(engine)
        answer = answer_and_signal(engine, session, signal.SIGKILL)
        assert answer.token_ids == text(1, 600)
        assert "process was ended by SIGKILL; it was started again" in answer.stats.reason
        wait_for_another_drafter(engine)
        second = process_id(engine)
        answer = session.generate(PROMPT, LONG)
        assert answer.token_ids == text(1, 600)
        assert answer.stats.drafter_busy > 0
        assert "failed" not in answer.stats.reason
        answer = answer_and_signal(engine, session, signal.SIGKILL)
        assert answer.token_ids == text(1, 600)
        if "failed" not in answer.stats.reason:  # the verifier was done before it was asked again
            answer = session.generate(PROMPT, LONG)
        assert "SIGKILL; this engine uses it no more" in answer.stats.reason
        assert engine._drafters.current() is None
        for each in (session.generate, engine.generate):
            answer = each(PROMPT, replace(LONG, max_tokens=TOKENS))
            assert answer.token_ids == text(1)
            assert "this engine uses it no more" in answer.stats.reason
    assert is_gone(first)
    assert is_gone(second)


def test_a_process_that_hangs_is_killed_at_its_deadline(tiny_pair, text):
    deadline = replace(SOON, floor_s=0.5, first_s=0.5)
    with open_here(tiny_pair, deadline=deadline, process=True) as engine:
        hung = process_id(engine)
        answer = answer_and_signal(engine, engine.session(), signal.SIGSTOP)
        assert answer.token_ids == text(1, 600)
        if "failed" not in answer.stats.reason:  # the verifier was done before the deadline
            with pytest.raises(UnitLost, match="longer than"):
                engine._drafters.current().call(lambda unit: unit.open_session())
        else:
            assert "longer than" in answer.stats.reason
        assert is_gone(hung)
        wait_for_another_drafter(engine)
        assert engine.generate(PROMPT, LONG).stats.drafter_busy > 0


def test_a_verifier_that_dies_takes_everything_with_it(tiny_pair):
    fault = Fault("raise", "verify", 2)
    engine = open_here(tiny_pair, lambda unit: Faulty(unit, fault), process=True)
    drafter, sessions = process_id(engine), [engine.session(), engine.session()]
    with pytest.raises(UnitLost, match="the verifier failed: OSError: planned"):
        sessions[0].generate(PROMPT, LONG)
    assert is_gone(drafter)
    with pytest.raises(OnDeviceError, match=r"planned|new session"):
        sessions[0].generate(PROMPT)
    with pytest.raises(UnitLost, match="planned"):
        sessions[1].generate(PROMPT)
    with pytest.raises(Closed, match="planned"):
        engine.session()
    engine.close()


def test_a_closed_engine_leaves_no_process(tiny_pair):
    engine = open_here(tiny_pair, process=True)
    stream = engine.session().stream(PROMPT, LONG)
    next(stream)
    drafter = process_id(engine)
    engine.close()
    assert is_gone(drafter, within_s=1.0)
    assert list(stream)[-1].answer.finish_reason == "cancelled"

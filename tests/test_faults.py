"""Whatever a unit does, an answer is exact or a clear error, and what is left can be used."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import cache

import pytest
from engines import open_here
from faults import NONSENSE, Fault, Faulty

from ondevice.deadline import Deadline
from ondevice.engine import Engine
from ondevice.errors import Closed, OnDeviceError, UnitFailed
from ondevice.policy import STRATEGIES
from ondevice.sampling import SamplingParams
from ondevice.session import Answer, Options, Session

PROMPT = [9, 40, 77, 41, 9]
TOKENS = 12
SOON = Deadline(floor_s=0.15, factor=10.0, first_s=0.15, first_steps=0)
SAMPLINGS = (SamplingParams(), SamplingParams(0.8, seed=4), SamplingParams(1.0, seed=5, top_k=20))


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


@pytest.mark.parametrize("seed", range(200))
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
    worker = engine._drafters.current()
    if drafter is not None and drafter.kind in ("lose", "hang") and drafter.met.is_set():
        if worker is not None:  # it hangs since the last answer, and nobody has waited for it
            with pytest.raises(UnitLost):
                worker.call(lambda unit: None)
        assert engine._drafters.current() is None
        reason = engine.generate(PROMPT, Options(max_tokens=4)).stats.reason
        assert "uses it no more" in reason
    else:
        assert worker.call(lambda unit: unit.open_session()) >= 0


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_refused_with_its_name_and_costs_no_token(tiny_pair, text, kind):
    fault = Fault(kind, "draft", 1)
    with open_here(tiny_pair, drafter=lambda unit: Faulty(unit, fault)) as engine:
        session = engine.session()
        answer = session.generate(PROMPT, Options(SAMPLINGS[1], 100))
        assert answer.token_ids == text(1, 100)
        assert fault.met.is_set()
        assert "without the drafter since it failed: " in answer.stats.reason
        assert "expected" in answer.stats.reason
        other = engine.session()
        assert other.generate(PROMPT, Options(SAMPLINGS[1], 100)).stats.num_draft_tokens > 0

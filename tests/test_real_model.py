"""The default pair, brought and converted by the product itself: a short look, and a long one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from ondevice.apps.comparison import compare
from ondevice.apps.prompts import PROMPTS
from ondevice.engine import Engine
from ondevice.policy import STRATEGIES
from ondevice.sampling import SamplingParams
from ondevice.session import Options

MESSAGE = "What is the capital of France?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("smollm2", quiet=True) as engine:
        yield engine


def test_the_default_pair_says_the_same_under_every_schedule(engine):
    assert engine.model.no_drafter == ""
    sampling = [SamplingParams(), SamplingParams(temperature=0.8, seed=7)]
    answers = {
        (strategy, index): engine.generate(
            MESSAGE, Options(sampling[index], 6, strategy=strategy)
        ).token_ids
        for strategy, index in product(STRATEGIES, range(2))
    }
    for index in range(2):
        assert len({answers[strategy, index] for strategy in STRATEGIES}) == 1
    assert "Paris" in engine.generate(MESSAGE, Options(max_tokens=12)).text


@pytest.mark.slow
def test_thirty_prompts_are_the_same_under_every_schedule(engine):
    report = compare(engine, PROMPTS, 64, lambda: None)
    assert len(PROMPTS) == 30
    assert report.passed, report


@pytest.mark.slow
def test_a_conversation_on_the_real_model_reuses_the_cache(engine):
    with engine.session() as session:
        session.generate(MESSAGE, Options(max_tokens=24))
        committed = len(session._driver.coordinator.committed)
        second = session.generate("And of Italy?", Options(max_tokens=24))
        assert "Rome" in second.text
        assert second.stats.prompt_tokens > committed

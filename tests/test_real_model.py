"""The default pair, brought and converted by the product itself: a short look, and a long one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ondevice.apps import comparison
from ondevice.apps.comparison import compare
from ondevice.apps.prompts import PROMPTS
from ondevice.engine import Engine
from ondevice.prompt import Message
from ondevice.sampling import SamplingParams
from ondevice.schedule import STRATEGIES, Sizes
from ondevice.session import Options

MESSAGE = "What is the capital of France?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("smollm2", quiet=True) as engine:
        yield engine


def test_the_default_pair_says_the_same_under_every_schedule(engine):
    """Few tokens and one session, whose prompt is prefilled once: a forward may take a second."""
    assert engine.model.no_drafter == ""
    prompt = [Message(role="user", content=MESSAGE)]
    with engine.session() as session:
        for sampling in (SamplingParams(), SamplingParams(temperature=0.8, seed=7)):
            answers = [
                session.generate(prompt, Options(sampling, 4, strategy=strategy)).token_ids
                for strategy in STRATEGIES
            ]
            assert answers == [answers[0]] * len(STRATEGIES)
        assert "Paris" in session.generate(prompt, Options(max_tokens=7, strategy="plain")).text


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_thirty_prompts_are_the_same_under_every_schedule(engine, monkeypatch, temperature):
    monkeypatch.setattr(comparison, "LAWS", (SamplingParams(temperature=temperature, seed=7),))
    monkeypatch.setattr(comparison, "SIZES", Sizes(verify_rows=4, depth=1))  # an emulated drafter
    report = compare(engine, PROMPTS, 48, lambda: None)
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

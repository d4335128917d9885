"""Same seed, same text: whatever the schedule, and however late the units are."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import open_here

from ondevice.apps.comparison import difference
from ondevice.apps.prompts import PROMPTS
from ondevice.engine import Engine
from ondevice.records import Window
from ondevice.sampling import SamplingParams
from ondevice.schedule import STRATEGIES, Sizes
from ondevice.session import Options

LAWS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=11),
    SamplingParams(temperature=1.0, seed=12),
)
TOKENS = 48
WINDOW = Window(columns=5, ngram=4, guesses=3)
SIZED = (Sizes(verify_rows=5, depth=3), Sizes(verify_rows=16, depth=5, draft_rows=3))


def schedules(law: SamplingParams, tokens: int = TOKENS) -> list[Options]:
    """All but plain: chosen sizes and, since those may find that nothing pays, set ones."""
    chosen = [
        Options(law, tokens, strategy=strategy, children=children)
        for strategy in STRATEGIES
        if strategy != "plain"
        for children in (1, 2, None)
    ]
    beside = ("auto", "pipelined", "weightless", "lookahead")
    chosen += [Options(law, tokens, strategy=name, window=WINDOW) for name in beside]
    chosen += [
        Options(law, tokens, strategy=name, sizes=sizes)
        for name in ("weightless", "lookup", "lookahead", "jacobi")
        for sizes in SIZED
    ]
    return chosen + [
        Options(law, tokens, strategy=strategy, children=children, sizes=sizes)
        for strategy in ("sequential", "pipelined")
        for children, sizes in zip((1, None), SIZED, strict=True)
    ]


class Late:
    """A unit whose every step begins and ends up to 3 ms late."""

    def __init__(self, unit: Any, seed: int) -> None:
        self._unit, self._rng = unit, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unit, name)

    def _nap(self) -> None:
        time.sleep(self._rng.choice([0, 0, 0.0005, 0.001, 0.003]))

    def _late(self, method: Any, *args: Any) -> Any:
        self._nap()
        try:
            return method(*args)
        finally:
            self._nap()

    def draft(self, *args: Any) -> Any:
        return self._late(self._unit.draft, *args)

    def verify(self, *args: Any) -> Any:
        return self._late(self._unit.verify, *args)

    def prefill(self, *args: Any) -> Any:
        return self._late(self._unit.prefill, *args)

    def run(self, *args: Any) -> Iterator[Any]:
        for verdict in self._unit.run(*args):
            self._nap()
            yield verdict


def some_prompts(count: int) -> list[str]:
    return [f"{number}. {PROMPTS[number % len(PROMPTS)]}" for number in range(count)]


def check(engine: Engine, texts: Sequence[str], law: SamplingParams) -> None:
    """No text parts from the plain one but at a near-tie, and all set sizes did draft.

    One session a prompt, so that every answer but the first finds its prompt in both caches.
    """
    drafted: Counter[str] = Counter()
    for text in texts:
        prompt = engine.model.tokenizer.encode(text)
        with engine.session() as session:
            plain = session.generate(prompt, Options(law, TOKENS, strategy="plain"))
            for options in schedules(law):
                answer = session.generate(prompt, options)
                name = f"{options.strategy}, children {options.children}, {options.sizes}"
                found = difference(engine, prompt, law, name, plain.token_ids, answer.token_ids)
                assert found is None or found.near_tie, found
                if options.sizes is not None:
                    drafted[name] += answer.stats.num_draft_tokens
    assert len(drafted) == 4 + 4 * len(SIZED)
    assert all(drafted.values()), drafted


@pytest.fixture(scope="module")
def late(tiny_pair: Path) -> Iterator[Engine]:
    """The tiny pair with random delays in both units."""
    with open_here(tiny_pair, lambda unit: Late(unit, 1), lambda unit: Late(unit, 2)) as engine:
        yield engine


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"T{law.temperature:g}")
def test_every_schedule_gives_the_plain_text(engine: Engine, law: SamplingParams) -> None:
    check(engine, some_prompts(3), law)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"T{law.temperature:g}")
def test_late_units_change_no_text(late: Engine, law: SamplingParams) -> None:
    check(late, some_prompts(1), law)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"T{law.temperature:g}")
def test_a_hundred_prompts_are_the_same_under_every_schedule(
    engine: Engine, law: SamplingParams
) -> None:
    check(engine, some_prompts(100), law)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"T{law.temperature:g}")
def test_a_hundred_prompts_are_the_same_when_units_are_late(
    late: Engine, law: SamplingParams
) -> None:
    check(late, some_prompts(100), law)

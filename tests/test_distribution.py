"""Speculation leaves the distribution alone: a model of 16 symbols, two tokens, exact chances.

The joint 16 x 16 table of the first two tokens at temperature 1 is known from mlx-lm's logits.
Seeds are consecutive from 0 and were fixed before the first look; p > 0.001 by chi-square, with
cells of fewer than 5 expected draws pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tiny

from ondevice.converters.checkpoint import open_checkpoint
from ondevice.converters.pair import write_pair
from ondevice.engine import Engine
from ondevice.models.pairs import DrafterRecipe
from ondevice.records import ROOT_ROW, AcceptanceRule, FloatArray, VerifyRow
from ondevice.sampling import (
    DRAFT_STREAM,
    Law,
    SamplingParams,
    history_with_path,
    walk_coupled,
    walk_rejection,
)
from ondevice.schedule import STRATEGIES
from ondevice.session import Options

SYMBOLS = 16
PROMPT = [3, 5, 1]
LAW_DRAWS = 20_000
ENGINE_DRAWS = 2_000

Logits = Callable[[Sequence[int]], FloatArray]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sixteen")
    model = tiny.tiny_model(seed=4, vocab_size=SYMBOLS)
    tiny.write_folder(model, folder / "llama")
    write_symbol_tokenizer(folder / "llama")
    recipe = DrafterRecipe(layers=(0,), row_counts=(1, 8), context_sizes=(64,))
    checkpoint = open_checkpoint(folder / "llama")
    write_pair(checkpoint, folder / "pair", name="sixteen", drafter=recipe, quiet=True)
    return folder / "pair"


def write_symbol_tokenizer(folder: Path) -> None:
    """One letter a token; it takes the place of the tiny model's own tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    letters = {chr(ord("a") + index): index for index in range(SYMBOLS)}
    Tokenizer(BPE(letters, [])).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tiny.write_json(folder / "tokenizer_config.json", settings)


@pytest.fixture(scope="module")
def logits(pair: Path) -> Logits:
    """Logits after a text, from mlx-lm without a cache; every text is computed once."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(pair / "verifier")
    known: dict[tuple[int, ...], FloatArray] = {}

    def after(history: Sequence[int]) -> FloatArray:
        key = tuple(history)
        if key not in known:
            known[key] = np.array(model(mx.array([key]))[0, -1])
        return known[key]

    return after


@pytest.fixture(scope="module")
def table(logits: Logits) -> npt.NDArray[np.float64]:
    """Exact probability of every pair of tokens, (16, 16)."""

    def softmax(history: Sequence[int]) -> npt.NDArray[np.float64]:
        p = np.exp(logits(history).astype(np.float64))
        return p / p.sum()

    first = softmax(PROMPT)
    return np.stack([first[t] * softmax([*PROMPT, t]) for t in range(SYMBOLS)])


def chi_square_p(draws: Sequence[tuple[int, int]], table: npt.NDArray[np.float64]) -> float:
    """p value of the draws against the table; rare cells are pooled."""
    counts = np.zeros_like(table)
    for pair in draws:
        counts[pair] += 1
    expected = table.ravel() * len(draws)
    rare = expected < 5
    observed = np.append(counts.ravel()[~rare], counts.ravel()[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    statistic = float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    return chi_square_tail(statistic, len(expected) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X > statistic), Wilson and Hilferty's cube root (1931): good to 1e-3 above 10 degrees."""
    from statistics import NormalDist

    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    return 1 - NormalDist().cdf(z)


def drafter_q(logits: Logits, history: Sequence[int]) -> FloatArray:
    """A drafter that is related to the verifier, but wrong."""
    blurred = 0.5 * logits(history) + np.sin(np.arange(SYMBOLS, dtype=np.float32) * len(history))
    q = np.exp(blurred - blurred.max())
    return (q / q.sum()).astype(np.float32)


def chain(logits: Logits, law: Law, history: list[int], length: int) -> tuple[VerifyRow, ...]:
    """The root, then `length` tokens sampled one after the other from the drafter."""
    rows = [VerifyRow(0, history[-1], ROOT_ROW)]
    text = list(history)
    for index in range(length):
        q = drafter_q(logits, text)
        token = int(np.argmax(np.log(q) + law.noise(len(text), DRAFT_STREAM)))
        rows.append(VerifyRow(index + 1, token, index, q))
        text.append(token)
    return tuple(rows)


def tree(logits: Logits, history: list[int]) -> tuple[VerifyRow, ...]:
    """The root, the drafter's three likeliest tokens, and two below each."""
    rows = [VerifyRow(0, history[-1], ROOT_ROW)]
    for first in np.argsort(-drafter_q(logits, history))[:3].tolist():
        at = len(rows)
        rows.append(VerifyRow(at, first, 0))
        for second in np.argsort(-drafter_q(logits, [*history, first]))[:2].tolist():
            rows.append(VerifyRow(len(rows), second, at))
    return tuple(rows)


def speculated(logits: Logits, seed: int, rule: AcceptanceRule) -> tuple[int, int]:
    """Two tokens through the walk of `rule`, in as many rounds as it takes."""
    law = Law(SamplingParams(temperature=1.0, seed=seed), SYMBOLS)
    text = list(PROMPT)
    while len(text) < len(PROMPT) + 2:
        walk = by_rejection if rule == "rejection" else by_coupling
        text += walk(logits, law, text)
    return text[len(PROMPT)], text[len(PROMPT) + 1]


def by_rejection(logits: Logits, law: Law, text: list[int]) -> list[int]:
    rows = chain(logits, law, text, 2)

    def log_p(index: int) -> FloatArray:
        history = history_with_path(text[:-1], rows, index)
        return law.log_p(logits(history), history)

    return walk_rejection(rows, log_p, law, len(text))[1]


def by_coupling(logits: Logits, law: Law, text: list[int]) -> list[int]:
    rows = tree(logits, text)

    def choose(index: int) -> int:
        history = history_with_path(text[:-1], rows, index)
        return law.choose(logits(history), history)

    return walk_coupled(rows, choose)[1]


def plain(logits: Logits, seed: int) -> tuple[int, int]:
    law = Law(SamplingParams(temperature=1.0, seed=seed), SYMBOLS)
    first = law.choose(logits(PROMPT), PROMPT)
    return first, law.choose(logits([*PROMPT, first]), [*PROMPT, first])


def test_the_law_has_the_verifiers_distribution(logits, table):
    draws = [plain(logits, seed) for seed in range(LAW_DRAWS)]
    assert chi_square_p(draws, table) > 0.001


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_verdict_walk_has_the_verifiers_distribution(logits, table, rule):
    draws = [speculated(logits, seed, rule) for seed in range(LAW_DRAWS)]
    assert chi_square_p(draws, table) > 0.001


def test_the_chi_square_sees_a_walk_that_accepts_what_the_drafter_likes(logits, table):
    def biased(seed: int) -> tuple[int, int]:
        law = Law(SamplingParams(temperature=1.0, seed=seed), SYMBOLS)
        rows = chain(logits, law, PROMPT, 1)
        first, second = plain(logits, seed)
        return (rows[1].token, second) if seed % 10 == 0 else (first, second)

    assert chi_square_p([biased(seed) for seed in range(LAW_DRAWS)], table) < 1e-6


@pytest.fixture(scope="module")
def engine(pair: Path) -> Iterator[Engine]:
    with Engine.open_folder(pair) as engine:
        # Every answer shall have two tokens, whatever they are.
        engine.model = replace(engine.model, end_tokens=frozenset())
        yield engine


def engine_p(engine: Engine, table: npt.NDArray[np.float64], count: int, options: Options) -> float:
    draws = []
    with engine.session() as session:
        for seed in range(count):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            answer = session.generate(PROMPT, replace(options, sampling=sampling, max_tokens=2))
            draws.append((answer.token_ids[0], answer.token_ids[1]))
    return chi_square_p(draws, table)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_engine_has_the_verifiers_distribution_at_a_glance(engine, table, rule):
    assert engine_p(engine, table, 300, Options(rule=rule)) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_engine_has_the_verifiers_distribution(engine, table, strategy, rule):
    assert engine_p(engine, table, ENGINE_DRAWS, Options(strategy=strategy, rule=rule)) > 0.001

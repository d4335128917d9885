"""The real model, at length: mlx-lm's own text, and trees after long prompts.

Needs the default pair, in ONDEVICE_HOME or from the network.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from verifying import assert_cache_equals_fresh_prefill, in_order, next_logits

from ondevice.converters.pair import prepare_pair
from ondevice.records import ROOT_ROW, VerifyRow
from ondevice.sampling import Law, SamplingParams
from ondevice.units import RunRequest, VerifyRequest
from ondevice.verifier import MLXVerifier

pytestmark = pytest.mark.slow

TOPICS = (
    "France",
    "rain",
    "prime numbers",
    "bread",
    "the moon",
    "bees",
    "steel",
    "chess",
    "tea",
    "jazz",
)
QUESTIONS = ("What is known about {}?", "Write a short story that ends with {}.")
PROMPTS = [question.format(topic) for question in QUESTIONS for topic in TOPICS]


@cache
def models() -> tuple[MLXVerifier, Any, Any]:
    """The verifier; the same folder in mlx-lm's hands; its tokenizer."""
    folder: Path = prepare_pair("smollm2", quiet=True) / "verifier"
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    return MLXVerifier.open(folder), model, tokenizer


def never() -> bool:
    return False


@pytest.mark.parametrize("question", PROMPTS)
def test_a_greedy_run_of_128_tokens_is_the_text_of_mlx_lms_generate(question: str) -> None:
    verifier, model, tokenizer = models()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    expected = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=128)]
    session, law = verifier.open_session(), Law(SamplingParams(), verifier.vocab_size)
    verifier.prefill(session, prompt[:-1], never)
    run = verifier.run(RunRequest(session, 0, prompt[-1], len(expected), law), never)
    found = [token for verdict in run for token in verdict.tokens]
    verifier.close_session(session)
    first = next(
        (i for i, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1), None
    )
    if first is not None:
        logits = next_logits(model, [*prompt, *expected[:first]])
        margin = abs(float(logits[found[first]] - logits[expected[first]]))
        print(f"token {first} differs, margin {margin:.2g}")
        assert margin < 5e-4


@pytest.mark.parametrize(("prompt_length", "rows", "seed"), [(1, 32, 0), (77, 24, 1), (600, 32, 2)])
def test_tree_rows_equal_decoding_in_order_and_rollback_is_exact(
    prompt_length: int, rows: int, seed: int
) -> None:
    verifier, model, _ = models()
    rng = np.random.default_rng(seed)
    vocab = verifier.vocab_size
    prompt = rng.integers(vocab, size=prompt_length).tolist()
    session, law = verifier.open_session(), Law(SamplingParams(), vocab)
    verifier.prefill(session, prompt, never)
    text = [*prompt, int(rng.integers(vocab))]
    for turn in range(2):
        tokens = rng.choice(vocab, size=rows, replace=False).tolist()
        tree = [VerifyRow(0, text[-1], ROOT_ROW)]
        tree += [
            VerifyRow(i, tokens[i], int(rng.integers(max(0, i - 6), i))) for i in range(1, rows)
        ]
        right = int(np.argmax(next_logits(model, text)))
        tree.append(VerifyRow(rows, right, 0))  # the last row, so that its keys have to move
        found = verifier.row_logits(session, tree)
        np.testing.assert_allclose(found, in_order(model, text[:-1], tree), atol=1e-3, rtol=0)
        (verdict,) = verifier.verify([VerifyRequest(session, turn, tuple(tree), "coupled", law)])
        assert verdict.tokens[0] == right
        text += verdict.tokens
        assert_cache_equals_fresh_prefill(verifier, session, model, text[:-1])
    verifier.truncate(session, prompt_length)
    assert_cache_equals_fresh_prefill(verifier, session, model, prompt)
    verifier.close_session(session)


def test_one_process_holds_no_second_copy_of_the_cache() -> None:
    """A commit that moves rows updates the cache in place: peak memory tells a copy."""
    verifier, _, _ = models()
    rng = np.random.default_rng(3)
    session, law = verifier.open_session(), Law(SamplingParams(), verifier.vocab_size)
    verifier.prefill(session, rng.integers(verifier.vocab_size, size=900).tolist(), never)
    size = sum(cache.nbytes for cache in verifier.mlx_lm_cache(session))
    mx.reset_peak_memory()
    before, root = mx.get_active_memory(), 5
    for turn in range(4):
        rows = [VerifyRow(0, root, ROOT_ROW), VerifyRow(1, 7, 0)]
        best = int(np.argmax(verifier.row_logits(session, rows)[0]))
        rows.append(VerifyRow(2, best, 0))
        (verdict,) = verifier.verify([VerifyRequest(session, turn, tuple(rows), "coupled", law)])
        assert verdict.accepted == (2,)
        root = verdict.tokens[-1]
    assert mx.get_peak_memory() - before < size / 2
    verifier.close_session(session)

"""Verdicts are the law's own choices; sessions, riders and failures leave no trace in a cache."""

from __future__ import annotations

import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verifying import (
    VOCAB,
    assert_cache_equals_fresh_prefill,
    folder_of,
    grafted,
    in_order,
    next_logits,
    oracle_of,
    plain_text,
    tokens_of,
    trees,
    verifier_of,
)

from ondevice.errors import UnitFailed
from ondevice.records import ROOT_ROW, VerifyRow
from ondevice.sampling import Law, SamplingParams, history_with_path, walk_coupled, walk_rejection
from ondevice.units import RunRequest, VerifyRequest
from ondevice.verifier import PREFILL_ROWS, MLXVerifier

VARIANT = "gqa tied"
PARAMS = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=6, top_logprobs=3),
        SamplingParams(temperature=0.7, min_p=0.05, repetition_penalty=1.4, seed=7),
        SamplingParams(repetition_penalty=1.2, logit_bias={3: 4.0, 90: -9.0}, repetition_window=8),
    ]
)
CLOSE = 5e-4  # DESIGN section 3: the margin below which two roundings may choose differently


def never() -> bool:
    return False


def fresh_session(verifier: MLXVerifier, prompt: list[int]) -> int:
    session = verifier.open_session()
    verifier.prefill(session, prompt, never)
    return session


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=trees(most=12), params=PARAMS, prompt_length=st.integers(1, 60), depth=st.integers(0, 3)
)
def test_a_verdict_is_the_laws_walk_over_logits_decoded_in_order(
    rows, params, prompt_length, depth
):
    verifier, oracle = verifier_of(VARIANT), oracle_of(VARIANT)
    law, prompt = Law(params, VOCAB), tokens_of(prompt_length, prompt_length)
    rows = with_laws_own_path(rows, law, oracle, prompt, depth)
    session = fresh_session(verifier, prompt)
    (verdict,) = verifier.verify([VerifyRequest(session, 4, rows, "coupled", law)])
    logits = in_order(oracle, prompt, rows)

    def choose(row: int) -> int:
        return law.choose(logits[row], history_with_path(prompt, rows, row))

    accepted, tokens = walk_coupled(rows, choose)
    assert verdict.tokens == tuple(tokens)
    assert verdict.accepted == tuple(rows[row].node for row in accepted)
    assert len(accepted) >= depth
    walked = [0, *accepted]
    raw = [logits[row] - np.logaddexp.reduce(logits[row]) for row in walked]
    expected = [row[token] for row, token in zip(raw, tokens, strict=True)]
    assert verdict.logprobs == pytest.approx(expected, abs=1e-3)
    assert [len(top) for top in verdict.top_logprobs] == (
        [params.top_logprobs] * len(tokens) if params.top_logprobs else []
    )
    assert verdict.step == 4
    assert verdict.start_ns < verdict.end_ns
    committed = [*prompt, rows[0].token, *tokens[:-1]]
    assert_cache_equals_fresh_prefill(verifier, session, oracle, committed)
    verifier.close_session(session)


def with_laws_own_path(rows, law, oracle, prompt, depth):
    """The tree with the law's own next `depth` tokens put in below the root."""
    path = plain_text(oracle, law, [*prompt, rows[0].token], depth)
    return grafted(rows, path)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), length=st.integers(1, 6), temperature=st.sampled_from([0, 1])
)
def test_a_verdict_under_rejection_is_leviathans_walk_over_logits_decoded_in_order(
    seed, length, temperature
):
    verifier, oracle, prompt = verifier_of(VARIANT), oracle_of(VARIANT), tokens_of(8, 30)
    law = Law(SamplingParams(temperature=temperature, top_k=30, seed=seed), VOCAB)
    rows = sampled_chain(oracle, prompt, length, seed)
    session = fresh_session(verifier, prompt)
    (verdict,) = verifier.verify([VerifyRequest(session, 1, rows, "rejection", law)])
    logits = in_order(oracle, prompt, rows)
    if temperature:
        log_p = [law.log_p(row, []) for row in logits]
        accepted, tokens = walk_rejection(rows, lambda row: log_p[row], law, len(prompt) + 1)
    else:  # a point mass on the likeliest token: rejection accepts it and nothing else
        accepted, tokens = walk_coupled(rows, lambda row: int(np.argmax(logits[row])))
    assert verdict.tokens == tuple(tokens)
    assert verdict.accepted == tuple(rows[row].node for row in accepted)
    walked = [logits[row] - np.logaddexp.reduce(logits[row]) for row in [0, *accepted]]
    expected = [row[token] for row, token in zip(walked, tokens, strict=True)]
    assert verdict.logprobs == pytest.approx(expected, abs=1e-3)
    committed = [*prompt, rows[0].token, *tokens[:-1]]
    assert_cache_equals_fresh_prefill(verifier, session, oracle, committed)
    verifier.close_session(session)


def sampled_chain(oracle, prompt, length, seed):
    """A chain whose tokens were sampled from a flattened copy of the oracle's distribution."""
    rng, rows = np.random.default_rng(seed), [VerifyRow(0, 5, ROOT_ROW)]
    for node in range(1, length + 1):
        logits = next_logits(oracle, [*prompt, *(row.token for row in rows)]) / 1.5
        q = np.exp(logits - logits.max(), dtype=np.float32)
        q /= q.sum()
        token = int(np.argmax(np.log(q) + rng.gumbel(size=VOCAB)))
        rows.append(VerifyRow(node, token, node - 1, q))
    return tuple(rows)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(rows=trees(most=6), riders=trees(most=8), hang=st.integers(-1, 5))
def test_riders_see_the_prefix_and_their_ancestors_and_never_enter_the_cache(rows, riders, hang):
    verifier, oracle, prompt = verifier_of(VARIANT), oracle_of(VARIANT), tokens_of(2, 40)
    law, below = Law(SamplingParams(), VOCAB), min(hang, len(rows) - 1)
    hung = tuple(
        replace(rider, parent=below if rider.parent < 0 else rider.parent + len(rows))
        for rider in riders
    )
    session = fresh_session(verifier, prompt)
    alone = verifier.row_logits(session, rows)
    together = verifier.row_logits(session, rows, hung)
    np.testing.assert_allclose(together[: len(rows)], alone, atol=1e-4)
    (verdict,) = verifier.verify([VerifyRequest(session, 0, rows, "coupled", law, riders=hung)])
    expected = in_order(oracle, prompt, [*rows, *hung])[len(rows) :]
    assert len(verdict.rider_tokens) == len(riders)
    for token, logits in zip(verdict.rider_tokens, expected, strict=True):
        assert logits.max() - logits[token] < CLOSE
    committed = [*prompt, rows[0].token, *verdict.tokens[:-1]]
    assert_cache_equals_fresh_prefill(verifier, session, oracle, committed)
    verifier.close_session(session)


def test_hidden_is_the_final_norms_output_of_the_walks_last_row():
    verifier, oracle, prompt = verifier_of(VARIANT), oracle_of(VARIANT), tokens_of(4, 25)
    law = Law(SamplingParams(), VOCAB)
    root = VerifyRow(0, 9, ROOT_ROW)
    rows = with_laws_own_path((root, VerifyRow(1, 8, 0)), law, oracle, prompt, depth=2)
    for wanted in (True, False):
        session = fresh_session(verifier, prompt)
        request = VerifyRequest(session, 0, rows, "coupled", law, want_hidden=wanted)
        (verdict,) = verifier.verify([request])
        text = [*prompt, root.token, *verdict.tokens[:-1]]
        expected = np.array(oracle.model(mx.array(text)[None])[0, -1])
        if wanted:
            np.testing.assert_allclose(verdict.hidden, expected, atol=1e-3)
        else:
            assert verdict.hidden is None
        verifier.close_session(session)


def test_sessions_do_not_see_each_other_even_in_one_call():
    verifier, oracle = verifier_of(VARIANT), oracle_of(VARIANT)
    prompts = [tokens_of(seed, 10 + 7 * seed) for seed in range(3)]
    laws = [Law(SamplingParams(temperature=t, seed=1), VOCAB) for t in (0.0, 0.8, 1.2)]
    sessions = [fresh_session(verifier, prompt) for prompt in prompts]
    texts = [[*prompt, 11] for prompt in prompts]
    rows = (VerifyRow(0, 11, ROOT_ROW), VerifyRow(1, 4, 0), VerifyRow(2, 6, 0))
    for _ in range(3):
        requests = [
            VerifyRequest(session, 0, (replace(rows[0], token=text[-1]), *rows[1:]), "coupled", law)
            for session, law, text in zip(sessions, laws, texts, strict=True)
        ]
        for text, verdict in zip(texts, verifier.verify(requests), strict=True):
            text += verdict.tokens
    for session, law, text, prompt in zip(sessions, laws, texts, prompts, strict=True):
        answer = text[len(prompt) + 1 :]
        assert answer == plain_text(oracle, law, [*prompt, 11], len(answer))
        assert_cache_equals_fresh_prefill(verifier, session, oracle, text[:-1])
        verifier.close_session(session)


def test_a_cancelled_prefill_keeps_whole_chunks_and_can_go_on():
    verifier, oracle = verifier_of(VARIANT), oracle_of(VARIANT)
    prompt, answers = tokens_of(1, 2 * PREFILL_ROWS + 30), iter([False, True])
    session = verifier.open_session()
    assert verifier.prefill(session, prompt, lambda: next(answers)) == PREFILL_ROWS
    assert verifier.prefill(session, prompt[PREFILL_ROWS:], never) == len(prompt)
    assert_cache_equals_fresh_prefill(verifier, session, oracle, prompt)
    verifier.close_session(session)


def test_truncating_to_more_than_the_cache_holds_is_refused():
    verifier = verifier_of(VARIANT)
    session = fresh_session(verifier, tokens_of(1, 6))
    with pytest.raises(UnitFailed, match="cannot keep 7 tokens of a cache of 6"):
        verifier.truncate(session, 7)
    verifier.close_session(session)


def test_rows_that_are_not_finite_fail_the_round_and_leave_the_cache_as_it_was():
    verifier = MLXVerifier.open(folder_of("mqa"))
    prompt, law = tokens_of(6, 20), Law(SamplingParams(), VOCAB)
    session = fresh_session(verifier, prompt)
    embedding = verifier._model.model.embed_tokens
    good = mx.array(embedding.weight)
    embedding.weight[17] = float("nan")
    rows = (VerifyRow(0, 5, ROOT_ROW), VerifyRow(1, 17, 0))
    with pytest.raises(UnitFailed, match="not finite"):
        verifier.verify([VerifyRequest(session, 0, rows, "coupled", law)])
    assert_cache_equals_fresh_prefill(verifier, session, oracle_of("mqa"), prompt)
    with pytest.raises(UnitFailed, match="not finite"):
        list(verifier.run(RunRequest(session, 0, 17, 3, law), never))
    embedding.weight = good
    assert verifier.prefill(session, [], never) in (len(prompt), len(prompt) + 1)
    verifier.truncate(session, len(prompt))
    assert_cache_equals_fresh_prefill(verifier, session, oracle_of("mqa"), prompt)
    verifier.close()


class Nothing:
    """A constraint that allows no token after the answer's first."""

    def start(self):
        return True

    def advance(self, state, token):
        return False

    def allowed(self, state):
        return np.full(VOCAB, state)


def test_a_constraint_that_allows_no_token_is_a_clear_failure():
    verifier = verifier_of(VARIANT)
    session = fresh_session(verifier, [1, 2])
    law = Law(SamplingParams(constraint=Nothing()), VOCAB, answer_start=3)
    run = verifier.run(RunRequest(session, 0, 3, 4, law), never)
    assert len(next(run).tokens) == 1
    with pytest.raises(UnitFailed, match="the constraint allows no token at position 4"):
        next(run)
    verifier.close_session(session)


def test_the_unit_works_on_the_thread_that_opened_it():
    texts = []

    def work() -> None:
        verifier = MLXVerifier.open(folder_of(VARIANT))
        session = fresh_session(verifier, tokens_of(1, 12))
        law = Law(SamplingParams(), VOCAB)
        rows = (VerifyRow(0, 3, ROOT_ROW), VerifyRow(1, 4, 0), VerifyRow(2, 5, 0))
        (verdict,) = verifier.verify([VerifyRequest(session, 0, rows, "coupled", law)])
        run = verifier.run(RunRequest(session, 0, verdict.tokens[-1], 5, law), never)
        texts.append([*verdict.tokens, *(token for each in run for token in each.tokens)])
        verifier.close()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prompt, law = [*tokens_of(1, 12), 3], Law(SamplingParams(), VOCAB)
    expected = plain_text(oracle_of(VARIANT), law, prompt, len(texts[0]))
    assert texts == [expected, expected]

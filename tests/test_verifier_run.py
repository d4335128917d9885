"""Plain decoding: mlx-lm's own text, the law's text, the pipeline, and how a run ends."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from verifying import (
    VARIANTS,
    VOCAB,
    assert_cache_equals_fresh_prefill,
    folder_of,
    next_logits,
    oracle_of,
    plain_text,
    tokens_of,
    verifier_of,
)

from ondevice import plainrun
from ondevice.records import Verdict
from ondevice.sampling import Law, SamplingParams
from ondevice.units import RunRequest
from ondevice.verifier import MLXVerifier

VARIANT = "gqa tied"


def never() -> bool:
    return False


def decode(verifier: MLXVerifier, prompt: list[int], law: Law, limit: int) -> list[Verdict]:
    session = verifier.open_session()
    verifier.prefill(session, prompt[:-1], never)
    verdicts = list(verifier.run(RunRequest(session, 3, prompt[-1], limit, law), never))
    verifier.close_session(session)
    return verdicts


def text_of(verdicts: list[Verdict]) -> list[int]:
    return [token for verdict in verdicts for token in verdict.tokens]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_greedy_run_gives_the_tokens_of_mlx_lm(variant):
    oracle, law = oracle_of(variant), Law(SamplingParams(), VOCAB)
    for seed in range(6):
        prompt = tokens_of(seed, 5 + 60 * seed)
        found = text_of(decode(verifier_of(variant), prompt, law, 32))
        expected = [int(t) for t, _ in generate_step(mx.array(prompt), oracle, max_tokens=32)]
        assert_same_up_to_a_near_tie(oracle, prompt, found, expected)


def assert_same_up_to_a_near_tie(
    oracle: Any, prompt: list[int], found: list[int], expected: list[int]
) -> None:
    """DESIGN section 3: the first difference is forgiven when its margin is below 5e-4."""
    assert len(found) == len(expected)
    differing = [i for i, pair in enumerate(zip(found, expected, strict=True)) if len({*pair}) > 1]
    if differing:
        logits = next_logits(oracle, [*prompt, *expected[: differing[0]]])
        margin = abs(float(logits[found[differing[0]]] - logits[expected[differing[0]]]))
        assert margin < 5e-4, f"token {differing[0]} differs by a margin of {margin:.2g}"


class NoRepeat:
    """A constraint with memory: a token must differ from the answer's last two."""

    def start(self):
        return ()

    def advance(self, state, token):
        return (*state, token)[-2:]

    def allowed(self, state):
        mask = np.ones(VOCAB, dtype=np.bool_)
        mask[list(state)] = False
        return mask


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=1.1, top_k=30, top_p=0.8, min_p=0.02, seed=4),
        SamplingParams(repetition_penalty=1.5, repetition_window=6),
        SamplingParams(temperature=0.8, repetition_penalty=1.3, logit_bias={5: 3.0}, seed=8),
        SamplingParams(repetition_penalty=1.5, repetition_window=1),
        SamplingParams(temperature=0.7, constraint=NoRepeat(), seed=2),
    ],
    ids=["temperature", "cuts", "penalty", "penalty bias noise", "window of one", "constraint"],
)
def test_a_run_gives_the_laws_text(params):
    prompt, oracle = tokens_of(3, 20), oracle_of(VARIANT)
    law = Law(params, VOCAB, answer_start=len(prompt))
    verdicts = decode(verifier_of(VARIANT), prompt, law, 20)
    assert text_of(verdicts) == plain_text(oracle, law, prompt, 20)
    assert [verdict.more for verdict in verdicts] == [True] * 19 + [False]


def test_a_runs_log_probabilities_are_those_of_the_unmodified_distribution():
    prompt, oracle = tokens_of(5, 9), oracle_of(VARIANT)
    law = Law(SamplingParams(temperature=0.6, top_k=4, top_logprobs=2, seed=1), VOCAB)
    text = list(prompt)
    for verdict in decode(verifier_of(VARIANT), prompt, law, 6):
        logits = next_logits(oracle, text)
        log_p = logits - np.logaddexp.reduce(logits)
        assert verdict.logprobs[0] == pytest.approx(log_p[verdict.tokens[0]], abs=1e-3)
        best = np.argsort(-log_p)[:2]
        assert [token for token, _ in verdict.top_logprobs[0]] == best.tolist()
        assert [p for _, p in verdict.top_logprobs[0]] == pytest.approx(log_p[best], abs=1e-3)
        text += verdict.tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=1),
        SamplingParams(constraint=NoRepeat()),
    ],
    ids=["greedy", "sampled", "constraint"],
)
def test_forward_t_plus_1_is_submitted_before_token_t_is_read(params, monkeypatch):
    """Except under a constraint, whose next mask needs the token."""
    events: list[str] = []
    verifier = MLXVerifier.open(folder_of(VARIANT))
    model, read = verifier._model, plainrun.PlainRun._read

    def recording_model(*args: Any, **kwargs: Any) -> mx.array:
        events.append("forward")
        return model(*args, **kwargs)

    def recording_submit(arrays: list[mx.array]) -> None:
        events.append("submit")
        mx_async_eval(arrays)

    def recording_read(self: Any, *args: Any, **kwargs: Any) -> Verdict:
        events.append("read")
        return read(self, *args, **kwargs)

    prompt, law = tokens_of(1, 6), Law(params, VOCAB, answer_start=6)
    session = verifier.open_session()
    verifier.prefill(session, prompt[:-1], never)
    mx_async_eval = mx.async_eval
    monkeypatch.setattr(verifier, "_model", recording_model)
    monkeypatch.setattr(plainrun.mx, "async_eval", recording_submit)
    monkeypatch.setattr(plainrun.PlainRun, "_read", recording_read)
    for _ in verifier.run(RunRequest(session, 0, prompt[-1], 4, law), never):
        events.append("verdict")
    step, seen = ["forward", "submit"], ["read", "verdict"]
    if params.constraint is None:
        assert events == [*step, *step, *seen, *step, *seen, *step, *seen, *seen]
    else:
        assert events == [*step, *seen] * 4


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("how", ["stopped", "closed"])
def test_a_run_ended_early_leaves_a_cache_that_any_committed_length_can_be_cut_from(how, taken):
    verifier, oracle, prompt = verifier_of(VARIANT), oracle_of(VARIANT), tokens_of(2, 15)
    session, law = verifier.open_session(), Law(SamplingParams(), VOCAB)
    verifier.prefill(session, prompt[:-1], never)
    stop = [False]
    run = verifier.run(RunRequest(session, 0, prompt[-1], 8, law), lambda: stop[0])
    text = [*prompt, *text_of([next(run) for _ in range(taken)])]
    if how == "closed":
        run.close()
    else:
        stop[0] = True
        (closing,) = run
        assert (closing.tokens, closing.more) == ((), False)
    committed = len(text) - 1 if taken else len(prompt) - 1
    verifier.truncate(session, committed)
    assert_cache_equals_fresh_prefill(verifier, session, oracle, text[:committed])
    text_after = text_of(list(verifier.run(RunRequest(session, 1, text[-1], 5, law), never)))
    assert text_after == plain_text(oracle, law, text, 5)
    verifier.close_session(session)


def test_the_cache_never_copies_itself_as_a_run_goes_on():
    """Peak memory of a run stays near mlx-lm's own: the demand is 1.15 times."""
    prompt, law = tokens_of(1, 300), Law(SamplingParams(), VOCAB)

    def peak(work: Any) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        work()
        return mx.get_peak_memory() - before

    oracle, verifier = oracle_of(VARIANT), verifier_of(VARIANT)
    theirs = peak(
        lambda: list(generate_step(mx.array(prompt), oracle, max_tokens=60, prefill_step_size=512))
    )
    ours = peak(lambda: decode(verifier, prompt, law, 60))
    assert ours <= 1.15 * theirs


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_a_run_that_shall_not_go_on_ends_with_the_token_under_way(asked):
    """Its cache then ends before that token, so that a forward over it can follow at once."""
    verifier, law = verifier_of(VARIANT), Law(SamplingParams(temperature=0.8, seed=3), VOCAB)
    prompt, answers = tokens_of(4, 12), iter([True] * (asked - 1) + [False])
    session = verifier.open_session()
    verifier.prefill(session, prompt[:-1], never)
    request = RunRequest(session, 3, prompt[-1], 40, law, goes_on=lambda: next(answers))
    verdicts = list(verifier.run(request, never))
    assert [verdict.more for verdict in verdicts] == [True] * (asked - 1) + [False]
    text = text_of(verdicts)
    assert text == text_of(decode(verifier, prompt, law, 40))[:asked]
    assert_cache_equals_fresh_prefill(verifier, session, oracle_of(VARIANT), [*prompt, *text[:-1]])
    verifier.close_session(session)

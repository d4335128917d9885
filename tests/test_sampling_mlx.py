"""The law on the device is the law in numpy."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.sampling import Law, SamplingParams
from ondevice.sampling_mlx import DeviceLaw

VOCAB = 96
MARGIN = 1e-4


class OnlyEven:
    """A constraint whose mask depends on the answer so far: parity alternates."""

    def start(self):
        return 0

    def advance(self, state, token):
        return state + 1

    def allowed(self, state):
        return np.arange(VOCAB) % 2 == state % 2


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 40, VOCAB, 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    repetition_window=st.sampled_from([0, 1, 4, 64]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-8, 8, width=32), max_size=4),
    seed=st.integers(0, 2**64 - 1),
    top_logprobs=st.sampled_from([0, 3]),
    constraint=st.sampled_from([None, None, OnlyEven()]),
)


def log_softmax(logits):
    wide = np.asarray(logits, dtype=np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def is_near_tie(law: Law, logits, history, token) -> bool:
    """Whether rounding may decide: the two best scores, or a cut and its neighbour, are close."""
    scores = law.log_p(logits, history)
    if not law.greedy:
        scores = scores + law.noise(len(history))
    if np.isfinite(scores[token]) and scores.max() - scores[token] < MARGIN:
        return True
    for change in (1 - MARGIN, 1 + MARGIN):
        p = law.params
        moved = replace(p, top_p=min(1.0, p.top_p * change), min_p=p.min_p * change)
        if Law(moved, VOCAB).choose(logits, history) == token:
            return True
    return False


@given(params=PARAMS, seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.5, 3.0, 12.0]))
@settings(max_examples=250, deadline=None, derandomize=True)
def test_every_row_chooses_what_the_law_in_numpy_chooses(params, seed, spread):
    rng = np.random.default_rng(seed)
    law = Law(params, VOCAB, answer_start=2)
    logits = (spread * rng.standard_normal((5, VOCAB))).astype(np.float32)
    histories = [rng.integers(VOCAB, size=n).tolist() for n in (3, 9, 4, 9, 40)]
    device = DeviceLaw(law)
    choices = device.choose(
        mx.array(logits), [len(h) for h in histories], device.edits(histories), with_log_p=True
    )
    for row, history in enumerate(histories):
        token = int(choices.tokens[row].item())
        expected = law.choose(logits[row], history)
        assert token == expected or is_near_tie(law, logits[row], history, token)
        raw = log_softmax(logits[row])
        assert choices.logprobs[row].item() == pytest.approx(raw[token], abs=1e-4)
        compare_log_p(law, logits[row], history, np.array(choices.log_p[row]))
        top = choices.top(row)
        assert [t for t, _ in top] == np.argsort(-raw)[: params.top_logprobs].tolist()
        assert [p for _, p in top] == pytest.approx(raw[[t for t, _ in top]], abs=1e-4)


def compare_log_p(law, logits, history, found):
    """Equal up to rounding, unless one token more or less passed a cut by a near tie."""
    expected = law.log_p(logits, history)
    kept, wanted = np.isfinite(found), np.isfinite(expected)
    if (kept == wanted).all():
        np.testing.assert_allclose(found[kept], expected[kept], atol=2e-4)
    else:
        edited = np.sort(law.rewrite(logits, history)[kept ^ wanted])
        assert len(edited) == 1 or np.ptp(edited) < MARGIN


@given(seed=st.integers(0, 2**32 - 1), top_p=st.sampled_from([0.3, 0.7, 0.95]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_exact_ties_at_a_cut_are_all_kept(seed, top_p):
    """Half precision logits tie often: top-k and then top-p keep the same set as in numpy."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, size=(3, VOCAB)).astype(np.float32)
    law = Law(SamplingParams(temperature=1.0, top_k=7, top_p=top_p, seed=seed), VOCAB)
    choices = DeviceLaw(law).choose(mx.array(logits), [4, 5, 6], with_log_p=True)
    for row, position in enumerate((4, 5, 6)):
        expected = law.log_p(logits[row], [0] * position)
        np.testing.assert_array_equal(
            np.isfinite(np.array(choices.log_p[row])), np.isfinite(expected)
        )
        assert choices.tokens[row].item() == law.choose(logits[row], [0] * position)


def test_rows_of_one_depth_share_its_noise():
    law = Law(SamplingParams(temperature=1.0, seed=11), VOCAB)
    flat = mx.zeros((4, VOCAB))
    tokens = DeviceLaw(law).choose(flat, [7, 8, 8, 7]).tokens.tolist()
    assert tokens == [int(np.argmax(law.noise(p))) for p in (7, 8, 8, 7)]


@given(params=PARAMS.filter(lambda p: p.constraint is None), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_penalty_with_the_last_token_still_on_the_device_is_the_same(params, seed):
    rng = np.random.default_rng(seed)
    history = rng.integers(VOCAB, size=12).tolist()
    logits = mx.array((3 * rng.standard_normal((1, VOCAB))).astype(np.float32))
    device = DeviceLaw(Law(params, VOCAB))
    ahead = device.edits_ahead(history[:-1], mx.array(history[-1:]))
    one = device.choose(logits, [12], ahead, with_log_p=True)
    other = device.choose(logits, [12], device.edits([history]), with_log_p=True)
    np.testing.assert_array_equal(np.array(one.log_p), np.array(other.log_p))


def test_half_precision_logits_are_judged_in_float32():
    law = Law(SamplingParams(), VOCAB)
    logits = mx.random.normal((2, VOCAB), key=mx.random.key(0)).astype(mx.bfloat16)
    choices = DeviceLaw(law).choose(logits, [1, 2])
    wide = np.array(logits.astype(mx.float32))
    assert choices.logprobs.dtype == mx.float32
    for row in range(2):
        expected = log_softmax(wide[row]).max()
        assert choices.logprobs[row].item() == pytest.approx(expected, abs=1e-5)


def test_a_token_that_was_not_chosen_has_its_log_probability_too():
    law = Law(SamplingParams(), VOCAB)
    logits = np.random.default_rng(3).standard_normal((2, VOCAB)).astype(np.float32)
    choices = DeviceLaw(law).choose(mx.array(logits), [1, 2])
    expected = [log_softmax(logits[0])[5], log_softmax(logits[1])[9]]
    assert choices.logprobs_of([0, 1], [5, 9]) == pytest.approx(expected, abs=1e-5)

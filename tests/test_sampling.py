"""The sampling law in numpy: noise, cuts, penalties, the two walks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ondevice.errors import BadRequest
from ondevice.records import ROOT_ROW, VerifyRow
from ondevice.sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    Law,
    SamplingParams,
    history_with_path,
    log_probabilities,
    noise,
    uniform,
    walk_coupled,
)

LOGITS = arrays(np.float32, st.integers(2, 40), elements=st.floats(-20, 20, width=32))


def test_noise_of_a_token_does_not_depend_on_the_vocabulary():
    assert np.array_equal(noise(7, 3, 100), noise(7, 3, 49_152)[:100])


def test_noise_differs_by_seed_position_and_stream():
    keys = [(7, 3, 0), (8, 3, 0), (7, 4, 0), (7, 3, DRAFT_STREAM), (7, 3, ACCEPT_STREAM)]
    rows = [noise(*key[:2], 64, key[2]).tobytes() for key in keys]
    assert len(set(rows)) == len(rows)


def test_neighbouring_large_seeds_differ():
    assert not np.array_equal(noise(2**63 + 1, 3, 8), noise(2**63 + 5, 3, 8))
    assert np.isfinite(noise(2**64 - 1, 3, 8)).all()


def test_noise_is_gumbel():
    draws = np.concatenate([noise(1, position, 10_000) for position in range(50)])
    assert draws.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert draws.std() == pytest.approx(np.pi / np.sqrt(6), abs=0.01)
    assert np.isfinite(draws).all()


def test_known_noise_stays_as_it_is():
    """Philox 4x64 with key (1, 2): a change here changes every seeded text that was ever made."""
    words = np.random.Philox(key=[1, 2], counter=[0, 0, 0, 0]).random_raw(2)
    halves = [int(words[0]) & 0xFFFFFFFF, int(words[0]) >> 32, int(words[1]) & 0xFFFFFFFF]
    u = [(half + 0.5) / 2**32 for half in halves]
    assert uniform(1, 2, 3) == pytest.approx(u, rel=1e-6)
    assert noise(1, 2, 3) == pytest.approx([-np.log(-np.log1p(-x)) for x in u], rel=1e-5)


@settings(max_examples=200, deadline=None)
@given(
    LOGITS,
    st.floats(0.1, 3),
    st.integers(0, 50),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
)
def test_cuts_equal_their_definition(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = log_probabilities(logits, params)
    p = np.exp(logits.astype(np.float64) / np.float32(temperature))
    p /= p.sum()
    kept = np.argsort(-p, kind="stable")
    sure: list[int] = []  # kept however rounding falls
    if 0 < top_k < p.size:
        kept = kept[logits[kept] >= np.sort(logits)[-top_k]]  # ties with the last are kept
    mass = p[kept] / p[kept].sum()
    before = np.cumsum(mass) - mass
    kept = kept[before < top_p + 1e-4] if top_p < 1 else kept
    sure = list(kept[(np.cumsum(mass) - mass)[: kept.size] < top_p - 1e-4])
    floor = p.max() * min_p
    finite = np.flatnonzero(np.isfinite(got))
    for token in sure:
        if p[token] > floor * (1 + 1e-4):
            assert token in finite
    least = p[kept].min()
    assert all(p[token] >= max(least, floor) * (1 - 1e-4) for token in finite)
    assert np.exp(got.astype(np.float64)).sum() == pytest.approx(1, abs=1e-4)
    ratio = got[finite] - np.log(p[finite])
    assert ratio.max() - ratio.min() < 1e-3, "a cut must not change the ratios of what it keeps"


def test_greedy_ignores_cuts_and_seed():
    logits = np.array([0.1, 3.0, 2.9], dtype=np.float32)
    for seed in range(5):
        law = Law(SamplingParams(seed=seed, top_k=1, top_p=0.1, min_p=0.5), 3)
        assert law.choose(logits, [0]) == 1


def test_repetition_penalty_touches_the_window_only():
    params = SamplingParams(repetition_penalty=2.0, repetition_window=2)
    law = Law(params, 4)
    logits = np.array([4.0, -4.0, 4.0, 4.0], dtype=np.float32)
    assert law.rewrite(logits, [3, 0, 1, 1]).tolist() == [4.0, -8.0, 4.0, 4.0]
    assert law.rewrite(logits, [3, 1, 0]).tolist() == [2.0, -8.0, 4.0, 4.0]
    assert logits.tolist() == [4.0, -4.0, 4.0, 4.0]


def test_bias_decides():
    law = Law(SamplingParams(logit_bias={2: 100.0}), 3)
    assert law.choose(np.array([5.0, 1.0, -9.0], dtype=np.float32), [0]) == 2


class Alternate:
    """Even and odd tokens in turn; the state is the parity of the last one."""

    def start(self):
        return 1

    def advance(self, state, token):
        assert token % 2 != state
        return token % 2

    def allowed(self, state):
        return np.arange(6) % 2 != state


def test_a_constraint_begins_with_the_answer_and_follows_the_path():
    law = Law(SamplingParams(constraint=Alternate()), 6, answer_start=2)
    logits = np.arange(6, dtype=np.float32)
    history = [1, 1]
    while len(history) < 6:
        history.append(law.choose(logits, history))
    assert history[2:] == [4, 5, 4, 5]
    assert law.choose(logits, [1, 1, 4]) == 5, "an earlier branch is still right"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=-1),
        SamplingParams(temperature=float("nan")),
        SamplingParams(temperature=float("inf")),
        SamplingParams(top_k=-1),
        SamplingParams(top_p=0),
        SamplingParams(top_p=1.1),
        SamplingParams(min_p=1.0),
        SamplingParams(repetition_penalty=0),
        SamplingParams(logit_bias={9: 1.0}),
        SamplingParams(logit_bias={1: float("nan")}),
        SamplingParams(seed=-1),
        SamplingParams(seed=2**64),
        SamplingParams(top_logprobs=21),
    ],
)
def test_values_out_of_range_are_refused_with_what_is_expected(params):
    with pytest.raises(BadRequest, match=r"must be .*, got "):
        params.checked(vocab_size=8)


def test_without_a_seed_one_is_drawn():
    assert Law(SamplingParams(), 8).seed != Law(SamplingParams(), 8).seed


TREE = (
    VerifyRow(0, 5, ROOT_ROW),
    VerifyRow(1, 1, 0),
    VerifyRow(2, 2, 0),
    VerifyRow(3, 1, 2),
    VerifyRow(4, 9, 3),
)


def test_the_walk_takes_the_branch_that_the_law_chooses():
    choices = {0: 2, 2: 1, 3: 7}
    assert walk_coupled(TREE, choices.__getitem__) == ([2, 3], [2, 1, 7])


def test_history_of_a_row_is_its_own_path():
    assert history_with_path([8, 8], TREE, 4) == [8, 8, 5, 2, 1, 9]
    assert history_with_path([8, 8], TREE, 1) == [8, 8, 5, 1]

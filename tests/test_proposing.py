"""Laws of reading a head: the exact best candidates, their probabilities, ranks and samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from drafter_oracle import head_outputs, log_softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.errors import UnitFailed
from ondevice.proposing import (
    CANDIDATES,
    Family,
    Head,
    RowTokens,
    ranked_children,
    sampled_child,
)
from ondevice.sampling import DRAFT_STREAM, Law, SamplingParams

ROWS = 128 * 150
Logits = npt.NDArray[np.float32]


def head_of(logits: Logits, row_to_token: list[int] | None = None, vocab: int = 0) -> Head:
    """A head over logits (T, rows), stored as the functions store it, in parts joined again."""
    outputs = head_outputs(logits)
    count = len([name for name in outputs if name.startswith("logits_")])

    def whole(name: str) -> npt.NDArray[np.float32]:
        return np.concatenate([outputs[f"{name}_{i}"][0, :, 0] for i in range(count)])

    stored = whole("logits").reshape(-1, 128, len(logits))
    vocabulary = RowTokens(vocab or logits.shape[1], row_to_token)
    return Head(stored, whole("chunk_max"), whole("chunk_sum"), vocabulary)


def random_logits(seed: int, rows: int = ROWS, count: int = 2) -> Logits:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 3, (count, rows)).astype(np.float16).astype(np.float32)


def family(law: Law, history: list[int] | None = None, position: int = 9) -> Family:
    return Family(5, position, law, history or [], "drafter")


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    rows=st.sampled_from([16, 64, 130, 128 * 66, 16384 + 100]),
    spread=st.sampled_from([0.0, 0.01, 3.0]),
    peaks=st.lists(st.integers(0, 10**6), max_size=80),
)
def test_candidates_are_the_best_of_all_logits(
    seed: int, rows: int, spread: float, peaks: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((3, rows))).astype(np.float32)
    logits[:, [peak % rows for peak in peaks]] += 10
    head = head_of(logits)
    law = Law(SamplingParams(), rows)
    for column in range(3):
        best = head.candidates(column, law, [])
        expected = np.sort(logits[column])[::-1][:CANDIDATES]
        assert len(set(best.tokens.tolist())) == len(expected)
        assert np.array_equal(logits[column, best.tokens], expected)
        assert np.allclose(best.log_q, log_softmax(logits[column])[best.tokens], atol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
    bias=st.dictionaries(st.integers(0, ROWS - 1), st.floats(-30, 30), max_size=20),
    recent=st.lists(st.integers(0, ROWS - 1), max_size=80),
    touch_best=st.booleans(),
)
def test_candidates_follow_penalty_and_bias_as_the_law_does(
    seed: int, penalty: float, bias: dict[int, float], recent: list[int], touch_best: bool
) -> None:
    logits = random_logits(seed, count=1)
    if touch_best:
        recent = [*np.argsort(-logits[0])[:40].tolist(), *recent]
    law = Law(SamplingParams(repetition_penalty=penalty, logit_bias=bias), ROWS)
    best = head_of(logits).candidates(0, law, recent)
    expected = law.log_p(logits[0], recent)
    assert np.allclose(best.log_q, np.sort(expected)[::-1][:CANDIDATES], atol=1e-4)
    assert np.allclose(best.log_q, expected[best.tokens], atol=1e-4)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.3, 1.5),
    top_k=st.sampled_from([0, 1, 5, 64]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_children_are_scored_under_the_laws_temperature_and_cuts(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Exact when all that is kept is among the candidates and its normaliser is not estimated."""
    logits = random_logits(seed, count=1)
    logits[0, :20] += 12
    params = SamplingParams(temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    law = Law(params, ROWS)
    children = ranked_children(head_of(logits), 0, family(law), 8)
    expected = law.log_p(logits[0], [])
    kept = np.count_nonzero(expected > -np.inf)
    exact = top_k > 0 or (min_p > 0 and top_p == 1 and kept < CANDIDATES)
    for child in children:
        assert child.log_q == pytest.approx(expected[child.token], abs=1e-4 if exact else 0.15)
    assert not exact or len(children) == min(8, kept)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_ranking_is_that_of_the_perturbed_candidates(temperature: float, seed: int) -> None:
    logits = random_logits(seed)
    law = Law(SamplingParams(temperature=temperature, seed=seed), ROWS)
    for column in range(2):
        children = ranked_children(head_of(logits), column, family(law), 4)
        best = np.argsort(-logits[column], kind="stable")[:CANDIDATES]
        scores = logits[column, best] / (temperature or 1)
        if temperature:
            scores = scores + law.noise(9)[best]
        order = np.argsort(-scores)
        assert [child.token for child in children] == best[order[:4]].tolist()
        assert [child.rank for child in children] == [0, 1, 2, 3]
        gaps = scores[order[:4]] - scores[order[1:5]]
        assert [child.gap for child in children] == pytest.approx(gaps.tolist(), abs=1e-4)


def test_the_normaliser_of_other_temperatures_lies_close_to_the_exact_one() -> None:
    logits = random_logits(3, count=4)
    for temperature, tolerance in ((0.5, 0.01), (0.8, 0.05), (1.25, 0.1)):
        law = Law(SamplingParams(temperature=temperature, seed=1), ROWS)
        for column in range(4):
            best = head_of(logits).candidates(column, law, [])
            exact = log_softmax(logits[column] / np.float32(temperature))[best.tokens]
            assert np.abs(best.log_q - exact).max() < tolerance


def test_nothing_is_better_than_the_last_choice() -> None:
    law = Law(SamplingParams(), 16)
    children = ranked_children(head_of(random_logits(0, 16)), 0, family(law), 40)
    assert len(children) == 16
    assert children[-1].gap == np.inf
    assert all(child.log_q <= 0 for child in children)


def test_a_subset_vocabulary_proposes_its_own_tokens_only() -> None:
    rng = np.random.default_rng(0)
    row_to_token = rng.permutation(5000)[:700].tolist()
    logits = random_logits(1, 700)
    head = head_of(logits, row_to_token, 5000)
    params = SamplingParams(repetition_penalty=2.0, logit_bias={row_to_token[3]: 50.0, 1: 99.0})
    for rule_params in (SamplingParams(), replace(params, temperature=1.0, seed=3)):
        law = Law(rule_params, 5000)
        whole = np.full(5000, -np.inf, np.float32)
        whole[row_to_token] = logits[0]
        expected = law.log_p(whole, row_to_token[:9])
        children = ranked_children(head, 0, family(law, row_to_token[:9]), 5)
        for child in children:
            assert child.log_q == pytest.approx(expected[child.token], abs=1e-4)
        (sample,) = sampled_child(head, 0, family(law, row_to_token[:9]))
        assert sample.q is not None
        assert sample.q.shape == (5000,)
        assert np.array_equal(sample.q, np.exp(expected))


class OnlyMultiples:
    """A grammar of multiples of a number; 0 of them after token 1."""

    def start(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return token

    def allowed(self, state: int) -> npt.NDArray[np.bool_]:
        return (np.arange(300) % 50 == 0) & (state != 1)


def test_a_constraint_is_kept_by_every_child() -> None:
    head = head_of(random_logits(0, 300))
    law = Law(SamplingParams(temperature=1.0, seed=2, constraint=OnlyMultiples()), 300)
    children = ranked_children(head, 0, family(law, [7]), 10)
    assert len(children) == 6
    assert all(child.token % 50 == 0 for child in children)
    assert np.exp([child.log_q for child in children]).sum() == pytest.approx(1, abs=1e-4)
    assert ranked_children(head, 0, family(law, [1]), 10) == []
    assert sampled_child(head, 0, family(law, [1])) == []


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8, repetition_penalty=1.5),
    ],
)
def test_under_rejection_the_token_is_sampled_from_the_row_that_is_returned(
    params: SamplingParams,
) -> None:
    """Chi-square of 4,000 positions; 37.7 is the 0.999 quantile at 15 degrees of freedom."""
    logits = random_logits(5, 16)
    head = head_of(logits)
    law = Law(replace(params, seed=20261129), 16)
    counts = np.zeros(16)
    for position in range(4000):
        (child,) = sampled_child(head, 0, family(law, [3, 4], position))
        counts[child.token] += 1
    q = child.q
    assert q is not None
    assert q.sum() == pytest.approx(1, abs=1e-5)
    assert child.log_q == pytest.approx(np.log(q[child.token]), abs=1e-6)
    assert counts[q == 0].sum() == 0
    expected = 4000 * q[q > 0]
    assert ((counts[q > 0] - expected) ** 2 / expected).sum() < 37.7
    assert np.allclose(q, np.exp(law.log_p(logits[0], [3, 4])), atol=1e-6)


def test_the_sample_ignores_the_verifiers_noise() -> None:
    logits = random_logits(5, 300)
    law = Law(SamplingParams(temperature=1.0, seed=3), 300)
    head = head_of(logits)
    log_q = log_softmax(logits[0])
    for position in range(50):
        (child,) = sampled_child(head, 0, family(law, [], position))
        scores = np.sort(log_q + law.noise(position, DRAFT_STREAM))
        assert child.token == int(np.argmax(log_q + law.noise(position, DRAFT_STREAM)))
        assert child.gap == pytest.approx(scores[-1] - scores[-2], abs=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail_the_step(bad: float) -> None:
    head = head_of(random_logits(0, 300))
    law = Law(SamplingParams(), 300)
    head.logits[0, 5, 1] = bad
    assert ranked_children(head, 0, family(law), 2)
    for read in (ranked_children, lambda *given: sampled_child(*given[:3])):
        with pytest.raises(UnitFailed, match="not finite"):
            read(head, 1, family(law), 2)
    for array in (head.maxima, head.sums):
        array[1, 0] = bad
        with pytest.raises(UnitFailed, match="not finite"):
            head.check([0])
        head.check([1])
        array[1, 0] = 1

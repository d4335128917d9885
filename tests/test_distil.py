"""Distillation on a tiny model: texts, their storage, the student, and what a kill can cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
import tiny
from distilling import chosen_text, random_texts, wide_model
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.converters.distil.corpus import Batch, Batcher
from ondevice.converters.distil.decoder import RowDecoder
from ondevice.converters.distil.decoding import TOP, draw
from ondevice.converters.distil.greedy import greedy_answers
from ondevice.converters.distil.loops import loop_period, loop_start, without_loop
from ondevice.converters.distil.repetition import echoes, loop_gone_on
from ondevice.converters.distil.student import START_SCALE, Student
from ondevice.converters.mlxmodel import mlx_model


@pytest.fixture(scope="module")
def model() -> tiny.TinyModel:
    return wide_model()


def small_student(model: tiny.TinyModel, rows: list[int]) -> Student:
    return Student(model.tensors.__getitem__, model.config, (0, 1), rows)


# --- loops ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 50), min_size=0, max_size=30),
    st.lists(st.integers(51, 90), min_size=1, max_size=12),
)
def test_a_loop_is_cut_to_two_rounds(before: list[int], body: list[int]) -> None:
    text = before + body * 30
    kept = without_loop(text)
    period = loop_period(text)
    assert period is not None
    assert len(before) + period <= kept <= len(before) + 2 * len(body)
    start = loop_start(text)
    assert start is not None
    assert start <= len(before) + len(body)
    assert text[start:] == text[start - period : len(text) - period]


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(60)))
def test_text_without_repetition_has_no_loop(tokens: list[int]) -> None:
    assert loop_period(tokens) is None
    assert loop_start(tokens) is None
    assert without_loop(tokens) == len(tokens)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30),
    st.permutations(range(51, 91)),
    st.integers(1, 40),
    st.integers(1, 60),
)
def test_a_cut_loop_goes_on_as_the_text_did(
    before: list[int], body: list[int], period: int, more: int
) -> None:
    body = body[:period]
    answer = before + body * 2
    text = chosen_text([7, 7, 7], answer)
    limit = len(answer) + more
    whole = loop_gone_on(text, limit)
    expected = (before + body * (2 + more))[:limit]
    assert whole.tokens[3:].tolist() == expected
    assert whole.top_tokens[:, 0].tolist() == expected
    assert whole.start == 3


def test_what_was_not_cut_at_a_loop_is_not_gone_on_with() -> None:
    text = replace(chosen_text([7], [5, 6, 5, 6]), looped=False)
    assert loop_gone_on(text, 50) is text


def test_an_answer_at_its_limit_is_not_gone_on_with() -> None:
    text = chosen_text([7], [5, 6, 5, 6])
    assert loop_gone_on(text, 4) is text


def test_a_loop_goes_on_with_the_targets_of_its_answer() -> None:
    asked = chosen_text([7], [1, 2, 5, 6, 5, 6])
    text = replace(asked, answer=3)
    assert loop_gone_on(text, 6).top_tokens[:, 0].tolist() == [1, 2, 5, 6, 5, 6, 5, 6]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 99), st.floats(0.05, 0.5))
def test_an_echo_can_be_foretold_from_what_stands_before(seed: int, share: float) -> None:
    texts = random_texts(30, 500, seed)
    made = echoes(texts, share, seed)
    wanted = share * sum(len(text.tokens) for text in texts)
    assert wanted <= sum(len(text.tokens) for text in made) < wanted + 500
    for text in made:
        tokens = text.tokens.tolist()
        assert text.top_tokens[:, 0].tolist() == tokens[text.start :]
        np.testing.assert_array_equal(np.exp(text.top_logprobs).sum(1), 1)
        for place in range(text.start, len(tokens)):
            assert (tokens[place - 1], tokens[place]) in set(pairwise(tokens[:place]))


def test_echoes_are_the_same_for_the_same_texts() -> None:
    texts = random_texts(30, 500)
    first, second = echoes(texts, 0.3, 1), echoes(texts, 0.3, 1)
    assert [t.tokens.tolist() for t in first] == [t.tokens.tolist() for t in second]


# --- drawing -------------------------------------------------------------------------------------


def test_draws_have_the_distribution_of_the_whole_vocabulary() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(200).astype(np.float32)
    heat = 0.7
    count = 20_000
    order = np.argsort(-logits)[:TOP]
    log_sum = np.log(np.exp(logits / heat).sum())
    drawn = draw(
        np.tile(order, (count, 1)),
        np.tile(logits[order], (count, 1)),
        np.full(count, log_sum, np.float32),
        np.full(count, heat, np.float32),
        ((np.arange(count) + 0.5) / count).astype(np.float32),
        lambda row: logits,
    )
    expected = np.exp(logits / heat - log_sum)
    found = np.bincount(drawn, minlength=200) / count
    assert np.abs(found - expected).max() < 3 / count + 1e-4


def test_rows_decode_as_the_model_does_alone(model: tiny.TinyModel) -> None:
    verifier = mlx_model(model.config, model.tensors)
    prompts = [[1, 30, 40], [1, 7, 8, 9, 10, 11], [1, 99]]
    decoder = RowDecoder(verifier, 2, 64, ())
    answers = greedy_answers(decoder, prompts, {0}, 12)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = list(prompt)
        while len(text) < len(prompt) + 12 and (text[-1] != 0 or len(text) == len(prompt)):
            text.append(int(verifier(mx.array([text]))[0, -1].argmax()))
        assert answer == text[len(prompt) :]


# --- the loss and its gradient -------------------------------------------------------------------


def test_loss_is_the_definition(model: tiny.TinyModel) -> None:
    vocab = model.config.vocab_size
    rows = sorted(np.random.default_rng(1).permutation(vocab)[:128].tolist())
    texts = random_texts(4, vocab)
    batcher = Batcher(texts, rows, vocab, first_choice_weight=0.3)
    batch = batcher.batch(range(4))
    loss = small_student(model, rows).judge([batch]).loss
    norm = "model.norm.weight"
    scaled = model.tensors | {norm: model.tensors[norm] * START_SCALE}
    scored = mlx_model(model.config, scaled)
    total, count = 0.0, 0
    for text in texts:
        tokens = text.tokens.astype(int).tolist()
        logits = np.array(scored(mx.array([tokens]))[0], np.float64)[:, rows]
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        for place in range(text.start, len(tokens)):
            ids, p = text.top_tokens[place - text.start], text.top_logprobs[place - text.start]
            inside = np.isin(ids, rows)
            share = np.exp(p.astype(np.float64)) * inside
            count += 1
            if not inside.any():
                continue
            share /= share.sum()
            weight = 0.3 if inside[0] else 0.0
            share *= 1 - weight
            share[0] += weight
            found = [logits[place - 1, rows.index(t)] if t in rows else 0.0 for t in ids]
            total -= float(share @ np.array(found))
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_gradient_is_the_slope_of_the_loss(model: tiny.TinyModel) -> None:
    vocab = model.config.vocab_size
    rows = list(range(0, 256))
    student = small_student(model, rows)
    batch = Batcher(random_texts(6, vocab), rows, vocab, 0.3).batch(range(6))
    gradients = student.gradients(batch)
    weights = student.weights()
    assert gradients.keys() == weights.keys()
    rng = np.random.default_rng(0)
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape).astype(np.float32)
        direction += 3 * gradient / np.linalg.norm(gradient) * np.sqrt(gradient.size)
        slope = _slope(student, batch, weights, name, direction)
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=2e-2), name


def _slope(
    student: Student, batch: Batch, weights: dict[str, np.ndarray], name: str, way: np.ndarray
) -> float:
    step = 1e-3 / float(np.abs(way).max())
    found = []
    for sign in (1, -1):
        student.begin_as(weights | {name: weights[name] + np.float32(sign * step) * way})
        found.append(student.judge([batch]).loss * len(batch.places))
    student.begin_as(weights)
    return (found[0] - found[1]) / (2 * step)


def test_only_the_layers_and_the_norm_learn(model: tiny.TinyModel) -> None:
    vocab = model.config.vocab_size
    student = small_student(model, list(range(256)))
    assert not any("embed" in name or "lm_head" in name for name in student.weights())
    batch = Batcher(random_texts(6, vocab), list(range(256)), vocab, 0.3).batch(range(6))
    before = student.judge([batch]).loss
    for _ in range(30):
        student.learn([batch], 1e-3)
    assert student.judge([batch]).loss < before - 0.5


def test_a_student_restored_goes_on_to_the_same_bits(model: tiny.TinyModel) -> None:
    vocab, rows = model.config.vocab_size, list(range(256))
    batcher = Batcher(random_texts(12, vocab), rows, vocab, 0.3)
    batches = [batcher.batch([i, i + 1]) for i in range(0, 12, 2)]
    one, other = small_student(model, rows), small_student(model, rows)
    for batch in batches[:3]:
        one.learn([batch], 1e-3)
    other.restore(one.state())
    for batch in batches[3:]:
        one.learn([batch], 1e-3)
        other.learn([batch], 1e-3)
    for name, value in one.state().items():
        np.testing.assert_array_equal(value, other.state()[name], err_msg=name)

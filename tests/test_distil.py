"""Distillation on a tiny model: texts, their storage, the student, and what a kill can cost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.distil.checkpoints import load_checkpoint
from ondevice.converters.distil.corpus import Batch, Batcher
from ondevice.converters.distil.decoder import RowDecoder
from ondevice.converters.distil.decoding import TOP, draw
from ondevice.converters.distil.finish import WEIGHTS_FILE
from ondevice.converters.distil.greedy import greedy_answers
from ondevice.converters.distil.loops import loop_period, loop_start, without_loop
from ondevice.converters.distil.material import Material
from ondevice.converters.distil.recipe import Recipe
from ondevice.converters.distil.run import Distillation, Effort
from ondevice.converters.distil.shards import Text
from ondevice.converters.distil.student import START_SCALE, Student
from ondevice.converters.distil.training import STATE_FILE
from ondevice.converters.parity import llama
from ondevice.converters.trained import check_trained, read_trained
from ondevice.errors import BadRequest, CacheUnwritable, UnsupportedModel

RECIPE = Recipe(
    layers=(0, 1),
    rows=384,
    question_tokens=12,
    answer_tokens=16,
    decode_rows=8,
    batch_tokens=256,
    step_tokens=256,
    held_out=5,
)
SOME = Effort(data_tokens=600, train_tokens=4000)


@pytest.fixture(scope="module")
def model() -> tiny.TinyModel:
    """More tokens than the tokenizer has: a student with fewer rows is possible."""
    return tiny.tiny_model(vocab_size=400)


@pytest.fixture(scope="module")
def checkpoint(model: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny.write_folder(model, tmp_path_factory.mktemp("distil") / "llama"))


def distillation(checkpoint: Checkpoint, work: Path, recipe: Recipe = RECIPE) -> Distillation:
    run = Distillation(checkpoint, recipe, Material(), work, quiet=True)
    run.claim()
    return run


def random_texts(count: int, vocab_size: int, seed: int = 0) -> list[Text]:
    """Random tokens with random distributions, as shards hold them."""
    rng = np.random.default_rng(seed)
    texts = []
    for index in range(count):
        length = int(rng.integers(6, 20))
        start = int(rng.integers(1, length - 2))
        logits = rng.standard_normal((length - start, vocab_size)) * 2
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        order = np.argsort(-logprobs, axis=1)[:, :TOP]
        texts.append(
            Text(
                index,
                "chat",
                0.0,
                rng.integers(0, vocab_size, length).astype(np.uint16),
                start,
                order.astype(np.uint16),
                np.take_along_axis(logprobs, order, 1).astype(np.float16),
            )
        )
    return texts


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
    verifier = llama(model.config, model.tensors)
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
    scored = llama(model.config, scaled)
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


# --- resuming ------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import test_distil as t
from ondevice.converters.checkpoint import open_checkpoint
from ondevice.converters.distil.finish import write_drafter
run = t.distillation(open_checkpoint(Path({model!r})), Path({work!r}), t.OFTEN)
texts = run.make_data(t.SOME)
student, position = run.train(texts, t.SOME)
write_drafter(run, student, run.rows(texts))
print("done", position.tokens)
"""
OFTEN = RECIPE.model_copy(update={"shard_s": 0.05, "checkpoint_s": 0.05})


def start_child(model: Path, work: Path) -> subprocess.Popen[str]:
    code = CHILD.format(path=sys.path, model=str(model), work=str(work))
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE)


def finished(checkpoint: Checkpoint, work: Path) -> tuple[list[int], int]:
    """Indices of the conversations in the shards, and tokens of the checkpoint."""
    run = distillation(checkpoint, work, OFTEN)
    indices = [text.index for text in run.texts()]
    state = work / STATE_FILE
    return indices, load_checkpoint(state)[1]["position"]["tokens"] if state.exists() else 0


@pytest.mark.slow
def test_ten_kills_cost_nothing_that_was_finished(model: tiny.TinyModel, tmp_path: Path) -> None:
    folder = tiny.write_folder(model, tmp_path / "model")
    checkpoint, work = open_checkpoint(folder), tmp_path / "work"
    rng = np.random.default_rng(5)
    before: tuple[list[int], int] = ([], 0)
    for kill in range(11):
        child = start_child(folder, work)
        if kill < 10:
            _wait_for_more(child, checkpoint, work, before)
            time.sleep(float(rng.random()))
            child.send_signal(signal.SIGKILL)
            child.wait()
        else:
            out, _ = child.communicate(timeout=300)
            assert child.returncode == 0
            assert out.startswith("done")
        indices, tokens = finished(checkpoint, work)
        assert indices[: len(before[0])] == before[0]
        assert len(set(indices)) == len(indices)
        assert tokens >= before[1]
        before = indices, tokens
    assert before[1] >= (SOME.train_tokens or 0)
    drafter = read_trained(work / WEIGHTS_FILE)
    check_trained(drafter, checkpoint)


def _wait_for_more(
    child: subprocess.Popen[str], checkpoint: Checkpoint, work: Path, before: tuple[list[int], int]
) -> None:
    """Until the child has put something on the disk, so that ten kills are spread over the run."""
    until = time.monotonic() + 60
    while child.poll() is None and time.monotonic() < until:
        if work.exists() and (work / "recipe.json").exists():
            indices, tokens = finished(checkpoint, work)
            if len(indices) > len(before[0]) or tokens > before[1]:
                return
        time.sleep(0.05)


def test_an_interrupted_run_ends_as_one_that_was_not(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    whole = distillation(checkpoint, tmp_path / "whole")
    parts = distillation(checkpoint, tmp_path / "parts")
    texts = whole.make_data(SOME)
    shutil.copytree(tmp_path / "whole" / "own", tmp_path / "parts" / "own", dirs_exist_ok=True)
    expected, _ = whole.train(texts, SOME)
    with pytest.MonkeyPatch.context() as patch:
        _stop_after(patch, 3)
        with pytest.raises(_Enough):
            parts.train(texts, SOME)
    found, position = distillation(checkpoint, tmp_path / "parts").train(texts, SOME)
    assert position.steps > 3
    for name, value in expected.weights().items():
        np.testing.assert_array_equal(value, found.weights()[name], err_msg=name)


class _Enough(Exception):
    """Ends a run as a signal would."""


def _stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    learn, done = Student.learn, []

    def counted(self: Student, *arguments: Any) -> Any:
        if len(done) == steps:
            raise _Enough
        done.append(1)
        return learn(self, *arguments)

    patch.setattr(Student, "learn", counted)


def test_data_made_in_parts_asks_nothing_twice(checkpoint: Checkpoint, tmp_path: Path) -> None:
    little = replace(SOME, data_tokens=200)
    first = distillation(checkpoint, tmp_path / "work").make_data(little)
    again = distillation(checkpoint, tmp_path / "work").make_data(little)
    assert [text.index for text in first] == [text.index for text in again]
    more = distillation(checkpoint, tmp_path / "work").make_data(SOME)
    indices = [text.index for text in more]
    assert indices[: len(first)] == [text.index for text in first]
    assert len(set(indices)) == len(indices)
    questions = [tuple(text.tokens[: text.start].tolist()) for text in more]
    assert len(set(questions)) == len(questions)
    assert sum(len(text.tokens) - text.start for text in more) >= 600
    for text in more:
        assert len(text.top_tokens) == len(text.tokens) - text.start


# --- bad input -----------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_loses_nothing(
    checkpoint: Checkpoint, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(400_000)
    work = disk / "work"
    with pytest.raises(CacheUnwritable, match=r"full|space"):
        distillation(checkpoint, work, OFTEN).make_data(replace(SOME, data_tokens=100_000))
    kept = {path: path.read_bytes() for path in (work / "own").iterdir()}
    assert all(path.name.startswith("data-") for path in kept)
    run = distillation(checkpoint, work, OFTEN)
    assert len(run.texts()) > 0
    with pytest.raises(CacheUnwritable, match=r"full|space"):
        run.train(run.texts(), SOME)
    assert {path: path.read_bytes() for path in (work / "own").iterdir()} == kept


@pytest.mark.parametrize(
    ("effort", "message"),
    [
        (Effort(hours=0), "hours: expected more than 0, got 0"),
        (Effort(hours=-1), "hours: expected more than 0, got -1"),
        (Effort(hours=float("nan")), "hours: expected more than 0, got nan"),
        (Effort(data_tokens=5), "got neither"),
    ],
)
def test_no_effort_is_refused(effort: Effort, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        effort.checked()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 1024}, "at most the 400 tokens"),
        ({"rows": 200}, "multiple of 128, got 200"),
        ({"layers": (0, 9)}, "from 0 to 1"),
        ({"layers": (1, 0)}, "ascending"),
    ],
)
def test_impossible_recipes_are_refused_before_any_work(
    change: dict[str, Any], message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    recipe = RECIPE.model_copy(update=change)
    with pytest.raises(BadRequest, match=message):
        Distillation(checkpoint, recipe, Material(), tmp_path / "work", quiet=True).claim()
    assert not (tmp_path / "work" / "own").exists()


def test_a_model_without_a_chat_template_is_refused(model: tiny.TinyModel, tmp_path: Path) -> None:
    folder = tiny.write_folder(model, tmp_path / "base")
    settings_file = folder / "tokenizer_config.json"
    content = json.loads(settings_file.read_text())
    del content["chat_template"]
    settings_file.write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match="no chat template"):
        distillation(open_checkpoint(folder), tmp_path / "work")


def test_text_that_is_no_utf_8_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("caf\xe9".encode("latin-1"))
    run = Distillation(checkpoint, RECIPE, Material(texts=(file,)), tmp_path / "w", quiet=True)
    with pytest.raises(BadRequest, match="not UTF-8: byte 3 is 0xe9"):
        run.claim()


def test_another_runs_folder_is_not_taken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    distillation(checkpoint, tmp_path / "work")
    with pytest.raises(BadRequest, match="another distillation"):
        distillation(checkpoint, tmp_path / "work", RECIPE.model_copy(update={"seed": 1}))

"""A distillation's stages on a tiny model: what a kill can cost, and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from distilling import OFTEN, RECIPE, SOME, distillation, random_texts, wide_model

from ondevice.converters.checkpoint import Checkpoint, open_checkpoint
from ondevice.converters.distil.checkpoints import load_checkpoint
from ondevice.converters.distil.corpus import Batch, Batcher
from ondevice.converters.distil.finish import WEIGHTS_FILE
from ondevice.converters.distil.learner import Learned, Single, State
from ondevice.converters.distil.material import Material
from ondevice.converters.distil.run import Distillation, Effort
from ondevice.converters.distil.schedule import Schedule
from ondevice.converters.distil.student import Student
from ondevice.converters.distil.training import (
    STATE_FILE,
    Budget,
    Pace,
    Position,
    Training,
)
from ondevice.converters.trained import check_trained, read_trained
from ondevice.errors import BadRequest, CacheUnwritable, UnsupportedModel


@pytest.fixture(scope="module")
def model() -> tiny.TinyModel:
    return wide_model()


@pytest.fixture(scope="module")
def checkpoint(model: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny.write_folder(model, tmp_path_factory.mktemp("distil") / "llama"))


# --- resuming ------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import distilling as t
from ondevice.converters.checkpoint import open_checkpoint
from ondevice.converters.distil.corpus import Batch, Batcher
from ondevice.converters.distil.finish import write_drafter
run = t.distillation(open_checkpoint(Path({model!r})), Path({work!r}), t.OFTEN)
texts = run.make_data(t.SOME)
student, position = run.train(texts, t.SOME)
write_drafter(run, student, run.rows(texts))
print("done", position.tokens)
"""


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
            child.communicate()
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
    questions = [tuple(text.tokens[: text.answer].tolist()) for text in more]
    assert len(set(questions)) == len(questions)
    assert sum(len(text.tokens) - text.start for text in more) >= 600
    for text in more:
        assert len(text.top_tokens) == len(text.tokens) - text.start


def test_every_token_after_the_template_is_learned_as_the_verifier_has_it(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    run = distillation(checkpoint, tmp_path / "work")
    prefix = run.plans["own"].prefix
    texts = run.make_data(replace(SOME, data_tokens=200))
    for text in texts:
        assert text.start == len(prefix) < text.answer < len(text.tokens)
        logits = run.verifier(mx.array([text.tokens.astype(int).tolist()]))[0]
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        expected = logprobs[text.start - 1 : -1]
        found = np.take_along_axis(expected, text.top_tokens.astype(int), axis=1)
        np.testing.assert_allclose(found, text.top_logprobs, atol=5e-3)
        np.testing.assert_allclose(found[:, 0], expected.max(1), atol=1e-5)
        asked = text.answer_only()
        np.testing.assert_array_equal(asked.top_tokens, text.top_tokens[text.answer - text.start :])
        assert len(asked.top_tokens) == len(text.tokens) - asked.start


def test_answers_under_way_are_kept_when_enough_is_made(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    run = distillation(checkpoint, tmp_path / "work")
    stops = set(checkpoint.eos_token_ids)
    open_ends = 0
    for text in run.make_data(replace(SOME, data_tokens=200)):
        answer = text.tokens[text.answer :]
        whole = int(answer[-1]) in stops or text.looped or len(answer) == RECIPE.answer_tokens
        open_ends += not whole
    assert 0 < open_ends <= RECIPE.decode_rows


def test_texts_under_way_are_kept_when_time_is_up(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("One word after another, and so on to the end. " * 60, encoding="utf-8")
    run = Distillation(checkpoint, RECIPE, Material((file,)), tmp_path / "work", quiet=True)
    run.check()
    run.claim()
    texts = run.make_data(Effort(hours=1e-6))  # over after one step
    windows = run.windows[0]
    assert [text.index for text in texts] == list(range(min(len(windows), RECIPE.decode_rows)))
    for text in texts:
        assert tuple(text.tokens) == windows[text.index][:2]
        assert len(text.top_tokens) == 1


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
        (Effort(hours=0), "hours: expected a finite number above 0, got 0"),
        (Effort(hours=-1), "hours: expected a finite number above 0, got -1"),
        (Effort(hours=float("inf")), "hours: expected a finite number above 0, got inf"),
        (Effort(hours=float("nan")), "hours: expected a finite number above 0, got nan"),
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
        Distillation(checkpoint, recipe, Material(), tmp_path / "work", quiet=True).check()
    assert not (tmp_path / "work").exists()


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
        run.check()


def test_another_runs_folder_is_not_taken(checkpoint: Checkpoint, tmp_path: Path) -> None:
    distillation(checkpoint, tmp_path / "work")
    with pytest.raises(BadRequest, match="another distillation"):
        distillation(checkpoint, tmp_path / "work", RECIPE.model_copy(update={"seed": 1}))


# --- stopping early ------------------------------------------------------------------------------


class Scripted:
    """A learner whose validations are given; it notes the rates that it is called with."""

    def __init__(self, shares: list[int]) -> None:
        self._shares, self.rates = shares, list[float]()

    def learn(self, batches: Sequence[Batch], rate: float) -> Learned:
        self.rates.append(rate)
        return Learned(1.0, 1, 1)

    def judge(self, batches: Sequence[Batch]) -> Learned:
        return Learned(1.0, 100, self._shares.pop(0) if len(self._shares) > 1 else self._shares[0])

    def weights(self) -> dict[str, Single]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: State) -> None:
        pass


def train_scripted(shares: list[int], folder: Path) -> tuple[Scripted, Position]:
    learner = Scripted(shares)
    batcher = Batcher(random_texts(50, 400), list(range(384)), 400, 0.3)
    pace = Pace(batch_tokens=64, step_batches=1, validate_tokens=500, patience=3)
    schedule, budget = Schedule(1.0), Budget(tokens=20_000)
    training = Training(learner, batcher, [], schedule, budget, pace, folder)
    return learner, training.run(lambda position, learned: None)


def test_a_run_that_no_longer_improves_descends_at_once(tmp_path: Path) -> None:
    whole, end = train_scripted(list(range(60)), tmp_path / "improves")
    assert end.tokens >= 20_000
    assert end.skipped == 0
    short, early = train_scripted([10, 20, 20], tmp_path / "stalls")
    # Five validations of 500 tokens, then the descent's 40 % of the budget.
    assert 9_000 < early.tokens < 12_000
    for learner in (whole, short):
        assert max(learner.rates) == 1
        assert learner.rates[-1] < 0.02
        descent = learner.rates[-50:]
        assert descent == sorted(descent, reverse=True)

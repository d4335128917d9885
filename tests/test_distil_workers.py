"""What is shared out among workers is what one alone would have made."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import tiny
from distilling import random_texts, wide_model

from ondevice import blas
from ondevice.converters.distil.corpus import Batcher
from ondevice.converters.distil.decoder import RowDecoder, SplitDecoder
from ondevice.converters.distil.greedy import greedy_answers
from ondevice.converters.distil.student import Student
from ondevice.converters.distil.workers import MOST_WORKERS, Workers
from ondevice.converters.mlxmodel import mlx_model

ROWS = list(range(256))


@pytest.fixture(scope="module")
def model() -> tiny.TinyModel:
    return wide_model()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_order_and_each_job_on_its_own_thread(count: int) -> None:
    with Workers(count) as workers:
        first = workers.map([threading.get_ident] * count)
        again = workers.map([threading.get_ident] * count)
        assert first == again
        assert len(set(first)) == count
        assert workers.map([partial(pow, place, 2) for place in range(10)]) == [
            place**2 for place in range(10)
        ]


def test_what_goes_wrong_in_a_worker_goes_wrong_in_the_caller() -> None:
    with Workers(2) as workers, pytest.raises(ZeroDivisionError):
        workers.map([partial(divmod, 1, 1), partial(divmod, 1, 0)])


def test_steps_shared_out_teach_the_same(model: tiny.TinyModel) -> None:
    vocab = model.config.vocab_size
    batcher = Batcher(random_texts(24, vocab), ROWS, vocab, 0.3)
    steps = [[batcher.batch(range(i, i + 4)) for i in range(first, 24, 8)] for first in (0, 4)]
    with Workers(2) as workers:
        tensors = model.tensors.__getitem__
        alone = Student(tensors, model.config, (0, 1), ROWS)
        shared = Student(tensors, model.config, (0, 1), ROWS, workers)
        for step in steps * 3:
            assert shared.learn(step, 1e-3) == alone.learn(step, 1e-3)
        assert shared.judge(steps[0]) == alone.judge(steps[0])
        again = Student(tensors, model.config, (0, 1), ROWS, workers)
        again.restore(alone.state())
        assert again.learn(steps[0], 1e-3) == alone.learn(steps[0], 1e-3)


def test_rows_shared_out_are_decoded_as_by_one(model: tiny.TinyModel) -> None:
    verifier = mlx_model(model.config, model.tensors)
    prompts = [[1, 30, 40], [1, 7, 8, 9, 10, 11], [1, 99], [1, 5, 6], [1, 8]]
    expected = greedy_answers(RowDecoder(verifier, 2, 64, ()), prompts, {0}, 12)
    with Workers(2) as workers:
        decoder = SplitDecoder(partial(RowDecoder, verifier, 2, 64, ()), workers)
        assert decoder.rows == 4
        assert greedy_answers(decoder, prompts, {0}, 12) == expected


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from ondevice.converters.distil.workers import Workers, prepared_workers
count = prepared_workers()
import distilling as t
from ondevice.converters.checkpoint import open_checkpoint
from ondevice.converters.distil.material import Material
from ondevice.converters.distil.run import Distillation
with Workers(2) as workers:
    checkpoint = open_checkpoint(Path({model!r}))
    run = Distillation(
        checkpoint, t.RECIPE, Material(), Path({work!r}), quiet=True, workers=workers
    )
    run.train(run.make_data(t.SOME), t.SOME)
print(count)
"""


@pytest.mark.parametrize("told", [None, "2"])
def test_a_process_ends_well_and_shares_cores_out_unless_told(
    model: tiny.TinyModel, tmp_path: Path, told: str | None
) -> None:
    folder = tiny.write_folder(model, tmp_path / "llama")
    code = CHILD.format(path=sys.path, model=str(folder), work=str(tmp_path / "work"))
    variables = {k: v for k, v in os.environ.items() if k != blas.THREADS_VARIABLE}
    if told is not None:
        variables[blas.THREADS_VARIABLE] = told
    ended = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    expected = min(os.cpu_count() or 1, MOST_WORKERS) if told is None else 1
    if sys.platform == "linux":
        assert int(ended.stdout) == expected

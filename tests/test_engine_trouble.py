"""Engines that meet trouble: units that fail, programs that end early, files that were changed."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ondevice.driver import UnitWorker
from ondevice.engine import Engine
from ondevice.errors import ArtifactError, BadRequest, UnitFailed
from ondevice.policy import STRATEGIES
from ondevice.session import Options

PROMPT = [9, 40, 77, 41, 9]
SHORT = Options(max_tokens=16)


@pytest.fixture(scope="module")
def engine(tiny_pair) -> Iterator[Engine]:
    with Engine.open_folder(tiny_pair) as engine:
        yield engine


class Broken:
    """Delegates to a unit and raises after some calls."""

    def __init__(self, unit, method: str, after: int) -> None:
        self._unit, self._method, self._left = unit, method, after

    def __getattr__(self, name: str):
        value = getattr(self._unit, name)
        if name != self._method:
            return value

        def failing(*args):
            self._left -= 1
            if self._left < 0:
                raise OSError("the unit is gone")
            return value(*args)

        return failing


def breaking(tiny_pair, unit: str, method: str, after: int) -> Engine:
    from ondevice.drafter import CoreMLDrafter
    from ondevice.verifier import MLXVerifier

    sound = Engine.open_folder(tiny_pair)
    sound.close()

    def verifier():
        opened = MLXVerifier.open(tiny_pair / "verifier")
        return Broken(opened, method, after) if unit == "verifier" else opened

    def drafter():
        opened = CoreMLDrafter.open(tiny_pair / "drafter", tiny_pair / "verifier")
        return Broken(opened, method, after) if unit == "drafter" else opened

    return Engine(sound.model.tokenizer, sound.model.end_tokens, verifier, drafter)


def test_a_drafter_that_fails_costs_no_token_and_the_answer_says_so(engine, tiny_pair):
    whole = engine.generate(PROMPT, SHORT).token_ids
    with breaking(tiny_pair, "drafter", "draft", 2) as broken, broken.session() as session:
        answer = session.generate(PROMPT, SHORT)
        assert answer.token_ids == whole
        assert "the unit is gone" in answer.stats.reason
        assert session.generate(PROMPT, SHORT).token_ids == whole


def test_a_verifier_that_fails_raises_and_the_engine_still_closes(tiny_pair):
    with breaking(tiny_pair, "verifier", "verify", 1) as broken:
        with broken.session() as session:
            with pytest.raises(UnitFailed, match="the unit is gone"):
                session.generate(PROMPT, SHORT)
            with pytest.raises(UnitFailed, match="new session"):
                session.generate(PROMPT, SHORT)
        assert broken.generate(PROMPT, replace(SHORT, strategy="plain")).token_ids


def test_close_in_the_middle_of_an_answer_leaves_no_thread(tiny_pair):
    before = threading.active_count()
    engine = Engine.open_folder(tiny_pair)
    stream = engine.session().stream(PROMPT, Options(max_tokens=2000, strategy="plain"))
    next(stream)
    engine.close()
    assert threading.active_count() == before
    stream.close()


def test_a_drafter_that_does_not_open_is_a_reason_not_an_error(tiny_pair, engine):
    def drafter():
        raise RuntimeError("no such unit")

    from ondevice.verifier import MLXVerifier

    with Engine(
        engine.model.tokenizer,
        engine.model.end_tokens,
        lambda: MLXVerifier.open(tiny_pair / "verifier"),
        drafter,
    ) as alone:
        answer = alone.generate(PROMPT, SHORT)
    assert answer.stats.strategy == "plain"
    assert "no such unit" in answer.stats.reason


def test_a_worker_whose_unit_did_not_open_raises_for_every_call():
    def failing():
        raise OSError("no")

    worker: UnitWorker = UnitWorker("drafter", failing)
    with pytest.raises(OSError, match="no"):
        worker.call(lambda unit: None)
    worker.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_that_ends_in_the_middle_of_an_answer_exits_cleanly(tiny_pair, strategy):
    code = (
        "from pathlib import Path\n"
        "from ondevice import Engine, Options\n"
        f"engine = Engine.open_folder(Path({str(tiny_pair)!r}))\n"
        f"options = Options(max_tokens=3000, strategy={strategy!r})\n"
        "stream = engine.session().stream([9, 40, 77], options)\n"
        "next(stream)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_half_a_character_is_refused(engine):
    with engine.session() as session, pytest.raises(BadRequest, match="Unicode"):
        session.generate("a\ud800", SHORT)


def test_a_session_keeps_its_engine(tiny_pair):
    session = Engine.open_folder(tiny_pair).session()
    gc.collect()
    assert session.generate(PROMPT, SHORT).token_ids
    session.close()


def test_tokenizer_files_that_were_changed_are_refused(tiny_pair, tmp_path):
    pair = tmp_path / "pair"
    shutil.copytree(tiny_pair, pair)
    file = pair / "verifier" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match="do not match their manifest"):
        Engine.open_folder(pair)

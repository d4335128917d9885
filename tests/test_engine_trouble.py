"""Engines that meet trouble: units that fail, cancels at any moment, files that were changed."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ondevice.engine import Engine
from ondevice.errors import ArtifactError, BadRequest, Closed, UnitFailed
from ondevice.prompt import Message
from ondevice.sampling import SamplingParams
from ondevice.schedule import STRATEGIES
from ondevice.session import Options
from ondevice.worker import UnitWorker

PROMPT = [9, 40, 77, 41, 9]
SHORT = Options(max_tokens=16)


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


def test_a_verifier_that_fails_raises_and_closes_its_engine(tiny_pair):
    with breaking(tiny_pair, "verifier", "verify", 1) as broken:
        with broken.session() as session:
            with pytest.raises(UnitFailed, match="the unit is gone"):
                session.generate(PROMPT, SHORT)
            with pytest.raises(UnitFailed, match="new session"):
                session.generate(PROMPT, SHORT)
        with pytest.raises(Closed, match="the unit is gone"):
            broken.generate(PROMPT, replace(SHORT, strategy="plain"))


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
        drafted = alone.generate(PROMPT, replace(SHORT, strategy="pipelined"))
    assert (answer.stats.strategy, drafted.stats.strategy) == ("auto", "plain")
    assert "no such unit" in answer.stats.reason
    assert "no such unit" in drafted.stats.reason


def test_a_worker_whose_unit_did_not_open_raises_for_every_call():
    def failing():
        raise OSError("no")

    worker: UnitWorker = UnitWorker("drafter", failing)
    with pytest.raises(OSError, match="no"):
        worker.call(lambda unit: None)
    worker.close()


def test_half_a_character_is_refused(engine):
    with engine.session() as session, pytest.raises(BadRequest, match="Unicode"):
        session.generate("a\ud800", SHORT)


def test_tokenizer_files_that_were_changed_are_refused(tiny_pair, tmp_path):
    pair = tmp_path / "pair"
    shutil.copytree(tiny_pair, pair)
    file = pair / "verifier" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match="does not match its manifest"):
        Engine.open_folder(pair)


class Paused:
    """A verifier whose prefill, verify and run wait for the test before they begin."""

    def __init__(self, unit) -> None:
        self._unit = unit
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.run_tokens = 0

    def __getattr__(self, name: str):
        return getattr(self._unit, name)

    def _wait(self) -> None:
        self.begun.set()
        assert self.may_go_on.wait(30)

    def prefill(self, session, tokens, stopped):
        self._wait()
        return self._unit.prefill(session, tokens, stopped)

    def verify(self, requests):
        self._wait()
        return self._unit.verify(requests)

    def run(self, request, stopped):
        for verdict in self._unit.run(request, stopped):
            self.run_tokens += len(verdict.tokens)
            yield verdict


@pytest.fixture
def paused(tiny_pair, engine) -> Iterator[tuple[Engine, Paused]]:
    from ondevice.drafter import CoreMLDrafter
    from ondevice.verifier import MLXVerifier

    units: list[Paused] = []

    def verifier():
        units.append(Paused(MLXVerifier.open(tiny_pair / "verifier")))
        return units[0]

    def drafter():
        return CoreMLDrafter.open(tiny_pair / "drafter", tiny_pair / "verifier")

    made = Engine(engine.model.tokenizer, engine.model.end_tokens, verifier, drafter)
    with made:
        yield made, units[0]
        units[0].may_go_on.set()


class Reader(threading.Thread):
    """Reads an answer on a thread of its own."""

    def __init__(self, session, options: Options) -> None:
        super().__init__(daemon=True)
        self._session, self._options = session, options
        self.answer = self.error = None

    def run(self) -> None:
        try:
            self.answer = self._session.generate(PROMPT, self._options)
        except Exception as error:
            self.error = error

    def joined(self):
        """Its answer; fails when it hangs."""
        self.join(30)
        assert not self.is_alive(), "the reader hangs"
        return self.answer


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", ["cancel", "session.close", "engine.close"])
def test_whoever_ends_an_answer_from_outside_the_reader_gets_it(paused, strategy, what):
    made, unit = paused
    session = made.session()
    reader = Reader(session, Options(max_tokens=3000, strategy=strategy))
    reader.start()
    assert unit.begun.wait(30)
    if what == "engine.close":
        closing = threading.Thread(target=made.close)
        closing.start()
    else:
        closing = threading.Thread(target=session.cancel if what == "cancel" else session.close)
        closing.start()
        closing.join(30)
    unit.may_go_on.set()
    answer = reader.joined()
    closing.join(30)
    assert not closing.is_alive()
    assert answer.finish_reason == "cancelled"
    assert len(answer.token_ids) < 100


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_answer_cancelled_in_its_prefill_leaves_the_next_one_right(paused, engine, strategy):
    made, unit = paused
    with made.session() as session:
        reader = Reader(session, Options(max_tokens=50, strategy=strategy))
        reader.start()
        assert unit.begun.wait(30)
        session.cancel()
        unit.may_go_on.set()
        assert reader.joined().token_ids == ()
        assert session.generate(PROMPT, SHORT).token_ids == engine.generate(PROMPT, SHORT).token_ids


def test_a_run_ends_with_its_answer(paused):
    made, unit = paused
    unit.may_go_on.set()
    with made.session() as session:
        whole = session.generate("talk", Options(max_tokens=30, strategy="plain"))
        unit.run_tokens = 0
        stop = whole.text[8:10]
        session.clear()
        session.generate("talk", Options(max_tokens=3000, stop=(stop,), strategy="plain"))
        session._driver._verifier.call(lambda _: None)
    assert unit.run_tokens < 300


def test_astream_cancelled_at_once_does_not_write_the_answer(paused):
    made, unit = paused
    unit.may_go_on.set()

    async def read() -> None:
        with made.session() as session:
            pieces = session.astream(PROMPT, Options(max_tokens=3000, strategy="plain"))
            task = asyncio.ensure_future(anext(pieces))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(read())
    assert unit.run_tokens < 300


def test_a_reader_cancelled_twice_leaves_a_session_that_is_not_busy(paused):
    made, unit = paused

    async def read() -> None:
        session = made.session()
        task = asyncio.ensure_future(anext(session.astream(PROMPT, SHORT)))
        await asyncio.to_thread(unit.begun.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        unit.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.generate(PROMPT, SHORT).token_ids

    asyncio.run(read())


def test_a_stream_that_is_cancelled_before_it_is_read_has_no_text(engine):
    with engine.session() as session:
        stream = session.stream(PROMPT, SHORT)
        session.cancel()
        (last,) = stream
        assert last.answer.finish_reason == "cancelled"
        assert last.answer.token_ids == ()
        assert session.generate(PROMPT, SHORT).token_ids


def test_an_answer_stopped_before_its_first_word_leaves_the_conversation_alone(paused):
    made, unit = paused
    with made.session() as session:
        stream = session.stream("hello", SHORT)
        session.messages.append(Message(role="user", content="before"))
        before = list(session.messages)
        reading = threading.Thread(target=lambda: list(stream))
        reading.start()
        assert unit.begun.wait(30)
        session.cancel()
        unit.may_go_on.set()
        reading.join(30)
        assert session.messages == before


class Nothing:
    """A constraint that allows two tokens, then none."""

    def start(self):
        return 0

    def advance(self, state, token):
        return state + 1

    def allowed(self, state):
        return np.full(264, state < 2)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_constraint_that_allows_nothing_is_an_error_under_either_rule(engine, strategy, rule):
    sampling = SamplingParams(temperature=1.0, seed=1, constraint=Nothing())
    options = Options(sampling, 8, strategy=strategy, rule=rule)
    right = engine.generate(PROMPT, SHORT).token_ids
    with engine.session() as session:
        for _ in range(2):
            with pytest.raises(UnitFailed, match="allows no token"):
                session.generate(PROMPT, options)
            assert session.generate(PROMPT, SHORT).token_ids == right, "the caches are as they were"


def test_a_damaged_generation_config_is_named(tiny_pair, tmp_path):
    for content in ("{", "[]", "{}"):
        pair = tmp_path / content.replace("{", "a").replace("[", "b")
        shutil.copytree(tiny_pair, pair)
        (pair / "verifier" / "generation_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ArtifactError, match="again"):
            Engine.open_folder(pair)


def test_a_pair_of_another_tokenizer_is_refused(tiny_pair, tmp_path):
    pair = tmp_path / "pair"
    shutil.copytree(tiny_pair, pair)
    content = json.loads((pair / "pair.json").read_text(encoding="utf-8"))
    content["tokenizer_sha256"] = "0" * 64
    (pair / "pair.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match="tokenizer 00000000"):
        Engine.open_folder(pair)


def test_a_chat_template_that_was_changed_is_refused(tiny_pair, tmp_path):
    pair = tmp_path / "pair"
    shutil.copytree(tiny_pair, pair)
    for file in (pair / "verifier").iterdir():
        if "template" in file.name or file.name == "tokenizer_config.json":
            file.write_text(file.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(ArtifactError, match="does not match its manifest"):
        Engine.open_folder(pair)

"""A drafter in a process of its own: the same drafter, and an end to it in every case."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import open_here
from processes import SmallDrafter, is_gone, runs

from ondevice import remote
from ondevice.drafter import CoreMLDrafter
from ondevice.errors import ArtifactError, UnitFailed, UnitLost
from ondevice.records import DraftRow, NodeToken
from ondevice.remote import ProcessDrafter
from ondevice.sampling import Law, SamplingParams
from ondevice.session import Options
from ondevice.units import DraftRequest, Killable, Sleepy

PROMPT = [9, 40, 77, 41, 9]
VOCAB = 264


class EvenTokens:
    """A constraint that pickles."""

    def start(self):
        return ()

    def advance(self, state, token):
        return ()

    def allowed(self, state):
        return np.arange(VOCAB) % 2 == 0


class NoPickle(EvenTokens):
    """One that does not."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.fixture(scope="module")
def drafters(tiny_pair):
    """The tiny drafter here, and in a process."""
    folders = tiny_pair / "drafter", tiny_pair / "verifier"
    here, there = CoreMLDrafter.open(*folders), ProcessDrafter(CoreMLDrafter.open, *folders)
    yield here, there
    there.close()
    here.close()


def never() -> bool:
    return False


PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.9, seed=5, top_p=0.9),
    "penalised": SamplingParams(repetition_penalty=1.3, logit_bias={7: 2.0}),
    "constrained": SamplingParams(temperature=0.7, seed=1, constraint=EvenTokens()),
}


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_it_proposes_what_the_same_drafter_proposes_here(drafters, params, rule):
    sessions = [unit.open_session() for unit in drafters]
    for unit, session in zip(drafters, sessions, strict=True):
        assert unit.prefill(session, PROMPT[:-1], never) == len(PROMPT) - 1
    law, rng = Law(params, VOCAB, len(PROMPT)), random.Random(3)
    committed = (NodeToken(0, PROMPT[-1]),)
    for step in range(6):
        tokens = [rng.randrange(4, 200) for _ in range(rng.randrange(4))]
        path = tuple(NodeToken(10 * step + i, token) for i, token in enumerate(tokens))
        rows = (DraftRow(path[-1].node if path else 0, path),)
        answers = []
        for unit, session in zip(drafters, sessions, strict=True):
            children = 1 if rule == "rejection" else 3
            request = DraftRequest(session, step, rows, committed, (), children, rule, law)
            result = unit.draft(request)
            assert 0 < result.start_ns < result.end_ns
            flat = [
                (p.parent, p.token, p.log_q, p.rank, p.gap, None if p.q is None else p.q.tobytes())
                for p in result.proposals
            ]
            counts = result.catch_up_steps, result.function_rows, result.window
            assert result.function_rows > 0
            answers.append((result.step, counts, flat))
        assert answers[0] == answers[1]
        assert answers[0][1]
        committed = ()
    for unit, session in zip(drafters, sessions, strict=True):
        unit.truncate(session, 2)
        assert unit.prefill(session, (), never) == 2
        unit.close_session(session)


def test_a_law_travels_once_an_answer(drafters, monkeypatch):
    _, there = drafters
    session = there.open_session()
    there.prefill(session, PROMPT[:-1], never)
    sent = []
    send = there._send
    monkeypatch.setattr(there, "_send", lambda message: (sent.append(message), send(message)))
    rows, last = (DraftRow(0, ()),), (NodeToken(0, PROMPT[-1]),)
    for law in (Law(SamplingParams(seed=1), VOCAB), Law(SamplingParams(seed=2), VOCAB)):
        for _ in range(3):
            there.draft(DraftRequest(session, 1, rows, last, (), 2, "coupled", law))
            last = ()
    assert [request.law is not None for _, request in sent] == [True, False, False] * 2


@pytest.mark.parametrize("constraint", [EvenTokens(), NoPickle()], ids=["pickles", "does-not"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_that_cannot_travel_costs_proposals_and_no_token(
    engine, constraint, temperature
):
    sampling = SamplingParams(temperature, seed=3, constraint=constraint)
    plain = engine.generate(PROMPT, Options(sampling, 24, strategy="plain"))
    drafted = engine.generate(PROMPT, Options(sampling, 24, strategy="pipelined"))
    assert drafted.token_ids == plain.token_ids
    assert all(token % 2 == 0 for token in plain.token_ids)
    assert "failed" not in drafted.stats.reason


def test_errors_keep_their_type_and_say_where(tiny_pair, tmp_path):
    with pytest.raises(ArtifactError) as caught:
        ProcessDrafter(CoreMLDrafter.open, tmp_path / "none", tiny_pair / "verifier")
    assert any("Traceback" in note for note in caught.value.__notes__)
    with pytest.raises(UnitFailed, match="RuntimeError: no such model"):
        ProcessDrafter(SmallDrafter, "raise")
    small = ProcessDrafter(SmallDrafter)
    with pytest.raises(UnitFailed, match="kept its type"):
        small.close_session(0)
    with pytest.raises(UnitFailed, match="ValueError: not explained"):
        small.truncate(0, 0)
    assert small.open_session() == small.process_id, "an error does not end it"
    small.close()
    assert is_gone(small.process_id)


def test_a_prefill_stops_when_told_to():
    small = ProcessDrafter(SmallDrafter)
    asked = iter([False, False, True])
    assert small.prefill(0, [1, 2, 3, 4], lambda: next(asked)) == 2
    assert small.prefill(0, [1, 2, 3], never) == 3
    small.close()


def test_a_process_that_ends_says_how_and_its_last_words(capfd):
    with pytest.raises(UnitLost, match=r"ended with status 3: library: cannot go on"):
        ProcessDrafter(SmallDrafter, "die")
    small = ProcessDrafter(SmallDrafter)
    with pytest.raises(UnitLost, match=r"ended with status 9: library: broken"):
        small.truncate(0, 2)
    with pytest.raises(UnitLost):
        small.open_session()
    small.close()
    small = ProcessDrafter(SmallDrafter)
    os.kill(small.process_id, signal.SIGKILL)
    with pytest.raises(UnitLost, match="by SIGKILL"):
        small.open_session()
    small.close()
    assert capfd.readouterr() == ("", ""), "what the child says is not for our terminal"


def test_a_hung_process_is_killed_from_another_thread():
    small = ProcessDrafter(SmallDrafter)
    assert isinstance(small, Killable)
    timer = threading.Timer(0.3, small.kill)
    timer.start()
    with pytest.raises(UnitLost, match="SIGKILL"):
        small.truncate(0, 1)
    timer.join()
    assert not runs(small.process_id)
    small.close()


PARENT = """
import os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
from processes import SmallDrafter
from ondevice.remote import ProcessDrafter
small = ProcessDrafter(SmallDrafter)
print(small.process_id, flush=True)
if {hung}:
    threading.Thread(target=small.truncate, args=(0, 1), daemon=True).start()
    time.sleep(0.2)
time.sleep(600)
"""


@pytest.mark.parametrize("hung", [False, True], ids=["idle", "in a step"])
def test_a_killed_parent_leaves_no_orphan(hung):
    code = PARENT.format(tests=str(Path(__file__).parent), hung=hung)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        assert runs(child)
        parent.kill()
    assert is_gone(child)


PATIENT = """
from ondevice import deadline, engine
engine.Deadline = lambda: deadline.Deadline(floor_s=86_400.0)
"""
"""For a script of its own, what the suite's `patient` is for this process."""


def test_a_terminals_interrupt_is_for_the_parent_alone(tiny_pair):
    """Ctrl-C goes to the whole foreground group: in chat it ends an answer, not the drafter."""
    code = (
        f"import os, signal\n{PATIENT}"
        "from ondevice.engine import Engine\n"
        "os.setpgid(0, 0)\n"
        f"engine = Engine.open_folder({str(tiny_pair)!r})\n"
        "signal.signal(signal.SIGINT, lambda *_: print('interrupted'))\n"
        "os.killpg(0, signal.SIGINT)\n"
        "print(engine.generate([9, 40, 77]).stats.reason)\n"
        "engine.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "interrupted"
    assert "without the drafter" not in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


def test_a_script_without_a_main_guard_runs_once(tiny_pair, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"print('once')\n{PATIENT}"
        "from ondevice.engine import Engine\n"
        f"engine = Engine.open_folder({str(tiny_pair)!r})\n"
        "print(engine.generate([9, 40, 77]).stats.reason)\n",
        encoding="utf-8",
    )
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')", encoding="utf-8")
    command = [sys.executable, "-P", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("once\n")
    assert "failed" not in done.stdout
    assert done.stdout.count("once") == 1


def test_the_text_is_the_same_for_any_drafters_home(engine, tiny_pair):
    options = Options(SamplingParams(0.8, seed=9), 40, strategy="pipelined")
    answers = [engine.generate(PROMPT, replace(options, strategy="plain"))]
    with open_here(tiny_pair) as here:
        answers += [each.generate(PROMPT, options) for each in (engine, here)]
    assert len({answer.token_ids for answer in answers}) == 1


class Asked:
    """A parent that says nothing until it was waited for so often."""

    def __init__(self, patience: int) -> None:
        self.left = patience

    def asks(self, within_s: float) -> bool:
        assert within_s == remote.WAKE_SECONDS
        self.left -= 1
        return self.left < 0


class Sleeper(SmallDrafter):
    """Falls asleep, and may fail when it is woken."""

    def __init__(self, fails: bool = False) -> None:
        self.woken, self.fails = 0, fails

    def stay_awake(self) -> None:
        self.woken += 1
        if self.fails:
            raise UnitFailed("Core ML failed")


@pytest.mark.parametrize("fails", [False, True])
def test_a_unit_that_sleeps_is_kept_awake_between_requests(fails):
    sleeper = Sleeper(fails)
    remote._wait_awake(sleeper, Asked(5))
    assert sleeper.woken == 5
    remote._wait_awake(sleeper, Asked(10**9))
    assert sleeper.woken - 5 == int(remote.AWAKE_SECONDS / remote.WAKE_SECONDS)  # then it may sleep


def test_the_emulator_has_nothing_to_wake(drafters):
    here, _ = drafters
    assert isinstance(here, Sleepy)
    here.stay_awake()
    assert here._idle is None

"""What goes wrong on a Mac, and the line that its user sees: a table of faults, on the stand-ins.

Whatever the fault, the text is plain decoding's. The examinations' own tests say how each of them
is found; here it is what becomes of it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import open_here
from processes import is_gone

from ondevice import energy, ladder, probe
from ondevice.apps.opening import placement
from ondevice.coreml.runtime import CoreMLRuntime
from ondevice.deadline import Deadline
from ondevice.engine import Engine
from ondevice.ladder import Choice
from ondevice.machine import Machine
from ondevice.probereport import ProbeReport
from ondevice.reference import reference
from ondevice.session import Options

MAC = Machine("Apple M9 Pro", 12, 12, 38_654_705_664, "macOS 27.1 (29B12)", True)
PROMPT, OPTIONS = [9, 40, 77, 41, 9], Options(max_tokens=16, strategy="pipelined")
TOOLS = "Core ML on the Neural Engine, through coremltools (100% of the cost by Core ML's plan)"
PYOBJC = "Core ML on the Neural Engine, through PyObjC (100% of the cost by Core ML's plan)"


@pytest.fixture(name="pair")
def pair_fixture(mac, tools_here, tiny_pair, tmp_path, monkeypatch) -> Path:
    """The tiny pair on a Mac that has not seen it yet; examinations are short."""
    for module in (ladder, energy):
        monkeypatch.setattr(module, "this_machine", lambda: MAC)
    monkeypatch.setattr(probe, "SOAK_CALLS", 8)
    monkeypatch.setattr(probe, "_step_ms", lambda runtime, calls: {rows: 4.0 for rows in calls})
    return Path(shutil.copytree(tiny_pair, tmp_path / "pair"))


@pytest.fixture(scope="module")
def plain_ids(tiny_pair) -> tuple[int, ...]:
    with open_here(tiny_pair) as engine:
        return engine.generate(PROMPT, Options(max_tokens=16, strategy="plain")).token_ids


@pytest.fixture
def examined_here(monkeypatch, tiny_pair) -> None:
    """Examinations in this process, for faults that do not end it, and the drafter too."""
    known = cache(lambda functions: reference(*_folders(tiny_pair), functions))
    monkeypatch.setattr(probe, "reference", lambda folder, verifier, functions: known(functions))

    def examine(kind: str, folder: Path, verifier: Path, *_: object) -> ProbeReport:
        return probe._Examination(kind, folder, verifier, lambda stage: None).report()

    monkeypatch.setattr(ladder, "examine", examine)
    monkeypatch.setattr(ladder, "open_process", ladder.open_chosen)


def _folders(pair: Path) -> tuple[Path, Path]:
    return pair / "drafter", pair / "verifier"


def open_pair(pair: Path) -> Engine:
    return Engine.open_folder(pair, measure=False, quiet=True)


def fits(line: str, expected: str) -> bool:
    """Whether it is the expected line; there, # is a number that was measured."""
    return re.fullmatch(re.escape(expected).replace(r"\#", r"[\d.]+"), line) is not None


# Found when the pair is opened. What is ordered -> what `chat` says of where the drafter runs.
OPENING = {
    "nothing is wrong": ({}, f"drafter: {PYOBJC}"),
    "compile error": (
        {"compile": "error"},
        f"drafter: {TOOLS}; not pyobjc: Core ML does not compile the package: Failed to compile "
        "the model (com.apple.CoreML 11)",
    ),
    "load error": (
        {"load": 1},
        f"drafter: {TOOLS}; not pyobjc: Core ML does not load t1_s64: Unable to build the ML "
        "execution plan: error code: -14 (com.apple.CoreML -14)",
    ),
    "function missing": (
        {"missing": "t8_s64"},
        f"drafter: {TOOLS}; not pyobjc: Core ML does not load t8_s64: The function t8_s64 is not "
        "in the model (com.apple.CoreML 0)",
    ),
    "prediction fails": (
        {"predict": "exception"},
        f"drafter: {TOOLS}; not pyobjc: Core ML failed in t1_s64: NSInternalInconsistencyException "
        "- 0x1d",
    ),
    "NaN outputs": ({"nan": 1}, f"drafter: {TOOLS}; not pyobjc: its logits are not finite"),
    "wrong numbers": (
        {"wrong": 1},
        f"drafter: {TOOLS}; not pyobjc: it computes something else: #% of 36 first choices are "
        "among the emulator's three, logits differ by up to #%",
    ),
    "wrong strides": ({"strides": "zero"}, f"drafter: {PYOBJC}"),
    "outputs put elsewhere": ({"backings": "ignored"}, f"drafter: {PYOBJC}"),
    "another shape": (
        {"flat": "k_new"},
        f"drafter: {TOOLS}; not pyobjc: Core ML returned type 65552 of shape (64,), expected "
        "float16 (1, 2, 1, 32)",
    ),
    "no output": (
        {"lost": "v_new"},
        f"drafter: {TOOLS}; not pyobjc: Core ML gave no array v_new in t1_s64",
    ),
    "plan says CPU": (
        {"plan": "cpu"},
        "drafter: MLX on the GPU; not pyobjc or coremltools: Core ML would run 0% of t1_s64 on the "
        "Neural Engine, expected at least 90% (10 mul on the CPU, 9 concat on the CPU, 8 conv on "
        "the CPU and 47 others)",
    ),
    "plan says CPU for some ops": (
        {"on_cpu": ["ios18.concat"]},
        "drafter: Core ML on the Neural Engine, through PyObjC (9#% of the cost by Core ML's plan)",
    ),
    "no plan": (
        {"plan": "error"},
        "drafter: MLX on the GPU; not pyobjc or coremltools: Core ML makes no plan for t1_s64: no "
        "plan for this model (com.apple.CoreML 0)",
    ),
    "plan of something else": (
        {"plan": "no program"},
        "drafter: MLX on the GPU; not pyobjc or coremltools: Core ML's plan has no function t1_s64",
    ),
    "both ways of Core ML fail": (
        {"load": 1, "tools_load": 1},
        "drafter: MLX on the GPU; not pyobjc: Core ML does not load t1_s64: Unable to build the ML "
        "execution plan: error code: -14 (com.apple.CoreML -14); not coremltools: coremltools does "
        "not load t1_s64: Error in declaring network.",
    ),
}


@pytest.mark.usefixtures("examined_here")
@pytest.mark.parametrize(("order", "line"), OPENING.values(), ids=OPENING)
def test_what_is_found_at_opening(mac, pair, plain_ids, order, line):
    mac.order(**order)
    assert_chat_says(pair, line, plain_ids)


def assert_chat_says(pair: Path, line: str, plain_ids: tuple[int, ...]) -> None:
    with open_pair(pair) as engine:
        told = placement(engine)[0]
        assert fits(told, line), told
        answer = engine.generate(PROMPT, OPTIONS)
    assert answer.token_ids == plain_ids
    assert answer.stats.reason == "pipelined, as set"


class Absent:
    """Finds nothing under one name, as if it were not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._name:
            raise ModuleNotFoundError(f"No module named {name!r}")


def without_pyobjc(patch: pytest.MonkeyPatch) -> None:
    patch.delitem(sys.modules, "CoreML", raising=False)
    patch.setattr(sys, "meta_path", [Absent("CoreML"), *sys.meta_path])


def slow_pyobjc(patch: pytest.MonkeyPatch) -> None:
    def step_ms(runtime: CoreMLRuntime, calls: probe.Calls) -> dict[int, float]:
        return {rows: 101.6 * rows if runtime.name == "pyobjc" else 4.0 for rows in calls}

    patch.setattr(probe, "_step_ms", step_ms)


# The same, where it is not Core ML that is at fault.
AROUND: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no PyObjC": (
        without_pyobjc,
        "drafter: Core ML on the Neural Engine, through coremltools (where it runs is not proven: "
        "Core ML's plan cannot be read); not pyobjc: no PyObjC frameworks (No module named "
        "'CoreML'); on a Mac: pip install pyobjc-framework-CoreML pyobjc-framework-Quartz",
    ),
    "slow steps": (
        slow_pyobjc,
        f"drafter: {TOOLS}; not pyobjc: a step of 8 rows takes 813 ms, expected at most 100",
    ),
}


@pytest.mark.usefixtures("examined_here")
@pytest.mark.parametrize(("spoil", "line"), AROUND.values(), ids=AROUND)
def test_what_is_found_around_it(pair, plain_ids, monkeypatch, spoil, line):
    spoil(monkeypatch)
    assert_chat_says(pair, line, plain_ids)


# Faults that end the examination's process, so that it must be one.
ENDING = {
    "compiler crashes": (
        "crash",
        "its process was ended by SIGABRT, while compiling and loading 4 functions",
    ),
    "compiler hangs": ("hang", "no end of compiling and loading 4 functions after 300 s"),
}


@pytest.mark.parametrize(("kind", "reason"), ENDING.values(), ids=ENDING)
def test_what_ends_the_examination(mac, pair, plain_ids, monkeypatch, kind, reason):
    clock, here = [0.0], ladder.examine
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def examine(runtime: str, folder: Path, verifier: Path, *_: object) -> ProbeReport:
        if runtime != "pyobjc":
            return accepted(runtime).reports[0]
        # The limit is over when it compiles, however long this machine takes to get there.
        late = 300.0 if kind == "hang" else 0.0
        return here(runtime, folder, verifier, lambda stage: clock.append(clock.pop() + late))

    monkeypatch.setattr(ladder, "examine", examine)
    monkeypatch.setattr(ladder, "open_process", ladder.open_chosen)
    mac.order(compile=kind)
    line = (
        "drafter: Core ML on the Neural Engine, through coremltools (where it runs is not proven: "
        f"Core ML's plan cannot be read); not pyobjc: {reason}"
    )
    assert_chat_says(pair, line, plain_ids)


def test_when_nothing_will_do_the_text_is_decoded_without_a_drafter(
    mac, pair, plain_ids, monkeypatch
):
    reasons = {"pyobjc": "its logits are not finite", "coremltools": "no", "mlx": "no Metal"}
    monkeypatch.setattr(
        ladder, "examine", lambda kind, *_: ProbeReport(runtime=kind, reason=reasons[kind])
    )
    why = (
        "the drafter did not open: not pyobjc: its logits are not finite; not coremltools: no; not "
        "mlx: no Metal"
    )
    with open_pair(pair) as engine:
        assert placement(engine)[0] == f"drafter: none ({why})"
        answer = engine.generate(PROMPT, OPTIONS)
    assert answer.stats.reason == f"plain: {why}"
    assert answer.token_ids == plain_ids


def accepted(kind: str) -> Choice:
    report = ProbeReport(runtime=kind, reason="", row_counts=[1, 8], context_sizes=[64, 256])
    return Choice(kind, (report,))


# Found while an answer is written. What is ordered -> what its statistics say.
ANSWERING = {
    "prediction fails": (
        {"predict": "error"},
        "Core ML failed in t#_s64: Failed to evaluate model 0 in pipeline (com.apple.CoreML 0)",
    ),
    "NaN outputs": (
        {"nan": 1},
        "the drafter's logits are not finite; the step is dropped, and the text goes on without "
        "the drafter",
    ),
    "another shape": (
        {"flat": "k_new"},
        "Core ML returned type 65552 of shape (#,), expected float16 (1, 2, #, 32)",
    ),
    "no output": ({"lost": "v_new"}, "Core ML gave no array v_new in t#_s64"),
}


@pytest.mark.parametrize(("order", "reason"), ANSWERING.values(), ids=ANSWERING)
def test_what_is_found_in_an_answer(mac, pair, plain_ids, order, reason):
    def opened(_: object) -> object:
        return ladder.open_chosen(*_folders(pair), accepted("pyobjc"))

    with open_here(pair, drafter=opened) as engine, engine.session() as session:
        assert session.generate(PROMPT, OPTIONS).stats.reason == "pipelined, as set"
        mac.order(**order)
        answer = session.generate(PROMPT, OPTIONS)
        assert answer.token_ids == plain_ids
        line = f"pipelined, as set; without the drafter since it failed: {reason}"
        assert fits(answer.stats.reason, line), answer.stats.reason
        mac.order()
        again = engine.generate(PROMPT, OPTIONS)
    assert (again.token_ids, again.stats.reason) == (plain_ids, "pipelined, as set")


# What becomes of the drafter's process -> what the statistics say.
RESTARTED = "it was started again for later answers"
PROCESS = {
    "killed": ("kill once", f"the drafter's process was ended by SIGKILL; {RESTARTED}"),
    "killed again": (
        "kill each",
        "the drafter's process was ended by SIGKILL; this engine uses it no more",
    ),
    "slow beyond the deadline": (
        "slow",
        f"the drafter took longer than 1 s for a step; {RESTARTED}",
    ),
}


@pytest.mark.parametrize(("fate", "reason"), PROCESS.values(), ids=PROCESS)
def test_what_ends_the_drafters_process(mac, pair, plain_ids, fate, reason):
    def opened(_: object) -> object:
        mac.order(**({"slow_s": 600} if fate == "slow" and not processes else {}))
        started = ladder.open_process(*_folders(pair), accepted("pyobjc"))
        processes.append(started.process_id)
        if fate == "kill each" or (fate == "kill once" and len(processes) == 1):
            os.kill(started.process_id, signal.SIGKILL)
        return started

    processes: list[int] = []
    line = f"pipelined, as set; without the drafter since it failed: {reason}"
    deadline, until_s = Deadline(floor_s=1.0, first_s=1.0), time.monotonic() + 120
    if fate != "slow":
        deadline = Deadline(floor_s=86_400.0)
    with open_here(pair, drafter=opened, deadline=deadline) as engine, engine.session() as session:
        expected = [line] if fate == "kill each" else [line, "pipelined, as set"]
        while expected:  # an answer may be done before anybody misses the drafter
            answer = session.generate(PROMPT, OPTIONS)
            assert answer.token_ids == plain_ids
            assert time.monotonic() < until_s, answer.stats.reason
            if answer.stats.reason == expected[0] and (len(expected) > 1 or len(processes) == 2):
                del expected[0]
        if fate == "kill each":
            assert engine.generate(PROMPT, OPTIONS).stats.reason == line
    assert all(map(is_gone, processes))


ABSENT = {"absent": 1}

# Energy: what is ordered -> what the statistics say of it, and which rails they have.
ENERGY = {
    "all is well": ({}, None, "cpu gpu ane dram"),
    "library absent": (
        ABSENT,
        "no energy counters (No module named 'zeus_apple_silicon'): pip install zeus-apple-silicon",
        "",
    ),
    "library fails": (
        {"monitor": 1},
        "no energy counters: zeus-apple-silicon: Failed to create subscription",
        "",
    ),
    "library fails later": (
        {"end_window": 1},
        "zeus-apple-silicon failed: the subscription is gone",
        "",
    ),
    "counters zero": (
        {"rails_dead": ["ane_mj", "cpu_total_mj"], "slow_s": 0.03},
        "cpu: its counter stayed at 0 for # ms of work; ane: its counter stayed at 0 for # ms of "
        "work",
        "gpu dram",
    ),
    "counters missing": (
        {"rails_absent": ["ane_mj", "dram_mj"]},
        "ane: this machine has no such counter; dram: this machine has no such counter",
        "cpu gpu",
    ),
}


@pytest.mark.parametrize(("order", "reason", "rails"), ENERGY.values(), ids=ENERGY)
def test_what_is_wrong_with_the_counters(mac, pair, monkeypatch, order, reason, rails):
    monkeypatch.setattr(ladder, "choose", lambda *_, **__: accepted("pyobjc"))
    monkeypatch.setattr(ladder, "open_process", ladder.open_chosen)
    if order == ABSENT:
        monkeypatch.setattr(sys, "meta_path", [Absent("zeus_apple_silicon"), *sys.meta_path])
    else:
        mac.order(**order)
    # Long enough for counters of 10 ms, and for two of the slow steps.
    options = replace(OPTIONS, max_tokens=200)
    until_s, worked = time.monotonic() + 60, False
    with open_pair(pair) as engine, engine.session() as session:
        while not worked and time.monotonic() < until_s:  # an answer may be done before a draft is
            stats = session.generate(PROMPT, options).stats
            worked = stats.num_draft_tokens > 0 and fits(stats.energy_reason or "", reason or "")
    assert fits(stats.energy_reason or "", reason or ""), stats.energy_reason
    known = [rail for rail, mj in (stats.energy_mj or {}).items() if mj is not None]
    assert " ".join(known) == rails
    assert (stats.energy_per_token_mj or {}).keys() == set(known)
    assert (stats.energy_rejected_drafts_mj is not None) == ("ane" in known)

"""The examination of a drafter on a Mac, in its process, on stand-ins: what it finds and says.

What its user sees of each fault: test_fault_matrix.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from ondevice import ladder, probe
from ondevice.errors import RuntimeUnavailable
from ondevice.ladder import Choice, choose, known, open_chosen, open_process
from ondevice.machine import Machine
from ondevice.probe import _Examination, _verdict, _worth_loading, examine
from ondevice.probereport import ProbeReport

pytestmark = pytest.mark.usefixtures("counted")

MAC = Machine("Apple M9 Pro", 12, 12, 36_000_000_000, "macOS 27.1 (29B12)", True)
ALL = ["t1_s64", "t8_s64", "t1_s256", "t8_s256"]


@pytest.fixture(name="drafter")
def drafter_fixture(mac, tiny_pair, tmp_path, monkeypatch) -> Path:
    """The tiny drafter in a folder of this test's own, on a Mac."""
    monkeypatch.setattr(ladder, "this_machine", lambda: MAC)
    # How slow this machine is now is no finding; what is too slow has a test of its own.
    monkeypatch.setattr(probe, "MOST_STEP_MS", math.inf)
    return Path(shutil.copytree(tiny_pair / "drafter", tmp_path / "drafter"))


@pytest.fixture(name="verifier")
def verifier_fixture(tiny_pair) -> Path:
    return tiny_pair / "verifier"


def examined_here(kind: str, drafter: Path, verifier: Path) -> ProbeReport:
    """In this process, for what does not crash."""
    return _Examination(kind, drafter, verifier, lambda stage: None).report()


def test_a_healthy_mac_is_accepted_with_every_figure(drafter, verifier):
    stages: list[str] = []
    report = examine("pyobjc", drafter, verifier, stages.append)
    assert report.reason == ""
    assert sorted(report.functions) == sorted(ALL)
    assert report.ane_share == 1.0
    assert all(each.first_call_ms > 0 and not each.elsewhere for each in report.functions.values())
    assert report.positions == 2 * 2 * (1 + 8)
    assert report.agreement == 1.0
    assert 0 < report.max_error < 0.01
    assert report.soak_calls == 256
    assert report.step_ms.keys() == report.beside_ms.keys() == {1, 8}
    assert report.load_s > 0
    assert report.bind_ms > 0
    assert report.ignored_backings == 0
    assert report.context_sizes == [64, 256]
    assert stages[0] == "compiling and loading 4 functions"
    assert {"running t8_s256", "asking for the plan of t1_s64", "256 steps"} <= set(stages)


def test_a_plan_for_the_cpu_names_the_ops(mac, drafter, verifier):
    mac.order(plan="cpu")
    report = examined_here("pyobjc", drafter, verifier)
    assert report.reason.startswith(
        "Core ML would run 0% of t1_s64 on the Neural Engine, expected at least 90% ("
    )
    assert " on the CPU" in report.reason
    assert report.step_ms == {}
    mac.order(on_cpu=["ios18.layer_norm"])
    report = examined_here("pyobjc", drafter, verifier)
    assert report.accepted
    assert report.functions["t8_s64"].elsewhere == {"layer_norm on the CPU": 3}
    assert 0.9 < report.ane_share < 1


def test_other_numbers_are_refused(mac, drafter, verifier):
    mac.order(wrong=1)
    reason = examined_here("pyobjc", drafter, verifier).reason
    assert reason.startswith("it computes something else: ")
    assert "of 36 first choices are among the emulator's three, logits differ by up to" in reason


def test_wrong_strides_and_ignored_backings_cost_copies_not_the_text(mac, drafter, verifier):
    mac.order(strides="zero", backings="ignored")
    report = examined_here("pyobjc", drafter, verifier)
    assert report.accepted
    assert report.ignored_backings > 256


@pytest.mark.parametrize("kind", ["mlx", "pyobjc"])
def test_each_runtime_can_be_examined_here(drafter, verifier, kind):
    report = examined_here(kind, drafter, verifier)
    assert report.accepted
    assert report.soak_calls == 256


def test_an_error_that_nobody_foresaw_is_a_reason(mac, drafter, verifier, monkeypatch):
    def broken(*_):
        raise KeyError("t3_s64")

    monkeypatch.setattr(probe, "open_runtime", broken)
    assert examined_here("pyobjc", drafter, verifier).reason == "KeyError: 't3_s64'"


def test_a_function_without_a_reference_is_refused(drafter, verifier, monkeypatch):
    monkeypatch.setattr(probe, "reference", lambda *_: {})
    reason = examined_here("mlx", drafter, verifier).reason
    assert reason == "there is no reference for t1_s64"


def test_steps_that_turn_bad_in_the_soak_are_refused(drafter, verifier, monkeypatch):
    """After 100 calls: palettised models have done so."""
    real, calls = probe.open_runtime, []

    def turning(*args):
        runtime = real(*args)
        predict = runtime.predict

        def later(*call):
            outputs = predict(*call)
            calls.append(call[0])
            if len(calls) > 100:
                outputs["k_new"] = outputs["k_new"] * np.float16("nan")
            return outputs

        runtime.predict = later
        return runtime

    monkeypatch.setattr(probe, "open_runtime", turning)
    reason = examined_here("mlx", drafter, verifier).reason
    assert reason.startswith("step ")
    assert reason.endswith("gave values that are not finite")
    assert len(calls) < 256


def test_steps_that_are_too_slow_are_refused():
    """Judged by the figures: a soak of slow steps would take minutes here."""
    report = ProbeReport(
        runtime="pyobjc", reason="", agreement=1.0, max_error=0.0, step_ms={1: 90.0, 8: 812.4}
    )
    assert _verdict(report) == "a step of 8 rows takes 812 ms, expected at most 100"


def test_row_counts_that_gain_nothing_are_not_loaded():
    assert _worth_loading([1, 8, 64], {1: 4.0, 8: 4.2}) == [8, 64]
    assert _worth_loading([1, 8, 64], {1: 3.0, 8: 4.2}) == [1, 8, 64]


# The ladder


def test_what_was_found_is_kept_with_the_drafter_for_this_machine(mac, drafter, verifier):
    first = choose(drafter, verifier)
    assert first.kind == "pyobjc"
    assert first.line == (
        "Core ML on the Neural Engine, through PyObjC (100% of the cost by Core ML's plan)"
    )
    mac.order(compile="crash", load=1)
    assert choose(drafter, verifier) == first
    assert known(drafter) == list(first.reports)
    (stored,) = (drafter / "verdicts").iterdir()
    assert json.loads(stored.read_text())["runtime"] == "pyobjc"
    other = Machine("Apple M10", 12, 12, 36_000_000_000, "macOS 27.1 (29B12)", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "this_machine", lambda: other)
        assert known(drafter) == []


def test_below_the_bar_comes_the_next_runtime_and_every_reason(mac, drafter, verifier):
    said: list[str] = []
    mac.order(load=1)
    choice = choose(drafter, verifier, say=said.append)
    assert choice.kind == "mlx"
    assert choice.line.startswith(
        "MLX on the GPU; not pyobjc: Core ML does not load t1_s64: Unable to build the ML "
        "execution plan: error code: -14 (com.apple.CoreML -14); not coremltools: "
    )
    assert "\n" not in choice.line
    assert "pyobjc: compiling and loading 4 functions" in said
    drafting = open_process(drafter, verifier, choice)
    try:
        assert drafting.runtime_name == "mlx on the CPU"  # here; on a Mac it is the GPU
        session = drafting.open_session()
        assert drafting.prefill(session, [5, 6, 7], lambda: False) == 3
    finally:
        drafting.close()


def test_when_nothing_will_do_every_reason_is_given(drafter, verifier, monkeypatch):
    monkeypatch.setattr(
        ladder, "examine", lambda kind, *_: ProbeReport(runtime=kind, reason=f"no {kind} here")
    )
    with pytest.raises(RuntimeUnavailable) as raised:
        choose(drafter, verifier)
    assert str(raised.value) == (
        "not pyobjc: no pyobjc here; not coremltools: no coremltools here; not mlx: no mlx here"
    )


def test_a_folder_that_cannot_be_written_costs_an_examination(drafter, verifier, monkeypatch):
    monkeypatch.setattr(
        ladder, "examine", lambda kind, *_: ProbeReport(runtime=kind, reason="", row_counts=[8])
    )
    (drafter / "verdicts").write_text("in the way")
    said: list[str] = []
    assert choose(drafter, verifier, say=said.append).kind == "pyobjc"
    assert said[0].startswith("what was found of pyobjc is not kept: cannot write")


def test_elsewhere_it_is_the_emulator(drafter, verifier, monkeypatch):
    monkeypatch.setattr(ladder, "this_machine", lambda: Machine("x", 2, 2, 0, "Linux", False))
    choice = choose(drafter, verifier)
    assert choice == Choice("emulator")
    assert choice.line == "emulated Core ML (emulator-fp32) on this machine's CPU"
    assert open_chosen(drafter, verifier, choice).runtime_name == "emulator-fp32"


def test_only_the_functions_worth_loading_are_loaded(mac, drafter, verifier):
    report = ProbeReport(runtime="pyobjc", reason="", row_counts=[8], context_sizes=[64, 256])
    opened = open_chosen(drafter, verifier, Choice("pyobjc", (report,)))
    assert sorted(opened._runtime.functions) == ["t8_s256", "t8_s64"]
    assert opened.manifest.row_counts == [8]
    session = opened.open_session()
    assert opened.prefill(session, [5, 6, 7], lambda: False) == 3
    opened.stay_awake()
    opened.close()
